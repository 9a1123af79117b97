"""Grids of more than `MOST_SIDE` cells a side, as early layers of CNNs and small patches have, made
coarser: a shown patch is then the mean of s x s of the model's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.types import Float32, Mask

if TYPE_CHECKING:
    from vitsee_stores.layout import TokenLayout

MOST_SIDE = 40


def pooled_side(layout: TokenLayout) -> int:
    """The s: the smallest power of 2 that makes the grid small enough, 1 for most."""
    assert layout.grid is not None
    s = 1
    while -(-max(layout.grid) // s) > MOST_SIDE:
        s *= 2
    return s


def coarse_layout(layout: TokenLayout) -> TokenLayout:
    """The layout of the shown patches; the last row and column may be of fewer cells, and then
    reach beyond the grid."""
    s = pooled_side(layout)
    if s == 1:
        return layout
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = (-(-n // s) for n in layout.grid)
    y, x = layout.stride_px
    return replace(layout, grid=(rows, cols), stride_px=(s * y, s * x))


def pooled(x: Float32, counts: Mask, layout: TokenLayout) -> tuple[Float32, Mask]:
    """Means over those of s x s cells that count.

    Args:
        x: (images, cells, dim); rows that do not count may hold anything.
        counts: (images, cells).
        layout: of the site.

    Returns:
        (images, shown patches, dim), and which of them have a cell that counts.
    """
    s = pooled_side(layout)
    if s == 1:
        return x, counts
    assert layout.grid is not None
    rows, cols = layout.grid
    n, dim = len(x), x.shape[-1]
    kept = np.where(counts[..., np.newaxis], x, 0).reshape(n, rows, cols, dim)
    sums = np.add.reduceat(np.add.reduceat(kept, range(0, rows, s), 1), range(0, cols, s), 2)
    own = counts.reshape(n, rows, cols).astype(np.int64)
    shares = np.add.reduceat(np.add.reduceat(own, range(0, rows, s), 1), range(0, cols, s), 2)
    found: Float32 = (sums / np.maximum(shares, 1)[..., np.newaxis]).astype(np.float32)
    return found.reshape(n, -1, dim), (shares > 0).reshape(n, -1)
