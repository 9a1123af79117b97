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
from vitsee_core.tables.replicates import WORD
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
MOST_PAIRED = 100
SIMULTANEOUS = (
    "low, high: value -+ q * std, simultaneous: with 95 % confidence the differences between all "
    "rows of which the best was chosen lie in such intervals, so that the choice on the same "
    "images needs no further correction. q: 0.95 quantile of the largest |t| of all pairs "
    f"(n_blocks - 1 degrees of freedom, correlated as the replicates; {DRAWS:,} draws with seed 0; "
    f"Bonferroni's of more than {MOST_PAIRED} rows)"
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
        """`BLOCKS` runs of the rows in `mask` (all images,), or one per row if there are fewer."""
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
        return int(self.labels.max(initial=-1)) + 1

    def sums(self, values: NDArray[Any]) -> Float:
        """(..., blocks) sums over each block of (images that count, ...)."""
        return block_sums(values, self.labels, self.n)

    def means_without(self, values: NDArray[Any], among: Mask | None = None) -> Float:
        """(blocks,) the mean of (images that count,) without each block; among: restrict to
        these."""
        counted = np.ones(len(self.labels)) if among is None else among.astype(np.float64)
        return means_without(self.sums(values * counted), self.sums(counted))

    def describe(self) -> dict[str, Any]:
        return {"n_blocks": self.n, "digest": self.digest, "method": METHOD}


def block_sums(values: NDArray[Any], labels: Integers, n: int) -> Float:
    """(..., n) sums of (images, ...) over the images of each of n blocks."""
    sums = np.zeros((n, *np.shape(values)[1:]))
    np.add.at(sums, labels, np.asarray(values, np.float64))
    return np.moveaxis(sums, 0, -1)


def means_without(sums: Float, counts: Float) -> Float:
    """(..., blocks) means without each block, from its sums and counts (..., blocks); NaN where
    nothing is left."""
    left = counts.sum(-1, keepdims=True) - counts
    with np.errstate(invalid="ignore", divide="ignore"):
        # Sums of the other blocks, not the total minus one: a mean of equal values is exact.
        others = np.stack(
            [np.delete(sums, b, -1).sum(-1) for b in range(sums.shape[-1])], -1
        )
        return np.where(left > 0, others / left, np.nan)


def standard_error(replicates: Float, axis: int = -1) -> Float:
    """sqrt((m - 1) / m sum of squared deviations of the m replicates from their mean)."""
    m = replicates.shape[axis]
    deviation = replicates - replicates.mean(axis, keepdims=True)
    return np.sqrt((m - 1) / m * (deviation**2).sum(axis))


def interval(
    value: Float, replicates: Float, limits: Limits = UNLIMITED
) -> tuple[Float, Float, Float]:
    """Standard error, low and high of the 95 % interval: value -+ t(0.975, m - 1) * error; NaN with
    fewer than two replicates, or a missing one.

    Args:
        value: (...).
        replicates: (..., m).
        limits: least and largest possible value, which bound the interval.
    """
    m = replicates.shape[-1]
    if m < 2:
        nothing = np.full(np.shape(value), np.nan)
        return nothing, nothing, nothing
    error = standard_error(replicates)
    half = t_quantile(m - 1) * error
    return error, *cut(value, value - half, value + half, limits)


def cut(value: Float, low: Float, high: Float, limits: Limits) -> tuple[Float, Float]:
    """Low and high of an interval, clipped to the limits as far as the value is within them."""
    least, most = limits
    return (
        np.maximum(low, np.minimum(value, least)),
        np.minimum(high, np.maximum(value, most)),
    )


def largest_t(replicates: Float) -> float:
    """The q with P(max over pairs |difference| / error > q) = 0.05 if no two rows differ.

    Blocks are drawn from a normal distribution with the rows' covariance; each pair is divided by
    its own error from these blocks, as the differences are. With one error for all pairs, as in
    Tukey's procedure, q would be too small: measured, 10 % instead of 5 % with 13 rows and 20
    blocks.

    Args:
        replicates: (rows, blocks), at least two of each; rows without a value everywhere are left
            out.
    """
    x = replicates[np.isfinite(replicates).all(1)]
    n, m = x.shape
    pairs = n * (n - 1) // 2
    if pairs <= 1 or n > MOST_PAIRED:
        return t_quantile(m - 1, 1 - (1 - LEVEL) / max(pairs, 1))
    x = x - x.mean(1, keepdims=True)
    normal = np.random.default_rng(0).standard_normal((m, m * DRAWS))
    drawn = (x @ normal).reshape(n, m, DRAWS)
    largest = np.zeros(DRAWS)
    for i in range(n - 1):
        differs = (x[i + 1 :] != x[i]).any(1)
        if differs.any():
            gap = drawn[i + 1 :][differs] - drawn[i]
            t = np.abs(gap.mean(1)) / (gap.std(1, ddof=1) / np.sqrt(m))
            largest = np.maximum(largest, t.max(0))
    # Rows that never differ leave the one pair's quantile.
    return max(float(np.quantile(largest, LEVEL)), t_quantile(m - 1))


def mean_cells(values: ArrayLike, labels: Integers) -> Cells:
    """Cells of a mean over images; see `image_statistics.METHODS`.

    Args:
        values: (images,), NaN for missing, which are left out.
        labels: (images,) blocks of the jackknife, for the replicates.
    """
    x = np.asarray(values, np.float64)[np.newaxis]
    return cells_of(statistic(x, "mean", labels).estimates(), 0)


def jackknife_cells(
    value: float, without: Float, n: int, limits: Limits = UNLIMITED
) -> Cells:
    """Cells of a statistic other than a mean: its 95 % interval by the delete-a-block jackknife;
    std is sqrt(n) times the standard error. without: (blocks,) the value of the n images without
    each block of them; limits: least and largest possible value."""
    error, low, high = interval(np.array(value), without, limits)
    return {
        **{"value": float(value), "std": float(error) * np.sqrt(n)},
        **{"low": float(low), "high": float(high), "n_images": n, WORD: without},
    }


def interval_cells(value: ArrayLike, without: Float, limits: Limits = UNLIMITED) -> Cells:
    """Cells of a value whose rows have no std; see `jackknife_cells`."""
    value = np.asarray(value, np.float64)
    _, low, high = interval(value, without, limits)
    return {"value": float(value), "low": float(low), "high": float(high), WORD: without}


def columns_of(estimates: Estimates) -> Cells:
    """Value columns of a block of rows, one per entry of the estimates."""
    of = estimates
    columns = {
        "value": of.value,
        "std": of.std,
        "low": of.low,
        "high": of.high,
        "n_images": of.n,
    }
    if of.without is None:
        return columns
    return columns | {WORD: of.without}


def cells_of(estimates: Estimates, i: int) -> Cells:
    of = estimates
    return {
        **{"value": float(of.value[i]), "std": float(of.std[i])},
        **{"low": float(of.low[i]), "high": float(of.high[i]), "n_images": int(of.n[i])},
        WORD: None if of.without is None else of.without[i],
    }
