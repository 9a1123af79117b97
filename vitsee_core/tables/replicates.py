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

import numpy as np

from vitsee_core.tables.columns import REPLICATES, column_of
from vitsee_core.types import Float, pl

WORD = REPLICATES
PREFIX = "without_"
# Columns of a row that its replicates replace.
_SPREAD = ("std", "low", "high", "spread")


def beside(path: Path) -> Path:
    """`r.replicates.csv` for `r.csv`, `r.replicates.csv.gz` for `r.csv.gz`."""
    end = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return path.with_name(f"{path.name.removesuffix(end)}.{WORD}{end}")


def as_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns of the file: those of a frame with the column `replicates`, one per block."""
    each = array_of(frame)
    assert each is not None
    blocks = pl.DataFrame({f"{PREFIX}{b}": values for b, values in enumerate(each.T)})
    kept = frame.drop(REPLICATES, *_SPREAD, strict=False)
    return pl.concat([kept, blocks.fill_nan(None)], how="horizontal")


def stacked(found: Sequence[Float | None]) -> Float | None:
    """(rows, blocks) from one array per row, NaN where a row has none or fewer; None if none has
    any."""
    return array_of(pl.DataFrame([column_of(REPLICATES, found)]))


def array_of(frame: pl.DataFrame) -> Float | None:
    """(rows, blocks) the lists of the column `replicates`, NaN where a row has none or fewer; None
    if none has any."""
    if REPLICATES not in frame.columns:
        return None
    lengths = frame[REPLICATES].list.len().fill_null(0).to_numpy()
    m = int(lengths.max(initial=0))
    if not m:
        return None
    whole = np.full((len(frame), m), np.nan)
    whole[np.arange(m) < lengths[:, None]] = (
        frame[REPLICATES].filter(lengths > 0).explode().to_numpy()
    )
    return whole
