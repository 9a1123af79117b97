"""How a result reaches the disk: the table, its sidecar, the picture.

A command opens the stores, calls `check_outputs` before the work starts, and passes table and
figure to `write_results`.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vitsee_core import replicates
from vitsee_core.files import check_new_files, write_files
from vitsee_core.formats import FIGURE_ENDINGS, ending_of, plain_json, table_bytes, table_ending
from vitsee_core.plotting import figure_bytes
from vitsee_core.results import Table, kind_of
from vitsee_core.versions import result_versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import Store

log = logging.getLogger(__name__)

NO_REPLICATES = "no value of this table has an interval from blocks of images"


@dataclass(frozen=True)
class Outputs:
    """Where a result goes: table (None: CSV on stdout), picture (None: none), both in the format
    that their endings say, whether files that exist are replaced, and whether the table's block
    replicates go into a file beside it."""

    csv: Path | None = None
    png: Path | None = None
    force: bool = False
    with_replicates: bool = False

    @property
    def sidecar(self) -> Path | None:
        """The table's companion, `r.csv.json` for `r.csv`."""
        return None if self.csv is None else self.csv.with_name(self.csv.name + ".json")

    @property
    def replicates(self) -> Path | None:
        """The file of the replicates, `r.replicates.csv` for `r.csv`."""
        if self.csv is None or not self.with_replicates:
            return None
        return replicates.beside(self.csv)

    def paths(self) -> list[Path]:
        """Every file that will be written, in that order: the table last."""
        files = (self.sidecar, self.png, self.replicates, self.csv)
        return [path for path in files if path is not None]


def check_outputs(outputs: Outputs) -> None:
    """Refuse outputs that exist, cannot be written, or whose endings say no format; to be called
    before the work starts.

    Raises:
        VitseeError: names the file and what to do.
    """
    if outputs.csv is not None:
        table_ending(outputs.csv, "-o")
    if outputs.png is not None:
        ending_of(outputs.png, FIGURE_ENDINGS, "--png")
    check_new_files(reversed(outputs.paths()), force=outputs.force)


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
        stdout: receives the CSV, and nothing else, where no CSV file is named.
        more: other files, which appear with these or not at all.

    Raises:
        VitseeError: a file could not be written.
        BrokenPipeError: the reader of stdout is gone (`| head`).
    """
    check_outputs(outputs)
    files: dict[Path, bytes] = dict(more or {})
    written = b""
    if outputs.csv is not None and outputs.sidecar is not None:
        written = table_bytes(table.columns, table_ending(outputs.csv, "-o"))
        files[outputs.sidecar] = _sidecar(table, sidecar, written)
    if outputs.png is not None:
        ending = ending_of(outputs.png, FIGURE_ENDINGS, "--png")
        files[outputs.png] = figure_bytes(figure(), ending)
    if outputs.csv is not None:
        ending = table_ending(outputs.csv, "-o")
        if outputs.replicates is not None and table.replicates is not None:
            columns = replicates.as_columns(table.columns, table.replicates)
            files[outputs.replicates] = table_bytes(columns, ending)
        elif outputs.replicates is not None:
            log.warning("%s is not written: %s", outputs.replicates.name, NO_REPLICATES)
        files[outputs.csv] = written
    text = io.StringIO()
    if outputs.csv is None:
        table.to_csv(text)
    write_files(files, force=outputs.force)
    if outputs.csv is None:
        stdout.write(text.getvalue())
        stdout.flush()


def _sidecar(table: Table, given: Mapping[str, Any], written: bytes) -> bytes:
    """The sidecar of a table that is `written` so."""
    own = {
        "rows": len(table),
        "columns": {name: kind_of(values) for name, values in table.columns.items()},
        "sha256": hashlib.sha256(written).hexdigest(),
        "notes": table.notes,
    }
    return (json.dumps(plain_json({**given, **own}), indent=2) + "\n").encode()


def describe_run(
    stores: Iterable[Store], *, command: Sequence[str], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """What made a result, for its sidecar: command line, parameters after defaults (seeds among
    them), stores by identity, versions, time."""
    return {
        "command": list(command),
        "parameters": {name: _plain(value) for name, value in parameters.items()},
        "stores": [
            {
                "label": store.label,
                "path": str(store.place.absolute()),
                "store_id": store.manifest.store_id,
                "samples_fingerprint": store.manifest.samples_fingerprint,
                "model": store.manifest.model.get("name"),
                "ablations": list(store.manifest.model.get("ablate_skip", ())),
                "complete": bool(store.complete),
            }
            for store in stores
        ],
        "versions": result_versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
