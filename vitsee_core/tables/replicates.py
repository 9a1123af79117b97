"""The block replicates of a table, in a file of their own beside it.

`r.replicates.csv` beside `r.csv` (likewise for every ending of tables): the table's rows in their
order, what each is about, its `value`, and the value without each block of images, `without_0`,
`without_1`, ... From these anything computed from several rows (a difference, a mean over heads)
gets an interval over images:

    sqrt((m - 1) / m sum_b (r_b - mean r)^2),  r_b the same computed from the columns without_b
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float

WORD = "replicates"
PREFIX = "without_"
# Columns of a row that its replicates replace.
_SPREAD = frozenset(("std", "low", "high", "spread"))


def beside(path: Path) -> Path:
    """`r.replicates.csv` for `r.csv`, `r.replicates.csv.gz` for `r.csv.gz`."""
    end = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return path.with_name(f"{path.name.removesuffix(end)}.{WORD}{end}")


def as_columns(columns: dict[str, NDArray[Any]], replicates: Float) -> dict[str, NDArray[Any]]:
    """The columns of the file; replicates: (rows, blocks)."""
    kept = {name: values for name, values in columns.items() if name not in _SPREAD}
    return kept | {f"{PREFIX}{b}": values for b, values in enumerate(replicates.T)}


def stacked(found: Sequence[NDArray[Any] | None]) -> Float | None:
    """(rows, blocks) from one array per row, NaN where a row has none or fewer; None if none has
    any."""
    m = max((len(one) for one in found if one is not None), default=0)
    if not m:
        return None
    whole = np.full((len(found), m), np.nan)
    for row, one in zip(whole, found, strict=True):
        if one is not None:
            row[: len(one)] = one
    return whole


def joined(parts: Sequence[tuple[int, Float | None]]) -> Float | None:
    """The same for several tables' rows: (number of rows, their replicates)."""
    m = max((one.shape[1] for _, one in parts if one is not None), default=0)
    if not m:
        return None
    return np.concatenate(
        [
            np.full((n, m), np.nan)
            if one is None
            else np.pad(one, ((0, 0), (0, m - one.shape[1])), constant_values=np.nan)
            for n, one in parts
        ]
    )
