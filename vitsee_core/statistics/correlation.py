"""How predictions compare with measurements that are repeated: correlation, explained
variance, and their noise ceiling.

    r = corr(y, p)        r2 = 1 - sum (y - p)^2 / sum (y - mean y)^2

of a column's responses y, the mean over repeats, and predictions p, over the images of a
test set; with several test sets (cross-validation) the mean over them. A prediction that
is the same for all images has r = 0.

The noise ceiling is the reliability of y: the correlation over images between the means of
two halves of the repeats, averaged over random halves, and corrected from h repeats per
half to all R by Spearman and Brown's formula (1910),

    reliability = k c / (1 + (k - 1) c),   k = R / h

which for halves is 2 c / (1 + c), as in Schrimpf et al. 2018. It is the share of the
variance of y that a repetition of the measurement explains, so that the noise-free
response would have r2 equal to it and r equal to its square root; `r_normalised` is r over
that root, `r2_normalised` r2 over the reliability (the share of the explainable variance
that is explained; Cadena et al. 2019 take the noise's variance from the repeats instead).
Other work divides r by the reliability itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.statistics.jackknife import block_sums
from vitsee_core.types import Float, Integers

N_SPLITS = 100  # random halves of the repeats
# A variance below this share of the mean square is rounding.
VARIANCE_ROUNDING = 1e-12


@dataclass(frozen=True)
class CorrelationSums:
    """Sums over images, (..., columns), from which r and r2 follow.

    Measured responses y and predictions p are both taken minus the same number, so that a
    large mean costs no digits.

    Attributes:
        n: number of images.
        y: sum of y.
        p: sum of p.
        yy: sum of y^2.
        pp: sum of p^2.
        yp: sum of y p.
    """

    n: Float
    y: Float
    p: Float
    yy: Float
    pp: Float
    yp: Float

    @classmethod
    def by_block(
        cls, y: Float, p: Float, labels: Integers, n_blocks: int
    ) -> CorrelationSums:
        """Return the sums over each block of images, (blocks, columns).

        Args:
            y: (images, columns) measured responses.
            p: (images, columns) predicted responses.
            labels: (images,) block of each image.
            n_blocks: number of blocks.
        """

        def sums(values: Float) -> Float:
            """Return the sums (blocks, columns) of values (images, columns)."""
            return block_sums(values, labels, n_blocks).swapaxes(-1, -2)

        return cls(
            n=sums(np.ones_like(y)),
            y=sums(y),
            p=sums(p),
            yy=sums(y * y),
            pp=sums(p * p),
            yp=sums(y * p),
        )

    def total(self) -> CorrelationSums:
        """Return the sums over all blocks, (columns,)."""
        return CorrelationSums(**{name: sums.sum(0) for name, sums in vars(self).items()})

    def without(self) -> CorrelationSums:
        """Return the sums over all blocks but one, for each left-out block, (blocks,
        columns)."""
        return CorrelationSums(
            **{name: sums.sum(0) - sums for name, sums in vars(self).items()}
        )

    @property
    def r(self) -> Float:
        """Pearson's correlation; 0 where the prediction has no variance, NaN where y
        has none."""
        n = np.maximum(self.n, 1)
        variance_y = self.yy - self.y**2 / n
        variance_p = self.pp - self.p**2 / n
        covariance = self.yp - self.y * self.p / n
        p_is_constant = variance_p <= VARIANCE_ROUNDING * self.pp
        with np.errstate(invalid="ignore", divide="ignore"):
            r = np.where(
                p_is_constant, 0.0, covariance / np.sqrt(variance_y * variance_p)
            )
        # Rounding can exceed 1 by a digit.
        r = np.clip(r, -1, 1)
        return np.where(variance_y > VARIANCE_ROUNDING * self.yy, r, np.nan)

    @property
    def r2(self) -> Float:
        """The explained variance: 1 less the squared error over the variance; NaN where y
        has none."""
        variance_y = self.yy - self.y**2 / np.maximum(self.n, 1)
        squared_error = self.yy - 2 * self.yp + self.pp
        with np.errstate(invalid="ignore", divide="ignore"):
            r2: Float = 1 - squared_error / variance_y
        return np.where(variance_y > VARIANCE_ROUNDING * self.yy, r2, np.nan)


def reliability(repeats: Float, seed: int) -> Float | None:
    """Return the reliability of the mean over repeats, (columns,).

    It is the split-half correlation, averaged over random halves and corrected for their
    length (Spearman and Brown 1910; Schrimpf et al. 2018). NaN for a column whose halves
    have no variance.

    Args:
        repeats: (repeats, images, columns).
        seed: seed of the random halves.

    Returns:
        The reliability; None with a single repeat.
    """
    n_repeats = len(repeats)
    if n_repeats < 2:
        return None
    # Of an odd number one repeat is left out of each split, another one every time.
    n_half = n_repeats // 2
    # Two repeats have one split only.
    n_splits = 1 if n_repeats == 2 else N_SPLITS
    rng = np.random.default_rng((seed, 4))
    correlations = []
    for _ in range(n_splits):
        order = rng.permutation(n_repeats)
        first_half = mean_of_repeats(repeats[order[:n_half]])
        second_half = mean_of_repeats(repeats[order[n_half : 2 * n_half]])
        correlations.append(_correlation(first_half, second_half))
    c = np.mean(correlations, axis=0)
    k = n_repeats / n_half
    with np.errstate(invalid="ignore", divide="ignore"):
        corrected: Float = k * c / (1 + (k - 1) * c)  # Spearman-Brown
    return corrected


def mean_of_repeats(repeats: Float) -> Float:
    """Return the mean over the finite repeats, (images, columns); NaN where none is
    finite."""
    is_finite = np.isfinite(repeats)
    n_finite = is_finite.sum(0)
    sums = np.where(is_finite, repeats, 0).sum(0)
    return np.where(n_finite > 0, sums / np.maximum(n_finite, 1), np.nan)


def _correlation(a: Float, b: Float) -> Float:
    """Return Pearson's correlation of a and b (images, columns) over images that have
    both."""
    has_both = np.isfinite(a) & np.isfinite(b)
    n = np.maximum(has_both.sum(0), 1)
    mean_a = np.where(has_both, a, 0).sum(0) / n
    mean_b = np.where(has_both, b, 0).sum(0) / n
    a = np.where(has_both, a - mean_a, 0)
    b = np.where(has_both, b - mean_b, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        r: Float = (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return r
