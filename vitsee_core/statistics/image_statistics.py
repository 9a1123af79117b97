"""Mean, median and geometric mean over images of many tokens at once, with 95 % intervals.

Values are (tokens, images) float64, contiguous per token, NaN for missing; every sum runs along a
token's own row, so that no result depends on which tokens are processed together.

A mean over tokens is the mean of the tokens' own statistics: images first, then tokens. Its
interval is still over images: each statistic carries a trace (the images' shares in the error of a
mean or a median, or the statistic without one block of images each), and traces are averaged over
tokens, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.medians import Medians, medians_over_images
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.types import Float, Integers, Mask

ESTIMATORS = ("mean", "median", "geomean")
BLOCKS = 20
METHODS = {
    "mean": "95 % interval over images: value -+ t(0.975, n - 1) * std / sqrt(n), the standard "
    "error that of the infinitesimal jackknife (for one token, or where every token has a value in "
    "every image: of a plain mean of images); empty where n < 2",
    "jackknife": "95 % interval over images: value -+ t(0.975, blocks - 1) * standard error, from "
    f"a delete-a-block jackknife of {BLOCKS} blocks (each image one below {BLOCKS}); empty where "
    "n < 2",
    "median": "95 % interval over images, whatever the distribution: of one value an image "
    "between two order statistics, whose ranks are exact by the binomial distribution (empty where "
    "n < 6); of several values an image (norms of tokens) Woodruff's interval (1952), empty where "
    "images are too few for it; of a mean over tokens of their medians value -+ t(0.975, n - 1) * "
    "standard error, by each image's influence on each median",
    "std": "sqrt(n) * standard error over images in every row: for a mean the sample standard "
    "deviation over images; for a median the standard error is its interval's width over twice the "
    "quantile",
}


@dataclass(frozen=True)
class Estimates:
    """Statistics over images, (entries,) each."""

    value: Float  # NaN where n = 0
    std: Float  # see `METHODS`; NaN, like low and high, where n < 2
    low: Float
    high: Float
    n: Integers  # images with a value
    # (entries, blocks) the statistic without each block of images (to first order for a median, and
    # for a mean over tokens that lack values in different images), None where there are none
    without: Float | None = None


@dataclass(frozen=True)
class Statistic:
    """One statistic of some tokens."""

    value: Float  # (tokens,)
    # (tokens, images) an image's share in the error of a mean or a median, 0 where it has no value;
    # or (tokens, blocks) the statistic without one block of images each, NaN where nothing is left
    trace: Float
    present: Mask  # (tokens, images) which images have a value
    jackknife: bool
    labels: Integers  # (images,) the blocks
    low: Float | None = None  # (tokens,) of intervals that do not follow from the trace
    high: Float | None = None

    def estimates(self) -> Estimates:
        """Estimates for each token."""
        estimates = estimates_of(
            self.value, self.trace, self.present, self.jackknife, self.labels
        )
        if self.low is None or self.high is None:
            return estimates
        return replace(estimates, low=self.low, high=self.high)


def estimates_of(
    value: Float, trace: Float, present: Mask, jackknife: bool, labels: Integers
) -> Estimates:
    """Return spread and interval of entries with these traces.

    Args:
        value: (entries,).
        trace: (entries, blocks) the statistic without each block, if `jackknife`; else (entries,
            images) each image's share in its error.
        present: (entries, images) which images have a value.
        jackknife: which of the two the trace is.
        labels: (images,) the blocks.
    """
    n = present.sum(1)
    if jackknife:
        without = trace
        m = trace.shape[1]
        deviations = trace - trace.mean(1, keepdims=True)
        error = np.sqrt((m - 1) / m * (deviations**2).sum(1))
        quantile = np.full(len(value), t_quantile(m - 1) if m > 1 else np.nan)
    else:
        without = _means_without(value, trace, present, labels)
        # Shares (x - mean) / n: the sum of their squares is (n - 1) / n of the error squared.
        error = np.sqrt((trace**2).sum(1) * n / np.maximum(n - 1, 1))
        counts, inverse = np.unique(n, return_inverse=True)
        quantiles = [t_quantile(int(k) - 1) if k > 1 else np.nan for k in counts]
        quantile = np.array(quantiles)[inverse]
    error = np.where(n > 1, error, np.nan)
    half = quantile * error
    return Estimates(value, error * np.sqrt(n), value - half, value + half, n, without)


def _means_without(value: Float, shares: Float, present: Mask, labels: Integers) -> Float:
    """Return (entries, blocks) means without each block, from each image's share (x - mean) / n."""
    counts = _block_sums(present, labels)
    n = counts.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        # mean - (n / (n - count of the block)) * sum of the block's shares
        change = n / (n - counts) * _block_sums(shares, labels)
        return np.where(n > counts, value[:, np.newaxis] - change, np.nan)


def block_labels(n: int, seed: int | None) -> Integers:
    """Return (images,) the jackknife's block of each of n images.

    Blocks are runs of rows, which in a shuffled store are random samples.

    seed: assigns the images of another store; None for a shuffled one.
    """
    labels = np.arange(n) * min(n, BLOCKS) // n
    if seed is None:
        return labels
    return np.random.default_rng(seed).permutation(labels)


def statistic(x: Float, estimator: str, labels: Integers) -> Statistic:
    """Return a statistic over images of each token.

    The geometric mean is exp(mean(log x)), 0 where an x is 0; the median of an even number of
    images is the mean of the middle two, exact.

    Args:
        x: (tokens, images), NaN for missing; not negative for `geomean`.
        estimator: one of `ESTIMATORS`.
        labels: (images,) from `block_labels`.
    """
    present = ~np.isnan(x)
    if estimator == "mean":
        n = present.sum(1)
        total = _replace_missing(x, present, 0.0).sum(1)
        value = np.where(n > 0, total / np.maximum(n, 1), np.nan)
        share = (x - value[:, np.newaxis]) / np.maximum(n, 1)[:, np.newaxis]
        return Statistic(
            value, _replace_missing(share, present, 0.0), present, False, labels
        )
    if estimator == "median":
        medians = medians_over_images(x, present)
        return median_statistic(medians, present, labels)
    value, without = _geomeans(x, present, labels)
    return Statistic(value, without, present, True, labels)


def median_statistic(medians: Medians, present: Mask, labels: Integers) -> Statistic:
    """Return the statistic of medians, which have intervals of their own.

    Args:
        medians: of each token.
        present: (tokens, images) which images have a value.
        labels: (images,) the blocks of the jackknife.
    """
    return Statistic(
        medians.value,
        trace=medians.shares,
        present=present,
        jackknife=False,
        labels=labels,
        low=medians.low,
        high=medians.high,
    )


def _replace_missing(x: Float, present: Mask, value: float) -> Float:
    """Return `x` with another value where none is present; itself, without a copy, if all are."""
    if present.all():
        return x
    return np.where(present, x, value)


def _block_sums(x: NDArray[np.generic], labels: Integers) -> Float:
    """Return (rows, blocks) sums over each block's columns of x (rows, images)."""
    # Columns sorted by block, so that each block is a run; they mostly are runs already.
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(labels.max() + 1))
    in_runs = x if (np.diff(order) == 1).all() else x[:, order]
    return np.add.reduceat(in_runs, starts, axis=1, dtype=np.float64)


def _geomeans(x: Float, present: Mask, labels: Integers) -> tuple[Float, Float]:
    """Return geometric means, (tokens,) over all images and (tokens, blocks) without each block."""
    with np.errstate(divide="ignore"):
        logs = np.log(_replace_missing(x, present, 1.0))
    sums = _block_sums(logs, labels)
    counts = _block_sums(present, labels)
    # Sums of the other blocks, not the total minus one: log 0 would give inf - inf.
    others = [np.delete(sums, b, axis=1).sum(1) for b in range(sums.shape[1])]
    left = counts.sum(1, keepdims=True) - counts
    with np.errstate(invalid="ignore", divide="ignore"):
        # The value must not depend on the blocks, not even by rounding.
        return np.exp(logs.sum(1) / present.sum(1)), np.exp(np.stack(others, 1) / left)
