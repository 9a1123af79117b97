"""Crops of the photographs around patches, and the sheet of them: concepts below one another, their
strongest patches across."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.patch_sheets import WHOLE, Map, Sheet, SheetLine, layer_name
from vitsee_core.figures.plotting import styled
from vitsee_core.images.embedded_pictures import decode, encode
from vitsee_core.patch_maps.photos import Photograph, Shown, photographs
from vitsee_core.patch_maps.views import Edges, View
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Integers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec, Store

AROUND = 1.0  # cells of neighbours on each side
CONCEPTS = 12  # most that are drawn
SMALLEST = 48  # pixels of a crop's shorter side, enlarged from fewer


def crops(
    store: Store, site: SiteSpec, rows: Integers, cells: Integers, data: str | None
) -> list[list[str]]:
    """PNG, in base64, of each patch with its neighbours; "" where the picture cannot be had. rows,
    cells: (concepts, n) of the store, and of the site's grid, row by row; data: where the images
    are now, by default where extract read them."""
    layout = store.site(site.name).layout
    assert layout is not None and layout.grid is not None
    view = View.of(store, [site])
    shown = Shown(store, view, sorted({int(row) for row in rows.ravel()}), [site])
    photos = photographs(shown, [view.seen(row) for row in shown.rows], data)
    n_cols = layout.grid[1]
    found = []
    for of_concept, at in zip(rows.tolist(), cells.tolist(), strict=True):
        line = []
        for row, cell in zip(of_concept, at, strict=True):
            edges = _around(view.grid_edges(layout, row), layout.grid, divmod(cell, n_cols))
            line.append(encode(_crop(photos[row], edges)) if row in photos else "")
        found.append(line)
    return found


def _around(grid: Edges, shape: Sequence[int], cell: tuple[int, int]) -> Edges:
    """The edges of a cell with its neighbours, as shares of the image."""
    top, left, bottom, right = grid
    tall, wide = (bottom - top) / shape[0], (right - left) / shape[1]
    y, x = top + cell[0] * tall, left + cell[1] * wide
    return (y - AROUND * tall, x - AROUND * wide,
            y + (1 + AROUND) * tall, x + (1 + AROUND) * wide)  # fmt: skip


def _crop(photo: Photograph, edges: Edges) -> NDArray[np.uint8]:
    """These edges of a photograph, white beyond it."""
    pixels = photo.pixels if photo.pixels.ndim == 3 else np.stack([photo.pixels] * 3, -1)
    top, left, bottom, right = photo.edges
    tall, wide = pixels.shape[0] / (bottom - top), pixels.shape[1] / (right - left)
    y0, y1 = (round((edge - top) * tall) for edge in (edges[0], edges[2]))
    x0, x1 = (round((edge - left) * wide) for edge in (edges[1], edges[3]))
    y1, x1 = max(y1, y0 + 1), max(x1, x0 + 1)
    whole = np.full((y1 - y0, x1 - x0, 3), 255, np.uint8)
    ys, xs = (slice(max(a, 0), min(b, n)) for a, b, n in
              ((y0, y1, pixels.shape[0]), (x0, x1, pixels.shape[1])))  # fmt: skip
    if ys.start < ys.stop and xs.start < xs.stop:
        whole[ys.start - y0 : ys.stop - y0, xs.start - x0 : xs.stop - x0] = pixels[ys, xs]
    scale = math.ceil(SMALLEST / min(whole.shape[:2]))
    return whole.repeat(scale, 0).repeat(scale, 1)


@styled
def draw_concepts(table: Table) -> Figure:
    """A line per concept, the most frequent first, of each store and site: the patches with the
    highest activation, of an image each, with their neighbours."""
    lines: list[SheetLine] = []
    pictures: Mapping[str, Any] = table.notes.get("crops", {})
    shares = table.frame.filter(metric="share")
    pairs = shares.partition_by("store", "site", maintain_order=True)
    most = max(1, CONCEPTS // max(1, len(pairs)))
    for own in pairs:
        ranked = own.sort("value", descending=True, nulls_last=True, maintain_order=True)
        for store, site, concept, value in (
            ranked.head(most).select("store", "site", "concept", "value").iter_rows()
        ):
            of_concept = pictures.get(store, {}).get(site, {}).get(str(concept), [])
            name = f"{concept}: {100 * value:.0f} %"
            if len(pairs) > 1:  # in the same room
                of_one = layer_name(site) if shares["store"].n_unique() == 1 else store
                name = f"{shorten(of_one, 8)} {concept}"
            tiles = [Map("", _pixels(text), WHOLE) for text in of_concept] or [_NOTHING]
            lines.append(SheetLine(str(len(lines)), "", [(name, tiles)]))
    share = ", with its share of the patches" if len(pairs) == 1 else ""
    caption = [
        f"a line per concept{share}: those with the highest",
        "activation, one per image, each in the middle",
        "of its neighbours; white is outside of the image",
    ]
    if len(shares) > len(lines):
        caption.append("the most frequent concepts; the table has all")
    return Sheet(lines, {}, caption, photos=False).draw()


_NOTHING = Map("no picture", np.ones((1, 1, 3)), WHOLE)


def _pixels(text: str) -> Any:
    return decode(text).astype(np.float64) / 255 if text else _NOTHING.values
