"""The picture of keypoints: the share found against relative depth, a panel per alpha."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.plotting import GREY, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table

DRAWN = ("", "grid", "chance")
ROOM = 1.15  # of the highest curve, where the ceiling is drawn out of the picture
FAR = 1.6  # times the highest curve: a ceiling above it would leave the curves no room


def draw_keypoints(table: Table) -> Figure:
    """See `analyses.keypoints.plot`; to be called below `styled`."""
    rows = table.where(baseline=list(DRAWN))
    for column in ("class", "group"):
        if column in rows.columns:
            cells = rows[column].tolist()
            rows = rows.take(np.array([not cell for cell in cells], bool))
    metrics = [m for m in rows.unique("metric") if re.match(r"pck@", m)]
    figure = new_figure(0.8 + 3.4 * len(metrics), 3.9)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        own = rows.where(metric=metric)
        curves = own.where(baseline="")
        top = float(np.nanmax(np.append(curves["high"], curves["value"]), initial=0))
        chance = own.where(baseline="chance")["value"]
        top = max(top, float(np.nanmax(chance, initial=0)))
        ceiling = own.where(baseline="grid")["value"]
        far = len(ceiling) > 0 and float(np.nanmin(ceiling)) > FAR * top > 0
        shown = own.where(baseline=["", "chance"]) if far else own
        draw_depth_curves(axes, shown, ylabel="share of keypoints found (PCK)", among=rows)
        if far:
            axes.set_ylim(0, ROOM * top)
            _note_ceiling(axes, float(np.nanmin(ceiling)), float(np.nanmax(ceiling)))
        alpha = metric.partition("@")[2]
        axes.set_title(f"PCK at {alpha} ({_counts(curves)})")
    for axes in panels[1:]:
        axes.set_ylabel("")
    add_curve_legend(figure, list(panels))
    return figure


def _note_ceiling(axes: Axes, low: float, high: float) -> None:
    """In words what is above the picture."""
    span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
    axes.annotate(
        f"ceiling (grid): {span} ↑", (0.99, 0.99), xycoords="axes fraction",
        ha="right", va="top", fontsize=7.5, color=GREY,
    )  # fmt: skip


def _counts(rows: Table) -> str:
    low, high = rows["n_pairs"].min(), rows["n_pairs"].max()
    return f"{low} pairs" if low == high else f"{low} to {high} pairs"
