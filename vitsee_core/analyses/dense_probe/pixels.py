"""The labelled pixels of an image, how values of cells become those of pixels, bilinearly, and what
the pixels of a cell add up to.

Labels are classes, `IGNORED` where there is none, or depths, NaN where there is none.

Pixels are one of three kinds (`RESOLUTIONS`):

- `label`: those of the class map as it was distributed. Nothing is resampled but the scores, which
  is what `interpolate(scores, size=label.shape, mode="bilinear", align_corners=False)` does where a
  grid covers its image;
- `input`: those of the model's input; the map is resampled by the nearest pixel;
- `patch`: one per token, its class the most frequent one among the input pixels of its cell (of
  equally frequent ones the lowest; none where most pixels have none).

Pixels that the model did not see, as they were cropped, have no class; cells whose middle is beside
the image (padding, canvases) have no part in any pixel.

Scores of cells are interpolated to pixels, which get a class or a depth (`ClassHead`, `DepthHead`).
Least squares needs sums over an image's pixels, which are made per cell (`CellSums`). With U the
bilinear operator from cells to pixels, M the diagonal of the pixels' weights (0 for those that do
not count) and Y their targets, classes as one-hot or depths:

    S = U'MU    (cells, cells): a cell and its eight neighbours, so four numbers a cell
    T = U'MY    (cells, targets): a triangular filter of the class map

so that for tokens Z (cells, dim), sums over pixels are Z'SZ and Z'T; no pixel has features in
memory. As U is a product of one operator a direction, S and T are each a few products of matrices
as large as the image. The baselines learn from each cell of a grid how often a class occurs there,
or the mean depth (`PlaceSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.placement import cell_edges, nearest_places
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.images.placement import Placement
    from vitsee_stores.layout import TokenLayout

Labels = NDArray[Any]  # uint8 classes, or float32 depths
RESOLUTIONS = ("label", "input", "patch")
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Pixels:
    """The labelled pixels of an image, and their place on a grid of tokens.

    Attributes:
        labels: (height, width), with no label for pixels that do not count.
        down: (height, rows) weights of the grid's rows of cells in each pixel, which add up to 1.
        across: (width, cols) the same for its columns.
        at: (height,) and (width,) where the pixels' middles lie on the model's input.
    """

    labels: Labels
    down: Float
    across: Float
    at: tuple[Float, Float]

    @cached_property
    def counted(self) -> Float:
        """The weights (height, width): 1 for pixels that count, 0 for others."""
        return has_label(self.labels).astype(np.float64)

    @cached_property
    def edge(self) -> Mask:
        """A mask (height, width) of pixels near a boundary of classes, see `near_boundary`."""
        return near_boundary(self.labels)

    @property
    def of_depth(self) -> bool:
        """Whether the labels are depths."""
        return self.labels.dtype.kind == "f"

    @cached_property
    def present(self) -> list[int]:
        """The classes that occur, or [0] for depths."""
        if self.of_depth:
            return [0] if self.counted.any() else []
        found = np.flatnonzero(
            np.bincount(self.labels.ravel(), minlength=IGNORED + 1)[:IGNORED]
        )
        return [int(number) for number in found]

    @property
    def targets(self) -> list[Float]:
        """An array (height, width) per entry of `present`: 1 for the pixels of a class, or the
        depths; 0 for pixels that do not count."""
        if self.of_depth:
            return [np.nan_to_num(self.labels, nan=0.0).astype(np.float64)] * len(
                self.present
            )
        return [(self.labels == number).astype(np.float64) for number in self.present]

    @property
    def nearest(self) -> tuple[Integers, Integers]:
        """The row (height,) and the column (width,) of the cell nearest to each pixel."""
        return self.down.argmax(1), self.across.argmax(1)

    def on_cells(self, values: Float) -> Float:
        """The sums U'v (rows, cols) of values (height, width) over pixels, as cells have part."""
        return self.down.T @ values @ self.across


def has_label(labels: Labels) -> Mask:
    """A mask of the pixels that have a class or a depth."""
    if labels.dtype.kind == "f":
        return np.isfinite(labels)
    return labels != IGNORED


def nothing(labels: Labels) -> int | float:
    """The value that stands for no label."""
    return np.nan if labels.dtype.kind == "f" else IGNORED


def labelled_pixels(
    truth: Labels,
    placement: Placement,
    layout: TokenLayout,
    input_size: tuple[int, int],
    resolution: str,
) -> Pixels:
    """The pixels of one image for the tokens of one grid; truth: of the original image, placement:
    its place on the model's input of `input_size`, resolution: one of `RESOLUTIONS`."""
    assert layout.grid is not None and layout.stride_px is not None
    ends = (placement.top, placement.bottom), (placement.left, placement.right)
    if resolution == "label":
        labels = truth.copy()
        centres = []
        for axis, (low, high) in enumerate(ends):
            n = truth.shape[axis]
            at = low + (np.arange(n) + 0.5) * (high - low) / n
            labels[_along(axis, (at < 0) | (at > input_size[axis]))] = nothing(labels)
            centres.append(at)
    else:
        labels = on_input(truth, placement, input_size)
        centres = [np.arange(n) + 0.5 for n in input_size]
    if resolution == "patch":
        labels = most_frequent(labels, layout)
        centres = [
            layout.offset_px[axis] + (np.arange(n) + 0.5) * layout.stride_px[axis]
            for axis, n in enumerate(layout.grid)
        ]
    on_image = placement.on_image(layout)
    weights = []
    for axis in (0, 1):
        cells = np.flatnonzero(on_image.any(1 - axis))
        n = layout.grid[axis]
        if not len(cells):
            none = [np.zeros((labels.shape[i], layout.grid[i])) for i in (0, 1)]
            empty = np.full_like(labels, nothing(labels))
            return Pixels(empty, none[0], none[1], (centres[0], centres[1]))
        if resolution == "patch":
            labels[_along(axis, np.delete(np.arange(n), cells))] = IGNORED
            weights.append(np.eye(n))
            continue
        at = (centres[axis] - layout.offset_px[axis]) / layout.stride_px[axis] - 0.5
        weights.append(interpolation(at, int(cells[0]), int(cells[-1]), n))
    return Pixels(labels, weights[0], weights[1], (centres[0], centres[1]))


def on_input(truth: Labels, placement: Placement, size: tuple[int, int]) -> Labels:
    """The labels on the model's input, each pixel that of the original that its middle lies on, as
    Pillow's nearest resize has it; without a label beside the image."""
    ends = (placement.top, placement.bottom), (placement.left, placement.right)
    places = []
    inside = []
    for (low, high), n, own in zip(ends, size, truth.shape, strict=True):
        edges = (own * (edge - low) / (high - low) for edge in (0, n))
        at = nearest_places(own, n, *(_whole(edge) for edge in edges))
        places.append(np.clip(at, 0, own - 1))
        inside.append((at >= 0) & (at < own))
    found: Labels = truth[places[0][:, None], places[1]]
    found[~(inside[0][:, None] & inside[1])] = nothing(truth)
    return found


def most_frequent(labels: ClassMap, layout: TokenLayout) -> ClassMap:
    """The most frequent class (rows, cols) of each cell's pixels of the model's input."""
    down, across = cell_edges(layout, labels.shape)
    found = np.full((len(down) - 1, len(across) - 1), IGNORED, np.uint8)
    for row, col in np.ndindex(found.shape):
        cell = labels[down[row] : down[row + 1], across[col] : across[col + 1]]
        if cell.size:
            found[row, col] = np.bincount(cell.ravel()).argmax()
    return found


def interpolation(at: Float, first: int, last: int, n: int) -> Float:
    """The weights (pixels, n) of cells in places along one axis, in cells: 0 is the middle of the
    first. Beyond the cells from `first` to `last` it is the nearest of them."""
    at = np.clip(at, first, last)
    low = np.floor(at).astype(np.int64)
    part = at - low
    weights = np.zeros((len(at), n))
    pixels: Integers = np.arange(len(at))
    weights[pixels, low] = 1 - part
    weights[pixels, np.minimum(low + 1, last)] += part
    return weights


def cell_pixels(labels: Labels, layout: TokenLayout) -> Labels | None:
    """The labels (cells, pixels) of each cell's pixels of the model's input, row by row; None where
    the cells are not all of the same number of whole pixels."""
    edges = cell_edges(layout, labels.shape)
    sides = [np.unique(np.diff(edge)) for edge in edges]
    if any(len(side) != 1 or side[0] < 1 for side in sides):
        return None
    (down, across), (tall, wide) = edges, (int(side[0]) for side in sides)
    part = labels[down[0] : down[-1], across[0] : across[-1]]
    cut = part.reshape(len(down) - 1, tall, len(across) - 1, wide).swapaxes(1, 2)
    return cut.reshape(-1, tall * wide)


def _whole(edge: float) -> float:
    """Round an edge that differs from a pixel's edge by rounding only."""
    if abs(edge - round(edge)) < _ROUNDING:
        return float(round(edge))
    return edge


def _along(axis: int, chosen: Integers | np.ndarray) -> tuple[slice | np.ndarray, ...]:
    """The index of these rows (axis 0) or columns (axis 1)."""
    return (chosen,) if axis == 0 else (slice(None), chosen)


BOUNDARY_SHARE = 0.02  # of the image's diagonal, as in Cheng et al. 2021


def near_boundary(labels: ClassMap) -> Mask:
    """A mask of the pixels near the boundary of the region of their class: a pixel of another
    class, or the image's border, is within `BOUNDARY_SHARE` of the diagonal, counted in pixels
    along the rows or columns, whichever is farther (the erosion by a square of Cheng et al. 2021).
    Pixels that are ignored are a region as others are."""
    from scipy.ndimage import maximum_filter, minimum_filter

    reach = max(1, round(BOUNDARY_SHARE * float(np.hypot(*labels.shape))))
    framed = np.pad(labels.astype(np.int16), 1, constant_values=-1)
    size = 2 * reach + 1
    low, high = (
        f(framed, size, mode="nearest") for f in (minimum_filter, maximum_filter)
    )
    return (low != high)[1:-1, 1:-1]


AT_ONCE = 1 << 22  # scores of pixels in memory


class Head(Protocol):
    """A trained probe, which predicts the label of every pixel."""

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """The class or the depth of each pixel, (height, width), from tokens (rows, cols, dim)."""


Scores = Callable[
    [Float], Float
]  # (rows, cols, n) of tokens (rows, cols, dim), picklable


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
        scores = self.scores(tokens)
        numbers = self.classes.astype(np.uint8)
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
        counted = (
            pixels.counted if class_weights is None else class_weights[pixels.labels]
        )
        squares = [weights**2 for weights in (down[0], right[0])]
        rows = squares[0].T @ counted
        pairs = down[1].T @ counted
        present = pixels.present
        targets = pixels.targets
        weighted = [counted * own for own in targets]
        grid = down[0].shape[1], right[0].shape[1]
        on_cells = np.array([pixels.on_cells(own) for own in weighted]).reshape(-1, *grid)
        totals = np.array([own.sum() for own in weighted], np.float64)
        of_squares = float(
            sum((w * own).sum() for w, own in zip(weighted, targets, strict=True))
        )
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
        """The sums (targets,) over all cells."""
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
