"""Fit ridge regressions in closed form, to classes or to any targets, from sums over batches.

`SufficientStats` collects the training images, `Factors` decomposes them so that any l2 costs
little, `solve` is for one l2 alone.

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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Integers

WORTH = 4  # images per channel that make an update of the scatter matrix worthwhile
EPSILON = 1e-5  # added to standard deviations, as in big_vision
Piece = list[tuple[NDArray[np.float32], Integers]]  # features (m, dim) and labels (m,)


class TrainingSums(NamedTuple):
    """Sums over the images of a piece, of features minus the shift."""

    scatter: Float  # (dim, dim)
    class_sums: Float  # (classes, dim)


class SufficientStats:
    """The training images of one probe: rows while they are fewer than channels, sums beyond.

    Args:
        dim: number of channels.
        n_classes: number of classes.

    With n images of `dim` channels and n < dim the rows are kept (the dual needs them, and they are
    smaller), else n, the sum, the scatter matrix (dim, dim) and one sum per class: X'Y of targets
    +-1 is twice the class sums of centred features. Sums are of the features minus the first
    image's, in float64: a large common mean costs no digits, equal features leave 0.
    """

    def __init__(self, dim: int, n_classes: int) -> None:
        self.dim = dim
        self.n_classes = n_classes
        self.n = 0
        self.counts: Integers = np.zeros(n_classes, np.int64)  # images, by class
        self._shift: Float | None = None  # (dim,)
        self._scatter: Float | None = None  # (dim, dim), once there are sums
        self._sums = np.zeros(0)  # (dim,)
        self._class_sums = np.zeros((0, 0))  # (classes, dim)
        # Images that are in no sum yet.
        self._waiting: Piece = []
        self._n_waiting = 0

    def add(self, x: NDArray[np.float32], labels: Integers) -> None:
        """Count these images; `x`, (m, dim), is kept and must not change."""
        piece = self.queue(x, labels)
        if piece is not None:
            self.add_sums(self.compute_sums(piece))

    def queue(self, x: NDArray[np.float32], labels: Integers) -> Piece | None:
        """Queue these images, and return all queued images once they are worth processing.

        None before that. The sums of what is returned must go to `add_sums`, in the pieces' order.
        """
        if len(x) == 0:
            return None
        self.n += len(x)
        self.counts += np.bincount(labels, minlength=self.n_classes)
        self._waiting.append((x, labels))
        self._n_waiting += len(x)
        if self._n_waiting >= WORTH * self.dim:
            return self._take_queue()
        return None

    def merge(self, other: SufficientStats) -> SufficientStats:
        """Return the statistics of both sets of images; neither is changed."""
        out = SufficientStats(self.dim, self.n_classes)
        for stats in (self, other):
            if stats._scatter is not None and stats._shift is not None:
                out._add_stats(stats)
        for stats in (self, other):
            for x, labels in stats._waiting:
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
        """Return centred features (n, dim), their mean (dim,) and labels (n,), if `by_rows`."""
        x = np.concatenate([x for x, _ in self._waiting]).astype(np.float64)
        labels = np.concatenate([labels for _, labels in self._waiting])
        shift = x[0].copy()  # first, so that a large common mean costs no digits
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

    def compute_sums(self, piece: Piece) -> TrainingSums:
        """Return the sums of these images; changes nothing, so that several threads may call it."""
        assert self._shift is not None
        shifted = np.concatenate([x for x, _ in piece]).astype(np.float64)
        shifted -= self._shift
        labels = np.concatenate([labels for _, labels in piece])
        return TrainingSums(
            scatter=shifted.T @ shifted,
            class_sums=class_sums(shifted, labels, self.n_classes),
        )

    def add_sums(self, sums: TrainingSums) -> None:
        """Add the sums of a piece."""
        self._allocate()
        assert self._scatter is not None
        self._scatter += sums.scatter
        self._sums += sums.class_sums.sum(axis=0)
        self._class_sums += sums.class_sums

    def _take_queue(self) -> Piece:
        """Empty the queue and return what was in it; the first image ever is the shift."""
        piece = self._waiting
        self._waiting = []
        self._n_waiting = 0
        if self._shift is None:
            self._shift = piece[0][0][0].astype(np.float64)
        return piece

    def _flush(self) -> None:
        """Add the images that wait to the sums."""
        self.add_sums(self.compute_sums(self._take_queue()))

    def _allocate(self) -> None:
        """Make sums of 0, unless there are sums already."""
        if self._scatter is None:
            self._scatter = np.zeros((self.dim, self.dim))
            self._sums = np.zeros(self.dim)
            self._class_sums = np.zeros((self.n_classes, self.dim))

    def _add_stats(self, other: SufficientStats) -> None:
        """Add another's sums, converted to this one's shift."""
        assert other._shift is not None and other._scatter is not None
        if self._shift is None:
            self._shift = other._shift
        self._allocate()
        assert self._scatter is not None
        # The images in the other's sums, which are all but those in its queue.
        n = other.n - other._n_waiting
        counts = other.counts.copy()
        for _, labels in other._waiting:
            counts -= np.bincount(labels, minlength=self.n_classes)
        # x - s = (x - s') + d with d = s' - s: sums of products get the terms in d.
        delta = other._shift - self._shift
        cross = np.outer(delta, other._sums)
        self._scatter += other._scatter + cross + cross.T + n * np.outer(delta, delta)
        self._sums += other._sums + n * delta
        self._class_sums += other._class_sums + counts[:, np.newaxis] * delta


def class_sums(x: Float, labels: Integers, n_classes: int) -> Float:
    """Return the sums (classes, dim) of the rows of x (n, dim) over each class."""
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
    """How a ridge regression treats the intercept and the features' scales.

    Attributes:
        standardise: divide features by their standard deviation over the training images (over n)
            + 1e-5.
        constant: value of a constant column whose weight is the intercept, penalised as the others
            are; None: the intercept is not penalised.
    """

    standardise: bool = False
    constant: float | None = None

    def intercept(self, mean_target: Float, n: int, l2: float) -> Float:
        """Return the scores (classes,) of an image at the mean of the n training images."""
        if self.constant is None:
            return mean_target
        # c^2 n / (c^2 n + l2), for any c.
        return mean_target / (1 + l2 / self.constant / self.constant / n)

    def leverage(self, n: int, l2: float) -> float:
        """Return the intercept's share in each training image's leverage."""
        if self.constant is None:
            return 1 / n
        # c^2 / (c^2 n + l2)
        return 1 / (n + l2 / self.constant / self.constant)

    def scales(self, sums_of_squares: Float, n: int) -> Float | None:
        """Return the factors (dim,) of the centred features; None if they are not scaled."""
        if not self.standardise:
            return None
        return 1 / (np.sqrt(np.maximum(sums_of_squares, 0) / n) + EPSILON)


@dataclass(frozen=True)
class Linear:
    """A linear model of features: scores(x) = x @ weights + bias."""

    weights: Float  # (dim, classes)
    bias: Float  # (classes,)

    def scores(self, x: Float) -> Float:
        """Return the scores (m, classes) of features (m, dim)."""
        return x @ self.weights + self.bias


@dataclass(frozen=True)
class Factors:
    """A training set decomposed, so that any l2 costs little.

    Attributes:
        basis: (dim, r) maps features to coordinates, along the eigenvectors of X'X.
        origin: (r,) the mean's coordinates.
        values: (r,) eigenvalues of X'X, which is diagonal in these coordinates.
        xty: (r, classes) X'Y in these coordinates.
        mean_target: (classes,) mean of the targets.
        n: number of training images.
        algebra: treatment of the intercept and of scales.
    """

    basis: Float
    origin: Float
    values: Float
    xty: Float
    mean_target: Float
    n: int
    algebra: Algebra

    def coordinates(self, x: Float) -> Float:
        """Return the coordinates (m, r) of features (m, dim), which serve all l2."""
        coordinates: Float = x @ self.basis
        coordinates -= self.origin
        return coordinates

    def scores(self, coordinates: Float, l2: float) -> Float:
        """Return the scores (m, classes) of images with these coordinates (m, r)."""
        scores: Float = coordinates @ self.weights(l2)
        scores += self.algebra.intercept(self.mean_target, self.n, l2)
        return scores

    def linear(self, l2: float) -> Linear:
        """Return the model of features at one l2."""
        weights = self.weights(l2)
        intercept = self.algebra.intercept(self.mean_target, self.n, l2)
        return Linear(self.basis @ weights, intercept - self.origin @ weights)

    def weights(self, l2: float) -> Float:
        """Return the weights (r, classes) of coordinates at one l2."""
        return self.xty / (self.values + l2)[:, np.newaxis]

    def leverages(self, coordinates: Float, l2s: Sequence[float]) -> Float:
        """Return the weight (m, l2s) of each training image's own target in its score.

        coordinates: (m, r) of training images.
        """
        inverses = 1 / (self.values[:, np.newaxis] + np.array(l2s))  # (r, l2s)
        leverages: Float = np.square(coordinates) @ inverses
        return leverages + [self.algebra.leverage(self.n, l2) for l2 in l2s]

    @classmethod
    def from_stats(cls, images: SufficientStats, algebra: Algebra) -> Factors:
        """Return the decomposition of X'X, or of XX' if it is smaller."""
        if images.by_rows:
            x, mean, labels, scales = _scaled_rows(images, algebra)
            basis, values, xty = _decompose_rows(x, targets(labels, images.n_classes))
        else:
            scatter, xty, mean, scales = _scaled_moments(images, algebra)
            values, basis = np.linalg.eigh(scatter)
            values = np.maximum(values, 0)  # rounding
            xty = basis.T @ xty
        if scales is not None:
            basis = basis * scales[:, np.newaxis]
        return cls(
            basis=basis,
            origin=mean @ basis,
            values=values,
            xty=xty,
            mean_target=mean_target(images.counts),
            n=images.n,
            algebra=algebra,
        )

    @classmethod
    def from_targets(cls, x: Float, y: Float, algebra: Algebra) -> Factors:
        """Return the decomposition for targets that are numbers: one for all columns of `y`.

        Args:
            x: (n, dim) features.
            y: (n, columns) targets.
            algebra: treatment of the intercept and of scales.
        """
        mean = x.mean(0)
        target_mean = y.mean(0)
        x = x - mean
        y = y - target_mean
        scales = algebra.scales(np.einsum("ij,ij->j", x, x), len(x))
        if scales is not None:
            x *= scales
        if len(x) < x.shape[1]:
            basis, values, xty = _decompose_rows(x, y)
        else:
            values, basis = np.linalg.eigh(x.T @ x)
            values = np.maximum(values, 0)  # rounding
            xty = basis.T @ (x.T @ y)
        if scales is not None:
            basis = basis * scales[:, np.newaxis]
        return cls(
            basis=basis,
            origin=mean @ basis,
            values=values,
            xty=xty,
            mean_target=target_mean,
            n=len(x),
            algebra=algebra,
        )


def _decompose_rows(x: Float, y: Float) -> tuple[Float, Float, Float]:
    """Return basis, values and xty of `Factors`, by the n x n matrix XX' (dual).

    Args:
        x: (n, dim) centred features.
        y: (n, columns) centred targets.
    """
    # XX' = U diag(v) U' gives X'X = Q diag(v) Q' with Q = X'U / sqrt(v), and Q'X'Y = sqrt(v) U'Y.
    values, vectors = _eigendecomposition(x @ x.T)
    roots = np.sqrt(values)
    return x.T @ (vectors / roots), values, roots[:, np.newaxis] * (vectors.T @ y)


def _eigendecomposition(kernel: Float) -> tuple[Float, Float]:
    """Return the eigenvalues (r,) of (n, n) that are above rounding, and their vectors (n, r)."""
    values, vectors = np.linalg.eigh(kernel)
    rounding = max(values[-1], 0) * len(kernel) * np.finfo(np.float64).eps
    is_above = values > rounding
    return values[is_above], vectors[:, is_above]


def from_kernel(
    kernel: Float, labels: Integers, n_classes: int, algebra: Algebra
) -> Factors:
    """Return the `Factors` of images known by their inner products only.

    Their method `coordinates` then takes the inner products (m, n) of images with the training
    images.

    Args:
        kernel: (n, n) of the training images' features, centred (and scaled).
        labels: (n,) their classes.
        n_classes: number of classes.
        algebra: treatment of the intercept.
    """
    values, vectors = _eigendecomposition(kernel)
    roots = np.sqrt(values)
    return Factors(
        basis=vectors / roots,
        origin=np.zeros(len(values)),  # inner products are of centred features
        values=values,
        xty=roots[:, np.newaxis] * (vectors.T @ targets(labels, n_classes)),
        mean_target=mean_target(np.bincount(labels, minlength=n_classes)),
        n=len(kernel),
        algebra=algebra,
    )


def _scaled_rows(
    images: SufficientStats, algebra: Algebra
) -> tuple[Float, Float, Integers, Float | None]:
    """Return features (n, dim), centred and scaled; their mean (dim,), labels (n,) and scales
    (dim,), None if they are not scaled."""
    x, mean, labels = images.rows()
    scales = algebra.scales(np.einsum("ij,ij->j", x, x), images.n)
    if scales is not None:
        x *= scales
    return x, mean, labels, scales


def _scaled_moments(
    images: SufficientStats, algebra: Algebra
) -> tuple[Float, Float, Float, Float | None]:
    """Return X'X (dim, dim) and X'Y (dim, classes) of scaled features; their mean (dim,) and scales
    (dim,), None if they are not scaled."""
    scatter, xty, mean = images.moments()
    scales = algebra.scales(np.diagonal(scatter), images.n)
    if scales is not None:
        scatter = scatter * np.outer(scales, scales)
        xty = xty * scales[:, np.newaxis]
    return scatter, xty, mean, scales


def solve(images: SufficientStats, algebra: Algebra, l2: float) -> Linear:
    """Return the model at a single l2, without a decomposition (a tenth of its cost)."""
    if images.by_rows:
        x, mean, labels, scales = _scaled_rows(images, algebra)
        kernel = x @ x.T
        kernel[np.diag_indices_from(kernel)] += l2
        weights = x.T @ np.linalg.solve(kernel, targets(labels, images.n_classes))
    else:
        scatter, xty, mean, scales = _scaled_moments(images, algebra)
        scatter[np.diag_indices_from(scatter)] += l2
        weights = np.linalg.solve(scatter, xty)
    if scales is not None:
        weights = weights * scales[:, np.newaxis]
    intercept = algebra.intercept(mean_target(images.counts), images.n, l2)
    return Linear(weights, intercept - mean @ weights)


def rank_true_classes(scores: Float, labels: Integers) -> Integers:
    """Return the number (m,) of classes that are ranked before each image's true class.

    Among equal scores the lower class comes first, and NaN comes before any number.

    Args:
        scores: (m, classes).
        labels: (m,) true classes.
    """
    n_classes = scores.shape[1]
    true_scores = scores[np.arange(len(labels)), labels][:, np.newaxis]
    # Counted by <=, which is false for NaN.
    n_above: Integers = n_classes - np.count_nonzero(scores <= true_scores, axis=1)
    # Ties are rare: only images that have some are looked at.
    equal = scores == true_scores
    tied = np.flatnonzero(np.count_nonzero(equal, axis=1) > 1)
    is_lower_class = np.arange(n_classes) < labels[tied, np.newaxis]
    n_above[tied] += np.count_nonzero(equal[tied] & is_lower_class, axis=1)
    return n_above


def targets(labels: Integers, n_classes: int) -> Float:
    """Return centred targets (n, classes): +1 for an image's class and -1 for the others, minus
    their mean over the images."""
    out = np.full((len(labels), n_classes), -1.0)
    out[np.arange(len(labels)), labels] = 1.0
    out -= out.mean(axis=0)
    return out


def mean_target(counts: Integers) -> Float:
    """Return the mean (classes,) of targets of +-1, from the images of each class."""
    return 2 * counts / counts.sum() - 1
