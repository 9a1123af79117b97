"""Scores against depth: one curve per store, baselines dashed. From a table's columns alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import (
    Curve,
    Look,
    baseline_name,
    cells_of,
    curve_label,
    curve_looks,
    curves_of,
    dashes_of,
    shared_baselines,
    site_kind,
)
from vitsee_core.figures.panels import handles_of, legend_below, note_count, small
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.groups import by_group
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import baseline_words, metric_words, site_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

DEPTH_LABEL = "relative depth"
BASELINE, BEST, NOTHING = "baseline: ", "best layer", "no value"
HEAD_STEP = 0.2  # of the x axis, a place for each site after the last block
MOST_INTERVALS = 8  # curves of a panel; the intervals of more would hide them
DODGE = 0.016  # of the x axis, between intervals of different curves
INTERVAL = "95 % interval"


def draw_depth_curves(
    axes: Axes,
    table: Table,
    *,
    by: Sequence[str] = (),
    ylabel: str | None = None,
    among: Table | None = None,
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
        table: rows of one metric, with the columns store, site, rel_depth, value.
        by: further columns whose values make curves of their own (`k`, `shots`).
        ylabel: of the y axis; by default the metric's words.
        among: the rows of all panels of a figure, so that a curve looks the same in each.
        spread: what `low` and `high` are.
        counts: the column whose number stands at the upper right, and what it counts.
    """
    among = table if among is None else among
    own = curves_of(table, by)
    looks = {curve: look for curve, look in curve_looks(among, by).items() if curve in {*own}}
    names = np.array([baseline_name(name) for name in cells_of(table, "baseline")], object)
    dashes, shared = dashes_of(among), shared_baselines(table, own, names)
    heads = [s for s in dict.fromkeys(table["site"].tolist()) if site_kind(s) == "head"]
    places = {site: 1 + HEAD_STEP * (i + 1) for i, site in enumerate(heads)}
    rows_of = {
        curve: table.take(np.array([other == curve for other in own], bool)) for curve in looks
    }
    real = {curve: rows.take(_real(rows)) for curve, rows in rows_of.items()}
    moves, banded = _intervals(among, by)
    metric = str(table["metric"][0]) if len(table) and "metric" in table.columns else ""
    texts: list[str] = []
    for curve, look in looks.items():
        rows, text = rows_of[curve], curve_label(among, by, curve)
        if text in texts and curve[-1] == "head":
            text = "_nolegend_"
        texts.append(text)
        _draw_baselines(axes, rows, curve, look, dashes, shared, places)
        _draw_curve(axes, real[curve], curve, {**look, "label": text}, places,
                    moves.get(curve, 0.0), banded)  # fmt: skip
    for name in dict.fromkeys(n for n in names.tolist() if n):
        axes.plot([], [], color=GREY, linestyle=dashes[name], linewidth=1,
                  label=baseline_words(name, metric))  # fmt: skip
    if moves and spread:
        _explain(axes, spread, banded)
    _finish(axes, places, metric_words(metric) if ylabel is None else ylabel)
    _mark_missing(axes, [rows for rows in real.values() if len(rows)], places)
    note_count(axes, table, *counts)


def add_curve_legend(figure: Figure, every: Sequence[Axes]) -> None:
    """One legend below all panels: curves, then lines and marks that are no store's."""
    found = handles_of(every)
    last = (BASELINE, BEST, "band: ", "bars: ", NOTHING)
    curves = {label: found[label] for label in found if not label.startswith(last)}
    legend_below(figure, curves | found)


def head_words(site: str) -> str:
    return shorten(site_words(site), 16)


def _real(table: Table) -> Any:
    return np.array([not baseline_name(name) for name in cells_of(table, "baseline")], bool)


def _bounds(rows: Table) -> tuple[Any, Any]:
    """`low` and `high`, NaN where the table has none."""
    nothing = np.full(len(rows), np.nan)
    return tuple(rows.columns.get(name, nothing).astype(float) for name in ("low", "high"))  # type: ignore[return-value]


def _intervals(among: Table, by: Sequence[str]) -> tuple[dict[Curve, float], bool | None]:
    """How far each curve that has intervals is moved to the right, and whether intervals are bands
    in all panels; None where they are so many that none is drawn."""
    among = among.take(_real(among) & np.isfinite(_bounds(among)[0]))
    metrics = among.groups("metric") if "metric" in among.columns else [("", among)]
    ends: dict[str, dict[Curve, float]] = {}  # of the curves of each group of stores
    crowded = False
    places = among["rel_depth"].astype(float)
    grid = np.linspace(places.min(initial=0), places.max(initial=1), 41)
    for group, rows in ((group, own) for _, of in metrics for group, own in by_group(of)):
        own, bands = curves_of(rows, by), []
        for curve in dict.fromkeys(c for c in own if c[-1] != "head"):
            ends.setdefault(group, {})[curve] = 0.0
            picked = rows.take(np.array([other == curve for other in own], bool))
            picked = picked.take(np.argsort(picked["rel_depth"], kind="stable"))
            depth = picked["rel_depth"].astype(float)
            bands.append([np.interp(grid, depth, side) for side in _bounds(picked)])
        crowded |= len(bands) <= MOST_INTERVALS and any(
            (np.minimum(a[1], b[1]) > np.maximum(a[0], b[0])).mean() > 0.4
            for i, a in enumerate(bands)
            for b in bands[:i]
        )
    moves = {curve: 0.0 for curves in ends.values() for curve in curves}
    if max(map(len, ends.values()), default=0) > MOST_INTERVALS:
        return moves, None
    if not crowded:
        return moves, True
    if places.max() > 1:  # no depth, but an attribute of the stores
        return moves, False
    for curves in ends.values():
        moves |= {c: DODGE * (i - (len(curves) - 1) / 2) for i, c in enumerate(curves)}
    return moves, False


def _explain(axes: Axes, spread: str, banded: bool | None) -> None:
    if banded is None:
        axes.plot([], [], linestyle="none", label=f"bars: {spread} in the table alone")
    elif banded:
        axes.fill_between([], [], color=GREY, alpha=0.25, linewidth=0, label=f"band: {spread}")
    else:
        axes.plot([], [], linestyle="none", marker="|", color=GREY, label=f"bars: {spread}")


def _places(rows: Table, curve: Curve, places: dict[str, float]) -> Any:
    if curve[-1] == "head":
        return np.array([places[site] for site in rows["site"].tolist()])
    return rows["rel_depth"].astype(float)


def _draw_baselines(
    axes: Axes,
    rows: Table,
    curve: Curve,
    look: Look,
    dashes: Look,
    shared: set[str],
    places: dict[str, float],
) -> None:
    names = np.array([baseline_name(name) for name in cells_of(rows, "baseline")], object)
    for name in dict.fromkeys(n for n in names.tolist() if n):
        own = rows.take(names == name)
        own = own.take(np.argsort(own["rel_depth"], kind="stable"))
        x, y = _places(own, curve, places), own["value"].astype(float)
        tint = GREY if name in shared else look["color"]
        line: Look = {"color": tint, "linestyle": dashes[name], "linewidth": 1}
        if curve[-1] == "head" or len(own) == 1:  # a line of one point would be invisible
            axes.hlines(y, x - 0.4 * HEAD_STEP, x + 0.4 * HEAD_STEP, **line)
        else:
            axes.plot(x, y, **line)


def _draw_curve(
    axes: Axes,
    rows: Table,
    curve: Curve,
    look: Look,
    places: dict[str, float],
    move: float,
    banded: bool | None,
) -> None:
    if not len(rows):
        return
    rows = rows.take(np.argsort(rows["rel_depth"], kind="stable"))
    x, y, bounds = _places(rows, curve, places), rows["value"].astype(float), _bounds(rows)
    points = curve[-1] == "head"
    if np.isfinite(bounds[0]).any() and banded is not None:
        if banded and not points and len(rows) > 1:
            axes.fill_between(x, *bounds, color=look["color"], alpha=0.18, linewidth=0)
        else:
            x = x + move
            axes.vlines(x, *bounds, color=look["color"], linewidth=0.8, alpha=0.75)
    axes.plot(x, y, **look | ({"linestyle": "none"} if points else {}))


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
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if np.isfinite([low, high]).all():
        low, high = min(low, 0.0), max(high, 0.0)
        margin = 0.05 * (high - low or 1)
        axes.set_ylim(low - (margin if low < 0 else 0), high + margin)


def _mark_missing(axes: Axes, rows: Sequence[Table], places: dict[str, float]) -> None:
    """Crosses at the lower edge where there is no value; in words where there is none at all."""
    values = [own["value"].astype(float) for own in rows]
    if values and all(np.isnan(of).all() for of in values):
        axes.text(0.5, 0.5, NOTHING, transform=axes.transAxes, ha="center", color=GREY)
        return
    x = [
        places.get(site, float(depth))
        for own, of in zip(rows, values, strict=True)
        for site, depth, value in zip(own["site"], own["rel_depth"], of, strict=True)
        if value != value
    ]
    if x:
        axes.plot(
            sorted({*x}), [0.03] * len({*x}), "x", transform=axes.get_xaxis_transform(),
            color=GREY, label=NOTHING, markersize=4, clip_on=False,
        )  # fmt: skip
