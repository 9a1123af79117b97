"""The tables of a report: their first rows, and where the whole of them is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitsee_core.report.materials import relative
from vitsee_core.report.pictures import carried
from vitsee_core.report.redrawing import Result
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.tables.results import Table
from vitsee_core.tables.sidecars import PYTHON
from vitsee_core.tables.text import visible

SHOWN_ROWS = 60
SPECIAL = re.compile(rb"[^\w.~,:;/ -]", re.ASCII)  # to be escaped in a URL
CARRIED_BYTES = 400_000  # a larger table is linked, not carried along


def link_of(path: Path, output: Path) -> tuple[str, str]:
    """The link by which the page finds the table: in itself where that is small, else beside it;
    and then what somebody has to know who sends the page away."""
    size = path.stat().st_size
    if size > CARRIED_BYTES:
        place = quote(relative(path, output.absolute().parent))
        return place, f"beside the page, {human_bytes(size)}"
    data = path.read_bytes()
    if path.suffix == ".csv":
        # Mostly digits and commas, which need no escape: shorter than base64.
        return f"data:text/csv,{SPECIAL.sub(_escaped, data).decode()}", ""
    return carried(data, "application/octet-stream"), ""


def _escaped(byte: re.Match[bytes]) -> bytes:
    return b"%%%02X" % ord(byte[0])


def command_of(result: Result) -> str:
    """The command, or the call in Python, that made a result; "" where it is not known."""
    if call := result.file.sidecar.get(PYTHON):
        return visible(str(call))
    return visible(shlex.join(map(str, result.file.sidecar.get("command", ()))))


def short_notes(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The notes of a table that are short enough to be read."""
    found = []
    for name, value in notes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= 600:
            found.append((visible(str(name)), visible(text)))
    return found


def first_rows(table: Table) -> dict[str, Any]:
    """The first rows, columns that are empty left out: header, cells with their sorting keys."""
    columns = [c for c in table.written.get_columns() if c.null_count() < len(c)]
    shown = table.written.select(column.name for column in columns).head(SHOWN_ROWS)
    return {
        "columns": [(visible(column.name), column.dtype.is_numeric()) for column in columns],
        "rows": [[_cell(value) for value in row] for row in shown.rows()],
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(str(value))
