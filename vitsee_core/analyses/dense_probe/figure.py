"""The picture of dense probes: scores against depth, and images beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import Grid, map_axes, map_title, note_below, stack
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.tables.columns import is_given
from vitsee_core.tables.words import site_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

PICTURES = ("photo", "label", "prediction", "error")
TILE = 9.0  # ems


def draw_dense(table: Table, metrics: Sequence[str]) -> Figure:
    """See `analyses.dense_probe.plot`; to be called below `styled`."""
    metrics = [metric for metric in metrics if metric in table.unique("metric")]
    among = table.where(metric=metrics)
    by = ["l2"] if _several_l2(among) else []
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
    if shown:
        note_below(figure, "colours: classes; red: wrong pixels; white: pixels without a class")
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
            axes.imshow(decode(one[kind]), interpolation="nearest")
        map_axes(axes)
        map_title(axes, grid, titles[kind])


def _several_l2(rows: Table) -> bool:
    """Whether one probe has several rows that differ in l2 only."""
    real = [
        (store, site, metric)
        for store, site, metric, baseline in zip(
            *(rows[name].tolist() for name in ("store", "site", "metric", "baseline")), strict=True
        )
        if not is_given(baseline)
    ]
    return len(set(real)) < len(real)
