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

Edges = tuple[
    float, float, float, float
]  # top, left, bottom, right, as shares of an image


@dataclass(frozen=True)
class View:
    """How a store's model saw its images.

    Attributes:
        transform: the store's.
        sizes: (images, 2) height and width of the originals; None if the store does not record them
            or their transform is unknown, so that the model's input is taken for the image.
        input_size: (height, width) in pixels.
    """

    transform: dict[str, Any]
    sizes: NDArray[np.int32] | None
    input_size: tuple[int, int]

    @classmethod
    def of(cls, store: Store, sites: Sequence[SiteSpec]) -> View:
        """The view of a store; an unknown resize is logged.

        Args:
            store: an open store.
            sites: with a grid at a known position.
        """
        transform = store.manifest.transform
        if "input_size" in transform:
            _, height, width = transform["input_size"]
        else:
            ends = [_end(site.layout) for site in sites if site.layout is not None]
            height, width = (max(end[axis] for end in ends) for axis in (0, 1))
        try:
            if "input_size" not in transform:
                raise MissingInput("it has no transform")
            sizes = store.sizes
            known = sizes[store.valid]
            place(transform, known[0].tolist())
        except (MissingInput, DataError) as reason:
            log.info(
                "%s: maps are drawn on the model's input, not on the original images: %s",
                *(store.label, reason),
            )
            return cls({}, None, (int(height), int(width)))
        return cls(dict(transform), sizes, (int(height), int(width)))

    def size(self, row: int) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        if self.sizes is None:
            return self.input_size
        height, width = self.sizes[row].tolist()
        return height, width

    def placement(self, row: int) -> Placement:
        if self.sizes is None:
            return Placement(0, 0, *map(float, self.input_size))
        return place(self.transform, self.size(row))

    def on_image(self, layout: TokenLayout, rows: Integers) -> Mask:
        """(rows, cells) which cells of a grid have their middle on the image, not beside it; of
        clips those of every frame."""
        assert layout.grid is not None
        found = np.ones((len(rows), layout.n_body), bool)
        if self.sizes is None or not len(rows):
            return found
        _, first, which = np.unique(
            self.sizes[rows], axis=0, return_index=True, return_inverse=True
        )
        for k, row in enumerate(rows[first].tolist()):
            of_frame = self.placement(row).on_image(layout).ravel()
            found[which.ravel() == k] = np.tile(of_frame, layout.frames or 1)
        return found

    def centres(self, layout: TokenLayout, row: int) -> Float:
        """(cells, 2) y and x of the middle of each cell; of clips those of one frame."""
        top, left, bottom, right = self.grid_edges(layout, row)
        assert layout.grid is not None
        rows, cols = layout.grid
        y = top + (np.arange(rows) + 0.5) / rows * (bottom - top)
        x = left + (np.arange(cols) + 0.5) / cols * (right - left)
        return np.stack([np.repeat(y, cols), np.tile(x, rows)], 1)

    def cells_at(self, layout: TokenLayout, row: int, places: Float) -> Integers:
        """(places,) the cell that contains each place (y, x), counted row by row; -1 for none. Of
        clips the cells of the first frame."""
        top, left, bottom, right = self.grid_edges(layout, row)
        assert layout.grid is not None
        rows, cols = layout.grid
        # A place on the edge between two cells, up to rounding, is the later one's.
        y = np.floor((places[:, 0] - top) / (bottom - top) * rows + 1e-9).astype(np.int64)
        x = np.floor((places[:, 1] - left) / (right - left) * cols + 1e-9).astype(
            np.int64
        )
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
        """(cells of the guide,) the cell of an image, or of a clip, at the place and the time of
        each cell of the same one in another grid; -1 for none. The time of a cell is its middle as
        a share of the sampled frames."""
        at = self.cells_at(layout, row, guide.centres(of_guide, guide_row))
        n = layout.frames or 1
        n_guide = of_guide.frames or 1
        first = (2 * np.arange(n_guide) + 1) * n // (2 * n_guide) * (layout.n_body // n)
        return np.where(at < 0, -1, first[:, np.newaxis] + at).ravel()

    def grid_edges(self, layout: TokenLayout, row: int) -> Edges:
        """The edges of a site's grid on an image; beyond 0 and 1 outside it."""
        assert layout.grid is not None and layout.stride_px is not None
        begin = layout.offset_px
        end = _end(layout)
        return self._shares(row, (begin[0], begin[1], end[0], end[1]))

    def seen(self, row: int) -> Edges:
        """The part of an image on the model's input."""
        top, left, bottom, right = self.input_edges(row)
        return max(top, 0.0), max(left, 0.0), min(bottom, 1.0), min(right, 1.0)

    def input_edges(self, row: int) -> Edges:
        """The edges of the model's input on an image."""
        height, width = self.input_size
        return self._shares(row, (0.0, 0.0, float(height), float(width)))

    def _shares(self, row: int, edges: Edges) -> Edges:
        """Edges in pixels of the input as fractions of an image."""
        at = self.placement(row)
        height = at.bottom - at.top
        width = at.right - at.left
        top, left, bottom, right = edges
        return (
            *((top - at.top) / height, (left - at.left) / width),
            *((bottom - at.top) / height, (right - at.left) / width),
        )


def _end(layout: TokenLayout) -> tuple[float, float]:
    assert layout.grid is not None and layout.stride_px is not None
    y, x = (layout.offset_px[i] + layout.grid[i] * layout.stride_px[i] for i in (0, 1))
    return y, x


def union(edges: Sequence[Edges]) -> Edges:
    tops, lefts, bottoms, rights = zip(*edges, strict=True)
    return min(tops), min(lefts), max(bottoms), max(rights)


def grid_sites(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """The selected sites with a grid of several cells at a known position; others are left out,
    which is logged.

    Raises:
        SiteError: none has one.
    """
    chosen = store.select(list(patterns))
    found = [site for site in chosen if _has_map(site.layout)]
    if not found:
        raise SiteError(
            f"{chosen[0].name} of {store.label} has no grid of patches to map; expected e.g. blocks"
        )
    if left := [site.name for site in chosen if site not in found]:
        log.info("%s: no grid of patches in %s", store.label, ", ".join(left[:5]))
    return found


def _has_map(layout: TokenLayout | None) -> bool:
    return (
        layout is not None
        and layout.grid is not None
        and layout.stride_px is not None
        and layout.n_body > 1
    )
