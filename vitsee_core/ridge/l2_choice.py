"""The choice of l2: by images held out of the training set, or by leaving each one out in turn.

Neither sees a test image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.ridge.at_l2 import AtL2s
from vitsee_core.ridge.gathered import add_to_classes
from vitsee_core.ridge.solver import Factors
from vitsee_core.types import Float, Integers

GRID = tuple(2.0**e for e in range(-10, 20))  # of Google's few-shot evaluations


class HeldOut:
    """Counts how well a probe does, at every l2, on images that it was not fitted to.

    The best l2 is right most often; of several the one with the least squared error, then the
    largest (features that are all equal).
    """

    method = "most held-out images right, then the least squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors, self.l2s = factors, tuple(l2s)
        self.right: Integers = np.zeros(len(self.l2s), np.int64)
        r, n_classes = factors.rhs.shape
        self._probes = AtL2s(factors, self.l2s)
        # Of the coordinates: of which follow squared errors at any l2.
        self._counts: Integers = np.zeros(n_classes, np.int64)
        self._sums, self._scatter = np.zeros((n_classes, r)), np.zeros((r, r))

    def add(self, x: NDArray[np.float32] | Float, labels: Integers) -> None:
        """Count images (m, dim) of these classes."""
        self.count(self.judged(x, labels))

    def judged(self, x: NDArray[np.float32] | Float, labels: Integers) -> tuple[Any, ...]:
        """What these images add; changes nothing, so that several threads may call it."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        right = np.count_nonzero(self._probes.ranks(z, labels) == 0, axis=1)
        sums = np.zeros_like(self._sums)
        add_to_classes(z, labels, sums)
        return right, np.bincount(labels, minlength=len(sums)), sums, z.T @ z

    def count(self, found: tuple[Any, ...]) -> None:
        """Add what `judged` found."""
        totals = self.right, self._counts, self._sums, self._scatter
        for total, part in zip(totals, found, strict=True):
            total += part

    def squared_error(self, l2: float) -> float:
        """Summed over images and classes: from the sum of (b + W'z - t)^2, multiplied out."""
        factors = self.factors
        weights = factors.weights(l2)
        level = factors.algebra.intercept(factors.mean_target, factors.n, l2)
        n, every = int(self._counts.sum()), self._sums.sum(0)
        of_levels = self._counts @ (1 - level) ** 2 + (n - self._counts) @ (1 + level) ** 2
        crossed = 2 * self._sums - every - level[:, np.newaxis] * every  # sum of (t - b) z'
        products = np.einsum("rc,rc->", weights, self._scatter @ weights)
        return float(of_levels - 2 * np.einsum("cr,rc->", crossed, weights) + products)

    def best(self) -> float:
        """The chosen l2."""
        most = [self.l2s[i] for i in np.flatnonzero(self.right == self.right.max())]
        return min(most, key=lambda l2: (self.squared_error(l2), -l2))


class LeaveOneOut:
    """The exact squared error of each training image under the probe of all the others, at every
    l2 (Allen's PRESS): residual / (1 - leverage). The mean and the intercept are refitted without
    the image; standard deviations are not, nor the mean where the intercept is penalised.

    The best l2 has the least error, as scikit-learn's RidgeCV chooses.

    Args:
        factors: of the training images.
        l2s: to choose from.
        exact: errors in float64. Else in float32, half the time: those l2 that this cannot tell
            from the best are then `undecided`.
    """

    method = "the least leave-one-out squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float], *, exact: bool = True) -> None:
        self.factors, self.l2s, self.exact = factors, tuple(l2s), exact
        self.squared_error = np.zeros(len(self.l2s))
        self._doubt = np.zeros(len(self.l2s))
        self._probes = AtL2s(factors, self.l2s)

    def add(self, x: NDArray[np.float32] | Float, labels: Integers) -> None:
        """Count training images (m, dim) of these classes."""
        self.count(self.judged(x, labels))

    def judged(self, x: NDArray[np.float32] | Float, labels: Integers) -> tuple[Any, ...]:
        """What these images add; changes nothing, so that several threads may call it."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        left = 1 - self.factors.leverages(z, self.l2s).T
        # An image that alone decides its score (1 - leverage is rounding) has no other probe.
        weights = 1 / np.square(np.where(left > 1e-12, left, np.nan))
        found = self._probes.squared_errors(z, labels, exact=self.exact)
        return tuple(np.einsum("ij,ij->i", weights, part) for part in found)

    def count(self, found: tuple[Any, ...]) -> None:
        """Add what `judged` found."""
        self.squared_error += found[0]
        self._doubt += found[1]

    def undecided(self) -> LeaveOneOut | None:
        """What judges exactly those l2 that may be the best; None where one is."""
        if self.exact or np.isnan(self.squared_error).all():
            return None
        least = np.nanmin(self.squared_error + self._doubt)
        some = [self.l2s[i] for i in np.flatnonzero(self.squared_error - self._doubt <= least)]
        return LeaveOneOut(self.factors, some) if len(some) > 1 else None

    def best(self) -> float:
        """The chosen l2; the largest where no error could be computed."""
        if np.isnan(self.squared_error).all():
            return self.l2s[-1]
        return self.l2s[int(np.nanargmin(self.squared_error))]
