"""The model's classifier on every block: curves over depth, and maps of patches. From the columns
of `vitsee lens`' table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.log_ticks import plain_log_ticks
from vitsee_core.figures.panels import (
    Grid,
    bars_at_ends,
    count,
    evenly,
    map_axes,
    map_title,
    name_part,
    small_maps,
    stack,
)
from vitsee_core.figures.patch_sheets import place_values
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words, site_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = ("lens_top1", "lens_agreement", "lens_rank")
TILES = 7


@styled
def draw_lens(table: Table) -> Figure:
    """One panel per metric over depth, one curve per store with the 95 % interval as a band, and
    dashed what patches say alone; below, where the table has single patches, for each store the
    share of images in which a patch alone has the right class (or the output's), at up to seven
    depths, on one scale of colours."""
    rows = table.frame
    metrics = [metric for metric in METRICS if metric in rows["metric"]]
    cells = rows.filter(pl.col("row").is_not_null())
    mapped = next((m for m in METRICS if m in cells["metric"] and m != "lens_rank"), "")
    stores = cells.filter(metric=mapped).partition_by("store", maintain_order=True)
    # A grid of one cell is no map.
    stores = [own for own in stores if own.select("row", "col").n_unique() > 1]
    shown = [_picked(own) for own in stores]
    curves = CurveGrid.of(len(metrics), rows)
    maps = [small_maps(len(sites), 2) for sites in shown]
    figure, parts = stack(curves, *maps)
    pooled = rows.filter(pl.col("row").is_null(), pl.col("token").is_null())
    panels = curves.panels(parts[0], of_metrics(pooled, metrics))
    for axes, metric, own in panels:
        draw_depth_curves(axes, own, among=pooled)
        of_stores = pl.col("store").is_in([*own["store"]])
        _draw_patches(axes, rows.filter(of_stores, metric=metric, token="patches"), pooled)
        if metric == "lens_rank":
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.2 * max(2.0, axes.dataLim.y1))
            plain_log_ticks(axes.yaxis)
    curves.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    tops = (own["value"].fill_null(0).to_numpy().max(initial=0) for own in stores)
    top = max(tops, default=0) or 1.0
    for part, grid, own, sites in zip(parts[1:], maps, stores, shown, strict=True):
        who = f"{shorten(own['store'][0], 28)}: {metric_words(mapped)}"
        name_part(part, f"{who}, by patch (n = {count(own)})")
        _draw_maps(grid, part, own, sites, top)
    return figure


def _picked(rows: pl.DataFrame) -> list[str]:
    """The sites whose maps are drawn, evenly over depth."""
    return evenly(rows["site"].unique(maintain_order=True).to_list(), TILES)


def _draw_patches(axes: Axes, rows: pl.DataFrame, among: pl.DataFrame) -> None:
    from vitsee_core.figures.depth_marks import draw_marks

    if len(rows):
        look: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1}
        draw_marks(axes, rows, among, "value", look)
        axes.plot([], [], color=GREY, **look, label="patches alone")


def _draw_maps(grid: Grid, part: Any, rows: pl.DataFrame, sites: list[str], top: Any) -> None:
    panels = grid.axes(part)
    for axes, site in zip(panels, sites, strict=True):
        own = rows.filter(site=site)
        shape = [largest + 1 for largest in own.select("row", "col").max().row(0)]
        image = axes.imshow(place_values(own, shape), vmin=0, vmax=top, origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, panels, image, "share of images")
