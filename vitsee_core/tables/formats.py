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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from vitsee_core.tables.columns import cast_columns, declared_type
from vitsee_core.tables.delimited import (
    SHOWN_CHARACTERS,
    Cells,
    as_numbers,
    parse,
    read_cells,
)
from vitsee_core.tables.files import MAX_TABLE_BYTES, TABLE_ENDINGS
from vitsee_core.tables.text import FORMULA, QUOTED, STEERING, spreadsheet_cell, visible
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

FIGURE_ENDINGS = (".png", ".svg", ".pdf")
EXPECTED_TABLE = "expected a table that a vitsee command wrote with -o"


def ending_of(path: Path, endings: Sequence[str], subject: str) -> str:
    """Return the ending of a file's name, which may be in capitals, as one of `endings`.

    Args:
        path: the file.
        endings: the allowed ones, in lower case.
        subject: names the file's role in messages: "the table".

    Raises:
        VitseeError: the name ends otherwise.
    """
    name = path.name.lower()
    for ending in endings:
        # A name that is nothing but an ending is that of a hidden file.
        if name.endswith(ending) and len(name) > len(ending):
            return ending
    listed = endings[-1]
    if len(endings) > 1:
        listed = f"{', '.join(endings[:-1])} or {listed}"
    raise VitseeError(
        f"{subject} {path} is refused: expected a name that ends in {listed}"
    )


def stem_of(path: Path) -> str:
    """Return a file's name without the ending of a table: `r` of `r.csv` and of `r.csv.gz`."""
    return path.name[: len(path.name) - len(_table_ending(path))]


def _table_ending(path: Path) -> str:
    """Return the ending of a table's file, in lower case; "" of another file."""
    name = path.name.lower()
    return next((ending for ending in TABLE_ENDINGS if name.endswith(ending)), "")


# ------------------------------------------------------------------------------------ writing


def table_bytes(frame: pl.DataFrame, ending: str) -> bytes:
    """Return the table's file in the format of that ending, reproducible byte for byte."""
    if ending in (".json", ".parquet"):
        frame = _change_text(frame, visible, STEERING)
    if ending == ".json":
        # JSON has neither NaN nor infinity: they become null.
        finite = []
        for name, dtype in frame.schema.items():
            if dtype.is_float():
                number = pl.col(name)
                finite.append(pl.when(number.is_finite()).then(number))
        lines = frame.with_columns(finite).write_ndjson().splitlines()
        return ("[\n" + ",\n".join(lines) + "\n]\n").encode()
    buffer = io.BytesIO()
    if ending == ".parquet":
        frame.write_parquet(buffer)
        return buffer.getvalue()
    write_csv(frame, buffer, "\t" if ending == ".tsv" else ",")
    data = buffer.getvalue()
    if ending == ".csv.gz":
        return gzip.compress(data, mtime=0)  # no time: equal tables are equal files
    return data


def write_csv(frame: pl.DataFrame, file: IO[bytes], separator: str = ",") -> None:
    """Write a header and the rows; null is an empty cell."""
    safe = _change_text(frame, spreadsheet_cell, rf"{FORMULA}|{STEERING}")
    safe.write_csv(file, separator=separator)


def _change_text(
    frame: pl.DataFrame, change: Callable[[str], str], pattern: str
) -> pl.DataFrame:
    """Return the frame with text as strings; those that match the pattern are changed."""
    columns = []
    for column in frame.get_columns():
        if column.dtype in (pl.String, pl.Categorical):
            # Each distinct text once: there are far fewer than rows.
            texts = column.unique().cast(pl.String)
            matched = texts.filter(texts.str.contains(pattern).fill_null(False))
            column = column.cast(pl.String)
            if len(matched):
                column = column.replace({text: change(text) for text in matched})
        columns.append(column)
    return pl.DataFrame(columns)


def plain_json(value: Any) -> Any:
    """Return a value that is strict JSON: numbers that are not finite become None (null)."""
    if isinstance(value, Mapping):
        return {key: plain_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ------------------------------------------------------------------------------------ reading


def read_table(
    path: Path, data: bytes, kinds: Mapping[str, str], *, as_written: bool = False
) -> pl.DataFrame:
    """Return the frame of a table's file; a name without a known ending is read as CSV.

    `vitsee_core.tables.delimited` reads a CSV of another program. A column whose type neither its
    name nor the sidecar tells is integers or numbers if all of its cells are, else text.

    Args:
        path: named in messages.
        data: the file's bytes.
        kinds: column -> "text", "number", "integer" or "empty", from the sidecar.
        as_written: these are the bytes that the sidecar describes.

    Raises:
        VitseeError: not in the format of its ending, no rows, rows of different lengths, a column
            twice, or text where every command writes numbers.
    """
    ending = _table_ending(path) or ".csv"
    format_name = "CSV text" if ending.startswith(".csv") else f"{ending} table"
    decimal_comma = False
    try:
        if ending == ".parquet":
            frame = read_parquet(data)
        elif ending == ".json":
            frame = _from_records(data)
        else:
            frame, decimal_comma = _from_csv(path, data, ending, kinds, as_written)
    except (pl.exceptions.PolarsError, ValueError, OSError, EOFError, zlib.error):
        raise VitseeError(f"{path} is no {format_name}; {EXPECTED_TABLE}") from None
    if nested := [n for n, t in frame.schema.items() if t.is_nested() or t == pl.Binary]:
        raise VitseeError(
            f"{path}: column {nested[0][:SHOWN_CHARACTERS]} holds lists or bytes; "
            f"{EXPECTED_TABLE}"
        )
    if not len(frame):
        raise VitseeError(f"{path} has no rows; {EXPECTED_TABLE}")
    # The quote before text that a spreadsheet would run; of compressed bytes it is not known.
    may_be_quoted = ending == ".csv.gz" or (ending in (".csv", ".tsv") and b"'" in data)
    columns = []
    for column in frame.get_columns():
        dtype = _known_type(column.name, kinds)
        if column.dtype == pl.Categorical and dtype is not None and dtype.is_numeric():
            column = column.cast(pl.String)
        if column.dtype != pl.String:  # of Parquet or JSON, perhaps by another program
            columns.append(_convert_values(path, column, dtype))
            continue
        text = column
        if may_be_quoted and column.str.starts_with("'").any():
            text = column.str.replace(QUOTED, "$1")
        if dtype is not None and not dtype.is_numeric():
            columns.append(text)
        else:
            numbers = _parse_numbers(path, column, dtype, decimal_comma=decimal_comma)
            columns.append(text if numbers is None else numbers)
    return cast_columns(frame.with_columns(columns))


def read_parquet(data: bytes) -> pl.DataFrame:
    """Return the frame of a Parquet file.

    Raises:
        ValueError: it is not Parquet, or damaged.
    """
    # Polars prints its panics to stderr before it raises them: descriptor 2 leads to nowhere.
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        return pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"no Parquet file: {error}") from None
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _from_records(data: bytes) -> pl.DataFrame:
    """Return the frame of a list of records, its columns in the order of the first record."""
    list_start = re.match(rb"\s*\[\s*(?=[{\]])", data)
    if list_start is None:
        raise ValueError("no list of records")
    frame = pl.read_json(io.BytesIO(data), infer_schema_length=None)
    if not frame.width:
        return frame
    # Polars does not promise an order: the first record is parsed alone.
    first, _ = json.JSONDecoder().raw_decode(data[list_start.end() :].decode())
    return frame.select([*first, *sorted({*frame.columns} - {*first})])


def _from_csv(
    path: Path, data: bytes, ending: str, kinds: Mapping[str, str], as_written: bool
) -> Cells:
    """Return the cells of a CSV or TSV; columns of a known numeric type are parsed as such."""
    if ending == ".csv.gz":
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read(MAX_TABLE_BYTES)
        if len(data) == MAX_TABLE_BYTES:
            raise ValueError(f"more than {MAX_TABLE_BYTES} bytes")
        ending = ".csv"

    def number_type(name: str) -> Any:
        """Return the polars type of a column of numbers; None for any other column."""
        dtype = _known_type(name, kinds)
        return dtype if dtype is not None and dtype.is_numeric() else None

    if not as_written:
        return read_cells(path, data, ending, number_type, EXPECTED_TABLE)
    # What vitsee wrote needs no guesses about separators and blanks.
    separator = "\t" if ending == ".tsv" else ","
    lines = io.TextIOWrapper(io.BytesIO(data), "utf-8", newline="")
    names = next(csv.reader(lines, delimiter=separator), [])
    frame = parse(data, names, separator, number_type) if names else pl.DataFrame()
    return Cells(frame, decimal_comma=False)


def _known_type(name: str, kinds: Mapping[str, str]) -> Any:
    """Return the type of a column by the sidecar, else by its name; None if neither tells it."""
    types = {"text": pl.String, "number": pl.Float64, "integer": pl.Int64}
    sidecar_type = types.get(str(kinds.get(name, "")))
    return declared_type(name) if sidecar_type is None else sidecar_type()


def _convert_values(path: Path, column: pl.Series, dtype: Any) -> pl.Series:
    """Return a column that is not of strings, with text where the known type is text.

    Raises:
        VitseeError: times or truth values where numbers are expected.
    """
    if dtype is None or column.dtype == pl.Null:
        return column
    if not dtype.is_numeric():
        return column if column.dtype == pl.Categorical else column.cast(pl.String)
    if column.dtype.is_numeric():
        return column
    name = column.name[:SHOWN_CHARACTERS]
    raise VitseeError(
        f"{path}: column {name} is of type {column.dtype}; expected numbers"
    )


def _parse_numbers(
    path: Path, column: pl.Series, dtype: Any, *, decimal_comma: bool
) -> pl.Series | None:
    """Return a column of strings as numbers, empty cells null; None if it may be text and is.

    Args:
        path: named in messages.
        column: strings.
        dtype: of the numbers that the column should hold; None if its type is not known.
        decimal_comma: `1,5` is one and a half.

    Raises:
        VitseeError: a text where numbers are expected.
    """
    cells = column.set(column == "", None) if (column == "").any() else column
    n_empty = cells.null_count()
    if n_empty == len(cells):
        empty = pl.repeat(None, n_empty, dtype=dtype or pl.Null, eager=True)
        return empty.alias(column.name)
    numbers = as_numbers(cells, decimal_comma=decimal_comma)
    if numbers is not None or dtype is None:
        return numbers
    is_number = cells.cast(pl.Float64, strict=False).is_not_null()
    texts = cells.filter(~is_number & cells.is_not_null())
    name = column.name[:SHOWN_CHARACTERS]
    text = texts[0][:SHOWN_CHARACTERS]
    raise VitseeError(f"{path}: column {name} has the text {text!r}; expected numbers")
