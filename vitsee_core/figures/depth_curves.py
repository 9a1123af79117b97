"""Scores against depth: one curve per store, baselines dashed. From a table's columns alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

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
HEAD_STEP = 0.2  # of the x axis, a place for each site after the last block
MOST_INTERVALS = 8  # curves of a panel whose intervals are drawn
DODGE = 0.016  # of the x axis, between intervals of different curves
INTERVAL = "95 % interval"
Intervals = Literal[
    "bands", "bars", "none"
]  # none: of so many curves that they would hide them
# Looks of further columns, see `draw_marks`.
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
    """Draw `value` against `rel_depth`, with the interval `low` to `high` where there is one: as a
    band, or as bars beside each other where bands of several curves would lie on one another.

    A curve joins the sites of one kind (the blocks' outputs with what enters the first block); the
    legend distinguishes the kinds where there are several. Sites that belong to no block (`norm`,
    `pooled`, `logits`) are single points right of depth 1, each named on the axis. Rows with a
    `baseline` are dashed lines of their curve's colour, grey where one value is all curves'. A
    cross at the lower edge is a row without a value.

    Args:
        axes: the panel; `add_curve_legend` draws the legend.
        rows: of one metric, with the columns store, site, rel_depth, value.
        by: further columns whose values make curves of their own (`k`, `shots`).
        ylabel: of the y axis; by default the metric's words.
        among: the rows of all panels of a figure, so that a curve looks the same in each.
        spread: what `low` and `high` are.
        counts: the column whose number stands at the upper right, and what it counts.
    """
    among = rows if among is None else among
    curves = by_curve(rows, by)
    looks = curve_looks(among, by)
    dashes = dashes_of(among)
    shared = shared_baselines(curves)
    heads = [s for s in rows["site"].unique(maintain_order=True) if site_kind(s) == HEAD]
    places = {site: 1 + HEAD_STEP * (i + 1) for i, site in enumerate(heads)}
    drawn, moves = _intervals(among, by)
    metric = str(rows["metric"][0]) if len(rows) and "metric" in rows.columns else ""
    texts: list[str] = []
    for curve, look in looks.items():
        if curve not in curves:
            continue
        text = curve_label(among, by, curve)
        if text in texts and curve.is_points:
            text = "_nolegend_"
        texts.append(text)
        _draw_baselines(axes, curves[curve], curve, look, dashes, shared, places)
        _draw_curve(
            axes,
            of_models(curves[curve]),
            curve,
            {**look, "label": text},
            places,
            moves.get(curve, 0.0),
            drawn,
        )
    for name in baselines_of(rows):
        axes.plot(
            [],
            [],
            color=GREY,
            linestyle=dashes[name],
            linewidth=1,
            label=baseline_words(name, metric),
        )
    if moves and spread:
        _explain(axes, spread, drawn)
    _finish(axes, places, metric_words(metric) if ylabel is None else ylabel)
    _mark_missing(axes, of_models(rows), places)
    note_count(axes, rows, *counts)


def draw_marks(
    axes: Axes,
    rows: pl.DataFrame,
    among: pl.DataFrame,
    column: str,
    look: dict[str, Any],
    label: str = "",
) -> None:
    """Draw a column against depth for each curve that `draw_depth_curves` has drawn.

    Args:
        axes: the panel.
        rows: what was drawn.
        among: as there.
        column: of the rows.
        look: `DOTS` or `DOTTED`.
        label: of what they are, in the legend.
    """
    if label:
        axes.plot([], [], color=GREY, label=label, **look)
    looks = curve_looks(among)
    for curve, own in by_curve(rows).items():
        if not curve.is_points:
            axes.plot(own["rel_depth"], own[column], color=looks[curve]["color"], **look)


def add_curve_legend(figure: Figure, every: Sequence[Axes]) -> None:
    """One legend below all panels: curves, then lines and marks that are no store's."""
    found = handles_of(every)
    last = (BASELINE, BEST, "band: ", "bars: ", NOTHING)
    curves = {label: found[label] for label in found if not label.startswith(last)}
    legend_below(figure, curves | found)


def head_words(site: str) -> str:
    return shorten(site_words(site), 16)


def _bounds(rows: pl.DataFrame) -> tuple[Any, Any]:
    """`low` and `high`, NaN where the table has none."""
    nothing = np.full(len(rows), np.nan)
    low, high = (
        rows[n].to_numpy() if n in rows.columns else nothing for n in ("low", "high")
    )
    return low, high


def _intervals(
    among: pl.DataFrame, by: Sequence[str]
) -> tuple[Intervals, dict[Curve, float]]:
    """How intervals are drawn, in all panels alike, and how far each curve that has some is moved
    to the right, so that bars of several curves stand beside each other."""
    if "low" not in among.columns:
        return "bands", {}
    among = of_models(among).filter(pl.col("low").is_finite())
    if not len(among):
        return "bands", {}
    metrics = (
        among.partition_by("metric", maintain_order=True)
        if "metric" in among
        else [among]
    )
    ends: dict[str, dict[Curve, float]] = {}  # of the curves of each group of stores
    crowded = False
    depths = among["rel_depth"].to_numpy()
    grid = np.linspace(min(depths.min(), 0), max(depths.max(), 1), 41)
    for group, rows in ((group, own) for of in metrics for group, own in by_group(of)):
        bands = []
        for curve, own in by_curve(rows, by).items():
            if not curve.is_points:
                ends.setdefault(group, {})[curve] = 0.0
                depth = own["rel_depth"].to_numpy()
                bands.append([np.interp(grid, depth, side) for side in _bounds(own)])
        crowded |= len(bands) <= MOST_INTERVALS and any(
            (np.minimum(a[1], b[1]) > np.maximum(a[0], b[0])).mean() > 0.4
            for i, a in enumerate(bands)
            for b in bands[:i]
        )
    moves = {curve: 0.0 for curves in ends.values() for curve in curves}
    if max(map(len, ends.values()), default=0) > MOST_INTERVALS:
        return "none", moves
    if not crowded:
        return "bands", moves
    if depths.max() > 1:  # no depth, but an attribute of the stores
        return "bars", moves
    for curves in ends.values():
        moves |= {c: DODGE * (i - (len(curves) - 1) / 2) for i, c in enumerate(curves)}
    return "bars", moves


def _explain(axes: Axes, spread: str, drawn: Intervals) -> None:
    if drawn == "none":
        axes.plot([], [], linestyle="none", label=f"bars: {spread} in the table alone")
    elif drawn == "bands":
        # No fill_between: before matplotlib 3.11 a legend below subfigures refuses it.
        axes.fill([], [], color=GREY, alpha=0.25, linewidth=0, label=f"band: {spread}")
    else:
        axes.plot(
            [], [], linestyle="none", marker="|", color=GREY, label=f"bars: {spread}"
        )


def _places(rows: pl.DataFrame, curve: Curve, places: dict[str, float]) -> Any:
    if curve.is_points:
        return np.array([places[site] for site in rows["site"]])
    return rows["rel_depth"].to_numpy()


def _draw_baselines(
    axes: Axes,
    rows: pl.DataFrame,
    curve: Curve,
    look: Look,
    dashes: Look,
    shared: set[str],
    places: dict[str, float],
) -> None:
    for name, own in baselines_of(rows).items():
        x = _places(own, curve, places)
        y = own["value"].to_numpy()
        tint = GREY if name in shared else look["color"]
        line: Look = {"color": tint, "linestyle": dashes[name], "linewidth": 1}
        if curve.is_points or len(own) == 1:  # a line of one point would be invisible
            axes.hlines(y, x - 0.4 * HEAD_STEP, x + 0.4 * HEAD_STEP, **line)
        else:
            axes.plot(x, y, **line)


def _draw_curve(
    axes: Axes,
    rows: pl.DataFrame,
    curve: Curve,
    look: Look,
    places: dict[str, float],
    move: float,
    drawn: Intervals,
) -> None:
    if not len(rows):
        return
    x = _places(rows, curve, places)
    y = rows["value"].to_numpy()
    bounds = _bounds(rows)
    if np.isfinite(bounds[0]).any() and drawn != "none":
        if drawn == "bands" and not curve.is_points and len(rows) > 1:
            axes.fill_between(x, *bounds, color=look["color"], alpha=0.18, linewidth=0)
        else:
            x = x + move
            axes.vlines(x, *bounds, color=look["color"], linewidth=0.8, alpha=0.75)
    axes.plot(x, y, **look | ({"linestyle": "none"} if curve.is_points else {}))


def _finish(axes: Axes, places: dict[str, float], ylabel: str) -> None:
    """Ticks, labels, and a y axis that starts at 0, or below where a value does."""
    ticks = {f"{t:g}": t for t in ((0, 0.5, 1) if places else (0, 0.25, 0.5, 0.75, 1))}
    names = [head_words(site) for site in places]
    axes.set_xticks([*ticks.values(), *places.values()], [*ticks, *names])
    if places:
        axes.axvline(1 + HEAD_STEP / 2, color=GREY, linewidth=0.6)
        for label in axes.get_xticklabels()[len(ticks) :]:
            label.set(rotation=90, fontsize=small())
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel(ylabel)
    low = axes.dataLim.y0
    high = axes.dataLim.y1
    if np.isfinite([low, high]).all():
        low = min(low, 0.0)
        high = max(high, 0.0)
        margin = 0.05 * (high - low or 1)
        axes.set_ylim(low - (margin if low < 0 else 0), high + margin)


def _mark_missing(axes: Axes, rows: pl.DataFrame, places: dict[str, float]) -> None:
    """Crosses at the lower edge where there is no value; in words where there is none at all."""
    missing = rows.filter(pl.col("value").is_null())
    if len(rows) and len(missing) == len(rows):
        axes.text(0.5, 0.5, NOTHING, transform=axes.transAxes, ha="center", color=GREY)
        return
    cells = missing.select("site", "rel_depth").unique(maintain_order=True)
    if x := {places.get(site, depth) for site, depth in cells.rows()}:
        axes.plot(
            sorted(x),
            [0.03] * len(x),
            "x",
            transform=axes.get_xaxis_transform(),
            color=GREY,
            label=NOTHING,
            markersize=4,
            clip_on=False,
        )
