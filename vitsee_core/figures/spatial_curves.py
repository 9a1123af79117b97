"""Curves of spatial structure over depth, and the spectra of single layers. From the columns of
`vitsee spatial`'s table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.depth_curves import (
    add_curve_legend,
    draw_depth_curves,
    site_kind,
)
from vitsee_core.figures.depth_marks import DOTTED, draw_marks
from vitsee_core.plotting import new_figure, shorten, styled
from vitsee_core.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "lds": "LDS: near minus far cosine",
    "lds_scaled": "LDS, distances of this grid",
    "cds": "CDS: decline with distance",
    "cds_scaled": "CDS, distances of this grid",
    "srss": "SRSS: object minus background",
    "rmsc": "RMSC (0: all patches alike)",
    "mean_cos": "mean cosine of patches",
    "fourier_high": "log amplitude, high minus zero",
    "share_image": "variance share of the image",
    "share_position": "variance share of the position",
    "share_rest": "variance share of neither",
}
PANELS_ACROSS = 3


@styled
def draw_spatial(table: Table) -> Figure:
    """One panel per metric over depth, one curve per store with the 95 % interval as a band, the
    shares of variance with what noise would give dotted; below, for each store, the log amplitude
    against the frequency, layers from dark to bright (Park et al. 2023)."""
    there = [metric for metric in LABELS if _has(table, metric)]
    # Where the grid is 16 x 16 both are the same; else only those of the grid have a value.
    metrics = [m for m in there if not (m.endswith("_scaled") and _same(table, m))]
    profiles = table.where(metric="fourier_radial")
    stores = profiles.unique("store") if _has(table, "fourier_radial") else []
    n = len(metrics) + len(stores)
    across = min(PANELS_ACROSS, max(n, 1))
    lines = -(-n // across) or 1
    figure = new_figure(0.4 + 3.6 * across, 0.5 + 2.6 * lines)
    panels = list(figure.subplots(lines, across, squeeze=False).ravel())
    for axes, metric in zip(panels, metrics, strict=False):
        rows = table.where(metric=metric)
        draw_depth_curves(axes, rows, ylabel=LABELS[metric], among=table)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))
        if metric in ("share_image", "share_position"):
            draw_marks(axes, rows, table, "null", DOTTED, "by chance")
    for axes, store in zip(panels[len(metrics) : n], stores, strict=True):
        _draw_profiles(axes, profiles.where(store=store))
    for axes in panels[n:]:
        axes.set_visible(False)
    for axes in panels[: max(0, len(metrics) - across)]:
        axes.set_xlabel("")
    add_curve_legend(figure, panels[: len(metrics)])
    return figure


def _has(table: Table, metric: str) -> bool:
    values = table.where(metric=metric)["value"].astype(float)
    return bool(np.isfinite(values).any())


def _same(table: Table, metric: str) -> bool:
    """Whether a metric of the grid's own distances says what the published one says."""
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
        label = f"depth {depth:g}" if depth in (depths.min(), depths.max()) else "_nolegend_"
        mark = "o" if len(x) < 3 else ""
        axes.plot([0, *x], [0, *y], color=colours(0.9 * depth), linewidth=1.2, marker=mark,
                  label=label)  # fmt: skip
    axes.set_title(shorten(str(rows["store"][0]), 28))
    axes.set_xlabel("frequency (pi per cell)")
    axes.set_ylabel("log amplitude minus zero's")
    axes.set_xlim(0, 1)
    axes.legend(loc="best", fontsize=7)
