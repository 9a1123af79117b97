"""What is predicted of pixels: classes, or depths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitsee_core.analyses.dense_probe import depth_errors, metrics
from vitsee_core.analyses.dense_probe.linear import ClassHead, DepthHead, Head, Scores
from vitsee_core.analyses.dense_probe.places import POSITION, PlaceSums
from vitsee_core.analyses.dense_probe.scoring import Tally
from vitsee_core.masks.class_maps import IGNORED, ClassMaps
from vitsee_core.masks.depth_maps import MIN_DEPTH, DepthMaps
from vitsee_core.types import Integers

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
    metrics = depth_errors.MEANS
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
        return partial(depth_errors.DepthErrors.empty, n_blocks)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        """See `depth_errors.error_cells`."""
        del per_class
        return depth_errors.error_cells(tally, wanted)

    def quality(self, tally: Any) -> float:
        """What the best site has most of."""
        whole = tally.sums.sum(0)
        return -float(np.divide(whole[0], whole[-1]))


Task = Segmentation | Depth
METRICS = (*metrics.MEANS, *depth_errors.MEANS)


def blind_heads(task: Task, places: Mapping[str, PlaceSums]) -> Iterator[tuple[str, str, Head]]:
    """(grid, baseline, its head) of every grid."""
    for grid, own in places.items():
        for name, head in task.blind(own).items():
            yield grid, name, head
