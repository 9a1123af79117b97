"""The figure of `vitsee saliency`: best heads against depth, all heads, and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import DASHES, baselines_of, of_models, store_looks
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import (
    DEPTH_LABEL,
    add_curve_legend,
    draw_depth_curves,
)
from vitsee_core.figures.panels import em, note_count, panels, stack
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import baseline_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHOSE = {"cls": "class token", "mean": "mean over patches"}
ORACLE = "each image's best head (oracle)"
# The heads of stores lie beside each other over this share of the x axis.
SPREAD = 0.03
# Baselines this near to one another are drawn once, for all stores.
ALIKE = 0.01


@styled
def plot(table: Table) -> Figure:
    """Draw two panels for the class token and two for the mean over patches.

    The left one has each store's best heads against relative depth, with the 95 % interval as a
    band and baselines dashed (Walmer et al. 2023, Figs. 5, 16), the right one all heads.
    """
    frame = table.frame
    tokens = [token for token in WHOSE if token in frame["token"]]
    # Stores in groups need a panel each, so that the dots of all heads have no room.
    if len(groups_of(frame["store"].unique())) > 1:
        return _draw_groups(frame, tokens)
    figure, all_axes = panels(2 * len(tokens), most=2, widest=26)
    heads = of_models(frame)
    for left, right, token in zip(all_axes[::2], all_axes[1::2], tokens, strict=True):
        rows = heads.filter(token=token)
        _draw_best(left, rows, frame)
        _draw_heads(right, rows, frame)
        left.set_title(f"{WHOSE[token]}: best head")
        right.set_title(f"{WHOSE[token]}: all heads")
    # An empty curve gives the oracle, thin with open markers, its entry in the legend.
    if "image" in heads["best"]:
        all_axes[-2].plot(
            [],
            [],
            color=GREY,
            marker="o",
            markerfacecolor="white",
            linewidth=0.8,
            label=ORACLE,
        )
    # One scale for all panels, from 0: IoUs of tokens and of heads compare.
    top = 1.06 * max(axes.dataLim.y1 for axes in all_axes)
    for axes in all_axes:
        axes.set_ylim(0, top)
    add_curve_legend(figure, all_axes[::2])
    return figure


def _draw_groups(frame: pl.DataFrame, tokens: Sequence[str]) -> Figure:
    """Draw the best heads alone, with a panel per group of stores and token."""
    heads = of_models(frame)
    grid = CurveGrid.of(len(tokens), frame)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [(token, heads.filter(token=token)) for token in tokens])
    for axes, token, rows in panels:
        _draw_best(axes, rows, frame)
        axes.set_title(WHOSE[token])
    all_axes = [axes for axes, *_ in panels]
    grid.finish(panels)
    add_curve_legend(figure, all_axes)
    return figure


def _draw_best(axes: Axes, rows: pl.DataFrame, frame: pl.DataFrame) -> None:
    """Draw the curves of best heads, thinner those of each image's best head, and baselines.

    Args:
        axes: the panel.
        rows: the rows of models about the panel's token.
        frame: all rows of the table, which decide colours and baselines.
    """
    best = frame.filter(best="head")
    # Colours follow from all rows, so that a store has one colour in every panel.
    looks = _store_colours(frame)
    draw_depth_curves(axes, rows.filter(best="head"), among=best)
    for oracle in rows.filter(best="image").partition_by("store", maintain_order=True):
        axes.plot(
            oracle["rel_depth"],
            oracle["value"],
            **looks[oracle["store"][0]],
            markerfacecolor="white",
            linewidth=0.8,
        )
    _draw_baselines(axes, rows, frame)


def _draw_heads(axes: Axes, rows: pl.DataFrame, frame: pl.DataFrame) -> None:
    """Draw a dot per head, and baselines; arguments as for `_draw_best`."""
    n = frame["store"].n_unique()
    looks = _store_colours(frame)
    # Without the rows of the oracle, which are of no single head.
    heads = rows.filter(pl.col("best").is_null() | (pl.col("best") == "head"))
    for i, store_heads in enumerate(heads.partition_by("store", maintain_order=True)):
        # Stores lie side by side about each depth.
        offset = SPREAD * (i - (n - 1) / 2) / n
        axes.scatter(
            store_heads["rel_depth"] + offset,
            store_heads["value"],
            s=em(72) ** 2 * 0.2,  # an area in points
            **looks[store_heads["store"][0]],
            alpha=0.5,
            linewidth=0,
        )
    _draw_baselines(axes, rows, frame)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel(DEPTH_LABEL)
    note_count(axes, rows)


def _draw_baselines(axes: Axes, drawn: pl.DataFrame, frame: pl.DataFrame) -> None:
    """Draw the baselines of some stores as dashed lines.

    A baseline is grey if it is the same for all stores, else in the stores' colours.

    Args:
        axes: the panel.
        drawn: rows of the stores that the panel shows.
        frame: all rows of the table, which decide colours and baselines.
    """
    looks = _store_colours(frame)
    baselines = baselines_of(frame.filter(pl.col("store").is_in([*drawn["store"]])))
    for (name, rows), dashes in zip(baselines.items(), DASHES, strict=False):
        values = rows["value"].drop_nulls().to_numpy()
        shared = np.ptp(values) < ALIKE if len(values) else True
        for store_rows in rows.partition_by("store", maintain_order=True):
            store_rows = store_rows.sort("rel_depth", maintain_order=True)
            tint = GREY if shared else looks[store_rows["store"][0]]["color"]
            axes.plot(
                store_rows["rel_depth"],
                store_rows["value"],
                color=tint,
                linestyle=dashes,
                linewidth=1,
                zorder=1,
            )
            if shared:
                break  # one line stands for all stores
        # In the legend, baselines are grey and differ by their dashes.
        axes.plot(
            [],
            [],
            color=GREY,
            linestyle=dashes,
            linewidth=1,
            label=baseline_words(name, "iou"),
        )


def _store_colours(frame: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Return store -> the colour and marker of its best heads' curve."""
    looks = store_looks(frame.filter(best="head"))
    return {
        store: {"color": look["color"], "marker": look["marker"]}
        for store, look in looks.items()
    }
