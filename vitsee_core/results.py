"""Tidy tables, and how a result reaches the disk: the table, its sidecar, the picture.

Every analysis is `run(*stores, ...) -> Table` and `plot(Table) -> Figure`. A command opens the
stores, asks `check_outputs` before the work starts, and hands both to `write_results`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.files import check_new_files, write_files
from vitsee_core.formats import (
    FIGURE_ENDINGS,
    ending_of,
    plain_json,
    table_bytes,
    table_ending,
    write_csv,
)
from vitsee_stores.notebook import html_table, shown_cell, to_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import Store

SHOWN_ROWS = 20  # of a table in a notebook
# What decides numbers and files; read without importing any of them.
VERSIONED = ("vitsee", "numpy", "torch", "timm", "zarr", "scikit-learn", "matplotlib")


@dataclass(frozen=True)
class Table:
    """A tidy table: one observation a row.

    columns: name -> one-dimensional array, all of one length, in the order of the CSV.
    notes: what a reader of the numbers has to know and no row can say (the interval's method, how
        many images were left out, seeds); JSON, written into the sidecar.
    """

    columns: dict[str, NDArray[Any]]
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: np.shape(values) for name, values in self.columns.items()}
        if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
            raise ValueError(f"columns of one length were expected, not {lengths}")

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Table:
        """A table of these rows; a value that is None or missing is an empty cell.

        Args:
            rows: name -> value, one mapping a row.
            columns: the columns and their order; by default those of the first row.
            notes: see the class.
        """
        rows = list(rows)
        names = list(columns if columns is not None else rows[0] if rows else ())
        return cls(
            {name: _column([row.get(name) for row in rows]) for name in names}, dict(notes or {})
        )

    @classmethod
    def concat(cls, tables: Sequence[Table], notes: Mapping[str, Any] | None = None) -> Table:
        """The rows of tables with the same columns, one table after the other."""
        names = list(tables[0].columns)
        columns = {name: np.concatenate([t.columns[name] for t in tables]) for name in names}
        return cls(columns, dict(notes or {}))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def take(self, index: NDArray[Any]) -> Table:
        """The rows that `index` chooses (a mask, or row numbers in the wanted order)."""
        return Table({name: values[index] for name, values in self.columns.items()}, self.notes)

    def where(self, **wanted: Any) -> Table:
        """The rows whose columns equal these values, or are among them where a list is given."""
        keep = np.ones(len(self), bool)
        for name, value in wanted.items():
            choices = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
            keep &= np.isin(self.columns[name], list(choices))
        return self.take(keep)

    def unique(self, name: str) -> list[Any]:
        """The values of a column in order of first appearance."""
        return list(dict.fromkeys(self.columns[name].tolist()))

    def groups(self, name: str) -> Iterator[tuple[Any, Table]]:
        """(value, its rows) for each value of a column, in order of first appearance."""
        for value in self.unique(name):
            yield value, self.where(**{name: value})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Table:
        """A table that a command or `write` wrote, with the notes of its sidecar.

        Raises:
            VitseeError: no such table; see `vitsee_core.result_files.read_result`.
            OSError: it cannot be opened.
        """
        from vitsee_core.result_files import read_result

        return read_result(Path(path)).table

    def to_csv(self, file: IO[str] | str | os.PathLike[str], *, force: bool = False) -> None:
        """Write a header and the rows as CSV, to an open text file or as `write` does.

        Floats have as many digits as bring back the same float64; NaN and None are empty cells.
        Text that a spreadsheet would take for a formula has a single quote before it.
        """
        if isinstance(file, (str, os.PathLike)):
            path = Path(file)
            ending_of(path, (".csv", ".csv.gz", ".tsv"), "to_csv:")
            self.write(path, force=force)
        else:
            write_csv(self.columns, file)

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the table in the format that the ending says: .csv, .csv.gz, .tsv, .json or
        .parquet. The notes are not written.

        Raises:
            VitseeError: another ending, or the file exists and `force` is off.
        """
        place = Path(path)
        write_files({place: table_bytes(self.columns, table_ending(place))}, force=force)

    def map_text(self, change: Callable[[str], str]) -> Table:
        """The table with every text in it, and in its notes, changed so."""
        columns = {n: _mapped(values, change) for n, values in self.columns.items()}
        notes: dict[str, Any] = _mapped_notes(self.notes, change)
        return Table(columns, notes)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame, the notes in its `attrs`.

        Raises:
            VitseeError: pandas is not installed.
        """
        return to_frame(self.columns, self.notes)

    def __repr__(self) -> str:
        return f"<Table {len(self)} rows: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the first and the last rows."""
        n = len(self)
        rows = list(range(n)) if n <= SHOWN_ROWS else [*range(SHOWN_ROWS // 2), None]
        rows += [] if n <= SHOWN_ROWS else range(n - SHOWN_ROWS // 2, n)
        lines = [
            ["…" if i is None else shown_cell(values[i]) for values in self.columns.values()]
            for i in rows
        ]
        return html_table(f"{n} rows", list(self.columns), lines)


def _column(values: list[Any]) -> NDArray[Any]:
    present = [value for value in values if value is not None]
    numbers = bool(present) and all(isinstance(value, (float, np.floating)) for value in present)
    if numbers:
        return np.array([np.nan if v is None else v for v in values], np.float64)
    # A whole number beside an empty cell stays whole: no 3.0 in a column of indices.
    return np.array(values, object if len(present) < len(values) else None)


def _mapped(values: NDArray[Any], change: Callable[[str], str]) -> NDArray[Any]:
    if values.dtype.kind not in "OU":
        return values
    cells = values.tolist()
    new = {cell: change(cell) for cell in {c for c in cells if isinstance(c, str)}}
    if all(old == text for old, text in new.items()):
        return values
    changed = [new[cell] if isinstance(cell, str) else cell for cell in cells]
    return np.array(changed, object if values.dtype.kind == "O" else None)


def _mapped_notes(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped_notes(k, change): _mapped_notes(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped_notes(v, change) for v in value]
    return value


@dataclass(frozen=True)
class Outputs:
    """Where a result goes: table (None: CSV on stdout), picture (None: none), both in the format
    that their endings say, and whether files that exist are replaced."""

    csv: Path | None = None
    png: Path | None = None
    force: bool = False

    @property
    def sidecar(self) -> Path | None:
        """The table's companion, `r.csv.json` for `r.csv`."""
        return None if self.csv is None else self.csv.with_name(self.csv.name + ".json")

    def paths(self) -> list[Path]:
        """Every file that will be written, in that order: the table last."""
        return [path for path in (self.sidecar, self.png, self.csv) if path is not None]


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
) -> None:
    """Write the table to stdout, or to its file with the sidecar beside it, and the picture.

    Everything is made before the first file appears, so a failure leaves none behind. The sidecar
    is what the caller gives, the table's notes and the number of rows.

    Args:
        table: the result.
        outputs: where it goes.
        figure: draws it; called only where a picture is wanted.
        sidecar: see `describe_run`.
        stdout: receives the CSV, and nothing else, where no CSV file is named.

    Raises:
        VitseeError: a file could not be written.
        BrokenPipeError: the reader of stdout is gone (`| head`).
    """
    check_outputs(outputs)
    files: dict[Path, bytes] = {}
    if outputs.sidecar is not None:
        record = plain_json({**sidecar, "rows": len(table), "notes": table.notes})
        files[outputs.sidecar] = (json.dumps(record, indent=2) + "\n").encode()
    if outputs.png is not None:
        from vitsee_core.plotting import figure_bytes

        ending = ending_of(outputs.png, FIGURE_ENDINGS, "--png")
        files[outputs.png] = figure_bytes(figure(), ending)
    if outputs.csv is not None:
        files[outputs.csv] = table_bytes(table.columns, table_ending(outputs.csv, "-o"))
    text = io.StringIO()
    if outputs.csv is None:
        table.to_csv(text)
    write_files(files, force=outputs.force)
    if outputs.csv is None:
        stdout.write(text.getvalue())
        stdout.flush()


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
                "path": str(Path(store.path).absolute()),
                "store_id": store.manifest.store_id,
                "samples_fingerprint": store.manifest.samples_fingerprint,
                "model": store.manifest.model.get("name"),
                "ablations": list(store.manifest.model.get("ablate_skip", ())),
                "complete": bool(store.complete),
            }
            for store in stores
        ],
        "versions": {"python": platform.python_version(), **versions()},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """The installed versions of what decides a result, without importing it."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
