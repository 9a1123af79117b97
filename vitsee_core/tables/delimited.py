"""Delimited text as any program writes it: the separator of its cells, and which are numbers.

Result tables, imports and neural responses are read by the same rules.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

NumberType = Callable[[str], Any]  # the polars type of a column's numbers, None for text
SEPARATORS = (",", ";", "\t", "|")
SHOWN_CHARACTERS = 60  # of a cell or a name in a message
MAX_CELL_CHARACTERS = 1 << 30  # Python's own limit is 128 KiB
BLANKS = " \t\u00a0"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SEPARATOR_LINE = re.compile(rb'"?sep=([,;|\t])"?\r?\n', re.IGNORECASE)  # Excel's

csv.field_size_limit(MAX_CELL_CHARACTERS)


class Cells(NamedTuple):
    """The cells of a delimited text.

    Attributes:
        frame: columns of text or numbers.
        decimal_comma: commas do not separate cells, so that one in a cell may be a number's.
    """

    frame: pl.DataFrame
    decimal_comma: bool


def read_cells(
    path: Path, data: bytes, ending: str, number_type: NumberType, expected: str
) -> Cells:
    """Return the cells of a delimited text, without the blanks around them.

    Before the text may stand a byte-order mark (UTF-8, UTF-16), and a line `sep=;`. Lines may end
    in CR LF, LF or CR. The separator is the ending's, or if the header has none of those, the most
    frequent of `SEPARATORS` in it.

    Args:
        path: named in messages.
        data: the bytes of the file.
        ending: .csv or .tsv.
        number_type: the type of a column that holds numbers as far as is known; a column with
            other cells is text.
        expected: ends the messages.

    Raises:
        VitseeError: columns of one name, or rows of different lengths.
        ValueError: it is not text.
    """
    separator, data = declared_separator(as_utf_8(data))
    if not data.strip():
        return Cells(pl.DataFrame(), decimal_comma=False)
    separator = separator or separator_of(data, "\t" if ending == ".tsv" else ",")
    data = _for_polars(data, separator)
    header = _first_row(data, separator)
    names = [name.strip(BLANKS) for name in header]
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise VitseeError(
            f"{path} has several columns named {repeated[0][:SHOWN_CHARACTERS]!r}; "
            f"{expected}"
        )
    _check_lengths(path, data, header, separator, expected)

    def type_of(header_cell: str) -> Any:
        """Return the type that polars parses below this cell of the header."""
        # What may have decimal commas is text to polars.
        if separator == ",":
            return number_type(header_cell.strip(BLANKS))
        return None

    frame = parse(data, header, separator, type_of)
    frame = frame.rename(dict(zip(header, names, strict=True)))
    frame = frame.with_columns(pl.col(pl.String).str.strip_chars(BLANKS))
    return Cells(frame, decimal_comma=separator != ",")


def parse(
    data: bytes, names: Sequence[str], separator: str, number_type: NumberType
) -> pl.DataFrame:
    """Return the cells below a header as numbers where `number_type` says so, else as text.

    If one of the former is not a number, all columns are text.

    Args:
        data: UTF-8 with a header, for polars.
        names: of the columns.
        separator: a single character.
        number_type: name -> polars type of the numbers, None for text.

    Raises:
        polars.exceptions.PolarsError: it is not such text.
    """
    schema = {name: number_type(name) or pl.String for name in names}
    try:
        return pl.read_csv(data, schema=schema, separator=separator, glob=False)
    except pl.exceptions.ComputeError:
        schema = dict.fromkeys(names, pl.String)
        return pl.read_csv(data, schema=schema, separator=separator, glob=False)


def as_numbers(cells: pl.Series, *, decimal_comma: bool) -> pl.Series | None:
    """Return a column of text as integers or floats, or None if a cell is something else.

    Args:
        cells: text; empty ones become null.
        decimal_comma: `1,5` is one and a half, if no cell of the column has a dot.
    """
    cells = cells.set(cells == "", None) if (cells == "").any() else cells
    # A cast that is not strict gives null where a cell is not a number.
    n_empty = cells.null_count()
    for dtype in (pl.Int64, pl.Float64):
        numbers = cells.cast(dtype, strict=False)
        if numbers.null_count() == n_empty:
            return numbers
    if not decimal_comma or cells.str.contains(".", literal=True).any():
        return None
    numbers = cells.str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
    return numbers if numbers.null_count() == n_empty else None


def as_utf_8(data: bytes) -> bytes:
    """Return the text in UTF-8 without a byte-order mark, its lines ended by LF.

    Raises:
        ValueError: it is not text.
    """
    if data.startswith(_UTF_16):
        data = data.decode("utf-16").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\0" in data:
        raise ValueError("it holds zero bytes, which no text has")
    return data if b"\n" in data else data.replace(b"\r", b"\n")


def declared_separator(data: bytes) -> tuple[str, bytes]:
    """Return the separator that a first line `sep=;` declares, "" without, and the text below."""
    first_line = _SEPARATOR_LINE.match(data)
    if first_line is None:
        return "", data
    return first_line[1].decode(), data[first_line.end() :]


def separator_of(data: bytes, preferred: str) -> str:
    """Return the separator of the header's cells: `preferred` if the header has it at all."""
    header = data.lstrip(b" \r\n").partition(b"\n")[0].decode()
    unquoted = re.sub(r'"[^"]*"', "", header)
    if preferred in unquoted:
        return preferred
    most_frequent = max(SEPARATORS, key=unquoted.count)
    return most_frequent if most_frequent in unquoted else preferred


def rows_of(
    data: bytes, separator: str, *, skip_blanks: bool = False, strict: bool = False
) -> Any:
    """Return Python's csv reader of the rows.

    Args:
        data: the text in UTF-8.
        separator: of the cells.
        skip_blanks: leave out blanks before cells.
        strict: raise csv.Error where quotes are not as they should be.
    """
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8", newline="")
    return csv.reader(
        text, delimiter=separator, skipinitialspace=skip_blanks, strict=strict
    )


def _first_row(data: bytes, separator: str) -> list[str]:
    """Return the cells of the header; a csv.Error becomes a ValueError."""
    try:
        return next(rows_of(data, separator), [])
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _for_polars(data: bytes, separator: str) -> bytes:
    """Return the text without blank lines, and without blanks beside quotes.

    Polars would take the former for rows, and the latter for text of the cell.
    """
    mark = re.escape(separator.encode())
    blank = rb"[ ]" if separator == "\t" else rb"[ \t]"
    blank_line = blank + rb"*\r?\n"
    if b'"' not in data:
        return re.sub(rb"(?:\A|(\r?\n))(?:%s)+" % blank_line, rb"\1", data)
    before_quote = rb'(?:\A|\n|%s)%s+"' % (mark, blank)
    behind_quote = rb'"%s+(?:%s|\r?\n|\Z)' % (blank, mark)
    irregular = rb"(?:\A|\n)%s|%s|%s" % (blank_line, before_quote, behind_quote)
    if re.search(irregular, data) is None:
        return data
    # Quotes with blanks beside them are rare: Python's reader, which is slow, writes all anew.
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    try:
        writer.writerows(row for row in rows_of(data, separator, skip_blanks=True) if row)
    except csv.Error as error:
        raise ValueError(str(error)) from None
    return text.getvalue().encode()


def _check_lengths(
    path: Path, data: bytes, header: list[str], separator: str, expected: str
) -> None:
    """Refuse rows of another length than the header's.

    Polars refuses longer rows and fills shorter ones up, so that the number of separators tells
    whether there are any; only then all rows are read to name the first.

    Raises:
        VitseeError: names the row.
    """
    unquoted = re.sub(rb'"[^"]*"', b"", data) if b'"' in data else data
    n_lines = unquoted.count(b"\n")
    if not unquoted.endswith(b"\n"):
        n_lines += 1
    if unquoted.count(separator.encode()) == n_lines * (len(header) - 1):
        return
    try:
        for number, row in enumerate(rows_of(data, separator)):
            if row and len(row) != len(header):
                raise VitseeError(
                    f"{path}, row {number} has {len(row)} cells, its header "
                    f"{len(header)}; {expected}"
                )
    except csv.Error as error:
        raise ValueError(str(error)) from None
