"""Cosines of patches: of one patch with all others of an image, and means by offset.

A patch is named by a cell of the grid, a pixel of the photograph, or its middle; of clips at a
place in time, or in the middle of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.patch_maps.views import View
from vitsee_core.statistics.covariance import autocorrelation
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.selectors import TokenSelection, parse_position

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import SiteSpec, Slab, Store
    from vitsee_stores.layout import TokenLayout

MIDDLE = "middle"
EXPECTED = (
    "ROW,COL of the token grid (3,5; of clips FRAME,ROW,COL, too), X,Ypx of the "
    f"original image (120,80px), or {MIDDLE} of what the model saw"
)
_PIXEL = re.compile(r"([0-9]+) *, *([0-9]+) *px")
STATISTICS = ("cosine_mean", "cosine_neighbours", "cosine_area")


@dataclass(frozen=True)
class Spot:
    """A patch named by a user: a cell, a pixel, or without both the middle.

    Attributes:
        text: the name in its normal form.
        cell: (row, col) of the grid; of clips also (frame, row, col).
        pixel: (x, y) of the original image.
    """

    text: str
    cell: tuple[int, ...] | None = None
    pixel: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str | tuple[int, ...]) -> Spot:
        """Parse `ROW,COL` or (row, col), with or without the frame before them, `X,Ypx`, or
        `middle`.

        Raises:
            VitseeError: the text is none of them.
        """
        if isinstance(text, tuple):
            return cls(",".join(map(str, text)), cell=text)
        if (cell := parse_position(text)) is not None:
            return cls(",".join(map(str, cell)), cell=cell)
        if match := _PIXEL.fullmatch(text):
            x = int(match[1])
            y = int(match[2])
            return cls(f"{x},{y}px", pixel=(x, y))
        if text != MIDDLE:
            raise VitseeError(f"no patch {text!r}; expected {EXPECTED}")
        return cls(text)

    def position(
        self, store: Store, site: SiteSpec, view: View, row: int
    ) -> tuple[float, float]:
        """Return (y, x) on an image, as fractions of its height and width.

        A cell's position is its middle.

        Raises:
            SiteError: the grid has no such cell.
            VitseeError: the image has no such pixel.
        """
        layout = store.site(site.name).layout
        assert layout is not None
        if self.cell is not None:
            owner = f"{store.label}: {site.name}"
            cell = self.cell
            if layout.frames is not None and len(cell) == 2:
                cell = (self.frame(layout), *cell)
            (token,) = TokenSelection.parse(cell).require(layout, owner)
            # Centres are those of one frame, whichever the patch is in.
            centres = view.centres(layout, row)
            y, x = centres[(token - layout.n_prefix) % len(centres)]
            return float(y), float(x)
        if self.pixel is not None:
            height, width = view.size(row)
            if self.pixel[0] >= width or self.pixel[1] >= height:
                name = str(store.samples.id[row])
                raise VitseeError(
                    f"{name!r} of {store.label} has {width} x {height} pixels, counted "
                    f"from 0: no pixel {self.text.removesuffix('px')}"
                )
            return (self.pixel[1] + 0.5) / height, (self.pixel[0] + 0.5) / width
        top, left, bottom, right = view.seen(row)
        return (top + bottom) / 2, (left + right) / 2

    def frame(self, layout: TokenLayout) -> int:
        """Return the index in time, 0 for images; the middle one if no frame was named."""
        if self.cell is not None and len(self.cell) == 3:
            return self.cell[0]
        return (layout.frames or 1) // 2

    def index(self, store: Store, site: SiteSpec, view: View, row: int) -> int:
        """Return the index of the patch, counted row by row, in clips frame by frame.

        Raises:
            SiteError: the grid has no such cell, or no patch of the image is there.
            VitseeError: the image has no such pixel.
        """
        layout = store.site(site.name).layout
        assert layout is not None
        positions = np.array([self.position(store, site, view, row)])
        cell = int(view.cells_at(layout, row, positions)[0])
        cells_per_frame = layout.n_body // (layout.frames or 1)
        if cell < 0 or not view.on_image(layout, np.array([row]))[0, cell]:
            name = str(store.samples.id[row])
            raise SiteError(
                f"{site.name} of {store.label} has no patch of {name!r} at {self.text}: "
                "it lies outside of what the model saw, or beside the image"
            )
        return self.frame(layout) * cells_per_frame + cell


def unit_vectors(x: NDArray[np.floating], is_counted: Mask) -> Float:
    """Return patches scaled to length 1 in float64, (cells, dim).

    A patch that has length 0 or does not count is NaN.

    Args:
        x: (cells, dim) features.
        is_counted: (cells,) whether each patch counts; one beside the image does not.
    """
    values = x.astype(np.float64)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    has_direction = is_counted[:, np.newaxis] & (length > 0)
    return np.where(has_direction, values / np.where(length > 0, length, 1), np.nan)


def map_statistics(cosines: Float, query: int, body: tuple[int, ...]) -> dict[str, float]:
    """Return how far one patch's similarity extends over the other patches of its image or clip.

    `cosine_mean` is the mean over them, `cosine_neighbours` the mean over its up to eight
    neighbours in its own frame. `cosine_area` is the share of them whose cosine is above the middle
    between that mean and 1. A statistic is NaN if it is over no patch.

    Args:
        cosines: (cells,) with the query, NaN where a patch does not count.
        query: index of the query's cell.
        body: (rows, cols), of clips (frames, rows, cols).
    """
    others = ~np.isnan(cosines)
    others[query] = False
    # (axes, cells)
    positions = np.stack(np.unravel_index(np.arange(len(cosines)), body))
    *frame_distance, down, across = np.abs(positions - positions[:, query : query + 1])
    neighbours = others & (np.maximum(down, across) == 1)
    for distance in frame_distance:  # of clips alone
        neighbours &= distance == 0
    statistics = dict.fromkeys(STATISTICS, np.nan)
    if others.any():
        mean = float(cosines[others].mean())
        statistics["cosine_mean"] = mean
        is_alike = cosines[others] > (mean + 1) / 2
        statistics["cosine_area"] = float(is_alike.mean())
    if neighbours.any():
        statistics["cosine_neighbours"] = float(cosines[neighbours].mean())
    return statistics


def offset_means(units: Float, grid: tuple[int, int]) -> Float:
    """Return the mean cosine of the pairs of patches at each offset, (2 rows - 1, 2 cols - 1).

    Offsets (dy, dx) start at -(rows - 1), -(cols - 1). An offset without a pair is NaN.

    By autocorrelation over the grid: T log T instead of T^2 for all pairs. Of clips pairs within
    one frame.

    Args:
        units: (cells, dim), NaN where a patch does not count; of clips frame by frame.
        grid: (rows, cols).
    """
    frames = units.reshape(-1, grid[0] * grid[1], units.shape[-1])
    sums: Float = np.zeros(())
    pairs: Float = np.zeros(())
    for frame in frames:
        frame_sums, frame_pairs = _sum_pairs(frame, grid)
        sums = sums + frame_sums
        pairs = pairs + frame_pairs
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(pairs > 0, sums / pairs, np.nan)
    # The autocorrelation has offset d at index d modulo its length.
    offsets = np.ix_(np.arange(-grid[0] + 1, grid[0]), np.arange(-grid[1] + 1, grid[1]))
    return means[offsets]


def _sum_pairs(units: Float, grid: tuple[int, int]) -> tuple[Float, Float]:
    """Return the sums of cosines at each offset within one frame, and the numbers of pairs."""
    rows, cols = grid
    # A patch that does not count is a vector of zeros, and so adds nothing.
    is_counted = ~np.isnan(units[:, 0])
    counted_units = np.where(is_counted[:, np.newaxis], units, 0).reshape(rows, cols, -1)
    # Counts of pairs are whole numbers, up to the rounding of the Fourier transform.
    pairs = np.rint(autocorrelation(is_counted.astype(np.float64).reshape(rows, cols, 1)))
    return autocorrelation(counted_units), pairs


@dataclass(frozen=True)
class ReadOffsets:
    """A reader of one slab: mean cosines by offset, for `SlabMoments`."""

    features: tuple[SiteFeatures, ...]
    view: View

    def __call__(self, slab: Slab) -> dict[str, Float]:
        """Return site -> (images, 2 rows - 1, 2 cols - 1) mean cosines of the valid images."""
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        means = {}
        for features in self.features:
            layout = features.site.layout
            assert layout is not None and layout.grid is not None
            # (images, cells, dim) and (images, cells)
            x = features.of_slab(slab, slice(0, len(features.tokens)))
            on_image = self.view.on_image(layout, rows)
            image_means = [
                offset_means(unit_vectors(patches, is_counted), layout.grid)
                for patches, is_counted in zip(x, on_image, strict=True)
            ]
            means[features.site.name] = np.stack(image_means)
        return means
