"""Mapping between a frame's pixels and the grid cells on it.

Pixels and cells are matched like Pillow's nearest resize, its rounding included: if the grid covers
the frame exactly this is bitwise the resize of the released code. Cropped or padded frames are the
general case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.placement import nearest_places
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.images.placement import Placement
    from vitsee_stores.layout import TokenLayout

_WHOLE = 1e-6  # edges this close to a pixel's are snapped to it


@dataclass(frozen=True)
class FrameAxis:
    """One axis of a frame and of its cells.

    Attributes:
        first, stop: the cells whose middle is on the frame.
        length: pixels of the frame.
        low, high: where these cells begin and end, in its pixels; beyond it if it was padded.
        seen: where all cells of the grid begin and end.
        cell: input pixels of a cell, to which it is enlarged.
    """

    first: int
    stop: int
    length: int
    low: float
    high: float
    seen: tuple[float, float]
    cell: int

    @property
    def n(self) -> int:
        """Number of cells on the frame."""
        return self.stop - self.first

    def pixels_of_cells(self) -> Integers:
        """(cells,) the pixel in the middle of each cell; the border pixel for a cell whose middle
        is beyond the frame."""
        return np.clip(nearest_places(self.length, self.n, self.low, self.high), 0, self.length - 1)

    def cells_of_pixels(self, per_cell: int) -> Integers:
        """(pixels,) for each pixel its part of a cell, with `per_cell` parts each, or the nearest
        part if the cell is left out because its middle is beyond the frame; -1 for pixels that no
        cell has seen."""
        n = self.n * per_cell
        scale = n / (self.high - self.low)
        low, high = (_whole((edge - self.low) * scale) for edge in (0, self.length))
        nearest = nearest_places(n, self.length, low, high)
        middle = np.arange(self.length) + 0.5
        seen = (middle > self.seen[0]) & (middle < self.seen[1])
        return np.where(seen, np.clip(nearest, 0, n - 1), -1)

    def weights(self) -> Float:
        """(cells, pixels) share of each pixel within each cell."""
        edges = self.low + (self.high - self.low) / self.n * np.arange(self.n + 1)
        pixels = np.arange(self.length)
        low = np.maximum(edges[:-1, None], pixels)
        high = np.minimum(edges[1:, None], pixels + 1)
        return np.maximum(high - low, 0.0)


@dataclass(frozen=True)
class FrameMap:
    """Both axes of a frame."""

    y: FrameAxis
    x: FrameAxis

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells on the frame."""
        return self.y.n, self.x.n

    def cells(self, tokens: NDArray[np.floating]) -> NDArray[np.floating]:
        """The cells on the frame; tokens: (rows, cols, dim) of the site's grid."""
        return tokens[self.y.first : self.y.stop, self.x.first : self.x.stop]

    def seeds(self, labels: NDArray[np.uint8], n_classes: int, how: str) -> Float32:
        """(rows, cols, classes) labels of the cells, adding up to 1.

        Args:
            labels: (height, width) numbers of classes.
            n_classes: including the background.
            how: `nearest`: the class of the pixel in the middle; `area`: each class's share.
        """
        classes = np.arange(n_classes)
        if how == "nearest":
            seen = labels[self.y.pixels_of_cells()[:, None], self.x.pixels_of_cells()]
            return (seen[..., None] == classes).astype(np.float32)
        down, across = self.y.weights(), self.x.weights()
        shares = np.stack([down @ (labels == i) @ across.T for i in classes], -1)
        # A cell's edge may exceed the frame slightly, its middle does not.
        return (shares / shares.sum(-1, keepdims=True)).astype(np.float32)

    def hidden(self) -> float:
        """The share of the frame that no cell has seen."""
        seen = [float((axis.cells_of_pixels(1) >= 0).mean()) for axis in (self.y, self.x)]
        return 1 - seen[0] * seen[1]


def frame_map(
    site: str, layout: TokenLayout | None, place: Placement, size: tuple[int, int]
) -> FrameMap:
    """The mapping of a frame to a site's grid.

    Args:
        site: its name.
        layout: of the site.
        place: of the frame on the model's input.
        size: height and width of the frame.

    Raises:
        SiteError: the site has no grid, or its position is unknown.
        VitseeError: no cell is on the frame.
    """
    if layout is None or layout.grid is None or layout.stride_px is None:
        raise SiteError(f"{site} has no grid of tokens; propagate needs sites that have one")
    on = place.on_image(layout)
    if not on.any():
        raise VitseeError(f"no token of {site} lies on frames of {size[1]} x {size[0]} pixels")
    edges = (place.top, place.bottom), (place.left, place.right)
    y, x = (
        _axis(
            np.asarray(on.any(1 - i)), layout.stride_px[i], layout.offset_px[i], size[i], edges[i]
        )
        for i in (0, 1)
    )
    return FrameMap(y, x)


def _axis(
    on: Mask, step: float, start: float, length: int, edges: tuple[float, float]
) -> FrameAxis:
    cells = np.flatnonzero(on)
    first, stop = int(cells[0]), int(cells[-1]) + 1
    scale = length / (edges[1] - edges[0])
    begin, low, high, end = (
        _whole((start + i * step - edges[0]) * scale) for i in (0, first, stop, len(on))
    )
    return FrameAxis(first, stop, length, low, high, (begin, end), max(1, round(step)))


def _whole(edge: float) -> float:
    return float(round(edge)) if abs(edge - round(edge)) < _WHOLE else float(edge)
