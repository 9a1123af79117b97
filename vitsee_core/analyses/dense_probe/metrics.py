"""The tasks, the class or the depth of every pixel, and their metrics with jackknife
intervals.

Pixels are counted per class, over all pixels of the data set that count (`Counts`):

    IoU of a class = both / (predicted + labelled - both)

Errors of depths are computed per image (`DepthErrors`), with depths d > 0 and predictions
p > 0 of the pixels that count:

    rmse = sqrt(mean (p - d)^2)    abs_rel = mean |p - d| / d    a1 = share of max(p/d, d/p) < 1.25

and averaged over images (Eigen et al. 2014, as the released code of Siméoni et al. 2025
averages them).

`Segmentation` and `Depth` have the same methods: what a probe of the task predicts, how
predictions are tallied over blocks of test images, and which cells of the table follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.dense_probe.heads import ClassHead, DepthHead, Head, Scores
from vitsee_core.analyses.dense_probe.pixels import (
    Labels,
    Pixels,
    has_label,
)
from vitsee_core.statistics.jackknife import SHARE, interval_cells
from vitsee_core.truth.masks.class_maps import ClassMaps
from vitsee_core.truth.masks.depth_maps import MIN_DEPTH, DepthMaps
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap, near_boundary
from vitsee_core.types import Float, Integers, Mask

# Axis of counts (..., 3, classes): pixels with a class in both, in the prediction, in the
# label.
BOTH, PREDICTED, LABELLED = range(3)
MIN_BLOCKS = 5  # with a class, of 20; with fewer, intervals over classes are too narrow
CLOSE = 1.25  # factor between a depth and a prediction that is right in `a1`

BOUNDARY = "boundary_iou"
CLASS = "iou_class"
CLASS_METRICS = ("miou", "pixel_accuracy", BOUNDARY)
DEPTH_METRICS = ("rmse", "abs_rel", "a1")
METRICS = (*CLASS_METRICS, *DEPTH_METRICS)
# Names of the baselines.
MAJORITY = "majority"
MEAN = "mean"
POSITION = "position"
METHOD = (
    "delete-a-block jackknife over blocks of test images (t quantile); the probe, its "
    "l2 and the training images held fixed; of a class that is missing without one of "
    "the blocks there is none"
)


@dataclass
class Counts:
    """Numbers of pixels per block of test images and class.

    Attributes:
        pixels: (blocks, 3, classes) over all pixels that count: those that have a class in
            prediction and label, in the prediction, and in the label.
        boundary: (blocks, 3, classes) the same over pixels near a boundary of their
            regions; no blocks where that is not asked for.
    """

    pixels: Integers
    boundary: Integers

    @classmethod
    def empty(cls, n_blocks: int, *, boundary: bool) -> Counts:
        """Return counts of no pixel, with or without those near boundaries."""
        n_boundary_blocks = n_blocks if boundary else 0
        return cls(
            pixels=np.zeros((n_blocks, 3, IGNORED), np.int64),
            boundary=np.zeros((n_boundary_blocks, 3, IGNORED), np.int64),
        )

    def count(self, block: int, prediction: Labels, pixels: Pixels) -> None:
        """Add an image, with the predicted labels of its pixels, (height, width)."""
        labels = pixels.labels
        prediction = np.where(labels == IGNORED, np.uint8(IGNORED), prediction)
        self.pixels[block] += count_confusions(prediction, labels)
        if len(self.boundary):
            self.boundary[block] += count_confusions(
                prediction, labels, near_boundary(prediction), pixels.boundary
            )

    def __add__(self, later: Counts) -> Counts:
        """Return the counts of both."""
        return Counts(self.pixels + later.pixels, self.boundary + later.boundary)

    def __bool__(self) -> bool:
        """Return whether any pixel was counted."""
        return bool(self.pixels.any())


def count_confusions(
    prediction: ClassMap,
    labels: ClassMap,
    prediction_mask: Mask | None = None,
    label_mask: Mask | None = None,
) -> Integers:
    """Return the counts of an image, (3, classes): in both, in the prediction, in the
    label.

    Args:
        prediction: (height, width) predicted classes.
        labels: (height, width) true classes.
        prediction_mask: (height, width) pixels of the prediction that count; None for all.
        label_mask: (height, width) pixels of the label that count; None for all.
    """
    if prediction_mask is None or label_mask is None:
        prediction_mask = np.ones(prediction.shape, np.bool_)
        label_mask = prediction_mask
    agrees = (prediction == labels) & prediction_mask & label_mask
    counts = np.empty((3, IGNORED), np.int64)
    counts[BOTH] = _class_counts(labels[agrees])
    counts[PREDICTED] = _class_counts(prediction[prediction_mask])
    counts[LABELLED] = _class_counts(labels[label_mask])
    return counts


def _class_counts(classes: ClassMap) -> Integers:
    """Return the number of pixels of each class, (classes,)."""
    return np.bincount(classes, minlength=IGNORED + 1)[:IGNORED]


def class_ious(counts: Integers) -> Float:
    """Return the IoU of each class, (..., classes), from counts (..., 3, classes).

    NaN for a class in neither label nor prediction.
    """
    both = counts[..., BOTH, :]
    union = counts[..., PREDICTED, :] + counts[..., LABELLED, :] - both
    return np.where(union > 0, both / np.maximum(union, 1), np.nan)


def mean_iou(counts: Integers) -> Float:
    """Return the mean IoU over the classes, (...), from counts (..., 3, classes).

    NaN without a pixel.
    """
    ious = class_ious(counts)
    occurs = ~np.isnan(ious)
    n_classes = occurs.sum(-1)
    sums = np.where(occurs, ious, 0).sum(-1)
    return np.where(n_classes > 0, sums / np.maximum(n_classes, 1), np.nan)


def accuracy(counts: Integers) -> Float:
    """Return the share of pixels that are right, (...), from counts (..., 3, classes).

    NaN without a pixel.
    """
    n_right = counts[..., BOTH, :].sum(-1)
    n_pixels = counts[..., LABELLED, :].sum(-1)
    return np.where(n_pixels > 0, n_right / np.maximum(n_pixels, 1), np.nan)


def rare_classes(counts: Counts) -> list[str]:
    """Return a remark where classes are labelled in fewer than `MIN_BLOCKS` blocks of test
    images.

    Other images would lack them, or have others, and no block that is left out shows by
    how much a mean over classes then differs. How many intervals contain it depends on how
    many pixels are given a class that no image has (simulated in `tests/test_dense_probe.py`).
    """
    n_blocks = len(counts.pixels)
    n_blocks_of_classes = (counts.pixels[:, LABELLED] > 0).sum(0)
    occurs = n_blocks_of_classes > 0
    n_classes = int(occurs.sum())
    n_rare = int((occurs & (n_blocks_of_classes < MIN_BLOCKS)).sum())
    if not n_rare:
        return []
    return [
        f"{n_rare} of {n_classes} classes are labelled in fewer than {MIN_BLOCKS} of the "
        f"{n_blocks} blocks of test images: a mean over classes depends on which images "
        "there are, and its interval is too narrow (in simulations with rare classes, 23 "
        "to 91 % of intervals of 20 images have the value of many images, fewest where "
        "absent classes are predicted)"
    ]


def class_cells(
    counts: Counts, metrics: Sequence[str], classes: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """Yield the cells of each row: metric, value and interval, and its replicates.

    Args:
        counts: of the predictions on all test images.
        metrics: some of `CLASS_METRICS`.
        classes: names of all classes by number; those that occur get a row each.
    """
    score_of_metric = {"miou": mean_iou, "pixel_accuracy": accuracy, BOUNDARY: mean_iou}
    for metric in metrics:
        score = score_of_metric[metric]
        block_counts = counts.boundary if metric == BOUNDARY else counts.pixels
        total = block_counts.sum(0)
        # Delete-a-block replicates: the total without each block.
        replicates = score(total - block_counts)
        yield {"metric": metric, **interval_cells(score(total), replicates, SHARE)}
    if not classes:
        return
    total = counts.pixels.sum(0)
    ious = class_ious(total)
    replicates = class_ious(total - counts.pixels)  # (blocks, classes)
    for number in np.flatnonzero(~np.isnan(ious)).tolist():
        cells = interval_cells(ious[number], replicates[:, number], SHARE)
        yield {"metric": CLASS, "class": classes[number], **cells}


@dataclass
class DepthErrors:
    """Errors of depths, summed over the images of each block.

    Attributes:
        sums: (blocks, 4) sums of `DEPTH_METRICS` over images, then the number of images.
    """

    sums: Float

    @classmethod
    def empty(cls, n_blocks: int) -> DepthErrors:
        """Return the sums over no image."""
        return cls(np.zeros((n_blocks, len(DEPTH_METRICS) + 1)))

    def count(self, block: int, prediction: Labels, pixels: Pixels) -> None:
        """Add the errors of an image, unless none of its pixels counts."""
        is_known = has_label(pixels.labels)
        if not is_known.any():
            return
        predicted = prediction[is_known].astype(np.float64)
        true = pixels.labels[is_known].astype(np.float64)
        self.sums[block] += [*depth_errors(predicted, true), 1]

    def __add__(self, later: DepthErrors) -> DepthErrors:
        """Return the sums over the images of both."""
        return DepthErrors(self.sums + later.sums)

    def __bool__(self) -> bool:
        """Return whether any image was counted."""
        return bool(self.sums[:, -1].any())


def depth_errors(p: Float, d: Float) -> tuple[float, float, float]:
    """Return rmse, abs_rel and a1 of one image with predicted depths p and true depths d.

    p, d: (pixels,) in metres, above 0.
    """
    error = np.abs(p - d)
    is_close = np.maximum(p / d, d / p) < CLOSE
    rmse = float(np.sqrt((error**2).mean()))
    abs_rel = float((error / d).mean())
    return rmse, abs_rel, float(is_close.mean())


def depth_cells(
    errors: DepthErrors, metrics: Sequence[str]
) -> Iterator[dict[str, object]]:
    """Yield the cells of each row: metric, value, interval and replicates."""
    total = errors.sums.sum(0)
    without_block = total - errors.sums  # (blocks, 4)
    # A block that has all images leaves none: 0 / 0, an interval of NaN.
    with np.errstate(invalid="ignore"):
        for metric in metrics:
            i = DEPTH_METRICS.index(metric)
            value = total[i] / total[-1]
            replicates = without_block[:, i] / without_block[:, -1]
            limits = SHARE if metric == "a1" else (0.0, np.inf)
            yield {"metric": metric, **interval_cells(value, replicates, limits)}


Tally = Counts | DepthErrors


@dataclass(frozen=True)
class Segmentation:
    """The task to predict the class of every pixel.

    Attributes:
        maps: the class maps.
        metrics: names of its metrics.
        baselines: names of its baselines, in the order of `heads.PositionSums.scores`.
        n_targets: number of targets of least squares, one per class.
        label: what a pixel has, for messages.
    """

    maps: ClassMaps
    metrics = CLASS_METRICS
    baselines = (MAJORITY, POSITION)
    n_targets = IGNORED
    label = "class"

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """Return the probe with these scores of classes."""
        return ClassHead(classes, scores, nearest)

    def tally(self, metrics: Sequence[str], n_blocks: int) -> Tally:
        """Return counts of no pixel yet, for these metrics."""
        return Counts.empty(n_blocks, boundary=BOUNDARY in metrics)

    def cells(
        self, tally: Any, metrics: Sequence[str], per_class: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the cells of each row: of each metric, then of each class if
        `per_class`."""
        if not per_class:
            return class_cells(tally, metrics)
        # A map may have values beyond the names that its folder lists: they are called by
        # number.
        names = list(self.maps.classes)
        names += [str(number) for number in range(len(names), IGNORED)]
        return class_cells(tally, metrics, names)

    def quality(self, tally: Any) -> float:
        """Return a number that is highest for the best site: the mean IoU."""
        return float(mean_iou(tally.pixels.sum(0)))

    def remarks(self, tally: Any) -> list[str]:
        """Return a remark where classes occur in few blocks of test images."""
        return rare_classes(tally)


@dataclass(frozen=True)
class Depth:
    """The task to predict the depth of every pixel; attributes as those of
    `Segmentation`."""

    maps: DepthMaps
    metrics = DEPTH_METRICS
    baselines = (MEAN, POSITION)
    n_targets = 1
    label = "depth"

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest depth that is predicted, in metres."""
        return MIN_DEPTH, self.maps.max_depth

    def head(self, classes: Integers, scores: Scores, nearest: bool = False) -> Head:
        """Return the probe whose score is the depth; it has no classes."""
        del classes, nearest
        return DepthHead(scores, self.limits)

    def tally(self, metrics: Sequence[str], n_blocks: int) -> Tally:
        """Return errors of no image yet."""
        del metrics
        return DepthErrors.empty(n_blocks)

    def cells(
        self, tally: Any, metrics: Sequence[str], per_class: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the cells of the row of each metric."""
        del per_class
        return depth_cells(tally, metrics)

    def quality(self, tally: Any) -> float:
        """Return a number that is highest for the best site: minus the mean rmse."""
        total = tally.sums.sum(0)
        return -float(np.divide(total[DEPTH_METRICS.index("rmse")], total[-1]))

    def remarks(self, tally: Any) -> list[str]:
        """Return no remark: errors are of single images."""
        del tally
        return []


Task = Segmentation | Depth
