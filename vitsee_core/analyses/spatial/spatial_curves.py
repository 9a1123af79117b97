"""Curves of spatial structure over depth, and the spectra of single layers. From the columns of
`vitsee spatial`'s table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

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
    frame = table.frame
    known = frame.filter(pl.col("value").is_finite())["metric"].unique()
    there = [metric for metric in METRICS if metric in known]
    # Where the grid is 16 x 16 both are the same; else only those of the grid have a value.
    metrics = [m for m in there if not (m.endswith("_scaled") and _same(frame, m))]
    profiles = frame.filter(metric=PROFILES)
    stores = profiles.partition_by("store", maintain_order=True) if PROFILES in known else []
    stores = stores if len(stores) <= MOST_STORES or not metrics else []
    curves = CurveGrid.of(max(1, len(metrics)), frame)
    below = [Grid(len(stores))] if stores else []
    figure, parts = stack(curves, *below)
    panels = curves.panels(parts[0], of_metrics(frame, metrics))
    among = frame.filter(pl.col("metric").is_in(metrics))
    for axes, metric, rows in panels:
        draw_depth_curves(axes, rows, among=among)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))
        if metric in ("share_image", "share_position"):
            draw_marks(axes, rows, frame, "null", DOTTED, "by chance")
    curves.finish(panels)
    every = below[0].axes(parts[1]) if stores else []
    for axes, store in zip(every, stores, strict=True):
        _draw_profiles(axes, store)
    add_curve_legend(figure, [*(axes for axes, *_ in panels), *every])
    return figure


def _same(rows: pl.DataFrame, metric: str) -> bool:
    """Whether a metric scaled to the grid equals the published one."""
    published = rows.filter(metric=metric.removesuffix("_scaled"))["value"].to_numpy()
    own = rows.filter(metric=metric)["value"].to_numpy()
    return len(own) == len(published) and np.allclose(own, published, equal_nan=True)


def _draw_profiles(axes: Axes, rows: pl.DataFrame) -> None:
    import matplotlib

    kinds = {site: site_kind(site) for site in rows["site"].unique(maintain_order=True)}
    main = "out" if "out" in kinds.values() else next(iter(kinds.values()))
    rows = rows.filter(pl.col("site").is_in([s for s, kind in kinds.items() if kind == main]))
    ends = {rows["rel_depth"].min(): "first layer", rows["rel_depth"].max(): "last layer"}
    colours = matplotlib.colormaps["viridis"]
    for own in rows.partition_by("site", maintain_order=True):
        depth, x, y = own["rel_depth"][0], own["frequency"], own["value"]
        label = f"spectrum of the {ends[depth]}" if depth in ends else "_nolegend_"
        mark = "o" if len(x) < 3 else ""
        axes.plot([0, *x], [0, *y], color=colours(0.9 * depth), marker=mark,
                  label=label)  # fmt: skip
    axes.set_title(shorten(str(rows["store"][0]), 28))
    axes.set_xlabel("frequency (pi per cell)")
    axes.set_ylabel(metric_words(PROFILES))
    note_count(axes, rows)
    axes.set_xlim(0, 1)
