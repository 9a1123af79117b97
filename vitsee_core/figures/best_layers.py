"""The curves that were compared for a best layer, the best ones marked, and the table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.depth_curves import (
    BEST,
    add_curve_legend,
    curve_numbers,
    draw_depth_curves,
    site_kind,
)
from vitsee_core.figures.redundancy import draw_redundancy
from vitsee_core.metrics import direction
from vitsee_core.plotting import GREY, colour, new_figure, shorten
from vitsee_core.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3


def draw_best_layers(
    table: Table, tasks: Mapping[str, Table], redundancy: Sequence[tuple[str, str, Table]]
) -> Figure:
    """One panel per task and one per CKA self-comparison; the table below.

    Args:
        table: the best rows.
        tasks: task -> the rows that were compared.
        redundancy: from `redundancy.to_last`.
    """
    compared = list(tasks.items())
    everything = Table.concat([_curve(rows) for _, rows in compared])
    n = len(compared) + len(redundancy)
    across = min(n, ACROSS)
    lines = -(-n // across)
    below = 0.2 + 0.26 * (1 + len(compared))
    figure = new_figure(max(4.4 * across, 7.0), 3.3 * lines + below + 0.4)
    grid = figure.add_gridspec(lines + 1, across, height_ratios=[*[3.3] * lines, below])
    panels = [figure.add_subplot(grid[divmod(i, across)]) for i in range(n)]
    for axes, (task, rows) in zip(panels, compared, strict=False):
        draw_depth_curves(axes, _curve(rows), ylabel=rows["metric"][0], among=everything)
        _draw_stars(axes, table.where(task=task, baseline=""), everything)
        axes.set_title(shorten(task, 44))
    for axes, (store, last, rows) in zip(panels[len(compared) :], redundancy, strict=True):
        scores = {task: _curve(of).where(store=store, baseline="") for task, of in compared}
        draw_redundancy(axes, store, last, rows, scores)
    add_curve_legend(figure, panels[: len(compared)])
    _draw_table(figure.add_subplot(grid[lines, :]), table)
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
    """A star at each store's best layer. everything: the rows from which the curves take their
    colours."""
    numbers = curve_numbers(everything)
    ticks = dict(
        zip((text.get_text() for text in axes.get_xticklabels()), axes.get_xticks(), strict=True)
    )
    for store, row in best.groups("store"):
        site, value = row["site"][0], row["value"][0]
        if value != value:
            continue
        kind = site_kind(site)
        x = ticks[site] if kind == "head" else _curve(row)["rel_depth"][0]
        style: dict[str, Any] = {
            "color": colour(numbers[store, kind]),
            "linestyle": "none",
            "zorder": 4,
        }
        axes.plot([x], [value], marker="*", markersize=12, markeredgecolor="white", **style)
    axes.plot([], [], marker="*", markersize=9, color=GREY, linestyle="none", label=BEST)


def _best_cell(row: Table) -> str:
    """`0.912  blocks.3.out`, and how many others are equal."""
    ties = row["ties"][0] if "ties" in row.columns else None
    more = f" (and {len(ties.split('; '))} equal)" if ties else ""
    return f"{row['value'][0]:.3f}  {row['site'][0]}{more}"


def _draw_table(axes: Axes, table: Table) -> None:
    """Tasks by stores: best value and its layer."""
    axes.set_axis_off()
    real = table.where(baseline="")
    stores = real.unique("store")
    cells = []
    for task, rows in real.groups("task"):
        of: dict[str, Table] = dict(rows.groups("store"))
        best = [_best_cell(of[s]) if s in of else "" for s in stores]
        cells.append([shorten(task, 40), *best])
    drawn = axes.table(
        cells,
        colLabels=["best layer", *(shorten(store, 28) for store in stores)],
        loc="upper center",
        cellLoc="left",
        colLoc="left",
        edges="horizontal",
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    for cell in drawn.get_celld().values():
        cell.set(edgecolor=GREY, linewidth=0.5)
