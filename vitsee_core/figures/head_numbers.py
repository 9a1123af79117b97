"""The figure of a table with one number per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.head_tiles import NOT_FROM_ZERO, colour_range
from vitsee_core.plotting import (
    COLOURS,
    integer_ticks,
    legend_above_data,
    new_figure,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table

UNITS = {
    "prefix_mass": "attention to prefix tokens (share)",
    "entropy": "entropy of attention (nats)",
}


def draw_numbers(table: Table) -> Figure:
    """One line of panels per store. Left: every head with its 95 % interval against depth, the
    layers' means as a line. Right: the same by layer and head. Both start at 0, or at the least
    value where all are nearly equal. Call it inside a function decorated with `styled`."""
    stores = [rows for _, rows in table.groups("store")]
    most_heads = max(int(rows["head"].max()) + 1 for rows in stores)
    cell = min(0.34, max(0.16, 8 / max(most_heads, 1)))
    heights = [max(3.1, 1.2 + cell * len(rows.unique("depth"))) for rows in stores]
    figure = new_figure(4.3 + 2.0 + cell * most_heads, sum(heights))
    lines = figure.subplots(
        len(stores), 2, squeeze=False, width_ratios=[4.0, 1.9 + cell * most_heads],
        height_ratios=heights,
    )  # fmt: skip
    for (left, right), rows in zip(lines, stores, strict=True):
        _draw_store(figure, left, right, rows)
    return figure


def _draw_store(figure: Figure, left: Axes, right: Axes, table: Table) -> None:
    metric = str(table["metric"][0])
    depths = np.unique(table["depth"])
    n_heads = int(table["head"].max()) + 1
    offsets = (table["head"] - (n_heads - 1) / 2) * 0.6 / max(n_heads, 1)
    error = np.abs(np.stack([table["value"] - table["low"], table["high"] - table["value"]]))
    left.errorbar(
        table["depth"] + offsets,
        table["value"],
        yerr=np.nan_to_num(error),
        fmt="o",
        markersize=3,
        color=COLOURS[0],
        elinewidth=0.8,
        alpha=0.7,
        label="head, 95 % interval",
    )
    layers = [table["value"][table["depth"] == depth] for depth in depths]
    means = [v[~np.isnan(v)].mean() if (~np.isnan(v)).any() else np.nan for v in layers]
    left.plot(depths, means, color="black", label="layer mean")
    integer_ticks(left, depths)
    left.set_xlabel("block")
    left.set_ylabel(UNITS.get(metric, metric))
    left.set_title(f"{shorten(str(table['store'][0]), 24)} (n = {table['n_images'].max()})")
    values = np.full((len(depths), n_heads), np.nan)
    values[np.searchsorted(depths, table["depth"]), table["head"]] = table["value"]
    lowest, highest = colour_range(values)
    legend_above_data(left, 2, from_zero=lowest == 0)
    image = right.imshow(values, vmin=lowest, vmax=highest, origin="upper", aspect="equal")
    right.grid(False)
    labels = [shorten(str(table["site"][table["depth"] == d][0]), 18) for d in depths]
    right.set_yticks(range(len(depths)), labels)
    every = -(-n_heads // 16)
    right.set_xticks(range(0, n_heads, every))
    right.set_xlabel("head")
    for spine in right.spines.values():
        spine.set_visible(False)
    right.tick_params(length=0)
    bar = figure.colorbar(image, ax=right, fraction=0.05, pad=0.03)
    unit = UNITS.get(metric, metric)
    bar.set_label(f"{unit}\n{NOT_FROM_ZERO}" if lowest > 0 else unit)
    bar.outline.set_visible(False)  # type: ignore[operator]
