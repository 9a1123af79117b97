"""The scoring of all heads in one pass over the tokens of test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.cells import Head
from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.analyses.dense_probe.tasks import Tally
from vitsee_core.analyses.dense_probe.work import HeadKey, Part, Sums, counted_rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.types import Float

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab


@dataclass(frozen=True)
class Testing:
    """The test images, the heads that predict them, and what is measured."""

    part: Part
    heads: Mapping[HeadKey, Head]
    wanted: Sequence[str]
    blocks: Blocks


@dataclass
class HeadCounts(Sums[Testing]):
    """The tallies of all heads."""

    counts: dict[HeadKey, Tally] = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Predict and count the images of a slab."""
        assert self.work is not None
        part, heads, rows = self.work.part, self.work.heads, counted_rows(slab)
        pixels = [part.truth.pixels(row) for row in rows]
        for key in heads:
            if key.baseline:
                for row, of_grid in zip(rows, pixels, strict=True):
                    self._count(key, row, np.zeros((0, 0, 0)), of_grid[key.of])
        for site, features in part.features.items():
            keys = [key for key in heads if key.of == site and not key.baseline]
            for row, x, of_grid in zip(rows, features.of_slab(slab), pixels, strict=True):
                z = x.astype(np.float64).reshape(*features.grid, features.dim)
                for key in keys:
                    self._count(key, row, z, of_grid[part.grids[site]])

    def _count(self, key: HeadKey, row: int, tokens: Float, pixels: Pixels) -> None:
        assert self.work is not None
        if key not in self.counts:
            blocks = self.work.blocks
            self.counts[key] = self.work.part.task.tally(self.work.wanted, blocks.n)
        block = int(self.work.blocks.of_rows[row])
        self.counts[key].count(block, self.work.heads[key].predict(tokens, pixels), pixels)


def score_heads(
    part: Part, heads: dict[HeadKey, Head], wanted: Sequence[str], execution: Execution, alone: bool
) -> tuple[dict[HeadKey, Tally], Blocks]:
    """Tally what each head predicts of the test images; also return the jackknife's blocks. wanted:
    metrics; alone: one slab after the other, as a head takes all threads, or is too large to be
    sent.

    Raises:
        VitseeError: no pixel of the test images counts.
    """
    blocks = Blocks.of(part.store, part.truth.mask, execution.seed)
    make = partial(HeadCounts, Testing(part, heads, wanted, blocks))
    if alone:
        one = replace(execution, map=None, jobs=1)
        counts = one.fold(part.store, make, part.truth.rows, slab_bytes=part.slab_bytes).counts
    else:
        counts = part.fold(make, execution).counts
    if not any(map(bool, counts.values())):
        raise part.no_pixel("test")
    return counts, blocks
