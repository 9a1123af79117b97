"""Spearman's rank correlation of two numbers of each head, over all heads and within blocks."""

from __future__ import annotations

import numpy as np

from vitsee_core.types import Float, Integers


def rank_correlation(x: Float, y: Float, blocks: Integers | None = None) -> Float:
    """(replicates,) correlation of the ranks of x and y (heads, replicates); NaN where either is
    constant.

    Args:
        x, y: heads with a NaN in any replicate are left out.
        blocks: (heads,) ranks are those within a block, less their mean: what blocks differ in does
            not count.
    """
    from scipy.stats import rankdata

    keep = np.isfinite(x).all(1) & np.isfinite(y).all(1)
    x, y = x[keep], y[keep]
    of = np.zeros(len(x), np.int64) if blocks is None else blocks[keep]
    if not len(x):
        return np.full(x.shape[1], np.nan)
    ranks = [np.zeros_like(x), np.zeros_like(y)]
    for block in np.unique(of):
        own = of == block
        for made, values in zip(ranks, (x, y), strict=True):
            made[own] = rankdata(values[own], axis=0)
            made[own] -= made[own].mean(0)
    a, b = ranks
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Float = (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return found
