"""Predicted against measured responses: correlation, explained variance, and their noise ceiling.

    r = corr(y, p)        r2 = 1 - sum (y - p)^2 / sum (y - mean y)^2

of a column's responses y, the mean over repeats, and predictions p, over the images of a test set;
with several test sets (cross-validation) the mean over them. A prediction that is the same for all
images has r = 0.

The noise ceiling is the reliability of y: the correlation over images between the means of two
halves of the repeats, averaged over random halves, and corrected from h repeats per half to all R
by Spearman and Brown's formula (1910),

    reliability = k c / (1 + (k - 1) c),   k = R / h

which for halves is 2 c / (1 + c), as in Schrimpf et al. 2018. It is the share of the variance of y
that a repetition of the measurement explains, so that the noise-free response would have r2 equal
to it and r equal to its square root; `r_normalised` is r over that root, `r2_normalised` r2 over
the reliability (the share of the explainable variance that is explained; Cadena et al. 2019 take
the noise's variance from the repeats instead). Other work divides r by the reliability itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.statistics.jackknife import block_sums
from vitsee_core.types import Float, Integers

SPLITS = 100  # random halves of the repeats


@dataclass(frozen=True)
class Sums:
    """(..., columns) sums over images: their number, y, p, y^2, p^2 and y p. y and p are about the
    same number, so that a large mean costs no digits."""

    n: Float
    y: Float
    p: Float
    yy: Float
    pp: Float
    yp: Float

    @classmethod
    def by_block(cls, y: Float, p: Float, labels: Integers, n_blocks: int) -> Sums:
        """(blocks, columns) of measured and predicted responses (images, columns); labels:
        (images,) each one's block."""
        parts = (np.ones_like(y), y, p, y * y, p * p, y * p)
        return cls(*(block_sums(part, labels, n_blocks).swapaxes(-1, -2) for part in parts))

    def total(self) -> Sums:
        """(columns,) over all blocks."""
        return Sums(*(part.sum(0) for part in vars(self).values()))

    def without(self) -> Sums:
        """(blocks, columns) over all blocks but each."""
        return Sums(*(part.sum(0) - part for part in vars(self).values()))

    @property
    def r(self) -> Float:
        """Pearson's correlation; 0 where the prediction has no variance, NaN where y has none."""
        n = np.maximum(self.n, 1)
        of_y, of_p = self.yy - self.y**2 / n, self.pp - self.p**2 / n
        both = self.yp - self.y * self.p / n
        flat = of_p <= 1e-12 * self.pp
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(flat, 0.0, both / np.sqrt(of_y * of_p))
        return np.where(of_y > 1e-12 * self.yy, np.clip(found, -1, 1), np.nan)

    @property
    def r2(self) -> Float:
        """1 less the squared error over the variance; NaN where y has none."""
        of_y = self.yy - self.y**2 / np.maximum(self.n, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Float = 1 - (self.yy - 2 * self.yp + self.pp) / of_y
        return np.where(of_y > 1e-12 * self.yy, found, np.nan)


def reliability(repeats: Float, seed: int) -> Float | None:
    """(columns,) the reliability of the mean over repeats (repeats, images, columns), see the
    module's text; None with one repeat, NaN for a column whose halves have no variance."""
    n_repeats = len(repeats)
    if n_repeats < 2:
        return None
    half, rng = n_repeats // 2, np.random.default_rng((seed, 4))
    n_splits = 1 if n_repeats == 2 else SPLITS
    found = []
    for _ in range(n_splits):
        order = rng.permutation(n_repeats)
        halves = (repeats[order[:half]], repeats[order[half : 2 * half]])
        found.append(_correlation(*map(mean_of_repeats, halves)))
    c = np.mean(found, axis=0)
    k = n_repeats / half
    with np.errstate(invalid="ignore", divide="ignore"):
        corrected: Float = k * c / (1 + (k - 1) * c)
    return corrected


def mean_of_repeats(repeats: Float) -> Float:
    """(images, columns) over the repeats that are there; NaN where none is."""
    there = np.isfinite(repeats)
    n = there.sum(0)
    return np.where(n > 0, np.where(there, repeats, 0).sum(0) / np.maximum(n, 1), np.nan)


def _correlation(a: Float, b: Float) -> Float:
    """(columns,) over the images (images, columns) that both have."""
    both = np.isfinite(a) & np.isfinite(b)
    n = np.maximum(both.sum(0), 1)
    means = [np.where(both, v, 0).sum(0) / n for v in (a, b)]
    a, b = (np.where(both, v - mean, 0) for v, mean in zip((a, b), means, strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Float = (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return found
