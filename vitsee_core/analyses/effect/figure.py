"""The figure of effects: the outputs' metrics by store, and CKA and cosines against depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.curve_looks import store_looks
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import INTERVAL, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    handles_of,
    legend_below,
    note_count,
    stack,
)
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTPUTS = ("top1_difference", "agreement", "kl")
LAYERS = ("cka", "cosine")
# Metric -> its value if nothing changed.
UNCHANGED = {"top1_difference": 0.0, "agreement": 1.0, "kl": 0.0}
# Heights in ems: one store's line, and what stands above and below all lines.
LINE = 1.7
MARGINS = 5.5
MAX_LETTERS = 22
# Below this value of CKA or cosine the axis begins at 0.
FAR = 0.5


@styled
def plot(table: Table) -> Figure:
    """Draw the outputs' metrics above and CKA and cosine over depth below.

    Each metric of the outputs has a panel with a line per changed store and its 95 % interval, and
    the unchanged model dashed. CKA and cosine have a panel each, with a curve per changed store.
    Metrics that the table does not contain are left out.
    """
    rows = table.frame.filter(pl.col("base").is_not_null())
    output_metrics = [metric for metric in OUTPUTS if metric in rows["metric"]]
    layer_metrics = [metric for metric in LAYERS if metric in rows["metric"]]
    outputs_frame = rows.filter(pl.col("metric").is_in(output_metrics))
    layer_rows = rows.filter(pl.col("metric").is_in(layer_metrics))
    n_stores = outputs_frame["store"].n_unique()
    output_grid = PanelGrid(len(output_metrics), height=LINE * n_stores + MARGINS)
    layer_grid = CurveGrid.of(len(layer_metrics), layer_rows)
    # A table of outputs alone, or of sites alone, has one of the two grids.
    grids: list[PanelGrid | CurveGrid] = []
    if output_metrics:
        grids.append(output_grid)
    if layer_metrics:
        grids.append(layer_grid)
    figure, boxes = stack(*grids)
    all_axes: list[Axes] = []
    if output_metrics:
        looks = store_looks(rows)
        output_axes = output_grid.axes(boxes[0])
        for axes, metric in zip(output_axes, output_metrics, strict=True):
            _draw_output_metric(axes, rows.filter(metric=metric), metric, looks)
            all_axes.append(axes)
        # Only the first panel of each line names the stores.
        for number, axes in enumerate(output_axes):
            if number % output_grid.across:
                axes.tick_params(axis="y", labelleft=False)
    if layer_metrics:
        panels = layer_grid.panels(boxes[-1], of_metrics(layer_rows, layer_metrics))
        for axes, _, metric_rows in panels:
            draw_depth_curves(axes, metric_rows, among=layer_rows)
            lowest = min(axes.dataLim.y0, 0.98)
            # From 0 on, unless all curves are so near 1 that their differences would be hidden.
            bottom = lowest - 0.1 * (1 - lowest)
            if lowest < FAR:
                bottom = min(0.0, lowest)
            axes.set_ylim(bottom, 1 + 0.04 * (1 - lowest))
            all_axes.append(axes)
        layer_grid.finish(panels)
    legend_below(figure, handles_of(all_axes))
    return figure


def _draw_output_metric(
    axes: Axes, rows: pl.DataFrame, metric: str, looks: dict[str, dict[str, object]]
) -> None:
    """Draw one metric of the outputs: a line per store with its value and 95 % interval.

    Args:
        axes: the panel.
        rows: one row per changed store.
        metric: one of `OUTPUTS`.
        looks: store -> keywords of its line, as `store_looks` returns them.
    """
    stores = rows["store"].unique(maintain_order=True)
    value, low, high = rows.select("value", "low", "high").to_numpy().T  # (stores,)
    axes.axvline(
        UNCHANGED[metric],
        color=GREY,
        linestyle=(0, (5, 3)),
        linewidth=1,
        zorder=1,
        label="unchanged",
    )
    # An empty line, so that the legend explains the bars once and in grey.
    axes.plot([], [], color=GREY, solid_capstyle="butt", label=f"bars: {INTERVAL}")
    for y, store in enumerate(stores):
        look = looks[store]
        axes.plot([low[y], high[y]], [y, y], color=look["color"], solid_capstyle="butt")
        axes.plot(
            [value[y]], [y], color=look["color"], marker=look["marker"], linestyle="none"
        )
    axes.set_yticks(np.arange(len(stores)), [shorten(s, MAX_LETTERS) for s in stores])
    axes.set_ylim(len(stores) - 0.4, -0.6)  # the first store on top
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(metric_words(metric))
    note_count(axes, rows)
