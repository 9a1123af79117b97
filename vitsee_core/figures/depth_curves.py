"""Curves of scores over depth: one curve per store, baselines dashed.

Everything comes from a table's columns: neither stores nor models are opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from vitsee_core.figures.curve_looks import (
    HEAD,
    Curve,
    Look,
    baselines_of,
    by_curve,
    curve_label,
    curve_looks,
    dashes_of,
    of_models,
    shared_baselines,
    site_kind,
)
from vitsee_core.figures.panels import handles_of, legend_below, note_count, small
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.groups import by_group
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import baseline_words, metric_words, site_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEPTH_LABEL = "relative depth"
BASELINE = "baseline: "
BEST = "best layer"
NOTHING = "no value"
HEAD_STEP = 0.2  # units of x between the sites that stand right of depth 1
MAX_INTERVALS = 8  # curves of a panel, up to which intervals are drawn
DODGE = 0.016  # units of x between the interval bars of different curves
INTERVAL = "95 % interval"
# How intervals are drawn; "none" where they are of so many curves that they would hide them.
Intervals = Literal["bands", "bars", "none"]
# Looks of the further columns that `draw_marks` draws.
DOTS = {"marker": ".", "markersize": 3, "linestyle": "none", "alpha": 0.6}
DOTTED = {"linestyle": (0, (1, 2)), "linewidth": 1}


def draw_depth_curves(
    axes: Axes,
    rows: pl.DataFrame,
    *,
    by: Sequence[str] = (),
    ylabel: str | None = None,
    among: pl.DataFrame | None = None,
    spread: str = INTERVAL,
    counts: tuple[str, str] = ("n_images", ""),
) -> None:
    """Draw one metric's `value` against `rel_depth` in a panel, with its intervals.

    Intervals `low` to `high` are bands, or bars side by side where the bands of several curves
    would lie on one another.

    A curve joins the sites of one kind (the blocks' outputs with what enters the first block); the
    legend distinguishes the kinds where there are several. Sites that belong to no block (`norm`,
    `pooled`, `logits`) are single points right of depth 1, each named on the axis. Rows with a
    `baseline` are dashed lines of their curve's colour, or grey lines where all curves have the
    same values. A cross at the lower edge marks a row without a value.

    Args:
        axes: the panel; `add_curve_legend` draws the legend.
        rows: rows of one metric, with the columns store, site, rel_depth, value.
        by: further columns whose values make curves of their own (`k`, `shots`).
        ylabel: label of the y axis; by default the metric in words.
        among: the rows of all panels of a figure, so that a curve looks the same in each.
        spread: words for what `low` and `high` are.
        counts: the column whose number stands at the upper right, and the plural of what it
            counts.
    """
    among = rows if among is None else among
    curves = by_curve(rows, by)
    looks = curve_looks(among, by)
    dashes = dashes_of(among)
    shared = shared_baselines(curves)
    sites = rows["site"].unique(maintain_order=True)
    head_sites = [site for site in sites if site_kind(site) == HEAD]
    head_x = {site: 1 + HEAD_STEP * (i + 1) for i, site in enumerate(head_sites)}
    intervals, shifts = _interval_style(among, by)
    metric = ""
    if len(rows) and "metric" in rows.columns:
        metric = str(rows["metric"][0])
    labels: list[str] = []
    for curve, look in looks.items():  # in the order of all panels, not of this one
        if curve not in curves:
            continue
        label = curve_label(among, by, curve)
        # The points after the last block look like their store's curve: one entry is enough.
        if label in labels and curve.is_points:
            label = "_nolegend_"
        labels.append(label)
        _draw_baselines(
            axes,
            curves[curve],
            curve,
            colour=look["color"],
            dashes=dashes,
            shared=shared,
            head_x=head_x,
        )
        _draw_curve(
            axes,
            of_models(curves[curve]),
            curve,
            look={**look, "label": label},
            head_x=head_x,
            shift=shifts.get(curve, 0.0),
            intervals=intervals,
        )
    _add_baseline_labels(axes, rows, dashes, metric)
    if shifts and spread:
        _add_interval_label(axes, spread, intervals)
    if ylabel is None:
        ylabel = metric_words(metric)
    _finish_axes(axes, head_x, ylabel)
    _mark_missing(axes, of_models(rows), head_x)
    note_count(axes, rows, *counts)


def _add_baseline_labels(
    axes: Axes, rows: pl.DataFrame, dashes: Mapping[str, Any], metric: str
) -> None:
    """Add an entry to the legend for each baseline of the rows: once, in grey, with its dashes."""
    for name in baselines_of(rows):
        axes.plot(
            [],
            [],
            color=GREY,
            linestyle=dashes[name],
            linewidth=1,
            label=baseline_words(name, metric),
        )


def draw_marks(
    axes: Axes,
    rows: pl.DataFrame,
    among: pl.DataFrame,
    column: str,
    look: dict[str, Any],
    label: str = "",
) -> None:
    """Draw a further column against depth for each curve that `draw_depth_curves` has drawn.

    Args:
        axes: the panel.
        rows: the rows that were drawn.
        among: the rows of all panels of the figure.
        column: name of a column of the rows.
        look: `DOTS` or `DOTTED`.
        label: text of the marks in the legend; "" for none.
    """
    if label:
        axes.plot([], [], color=GREY, label=label, **look)
    looks = curve_looks(among)
    for curve, curve_rows in by_curve(rows).items():
        if not curve.is_points:
            axes.plot(
                curve_rows["rel_depth"],
                curve_rows[column],
                color=looks[curve]["color"],
                **look,
            )


def add_curve_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Add one legend below all panels: first the curves of stores, then all other lines."""
    handles = handles_of(panels)
    other_lines = (BASELINE, BEST, "band: ", "bars: ", NOTHING)
    curves = {
        label: handle
        for label, handle in handles.items()
        if not label.startswith(other_lines)
    }
    legend_below(figure, curves | handles)


def head_words(site: str) -> str:
    """Return the name of a site outside of the blocks as a tick label."""
    return shorten(site_words(site), 16)


def _column_or_nan(rows: pl.DataFrame, name: str) -> Any:
    """Return a column as an array (rows,), all NaN where the table lacks it."""
    if name in rows.columns:
        return rows[name].to_numpy()
    return np.full(len(rows), np.nan)


class _Band(NamedTuple):
    """The interval of a curve on a grid of depths, each bound (41,)."""

    low: Any
    high: Any

    def overlaps(self, other: _Band) -> bool:
        """Whether two bands share values at more than 40 % of the depths."""
        shared = np.minimum(self.high, other.high) > np.maximum(self.low, other.low)
        return bool(shared.mean() > 0.4)


def _interval_style(
    among: pl.DataFrame, by: Sequence[str]
) -> tuple[Intervals, dict[Curve, float]]:
    """Choose how the intervals of a figure are drawn, in all of its panels alike.

    Bands where they can be told from each other, else bars; none where more than `MAX_INTERVALS`
    curves share a panel.

    Returns:
        The kind, and for each curve with intervals how far its bars are shifted along x, so that
        bars of several curves stand side by side.
    """
    if "low" not in among.columns:
        return "bands", {}
    among = of_models(among).filter(pl.col("low").is_finite())
    if not len(among):
        return "bands", {}
    metrics = [among]
    if "metric" in among:
        metrics = among.partition_by("metric", maintain_order=True)
    # Each group of stores has panels of its own: only curves of one group can overlap.
    curves_of_group: dict[str, list[Curve]] = {}
    crowded = False
    depths = among["rel_depth"].to_numpy()
    # Stores have different depths: bands are compared on a common grid.
    grid = np.linspace(min(depths.min(), 0), max(depths.max(), 1), 41)
    for metric_rows in metrics:
        for group, rows in by_group(metric_rows):
            bands: list[_Band] = []
            for curve, curve_rows in by_curve(rows, by).items():
                if curve.is_points:
                    continue
                curves = curves_of_group.setdefault(group, [])
                if curve not in curves:
                    curves.append(curve)
                depth = curve_rows["rel_depth"].to_numpy()
                low = np.interp(grid, depth, _column_or_nan(curve_rows, "low"))
                high = np.interp(grid, depth, _column_or_nan(curve_rows, "high"))
                bands.append(_Band(low, high))
            if len(bands) <= MAX_INTERVALS:
                crowded |= any(a.overlaps(b) for a, b in combinations(bands, 2))
    shifts = {curve: 0.0 for curves in curves_of_group.values() for curve in curves}
    if max(map(len, curves_of_group.values()), default=0) > MAX_INTERVALS:
        return "none", shifts
    if not crowded:
        return "bands", shifts
    if depths.max() > 1:  # x is an attribute of the stores, in its own units, not a depth
        return "bars", shifts
    for curves in curves_of_group.values():
        middle = (len(curves) - 1) / 2
        for i, curve in enumerate(curves):
            shifts[curve] = DODGE * (i - middle)
    return "bars", shifts


def _add_interval_label(axes: Axes, spread: str, intervals: Intervals) -> None:
    """Add an entry to the legend that says what bands or bars are."""
    if intervals == "none":
        axes.plot([], [], linestyle="none", label=f"bars: {spread} in the table alone")
    elif intervals == "bands":
        # No fill_between: before matplotlib 3.11 a legend below subfigures refuses it.
        axes.fill([], [], color=GREY, alpha=0.25, linewidth=0, label=f"band: {spread}")
    else:
        axes.plot(
            [], [], linestyle="none", marker="|", color=GREY, label=f"bars: {spread}"
        )


def _x_of(rows: pl.DataFrame, curve: Curve, head_x: dict[str, float]) -> Any:
    """Return x of each row, (rows,): its depth, or the place of its site after the last block."""
    if curve.is_points:
        return np.array([head_x[site] for site in rows["site"]])
    return rows["rel_depth"].to_numpy()


def _draw_baselines(
    axes: Axes,
    rows: pl.DataFrame,
    curve: Curve,
    *,
    colour: str,
    dashes: Look,
    shared: set[str],
    head_x: dict[str, float],
) -> None:
    """Draw the baselines of one curve.

    Args:
        axes: the panel.
        rows: the curve's rows, those of baselines among them.
        curve: its key.
        colour: the curve's.
        dashes: baseline -> its dash pattern.
        shared: the baselines that all curves have in common, which are grey.
        head_x: site outside of the blocks -> its x.
    """
    for name, baseline_rows in baselines_of(rows).items():
        x = _x_of(baseline_rows, curve, head_x)
        y = baseline_rows["value"].to_numpy()
        line: Look = {
            "color": GREY if name in shared else colour,
            "linestyle": dashes[name],
            "linewidth": 1,
        }
        # A line through a single point would be invisible.
        if curve.is_points or len(baseline_rows) == 1:
            axes.hlines(y, x - 0.4 * HEAD_STEP, x + 0.4 * HEAD_STEP, **line)
        else:
            axes.plot(x, y, **line)


def _draw_curve(
    axes: Axes,
    rows: pl.DataFrame,
    curve: Curve,
    *,
    look: Look,
    head_x: dict[str, float],
    shift: float,
    intervals: Intervals,
) -> None:
    """Draw one curve, or its points after the last block, with its intervals.

    Args:
        axes: the panel.
        rows: the curve's rows without baselines, from input to output.
        curve: its key.
        look: keywords of matplotlib's `plot`.
        head_x: site outside of the blocks -> its x.
        shift: how far the curve stands to the right where its intervals are bars.
        intervals: how they are drawn.
    """
    if not len(rows):
        return
    x = _x_of(rows, curve, head_x)
    y = rows["value"].to_numpy()
    low = _column_or_nan(rows, "low")
    high = _column_or_nan(rows, "high")
    if np.isfinite(low).any() and intervals != "none":
        if intervals == "bands" and not curve.is_points and len(rows) > 1:
            axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        else:
            x = x + shift
            axes.vlines(x, low, high, color=look["color"], linewidth=0.8, alpha=0.75)
    if curve.is_points:
        look = {**look, "linestyle": "none"}
    axes.plot(x, y, **look)


def _finish_axes(axes: Axes, head_x: dict[str, float], ylabel: str) -> None:
    """Write ticks and labels, and let the y axis start at 0, or below where a value does."""
    depths = (0, 0.5, 1) if head_x else (0, 0.25, 0.5, 0.75, 1)
    depth_texts = [f"{depth:g}" for depth in depths]
    names = [head_words(site) for site in head_x]
    axes.set_xticks([*depths, *head_x.values()], [*depth_texts, *names])
    if head_x:
        axes.axvline(1 + HEAD_STEP / 2, color=GREY, linewidth=0.6)
        for label in axes.get_xticklabels()[len(depths) :]:
            label.set(rotation=90, fontsize=small())
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel(ylabel)
    low = axes.dataLim.y0
    high = axes.dataLim.y1
    if np.isfinite([low, high]).all():
        low = min(low, 0.0)
        high = max(high, 0.0)
        margin = 0.05 * (high - low or 1)
        bottom = low - margin if low < 0 else low
        axes.set_ylim(bottom, high + margin)


def _mark_missing(axes: Axes, rows: pl.DataFrame, head_x: dict[str, float]) -> None:
    """Draw crosses at the lower edge where rows lack a value, or say so where all do."""
    missing = rows.filter(pl.col("value").is_null())
    if len(rows) and len(missing) == len(rows):
        axes.text(0.5, 0.5, NOTHING, transform=axes.transAxes, ha="center", color=GREY)
        return
    cells = missing.select("site", "rel_depth").unique(maintain_order=True)
    x = {head_x.get(site, depth) for site, depth in cells.rows()}
    if x:
        axes.plot(
            sorted(x),
            [0.03] * len(x),
            "x",
            transform=axes.get_xaxis_transform(),  # y as a share of the panel
            color=GREY,
            label=NOTHING,
            markersize=4,
            clip_on=False,
        )
