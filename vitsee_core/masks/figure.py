"""The picture of saliency: best heads and all heads against relative depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.depth_curves import BASELINE, DASHES, add_curve_legend, draw_depth_curves
from vitsee_core.plotting import GREY, colour, marker, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table

WHOSE = {"cls": "class token", "mean": "mean over patches"}
YLABEL = "IoU with the objects"
ORACLE = "each image's best head (oracle)"
SPREAD = 0.03  # of the x axis, over which the stores' heads lie beside each other
ALIKE = 0.01  # baselines this near to one another are drawn once, for all stores


def draw_saliency(table: Table) -> Figure:
    """See `analyses.saliency.plot`; to be called below `styled`."""
    tokens = [token for token in WHOSE if token in table.unique("token")]
    figure = new_figure(9.4, 0.9 + 3.1 * len(tokens))
    panels = figure.subplots(len(tokens), 2, squeeze=False)
    heads = table.where(baseline="")
    for (left, right), token in zip(panels, tokens, strict=True):
        rows = heads.where(token=token)
        _draw_best(left, rows, table)
        _draw_heads(right, rows, table)
        left.set_title(f"{WHOSE[token]}: best head of each block ({_count(rows)})")
        right.set_title(f"{WHOSE[token]}: all heads")
    if "image" in heads.unique("best"):
        panels[-1][0].plot(
            [], [], color=GREY, marker="o", markerfacecolor="white", linewidth=0.8, label=ORACLE
        )
    every = [axes for pair in panels for axes in pair]
    top = 1.06 * max(axes.dataLim.y1 for axes in every)
    for axes in every:
        axes.set_ylim(0, top)
    add_curve_legend(figure, [pair[0] for pair in panels])
    return figure


def _draw_best(axes: Axes, rows: Table, table: Table) -> None:
    draw_depth_curves(axes, rows.where(best="head"), ylabel=YLABEL, among=_curves(table))
    for label, oracle in rows.where(best="image").groups("store"):
        axes.plot(
            oracle["rel_depth"], oracle["value"],
            color=_colour(table, label), marker=_marker(table, label), markerfacecolor="white",
            linewidth=0.8,
        )  # fmt: skip
    _draw_blind(axes, rows, table)


def _draw_heads(axes: Axes, rows: Table, table: Table) -> None:
    stores = table.unique("store")
    for i, (label, own) in enumerate(rows.where(best=["", "head"]).groups("store")):
        aside = SPREAD * (i - (len(stores) - 1) / 2) / len(stores)
        axes.scatter(
            own["rel_depth"] + aside, own["value"],
            s=12, color=_colour(table, label), marker=_marker(table, label), alpha=0.5, linewidth=0,
            label=shorten(str(label), 28),
        )  # fmt: skip
    _draw_blind(axes, rows, table)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel("relative depth (first 0, last 1)")


def _draw_blind(axes: Axes, drawn: Table, table: Table) -> None:
    """Each baseline of the stores that are drawn, in grey where it is the same for all of them,
    else in their colours."""
    baselines = _baselines(table.where(store=drawn.unique("store")))
    for (name, rows), dashes in zip(baselines.items(), DASHES, strict=False):
        values = rows["value"][~np.isnan(rows["value"])]
        shared = len(values) == 0 or values.max() - values.min() < ALIKE
        for label, own in rows.groups("store"):
            own = own.take(np.argsort(own["rel_depth"], kind="stable"))
            tint = GREY if shared else _colour(table, label)
            axes.plot(
                own["rel_depth"], own["value"], color=tint, linestyle=dashes, linewidth=1, zorder=1
            )
            if shared:
                break
        axes.plot([], [], color=GREY, linestyle=dashes, linewidth=1, label=f"{BASELINE}{name}")


def _baselines(table: Table) -> dict[str, Table]:
    return {name: rows for name, rows in table.groups("baseline") if name}


def _curves(table: Table) -> Table:
    """The rows whose curves get a colour, so that a store keeps its own in every panel."""
    return table.where(best="head")


def _colour(table: Table, label: str) -> str:
    return colour(_curves(table).unique("store").index(label))


def _marker(table: Table, label: str) -> str:
    return marker(_curves(table).unique("store").index(label))


def _count(rows: Table) -> str:
    low, high = rows["n_images"].min(), rows["n_images"].max()
    return f"n = {high}" if low == high else f"n = {low} to {high}"
