"""The model's classifier on every block: curves over depth, and maps of patches. From the columns
of `vitsee lens`' table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.log_ticks import plain_log_ticks
from vitsee_core.figures.panels import (
    Grid,
    bars_at_ends,
    count,
    map_axes,
    map_title,
    name_part,
    small_maps,
    stack,
)
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
    metrics = [metric for metric in METRICS if metric in table.unique("metric")]
    mapped = next((m for m in METRICS if len(_cells(table, m)) and m != "lens_rank"), None)
    of_cells = _cells(table, str(mapped)) if mapped else table.take(np.zeros(len(table), bool))
    # A grid of one cell is no map.
    stores = [store for store, own in of_cells.groups("store") if len({*_places(own)}) > 1]
    shown = {store: _picked(of_cells.where(store=store)) for store in stores}
    curves = CurveGrid.of(len(metrics), table)
    maps = [small_maps(len(sites), 2) for sites in shown.values()]
    figure, parts = stack(curves, *maps)
    pooled = table.take(~table.given("row") & ~table.given("token"))
    panels = curves.panels(parts[0], of_metrics(pooled, metrics))
    for axes, metric, rows in panels:
        draw_depth_curves(axes, rows, among=pooled)
        own = table.where(metric=metric, token="patches", store=rows.unique("store"))
        _draw_patches(axes, own, pooled)
        if metric == "lens_rank":
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.2 * max(2.0, axes.dataLim.y1))
            plain_log_ticks(axes.yaxis)
    curves.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    drawn = of_cells.take(np.isin(of_cells["store"], stores))
    top = float(np.nanmax(drawn["value"].astype(float), initial=0)) or 1.0
    for part, grid, (store, sites) in zip(parts[1:], maps, shown.items(), strict=True):
        rows = of_cells.where(store=store)
        name_part(
            part,
            f"{shorten(str(store), 28)}: {metric_words(str(mapped))}, by patch (n = {count(rows)})",
        )
        _draw_maps(grid, part, rows, sites, top)
    return figure


def _picked(rows: Table) -> list[str]:
    """The sites whose maps are drawn, evenly over depth."""
    sites = rows.unique("site")
    picks = np.unique(np.round(np.linspace(0, len(sites) - 1, TILES)).astype(int))
    return [sites[i] for i in picks]


def _cells(table: Table, metric: str) -> Table:
    rows = table.where(metric=metric)
    return rows.take(rows.given("row"))


def _places(rows: Table) -> list[tuple[Any, Any]]:
    return list(zip(rows["row"].tolist(), rows["col"].tolist(), strict=True))


def _draw_patches(axes: Axes, rows: Table, among: Table) -> None:
    from vitsee_core.figures.depth_marks import draw_marks

    if len(rows):
        look: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1}
        draw_marks(axes, rows, among, "value", look)
        axes.plot([], [], color=GREY, **look, label="patches alone")


def _draw_maps(grid: Grid, part: Any, rows: Table, sites: list[str], top: float) -> None:
    panels = grid.axes(part)
    for axes, site in zip(panels, sites, strict=True):
        own = rows.where(site=site)
        at = [np.array([int(float(v)) for v in own[name].tolist()]) for name in ("row", "col")]
        values = np.full((at[0].max() + 1, at[1].max() + 1), np.nan)
        values[at[0], at[1]] = own["value"].astype(float)
        image = axes.imshow(values, vmin=0, vmax=top, origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, panels, image, "share of images")
