"""The probes of one training set at several l2, whose scores are made together, in float32 where
that decides.

The error of a product z.w of r terms in float32 is at most (r + 8) 2^-24 |z| |w|, the rounding of
both vectors counted; coordinates are brought to about the same length first, which makes that
small. Scores that are further apart than their errors keep their order; of the others the products
are made again in float64. So ranks are those of scores in float64, in half the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.types import Float, Integers

if TYPE_CHECKING:
    from vitsee_core.ridge.solver import Factors

ROUNDING = 2.0**-50  # of adding an intercept, whose magnitude is 1 at most, in float64
SCORE_BYTES = 1 << 21  # of scores that are made at a time, so few that they stay in cache
Scores = NDArray[np.float32] | Float


class AtL2s:
    """Scores of images at several l2.

    Memory: three times the right-hand sides, and some MB in each thread.
    """

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self._lengths = np.sqrt(factors.eigenvalues + min(l2s))
        self._inverses = 1 / (factors.eigenvalues + np.array(l2s)[:, np.newaxis])
        self._rhs = factors.rhs * self._lengths[:, np.newaxis]
        self._rows = np.ascontiguousarray(self._rhs.T)
        self._norms = np.sqrt(np.square(self._inverses) @ np.square(self._rhs))
        self._levels = np.stack(
            [factors.algebra.intercept(factors.mean_target, factors.n, l2) for l2 in l2s]
        )

    def ranks(self, coordinates: Float, labels: Integers) -> Integers:
        """(l2s, m) how many classes come before each image's own, of equal scores the lower class.

        Args:
            coordinates: (m, r) of the images, as `Factors.coordinates` has them.
            labels: (m,) their classes.
        """
        z = coordinates / self._lengths
        found: Integers = np.empty((len(self._inverses), len(z)), np.int64)
        errors = self._errors(z)
        for of, scores in self._scores(z.astype(np.float32)):
            about = self._rows, self._inverses[of], self._norms[of], self._levels[of]
            count_before(scores, z, errors, labels, *about, found[of])
        return found

    def squared_errors(
        self, coordinates: Float, labels: Integers, *, exact: bool
    ) -> tuple[Float, Float]:
        """(l2s, m) of each image, summed over classes, and how far these may be off: 0 where
        `exact`, else what float32 makes of it."""
        z = coordinates / self._lengths
        found = np.empty((len(self._inverses), len(z)))
        for of, scores in self._scores(z if exact else z.astype(np.float32)):
            add_squares(scores, labels, self._levels[of], found[of])
        if exact:
            return found, np.zeros_like(found)
        lengths = np.sqrt(np.square(self._norms).sum(1))[:, np.newaxis]
        apart = lengths * self._errors(z)
        return found, 2 * np.sqrt(found) * apart + np.square(apart)

    def _errors(self, z: Float) -> Float:
        """(m,) of products with weights of length 1 in float32, at most."""
        lengths: Float = np.sqrt(np.einsum("ij,ij->i", z, z))
        lengths *= (z.shape[1] + 8) * 2.0**-24
        return lengths

    def _scores(self, z: Scores) -> Iterator[tuple[slice, Scores]]:
        """Scores less the intercepts, (m, l2s, classes), of some l2 at a time, in the type of
        `z`."""
        rhs = self._rhs.astype(z.dtype)
        inverses = self._inverses.T.astype(z.dtype)
        (r, n_classes), n_l2 = rhs.shape, inverses.shape[1]
        step = max(1, SCORE_BYTES // (z.itemsize * n_classes * max(len(z), r)))
        for start in range(0, n_l2, step):
            of = slice(start, start + step)
            weights = rhs[:, np.newaxis] * inverses[:, of, np.newaxis]
            scores = z @ weights.reshape(r, weights.shape[1] * n_classes)  # r may be 0
            yield of, scores.reshape(len(z), weights.shape[1], n_classes)


@compiled
def count_before(
    scores: NDArray[Any],
    z: Float,
    errors: Float,
    labels: Integers,
    rows: Float,
    inverses: Float,
    norms: Float,
    levels: Float,
    found: Integers,
) -> None:
    """Count the classes before each image's own.

    Args:
        scores: (m, l2s, classes) in float32, less the intercepts.
        z: (m, r) coordinates.
        errors: (m,) of products with weights of length 1, at most.
        labels: (m,) own classes.
        rows: (classes, r) right-hand sides.
        inverses: (l2s, r) what these are multiplied by to be weights.
        norms: (l2s, classes) lengths of the weights.
        levels: (l2s, classes) intercepts.
        found: (l2s, m), changed: the counts.
    """
    n_classes, r = rows.shape
    weighted = np.empty(r)
    for i in range(scores.shape[0]):
        label, error = labels[i], errors[i]
        for at in range(scores.shape[1]):
            some, level, norm = scores[i, at], levels[at], norms[at]
            own = some[label] + level[label]
            before, apart = 0, 0
            for c in range(n_classes):
                ahead = some[c] + level[c] - own
                bound = error * (norm[c] + norm[label]) + ROUNDING
                before += ahead > bound
                apart += (ahead > bound) | (ahead < -bound)
            if apart < n_classes - 1:  # others than its own are near
                for k in range(r):
                    weighted[k] = z[i, k] * inverses[at, k]
                exact = 0.0
                for k in range(r):
                    exact += weighted[k] * rows[label, k]
                exact += level[label]
                for c in range(n_classes):
                    ahead = some[c] + level[c] - own
                    bound = error * (norm[c] + norm[label]) + ROUNDING
                    if c == label or ahead > bound or ahead < -bound:
                        continue
                    other = 0.0
                    if norm[c] > 0:  # of many classes without training images this is not so
                        for k in range(r):
                            other += weighted[k] * rows[c, k]
                    other += level[c]
                    before += other > exact or (other == exact and c < label)
            found[at, i] = before


@compiled
def add_squares(scores: NDArray[Any], labels: Integers, levels: Float, found: Float) -> None:
    """Sum (score - target)^2 over the classes, the target of an image's own 1 and of others -1.

    Args:
        scores: (m, l2s, classes) less the intercepts.
        labels: (m,) own classes.
        levels: (l2s, classes) intercepts.
        found: (l2s, m), changed: the sums.
    """
    for i in range(scores.shape[0]):
        label = labels[i]
        for at in range(scores.shape[1]):
            some, level = scores[i, at], levels[at]
            total = 0.0
            for c in range(scores.shape[2]):
                error = some[c] + level[c] - (1.0 if c == label else -1.0)
                total += error * error
            found[at, i] = total
