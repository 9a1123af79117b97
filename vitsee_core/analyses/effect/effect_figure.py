"""The figure of `vitsee effect`: what each change does to the outputs, beside each other, and to
the layers over depth. It is drawn from the table's columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from vitsee_core.figures.curve_looks import store_looks
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import INTERVAL, draw_depth_curves
from vitsee_core.figures.panels import Grid, handles_of, legend_below, note_count, stack
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

OUTPUTS = ("top1_difference", "agreement", "kl")
LAYERS = ("cka", "cosine")
UNCHANGED = {"top1_difference": 0.0, "agreement": 1.0, "kl": 0.0}
LINE, MARGINS = 1.7, 5.5  # ems: of a store's line, and above and below all
MOST_LETTERS = 22
FAR = 0.5


@styled
def draw_effect(table: Table) -> Figure:
    """One panel per metric of the outputs, a line for each changed store with its 95 % interval,
    the unchanged model dashed; below, one panel each for CKA and cosine over depth, one curve per
    changed store. What the table does not contain is left out."""
    rows = table.frame.filter(pl.col("base").is_not_null())
    outputs = [metric for metric in OUTPUTS if metric in rows["metric"]]
    layers = [metric for metric in LAYERS if metric in rows["metric"]]
    of_outputs, of_layers = (rows.filter(pl.col("metric").is_in(m)) for m in (outputs, layers))
    n_stores = of_outputs["store"].n_unique()
    beside = Grid(len(outputs), height=LINE * n_stores + MARGINS)
    below = CurveGrid.of(len(layers), of_layers)
    figure, parts = stack(*([beside] if outputs else []), *([below] if layers else []))
    every: list[Axes] = []
    if outputs:
        looks = store_looks(rows)
        for axes, metric in zip(beside.axes(parts[0]), outputs, strict=True):
            _draw_outputs(axes, rows.filter(metric=metric), metric, looks)
            every.append(axes)
        for number, axes in enumerate(every):
            if number % beside.across:
                axes.tick_params(axis="y", labelleft=False)
    if layers:
        panels = below.panels(parts[-1], of_metrics(of_layers, layers))
        for axes, _, own in panels:
            draw_depth_curves(axes, own, among=of_layers)
            low = min(axes.dataLim.y0, 0.98)
            # From 0 on, unless that would hide what there is to see.
            axes.set_ylim(
                min(0.0, low) if low < FAR else low - 0.1 * (1 - low), 1 + 0.04 * (1 - low)
            )
            every.append(axes)
        below.finish(panels)
    legend_below(figure, handles_of(every))
    return figure


def _draw_outputs(
    axes: Axes, rows: pl.DataFrame, metric: str, looks: dict[str, dict[str, object]]
) -> None:
    stores = rows["store"].unique(maintain_order=True)
    value, low, high = rows.select("value", "low", "high").to_numpy().T
    axes.axvline(UNCHANGED[metric], color=GREY, linestyle=(0, (5, 3)), linewidth=1, zorder=1,
                 label="unchanged")  # fmt: skip
    axes.plot([], [], color=GREY, solid_capstyle="butt", label=f"bars: {INTERVAL}")
    for y, store in enumerate(stores):
        look = looks[store]
        axes.plot([low[y], high[y]], [y, y], color=look["color"], solid_capstyle="butt")
        axes.plot([value[y]], [y], color=look["color"], marker=look["marker"], linestyle="none")
    axes.set_yticks(np.arange(len(stores)), [shorten(s, MOST_LETTERS) for s in stores])
    axes.set_ylim(len(stores) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(metric_words(metric))
    note_count(axes, rows)
