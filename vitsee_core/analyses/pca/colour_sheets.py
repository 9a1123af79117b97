"""Sheets of principal components as colours, drawn from `vitsee pca`'s table and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, ClipStrip, of_clips
from vitsee_core.figures.patch_maps.colours import CHANNELS, Colours
from vitsee_core.figures.patch_sheets import (
    Map,
    Sheet,
    SheetLine,
    grid_of,
    layer_name,
    of_sites,
    places_in,
    shown_layers,
    shown_sites,
    thinned,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def draw_colours(table: Table) -> Figure:
    """Draw a line per image: the photograph, then each layer's patches as colours.

    Red, green and blue are the first three principal components. Models stand below one another;
    above each map stand the layer and the share of the variance that these three explain. A clip
    has a line of frames, and below it one per layer. Patches left out as background are black.
    """
    scores = table.frame.filter(metric="score")
    sheet = table.notes.get("sheet", {})
    has_foreground = table.notes.get("foreground", "none") != "none"
    explained = _explained_shares(table.frame)
    clips = of_clips(scores)
    sites = shown_layers(scores) if clips else shown_sites(scores, bar=False)
    colour_scores = of_sites(scores.filter(pl.col("component") <= CHANNELS), sites)
    colours = {}
    for store in sites:
        for site in sites[store]:
            colours[store, site] = _site_colours(table.notes, colour_scores, store, site)
    cells = colour_scores.partition_by("store", "site", "image", as_dict=True)
    lines = []
    clip_lines = []
    # A line per image, a group of tiles per store, a tile per layer.
    for image in scores["image"].unique(maintain_order=True):
        maps = []
        for store in sites:
            tiles = []
            for site in sites[store]:
                patches = cells.get((store, site, image), colour_scores.clear())
                title = layer_name(site)
                share = explained.get((store, site))
                if share:
                    title += f"\n{100 * share:.0f} %"
                # An image without a patch of the foreground has an empty tile, as large as others'.
                grid_rows = patches
                if len(patches) == 0:
                    grid_rows = colour_scores.filter(store=store, site=site)
                shape, edges = grid_of(grid_rows, sheet, site, image)
                rgba = _rgba(patches, shape, colours[store, site], has_foreground)
                tiles.append(Map(title, rgba, edges))
            maps.append((store, tiles))
        lines.append(SheetLine(image, image, maps))
        # The same tiles, as lines of frames.
        strips = [
            ClipStrip(store, tile.title, tile.values, tile.edges)
            for store, tiles in maps
            for tile in tiles
        ]
        clip_lines.append(ClipLine(image, image, strips))
    if clips:
        return ClipSheet(clip_lines, sheet, _caption(table, sites)).draw()
    return Sheet(lines, sheet.get("images", {}), _caption(table, sites)).draw()


def _site_colours(
    notes: Mapping[str, Any], rows: pl.DataFrame, store: str, site: str
) -> Colours:
    """Return the colours of a layer, from the notes, or else from the scores in the table.

    Args:
        notes: the table's notes, which a table from a file without a sidecar lacks.
        rows: scores of the drawn layers.
        store: label of the store.
        site: name of the site.
    """
    note = notes.get("colours", {}).get(store, {}).get(site)
    if note is not None:
        return Colours.read(note)
    scores = rows.filter(store=store, site=site)
    channels = []
    for component in range(1, CHANNELS + 1):
        channels.append(scores.filter(component=component)["value"].to_numpy())
    return Colours.of(np.stack(channels, axis=1))  # of (patches, 3)


def _rgba(
    rows: pl.DataFrame, shape: Sequence[int], colours: Colours, has_foreground: bool
) -> Float:
    """Return the map of an image, (rows, cols, 4), of a clip (frames, rows, cols, 4).

    Args:
        rows: the scores of its patches.
        shape: of the grid.
        colours: how scores become colours.
        has_foreground: whether patches without a score are background, and black; else they are
            transparent.
    """
    scores = np.full((*shape, CHANNELS), np.nan)
    # Components count from 1.
    indices = [rows[name].to_numpy() for name in places_in(rows)]
    scores[*indices, rows["component"].to_numpy() - 1] = rows["value"].to_numpy()
    has_score = ~np.isnan(scores[..., 0])
    # Alpha first: black where it is opaque without a colour.
    rgba = np.zeros((*shape, 4))
    rgba[..., 3] = has_score | has_foreground
    rgba[has_score, :3] = colours(scores[has_score])
    return rgba


def _explained_shares(rows: pl.DataFrame) -> dict[tuple[str, str], float]:
    """Return (store, site) -> the share of the variance of the first three axes."""
    first = rows.filter(pl.col("component") <= 3, metric="explained_variance")
    shares = first.group_by("store", "site").agg(pl.col("value").sum())
    return {(store, site): value for store, site, value in shares.rows()}


def _caption(table: Table, sites: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines below the sheet: what the colours mean, and which layers are left out.

    Args:
        table: the table.
        sites: store -> its drawn sites.
    """
    notes = table.notes
    text = (
        "red, green, blue: the first three principal components of each layer's patches"
    )
    if notes.get("normalise"):
        text += ", normalised"
    lines = [f"{text}; %: their share of the variance"]
    reference = notes.get("aligned_to")
    if reference:
        name = f"{shorten(reference['store'], 20)} {layer_name(reference['site'])}"
        lines.append(f"turned to be nearest to {name}")
    if notes.get("foreground", "none") != "none":
        lines.append(
            "black: background, on the other side of the first component of all patches"
        )
    return lines + thinned(table.frame, sites)
