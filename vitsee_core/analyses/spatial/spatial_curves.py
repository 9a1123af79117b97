"""Curves of spatial structure over depth, and the spectra of single layers. From the columns of
`vitsee spatial`'s table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.depth_marks import DOTTED, draw_marks
from vitsee_core.figures.panels import Grid, note_count, stack
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = (
    *("lds", "lds_scaled", "cds", "cds_scaled", "srss", "rmsc", "mean_cos", "fourier_high"),
    *("share_image", "share_position", "share_rest"),
)
PROFILES = "fourier_radial"
MOST_STORES = 6  # with a panel of spectra each


@styled
def draw_spatial(table: Table) -> Figure:
    """One panel per metric over depth, one curve per store with the 95 % interval as a band, the
    shares of variance with what noise would give dotted; below, for each store (up to
    `MOST_STORES`), the log amplitude against the frequency, layers from dark to bright (Park et al.
    2023)."""
    there = [metric for metric in METRICS if _has(table, metric)]
    # Where the grid is 16 x 16 both are the same; else only those of the grid have a value.
    metrics = [m for m in there if not (m.endswith("_scaled") and _same(table, m))]
    profiles = table.where(metric=PROFILES)
    stores = profiles.unique("store") if _has(table, PROFILES) else []
    stores = stores if len(stores) <= MOST_STORES or not metrics else []
    curves = CurveGrid.of(max(1, len(metrics)), table)
    below = [Grid(len(stores))] if stores else []
    figure, parts = stack(curves, *below)
    panels = curves.panels(parts[0], of_metrics(table, metrics))
    for axes, metric, rows in panels:
        draw_depth_curves(axes, rows, among=table.where(metric=metrics))
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))
        if metric in ("share_image", "share_position"):
            draw_marks(axes, rows, table, "null", DOTTED, "by chance")
    curves.finish(panels)
    every = below[0].axes(parts[1]) if stores else []
    for axes, store in zip(every, stores, strict=True):
        _draw_profiles(axes, profiles.where(store=store))
    add_curve_legend(figure, [*(axes for axes, *_ in panels), *every])
    return figure


def _has(table: Table, metric: str) -> bool:
    values = table.where(metric=metric)["value"].astype(float)
    return bool(np.isfinite(values).any())


def _same(table: Table, metric: str) -> bool:
    """Whether a metric scaled to the grid equals the published one."""
    published = table.where(metric=metric.removesuffix("_scaled"))["value"].astype(float)
    own = table.where(metric=metric)["value"].astype(float)
    return len(own) == len(published) and np.allclose(own, published, equal_nan=True)


def _draw_profiles(axes: Axes, rows: Table) -> None:
    import matplotlib

    kinds = [site_kind(site) for site in rows["site"].tolist()]
    main = "out" if "out" in kinds else kinds[0]
    rows = rows.take(np.array([kind == main for kind in kinds], bool))
    depths = rows["rel_depth"].astype(float)
    colours = matplotlib.colormaps["viridis"]
    for _, own in rows.groups("site"):
        depth = float(own["rel_depth"][0])
        x, y = own["frequency"].astype(float), own["value"].astype(float)
        ends = {depths.min(): "first layer", depths.max(): "last layer"}
        label = f"spectrum of the {ends[depth]}" if depth in ends else "_nolegend_"
        mark = "o" if len(x) < 3 else ""
        axes.plot([0, *x], [0, *y], color=colours(0.9 * depth), marker=mark,
                  label=label)  # fmt: skip
    axes.set_title(shorten(str(rows["store"][0]), 28))
    axes.set_xlabel("frequency (pi per cell)")
    axes.set_ylabel(metric_words(PROFILES))
    note_count(axes, rows)
    axes.set_xlim(0, 1)
