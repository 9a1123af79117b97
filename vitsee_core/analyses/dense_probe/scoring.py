"""Classes or depths as what is predicted, and the scoring of all heads in one pass over tokens."""

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
    from vitsee_core.analyses.dense_probe.features import Patches
    from vitsee_core.analyses.dense_probe.labelled_images import Truth
    from vitsee_stores import Slab

MAJORITY, MEAN = "majority", "mean"


@dataclass(frozen=True)
class HeadKey:
    """Identifies a head: that of a site at an l2 or with k neighbours, or a baseline on a grid."""

    of: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


class Tally(Protocol):
    """How right the predictions of one head are, by block of the jackknife."""

    def count(self, block: int, found: Labels, pixels: Pixels) -> None:
        """Add an image, with the predicted labels of its pixels, (height, width)."""

    def add(self, other: Any) -> None:
        """Add the tally of other images."""

    def __bool__(self) -> bool:
        """Whether any pixel was counted."""


@dataclass(frozen=True)
class TestImages:
    """The test images, and the heads that predict them.

    Attributes:
        heads: key -> a trained probe; several may read one site.
        features: site -> its patches.
        grids: site -> key of its grid in `truth.layouts`.
        blocks: (images,) block of the jackknife of every row of the store.
        tally: makes an empty tally.
    """

    heads: Mapping[HeadKey, Head]
    features: Mapping[str, Patches]
    grids: Mapping[str, str]
    truth: Truth
    blocks: Integers
    tally: Callable[[], Tally]


@dataclass
class HeadCounts:
    """The tallies of all heads, to be filled by `streaming.fold`."""

    images: TestImages | None
    counts: dict[HeadKey, Tally] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the images out once there are counts: another process returns these alone."""
        return self.__dict__ | ({"images": None} if self.counts else {})

    def update(self, slab: Slab) -> None:
        """Predict and count the images of a slab."""
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
        """Add the tallies of other slabs."""
        for key, counts in other.counts.items():
            if key in self.counts:
                self.counts[key].add(counts)
            else:
                self.counts[key] = counts

    def result(self) -> dict[HeadKey, Tally]:
        """Return the tally of each head."""
        return self.counts

    def _tally(self, key: HeadKey) -> Tally:
        assert self.images is not None
        if key not in self.counts:
            self.counts[key] = self.images.tally()
        return self.counts[key]


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
        """Make the probe with these scores of classes."""
        return ClassHead(classes, scores, nearest)

    def blind(self, places: PlaceSums) -> dict[str, Head]:
        """Return the head of each baseline."""
        classes, *both = places.scores()
        heads = (ClassHead(classes, scores) for scores in both)
        return dict(zip(self.baselines, heads, strict=True))

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Callable[[], Tally]:
        """Return a function that makes an empty tally for these metrics."""
        return partial(metrics.Counts.empty, n_blocks, metrics.BOUNDARY in wanted)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        """Yield the cells of each row; see `metrics.metric_cells`."""
        names = [*self.maps.classes]
        names += [str(number) for number in range(len(names), IGNORED)]
        return metrics.metric_cells(tally, wanted, names if per_class else ())

    def quality(self, tally: Any) -> float:
        """Return a number that is highest for the best site."""
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
        """The least and the largest depth that is predicted, in metres."""
        return MIN_DEPTH, self.maps.max_depth

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """Make the probe whose score is the depth."""
        del classes, nearest
        return DepthHead(scores, self.limits)

    def blind(self, places: PlaceSums) -> dict[str, Head]:
        """Return the head of each baseline."""
        _, *both = places.scores()
        heads = (DepthHead(scores, self.limits) for scores in both)
        return dict(zip(self.baselines, heads, strict=True))

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Callable[[], Tally]:
        """Return a function that makes an empty tally."""
        del wanted
        return partial(metrics.DepthErrors.empty, n_blocks)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        """Yield the cells of each row; see `metrics.error_cells`."""
        del per_class
        return metrics.error_cells(tally, wanted)

    def quality(self, tally: Any) -> float:
        """Return a number that is highest for the best site."""
        whole = tally.sums.sum(0)
        return -float(np.divide(whole[0], whole[-1]))


Task = Segmentation | Depth
METRICS = (*metrics.MEANS, *metrics.DEPTH_MEANS)


def blind_heads(task: Task, places: Mapping[str, PlaceSums]) -> Iterator[tuple[str, str, Head]]:
    """Yield grid, name and head of each baseline."""
    for grid, own in places.items():
        for name, head in task.blind(own).items():
            yield grid, name, head
