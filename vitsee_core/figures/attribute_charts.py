"""Values along an attribute of the models: parameters, resolution, data, shots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import panels
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.columns import is_given
from vitsee_core.tables.groups import SIGN
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import task_words
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECADE = 10  # of the largest to the smallest value, from which on the axis is logarithmic
LABELS = {
    "params": "parameters",
    "flops": "floating-point operations per image",
    "resolution": "input resolution (px)",
}


@styled
def draw_attribute_chart(table: Table, x: str, by: Sequence[str] = ()) -> Figure:
    """One panel per task or metric: `value` against the column `x`, with its interval.

    Text along x is spaced evenly in the table's order; numbers of more than a decade are drawn on a
    logarithmic axis. Rows of baselines are left out.

    Args:
        table: a result with a value per store.
        x: a column.
        by: columns whose values make the curves; by default each store is a curve.

    Raises:
        VitseeError: no such column, or several values at one place of a curve.
    """
    by = by or ("store",)
    for name in (x, *by, "value", "metric"):
        if name not in table.columns:
            raise VitseeError(
                f"this result has no column {name}; it has {', '.join(table.columns)}"
            )
    if "baseline" in table.columns:
        table = table.take(np.array([not is_given(b) for b in table["baseline"].tolist()], bool))
    table = table.take(np.array([is_given(cell) for cell in table[x].tolist()], bool))
    cells = table[x].tolist()
    if not cells:
        raise VitseeError(f"no row of a model has a value of {x}")
    places = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    text = any(isinstance(cell, str) for cell in cells)
    columns: dict[str, Any] = {
        n: table[n] for n in ("metric", "value", "low", "high", "n_images") if n in table.columns
    }
    curves = zip(*(table[name].tolist() for name in by), strict=True)
    panel = "task" if "task" in table.columns else "metric"
    columns |= {
        # Not the sign of groups, which would have panels of their own.
        "store": np.array([", ".join(map(str, c)).replace(SIGN, "\u2044") for c in curves], object),
        "site": np.full(len(table), "blocks.0.out", object),  # one kind: one curve
        "rel_depth": np.array([places[cell] if text else cell for cell in cells], np.float64),
        "panel": table[panel],
    }
    drawn = Table(columns)
    _check_one_each(table, drawn, x, by)
    names = drawn.unique("panel")
    figure, every = panels(len(names))
    for axes, (name, rows) in zip(every, drawn.groups("panel"), strict=True):
        draw_depth_curves(axes, rows, among=drawn)
        axes.set_title(task_words(str(name)) if panel == "task" else "")
        axes.set_xlabel(LABELS.get(x, x))
        _put_ticks(axes, list(places) if text else None, drawn["rel_depth"])
    add_curve_legend(figure, every)
    return figure


def _check_one_each(table: Table, drawn: Table, x: str, by: Sequence[str]) -> None:
    first: dict[Any, int] = {}
    names = ("panel", "store", "rel_depth")
    for i, key in enumerate(zip(*(drawn[name].tolist() for name in names), strict=True)):
        j = first.setdefault(key, i)
        if i == j:
            continue
        about = [*table.columns][: [*table.columns].index("metric")]
        others = [n for n in about if n not in (x, *by) and table[n][i] != table[n][j]]
        raise VitseeError(
            f"several values of {key[1]} at {x} = {table[x][i]}"
            + (f", which differ in {', '.join(others)}" if others else "")
            + "; choose a layer with --sites (last), take the best with vitsee best-layer, or make "
            "curves of a column with --by"
        )


def _put_ticks(axes: Axes, names: Sequence[str] | None, values: Any) -> None:
    from matplotlib import ticker

    if names is not None:
        axes.set_xticks(range(len(names)), [shorten(name, 16) for name in names])
        axes.margins(x=0.15)
        return
    if min(values) > 0 and max(values) >= DECADE * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=6))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
