"""The figure of `vitsee logit-attribution --patches`: maps beside photographs. From the columns of
its table and the notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from vitsee_core.figures.patch_sheets import (
    Map,
    Sheet,
    SheetLine,
    grid_of,
    place_values,
    shown_sites,
    thinned,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.figures.token_maps import DIVERGING
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import site_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOTAL = "patches"
SCALES = ("shared", "map")


@styled
def draw_patch_parts(table: Table, scale: str) -> Figure:
    """A line per image (and class): the photograph, what each patch adds to the logit in all, and
    in evenly spaced layers, models below one another; white is 0. scale: "shared", one scale of
    colours, or "map", each map over its own."""
    cells = table.frame.filter(pl.col("row").is_not_null())
    sheet = table.notes.get("sheet", {})
    order = {own["store"][0]: _shown(own) for own in cells.partition_by("store")}
    lines = []
    for own in cells.partition_by("image", "class", maintain_order=True):
        image, name = own["image"][0], own["class"][0]
        maps = []
        for rows in own.partition_by("store", maintain_order=True):
            tiles, store = [], rows["store"][0]
            key = next(iter(sheet.get("grids", {}).get(store, {"": None})))
            for site in order[store]:
                of_site = rows.filter(site=site)
                shape, edges = grid_of(of_site, sheet, key, image)
                title = site_words(site).replace(", ", "\n")
                title = "all" if site == order[store][0] else title
                values = place_values(of_site, shape)
                if scale == "map":
                    values = values / (float(np.nanmax(np.abs(values))) or 1.0)
                tiles.append(Map(title, values, edges))
            maps.append((store, tiles))
        lines.append(SheetLine(image, name or "", maps))
    every = [tile.values for line in lines for _, tiles in line.maps for tile in tiles]
    top = max((float(np.nanmax(np.abs(one))) for one in every), default=1.0) or 1.0
    caption = ["what each patch adds to the logit, directly (red: for the class)"]
    caption.append(f"images: {', '.join(cells['image'].unique(maintain_order=True))}")
    caption += thinned(cells, order)
    look = {"vmin": -top, "vmax": top, "cmap": DIVERGING}
    bar = "part of logit" if scale == "shared" else "each map over its own range"
    return Sheet(lines, sheet.get("images", {}), caption, look, bar).draw()


def _shown(rows: pl.DataFrame) -> list[str]:
    """The sum of all terms, which stands last in the table, then evenly spaced ones."""
    *every, total = rows["site"].unique(maintain_order=True)
    n = min(len(every), len(shown_sites(rows)) - 1)
    return [total, *(every[k] for k in np.linspace(0, len(every) - 1, n).round().astype(int))]
