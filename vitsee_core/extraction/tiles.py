"""Tiles of an image on a canvas, and which part of each is new (Walmer et al. 2023, Sec. B.4).

    tile i of a side begins at  min(i * side, length - side)  and adds what lies from  i * side on

The last tile of a row or column is moved back to the image's edge and overlaps the previous one,
which takes precedence. So every cell comes from exactly one tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitsee_core.extraction.buffers import SlabBuffers
from vitsee_core.extraction.slab import SlabObserver
from vitsee_core.runtime.device import to_device
from vitsee_core.summaries import largest_magnitude
from vitsee_stores.layout import SiteSpec, TokenLayout
from vitsee_stores.plan import Canvas, Size

TILED = "the model runs on tiles, which do not see each other"


@dataclass(frozen=True)
class Tile:
    """One tile of an image."""

    image: int  # index of the image in the batch
    top: int  # first pixel row
    left: int  # first pixel column
    new: Size  # (row, col) within it of its first pixel that no earlier tile has


def starts(length: int, side: int) -> list[tuple[int, int]]:
    """Return the start of each tile along one axis, and the first new pixel within it."""
    tile_starts = [min(start, length - side) for start in range(0, length, side)]
    return [(start, k * side - start) for k, start in enumerate(tile_starts)]


def n_tiles(size: Size, side: Size) -> int:
    """Return the number of tiles that cover an image of this size on the canvas."""
    return len(starts(size[0], side[0])) * len(starts(size[1], side[1]))


def tiles_of(sizes: Sequence[Size], canvas: Canvas) -> list[Tile]:
    """Return the tiles of a batch, image by image and row by row.

    Args:
        sizes: (height, width) of the original images, 0 for one that does not count, which
            has no tiles.
        canvas: a canvas with tiles.
    """
    assert canvas.tiles is not None
    tiles = []
    for image, size in enumerate(sizes):
        if min(size) < 1:
            continue
        height, width = canvas.image(size)
        col_starts = starts(width, canvas.tiles[1])
        for top, new_row in starts(height, canvas.tiles[0]):
            for left, new_col in col_starts:
                tiles.append(Tile(image, top, left, new=(new_row, new_col)))
    return tiles


class TiledObserver(SlabObserver):
    """Assembles the tokens of tiles into the grids of their images.

    Per batch: `begin_batch`, for each tensor of `passes` a captured forward of its pixels, and
    `end_batch`. Memory on the device, beside that of `SlabObserver`: the grids of one batch of
    images, for one site if all their tiles go through the model at once, else for all.
    """

    def start(self, buffers: SlabBuffers) -> None:
        """Begin a slab in these buffers."""
        super().start(buffers)
        self._spare: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def passes(
        self, pixels: Tensor, sizes: Sequence[Size], max_tiles: int
    ) -> Iterator[Tensor]:
        """Yield the pixels of the next tiles, (tiles, channels, rows, cols), until all were taken.

        Args:
            pixels: (images, channels, height, width) of a batch, on the canvas.
            sizes: as for `tiles_of`.
            max_tiles: tiles in one forward pass.
        """
        canvas = self._plan.canvas
        assert canvas is not None and canvas.tiles is not None
        tiles = tiles_of(sizes, canvas)
        height, width = canvas.tiles
        self._grids: dict[str, Tensor] = {}
        self._sizes = [canvas.image(size) if min(size) > 0 else (0, 0) for size in sizes]
        self._n_cells: dict[Size, Tensor] = {}
        for first in range(0, len(tiles), max_tiles):
            # What the model's hooks then observe belongs to these tiles.
            self._tiles = tiles[first : first + max_tiles]
            self._is_last_pass = first + max_tiles >= len(tiles)
            crops = []
            for tile in self._tiles:
                bottom = tile.top + height
                right = tile.left + width
                crops.append(pixels[tile.image, :, tile.top : bottom, tile.left : right])
            yield torch.stack(crops)

    def images_of_pass(self, n_rows: int) -> list[int]:
        """Return the index in the batch of the image of each tile."""
        return [tile.image for tile in self._tiles]

    def end_batch(self) -> None:
        """Store what needs all blocks of a batch; images without tiles have grids of zeros."""
        # Without any tile there was no pass, so that no site was stored.
        if not any(min(size) for size in self._sizes):
            with self._exactly():
                for site in self._plan.stored:
                    self._lay_out(site.name, self._empty(site))
        super().end_batch()

    def _site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Copy the new cells of each tile into its image's grid.

        `body` is (tiles, rows, cols, dim). The grids are stored with the last pass of a batch.
        """
        stored = self._stored[site.name]
        self._note_peak(site.name, largest_magnitude(body))
        step_y, step_x = _steps(stored.layout)
        grid = self._grids.get(site.name)
        if grid is None:
            grid = self._grids[site.name] = self._empty(stored, body)
        for tile, tokens in zip(self._tiles, body, strict=True):
            row = tile.new[0] // step_y
            col = tile.new[1] // step_x
            top = tile.top // step_y + row
            left = tile.left // step_x + col
            new = tokens[row:, col:]  # (rows, cols, dim) that no earlier tile has
            grid[tile.image, top : top + len(new), left : left + new.shape[1]] = new
        if self._is_last_pass:
            self._lay_out(site.name, self._grids.pop(site.name))

    def _empty(self, site: SiteSpec, like: Tensor | None = None) -> Tensor:
        """Return zeros (images, rows, cols, dim) for a batch's grids, in the type of `like`."""
        assert site.layout is not None and site.layout.grid is not None
        shape = (len(self._sizes), *site.layout.grid, site.dim)
        dtype = torch.float32 if like is None else like.dtype
        spare = self._spare.get((shape, dtype))
        if spare:  # new memory costs ten times as much as zeroing old memory
            return spare.pop().zero_()
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _lay_out(self, name: str, grid: Tensor) -> None:
        """Store whole grids, and their means over the cells on the image."""
        stored = self._stored[name]
        total = grid.flatten(1, 2).sum(1, dtype=torch.float32)
        self._keep(f"pooled/{name}/mean", total / self._cells(_steps(stored.layout)))
        if stored.tokens == "all":
            self._keep(f"acts/{name}/grid", grid)
        self._spare.setdefault((grid.shape, grid.dtype), []).append(grid)

    def _cells(self, step: Size) -> Tensor:
        """(images, 1) cells on each image, sent to the device once per batch."""
        if step not in self._n_cells:
            # At least 1: images without tiles have sums of 0, and means of 0, too.
            counts = np.array(
                [max(1, (h // step[0]) * (w // step[1])) for h, w in self._sizes],
                np.float32,
            )
            self._n_cells[step] = to_device(counts, self._device)[:, None]
        return self._n_cells[step]


def _steps(layout: TokenLayout | None) -> Size:
    """Pixels between cells, integers where tiles are used."""
    assert layout is not None and layout.stride_px is not None
    return round(layout.stride_px[0]), round(layout.stride_px[1])
