"""Scores against depth: one curve per store, baselines dashed. From a table's columns alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.plotting import GREY, colour, marker, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table

DEPTH_LABEL = "relative depth (embedding or stem 0, last block 1)"
OTHER_LABEL = "relative depth (first 0, last 1)"
FIRST = ("embed", "stem")  # belong to the curve of the blocks' outputs
DASHES = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (3, 1)))
Dashes = dict[str, Any]
BASELINE, BEST = "baseline: ", "best layer"
ALIKE = 1e-9  # values nearer than this are one
HEAD_STEP = 0.09  # of the x axis, a place for each site after the last block


def draw_depth_curves(
    axes: Axes,
    table: Table,
    *,
    by: Sequence[str] = (),
    ylabel: str = "",
    among: Table | None = None,
) -> None:
    """Draw `value` against `rel_depth`, the interval `low` to `high` as a band where there is one.

    A curve joins the sites of one kind (the blocks' outputs with what enters the first block); the
    legend distinguishes the kinds where there are several. Sites that belong to no block (`norm`,
    `pooled`, `logits`) are single points right of depth 1, each named on the axis. Rows with a
    `baseline` are dashed lines of their curve's colour, grey where one value is all curves'.

    Args:
        axes: the panel; `add_curve_legend` draws the legend.
        table: rows of one metric, with the columns store, site, rel_depth, value.
        by: further columns whose values make curves of their own (`k`, `shots`).
        ylabel: of the y axis.
        among: the rows of all panels of a figure, so that a curve looks the same in each.
    """
    among = table if among is None else among
    numbers, own = curve_numbers(among, by), _curves(table, by)
    names = np.array([_baseline(name) for name in _column(table, "baseline")], object)
    dashes, shared = _dashes(among), _shared(table, own, names)
    heads = [s for s in dict.fromkeys(table["site"].tolist()) if site_kind(s) == "head"]
    places = {site: 1 + HEAD_STEP * (i + 1) for i, site in enumerate(heads)}
    several_kinds = len({kind for *_, kind in numbers if kind != "head"}) > 1
    for curve, i in numbers.items():
        rows = np.array([other == curve for other in own], bool)
        text = _label(among, by, curve, several_kinds)
        if curve[-1] == "head":
            _draw_heads(axes, table, rows, names, dashes, i, places, text)
        else:
            _draw(axes, table, rows, names, dashes, i, text, shared)
    for name in dict.fromkeys(n for n in names.tolist() if n):
        label = f"{BASELINE}{name}"
        axes.plot([], [], color=GREY, linestyle=dashes[name], linewidth=1, label=label)
    _finish(axes, places, ylabel)
    axes.set_xlabel(DEPTH_LABEL if any(kind == "out" for *_, kind in numbers) else OTHER_LABEL)


def curve_numbers(table: Table, by: Sequence[str] = ()) -> dict[tuple[Any, ...], int]:
    """(store, values of `by`, kind of site) -> index of its colour and marker; sites that belong to
    no block share the first index of their store."""
    curves = dict.fromkeys(_curves(table, by))
    numbers = {curve: i for i, curve in enumerate(c for c in curves if c[-1] != "head")}
    for curve in curves:
        if curve[-1] == "head":
            same = [i for other, i in numbers.items() if other[:-1] == curve[:-1]]
            numbers[curve] = min(same) if same else max(numbers.values(), default=-1) + 1
    return numbers


def add_curve_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend below all panels, each label once."""
    curves: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            (others if label.startswith((BASELINE, BEST)) else curves).setdefault(label, handle)
    if found := curves | others:
        widest = max(map(len, found))
        columns = max(1, min(len(found), int(figure.bbox.width / figure.dpi * 13 / (widest + 6))))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns,
            columnspacing=1.4,
        )  # fmt: skip


def site_kind(site: str) -> str:
    """The part of a site's name after its block's path: `out`, `norm1`, `attn.branch`; `out` for
    what enters the first block; `head` for sites that belong to no block."""
    if site in FIRST:
        return "out"
    match = re.fullmatch(r".*?\.\d+\.(.+)", site)
    # The last number ends the block's path: stages.0.blocks.1.out.
    while match is not None and (deeper := re.fullmatch(r".*?(?:^|\.)\d+\.(.+)", match[1])):
        match = deeper
    return match[1] if match is not None else "block" if re.search(r"\.\d+$", site) else "head"


def _column(table: Table, name: str) -> list[Any]:
    return table[name].tolist() if name in table.columns else [None] * len(table)


def _baseline(name: Any) -> str:
    return "" if name is None or name != name else str(name)


def _curves(table: Table, by: Sequence[str]) -> list[tuple[Any, ...]]:
    """Each row's curve: its store, the values of `by`, the kind of its site."""
    kinds = [site_kind(site) for site in table["site"].tolist()]
    return list(
        zip(table["store"].tolist(), *(_column(table, name) for name in by), kinds, strict=True)
    )


def _dashes(table: Table) -> Dashes:
    """Baseline -> its dash pattern."""
    names = dict.fromkeys(filter(None, map(_baseline, _column(table, "baseline"))))
    return {name: DASHES[i % len(DASHES)] for i, name in enumerate(names)}


def _label(table: Table, by: Sequence[str], curve: tuple[Any, ...], kinds: bool) -> str:
    """The store, and every other column in which the table has several values."""
    parts = [shorten(str(curve[0]), 28)]
    if kinds and curve[-1] != "head":
        parts.append(curve[-1])
    for name, value in zip(by, curve[1:-1], strict=True):
        if len(set(_column(table, name))) > 1:
            parts.append(f"{name} = {value}")
    return ", ".join(parts)


def _shared(table: Table, curves: Sequence[tuple[Any, ...]], names: Any) -> set[str]:
    """The baselines of which several curves have the same value everywhere."""
    found = set()
    lines = np.array([curve[-1] != "head" for curve in curves], bool)
    for name in dict.fromkeys(n for n in names.tolist() if n):
        picked = lines & (names == name)
        values = table["value"][picked].astype(float)
        several = len({curve for curve, own in zip(curves, picked, strict=True) if own}) > 1
        if several and float(np.ptp(values)) < ALIKE:
            found.add(name)
    return found


def _draw(
    axes: Axes,
    table: Table,
    picked: Any,
    names: Any,
    dashes: Dashes,
    i: int,
    text: str,
    shared: set[str],
) -> None:
    for name in dict.fromkeys(names[picked].tolist()):
        rows = table.take(picked & (names == name))
        rows = rows.take(np.argsort(rows["rel_depth"], kind="stable"))
        x, y = rows["rel_depth"], rows["value"].astype(float)
        if len(rows) == 1:  # a line or band of one point would be invisible
            _draw_points(axes, x, rows, i, dashes.get(name))
        elif name:
            tint = GREY if name in shared else colour(i)
            axes.plot(x, y, color=tint, linestyle=dashes[name], linewidth=1)
        elif "low" in rows.columns and "high" in rows.columns:
            low, high = rows["low"].astype(float), rows["high"].astype(float)
            axes.fill_between(x, low, high, color=colour(i), alpha=0.18, linewidth=0)
        if not name:
            axes.plot(x, y, color=colour(i), marker=marker(i), label=text)


def _draw_heads(
    axes: Axes,
    table: Table,
    picked: Any,
    names: Any,
    dashes: Dashes,
    i: int,
    places: dict[str, float],
    text: str,
) -> None:
    known = axes.get_legend_handles_labels()[1]
    for name in dict.fromkeys(names[picked].tolist()):
        rows = table.take(picked & (names == name))
        x = np.array([places[site] for site in rows["site"].tolist()])
        _draw_points(axes, x, rows, i, dashes.get(name))
        if name:
            continue
        y = rows["value"].astype(float)
        label = "_nolegend_" if any(other.startswith(text) for other in known) else text
        axes.plot(x, y, linestyle="none", color=colour(i), marker=marker(i), label=label)


def _draw_points(axes: Axes, x: Any, rows: Table, i: int, dash: Any) -> None:
    """For each point what its curve has beside the line: a baseline's dashes, or the interval."""
    if dash is not None:
        left, right = x - 0.4 * HEAD_STEP, x + 0.4 * HEAD_STEP
        values = rows["value"].astype(float)
        axes.hlines(values, left, right, color=colour(i), linestyle=dash, linewidth=1)
    elif "low" in rows.columns and "high" in rows.columns:
        axes.vlines(x, rows["low"].astype(float), rows["high"].astype(float), color=colour(i))


def _finish(axes: Axes, places: dict[str, float], ylabel: str) -> None:
    """Ticks, labels, and a y axis that starts at 0, or below where a value does."""
    ticks = {f"{t:g}": t for t in ((0, 0.5, 1) if places else (0, 0.25, 0.5, 0.75, 1))}
    axes.set_xticks([*ticks.values(), *places.values()], [*ticks, *places])
    if places:
        axes.axvline(1 + HEAD_STEP / 2, color=GREY, linewidth=0.6)
        for label in axes.get_xticklabels()[len(ticks) :]:
            label.set(rotation=90, fontsize=7)
    axes.set_ylabel(ylabel)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if np.isfinite([low, high]).all():
        low, high = min(low, 0.0), max(high, 0.0)
        margin = 0.05 * (high - low or 1)
        axes.set_ylim(low - (margin if low < 0 else 0), high + margin)
