"""Charts of values along an attribute of the models: parameters, resolution, data, shots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.curve_looks import of_models
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import panels
from vitsee_core.figures.plotting import styled
from vitsee_core.tables.groups import GROUP_SEPARATOR
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import task_words
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECADE = (
    10  # ratio of the largest to the smallest value above which the axis is logarithmic
)
LABELS = {
    "params": "parameters",
    "flops": "floating-point operations per image",
    "resolution": "input resolution (px)",
}


@styled
def draw_attribute_chart(table: Table, x: str, by: Sequence[str] = ()) -> Figure:
    """Return a figure of `value` against the column `x`, with its interval: a panel per task or
    metric.

    Text along x is spaced evenly in the table's order; numbers that span more than a decade are on
    a logarithmic axis. Rows of baselines are left out.

    Args:
        table: a result with a value per store.
        x: name of the column along the x axis.
        by: columns whose values make the curves; by default each store is a curve.

    Raises:
        VitseeError: no such column, or a curve has several values at one x.
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
    # The chart is drawn as curves over depth are: x takes the place of the depth, the values of
    # `by` that of the store.
    labels: list[str] | None = None  # of ticks, where x is text
    x_values = pl.col(x)
    if not rows[x].dtype.is_numeric():
        x_of_text = {
            text: i for i, text in enumerate(rows[x].unique(maintain_order=True))
        }
        labels = list(map(str, x_of_text))
        x_values = x_values.cast(pl.String).replace_strict(x_of_text)
    panel_column = "task" if "task" in rows.columns else "metric"
    optional = []
    for name in ("low", "high", "n_images"):
        if name in rows.columns:
            optional.append(name)
    by_texts = [pl.col(name).cast(pl.String).fill_null("None") for name in by]
    curve = pl.concat_str(by_texts, separator=", ")
    # A fraction slash instead of the sign that separates groups, which would get own panels.
    curve = curve.str.replace_all(GROUP_SEPARATOR, "\u2044", literal=True)
    chart_rows = rows.select(
        "metric",
        "value",
        *optional,
        store=curve,
        site=pl.lit("blocks.0.out"),  # sites of one kind make one curve
        rel_depth=x_values.cast(pl.Float64),
        panel=panel_column,
    )
    _require_one_value(rows, chart_rows, x, by)
    parts = chart_rows.partition_by("panel", maintain_order=True)
    figure, panel_axes = panels(len(parts))
    for axes, panel_rows in zip(panel_axes, parts, strict=True):
        draw_depth_curves(axes, panel_rows, among=chart_rows)
        title = ""
        if panel_column == "task":
            title = task_words(panel_rows["panel"][0])
        axes.set_title(title)
        axes.set_xlabel(LABELS.get(x, x))
        _label_x(axes, labels, chart_rows["rel_depth"])
    add_curve_legend(figure, panel_axes)
    return figure


def _require_one_value(
    rows: pl.DataFrame, chart_rows: pl.DataFrame, x: str, by: Sequence[str]
) -> None:
    """Refuse a chart whose curves have several values at one x.

    Args:
        rows: the table's rows.
        chart_rows: the same rows as they are drawn, with `panel`, `store` and `rel_depth`.
        x: the column along the x axis.
        by: the columns whose values make the curves.

    Raises:
        VitseeError: names such a curve, and the columns in which two of its rows differ.
    """
    point = pl.struct("panel", "store", "rel_depth")
    is_repeated = chart_rows.select(point.is_duplicated()).to_series()
    if not is_repeated.any():
        return
    first = is_repeated.arg_max() or 0
    is_same = chart_rows.select((point == point.gather([first])).alias("same"))["same"]
    i, j, *_ = is_same.arg_true()
    # Columns before the metric say what a row is about.
    about = rows.columns[: rows.columns.index("metric")]
    differing = [n for n in about if n not in (x, *by) and rows[n][i] != rows[n][j]]
    message = f"several values of {chart_rows['store'][i]} at {x} = {rows[x][i]}"
    if differing:
        message += f", which differ in {', '.join(differing)}"
    raise VitseeError(
        f"{message}; choose a layer with --sites (last), take the best with vitsee "
        "best-layer, or make curves of a column with --by"
    )


def _label_x(axes: Axes, names: Sequence[str] | None, values: Any) -> None:
    """Put ticks on the x axis.

    Args:
        axes: the panel.
        names: texts at 0, 1, ...; None where x are numbers.
        values: x of all rows; a span of a decade or more is logarithmic.
    """
    from matplotlib import ticker

    if names is not None:
        axes.set_xticks(range(len(names)), [shorten(name, 16) for name in names])
        axes.margins(x=0.15)
        return
    if min(values) > 0 and max(values) >= DECADE * min(values):
        axes.set_xscale("log")
        if not all(map(math.isfinite, axes.dataLim.intervalx)):
            # A panel without a value keeps matplotlib's limits about 0, which have no logarithm.
            axes.set_xlim(min(values), max(values))
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=6))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
