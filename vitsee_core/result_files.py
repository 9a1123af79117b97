"""Results read back from their files, with the sidecar where there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.formats import read_rows
from vitsee_core.results import Table
from vitsee_stores.errors import VitseeError

# Never numbers, whatever they look like: a store may be called 5.
TEXT = frozenset(
    (
        *("store", "model", "site", "block", "metric", "spread", "class", "token", "baseline"),
        *("store_a", "model_a", "site_a", "block_a", "store_b", "model_b", "site_b", "block_b"),
    )
)
# Always numbers, empty for NaN: a whole column of them may be empty.
NUMBERS = frozenset(
    (
        *("depth", "rel_depth", "value", "std", "low", "high", "n_images"),
        *("depth_a", "rel_depth_a", "depth_b", "rel_depth_b"),
    )
)
SHOWN_COLUMNS = 8


@dataclass(frozen=True)
class ResultFile:
    """A table that a command wrote. command: the command's name and sidecar: the content of
    `r.csv.json`; "" and empty without that file."""

    path: Path
    table: Table
    command: str
    sidecar: dict[str, Any]

    def has(self, columns: Sequence[str]) -> bool:
        """Whether the table has all these columns."""
        return all(name in self.table.columns for name in columns)

    def describe_columns(self) -> str:
        """The first of its columns, for a message."""
        names = list(self.table.columns)
        more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
        return ", ".join(names[:SHOWN_COLUMNS]) + more


def read_result(path: str | Path) -> ResultFile:
    """The table in a file, in the format that its ending says, and how it was made.

    A column of numbers is float64 (an empty cell NaN) or, where all of it are whole numbers, int64
    (an object array with None where a cell is empty); every other column is text.

    Raises:
        VitseeError: a folder, not what its ending says, no rows, rows of different lengths, or
            text where every command writes numbers.
        OSError: it cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        raise VitseeError(f"{path} is a folder; expected a CSV that a vitsee command wrote with -o")
    header, body = read_rows(path)
    if not body:
        raise VitseeError(f"{path} has no rows; expected a CSV that a vitsee command wrote with -o")
    for number, line in enumerate(body, 1):
        if len(line) != len(header):
            raise VitseeError(
                f"{path}, row {number} has {len(line)} cells, its header {len(header)}; "
                "expected a CSV that a vitsee command wrote with -o"
            )
    columns = {
        name: _column(path, name, [line[i] for line in body]) for i, name in enumerate(header)
    }
    sidecar = _sidecar(path)
    words = sidecar.get("command")
    typed = map(str, words[1:]) if isinstance(words, list) else ()
    command = next((word for word in typed if not word.startswith("-")), "")  # vitsee -q knn ...
    notes = sidecar.get("notes")
    table = Table(columns, notes if isinstance(notes, dict) else {})
    return ResultFile(path, table, command, sidecar)


def _column(path: Path, name: str, cells: list[str]) -> NDArray[Any]:
    if name in TEXT or not any(cells):
        empty = np.full(len(cells), np.nan) if name in NUMBERS else np.array(cells)
        return np.array(cells, object) if name in TEXT else empty
    for kind in (int, float):
        try:
            values = [kind(cell) if cell else None for cell in cells]
        except ValueError:
            continue
        if kind is float:
            return np.array([np.nan if v is None else v for v in values], np.float64)
        return np.array(values, object if None in values else np.int64)
    if name in NUMBERS:
        raise VitseeError(
            f"{path}: column {name} has the text {_first_text(cells)!r}; expected numbers"
        )
    return np.array(cells, object)


def _first_text(cells: list[str]) -> str:
    """The first cell that is no number."""
    for cell in filter(None, cells):
        try:
            float(cell)
        except ValueError:
            return cell
    return ""


def _sidecar(path: Path) -> dict[str, Any]:
    """What stands beside the CSV; nothing where it is missing or not ours."""
    try:
        found = json.loads(path.with_name(path.name + ".json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
