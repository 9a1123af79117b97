"""Delimited text as any program writes it: which character separates cells, and which cells are
numbers. Result tables, imports and neural responses are read by the same rules."""

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
    """frame: a column of text or numbers each; decimal_comma: whether a comma in a cell can be that
    of a number, as commas do not separate cells."""

    frame: pl.DataFrame
    decimal_comma: bool


def read_cells(
    path: Path, data: bytes, ending: str, number_type: NumberType, expected: str
) -> Cells:
    """The cells of a delimited text, without the blanks around them.

    Before the text may stand a byte-order mark (UTF-8, UTF-16), and a line `sep=;`. Lines may end
    in CR LF, LF or CR. The separator is the ending's, or if the header has none of those, the most
    frequent of `SEPARATORS` in it.

    Args:
        path: named in messages.
        data: of the file.
        ending: .csv or .tsv.
        number_type: the type of a column that holds numbers as far as is known; a column with
            other cells is text.
        expected: ends the messages.

    Raises:
        VitseeError: columns of one name, or rows of different lengths.
        ValueError: it is not text.
    """
    data = _as_utf_8(data)
    separator = ""
    if first_line := _SEPARATOR_LINE.match(data):
        separator = first_line[1].decode()
        data = data[first_line.end() :]
    if not data.strip():
        return Cells(pl.DataFrame(), decimal_comma=False)
    separator = separator or _separator_of(data, "\t" if ending == ".tsv" else ",")
    data = _for_polars(data, separator)
    header = _first_row(data, separator)
    names = [name.strip(BLANKS) for name in header]
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise VitseeError(
            f"{path} has several columns named {repeated[0][:SHOWN_CHARACTERS]!r}; {expected}"
        )
    _check_lengths(path, data, header, separator, expected)

    def type_of(header_cell: str) -> Any:
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
    """The cells below a header as numbers where `number_type` says so, else as text; all as text if
    one of them is not a number. Raises polars.exceptions.PolarsError: it is no such text."""
    schema = {name: number_type(name) or pl.String for name in names}
    try:
        return pl.read_csv(data, schema=schema, separator=separator, glob=False)
    except pl.exceptions.ComputeError:
        schema = dict.fromkeys(names, pl.String)
        return pl.read_csv(data, schema=schema, separator=separator, glob=False)


def as_numbers(cells: pl.Series, *, decimal_comma: bool) -> pl.Series | None:
    """A column of text as integers or floats, empty cells null; None if a cell is something else.
    decimal_comma: `1,5` is one and a half, where no cell of the column has a dot."""
    cells = cells.set(cells == "", None) if (cells == "").any() else cells
    n_empty = cells.null_count()
    for kind in (pl.Int64, pl.Float64):
        numbers = cells.cast(kind, strict=False)
        if numbers.null_count() == n_empty:
            return numbers
    if not decimal_comma or cells.str.contains(".", literal=True).any():
        return None
    numbers = cells.str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
    return numbers if numbers.null_count() == n_empty else None


def _as_utf_8(data: bytes) -> bytes:
    """The text in UTF-8 without a byte-order mark, its lines ended by LF. Raises ValueError: it is
    not text."""
    if data.startswith(_UTF_16):
        data = data.decode("utf-16").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\0" in data:
        raise ValueError("it holds zero bytes, which no text has")
    return data if b"\n" in data else data.replace(b"\r", b"\n")


def _separator_of(data: bytes, preferred: str) -> str:
    """The separator of the header's cells."""
    line = data.lstrip(b" \r\n").partition(b"\n")[0].decode()
    bare = re.sub(r'"[^"]*"', "", line)
    if preferred in bare:
        return preferred
    most_frequent = max(SEPARATORS, key=bare.count)
    return most_frequent if most_frequent in bare else preferred


def _rows_of(data: bytes, separator: str, *, skip_blanks: bool = False) -> Any:
    """The rows as Python's reader has them. skip_blanks: those before a cell."""
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8", newline="")
    return csv.reader(text, delimiter=separator, skipinitialspace=skip_blanks)


def _first_row(data: bytes, separator: str) -> list[str]:
    try:
        return next(_rows_of(data, separator), [])
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _for_polars(data: bytes, separator: str) -> bytes:
    """The text without blank lines, and without blanks beside quotes, which polars would take for
    rows and for text."""
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
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    try:
        writer.writerows(
            row for row in _rows_of(data, separator, skip_blanks=True) if row
        )
    except csv.Error as error:
        raise ValueError(str(error)) from None
    return text.getvalue().encode()


def _check_lengths(
    path: Path, data: bytes, header: list[str], separator: str, expected: str
) -> None:
    """Refuse rows of another length than the header's. Polars refuses longer ones and fills shorter
    ones up, so that the number of separators tells whether there are any."""
    bare = re.sub(rb'"[^"]*"', b"", data) if b'"' in data else data
    lines = bare.count(b"\n") + (not bare.endswith(b"\n"))
    if bare.count(separator.encode()) == lines * (len(header) - 1):
        return
    try:
        for number, row in enumerate(_rows_of(data, separator)):
            if row and len(row) != len(header):
                raise VitseeError(
                    f"{path}, row {number} has {len(row)} cells, its header {len(header)}; "
                    f"{expected}"
                )
    except csv.Error as error:
        raise ValueError(str(error)) from None
