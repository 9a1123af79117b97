"""Predictions of the test images, counted: one pass over tokens for every head.

What is predicted of pixels: classes, or depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitsee_core.analyses.dense_probe import metrics
from vitsee_core.analyses.dense_probe.cells import (
    POSITION,
    ClassHead,
    DepthHead,
    Head,
    PlaceSums,
    Scores,
)
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.masks.class_maps import IGNORED, ClassMaps
from vitsee_core.masks.depth_maps import MIN_DEPTH, DepthMaps
from vitsee_core.types import Integers

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.cells import Head
    from vitsee_core.analyses.dense_probe.features import Patches
    from vitsee_core.analyses.dense_probe.labelled_images import Truth
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


MAJORITY, MEAN = "majority", "mean"
SCORE = "miou"


@dataclass(frozen=True)
class Segmentation:
    """The class of every pixel.

    Attributes:
        maps: the class maps.
    """

    maps: ClassMaps
    metrics = metrics.MEANS
    baselines = MAJORITY, POSITION
    n_targets = IGNORED
    label = "class"

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """The probe with these scores of classes."""
        return ClassHead(classes, scores, nearest)

    def blind(self, places: PlaceSums) -> dict[str, Head]:
        """Baseline -> its head."""
        classes, *both = places.scores()
        heads = (ClassHead(classes, scores) for scores in both)
        return dict(zip(self.baselines, heads, strict=True))

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Callable[[], Tally]:
        """Makes an empty one for these metrics."""
        return partial(metrics.Counts.empty, n_blocks, metrics.BOUNDARY in wanted)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        """See `metrics.metric_cells`."""
        names = [*self.maps.classes]
        names += [str(number) for number in range(len(names), IGNORED)]
        return metrics.metric_cells(tally, wanted, names if per_class else ())

    def quality(self, tally: Any) -> float:
        """What the best site has most of."""
        return float(metrics.mean_iou(tally.whole.sum(0)))


@dataclass(frozen=True)
class Depth:
    """The depth of every pixel.

    Attributes:
        maps: the depth maps.
    """

    maps: DepthMaps
    metrics = metrics.DEPTH_MEANS
    baselines = MEAN, POSITION
    n_targets = 1
    label = "depth"

    @property
    def limits(self) -> tuple[float, float]:
        """Of predictions, metres."""
        return MIN_DEPTH, self.maps.max_depth

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """The probe with this score."""
        del classes, nearest
        return DepthHead(scores, self.limits)

    def blind(self, places: PlaceSums) -> dict[str, Head]:
        """Baseline -> its head."""
        _, *both = places.scores()
        heads = (DepthHead(scores, self.limits) for scores in both)
        return dict(zip(self.baselines, heads, strict=True))

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Callable[[], Tally]:
        """Makes an empty one."""
        del wanted
        return partial(metrics.DepthErrors.empty, n_blocks)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        """See `metrics.error_cells`."""
        del per_class
        return metrics.error_cells(tally, wanted)

    def quality(self, tally: Any) -> float:
        """What the best site has most of."""
        whole = tally.sums.sum(0)
        return -float(np.divide(whole[0], whole[-1]))


Task = Segmentation | Depth
METRICS = (*metrics.MEANS, *metrics.DEPTH_MEANS)


def blind_heads(task: Task, places: Mapping[str, PlaceSums]) -> Iterator[tuple[str, str, Head]]:
    """(grid, baseline, its head) of every grid."""
    for grid, own in places.items():
        for name, head in task.blind(own).items():
            yield grid, name, head
