"""TwoNN: the intrinsic dimension from the two nearest neighbours of each example.

Facco et al. 2017: mu = r2 / r1, the distances to the second and the first neighbour, has the
distribution 1 - mu^-d; d is the slope through the origin of -log(1 - i / n) on log mu_(i), i = 1 to
n, the tenth of the examples with the largest mu left out. It describes features at the scale of
single neighbours, and grows with n where they are noisy; see arXiv 2604.20276 for its limits.

Its standard error is that of batch means: d of each block of images by itself, whose standard
deviation over the m blocks is sqrt(m) times it. Leaving a block out instead gives other examples
new neighbours, a change that a jackknife counts as if every sample had it: measured, 1.7 times the
true error in 2 to 10 dimensions; with the neighbours kept as they are it is 0.8 times that.
"""

from __future__ import annotations

import math

import numpy as np

from vitsee_core.types import Float, Integers, Mask

KEPT = 0.9
# Squared distances below this part of the largest are rounding: the examples are equal.
EQUAL = 1e-12


class TwoNearest:
    """The two nearest neighbours of each example within each block of images.

    x: (n, dim); of equal examples the first is kept. labels: (n,) blocks.
    """

    def __init__(self, x: Float, labels: Integers) -> None:
        x = x - x.mean(0)
        size = np.einsum("nd,nd->n", x, x)
        squared = size[:, np.newaxis] + size - 2 * x @ x.T
        np.fill_diagonal(squared, np.inf)
        finite = squared[np.isfinite(squared)]
        edge = EQUAL * max(float(finite.max(initial=0)), 2 * float(size.max(initial=0)))
        first = ~np.tril(squared <= edge, -1).any(1)
        squared, self.labels = squared[np.ix_(first, first)], labels[first]
        self.n_equal = int((~first).sum())
        self.blocks = np.unique(labels)
        self.nearest = np.stack([_two(squared[:, self.labels == b]) for b in self.blocks], 1)

    def dimension(self, among: Mask) -> float:
        """The dimension estimated from the examples in these blocks (blocks,) alone; NaN for fewer
        than three."""
        keep = np.isin(self.labels, self.blocks[among])
        if keep.sum() < 3:
            return math.nan
        near = self.nearest[keep][:, among].reshape(int(keep.sum()), -1)
        near = np.sort(near, axis=1)[:, :2]
        log_mu = np.sort(np.log(near[:, 1] / near[:, 0]) / 2)
        n = len(log_mu)
        x = log_mu[: int(n * KEPT)]
        y = -np.log1p(-np.arange(1, len(x) + 1) / n)
        return float(x @ y / (x @ x)) if x @ x > 0 else math.nan

    def replicates(self) -> Float:
        """(blocks,) the dimension moved as much as a mean over the blocks moves without each: their
        jackknife's standard error is that of batch means. NaN if a block has no dimension (fewer
        than three examples)."""
        every = np.ones(len(self.blocks), bool)
        alone = np.array([self.dimension(self.blocks == b) for b in self.blocks])
        moved: Float = 1 + (1 - alone / alone.mean()) / max(len(alone) - 1, 1)
        return self.dimension(every) * moved


def _two(squared: Float) -> Float:
    """(n, 2) the two smallest of each row, inf if there are fewer."""
    squared = np.pad(squared, ((0, 0), (0, 2)), constant_values=np.inf)
    return np.partition(squared, 1, axis=1)[:, :2]
