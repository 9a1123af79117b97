"""How a table is written and read: the ending of its file's name chooses the format.

    .csv      comma-separated, UTF-8, one line per row
    .csv.gz   the same, compressed
    .tsv      the same with tabs
    .json     a list of records, one a line; an empty cell is null
    .parquet  typed columns, an empty cell null

Numbers are written with as many digits as bring back the same float64. In text, control characters
are written out (`\\x1b`); in .csv, .csv.gz and .tsv a single quote stands before text that a
spreadsheet would take for a formula (see `vitsee_core.tables.text`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from vitsee_core.tables.columns import declared_type, typed
from vitsee_core.tables.delimited import (
    SHOWN_CHARACTERS,
    Cells,
    as_numbers,
    parse,
    read_cells,
)
from vitsee_core.tables.files import MOST_BYTES, TABLE_ENDINGS
from vitsee_core.tables.text import FORMULA, QUOTED, STEERING, spreadsheet_cell, visible
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

FIGURE_ENDINGS = (".png", ".svg", ".pdf")
WRITTEN = "expected a table that a vitsee command wrote with -o"


def ending_of(path: Path, known: Sequence[str], what: str) -> str:
    """The one of the `known` endings that a file's name has, in any case. Raises VitseeError: none
    of them; the message names what was expected of `what`."""
    name = path.name.lower()
    for ending in known:
        if name.endswith(ending) and len(name) > len(ending):
            return ending
    listed = f"{', '.join(known[:-1])} or {known[-1]}" if len(known) > 1 else known[0]
    raise VitseeError(f"{what} {path} is refused: expected a name that ends in {listed}")


def stem_of(path: Path) -> str:
    """A file's name without the ending of a table: `r` of `r.csv` and of `r.csv.gz`."""
    ending = next((e for e in TABLE_ENDINGS if path.name.lower().endswith(e)), "")
    return path.name[: len(path.name) - len(ending)]


# ------------------------------------------------------------------------------------ writing


def table_bytes(frame: pl.DataFrame, ending: str) -> bytes:
    """The table in the format of that ending, reproducible byte for byte."""
    if ending in (".json", ".parquet"):
        frame = _with_text(frame, visible, STEERING)
    if ending == ".json":
        lines = frame.with_columns(_finite(frame)).write_ndjson().splitlines()
        return ("[\n" + ",\n".join(lines) + "\n]\n").encode()
    buffer = io.BytesIO()
    if ending == ".parquet":
        frame.write_parquet(buffer)
        return buffer.getvalue()
    write_csv(frame, buffer, "\t" if ending == ".tsv" else ",")
    data = buffer.getvalue()
    if ending == ".csv.gz":
        return gzip.compress(data, mtime=0)
    return data


def write_csv(frame: pl.DataFrame, file: IO[bytes], separator: str = ",") -> None:
    """A header and the rows; an empty cell for null."""
    safe = _with_text(frame, spreadsheet_cell, rf"{FORMULA}|{STEERING}")
    safe.write_csv(file, separator=separator)


def _with_text(frame: pl.DataFrame, change: Any, where: str) -> pl.DataFrame:
    """The frame with its text as strings, in which `change` is applied to what `where` matches."""
    columns = []
    for column in frame.get_columns():
        if column.dtype in (pl.String, pl.Categorical):
            texts = column.unique().cast(pl.String)
            matched = texts.filter(texts.str.contains(where).fill_null(False))
            column = column.cast(pl.String)
            if len(matched):
                column = column.replace({text: change(text) for text in matched})
        columns.append(column)
    return pl.DataFrame(columns)


def _finite(frame: pl.DataFrame) -> list[pl.Expr]:
    numbers = [name for name, kind in frame.schema.items() if kind.is_float()]
    return [pl.when(pl.col(name).is_finite()).then(pl.col(name)) for name in numbers]


def plain_json(value: Any) -> Any:
    """`value` in strict JSON: non-finite numbers become null."""
    if isinstance(value, Mapping):
        return {key: plain_json(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ------------------------------------------------------------------------------------ reading


def read_table(
    path: Path, data: bytes, kinds: Mapping[str, str], *, as_written: bool = False
) -> pl.DataFrame:
    """The frame of a table's file; a name without a known ending is read as CSV.

    A CSV of another program is read as `vitsee_core.tables.delimited` says. A column of which
    nobody says what it holds is integers or numbers where all of its cells are, else text.

    Args:
        path: named in messages.
        data: the file's bytes.
        kinds: column -> text, number, integer or empty, of the sidecar.
        as_written: these are the bytes that the sidecar describes.

    Raises:
        VitseeError: not in the format of its ending, no rows, rows of different lengths, a column
            twice, or text where every command writes numbers.
    """
    ending = next((e for e in TABLE_ENDINGS if path.name.lower().endswith(e)), ".csv")
    kind = "CSV text" if ending.startswith(".csv") else f"{ending} table"
    try:
        decimal_comma = False
        if ending == ".parquet":
            frame = read_parquet(data)
        elif ending == ".json":
            frame = _from_records(data)
        else:
            frame, decimal_comma = _from_csv(path, data, ending, kinds, as_written)
    except (pl.exceptions.PolarsError, ValueError, OSError, EOFError, zlib.error):
        raise VitseeError(f"{path} is no {kind}; {WRITTEN}") from None
    if nested := [n for n, t in frame.schema.items() if t.is_nested() or t == pl.Binary]:
        raise VitseeError(
            f"{path}: column {nested[0][:SHOWN_CHARACTERS]} holds lists or bytes; {WRITTEN}"
        )
    if not len(frame):
        raise VitseeError(f"{path} has no rows; {WRITTEN}")
    quoted = ending == ".csv.gz" or (ending in (".csv", ".tsv") and b"'" in data)
    columns = [
        _as(path, column, kinds, quoted=quoted, decimal_comma=decimal_comma)
        for column in frame.get_columns()
    ]
    return typed(frame.with_columns(columns))


def read_parquet(data: bytes) -> pl.DataFrame:
    """The frame of a Parquet file. Raises ValueError: it is none, or damaged."""
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)  # polars prints its panics before it raises them
        return pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"no Parquet file: {error}") from None
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _from_records(data: bytes) -> pl.DataFrame:
    """The frame of a list of records, its columns in the order of the first."""
    if not (begin := re.match(rb"\s*\[\s*(?=[{\]])", data)):
        raise ValueError("no list of records")
    frame = pl.read_json(io.BytesIO(data), infer_schema_length=None)
    if not frame.width:
        return frame
    first, _ = json.JSONDecoder().raw_decode(data[begin.end() :].decode())
    return frame.select([*first, *sorted({*frame.columns} - {*first})])


def _from_csv(
    path: Path, data: bytes, ending: str, kinds: Mapping[str, str], as_written: bool
) -> Cells:
    """The cells of a CSV, those of columns that are said to hold numbers already as such."""
    if ending == ".csv.gz":
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read(MOST_BYTES)
        if len(data) == MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        ending = ".csv"

    def number_type(name: str) -> Any:
        kind = _type_of(name, kinds)
        return kind if kind is not None and kind.is_numeric() else None

    if not as_written:
        return read_cells(path, data, ending, number_type, WRITTEN)
    separator = "\t" if ending == ".tsv" else ","
    lines = io.TextIOWrapper(io.BytesIO(data), "utf-8", newline="")
    names = next(csv.reader(lines, delimiter=separator), [])
    frame = parse(data, names, separator, number_type) if names else pl.DataFrame()
    return Cells(frame, decimal_comma=False)


def _type_of(name: str, kinds: Mapping[str, str]) -> Any:
    """The type of a column by the sidecar, else as every table has it; None if neither says."""
    types = {"text": pl.String, "number": pl.Float64, "integer": pl.Int64}
    told = types.get(str(kinds.get(name, "")))
    return declared_type(name) if told is None else told()


def _as(
    path: Path,
    column: pl.Series,
    kinds: Mapping[str, str],
    *,
    quoted: bool,
    decimal_comma: bool,
) -> pl.Series:
    """A column as its type. quoted: text that a spreadsheet would run begins with a quote;
    decimal_comma: see `as_numbers`. Raises VitseeError: text, times or truth values where numbers
    are expected."""
    wanted = _type_of(column.name, kinds)
    name = column.name[:SHOWN_CHARACTERS]
    if column.dtype == pl.Categorical and wanted is not None and wanted.is_numeric():
        column = column.cast(pl.String)
    if column.dtype != pl.String:  # of Parquet or JSON, perhaps by another program
        if wanted is None or column.dtype == pl.Null:
            return column
        if not wanted.is_numeric():
            if column.dtype == pl.Categorical:
                return column
            return column.cast(pl.String)
        if column.dtype.is_numeric():
            return column
        raise VitseeError(
            f"{path}: column {name} is of type {column.dtype}; expected numbers"
        )
    if quoted and column.str.starts_with("'").any():
        text = column.str.replace(QUOTED, "$1")
    else:
        text = column
    if wanted is not None and not wanted.is_numeric():
        return text
    given = column.set(column == "", None) if (column == "").any() else column
    n = given.null_count()
    if n == len(given):
        return pl.repeat(None, n, dtype=wanted or pl.Null, eager=True).alias(column.name)
    numbers = as_numbers(given, decimal_comma=decimal_comma)
    if numbers is not None:
        return numbers
    if wanted is None:
        return text
    odd = given.filter(
        given.cast(pl.Float64, strict=False).is_null() & given.is_not_null()
    )
    shown = odd[0][:SHOWN_CHARACTERS]
    raise VitseeError(f"{path}: column {name} has the text {shown!r}; expected numbers")
