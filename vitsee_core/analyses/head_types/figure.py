"""The figure of head types: counts by block, and the map of the clearest head of each type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.head_types.head_geometry import (
    TIME_AGREEMENT,
    TIME_TYPES,
    TYPES,
    UNDEFINED,
)
from vitsee_core.attention.head_maps import ALIGNED_FRAMES, per_query
from vitsee_core.figures.head_tiles import cut_maps, mark_middle, stretched
from vitsee_core.figures.panels import (
    PanelGrid,
    legend_below,
    map_axes,
    note_count,
    small,
    stack,
)
from vitsee_core.figures.plotting import COLOURS, GREY, styled
from vitsee_core.figures.site_axes import layer_ticks, one_place_a_layer
from vitsee_core.tables.columns import window_of
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AGREEMENT = ("same_type_thresholds", "same_type_slabs")
TIME_TINTS = dict(
    zip(
        (*TIME_TYPES, UNDEFINED),
        ("#BDBDBD", *COLOURS[:5], "#777777", "#EEEEEE"),
        strict=True,
    )
)
TINTS = dict(zip((*TYPES, UNDEFINED), (*COLOURS[:5], "#BDBDBD", "#EEEEEE"), strict=True))
_COUNTS = PanelGrid(1, widest=60, height=11)
_TIME_EXAMPLES = PanelGrid(
    len(TIME_TYPES), width=10, widest=12, height=12, most=len(TIME_TYPES)
)
_EXAMPLES = PanelGrid(len(TYPES), width=10.5, widest=13, height=14, most=len(TYPES))
UNSTEADY = "changes type when a threshold moves by x 0.8 or x 1.25"


@styled
def plot(table: Table) -> Figure:
    """One line of panels per store, from the table alone: heads of each type by block, those
    hatched that change type when some threshold moves by x 0.8 or x 1.25; and the aligned map of
    the clearest head of each type, corrected for coverage, over the range written below it,
    midlines in red. Of clips the same in time below it, with the shares of a head's attention by
    offset in frames."""
    stores = table.frame.partition_by("store", maintain_order=True)
    clips = [TIME_AGREEMENT[0] in own["metric"] for own in stores]
    grids = [
        grid
        for of_clips in clips
        for grid in (_COUNTS, _EXAMPLES, *([_COUNTS, _TIME_EXAMPLES] if of_clips else []))
    ]
    figure, boxes = stack(*grids)
    parts = iter(boxes)
    for rows, of_clips in zip(stores, clips, strict=True):
        examples = rows.filter(metric="aligned")
        _draw_counts(_COUNTS.axes(next(parts))[0], rows, "type")
        for axes, kind in zip(_EXAMPLES.axes(next(parts)), TYPES, strict=True):
            _draw_example(axes, examples.filter(type=kind), kind)
        if of_clips:
            _draw_counts(_COUNTS.axes(next(parts))[0], rows, "time")
            _draw_in_time(
                _TIME_EXAMPLES.axes(next(parts)), rows.filter(metric=ALIGNED_FRAMES)
            )
    from matplotlib.patches import Patch

    found = {UNSTEADY: Patch(facecolor="white", edgecolor=GREY, hatch="//////")}
    if UNDEFINED in table.frame["type"]:
        found["no type"] = Patch(facecolor=TINTS[UNDEFINED])
    legend_below(figure, found)
    return figure


def _draw_counts(axes: Axes, rows: pl.DataFrame, of: str) -> None:
    """Heads by block and class: `type` in space, `time` in time."""
    from matplotlib.ticker import MaxNLocator

    tints = TINTS if of == "type" else TIME_TINTS
    steady = rows.filter(metric=AGREEMENT[0] if of == "type" else TIME_AGREEMENT[0])
    steady, names = one_place_a_layer(
        steady.with_columns(sure=pl.col("value").eq_missing(1))
    )
    depths = steady["depth"].unique().sort().to_numpy()
    base = np.zeros(len(depths))
    for kind in tints:
        for sure in (True, False):
            own = steady.filter(pl.col(of) == kind, sure=sure)
            counts = (own["depth"].to_numpy() == depths[:, np.newaxis]).sum(1)
            if not counts.any():
                continue
            hatch = "" if sure else "//////"
            axes.bar(
                depths,
                counts,
                0.8,
                base,
                color=tints[kind],
                hatch=hatch,
                edgecolor="white",
                linewidth=0.4,
            )
            base += counts
    axes.set_title(shorten(rows["store"][0], 28) + ("" if of == "type" else ", in time"))
    note_count(axes, steady)
    axes.grid(False, axis="x")
    layer_ticks(axes, names, 13)
    axes.set_ylabel("heads")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_in_time(every: Sequence[Axes], rows: pl.DataFrame) -> None:
    """The shares by offset in time of an example of each class, all on one scale."""
    top = float(np.nanmax([1e-9, *rows["value"].drop_nulls().to_list()]))
    for axes, kind in zip(every, TIME_TYPES, strict=True):
        own = rows.filter(time=kind)
        axes.set_title(kind)
        if not len(own):
            map_axes(axes)
        for spine in axes.spines.values():
            spine.set(color=TIME_TINTS[kind], linewidth=2)
        axes.set_ylim(0, 1.06 * top)
        axes.grid(False)
        if not len(own):
            axes.text(
                0.5, 0.5, "no head", transform=axes.transAxes, ha="center", color=GREY
            )
            continue
        frames = own["frame"].to_numpy()
        axes.bar(frames, own["value"], 0.8, color=TIME_TINTS[kind])
        axes.set_xticks([frames[0], 0, frames[-1]])
        text = f"{site_words(own['site'][0])}, head {own['head'][0]}"
        axes.set_xlabel(f"times from the query\n{text}", fontsize=small())
    every[0].set_ylabel("share of attention", fontsize=small())


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
    lowest = np.nanmin(shown)
    highest = np.nanmax(shown)
    axes.set_xlabel(f"{text}\n{lowest:.2g} to {highest:.2g}", fontsize=small())
