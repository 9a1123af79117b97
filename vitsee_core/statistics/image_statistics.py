"""Mean, median and geometric mean over images of many tokens at once, with 95 % intervals.

Values are (tokens, images) float64, contiguous per token, NaN for missing; every sum runs along a
token's own row, so that no result depends on which tokens are processed together.

A mean over tokens is the mean of the tokens' own statistics: images first, then tokens. Its
interval is still over images: each statistic carries a trace (the images' shares in a mean, or the
statistic without one block of images each), and traces are averaged over tokens, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.moments import t_quantile
from vitsee_core.types import Float, Integers, Mask

ESTIMATORS = ("mean", "median", "geomean")
BLOCKS = 20
METHODS = {
    "mean": "95 % interval over images: value -+ t(0.975, n - 1) * std / sqrt(n), the standard "
    "error that of the infinitesimal jackknife (for one token, or where every token has a value in "
    "every image: of a plain mean of images); empty where n < 2",
    "jackknife": "95 % interval over images: value -+ t(0.975, blocks - 1) * standard error, from "
    f"a delete-a-block jackknife of {BLOCKS} blocks (each image one below {BLOCKS}); rough below "
    "some 400 images, where blocks are too short for a median; empty where n < 2",
    "std": "sqrt(n) * standard error over images in every row: for a mean the sample standard "
    "deviation over images",
}


@dataclass(frozen=True)
class Estimates:
    """Statistics over images, (entries,) each."""

    value: Float  # NaN where n = 0
    std: Float  # see `METHODS`; NaN, like low and high, where n < 2
    low: Float
    high: Float
    n: Integers  # images with a value
    # (entries, blocks) the statistic without each block of images (for a mean over tokens that lack
    # values in different images, to first order), None where there are none
    without: Float | None = None


@dataclass(frozen=True)
class Statistic:
    """One statistic of some tokens."""

    value: Float  # (tokens,)
    # (tokens, images) an image's share in the error of a mean, 0 where it has no value; or (tokens,
    # blocks) the statistic without one block of images each, NaN where nothing is left
    trace: Float
    present: Mask  # (tokens, images) which images have a value
    jackknife: bool
    labels: Integers  # (images,) the blocks

    def estimates(self) -> Estimates:
        """Estimates for each token."""
        return estimates_of(self.value, self.trace, self.present, self.jackknife, self.labels)


def estimates_of(
    value: Float, trace: Float, present: Mask, jackknife: bool, labels: Integers
) -> Estimates:
    """Spread and interval of entries with these traces (entries, ...); see `Statistic`."""
    n = present.sum(1)
    without = trace if jackknife else _means_without(value, trace, present, labels)
    if jackknife:
        m = trace.shape[1]
        error = np.sqrt((m - 1) / m * ((trace - trace.mean(1, keepdims=True)) ** 2).sum(1))
        quantile = np.full(len(value), t_quantile(m - 1) if m > 1 else np.nan)
    else:
        error = np.sqrt((trace**2).sum(1) * n / np.maximum(n - 1, 1))
        counts, which = np.unique(n, return_inverse=True)
        quantile = np.array([t_quantile(int(k) - 1) if k > 1 else np.nan for k in counts])[which]
    error = np.where(n > 1, error, np.nan)
    half = quantile * error
    return Estimates(value, error * np.sqrt(n), value - half, value + half, n, without)


def _means_without(value: Float, shares: Float, present: Mask, labels: Integers) -> Float:
    """(entries, blocks) means without each block, from each image's share (x - mean) / n."""
    counts = _block_sums(present, labels)
    n = counts.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        moved = n / (n - counts) * _block_sums(shares, labels)
        return np.where(n > counts, value[:, np.newaxis] - moved, np.nan)


def block_labels(n: int, seed: int | None) -> Integers:
    """(images,) the jackknife's block of each image: runs of rows, which in a shuffled store are
    random samples; otherwise assigned with `seed`."""
    labels = np.arange(n) * min(n, BLOCKS) // n
    return labels if seed is None else np.random.default_rng(seed).permutation(labels)


def statistic(x: Float, estimator: str, labels: Integers) -> Statistic:
    """A statistic over images of each token.

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
        total = _filled(x, present, 0.0).sum(1)
        value = np.where(n > 0, total / np.maximum(n, 1), np.nan)
        share = (x - value[:, np.newaxis]) / np.maximum(n, 1)[:, np.newaxis]
        return Statistic(value, _filled(share, present, 0.0), present, False, labels)
    value, without = (_medians if estimator == "median" else _geomeans)(x, present, labels)
    return Statistic(value, without, present, True, labels)


def _filled(x: Float, present: Mask, value: float) -> Float:
    """`x` with NaN replaced."""
    return x if present.all() else np.where(present, x, value)


def _block_sums(x: NDArray[np.generic], labels: Integers) -> Float:
    """(rows, blocks) sums over each block's columns."""
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(labels.max() + 1))
    in_runs = x if (np.diff(order) == 1).all() else x[:, order]
    return np.add.reduceat(in_runs, starts, axis=1, dtype=np.float64)


def _geomeans(x: Float, present: Mask, labels: Integers) -> tuple[Float, Float]:
    """(tokens,) over all images, and (tokens, blocks) without each block."""
    with np.errstate(divide="ignore"):
        logs = np.log(_filled(x, present, 1.0))
    sums = _block_sums(logs, labels)
    counts = _block_sums(present, labels)
    # Sums of the other blocks, not the total minus one: log 0 would give inf - inf.
    others = [np.delete(sums, b, axis=1).sum(1) for b in range(sums.shape[1])]
    left = counts.sum(1, keepdims=True) - counts
    with np.errstate(invalid="ignore", divide="ignore"):
        # The value must not depend on the blocks, not even by rounding.
        return np.exp(logs.sum(1) / present.sum(1)), np.exp(np.stack(others, 1) / left)


def _medians(x: Float, present: Mask, labels: Integers) -> tuple[Float, Float]:
    """(tokens,) over all images, and (tokens, blocks) without each block; both exact."""
    value = np.full(len(x), np.nan)
    without = np.full((len(x), labels.max() + 1), np.nan)
    counts = present.sum(1)
    for n in np.unique(counts[counts > 0]):  # one count, unless images lack values
        rows = np.flatnonzero(counts == n)
        of_block = _block_sums(present[rows], labels).astype(np.int64)
        value[rows], without[rows] = _medians_of(x[rows], int(n), of_block, labels)
    return value, without


def _medians_of(x: Float, n: int, of_block: Integers, labels: Integers) -> tuple[Float, Float]:
    """Like `_medians`, for rows with `n` values each, `of_block` (rows, blocks) of them in a block.

    Without the d values of a block, a row's middle is at most (d + 1) / 2 ranks from the middle of
    the whole. So only that window of ranks is sorted.
    """
    reach = (int(of_block.max()) + 1) // 2
    low, high = max(0, (n - 1) // 2 - reach), min(n - 1, n // 2 + reach)
    order = np.argpartition(x, (low, high), axis=1)  # NaN sort last
    window = order[:, low : high + 1]
    values = np.take_along_axis(x, window, axis=1)
    by_value = np.argsort(values, axis=1, kind="stable")
    values = np.take_along_axis(values, by_value, axis=1)
    value = (values[:, (n - 1) // 2 - low] + values[:, n // 2 - low]) / 2

    n_blocks = of_block.shape[1]
    rows = np.arange(len(x))[:, np.newaxis]
    below = np.bincount(
        (labels[order[:, :low]] + n_blocks * rows).ravel(), minlength=len(x) * n_blocks
    ).reshape(len(x), n_blocks)
    blocks = labels[np.take_along_axis(window, by_value, axis=1)]
    without = np.empty((len(x), n_blocks))
    for b in range(n_blocks):
        left = n - of_block[:, b]
        seen = np.cumsum(blocks != b, axis=1)
        first = low - below[:, b]  # ranks below the window that stay
        ends = [
            np.take_along_axis(
                values,
                # The first place where `rank + 1` values were passed.
                np.minimum((seen < (rank + 1 - first)[:, np.newaxis]).sum(1), high - low)[
                    :, np.newaxis
                ],
                axis=1,
            )[:, 0]
            for rank in ((left - 1) // 2, left // 2)
        ]
        without[:, b] = np.where(left > 0, (ends[0] + ends[1]) / 2, np.nan)
    return value, without
