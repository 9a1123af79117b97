"""Finds the results and the stores below a folder, which a report shows."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from vitsee_core.pages.report.redrawing import Result, open_result
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.tables.files import TABLE_ENDINGS
from vitsee_core.tables.formats import FIGURE_ENDINGS, stem_of
from vitsee_core.tables.results import ResultFile, read_result
from vitsee_core.tables.steps import RECORD
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError
from vitsee_stores.info import describe

STORE_FILE = "zarr.json"


@dataclass(frozen=True)
class FoundStore:
    """A store and its description by `vitsee_stores.info.describe`."""

    path: Path
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name without its ending."""
        return self.path.stem


@dataclass(frozen=True)
class Materials:
    """Results, stores and records below a folder.

    Attributes:
        folder: in which they were found.
        results: in the order in which they were made.
        stores: in the order of their paths.
        left_out: path -> why the report does not show it.
        records: of trainings; how each step ended.
    """

    folder: Path
    results: tuple[Result, ...]
    stores: tuple[FoundStore, ...]
    left_out: dict[Path, str] = field(default_factory=dict)
    records: tuple[ResultFile, ...] = ()

    def without_left_out(self) -> Materials:
        """Return the same without the results that are left out."""
        shown = [r for r in self.results if r.file.path not in self.left_out]
        return replace(self, results=tuple(shown))


def find_materials(folder: Path) -> Materials:
    """Return all results with sidecars, in the order in which they were made, and all stores.

    Stores and hidden folders are not searched, and links to folders not followed.

    Raises:
        VitseeError: there is no such folder, or neither a result nor a store in it.
    """
    if not folder.is_dir():
        raise VitseeError(f"{folder} is no folder; expected one with results of vitsee")
    results: list[Result] = []
    stores: list[FoundStore] = []
    left_out: dict[Path, str] = {}
    records: list[ResultFile] = []
    for path in candidates(folder):
        try:
            if path.is_dir():
                stores.append(FoundStore(path, describe(path)))
                continue
            record = read_result(path) if path.name == RECORD else None
            if record is not None and "status" in record.table.frame:
                records.append(record)
            else:
                results.append(open_result(path))
        except (VitseeError, OSError) as error:
            left_out[path] = " ".join(str(error).split())  # on one line
    if not results and not stores:
        first_reason = "".join(f"; {reason}" for reason in list(left_out.values())[:1])
        raise VitseeError(
            f"{folder} has neither results (tables that commands wrote with -o, with "
            f"their sidecars) nor stores{first_reason}"
        )
    results.sort(key=_time_made)
    return Materials(folder, tuple(results), tuple(stores), left_out, tuple(records))


def _time_made(result: Result) -> tuple[str, int, str]:
    """Return a key that sorts results by the time at which they were made."""
    path = result.file.path
    second = str(result.file.sidecar.get("created", ""))
    # Within a second the files' times decide.
    return second, path.stat().st_mtime_ns, str(path)


def picture_beside(table: Path) -> Path | None:
    """Return the figure beside a table (`r.png`, else `r.svg`), or None."""
    for ending in FIGURE_ENDINGS[:2]:
        path = table.with_name(f"{stem_of(table)}{ending}")
        if path.is_file():
            return path
    return None


def candidates(folder: Path) -> Iterator[Path]:
    """Yield the paths of stores, and of files that may be tables of results, in order."""
    for parent_name, folders, files in os.walk(folder):
        parent = Path(parent_name)
        if STORE_FILE in files:
            folders.clear()  # os.walk goes no deeper
            yield parent
            continue
        # The folder of Gram matrices beside a store is a cache of its own.
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and ".grams" not in f
        )
        for name in sorted(files):
            if name.startswith(".") or f".{REPLICATES}." in name:
                continue
            path = parent / name
            # A table in JSON has a sidecar, `r.json.json`; a sidecar has none.
            is_sidecar = name.endswith(".json") and not Path(f"{path}.json").exists()
            if name.lower().endswith(TABLE_ENDINGS) and not is_sidecar and path.is_file():
                yield path


HEAD = 4096  # bytes within which a page says who made it and what it is called
_GENERATOR = b'<meta name="generator" content="vitsee explore">'
_TITLE = re.compile(rb"<title>([^<]*) \xc2\xb7 vitsee explore</title>")


def relative(path: Path, folder: Path) -> str:
    """Return the path from a folder, with control characters written out."""
    return visible(os.path.relpath(path.absolute(), folder.absolute()))


class ExploredPage(NamedTuple):
    """A page of `vitsee explore`: the link from the report, and the page's title."""

    link: str
    title: str


def explored_pages(folder: Path, output: Path) -> list[ExploredPage]:
    """Return the pages of `vitsee explore` in the folder, and in that of the report at `output`."""
    report_folder = output.absolute().parent
    paths = {path.absolute() for path in folder.glob("*.html")}
    paths |= {path.absolute() for path in report_folder.glob("*.html")}
    pages = []
    for path in sorted(paths):
        try:
            with path.open("rb") as file:
                head = file.read(HEAD)
        except OSError:
            continue
        title = _TITLE.search(head)
        if _GENERATOR in head and title is not None:
            text = html.unescape(title[1].decode("utf-8", "replace"))
            link = quote(relative(path, report_folder))
            pages.append(ExploredPage(link, visible(text)))
    return pages
