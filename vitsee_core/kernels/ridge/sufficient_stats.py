"""Sufficient statistics of ridge regression, collected piece by piece."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Integers

WORTH = 4  # images per channel that make an update of the scatter matrix worthwhile
Piece = list[tuple[NDArray[np.float32], Integers]]


@dataclass(frozen=True)
class TrainingSums:
    """Sums over a piece of training images, minus the shift."""

    scatter: Float  # (dim, dim)
    of_class: Float  # (classes, dim) sums over each class


class SufficientStats:
    """Training images of one probe: rows while they are fewer than channels, sums beyond.

    With n images of `dim` channels and n < dim the rows are kept (the dual needs them, and they are
    smaller), else n, the sum, the scatter matrix (dim, dim) and one sum per class: X'Y of targets
    +-1 is twice the class sums of centred features. Sums are of the features minus the first
    image's, in float64: a large common mean costs no digits, equal features leave 0.
    """

    def __init__(self, dim: int, n_classes: int) -> None:
        self.dim, self.n_classes = dim, n_classes
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
        """Queue these images; returns the queued images once they are worth processing. Their sums
        must then go to `count`, in the pieces' order."""
        if len(x) == 0:
            return None
        self.n += len(x)
        self.counts += np.bincount(labels, minlength=self.n_classes)
        self._waiting.append((x, labels))
        self._n_waiting += len(x)
        return self._ready() if self._n_waiting >= WORTH * self.dim else None

    def joined(self, other: SufficientStats) -> SufficientStats:
        """The statistics of both sets of images."""
        out = SufficientStats(self.dim, self.n_classes)
        for part in (self, other):
            if part._scatter is not None and part._shift is not None:
                out._take_sums(part)
        for part in (self, other):
            for x, labels in part._waiting:
                out._waiting.append((x, labels))
                out._n_waiting += len(x)
        out.n, out.counts = self.n + other.n, self.counts + other.counts
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
        """Scatter matrix of the centred features (dim, dim), X'Y (dim, classes) and the mean
        (dim,), if not `by_rows`."""
        if self.by_rows:
            raise ValueError("these images are kept as rows")
        if self._waiting:
            self._flush()
        assert self._scatter is not None and self._shift is not None
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
        return TrainingSums(apart.T @ apart, class_sums(apart, labels, self.n_classes))

    def count(self, sums: TrainingSums) -> None:
        """Add the sums of a piece."""
        self._start()
        assert self._scatter is not None
        self._scatter += sums.scatter
        self._sums += sums.of_class.sum(axis=0)
        self._class_sums += sums.of_class

    def _ready(self) -> Piece:
        piece, self._waiting, self._n_waiting = self._waiting, [], 0
        if self._shift is None:
            self._shift = piece[0][0][0].astype(np.float64)
        return piece

    def _flush(self) -> None:
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
        delta = part._shift - self._shift
        cross = np.outer(delta, part._sums)
        self._scatter += part._scatter + cross + cross.T + n * np.outer(delta, delta)
        self._sums += part._sums + n * delta
        self._class_sums += part._class_sums + counts[:, np.newaxis] * delta


def class_sums(x: Float, labels: Integers, n_classes: int) -> Float:
    """(classes, dim) sums of the rows of x (n, dim) over each class."""
    from scipy.sparse import csc_array

    ones = np.ones(len(labels))
    one_hot = csc_array((ones, labels, np.arange(len(labels) + 1)), (n_classes, len(labels)))
    return one_hot @ x


def n_bytes(n: int, dim: int, n_classes: int) -> int:
    """Approximate memory of one probe while it is collected and solved: three times the smaller of
    rows and scatter matrix (kept, centred, factors); right-hand sides, weights, and up to a dozen
    components of the weights at all l2, in float32."""
    small = min(n, dim)
    return 8 * math.ceil(3 * small * dim + small * small + (4 + 12 / 2) * n_classes * dim)
