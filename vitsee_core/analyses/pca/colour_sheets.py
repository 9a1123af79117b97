"""Sheets of principal components as colours. From the columns of `vitsee pca`'s table and its
notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, Strip, of_clips, shown_layers
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
from vitsee_core.patch_maps.colours import Colours
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def draw_colours(table: Table) -> Figure:
    """One line per image: the photograph, and each layer's patches in the colours of the first
    three principal components, models below one another; above them the layer and how much of the
    variance these three explain. Of clips a line of frames, and one of each layer below it. Patches
    left out as background are black."""
    scores = table.frame.filter(metric="score")
    sheet = table.notes.get("sheet", {})
    of_object = table.notes.get("foreground", "none") != "none"
    explained = _explained(table.frame)
    clips = of_clips(scores)
    sites = shown_layers(scores) if clips else shown_sites(scores, bar=False)
    by_site = scores.partition_by("store", "site", as_dict=True)
    colours = {
        (store, site): _colours(table.notes, by_site[store, site], store, site)
        for store in sites
        for site in sites[store]
    }
    cells = scores.partition_by("store", "site", "image", as_dict=True)
    lines, clip_lines = [], []
    for image in scores["image"].unique(maintain_order=True):
        maps = []
        for store in sites:
            tiles = []
            for site in sites[store]:
                of_site = by_site[store, site]
                own = cells.get((store, site, image), of_site.clear())
                title = layer_name(site)
                if share := explained.get((store, site)):
                    title += f"\n{100 * share:.0f} %"
                # An image without a patch of the foreground has an empty tile.
                shape, edges = grid_of(own if len(own) else of_site, sheet, site, image)
                values = _rgb(own, shape, colours[store, site], of_object)
                tiles.append(Map(title, values, edges))
            maps.append((store, tiles))
        lines.append(SheetLine(image, image, maps))
        strips = [
            Strip(store, tile.title, tile.values, tile.edges)
            for store, tiles in maps
            for tile in tiles
        ]
        clip_lines.append(ClipLine(image, image, strips))
    if clips:
        return ClipSheet(clip_lines, sheet, _caption(table, sites)).draw()
    return Sheet(lines, sheet.get("images", {}), _caption(table, sites)).draw()


def _colours(notes: Mapping[str, Any], rows: pl.DataFrame, store: str, site: str) -> Colours:
    """The colours of a layer: from the notes, else from the scores in the table."""
    own = notes.get("colours", {}).get(store, {}).get(site)
    if own is not None:
        return Colours.read(own)
    by_channel = [rows.filter(component=c)["value"].to_numpy() for c in (1, 2, 3)]
    return Colours.of(np.stack(by_channel, 1))


def _rgb(rows: pl.DataFrame, shape: Sequence[int], colours: Colours, of_object: bool) -> Float:
    """(rows, cols, 4), of clips (frames, rows, cols, 4): what does not count is black, or nothing
    where all patches should."""
    scores = np.stack([place_values(rows.filter(component=c), shape) for c in (1, 2, 3)], -1)
    there = ~np.isnan(scores[..., 0])
    found = np.zeros((*shape, 4))
    found[..., 3] = there | of_object
    found[there, :3] = colours(scores[there])
    return found


def _explained(rows: pl.DataFrame) -> dict[tuple[str, str], float]:
    """(store, site) -> share of the variance of the first three axes."""
    first = rows.filter(pl.col("component") <= 3, metric="explained_variance")
    shares = first.group_by("store", "site").agg(pl.col("value").sum())
    return {(store, site): value for store, site, value in shares.rows()}


def _caption(table: Table, sites: Mapping[str, Sequence[str]]) -> list[str]:
    notes = table.notes
    text = "red, green, blue: the first three principal components of each layer's patches"
    if notes.get("normalise"):
        text += ", normalised"
    lines = [f"{text}; %: their share of the variance"]
    if aligned := notes.get("aligned_to"):
        of = f"{shorten(aligned['store'], 20)} {layer_name(aligned['site'])}"
        lines.append(f"turned to be nearest to {of}")
    if notes.get("foreground", "none") != "none":
        lines.append("black: background, on the other side of the first component of all patches")
    return lines + thinned(table.frame, sites)
