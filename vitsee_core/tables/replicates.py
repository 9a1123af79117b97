"""The block replicates of a table, in a file of their own beside it (a block jackknife).

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

from vitsee_core.tables.columns import REPLICATES, build_column
from vitsee_core.types import Float, pl

PREFIX = "without_"
# Columns of a row that its replicates replace.
_SPREAD = ("std", "low", "high", "spread")


def replicates_path(path: Path) -> Path:
    """Return the path of a table's replicates: `r.replicates.csv` for `r.csv`, and so on."""
    end = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return path.with_name(f"{path.name.removesuffix(end)}.{REPLICATES}{end}")


def expand_replicates(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame of the file: the column `replicates` becomes a column per block."""
    values = replicates_array(frame)  # (rows, blocks)
    assert values is not None
    blocks = pl.DataFrame({f"{PREFIX}{b}": block for b, block in enumerate(values.T)})
    other_columns = frame.drop(REPLICATES, *_SPREAD, strict=False)
    return pl.concat([other_columns, blocks.fill_nan(None)], how="horizontal")


def stack_replicates(arrays: Sequence[Float | None]) -> Float | None:
    """Return (rows, blocks) from one array (blocks,) per row.

    NaN where a row has none or fewer; None if no row has any.
    """
    return replicates_array(pl.DataFrame([build_column(REPLICATES, arrays)]))


def replicates_array(frame: pl.DataFrame) -> Float | None:
    """Return the lists of the column `replicates` as an array (rows, blocks).

    NaN where a row has none or fewer; None if no row has any.
    """
    if REPLICATES not in frame.columns:
        return None
    lengths = frame[REPLICATES].list.len().fill_null(0).to_numpy()
    n_blocks = int(lengths.max(initial=0))
    if not n_blocks:
        return None
    values = np.full((len(frame), n_blocks), np.nan)
    # A mask is filled row by row, in the order of the exploded lists.
    is_filled = np.arange(n_blocks) < lengths[:, None]
    values[is_filled] = frame[REPLICATES].filter(lengths > 0).explode().to_numpy()
    return values
