"""Figures of token norms, drawn from the columns of `vitsee norms`' table.

They are histograms over depth, maps of where outliers are, and the outliers' share over depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.norms.stream_norms import BINS_PER_OCTAVE
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
    "outlier_share",
    "outlier_share_mad",
    "massive_ratio",
    "neighbour_cos",
    "bimodality",
    "norm_median",
    "norm",
    "massive_top1",
)
MAX_CURVES = 4
MAX_STORES = 6  # with panels of their own
MAP_METRICS = ("outlier_share", "outlier_share_mad")
MAX_MAPS = 4  # of a store
MARKERS = {"cls": "s", "registers": "^"}  # white, to be no store's colour


class OutlierMaps(NamedTuple):
    """The maps of one store.

    Attributes:
        metric: one of `MAP_METRICS`.
        cells: rows of the table about single patches.
        sites: names of the sites that are drawn; none if no patch is an outlier.
    """

    metric: str
    cells: pl.DataFrame
    sites: list[str]


@styled
def draw_norms(table: Table) -> Figure:
    """Draw the norms of patch tokens over depth, where outliers are, and curves of their share.

    For each store it is the histogram of its patch tokens' norms over depth (as Darcet et al. 2024,
    Fig. 4), with the means of class token and registers, and below it maps of how often each patch
    is an outlier, at four depths; then curves over depth, the stores overlaid. What the table does
    not contain is left out, and so are histograms and maps of more than `MAX_STORES` stores, if
    there are curves.

    Maps are of `outlier_share` where a store has any, else of `outlier_share_mad`.
    """
    rows = table.written
    curve_rows = _rows_by_curve(rows)
    curves = _choose_curves(curve_rows)
    with_histograms = len(rows.filter(metric="norm_histogram")) > 0
    with_maps = any((_patch_rows(rows, m)["value"] > 0).any() for m in MAP_METRICS)
    stores = rows.partition_by("store", maintain_order=True)
    if curves and len(stores) > MAX_STORES:
        with_histograms = False
        with_maps = False
    if not (with_histograms or with_maps or curves):
        return _draw_kinds(rows)

    # The room that each part needs, then the figure, then what is drawn in it.
    n_frames = table.notes.get("clip", {}).get("frames")
    store_maps = [_choose_maps(store_rows) for store_rows in stores] if with_maps else []
    map_grids = [_map_grid(maps) for maps in store_maps]
    grids: list[Any] = []
    if with_histograms:
        histogram_grid = PanelGrid(len(stores), width=28, widest=44, height=17)
        grids.append(histogram_grid)
    grids += map_grids
    if curves:
        curve_grid = CurveGrid.of(len(curves), rows)
        grids.append(curve_grid)
    figure, boxes = stack(*grids)
    remaining = iter(boxes)
    handles: dict[str, Any] = {}
    if with_histograms:
        panels = histogram_grid.axes(next(remaining))
        _draw_histograms(histogram_grid, panels, stores)
        handles = handles_of(panels)
    # Without maps both lists are empty.
    for store_rows, grid, maps in zip(stores, map_grids, store_maps, strict=False):
        _draw_maps(grid, next(remaining), store_rows, maps, n_frames)
    if curves:
        curve_panels = curve_grid.panels(
            next(remaining), [(metric, curve_rows[metric]) for metric in curves]
        )
        all_rows = pl.concat(list(curve_rows.values()))
        _draw_curves(curve_panels, all_rows, table.notes.get("threshold"))
        curve_grid.finish(curve_panels)
        # Entries of stores come first in the legend.
        handles = handles_of([axes for axes, _, _ in curve_panels]) | handles
    legend_below(figure, handles)
    return figure


def _rows_by_curve(rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return metric -> its rows about all patches or the whole site, in the order of `CURVES`.

    Metrics that the table does not contain are left out.
    """
    is_whole_site = pl.col("token").is_null() & pl.col("row").is_null()
    is_patches = (pl.col("token") == "patches").fill_null(False)
    curve_rows = {}
    for metric in CURVES:
        metric_rows = rows.filter(metric=metric)
        if len(metric_rows):
            curve_rows[metric] = metric_rows.filter(is_patches | is_whole_site)
    return curve_rows


def _choose_curves(curve_rows: dict[str, pl.DataFrame]) -> list[str]:
    """Return the metrics that are drawn over depth, at most `MAX_CURVES`."""
    curves = [metric for metric, rows in curve_rows.items() if len(rows)]
    # A curve that is 0 everywhere says less than the next one.
    curves.sort(key=lambda metric: not curve_rows[metric]["value"].sum())
    return curves[:MAX_CURVES]


def _draw_kinds(rows: pl.DataFrame) -> Figure:
    """Draw the norms of the other tokens over depth, of a table without patches."""
    norms = rows.filter(
        pl.col("metric").is_in(["norm", "norm_median"]), pl.col("row").is_null()
    )
    grid = CurveGrid.of(1, norms)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [("norm", norms)])
    for axes, _, panel_rows in panels:
        draw_depth_curves(
            axes,
            panel_rows,
            by=["token", "metric"],
            ylabel="norm of a token",
            among=norms,
        )
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, _, _ in panels])
    return figure


def _patch_rows(rows: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return a metric's rows about single patches of the grid."""
    return rows.filter(pl.col("row").is_not_null(), metric=metric)


# ------------------------------------------------------------------------------------ histograms


def _draw_histograms(
    grid: PanelGrid, panels: Sequence[Axes], stores: Sequence[pl.DataFrame]
) -> None:
    """Draw the histogram of each store, all in one scale of colours.

    Args:
        grid: the histograms' room.
        panels: an axes for each store.
        stores: rows of each store.
    """
    from matplotlib.colors import LogNorm

    shares = pl.concat(
        [rows.filter(metric="norm_histogram")["value"] for rows in stores]
    ).to_numpy()
    lowest = float(shares.min())
    # A scale of one value has no colours.
    highest = max(float(shares.max()), 1.01 * lowest)
    scale = LogNorm(lowest, highest)
    for axes, rows in zip(panels, stores, strict=True):
        image = _draw_histogram(axes, rows, scale)
        axes.set_title(shorten(rows["store"][0], 28))
        axes.set_ylabel("norm of a token")
        note_count(axes, rows)
    bars_at_ends(grid, panels, image, "share of patch tokens")


def _draw_histogram(axes: Axes, rows: pl.DataFrame, scale: Any) -> Any:
    """Draw one store's histogram, a column per site, and return matplotlib's image.

    Lines over it are the median patch and the means of class token and registers.

    Args:
        axes: where to draw.
        rows: rows of the store.
        scale: colours of shares, the same for all stores.
    """
    bins = rows.filter(metric="norm_histogram")
    sites = bins["site"].unique(maintain_order=True).to_list()
    column_by_site = {site: i for i, site in enumerate(sites)}
    column = pl.col("site").cast(pl.String).replace_strict(column_by_site)
    # Edges in bins; rounding undoes the power of 2.
    low = BINS_PER_OCTAVE * np.log2(bins["norm_from"].to_numpy())
    high = BINS_PER_OCTAVE * np.log2(bins["norm_to"].to_numpy())
    first = np.round(low.min())
    last = np.round(high.max())
    shares = np.full((int(last - first), len(sites)), np.nan)  # (bins, sites)
    bin_indices = np.round(low - first).astype(int)
    columns = bins.select(column).to_series().to_numpy()
    shares[bin_indices, columns] = bins["value"].to_numpy()
    site_edges = np.arange(len(sites) + 1) - 0.5
    norm_edges = 2.0 ** (np.arange(first, last + 1) / BINS_PER_OCTAVE)
    image = axes.pcolormesh(site_edges, norm_edges, shares, norm=scale, cmap="viridis")

    site_rows = rows.filter(pl.col("site").is_in(sites))
    for kind, marker in MARKERS.items():
        means = site_rows.filter(metric="norm", token=kind).select(column, "value")
        if len(means):
            axes.plot(
                *means.get_columns(),
                color="white",
                marker=marker,
                linewidth=1,
                label=token_words(kind),
                markeredgecolor="black",
                markeredgewidth=0.6,
            )
    medians = site_rows.filter(metric="norm_median", token="patches").select(
        column, "value"
    )
    if len(medians):
        # Black on a white rim, to be seen on every colour.
        axes.plot(*medians.get_columns(), color="white", linewidth=2.2)
        axes.plot(
            *medians.get_columns(), color="black", linewidth=1.1, label="median patch"
        )
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.grid(False)
    block = pl.col("block").cast(pl.String).fill_null("")
    block_by_site = dict(rows.select("site", block).iter_rows())
    site_axis = SiteAxis.of([(rows["store"][0], site) for site in sites], block_by_site)
    site_axis.ticks(16).put_on(axes.xaxis)
    return image


# ------------------------------------------------------------------------------------------- maps


def _choose_maps(rows: pl.DataFrame) -> OutlierMaps:
    """Return a store's maps: the sites with most outliers, in the order of the table.

    They are of the fixed threshold if any patch is above it, else of the relative one.
    """
    fixed_metric, relative_metric = MAP_METRICS
    metric = fixed_metric
    cells = _patch_rows(rows, fixed_metric)
    relative = _patch_rows(rows, relative_metric)
    if len(relative) and not (cells["value"] > 0).any():
        metric = relative_metric
        cells = relative
    highest = cells.group_by("site", maintain_order=True).agg(pl.col("value").max())
    with_outliers = highest.filter(pl.col("value") > 0)
    chosen = with_outliers.sort("value", descending=True, maintain_order=True)
    chosen_sites = {*chosen["site"].head(MAX_MAPS)}
    return OutlierMaps(
        metric, cells, [site for site in highest["site"] if site in chosen_sites]
    )


def _map_grid(maps: OutlierMaps) -> PanelGrid:
    """Return the room of one store's maps, or of the line that says that there is none."""
    if not maps.sites:
        return PanelGrid(1, height=2.5)
    if of_clips(maps.cells):
        return tile_grid(_clip_tiles(maps))
    return small_maps(len(maps.sites), 3)


def _draw_maps(
    grid: PanelGrid,
    box: Any,
    rows: pl.DataFrame,
    maps: OutlierMaps,
    n_frames: int | None,
) -> None:
    """Draw one store's maps into a box, or write that no patch is an outlier.

    Args:
        grid: the maps' room.
        box: a figure or a subfigure.
        rows: the store's rows.
        maps: the maps.
        n_frames: number of frames of a clip; None for images.
    """
    name = f"{shorten(rows['store'][0], 28)}, n = {count(rows)}"
    if not maps.sites:
        name_part(box, f"{name}: no patch is an outlier")
        return
    condition = "norm is above median + 6 MAD"
    if maps.metric == MAP_METRICS[0]:
        condition = "norm is above the threshold"
    name_part(box, f"{name}: patches whose {condition}, in the layers with most")
    highest: Any = maps.cells["value"].max()
    if of_clips(maps.cells):
        _draw_clip_tiles(grid, box, maps, highest, n_frames)
        return
    panels = grid.axes(box)
    for axes, site in zip(panels, maps.sites, strict=True):
        site_cells = maps.cells.filter(site=site)
        last_row, last_col = site_cells.select("row", "col").max().row(0)
        map_axes(axes)
        image = axes.imshow(
            place_values(site_cells, (last_row + 1, last_col + 1)),
            vmin=0,
            vmax=highest,
            cmap="magma",
            origin="upper",
        )
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, panels, image, "share of images")


def _clip_tiles(maps: OutlierMaps, n_frames: int | None = None) -> Tiles:
    """Return the maps of clips: a line per site, a column per step in time.

    Steps are as many as there is room for, evenly spaced.

    Args:
        maps: the maps.
        n_frames: number of frames of a clip; None if each step is a frame.
    """
    n_steps = maps.cells["frame"].n_unique()
    # A tile takes 4 ems, labels and the colour bar 14.
    steps = evenly(sorted(maps.cells["frame"].unique()), max(2, int((room() - 14) / 4)))
    tiles: dict[tuple[int, int], Float] = {}
    for line, site in enumerate(maps.sites):
        site_cells = maps.cells.filter(site=site)
        last_indices = site_cells.select(places_in(site_cells)).max().row(0)
        shape = [last + 1 for last in last_indices]
        values = place_values(site_cells, shape)  # (steps, rows, cols)
        for column, step in enumerate(steps):
            tiles[line, column] = values[step]
    return Tiles(
        tiles,
        [shorten(site_words(site), 18) for site in maps.sites],
        [Moment(step, n_steps).frames(n_frames or n_steps) for step in steps],
    )


def _draw_clip_tiles(
    grid: PanelGrid,
    box: Any,
    maps: OutlierMaps,
    highest: float,
    n_frames: int | None,
) -> None:
    """Draw the maps of clips, in colours from 0 to the highest share.

    Args:
        grid: the maps' room.
        box: a figure or a subfigure.
        maps: the maps.
        highest: the largest share of the maps.
        n_frames: number of frames of a clip.
    """
    (axes,) = grid.axes(box)
    tiles = _clip_tiles(maps, n_frames)
    image = draw_tiles(axes, tiles, scale="plain", limits=(0.0, highest))
    image.set_cmap("magma")
    axes.set_xlabel("frame")
    colour_bar(axes, image, "share of clips")


# ----------------------------------------------------------------------------------------- curves


def _draw_curves(
    panels: Sequence[Panel], all_rows: pl.DataFrame, threshold: str | None
) -> None:
    """Draw the curves over depth, activations that span decades on a logarithmic axis.

    Args:
        panels: axes, metric and rows of each.
        all_rows: rows of all panels, which decide the looks of stores.
        threshold: of `outlier_share`, for its label; None if the table does not say it.
    """
    for axes, metric, rows in panels:
        label = None
        if metric == "outlier_share" and threshold is not None:
            label = f"patches above {threshold}"
        draw_depth_curves(axes, rows, ylabel=label, among=all_rows)
        if metric not in ("massive_ratio", "massive_top1"):
            continue
        values = rows["value"].drop_nulls().to_numpy()
        low = values.min(initial=np.inf)
        high = values.max(initial=0)
        if 0 < 10 * low < high:
            axes.set_yscale("log")
            axes.set_ylim(0.8 * low, 1.3 * high)
            # Within two decades, ticks at powers of 10 would be too few.
            plain_log_ticks(axes.yaxis, FINE if high < 100 * low else DECADES)
