"""Scores of predicted classes and depths, with jackknife intervals over blocks of images, and the
tasks that are scored: the class or the depth of every pixel.

Pixels are counted per class, over all pixels of the data set that count (`Counts`):

    IoU of a class = both / (predicted + labelled - both)

Errors of depths are computed per image (`DepthErrors`), with depths d > 0 and predictions p > 0 of
the pixels that count:

    rmse = sqrt(mean (p - d)^2)    abs_rel = mean |p - d| / d    a1 = share of max(p/d, d/p) < 1.25

and averaged over images (Eigen et al. 2014, as the released code of Siméoni et al.
2025 averages them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import (
    POSITION,
    ClassHead,
    DepthHead,
    Head,
    Labels,
    Pixels,
    Scores,
    has_label,
    near_boundary,
)
from vitsee_core.statistics.jackknife import SHARE, interval_cells
from vitsee_core.truth.masks.class_maps import ClassMaps
from vitsee_core.truth.masks.depth_maps import MIN_DEPTH, DepthMaps
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Integers, Mask

BOTH, PREDICTED, LABELLED = range(3)
BOUNDARY = "boundary_iou"
MIN_BLOCKS = 5  # with a class, of 20
MEANS = ("miou", "pixel_accuracy", BOUNDARY)
CLASS = "iou_class"
METHOD = (
    "delete-a-block jackknife over blocks of test images (t quantile); the probe, its l2 and the "
    "training images held fixed; of a class that is missing without one of the blocks there is none"
)


@dataclass
class Counts:
    """Numbers of pixels (blocks, 3, classes) that have a class in prediction and label, in the
    prediction, and in the label: over all pixels that count, and over those near a boundary of
    their regions (no blocks where that is not asked for)."""

    whole: Integers
    edge: Integers

    @classmethod
    def empty(cls, n_blocks: int, boundary: bool) -> Counts:
        shape = 3, IGNORED
        return cls(
            np.zeros((n_blocks, *shape), np.int64),
            np.zeros((n_blocks if boundary else 0, *shape), np.int64),
        )

    def count(self, block: int, found: Labels, pixels: Pixels) -> None:
        """Add an image, with the predicted labels of its pixels, (height, width)."""
        labels = pixels.labels
        found = np.where(labels == IGNORED, np.uint8(IGNORED), found)
        self.whole[block] += count_confusions(found, labels)
        if len(self.edge):
            self.edge[block] += count_confusions(
                found, labels, near_boundary(found), pixels.edge
            )

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.whole + other.whole, self.edge + other.edge)

    def __bool__(self) -> bool:
        return bool(self.whole.any())


def count_confusions(
    found: ClassMap, labels: ClassMap, near: Mask | None = None, edge: Mask | None = None
) -> Integers:
    """The counts of an image, (3, classes), see `Counts`; near, edge: only these pixels of the
    prediction and of the label."""
    if near is None or edge is None:
        near = edge = np.ones(found.shape, np.bool_)
    parts: Sequence[ClassMap] = (
        labels[(found == labels) & near & edge],
        found[near],
        labels[edge],
    )
    return np.stack(
        [np.bincount(part, minlength=IGNORED + 1)[:IGNORED] for part in parts]
    )


def class_ious(counts: Integers) -> Float:
    """The IoU of each class, (..., classes), from counts (..., 3, classes); NaN for a class in
    neither label nor prediction."""
    both, predicted, labelled = (counts[..., k, :] for k in (BOTH, PREDICTED, LABELLED))
    either = predicted + labelled - both
    return np.where(either > 0, both / np.maximum(either, 1), np.nan)


def mean_iou(counts: Integers) -> Float:
    """The mean IoU over the classes, (...), from counts (..., 3, classes); NaN without a pixel."""
    ious = class_ious(counts)
    there = ~np.isnan(ious)
    n = there.sum(-1)
    return np.where(n > 0, np.where(there, ious, 0).sum(-1) / np.maximum(n, 1), np.nan)


def accuracy(counts: Integers) -> Float:
    """The share of pixels that are right, (...), from counts (..., 3, classes); NaN without a
    pixel."""
    both, labelled = (counts[..., k, :].sum(-1) for k in (BOTH, LABELLED))
    return np.where(labelled > 0, both / np.maximum(labelled, 1), np.nan)


def rare_classes(counts: Counts) -> list[str]:
    """A remark where classes are labelled in fewer than `MIN_BLOCKS` blocks of test images. Other
    images would lack them, or have others, and no block that is left out shows by how much a mean
    over classes then differs: measured, 72 % of intervals contain it in place of 95 %."""
    n_blocks = len(counts.whole)
    of_class = (counts.whole[:, LABELLED] > 0).sum(0)
    n_classes = int((of_class > 0).sum())
    n_rare = int(((of_class > 0) & (of_class < MIN_BLOCKS)).sum())
    if not n_rare:
        return []
    return [
        f"{n_rare} of {n_classes} classes are labelled in fewer than {MIN_BLOCKS} of the "
        f"{n_blocks} blocks of test images: a mean over classes depends on which images there are, "
        "and its interval is too narrow (of rare classes and 20 images 72 % in place of 95 %)"
    ]


def metric_cells(
    counts: Counts, metrics: Sequence[str], classes: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """The cells of each row: metric, value and interval, and its replicates; classes: names of all
    by number, where those that occur get a row each."""
    of = {"miou": mean_iou, "pixel_accuracy": accuracy, BOUNDARY: mean_iou}
    for metric in metrics:
        own = counts.edge if metric == BOUNDARY else counts.whole
        value = of[metric](own.sum(0))
        replicates = of[metric](own.sum(0) - own)
        yield {"metric": metric, **interval_cells(value, replicates, SHARE)}
    if classes:
        whole = counts.whole.sum(0)
        ious = class_ious(whole)
        replicates = class_ious(whole - counts.whole)
        for number in np.flatnonzero(~np.isnan(ious)).tolist():
            cells = interval_cells(ious[number], replicates[:, number], SHARE)
            yield {"metric": CLASS, "class": classes[number], **cells}


DEPTH_MEANS = ("rmse", "abs_rel", "a1")
CLOSE = 1.25


@dataclass
class DepthErrors:
    """The sums (blocks, 4) of `DEPTH_MEANS` over the images of each block, and the number of
    images."""

    sums: Float

    @classmethod
    def empty(cls, n_blocks: int) -> DepthErrors:
        return cls(np.zeros((n_blocks, len(DEPTH_MEANS) + 1)))

    def count(self, block: int, found: Labels, pixels: Pixels) -> None:
        """Add the errors of an image, unless none of its pixels counts."""
        there = has_label(pixels.labels)
        if there.any():
            p, d = (own[there].astype(np.float64) for own in (found, pixels.labels))
            self.sums[block] += [*errors(p, d), 1]

    def __add__(self, other: DepthErrors) -> DepthErrors:
        return DepthErrors(self.sums + other.sums)

    def __bool__(self) -> bool:
        return bool(self.sums[:, -1].any())


def errors(p: Float, d: Float) -> tuple[float, float, float]:
    """The `DEPTH_MEANS` of one image with predicted and true depths p and d, (pixels,)."""
    off = np.abs(p - d)
    close = np.maximum(p / d, d / p) < CLOSE
    return float(np.sqrt((off**2).mean())), float((off / d).mean()), float(close.mean())


def error_cells(
    tally: DepthErrors, metrics: Sequence[str]
) -> Iterator[dict[str, object]]:
    """The cells of each row: metric, value, interval and replicates."""
    whole = tally.sums.sum(0)
    others = whole - tally.sums
    with np.errstate(invalid="ignore"):
        for metric in metrics:
            i = DEPTH_MEANS.index(metric)
            value = whole[i] / whole[-1]
            replicates = others[:, i] / others[:, -1]
            limits = SHARE if metric == "a1" else (0.0, np.inf)
            yield {"metric": metric, **interval_cells(value, replicates, limits)}


MAJORITY = "majority"
MEAN = "mean"
METRICS = (*MEANS, *DEPTH_MEANS)
Tally = Counts | DepthErrors


@dataclass(frozen=True)
class Segmentation:
    """The class of every pixel."""

    maps: ClassMaps
    metrics = MEANS
    baselines = MAJORITY, POSITION
    n_targets = IGNORED
    label = "class"

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """The probe with these scores of classes."""
        return ClassHead(classes, scores, nearest)

    def tally(self, wanted: Sequence[str], n_blocks: int) -> Tally:
        """Counts of no pixel yet, for these metrics."""
        return Counts.empty(n_blocks, BOUNDARY in wanted)

    def cells(
        self, tally: Any, wanted: Sequence[str], per_class: bool
    ) -> Iterator[dict[str, Any]]:
        """The cells of each row; see `metric_cells`."""
        names = [*self.maps.classes]
        names += [str(number) for number in range(len(names), IGNORED)]
        return metric_cells(tally, wanted, names if per_class else ())

    def quality(self, tally: Any) -> float:
        """A number that is highest for the best site."""
        return float(mean_iou(tally.whole.sum(0)))

    def remarks(self, tally: Any) -> list[str]:
        """A remark where classes occur in few blocks of images; see `rare_classes`."""
        return rare_classes(tally)


@dataclass(frozen=True)
class Depth:
    """The depth of every pixel; see `Segmentation`."""

    maps: DepthMaps
    metrics = DEPTH_MEANS
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

    def cells(
        self, tally: Any, wanted: Sequence[str], per_class: bool
    ) -> Iterator[dict[str, Any]]:
        del per_class
        return error_cells(tally, wanted)

    def remarks(self, tally: Any) -> list[str]:
        """No remark: errors are of single images."""
        del tally
        return []

    def quality(self, tally: Any) -> float:
        whole = tally.sums.sum(0)
        return -float(np.divide(whole[0], whole[-1]))


Task = Segmentation | Depth
