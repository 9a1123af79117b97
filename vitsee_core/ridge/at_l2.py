"""The probes of one training set at several l2, whose scores are made together, in float32 where
that decides.

The error of a product z.w of r terms in float32 is at most (r + 8) 2^-24 |z| |w|, the rounding of
both vectors counted; coordinates are brought to about the same length first, which makes that
small. Scores that are further apart than their errors keep their order; of the others the products
are made again in float64. So ranks are those of scores in float64.

The weights at 20 or 30 l2 are so much alike that they are mixtures of some five, but for less than
float32 leaves (`Mixture`, which counts what is left). Only these five are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.ridge.tridiagonal import Resolvents, resolve_one
from vitsee_core.types import Float, Float32, Integers

if TYPE_CHECKING:
    from vitsee_core.ridge.solver import Factors

ROUNDING = 2.0**-50  # of adding an intercept, whose magnitude is 1 at most, in float64
SCORE_BYTES = 1 << 21  # of products that are made at a time, so few that they stay in cache
WORTH = 0.4  # as many parts of all l2 are worth mixing
LEAST_IMAGES = 256  # of which they are made at a time, however many classes there are


class AtL2s:
    """Scores of images at several l2.

    Memory: the right-hand sides once more and, in float32, times the parts of a mixture; in each
    thread some MB, and where nothing is mixed the weights of one l2.
    """

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self._resolvents = factors.resolvents(l2s)
        self._rhs, self._rows = factors.rhs, np.ascontiguousarray(factors.rhs.T)
        self._few = Mixture.of(self._resolvents, factors.rhs)
        self._levels = np.stack(
            [factors.algebra.intercept(factors.mean_target, factors.n, l2) for l2 in l2s]
        )

    def ranks(self, coordinates: Float, labels: Integers) -> Integers:
        """(l2s, m) how many classes come before each image's own, of equal scores the lower class.

        Args:
            coordinates: (m, r) of the images, as `Factors.coordinates` has them.
            labels: (m,) their classes.
        """
        z = self._resolvents.evened(coordinates)
        found: Integers = np.empty((len(self._resolvents), len(z)), np.int64)
        errors = _lengths(z) * self._few.error
        inverses, below = self._resolvents.inverses, self._resolvents.below
        for some, of, near, mix in self._products(z.astype(np.float32), self._few.weights):
            about = coordinates[some], errors[some], labels[some], self._rows
            norms, levels = self._few.norms[of], self._levels[of]
            count_before(near, mix, *about, inverses[of], below[of], norms, levels, found[of, some])
        return found

    def squared_errors(
        self, coordinates: Float, labels: Integers, *, exact: bool
    ) -> tuple[Float, Float]:
        """(l2s, m) of each image, summed over classes, and how far these may be off: 0 where
        `exact`, else what float32 makes of it."""
        z = self._resolvents.evened(coordinates)
        found = np.empty((len(self._resolvents), len(z)))
        weights = None if exact else self._few.weights
        for some, of, near, mix in self._products(z if exact else z.astype(np.float32), weights):
            add_squares(near, mix, labels[some], self._levels[of], found[of, some])
        if exact:
            return found, np.zeros_like(found)
        lengths = np.sqrt(np.square(self._few.norms).sum(1))[:, np.newaxis]
        apart = lengths * _lengths(z) * self._few.error
        return found, 2 * np.sqrt(found) * apart + np.square(apart)

    def _products(
        self, z: NDArray[Any], weights: Float32 | None
    ) -> Iterator[tuple[slice, slice, NDArray[Any], NDArray[Any]]]:
        """Some images and some l2 at a time: which, what the scores less the intercepts are mixed
        of, (images, parts, classes) in the type of `z`, and how, (l2s, parts) or (l2s, 0)."""
        (m, r), n_classes = z.shape, self._rhs.shape[1]
        every, size = slice(None), z.itemsize * n_classes
        if weights is None:
            mix = np.zeros((len(self._resolvents), 0), z.dtype)
            step = max(1, SCORE_BYTES // (size * max(m, r)))
            for start in range(0, len(mix), step):
                of = slice(start, start + step)
                made = self._resolvents.weights(self._rhs, of)
                flat = made.transpose(1, 0, 2).astype(z.dtype).reshape(r, len(made) * n_classes)
                yield every, of, (z @ flat).reshape(m, len(made), n_classes), mix[of]
            return
        mix, n_parts = self._few.mix.astype(z.dtype), weights.shape[1]
        parts = weights.reshape(r, n_parts * n_classes)
        step = max(LEAST_IMAGES, SCORE_BYTES // (size * n_parts))
        for start in range(0, m, step):
            some = slice(start, start + step)
            near = z[some] @ parts
            yield some, every, near.reshape(len(near), n_parts, n_classes), mix


@dataclass(frozen=True)
class Mixture:
    """The weights of all l2, (l2s, r, classes), as `mix` (l2s, parts) times those of parts.

    weights: (r, parts, classes); None where each l2 is by itself. norms: (l2s, classes); a score
    made of these in float32 is off by at most error |z| norms, in which is counted what the parts
    leave of the weights.
    """

    weights: Float32 | None
    mix: Float
    norms: Float
    error: float

    @classmethod
    def of_each(cls, resolvents: Resolvents, rhs: Float) -> Mixture:
        """Every l2 by itself."""
        norms = np.empty((len(resolvents), rhs.shape[1]))
        for some, weights in resolvents.by_class(rhs):
            norms[:, some] = _column_lengths(weights)
        return cls(None, np.zeros((len(resolvents), 0)), norms, _rounding(len(rhs)))

    @classmethod
    def of(cls, resolvents: Resolvents, rhs: Float) -> Mixture:
        """So few parts that they leave less than the products lose by rounding; every l2 by itself
        where that saves little. The parts are the principal ones of the l2, all of these having the
        same length."""
        n_l2, (r, n_classes) = len(resolvents), rhs.shape
        gram = np.zeros((n_l2, n_l2))
        for _, weights in resolvents.by_class(rhs):
            flat = weights.reshape(n_l2, -1)
            gram += flat @ flat.T
        lengths = np.sqrt(gram.diagonal())
        shares = np.divide(1, lengths, out=np.zeros(n_l2), where=lengths > 0)
        values, vectors = np.linalg.eigh(gram * np.outer(shares, shares))
        values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
        # What the first 0, 1, 2, ... parts leave of an l2, squared, as a share of all of it.
        left = np.cumsum((values * np.square(vectors))[:, ::-1], axis=1)[:, ::-1].max(axis=0)
        n = max(1, int(np.count_nonzero(left > (_rounding(r) / 2) ** 2)))
        if n > WORTH * n_l2:
            return cls.of_each(resolvents, rhs)
        made = shares[:, np.newaxis] * vectors[:, :n]
        mix, error = lengths[:, np.newaxis] * vectors[:, :n], _rounding(r + n)
        found, norms = np.empty((r, n, n_classes), np.float32), np.empty((n_l2, n_classes))
        for some, weights in resolvents.by_class(rhs):
            flat = weights.reshape(n_l2, -1)
            parts = made.T @ flat
            flat -= mix @ parts
            parts = parts.reshape(n, *weights.shape[1:])
            found[:, :, some] = parts.transpose(1, 0, 2)
            norms[:, some] = np.abs(mix) @ _column_lengths(parts) + _column_lengths(weights) / error
        return cls(found, mix, norms, error)


def _rounding(n: int) -> float:
    """|error| of a float32 product of n terms over the lengths of its factors, at most."""
    return (n + 8) * 2.0**-24


def _column_lengths(weights: Float) -> Float:
    """(n, c) of (n, r, c)."""
    lengths: Float = np.sqrt(np.einsum("nrc,nrc->nc", weights, weights))
    return lengths


def _lengths(z: Float) -> Float:
    """(m,) of the rows."""
    lengths: Float = np.sqrt(np.einsum("ij,ij->i", z, z))
    return lengths


@compiled
def mixed(parts: NDArray[Any], mix: NDArray[Any], at: int, out: NDArray[Any]) -> NDArray[Any]:
    """(classes,) the scores at one l2 of an image's parts (q, classes), put into `out` where they
    have to be mixed."""
    if mix.shape[1] == 0:
        only: NDArray[Any] = parts[at]
        return only
    for c in range(len(out)):
        out[c] = 0
    for q in range(mix.shape[1]):
        share = mix[at, q]
        for c in range(len(out)):
            out[c] += share * parts[q, c]
    return out


@compiled
def count_before(
    near: NDArray[Any],
    mix: NDArray[Any],
    z: Float,
    errors: Float,
    labels: Integers,
    rows: Float,
    inverses: Float,
    below: Float,
    norms: Float,
    levels: Float,
    found: Integers,
) -> None:
    """Count the classes before each image's own.

    Args:
        near: (m, parts, classes) in float32, what scores less the intercepts are mixed of.
        mix: (l2s, parts), or (l2s, 0): see `Mixture`.
        z: (m, r) coordinates.
        errors: (m,) of products with weights of length 1, at most.
        labels: (m,) own classes.
        rows: (classes, r) right-hand sides.
        inverses: (l2s, r), and
        below: (l2s, r - 1), see `Resolvents`.
        norms: (l2s, classes) lengths of the weights, at least.
        levels: (l2s, classes) intercepts.
        found: (l2s, m), changed: the counts.
    """
    n_classes, r = rows.shape
    weighted, room = np.empty(r), np.empty(n_classes, near.dtype)
    for i in range(near.shape[0]):
        label, error = labels[i], errors[i]
        for at in range(mix.shape[0]):
            some, level, norm = mixed(near[i], mix, at, room), levels[at], norms[at]
            own = some[label] + level[label]
            before, apart = 0, 0
            for c in range(n_classes):
                ahead = some[c] + level[c] - own
                bound = error * (norm[c] + norm[label]) + ROUNDING
                before += not (ahead <= bound)  # of no number, too
                apart += (ahead > bound) | (ahead < -bound)
            if apart < n_classes - 1:  # others than its own are near
                resolve_one(inverses[at], below[at], z[i], weighted)
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
def add_squares(
    near: NDArray[Any], mix: NDArray[Any], labels: Integers, levels: Float, found: Float
) -> None:
    """Sum (score - target)^2 over the classes, the target of an image's own 1 and of others -1.

    Args:
        near: (m, parts, classes) of which scores less the intercepts are mixed.
        mix: (l2s, parts), or (l2s, 0): see `Mixture`.
        labels: (m,) own classes.
        levels: (l2s, classes) intercepts.
        found: (l2s, m), changed: the sums.
    """
    room = np.empty(near.shape[2], near.dtype)
    for i in range(near.shape[0]):
        label = labels[i]
        for at in range(mix.shape[0]):
            some, level = mixed(near[i], mix, at, room), levels[at]
            total = 0.0
            for c in range(len(some)):
                error = some[c] + level[c] - (1.0 if c == label else -1.0)
                total += error * error
            found[at, i] = total
