"""The protocol of measures, and the Gram matrix that they are given.

A measure makes a state of each representation, once, and numbers of pairs of states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.similarity.representation import Shift
from vitsee_core.types import Float, Float32, Integers, Mask

# Beyond this, matrices over all pairs of images use a random sample of images.
MOST_DENSE = 4096


class Measure(ABC):
    """A measure of similarity of two representations of the same n images.

    Attributes:
        name: as in tables.
        distance: a lower value is nearer.
        symmetric: both orders of a pair have one value.
        limits: least and largest value.
        most_images: beyond this a random sample is taken; None: all.
        slow: a pair takes seconds, so that intervals and calibration are limited to few pairs.
        reduces: the state without some images follows from the state of all, see `reduced`.
    """

    name: ClassVar[str]
    distance: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (0.0, 1.0)
    most_images: ClassVar[int | None] = None
    slow: ClassVar[bool] = False
    reduces: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Any:
        """The state of one representation, whatever it is compared with; None if it has no value.
        kept: from the state of all images, for the state without some of them."""

    def kept(self, state: Any) -> tuple[int, ...]:
        """The choices, by number, that replicates without some of the images reuse from the state
        of all; none by default. Those of several states of the same images are merged."""
        return ()

    def reduced(self, state: Any, places: Integers) -> Any:
        """The state of the images at these ascending places among those of `state`, equal to
        `prepare` of their Gram matrix; None if that matrix is needed."""
        return None

    def lacking(self, gram: SiteGram) -> Mask | None:
        """A mask (n,) of images without a value in this representation; None if there are none."""
        return None

    @abstractmethod
    def permuted(self, state: Any, order: Integers) -> Any:
        """The state with image `order[i]` in place of image i."""

    @abstractmethod
    def compare(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> Float:
        """The measure of a[i] and b[j] for each (i, j) of pairs (pairs, 2), (pairs,)."""

    def null(
        self, a: Sequence[Any], b: Sequence[Any], pairs: Integers, orders: Sequence[Integers]
    ) -> Float:
        """The same with the images of `b` in each of these orders, (permutations, pairs)."""
        used = np.unique(pairs[:, 1])
        values = []
        with one_blas_thread():  # set once rather than for each order
            for order in orders:
                moved = list(b)
                for j in used:
                    moved[j] = self.permuted(b[j], order)
                values.append(self.compare(a, moved, pairs))
        return np.array(values)

    def remark(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> str | None:
        """A caveat about these values, if any."""
        return None

    @abstractmethod
    def state_bytes(self, n: int) -> int:
        """Approximate bytes of a state of n images."""


# Relative residue of cancellation after rounding to float32.
CANCELLED = 1e-6
CONSTANT = 1e-10


@dataclass(frozen=True)
class SiteGram:
    """The Gram matrix of one representation of n images in the forms that measures need."""

    shifted: Float32  # (n, n) inner products of features minus one common vector
    shift: Shift  # gives the inner products of the features themselves, see `similarity.shift`

    @property
    def n(self) -> int:
        return len(self.shifted)

    def of(self, places: Integers) -> SiteGram:
        """The Gram matrix of some of the images, in this order."""
        return SiteGram(self.shifted[np.ix_(places, places)], self.shift.of(places))

    def centred(self) -> Float:
        """The matrix K = H G H (n, n), of features minus their mean over the images."""
        g = self.shifted.astype(np.float64)
        mean = g.mean(0)
        g -= mean
        g -= mean[:, np.newaxis] - mean.mean()
        return g

    def distances(self) -> Float:
        """The Euclidean distances (n, n) between the images' features."""
        g = self.shifted.astype(np.float64)
        own = np.diagonal(g).copy()
        squared = own[:, np.newaxis] + own - 2 * g
        return np.sqrt(np.maximum(squared, 0, out=squared))

    @property
    def is_constant(self) -> bool:
        """Whether all images have the same features, up to rounding."""
        g = self.shifted.astype(np.float64)
        own = np.trace(g)
        centred = own - g.sum() / self.n
        raw = own + 2 * self.shift.along.sum() + self.n * self.shift.squared
        return not centred > max(CONSTANT * raw, 0.0)

    @property
    def zero(self) -> Mask:
        """A mask (n,) of images whose features are all 0, up to rounding."""
        own, g = np.diagonal(self.shifted).astype(np.float64), self.shift.along
        scale = own + 2 * np.abs(g) + self.shift.squared
        return own + 2 * g + self.shift.squared <= CANCELLED * scale

    @property
    def flat(self) -> Mask:
        """A mask (n,) of images whose features are all the same, so that they correlate with
        none."""
        own = np.diagonal(self.shifted).astype(np.float64)
        raw = own + 2 * self.shift.along + self.shift.squared
        spread = raw - self.shift.n_features * self.shift.means**2
        return self.zero | (spread <= CANCELLED * raw)
