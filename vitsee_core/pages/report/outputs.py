"""How a result reaches the disk: the table, its sidecar, the picture.

A command opens the stores, calls `check_outputs` before the work starts, and passes table and
figure to `write_results`.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vitsee_core.figures.plotting import figure_bytes
from vitsee_core.runtime.progress import soon_said
from vitsee_core.tables import replicates
from vitsee_core.tables.files import (
    TABLE_ENDINGS,
    check_new_files,
    check_output_path,
    write_files,
)
from vitsee_core.tables.formats import FIGURE_ENDINGS, ending_of, plain_json, table_bytes
from vitsee_core.tables.results import Table, read_result
from vitsee_core.tables.sidecars import newest_ns, sidecar_bytes
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

# Rows of a longer table that a terminal shows, and how many are not too long for one.
ON_A_TERMINAL = 50
MOST_ON_A_TERMINAL = 2000
# Parameters on which no number depends.
WITHOUT_EFFECT = ("jobs", "memory")
NO_REPLICATES = "no value of this table has an interval from blocks of images"


@dataclass(frozen=True)
class Outputs:
    """The places that a result goes to: table (None: CSV on stdout), picture (None: none), both in
    the format that their endings say, whether files that exist are replaced, whether the table's
    block replicates go into a file beside it, and whether files that are up to date stay as they
    are, see `is_up_to_date`."""

    csv: Path | None = None
    png: Path | None = None
    force: bool = False
    with_replicates: bool = False
    if_changed: bool = False

    @property
    def sidecar(self) -> Path | None:
        """`r.csv.json` for `r.csv`."""
        if self.csv is None:
            return None
        return self.csv.with_name(self.csv.name + ".json")

    @property
    def replicates(self) -> Path | None:
        """`r.replicates.csv` for `r.csv`."""
        if self.csv is None or not self.with_replicates:
            return None
        return replicates.replicates_path(self.csv)

    def paths(self) -> list[Path]:
        """Every file that will be written, in that order: the table last."""
        files = (self.sidecar, self.png, self.replicates, self.csv)
        return [path for path in files if path is not None]


def check_outputs(
    outputs: Outputs, *, inputs: Iterable[Path] = (), images: str = ""
) -> None:
    """Refuse outputs that exist, cannot be written, or whose endings say no format; to be called
    before the work starts.

    Args:
        outputs: see `Outputs`.
        inputs: files that the work reads, see `check_new_files`.
        images: the command's --data; a picture is not written below it, see `check_output_path`.

    Raises:
        VitseeError: names the file and what to do.
    """
    if outputs.csv is not None:
        ending_of(outputs.csv, TABLE_ENDINGS, "-o")
    if outputs.png is not None:
        ending_of(outputs.png, FIGURE_ENDINGS, "--png")
        check_output_path(outputs.png, images=images)
    check_new_files(reversed(outputs.paths()), force=outputs.force, inputs=inputs)


def is_up_to_date(
    outputs: Outputs, sidecar: Mapping[str, Any], inputs: Iterable[Path] = ()
) -> bool:
    """Whether all files of a result are there, unchanged, and of the same stores, options, results
    and versions as `sidecar` says, and no file that the command reads is newer.

    Args:
        outputs: the files.
        sidecar: how the result would be made now, see `describe_run`.
        inputs: paths that the options name.
    """
    if outputs.csv is None or not all(path.is_file() for path in outputs.paths()):
        return False
    try:
        before = read_result(outputs.csv)
    except (VitseeError, OSError):
        return False
    partial = [store for store in sidecar.get("stores", ()) if not store["complete"]]
    if partial or not before.as_written:
        return False
    if _deciding(before.sidecar) != _deciding(
        json.loads(json.dumps(plain_json(sidecar)))
    ):
        return False
    made_ns = min(path.stat().st_mtime_ns for path in outputs.paths())
    return newest_ns(inputs) <= made_ns


def _deciding(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a sidecar that decides the numbers and the figure."""
    parameters = sidecar.get("parameters", {})
    stores = [
        {key: value for key, value in store.items() if key != "path"}
        for store in sidecar.get("stores", ())
    ]
    results = [
        {"label": result.get("label"), "digest": result.get("made_by", {}).get("digest")}
        for result in sidecar.get("results", ())
    ]
    return {
        "parameters": {
            key: x for key, x in parameters.items() if key not in WITHOUT_EFFECT
        },
        "stores": stores,
        "results": results,
        **{key: sidecar.get(key) for key in ("versions", "package", "figure")},
    }


def touch(outputs: Outputs) -> None:
    """Set the times of a result's files to now, for programs that go by them (make)."""
    for path in outputs.paths():
        os.utime(path)


def write_results(
    table: Table,
    outputs: Outputs,
    *,
    figure: Callable[[], Figure],
    sidecar: Mapping[str, Any],
    stdout: IO[str],
    more: Mapping[Path, bytes] | None = None,
) -> None:
    """Write the table to stdout, or to its file with the sidecar beside it, and the picture.

    Everything is made before the first file appears, so a failure leaves none behind. The sidecar
    is what the caller gives, the table's notes, what its columns hold, the number of rows and the
    SHA-256 of the table's file.

    Args:
        table: the result.
        outputs: where it goes.
        figure: draws it; called only where a picture is wanted.
        sidecar: see `describe_run`.
        stdout: receives the CSV, and nothing else, where no CSV file is named; a terminal the
            first rows of a long one.
        more: other files, which appear with these or not at all.

    Raises:
        VitseeError: a file could not be written.
        BrokenPipeError: the reader of stdout is gone (`| head`).
    """
    check_outputs(outputs)
    files: dict[Path, bytes] = dict(more or {})
    written = b""
    if outputs.csv is not None and outputs.sidecar is not None:
        written = table_bytes(table.written, ending_of(outputs.csv, TABLE_ENDINGS, "-o"))
        files[outputs.sidecar] = sidecar_bytes(
            table.written, table.notes, sidecar, written
        )
    if outputs.png is not None:
        ending = ending_of(outputs.png, FIGURE_ENDINGS, "--png")
        with soon_said("drawing the figure"):
            files[outputs.png] = figure_bytes(figure(), ending)
    if outputs.csv is not None:
        ending = ending_of(outputs.csv, TABLE_ENDINGS, "-o")
        if outputs.replicates is not None and table.replicates is not None:
            files[outputs.replicates] = table_bytes(
                replicates.expand_replicates(table.frame), ending
            )
        elif outputs.replicates is not None:
            log.warning("%s is not written: %s", outputs.replicates.name, NO_REPLICATES)
        files[outputs.csv] = written
    text = io.StringIO()
    if outputs.csv is None:
        cut = stdout.isatty() and len(table) > MOST_ON_A_TERMINAL
        (table.with_frame(table.frame.head(ON_A_TERMINAL)) if cut else table).to_csv(text)
    write_files(files, force=outputs.force)
    if outputs.csv is None:
        stdout.write(text.getvalue())
        stdout.flush()
        if cut:
            log.warning(
                "the first %d of %s rows, as this is a terminal; -o FILE keeps them all",
                ON_A_TERMINAL,
                f"{len(table):,}",
            )
