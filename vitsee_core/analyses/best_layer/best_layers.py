"""The curves that were compared for a best layer, the best ones marked, and the table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.best_layer.best_table import BestTable
from vitsee_core.analyses.best_layer.redundancy import draw_redundancy
from vitsee_core.figures.curve_looks import curve_looks, site_kind
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import (
    BEST,
    add_curve_legend,
    draw_depth_curves,
)
from vitsee_core.figures.panels import Grid, em, note_count, stack
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import metric_words, site_words, task_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_best_layers(
    table: Table, tasks: Mapping[str, Table], redundancy: Sequence[tuple[str, str, Table]]
) -> Figure:
    """One panel per task (-> the rows that were compared) and one per CKA self-comparison, from
    `redundancy.to_last`; below the table of the best rows."""
    compared = list(tasks.items())
    everything = Table.concat([_curve(rows) for _, rows in compared])
    printed = BestTable.of(table)
    grid = CurveGrid.of(len(compared), everything)
    between = [Grid(len(redundancy))] if redundancy else []
    figure, (above, *middle, below) = stack(grid, *between, printed.grid())
    panels = grid.panels(above, compared)
    for axes, task, rows in panels:
        drawn, stores = _curve(rows), rows.unique("store")
        draw_depth_curves(axes, drawn, ylabel=metric_words(rows["metric"][0]), among=everything)
        _draw_stars(axes, table.where(task=task, baseline="", store=stores), everything)
        axes.set_title(task_words(task))
        note_count(axes, rows)
    grid.finish(panels)
    every = between[0].axes(middle[0]) if between else []
    for axes, (store, last, rows) in zip(every, redundancy, strict=True):
        scores = {task: _curve(of).where(store=store, baseline="") for task, of in compared}
        draw_redundancy(axes, store, last, rows, scores)
    add_curve_legend(figure, [*(axes for axes, *_ in panels), *every])
    printed.draw(below)
    return figure


def _curve(rows: Table) -> Table:
    """One row per store, site and baseline: the best of its heads and tokens."""
    sign = -1 if direction(str(rows["metric"][0])) == "lower" else 1
    values = sign * rows["value"].astype(float)
    best: dict[Any, int] = {}
    keys = zip(*(rows[n].tolist() for n in ("store", "site", "baseline")), strict=True)
    for i, key in enumerate(keys):
        if key not in best or values[i] > values[best[key]] or np.isnan(values[best[key]]):
            best[key] = i
    chosen = rows.take(np.array([*best.values()], np.int64))
    depth = chosen["depth"].astype(float)
    top = {
        store: np.nan_to_num(part["depth"].astype(float)).max(initial=1)
        for store, part in chosen.groups("store")
    }
    relative = depth / np.array([top[s] for s in chosen["store"].tolist()])
    columns: dict[str, NDArray[Any]] = {
        name: chosen[name] for name in ("store", "site", "baseline", "value")
    }
    given = chosen["rel_depth"].astype(float)
    columns["rel_depth"] = np.where(np.isfinite(given), given, relative)
    # Best rows have no intervals where no file has any.
    nothing = np.full(len(chosen), np.nan)
    for name in ("low", "high"):
        columns[name] = chosen.columns.get(name, nothing).astype(float)
    return Table(columns)


def _draw_stars(axes: Axes, best: Table, everything: Table) -> None:
    """A star at each store's best layer, in the colours of the curves of `everything`."""
    looks = curve_looks(everything)
    places = dict(
        zip((text.get_text() for text in axes.get_xticklabels()), axes.get_xticks(), strict=True)
    )
    for store, row in best.groups("store"):
        site, value = row["site"][0], row["value"][0]
        if value != value:
            continue
        kind = site_kind(site)
        x = places[site_words(site)] if kind == "head" else _curve(row)["rel_depth"][0]
        axes.plot(
            [x], [value], marker="*", markersize=em(72), markeredgecolor="white", zorder=4,
            color=looks[store, kind]["color"], linestyle="none",
        )  # fmt: skip
    axes.plot([], [], marker="*", markersize=em(72) * 0.8, color=GREY, linestyle="none", label=BEST)
