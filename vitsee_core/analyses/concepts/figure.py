"""The figure of concepts: crops of each concept's strongest patches, which the table's notes keep,
and the sheet that shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.patch_maps.photos import (
    Photograph,
    SheetImages,
    clip_frames,
    photographs,
)
from vitsee_core.figures.patch_maps.views import Edges, View
from vitsee_core.figures.patch_sheets import WHOLE, Map, Sheet, SheetLine, layer_name
from vitsee_core.figures.plotting import styled
from vitsee_core.images.embedded_pictures import decode, encode
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float, Integers
from vitsee_stores import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

AROUND = 1.0  # grid cells around the patch, on each side of a crop
MAX_CONCEPTS = 12  # concepts in a figure, over all stores and sites
MIN_PIXELS = 48  # of a crop's shorter side; smaller crops are enlarged
_NO_PICTURE = Map("no picture", np.ones((1, 1, 3)), WHOLE)


def make_crops(
    store: Store, site: SiteSpec, rows: Integers, cells: Integers, data: str | None
) -> list[list[str]]:
    """Cut each patch with its neighbours out of its photograph.

    Args:
        store: the store that the patches are from.
        site: the site whose grid the cells count on.
        rows: (concepts, n) rows of the store.
        cells: (concepts, n) cells of the site's grid, time by time and row by row.
        data: where the images are now; by default where extract read them.

    Returns:
        (concepts, n) pictures, encoded by `encode`; "" where the photograph cannot be read. A
        patch of a clip is shown in the frame in the middle of its time.
    """
    layout = store.site(site.name).layout
    assert layout is not None and layout.grid is not None
    grid_shape = layout.grid
    view = View.of(store, [site])
    times, cells_in_grid = np.divmod(cells, grid_shape[0] * grid_shape[1])
    if store.plan.clip is None:
        frames = np.zeros_like(cells)
        photos = _photos_of_images(store, site, view, rows, data)
    else:
        frames = _middle_frames(times, layout.frames or 1, store.plan.clip.frames)
        photos = _photos_of_frames(store, view, rows, frames, data)

    @cache  # the same patch may be among the strongest of several concepts
    def crop(row: int, frame: int, cell: int) -> str:
        """Return the picture of one patch, "" without a photograph."""
        photo = photos.get((row, frame))
        if photo is None:
            return ""
        edges = _edges_with_neighbours(
            view.grid_edges(layout, row), grid_shape, divmod(cell, grid_shape[1])
        )
        return encode(_cut(photo, edges))

    # (concepts, n, 3): row, frame, cell of each patch
    patches = np.stack([rows, frames, cells_in_grid], axis=-1).tolist()
    return [
        [crop(row, frame, cell) for row, frame, cell in patches_of_concept]
        for patches_of_concept in patches
    ]


def _photos_of_images(
    store: Store, site: SiteSpec, view: View, rows: Integers, data: str | None
) -> dict[tuple[int, int], Photograph]:
    """Return (row, 0) -> the photograph, cut to what the model saw.

    Args:
        store: of the images.
        site: the site whose patches are shown.
        view: how the store's model saw the images.
        rows: rows of the store, in any shape.
        data: where the images are now.
    """
    images = SheetImages(store, view, sorted({int(row) for row in rows.ravel()}), [site])
    seen_edges = [view.seen(row) for row in images.rows]
    return {
        (row, 0): photo for row, photo in photographs(images, seen_edges, data).items()
    }


def _photos_of_frames(
    store: Store, view: View, rows: Integers, frames: Integers, data: str | None
) -> dict[tuple[int, int], Photograph]:
    """Return (row, frame) -> the frame of that clip as the model's input has it.

    Args:
        store: of the clips.
        view: how the store's model saw them.
        rows: rows of the store, in any shape.
        frames: the sampled frame to read of each of them.
        data: where the clips are now.
    """
    row_frames = set(zip(rows.ravel().tolist(), frames.ravel().tolist(), strict=True))
    photos = {}
    for (row, frame), pixels in clip_frames(store, row_frames, data).items():
        photos[row, frame] = Photograph(pixels, view.input_edges(row))
    return photos


def _middle_frames(times: Integers, n_times: int, n_frames: int) -> Integers:
    """Return the sampled frame in the middle of each of the grid's times, in whole numbers."""
    # (time + 1/2) / n_times of the clip, without a float that could round down.
    return (2 * times + 1) * n_frames // (2 * n_times)


def _edges_with_neighbours(
    grid: Edges, shape: Sequence[int], cell: tuple[int, int]
) -> Edges:
    """Return the edges of a cell with `AROUND` cells on each side, as shares of the image.

    grid: edges of the grid; shape: its rows and columns; cell: row and column.
    """
    top, left, bottom, right = grid
    cell_height = (bottom - top) / shape[0]
    cell_width = (right - left) / shape[1]
    y = top + cell[0] * cell_height
    x = left + cell[1] * cell_width
    return (
        y - AROUND * cell_height,
        x - AROUND * cell_width,
        y + (1 + AROUND) * cell_height,
        x + (1 + AROUND) * cell_width,
    )


def _cut(photo: Photograph, edges: Edges) -> NDArray[np.uint8]:
    """Return (h, w, 3) the pixels of a photograph between edges, white beyond the photograph."""
    pixels = photo.pixels
    if pixels.ndim == 2:  # greyscale
        pixels = np.stack([pixels] * 3, axis=-1)
    top, left, bottom, right = photo.edges
    pixels_high = pixels.shape[0] / (bottom - top)  # per whole image
    pixels_wide = pixels.shape[1] / (right - left)
    # Edges of the crop in pixels of the photograph, at least one pixel apart.
    y0 = round((edges[0] - top) * pixels_high)
    x0 = round((edges[1] - left) * pixels_wide)
    y1 = max(round((edges[2] - top) * pixels_high), y0 + 1)
    x1 = max(round((edges[3] - left) * pixels_wide), x0 + 1)
    crop = np.full((y1 - y0, x1 - x0, 3), 255, np.uint8)
    # The overlap of crop and photograph.
    ys = slice(max(y0, 0), min(y1, pixels.shape[0]))
    xs = slice(max(x0, 0), min(x1, pixels.shape[1]))
    if ys.start < ys.stop and xs.start < xs.stop:
        crop[ys.start - y0 : ys.stop - y0, xs.start - x0 : xs.stop - x0] = pixels[ys, xs]
    scale = math.ceil(MIN_PIXELS / min(crop.shape[:2]))
    return crop.repeat(scale, 0).repeat(scale, 1)


@styled
def plot(table: Table) -> Figure:
    """Draw a line per concept, the most frequent first, of each store and site.

    A line shows the patches with the highest activation, one per image, with their neighbours.
    """
    pictures: Mapping[str, Any] = table.notes.get("crops", {})
    shares = table.frame.filter(metric="share")
    one_store = shares["store"].n_unique() == 1
    shares_by_site = shares.partition_by("store", "site", maintain_order=True)
    one_site = len(shares_by_site) == 1
    n_shown = max(1, MAX_CONCEPTS // max(1, len(shares_by_site)))
    lines: list[SheetLine] = []
    for site_shares in shares_by_site:
        ranked = site_shares.sort(
            "value", descending=True, nulls_last=True, maintain_order=True
        )
        for row in ranked.head(n_shown).iter_rows(named=True):
            concept = row["concept"]
            if one_site:
                name = f"{concept}: {100 * row['value']:.0f} %"
            else:  # the room is the same, so that the site or store replaces the share
                source = layer_name(row["site"]) if one_store else row["store"]
                name = f"{shorten(source, 8)} {concept}"
            site_crops = pictures.get(row["store"], {}).get(row["site"], {})
            tiles = [
                Map("", _decode_crop(crop), WHOLE)
                for crop in site_crops.get(str(concept), [])
            ]
            maps = [(name, tiles or [_NO_PICTURE])]
            lines.append(SheetLine(image=str(len(lines)), title="", maps=maps))
    share = ", with its share of the patches" if one_site else ""
    caption = [
        f"a line per concept{share}: those with the highest",
        "activation, one per image, each in the middle",
        "of its neighbours; white is outside of the image",
    ]
    if len(shares) > len(lines):
        caption.append("the most frequent concepts; the table has all")
    return Sheet(lines, {}, caption, photos=False).draw()


def _decode_crop(crop: str) -> Float:
    """Return (h, w, 3) colours from 0 to 1 of an encoded crop; one white pixel of ""."""
    if not crop:
        return _NO_PICTURE.values
    return decode(crop).astype(np.float64) / 255
