"""The curves that were compared for a best layer, the best ones marked, and the table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from vitsee_core.analyses.best_layer.best_table import BestTable
from vitsee_core.analyses.best_layer.redundancy import draw_redundancy
from vitsee_core.figures.curve_looks import curve_looks, of_models, site_kind
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import (
    BEST,
    add_curve_legend,
    draw_depth_curves,
    head_words,
)
from vitsee_core.figures.panels import Grid, em, note_count, stack
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import metric_words, task_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_best_layers(
    table: Table,
    tasks: Mapping[str, pl.DataFrame],
    redundancy: Sequence[tuple[str, str, pl.DataFrame]],
) -> Figure:
    """One panel per task (-> the rows that were compared) and one per CKA self-comparison, from
    `redundancy.to_last`; below the table of the best rows."""
    compared = list(tasks.items())
    everything = pl.concat([_curve(rows) for _, rows in compared])
    best = of_models(table.frame)
    printed = BestTable.of(table)
    grid = CurveGrid.of(len(compared), everything)
    between = [Grid(len(redundancy))] if redundancy else []
    figure, (above, *middle, below) = stack(grid, *between, printed.grid())
    panels = grid.panels(above, compared)
    for axes, task, rows in panels:
        drawn = _curve(rows)
        draw_depth_curves(axes, drawn, ylabel=metric_words(rows["metric"][0]), among=everything)
        own = best.filter(pl.col("store").is_in([*rows["store"]]), task=task)
        _draw_stars(axes, own, drawn, everything)
        axes.set_title(task_words(task))
        note_count(axes, rows)
    grid.finish(panels)
    every = between[0].axes(middle[0]) if between else []
    for axes, (store, last, apart) in zip(every, redundancy, strict=True):
        scores = {task: of_models(_curve(of)).filter(store=store) for task, of in compared}
        draw_redundancy(axes, store, last, apart, scores)
    add_curve_legend(figure, [*(axes for axes, *_ in panels), *every])
    printed.draw(below)
    return figure


def _curve(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per store, site and baseline: the best of its heads and tokens."""
    sign = -1 if direction(str(rows["metric"][0])) == "lower" else 1
    best = (sign * pl.col("value")).arg_max().fill_null(0)
    numbers = pl.col("value", "low", "high", "depth", "rel_depth").get(best)
    found = rows.group_by("store", "site", "baseline", maintain_order=True).agg(numbers)
    top = pl.col("depth").max().over("store").fill_null(1).clip(1)
    found = found.with_columns(rel_depth=pl.coalesce("rel_depth", pl.col("depth") / top))
    return found.drop("depth")


def _draw_stars(
    axes: Axes, best: pl.DataFrame, drawn: pl.DataFrame, everything: pl.DataFrame
) -> None:
    """A star at each store's best layer, on the curves of the panel, in the colours of those of
    `everything`."""
    looks = curve_looks(everything)
    places = dict(
        zip((text.get_text() for text in axes.get_xticklabels()), axes.get_xticks(), strict=True)
    )
    for store, site, value in best.select("store", "site", "value").rows():
        if value is None:
            continue
        kind = site_kind(site)
        if kind == "head":
            x = places[head_words(site)]
        else:
            x = drawn.filter(store=store, site=site)["rel_depth"][0]
        axes.plot(
            [x], [value], marker="*", markersize=em(72), markeredgecolor="white", zorder=4,
            color=looks[store, kind]["color"], linestyle="none",
        )  # fmt: skip
    axes.plot([], [], marker="*", markersize=em(72) * 0.8, color=GREY, linestyle="none", label=BEST)
