"""The figure of attention distances: heads of blocks sorted, heads against depth, means of several
stores against relative depth, and of clips the same in time."""

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
IN_TIME = ("distance_frames", SECONDS, "frame_mass")  # of clips
# Two lowest and two highest blocks: cold and warm, the outermost darker.
SHADES = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00")
MOST_SORTED = 6  # stores, of whose blocks the sorted heads are drawn, too
ENDS = ("first block", "second block", "last block but one", "last block")
KINDS = ("attention over the clip", "attention over time", "attention within a frame")


@styled
def plot(table: Table) -> Figure:
    """Panels of three kinds, from the table alone.

    One per store, of up to `MOST_SORTED`: heads sorted by distance in the two lowest and the two
    highest blocks, the 95 % interval as a band (Raghu et al. 2021, Figs. 3, 4, C.5, C.6). One per
    store: all heads against depth, their mean as a line (Dosovitskiy et al. 2021, Fig. 7 right;
    Walmer et al. 2023, Fig. 4 left). With several stores, their means over heads against relative
    depth in one panel (Walmer et al. 2023, Figs. 4 right, 15); relative to uniform attention where
    the stores' inputs differ in size, as pixels are not comparable then. Dashed: uniform
    attention, where the table contains it (for pixels it must have `distance_relative`, too). The
    metric is the first of `METRICS`. Of several groups of stores (`GROUP/NAME`) the means alone are
    drawn, a panel per group. Of clips there are panels below for the distance in time and the share
    within the query's own frame: heads against depth, a mean for each kind of window, and for
    several stores their means.
    """
    every_row = table.frame
    in_time = [m for m in (IN_TIME[0], IN_TIME[2]) if m in table["metric"]]
    if not (known := [m for m in METRICS if m in table["metric"]]):
        return _draw_time_alone(every_row)
    metric = known[0]
    clips = _clips(every_row)
    stores = every_row.partition_by("store", maintain_order=True)
    groups = groups_of(every_row["store"].unique(maintain_order=True))
    if len(groups) > 1:
        return _draw_groups(every_row, metric, groups)
    several = len(stores) > 1
    each = 2 if len(stores) <= MOST_SORTED else 1  # panels
    grids = [
        PanelGrid(each * len(stores), most=4 if several else 2, widest=24, together=each)
    ]
    if several:
        grids.append(PanelGrid(1, widest=48))
    after = len(grids)
    grids += _time_grids(clips, in_time)
    figure, parts = stack(*grids)
    every = grids[0].axes(parts[0])
    of_store = [every[i : i + each] for i in range(0, len(every), each)]
    for own, rows in zip(of_store, stores, strict=True):
        uniform = _uniform_of(rows, metric)
        drawn = rows.filter(metric=metric)
        if each > 1:
            _draw_sorted(own[0], drawn, uniform)
        _draw_depth(own[-1], drawn, uniform)
        own[0].set_title(shorten(rows["store"][0], 28))
        note_count(own[-1], drawn)
        own[0].set_ylabel(metric_words(metric))
    # All panels on one y axis from 0, unless that would flatten a store below a third of it.
    tops = [_top(max(axes.dataLim.y1 for axes in pair)) for pair in of_store]
    for pair, top in zip(of_store, tops, strict=True):
        for axes in pair:
            axes.set_ylim(0, max(tops) if min(tops) > max(tops) / 3 else top)
    if several:
        every += grids[1].axes(parts[1])
        _draw_layers(every[-1], every_row, metric, every_row)
    every += _draw_time(grids[after:], parts[after:], clips, in_time, every_row)
    legend_below(figure, handles_of(every))
    return figure


def _clips(every_row: pl.DataFrame) -> list[pl.DataFrame]:
    """The rows of each store of clips."""
    own = every_row.filter(pl.col("metric").is_in(IN_TIME))["store"].unique(
        maintain_order=True
    )
    return [every_row.filter(store=store) for store in own]


def _time_grids(clips: Sequence[pl.DataFrame], metrics: Sequence[str]) -> list[PanelGrid]:
    """A row of panels for the stores' heads in time, and of several one for their means."""
    if not clips or not metrics:
        return []
    each = PanelGrid(len(metrics) * len(clips), most=len(metrics), widest=30)
    return [each, *([PanelGrid(len(metrics), widest=30)] if len(clips) > 1 else [])]


def _draw_time(
    grids: Sequence[PanelGrid],
    parts: Sequence[Any],
    clips: Sequence[pl.DataFrame],
    metrics: Sequence[str],
    among: pl.DataFrame,
) -> list[Axes]:
    """Heads in time against depth, of each store, and of several the means over their heads."""
    if not grids:
        return []
    every = grids[0].axes(parts[0])
    panels = [(rows, metric) for rows in clips for metric in metrics]
    for axes, (rows, metric) in zip(every, panels, strict=True):
        drawn = rows.filter(metric=metric)
        _draw_heads_in_time(axes, drawn)
        axes.set_title(shorten(rows["store"][0], 28))
        note_count(axes, drawn)
        axes.set_ylabel(metric_words(metric))
    for i in range(len(metrics)):
        top = max(axes.get_ylim()[1] for axes in every[i :: len(metrics)])
        for axes in every[i :: len(metrics)]:
            axes.set_ylim(0, top)
    if len(grids) > 1:
        means = grids[1].axes(parts[1])
        looks = store_looks(among)
        for axes, metric in zip(means, metrics, strict=True):
            for rows in clips:
                label = str(rows["store"][0])
                for x, y in _lines(rows.filter(metric=metric), "rel_depth"):
                    axes.plot(x, y, **looks[label], label=shorten(label, 28))
            own = among.filter(metric=metric)
            _draw_uniform(axes, own["uniform"].drop_nulls().unique().to_list())
            axes.set_xlabel("relative depth")
            axes.set_ylabel(metric_words(metric))
            axes.set_title("mean over heads")
            axes.set_ylim(0, _top(max(axes.dataLim.y1, own["uniform"].max() or 0)))
        every += means
    return every


def _draw_heads_in_time(axes: Axes, rows: pl.DataFrame) -> None:
    """Dots for heads and a line for their mean, for each kind of window; where attention spread
    evenly lies, dashed."""
    for own in _with_kinds(rows):
        kind = own["kind"][0]
        i = (
            len(COLOURS) - 1 - KINDS.index(kind)
        )  # from the end: stores begin at the start
        axes.scatter(
            own["depth"],
            own["value"],
            s=em(72) ** 2 * 0.15,
            color=colour(i),
            alpha=0.5,
            linewidth=0,
        )
        axes.plot(
            *_layer_means(own, "depth"), color=colour(i), marker=marker(i), label=kind
        )
    _draw_uniform(axes, rows["uniform"].drop_nulls().unique().to_list())
    axes.set_ylim(0, _top(max(axes.dataLim.y1, rows["uniform"].max() or 0)))
    integer_ticks(axes, rows["depth"].to_numpy())
    axes.set_xlabel("block")


def _with_kinds(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """The rows of each kind of window, named in `kind`."""
    texts = pl.Series([""] * len(rows))
    if "window" in rows.columns:
        texts = rows["window"].cast(pl.String).fill_null("")
    named = rows.with_columns(kind=pl.Series([_kind(text) for text in texts]))
    return named.partition_by("kind", maintain_order=True)


def _top(largest: float) -> float:
    """The end of a y axis from 0; 1 where all values are 0, as distances in time within frames."""
    return 1.06 * largest if largest > 1e-6 else 1.0


def _kind(window: str) -> str:
    """The kind of attention, of `KINDS`, that a window's text names, such as `1 x 14 x 14`."""
    sides = window.split(" x ")
    if sides[0] == "1" and len(sides) == 3:
        return KINDS[2]
    return KINDS[1] if sides[1:] == ["1", "1"] else KINDS[0]


def _draw_time_alone(every_row: pl.DataFrame) -> Figure:
    """The panels in time, of a table that has no others."""
    metrics = [m for m in IN_TIME if m in every_row["metric"]]
    clips = _clips(every_row)
    grids = _time_grids(clips, metrics)
    figure, parts = stack(*grids)
    legend_below(figure, handles_of(_draw_time(grids, parts, clips, metrics, every_row)))
    return figure


def _draw_groups(among: pl.DataFrame, metric: str, groups: Sequence[str]) -> Figure:
    """The means over heads, a panel per group of stores, all on one y axis."""
    grid = PanelGrid(len(groups))
    figure, (box,) = stack(grid)
    every = grid.axes(box)
    for axes, (group, rows) in zip(every, by_group(among), strict=True):
        _draw_layers(axes, rows, metric, among)
        axes.set_title(shorten(group or "no group", 24))
    top = max(axes.get_ylim()[1] for axes in every)
    for axes in every:
        axes.set_ylim(0, top)
    legend_below(figure, handles_of(every))
    return figure


def _uniform_of(rows: pl.DataFrame, metric: str) -> dict[str, float]:
    """Site -> the distance of uniform attention, where one store's rows determine it."""
    if metric == "distance_relative":
        return dict.fromkeys(rows["site"].unique(), 1.0)
    if metric not in ("distance_px", "distance_unit"):
        return {}
    heads = rows.filter(metric=metric).join(
        rows.filter(pl.col("value") > 0, metric="distance_relative"), on=["site", "head"]
    )
    ratio = pl.col("value") / pl.col("value_right")
    scales = heads.group_by("site").agg(
        least=ratio.min(), most=ratio.max(), middle=ratio.median()
    )
    # On the unit square a grid that is not square has no one scale.
    alike = scales.filter(pl.col("most") <= 1.001 * pl.col("least"))
    return dict(alike.select("site", "middle").iter_rows())


def _layer_means(rows: pl.DataFrame, depth: str) -> tuple[pl.Series, pl.Series]:
    """The blocks' depths and their means over heads (those with a value)."""
    means = rows.group_by("site", maintain_order=True).agg(
        pl.col(depth).first(), pl.col("value").mean()
    )
    return means[depth], means["value"]


def _lines(rows: pl.DataFrame, depth: str) -> list[tuple[pl.Series, pl.Series]]:
    """The lines of a store's means over heads: one; of clips one for each kind of window, as a
    block may look over time and within a frame."""
    if "uniform" not in rows.columns or not rows["uniform"].is_not_null().any():
        return [_layer_means(rows, depth)]
    return [_layer_means(own, depth) for own in _with_kinds(rows)]


def _draw_uniform(axes: Axes, values: Iterable[float]) -> None:
    """A dashed line at each distinct value (to a percent), the highest one named."""
    drawn: list[float] = []
    for value in sorted(values, reverse=True):
        if not drawn or value < 0.99 * drawn[-1]:
            reference_line(axes, value, "" if drawn else "uniform")
            drawn.append(value)


def _draw_sorted(axes: Axes, rows: pl.DataFrame, uniform: dict[str, float]) -> None:
    sites = rows["site"].unique(maintain_order=True).to_list()
    n = min(len(sites), len(ENDS))
    shown = [*sites[: -(-n // 2)], *sites[len(sites) - n // 2 :]]
    looks = [*range(-(-n // 2)), *range(len(ENDS) - n // 2, len(ENDS))]
    for i, site in zip(looks, shown, strict=True):
        heads = rows.filter(site=site).sort("value", nulls_last=True, maintain_order=True)
        rank = np.arange(len(heads))
        axes.fill_between(
            rank, heads["low"], heads["high"], color=SHADES[i], alpha=0.2, linewidth=0
        )
        axes.plot(rank, heads["value"], color=SHADES[i], marker=marker(i), label=ENDS[i])
    _draw_uniform(axes, [uniform[site] for site in shown if site in uniform])
    integer_ticks(axes, [0, rows["head"].to_numpy().max()])
    axes.set_xlabel("heads of a block, sorted")


def _draw_depth(axes: Axes, rows: pl.DataFrame, uniform: dict[str, float]) -> None:
    axes.scatter(
        rows["depth"],
        rows["value"],
        s=em(72) ** 2 * 0.15,
        color=colour(0),
        alpha=0.5,
        linewidth=0,
        label="head",
    )
    for x, y in _lines(rows, "depth"):
        axes.plot(x, y, color=ink(), label="mean of a block's heads")
    _draw_uniform(axes, uniform.values())
    integer_ticks(axes, rows["depth"].to_numpy())
    axes.set_xlabel("block")


def _draw_layers(
    axes: Axes, rows: pl.DataFrame, metric: str, among: pl.DataFrame
) -> None:
    """among: the stores of all panels, which decide how curves look and what is comparable."""
    stores = among.partition_by("store")
    uniform = [value for own in stores for value in _uniform_of(own, metric).values()]
    if uniform and max(uniform) > 1.02 * min(uniform):
        metric = "distance_relative"
        uniform = [1.0]
    looks = store_looks(among)
    grouped = len(groups_of(among["store"].unique())) > 1
    drawn = rows.filter(metric=metric).partition_by(
        "store", maintain_order=True, as_dict=True
    )
    for (label,), own in drawn.items():
        name = split_label(label)[1] if grouped else label
        for x, y in _lines(own, "rel_depth"):
            axes.plot(x, y, **looks[label], label=shorten(name, 28))
    _draw_uniform(axes, uniform)
    axes.set_xlabel("relative depth")
    axes.set_ylabel(metric_words(metric))
    axes.set_title("mean over heads")
    axes.set_ylim(0, 1.06 * max(axes.dataLim.y1, *uniform, 0))
    note_count(axes, rows)
