"""Figures of probes, drawn from the table alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    Grid,
    bars_at_ends,
    map_axes,
    map_title,
    name_part,
    note_count,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import marker, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import CEILING, baseline_words, metric_words, site_words

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
    if "n_columns" in table.columns:
        return _draw_responses(table)
    curves = _with_vectors(table.take(~_cells(table)))
    metrics = [metric for metric in DRAWN if metric in curves.unique("metric")]
    maps = _maps(table)
    above = CurveGrid.of(len(metrics), curves)
    grids = [small_maps(len(sites), 2) for _, sites in maps]
    figure, parts = stack(above, *grids)
    panels = above.panels(parts[0], of_metrics(curves, metrics))
    segments = "n_segments" in table.columns
    counts = ("n_segments", "segments") if segments else ("n_images", "")
    for axes, metric, rows in panels:
        if _several_l2(curves):
            _draw_l2(axes, rows, metric_words(metric))
            note_count(axes, rows, *counts)
        else:
            by = ["token", "shots"]
            draw_depth_curves(axes, rows, by=by, among=curves, counts=counts)
    if set(curves["token"].tolist()) == {EACH}:
        panels[0][0].set_title("mean over tokens")
    above.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    scale = _scale([site for _, sites in maps for site in sites])
    for part, grid, (title, sites) in zip(parts[1:], grids, maps, strict=True):
        _draw_maps(grid, part, title, sites, scale)
    return figure


def _draw_responses(table: Table) -> Figure:
    medians = _with_vectors(table.where(metric=list(OF_RESPONSES)))
    ceilings = medians.where(baseline=CEILING)
    model = medians.take(~np.isin(np.array(_text(medians["baseline"]), object), [CEILING]))
    grid = CurveGrid.of(len(OF_RESPONSES), medians)
    figure, parts = stack(grid)
    panels = grid.panels(parts[0], of_metrics(medians, OF_RESPONSES))
    for axes, metric, rows in panels:
        if not _several_l2(model):
            draw_depth_curves(axes, rows, by=["token"], among=medians)
            continue
        words = baseline_words(CEILING)
        for value in ceilings.where(metric=metric).unique("value"):
            axes.axhline(value, linestyle="--", color="grey", label=words)
        shotless = {**model.columns, "shots": np.full(len(model), "")}
        _draw_l2(axes, Table(shotless).where(metric=metric), metric_words(metric))
        note_count(axes, rows, "n_images", "")
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _text(values: Any) -> list[str]:
    """A column's cells as text, empty for None and NaN."""
    return ["" if v is None or v != v else str(v) for v in values.tolist()]


def _with_vectors(table: Table) -> Table:
    """Vectors have no token: they are drawn with the first kind of token in the table."""
    tokens = _text(table["token"])
    first = next((token for token in tokens if token), "")
    token = np.array([token or first for token in tokens], object)
    return Table({**table.columns, "token": token}, table.notes)


def _cells(table: Table) -> Any:
    """(rows,) whether a row is one of the tokens of `each`, and so drawn in a map."""
    token, site, store = (np.array(_text(table[c]), object) for c in ("token", "site", "store"))
    out = np.zeros(len(table), bool)
    each = token == EACH
    for pair in set(zip(store[each], site[each], strict=True)):
        out |= (store == pair[0]) & (site == pair[1]) & ~each
    single = np.array([re.fullmatch(r"\d+(,\d+)?|cls|dist|reg\d+", t) is not None for t in token])
    return out & single


def _several_l2(rows: Table) -> bool:
    """Whether one probe has several rows that differ in l2 only."""
    names = ("store", "site", "token", "shots", "metric", "baseline", "class")
    columns = [name for name in names if name in rows.columns]
    keys = list(zip(*(_text(rows[name]) for name in columns), strict=True))
    return len(set(keys)) < len(keys)


def _draw_l2(axes: Any, rows: Table, ylabel: str) -> None:
    """Accuracy against l2, a curve per site from dark (low) to light (high); other differences are
    shown by markers."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    columns = ("store", "site", "token", "shots", "baseline")
    keys = list(zip(*(_text(rows[name]) for name in columns), strict=True))
    kinds = list(dict.fromkeys((key[0], *key[2:4]) for key in keys))
    varied = [i for i in range(4) if len({key[i] for key in keys}) > 1]
    for key in dict.fromkeys(keys):
        own = rows.take(np.array([other == key for other in keys]))
        own = own.take(np.argsort(own["l2"], kind="stable"))
        parts = [f"shots = {key[i]}" if i == 3 else shorten(key[i], 24) for i in varied]
        kind = kinds.index((key[0], *key[2:4]))
        axes.plot(
            own["l2"], own["value"], color=colours(0.92 * float(own["rel_depth"][0])),
            linestyle="--" if key[4] else "-",
            marker=marker(kind) if len(kinds) > 1 and not key[4] else None,
            label="_nolegend_" if key[4] else ", ".join(parts) or key[1],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="l2", ylabel=ylabel, ylim=(0, None))


Site = tuple[str, Any]  # name, map


def _maps(table: Table) -> list[tuple[str, list[Site]]]:
    """(title, maps) of each store whose tokens were probed individually; for several numbers of
    shots, the largest."""
    cells = table.take(_cells(table) & (table["metric"] == "top1"))
    cells = cells.take(np.array([not text for text in _text(cells["baseline"])], bool))
    out = []
    for store in dict.fromkeys(_text(cells["store"])):
        own = cells.where(store=store)
        shots = _text(own["shots"])
        most = max(shots, key=lambda text: float(text or "inf"), default="")
        own = own.take(np.array([text == most for text in shots], bool))
        sites = []
        for site, rows in own.groups("site"):
            places = [re.fullmatch(r"(\d+),(\d+)", token) for token in _text(rows["token"])]
            on_grid = [(int(p[1]), int(p[2]), i) for i, p in enumerate(places) if p]
            if not on_grid:
                continue
            values = np.full([max(at) + 1 for at in list(zip(*on_grid, strict=True))[:2]], np.nan)
            for row, col, i in on_grid:
                values[row, col] = rows["value"][i]
            sites.append((site, values))
        if sites:
            title = f"{shorten(store, 28)}: one probe for each token"
            out.append((title + (f", {most} shots" if most else ""), sites))
    return out


def _scale(sites: Sequence[Site]) -> tuple[float, float]:
    """Lowest and highest value of all maps."""
    values = np.concatenate([values.ravel() for _, values in sites] or [np.zeros(1)])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.01, high + 0.01)


def _draw_maps(
    grid: Grid, part: Any, title: str, sites: Sequence[Site], scale: tuple[float, float]
) -> None:
    every = grid.axes(part)
    for axes, (name, values) in zip(every, sites, strict=True):
        image = axes.imshow(values, vmin=scale[0], vmax=scale[1], origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(name))
    name_part(part, title)
    bars_at_ends(grid, every, image, metric_words("top1"))
