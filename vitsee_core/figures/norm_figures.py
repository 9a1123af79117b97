"""Pictures of token norms: histograms over depth, where outliers lie, and their share over depth.

From the columns of `vitsee norms`' table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.log_ticks import DECADES, FINE, plain_log_ticks
from vitsee_core.figures.site_axes import SiteAxis
from vitsee_core.plotting import COLOURS, GREY, new_figure, shorten, styled
from vitsee_core.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

CURVES = {
    "outlier_share": "patches above {threshold}",
    "outlier_share_mad": "patches above median + 6 MAD",
    "massive_ratio": "largest |activation| / median",
    "neighbour_cos": "cosine of neighbouring patches",
    "bimodality": "bimodality of log norms",
    "norm_median": "median norm of patches",
    "norm": "mean norm of patches",
    "massive_top1": "largest |activation|",
}
MOST_CURVES = 4
MAPS = ("outlier_share", "outlier_share_mad")
TILES = 4
KIND_LOOKS = {"cls": (COLOURS[1], "s", "CLS"), "registers": (COLOURS[2], "^", "registers")}
STORE_INCHES, HISTOGRAM_INCHES, MAP_INCHES, CURVE_INCHES = 4.4, 2.9, 1.55, 2.7


@styled
def draw_norms(table: Table) -> Figure:
    """For each store the histogram of its patch tokens' norms over depth (as Darcet et al. 2024,
    Fig. 4), with the means of class token and registers, and below it maps of how often each patch
    is an outlier, at four depths; then curves over depth, the stores overlaid. What the table does
    not contain is left out.

    Maps are of `outlier_share` where a store has any, else of `outlier_share_mad`.
    """
    stores = table.unique("store")
    with_histogram = "norm_histogram" in table.unique("metric")
    with_maps = any(np.nansum(_cells(table, m)["value"].astype(float)) > 0 for m in MAPS)
    curves = [metric for metric in CURVES if len(_of_sites(table, metric))]
    # A curve that is 0 everywhere says less than the next one.
    curves.sort(key=lambda metric: not np.nansum(_of_sites(table, metric)["value"].astype(float)))
    curves = curves[:MOST_CURVES]
    heights = [
        *([HISTOGRAM_INCHES] if with_histogram else []),
        *([MAP_INCHES] if with_maps else []),
        *([CURVE_INCHES * -(-len(curves) // 2) + 0.3] if curves else []),
    ]
    if not heights:
        return _draw_kinds(table)
    figure = new_figure(max(7.4, STORE_INCHES * len(stores)), sum(heights))
    strips = _strips(figure, len(heights), 1, height_ratios=heights)
    if with_histogram:
        _draw_histograms(strips.pop(0), table)
    if with_maps:
        _draw_maps(strips.pop(0), table)
    if curves:
        _draw_curves(figure, strips.pop(0), table, curves)
    return figure


def _draw_kinds(table: Table) -> Figure:
    """Of a table without patches: norms of other tokens over depth."""
    figure = new_figure(5.0, 3.4)
    axes = figure.subplots()
    rows = table.where(metric=["norm", "norm_median"])
    rows = rows.take(~_given(rows, "row"))
    draw_depth_curves(axes, rows, by=["token", "metric"], ylabel="norm of a token")
    add_curve_legend(figure, [axes])
    return figure


def _strips(figure: Any, rows: int, columns: int, **options: Any) -> list[SubFigure]:
    found: Any = figure.subfigures(rows, columns, squeeze=False, **options)
    return list(found.ravel())


def _given(table: Table, name: str) -> Any:
    """(rows,) whether a column has a value, before and after a CSV."""
    return np.array([v is not None and v == v and v != "" for v in table[name].tolist()], bool)


def _of_sites(table: Table, metric: str) -> Table:
    """A metric's rows about all patches, or the whole site."""
    rows = table.where(metric=metric)
    named = rows["token"] == "patches"
    whole = ~_given(rows, "token") & ~_given(rows, "row")
    return rows.take(named | whole)


def _cells(table: Table, metric: str) -> Table:
    rows = table.where(metric=metric)
    return rows.take(_given(rows, "row"))


# ------------------------------------------------------------------------------------ histograms


def _draw_histograms(figure: SubFigure, table: Table) -> None:
    from matplotlib.colors import LogNorm

    rows = table.where(metric="norm_histogram")
    shares = rows["value"].astype(float)
    scale = LogNorm(float(shares.min()), max(float(shares.max()), 1.01 * float(shares.min())))
    panels = figure.subplots(1, len(table.unique("store")), squeeze=False)[0]
    for axes, (store, own) in zip(panels, table.groups("store"), strict=True):
        image = _draw_histogram(axes, own, scale)
        count = int(own["n_images"].max())
        axes.set_title(f"{shorten(str(store), 28)} (n = {count})")
    panels[0].set_ylabel("norm of a token")
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, aspect=28)
    bar.set_label("share of patch tokens")


def _draw_histogram(axes: Axes, table: Table, scale: Any) -> Any:
    rows = table.where(metric="norm_histogram")
    sites = rows.unique("site")
    places = {site: i for i, site in enumerate(sites)}
    low, high = (rows[name].astype(float) for name in ("norm_from", "norm_to"))
    edges = np.unique(np.round(8 * np.log2([*low, *high])))
    edges = np.arange(edges.min(), edges.max() + 1)
    values = np.full((len(edges) - 1, len(sites)), np.nan)
    bins = np.round(8 * np.log2(low) - edges[0]).astype(int)
    values[bins, [places[site] for site in rows["site"].tolist()]] = rows["value"].astype(float)
    x = np.arange(len(sites) + 1) - 0.5
    image = axes.pcolormesh(x, 2.0 ** (edges / 8), values, norm=scale, cmap="viridis")
    for kind, (tint, mark, name) in KIND_LOOKS.items():
        own = table.where(metric="norm", token=kind)
        if len(own):
            at = [places[site] for site in own["site"].tolist()]
            axes.plot(
                at, own["value"].astype(float), color=tint, marker=mark, linewidth=1, label=name,
                markeredgecolor="white", markeredgewidth=0.5,
            )  # fmt: skip
    medians = table.where(metric="norm_median", token="patches")
    if len(medians):
        at = [places[site] for site in medians["site"].tolist()]
        axes.plot(at, medians["value"].astype(float), color="white", linewidth=2.2)
        axes.plot(
            at, medians["value"].astype(float), color="black", linewidth=1.1, label="median patch"
        )
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.grid(False)
    ticks = SiteAxis.of([(str(table["store"][0]), site) for site in sites], _blocks(table))
    ticks.ticks(16).put_on(axes.xaxis, 3.2 / len(sites))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right", fontsize=7, frameon=True, framealpha=0.85, edgecolor="none")
    return image


def _blocks(table: Table) -> dict[str, str]:
    pairs = zip(table["site"].tolist(), table["block"].tolist(), strict=True)
    return {site: block or "" for site, block in pairs}


# ------------------------------------------------------------------------------------------- maps


def _draw_maps(figure: SubFigure, table: Table) -> None:
    from matplotlib.colors import Normalize

    stores = table.unique("store")
    strips = _strips(figure, 1, len(stores))
    for strip, (_, own) in zip(strips, table.groups("store"), strict=True):
        metric, rows = _mapped(own)
        if not len(rows):
            continue
        shown = rows.unique("site")
        picks = np.unique(np.round(np.linspace(0, len(shown) - 1, TILES)).astype(int))
        top = float(np.nanmax(rows["value"].astype(float)))
        if not top:
            text = f"{shorten(str(own['store'][0]), 28)}: no patch is an outlier"
            strip.text(0.5, 0.5, text, ha="center", va="center", color=GREY)
            continue
        scale = Normalize(0, top)
        panels = strip.subplots(1, len(picks), squeeze=False)[0]
        for axes, i in zip(panels, picks, strict=True):
            image = _draw_tile(axes, rows.where(site=shown[i]), scale)
            axes.set_title(shorten(shown[i].removesuffix(".out"), 14), fontsize=8)
        bar = strip.colorbar(image, ax=list(panels), pad=0.02, shrink=0.8)
        threshold = "fixed" if metric == MAPS[0] else "MAD"
        bar.set_label(f"share of images\n> {threshold} threshold")
        bar.ax.tick_params(labelsize=7)


def _mapped(rows: Table) -> tuple[str, Table]:
    """The map that says something: of the fixed threshold where any patch is above it."""
    for metric in MAPS:
        cells = _cells(rows, metric)
        if len(cells) and (metric == MAPS[-1] or np.nanmax(cells["value"].astype(float)) > 0):
            return metric, cells
    return MAPS[0], _cells(rows, MAPS[0])


def _draw_tile(axes: Axes, rows: Table, scale: Any) -> Any:
    at = [np.array([int(float(v)) for v in rows[name].tolist()]) for name in ("row", "col")]
    values = np.full((at[0].max() + 1, at[1].max() + 1), np.nan)
    values[at[0], at[1]] = rows["value"].astype(float)
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color=GREY)
    return axes.imshow(values, norm=scale, cmap="magma", origin="upper")


# ----------------------------------------------------------------------------------------- curves


def _draw_curves(figure: Figure, strip: SubFigure, table: Table, metrics: Sequence[str]) -> None:
    lines = -(-len(metrics) // 2)
    panels = list(np.ravel(strip.subplots(lines, min(2, len(metrics)), squeeze=False)))
    threshold = str(table.notes.get("threshold", "the threshold"))
    for axes, metric in zip(panels, metrics, strict=False):
        rows = _of_sites(table, metric)
        label = CURVES[metric].format(threshold=threshold)
        draw_depth_curves(axes, rows, ylabel=label, among=table)
        values = rows["value"].astype(float)
        if metric in ("massive_ratio", "massive_top1"):
            low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=0)
            if 0 < 10 * low < high:
                axes.set_yscale("log")
                axes.set_ylim(0.8 * low, 1.3 * high)
                plain_log_ticks(axes.yaxis, FINE if high < 100 * low else DECADES)
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    add_curve_legend(figure, panels[: len(metrics)])
