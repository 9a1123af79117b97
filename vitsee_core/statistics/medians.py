"""Medians over images and their 95 % intervals, which assume no shape of the distribution.

A jackknife of a median is not consistent: without a block of d of n images the median moves by
single values, unless d is far above sqrt(n) (Efron 1979; Shao and Wu 1989). Here instead:

- One value an image: the interval lies between two order statistics, x_(k) and x_(n + 1 - k). The
  number of images below the true median is binomial with 1/2, whatever the distribution, so that k
  is the largest rank with P(Binomial(n, 1/2) < k) <= 0.025. Fewer than 6 images have no such k.
- Several values an image (the norms of its tokens), which are not independent: Woodruff's interval
  (1952). An image counts by its share p_i of values below the pooled median; the mean of the p_i
  has a standard error over images, and 1/2 -+ t(0.975, n - 1) of it are the levels of the pooled
  quantiles that are the interval's ends.

The standard error of a median is the interval's width over twice its quantile of the normal
distribution, or of Student's (McKean and Schrader 1984; Price and Bonett 2001). Images share in it
as the median's influence function says: by the sign of x_i - median, or by 1/2 - p_i. So means over
tokens and differences between rows have a standard error of the same images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from vitsee_core.statistics.moments import LEVEL, t_quantile
from vitsee_core.types import Float, Mask

MIN_IMAGES = 6  # 1 - 2 / 2^5 = 94 % of intervals from x_(1) to x_(5) contain the median
TAIL = (1 - LEVEL) / 2


class Ranks(NamedTuple):
    """The order statistics that are the ends of an interval of the median, counted from 0."""

    low: int
    high: int
    confidence: float  # at least `LEVEL`: how often such an interval contains the median


@lru_cache(maxsize=4096)
def median_ranks(n: int) -> Ranks | None:
    """Return the ranks of the interval of a median of n independent values; None for n < 6."""
    if n < MIN_IMAGES:
        return None
    i = np.arange(1, n + 1)
    # log C(n, k) = sum over i <= k of log((n + 1 - i) / i): the numbers themselves overflow.
    log_counts = np.concatenate([[0.0], np.cumsum(np.log((n + 1 - i) / i))])
    cumulative = np.cumsum(
        np.exp(log_counts - n * math.log(2))
    )  # P(Binomial(n, 1/2) <= k)
    low = int(np.searchsorted(cumulative, TAIL, "right")) - 1
    return Ranks(low=low, high=n - 1 - low, confidence=1 - 2 * float(cumulative[low]))


@dataclass(frozen=True)
class Medians:
    """Medians over images with their intervals, (rows,) each; NaN without a value, or interval."""

    value: Float
    low: Float
    high: Float
    # (rows, images) an image's share in the error, as for a mean: the standard error squared is
    # n / (n - 1) times the sum of squares; 0 where an image has no value, NaN without an interval
    shares: Float


def medians_over_images(x: Float, present: Mask) -> Medians:
    """Return the median of each row over its images, where an image has one value.

    The median of an even number of images is the mean of the middle two.

    Args:
        x: (rows, images), NaN where `present` is False.
        present: (rows, images).
    """
    n_rows = len(x)
    value = np.full(n_rows, np.nan)
    low = np.full(n_rows, np.nan)
    high = np.full(n_rows, np.nan)
    shares = np.where(present, np.nan, 0.0)
    counts = present.sum(1)
    # Rows with the same number of values together: all rows, unless images lack values.
    for n in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == n)
        ranks = median_ranks(n)
        middle = [(n - 1) // 2, n // 2]
        partition_ranks = [*middle]
        if ranks is not None:
            partition_ranks += [ranks.low, ranks.high]
        # Only these ranks are sorted into their places; NaN sort last.
        ordered = np.partition(x[rows], partition_ranks, axis=1)
        value[rows] = ordered[:, middle].sum(1) / 2
        if ranks is None:
            continue
        low[rows] = ordered[:, ranks.low]
        high[rows] = ordered[:, ranks.high]
        z = NormalDist().inv_cdf((1 + ranks.confidence) / 2)
        error = (high[rows] - low[rows]) / (2 * z)
        # The influence function of a median: the side on which a value lies.
        influence = np.where(
            present[rows], np.sign(x[rows] - value[rows, np.newaxis]), 0.0
        )
        shares[rows] = _scale_to_error(error, influence, n)
    return Medians(value, low, high, shares)


def pooled_median(values: Float) -> Medians:
    """Return the median of all values of all images, as one row, with Woodruff's interval (1952).

    Args:
        values: (images, values of an image), without NaN.
    """
    n_images, n_values_each = values.shape
    if n_values_each == 1:
        return medians_over_images(values.T, np.ones((1, n_images), bool))
    pooled = np.sort(values, axis=None)
    n = len(pooled)
    value = (pooled[(n - 1) // 2] + pooled[n // 2]) / 2
    nan_row = np.full(1, np.nan)
    no_interval = Medians(
        np.array([value]), nan_row, nan_row, np.full((1, n_images), np.nan)
    )
    if n_images < 2:
        return no_interval
    # p_i, each image's share below the median; values that equal it count half.
    shares_below = ((values < value).mean(1) + (values <= value).mean(1)) / 2
    error_of_share = shares_below.std(ddof=1) / math.sqrt(n_images)
    t = t_quantile(n_images - 1)
    # The interval's ends are the pooled quantiles at 1/2 -+ t times that error.
    half_level = t * error_of_share
    if half_level >= 0.5:
        return no_interval
    low = min(pooled[math.floor(n * (0.5 - half_level))], value)
    high = max(pooled[math.ceil(n * (0.5 + half_level)) - 1], value)
    error = np.array([(high - low) / (2 * t)])
    influence = shares_below.mean() - shares_below[np.newaxis]
    shares = _scale_to_error(error, influence, n_images)
    return Medians(np.array([value]), np.array([low]), np.array([high]), shares)


def _scale_to_error(error: Float, influence: Float, n: int) -> Float:
    """Return the influence of images, (rows, images), scaled so that it has a standard error.

    Args:
        error: (rows,) the standard error.
        influence: (rows, images), with mean 0.
        n: images with a value.
    """
    squares = (influence**2).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.where(squares > 0, error * np.sqrt((n - 1) / n / squares), 0.0)
    return influence * scale[:, np.newaxis]
