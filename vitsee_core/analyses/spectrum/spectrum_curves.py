"""Curves of spectral numbers over depth. From the columns of `vitsee spectrum`'s table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.depth_marks import DOTS, DOTTED, draw_marks
from vitsee_core.figures.log_ticks import DECADES, FINE, plain_log_ticks
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = (
    *("rankme", "effective_rank", "participation_ratio", "alpha", "anisotropy", "twonn"),
    *("nc1", "cdnv", "nc2_norms", "nc2_angles", "nc4"),
)
RANKS = ("rankme", "effective_rank", "participation_ratio")
LOGARITHMIC = (*RANKS, "nc1", "cdnv")


@styled
def draw_spectrum(table: Table) -> Figure:
    """One panel per metric, one curve per store with the 95 % interval as a band, and the values of
    two halves of the images as dots; dotted lines are the caps of ranks, on logarithmic axes."""
    there = [metric for metric in METRICS if metric in table.unique("metric")]
    # A metric without a value (alpha of fewer than 100 channels) needs no panel beside others.
    values = {metric: table.where(metric=metric)["value"].astype(float) for metric in there}
    metrics = [metric for metric in there if not np.isnan(values[metric]).all()] or there

    def finish(axes: Axes, rows: Table, metric: str) -> None:
        for half in ("half_a", "half_b"):
            draw_marks(axes, rows, table, half, DOTS, "half of the images")
        if metric in RANKS:
            draw_marks(axes, rows, table, "cap", DOTTED, "largest possible")
        if metric in LOGARITHMIC and 0 < np.nanmin(values[metric], initial=np.inf) < np.inf:
            _logarithmic(axes, rows, caps=metric in RANKS)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))

    return draw_depth_panels(table, metrics, finish)


def _logarithmic(axes: Axes, rows: Table, *, caps: bool) -> None:
    names = ["value", "half_a", "half_b", *(["cap"] if caps else [])]
    values = np.concatenate([rows[name].astype(float) for name in names])
    values = values[values > 0]
    axes.set_yscale("log")
    axes.set_ylim(0.8 * values.min(), 1.3 * values.max())
    # Every decade where there are several, else what lies within it.
    few = values.max() < 40 * values.min()
    plain_log_ticks(axes.yaxis, FINE if few else DECADES)
