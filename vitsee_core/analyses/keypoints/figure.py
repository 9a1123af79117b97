"""Figure of keypoints: the share found against relative depth, a panel per alpha."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.figures.curve_looks import DASHES, curve_looks
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.panels import small
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.words import baseline_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

LINES = ("grid", "still", "chance", "random")
ALIKE = 0.002  # lines this near to one another are one, for all stores
ROOM = 1.12  # times the highest value is the top of a panel
FAR = 1.6  # times the highest curve: a ceiling above it would leave the curves no room


@styled
def plot(table: Table) -> Figure:
    """PCK (mean over classes, else the first metric there is) against relative depth, a panel per
    alpha and a curve per store, with the 95 % interval as a band; the ceiling of the grid and
    chance dashed (Walmer et al. 2023, Figs. 10 right, 31). A ceiling far above the curves is given
    in words."""
    baseline = pl.col("baseline")
    parts = [pl.col(name).is_null() for name in ("class", "group") if name in table.frame.columns]
    rows = table.frame.filter(baseline.is_null() | baseline.is_in(LINES), *parts)
    models = rows.filter(baseline.is_null())
    metrics = [*rows["metric"].unique(maintain_order=True)]
    metrics = [m for m in metrics if m.startswith(f"{metrics[0].partition('@')[0]}@")]

    def finish(axes: Axes, curves: pl.DataFrame, metric: str) -> None:
        lines = rows.filter(baseline.is_in(LINES), metric=metric)
        ceiling = lines.filter(baseline="grid")["value"]
        others = lines.filter(baseline.is_in(["still", "chance"]))["value"]
        top = _highest(curves["high"], curves["value"], others)
        if _highest(ceiling) <= FAR * top:
            top = max(top, _highest(ceiling))
        axes.set_ylim(0, ROOM * top or 1)
        for name, dashes in zip(LINES, DASHES, strict=False):
            line = lines.filter(baseline=name)
            if len(line) and float(np.nanmin(line["value"])) <= ROOM * top:
                _draw_line(axes, line, models, name, dashes)
        if _highest(ceiling) > ROOM * top:
            _note_ceiling(axes, float(np.nanmin(ceiling)), _highest(ceiling))

    spread = "95 % interval over images"
    return draw_depth_panels(models, metrics, finish, spread=spread, counts=("n_pairs", "pairs"))


def _highest(*values: pl.Series) -> float:
    return float(np.nanmax(np.concatenate(values), initial=0))


def _draw_line(
    axes: Axes, rows: pl.DataFrame, models: pl.DataFrame, name: str, dashes: Any
) -> None:
    """A baseline: grey if it is the same for all stores, else in their colours."""
    tints = {curve[0]: look["color"] for curve, look in curve_looks(models).items()}
    values = rows["value"]
    shared = float(np.nanmax(values) - np.nanmin(values)) < ALIKE
    for own in rows.partition_by("store", maintain_order=True):
        own = own.sort("rel_depth", maintain_order=True)
        axes.plot(
            own["rel_depth"], own["value"], color=GREY if shared else tints[own["store"][0]],
            linestyle=dashes, linewidth=1, zorder=1.5,
        )  # fmt: skip
        if shared:
            break
    axes.plot([], [], color=GREY, linestyle=dashes, linewidth=1, label=baseline_words(name))


def _note_ceiling(axes: Axes, low: float, high: float) -> None:
    span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
    axes.annotate(
        f"ceiling (grid): {span} ↑", (0.99, 0.99), xycoords="axes fraction",
        ha="right", va="top", fontsize=small(), color=GREY,
    )  # fmt: skip
