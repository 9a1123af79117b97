"""Blocks of rows, column -> array or scalar, as frames of polars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitsee_core.runtime.parameters import DeclarationError
from vitsee_core.tables.columns import REPLICATES, build_column, has_value
from vitsee_core.types import pl


def require_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Refuse rows with a value outside of the columns, which would be lost.

    Raises:
        DeclarationError: names the first such value.
    """
    columns = {*names, REPLICATES}
    for row in rows:
        for name, value in row.items():
            if name not in columns and has_value(value):
                raise DeclarationError(
                    f"rows have {name!r}, which is not among the columns; expected some "
                    f"of {', '.join(names)}"
                )


def frame_of(block: pl.DataFrame | Mapping[str, Any]) -> pl.DataFrame:
    """Return the frame of a block of columns, or a frame as it is.

    A block's columns are arrays and sequences of one length, and scalars that hold for every row.

    Raises:
        ValueError: the columns have different lengths.
    """
    if isinstance(block, pl.DataFrame):
        return block
    # An array (blocks,) of replicates is one cell of a single row, not a column.
    if single_row_columns(block) and isinstance(block.get(REPLICATES), np.ndarray):
        block = {**block, REPLICATES: [block[REPLICATES]]}
    columns = {
        name: build_column(name, value)
        for name, value in block.items()
        if _is_column(value)
    }
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of one length were expected, not {lengths}")
    if lengths:
        n = next(iter(lengths.values()))
    else:
        n = 1 if block else 0  # scalars alone are one row
    series = []
    for name, value in block.items():
        if name in columns:
            series.append(columns[name])
        else:
            series.append(build_column(name, [value]).new_from_index(0, n))
    return pl.DataFrame(series)


def single_row_columns(block: Any) -> tuple[str, ...] | None:
    """Return the columns of a block that is a single row; None for any other block.

    The replicates of a single row are (blocks,).
    """
    if not isinstance(block, Mapping) or not block:
        return None
    for name, value in block.items():
        is_column = np.ndim(value) > 1 if name == REPLICATES else _is_column(value)
        if is_column:
            return None
    return tuple(block)


def _is_column(value: Any) -> bool:
    """Return whether a value is a column, rather than a scalar or a text."""
    return not isinstance(value, str) and (
        hasattr(value, "__len__") and np.ndim(value) != 0
    )
