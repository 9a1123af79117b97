"""The picture of keypoints: the share found against relative depth, a panel per alpha."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.depth_curves import (
    BASELINE,
    DASHES,
    add_curve_legend,
    curve_numbers,
    draw_depth_curves,
)
from vitsee_core.plotting import GREY, colour, new_figure
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table

LINES = ("grid", "chance")
ALIKE = 0.002  # lines this near to one another are one, for all stores
ROOM = 1.12  # times the highest value is the top of a panel
FAR = 1.6  # times the highest curve: a ceiling above it would leave the curves no room


def draw_keypoints(table: Table) -> Figure:
    """See `analyses.keypoints.plot`; to be called below `styled`."""
    rows = table.where(baseline=["", *LINES])
    for column in ("class", "group"):
        if column in rows.columns:
            cells = rows[column].tolist()
            rows = rows.take(np.array([not cell for cell in cells], bool))
    models = rows.where(baseline="")
    metrics = [m for m in rows.unique("metric") if re.match(r"pck@", m)]
    figure = new_figure(0.8 + 3.4 * len(metrics), 3.9)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        own = rows.where(metric=metric)
        curves, lines = (own.where(baseline=name) for name in ("", list(LINES)))
        draw_depth_curves(axes, curves, ylabel="share of keypoints found (PCK)", among=models)
        ceiling = lines.where(baseline="grid")["value"]
        top = _highest(curves["high"], curves["value"], lines.where(baseline="chance")["value"])
        if _highest(ceiling) <= FAR * top:
            top = max(top, _highest(ceiling))
        axes.set_ylim(0, ROOM * top or 1)
        for name, dashes in zip(LINES, DASHES, strict=False):
            line = lines.where(baseline=name)
            if len(line) and float(np.nanmin(line["value"])) <= ROOM * top:
                _draw_line(axes, line, models, name, dashes)
        if _highest(ceiling) > ROOM * top:
            _note_ceiling(axes, float(np.nanmin(ceiling)), _highest(ceiling))
        alpha = metric.partition("@")[2]
        axes.set_title(f"PCK at {alpha} ({_counts(curves)})")
    for axes in panels[1:]:
        axes.set_ylabel("")
    add_curve_legend(figure, list(panels))
    return figure


def _highest(*values: Float) -> float:
    return float(np.nanmax(np.concatenate(values), initial=0))


def _draw_line(axes: Axes, rows: Table, models: Table, name: str, dashes: Any) -> None:
    """A baseline: grey where it is the same for all stores, else in their colours."""
    numbers = curve_numbers(models)
    values = rows["value"]
    shared = float(np.nanmax(values) - np.nanmin(values)) < ALIKE
    for label, own in rows.groups("store"):
        own = own.take(np.argsort(own["rel_depth"], kind="stable"))
        first = min(i for (store, *_), i in numbers.items() if store == label)
        axes.plot(
            own["rel_depth"], own["value"], color=GREY if shared else colour(first),
            linestyle=dashes, linewidth=1, zorder=1.5,
        )  # fmt: skip
        if shared:
            break
    axes.plot([], [], color=GREY, linestyle=dashes, linewidth=1, label=f"{BASELINE}{name}")


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
