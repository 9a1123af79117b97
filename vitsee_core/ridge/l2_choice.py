"""The choice of l2: by images held out of the training set, or by leaving each one out in turn.

Neither sees a test image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitsee_core.ridge.solver import Factors
from vitsee_core.types import Float, Integers

GRID = tuple(2.0**e for e in range(-10, 20))  # of Google's few-shot evaluations

# Of each l2: images that are right, and the squared error.
Judged = tuple[Integers, Float]


class HeldOut:
    """Counts how well a probe does, at every l2, on images that it was not fitted to.

    The best l2 is right most often; of several the one with the least squared error, then the
    largest (features that are all equal).
    """

    method = "most held-out images right, then the least squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors, self.l2s = factors, tuple(l2s)
        self.right: Integers = np.zeros(len(self.l2s), np.int64)
        self.squared_error = np.zeros(len(self.l2s))

    def add(self, x: NDArray[np.float32] | Float, labels: Integers) -> None:
        """Count images (m, dim) of these classes."""
        self.count(self.judged(x, labels))

    def judged(self, x: NDArray[np.float32] | Float, labels: Integers) -> Judged:
        """What these images add; changes nothing, so that several threads may call it."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        own = np.arange(len(labels)), labels
        right, errors = np.zeros(len(self.l2s), np.int64), np.zeros(len(self.l2s))
        for i, l2 in enumerate(self.l2s):
            scores = self.factors.scores(z, l2)
            right[i] = np.count_nonzero(scores.argmax(axis=1) == labels)
            errors[i] = _squared_error(scores, own)
        return right, errors

    def count(self, found: Judged) -> None:
        """Add what `judged` found."""
        right, errors = found
        self.right += right
        self.squared_error += errors

    def best(self) -> float:
        """The chosen l2."""
        order = np.lexsort((np.array(self.l2s), -self.squared_error, self.right))
        return self.l2s[int(order[-1])]


class LeaveOneOut:
    """The exact squared error of each training image under the probe of all the others, at every
    l2 (Allen's PRESS): residual / (1 - leverage). The mean and the intercept are refitted without
    the image; standard deviations are not, nor the mean where the intercept is penalised.

    The best l2 has the least error, as scikit-learn's RidgeCV chooses.
    """

    method = "the least leave-one-out squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors, self.l2s = factors, tuple(l2s)
        self.squared_error = np.zeros(len(self.l2s))

    def add(self, x: NDArray[np.float32] | Float, labels: Integers) -> None:
        """Count training images (m, dim) of these classes."""
        self.count(self.judged(x, labels))

    def judged(self, x: NDArray[np.float32] | Float, labels: Integers) -> Judged:
        """What these images add; changes nothing, so that several threads may call it."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        own = np.arange(len(labels)), labels
        left = 1 - self.factors.leverages(z, self.l2s)
        # An image that alone decides its score (1 - leverage is rounding) has no other probe.
        left = np.where(left > 1e-12, left, np.nan)
        errors = [
            _squared_error(self.factors.scores(z, l2), own, left[:, i])
            for i, l2 in enumerate(self.l2s)
        ]
        return np.zeros(len(self.l2s), np.int64), np.array(errors)

    def count(self, found: Judged) -> None:
        """Add what `judged` found."""
        self.squared_error += found[1]

    def best(self) -> float:
        """The chosen l2; the largest where no error could be computed."""
        if np.isnan(self.squared_error).all():
            return self.l2s[-1]
        return self.l2s[int(np.nanargmin(self.squared_error))]


def _squared_error(
    scores: Float, own: tuple[Integers, Integers], divisor: Float | None = None
) -> float:
    """Sum over images and classes of (score - target)^2, each image's divided by `divisor`^2."""
    scores += 1.0  # the target of other classes is -1
    scores[own] -= 2.0
    errors = np.einsum("ij,ij->i", scores, scores)
    return float((errors if divisor is None else errors / np.square(divisor)).sum())
