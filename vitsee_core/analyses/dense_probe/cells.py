"""The cells of a token grid: what their pixels add up to, and how their scores reach pixels.

Scores of cells are interpolated to pixels, which get a class or a depth (`ClassHead`, `DepthHead`).
Least squares needs sums over an image's pixels, which are made per cell (`CellSums`).

With U the bilinear operator from cells to pixels, M the diagonal of the pixels' weights (0 for
those that do not count) and Y their targets, classes as one-hot or depths:

    S = U'MU    (cells, cells): a cell and its eight neighbours, so four numbers a cell
    T = U'MY    (cells, targets): a triangular filter of the class map

so that for tokens Z (cells, dim), sums over pixels are Z'SZ and Z'T; no pixel has features in
memory. As U is a product of one operator a direction, S and T are each a few products of matrices
as large as the image.

The baselines learn from each cell of a grid how often a class occurs there, or the mean depth
(`PlaceSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.types import Float, Float32, Integers

AT_ONCE = 1 << 22  # scores of pixels in memory


class Head(Protocol):
    """A trained probe, which predicts the label of every pixel."""

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """The class or the depth of each pixel, (height, width), from tokens (rows, cols, dim)."""


Scores = Callable[[Float], Float]  # (rows, cols, n) of tokens (rows, cols, dim), picklable


@dataclass(frozen=True)
class LinearScores:
    """Scores that are linear in the token: tokens @ weights + bias, with weights (dim, n) and bias
    (n,)."""

    weights: Float
    bias: Float

    def __call__(self, tokens: Float) -> Float:
        return tokens @ self.weights + self.bias


@dataclass(frozen=True)
class FixedScores:
    """Scores (rows, cols, n) that are the same for every image, as a probe that sees the position
    alone gives them."""

    values: Float

    def __call__(self, tokens: Float) -> Float:
        del tokens
        return self.values


@dataclass(frozen=True)
class ClassHead:
    """A pixel gets the class with the highest interpolated score, and the lowest of equal ones; if
    `nearest`, that of its nearest cell. classes: (n,) their numbers."""

    classes: Integers
    scores: Scores
    nearest: bool = False

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
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
    """A pixel gets the interpolated score as its depth, clipped to `limits` in metres."""

    scores: Scores
    limits: tuple[float, float]

    def predict(self, tokens: Float, pixels: Pixels) -> Float32:
        found = np.empty(pixels.labels.shape, np.float32)
        for part, values in interpolated(self.scores(tokens), pixels):
            found[part] = np.clip(values[..., 0], *self.limits)
        return found


def interpolated(scores: Float, pixels: Pixels) -> Iterator[tuple[slice, Float]]:
    """Rows of pixels with their interpolated scores (rows, width, n), some rows at a time."""
    rows, cols, n = scores.shape
    height, width = pixels.labels.shape
    step = max(1, AT_ONCE // (width * n))
    for start in range(0, height, step):
        part = slice(start, min(start + step, height))
        between = (pixels.down[part] @ scores.reshape(rows, -1)).reshape(-1, cols, n)
        yield part, pixels.across @ between


@dataclass(frozen=True)
class CellSums:
    """The sums of one image over the cells of one grid.

    Attributes:
        own: (rows, cols) numbers of S of a cell with itself.
        beside: (rows, cols - 1) of a cell with its right neighbour.
        below: (rows - 1, cols) of a cell with the one below.
        across: (rows - 1, cols - 1) of either diagonal of four cells, which are equal.
        present: the classes that occur, or [0] for depths.
        targets: (present, rows, cols) T.
        totals: (present,) sums of Y over pixels.
        squares: the sum of Y squared over pixels.
        n: the sum of the weights.
        weights: (rows, cols) U'M1, the row sums of S.
    """

    own: Float
    beside: Float
    below: Float
    across: Float
    present: list[int]
    targets: Float
    totals: Float
    squares: float
    n: float
    weights: Float

    @classmethod
    def of(cls, pixels: Pixels, class_weights: Float | None = None) -> CellSums:
        """The sums of an image; class_weights: (256,) of a pixel of each class, 0 for `IGNORED`, by
        default 1."""
        down = pixels.down, pixels.down[:, :-1] * pixels.down[:, 1:]
        right = pixels.across, pixels.across[:, :-1] * pixels.across[:, 1:]
        counted = pixels.counted if class_weights is None else class_weights[pixels.labels]
        squares = [weights**2 for weights in (down[0], right[0])]
        rows, pairs = squares[0].T @ counted, down[1].T @ counted
        present, targets = pixels.present, pixels.targets
        weighted = [counted * own for own in targets]
        grid = down[0].shape[1], right[0].shape[1]
        on_cells = np.array([pixels.on_cells(own) for own in weighted]).reshape(-1, *grid)
        totals = np.array([own.sum() for own in weighted], np.float64)
        of_squares = float(sum((w * own).sum() for w, own in zip(weighted, targets, strict=True)))
        return cls(
            *(rows @ squares[1], rows @ right[1], pairs @ squares[1], pairs @ right[1]),
            *(present, on_cells, totals, of_squares),
            *(float(counted.sum()), pixels.on_cells(counted)),
        )

    def smoothed(self, tokens: Float) -> Float:
        """The product S Z for tokens Z (rows, cols, dim)."""
        found = self.own[..., None] * tokens
        for weights, one, other in (
            (self.beside, np.s_[:, :-1], np.s_[:, 1:]),
            (self.below, np.s_[:-1, :], np.s_[1:, :]),
            (self.across, np.s_[:-1, :-1], np.s_[1:, 1:]),
            (self.across, np.s_[:-1, 1:], np.s_[1:, :-1]),
        ):
            found[one] += weights[..., None] * tokens[other]
            found[other] += weights[..., None] * tokens[one]
        return found


POSITION = "position"


@dataclass
class PlaceSums:
    """Sums over the pixels of a grid's cells, each pixel weighted by its share in the cell:
    (targets, rows, cols) of the targets and (rows, cols) of the shares."""

    of_target: Float
    weights: Float

    def __add__(self, other: PlaceSums) -> PlaceSums:
        return PlaceSums(self.of_target + other.of_target, self.weights + other.weights)

    @property
    def totals(self) -> Float:
        """(targets,) sums over all cells."""
        return self.of_target.sum((1, 2))

    def scores(self) -> tuple[Integers, FixedScores, FixedScores]:
        """The targets that occur, their mean over all cells, and their mean at each cell: that over
        all cells where no pixel counts."""
        classes = np.flatnonzero(self.totals)
        everywhere = self.totals[classes] / self.weights.sum()
        here = self.of_target[classes] / np.where(self.weights > 0, self.weights, 1)
        here = np.where(self.weights > 0, here, everywhere[:, None, None])
        whole = np.broadcast_to(everywhere, (*self.weights.shape, len(classes)))
        return classes, FixedScores(whole), FixedScores(np.moveaxis(here, 0, -1))


Places = dict[str, PlaceSums]  # by grid


def count_places(places: Places, grid: str, sums: CellSums, n_targets: int) -> None:
    """Add an image's sums to those of its grid."""
    if grid not in places:
        shape = sums.weights.shape
        places[grid] = PlaceSums(np.zeros((n_targets, *shape)), np.zeros(shape))
    places[grid].of_target[sums.present] += sums.targets
    places[grid].weights += sums.weights
