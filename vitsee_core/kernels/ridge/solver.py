"""Ridge regression in closed form, to classes or to any targets.

With centred features X (n, dim), targets Y (n, classes) of +-1 and l2 > 0:

    W = (X'X + l2 I)^-1 X'Y,    scores(x) = (x - mean) W + intercept

X centred makes the constant column orthogonal to the others, so its weight is known beforehand: not
penalised, the intercept is the mean target; as the weight of a constant column of c that is
penalised like the others (Kolesnikov et al., big_vision: c = 100) it is that times c^2 n / (c^2 n +
l2). With fewer images than channels the same W comes from the n x n matrix XX' (dual). Either
matrix is decomposed into eigenvectors once for every l2: X'X = Q diag(v) Q', so

    W = Q diag(1 / (v + l2)) Q'X'Y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.kernels.ridge.sufficient_stats import SufficientStats
from vitsee_core.types import Float, Integers

EPSILON = 1e-5  # added to standard deviations, as in big_vision


@dataclass(frozen=True)
class Algebra:
    """Treatment of the intercept and of feature scales."""

    # divide features by their standard deviation over the training images (over n) + 1e-5
    standardise: bool = False
    # of a penalised constant column; None: the intercept is not penalised
    constant: float | None = None

    def intercept(self, mean_target: Float, n: int, l2: float) -> Float:
        """(classes,) the score of an image at the mean of the training images."""
        if self.constant is None:
            return mean_target
        # c^2 n / (c^2 n + l2), for any c.
        return mean_target / (1 + l2 / self.constant / self.constant / n)

    def leverage(self, n: int, l2: float) -> float:
        """The intercept's share in each training image's leverage."""
        return 1 / (n if self.constant is None else n + l2 / self.constant / self.constant)

    def scales(self, sums_of_squares: Float, n: int) -> Float | None:
        """(dim,) factors of the centred features; None for all 1."""
        if not self.standardise:
            return None
        return 1 / (np.sqrt(np.maximum(sums_of_squares, 0) / n) + EPSILON)


@dataclass(frozen=True)
class Linear:
    """scores(x) = x @ weights + bias: weights (dim, classes), bias (classes,)."""

    weights: Float
    bias: Float

    def scores(self, x: Float) -> Float:
        """(m, classes) of features (m, dim)."""
        return x @ self.weights + self.bias


@dataclass(frozen=True)
class Factors:
    """A training set decomposed, so that any l2 costs little."""

    basis: Float  # (dim, r) maps features to coordinates
    origin: Float  # (r,) the mean's coordinates
    values: Float  # (r,) eigenvalues of X'X, which is diagonal in these coordinates
    rhs: Float  # (r, classes) X'Y in these coordinates
    mean_target: Float  # (classes,)
    n: int  # number of training images
    algebra: Algebra

    def coordinates(self, x: Float) -> Float:
        """(m, r) for features (m, dim): rotated once, for every l2."""
        coordinates: Float = x @ self.basis
        coordinates -= self.origin
        return coordinates

    def scores(self, coordinates: Float, l2: float) -> Float:
        """(m, classes) from coordinates (m, r)."""
        scores: Float = coordinates @ self.weights(l2)
        scores += self.algebra.intercept(self.mean_target, self.n, l2)
        return scores

    def linear(self, l2: float) -> Linear:
        """The weights at one l2."""
        shrunk = self.weights(l2)
        bias = self.algebra.intercept(self.mean_target, self.n, l2) - self.origin @ shrunk
        return Linear(self.basis @ shrunk, bias)

    def weights(self, l2: float) -> Float:
        """(r, classes) in coordinates."""
        return self.rhs / (self.values + l2)[:, np.newaxis]

    def leverages(self, coordinates: Float, l2s: Sequence[float]) -> Float:
        """(m, l2s) weight of each training image's own target in its score."""
        inverses = 1 / (self.values[:, np.newaxis] + np.array(l2s))
        own: Float = np.square(coordinates) @ inverses
        return own + [self.algebra.leverage(self.n, l2) for l2 in l2s]

    @classmethod
    def of(cls, images: SufficientStats, algebra: Algebra) -> Factors:
        """Decompose X'X, or XX' if it is smaller."""
        target = mean_target(images.counts)
        if images.by_rows:
            x, mean, labels, scales = _scaled_rows(images, algebra)
            basis, values, rhs = _by_dual(x, targets(labels, images.n_classes))
        else:
            scatter, rhs, mean, scales = _scaled_moments(images, algebra)
            values, basis = np.linalg.eigh(scatter)
            values = np.maximum(values, 0)  # rounding
            rhs = basis.T @ rhs
        if scales is not None:
            basis = basis * scales[:, np.newaxis]
        return cls(basis, mean @ basis, values, rhs, target, images.n, algebra)

    @classmethod
    def of_targets(cls, x: Float, y: Float, algebra: Algebra) -> Factors:
        """The same for targets that are numbers: one decomposition for every column of `y`.

        Args:
            x: (n, dim) features.
            y: (n, columns) targets.
            algebra: treatment of the intercept and of scales.
        """
        mean, target = x.mean(0), y.mean(0)
        x, y = x - mean, y - target
        scales = algebra.scales(np.einsum("ij,ij->j", x, x), len(x))
        if scales is not None:
            x *= scales
        if len(x) < x.shape[1]:
            basis, values, rhs = _by_dual(x, y)
        else:
            values, basis = np.linalg.eigh(x.T @ x)
            values, rhs = np.maximum(values, 0), basis.T @ (x.T @ y)
        if scales is not None:
            basis = basis * scales[:, np.newaxis]
        return cls(basis, mean @ basis, values, rhs, target, len(x), algebra)


def _by_dual(x: Float, y: Float) -> tuple[Float, Float, Float]:
    """Basis, values and right-hand sides of centred features (n, dim) and targets (n, columns), by
    the matrix of inner products."""
    values, vectors = _decomposed(x @ x.T)
    roots = np.sqrt(values)
    return x.T @ (vectors / roots), values, roots[:, np.newaxis] * (vectors.T @ y)


def _decomposed(kernel: Float) -> tuple[Float, Float]:
    """Eigenvalues that are above rounding, and their eigenvectors."""
    values, vectors = np.linalg.eigh(kernel)
    kept = values > max(values[-1], 0) * len(kernel) * np.finfo(np.float64).eps
    return values[kept], vectors[:, kept]


def from_kernel(kernel: Float, labels: Integers, n_classes: int, algebra: Algebra) -> Factors:
    """`Factors` of images known by their inner products only.

    `coordinates` then takes the inner products (m, n) of images with the training images.

    Args:
        kernel: (n, n) of the training images' features, centred (and scaled).
        labels: (n,) their classes.
        n_classes: number of classes.
        algebra: treatment of the intercept.
    """
    values, vectors = _decomposed(kernel)
    roots = np.sqrt(values)
    rhs = roots[:, np.newaxis] * (vectors.T @ targets(labels, n_classes))
    target = mean_target(np.bincount(labels, minlength=n_classes))
    origin = np.zeros(len(values))
    return Factors(vectors / roots, origin, values, rhs, target, len(kernel), algebra)


def _scaled_rows(
    images: SufficientStats, algebra: Algebra
) -> tuple[Float, Float, Integers, Float | None]:
    """Features (n, d), centred and scaled; their mean, labels and scales (None for none)."""
    x, mean, labels = images.rows()
    scales = algebra.scales(np.einsum("ij,ij->j", x, x), images.n)
    if scales is not None:
        x *= scales
    return x, mean, labels, scales


def _scaled_moments(
    images: SufficientStats, algebra: Algebra
) -> tuple[Float, Float, Float, Float | None]:
    """X'X and X'Y of scaled features; the features' mean and scales (None for none)."""
    scatter, rhs, mean = images.moments()
    scales = algebra.scales(np.diagonal(scatter), images.n)
    if scales is not None:
        scatter = scatter * np.outer(scales, scales)
        rhs = rhs * scales[:, np.newaxis]
    return scatter, rhs, mean, scales


def solve(images: SufficientStats, algebra: Algebra, l2: float) -> Linear:
    """The weights at a single l2, without a decomposition (a tenth of its cost)."""
    if images.by_rows:
        x, mean, labels, scales = _scaled_rows(images, algebra)
        kernel = x @ x.T
        kernel[np.diag_indices_from(kernel)] += l2
        weights = x.T @ np.linalg.solve(kernel, targets(labels, images.n_classes))
    else:
        scatter, rhs, mean, scales = _scaled_moments(images, algebra)
        scatter[np.diag_indices_from(scatter)] += l2
        weights = np.linalg.solve(scatter, rhs)
    if scales is not None:
        weights = weights * scales[:, np.newaxis]
    target = mean_target(images.counts)
    return Linear(weights, algebra.intercept(target, images.n, l2) - mean @ weights)


def ranks(scores: Float, labels: Integers) -> Integers:
    """(m,) number of classes ranked before each image's own; among equal scores the lower class
    comes first, and NaN comes before everything."""
    own = scores[np.arange(len(labels)), labels][:, np.newaxis]
    above: Integers = scores.shape[1] - np.count_nonzero(scores <= own, axis=1)
    equal = scores == own
    tied = np.flatnonzero(np.count_nonzero(equal, axis=1) > 1)
    lower = np.arange(scores.shape[1]) < labels[tied, np.newaxis]
    above[tied] += np.count_nonzero(equal[tied] & lower, axis=1)
    return above


def targets(labels: Integers, n_classes: int) -> Float:
    """(n, classes): centred targets, +1 for an image's own class and -1 for the others, minus their
    mean."""
    out = np.full((len(labels), n_classes), -1.0)
    out[np.arange(len(labels)), labels] = 1.0
    out -= out.mean(axis=0)
    return out


def mean_target(counts: Integers) -> Float:
    """(classes,) mean of the targets."""
    return 2 * counts / counts.sum() - 1
