"""The figure of head types: counts over depth and an example of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from vitsee_core.analyses.head_types.head_geometry import TYPES, UNDEFINED
from vitsee_core.attention.head_maps import per_query
from vitsee_core.figures.head_tiles import cut_maps, mark_middle, stretched
from vitsee_core.figures.panels import Grid, legend_below, map_axes, note_count, small, stack
from vitsee_core.figures.plotting import COLOURS, GREY, integer_ticks, styled
from vitsee_core.tables.columns import window_of
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

TINTS = dict(zip((*TYPES, UNDEFINED), (*COLOURS[:5], "#BDBDBD", "#EEEEEE"), strict=True))

_EXAMPLES = Grid(len(TYPES), width=10.5, widest=13, height=14, most=len(TYPES))
UNSTEADY = "changes type when a threshold moves by x 0.8 or x 1.25"


@styled
def draw_types(table: Table) -> Figure:
    """One line of panels per store, from the table alone: heads of each type by block, those
    hatched that change type when some threshold moves by x 0.8 or x 1.25; and the aligned map of
    the clearest head of each type, corrected for coverage, over the range written below it,
    midlines in red."""
    stores = table.frame.partition_by("store", maintain_order=True)
    grids = [g for _ in stores for g in (Grid(1, widest=60, height=11), _EXAMPLES)]
    figure, parts = stack(*grids)
    for rows, above, below in zip(stores, parts[::2], parts[1::2], strict=True):
        examples = rows.filter(metric="aligned")
        _draw_counts(Grid(1).axes(above)[0], rows)
        for axes, kind in zip(_EXAMPLES.axes(below), TYPES, strict=True):
            _draw_example(axes, examples.filter(type=kind), kind)
    from matplotlib.patches import Patch

    found = {UNSTEADY: Patch(facecolor="white", edgecolor=GREY, hatch="//////")}
    if UNDEFINED in table.frame["type"]:
        found["no type"] = Patch(facecolor=TINTS[UNDEFINED])
    legend_below(figure, found)
    return figure


def _draw_counts(axes: Axes, rows: pl.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    steady = rows.filter(metric="same_type_thresholds")
    steady = steady.with_columns(sure=pl.col("value").eq_missing(1))
    depths = steady["depth"].unique().sort().to_numpy()
    base = np.zeros(len(depths))
    for kind in (*TYPES, UNDEFINED):
        for sure in (True, False):
            own = steady.filter(type=kind, sure=sure)
            counts = (own["depth"].to_numpy() == depths[:, np.newaxis]).sum(1)
            if not counts.any():
                continue
            hatch = "" if sure else "//////"
            axes.bar(
                depths, counts, 0.8, base, color=TINTS[kind], hatch=hatch, edgecolor="white",
                linewidth=0.4,
            )  # fmt: skip
            base += counts
    axes.set_title(shorten(rows["store"][0], 28))
    note_count(axes, steady)
    axes.grid(False, axis="x")
    integer_ticks(axes, depths, 13)
    axes.set_xlabel("block")
    axes.set_ylabel("heads")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_example(axes: Axes, rows: pl.DataFrame, kind: str) -> None:
    map_axes(axes)
    axes.set_title(kind)
    for spine in axes.spines.values():
        spine.set(color=TINTS[kind], linewidth=2)
    axes.set_aspect("equal")
    if not len(rows):
        axes.text(0.5, 0.5, "no head", transform=axes.transAxes, ha="center", color=GREY)
        return
    ((_, head, site, values),) = cut_maps(rows)
    window = rows["window"][0] if "window" in rows.columns else None
    shown = per_query(values, window_of(window))
    axes.imshow(stretched(shown), origin="upper")
    mark_middle(axes, values.shape)
    detail = rows["detail"][0]
    text = f"{site_words(site)}, head {head}" + (f"\n{detail}" if detail else "")
    lowest, highest = np.nanmin(shown), np.nanmax(shown)
    axes.set_xlabel(f"{text}\n{lowest:.2g} to {highest:.2g}", fontsize=small())
