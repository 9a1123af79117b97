"""Scores of a grid's cells, and what pixels make of them by interpolation: a class, or a depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.types import Float, Float32, Integers

AT_ONCE = 1 << 22  # scores of pixels in memory


class Head(Protocol):
    """A trained probe."""

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """(height, width) the class or the depth of each pixel; tokens: (rows, cols, dim)."""


class Scores(Protocol):
    """What a trained probe says of each cell."""

    def __call__(self, tokens: Float) -> Float:
        """(rows, cols, n) of tokens (rows, cols, dim)."""


@dataclass(frozen=True)
class LinearScores:
    """tokens @ weights + bias. weights: (dim, n); bias: (n,)."""

    weights: Float
    bias: Float

    def __call__(self, tokens: Float) -> Float:
        """See `Scores`."""
        found: Float = tokens @ self.weights + self.bias
        return found


@dataclass(frozen=True)
class FixedScores:
    """The same for every image: a probe that sees the position alone. values: (rows, cols, n)."""

    values: Float

    def __call__(self, tokens: Float) -> Float:
        """See `Scores`."""
        del tokens
        return self.values


@dataclass(frozen=True)
class ClassHead:
    """The class with the highest interpolated score, of equal ones the lowest. classes: (n,)
    numbers. nearest: each pixel has the class of its nearest cell instead."""

    classes: Integers
    scores: Scores
    nearest: bool = False

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """See `Head`."""
        scores, numbers = self.scores(tokens), self.classes.astype(np.uint8)
        if self.nearest:
            rows, cols = pixels.nearest
            return numbers[scores.argmax(-1)][rows[:, None], cols]
        found = np.empty(pixels.labels.shape, np.uint8)
        for part, values in interpolated(scores, pixels):
            found[part] = numbers[values.argmax(-1)]
        return found


@dataclass(frozen=True)
class DepthHead:
    """The interpolated score, within `limits` (metres)."""

    scores: Scores
    limits: tuple[float, float]

    def predict(self, tokens: Float, pixels: Pixels) -> Float32:
        """See `Head`."""
        found = np.empty(pixels.labels.shape, np.float32)
        for part, values in interpolated(self.scores(tokens), pixels):
            found[part] = np.clip(values[..., 0], *self.limits)
        return found


def interpolated(scores: Float, pixels: Pixels) -> Iterator[tuple[slice, Float]]:
    """(rows of pixels, their scores (rows, width, n)), some rows at a time."""
    rows, cols, n = scores.shape
    height, width = pixels.labels.shape
    step = max(1, AT_ONCE // (width * n))
    for start in range(0, height, step):
        part = slice(start, min(start + step, height))
        between = (pixels.down[part] @ scores.reshape(rows, -1)).reshape(-1, cols, n)
        yield part, pixels.across @ between
