"""Sheets of cosine maps. From the columns of `vitsee cosine-map`'s tables and their notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.patch_sheets import (
    Map,
    Sheet,
    SheetLine,
    grid_of,
    layer_name,
    place_values,
    shown_sites,
    thinned,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float
from vitsee_stores.token_selection import parse_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("shared", "map")


@styled
def draw_cosines(table: Table, scale: str) -> Figure:
    """One line per chosen patch: the photograph with the patch marked, and its cosine map in each
    layer, models below one another, the patch framed; then the same patch in the other images. Of
    offsets: one tile per layer, the query in the middle."""
    if "token" not in table.columns:
        return _draw_offsets(table, scale)
    cosines = table.where(metric="cosine")
    sheet = table.notes.get("sheet", {})
    places = {(m["query"], m["at"]): m["place"] for m in table.notes.get("marks", ())}
    sites = {store: shown_sites(rows) for store, rows in cosines.groups("store")}
    lines = []
    for query, of_query in cosines.groups("query"):
        for at, of_spot in of_query.groups("at"):
            own = [(image, rows) for image, rows in of_spot.groups("image")]
            for image, rows in own:
                mark = places.get((query, at)) if image == query else None
                title = image if image == query else f"in {image}"
                maps = []
                for store, of_store in rows.groups("store"):
                    tiles = []
                    for site in sites[store]:
                        of_site = of_store.where(site=site)
                        shape, edges = grid_of(of_site, sheet, site, image)
                        values = place_values(of_site, shape)
                        cell = parse_cell(str(of_site["token"][0])) if image == query else None
                        if scale == "map":
                            values = _stretched(values, cell)
                        tiles.append(Map(layer_name(site), values, edges, cell))
                    maps.append((store, tiles))
                lines.append(SheetLine(image, title, maps, mark))
    return Sheet(
        lines, sheet.get("images", {}), _caption(table, sites), *_look(lines, scale)
    ).draw()


def _draw_offsets(table: Table, scale: str) -> Figure:
    sites = {store: shown_sites(rows) for store, rows in table.groups("store")}
    maps = []
    shape = (1, 1)
    for store, rows in table.groups("store"):
        tiles = []
        for site in sites[store]:
            own = rows.where(site=site)
            at = [own[name].astype(np.int64) for name in ("row", "col")]
            shape = (2 * int(at[0].max()) + 1, 2 * int(at[1].max()) + 1)
            values = np.full(shape, np.nan)
            values[at[0] + shape[0] // 2, at[1] + shape[1] // 2] = own["value"].astype(float)
            middle = (shape[0] // 2, shape[1] // 2)
            if scale == "map":
                values = _stretched(values, middle)
            tiles.append(Map(layer_name(site), values, (0.0, 0.0, 1.0, 1.0), None))
        maps.append((store, tiles))
    n = sorted({int(v) for v in table["n_images"].tolist() if v})
    counts = f"{n[-1]} images" if len(n) == 1 else f"up to {n[-1]} images"
    caption = [f"mean cosine by offset from the query (middle), {counts}"]
    lines = [SheetLine("", "", maps)]
    about: dict[str, Any] = {"": {"aspect": shape[0] / shape[1]}}
    caption += _caption(table, sites)[1:]
    return Sheet(lines, about, caption, *_look(lines, scale), photos=False).draw()


def _stretched(values: Float, cell: tuple[int, int] | None) -> Float:
    """A map over its own range, 0 to 1, excluding that of the patch itself."""
    others = values.copy()
    if cell is not None:
        others[cell] = np.nan
    if np.isnan(others).all():
        return values
    low, high = np.nanmin(others), np.nanmax(others)
    return np.clip((values - low) / (high - low if high > low else 1), 0, 1)


def _look(lines: Sequence[SheetLine], scale: str) -> tuple[dict[str, Any], str]:
    if scale == "map":
        return {"vmin": 0.0, "vmax": 1.0, "cmap": "viridis"}, "each map over its own range"
    values = [tile.values for line in lines for _, tiles in line.maps for tile in tiles]
    there = np.concatenate([v[~np.isnan(v)].ravel() for v in values])
    low = float(there.min()) if len(there) else 0.0
    return {"vmin": min(low, 0.99), "vmax": 1.0, "cmap": "viridis"}, "cosine"


def _caption(table: Table, sites: dict[str, list[str]]) -> list[str]:
    lines = ["cosine of the framed patch with every patch"]
    if "query" in table.columns and (table["query"] != table["image"]).any():
        lines.append("in ...: the patch above with those of another image")
    lines += thinned(table, sites)
    names = [str(name) for name in table.unique("store")]
    return lines if len(names) > 1 else [f"{shorten(names[0], 24)}: {lines[0]}", *lines[1:]]
