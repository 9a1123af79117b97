"""The picture of dense probes: scores against depth, and images beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import polars as pl

from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import Grid, em, grow, map_axes, map_title, note_below, stack
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.tables.words import site_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

PICTURES = ("photo", "label", "prediction", "error")
TILE = 9.0  # ems
LETTER = 0.56  # ems that a letter of the caption takes


def draw_dense(table: Table, metrics: Sequence[str]) -> Figure:
    """Draw the figure that `analyses.dense_probe.plot` describes; call it inside `styled`."""
    among = table.frame.filter(pl.col("metric").is_in(metrics))
    metrics = [metric for metric in metrics if metric in among["metric"]]
    by = _settings(among)
    shown: Sequence[Mapping[str, Any]] = table.notes.get("shown", ())
    curves = CurveGrid.of(len(metrics), among)
    tall = TILE + 2.2
    grids = [Grid(len(PICTURES), TILE, tall, TILE) for _ in shown]
    figure, parts = stack(curves, *grids)
    panels = curves.panels(parts[0], of_metrics(among, metrics))
    for axes, _, rows in panels:
        draw_depth_curves(axes, rows, by=by, among=among)
        axes.set_ylim(bottom=0)
    curves.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    for part, grid, one in zip(parts[1:], grids, shown, strict=True):
        _draw_shown(part, grid, one)
    if text := _caption(table.notes, float(figure.get_figwidth()) / em()):
        note_below(figure, text)
        grow(figure, em(1.3 * text.count("\n")))
    return figure


def _draw_shown(part: Any, grid: Grid, one: Mapping[str, Any]) -> None:
    right = one.get("right")
    titles = {
        "photo": str(one["image"]),
        "label": "label",
        "prediction": site_words(str(one["site"])),
        "error": "no pixel counts" if right is None else f"{right:.0%} right",
    }
    for axes, kind in zip(grid.axes(part), PICTURES, strict=True):
        if kind in one:
            axes.imshow(decode(one[kind]), interpolation="nearest", origin="upper")
        map_axes(axes)
        map_title(axes, grid, titles[kind])


def _settings(rows: pl.DataFrame) -> list[str]:
    """The columns, among l2_relative and k, in which several rows of one probe differ."""
    probe = [name for name in ("store", "site", "metric", "baseline") if name in rows.columns]
    there = [name for name in ("l2_relative", "k") if name in rows.columns]
    values = rows.group_by(probe).agg(pl.col(there).drop_nulls().n_unique())
    return [name for name in there if (values[name] > 1).any()]


def _caption(notes: Mapping[str, Any], width: float) -> str:
    """The text below the figure, for a width in ems: the protocol, and the points in which the run
    differs from it."""
    lines = []
    if protocol := notes.get("protocol"):
        unlike = "; ".join(protocol["differences"])
        lines += wrap(f"after {protocol['preset']}, but: {unlike}", int(width / LETTER))
    if notes.get("shown"):
        lines.append(
            "colours: depth, lighter is farther; red: off by the depth itself; white: no depth"
            if "pixels with a depth" in notes.get("truth", {})
            else "colours: classes; red: wrong pixels; white: pixels without a class"
        )
    return "\n".join(lines)
