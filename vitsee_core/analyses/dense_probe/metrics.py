"""Pixels counted per class, and their scores with jackknife intervals over blocks of images.

    IoU of a class = both / (predicted + labelled - both)

over all pixels of the data set that count, not per image. `miou` is the mean over the classes that
occur in a label or in a prediction; `boundary_iou` is the same of pixels near the boundaries of
their regions (Cheng et al. 2021); `pixel_accuracy` the share of pixels that are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.boundaries import near_boundary
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.masks.class_maps import IGNORED, ClassMap
from vitsee_core.statistics.jackknife import SHARE, Limits, interval
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Integers, Mask

BOTH, PREDICTED, LABELLED = range(3)
BOUNDARY = "boundary_iou"
MEANS = ("miou", "pixel_accuracy", BOUNDARY)
CLASS = "iou_class"
METHOD = (
    "delete-a-block jackknife over blocks of test images (t quantile); the probe, its l2 and the "
    "training images held fixed; of a class that is missing without one of the blocks there is none"
)


@dataclass
class Counts:
    """(blocks, 3, classes) pixels that are a class in prediction and label, in the prediction, in
    the label: `whole` of all pixels that count, `edge` of those near a boundary of their regions;
    without blocks where that is not asked for."""

    whole: Integers
    edge: Integers

    @classmethod
    def empty(cls, n_blocks: int, boundary: bool) -> Counts:
        """Of no pixel."""
        shape = 3, IGNORED
        return cls(
            np.zeros((n_blocks, *shape), np.int64),
            np.zeros((n_blocks if boundary else 0, *shape), np.int64),
        )

    def count(self, block: int, found: Labels, pixels: Pixels) -> None:
        """See `scoring.Tally`."""
        labels = pixels.labels
        found = np.where(labels == IGNORED, np.uint8(IGNORED), found)
        self.whole[block] += counted(found, labels)
        if len(self.edge):
            self.edge[block] += counted(found, labels, near_boundary(found), pixels.edge)

    def add(self, other: Counts) -> None:
        """See `scoring.Tally`."""
        self.whole += other.whole
        self.edge += other.edge

    def __bool__(self) -> bool:
        return bool(self.whole.any())


def counted(
    found: ClassMap, labels: ClassMap, near: Mask | None = None, edge: Mask | None = None
) -> Integers:
    """(3, classes) counts of an image, see `Counts`; near, edge: only these pixels of the
    prediction and of the label."""
    if near is None or edge is None:
        near = edge = np.ones(found.shape, np.bool_)
    parts: Sequence[ClassMap] = (
        labels[(found == labels) & near & edge], found[near], labels[edge],
    )  # fmt: skip
    return np.stack([np.bincount(part, minlength=IGNORED + 1)[:IGNORED] for part in parts])


def class_ious(counts: Integers) -> Float:
    """(..., classes) of counts (..., 3, classes); NaN for a class in neither label nor
    prediction."""
    both, predicted, labelled = (counts[..., k, :] for k in (BOTH, PREDICTED, LABELLED))
    either = predicted + labelled - both
    found: Float = np.where(either > 0, both / np.maximum(either, 1), np.nan)
    return found


def mean_iou(counts: Integers) -> Float:
    """(...) the mean over classes; NaN without a pixel."""
    ious = class_ious(counts)
    there = ~np.isnan(ious)
    n = there.sum(-1)
    found: Float = np.where(n > 0, np.where(there, ious, 0).sum(-1) / np.maximum(n, 1), np.nan)
    return found


def accuracy(counts: Integers) -> Float:
    """(...) the share of pixels that are right; NaN without a pixel."""
    both, labelled = (counts[..., k, :].sum(-1) for k in (BOTH, LABELLED))
    found: Float = np.where(labelled > 0, both / np.maximum(labelled, 1), np.nan)
    return found


def metric_cells(
    counts: Counts, metrics: Sequence[str], classes: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """The cells of each row: metric, value and interval, and its replicates.

    Args:
        counts: by block.
        metrics: some of `MEANS`.
        classes: names of all classes by number, where those that occur get a row each.
    """
    of = {"miou": mean_iou, "pixel_accuracy": accuracy, BOUNDARY: mean_iou}
    for metric in metrics:
        own = counts.edge if metric == BOUNDARY else counts.whole
        yield {"metric": metric, **spread_cells(of[metric](own.sum(0)), of[metric](without(own)))}
    if classes:
        ious, replicates = class_ious(counts.whole.sum(0)), class_ious(without(counts.whole))
        for number in np.flatnonzero(~np.isnan(ious)).tolist():
            cells = spread_cells(ious[number], replicates[:, number])
            yield {"metric": CLASS, "class": classes[number], **cells}


def without(counts: Integers) -> Integers:
    """(blocks, 3, classes) of all images but those of each block."""
    found: Integers = counts.sum(0) - counts
    return found


def spread_cells(value: Float, replicates: Float, limits: Limits = SHARE) -> dict[str, object]:
    """A value with its interval, within limits, and its replicates."""
    _, low, high = interval(np.asarray(value), replicates, limits)
    return {"value": float(value), "low": float(low), "high": float(high), WORD: replicates}
