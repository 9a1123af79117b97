"""Tidy tables, and results read back from their files, with the sidecar where there is one.

Every analysis is `run(*stores, ...) -> Table` and `plot(Table) -> Figure`; `outputs` writes both.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.tables import replicates
from vitsee_core.tables.columns import NUMBERS, TEXT, is_given
from vitsee_core.tables.files import read_file, write_files
from vitsee_core.tables.formats import ending_of, read_rows, table_bytes, table_ending, write_csv
from vitsee_core.tables.sidecars import describe_call, digest_of, sidecar_bytes
from vitsee_core.types import Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.metadata import parse
from vitsee_stores.notebook import html_table, shown_cell, to_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_ROWS = 20  # of a table in a notebook


@dataclass(frozen=True)
class Table:
    """A tidy table: one observation per row.

    Attributes:
        columns: name -> one-dimensional array, all of one length, in the order of the CSV.
        notes: facts about the numbers that no row can state (the interval's method, how many images
            were left out, seeds); JSON, written into the sidecar.
        replicates: (rows, blocks) each row's value without one block of the images, NaN if it has
            none; None if no row has any. See `vitsee_core.tables.replicates`.
        made_by: the analysis and its arguments, if an analysis returned the table.
        analysis: the one whose figure `plot` draws, of a part of a table or one that was read.
    """

    columns: dict[str, NDArray[Any]]
    notes: dict[str, Any] = field(default_factory=dict)
    replicates: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    made_by: tuple[str, Mapping[str, Any]] | None = field(default=None, repr=False, compare=False)
    analysis: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = {name: np.shape(values) for name, values in self.columns.items()}
        if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
            raise ValueError(f"columns of one length were expected, not {lengths}")
        if self.replicates is not None and len(self.replicates) != len(self):
            raise ValueError(f"replicates of {len(self)} rows were expected")

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Table:
        """A table of these rows; a value that is None or missing is an empty cell. The key
        `replicates` of a row, (blocks,), is not a column but goes into `Table.replicates`.

        Args:
            rows: name -> value, one mapping per row.
            columns: the columns and their order; by default those of the first row.
            notes: facts about the whole table.
        """
        rows = list(rows)
        names = list(columns if columns is not None else rows[0] if rows else ())
        return cls(
            {name: _column([row.get(name) for row in rows]) for name in names},
            dict(notes or {}),
            replicates.stacked([row.get(replicates.WORD) for row in rows]),
        )

    @classmethod
    def concat(cls, tables: Sequence[Table], notes: Mapping[str, Any] | None = None) -> Table:
        """The rows of tables with the same columns, one table after the other."""
        names = list(tables[0].columns)
        columns = {name: np.concatenate([t.columns[name] for t in tables]) for name in names}
        own = replicates.joined([(len(table), table.replicates) for table in tables])
        return cls(columns, dict(notes or {}), own)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def cells(self, name: str) -> list[Any]:
        """The cells of a column; None of every row where there is no such column."""
        return self[name].tolist() if name in self.columns else [None] * len(self)

    def take(self, index: NDArray[Any]) -> Table:
        """The rows selected by `index` (a mask, or row numbers in the wanted order)."""
        columns = {name: values[index] for name, values in self.columns.items()}
        own = None if self.replicates is None else self.replicates[index]
        return Table(columns, self.notes, own, analysis=self._analysis())

    def where(self, **wanted: Any) -> Table:
        """The rows whose columns equal these values, or are among them for a list."""
        keep = np.ones(len(self), bool)
        for name, value in wanted.items():
            choices = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
            keep &= np.isin(self.columns[name], list(choices))
        return self.take(keep)

    def unique(self, name: str) -> list[Any]:
        """The values of a column in order of first appearance."""
        return list(dict.fromkeys(self.columns[name].tolist()))

    def given(self, name: str) -> Mask:
        """(rows,) which rows have a value in a column, in memory or read from a CSV."""
        return np.array([is_given(value) for value in self[name].tolist()], bool)

    def groups(self, name: str) -> Iterator[tuple[Any, Table]]:
        """(value, its rows) for each value of a column, in order of first appearance."""
        for value in self.unique(name):
            yield value, self.where(**{name: value})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Table:
        """Read a table that a command or `write` wrote, with the notes of its sidecar.

        Raises:
            VitseeError: no such table; see `read_result`.
            OSError: it cannot be opened.
        """

        result = read_result(Path(path))
        return replace(result.table, analysis=result.command.replace("-", "_"))

    def to_csv(self, file: IO[str] | str | os.PathLike[str], *, force: bool = False) -> None:
        """Write a header and the rows as CSV, to an open text file or as `write` does.

        Floats have enough digits to restore the same float64; NaN and None are empty cells. Text
        that a spreadsheet would take for a formula is prefixed with a single quote.
        """
        if isinstance(file, (str, os.PathLike)):
            path = Path(file)
            ending_of(path, (".csv", ".csv.gz", ".tsv"), "to_csv:")
            self.write(path, force=force)
        else:
            write_csv(self.columns, file)

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the table in the format of the ending: .csv, .csv.gz, .tsv, .json or .parquet; and
        beside it `r.csv.json`, with the notes and, if an analysis returned the table, how it was
        made, which `vitsee plot` and `vitsee report` read. Raises VitseeError: another ending, or a
        file exists and `force` is off."""
        place = Path(path)
        data = table_bytes(self.columns, table_ending(place))
        given = describe_call(*self.made_by) if self.made_by is not None else {}
        sidecar = sidecar_bytes(self.columns, self.notes, given, data)
        files = {place.with_name(f"{place.name}.json"): sidecar, place: data}
        write_files(files, force=force)

    def _analysis(self) -> str:
        return self.analysis or (self.made_by[0] if self.made_by is not None else "")

    def plot(self, **options: Any) -> Figure:
        """The figure that the command of this table draws; in a notebook it is shown.

        Args:
            options: those of the analysis' `plot`.

        Raises:
            VitseeError: no analysis made this table, or it draws no figure.
        """
        name = self._analysis()
        try:
            draw = importlib.import_module(f"vitsee_core.analyses.{name}").plot if name else None
        except (ImportError, AttributeError):
            draw = None
        if draw is None:
            raise VitseeError(
                "this table has no figure of its own; expected what an analysis returned, or "
                "Table.read of what a command wrote with -o"
            )
        figure: Figure = draw(self, **options)
        return figure

    def map_text(self, change: Callable[[str], str]) -> Table:
        """The table with `change` applied to every text in it and in its notes."""
        columns = {n: _mapped(values, change) for n, values in self.columns.items()}
        notes: dict[str, Any] = _mapped_notes(self.notes, change)
        return Table(columns, notes, self.replicates)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame, the notes in its `attrs`. Raises VitseeError: pandas is
        not installed."""
        return to_frame(self.columns, self.notes)

    def __repr__(self) -> str:
        return f"<Table {len(self)} rows: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """Notebook display: the first and the last rows."""
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
    # Integers beside empty cells stay integers: no 3.0 in a column of indices.
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


SHOWN_COLUMNS = 8
WRITTEN = "expected a CSV that a vitsee command wrote with -o"


@dataclass(frozen=True)
class ResultFile:
    """A table that a command wrote.

    Attributes:
        command: the command's name; "" without a sidecar.
        sidecar: the content of `r.csv.json`; empty without that file.
        changed: the table is not the one that the sidecar describes, or the sidecar was edited
            (False if it does not say).
    """

    path: Path
    table: Table
    command: str
    sidecar: dict[str, Any]
    changed: bool = False

    @property
    def as_written(self) -> bool:
        """Whether table and sidecar are known to be unchanged: failures are then our bug."""
        return "digest" in self.sidecar and not self.changed

    def has(self, columns: Sequence[str]) -> bool:
        return all(name in self.table.columns for name in columns)

    def describe_columns(self) -> str:
        """The first of its columns, for a message."""
        names = list(self.table.columns)
        more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
        return ", ".join(names[:SHOWN_COLUMNS]) + more


def read_result(path: str | Path) -> ResultFile:
    """Read a table's file in the format of its ending, with its sidecar.

    The sidecar says what each column holds; without one it is inferred. A column of numbers is
    float64 (an empty cell NaN) or, if all are integers, int64 (an object array with None for an
    empty cell); every other column is text.

    Raises:
        VitseeError: a folder, not in the format of its ending, no rows, rows of different lengths,
            or text where every command writes numbers.
        OSError: it cannot be opened.
    """
    path = Path(path)
    sidecar = _sidecar(path)
    result = _read(path, sidecar, sidecar.get("columns", {}))
    now = {"sha256": hashlib.sha256(read_file(path)).hexdigest(), "digest": digest_of(sidecar)}
    return replace(result, changed=any(sidecar.get(name, now[name]) != now[name] for name in now))


def _read(path: Path, sidecar: dict[str, Any], kinds: Mapping[str, Any]) -> ResultFile:
    if path.is_dir():
        raise VitseeError(f"{path} is a folder; {WRITTEN}")
    header, body = read_rows(path)
    if not body:
        raise VitseeError(f"{path} has no rows; {WRITTEN}")
    for number, line in enumerate(body, 1):
        if len(line) != len(header):
            raise VitseeError(
                f"{path}, row {number} has {len(line)} cells, its header {len(header)}; {WRITTEN}"
            )
    columns = {
        name: _typed(path, name, [line[i] for line in body], str(kinds.get(name, "")))
        for i, name in enumerate(header)
    }
    typed = map(str, sidecar.get("command", ())[1:])
    command = next((word for word in typed if not word.startswith("-")), "")  # vitsee -q knn ...
    return ResultFile(path, Table(columns, sidecar.get("notes", {})), command, sidecar)


def read_replicates(file: ResultFile) -> NDArray[np.float64]:
    """(rows, blocks) the replicates of a result, from the file beside it. Raises VitseeError: there
    is none, or it belongs to another table."""
    path = replicates.beside(file.path)
    if not path.exists():
        raise VitseeError(
            f"{file.path} has no replicates beside it ({path.name}); run its command again with "
            "--replicates, where it has that option"
        )
    other = _read(path, {}, file.sidecar.get("columns", {})).table
    names = [name for name in other.columns if name.startswith(replicates.PREFIX)]
    same = [n for n in file.table.columns if n in other.columns and n not in names]
    if not names or len(other) != len(file.table) or "value" not in same:
        raise VitseeError(f"{path} holds no replicates of the rows of {file.path}")
    for name in same:
        ours, theirs = file.table[name].tolist(), other[name].tolist()
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
            if a != b and (a == a or b == b):
                raise VitseeError(
                    f"{path} belongs to another table than {file.path}: row {row} has {name} {b} "
                    f"in place of {a}; run the command again with --replicates --force"
                )
    return np.stack([other[name].astype(np.float64) for name in names], 1)


def _typed(path: Path, name: str, cells: list[str], holds: str) -> NDArray[Any]:
    unsaid = holds in ("", "empty")
    text = holds == "text" or (unsaid and name in TEXT)
    numbers = holds in ("number", "integer") or (unsaid and name in NUMBERS)
    if text:
        return np.array(cells, object)
    if holds == "empty" and not numbers and not any(cells):
        return np.full(len(cells), None, object)
    if not any(cells):
        return np.full(len(cells), np.nan) if numbers else np.array(cells)
    for kind in (int, float):
        try:
            values = [kind(cell) if cell else None for cell in cells]
            if kind is int:  # of 64 bits
                np.array([v for v in values if v is not None], np.int64)
        except (ValueError, OverflowError):
            continue
        if kind is float:
            return np.array([np.nan if v is None else v for v in values], np.float64)
        return np.array(values, object if None in values else np.int64)
    if numbers:
        raise VitseeError(
            f"{path}: column {name} has the text {_first_text(cells)!r}; expected numbers"
        )
    return np.array(cells, object)


def _first_text(cells: list[str]) -> str:
    for cell in filter(None, cells):
        try:
            float(cell)
        except ValueError:
            return cell
    return ""


# Keys of a sidecar that are read back.
_SHAPES: dict[str, type] = {
    **{"command": list, "stores": list, "results": list, "parameters": dict, "columns": dict},
    **{"notes": dict, "figure": dict, "sha256": str, "digest": str, "created": str},
}


def _sidecar(path: Path) -> dict[str, Any]:
    """The content of `r.csv.json`, without keys whose values are of an unexpected type; empty if it
    is missing or not ours."""
    try:
        document = parse(read_file(path.with_name(path.name + ".json")))
    except (OSError, ValueError, VitseeError):
        return {}
    document = document if isinstance(document, dict) else {}
    return {key: v for key, v in document.items() if isinstance(v, _SHAPES.get(key, object))}
