"""The delete-a-block jackknife: its blocks of images, its replicates, its standard error, and the
columns of a table's row that carry them.

A replicate is a row's value from all images except one block. Replicates are stored as (...,
blocks), NaN for missing, so that differences of rows keep their blocks: what two rows share (the
same images) cancels in the difference's own replicates. All such differences at once have
simultaneous intervals.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitsee_core.statistics.image_statistics import Estimates, block_labels, statistic
from vitsee_core.statistics.moments import LEVEL, t_quantile
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores import Store

Limits = tuple[float, float]
UNLIMITED: Limits = (-np.inf, np.inf)
SHARE: Limits = (0.0, 1.0)
METHOD = (
    "value without one block of images each; runs of rows of a shuffled store, dealt out with the "
    "seed else"
)
DRAWS = 4_000
# rows whose pairs are drawn; beyond that Bonferroni's bound, which needs no draws
MAX_PAIRED_ROWS = 100
SIMULTANEOUS = (
    "low, high: value -+ q * std, simultaneous: with 95 % confidence the differences between all "
    "rows of which the best was chosen lie in such intervals, so that the choice on the same "
    "images needs no further correction. q: 0.95 quantile of the largest |t| of all pairs "
    f"(n_blocks - 1 degrees of freedom, correlated as the replicates; {DRAWS:,} draws with seed 0; "
    f"Bonferroni's of more than {MAX_PAIRED_ROWS} rows)"
)
Cells = dict[str, Any]


@dataclass(frozen=True)
class Blocks:
    """The blocks of the images that count."""

    labels: Integers  # (images that count,) in the store's order
    of_rows: Integers  # (all images,) -1 where one does not count
    digest: str  # equal for the same images in the same blocks, whatever the model

    @classmethod
    def of(cls, store: Store, mask: Mask, seed: int) -> Blocks:
        """Return the blocks of a store's images.

        They are `BLOCKS` runs of the rows that count, or one per row if there are fewer.

        Args:
            store: the store.
            mask: (all images,) which of them count.
            seed: deals out the rows of a store that is not shuffled.
        """
        shuffled = store.shuffled
        labels = block_labels(int(mask.sum()), None if shuffled else seed)
        of_rows = np.full(len(mask), -1, np.int64)
        of_rows[mask] = labels
        text = (
            store.manifest.samples_fingerprint.encode() + of_rows.astype("<i8").tobytes()
        )
        return cls(labels, of_rows, hashlib.sha256(text).hexdigest()[:16])

    @property
    def n(self) -> int:
        """Number of blocks."""
        return int(self.labels.max(initial=-1)) + 1

    def sums(self, values: NDArray[Any]) -> Float:
        """Return (..., blocks) sums over each block of values (images that count, ...)."""
        return block_sums(values, self.labels, self.n)

    def means_without(self, values: NDArray[Any], among: Mask | None = None) -> Float:
        """Return (blocks,) the mean of values (images that count,) without each block.

        among: (images that count,) those to take the mean of; None for all.
        """
        counted = np.ones(len(self.labels)) if among is None else among.astype(np.float64)
        return means_without(self.sums(values * counted), self.sums(counted))

    def describe(self) -> dict[str, Any]:
        """Return the entry of a sidecar about the blocks."""
        return {"n_blocks": self.n, "digest": self.digest, "method": METHOD}


def block_sums(values: NDArray[Any], labels: Integers, n: int) -> Float:
    """Return (..., n) sums of values (images, ...) over the images of each of n blocks."""
    sums = np.zeros((n, *np.shape(values)[1:]))
    np.add.at(sums, labels, np.asarray(values, np.float64))
    return np.moveaxis(sums, 0, -1)


def means_without(sums: Float, counts: Float) -> Float:
    """Return (..., blocks) means without each block; NaN where no image is left.

    sums, counts: (..., blocks) of each block.
    """
    left = counts.sum(-1, keepdims=True) - counts
    with np.errstate(invalid="ignore", divide="ignore"):
        # Sums of the other blocks, not the total minus one: a mean of equal values is exact.
        others = np.stack(
            [np.delete(sums, b, -1).sum(-1) for b in range(sums.shape[-1])], -1
        )
        return np.where(left > 0, others / left, np.nan)


def standard_error(replicates: Float, axis: int = -1) -> Float:
    """Return the jackknife's standard error of a value with these replicates.

    It is sqrt((m - 1) / m * sum of squared deviations of the m replicates from their mean).
    """
    m = replicates.shape[axis]
    deviation = replicates - replicates.mean(axis, keepdims=True)
    return np.sqrt((m - 1) / m * (deviation**2).sum(axis))


def interval(
    value: Float, replicates: Float, limits: Limits = UNLIMITED
) -> tuple[Float, Float, Float]:
    """Return standard error, low and high of the 95 % interval, value -+ t(0.975, m - 1) * error.

    All are NaN with fewer than two replicates, or a missing one.

    Args:
        value: (...).
        replicates: (..., m).
        limits: smallest and largest possible value, which bound the interval.
    """
    m = replicates.shape[-1]
    if m < 2:
        nans = np.full(np.shape(value), np.nan)
        return nans, nans, nans
    error = standard_error(replicates)
    half = t_quantile(m - 1) * error
    low, high = cut(value, value - half, value + half, limits)
    return error, low, high


def cut(value: Float, low: Float, high: Float, limits: Limits) -> tuple[Float, Float]:
    """Return low and high of an interval, clipped to the limits.

    A value beyond a limit, by rounding, stays inside of its interval.
    """
    smallest, largest = limits
    return (
        np.maximum(low, np.minimum(value, smallest)),
        np.minimum(high, np.maximum(value, largest)),
    )


def largest_t(replicates: Float) -> float:
    """Return the q with P(max over pairs |difference| / error > q) = 0.05 if no two rows differ.

    Blocks are drawn from a normal distribution with the rows' covariance; each pair is divided by
    its own error from these blocks, as the differences are. With one error for all pairs, as in
    Tukey's procedure, q would be too small: measured, 10 % instead of 5 % with 13 rows and 20
    blocks.

    Args:
        replicates: (rows, blocks), at least two of each; rows without a value everywhere are left
            out.
    """
    x = replicates[np.isfinite(replicates).all(1)]
    n_rows, m = x.shape
    n_pairs = n_rows * (n_rows - 1) // 2
    if n_pairs <= 1 or n_rows > MAX_PAIRED_ROWS:
        # Bonferroni's bound.
        return t_quantile(m - 1, 1 - (1 - LEVEL) / max(n_pairs, 1))
    x = x - x.mean(1, keepdims=True)
    # m blocks of each draw, with the covariance of the rows: (rows, blocks, draws).
    normal = np.random.default_rng(0).standard_normal((m, m * DRAWS))
    drawn = (x @ normal).reshape(n_rows, m, DRAWS)
    largest = np.zeros(DRAWS)
    for i in range(n_rows - 1):
        # Equal rows have no error to divide by.
        differs = (x[i + 1 :] != x[i]).any(1)
        if differs.any():
            differences = drawn[i + 1 :][differs] - drawn[i]  # (pairs, blocks, draws)
            errors = differences.std(1, ddof=1) / np.sqrt(m)
            t = np.abs(differences.mean(1)) / errors
            largest = np.maximum(largest, t.max(0))
    # If no rows differ, this is the quantile of a single pair.
    return max(float(np.quantile(largest, LEVEL)), t_quantile(m - 1))


def mean_cells(values: ArrayLike, block_of_image: Integers) -> Cells:
    """Return the cells of a mean over images; its interval is that of `image_statistics.METHODS`.

    Args:
        values: (images,), NaN for missing, which are left out.
        block_of_image: (images,) blocks of the jackknife, for the replicates.
    """
    x = np.asarray(values, np.float64)[np.newaxis]
    return cells_of(statistic(x, "mean", block_of_image).estimates(), 0)


def jackknife_cells(
    value: float, without: Float, n: int, limits: Limits = UNLIMITED
) -> Cells:
    """Return the cells of a statistic other than a mean, with a delete-a-block jackknife.

    `std` is sqrt(n) times the standard error.

    Args:
        value: the statistic of n images.
        without: (blocks,) the statistic without each block of them.
        n: number of images.
        limits: smallest and largest possible value.
    """
    error, low, high = interval(np.array(value), without, limits)
    return {
        "value": float(value),
        "std": float(error) * np.sqrt(n),
        "low": float(low),
        "high": float(high),
        "n_images": n,
        REPLICATES: without,
    }


def interval_cells(value: ArrayLike, without: Float, limits: Limits = UNLIMITED) -> Cells:
    """Return the cells of a value whose rows have no std; arguments as of `jackknife_cells`."""
    value = np.asarray(value, np.float64)
    _, low, high = interval(value, without, limits)
    return {
        "value": float(value),
        "low": float(low),
        "high": float(high),
        REPLICATES: without,
    }


def columns_of(estimates: Estimates) -> Cells:
    """Return the value columns of a block of rows, one row per entry of the estimates."""
    columns = {
        "value": estimates.value,
        "std": estimates.std,
        "low": estimates.low,
        "high": estimates.high,
        "n_images": estimates.n,
    }
    if estimates.without is not None:
        columns[REPLICATES] = estimates.without
    return columns


def cells_of(estimates: Estimates, i: int) -> Cells:
    """Return the cells of the row about entry i of the estimates."""
    without = None if estimates.without is None else estimates.without[i]
    return {
        "value": float(estimates.value[i]),
        "std": float(estimates.std[i]),
        "low": float(estimates.low[i]),
        "high": float(estimates.high[i]),
        "n_images": int(estimates.n[i]),
        REPLICATES: without,
    }
