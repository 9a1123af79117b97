"""Writes a result to the disk: the table, its sidecar, its replicates, the figure.

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

# A terminal shows all rows of a table, or the first few if there are more than that.
MAX_TERMINAL_ROWS = 2000
SHOWN_TERMINAL_ROWS = 50
# Parameters on which no number depends.
WITHOUT_EFFECT = ("jobs", "memory")
NO_REPLICATES = "no value of this table has an interval from blocks of images"


@dataclass(frozen=True)
class Outputs:
    """Where a result goes, in the formats that the endings say.

    Attributes:
        csv: the table's file; None for CSV on stdout.
        png: the figure's file; None for no figure.
        force: files that exist are replaced.
        with_replicates: the table's block replicates go into a file beside it.
        if_changed: files that are up to date (`is_up_to_date`) stay as they are.
    """

    csv: Path | None = None
    png: Path | None = None
    force: bool = False
    with_replicates: bool = False
    if_changed: bool = False

    @property
    def sidecar(self) -> Path | None:
        """The path of the sidecar: `r.csv.json` for `r.csv`."""
        if self.csv is None:
            return None
        return self.csv.with_name(self.csv.name + ".json")

    @property
    def replicates(self) -> Path | None:
        """The path of the replicates, if they are wanted: `r.replicates.csv` for `r.csv`."""
        if self.csv is None or not self.with_replicates:
            return None
        return replicates.replicates_path(self.csv)

    def paths(self) -> list[Path]:
        """Return every file that will be written, in that order.

        The table is last: one that is there has all that belongs to it.
        """
        files = (self.sidecar, self.png, self.replicates, self.csv)
        return [path for path in files if path is not None]


def check_outputs(
    outputs: Outputs, *, inputs: Iterable[Path] = (), images: str = ""
) -> None:
    """Refuse outputs that exist, cannot be written, or whose endings say no format.

    A command calls it before the work starts.

    Args:
        outputs: the files.
        inputs: files that the work reads; these are never replaced.
        images: the command's --data; a figure is not written below it, where the next command would
            read it as an image.

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
    """Return whether a command would write the files that are there.

    All of them exist, unchanged, and are of the same stores, options, results and versions, and no
    file that the command reads is newer.

    Args:
        outputs: the files.
        sidecar: how the result would be made now, by `describe_run`.
        inputs: paths that the options name.
    """
    if outputs.csv is None or not all(path.is_file() for path in outputs.paths()):
        return False
    try:
        previous = read_result(outputs.csv)
    except (VitseeError, OSError):
        return False
    # A store that is not complete may get more slabs under the same identity.
    is_partial = any(not store["complete"] for store in sidecar.get("stores", ()))
    if is_partial or not previous.as_written:
        return False
    # As it would be read back: tuples are lists, keys text.
    planned = json.loads(json.dumps(plain_json(sidecar)))
    if _deciding_entries(previous.sidecar) != _deciding_entries(planned):
        return False
    made_ns = min(path.stat().st_mtime_ns for path in outputs.paths())
    return newest_ns(inputs) <= made_ns


def _deciding_entries(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a sidecar that decide the numbers and the figure."""
    parameters = dict(sidecar.get("parameters", {}))
    for name in WITHOUT_EFFECT:
        parameters.pop(name, None)
    stores = [
        {key: value for key, value in store.items() if key != "path"}
        for store in sidecar.get("stores", ())
    ]
    results = [
        {"label": result.get("label"), "digest": result.get("made_by", {}).get("digest")}
        for result in sidecar.get("results", ())
    ]
    return {
        "parameters": parameters,
        "stores": stores,
        "results": results,
        "versions": sidecar.get("versions"),
        "package": sidecar.get("package"),
        "figure": sidecar.get("figure"),
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
    """Write the table to stdout, or to its file with the sidecar beside it, and the figure.

    Everything is made before the first file appears, so a failure leaves none behind.

    Args:
        table: the result.
        outputs: where it goes.
        figure: draws it; called only if a figure is wanted.
        sidecar: how the result was made, by `describe_run`.
        stdout: receives the CSV, and nothing else, if the table has no file; a terminal receives
            the first rows of a long one.
        more: other files, which appear with these or not at all.

    Raises:
        VitseeError: a file could not be written.
        BrokenPipeError: the reader of stdout is gone (`| head`).
    """
    check_outputs(outputs)
    files: dict[Path, bytes] = dict(more or {})
    table_file = b""
    ending = ""
    if outputs.csv is not None and outputs.sidecar is not None:
        ending = ending_of(outputs.csv, TABLE_ENDINGS, "-o")
        table_file = table_bytes(table.written, ending)
        files[outputs.sidecar] = sidecar_bytes(
            table.written, table.notes, sidecar, table_file
        )
    if outputs.png is not None:
        figure_ending = ending_of(outputs.png, FIGURE_ENDINGS, "--png")
        with soon_said("drawing the figure"):
            files[outputs.png] = figure_bytes(figure(), figure_ending)
    if outputs.replicates is not None:
        if table.replicates is not None:
            rows = replicates.expand_replicates(table.frame)
            files[outputs.replicates] = table_bytes(rows, ending)
        else:
            log.warning("%s is not written: %s", outputs.replicates.name, NO_REPLICATES)
    if outputs.csv is not None:
        files[outputs.csv] = table_file  # last, see `Outputs.paths`
        write_files(files, force=outputs.force)
        return
    # The text is made before any file appears, and printed once all have.
    is_cut = stdout.isatty() and len(table) > MAX_TERMINAL_ROWS
    shown_table = table
    if is_cut:
        shown_table = table.with_frame(table.frame.head(SHOWN_TERMINAL_ROWS))
    text = io.StringIO()
    shown_table.to_csv(text)
    write_files(files, force=outputs.force)
    stdout.write(text.getvalue())
    stdout.flush()
    if is_cut:
        log.warning(
            "the first %d of %s rows, as this is a terminal; -o FILE keeps them all",
            SHOWN_TERMINAL_ROWS,
            f"{len(table):,}",
        )
