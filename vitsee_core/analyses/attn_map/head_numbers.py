"""The figure of a table with one number per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.head_tiles import NOT_FROM_ZERO, colour_range
from vitsee_core.figures.panels import colour_bar, handles_of, legend_below, note_count, panels
from vitsee_core.figures.plotting import colour, ink, integer_ticks
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table


def draw_numbers(table: Table) -> Figure:
    """One line of panels per store. Left: every head with its 95 % interval against depth, the
    layers' means as a line. Right: the same by layer and head. Both start at 0, or at the least
    value where all are nearly equal. Call it inside a function decorated with `styled`."""
    stores = [rows for _, rows in table.groups("store")]
    figure, every = panels(2 * len(stores), most=2, width=18, widest=28, height=16)
    for left, right, rows in zip(every[::2], every[1::2], stores, strict=True):
        _draw_store(left, right, rows)
    legend_below(figure, handles_of(every))
    return figure


def _draw_store(left: Axes, right: Axes, table: Table) -> None:
    metric = str(table["metric"][0])
    depths = np.unique(table["depth"])
    error = np.abs(np.stack([table["value"] - table["low"], table["high"] - table["value"]]))
    look: dict[str, Any] = {
        "color": colour(0),
        "elinewidth": 0.8,
        "alpha": 0.7,
        "label": "head, 95 % interval",
    }
    x, y = beside_each_other(table), table["value"]
    left.errorbar(x, y, yerr=np.nan_to_num(error), fmt="o", **look)
    draw_layer_means(left, table)
    integer_ticks(left, depths)
    left.set_xlabel("block")
    left.set_ylabel(metric_words(metric))
    left.set_title(shorten(str(table["store"][0]), 24))
    note_count(left, table)
    n_heads = int(table["head"].max()) + 1
    values = np.full((len(depths), n_heads), np.nan)
    values[np.searchsorted(depths, table["depth"]), table["head"]] = table["value"]
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
    note_count(right, table)
    unit = metric_words(metric)
    colour_bar(right, image, f"{unit} ({NOT_FROM_ZERO})" if lowest > 0 else unit)


def beside_each_other(rows: Table) -> Any:
    """The x of every head: side by side within the block."""
    n = int(rows["head"].max()) + 1
    return rows["depth"] + (rows["head"] - (n - 1) / 2) * 0.6 / max(n, 1)


def layer_means(rows: Table, depths: Any, empty: float = np.nan) -> Any:
    """(depths,) the mean value of each layer's heads, `empty` where none has one."""
    values = rows["value"].astype(float)
    known = [values[(rows["depth"] == depth) & ~np.isnan(values)] for depth in depths]
    return np.array([own.mean() if len(own) else empty for own in known])


def draw_layer_means(axes: Axes, rows: Table) -> None:
    depths = np.unique(rows["depth"])
    axes.plot(depths, layer_means(rows, depths), color=ink(), label="layer mean")
