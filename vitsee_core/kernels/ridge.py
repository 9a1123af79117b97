"""Ridge regression in closed form, to classes or to any targets, from sums collected in pieces.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Integers

WORTH = 4  # images per channel that make an update of the scatter matrix worthwhile
Piece = list[tuple[NDArray[np.float32], Integers]]
# Of a piece, minus the shift: the scatter matrix (dim, dim), sums over each class (classes, dim).
TrainingSums = tuple[Float, Float]
EPSILON = 1e-5  # added to standard deviations, as in big_vision


class SufficientStats:
    """Training images of one probe: rows while they are fewer than channels, sums beyond.

    With n images of `dim` channels and n < dim the rows are kept (the dual needs them, and they are
    smaller), else n, the sum, the scatter matrix (dim, dim) and one sum per class: X'Y of targets
    +-1 is twice the class sums of centred features. Sums are of the features minus the first
    image's, in float64: a large common mean costs no digits, equal features leave 0.
    """

    def __init__(self, dim: int, n_classes: int) -> None:
        self.dim = dim
        self.n_classes = n_classes
        self.n = 0
        self.counts: Integers = np.zeros(n_classes, np.int64)
        self._shift: Float | None = None
        self._scatter: Float | None = None
        self._sums = np.zeros(0)
        self._class_sums = np.zeros((0, 0))
        self._waiting: Piece = []
        self._n_waiting = 0

    def add(self, x: NDArray[np.float32], labels: Integers) -> None:
        """Count these images; `x`, (m, dim), is kept and must not change."""
        if (piece := self.wait(x, labels)) is not None:
            self.count(self.sums_of(piece))

    def wait(self, x: NDArray[np.float32], labels: Integers) -> Piece | None:
        """Queue these images, and return all queued images once they are worth processing.

        None before that. The sums of what is returned must go to `count`, in the pieces' order.
        """
        if len(x) == 0:
            return None
        self.n += len(x)
        self.counts += np.bincount(labels, minlength=self.n_classes)
        self._waiting.append((x, labels))
        self._n_waiting += len(x)
        if self._n_waiting >= WORTH * self.dim:
            return self._ready()
        return None

    def joined(self, other: SufficientStats) -> SufficientStats:
        """Return the statistics of both sets of images; neither is changed."""
        out = SufficientStats(self.dim, self.n_classes)
        for part in (self, other):
            if part._scatter is not None and part._shift is not None:
                out._take_sums(part)
        for part in (self, other):
            for x, labels in part._waiting:
                out._waiting.append((x, labels))
                out._n_waiting += len(x)
        out.n = self.n + other.n
        out.counts = self.counts + other.counts
        if out._scatter is not None and out._waiting:
            out._flush()
        return out

    @property
    def by_rows(self) -> bool:
        """Whether the images are kept as rows: fewer than channels."""
        return self.n < self.dim

    def rows(self) -> tuple[Float, Float, Integers]:
        """Centred features (n, dim), their mean (dim,) and labels (n,), if `by_rows`."""
        x = np.concatenate([x for x, _ in self._waiting]).astype(np.float64)
        labels = np.concatenate([labels for _, labels in self._waiting])
        shift = x[0].copy()
        x -= shift
        mean = x.mean(axis=0)
        x -= mean
        return x, mean + shift, labels

    def moments(self) -> tuple[Float, Float, Float]:
        """Return the scatter matrix (dim, dim), X'Y (dim, classes) and the mean (dim,).

        The first two are of centred features.

        Raises:
            ValueError: the images are kept as rows (`by_rows`).
        """
        if self.by_rows:
            raise ValueError("these images are kept as rows")
        if self._waiting:
            self._flush()
        assert self._scatter is not None and self._shift is not None
        # About the mean: sum (x - s)(x - s)' - n o o', with o the mean minus the shift s.
        offset = self._sums / self.n
        scatter = self._scatter - self.n * np.outer(offset, offset)
        class_sums = self._class_sums - self.counts[:, np.newaxis] * offset
        return scatter, 2 * class_sums.T, offset + self._shift

    def sums_of(self, piece: Piece) -> TrainingSums:
        """The contribution of these images; without side effects, so that several threads may call
        it."""
        assert self._shift is not None
        apart = np.concatenate([x for x, _ in piece]).astype(np.float64)
        apart -= self._shift
        labels = np.concatenate([labels for _, labels in piece])
        return apart.T @ apart, class_sums(apart, labels, self.n_classes)

    def count(self, sums: TrainingSums) -> None:
        """Add the sums of a piece."""
        self._start()
        assert self._scatter is not None
        scatter, of_class = sums
        self._scatter += scatter
        self._sums += of_class.sum(axis=0)
        self._class_sums += of_class

    def _ready(self) -> Piece:
        piece = self._waiting
        self._waiting = []
        self._n_waiting = 0
        if self._shift is None:
            self._shift = piece[0][0][0].astype(np.float64)
        return piece

    def _flush(self) -> None:
        """Add the images that wait to the sums."""
        self.count(self.sums_of(self._ready()))

    def _start(self) -> None:
        if self._scatter is None:
            self._scatter = np.zeros((self.dim, self.dim))
            self._sums = np.zeros(self.dim)
            self._class_sums = np.zeros((self.n_classes, self.dim))

    def _take_sums(self, part: SufficientStats) -> None:
        """Add another's sums, converted to this one's shift."""
        assert part._shift is not None and part._scatter is not None
        if self._shift is None:
            self._shift = part._shift
        self._start()
        assert self._scatter is not None
        n = part.n - part._n_waiting
        waiting = (np.bincount(y, minlength=self.n_classes) for _, y in part._waiting)
        counts = part.counts - sum(waiting, np.zeros(self.n_classes, np.int64))
        # x - s = (x - s') + d with d = s' - s: sums of products get the terms in d.
        delta = part._shift - self._shift
        cross = np.outer(delta, part._sums)
        self._scatter += part._scatter + cross + cross.T + n * np.outer(delta, delta)
        self._sums += part._sums + n * delta
        self._class_sums += part._class_sums + counts[:, np.newaxis] * delta


def class_sums(x: Float, labels: Integers, n_classes: int) -> Float:
    """Return (classes, dim) sums of the rows of x (n, dim) over each class."""
    from scipy.sparse import csc_array

    ones = np.ones(len(labels))
    one_hot = csc_array(
        (ones, labels, np.arange(len(labels) + 1)), (n_classes, len(labels))
    )
    return one_hot @ x


def n_bytes(n: int, dim: int, n_classes: int) -> int:
    """Return the approximate memory, in bytes, of one probe while it is collected and solved.

    n: images; dim: channels.
    """
    smaller = min(n, dim)
    # In float64: rows or scatter matrix as they are, centred, and as factors; the kernel matrix;
    # right-hand sides and weights. The 12 components of the weights at all l2 are float32.
    features = 3 * smaller * dim
    kernel = smaller * smaller
    weights = (4 + 12 / 2) * n_classes * dim
    return 8 * math.ceil(features + kernel + weights)


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
        return 1 / (
            n if self.constant is None else n + l2 / self.constant / self.constant
        )

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
        mean = x.mean(0)
        target = y.mean(0)
        x = x - mean
        y = y - target
        scales = algebra.scales(np.einsum("ij,ij->j", x, x), len(x))
        if scales is not None:
            x *= scales
        if len(x) < x.shape[1]:
            basis, values, rhs = _by_dual(x, y)
        else:
            values, basis = np.linalg.eigh(x.T @ x)
            values = np.maximum(values, 0)
            rhs = basis.T @ (x.T @ y)
        if scales is not None:
            basis = basis * scales[:, np.newaxis]
        return cls(basis, mean @ basis, values, rhs, target, len(x), algebra)


def _by_dual(x: Float, y: Float) -> tuple[Float, Float, Float]:
    """Basis, values and right-hand sides of centred features (n, dim) and targets (n, columns), by
    the matrix of inner products."""
    values, vectors = _eigendecomposition(x @ x.T)
    roots = np.sqrt(values)
    return x.T @ (vectors / roots), values, roots[:, np.newaxis] * (vectors.T @ y)


def _eigendecomposition(kernel: Float) -> tuple[Float, Float]:
    """Eigenvalues that are above rounding, and their eigenvectors."""
    values, vectors = np.linalg.eigh(kernel)
    kept = values > max(values[-1], 0) * len(kernel) * np.finfo(np.float64).eps
    return values[kept], vectors[:, kept]


def from_kernel(
    kernel: Float, labels: Integers, n_classes: int, algebra: Algebra
) -> Factors:
    """`Factors` of images known by their inner products only.

    `coordinates` then takes the inner products (m, n) of images with the training images.

    Args:
        kernel: (n, n) of the training images' features, centred (and scaled).
        labels: (n,) their classes.
        n_classes: number of classes.
        algebra: treatment of the intercept.
    """
    values, vectors = _eigendecomposition(kernel)
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
