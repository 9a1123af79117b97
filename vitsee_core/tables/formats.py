"""How a table is written: the ending of its file's name chooses the format.

    .csv      comma-separated, UTF-8, one line per row
    .csv.gz   the same, compressed
    .tsv      the same with tabs
    .json     a list of records, one a line; an empty cell is null
    .parquet  typed columns, an empty cell null; needs pyarrow

Numbers are written with as many digits as bring back the same float64; NaN is an empty cell. In
text, control characters are written out (`\\x1b`); in .csv, .csv.gz and .tsv a single quote stands
before text that a spreadsheet would take for a formula (see `vitsee_core.tables.text`).
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.tables.files import MOST_BYTES, read_file
from vitsee_core.tables.text import from_cell, spreadsheet_cell, visible
from vitsee_stores.errors import VitseeError

Columns = Mapping[str, NDArray[Any]]

TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".json", ".parquet")
FIGURE_ENDINGS = (".png", ".svg", ".pdf")
NO_PYARROW = "pyarrow is not installed; run: pip install pyarrow"


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


def table_ending(path: Path, what: str = "the table") -> str:
    """The ending that selects a table's format. Raises VitseeError: an unknown one, or .parquet
    without pyarrow."""
    ending = ending_of(path, TABLE_ENDINGS, what)
    if ending == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise VitseeError(f"{path}: {NO_PYARROW}, or name a .csv")
    return ending


def table_bytes(columns: Columns, ending: str) -> bytes:
    """The table in the format of that ending, reproducible byte for byte."""
    if ending == ".json":
        return _json(columns)
    if ending == ".parquet":
        return _parquet(columns)
    text = io.StringIO()
    write_csv(columns, text, "\t" if ending == ".tsv" else ",")
    data = text.getvalue().encode()
    return gzip.compress(data, mtime=0) if ending == ".csv.gz" else data


def write_csv(columns: Columns, file: IO[str], delimiter: str = ",") -> None:
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    lists = (map(_cell, values.tolist()) for values in columns.values())
    writer.writerows(zip(*lists, strict=True))


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return spreadsheet_cell(value)
    if value is None or value != value:
        return ""
    return repr(float(value)) if isinstance(value, float) else value


def plain_json(value: Any) -> Any:
    """`value` in strict JSON: non-finite numbers become null."""
    if isinstance(value, Mapping):
        return {key: plain_json(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return visible(value) if isinstance(value, str) else plain_json(value)


def _json(columns: Columns) -> bytes:
    names = list(columns)
    rows = zip(*(map(_shown, values.tolist()) for values in columns.values()), strict=True)
    records = (json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    return ("[\n" + ",\n".join(records) + "\n]\n").encode()


def _parquet(columns: Columns) -> bytes:
    import pyarrow
    import pyarrow.parquet

    arrays = {}
    for name, values in columns.items():
        cells = [_shown(value) for value in values.tolist()]
        kind = pyarrow.float64() if np.issubdtype(values.dtype, np.floating) else None
        try:
            arrays[name] = pyarrow.array(cells, kind)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # words beside numbers
            arrays[name] = pyarrow.array([None if c is None else str(c) for c in cells])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), buffer)
    return buffer.getvalue()


def read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table's file, each cell as its text in a CSV ("" for an empty one). A
    name without a known ending is read as CSV.

    Raises:
        VitseeError: not in the format of its ending, or .parquet without pyarrow.
        OSError: it cannot be opened.
    """
    name = path.name.lower()
    ending = next((e for e in TABLE_ENDINGS if name.endswith(e)), ".csv")
    data = read_file(path)
    try:
        if ending == ".json":
            return _from_records(json.loads(data))
        if ending == ".parquet":
            return _from_parquet(path, data)
        return _from_csv(data, ending)
    except (ValueError, EOFError, OSError, csv.Error, RecursionError):
        kind = "CSV text" if ending.startswith(".csv") else f"{ending} table"
        raise VitseeError(f"{path} is no {kind}; expected what vitsee wrote with -o") from None


def _from_csv(data: bytes, ending: str) -> tuple[list[str], list[list[str]]]:
    if ending == ".csv.gz":
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read(MOST_BYTES)
        if len(data) == MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
    text = data.decode("utf-8-sig")
    delimiter = "\t" if ending == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    lines = [
        [from_cell(cell) if cell[:1] == "'" else cell for cell in line] for line in reader if line
    ]
    return (lines[0], lines[1:]) if lines else ([], [])


def _from_records(records: Any) -> tuple[list[str], list[list[str]]]:
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError("no list of records")
    names = list(records[0]) if records else []
    if any(list(record) != names for record in records):
        raise ValueError("records with different names")
    return names, [[_text(value) for value in record.values()] for record in records]


def _from_parquet(path: Path, data: bytes) -> tuple[list[str], list[list[str]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise VitseeError(f"{path}: {NO_PYARROW}") from None
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    columns = [[_text(value) for value in column.to_pylist()] for column in table.columns]
    return list(table.column_names), [list(row) for row in zip(*columns, strict=True)]


def _text(value: Any) -> str:
    """A cell of JSON or Parquet as text."""
    if isinstance(value, (list, dict)):
        raise ValueError("a cell that is a list")
    return str(_cell(value)) if not isinstance(value, str) else value
