"""Maps of summaries by token: each token's value at its position, drawn from the table alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.localize.location_maps import draw_map
from vitsee_core.figures.heatmaps import COLOUR_MAP, NO_VALUE
from vitsee_core.figures.panels import (
    bars_at_ends,
    count,
    legend_below,
    map_title,
    name_part,
    small_maps,
    stack,
)
from vitsee_core.figures.token_maps import value_ticks
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import METRICS, site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure


DRAWN_METRICS = (
    "own_cka",
    "own_rank",
    "own_margin",
)  # others, if the table has none of them


def draw_token_summary(table: Table) -> Figure:
    """Draw maps of the metrics, each token's value at its position.

    There is a line of maps and a colour scale for each store and metric, and a map for each site.
    Call it inside a function decorated with `styled`.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    frame = table.frame
    metrics = [metric for metric in DRAWN_METRICS if metric in table["metric"]]
    if metrics:
        frame = frame.filter(pl.col("metric").is_in(metrics))
    # A line of maps for each store and metric, a map for each site.
    lines = frame.partition_by("store", "metric", maintain_order=True)
    grids = [small_maps(rows["site"].n_unique(), 2) for rows in lines]
    figure, boxes = stack(*grids)
    for grid, box, rows in zip(grids, boxes, lines, strict=True):
        store = rows["store"][0]
        metric = rows["metric"][0]
        scale = _metric_scale(frame.filter(metric=metric), metric)
        colours = _metric_colours(metric)
        maps = grid.axes(box)
        sites = rows.partition_by("site", maintain_order=True)
        for axes, site_rows in zip(maps, sites, strict=True):
            image = draw_map(axes, _token_grid(site_rows), scale, colours)
            axes.set(xticks=[], yticks=[])
            map_title(axes, grid, site_words(site_rows["site"][0]))
        name_part(box, f"{shorten(store, 20)}: {METRICS[metric]} (n = {count(rows)})")
        bars_at_ends(grid, maps, image, "")
        # Ranks are labelled as numbers, not as powers of 10.
        if isinstance(scale, LogNorm):
            for axes in maps:
                for bar in axes.child_axes:
                    value_ticks(bar.yaxis, scale)
    if frame["value"].has_nulls():
        patch = Patch(facecolor=NO_VALUE)
        legend_below(figure, {"no value: constant, or a single patch": patch})
    return figure


def _metric_scale(rows: pl.DataFrame, metric: str) -> Normalize:
    """Return the colour scale of a metric, one for all stores and sites.

    Args:
        rows: of the metric, of all stores and sites.
        metric: its name.
    """
    from matplotlib.colors import LogNorm, Normalize

    largest: Any = rows["value"].abs().max() or 1.0
    if metric == "own_rank":
        # From first to last of a token's patches, so that ranks are comparable between figures.
        max_tokens: Any = rows.group_by("store", "site").len()["len"].max()
        return LogNorm(1, max(2, max_tokens, largest))
    if metric == "own_rank_relative":
        return Normalize(0, 1)
    if metric == "own_margin":
        return Normalize(-largest, largest)
    return Normalize(0, largest)


def _metric_colours(metric: str) -> str:
    """Return the colour map of a metric: diverging for margins, reversed for ranks.

    The best rank is the lowest.
    """
    if metric == "own_margin":
        return "RdBu_r"
    if metric.startswith("own_rank"):
        return f"{COLOUR_MAP}_r"
    return COLOUR_MAP


def _token_grid(rows: pl.DataFrame) -> Float:
    """Return the values of one site's tokens at their positions, (rows, cols); NaN elsewhere."""
    row = rows["row"].to_numpy()
    col = rows["col"].to_numpy()
    distinct_rows = np.unique(row)
    distinct_cols = np.unique(col)
    if len(distinct_rows) * len(distinct_cols) == len(rows):
        # All tokens, or those of every s-th row and column: without gaps.
        row = np.searchsorted(distinct_rows, row)
        col = np.searchsorted(distinct_cols, col)
    grid = np.full((row.max() + 1, col.max() + 1), np.nan)
    grid[row, col] = rows["value"]
    return grid
