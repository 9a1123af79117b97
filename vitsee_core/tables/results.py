"""Tidy tables, and results read back from their files, with the sidecar where there is one.

Every analysis is `run(*stores, ...) -> Table` and `plot(Table) -> Figure`; `outputs` writes both.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime import registry
from vitsee_core.runtime.parameters import DeclarationError
from vitsee_core.tables import replicates
from vitsee_core.tables.columns import REPLICATES, column_of, is_given, typed
from vitsee_core.tables.files import (
    TABLE_ENDINGS,
    is_stream,
    read_file,
    read_stream,
    write_files,
)
from vitsee_core.tables.formats import WRITTEN, ending_of, read_table, table_bytes
from vitsee_core.tables.sidecars import describe_call, digest_of, sidecar_bytes
from vitsee_core.types import Float, pl
from vitsee_stores.errors import VitseeError
from vitsee_stores.metadata import parse
from vitsee_stores.notebook import html_table, shown_cell, to_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_ROWS = 20  # of a table in a notebook


@dataclass(frozen=True)
class Table:
    """A tidy table, one observation per row: a polars DataFrame and what belongs to it.

    Attributes:
        frame: the columns, in the order of the CSV, with the types of `vitsee_core.tables.columns`;
            given as a frame, or as arrays, sequences and, for a value of every row, scalars. A last
            column `replicates` (the row's value without each block of the images) is not written
            into the table's file; see `vitsee_core.tables.replicates`.
        notes: facts about the numbers that no row can state (the interval's method, how many images
            were left out, seeds); JSON, written into the sidecar.
        made_by: the analysis and its arguments, if an analysis returned the table.
        analysis: the one whose figure `plot` draws, of a part of a table or one that was read.
    """

    frame: pl.DataFrame
    notes: dict[str, Any] = field(default_factory=dict)
    made_by: tuple[str, Mapping[str, Any]] | None = field(
        default=None, repr=False, compare=False
    )
    analysis: str = field(default="", repr=False, compare=False)

    if TYPE_CHECKING:  # what it takes: columns, too

        def __init__(
            self,
            frame: pl.DataFrame | Mapping[str, Any],
            notes: dict[str, Any] = ...,
            made_by: tuple[str, Mapping[str, Any]] | None = ...,
            analysis: str = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "frame", typed(_frame_of(self.frame)))

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Table:
        """A table of a handful of rows; a value that is None or missing is an empty cell.

        Args:
            rows: name -> value, one mapping per row; `replicates`: (blocks,) or None.
            columns: the columns and their order; by default as they appear.
            notes: facts about the whole table.

        Raises:
            DeclarationError: a row has a value whose name is not among the columns.
        """
        rows = list(rows)
        if columns is None:
            in_rows = dict.fromkeys(name for row in rows for name in row)
            names = [name for name in in_rows if name != REPLICATES]
        else:
            names = list(columns)
            _require_columns(rows, names)
        if (
            any(row.get(REPLICATES) is not None for row in rows)
            and REPLICATES not in names
        ):
            names.append(REPLICATES)
        return cls(
            {n: column_of(n, [r.get(n) for r in rows]) for n in names}, dict(notes or {})
        )

    @classmethod
    def concat(
        cls,
        parts: Sequence[Table | pl.DataFrame | Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Table:
        """The rows of several parts in a row; a column that a part lacks is empty there.

        Args:
            parts: tables, frames, or blocks of rows: column -> array, or a scalar for all rows.
            columns: the columns and their order; by default as they appear.
            notes: facts about the whole table.
        """
        if not parts:
            return cls.from_rows((), columns or (), notes)
        frames: list[pl.DataFrame] = []
        for names, some in groupby(parts, _row_names):
            if names is None:
                frames += [
                    typed(p) if isinstance(p, pl.DataFrame) else _frame_of(p)
                    for p in some
                ]
            else:  # a frame of many rows takes hardly longer than one of a single row
                rows: list[Any] = list(some)
                frames.append(
                    pl.DataFrame([column_of(n, [r[n] for r in rows]) for n in names])
                )
        frame = pl.concat(frames, how="diagonal_relaxed")
        if columns is not None:
            own = [
                n for n in (*columns, REPLICATES) if n in frame.columns or n != REPLICATES
            ]
            lacking = [n for n in own if n not in frame.columns]
            frame = frame.with_columns(pl.lit(None).alias(n) for n in lacking).select(own)
        return cls(frame, dict(notes or {}))

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column as numpy: floats (NaN where empty), integers (objects with None where some are
        empty), or text as objects ("" where empty)."""
        column = self.frame[name]
        if column.dtype.is_float() or (
            column.dtype.is_integer() and not column.null_count()
        ):
            return column.to_numpy(writable=True)
        if column.dtype in (pl.String, pl.Categorical):
            column = column.cast(pl.String).fill_null("")
        return np.array(column.to_list(), object)

    @property
    def replicates(self) -> Float | None:
        """(rows, blocks) each row's value without one block of the images, NaN if it has none; None
        if no row has any."""
        return replicates.array_of(self.frame)

    def filter(self, *predicates: Any, **constraints: Any) -> Table:
        """The rows that `polars.DataFrame.filter` keeps: expressions, or `column=value`."""
        return self.with_frame(self.frame.filter(*predicates, **constraints))

    def with_frame(self, frame: pl.DataFrame) -> Table:
        """Other rows or columns of the same analysis, with the notes."""
        return Table(frame, self.notes, analysis=self.analysis_name)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Table:
        """Read a table that a command or `write` wrote, with the notes of its sidecar.

        Raises:
            VitseeError: no such table; see `read_result`.
            OSError: it cannot be opened.
        """

        result = read_result(Path(path))
        return replace(result.table, analysis=result.command.replace("-", "_"))

    def to_csv(
        self, file: IO[str] | str | os.PathLike[str], *, force: bool = False
    ) -> None:
        """Write a header and the rows as CSV, to an open text file or as `write` does.

        Floats have enough digits to restore the same float64; NaN and None are empty cells. Text
        that a spreadsheet would take for a formula is prefixed with a single quote.
        """
        if isinstance(file, (str, os.PathLike)):
            path = Path(file)
            ending_of(path, (".csv", ".csv.gz", ".tsv"), "to_csv:")
            self.write(path, force=force)
        else:
            file.write(table_bytes(self.written, ".csv").decode())

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the table in the format of the ending: .csv, .csv.gz, .tsv, .json or .parquet; and
        beside it `r.csv.json`, with the notes and, if an analysis returned the table, how it was
        made, which `vitsee plot` and `vitsee report` read. Raises VitseeError: another ending, or a
        file exists and `force` is off."""
        place = Path(path)
        data = table_bytes(self.written, ending_of(place, TABLE_ENDINGS, "the table"))
        given = describe_call(*self.made_by) if self.made_by is not None else {}
        sidecar = sidecar_bytes(self.written, self.notes, given, data)
        files = {place.with_name(f"{place.name}.json"): sidecar, place: data}
        write_files(files, force=force)

    @property
    def written(self) -> pl.DataFrame:
        """The frame without the column `replicates`: what a file holds."""
        return self.frame.drop(REPLICATES, strict=False)

    @property
    def analysis_name(self) -> str:
        """The analysis that made the table or its origin; "" if none did."""
        return self.analysis or (self.made_by[0] if self.made_by is not None else "")

    @property
    def step_unit(self) -> str:
        """The unit of the steps in a table over a training, "step" or "epoch", which is also their
        column's name; "" for another table, or one of a single step."""
        unit = self.notes.get("unit")
        names = {*self.frame.columns}
        if not isinstance(unit, str) or not {unit, "metric", "value"} <= names:
            return ""
        placed = "site" in names or {"site_a", "site_b"} <= names
        return unit if placed and self.frame[unit].n_unique() > 1 else ""

    def plot(self, **options: Any) -> Figure:
        """The figure that the command of this table draws; of a table over a training the chart
        along its steps. In a notebook it is shown.

        Args:
            options: those of the analysis' `plot`, or of `draw_over_training`.

        Raises:
            VitseeError: no analysis made this table, or it draws no figure.
        """
        name = self.analysis_name
        if name not in registry.names():
            of = f" ({name} is no analysis that is installed)" if name else ""
            raise VitseeError(
                f"this table has no figure of its own{of}; expected what an analysis returned, or "
                "Table.read of what a command wrote with -o"
            )
        analysis = registry.load(name)
        with registry.blamed(analysis.module):
            figure: Figure = analysis.draw(self, **options)
        return figure

    def map_text(self, change: Callable[[str], str]) -> Table:
        """The table with `change` applied to every text in it and in its notes."""
        of_text = pl.col(pl.String, pl.Categorical)
        found = self.frame.select(of_text.unique().drop_nulls().cast(pl.String).implode())
        changed = []
        for column in found.get_columns():
            new = {text: change(text) for text in column[0]}
            if any(old != text for old, text in new.items()):
                own = pl.nth(self.frame.get_column_index(column.name))
                kind = self.frame.schema[column.name]
                changed.append(own.cast(pl.String).replace(new).cast(kind))
        return Table(self.frame.with_columns(changed), _mapped_notes(self.notes, change))

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame, the notes in its `attrs`. Raises VitseeError: pandas is
        not installed."""
        return to_frame({name: self[name] for name in self.written.columns}, self.notes)

    def __repr__(self) -> str:
        return f"<Table {len(self)} rows: {', '.join(self.written.columns)}>"

    def _repr_html_(self) -> str:
        """Notebook display: the first and the last rows."""
        n = len(self)
        frame = self.written
        half = SHOWN_ROWS // 2
        shown = (
            frame if n <= SHOWN_ROWS else pl.concat([frame.head(half), frame.tail(half)])
        )
        lines = [[shown_cell(cell) for cell in row] for row in shown.rows()]
        if n > SHOWN_ROWS:
            lines.insert(half, ["…"] * frame.width)
        return html_table(f"{n} rows", frame.columns, lines)


def _require_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Refuse rows that would lose a value. Raises DeclarationError: names the first."""
    columns = {*names, REPLICATES}
    for row in rows:
        for name, value in row.items():
            if name not in columns and is_given(value):
                raise DeclarationError(
                    f"rows have {name!r}, which is not among the columns; expected some of "
                    f"{', '.join(names)}"
                )


def _frame_of(part: Table | pl.DataFrame | Mapping[str, Any]) -> pl.DataFrame:
    """A frame of a table, a frame, or columns: arrays and sequences of one length, and scalars that
    hold for every row. Raises ValueError: columns of several lengths."""
    if isinstance(part, (Table, pl.DataFrame)):
        return part if isinstance(part, pl.DataFrame) else part.frame
    if _row_names(part) and isinstance(part.get(REPLICATES), np.ndarray):
        part = {**part, REPLICATES: [part[REPLICATES]]}
    long = {n: column_of(n, v) for n, v in part.items() if _is_long(v)}
    lengths = {name: len(column) for name, column in long.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of one length were expected, not {lengths}")
    n = next(iter(lengths.values()), 1 if part else 0)
    return pl.DataFrame(
        [
            long[k] if k in long else column_of(k, [v]).new_from_index(0, n)
            for k, v in part.items()
        ]
    )


def _row_names(part: Table | pl.DataFrame | Mapping[str, Any]) -> tuple[str, ...] | None:
    """The columns of a block that is a single row, whose replicates are (blocks,); None: another
    part."""
    if not isinstance(part, Mapping) or not part:
        return None
    one_row = all(
        np.ndim(value) <= 1 if name == REPLICATES else not _is_long(value)
        for name, value in part.items()
    )
    return tuple(part) if one_row else None


def _is_long(value: Any) -> bool:
    return not isinstance(value, str) and (
        hasattr(value, "__len__") and np.ndim(value) != 0
    )


def _mapped_notes(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _mapped_notes(k, change): _mapped_notes(v, change) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped_notes(v, change) for v in value]
    return value


SHOWN_COLUMNS = 8


@dataclass(frozen=True)
class ResultFile:
    """A table that a command wrote.

    Attributes:
        command: the command's name; "" without a sidecar.
        sidecar: the content of `r.csv.json`; empty without that file.
        changed: the table is not the one that the sidecar describes, or the sidecar was edited
            (False if it does not say).
        digest: of the table's bytes and the sidecar.
    """

    path: Path
    table: Table
    command: str
    sidecar: dict[str, Any]
    changed: bool = False
    digest: str = ""

    @property
    def as_written(self) -> bool:
        """Whether table and sidecar are known to be unchanged: failures are then our bug."""
        return "digest" in self.sidecar and not self.changed

    def has(self, columns: Sequence[str]) -> bool:
        return all(name in self.table.frame.columns for name in columns)

    def describe_columns(self) -> str:
        """The first of its columns, for a message."""
        names = self.table.frame.columns
        more = (
            f" and {len(names) - SHOWN_COLUMNS} more"
            if len(names) > SHOWN_COLUMNS
            else ""
        )
        return ", ".join(names[:SHOWN_COLUMNS]) + more


def read_result(path: str | Path) -> ResultFile:
    """Read a table's file in the format of its ending, with its sidecar.

    The sidecar says what each column holds; without one it is inferred, see `formats.read_table`.
    What comes from a stream (`-`) is CSV without a sidecar.

    Raises:
        VitseeError: a folder, not in the format of its ending, no rows, rows of different lengths,
            or text where every command writes numbers.
        OSError: it cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        raise VitseeError(f"{path} is a folder; {WRITTEN}")
    if is_stream(path):
        sidecar: dict[str, Any] = {}
        data = read_stream(path)
    else:
        sidecar = _sidecar(path)
        data = read_file(path)
    sha256 = hashlib.sha256(data).hexdigest()
    as_written = sidecar.get("sha256") == sha256
    frame = read_table(path, data, sidecar.get("columns", {}), as_written=as_written)
    typed = map(str, sidecar.get("command", ())[1:])
    command = next(
        (word for word in typed if not word.startswith("-")), ""
    )  # vitsee -q knn ...
    now = {"sha256": sha256, "digest": digest_of(sidecar)}
    changed = any(sidecar.get(name, now[name]) != now[name] for name in now)
    table = Table(frame, sidecar.get("notes", {}))
    return ResultFile(path, table, command, sidecar, changed, " ".join(now.values()))


def read_replicates(file: ResultFile) -> Table:
    """The table of a result with its replicates, from the file beside it. Raises VitseeError: there
    is none, or it belongs to another table."""
    path = replicates.beside(file.path)
    if not path.exists():
        raise VitseeError(
            f"{file.path} has no replicates beside it ({path.name}); run its command again with "
            "--replicates, where it has that option"
        )
    other = read_table(path, read_file(path), file.sidecar.get("columns", {}))
    names = [name for name in other.columns if name.startswith(replicates.PREFIX)]
    frame = file.table.frame
    same = [n for n in frame.columns if n in other.columns and n not in names]
    if not names or len(other) != len(frame) or "value" not in same:
        raise VitseeError(f"{path} holds no replicates of the rows of {file.path}")
    for name in same:
        differ = frame[name].cast(other[name].dtype).ne_missing(other[name])
        if differ.any():
            row = int(differ.arg_max() or 0)
            raise VitseeError(
                f"{path} belongs to another table than {file.path}: row {row + 1} has {name} "
                f"{other[name][row]} in place of {frame[name][row]}; run the command again with "
                "--replicates --force"
            )
    each = other.select(pl.concat_list(pl.col(names).cast(pl.Float64)).alias(REPLICATES))
    return file.table.with_frame(pl.concat([frame, each], how="horizontal"))


# Keys of a sidecar that are read back.
_SHAPES: dict[str, type] = {
    **{
        "command": list,
        "stores": list,
        "results": list,
        "parameters": dict,
        "columns": dict,
    },
    **{"notes": dict, "figure": dict, "sha256": str, "digest": str, "created": str},
    "package": dict,
}


def _sidecar(path: Path) -> dict[str, Any]:
    """The content of `r.csv.json`, without keys whose values are of an unexpected type; empty if it
    is missing or not ours."""
    try:
        document = parse(read_file(path.with_name(path.name + ".json")))
    except (OSError, ValueError, VitseeError):
        return {}
    document = document if isinstance(document, dict) else {}
    return {
        key: v for key, v in document.items() if isinstance(v, _SHAPES.get(key, object))
    }
