"""Sheets of cosine maps. From the columns of `vitsee cosine-map`'s tables and their notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, ClipStrip, of_clips
from vitsee_core.figures.patch_sheets import (
    Map,
    Sheet,
    SheetLine,
    grid_of,
    layer_name,
    of_sites,
    place_values,
    shown_layers,
    shown_sites,
    thinned,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float, pl
from vitsee_stores.selectors import parse_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("shared", "map")


@styled
def draw_cosines(table: Table, scale: str) -> Figure:
    """One line per chosen patch: the photograph with the patch marked, and its cosine map in each
    layer, models below one another, the patch framed; then the same patch in the other images. Of
    offsets: one tile per layer, the query in the middle."""
    if "token" not in table.frame.columns:
        return _draw_offsets(table.frame, scale)
    cosines = table.frame.filter(metric="cosine")
    if of_clips(cosines):
        return _draw_clips(table, cosines, scale)
    sheet = table.notes.get("sheet", {})
    places = {(m["query"], m["at"]): m["place"] for m in table.notes.get("marks", ())}
    sites = shown_sites(cosines)
    cells = of_sites(cosines, sites).partition_by(
        "query", "at", "image", "store", "site", as_dict=True
    )
    shown = cosines.select("query", "at", "image").unique(maintain_order=True)
    lines = []
    for query, at in shown.select("query", "at").unique(maintain_order=True).rows():
        for image in shown.filter(query=query, at=at)["image"]:
            mark = places.get((query, at)) if image == query else None
            title = image if image == query else f"in {image}"
            maps = []
            for store in sites:
                tiles = []
                for site in sites[store]:
                    if (own := cells.get((query, at, image, store, site))) is None:
                        continue
                    shape, edges = grid_of(own, sheet, site, image)
                    values = place_values(own, shape)
                    cell = parse_place(own["token"][0]) if image == query else None
                    if scale == "map":
                        values = _stretched(values, cell)
                    tiles.append(Map(layer_name(site), values, edges, cell))
                if tiles:
                    maps.append((store, tiles))
            lines.append(SheetLine(image, title, maps, mark))
    return Sheet(
        lines,
        sheet.get("images", {}),
        _caption(table.frame, sites),
        *_look(_values(lines), scale),
    ).draw()


def _draw_clips(table: Table, cosines: pl.DataFrame, scale: str) -> Figure:
    """One strip per chosen patch and layer: the cosines with the patches of each frame of its clip,
    below the frames; then the same patch in the other clips."""
    sheet = table.notes.get("sheet", {})
    marks = {
        (m["query"], m["at"]): (m["time"], *m["place"])
        for m in table.notes.get("marks", ())
        if "time" in m
    }
    sites = shown_layers(cosines)
    lines = []
    for (query, at, image), shown in cosines.group_by(
        "query", "at", "image", maintain_order=True
    ):
        strips = []
        for (store, site), own in shown.group_by("store", "site", maintain_order=True):
            if site not in sites[store]:
                continue
            shape, edges = grid_of(own, sheet, site, image)
            values = place_values(own, shape)
            cell = parse_place(own["token"][0]) if image == query else None
            if scale == "map":
                values = _stretched(values, cell)
            strips.append(ClipStrip(store, layer_name(site), values, edges, cell))
        mark = marks.get((query, at)) if image == query else None
        title = f"{query}, patch {at}" if image == query else f"in {image}"
        lines.append(ClipLine(image, title, strips, mark))
    every = [strip.values for line in lines for strip in line.strips]
    caption = _caption(table.frame, sites)
    return ClipSheet(lines, sheet, caption, *_look(every, scale)).draw()


def _draw_offsets(rows: pl.DataFrame, scale: str) -> Figure:
    sites = shown_sites(rows)
    cells = rows.partition_by("store", "site", as_dict=True)
    maps = []
    shape = (1, 1)
    for store in sites:
        tiles = []
        for site in sites[store]:
            own = cells[store, site]
            middle = own.select("row", "col").max().row(0)
            shape = (2 * middle[0] + 1, 2 * middle[1] + 1)
            whole = own.with_columns(pl.col("row") + middle[0], pl.col("col") + middle[1])
            values = place_values(whole, shape)
            if scale == "map":
                values = _stretched(values, middle)
            tiles.append(Map(layer_name(site), values, (0.0, 0.0, 1.0, 1.0), None))
        maps.append((store, tiles))
    n = rows.filter(pl.col("n_images") > 0)["n_images"]
    counts = f"{n.max()!s} images" if n.n_unique() == 1 else f"up to {n.max()!s} images"
    caption = [f"mean cosine by offset from the query (middle), {counts}"]
    lines = [SheetLine("", "", maps)]
    about: dict[str, Any] = {"": {"aspect": shape[0] / shape[1]}}
    caption += _caption(rows, sites)[1:]
    return Sheet(
        lines, about, caption, *_look(_values(lines), scale), photos=False
    ).draw()


def _stretched(values: Float, cell: tuple[int, ...] | None) -> Float:
    """A map over its own range, 0 to 1, excluding that of the patch itself."""
    others = values.copy()
    if cell is not None:
        others[cell] = np.nan
    if np.isnan(others).all():
        return values
    low = np.nanmin(others)
    high = np.nanmax(others)
    return np.clip((values - low) / (high - low if high > low else 1), 0, 1)


def _values(lines: Sequence[SheetLine]) -> list[Float]:
    return [tile.values for line in lines for _, tiles in line.maps for tile in tiles]


def _look(values: Sequence[Float], scale: str) -> tuple[dict[str, Any], str]:
    if scale == "map":
        return {
            "vmin": 0.0,
            "vmax": 1.0,
            "cmap": "viridis",
        }, "each map over its own range"
    there = np.concatenate([v[~np.isnan(v)].ravel() for v in values])
    low = float(there.min()) if len(there) else 0.0
    return {"vmin": min(low, 0.99), "vmax": 1.0, "cmap": "viridis"}, "cosine"


def _caption(rows: pl.DataFrame, sites: dict[str, list[str]]) -> list[str]:
    lines = ["cosine of the framed patch with every patch"]
    if "query" in rows.columns and (rows["query"] != rows["image"]).any():
        other = "clip" if of_clips(rows) else "image"
        lines.append(f"in ...: the patch above with those of another {other}")
    lines += thinned(rows, sites)
    names = list(sites)
    if len(names) > 1:
        return lines
    return [f"{shorten(names[0], 24)}: {lines[0]}", *lines[1:]]
