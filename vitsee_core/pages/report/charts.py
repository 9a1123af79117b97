"""Charts whose values a reader can point at: which ones a table gives, as JSON for the page.

A chart is a heatmap (`heat`) of pairs of sites, or of layers and the steps of a training, or
`curves` over depth; a mark of either carries its
site, value, 95 % interval and number of images. Tables of other kinds (maps of tokens, histograms)
have their figure alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from vitsee_core.figures.heatmaps import data_limits
from vitsee_core.figures.plotting import store_order
from vitsee_core.figures.training_charts import MOST_PANELS
from vitsee_core.figures.training_values import layer_words, layers_over_steps
from vitsee_core.tables.results import Table
from vitsee_core.tables.table_sites import block_part
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import BLOCK_PARTS as WORDS
from vitsee_core.tables.words import baseline_words, metric_words, site_words, token_words
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

MOST_MARKS = 6000  # of one table: more than that no browser shows at once without delay
MOST_LINES = 24  # of one panel
# Columns that tell lines of one panel apart, beside the store, where they have to.
ABOUT_LINE = (
    *("baseline", "token", "class", "type", "shots", "k"),
    *("l2", "l2_relative", "filter", "best"),
)
# Columns of which each value would be a curve of its own: such tables are maps, not curves.
ABOUT_MAP = (
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
SHOWN_STORES = 60  # characters of a name
MARK = [f"shown {name}" for name in ("value", "low", "high", "n_images")]


def charts_of(table: Table) -> list[dict[str, Any]]:
    """The charts of a table, none where it has no such shape or more marks than `MOST_MARKS`."""
    rows = table.frame
    names = {*table.frame.columns}
    if "value" not in names or TASK in names:
        return []
    if any(
        _varies(rows, name) for name in ABOUT_MAP
    ):  # rows about the whole beside parts
        rows = rows.filter(pl.col(n).is_null() for n in ABOUT_MAP if n in names)
    if not 0 < len(rows) <= 20 * MOST_MARKS:
        return []
    if table.step_unit:
        found = _over_steps(table)
    elif {"site_a", "site_b"} <= names:
        found = _pairs(rows)
    elif {"site", "rel_depth", "store", "metric"} <= names:
        found = _curves(rows)
    else:
        return []
    marks = sum(chart["n_marks"] for chart in found)
    return found if 0 < marks <= MOST_MARKS else []


# ------------------------------------------------------------------------------------ pairs


def _pairs(every: pl.DataFrame) -> list[dict[str, Any]]:
    found = []
    every = _marked(every)
    for (store_a, store_b, metric), rows in _grouped(
        every, ("store_a", "store_b", "metric")
    ):
        axes = [
            rows[f"site_{side}"].unique(maintain_order=True).to_list() for side in "ab"
        ]
        if min(map(len, axes)) < 2 or len(rows) > len(axes[0]) * len(axes[1]):
            continue
        if (
            len(rows) < len(axes[0]) * len(axes[1]) / 2
        ):  # sites in pairs, not all with all
            continue
        cells: list[list[Any]] = [[None] * len(axes[1]) for _ in axes[0]]
        place = [{site: i for i, site in enumerate(sites)} for sites in axes]
        for site_a, site_b, *mark in rows.select("site_a", "site_b", *MARK).rows():
            cells[place[0][site_a]][place[1][site_b]] = mark
        values = rows.filter(pl.col("value").is_finite())["value"].to_numpy()
        if not len(values):
            continue
        low, high = data_limits([values])
        names = {"a": _short(store_a), "b": _short(store_b)}
        found.append(
            {
                "kind": "heat",
                "title": f"{names['a']} × {names['b']}",
                "metric": metric_words(metric),
                "y": names["a"],
                "x": names["b"],
                "rows": [*map(site_words, axes[0])],
                "cols": [*map(site_words, axes[1])],
                "cells": cells,
                "range": [low, high],
                "n_marks": len(rows),
            }
        )
    return found


# ------------------------------------------------------------------------------------ steps


def _over_steps(table: Table) -> list[dict[str, Any]]:
    """A heatmap of layers and steps for each metric and model that the figure shows."""
    unit = table.step_unit
    found = []
    try:
        every = _marked(layers_over_steps(table))
    except VitseeError:  # which the figure says
        return []
    several = every["run"].n_unique() > 1
    for (panel, run), rows in list(_grouped(every, ("panel", "run")))[:MOST_PANELS]:
        sites = rows.select("site", "block").unique(maintain_order=True).rows()
        steps = rows["step"].unique().sort().to_list()
        cells: list[list[Any]] = [[None] * len(steps) for _ in sites]
        place = {site: i for i, (site, _) in enumerate(sites)}
        for site, step, *mark in rows.select("site", "step", *MARK).rows():
            cells[place[site]][steps.index(step)] = mark
        values = rows.filter(pl.col("value").is_finite())["value"]
        # type: ignore[arg-type]
        low = float(values.min() or 0)  # type: ignore[arg-type]
        high = float(values.max() or 0)  # type: ignore[arg-type]
        found.append(
            {
                "kind": "heat",
                "title": f"{_short(run)}: {panel}" if several else panel,
                "metric": metric_words(rows["metric"][0]),
                "y": "layer",
                "x": unit,
                "rows": [layer_words(*site) for site in sites],
                "cols": [f"{s:,}" for s in steps],
                "cells": cells,
                "range": [low, high],
                "n_marks": len(rows),
            }
        )
    return found


# ------------------------------------------------------------------------------------ curves


def _curves(every: pl.DataFrame) -> list[dict[str, Any]]:
    """A panel per metric: a line per store (and token, k, ...) or, with heads, a dot per head."""
    every = _marked(every).with_columns(block_part(every).alias(PART))
    stores = store_order(every)
    found = []
    for (metric,), rows in _grouped(every, ("metric",)):
        by_head = _varies(rows, "head")
        about = _keys(rows, by_head)
        lines: list[dict[str, Any]] = []
        for key, own in _grouped(rows, about):
            if not by_head and own["site"].n_unique() < len(own):
                break  # something else tells these rows apart
            cells = own.select(
                "rel_depth", *MARK, "site", *(["head"] if by_head else [])
            ).rows()
            placed = [
                cell for cell in cells if cell[0] is not None and cell[1] is not None
            ]
            points = [
                [round(x, 5), *mark, site_words(site), *(f"head {one}" for one in head)]
                for x, *mark, site, head in (
                    (*cell[:6], cell[6:]) for cell in sorted(placed, key=itemgetter(0))
                )
            ]
            baseline = "baseline" in about and key[about.index("baseline")] is not None
            if points:
                named = zip(about, key, strict=True)
                name = ", ".join(_label(n, v) for n, v in named if v is not None)
                lines.append(
                    {"name": name, "points": points, "baseline": baseline}
                    | {"store": stores.index(own["store"][0])}
                )
        else:
            shown = [line["store"] for line in lines if not line["baseline"]]
            for i, line in enumerate(
                lines
            ):  # the store's colour, where each has one line
                line["colour"] = (
                    line.pop("store") if len({*shown}) == len(shown) > 0 else i
                )
            depths = {point[0] for line in lines for point in line["points"]}
            if 0 < len(lines) <= MOST_LINES and len(depths) > 1:
                found.append(
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
    return found


def _keys(rows: pl.DataFrame, by_head: bool) -> list[str]:
    """The columns that tell lines apart: as few as leave no site twice on a line."""
    own = ["site", "head"] if by_head else ["site"]
    keys = ["store", *([PART] if _varies(rows, PART) else [])]
    for name in ABOUT_LINE:
        if not _varies(rows, name):
            continue
        apart = _distinct(rows, [*keys, *own])
        if name == "baseline" or apart < _distinct(rows, [*keys, name, *own]):
            keys.append(name)
    return keys


def _distinct(rows: pl.DataFrame, names: Sequence[str]) -> int:
    return rows.select(names).n_unique()


def _label(name: str, value: Any) -> str:
    if name == "baseline":
        return baseline_words(str(value))
    if name == "token":
        return token_words(_short(value))
    if name == PART:
        return WORDS.get(value, value) or "block output"
    if name in ("store", "type", "class"):
        return _short(value)
    return f"{name} {_text(value)}"


# ------------------------------------------------------------------------------------ cells


def _marked(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with `MARK`: value, low, high and n_images to six digits (which the page shows fewer
    of), null where there is none."""
    cells = [
        (pl.col(n) if n in rows.columns else pl.lit(None, pl.Float64)).cast(pl.Float64)
        for n in ("value", "low", "high", "n_images")
    ]
    finite = (pl.when(cell.is_finite()).then(cell.round_sig_figs(6)) for cell in cells)
    return rows.with_columns(x.alias(name) for x, name in zip(finite, MARK, strict=True))


def _grouped(
    rows: pl.DataFrame, names: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    """(values of these columns, the rows that have them), in order of appearance."""
    yield from rows.partition_by(names, maintain_order=True, as_dict=True).items()


def _varies(rows: pl.DataFrame, name: str) -> bool:
    least = 1 if name == "baseline" else 2
    return name in rows.columns and rows[name].drop_nulls().n_unique() >= least


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(value: Any) -> str:
    return shorten(_text(value), SHOWN_STORES)
