"""Predictions of the test images, counted: one pass over tokens for every head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.types import Integers

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.features import Patches
    from vitsee_core.analyses.dense_probe.linear import Head
    from vitsee_core.analyses.dense_probe.truth import Truth
    from vitsee_stores import Slab


@dataclass(frozen=True)
class HeadKey:
    """Whose predictions: of a site at an l2 or with k neighbours, or of a baseline on a grid."""

    of: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


class Tally(Protocol):
    """Right and wrong of a head's predictions, by block of the jackknife."""

    def count(self, block: int, found: Labels, pixels: Pixels) -> None:
        """Add an image; found: (height, width) what is predicted of its pixels."""

    def add(self, other: Any) -> None:
        """Add another of its kind."""

    def __bool__(self) -> bool:
        """Whether any pixel was counted."""


@dataclass(frozen=True)
class TestImages:
    """What is predicted. heads: key -> a trained probe; several may read one site. features: site
    -> its patches. grids: site -> key of its grid in `truth.layouts`. blocks: (images,) of the
    jackknife, of all rows. tally: makes an empty one."""

    heads: Mapping[HeadKey, Head]
    features: Mapping[str, Patches]
    grids: Mapping[str, str]
    truth: Truth
    blocks: Integers
    tally: Callable[[], Tally]


@dataclass
class HeadCounts:
    """Counts of every head, to be filled by `streaming.fold`."""

    images: TestImages | None
    counts: dict[HeadKey, Tally] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Another process gives back the counts alone."""
        return self.__dict__ | ({"images": None} if self.counts else {})

    def update(self, slab: Slab) -> None:
        """Count a slab's images."""
        images = self.images
        assert images is not None
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()
        pixels = [images.truth.pixels(row) for row in rows]
        nothing = np.zeros((0, 0, 0))
        for key, head in images.heads.items():
            if key.baseline:
                for row, of_grid in zip(rows, pixels, strict=True):
                    own = of_grid[key.of]
                    self._tally(key).count(images.blocks[row], head.predict(nothing, own), own)
        for site, features in images.features.items():
            heads = {k: h for k, h in images.heads.items() if k.of == site and not k.baseline}
            tokens = features.of_slab(slab)
            for row, x, of_grid in zip(rows, tokens, pixels, strict=True):
                own = of_grid[images.grids[site]]
                z = x.astype(np.float64).reshape(*features.grid, features.dim)
                for key, head in heads.items():
                    self._tally(key).count(images.blocks[row], head.predict(z, own), own)

    def merge(self, other: HeadCounts) -> None:
        """Count what `other` counted."""
        for key, counts in other.counts.items():
            if key in self.counts:
                self.counts[key].add(counts)
            else:
                self.counts[key] = counts

    def result(self) -> dict[HeadKey, Tally]:
        """Of every head."""
        return self.counts

    def _tally(self, key: HeadKey) -> Tally:
        assert self.images is not None
        if key not in self.counts:
            self.counts[key] = self.images.tally()
        return self.counts[key]
