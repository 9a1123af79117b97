"""The picture of saliency: best heads and all heads against relative depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import DASHES, store_looks
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import DEPTH_LABEL, add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import em, note_count, panels, stack
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.words import baseline_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

WHOSE = {"cls": "class token", "mean": "mean over patches"}
ORACLE = "each image's best head (oracle)"
SPREAD = 0.03  # of the x axis, over which the stores' heads lie beside each other
ALIKE = 0.01  # baselines this near to one another are drawn once, for all stores


def draw_saliency(table: Table) -> Figure:
    tokens = [token for token in WHOSE if token in table.unique("token")]
    if len(groups_of(table.unique("store"))) > 1:
        return _draw_groups(table, tokens)
    figure, every = panels(2 * len(tokens), most=2, widest=26)
    heads = table.where(baseline="")
    for left, right, token in zip(every[::2], every[1::2], tokens, strict=True):
        rows = heads.where(token=token)
        _draw_best(left, rows, table)
        _draw_heads(right, rows, table)
        left.set_title(f"{WHOSE[token]}: best head")
        right.set_title(f"{WHOSE[token]}: all heads")
    if "image" in heads.unique("best"):
        every[-2].plot(
            [], [], color=GREY, marker="o", markerfacecolor="white", linewidth=0.8, label=ORACLE
        )
    top = 1.06 * max(axes.dataLim.y1 for axes in every)
    for axes in every:
        axes.set_ylim(0, top)
    add_curve_legend(figure, every[::2])
    return figure


def _draw_groups(table: Table, tokens: Sequence[str]) -> Figure:
    """The best heads alone, a panel per group of stores and token."""
    heads = table.where(baseline="")
    grid = CurveGrid.of(len(tokens), table)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [(token, heads.where(token=token)) for token in tokens])
    for axes, token, rows in panels:
        _draw_best(axes, rows, table)
        axes.set_title(WHOSE[token])
    every = [axes for axes, *_ in panels]
    grid.finish(panels)
    add_curve_legend(figure, every)
    return figure


def _draw_best(axes: Axes, rows: Table, table: Table) -> None:
    draw_depth_curves(axes, rows.where(best="head"), among=_curves(table))
    for label, oracle in rows.where(best="image").groups("store"):
        axes.plot(
            oracle["rel_depth"], oracle["value"],
            **_look(table, label), markerfacecolor="white", linewidth=0.8,
        )  # fmt: skip
    _draw_blind(axes, rows, table)


def _draw_heads(axes: Axes, rows: Table, table: Table) -> None:
    stores = table.unique("store")
    for i, (label, own) in enumerate(rows.where(best=["", "head"]).groups("store")):
        aside = SPREAD * (i - (len(stores) - 1) / 2) / len(stores)
        axes.scatter(
            own["rel_depth"] + aside, own["value"],
            s=em(72) ** 2 * 0.2, **_look(table, label), alpha=0.5, linewidth=0,
        )  # fmt: skip
    _draw_blind(axes, rows, table)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel(DEPTH_LABEL)
    note_count(axes, rows)


def _draw_blind(axes: Axes, drawn: Table, table: Table) -> None:
    """Each baseline of the stores that are drawn, in grey where it is the same for all of them,
    else in their colours."""
    own = table.where(store=drawn.unique("store"))
    blind = [(name, rows) for name, rows in own.groups("baseline") if name]
    for (name, rows), dashes in zip(blind, DASHES, strict=False):
        values = rows["value"][~np.isnan(rows["value"])]
        shared = len(values) == 0 or values.max() - values.min() < ALIKE
        for label, own in rows.groups("store"):
            own = own.take(np.argsort(own["rel_depth"], kind="stable"))
            tint = GREY if shared else _look(table, label)["color"]
            axes.plot(
                own["rel_depth"], own["value"], color=tint, linestyle=dashes, linewidth=1, zorder=1
            )
            if shared:
                break
        axes.plot(
            [], [], color=GREY, linestyle=dashes, linewidth=1, label=baseline_words(name, "iou")
        )


def _curves(table: Table) -> Table:
    return table.where(best="head")


def _look(table: Table, label: str) -> dict[str, Any]:
    look = store_looks(_curves(table))[label]
    return {"color": look["color"], "marker": look["marker"]}
