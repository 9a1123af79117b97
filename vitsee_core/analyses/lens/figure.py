"""The figure of the lens: metrics against depth, and maps of single patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitsee_core.analyses.lens.store_lens import METRICS
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
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
from vitsee_core.figures.plotting import GREY, plain_log_ticks, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words, site_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_MAPS = 7  # depths of which maps are drawn


@styled
def plot(table: Table) -> Figure:
    """Draw each metric against relative depth, and maps of single patches.

    There is one panel per metric and one curve per store, with the 95 % interval as a band; the
    mean over patches alone is dashed. Below, where the table has single patches, are maps of each
    store: the share of images in which a patch alone has the right class (or the output's), at up
    to seven depths, on one scale of colours.
    """
    rows = table.frame
    metrics = [metric for metric in METRICS if metric in rows["metric"]]
    patch_rows = rows.filter(pl.col("row").is_not_null())
    # Whether the label is right, if there are labels; else, agreement with the model's output.
    map_metric = ""
    for metric in ("lens_top1", "lens_agreement"):
        if metric in patch_rows["metric"]:
            map_metric = metric
            break
    maps_of_stores = []
    sites_of_stores = []
    for store_rows in patch_rows.filter(metric=map_metric).partition_by(
        "store", maintain_order=True
    ):
        # A grid of one cell is not a map.
        if store_rows.select("row", "col").n_unique() > 1:
            maps_of_stores.append(store_rows)
            site_names = [*store_rows["site"].unique(maintain_order=True)]
            sites_of_stores.append(evenly(site_names, MAX_MAPS))
    # The room that each part needs, then the figure, then what is drawn in it.
    curve_grid = CurveGrid.of(len(metrics), rows)
    map_grids = [small_maps(len(sites), 2) for sites in sites_of_stores]
    figure, subfigures = stack(curve_grid, *map_grids)
    pooled = rows.filter(pl.col("row").is_null(), pl.col("token").is_null())
    panels = curve_grid.panels(subfigures[0], of_metrics(pooled, metrics))
    for axes, metric, panel_rows in panels:
        draw_depth_curves(axes, panel_rows, among=pooled)
        in_panel = pl.col("store").is_in([*panel_rows["store"]])
        patch_means = rows.filter(in_panel, metric=metric, token="patches")
        _draw_patch_means(axes, patch_means, pooled)
        if metric == "lens_rank":
            # From just below rank 1, even if all ranks are 1.
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.2 * max(2.0, axes.dataLim.y1))
            plain_log_ticks(axes.yaxis)
    curve_grid.finish(panels)
    add_curve_legend(figure, [axes for axes, _, _ in panels])
    # One scale of colours for all maps.
    top = 0.0
    for store_rows in maps_of_stores:
        top = max(top, store_rows["value"].fill_null(0).to_numpy().max(initial=0))
    for subfigure, grid, store_rows, sites in zip(
        subfigures[1:], map_grids, maps_of_stores, sites_of_stores, strict=True
    ):
        title = f"{shorten(store_rows['store'][0], 28)}: {metric_words(map_metric)}"
        name_part(subfigure, f"{title}, by patch (n = {count(store_rows)})")
        _draw_patch_maps(grid, subfigure, store_rows, sites, top or 1.0)
    return figure


def _draw_patch_means(axes: Axes, rows: pl.DataFrame, among: pl.DataFrame) -> None:
    """Draw the mean over patches alone, dashed, with a legend entry if there is one.

    Args:
        axes: where to draw.
        rows: rows of one metric about the mean over patches.
        among: rows of the curves, which decide on colours.
    """
    from vitsee_core.figures.depth_curves import draw_marks

    if len(rows):
        style: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1}
        draw_marks(axes, rows, among, "value", style)
        # Without points: the entry of the legend, grey for all stores.
        axes.plot([], [], color=GREY, **style, label="patches alone")


def _draw_patch_maps(
    grid: PanelGrid, subfigure: Any, rows: pl.DataFrame, sites: list[str], top: float
) -> None:
    """Draw the maps of some sites of one store.

    Args:
        grid: the maps' room.
        subfigure: the part of the figure that has this room.
        rows: the store's rows about single patches.
        sites: names of the sites, a map each.
        top: colours go from 0 to this share.
    """
    panels = grid.axes(subfigure)
    for axes, site in zip(panels, sites, strict=True):
        site_rows = rows.filter(site=site)
        last_row, last_column = site_rows.select("row", "col").max().row(0)
        values = place_values(site_rows, [last_row + 1, last_column + 1])
        image = axes.imshow(values, vmin=0, vmax=top, origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, panels, image, "share of images")
