"""Sheets of cosine maps, from the columns of `vitsee cosine-map`'s tables and their notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, ClipStrip, of_clips
from vitsee_core.figures.patch_sheets import (
    WHOLE,
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
from vitsee_stores.selectors import parse_position

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("shared", "map")
MIN_COLOUR_RANGE = 0.01  # of the shared scale, whose largest value is always 1


@styled
def draw_cosines(table: Table, scale: str) -> Figure:
    """Draw a sheet with a line per chosen patch and image.

    A line has the photograph with the patch marked, and its cosine map in each layer, models below
    one another, the patch framed; then come the maps of the same patch in the other images. Of
    offsets there is one map per layer, with the query in the middle.

    Args:
        table: maps of patches of images or of clips, or means by offset.
        scale: one of `SCALES`, the range of the maps' colours.
    """
    if "token" not in table.frame.columns:
        return _draw_offsets(table.frame, scale)
    cosines = table.frame.filter(metric="cosine")
    if of_clips(cosines):
        return _draw_clips(table, cosines, scale)
    return _draw_images(table, cosines, scale)


def _draw_images(table: Table, cosines: pl.DataFrame, scale: str) -> Figure:
    """Draw a line per chosen patch and image, with one map per layer.

    Args:
        table: of the maps, with where they lie on photographs in its notes.
        cosines: its rows of maps, without those of statistics.
        scale: one of `SCALES`.
    """
    sheet = table.notes.get("sheet", {})
    marks = {
        (mark["query"], mark["at"]): mark["place"]
        for mark in table.notes.get("marks", ())
    }
    sites = shown_sites(cosines)
    rows_by_map = of_sites(cosines, sites).partition_by(
        "query", "at", "image", "store", "site", as_dict=True
    )
    lines = []
    for query, at, image in _patches_and_images(cosines):
        maps = []
        for store, site_names in sites.items():
            tiles = []
            for site in site_names:
                rows = rows_by_map.get((query, at, image, store, site))
                if rows is None:  # this store has another choice of sites
                    continue
                shape, edges = grid_of(rows, sheet, site, image)
                cell = _query_cell(rows, query, image)
                values = _scale_values(place_values(rows, shape), cell, scale)
                tiles.append(Map(layer_name(site), values, edges, cell))
            if tiles:
                maps.append((store, tiles))
        if image == query:
            lines.append(SheetLine(image, image, maps, marks.get((query, at))))
        else:
            lines.append(SheetLine(image, f"in {image}", maps))
    look, bar = _colours(_values_of_maps(lines), scale)
    about = sheet.get("images", {})
    return Sheet(lines, about, _caption(table.frame, sites), look=look, bar=bar).draw()


def _patches_and_images(cosines: pl.DataFrame) -> list[tuple[str, str, str]]:
    """Return (query, at, image) of each line of a sheet, the lines of one patch together."""
    lines = cosines.select("query", "at", "image").unique(maintain_order=True)
    patches = lines.partition_by("query", "at", maintain_order=True)
    # Rows of one patch need not stand together in a table of several stores.
    in_order = pl.concat(patches)
    return list(in_order.rows())


def _draw_clips(table: Table, cosines: pl.DataFrame, scale: str) -> Figure:
    """Draw one strip per chosen patch and layer.

    A strip has the cosines with the patches of each frame of the patch's clip, below the frames;
    then come the strips of the same patch in the other clips.

    Args:
        table: of the maps, with the frames in its notes.
        cosines: its rows of maps, without those of statistics.
        scale: one of `SCALES`.
    """
    sheet = table.notes.get("sheet", {})
    marks = {}  # (query, at) -> (time, y, x)
    for mark in table.notes.get("marks", ()):
        if "time" in mark:
            marks[mark["query"], mark["at"]] = (mark["time"], *mark["place"])
    sites = shown_layers(cosines)  # strips are wide: few layers of a store fit
    lines = []
    for (query, at, image), line_rows in cosines.group_by(
        "query", "at", "image", maintain_order=True
    ):
        strips = []
        for (store, site), rows in line_rows.group_by(
            "store", "site", maintain_order=True
        ):
            if site not in sites[store]:
                continue
            shape, edges = grid_of(rows, sheet, site, image)
            cell = _query_cell(rows, query, image)
            values = _scale_values(place_values(rows, shape), cell, scale)
            strips.append(ClipStrip(store, layer_name(site), values, edges, cell))
        if image == query:
            title = f"{query}, patch {at}"
            lines.append(ClipLine(image, title, strips, marks.get((query, at))))
        else:
            lines.append(ClipLine(image, f"in {image}", strips, None))
    values_of_strips = [strip.values for line in lines for strip in line.strips]
    look, bar = _colours(values_of_strips, scale)
    return ClipSheet(lines, sheet, _caption(table.frame, sites), look, bar).draw()


def _draw_offsets(rows: pl.DataFrame, scale: str) -> Figure:
    """Draw one map per layer of the mean cosines by offset, offset 0 in the middle.

    Args:
        rows: one per store, site and offset.
        scale: one of `SCALES`.
    """
    sites = shown_sites(rows)
    rows_by_site = rows.partition_by("store", "site", as_dict=True)
    maps = []
    shape = (1, 1)
    for store, site_names in sites.items():
        tiles = []
        for site in site_names:
            site_rows = rows_by_site[store, site]
            # Offsets go from -middle to middle; cells of a map count from 0.
            middle = site_rows.select("row", "col").max().row(0)
            shape = (2 * middle[0] + 1, 2 * middle[1] + 1)
            cells = site_rows.with_columns(
                pl.col("row") + middle[0], pl.col("col") + middle[1]
            )
            values = _scale_values(place_values(cells, shape), middle, scale)
            tiles.append(Map(layer_name(site), values, WHOLE))
        maps.append((store, tiles))
    n_images = rows.filter(pl.col("n_images") > 0)["n_images"]
    counts = f"{n_images.max()!s} images"
    if n_images.n_unique() != 1:
        counts = f"up to {counts}"
    caption = [f"mean cosine by offset from the query (middle), {counts}"]
    # The first line of the caption is about single patches.
    caption += _caption(rows, sites)[1:]
    # The maps belong to no image: a line without a name, as high as the last map.
    lines = [SheetLine(image="", title="", maps=maps)]
    about = {"": {"aspect": shape[0] / shape[1]}}
    look, bar = _colours(_values_of_maps(lines), scale)
    return Sheet(lines, about, caption, look=look, bar=bar, photos=False).draw()


def _query_cell(rows: pl.DataFrame, query: str, image: str) -> tuple[int, ...] | None:
    """Return the chosen patch's cell, None in maps of the other images."""
    if image != query:
        return None
    return parse_position(rows["token"][0])


def _scale_values(values: Float, cell: tuple[int, ...] | None, scale: str) -> Float:
    """Return the values to draw: for "map" as shares of the map's range.

    The range is that of the other patches: the cosine of the chosen patch at `cell` with itself
    is always 1, and would leave a flat map without contrast.
    """
    if scale != "map":
        return values
    others = values.copy()
    if cell is not None:
        others[cell] = np.nan
    if np.isnan(others).all():
        return values
    low = np.nanmin(others)
    high = np.nanmax(others)
    span = high - low if high > low else 1
    return np.clip((values - low) / span, 0, 1)


def _values_of_maps(lines: Sequence[SheetLine]) -> list[Float]:
    """Return the values of all maps of a sheet."""
    values = []
    for line in lines:
        for _, tiles in line.maps:
            values += [tile.values for tile in tiles]
    return values


def _colours(values: Sequence[Float], scale: str) -> tuple[dict[str, Any], str]:
    """Return the keywords of `imshow` for all maps of a sheet, and the colour bar's label.

    Args:
        values: (rows, cols) of each map, as drawn.
        scale: one of `SCALES`.
    """
    if scale == "map":
        look = {"vmin": 0.0, "vmax": 1.0, "cmap": "viridis"}
        return look, "each map over its own range"
    # All maps from the smallest cosine to 1, so that colours compare.
    finite = np.concatenate([v[~np.isnan(v)].ravel() for v in values])
    low = float(finite.min()) if len(finite) else 0.0
    look = {"vmin": min(low, 1 - MIN_COLOUR_RANGE), "vmax": 1.0, "cmap": "viridis"}
    return look, "cosine"


def _caption(rows: pl.DataFrame, sites: Mapping[str, list[str]]) -> list[str]:
    """Return the lines at the foot of a sheet. sites: store -> names of the drawn sites."""
    lines = ["cosine of the framed patch with every patch"]
    if "query" in rows.columns and (rows["query"] != rows["image"]).any():
        kind = "clip" if of_clips(rows) else "image"
        lines.append(f"in ...: the patch above with those of another {kind}")
    lines += thinned(rows, sites)
    # Several stores are named beside their maps.
    stores = list(sites)
    if len(stores) == 1:
        lines[0] = f"{shorten(stores[0], 24)}: {lines[0]}"
    return lines
