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
    """Low and high of Wilson's interval for shares of n; NaN where n is 0."""
    p = np.asarray(share, np.float64)
    n = np.asarray(n, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = 1 + quantile**2 / n
        centre = (p + quantile**2 / (2 * n)) / scale
        half = quantile * np.sqrt(p * (1 - p) / n + quantile**2 / (4 * n**2)) / scale
    # At 0 and 1 one end of the interval is p itself, up to rounding.
    return np.clip(centre - half, 0.0, p), np.clip(centre + half, p, 1.0)


def share_interval(
    share: ArrayLike, error: ArrayLike, n: ArrayLike, quantile: float = Z
) -> tuple[Float, Float]:
    """Low and high of the interval of shares with these standard errors.

    Args:
        share: 0 to 1.
        error: its standard error; NaN gives no interval.
        n: images.
        quantile: of the standard normal distribution, or of Student's for an error from few
            replicates.
    """
    p = np.asarray(share, np.float64)
    error = np.asarray(error, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = np.where(p * (1 - p) > 0, p * (1 - p) / error**2 + 1, n)
    return wilson(p, np.where(np.isnan(error), np.nan, effective), quantile)


def jackknife_share(share: float, replicates: Float, n: int) -> tuple[float, float]:
    """Low and high of the interval of a share of n images with these replicates (blocks,); NaN with
    fewer than two of them."""
    m = len(replicates)
    if m < 2:
        return np.nan, np.nan
    low, high = share_interval(share, standard_error(replicates), n, t_quantile(m - 1))
    return float(low), float(high)


def as_share(cells: Cells) -> Cells:
    """The cells of a proportion, or the columns of several, with their Wilson intervals; std:
    sqrt(n_images) times the standard error."""
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
    """Low and high of the 95 % interval of (more - fewer) / n, within -1 and 1."""
    p = (more + 1) / (n + 2)
    q = (fewer + 1) / (n + 2)
    d = p - q
    half = Z * sqrt((p + q - d**2) / (n + 2))
    return max(d - half, -1.0), min(d + half, 1.0)


def mcnemar(more: int, fewer: int) -> float:
    """The p-value that both directions are equally likely; 1 without a discordant image."""
    from scipy.stats import binomtest

    n = more + fewer
    return float(binomtest(more, n, 0.5).pvalue) if n else 1.0
