"""Means over images, whole and without each block of the jackknife, of what slabs give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.statistics.jackknife import (
    UNLIMITED,
    Blocks,
    Limits,
    block_sums,
    interval,
    means_without,
    standard_error,
)
from vitsee_core.statistics.value_columns import Cells
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Integers

if TYPE_CHECKING:
    from vitsee_stores import Slab

Key = Any  # hashable


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
        return self._cells(float(standard_error(self.without)), float(ends[0]), float(ends[1]))

    def _cells(self, std: float, low: float, high: float) -> Cells:
        numbers = {"value": self.value, "std": std, "low": low, "high": high}
        return {**numbers, "spread": "jackknife", "n_images": self.n, WORD: self.without}


class BlockMeans:
    """Means per block of images, filled by `streaming.fold` over one store or a pair.

    `read(*slabs)` gives key -> (images,) for the images that count, NaN for no value, with the same
    keys for each slab; it must be picklable. None: values are counted as they come.
    """

    def __init__(self, read: Callable[..., Mapping[Key, Float]] | None, blocks: Blocks) -> None:
        self._read, self._blocks = read, blocks
        self._found: dict[Key, BlockMean] = {}

    def update(self, *slabs: Slab) -> None:
        assert self._read is not None
        first = slabs[0]
        self.count(self._read(*slabs), np.arange(len(first.valid))[first.valid] + first.rows.start)

    def count(self, found: Mapping[Key, Float], rows: Integers) -> None:
        """Add values key -> (images,) of these rows of the store."""
        labels = self._blocks.of_rows[rows]
        for key, values in found.items():
            present = ~np.isnan(values)
            parts = (np.where(present, values, 0.0), present)
            self._add(key, BlockMean(*(block_sums(x, labels, self._blocks.n) for x in parts)))

    def merge(self, other: BlockMeans) -> None:
        for key, mean in other._found.items():
            self._add(key, mean)

    def _add(self, key: Key, mean: BlockMean) -> None:
        if own := self._found.get(key):
            mean = BlockMean(own.sums + mean.sums, own.counts + mean.counts)
        self._found[key] = mean

    def result(self) -> dict[Key, BlockMean]:
        return dict(self._found)
