"""The effect of a change on a model's outputs: accuracy, equal answers and divergence, as means
over images, whole and without each block of the jackknife."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.statistics.jackknife import METHOD as BLOCKS
from vitsee_core.statistics.jackknife import (
    UNLIMITED,
    Blocks,
    Cells,
    Limits,
    block_sums,
    interval,
    means_without,
    standard_error,
)
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import PAIRED_METHOD as PAIRED
from vitsee_core.statistics.shares import difference_interval, mcnemar, wilson
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.types import Float, Integers

if TYPE_CHECKING:
    from vitsee_stores import Slab

Key = Any  # hashable
# Keys of what `compare_outputs` gives; AGREEMENT and KL are metrics.
RIGHT = "right"
RIGHT_BASE = "right base"
ONLY_BASE = "only base"
ONLY_CHANGED = "only changed"
AGREEMENT = "agreement"
KL = "kl"
NOT_NEGATIVE = (0.0, np.inf)
OUTPUT_INTERVALS = {
    "top1, agreement": SHARES,
    "top1_difference": PAIRED,
    "kl": f"delete-a-block jackknife over images: {BLOCKS}",
}


@dataclass(frozen=True)
class BlockMean:
    """A mean over images; sums, counts: (blocks,) of the images of each block that have a value."""

    sums: Float
    counts: Float

    @property
    def n(self) -> int:
        """Images with a value."""
        return int(self.counts.sum())

    @property
    def total(self) -> float:
        """Sum of all values."""
        return float(self.sums.sum())

    @property
    def value(self) -> float:
        """The mean, NaN without a value."""
        return self.total / self.n if self.n else np.nan

    @property
    def without(self) -> Float:
        """(blocks,) the mean without each block, NaN where nothing is left."""
        return means_without(self.sums, self.counts)

    def cells(self, limits: Limits = UNLIMITED) -> Cells:
        """The value columns of a row, std the jackknife's standard error; limits of `interval`."""
        error, low, high = interval(np.array(self.value), self.without, limits)
        return self._cells(float(error), float(low), float(high))

    def cells_between(self, ends: tuple[Any, Any]) -> Cells:
        """The same with another interval."""
        return self._cells(
            float(standard_error(self.without)), float(ends[0]), float(ends[1])
        )

    def _cells(self, std: float, low: float, high: float) -> Cells:
        numbers = {"value": self.value, "std": std, "low": low, "high": high}
        return {
            **numbers,
            "spread": "jackknife",
            "n_images": self.n,
            REPLICATES: self.without,
        }


class BlockMeans:
    """Means per block of images, filled by `streaming.fold` over one store or a pair.

    `read(*slabs)` gives key -> (images,) for the images that count, NaN for no value, with the same
    keys for each slab; it must be picklable. None: values are counted as they come.
    """

    def __init__(
        self, read: Callable[..., Mapping[Key, Float]] | None, blocks: Blocks
    ) -> None:
        self._read = read
        self._blocks = blocks
        self._found: dict[Key, BlockMean] = {}

    def update(self, *slabs: Slab) -> None:
        assert self._read is not None
        first = slabs[0]
        self.count(
            self._read(*slabs),
            np.arange(len(first.valid))[first.valid] + first.rows.start,
        )

    def count(self, found: Mapping[Key, Float], rows: Integers) -> None:
        """Add values key -> (images,) of these rows of the store."""
        labels = self._blocks.of_rows[rows]
        for key, values in found.items():
            present = ~np.isnan(values)
            parts = (np.where(present, values, 0.0), present)
            self._add(
                key, BlockMean(*(block_sums(x, labels, self._blocks.n) for x in parts))
            )

    def merge(self, other: BlockMeans) -> None:
        for key, mean in other._found.items():
            self._add(key, mean)

    def _add(self, key: Key, mean: BlockMean) -> None:
        if own := self._found.get(key):
            mean = BlockMean(own.sums + mean.sums, own.counts + mean.counts)
        self._found[key] = mean

    def result(self) -> dict[Key, BlockMean]:
        return dict(self._found)


def compare_outputs(
    base: Float, changed: Float, labels: Integers | None = None
) -> dict[str, Float]:
    """Metric -> (images,) of logits (images, classes); with labels (images,), -1 for none, which of
    both have the label's class as their first: NaN where there is none."""
    from scipy.special import log_softmax

    first = base.argmax(1)
    then = changed.argmax(1)
    log_p = log_softmax(base, axis=1)
    log_q = log_softmax(changed, axis=1)
    found = {
        AGREEMENT: (first == then).astype(np.float64),
        KL: (np.exp(log_p) * (log_p - log_q)).sum(1),
    }
    if labels is None:
        return found
    right = then == labels
    right_base = first == labels
    known = labels >= 0
    shares = {
        RIGHT: right,
        RIGHT_BASE: right_base,
        ONLY_BASE: right_base & ~right,
        ONLY_CHANGED: right & ~right_base,
    }
    return found | {name: np.where(known, of, np.nan) for name, of in shares.items()}


def top1_cells(mean: BlockMean) -> Cells:
    return {"metric": "top1", **mean.cells_between(wilson(mean.value, mean.n))}


def output_rows(of: Mapping[str, BlockMean]) -> list[Cells]:
    """Rows about a changed model's outputs, from means of what `compare_outputs` gives."""
    rows: list[Cells] = []
    if RIGHT in of:
        fewer, more = (round(of[name].total) for name in (ONLY_BASE, ONLY_CHANGED))
        difference = loss(of, -1.0)
        rows.append(top1_cells(of[RIGHT]))
        rows.append(
            {"metric": "top1_difference"}
            | difference.cells_between(difference_interval(more, fewer, of[RIGHT].n))
            | {"p": mcnemar(more, fewer), "n_only_base": fewer, "n_only_changed": more}
        )
    same = of[AGREEMENT]
    rows.append({"metric": AGREEMENT, **same.cells_between(wilson(same.value, same.n))})
    rows.append({"metric": KL, **of[KL].cells(NOT_NEGATIVE)})
    return rows


def loss(of: Mapping[str, BlockMean], sign: float = 1.0) -> BlockMean:
    """The accuracy that a change costs; sign: -1 for what it gains."""
    return BlockMean(sign * (of[RIGHT_BASE].sums - of[RIGHT].sums), of[RIGHT].counts)
