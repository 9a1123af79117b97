"""Intervals of proportions: Wilson's score interval (1927), and its form for clustered samples.

A symmetric interval, value -+ t std / sqrt(n), of a proportion that no image of the sample has is
[0, 0], and that of a rare one misses it more often than not; Wilson's has a width there.

If an image contributes a fraction (of its tokens, say), or the standard error comes from a
jackknife, n is the effective sample size (Dean and Pagano 2015): that of independent yes-or-no
answers with the same standard error,

    n_effective = value (1 - value) / error^2 + 1,  n where the value is 0 or 1

which for yes-or-no answers of n images, error^2 = value (1 - value) / (n - 1), is n itself.

Two proportions of the same images have the interval of their difference, and McNemar's exact test.
Only discordant images count, those that are right in one and wrong in the other: `more` of them in
the first direction and `fewer` in the second. With 1 added to both and 2 to n, Wald's interval

    d -+ z sqrt((p + q - d^2) / (n + 2)),  p = (more + 1) / (n + 2), q = (fewer + 1) / (n + 2)
    d = p - q

keeps its coverage at small counts, and a width where there is no discordant image (Bonett and Price
2012; recommended by Fagerland et al. 2014).
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from vitsee_core.statistics.jackknife import Cells, standard_error
from vitsee_core.statistics.moments import LEVEL, t_quantile
from vitsee_core.types import Float

METHOD = (
    "95 % Wilson score interval of shares, of the number of images; where these contribute "
    "fractions, or the standard error is a jackknife's, of value (1 - value) / error^2 + 1, the "
    "number of independent answers with that error (Dean and Pagano 2015), unless the value is 0 "
    "or 1"
)
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def wilson(share: ArrayLike, n: ArrayLike, quantile: float = Z) -> tuple[Float, Float]:
    """Return low and high of Wilson's score interval (1927) of proportions; NaN where n is 0.

    Args:
        share: proportions, 0 to 1, of any shape.
        n: numbers of independent answers, of that shape.
        quantile: of the standard normal distribution; by default for 95 %.

    Example:
        >>> low, high = wilson(0.0, 10)
        >>> float(low), round(float(high), 3)
        (0.0, 0.278)
    """
    p = np.asarray(share, np.float64)
    n = np.asarray(n, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        # (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
        scale = 1 + quantile**2 / n
        centre = (p + quantile**2 / (2 * n)) / scale
        half = quantile * np.sqrt(p * (1 - p) / n + quantile**2 / (4 * n**2)) / scale
    # At 0 and 1 one end of the interval is p itself, up to rounding.
    return np.clip(centre - half, 0.0, p), np.clip(centre + half, p, 1.0)


def share_interval(
    share: ArrayLike, error: ArrayLike, n: ArrayLike, quantile: float = Z
) -> tuple[Float, Float]:
    """Return low and high of the interval of proportions with these standard errors.

    Args:
        share: proportions, 0 to 1.
        error: their standard errors; NaN gives no interval.
        n: numbers of images.
        quantile: of the standard normal distribution, or of Student's for an error from few
            replicates.
    """
    p = np.asarray(share, np.float64)
    error = np.asarray(error, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The effective sample size of Dean and Pagano (2015), see the head of this file.
        n_effective = np.where(p * (1 - p) > 0, p * (1 - p) / error**2 + 1, n)
    return wilson(p, np.where(np.isnan(error), np.nan, n_effective), quantile)


def jackknife_share(share: float, replicates: Float, n: int) -> tuple[float, float]:
    """Return low and high of the interval of a proportion whose error is a jackknife's.

    Args:
        share: the proportion.
        replicates: (blocks,) the proportion without each block; fewer than two give NaN.
        n: number of images.
    """
    n_blocks = len(replicates)
    if n_blocks < 2:
        return np.nan, np.nan
    low, high = share_interval(
        share, standard_error(replicates), n, t_quantile(n_blocks - 1)
    )
    return float(low), float(high)


def as_share(cells: Cells) -> Cells:
    """Return the cells of a proportion, or the columns of several, with Wilson intervals.

    Their `std` is sqrt(n_images) times the standard error.
    """
    n = np.asarray(cells["n_images"])
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(n > 0, cells["std"] / np.sqrt(n), np.nan)
    low, high = share_interval(cells["value"], error, n)
    return cells | {"low": low[()], "high": high[()]}


PAIRED_METHOD = (
    "Bonett and Price's interval of the difference of two paired proportions (2012), of the "
    "numbers of images that only one of both has right"
)
PAIRED_TEST = "McNemar's exact test (1947), two-sided: binomial, of the discordant images"


def difference_interval(more: int, fewer: int, n: int) -> tuple[float, float]:
    """Return low and high of the 95 % interval of (more - fewer) / n, within -1 and 1.

    Bonett and Price (2012). Args:
        more: images that are right in the first only.
        fewer: images that are right in the second only.
        n: all images.
    """
    # 1 is added to both counts, and 2 to n: the head of this file has the formula.
    p = (more + 1) / (n + 2)
    q = (fewer + 1) / (n + 2)
    d = p - q
    half = Z * sqrt((p + q - d**2) / (n + 2))
    return max(d - half, -1.0), min(d + half, 1.0)


def mcnemar(more: int, fewer: int) -> float:
    """Return the p-value of McNemar's exact test; 1 without a discordant image.

    The null hypothesis is that an image is as likely right in the first only as in the second.
    """
    from scipy.stats import binomtest

    n_discordant = more + fewer
    if n_discordant == 0:
        return 1.0
    return float(binomtest(more, n_discordant, 0.5).pvalue)
