"""Figures of token norms: histograms over depth, where outliers are, and their share over depth.
From the columns of `vitsee norms`' table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_panels import CurveGrid, Panel
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.log_ticks import DECADES, FINE, plain_log_ticks
from vitsee_core.figures.panels import (
    Grid,
    bars_at_ends,
    count,
    handles_of,
    legend_below,
    map_axes,
    map_title,
    name_part,
    note_count,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.figures.site_axes import SiteAxis
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = (
    *("outlier_share", "outlier_share_mad", "massive_ratio", "neighbour_cos", "bimodality"),
    *("norm_median", "norm", "massive_top1"),
)
MOST_CURVES = 4
MOST_STORES = 6  # with panels of their own
MAPS = ("outlier_share", "outlier_share_mad")
TILES = 4
KIND_LOOKS = {"cls": "s", "registers": "^"}  # white, to be no store's colour


@styled
def draw_norms(table: Table) -> Figure:
    """For each store the histogram of its patch tokens' norms over depth (as Darcet et al. 2024,
    Fig. 4), with the means of class token and registers, and below it maps of how often each patch
    is an outlier, at four depths; then curves over depth, the stores overlaid. What the table does
    not contain is left out, and so are histograms and maps of more than `MOST_STORES` stores, if
    there are curves.

    Maps are of `outlier_share` where a store has any, else of `outlier_share_mad`.
    """
    with_histogram = "norm_histogram" in table.unique("metric")
    with_maps = any(np.nansum(_cells(table, m)["value"].astype(float)) > 0 for m in MAPS)
    curves = [metric for metric in CURVES if len(_of_sites(table, metric))]
    # A curve that is 0 everywhere says less than the next one.
    curves.sort(key=lambda metric: not np.nansum(_of_sites(table, metric)["value"].astype(float)))
    curves = curves[:MOST_CURVES]
    if curves and len(table.unique("store")) > MOST_STORES:
        with_histogram = with_maps = False
    if not (with_histogram or with_maps or curves):
        return _draw_kinds(table)
    stores = list(table.groups("store"))
    tiles = [_tiles(own) for _, own in stores] if with_maps else []
    histograms = [Grid(len(stores), width=28, widest=44, height=17)] if with_histogram else []
    maps = [small_maps(len(sites), 3) if sites else Grid(1, height=2.5) for *_, sites in tiles]
    below = [CurveGrid.of(len(curves), table)] if curves else []
    figure, parts = stack(*histograms, *maps, *below)
    left, of_histograms, curves_of = iter(parts), {}, {}
    if with_histogram:
        every = histograms[0].axes(next(left))
        _draw_histograms(histograms[0], every, table)
        of_histograms = handles_of(every)
    for (store, own), grid, (metric, rows, sites) in zip(stores, maps, tiles, strict=False):
        _draw_maps(grid, next(left), store, own, metric, rows, sites)
    if curves:
        panels = below[0].panels(next(left), [(m, _of_sites(table, m)) for m in curves])
        _draw_curves(panels, table)
        below[0].finish(panels)
        curves_of = handles_of([axes for axes, *_ in panels])
    legend_below(figure, curves_of | of_histograms)
    return figure


def _draw_kinds(table: Table) -> Figure:
    """Norms of the other tokens over depth, of a table without patches."""
    norms = table.where(metric=["norm", "norm_median"])
    norms = norms.take(~norms.given("row"))
    grid = CurveGrid.of(1, norms)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [("norm", norms)])
    for axes, _, rows in panels:
        by = ["token", "metric"]
        draw_depth_curves(axes, rows, by=by, ylabel="norm of a token", among=norms)
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _of_sites(table: Table, metric: str) -> Table:
    """A metric's rows about all patches, or the whole site."""
    rows = table.where(metric=metric)
    named = rows["token"] == "patches"
    whole = ~rows.given("token") & ~rows.given("row")
    return rows.take(named | whole)


def _cells(table: Table, metric: str) -> Table:
    rows = table.where(metric=metric)
    return rows.take(rows.given("row"))


# ------------------------------------------------------------------------------------ histograms


def _draw_histograms(grid: Grid, every: Sequence[Axes], table: Table) -> None:
    from matplotlib.colors import LogNorm

    shares = table.where(metric="norm_histogram")["value"].astype(float)
    scale = LogNorm(float(shares.min()), max(float(shares.max()), 1.01 * float(shares.min())))
    for axes, (store, own) in zip(every, table.groups("store"), strict=True):
        image = _draw_histogram(axes, own, scale)
        axes.set_title(shorten(str(store), 28))
        axes.set_ylabel("norm of a token")
        note_count(axes, own)
    bars_at_ends(grid, every, image, "share of patch tokens")


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
    for kind, mark in KIND_LOOKS.items():
        own = table.where(metric="norm", token=kind)
        if len(own):
            at = [places[site] for site in own["site"].tolist()]
            axes.plot(
                at, own["value"].astype(float), color="white", marker=mark, linewidth=1,
                label=token_words(kind), markeredgecolor="black", markeredgewidth=0.6,
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
    ticks.ticks(16).put_on(axes.xaxis)
    return image


def _blocks(table: Table) -> dict[str, str]:
    pairs = zip(table["site"].tolist(), table["block"].tolist(), strict=True)
    return {site: block or "" for site, block in pairs}


# ------------------------------------------------------------------------------------------- maps


def _tiles(own: Table) -> tuple[str, Table, list[str]]:
    """For a store: the metric of its maps, their rows, and the drawn sites: those with most
    outliers, in their order."""
    metric, rows = _mapped(own)
    most = {site: np.nanmax(of["value"].astype(float)) for site, of in rows.groups("site")}
    chosen = sorted((site for site in most if most[site] > 0), key=lambda site: -most[site])[:TILES]
    return metric, rows, [site for site in most if site in chosen]


def _draw_maps(
    grid: Grid, part: Any, store: Any, own: Table, metric: str, rows: Table, sites: list[str]
) -> None:
    name = f"{shorten(str(store), 28)}, n = {count(own)}"
    if not sites:
        name_part(part, f"{name}: no patch is an outlier")
        return
    above = "norm is above the threshold" if metric == MAPS[0] else "norm is above median + 6 MAD"
    text = f"{name}: patches whose {above}, in the layers with most"
    name_part(part, text)
    top = float(np.nanmax(rows["value"].astype(float)))
    every = grid.axes(part)
    for axes, site in zip(every, sites, strict=True):
        image = _draw_tile(axes, rows.where(site=site), top)
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, every, image, "share of images")


def _mapped(rows: Table) -> tuple[str, Table]:
    """The informative map: of the fixed threshold if any patch is above it."""
    for metric in MAPS:
        cells = _cells(rows, metric)
        if len(cells) and (metric == MAPS[-1] or np.nanmax(cells["value"].astype(float)) > 0):
            return metric, cells
    return MAPS[0], _cells(rows, MAPS[0])


def _draw_tile(axes: Axes, rows: Table, top: float) -> Any:
    at = [np.array([int(float(v)) for v in rows[name].tolist()]) for name in ("row", "col")]
    values = np.full((at[0].max() + 1, at[1].max() + 1), np.nan)
    values[at[0], at[1]] = rows["value"].astype(float)
    map_axes(axes)
    return axes.imshow(values, vmin=0, vmax=top, cmap="magma", origin="upper")


# ----------------------------------------------------------------------------------------- curves


def _draw_curves(panels: Sequence[Panel], table: Table) -> None:
    threshold = table.notes.get("threshold")
    for axes, metric, rows in panels:
        named = metric == "outlier_share" and threshold is not None
        label = f"patches above {threshold}" if named else None
        draw_depth_curves(axes, rows, ylabel=label, among=table)
        values = rows["value"].astype(float)
        if metric in ("massive_ratio", "massive_top1"):
            low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=0)
            if 0 < 10 * low < high:
                axes.set_yscale("log")
                axes.set_ylim(0.8 * low, 1.3 * high)
                plain_log_ticks(axes.yaxis, FINE if high < 100 * low else DECADES)
