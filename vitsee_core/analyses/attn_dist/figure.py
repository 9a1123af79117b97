"""The figure of attention distances: sorted heads of the outer blocks, all heads against depth, the
means of several stores against relative depth, and for clips the same in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import store_looks
from vitsee_core.figures.panels import (
    PanelGrid,
    em,
    handles_of,
    legend_below,
    note_count,
    stack,
)
from vitsee_core.figures.plotting import (
    COLOURS,
    colour,
    ink,
    integer_ticks,
    marker,
    reference_line,
    styled,
)
from vitsee_core.tables.groups import by_group, groups_of, split_label
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


METRICS = ("distance_px", "distance_px_raw", "distance_unit", "distance_relative")
SECONDS = "distance_seconds"
FRAMES = "distance_frames"
FRAME_MASS = "frame_mass"
IN_TIME = (FRAMES, SECONDS, FRAME_MASS)  # metrics of clips
# Lines of uniform attention nearer than this ratio are drawn once.
UNIFORM_TOLERANCE = 0.99
# Two lowest and two highest blocks: cold and warm, the outermost darker.
SHADES = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00")
MAX_SORTED = 6  # stores up to which sorted heads are drawn, too
ENDS = ("first block", "second block", "last block but one", "last block")
KINDS = ("attention over the clip", "attention over time", "attention within a frame")


@styled
def plot(table: Table) -> Figure:
    """Draw panels of three kinds, from the table alone.

    - One per store, of up to `MAX_SORTED`: heads sorted by distance in the two lowest and the two
      highest blocks, the 95 % interval as a band (Raghu et al. 2021, Figs. 3, 4, C.5, C.6).
    - One per store: all heads against depth, their mean as a line (Dosovitskiy et al. 2021, Fig. 7
      right; Walmer et al. 2023, Fig. 4 left).
    - Of several stores one panel: their means over heads against relative depth (Walmer et al.
      2023, Figs. 4 right, 15); relative to uniform attention if the stores' inputs differ in size,
      as pixels are not comparable then.

    Dashed lines are uniform attention, if the table contains it (for pixels it must have
    `distance_relative`, too). The metric is the first of `METRICS` in the table. Of several groups
    of stores (`GROUP/NAME`) only the means are drawn, a panel per group. For clips there are panels
    below for the distance in time and the share of attention within the query's own frame: heads
    against depth, with a mean for each kind of window, and for several stores their means.
    """
    all_rows = table.frame
    # Seconds are frames in another unit: they are drawn if there is nothing else.
    drawn_in_time = {FRAMES, FRAME_MASS} & {*table["metric"]}
    time_metrics = [metric for metric in IN_TIME if metric in drawn_in_time]
    metrics = [metric for metric in METRICS if metric in table["metric"]]
    if not metrics:
        return _draw_time_alone(all_rows)
    metric = metrics[0]
    clips = _rows_of_clips(all_rows)
    stores = all_rows.partition_by("store", maintain_order=True)
    groups = groups_of(all_rows["store"].unique(maintain_order=True))
    if len(groups) > 1:
        return _draw_groups(all_rows, metric, groups)

    # Sizes of all panels, from top to bottom.
    is_comparison = len(stores) > 1
    panels_per_store = 2 if len(stores) <= MAX_SORTED else 1
    store_grid = PanelGrid(
        panels_per_store * len(stores),
        most=4 if is_comparison else 2,
        widest=24,
        together=panels_per_store,
    )
    grids = [store_grid]
    if is_comparison:
        grids.append(PanelGrid(1, widest=48))
    first_time_grid = len(grids)
    grids += _time_grids(clips, time_metrics)
    figure, boxes = stack(*grids)

    # The panels of each store, then the means, then those in time.
    panels = store_grid.axes(boxes[0])
    panels_by_store = [
        panels[i : i + panels_per_store] for i in range(0, len(panels), panels_per_store)
    ]
    for store_panels, rows in zip(panels_by_store, stores, strict=True):
        uniform = _uniform_by_site(rows, metric)
        heads = rows.filter(metric=metric)
        if panels_per_store > 1:
            _draw_sorted_heads(store_panels[0], heads, uniform)
        _draw_heads_by_depth(store_panels[-1], heads, uniform)
        store_panels[0].set_title(shorten(rows["store"][0], 28))
        note_count(store_panels[-1], heads)
        store_panels[0].set_ylabel(metric_words(metric))
    _share_y_axis(panels_by_store)
    if is_comparison:
        panels += grids[1].axes(boxes[1])
        _draw_store_means(panels[-1], all_rows, metric, all_rows)
    panels += _draw_time(
        grids[first_time_grid:], boxes[first_time_grid:], clips, time_metrics, all_rows
    )
    legend_below(figure, handles_of(panels))
    return figure


def _share_y_axis(panels_by_store: Sequence[Sequence[Axes]]) -> None:
    """Give all panels one y axis from 0, unless that would flatten a store below a third of it."""
    tops = [
        _y_limit(max(axes.dataLim.y1 for axes in store_panels))
        for store_panels in panels_by_store
    ]
    is_shared = min(tops) > max(tops) / 3
    for store_panels, store_top in zip(panels_by_store, tops, strict=True):
        # A store has two panels, which share an axis in any case.
        top = max(tops) if is_shared else store_top
        for axes in store_panels:
            axes.set_ylim(0, top)


def _rows_of_clips(all_rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the rows of each store of clips."""
    in_time = all_rows.filter(pl.col("metric").is_in(IN_TIME))
    stores = in_time["store"].unique(maintain_order=True)
    return [all_rows.filter(store=store) for store in stores]


def _time_grids(clips: Sequence[pl.DataFrame], metrics: Sequence[str]) -> list[PanelGrid]:
    """Return the grids of panels in time: of the stores' heads, and of several stores' means."""
    if not clips or not metrics:
        return []
    heads = PanelGrid(len(metrics) * len(clips), most=len(metrics), widest=30)
    if len(clips) == 1:
        return [heads]
    return [heads, PanelGrid(len(metrics), widest=30)]


def _draw_time(
    grids: Sequence[PanelGrid],
    boxes: Sequence[Any],
    clips: Sequence[pl.DataFrame],
    metrics: Sequence[str],
    all_rows: pl.DataFrame,
) -> list[Axes]:
    """Draw heads in time against depth for each store, and of several stores their means.

    Args:
        grids: as `_time_grids` returns them.
        boxes: the part of the figure for each grid.
        clips: rows of each store of clips.
        metrics: in time, one column of panels for each.
        all_rows: of the table; its stores decide how curves look.

    Returns:
        The panels.
    """
    if not grids:
        return []
    panels = grids[0].axes(boxes[0])
    contents = [(rows, metric) for rows in clips for metric in metrics]
    for axes, (rows, metric) in zip(panels, contents, strict=True):
        heads = rows.filter(metric=metric)
        _draw_heads_in_time(axes, heads)
        axes.set_title(shorten(rows["store"][0], 28))
        note_count(axes, heads)
        axes.set_ylabel(metric_words(metric))
    # One y axis for each metric, which is a column of panels.
    for i in range(len(metrics)):
        column = panels[i :: len(metrics)]
        top = max(axes.get_ylim()[1] for axes in column)
        for axes in column:
            axes.set_ylim(0, top)
    if len(grids) > 1:
        mean_panels = grids[1].axes(boxes[1])
        for axes, metric in zip(mean_panels, metrics, strict=True):
            _draw_time_means(axes, clips, metric, all_rows)
        panels += mean_panels
    return panels


def _draw_time_means(
    axes: Axes, clips: Sequence[pl.DataFrame], metric: str, all_rows: pl.DataFrame
) -> None:
    """Draw the mean over heads of a metric in time against relative depth, a curve per store."""
    looks = store_looks(all_rows)
    for rows in clips:
        label = str(rows["store"][0])
        for x, y in _mean_lines(rows.filter(metric=metric), "rel_depth"):
            axes.plot(x, y, **looks[label], label=shorten(label, 28))
    uniform = all_rows.filter(metric=metric)["uniform"]
    _draw_uniform(axes, uniform.drop_nulls().unique().to_list())
    axes.set_xlabel("relative depth")
    axes.set_ylabel(metric_words(metric))
    axes.set_title("mean over heads")
    axes.set_ylim(0, _y_limit(max(axes.dataLim.y1, uniform.max() or 0)))


def _draw_heads_in_time(axes: Axes, rows: pl.DataFrame) -> None:
    """Draw heads in time against depth: dots, and a line for the mean of each kind of window.

    Attention that is spread evenly is a dashed line.
    """
    for heads in _by_kind_of_window(rows):
        kind = heads["kind"][0]
        # Colours from the end: those of stores begin at the start.
        i = len(COLOURS) - 1 - KINDS.index(kind)
        axes.scatter(
            heads["depth"],
            heads["value"],
            s=em(72) ** 2 * 0.15,
            color=colour(i),
            alpha=0.5,
            linewidth=0,
        )
        depths, means = _block_means(heads, "depth")
        axes.plot(depths, means, color=colour(i), marker=marker(i), label=kind)
    _draw_uniform(axes, rows["uniform"].drop_nulls().unique().to_list())
    axes.set_ylim(0, _y_limit(max(axes.dataLim.y1, rows["uniform"].max() or 0)))
    integer_ticks(axes, rows["depth"].to_numpy())
    axes.set_xlabel("block")


def _by_kind_of_window(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the rows of each kind of window, with the kind's name in the column `kind`."""
    windows = pl.Series([""] * len(rows))
    if "window" in rows.columns:
        windows = rows["window"].cast(pl.String).fill_null("")
    kinds = pl.Series([_kind_of_window(window) for window in windows])
    return rows.with_columns(kind=kinds).partition_by("kind", maintain_order=True)


def _kind_of_window(window: str) -> str:
    """Return which of `KINDS` a window is.

    window: times, rows and columns as `1 x 14 x 14`; "" is attention over the clip.
    """
    over_clip, over_time, within_frame = KINDS
    sides = window.split(" x ")
    if sides[0] == "1" and len(sides) == 3:
        return within_frame
    if sides[1:] == ["1", "1"]:
        return over_time
    return over_clip


def _y_limit(largest: float) -> float:
    """Return the end of a y axis from 0 for values up to the largest.

    It is 1 if all values are 0, as distances in time within frames are.
    """
    return 1.06 * largest if largest > 1e-6 else 1.0


def _draw_time_alone(all_rows: pl.DataFrame) -> Figure:
    """Draw the panels in time of a table that has no other metrics."""
    metrics = [metric for metric in IN_TIME if metric in all_rows["metric"]]
    clips = _rows_of_clips(all_rows)
    grids = _time_grids(clips, metrics)
    figure, boxes = stack(*grids)
    panels = _draw_time(grids, boxes, clips, metrics, all_rows)
    legend_below(figure, handles_of(panels))
    return figure


def _draw_groups(all_rows: pl.DataFrame, metric: str, groups: Sequence[str]) -> Figure:
    """Draw the means over heads, a panel per group of stores, all on one y axis."""
    grid = PanelGrid(len(groups))
    figure, (box,) = stack(grid)
    panels = grid.axes(box)
    for axes, (group, rows) in zip(panels, by_group(all_rows), strict=True):
        _draw_store_means(axes, rows, metric, all_rows)
        axes.set_title(shorten(group or "no group", 24))
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)
    legend_below(figure, handles_of(panels))
    return figure


def _uniform_by_site(rows: pl.DataFrame, metric: str) -> dict[str, float]:
    """Return site -> the metric of uniform attention, where one store's rows determine it."""
    if metric == "distance_relative":
        return dict.fromkeys(rows["site"].unique(), 1.0)
    if metric not in ("distance_px", "distance_unit"):
        return {}
    # distance / distance_relative is the distance of uniform attention, for every head the same.
    heads = rows.filter(metric=metric).join(
        rows.filter(pl.col("value") > 0, metric="distance_relative"), on=["site", "head"]
    )
    ratio = pl.col("value") / pl.col("value_right")
    scales = heads.group_by("site").agg(
        lowest=ratio.min(), highest=ratio.max(), median=ratio.median()
    )
    # On the unit square a grid that is not square has different scales in its two directions, so
    # that the ratio differs between heads.
    consistent = scales.filter(pl.col("highest") <= 1.001 * pl.col("lowest"))
    return dict(consistent.select("site", "median").iter_rows())


def _block_means(rows: pl.DataFrame, depth: str) -> tuple[pl.Series, pl.Series]:
    """Return the blocks' depths and their means over the heads with a value.

    Args:
        rows: of one store and metric.
        depth: the column of depths, `depth` or `rel_depth`.
    """
    means = rows.group_by("site", maintain_order=True).agg(
        pl.col(depth).first(), pl.col("value").mean()
    )
    return means[depth], means["value"]


def _mean_lines(rows: pl.DataFrame, depth: str) -> list[tuple[pl.Series, pl.Series]]:
    """Return the lines of a store's means over heads, each as depths and means.

    Images have one line. Clips have one for each kind of window, as a block may have attention over
    time and attention within a frame.
    """
    has_clips = "uniform" in rows.columns and rows["uniform"].is_not_null().any()
    if not has_clips:
        return [_block_means(rows, depth)]
    return [_block_means(heads, depth) for heads in _by_kind_of_window(rows)]


def _draw_uniform(axes: Axes, values: Iterable[float]) -> None:
    """Draw a dashed line at each distinct value (to a percent), with a name on the highest."""
    lowest_drawn: float | None = None
    for value in sorted(values, reverse=True):
        if lowest_drawn is None:
            reference_line(axes, value, "uniform")
            lowest_drawn = value
        elif value < UNIFORM_TOLERANCE * lowest_drawn:
            reference_line(axes, value, "")
            lowest_drawn = value


def _draw_sorted_heads(axes: Axes, rows: pl.DataFrame, uniform: dict[str, float]) -> None:
    """Draw the sorted distances of heads, a curve for each of the two lowest and highest blocks.

    Args:
        axes: where to draw.
        rows: of one store and metric.
        uniform: site -> the metric of uniform attention.
    """
    sites = rows["site"].unique(maintain_order=True).to_list()
    # Of fewer than four blocks the lower half counts as lowest, the rest as highest.
    n = min(len(sites), len(ENDS))
    n_low = -(-n // 2)
    n_high = n // 2
    outer_sites = [*sites[:n_low], *sites[len(sites) - n_high :]]
    looks = [*range(n_low), *range(len(ENDS) - n_high, len(ENDS))]  # indices into ENDS
    for i, site in zip(looks, outer_sites, strict=True):
        heads = rows.filter(site=site).sort("value", nulls_last=True, maintain_order=True)
        rank = np.arange(len(heads))
        axes.fill_between(
            rank, heads["low"], heads["high"], color=SHADES[i], alpha=0.2, linewidth=0
        )
        axes.plot(rank, heads["value"], color=SHADES[i], marker=marker(i), label=ENDS[i])
    _draw_uniform(axes, [uniform[site] for site in outer_sites if site in uniform])
    integer_ticks(axes, [0, rows["head"].to_numpy().max()])
    axes.set_xlabel("heads of a block, sorted")


def _draw_heads_by_depth(
    axes: Axes, rows: pl.DataFrame, uniform: dict[str, float]
) -> None:
    """Draw all heads of a store against depth, and the means of its blocks as a line.

    Args:
        axes: where to draw.
        rows: of one store and metric.
        uniform: site -> the metric of uniform attention.
    """
    axes.scatter(
        rows["depth"],
        rows["value"],
        s=em(72) ** 2 * 0.15,
        color=colour(0),
        alpha=0.5,
        linewidth=0,
        label="head",
    )
    for x, y in _mean_lines(rows, "depth"):
        axes.plot(x, y, color=ink(), label="mean of a block's heads")
    _draw_uniform(axes, uniform.values())
    integer_ticks(axes, rows["depth"].to_numpy())
    axes.set_xlabel("block")


def _draw_store_means(
    axes: Axes, rows: pl.DataFrame, metric: str, all_rows: pl.DataFrame
) -> None:
    """Draw the means over heads against relative depth, a curve per store.

    Args:
        axes: where to draw.
        rows: of the stores to draw.
        metric: drawn if it is comparable between all stores, else `distance_relative`.
        all_rows: of the stores of all panels, which decide how curves look and what is comparable.
    """
    uniform: list[float] = []
    for store_rows in all_rows.partition_by("store"):
        uniform += _uniform_by_site(store_rows, metric).values()
    if uniform and max(uniform) > 1.02 * min(uniform):  # inputs of different sizes
        metric = "distance_relative"
        uniform = [1.0]
    looks = store_looks(all_rows)
    is_grouped = len(groups_of(all_rows["store"].unique())) > 1
    by_label = rows.filter(metric=metric).partition_by(
        "store", maintain_order=True, as_dict=True
    )
    for (label,), heads in by_label.items():
        name = split_label(label)[1] if is_grouped else label
        for x, y in _mean_lines(heads, "rel_depth"):
            axes.plot(x, y, **looks[label], label=shorten(name, 28))
    _draw_uniform(axes, uniform)
    axes.set_xlabel("relative depth")
    axes.set_ylabel(metric_words(metric))
    axes.set_title("mean over heads")
    axes.set_ylim(0, 1.06 * max(axes.dataLim.y1, *uniform, 0))
    note_count(axes, rows)
