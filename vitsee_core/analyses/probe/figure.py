"""Figures of probes, drawn from the table alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.figures.curve_looks import of_models
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    map_axes,
    map_title,
    name_part,
    note_count,
    small_maps,
    stack,
)
from vitsee_core.figures.patch_sheets import place_values
from vitsee_core.figures.plotting import marker, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import CEILING, baseline_words, metric_words, site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = ("top1", "top5")
RESPONSE_MEDIANS = ("r_median", "r2_median")
EACH = "each"
# Cells of a probe that a curve's label can have.
LABEL_FIELDS = ("store", "site", "token", "shots")


@styled
def plot(table: Table) -> Figure:
    """Draw accuracy against relative depth.

    There is a panel per metric and a curve per store, token and shots, with the 95 %
    interval as a band and the baseline dashed (Raghu et al. 2021, Figs. 11, 13, F).

    If every token was probed, the curve is their mean, and below it are maps of each
    site's tokens, on one scale (Fig. D.4; the paper's panels have one each). If several l2
    were requested, accuracy is drawn against l2 instead, one curve per site. A table of
    responses is drawn as the median column's r and r2, with the noise ceiling dashed.
    """
    rows = table.frame
    if "n_columns" in rows.columns:
        return _draw_responses(rows)
    is_in_map = _is_in_map(rows)
    curves = _fill_missing_tokens(rows.filter(~is_in_map))
    metrics = [metric for metric in DRAWN if metric in curves["metric"]]
    maps = _accuracy_maps(rows.filter(is_in_map))
    curve_grid = CurveGrid.of(len(metrics), curves)
    map_grids = [small_maps(len(store_maps.sites), 2) for store_maps in maps]
    figure, subfigures = stack(curve_grid, *map_grids)
    panels = curve_grid.panels(subfigures[0], of_metrics(curves, metrics))
    counts = ("n_images", "")
    if "n_segments" in rows.columns:
        counts = ("n_segments", "segments")
    for axes, metric, panel_rows in panels:
        if _has_several_l2(curves):
            _draw_against_l2(axes, panel_rows, metric_words(metric))
            note_count(axes, panel_rows, *counts)
        else:
            by = ["token", "shots"]
            draw_depth_curves(axes, panel_rows, by=by, among=curves, counts=counts)
    # With curves of several kinds the legend names them.
    if {*curves["token"].unique()} == {EACH}:
        panels[0][0].set_title("mean over tokens")
    curve_grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    colour_range = _colour_range(maps)
    for subfigure, grid, store_maps in zip(subfigures[1:], map_grids, maps, strict=True):
        _draw_maps(grid, subfigure, store_maps, colour_range)
    return figure


def _draw_responses(rows: pl.DataFrame) -> Figure:
    """Draw the median column's r and r2 against relative depth, or against l2 if there are
    several.

    The noise ceiling is a dashed curve, or against l2 a dashed line.
    """
    medians = _fill_missing_tokens(rows.filter(pl.col("metric").is_in(RESPONSE_MEDIANS)))
    metrics = [metric for metric in RESPONSE_MEDIANS if metric in medians["metric"]]
    ceilings = medians.filter(baseline=CEILING)
    model = medians.filter(pl.col("baseline").ne_missing(CEILING))
    grid = CurveGrid.of(len(metrics), medians)
    figure, subfigures = stack(grid)
    panels = grid.panels(subfigures[0], of_metrics(medians, metrics))
    for axes, metric, panel_rows in panels:
        if not _has_several_l2(model):
            draw_depth_curves(axes, panel_rows, by=["token"], among=medians)
            continue
        label = baseline_words(CEILING)
        for value in ceilings.filter(metric=metric)["value"].unique(maintain_order=True):
            axes.axhline(value, linestyle="--", color="grey", label=label)
        _draw_against_l2(axes, model.filter(metric=metric), metric_words(metric))
        note_count(axes, panel_rows, "n_images", "")
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _fill_missing_tokens(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with a token each.

    Vectors have no token: they join the curve of the table's first kind of token.
    """
    return rows.with_columns(
        pl.col("token").fill_null(pl.col("token").drop_nulls().first())
    )


def _is_in_map(rows: pl.DataFrame) -> pl.Series:
    """Return a mask (rows,) of the single tokens of `each`, which are drawn in a map.

    The same tokens, probed without `each`, are curves.
    """
    token = pl.col("token").cast(pl.String).fill_null("")
    is_single = token.str.contains(r"^(\d+(,\d+)?|cls|dist|reg\d+)$")
    site_has_each = (token == EACH).any().over("store", "site")
    return rows.select(is_single & site_has_each).to_series()


def _has_several_l2(rows: pl.DataFrame) -> bool:
    """Return whether one probe has several rows that differ in l2 only."""
    names = ("store", "site", "token", "shots", "metric", "baseline", "class")
    probes = rows.select(name for name in names if name in rows.columns)
    return bool(probes.is_duplicated().any())


class _ProbeKey(NamedTuple):
    """The cells that all rows of one probe share; `baseline` is "" or None for the
    model's."""

    store: str
    site: str
    token: str | None
    shots: int | None
    baseline: str | None

    @property
    def kind(self) -> tuple[str, str | None, int | None]:
        """The cells that the marker shows; the colour shows the site."""
        return (self.store, self.token, self.shots)


def _draw_against_l2(axes: Any, rows: pl.DataFrame, ylabel: str) -> None:
    """Draw accuracy against l2, a curve per site from dark (early) to light (late).

    Markers distinguish stores, tokens and shots; baselines are dashed.
    """
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    if "shots" not in rows.columns:
        rows = rows.with_columns(shots=pl.lit(None))
    probes = rows.partition_by(*_ProbeKey._fields, maintain_order=True, as_dict=True)
    keys = [_ProbeKey(*cells) for cells in probes]
    kinds = list(dict.fromkeys(key.kind for key in keys))
    # A curve's label has only what differs between curves.
    label_fields = []
    for name in LABEL_FIELDS:
        if len({getattr(key, name) for key in keys}) > 1:
            label_fields.append(name)
    for key, probe_rows in zip(keys, probes.values(), strict=True):
        probe_rows = probe_rows.sort("l2", maintain_order=True, nulls_last=True)
        # Up to 0.92: the end of the colour map is too light on white.
        colour = colours(0.92 * float(probe_rows["rel_depth"][0]))
        if key.baseline:
            axes.plot(
                probe_rows["l2"],
                probe_rows["value"],
                color=colour,
                linestyle="--",
                label="_nolegend_",
            )
            continue
        axes.plot(
            probe_rows["l2"],
            probe_rows["value"],
            color=colour,
            linestyle="-",
            marker=marker(kinds.index(key.kind)) if len(kinds) > 1 else None,
            label=_label(key, label_fields),
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="l2", ylabel=ylabel, ylim=(0, None))


def _label(key: _ProbeKey, fields: Sequence[str]) -> str:
    """Return a curve's label from some of its probe's cells; without any, the site's
    name."""
    parts = []
    for name in fields:
        value = getattr(key, name)
        text = "" if value is None else str(value)
        parts.append(f"shots = {text}" if name == "shots" else shorten(text, 24))
    return ", ".join(parts) or str(key.site)


class _SiteMap(NamedTuple):
    """The accuracy of each token's probe at one site, (rows, columns) of the token grid."""

    site: str
    values: Float


class _StoreMaps(NamedTuple):
    """The maps of one store, in the table's order of sites, and their title."""

    title: str
    sites: list[_SiteMap]


def _accuracy_maps(rows: pl.DataFrame) -> list[_StoreMaps]:
    """Return the maps of each store whose tokens were probed individually.

    With several numbers of shots they are those of the largest; all training images are
    more than any number. Prefix tokens have no place in the grid and are left out.
    """
    rows = of_models(rows.filter(pl.col("row").is_not_null(), metric="top1"))
    maps = []
    for store_rows in rows.partition_by("store", maintain_order=True):
        title = f"{shorten(store_rows['store'][0], 28)}: one probe for each token"
        shots = None  # all training images
        if not store_rows["shots"].has_nulls():
            shots = store_rows["shots"].max()
            title = f"{title}, {shots!s} shots"
        store_rows = store_rows.filter(pl.col("shots").eq_missing(shots))
        sites = []
        for site_rows in store_rows.partition_by("site", maintain_order=True):
            last_row, last_column = site_rows.select("row", "col").max().row(0)
            values = place_values(site_rows, [last_row + 1, last_column + 1])
            sites.append(_SiteMap(site_rows["site"][0], values))
        maps.append(_StoreMaps(title, sites))
    return maps


def _colour_range(maps: Sequence[_StoreMaps]) -> tuple[float, float]:
    """Return the lowest and highest value of all maps, apart from each other."""
    arrays = [site.values.ravel() for store_maps in maps for site in store_maps.sites]
    if not arrays:
        return 0.0, 1.0
    values = np.concatenate(arrays)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return 0.0, 1.0
    low = float(values.min())
    high = float(values.max())
    if high > low:
        return low, high
    return low - 0.01, high + 0.01  # equal values: a range of 0 has no colours


def _draw_maps(
    grid: PanelGrid,
    subfigure: Any,
    store_maps: _StoreMaps,
    colour_range: tuple[float, float],
) -> None:
    """Draw the maps of one store into a subfigure, with a colour bar at the end of each
    row."""
    low, high = colour_range
    axes_of_sites = grid.axes(subfigure)
    for axes, site in zip(axes_of_sites, store_maps.sites, strict=True):
        image = axes.imshow(site.values, vmin=low, vmax=high, origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(site.site))
    name_part(subfigure, store_maps.title)
    bars_at_ends(grid, axes_of_sites, image, metric_words("top1"))
