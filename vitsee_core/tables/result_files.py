"""Results read back from their files, with the sidecar and the replicates beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.tables import replicates
from vitsee_core.tables.columns import NUMBERS, TEXT
from vitsee_core.tables.files import read_file
from vitsee_core.tables.formats import read_rows
from vitsee_core.tables.results import Table
from vitsee_core.tables.sidecars import digest_of
from vitsee_stores.errors import VitseeError
from vitsee_stores.metadata import parse

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
