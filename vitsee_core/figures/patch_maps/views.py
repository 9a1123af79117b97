"""The position of a model's input, and of the cells of its grids, on the original images.

Places are fractions of an image: y and x from 0 at its upper and left edge to 1 at the lower and
right one, so that models with other inputs, crops and grids name the same place alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import Placement, place
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import MissingInput, SiteError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

# Top, left, bottom and right, as shares of an image.
Edges = tuple[float, float, float, float]


@dataclass(frozen=True)
class View:
    """How a store's model saw its images.

    Attributes:
        transform: the store's transform: resize, crop, input size.
        sizes: height and width of the original images, (images, 2); None if the store does not
            record them or their transform is unknown, so that the model's input is taken for the
            image.
        input_size: (height, width) of the model's input in pixels.
    """

    transform: dict[str, Any]
    sizes: NDArray[np.int32] | None
    input_size: tuple[int, int]

    @classmethod
    def of(cls, store: Store, sites: Sequence[SiteSpec]) -> View:
        """Return the view of a store; an unknown resize is logged.

        Args:
            store: an open store.
            sites: sites with a grid at a known position, from which the size of the input is
                inferred where the transform does not tell it.
        """
        transform = store.manifest.transform
        if "input_size" in transform:
            _, height, width = transform["input_size"]
        else:
            ends = [_end(site.layout) for site in sites if site.layout is not None]
            height = max(bottom for bottom, _ in ends)
            width = max(right for _, right in ends)
        try:
            if "input_size" not in transform:
                raise MissingInput("it has no transform")
            sizes = store.sizes
            valid_sizes = sizes[store.valid]
            place(transform, valid_sizes[0].tolist())  # raises if it cannot be computed
        except (MissingInput, DataError) as reason:
            log.info(
                "%s: maps are drawn on the model's input, not on the original images: %s",
                store.label,
                reason,
            )
            return cls(transform={}, sizes=None, input_size=(int(height), int(width)))
        return cls(
            transform=dict(transform), sizes=sizes, input_size=(int(height), int(width))
        )

    def size(self, row: int) -> tuple[int, int]:
        """Return height and width of an image in pixels."""
        if self.sizes is None:
            return self.input_size
        height, width = self.sizes[row].tolist()
        return height, width

    def placement(self, row: int) -> Placement:
        """Return where the whole image lies on the model's input, in pixels of the input."""
        if self.sizes is None:
            return Placement(0, 0, *map(float, self.input_size))
        return place(self.transform, self.size(row))

    def on_image(self, layout: TokenLayout, rows: Integers) -> Mask:
        """Return which cells of a grid have their middle on the image, not beside it.

        Args:
            layout: the site's tokens, with a grid.
            rows: rows of the store.

        Returns:
            (rows, cells); of clips the cells of every frame.
        """
        assert layout.grid is not None
        is_on_image = np.ones((len(rows), layout.n_body), bool)
        if self.sizes is None or not len(rows):
            return is_on_image
        # Images of one size share their cells: they are computed once per size.
        _, first, size_number = np.unique(
            self.sizes[rows], axis=0, return_index=True, return_inverse=True
        )
        for k, row in enumerate(rows[first].tolist()):
            frame_cells = self.placement(row).on_image(layout).ravel()
            has_size = size_number.ravel() == k
            is_on_image[has_size] = np.tile(frame_cells, layout.frames or 1)
        return is_on_image

    def centres(self, layout: TokenLayout, row: int) -> Float:
        """Return y and x of the middle of each cell, (cells, 2); of clips those of one frame."""
        top, left, bottom, right = self.grid_edges(layout, row)
        assert layout.grid is not None
        rows, cols = layout.grid
        y = top + (np.arange(rows) + 0.5) / rows * (bottom - top)
        x = left + (np.arange(cols) + 0.5) / cols * (right - left)
        return np.stack([np.repeat(y, cols), np.tile(x, rows)], 1)

    def cells_at(self, layout: TokenLayout, row: int, points: Float) -> Integers:
        """Return the cell that contains each point of an image; -1 for none.

        Args:
            layout: the site's tokens, with a grid.
            row: the image's row.
            points: (points, 2), y and x.

        Returns:
            (points,) cells counted row by row; of clips those of the first frame.
        """
        top, left, bottom, right = self.grid_edges(layout, row)
        assert layout.grid is not None
        rows, cols = layout.grid
        # A point on the edge between two cells, up to rounding, is the later one's.
        y = np.floor((points[:, 0] - top) / (bottom - top) * rows + 1e-9)
        x = np.floor((points[:, 1] - left) / (right - left) * cols + 1e-9)
        y = y.astype(np.int64)
        x = x.astype(np.int64)
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < cols)
        return np.where(inside, y * cols + x, -1)

    def cells_like(
        self,
        layout: TokenLayout,
        row: int,
        guide: View,
        of_guide: TokenLayout,
        guide_row: int,
    ) -> Integers:
        """Return the cell of an image at the position of each cell of another grid; -1 for none.

        Of clips it is also at the same time: the middle of a cell as a share of the sampled frames.

        Args:
            layout: the site's tokens, with a grid.
            row: the image's row in this store.
            guide: the view of the other store.
            of_guide: the tokens of the other site, with a grid.
            guide_row: the same image's row in the other store.

        Returns:
            (cells of the guide,).
        """
        at = self.cells_at(layout, row, guide.centres(of_guide, guide_row))
        n = layout.frames or 1
        n_guide = of_guide.frames or 1
        # The frame at the middle of each of the guide's, (2 k + 1) / (2 n_guide) of the time.
        frame = (2 * np.arange(n_guide) + 1) * n // (2 * n_guide)
        first = frame * (layout.n_body // n)  # the frame's first cell
        return np.where(at < 0, -1, first[:, np.newaxis] + at).ravel()

    def grid_edges(self, layout: TokenLayout, row: int) -> Edges:
        """Return the edges of a site's grid on an image; below 0 or above 1 outside of it."""
        assert layout.grid is not None and layout.stride_px is not None
        begin = layout.offset_px
        end = _end(layout)
        return self._shares(row, (begin[0], begin[1], end[0], end[1]))

    def seen(self, row: int) -> Edges:
        """Return the part of an image that is on the model's input."""
        top, left, bottom, right = self.input_edges(row)
        return max(top, 0.0), max(left, 0.0), min(bottom, 1.0), min(right, 1.0)

    def input_edges(self, row: int) -> Edges:
        """Return the edges of the model's input on an image; below 0 or above 1 outside of it."""
        height, width = self.input_size
        return self._shares(row, (0.0, 0.0, float(height), float(width)))

    def _shares(self, row: int, edges: Edges) -> Edges:
        """Return edges in pixels of the input as shares of an image."""
        image = self.placement(row)
        height = image.bottom - image.top
        width = image.right - image.left
        top, left, bottom, right = edges
        return (
            (top - image.top) / height,
            (left - image.left) / width,
            (bottom - image.top) / height,
            (right - image.left) / width,
        )


def _end(layout: TokenLayout) -> tuple[float, float]:
    """Return the lower and the right edge of a grid in pixels of the input."""
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = layout.grid
    bottom = layout.offset_px[0] + rows * layout.stride_px[0]
    right = layout.offset_px[1] + cols * layout.stride_px[1]
    return bottom, right


def union(edges: Sequence[Edges]) -> Edges:
    """Return the edges of the smallest box around several."""
    tops, lefts, bottoms, rights = zip(*edges, strict=True)
    return min(tops), min(lefts), max(bottoms), max(rights)


def grid_sites(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the selected sites with a grid of several cells at a known position.

    Others are left out, which is logged.

    Raises:
        SiteError: no selected site has such a grid.
    """
    chosen = store.select(list(patterns))
    with_grid = [site for site in chosen if _has_map(site.layout)]
    if not with_grid:
        raise SiteError(
            f"{chosen[0].name} of {store.label} has no grid of patches to map; expected "
            "e.g. blocks"
        )
    left_out = [site.name for site in chosen if site not in with_grid]
    if left_out:
        log.info("%s: no grid of patches in %s", store.label, ", ".join(left_out[:5]))
    return with_grid


def _has_map(layout: TokenLayout | None) -> bool:
    """Return whether tokens have a grid of several cells at a known position."""
    return (
        layout is not None
        and layout.grid is not None
        and layout.stride_px is not None
        and layout.n_body > 1
    )
