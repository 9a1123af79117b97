"""Figures of token norms: histograms over depth, where outliers are, and their share over depth.
From the columns of `vitsee norms`' table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.clip_strips import Moment, of_clips
from vitsee_core.figures.curve_panels import CurveGrid, Panel
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.head_tiles import Tiles, draw_tiles, tile_grid
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    colour_bar,
    count,
    evenly,
    handles_of,
    legend_below,
    map_axes,
    map_title,
    name_part,
    note_count,
    room,
    small_maps,
    stack,
)
from vitsee_core.figures.patch_sheets import place_values, places_in
from vitsee_core.figures.plotting import DECADES, FINE, plain_log_ticks, styled
from vitsee_core.figures.site_axes import SiteAxis
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = (
    *(
        "outlier_share",
        "outlier_share_mad",
        "massive_ratio",
        "neighbour_cos",
        "bimodality",
    ),
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
    rows = table.written
    by_metric = {str(own["metric"][0]): own for own in rows.partition_by("metric")}
    with_histogram = "norm_histogram" in by_metric
    with_maps = any((_cells(rows, metric)["value"] > 0).any() for metric in MAPS)
    of_sites = {m: _of_sites(by_metric[m]) for m in CURVES if m in by_metric}
    curves = [metric for metric, own in of_sites.items() if len(own)]
    # A curve that is 0 everywhere says less than the next one.
    curves.sort(key=lambda metric: not of_sites[metric]["value"].sum())
    curves = curves[:MOST_CURVES]
    stores = rows.partition_by("store", maintain_order=True)
    if curves and len(stores) > MOST_STORES:
        with_histogram = with_maps = False
    if not (with_histogram or with_maps or curves):
        return _draw_kinds(rows)
    tiles = [_tiles(own) for own in stores] if with_maps else []
    histograms = (
        [PanelGrid(len(stores), width=28, widest=44, height=17)] if with_histogram else []
    )
    maps = [
        tile_grid(_strips(cells, sites))
        if sites and of_clips(cells)
        else small_maps(len(sites), 3)
        if sites
        else PanelGrid(1, height=2.5)
        for _, cells, sites in tiles
    ]
    below = [CurveGrid.of(len(curves), rows)] if curves else []
    figure, parts = stack(*histograms, *maps, *below)
    left = iter(parts)
    of_histograms = {}
    curves_of = {}
    if with_histogram:
        every = histograms[0].axes(next(left))
        _draw_histograms(histograms[0], every, stores)
        of_histograms = handles_of(every)
    for own, grid, (metric, cells, sites) in zip(stores, maps, tiles, strict=False):
        n_frames = table.notes.get("clip", {}).get("frames")
        _draw_maps(grid, next(left), own, metric, cells, sites, n_frames)
    if curves:
        panels = below[0].panels(next(left), [(m, of_sites[m]) for m in curves])
        among = pl.concat([of_sites[metric] for metric in of_sites])
        _draw_curves(panels, among, table.notes.get("threshold"))
        below[0].finish(panels)
        curves_of = handles_of([axes for axes, *_ in panels])
    legend_below(figure, curves_of | of_histograms)
    return figure


def _draw_kinds(rows: pl.DataFrame) -> Figure:
    """Norms of the other tokens over depth, of a table without patches."""
    norms = rows.filter(
        pl.col("metric").is_in(["norm", "norm_median"]), pl.col("row").is_null()
    )
    grid = CurveGrid.of(1, norms)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [("norm", norms)])
    for axes, _, own in panels:
        by = ["token", "metric"]
        draw_depth_curves(axes, own, by=by, ylabel="norm of a token", among=norms)
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _of_sites(rows: pl.DataFrame) -> pl.DataFrame:
    """A metric's rows about all patches, or the whole site."""
    whole = pl.col("token").is_null() & pl.col("row").is_null()
    return rows.filter((pl.col("token") == "patches").fill_null(False) | whole)


def _cells(rows: pl.DataFrame, metric: str) -> pl.DataFrame:
    return rows.filter(pl.col("row").is_not_null(), metric=metric)


# ------------------------------------------------------------------------------------ histograms


def _draw_histograms(
    grid: PanelGrid, every: Sequence[Axes], stores: Sequence[pl.DataFrame]
) -> None:
    from matplotlib.colors import LogNorm

    shares = pl.concat(
        [own.filter(metric="norm_histogram")["value"] for own in stores]
    ).to_numpy()
    scale = LogNorm(
        float(shares.min()), max(float(shares.max()), 1.01 * float(shares.min()))
    )
    for axes, own in zip(every, stores, strict=True):
        image = _draw_histogram(axes, own, scale)
        axes.set_title(shorten(own["store"][0], 28))
        axes.set_ylabel("norm of a token")
        note_count(axes, own)
    bars_at_ends(grid, every, image, "share of patch tokens")


def _draw_histogram(axes: Axes, rows: pl.DataFrame, scale: Any) -> Any:
    bins = rows.filter(metric="norm_histogram")
    sites = bins["site"].unique(maintain_order=True).to_list()
    places = (
        pl.col("site").cast(pl.String).replace_strict({s: i for i, s in enumerate(sites)})
    )
    low, high = (8 * np.log2(bins[name].to_numpy()) for name in ("norm_from", "norm_to"))
    first = np.round(low.min())
    last = np.round(high.max())
    values = np.full((int(last - first), len(sites)), np.nan)
    columns = bins.select(places).to_series().to_numpy()
    values[np.round(low - first).astype(int), columns] = bins["value"].to_numpy()
    x = np.arange(len(sites) + 1) - 0.5
    edges = np.arange(first, last + 1)
    image = axes.pcolormesh(x, 2.0 ** (edges / 8), values, norm=scale, cmap="viridis")
    among = rows.filter(pl.col("site").is_in(sites))
    for kind, mark in KIND_LOOKS.items():
        own = among.filter(metric="norm", token=kind).select(places, "value")
        if len(own):
            axes.plot(
                *own.get_columns(),
                color="white",
                marker=mark,
                linewidth=1,
                label=token_words(kind),
                markeredgecolor="black",
                markeredgewidth=0.6,
            )
    medians = among.filter(metric="norm_median", token="patches").select(places, "value")
    if len(medians):
        axes.plot(*medians.get_columns(), color="white", linewidth=2.2)
        axes.plot(
            *medians.get_columns(), color="black", linewidth=1.1, label="median patch"
        )
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.grid(False)
    blocks = dict(
        rows.select("site", pl.col("block").cast(pl.String).fill_null("")).iter_rows()
    )
    ticks = SiteAxis.of([(rows["store"][0], site) for site in sites], blocks)
    ticks.ticks(16).put_on(axes.xaxis)
    return image


# ------------------------------------------------------------------------------------------- maps


def _tiles(own: pl.DataFrame) -> tuple[str, pl.DataFrame, list[str]]:
    """For a store: the metric of its maps (of the fixed threshold if any patch is above it), their
    rows, and the drawn sites: those with most outliers, in their order."""
    fixed, relative = (_cells(own, metric) for metric in MAPS)
    above = (fixed["value"] > 0).any() or not len(relative)
    metric, cells = (MAPS[0], fixed) if above else (MAPS[1], relative)
    most = cells.group_by("site", maintain_order=True).agg(pl.col("value").max())
    chosen = most.filter(pl.col("value") > 0).sort(
        "value", descending=True, maintain_order=True
    )
    shown = {*chosen["site"].head(TILES)}
    return metric, cells, [site for site in most["site"] if site in shown]


def _draw_maps(
    grid: PanelGrid,
    part: Any,
    own: pl.DataFrame,
    metric: str,
    cells: pl.DataFrame,
    sites: list[str],
    n_frames: int | None,
) -> None:
    name = f"{shorten(own['store'][0], 28)}, n = {count(own)}"
    if not sites:
        name_part(part, f"{name}: no patch is an outlier")
        return
    above = (
        "norm is above the threshold"
        if metric == MAPS[0]
        else "norm is above median + 6 MAD"
    )
    text = f"{name}: patches whose {above}, in the layers with most"
    name_part(part, text)
    top: Any = cells["value"].max()
    if of_clips(cells):
        _draw_strips(grid, part, cells, sites, top, n_frames)
        return
    every = grid.axes(part)
    for axes, site in zip(every, sites, strict=True):
        of_site = cells.filter(site=site)
        rows, cols = of_site.select("row", "col").max().row(0)
        map_axes(axes)
        look: dict[str, Any] = {
            "vmin": 0,
            "vmax": top,
            "cmap": "magma",
            "origin": "upper",
        }
        image = axes.imshow(place_values(of_site, (rows + 1, cols + 1)), **look)
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, every, image, "share of images")


def _strips(
    cells: pl.DataFrame, sites: Sequence[str], n_frames: int | None = None
) -> Tiles:
    """The maps of clips: a line per site, a column per place in time, as many as there is room
    for. n_frames: sampled of a clip, as many as there are places where None."""
    maps: dict[tuple[int, int], Float] = {}
    of_time = evenly(sorted(cells["frame"].unique()), max(2, int((room() - 14) / 4)))
    n = cells["frame"].n_unique()
    for i, site in enumerate(sites):
        own = cells.filter(site=site)
        shape = [n + 1 for n in own.select(places_in(own)).max().row(0)]
        values = place_values(own, shape)
        maps |= {(i, k): values[frame] for k, frame in enumerate(of_time)}
    return Tiles(
        maps,
        [shorten(site_words(s), 18) for s in sites],
        [Moment(t, n).frames(n_frames or n) for t in of_time],
    )


def _draw_strips(
    grid: PanelGrid,
    part: Any,
    cells: pl.DataFrame,
    sites: Sequence[str],
    top: float,
    n_frames: int | None,
) -> None:
    (axes,) = grid.axes(part)
    tiles = _strips(cells, sites, n_frames)
    image = draw_tiles(axes, tiles, scale="plain", limits=(0.0, top))
    image.set_cmap("magma")
    axes.set_xlabel("frame")
    colour_bar(axes, image, "share of clips")


# ----------------------------------------------------------------------------------------- curves


def _draw_curves(
    panels: Sequence[Panel], among: pl.DataFrame, threshold: str | None
) -> None:
    for axes, metric, rows in panels:
        named = metric == "outlier_share" and threshold is not None
        label = f"patches above {threshold}" if named else None
        draw_depth_curves(axes, rows, ylabel=label, among=among)
        if metric in ("massive_ratio", "massive_top1"):
            values = rows["value"].drop_nulls().to_numpy()
            low = values.min(initial=np.inf)
            high = values.max(initial=0)
            if 0 < 10 * low < high:
                axes.set_yscale("log")
                axes.set_ylim(0.8 * low, 1.3 * high)
                plain_log_ticks(axes.yaxis, FINE if high < 100 * low else DECADES)
