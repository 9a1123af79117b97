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
    """Return each of `METRICS`, and how many pairs of classes `cdnv` leaves out.

    The metrics are NaN with fewer than two classes of two examples.

    Args:
        x: (n, dim) examples.
        labels: (n,) their classes.
    """
    names, class_index, counts = np.unique(
        labels, return_inverse=True, return_counts=True
    )
    keep = (counts >= 2)[class_index]
    if (counts >= 2).sum() < 2:
        return dict.fromkeys(METRICS, math.nan), 0
    x = x[keep]
    labels = labels[keep]
    names, class_index, counts = np.unique(
        labels, return_inverse=True, return_counts=True
    )
    c = len(names)
    # Sorted by class: reduceat adds up runs, many times as fast as np.add.at.
    order = np.argsort(class_index, kind="stable")
    starts = np.searchsorted(class_index[order], np.arange(c))
    class_sums = np.add.reduceat(x[order], starts, axis=0)
    means = class_sums / counts[:, np.newaxis]
    within = x - means[class_index]
    # s_c^2 is unbiased: divided by n_c - 1.
    squared_norms = np.einsum("nd,nd->n", within, within)
    variance = np.bincount(class_index, squared_norms) / (counts - 1)
    centred = means - means.mean(0)
    values = dict(_nc2(centred))
    values["cdnv"], left_out = _cdnv(means, variance, counts)
    values["nc1"] = _nc1(within, centred)
    return values, left_out


def _nc1(within: Float, centred: Float) -> float:
    """Return tr(S_W S_B^+) / C without making the D x D matrices.

    Args:
        within: (n, dim) examples less their class means.
        centred: (classes, dim) class means less their mean.
    """
    c = len(centred)
    _, size, directions = np.linalg.svd(centred, full_matrices=False)
    # S_B has rank C - 1 at most; smaller singular values are rounding.
    keep = np.zeros(0, bool)
    if size[0] > 0:
        keep = size[: c - 1] > 1e-10 * size[0]
    if not keep.any():
        return math.nan
    size = size[: c - 1][keep]
    directions = directions[: c - 1][keep]
    spread = ((within @ directions.T) ** 2).mean(0)
    return float((spread / (size**2 / c)).sum() / c)


def _cdnv(means: Float, variance: Float, counts: Integers) -> tuple[float, int]:
    """Return the mean of (s_i^2 + s_j^2) / (2 d_ij^2) over pairs of classes, and the number of
    pairs left out.

    Args:
        means: (classes, dim).
        variance: (classes,) s^2, the sum over channels of the variances.
        counts: (classes,) examples.
    """
    i, j = np.triu_indices(len(means), 1)
    size = np.einsum("cd,cd->c", means, means)
    # |m_i - m_j|^2 by products, not below 0 where rounding would take it there.
    all_squared = size[:, np.newaxis] + size - 2 * means @ means.T
    squared = np.maximum(all_squared, 0)[i, j]
    # The squared distance of sample means exceeds that of the true ones by their variances.
    variance_of_mean = variance / counts
    squared = squared - variance_of_mean[i] - variance_of_mean[j]
    positive = squared > 0
    if not positive.any():
        return math.nan, len(i)
    ratio = (variance[i] + variance[j])[positive] / (2 * squared[positive])
    return float(ratio.mean()), int((~positive).sum())


def _nc2(centred: Float) -> dict[str, float]:
    """Return `nc2_norms` and `nc2_angles` of class means less their mean, (classes, dim)."""
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
    """Return the half of its class that each example is in, (n,): 0 or 1, alternating in order."""
    half = np.zeros(len(labels), np.int64)
    for c in np.unique(labels):
        of_class = np.flatnonzero(labels == c)
        half[of_class] = np.arange(len(of_class)) % 2
    return half


def nearest_mean_disagrees(
    x: Float, labels: Integers, predicted: Integers, half: Integers
) -> Float:
    """Return 1 if the nearest class mean is not the class that the model predicts, else 0: (n,).

    It is NaN for classes that are not in both halves. Means are of the half without the example.

    Args:
        x: (n, dim) examples.
        labels: (n,) their classes.
        predicted: (n,) the classes that the model predicts.
        half: (n,) the examples' halves from `halves`, which may have divided others with them.
    """
    disagrees = np.full(len(x), np.nan)
    classes = np.intersect1d(labels[half == 0], labels[half == 1])
    if len(classes) < 2:
        return disagrees
    for tested_half in (0, 1):
        is_tested = half == tested_half
        means = np.stack([x[(labels == c) & ~is_tested].mean(0) for c in classes])
        tested = np.flatnonzero(is_tested & np.isin(labels, classes))
        # |x - m|^2 less |x|^2, which is the same for all classes.
        squared = np.einsum("cd,cd->c", means, means) - 2 * x[tested] @ means.T
        disagrees[tested] = classes[squared.argmin(1)] != predicted[tested]
    return disagrees


# The share of examples that the slope is fitted to (Facco et al. 2017 leave out the largest mu).
KEPT_SHARE = 0.9
# Squared distances below this part of the largest are rounding: the examples are equal.
EQUAL = 1e-12


class TwoNearest:
    """The two nearest neighbours of each example within each block of images.

    Args:
        x: (n, dim) examples; of equal ones the first is kept.
        labels: (n,) their blocks.

    Attributes:
        n_equal: examples that were left out because they equal another.
        blocks: the blocks' numbers.
        nearest: (examples, blocks, 2) squared distances to the two nearest examples of a block.
    """

    def __init__(self, x: Float, labels: Integers) -> None:
        x = x - x.mean(0)
        size = np.einsum("nd,nd->n", x, x)
        squared = size[:, np.newaxis] + size - 2 * x @ x.T
        np.fill_diagonal(squared, np.inf)
        finite = squared[np.isfinite(squared)]
        edge = EQUAL * max(float(finite.max(initial=0)), 2 * float(size.max(initial=0)))
        # An example stays if none before it equals it.
        first = ~np.tril(squared <= edge, -1).any(1)
        squared = squared[np.ix_(first, first)]
        self.labels = labels[first]
        self.n_equal = int((~first).sum())
        self.blocks = np.unique(labels)
        nearest = []
        for b in self.blocks:
            # Padded with inf, so that a block of one example has two columns.
            in_block = squared[:, self.labels == b]
            in_block = np.pad(in_block, ((0, 0), (0, 2)), constant_values=np.inf)
            nearest.append(np.partition(in_block, 1, axis=1)[:, :2])
        self.nearest = np.stack(nearest, axis=1)

    def dimension(self, among: Mask) -> float:
        """Return the dimension estimated from the examples in some blocks, a mask (blocks,).

        It is NaN for fewer than three examples.
        """
        keep = np.isin(self.labels, self.blocks[among])
        if keep.sum() < 3:
            return math.nan
        near = self.nearest[keep][:, among].reshape(int(keep.sum()), -1)
        near = np.sort(near, axis=1)[:, :2]
        # log(r2 / r1), half of the logarithm for squared distances.
        log_mu = np.sort(np.log(near[:, 1] / near[:, 0]) / 2)
        n = len(log_mu)
        # The slope through the origin of y = -log(1 - i / n) on log mu.
        x = log_mu[: int(n * KEPT_SHARE)]
        y = -np.log1p(-np.arange(1, len(x) + 1) / n)
        return float(x @ y / (x @ x)) if x @ x > 0 else math.nan

    def replicates(self) -> Float:
        """Return replicates whose jackknife standard error is that of batch means, (blocks,).

        Each is the dimension, moved as much as a mean over the blocks moves without that block.
        They are NaN if a block has no dimension (fewer than three examples).
        """
        all_blocks = np.ones(len(self.blocks), bool)
        alone = np.array([self.dimension(self.blocks == b) for b in self.blocks])
        moved: Float = 1 + (1 - alone / alone.mean()) / max(len(alone) - 1, 1)
        return self.dimension(all_blocks) * moved
