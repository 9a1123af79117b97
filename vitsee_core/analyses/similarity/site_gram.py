"""The Gram matrix of one representation in the forms that measures need: centred, raw, cosines,
distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.similarity.shift import Shift
from vitsee_core.types import Float, Float32, Integers, Mask

# Relative residue of cancellation after rounding to float32.
CANCELLED = 1e-6
CONSTANT = 1e-10


@dataclass(frozen=True)
class SiteGram:
    """Gram matrix of n images."""

    shifted: Float32  # (n, n) inner products of features minus one common vector
    shift: Shift  # gives the inner products of the features themselves, see `similarity.shift`

    @property
    def n(self) -> int:
        return len(self.shifted)

    def of(self, places: Integers) -> SiteGram:
        """Restricted to some of the images, in this order."""
        return SiteGram(self.shifted[np.ix_(places, places)], self.shift.of(places))

    def centred(self) -> Float:
        """(n, n) K = H G H, of features minus their mean over the images."""
        g = self.shifted.astype(np.float64)
        mean = g.mean(0)
        g -= mean
        g -= mean[:, np.newaxis] - mean.mean()
        return g

    def distances(self) -> Float:
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
        """(n,) images whose features are all 0, up to rounding."""
        own, g = np.diagonal(self.shifted).astype(np.float64), self.shift.along
        scale = own + 2 * np.abs(g) + self.shift.squared
        return own + 2 * g + self.shift.squared <= CANCELLED * scale

    @property
    def flat(self) -> Mask:
        """(n,) images whose features are all the same (so that none correlates)."""
        own = np.diagonal(self.shifted).astype(np.float64)
        raw = own + 2 * self.shift.along + self.shift.squared
        spread = raw - self.shift.n_features * self.shift.means**2
        return self.zero | (spread <= CANCELLED * raw)
