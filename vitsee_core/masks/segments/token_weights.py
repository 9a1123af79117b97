"""How much each token of a grid counts for a segment: (tokens, weights), the weights' sum 1.

    area           the share of the segment's visible area in the token's cell, exact: the image's
                   pixels are rectangles on the model's input (`images.placement`), and so are cells
    any            equal for every token with some of the segment in its cell
    vit_analysis   as the code of Walmer et al. 2023 has it: the mask, cut to what the model sees,
                   is resized to the grid by Pillow's antialiased bicubic and clipped to 0..255

By area no segment with a visible pixel is lost, and an object of a few pixels is not spread over
its neighbours: bicubic weights of a disk of 2 px radius differ from its area by half their sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitsee_core.images.placement import Placement
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Sparse = tuple[Integers, Float32]
SMALLEST = 1e-9  # of a segment's area: less is rounding at a cell's edge


class Weigher:
    """Weights of the segments of one image on one grid."""

    def __init__(
        self, size: tuple[int, int], place: Placement, layout: TokenLayout, seen: tuple[int, int]
    ) -> None:
        """Size: (height, width) of the image. place: where it lies on the input. layout: of the
        tokens. seen: (height, width) of the input.

        Raises:
            VitseeError: the layout has no grid, or does not say where it lies.
        """
        if layout.grid is None or layout.stride_px is None:
            raise VitseeError("these tokens do not say which pixels are theirs")
        self.grid, self._size, self._place, self._seen = layout.grid, size, place, seen
        self._offset, self._stride = layout.offset_px, layout.stride_px
        self._scales = (place.bottom - place.top) / size[0], (place.right - place.left) / size[1]
        along = zip(
            (place.top, place.left), (place.bottom, place.right), size, seen,
            layout.offset_px, layout.stride_px, layout.grid, strict=True,
        )  # fmt: skip
        # (cells, pixels): how much of each pixel's side each cell has.
        self._rows, self._cols = (
            _overlaps(
                first + (last - first) / n * np.arange(n + 1),
                np.clip(offset + stride * np.arange(cells + 1), 0, length),
            )
            for first, last, n, length, offset, stride, cells in along
        )

    def of(self, mask: Mask, kind: str = "area") -> Sparse | None:
        """Tokens, ascending, counted row by row, and their weights; None where the segment cannot
        be seen.

        Args:
            mask: (height, width) of the image.
            kind: `area`, `any` or `vit_analysis`.
        """
        whole = self._resized(mask) if kind == "vit_analysis" else self._areas(mask)
        total = float(whole.sum())
        if not total > 0:
            return None
        flat = whole.ravel() / total
        tokens = np.flatnonzero(flat > SMALLEST)
        weights = np.ones(len(tokens)) if kind == "any" else flat[tokens]
        return tokens, (weights / weights.sum()).astype(np.float32)

    def _areas(self, mask: Mask) -> Float:
        """(rows, cols) of the grid: the area of the segment in each cell, in the input's pixels."""
        on = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(on[0]):
            return np.zeros(self.grid)
        rows, cols = (slice(where[0], where[-1] + 1) for where in on)
        inside = mask[rows, cols].astype(np.float64)
        return self._rows[:, rows] @ inside @ self._cols[:, cols].T

    def _resized(self, mask: Mask) -> Float:
        """The same by Pillow's default resize of the visible part to the cells that it lies on."""
        place, (height, width) = self._place, self._size
        down = self._visible(place.top, place.bottom, height, 0)
        across = self._visible(place.left, place.right, width, 1)
        whole = np.zeros(self.grid)
        cells = whole[down.cells, across.cells]
        if cells.size:
            box = (across.first, down.first, across.last, down.last)
            image = Image.fromarray(mask.astype(np.uint8) * np.uint8(255)).crop(box)
            cells[...] = np.asarray(image.resize(cells.shape[::-1], Image.Resampling.BICUBIC))
        return whole

    def _visible(self, first: float, last: float, n: int, axis: int) -> _Visible:
        """Along one axis: the cells that the image lies on, and their pixels of the image. Of a
        centred crop these begin at (n - length) / 2 as in the published code, whose halves Pillow
        rounds to the even pixel."""
        offset, stride = self._offset[axis], self._stride[axis]
        ends = max(first, 0.0), min(last, float(self._seen[axis]))
        low = max(0, math.floor((ends[0] - offset) / stride + SMALLEST))
        high = min(self.grid[axis], math.ceil((ends[1] - offset) / stride - SMALLEST))
        scale = self._scales[axis]
        start = (offset + low * stride - first) / scale
        if first < 0:
            # A resize keeps proportions but for the long side's rounding, a crop is centred but
            # for its own; those of the image itself are exact.
            scale = max(self._scales)
        length = max(1, round((high - low) * stride / scale))
        centred = (n - length) / 2
        if abs(start - centred) * scale < 1:
            start = centred
        return _Visible(slice(low, max(low, high)), round(start), round(start + length))


class _Visible(NamedTuple):
    """Cells, and the pixels of the image from `first` to before `last`."""

    cells: slice
    first: int
    last: int


def _overlaps(pixels: Float, cells: Float) -> Float:
    """(cells, pixels) the length that each cell has in common with each pixel, from their edges."""
    first = np.maximum(cells[:-1, None], pixels[None, :-1])
    last = np.minimum(cells[1:, None], pixels[None, 1:])
    return np.maximum(last - first, 0)
