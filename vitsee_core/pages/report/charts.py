"""Charts whose values a reader can point at: which ones a table gives, as JSON for the page.

A chart is a heatmap (`heat`) of pairs of sites, or of layers and the steps of a training, or
`curves` over depth. A mark of either carries its site, value, 95 % interval and number of images.
Tables of other kinds (maps of tokens, histograms) have their figure alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vitsee_core.figures.heatmaps import data_limits
from vitsee_core.figures.plotting import store_order
from vitsee_core.figures.training_charts import MOST_PANELS as MAX_PANELS
from vitsee_core.figures.training_values import layer_words, layers_over_steps
from vitsee_core.tables.results import Table
from vitsee_core.tables.table_sites import block_part
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import (
    BLOCK_PARTS,
    baseline_words,
    metric_words,
    site_words,
    token_words,
)
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

MAX_MARKS = 6000  # of one table: more than that no browser shows at once without delay
MAX_LINES = 24  # of one panel
# Columns that tell lines of one panel apart, beside the store, where they have to.
LINE_COLUMNS = (
    "baseline",
    "token",
    "class",
    "type",
    "shots",
    "k",
    "l2",
    "l2_relative",
    "filter",
    "best",
)
# Columns of which each value would be a curve of its own: such tables are maps, not curves.
MAP_COLUMNS = (
    "row",
    "col",
    "image",
    "query",
    "video",
    "object",
    "segment",
    "class",
    "frequency",
)
TASK = "task"  # of best-layer, whose rows are no curve
PART = "part of its block"
MAX_NAME_CHARACTERS = 60
MARK_COLUMNS = ("value", "low", "high", "n_images")
MARK = [f"shown {name}" for name in MARK_COLUMNS]


def charts_of(table: Table) -> list[dict[str, Any]]:
    """Return the charts of a table; none for another shape, or more marks than `MAX_MARKS`."""
    rows = table.frame
    names = {*table.frame.columns}
    if "value" not in names or TASK in names:
        return []
    map_columns = [name for name in MAP_COLUMNS if name in names]
    if any(_varies(rows, name) for name in map_columns):
        # Beside rows about parts there may be rows about all of them, which are curves.
        rows = rows.filter(pl.col(name).is_null() for name in map_columns)
    # Before any chart is built: a table of millions of rows has too many marks anyhow.
    if not 0 < len(rows) <= 20 * MAX_MARKS:
        return []
    if table.step_unit:
        charts = _step_heatmaps(table)
    elif {"site_a", "site_b"} <= names:
        charts = _pair_heatmaps(rows)
    elif {"site", "rel_depth", "store", "metric"} <= names:
        charts = _depth_curves(rows)
    else:
        return []
    n_marks = sum(chart["n_marks"] for chart in charts)
    return charts if 0 < n_marks <= MAX_MARKS else []


# ------------------------------------------------------------------------------------ pairs


def _pair_heatmaps(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return a heatmap of sites and sites for each pair of stores and metric."""
    charts = []
    groups = _group_rows(_add_marks(rows), ("store_a", "store_b", "metric"))
    for (store_a, store_b, metric), panel in groups:
        sites_a = panel["site_a"].unique(maintain_order=True).to_list()
        sites_b = panel["site_b"].unique(maintain_order=True).to_list()
        n_cells = len(sites_a) * len(sites_b)
        if min(len(sites_a), len(sites_b)) < 2 or len(panel) > n_cells:
            continue
        if len(panel) < n_cells / 2:  # single pairs of sites, rather than all with all
            continue
        values = panel.filter(pl.col("value").is_finite())["value"].to_numpy()
        if not len(values):
            continue
        limits = data_limits([values])
        marks = panel.select("site_a", "site_b", *MARK).rows()
        charts.append(
            {
                "kind": "heat",
                "title": f"{_short_text(store_a)} × {_short_text(store_b)}",
                "metric": metric_words(metric),
                "y": _short_text(store_a),
                "x": _short_text(store_b),
                "rows": [site_words(site) for site in sites_a],
                "cols": [site_words(site) for site in sites_b],
                "cells": _fill_cells(sites_a, sites_b, marks),
                "range": list(limits),
                "n_marks": len(panel),
            }
        )
    return charts


def _fill_cells(
    row_names: Sequence[Any], col_names: Sequence[Any], marks: Iterable[tuple[Any, ...]]
) -> list[list[Any]]:
    """Return the cells of a heatmap, rows of columns: a mark, or None where there is none.

    Args:
        row_names: distinct.
        col_names: distinct.
        marks: (row's name, column's name, *the cells of `MARK`).
    """
    cells: list[list[Any]] = [[None] * len(col_names) for _ in row_names]
    row_index = {name: i for i, name in enumerate(row_names)}
    col_index = {name: i for i, name in enumerate(col_names)}
    for row_name, col_name, *mark in marks:
        cells[row_index[row_name]][col_index[col_name]] = mark
    return cells


# ------------------------------------------------------------------------------------ steps


def _step_heatmaps(table: Table) -> list[dict[str, Any]]:
    """Return a heatmap of layers and steps for each metric and model that the figure shows."""
    try:
        rows = _add_marks(layers_over_steps(table))
    except VitseeError:  # the figure says why
        return []
    charts = []
    has_several_runs = rows["run"].n_unique() > 1
    panels = list(_group_rows(rows, ("panel", "run")))[:MAX_PANELS]
    for (title, run), panel in panels:
        sites = panel.select("site", "block").unique(maintain_order=True).rows()
        steps = panel["step"].unique().sort().to_list()
        values = panel.filter(pl.col("value").is_finite())["value"].to_numpy()
        site_names = [site for site, _ in sites]
        marks = panel.select("site", "step", *MARK).rows()
        charts.append(
            {
                "kind": "heat",
                "title": f"{_short_text(run)}: {title}" if has_several_runs else title,
                "metric": metric_words(panel["metric"][0]),
                "y": "layer",
                "x": table.step_unit,
                "rows": [layer_words(site, block) for site, block in sites],
                "cols": [f"{step:,}" for step in steps],
                "cells": _fill_cells(site_names, steps, marks),
                "range": [
                    float(values.min()) if len(values) else 0.0,
                    float(values.max()) if len(values) else 0.0,
                ],
                "n_marks": len(panel),
            }
        )
    return charts


# ------------------------------------------------------------------------------------ curves


def _depth_curves(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return a panel per metric.

    It has a line per store (and token, k, ...) or, if the rows have heads, a dot per head.
    """
    rows = _add_marks(rows)
    rows = rows.with_columns(block_part(rows).alias(PART))
    stores = store_order(rows)
    charts = []
    for (metric,), panel in _group_rows(rows, ("metric",)):
        by_head = _varies(panel, "head")
        lines = _panel_lines(panel, stores, by_head=by_head)
        depths = {point[0] for line in lines for point in line["points"]}
        if not 0 < len(lines) <= MAX_LINES or len(depths) < 2:
            continue
        charts.append(
            {
                "kind": "curves",
                "key": metric,
                "title": metric_words(metric),
                "metric": metric_words(metric),
                "heads": by_head,
                "lines": lines,
                "n_marks": sum(len(line["points"]) for line in lines),
            }
        )
    return charts


def _panel_lines(
    panel: pl.DataFrame, stores: Sequence[str], *, by_head: bool
) -> list[dict[str, Any]]:
    """Return the lines of a panel: name, points, whether it is a baseline, number of its colour.

    Empty if a line would have a site twice, which none of the known columns tells apart.

    Args:
        panel: rows of one metric, with `MARK` and `PART`.
        stores: in the order of their colours.
        by_head: a point per head rather than per site.
    """
    line_columns = _line_columns(panel, by_head=by_head)
    lines: list[dict[str, Any]] = []
    line_stores: list[int] = []  # of each line
    for key, rows in _group_rows(panel, line_columns):
        if not by_head and rows["site"].n_unique() < len(rows):
            return []
        points = _line_points(rows, by_head=by_head)
        if not points:
            continue
        cells = dict(zip(line_columns, key, strict=True))
        words = [
            _value_words(name, value)
            for name, value in cells.items()
            if value is not None
        ]
        is_baseline = cells.get("baseline") is not None
        lines.append(
            {"name": ", ".join(words), "points": points, "baseline": is_baseline}
        )
        line_stores.append(stores.index(rows["store"][0]))
    of_models = [
        store
        for line, store in zip(lines, line_stores, strict=True)
        if not line["baseline"]
    ]
    # The store's colour if each store has one line, else a colour per line.
    one_line_each = 0 < len(of_models) == len({*of_models})
    for i, line in enumerate(lines):
        line["colour"] = line_stores[i] if one_line_each else i
    return lines


def _line_points(rows: pl.DataFrame, *, by_head: bool) -> list[list[Any]]:
    """Return [depth, *the cells of `MARK`, site in words, head in words if there are heads].

    In the order of depth; rows without a depth or a value have no point.
    """
    rows = rows.filter(pl.all_horizontal(pl.col("rel_depth", MARK[0]).is_not_null()))
    rows = rows.sort("rel_depth", maintain_order=True)
    points = []
    for depth, *mark, site in rows.select("rel_depth", *MARK, "site").rows():
        points.append([round(depth, 5), *mark, site_words(site)])
    if by_head:
        for point, head in zip(points, rows["head"], strict=True):
            point.append(f"head {head}")
    return points


def _line_columns(panel: pl.DataFrame, *, by_head: bool) -> list[str]:
    """Return the columns that tell lines apart: as few as leave no site twice on a line."""
    point_columns = ["site", "head"] if by_head else ["site"]
    columns = ["store"]
    if _varies(panel, PART):
        columns.append(PART)
    for name in LINE_COLUMNS:
        if not _varies(panel, name):
            continue
        n_without = panel.select([*columns, *point_columns]).n_unique()
        n_with = panel.select([*columns, name, *point_columns]).n_unique()
        # Baselines are lines of their own, whatever their sites.
        if name == "baseline" or n_without < n_with:
            columns.append(name)
    return columns


def _value_words(name: str, value: Any) -> str:
    """Return a value that tells lines apart as words in the line's name."""
    if name == "baseline":
        return baseline_words(str(value))
    if name == "token":
        return token_words(_short_text(value))
    if name == PART:
        return BLOCK_PARTS.get(value, value) or "block output"
    if name in ("store", "type", "class"):
        return _short_text(value)
    return f"{name} {_text(value)}"


# ------------------------------------------------------------------------------------ cells


def _add_marks(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with the columns `MARK`, null where a number is missing or not finite.

    They are rounded to six digits, more than the page shows: the page gets shorter.
    """
    marks = []
    for name, mark in zip(MARK_COLUMNS, MARK, strict=True):
        cell = pl.col(name) if name in rows.columns else pl.lit(None, pl.Float64)
        number = cell.cast(pl.Float64)
        rounded = pl.when(number.is_finite()).then(number.round_sig_figs(6))
        marks.append(rounded.alias(mark))
    return rows.with_columns(marks)


def _group_rows(
    rows: pl.DataFrame, names: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    """Yield (values of these columns, the rows that have them), in order of appearance."""
    yield from rows.partition_by(names, maintain_order=True, as_dict=True).items()


def _varies(rows: pl.DataFrame, name: str) -> bool:
    """Return whether a column has several values; one is enough of `baseline`, beside none."""
    min_values = 1 if name == "baseline" else 2
    return name in rows.columns and rows[name].drop_nulls().n_unique() >= min_values


def _text(value: Any) -> str:
    """Return a value as text, a float without trailing zeros."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short_text(value: Any) -> str:
    """Return a value as text that fits a legend."""
    return shorten(_text(value), MAX_NAME_CHARACTERS)
