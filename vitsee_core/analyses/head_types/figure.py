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
from vitsee_core.tables.columns import parse_window
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AGREEMENT = ("same_type_thresholds", "same_type_slabs")
# Class -> its colour; the classes that are nothing special are grey.
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
_HATCH = "//////"


@styled
def plot(table: Table) -> Figure:
    """Draw for each store the heads of each type by block, and an example of each type.

    Bars are hatched for heads that change type when some threshold moves by x 0.8 or x 1.25. The
    example is the aligned map of the clearest head, as attention per pair of tokens, in colours
    over the range that stands below it, with its midlines in red. Stores of clips have two more
    lines, for the classes in time, with an example's share of attention by offset in frames.
    """
    from matplotlib.patches import Patch

    # Sizes first, as a figure is made for all its panels; then the panels, in the same order.
    stores = table.frame.partition_by("store", maintain_order=True)
    grids = []
    for rows in stores:
        grids += [_COUNTS, _EXAMPLES]
        if _has_clips(rows):
            grids += [_COUNTS, _TIME_EXAMPLES]
    figure, boxes = stack(*grids)
    remaining_boxes = iter(boxes)
    for rows in stores:
        maps = rows.filter(metric="aligned")
        (count_axes,) = _COUNTS.axes(next(remaining_boxes))
        title = shorten(rows["store"][0], 28)
        _draw_counts(count_axes, rows, column="type", tints=TINTS, title=title)
        for axes, kind in zip(_EXAMPLES.axes(next(remaining_boxes)), TYPES, strict=True):
            _draw_example(axes, maps.filter(type=kind), kind)
        if _has_clips(rows):
            (count_axes,) = _COUNTS.axes(next(remaining_boxes))
            title = f"{title}, in time"
            _draw_counts(count_axes, rows, column="time", tints=TIME_TINTS, title=title)
            time_axes = _TIME_EXAMPLES.axes(next(remaining_boxes))
            _draw_time_examples(time_axes, rows.filter(metric=ALIGNED_FRAMES))
    handles = {UNSTEADY: Patch(facecolor="white", edgecolor=GREY, hatch=_HATCH)}
    if UNDEFINED in table.frame["type"]:
        handles["no type"] = Patch(facecolor=TINTS[UNDEFINED])
    legend_below(figure, handles)
    return figure


def _has_clips(rows: pl.DataFrame) -> bool:
    """Return whether a store's heads have classes in time."""
    return TIME_AGREEMENT[0] in rows["metric"]


def _draw_counts(
    axes: Axes, rows: pl.DataFrame, *, column: str, tints: dict[str, str], title: str
) -> None:
    """Draw the number of heads by block and class as stacked bars.

    Args:
        axes: the panel.
        rows: the rows of one store.
        column: the class that is counted: "type" in space, or "time".
        tints: class -> its colour, from the bottom of the bars to the top.
        title: what stands above the panel.
    """
    from matplotlib.ticker import MaxNLocator

    # These metrics have one row per head: the share of thresholds that give the same class.
    metric = AGREEMENT[0] if column == "type" else TIME_AGREEMENT[0]
    heads = rows.filter(metric=metric)
    heads = heads.with_columns(is_steady=pl.col("value").eq_missing(1))
    heads, names = one_place_a_layer(heads)
    depths = heads["depth"].unique().sort().to_numpy()
    bottom = np.zeros(len(depths))
    for kind, tint in tints.items():
        for is_steady, hatch in ((True, ""), (False, _HATCH)):
            counted = heads.filter(pl.col(column) == kind, is_steady=is_steady)
            # (depths,)
            counts = (counted["depth"].to_numpy() == depths[:, np.newaxis]).sum(1)
            if not counts.any():
                continue
            axes.bar(
                depths,
                counts,
                width=0.8,
                bottom=bottom,
                color=tint,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.4,
            )
            bottom += counts
    axes.set_title(title)
    note_count(axes, heads)
    axes.grid(False, axis="x")
    layer_ticks(axes, names, 13)  # labels that fit the width
    axes.set_ylabel("heads")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_time_examples(all_axes: Sequence[Axes], rows: pl.DataFrame) -> None:
    """Draw for each class in time the example's shares by offset, all panels on one scale.

    Args:
        all_axes: a panel for each of `TIME_TYPES`.
        rows: the shares of one store's examples.
    """
    # 1e-9: a scale needs a height, though all shares be 0 or missing.
    highest = float(np.nanmax([1e-9, *rows["value"].drop_nulls().to_list()]))
    for axes, kind in zip(all_axes, TIME_TYPES, strict=True):
        example = rows.filter(time=kind)
        has_example = len(example) > 0
        axes.set_title(kind)
        if not has_example:
            map_axes(axes)
        _frame_in_colour(axes, TIME_TINTS[kind])
        axes.set_ylim(0, 1.06 * highest)
        axes.grid(False)
        if not has_example:
            _write_no_head(axes)
            continue
        frames = example["frame"].to_numpy()
        axes.bar(frames, example["value"], width=0.8, color=TIME_TINTS[kind])
        axes.set_xticks([frames[0], 0, frames[-1]])
        text = f"{site_words(example['site'][0])}, head {example['head'][0]}"
        axes.set_xlabel(f"times from the query\n{text}", fontsize=small())
    all_axes[0].set_ylabel("share of attention", fontsize=small())


def _draw_example(axes: Axes, rows: pl.DataFrame, kind: str) -> None:
    """Draw the map of a type's example, or "no head".

    Args:
        axes: the panel.
        rows: the example's map; none if no head has the type.
        kind: one of `TYPES`.
    """
    map_axes(axes)
    axes.set_title(kind)
    _frame_in_colour(axes, TINTS[kind])
    axes.set_aspect("equal")
    if len(rows) == 0:
        _write_no_head(axes)
        return
    ((_, head, site, values),) = cut_maps(rows)
    window = rows["window"][0] if "window" in rows.columns else None
    # Fewer pairs of tokens have large offsets: without this all maps would be bright in the middle.
    density = per_query(values, parse_window(window))
    axes.imshow(stretched(density), origin="upper")
    mark_middle(axes, values.shape)
    lines = [f"{site_words(site)}, head {head}"]
    if rows["detail"][0]:
        lines.append(rows["detail"][0])
    lines.append(f"{np.nanmin(density):.2g} to {np.nanmax(density):.2g}")
    axes.set_xlabel("\n".join(lines), fontsize=small())


def _frame_in_colour(axes: Axes, tint: str) -> None:
    """Give the panel a frame in the colour of its class, which is that of the bars."""
    for spine in axes.spines.values():
        spine.set(color=tint, linewidth=2)


def _write_no_head(axes: Axes) -> None:
    """Write that no head has the panel's class."""
    axes.text(0.5, 0.5, "no head", transform=axes.transAxes, ha="center", color=GREY)
