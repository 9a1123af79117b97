"""The protocol of measures: a state per representation, computed once, and numbers from pairs of
states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from vitsee_core.analyses.similarity.site_gram import SiteGram
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.types import Float, Integers, Mask

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
        """What replicates without some of the images reuse from the state of all: choices by
        number; none by default. Those of several states of the same images are merged."""
        return ()

    def reduced(self, state: Any, places: Integers) -> Any:
        """The state of the images at these ascending places among those of `state`, equal to
        `prepare` of their Gram matrix; None if that matrix is needed."""
        return None

    def lacking(self, gram: SiteGram) -> Mask | None:
        """(n,) images without a value in this representation; None if there cannot be any."""
        return None

    @abstractmethod
    def permuted(self, state: Any, order: Integers) -> Any:
        """The state with image `order[i]` in place of image i."""

    @abstractmethod
    def compare(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> Float:
        """(pairs,) the measure of a[i] and b[j] for each (i, j) of pairs (n, 2)."""

    def null(
        self, a: Sequence[Any], b: Sequence[Any], pairs: Integers, orders: Sequence[Integers]
    ) -> Float:
        """(permutations, pairs) the same with the images of `b` in each of these orders."""
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
