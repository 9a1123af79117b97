"""Measures of vectors that no spectrum gives: neural collapse, and the intrinsic dimension.

Neural collapse is how closely the examples of a class lie together, and how the classes lie.

Of classes c = 1..C with n_c examples each, means m_c, and m the mean of the class means:

- `nc1` = tr(S_W S_B^+) / C, S_W the mean over examples of (x - m_c)(x - m_c)^T, S_B the mean over
  classes of (m_c - m)(m_c - m)^T, its pseudoinverse of rank C - 1 (Papyan et al. 2020);
- `cdnv`: mean over pairs of classes of (s_i^2 + s_j^2) / (2 d_ij^2), s_i^2 the sum over channels of
  the variances in class i (Galanti et al. 2022); d_ij^2 is unbiased: the squared distance of the
  means less s_i^2 / n_i + s_j^2 / n_j. Pairs that this leaves nothing of are left out, and
  counted;
- `nc2_norms`: std / mean over classes of |m_c - m|; `nc2_angles`: mean over pairs of |cos(m_i - m,
  m_j - m) + 1 / (C - 1)|: both 0 for a simplex;
- `nc4`: share of the examples whose nearest class mean is another class than the model's logits
  say; the means are of one half of each class, and tested on the other, both ways (in-sample, pure
  noise of more channels than examples would agree with every label).

Classes with fewer than two examples are left out.

TwoNN is the intrinsic dimension from the two nearest neighbours of each example (Facco et al.
2017): mu = r2 / r1, the distances to the second and the first neighbour, has the distribution
1 - mu^-d; d is the slope through the origin of -log(1 - i / n) on log mu_(i), i = 1 to n, the tenth
of the examples with the largest mu left out. It describes features at the scale of single
neighbours, and grows with n where they are noisy; see arXiv 2604.20276 for its limits.

Its standard error is that of batch means: d of each block of images by itself, whose standard
deviation over the m blocks is sqrt(m) times it. Leaving a block out instead gives other examples
new neighbours, a change that a jackknife counts as if every sample had it: measured, 1.7 times the
true error in 2 to 10 dimensions; with the neighbours kept as they are it is 0.8 times that.
"""

from __future__ import annotations

import math

import numpy as np

from vitsee_core.types import Float, Integers, Mask

METRICS = ("nc1", "cdnv", "nc2_norms", "nc2_angles")
FOURTH = "nc4"


def collapse(x: Float, labels: Integers) -> tuple[dict[str, float], int]:
    """Each of `METRICS`, NaN with fewer than two classes, and how many pairs of classes `cdnv`
    leaves out.

    Args:
        x: (n, dim).
        labels: (n,) classes.
    """
    names, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    keep = (counts >= 2)[place]
    if (counts >= 2).sum() < 2:
        return dict.fromkeys(METRICS, math.nan), 0
    x = x[keep]
    labels = labels[keep]
    names, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    c = len(names)
    means = _sums_of(x, place, c) / counts[:, np.newaxis]
    within = x - means[place]
    variance = np.bincount(place, np.einsum("nd,nd->n", within, within)) / (counts - 1)
    centred = means - means.mean(0)
    values = dict(_geometry(centred))
    values["cdnv"], left_out = _distances(means, variance, counts)
    values["nc1"] = _first(within, centred)
    return values, left_out


def _first(within: Float, centred: Float) -> float:
    c = len(centred)
    _, size, directions = np.linalg.svd(centred, full_matrices=False)
    keep = size[: c - 1] > 1e-10 * size[0] if size[0] > 0 else np.zeros(0, bool)
    if not keep.any():
        return math.nan
    size = size[: c - 1][keep]
    directions = directions[: c - 1][keep]
    spread = ((within @ directions.T) ** 2).mean(0)
    return float((spread / (size**2 / c)).sum() / c)


def _distances(means: Float, variance: Float, counts: Integers) -> tuple[float, int]:
    i, j = np.triu_indices(len(means), 1)
    size = np.einsum("cd,cd->c", means, means)
    squared = np.maximum(size[:, np.newaxis] + size - 2 * means @ means.T, 0)[i, j]
    share = variance / counts
    squared = squared - share[i] - share[j]
    there = squared > 0
    if not there.any():
        return math.nan, len(i)
    ratio = (variance[i] + variance[j])[there] / (2 * squared[there])
    return float(ratio.mean()), int((~there).sum())


def _geometry(centred: Float) -> dict[str, float]:
    c = len(centred)
    norms = np.linalg.norm(centred, axis=1)
    if not norms.min() > 0:
        return {"nc2_norms": math.nan, "nc2_angles": math.nan}
    units = centred / norms[:, np.newaxis]
    cosines = (units @ units.T)[np.triu_indices(c, 1)]
    return {
        "nc2_norms": float(norms.std() / norms.mean()),
        "nc2_angles": float(np.abs(cosines + 1 / (c - 1)).mean()),
    }


def halves(labels: Integers) -> Integers:
    """(n,) which half of its class an example is in, 0 or 1, alternating in order."""
    half = np.zeros(len(labels), np.int64)
    for c in np.unique(labels):
        of_class = np.flatnonzero(labels == c)
        half[of_class] = np.arange(len(of_class)) % 2
    return half


def nearest_mean_disagrees(
    x: Float, labels: Integers, predicted: Integers, half: Integers
) -> Float:
    """(n,) 1 if the nearest class mean is not the class that the model predicts, else 0; NaN for
    classes that are not in both halves. Means are of the half without the example. x: (n, dim);
    half: (n,) from `halves`, of these examples and others."""
    disagrees = np.full(len(x), np.nan)
    known = np.intersect1d(labels[half == 0], labels[half == 1])
    if len(known) < 2:
        return disagrees
    for side in (0, 1):
        means = np.stack([x[(labels == c) & (half != side)].mean(0) for c in known])
        test = np.flatnonzero((half == side) & np.isin(labels, known))
        squared = np.einsum("cd,cd->c", means, means) - 2 * x[test] @ means.T
        disagrees[test] = known[squared.argmin(1)] != predicted[test]
    return disagrees


def _sums_of(x: Float, place: Integers, n: int) -> Float:
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(n))
    return np.add.reduceat(x[order], starts, axis=0)


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
        squared = squared[np.ix_(first, first)]
        self.labels = labels[first]
        self.n_equal = int((~first).sum())
        self.blocks = np.unique(labels)
        self.nearest = np.stack(
            [_two(squared[:, self.labels == b]) for b in self.blocks], 1
        )

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
