"""Values along an attribute of the models: parameters, resolution, data, shots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.curve_looks import of_models
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import panels
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.groups import SIGN
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import task_words
from vitsee_core.types import pl
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
    rows = table.frame
    for name in (x, *by, "value", "metric"):
        if name not in rows.columns:
            raise VitseeError(
                f"this result has no column {name}; it has {', '.join(rows.columns)}"
            )
    rows = of_models(rows).filter(pl.col(x).is_not_null())
    if not len(rows):
        raise VitseeError(f"no row of a model has a value of {x}")
    text = not rows[x].dtype.is_numeric()
    places = {cell: i for i, cell in enumerate(rows[x].unique(maintain_order=True))}
    panel = "task" if "task" in rows.columns else "metric"
    numbers = ["value", *(n for n in ("low", "high", "n_images") if n in rows.columns)]
    at = pl.col(x).cast(pl.String).replace_strict(places) if text else pl.col(x)
    # Not the sign of groups, which would have panels of their own.
    curve = pl.concat_str(
        [pl.col(n).cast(pl.String).fill_null("None") for n in by], separator=", "
    )
    drawn = rows.select(
        "metric",
        *numbers,
        store=curve.str.replace_all(SIGN, "\u2044", literal=True),
        site=pl.lit("blocks.0.out"),  # one kind: one curve
        rel_depth=at.cast(pl.Float64),
        panel=panel,
    )
    _check_one_each(rows, drawn, x, by)
    each = drawn.partition_by("panel", maintain_order=True)
    figure, every = panels(len(each))
    for axes, own in zip(every, each, strict=True):
        draw_depth_curves(axes, own, among=drawn)
        axes.set_title(task_words(own["panel"][0]) if panel == "task" else "")
        axes.set_xlabel(LABELS.get(x, x))
        _put_ticks(axes, list(map(str, places)) if text else None, drawn["rel_depth"])
    add_curve_legend(figure, every)
    return figure


def _check_one_each(
    rows: pl.DataFrame, drawn: pl.DataFrame, x: str, by: Sequence[str]
) -> None:
    place = pl.struct("panel", "store", "rel_depth")
    again = drawn.select(place.is_duplicated()).to_series()
    if not again.any():
        return
    first = again.arg_max() or 0
    same = drawn.select((place == place.gather([first])).alias("same"))["same"]
    i, j, *_ = same.arg_true()
    about = rows.columns[: rows.columns.index("metric")]
    others = [n for n in about if n not in (x, *by) and rows[n][i] != rows[n][j]]
    raise VitseeError(
        f"several values of {drawn['store'][i]} at {x} = {rows[x][i]}"
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
