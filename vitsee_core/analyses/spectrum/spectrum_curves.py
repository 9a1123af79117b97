"""Curves of spectral numbers over depth. From the columns of `vitsee spectrum`'s table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

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
    every_row = table.frame
    there = [metric for metric in METRICS if metric in every_row["metric"]]
    # A metric without a value (alpha of fewer than 100 channels) needs no panel beside others.
    lowest = dict(every_row.group_by("metric").agg(pl.col("value").min()).rows())
    metrics = [metric for metric in there if lowest[metric] is not None] or there

    def finish(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        for half in ("half_a", "half_b"):
            draw_marks(axes, rows, every_row, half, DOTS, "half of the images")
        if metric in RANKS:
            draw_marks(axes, rows, every_row, "cap", DOTTED, "largest possible")
        if metric in LOGARITHMIC and (lowest[metric] or 0) > 0:
            _logarithmic(axes, rows, caps=metric in RANKS)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))

    return draw_depth_panels(every_row, metrics, finish)


def _logarithmic(axes: Axes, rows: pl.DataFrame, *, caps: bool) -> None:
    names = ["value", "half_a", "half_b", *(["cap"] if caps else [])]
    values = rows.select(names).to_numpy()
    values = values[values > 0]
    axes.set_yscale("log")
    axes.set_ylim(0.8 * values.min(), 1.3 * values.max())
    # Every decade where there are several, else what lies within it.
    few = values.max() < 40 * values.min()
    plain_log_ticks(axes.yaxis, FINE if few else DECADES)
