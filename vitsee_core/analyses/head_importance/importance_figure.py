"""Heads by how far they look and how much the answer needs them. From the columns of `vitsee
head-importance`' table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from vitsee_core.figures.panels import Grid, colour_bar, note_count, stack
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

SHOWN = {"kl": "spearman_kl", "top1_difference": "spearman_top1"}
LOST = "top-1 accuracy lost"


@styled
def draw_importance(table: Table) -> Figure:
    """One panel per store and metric: what the answer loses without each head against the head's
    mean attention distance, with 95 % intervals, coloured by block; below the axis the rank
    correlations."""
    from matplotlib.ticker import MaxNLocator

    there = table.frame["metric"]
    metrics = [metric for metric in SHOWN if metric in there] or ["agreement"]
    stores = table.frame.partition_by("store", maintain_order=True)
    grid = Grid(len(stores) * len(metrics), width=24, widest=36, height=17, most=2)
    figure, (box,) = stack(grid)
    every = iter(grid.axes(box))
    for rows in stores:
        for metric in metrics:
            axes = next(every)
            if len(own := rows.filter(metric=metric)):
                image = _draw(axes, own, rows)
                _explain(axes, rows, SHOWN.get(metric, ""))
                axes.set_title(shorten(rows["store"][0], 24))
                colour_bar(axes, image, "block", ticks=MaxNLocator(5, integer=True))
            else:
                axes.set_visible(False)
    return figure


def _draw(axes: Axes, own: pl.DataFrame, rows: pl.DataFrame) -> Any:
    far = rows.filter(metric="distance_px").select("site", "head", x="value")
    own = own.join(far, on=["site", "head"], how="left", maintain_order="left")
    metric = str(own["metric"][0])
    sign = -1 if metric == "top1_difference" else 1
    x, value, low, high = own.select("x", pl.col("value", "low", "high") * sign).to_numpy().T
    axes.axhline(0, color=GREY, linestyle=(0, (5, 3)), linewidth=1, zorder=1)
    axes.vlines(x, low, high, color=GREY, linewidth=0.7, zorder=2)
    image = axes.scatter(x, value, c=own["depth"].to_numpy(), cmap="viridis", s=14, zorder=3)
    axes.set_ylabel(metric_words(metric) if sign > 0 else LOST)
    note_count(axes, own)
    return image


def _explain(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
    """The x axis with the rank correlations below it."""
    lines = [metric_words("distance_px")]
    for name, words in ((metric, "rank correlation"), (f"{metric}_within", "within blocks")):
        known = rows.filter(pl.col("value").is_not_null(), metric=name)
        for value, low, high in known.select("value", "low", "high").rows()[:1]:
            spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
            lines.append(f"{words} {value:.2f}{spread}")
    axes.set_xlabel("\n".join(lines))
