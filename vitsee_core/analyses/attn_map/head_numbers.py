"""The figure of a table with one number per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.figures.head_tiles import NOT_FROM_ZERO, colour_range
from vitsee_core.figures.panels import colour_bar, handles_of, legend_below, note_count, panels
from vitsee_core.figures.plotting import colour, ink, integer_ticks
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_numbers(every_row: pl.DataFrame) -> Figure:
    """One line of panels per store. Left: every head with its 95 % interval against depth, the
    layers' means as a line. Right: the same by layer and head. Both start at 0, or at the least
    value where all are nearly equal. Call it inside a function decorated with `styled`."""
    stores = every_row.partition_by("store", maintain_order=True)
    figure, every = panels(2 * len(stores), most=2, width=18, widest=28, height=16)
    for left, right, rows in zip(every[::2], every[1::2], stores, strict=True):
        _draw_store(left, right, rows)
    legend_below(figure, handles_of(every))
    return figure


def _draw_store(left: Axes, right: Axes, rows: pl.DataFrame) -> None:
    metric = rows["metric"][0]
    depths = rows["depth"].unique().sort().to_numpy()
    y = rows["value"].to_numpy()
    error = np.abs(np.stack([y - rows["low"].to_numpy(), rows["high"].to_numpy() - y]))
    look: dict[str, Any] = {
        "color": colour(0),
        "elinewidth": 0.8,
        "alpha": 0.7,
        "label": "head, 95 % interval",
    }
    left.errorbar(beside_each_other(rows), y, yerr=np.nan_to_num(error), fmt="o", **look)
    draw_layer_means(left, rows)
    integer_ticks(left, depths)
    left.set_xlabel("block")
    left.set_ylabel(metric_words(metric))
    left.set_title(shorten(rows["store"][0], 24))
    note_count(left, rows)
    n_heads = rows["head"].to_numpy().max() + 1
    values = np.full((len(depths), n_heads), np.nan)
    values[np.searchsorted(depths, rows["depth"]), rows["head"]] = y
    lowest, highest = colour_range(values)
    if lowest == 0:
        left.set_ylim(bottom=0)
    image = right.imshow(values, vmin=lowest, vmax=highest, origin="upper", aspect="auto")
    right.grid(False)
    most = 14
    shown = range(0, len(depths), -(-len(depths) // most))
    right.set_yticks(shown, [str(depths[i]) for i in shown])
    right.set_xticks(range(0, n_heads, -(-n_heads // most)))
    right.set_xlabel("head")
    right.set_ylabel("block")
    note_count(right, rows)
    unit = metric_words(metric)
    colour_bar(right, image, f"{unit} ({NOT_FROM_ZERO})" if lowest > 0 else unit)


def beside_each_other(rows: pl.DataFrame) -> pl.Series:
    """The x of every row, so that the heads of a block stand side by side around its depth."""
    n = rows["head"].to_numpy().max(initial=0) + 1
    return rows["depth"] + (rows["head"] - (n - 1) / 2) * 0.6 / n


def layer_means(rows: pl.DataFrame, depths: Any) -> pl.Series:
    """The mean value of the heads of each layer, (depths,); null where none has a value."""
    means = rows.group_by("depth").agg(pl.col("value").mean())
    every = pl.DataFrame({"depth": depths})
    return every.join(means, on="depth", how="left", maintain_order="left")["value"]


def draw_layer_means(axes: Axes, rows: pl.DataFrame) -> None:
    depths = rows["depth"].unique().sort()
    axes.plot(depths, layer_means(rows, depths), color=ink(), label="layer mean")
