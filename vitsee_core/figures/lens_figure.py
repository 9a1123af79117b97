"""The model's classifier on every block: curves over depth, and maps of patches. From the columns
of `vitsee lens`' table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.log_ticks import plain_log_ticks
from vitsee_core.plotting import GREY, new_figure, shorten, styled
from vitsee_core.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "lens_top1": "top-1 of the block's tokens",
    "lens_agreement": "agreement with the output",
    "lens_rank": "rank of the label",
}
TILES = 7
TILE_INCHES = 1.25


@styled
def draw_lens(table: Table) -> Figure:
    """One panel per metric over depth, one curve per store with the 95 % interval as a band, and
    dashed what patches say alone; below, where the table has single patches, for each store the
    share of images in which a patch alone has the right class (or the output's), at up to seven
    depths, on one scale of colours."""
    metrics = [metric for metric in LABELS if metric in table.unique("metric")]
    mapped = next((m for m in LABELS if len(_cells(table, m)) and m != "lens_rank"), None)
    of_cells = _cells(table, str(mapped)) if mapped else table.take(np.zeros(len(table), bool))
    # A grid of one cell is no map.
    stores = [store for store, own in of_cells.groups("store") if len({*_places(own)}) > 1]
    height = 3.1 + TILE_INCHES * 1.35 * len(stores)
    figure = new_figure(max(0.4 + 3.6 * len(metrics), 7.6 if stores else 0.0), height)
    ratios = [3.1, *(TILE_INCHES * 1.35 for _ in stores)]
    strips: Any = figure.subfigures(len(ratios), 1, height_ratios=ratios, squeeze=False)
    strips = strips.ravel()
    panels = list(strips[0].subplots(1, len(metrics), squeeze=False)[0])
    pooled = table.take(~_given(table, "row") & ~_given(table, "token"))
    for axes, metric in zip(panels, metrics, strict=True):
        rows = pooled.where(metric=metric)
        draw_depth_curves(axes, rows, ylabel=LABELS[metric], among=pooled)
        _draw_patches(axes, table.where(metric=metric, token="patches"), pooled)
        if metric == "lens_rank":
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.2 * max(2.0, axes.dataLim.y1))
            plain_log_ticks(axes.yaxis)
    add_curve_legend(figure, panels)
    shown = of_cells.take(np.isin(of_cells["store"], stores))
    top = float(np.nanmax(shown["value"].astype(float), initial=0)) or 1.0
    for strip, store in zip(strips[1:], stores, strict=True):
        _draw_maps(strip, of_cells.where(store=store), str(mapped), top)
    return figure


def _given(table: Table, name: str) -> Any:
    """(rows,) whether a column has a value, before and after a CSV."""
    return np.array([v is not None and v == v and v != "" for v in table[name].tolist()], bool)


def _cells(table: Table, metric: str) -> Table:
    rows = table.where(metric=metric)
    return rows.take(_given(rows, "row"))


def _places(rows: Table) -> list[tuple[Any, Any]]:
    return list(zip(rows["row"].tolist(), rows["col"].tolist(), strict=True))


def _draw_patches(axes: Axes, rows: Table, among: Table) -> None:
    from vitsee_core.figures.depth_marks import draw_marks

    if len(rows):
        look: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1}
        draw_marks(axes, rows, among, "value", look)
        axes.plot([], [], color=GREY, **look, label="patches alone")


def _draw_maps(strip: Any, rows: Table, metric: str, top: float) -> None:
    shown = rows.unique("site")
    picks = np.unique(np.round(np.linspace(0, len(shown) - 1, TILES)).astype(int))
    panels = strip.subplots(1, len(picks), squeeze=False)[0]
    for axes, i in zip(panels, picks, strict=True):
        own = rows.where(site=shown[i])
        at = [np.array([int(float(v)) for v in own[name].tolist()]) for name in ("row", "col")]
        values = np.full((at[0].max() + 1, at[1].max() + 1), np.nan)
        values[at[0], at[1]] = own["value"].astype(float)
        image = axes.imshow(values, vmin=0, vmax=top, cmap="viridis", origin="upper")
        axes.grid(False)
        axes.set(xticks=[], yticks=[])
        axes.set_title(shorten(shown[i].removesuffix(".out"), 14), fontsize=8)
    panels[0].set_ylabel(shorten(str(rows["store"][0]), 16))
    bar = strip.colorbar(image, ax=list(panels), pad=0.02)
    bar.set_label("top-1" if metric == "lens_top1" else "agreement")
