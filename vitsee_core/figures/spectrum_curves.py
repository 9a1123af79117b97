"""Curves of spectral numbers over depth. From the columns of `vitsee spectrum`'s table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.depth_marks import DOTS, DOTTED, draw_marks
from vitsee_core.figures.log_ticks import DECADES, FINE, plain_log_ticks
from vitsee_core.plotting import new_figure, shorten, styled
from vitsee_core.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "rankme": "RankMe",
    "effective_rank": "effective rank (centred)",
    "participation_ratio": "participation ratio",
    "alpha": "decay of the spectrum, alpha",
    "anisotropy": "anisotropy (mean cosine)",
    "twonn": "intrinsic dimension (TwoNN)",
    "nc1": "NC1: within / between classes",
    "cdnv": "class-distance normalised variance",
    "nc2_norms": "NC2: spread of class means' norms",
    "nc2_angles": "NC2: angles from a simplex",
    "nc4": "NC4: nearest mean against logits",
}
RANKS = ("rankme", "effective_rank", "participation_ratio")
LOGARITHMIC = (*RANKS, "nc1", "cdnv")


@styled
def draw_spectrum(table: Table) -> Figure:
    """One panel per metric, one curve per store with the 95 % interval as a band, and the values of
    two halves of the images as dots; dotted lines are the caps of ranks, on logarithmic axes."""
    there = [metric for metric in LABELS if metric in table.unique("metric")]
    # A metric without a value (alpha of fewer than 100 channels) needs no panel beside others.
    values = {metric: table.where(metric=metric)["value"].astype(float) for metric in there}
    metrics = [metric for metric in there if not np.isnan(values[metric]).all()] or there
    across = min(3, len(metrics))
    lines = -(-len(metrics) // across)
    figure = new_figure(0.4 + 3.6 * across, 0.5 + 2.6 * lines)
    panels = list(figure.subplots(lines, across, squeeze=False).ravel())
    for axes, metric in zip(panels, metrics, strict=False):
        rows = table.where(metric=metric)
        draw_depth_curves(axes, rows, ylabel=LABELS[metric], among=table)
        for half in ("half_a", "half_b"):
            draw_marks(axes, rows, table, half, DOTS, "half of the images")
        if metric in RANKS:
            draw_marks(axes, rows, table, "cap", DOTTED, "largest possible")
        if metric in LOGARITHMIC and 0 < np.nanmin(values[metric], initial=np.inf) < np.inf:
            _logarithmic(axes, rows, caps=metric in RANKS)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))
        if np.isnan(values[metric]).all():
            axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center")
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    for axes in panels[: len(metrics) - across]:
        axes.set_xlabel("")
    counts = table.groups("store")
    figure.suptitle(
        ", ".join(f"{shorten(str(s), 20)} (n = {int(t['n_images'].max())})" for s, t in counts),
        fontsize=9,
    )
    add_curve_legend(figure, panels[: len(metrics)])
    return figure


def _logarithmic(axes: Axes, rows: Table, *, caps: bool) -> None:
    names = ["value", "half_a", "half_b", *(["cap"] if caps else [])]
    values = np.concatenate([rows[name].astype(float) for name in names])
    values = values[values > 0]
    axes.set_yscale("log")
    axes.set_ylim(0.8 * values.min(), 1.3 * values.max())
    # Every decade where there are several, else what lies within it.
    few = values.max() < 40 * values.min()
    plain_log_ticks(axes.yaxis, FINE if few else DECADES)
