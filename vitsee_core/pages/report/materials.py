"""The results and the stores below a folder, which a report is made of."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitsee_core.pages.report.redrawing import Result, open_result
from vitsee_core.tables.files import TABLE_ENDINGS
from vitsee_core.tables.formats import FIGURE_ENDINGS, stem_of
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import ResultFile, read_result
from vitsee_core.tables.steps import RECORD
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError
from vitsee_stores.info import describe

STORE_FILE = "zarr.json"


@dataclass(frozen=True)
class FoundStore:
    """A store. record: as `vitsee_stores.info.describe` gives it."""

    path: Path
    record: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Materials:
    """Results, stores and records below a folder. left_out: path -> why it is no part of the
    report; records: of trainings, how each step ended."""

    folder: Path
    results: tuple[Result, ...]
    stores: tuple[FoundStore, ...]
    left_out: dict[Path, str] = field(default_factory=dict)
    records: tuple[ResultFile, ...] = ()


def find_materials(folder: Path) -> Materials:
    """All results with sidecars, in the order in which they were made, and all stores below.

    Nothing inside a store and no hidden folder is looked into, and no link to a folder followed.

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
            elif (
                path.name == RECORD
                and "status" in (file := read_result(path)).table.frame
            ):
                records.append(file)
            else:
                results.append(open_result(path))
        except (VitseeError, OSError) as error:
            left_out[path] = " ".join(str(error).split())
    if not results and not stores:
        reasons = "".join(f"; {reason}" for reason in list(left_out.values())[:1])
        raise VitseeError(
            f"{folder} has neither results (tables that commands wrote with -o, with "
            f"their sidecars) nor stores{reasons}"
        )
    results.sort(key=_made)
    return Materials(folder, tuple(results), tuple(stores), left_out, tuple(records))


def _made(result: Result) -> tuple[str, int, str]:
    """When: sidecars say the second, files the rest."""
    path = result.file.path
    return str(result.file.sidecar.get("created", "")), path.stat().st_mtime_ns, str(path)


def picture_beside(table: Path) -> Path | None:
    """The figure beside a table (`r.png`, else `r.svg`), if there is one."""
    places = (table.with_name(stem_of(table) + kind) for kind in FIGURE_ENDINGS[:2])
    return next((place for place in places if place.is_file()), None)


def candidates(folder: Path) -> Iterator[Path]:
    """Stores, and files that may be tables of results."""
    for here, folders, files in os.walk(folder):
        place = Path(here)
        if STORE_FILE in files:
            folders.clear()
            yield place
            continue
        # The Gram matrices beside a store are its own.
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and ".grams" not in f
        )
        for name in sorted(files):
            path = place / name
            if name.lower().endswith(TABLE_ENDINGS) and not name.startswith("."):
                of_sidecar = name.endswith(".json") and not Path(f"{path}.json").exists()
                if f".{WORD}." not in name and not of_sidecar and path.is_file():
                    yield path


HEAD = 4096  # bytes within which a page says who made it and what it is called
_MADE = b'<meta name="generator" content="vitsee explore">'
_TITLE = re.compile(rb"<title>([^<]*) \xc2\xb7 vitsee explore</title>")


def relative(path: Path, folder: Path) -> str:
    return visible(os.path.relpath(path.absolute(), folder.absolute()))


@dataclass(frozen=True)
class ExploredPage:
    """link: from the report; title: of the page."""

    link: str
    title: str


def explored_pages(folder: Path, output: Path) -> list[ExploredPage]:
    """The pages of `vitsee explore` in the folder, and in that of the report at `output`."""
    around = output.absolute().parent
    places = {
        path.absolute() for where in (folder, around) for path in where.glob("*.html")
    }
    found = []
    for path in sorted(places):
        try:
            with path.open("rb") as file:
                head = file.read(HEAD)
        except OSError:
            continue
        title = _TITLE.search(head)
        if _MADE in head and title is not None:
            text = html.unescape(title[1].decode("utf-8", "replace"))
            found.append(ExploredPage(quote(relative(path, around)), visible(text)))
    return found
