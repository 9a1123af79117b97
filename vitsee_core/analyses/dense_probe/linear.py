"""Probes that give every cell of a grid a score for each class, which pixels interpolate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.masks.class_maps import ClassMap
from vitsee_core.types import Float, Integers

AT_ONCE = 1 << 22  # scores of pixels in memory


class Head(Protocol):
    """A trained probe."""

    def predict(self, tokens: Float, pixels: Pixels) -> ClassMap:
        """(height, width) the class of each pixel; tokens: (rows, cols, dim)."""


@dataclass(frozen=True)
class LinearHead:
    """scores = tokens @ weights + bias, interpolated to pixels; the highest wins, of equal ones the
    lowest class. classes: (classes,) numbers; weights: (dim, classes); bias: (classes,). nearest:
    each pixel has the class of its nearest cell instead."""

    classes: Integers
    weights: Float
    bias: Float
    nearest: bool = False

    def predict(self, tokens: Float, pixels: Pixels) -> ClassMap:
        """See `Head`."""
        scores = tokens @ self.weights + self.bias
        if not self.nearest:
            return highest(scores, self.classes, pixels)
        rows, cols = pixels.nearest
        found: ClassMap = self.classes.astype(np.uint8)[scores.argmax(-1)][rows[:, None], cols]
        return found


@dataclass(frozen=True)
class FixedHead:
    """The same scores for every image: a probe that sees the position alone. scores: (rows, cols,
    classes)."""

    classes: Integers
    scores: Float

    def predict(self, tokens: Float, pixels: Pixels) -> ClassMap:
        """See `Head`."""
        del tokens
        return highest(self.scores, self.classes, pixels)


def highest(scores: Float, classes: Integers, pixels: Pixels) -> ClassMap:
    """(height, width) the class with the highest interpolated score.

    scores: (rows, cols, classes) of the cells.
    """
    numbers = classes.astype(np.uint8)
    found = np.empty(pixels.labels.shape, np.uint8)
    for part, values in interpolated(scores, pixels):
        found[part] = numbers[values.argmax(-1)]
    return found


def interpolated(scores: Float, pixels: Pixels) -> Iterator[tuple[slice, Float]]:
    """(rows of pixels, their scores (rows, width, classes)), some rows at a time."""
    rows, cols, n = scores.shape
    height, width = pixels.labels.shape
    step = max(1, AT_ONCE // (width * n))
    for start in range(0, height, step):
        part = slice(start, min(start + step, height))
        between = (pixels.down[part] @ scores.reshape(rows, -1)).reshape(-1, cols, n)
        yield part, pixels.across @ between
