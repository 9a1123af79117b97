"""Figures of probes, drawn from the table alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = ("top1", "top5")
OF_RESPONSES = ("r_median", "r2_median")
EACH = "each"


@styled
def plot(table: Table) -> Figure:
    """Accuracy against relative depth, a panel per metric and a curve per store, token and shots,
    with the 95 % interval as a band and the baseline dashed (Raghu et al. 2021, Figs. 11, 13,
    F).

    If every token was probed, the curve is their mean, and below it are maps of each site's tokens,
    on one scale (Fig. D.4; the paper's panels have one each). If several l2 were requested,
    accuracy is drawn against l2 instead, one curve per site. Of responses: the median column's r
    and r2, the noise ceiling dashed.
    """
    rows = table.frame
    if "n_columns" in rows.columns:
        return _draw_responses(rows)
    cells = _cells(rows)
    curves = _with_vectors(rows.filter(~cells))
    metrics = [metric for metric in DRAWN if metric in curves["metric"]]
    maps = _maps(rows.filter(cells))
    above = CurveGrid.of(len(metrics), curves)
    grids = [small_maps(len(sites), 2) for _, sites in maps]
    figure, parts = stack(above, *grids)
    panels = above.panels(parts[0], of_metrics(curves, metrics))
    segments = "n_segments" in rows.columns
    counts = ("n_segments", "segments") if segments else ("n_images", "")
    for axes, metric, own in panels:
        if _several_l2(curves):
            _draw_l2(axes, own, metric_words(metric))
            note_count(axes, own, *counts)
        else:
            by = ["token", "shots"]
            draw_depth_curves(axes, own, by=by, among=curves, counts=counts)
    if {*curves["token"].unique()} == {EACH}:
        panels[0][0].set_title("mean over tokens")
    above.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    scale = _scale([site for _, sites in maps for site in sites])
    for part, grid, (title, sites) in zip(parts[1:], grids, maps, strict=True):
        _draw_maps(grid, part, title, sites, scale)
    return figure


def _draw_responses(every_row: pl.DataFrame) -> Figure:
    medians = _with_vectors(every_row.filter(pl.col("metric").is_in(OF_RESPONSES)))
    metrics = [metric for metric in OF_RESPONSES if metric in medians["metric"]]
    ceilings = medians.filter(baseline=CEILING)
    model = medians.filter(pl.col("baseline").ne_missing(CEILING))
    grid = CurveGrid.of(len(metrics), medians)
    figure, parts = stack(grid)
    panels = grid.panels(parts[0], of_metrics(medians, metrics))
    for axes, metric, rows in panels:
        if not _several_l2(model):
            draw_depth_curves(axes, rows, by=["token"], among=medians)
            continue
        words = baseline_words(CEILING)
        for value in ceilings.filter(metric=metric)["value"].unique(maintain_order=True):
            axes.axhline(value, linestyle="--", color="grey", label=words)
        _draw_l2(axes, model.filter(metric=metric), metric_words(metric))
        note_count(axes, rows, "n_images", "")
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _with_vectors(rows: pl.DataFrame) -> pl.DataFrame:
    """Vectors have no token: they are drawn with the first kind of token in the table."""
    return rows.with_columns(
        pl.col("token").fill_null(pl.col("token").drop_nulls().first())
    )


def _cells(rows: pl.DataFrame) -> pl.Series:
    """A mask (rows,) of the tokens of `each`, which are drawn in a map."""
    token = pl.col("token").cast(pl.String).fill_null("")
    single = token.str.contains(r"^(\d+(,\d+)?|cls|dist|reg\d+)$")
    return rows.select(single & (token == EACH).any().over("store", "site")).to_series()


def _several_l2(rows: pl.DataFrame) -> bool:
    """Whether one probe has several rows that differ in l2 only."""
    names = ("store", "site", "token", "shots", "metric", "baseline", "class")
    return bool(
        rows.select(name for name in names if name in rows.columns).is_duplicated().any()
    )


def _draw_l2(axes: Any, rows: pl.DataFrame, ylabel: str) -> None:
    """Accuracy against l2, a curve per site from dark (low) to light (high); other differences are
    shown by markers."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    if "shots" not in rows.columns:
        rows = rows.with_columns(shots=pl.lit(None))
    columns = ("store", "site", "token", "shots", "baseline")
    of_probes = rows.partition_by(*columns, maintain_order=True, as_dict=True)
    kinds = list(dict.fromkeys((key[0], *key[2:4]) for key in of_probes))
    varied = [i for i in range(4) if len({key[i] for key in of_probes}) > 1]
    for key, own in of_probes.items():
        own = own.sort("l2", maintain_order=True, nulls_last=True)
        words = ["" if part is None else str(part) for part in key]
        parts = [
            f"shots = {words[i]}" if i == 3 else shorten(words[i], 24) for i in varied
        ]
        kind = kinds.index((key[0], *key[2:4]))
        axes.plot(
            own["l2"],
            own["value"],
            color=colours(0.92 * float(own["rel_depth"][0])),
            linestyle="--" if key[4] else "-",
            marker=marker(kind) if len(kinds) > 1 and not key[4] else None,
            label="_nolegend_" if key[4] else ", ".join(parts) or words[1],
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="l2", ylabel=ylabel, ylim=(0, None))


Site = tuple[str, Any]  # name, map


def _maps(cells: pl.DataFrame) -> list[tuple[str, list[Site]]]:
    """The title and the maps of each store whose tokens were probed individually; for several
    numbers of shots, the largest."""
    cells = of_models(cells.filter(pl.col("row").is_not_null(), metric="top1"))
    out = []
    for own in cells.partition_by("store", maintain_order=True):
        most = None if own["shots"].has_nulls() else own["shots"].max()
        own = own.filter(pl.col("shots").eq_missing(most))
        sites = []
        for rows in own.partition_by("site", maintain_order=True):
            shape = [largest + 1 for largest in rows.select("row", "col").max().row(0)]
            sites.append((rows["site"][0], place_values(rows, shape)))
        title = f"{shorten(own['store'][0], 28)}: one probe for each token"
        out.append((title if most is None else f"{title}, {most!s} shots", sites))
    return out


def _scale(sites: Sequence[Site]) -> tuple[float, float]:
    """Lowest and highest value of all maps."""
    values = np.concatenate([values.ravel() for _, values in sites] or [np.zeros(1)])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.01, high + 0.01)


def _draw_maps(
    grid: PanelGrid,
    part: Any,
    title: str,
    sites: Sequence[Site],
    scale: tuple[float, float],
) -> None:
    every = grid.axes(part)
    for axes, (name, values) in zip(every, sites, strict=True):
        image = axes.imshow(values, vmin=scale[0], vmax=scale[1], origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(name))
    name_part(part, title)
    bars_at_ends(grid, every, image, metric_words("top1"))
