"""The picture of saliency: best heads and all heads against relative depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.figures.curve_looks import DASHES, baselines_of, of_models, store_looks
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
    every_row = table.frame
    tokens = [token for token in WHOSE if token in every_row["token"]]
    if len(groups_of(every_row["store"].unique())) > 1:
        return _draw_groups(every_row, tokens)
    figure, every = panels(2 * len(tokens), most=2, widest=26)
    heads = of_models(every_row)
    for left, right, token in zip(every[::2], every[1::2], tokens, strict=True):
        rows = heads.filter(token=token)
        _draw_best(left, rows, every_row)
        _draw_heads(right, rows, every_row)
        left.set_title(f"{WHOSE[token]}: best head")
        right.set_title(f"{WHOSE[token]}: all heads")
    if "image" in heads["best"]:
        every[-2].plot(
            [], [], color=GREY, marker="o", markerfacecolor="white", linewidth=0.8, label=ORACLE
        )
    top = 1.06 * max(axes.dataLim.y1 for axes in every)
    for axes in every:
        axes.set_ylim(0, top)
    add_curve_legend(figure, every[::2])
    return figure


def _draw_groups(every_row: pl.DataFrame, tokens: Sequence[str]) -> Figure:
    """The best heads alone, a panel per group of stores and token."""
    heads = of_models(every_row)
    grid = CurveGrid.of(len(tokens), every_row)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [(token, heads.filter(token=token)) for token in tokens])
    for axes, token, rows in panels:
        _draw_best(axes, rows, every_row)
        axes.set_title(WHOSE[token])
    every = [axes for axes, *_ in panels]
    grid.finish(panels)
    add_curve_legend(figure, every)
    return figure


def _draw_best(axes: Axes, rows: pl.DataFrame, every_row: pl.DataFrame) -> None:
    best, looks = every_row.filter(best="head"), _looks(every_row)
    draw_depth_curves(axes, rows.filter(best="head"), among=best)
    for oracle in rows.filter(best="image").partition_by("store", maintain_order=True):
        axes.plot(
            oracle["rel_depth"], oracle["value"],
            **looks[oracle["store"][0]], markerfacecolor="white", linewidth=0.8,
        )  # fmt: skip
    _draw_blind(axes, rows, every_row)


def _draw_heads(axes: Axes, rows: pl.DataFrame, every_row: pl.DataFrame) -> None:
    n, looks = every_row["store"].n_unique(), _looks(every_row)
    heads = rows.filter(pl.col("best").is_null() | (pl.col("best") == "head"))
    for i, own in enumerate(heads.partition_by("store", maintain_order=True)):
        axes.scatter(
            own["rel_depth"] + SPREAD * (i - (n - 1) / 2) / n, own["value"],
            s=em(72) ** 2 * 0.2, **looks[own["store"][0]], alpha=0.5, linewidth=0,
        )  # fmt: skip
    _draw_blind(axes, rows, every_row)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel(DEPTH_LABEL)
    note_count(axes, rows)


def _draw_blind(axes: Axes, drawn: pl.DataFrame, every_row: pl.DataFrame) -> None:
    """Each baseline of the stores that are drawn, in grey where it is the same for all of them,
    else in their colours."""
    looks = _looks(every_row)
    blind = baselines_of(every_row.filter(pl.col("store").is_in([*drawn["store"]])))
    for (name, rows), dashes in zip(blind.items(), DASHES, strict=False):
        values = rows["value"].drop_nulls().to_numpy()
        shared = np.ptp(values) < ALIKE if len(values) else True
        for own in rows.partition_by("store", maintain_order=True):
            own = own.sort("rel_depth", maintain_order=True)
            tint = GREY if shared else looks[own["store"][0]]["color"]
            axes.plot(
                own["rel_depth"], own["value"], color=tint, linestyle=dashes, linewidth=1, zorder=1
            )
            if shared:
                break
        axes.plot(
            [], [], color=GREY, linestyle=dashes, linewidth=1, label=baseline_words(name, "iou")
        )


def _looks(every_row: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Store -> colour and marker, those of its best heads' curve."""
    found = store_looks(every_row.filter(best="head"))
    return {
        store: {name: look[name] for name in ("color", "marker")} for store, look in found.items()
    }
