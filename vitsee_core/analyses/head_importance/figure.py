"""The figure of head importance: each head's importance against its attention distance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitsee_core.figures.panels import PanelGrid, colour_bar, note_count, stack
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metric that has a panel -> the rank correlation written below it.
PANEL_CORRELATIONS = {"kl": "spearman_kl", "top1_difference": "spearman_top1"}
LOST = "top-1 accuracy lost"


@styled
def plot(table: Table) -> Figure:
    """Draw one panel per store and metric: each head's importance against its attention distance.

    Every dot is a head with its 95 % interval, coloured by its block. Below the axis stand the rank
    correlations.
    """
    from matplotlib.ticker import MaxNLocator

    table_metrics = table.frame["metric"]
    metrics = [metric for metric in PANEL_CORRELATIONS if metric in table_metrics]
    # Only if it was all that was requested: agreement tells less than either of them.
    if not metrics:
        metrics = ["agreement"]
    stores = table.frame.partition_by("store", maintain_order=True)
    grid = PanelGrid(len(stores) * len(metrics), width=24, widest=36, height=17, most=2)
    figure, (box,) = stack(grid)
    remaining_axes = iter(grid.axes(box))
    for store_rows in stores:
        for metric in metrics:
            axes = next(remaining_axes)
            metric_rows = store_rows.filter(metric=metric)
            if len(metric_rows) == 0:  # accuracy of a store without labels
                axes.set_visible(False)
                continue
            image = _draw_heads(axes, metric_rows, store_rows)
            _label_x_axis(axes, store_rows, PANEL_CORRELATIONS.get(metric, ""))
            axes.set_title(shorten(store_rows["store"][0], 24))
            colour_bar(axes, image, "block", ticks=MaxNLocator(5, integer=True))
    return figure


def _draw_heads(axes: Axes, metric_rows: pl.DataFrame, store_rows: pl.DataFrame) -> Any:
    """Draw a dot per head; return matplotlib's collection, for the colour bar.

    Args:
        axes: the panel.
        metric_rows: one store's rows of the metric that is drawn.
        store_rows: all rows of that store, among them the distances.
    """
    # A table has a row per head and metric: here a column of each.
    distance = store_rows.filter(metric="distance_px").select("site", "head", x="value")
    heads = metric_rows.join(
        distance, on=["site", "head"], how="left", maintain_order="left"
    )
    metric = str(heads["metric"][0])
    # `top1_difference` is below 0 for a loss; drawn, more important heads are higher up.
    is_loss = metric == "top1_difference"
    sign = -1 if is_loss else 1
    # (heads, 4); of a loss `low` is then above `high`, which a line does not mind.
    numbers = heads.select("x", pl.col("value", "low", "high") * sign).to_numpy()
    x, value, low, high = numbers.T
    axes.axhline(0, color=GREY, linestyle=(0, (5, 3)), linewidth=1, zorder=1)
    axes.vlines(x, low, high, color=GREY, linewidth=0.7, zorder=2)
    image = axes.scatter(
        x, value, c=heads["depth"].to_numpy(), cmap="viridis", s=14, zorder=3
    )
    axes.set_ylabel(LOST if is_loss else metric_words(metric))
    note_count(axes, heads)
    return image


def _label_x_axis(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
    """Label the x axis, with the rank correlation and the one within blocks below the words."""
    lines = [metric_words("distance_px")]
    correlations = {metric: "rank correlation", f"{metric}_within": "within blocks"}
    for name, words in correlations.items():
        measured_rows = rows.filter(pl.col("value").is_not_null(), metric=name)
        if len(measured_rows) == 0:
            continue
        value, low, high = measured_rows.select("value", "low", "high").row(0)
        line = f"{words} {value:.2f}"
        if low is not None:
            line += f" ({low:.2f} to {high:.2f})"
        lines.append(line)
    axes.set_xlabel("\n".join(lines))
