"""The tasks of dense probes: the class or the depth of every pixel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.dense_probe import metrics
from vitsee_core.analyses.dense_probe.cells import POSITION, ClassHead, DepthHead, Head, Scores
from vitsee_core.analyses.dense_probe.metrics import Counts, DepthErrors
from vitsee_core.masks.class_maps import IGNORED, ClassMaps
from vitsee_core.masks.depth_maps import MIN_DEPTH, DepthMaps
from vitsee_core.types import Integers

MAJORITY, MEAN = "majority", "mean"
METRICS = (*metrics.MEANS, *metrics.DEPTH_MEANS)
Tally = Counts | DepthErrors


@dataclass(frozen=True)
class Segmentation:
    """The class of every pixel."""

    maps: ClassMaps
    metrics = metrics.MEANS
    baselines = MAJORITY, POSITION
    n_targets = IGNORED
    label = "class"

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """The probe with these scores of classes."""
        return ClassHead(classes, scores, nearest)

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Tally:
        """Counts of no pixel yet, for these metrics."""
        return Counts.empty(n_blocks, metrics.BOUNDARY in wanted)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        """The cells of each row; see `metrics.metric_cells`."""
        names = [*self.maps.classes]
        names += [str(number) for number in range(len(names), IGNORED)]
        return metrics.metric_cells(tally, wanted, names if per_class else ())

    def quality(self, tally: Any) -> float:
        """A number that is highest for the best site."""
        return float(metrics.mean_iou(tally.whole.sum(0)))


@dataclass(frozen=True)
class Depth:
    """The depth of every pixel; see `Segmentation`."""

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
        del classes, nearest
        return DepthHead(scores, self.limits)

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Tally:
        del wanted
        return DepthErrors.empty(n_blocks)

    def cells(self, tally: Any, wanted: Sequence[str], per_class: bool) -> Iterator[dict[str, Any]]:
        del per_class
        return metrics.error_cells(tally, wanted)

    def quality(self, tally: Any) -> float:
        whole = tally.sums.sum(0)
        return -float(np.divide(whole[0], whole[-1]))


Task = Segmentation | Depth
