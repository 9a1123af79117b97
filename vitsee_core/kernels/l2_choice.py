"""Choice of l2 by images held out of the training set, or by leave-one-out. Neither uses a test
image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.ridge import Factors, class_sums, ranks
from vitsee_core.types import Float, Integers

GRID = tuple(2.0**e for e in range(-10, 20))  # of Google's few-shot evaluations
# Numbers made at a time: residuals stay in cache, and the parts they are mixed of take 16 MB.
BLOCK = 1 << 16
PARTS = 1 << 21
ROUNDING = 1e-11


class HeldOut:
    """Counts right answers, at every l2, on images that the probe was not fitted to.

    The best l2 has the most right answers; ties go to the least squared error, then to the largest
    l2 (features that are all equal).
    """

    method = "most held-out images right, then the least squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors = factors
        self.l2s = tuple(l2s)
        self.right: Integers = np.zeros(len(self.l2s), np.int64)
        r, n_classes = factors.rhs.shape
        # Sums over coordinates, from which squared errors follow at any l2.
        self._counts: Integers = np.zeros(n_classes, np.int64)
        self._sums = np.zeros((n_classes, r))
        self._scatter = np.zeros((r, r))

    def add(self, x: NDArray[np.floating[Any]], labels: Integers) -> None:
        """Count images (m, dim) of these classes."""
        self.count(self.judged(x, labels))

    def judged(self, x: NDArray[np.floating[Any]], labels: Integers) -> tuple[Any, ...]:
        """The contribution of these images; without side effects, so that several threads may call
        it."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        of_l2s = (ranks(self.factors.scores(z, l2), labels) for l2 in self.l2s)
        right = np.array([np.count_nonzero(own == 0) for own in of_l2s])
        n_classes = len(self._counts)
        counts = np.bincount(labels, minlength=n_classes)
        return right, counts, class_sums(z, labels, n_classes), z.T @ z

    def count(self, found: tuple[Any, ...]) -> None:
        """Add a result of `judged`."""
        totals = self.right, self._counts, self._sums, self._scatter
        for total, part in zip(totals, found, strict=True):
            total += part

    def squared_error(self, l2: float) -> float:
        """Sum over images and classes: from the sum of (b + W'z - t)^2, multiplied out."""
        factors = self.factors
        weights = factors.weights(l2)
        level = factors.algebra.intercept(factors.mean_target, factors.n, l2)
        n = int(self._counts.sum())
        every = self._sums.sum(0)
        of_levels = (
            self._counts @ (1 - level) ** 2 + (n - self._counts) @ (1 + level) ** 2
        )
        crossed = (
            2 * self._sums - every - level[:, np.newaxis] * every
        )  # sum of (t - b) z'
        products = np.einsum("rc,rc->", weights, self._scatter @ weights)
        return float(of_levels - 2 * np.einsum("cr,rc->", crossed, weights) + products)

    def best(self) -> float:
        """The l2 that was chosen."""
        most = [self.l2s[i] for i in np.flatnonzero(self.right == self.right.max())]
        return min(most, key=lambda l2: (self.squared_error(l2), -l2))


class LeaveOneOut:
    """The exact squared error of each training image under the probe of all the others, at every l2
    (Allen's PRESS): residual / (1 - leverage). The mean and the intercept are refitted without
    the image; standard deviations are not, nor the mean if the intercept is penalised.

    The best l2 has the least error, as scikit-learn's RidgeCV chooses.
    """

    method = "the least leave-one-out squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors = factors
        self.l2s = tuple(l2s)
        self.squared_error = np.zeros(len(self.l2s))
        self._mix, self._weights = mixture(factors, l2s)
        intercepts = [
            factors.algebra.intercept(factors.mean_target, factors.n, l2) for l2 in l2s
        ]
        self._levels = np.stack(intercepts)[:, np.newaxis] + 1  # minus targets of -1

    def add(self, x: NDArray[np.floating[Any]], labels: Integers) -> None:
        """Count training images (m, dim) of these classes."""
        self.count(self.judged(x, labels))

    def judged(self, x: NDArray[np.floating[Any]], labels: Integers) -> Float:
        """(l2s,) the contribution of these images; without side effects, so that several threads
        may call it."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        left = 1 - self.factors.leverages(z, self.l2s).T
        # An image that alone decides its score (1 - leverage is rounding) has no left-out probe.
        weights = 1 / np.square(np.where(left > 1e-12, left, np.nan))
        errors, (n_parts, _, n_classes) = np.zeros(len(self.l2s)), self._weights.shape
        step = max(1, BLOCK // (len(self.l2s) * n_classes))
        many = max(
            step, PARTS // max(1, n_parts * n_classes)
        )  # no part: all features are constant
        for first in range(0, len(z), many):
            parts = z[first : first + many] @ self._weights
            for at in range(0, parts.shape[1], step):
                block = parts[:, at : at + step]
                residuals = np.tensordot(self._mix, block, 1)
                some = slice(first + at, first + at + block.shape[1])
                residuals += self._levels
                residuals[:, np.arange(residuals.shape[1]), labels[some]] -= (
                    2  # own class: 1
                )
                errors += np.einsum(
                    "lm,lmc,lmc->l", weights[:, some], residuals, residuals
                )
        return errors

    def count(self, found: Float) -> None:
        """Add a result of `judged`."""
        self.squared_error += found

    def best(self) -> float:
        """The chosen l2; the largest if no error could be computed."""
        if np.isnan(self.squared_error).all():
            return self.l2s[-1]
        return self.l2s[int(np.nanargmin(self.squared_error))]


def mixture(factors: Factors, l2s: Sequence[float]) -> tuple[Float, Float]:
    """mix (l2s, k) and weights (k, r, classes) with `Factors.weights` of every l2 = mix @ weights.

    The weights at 30 l2 are mixtures of about 10, to rounding: shrinkage v / (v + l2) is a smooth
    function of l2. Not so if a probe can fit every image: its remaining residuals are smaller than
    that.
    """
    values = factors.values
    n_l2 = len(l2s)
    shrunk = values / (values + np.array(l2s)[:, np.newaxis])
    left, sizes, right = np.linalg.svd(shrunk, full_matrices=False)
    k = int(np.count_nonzero(sizes > ROUNDING * sizes[:1]))
    if k >= n_l2 or len(values) >= factors.n - 1:
        return np.eye(n_l2), np.stack([factors.weights(l2) for l2 in l2s])
    by = np.divide(right[:k], values, out=np.zeros_like(right[:k]), where=values > 0)
    return left[:, :k] * sizes[:k], by[:, :, np.newaxis] * factors.rhs
