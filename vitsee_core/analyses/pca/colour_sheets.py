"""Sheets of principal components as colours. From the columns of `vitsee pca`'s table and its
notes."""

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
    shown = of_sites(scores.filter(pl.col("component") <= CHANNELS), sites)
    colours = {
        (store, site): _colours(table.notes, shown, store, site)
        for store in sites
        for site in sites[store]
    }
    cells = shown.partition_by("store", "site", "image", as_dict=True)
    lines = []
    clip_lines = []
    for image in scores["image"].unique(maintain_order=True):
        maps = []
        for store in sites:
            tiles = []
            for site in sites[store]:
                own = cells.get((store, site, image), shown.clear())
                title = layer_name(site)
                if share := explained.get((store, site)):
                    title += f"\n{100 * share:.0f} %"
                # An image without a patch of the foreground has an empty tile.
                known = own if len(own) else shown.filter(store=store, site=site)
                shape, edges = grid_of(known, sheet, site, image)
                values = _rgb(own, shape, colours[store, site], of_object)
                tiles.append(Map(title, values, edges))
            maps.append((store, tiles))
        lines.append(SheetLine(image, image, maps))
        strips = [
            ClipStrip(store, tile.title, tile.values, tile.edges)
            for store, tiles in maps
            for tile in tiles
        ]
        clip_lines.append(ClipLine(image, image, strips))
    if clips:
        return ClipSheet(clip_lines, sheet, _caption(table, sites)).draw()
    return Sheet(lines, sheet.get("images", {}), _caption(table, sites)).draw()


def _colours(
    notes: Mapping[str, Any], rows: pl.DataFrame, store: str, site: str
) -> Colours:
    """The colours of a layer: from the notes, else from the scores in the table."""
    said = notes.get("colours", {}).get(store, {}).get(site)
    if said is not None:
        return Colours.read(said)
    own = rows.filter(store=store, site=site)
    by_channel = [own.filter(component=c)["value"].to_numpy() for c in (1, 2, 3)]
    return Colours.of(np.stack(by_channel, 1))


def _rgb(
    rows: pl.DataFrame, shape: Sequence[int], colours: Colours, of_object: bool
) -> Float:
    """(rows, cols, 4), of clips (frames, rows, cols, 4): what does not count is black, or nothing
    where all patches should."""
    scores = np.full((*shape, CHANNELS), np.nan)
    at = [rows[name].to_numpy() for name in places_in(rows)]
    scores[*at, rows["component"].to_numpy() - 1] = rows["value"].to_numpy()
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
    text = (
        "red, green, blue: the first three principal components of each layer's patches"
    )
    if notes.get("normalise"):
        text += ", normalised"
    lines = [f"{text}; %: their share of the variance"]
    if aligned := notes.get("aligned_to"):
        of = f"{shorten(aligned['store'], 20)} {layer_name(aligned['site'])}"
        lines.append(f"turned to be nearest to {of}")
    if notes.get("foreground", "none") != "none":
        lines.append(
            "black: background, on the other side of the first component of all patches"
        )
    return lines + thinned(table.frame, sites)
