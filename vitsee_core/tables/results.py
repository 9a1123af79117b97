"""Tidy tables, and results read back from their files, with their sidecars.

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
from vitsee_core.tables import replicates
from vitsee_core.tables.columns import REPLICATES, build_column, cast_columns
from vitsee_core.tables.files import (
    TABLE_ENDINGS,
    is_stream,
    read_file,
    read_stream,
    write_files,
)
from vitsee_core.tables.formats import EXPECTED_TABLE, ending_of, read_table, table_bytes
from vitsee_core.tables.row_blocks import frame_of, require_columns, single_row_columns
from vitsee_core.tables.sidecars import describe_call, digest_of, sidecar_bytes
from vitsee_core.tables.weights_labels import with_distinct_weights
from vitsee_core.types import Float, pl
from vitsee_stores.errors import VitseeError
from vitsee_stores.metadata import parse
from vitsee_stores.notebook import format_cell, html_table, to_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import Store

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
        analysis: the analysis whose figure `plot` draws, if the table is a part of another one or
            was read from a file.

    Examples:
        >>> import vitsee
        >>> table = vitsee.attn_dist("vit.zarr")
        >>> table.to_csv("dist.csv")
        >>> vitsee.Table.read("dist.csv").filter(head=1)["site"].tolist()[:2]
        ['blocks.0', 'blocks.1']
        >>> len(table.to_pandas()) == len(table)
        True
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
        object.__setattr__(self, "frame", cast_columns(frame_of(self.frame)))

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Table:
        """Return a table of a handful of rows; a value that is None or missing is an empty cell.

        Args:
            rows: one mapping of column -> value per row; `replicates`: (blocks,) or None.
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
            require_columns(rows, names)
        if (
            any(row.get(REPLICATES) is not None for row in rows)
            and REPLICATES not in names
        ):
            names.append(REPLICATES)
        return cls(
            {n: build_column(n, [r.get(n) for r in rows]) for n in names},
            dict(notes or {}),
        )

    def with_distinct_weights(self, stores: Sequence[Store]) -> Table:
        """Return the table, whose column `weights` calls no two of the stores' weights alike:
        `runA/vit` and `runB/vit` where both folders are `vit`."""
        frame = with_distinct_weights(self.frame, stores)
        return self if frame is self.frame else replace(self, frame=frame)

    @classmethod
    def concat(
        cls,
        parts: Sequence[Table | pl.DataFrame | Mapping[str, Any]],
        columns: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Table:
        """Return the rows of several parts after one another; a column that a part lacks is empty.

        Args:
            parts: tables, frames, or blocks of rows: column -> array, or a scalar for all rows.
            columns: the columns and their order; by default as they appear.
            notes: facts about the whole table.
        """
        if not parts:
            return cls.from_rows((), columns or (), notes)
        frames: list[pl.DataFrame] = []
        # Consecutive single rows with the same columns become one frame: it takes hardly longer to
        # make than a frame of a single row, of which there may be thousands.
        for names, group in groupby(parts, single_row_columns):
            if names is not None:
                rows: list[Any] = list(group)
                cells = {name: [row[name] for row in rows] for name in names}
                frames.append(
                    pl.DataFrame([build_column(name, cells[name]) for name in names])
                )
                continue
            for part in group:
                if isinstance(part, Table):
                    frames.append(part.frame)
                elif isinstance(part, pl.DataFrame):
                    frames.append(cast_columns(part))
                else:
                    frames.append(frame_of(part))
        frame = pl.concat(frames, how="diagonal_relaxed")
        if columns is not None:
            order = [name for name in columns if name != REPLICATES]
            if REPLICATES in frame.columns:
                order.append(REPLICATES)
            lacking = [name for name in order if name not in frame.columns]
            frame = frame.with_columns(pl.lit(None).alias(name) for name in lacking)
            frame = frame.select(order)
        return cls(frame, dict(notes or {}))

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column as a numpy array (rows,).

        Floats are NaN where a cell is empty; integers with empty cells are objects with None; text
        is objects with "".
        """
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
        """Each row's value without one block of the images, (rows, blocks).

        NaN if a row has none; None if no row has any.
        """
        return replicates.replicates_array(self.frame)

    def filter(self, *predicates: Any, **constraints: Any) -> Table:
        """Return the rows that `polars.DataFrame.filter` keeps: expressions, or `column=value`."""
        return self.with_frame(self.frame.filter(*predicates, **constraints))

    def with_frame(self, frame: pl.DataFrame) -> Table:
        """Return a table of other rows or columns of the same analysis, with the same notes."""
        return Table(frame, self.notes, analysis=self.analysis_name)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Table:
        """Return the table in a file that a command or `write` wrote, with its sidecar's notes.

        Raises:
            VitseeError: the file is not a table.
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
        """Write the table in the format of the ending: .csv, .csv.gz, .tsv, .json or .parquet.

        Beside it goes its sidecar, `r.csv.json`: the notes and, if an analysis returned the table,
        how it was made, which `vitsee plot` and `vitsee report` read.

        Args:
            path: where the table goes.
            force: replace existing files.

        Raises:
            VitseeError: another ending, or a file exists and `force` is off.
        """
        path = Path(path)
        data = table_bytes(self.written, ending_of(path, TABLE_ENDINGS, "the table"))
        run_record: dict[str, Any] = {}
        if self.made_by is not None:
            analysis, arguments = self.made_by
            run_record = describe_call(analysis, arguments)
        sidecar = sidecar_bytes(self.written, self.notes, run_record, data)
        # The sidecar first: a table that is there has its sidecar.
        files = {path.with_name(f"{path.name}.json"): sidecar, path: data}
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
        """The unit of the steps in a table over a training: "step" or "epoch".

        It is also the name of the steps' column. "" for another table, or one of a single step.
        """
        unit = self.notes.get("unit")
        names = {*self.frame.columns}
        if not isinstance(unit, str) or not {unit, "metric", "value"} <= names:
            return ""
        has_sites = "site" in names or {"site_a", "site_b"} <= names
        if has_sites and self.frame[unit].n_unique() > 1:
            return unit
        return ""

    def plot(self, **options: Any) -> Figure:
        """Return the figure that the table's command draws; a notebook shows it.

        A table over a training is drawn as a chart along its steps.

        Args:
            options: options of the analysis' `plot`, or of `draw_over_training`.

        Raises:
            VitseeError: no analysis made this table, or it draws no figure.
        """
        name = self.analysis_name
        if name not in registry.names():
            reason = f" ({name} is no analysis that is installed)" if name else ""
            raise VitseeError(
                f"this table has no figure of its own{reason}; expected what an analysis "
                "returned, or Table.read of what a command wrote with -o"
            )
        analysis = registry.load(name)
        with registry.blamed(analysis.module):
            figure: Figure = analysis.draw(self, **options)
        return figure

    def map_text(self, change: Callable[[str], str]) -> Table:
        """Return the table with `change` applied to every text in it and in its notes."""
        text_columns = pl.col(pl.String, pl.Categorical)
        # Each distinct text once: a row per column, of the list of its texts.
        distinct = self.frame.select(
            text_columns.unique().drop_nulls().cast(pl.String).implode()
        )
        changed_columns = []
        for texts in distinct.get_columns():
            replacements = {text: change(text) for text in texts[0]}
            if any(old != new for old, new in replacements.items()):
                # By its index: to `pl.col` a name such as `^a$` is a pattern.
                column = pl.nth(self.frame.get_column_index(texts.name))
                dtype = self.frame.schema[texts.name]
                changed = column.cast(pl.String).replace(replacements).cast(dtype)
                changed_columns.append(changed)
        frame = self.frame.with_columns(changed_columns)
        return Table(frame, _mapped_notes(self.notes, change))

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame, with the notes in its `attrs`.

        Raises:
            VitseeError: pandas is not installed.
        """
        return to_frame({name: self[name] for name in self.written.columns}, self.notes)

    def __repr__(self) -> str:
        return f"<Table {len(self)} rows: {', '.join(self.written.columns)}>"

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show: the first and the last rows."""
        n = len(self)
        frame = self.written
        half = SHOWN_ROWS // 2
        is_cut = n > SHOWN_ROWS
        rows = pl.concat([frame.head(half), frame.tail(half)]) if is_cut else frame
        lines = [[format_cell(cell) for cell in row] for row in rows.rows()]
        if is_cut:
            lines.insert(half, ["…"] * frame.width)
        return html_table(f"{n} rows", frame.columns, lines)


def _mapped_notes(value: Any, change: Callable[[str], str]) -> Any:
    """Return notes with `change` applied to every text and key in them."""
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
        path: the table's file.
        table: its content.
        command: the command's name; "" without a sidecar.
        sidecar: the content of `r.csv.json`; empty without that file.
        changed: whether the table is not the one that the sidecar describes, or the sidecar was
            edited; False if the sidecar does not say.
        digest: hash of the table's bytes, and of the sidecar.
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
        """Return whether the table has all of these columns."""
        return all(name in self.table.frame.columns for name in columns)

    def describe_columns(self) -> str:
        """Return the names of the first columns, for a message."""
        names = self.table.frame.columns
        text = ", ".join(names[:SHOWN_COLUMNS])
        n_more = len(names) - SHOWN_COLUMNS
        if n_more > 0:
            text += f" and {n_more} more"
        return text


def read_result(path: str | Path) -> ResultFile:
    """Return the table in a file, read in the format of its ending, with its sidecar.

    The sidecar says what each column holds; without a sidecar the types are inferred from the
    cells. Data from a stream (`-`) is CSV without a sidecar.

    Raises:
        VitseeError: a folder, not in the format of its ending, no rows, rows of different lengths,
            or text where every command writes numbers.
        OSError: it cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        raise VitseeError(f"{path} is a folder; {EXPECTED_TABLE}")
    if is_stream(path):
        sidecar: dict[str, Any] = {}
        data = read_stream(path)
    else:
        sidecar = _read_sidecar(path)
        data = read_file(path)
    sha256 = hashlib.sha256(data).hexdigest()
    as_written = sidecar.get("sha256") == sha256
    frame = read_table(path, data, sidecar.get("columns", {}), as_written=as_written)
    # The first word that is not an option: `knn` of `vitsee -q knn a.zarr`.
    words = [str(word) for word in sidecar.get("command", ())[1:]]
    command = next((word for word in words if not word.startswith("-")), "")
    digest = digest_of(sidecar)
    table_changed = sidecar.get("sha256", sha256) != sha256
    sidecar_changed = sidecar.get("digest", digest) != digest
    return ResultFile(
        path=path,
        table=Table(frame, sidecar.get("notes", {})),
        command=command,
        sidecar=sidecar,
        changed=table_changed or sidecar_changed,
        digest=f"{sha256} {digest}",
    )


def read_replicates(file: ResultFile) -> Table:
    """Return the table of a result with its replicates, from the file beside it.

    Raises:
        VitseeError: there is no such file, or it belongs to another table.
    """
    path = replicates.replicates_path(file.path)
    if not path.exists():
        raise VitseeError(
            f"{file.path} has no replicates beside it ({path.name}); run its command "
            "again with --replicates, where it has that option"
        )
    other = read_table(path, read_file(path), file.sidecar.get("columns", {}))
    names = [name for name in other.columns if name.startswith(replicates.PREFIX)]
    frame = file.table.frame
    shared = [n for n in frame.columns if n in other.columns and n not in names]
    if not names or len(other) != len(frame) or "value" not in shared:
        raise VitseeError(f"{path} holds no replicates of the rows of {file.path}")
    # Rows have no key: the files belong together if all of their common columns agree.
    for name in shared:
        differ = frame[name].cast(other[name].dtype).ne_missing(other[name])
        if differ.any():
            row = int(differ.arg_max() or 0)
            raise VitseeError(
                f"{path} belongs to another table than {file.path}: row {row + 1} has "
                f"{name} {other[name][row]} in place of {frame[name][row]}; run the "
                "command again with --replicates --force"
            )
    values = pl.concat_list(pl.col(names).cast(pl.Float64))
    lists = other.select(values.alias(REPLICATES))
    return file.table.with_frame(pl.concat([frame, lists], how="horizontal"))


# Types of the sidecar's keys that are read back.
_SIDECAR_TYPES: dict[str, type] = {
    "command": list,
    "stores": list,
    "results": list,
    "parameters": dict,
    "columns": dict,
    "notes": dict,
    "figure": dict,
    "sha256": str,
    "digest": str,
    "created": str,
    "package": dict,
}


def _read_sidecar(path: Path) -> dict[str, Any]:
    """Return the content of a table's `r.csv.json`; empty if it is missing or not a sidecar.

    Keys whose values are of an unexpected type are left out.
    """
    try:
        document = parse(read_file(path.with_name(path.name + ".json")))
    except (OSError, ValueError, VitseeError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {
        key: value
        for key, value in document.items()
        if isinstance(value, _SIDECAR_TYPES.get(key, object))
    }
