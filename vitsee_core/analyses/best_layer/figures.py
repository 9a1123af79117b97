"""The best layers drawn: the curves that were compared with the best ones marked, above the table
of best layers; and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vitsee_core.analyses.best_layer.best_table import BestTable
from vitsee_core.analyses.best_layer.layer_tasks import LastLayerCka
from vitsee_core.figures.curve_looks import (
    HEAD,
    Curve,
    curve_looks,
    of_models,
    site_kind,
)
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import (
    BEST,
    DEPTH_LABEL,
    add_curve_legend,
    draw_depth_curves,
    head_words,
)
from vitsee_core.figures.panels import (
    PanelGrid,
    em,
    handles_of,
    legend_below,
    note_count,
    panels,
    stack,
)
from vitsee_core.figures.plotting import GREY, colour, ink, marker
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words, site_words, task_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_best_layers(
    table: Table,
    tasks: Mapping[str, pl.DataFrame],
    redundancy: Sequence[LastLayerCka],
) -> Figure:
    """Draw the curves of all tasks, the CKA with the last layer, and the table of best rows.

    Args:
        table: a result of `best_layer.run`.
        tasks: task -> the rows that were compared, one panel each.
        redundancy: results of `layer_tasks.to_last`, one panel each.
    """
    curves_by_task = {task: _curve_points(rows) for task, rows in tasks.items()}
    # All panels share colours, so that looks are chosen for the curves of all.
    all_curves = pl.concat(list(curves_by_task.values()))
    best = of_models(table.frame)
    printed = BestTable.from_result(table)
    curve_grid = CurveGrid.of(len(tasks), all_curves)
    cka_grid = PanelGrid(len(redundancy))
    if redundancy:
        figure, boxes = stack(curve_grid, cka_grid, printed.grid())
    else:
        figure, boxes = stack(curve_grid, printed.grid())
    curve_box = boxes[0]
    panels = curve_grid.panels(curve_box, list(tasks.items()))
    for axes, task, rows in panels:
        curves = curves_by_task[task]
        draw_depth_curves(
            axes, curves, ylabel=metric_words(rows["metric"][0]), among=all_curves
        )
        best_rows = best.filter(pl.col("store").is_in([*rows["store"]]), task=task)
        _draw_stars(axes, best_rows, curves, all_curves)
        axes.set_title(task_words(task))
        note_count(axes, rows)
    curve_grid.finish(panels)
    cka_axes = cka_grid.axes(boxes[1]) if redundancy else []
    for axes, comparison in zip(cka_axes, redundancy, strict=True):
        scores = {
            task: of_models(curves).filter(store=comparison.store)
            for task, curves in curves_by_task.items()
        }
        draw_redundancy(axes, comparison, scores)
    add_curve_legend(figure, [*(axes for axes, *_ in panels), *cka_axes])
    printed.draw(boxes[-1])
    return figure


def _curve_points(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the points of a task's curves, one per store, site and baseline.

    A point is the best of a site's heads and tokens. The columns are store, site, baseline,
    rel_depth, value, low and high.

    rows: of one task.
    """
    sign = -1 if direction(str(rows["metric"][0])) == "lower" else 1
    best = (sign * pl.col("value")).arg_max().fill_null(0)
    numbers = pl.col("value", "low", "high", "depth", "rel_depth").get(best)
    points = rows.group_by("store", "site", "baseline", maintain_order=True).agg(numbers)
    # Tables of older versions have no rel_depth.
    max_depth = pl.col("depth").max().over("store").fill_null(1).clip(1)
    rel_depth = pl.coalesce("rel_depth", pl.col("depth") / max_depth)
    return points.with_columns(rel_depth=rel_depth).drop("depth")


def _draw_stars(
    axes: Axes, best: pl.DataFrame, curves: pl.DataFrame, all_curves: pl.DataFrame
) -> None:
    """Draw a star at each store's best layer.

    Args:
        axes: the panel of a task, with its curves.
        best: the best rows of that task.
        curves: the points of the panel's curves.
        all_curves: the points of the curves of all panels, which decide the colours.
    """
    looks = curve_looks(all_curves)
    # Sites of the classifier have no depth: they stand at ticks of their own, found by their words.
    labels = [text.get_text() for text in axes.get_xticklabels()]
    x_by_label = dict(zip(labels, axes.get_xticks(), strict=True))
    for store, site, value in best.select("store", "site", "value").rows():
        if value is None:
            continue
        kind = site_kind(site)
        if kind == HEAD:
            x = x_by_label[head_words(site)]
        else:
            x = curves.filter(store=store, site=site)["rel_depth"][0]
        axes.plot(
            [x],
            [value],
            marker="*",
            markersize=em(72),
            markeredgecolor="white",
            zorder=4,
            color=looks[Curve(store, (), kind)]["color"],
            linestyle="none",
        )
    # An empty line in grey, so that the legend has one star and not one per store.
    axes.plot(
        [],
        [],
        marker="*",
        markersize=em(72) * 0.8,
        color=GREY,
        linestyle="none",
        label=BEST,
    )


# ---------------------------------------------------------------- paired differences


# Heights in ems: one line, and what stands above and below all lines.
LINE = 1.7
MARGINS = 7.0
MAX_LETTERS = 44
CLEAR = "95 % interval excludes 0"
UNCLEAR = "95 % interval includes 0"
ALONE = "no interval"


def draw_differences(rows: pl.DataFrame) -> Figure:
    """Draw a table of `best_layer.compare`, one panel per task.

    A heading names row a; below it each difference has a line, the largest first, with the name of
    row b and a marker that says whether the interval excludes 0.
    """
    by_task = rows.partition_by("task", maintain_order=True)
    tasks = [(str(frame["task"][0]), _difference_lines(frame)) for frame in by_task]
    max_lines = max(len(lines) for _, lines in tasks)
    max_letters = max(len(line.text) for _, lines in tasks for line in lines)
    width = 12 + 0.56 * max_letters  # ems: the panel, and a letter's mean width
    figure, all_axes = panels(
        len(tasks),
        width=width,
        widest=width + 8,
        height=max_lines * LINE + MARGINS,
        most=2,
    )
    for axes, (task, lines) in zip(all_axes, tasks, strict=True):
        _draw_difference_panel(axes, task, lines)
    legend_below(figure, handles_of(all_axes))
    return figure


class DifferenceLine(NamedTuple):
    """A line of a panel of differences; a heading, which names row a, has no row."""

    text: str
    row: dict[str, Any] | None


def _difference_lines(rows: pl.DataFrame) -> list[DifferenceLine]:
    """Return the lines of a panel from top to bottom, a heading above the lines of each row a.

    rows: differences of one task.
    """
    lines = []
    by_minuend = rows.group_by("store_a", "site_a", maintain_order=True)
    for (store, site), group in by_minuend:
        ordered = group.sort(
            "value", descending=True, nulls_last=True, maintain_order=True
        )
        detail = _head_and_token(group.row(0, named=True), "a")
        minuend = f"{store}: {site_words(site)}{detail} less"
        lines.append(DifferenceLine(shorten(minuend, MAX_LETTERS), None))
        for row in ordered.rows(named=True):
            subtrahend = site_words(row["site_b"]) + _head_and_token(row, "b")
            if row["store_b"] != store:
                subtrahend = f"{row['store_b']}: {subtrahend}"
            lines.append(DifferenceLine(shorten(subtrahend, MAX_LETTERS), row))
    return lines


def _head_and_token(row: Mapping[str, Any], side: str) -> str:
    """Return ` (head 5, token cls)` for side "a" or "b" of a difference, "" if it has neither."""
    words = []
    for name in ("head", "token"):
        # Tables in which all rows have the same token have it once, without a side.
        value = row.get(f"{name}_{side}", row.get(name))
        if value is not None:
            words.append(f"{name} {value}")
    if not words:
        return ""
    return f" ({', '.join(words)})"


def _draw_difference_panel(
    axes: Axes, task: str, lines: Sequence[DifferenceLine]
) -> None:
    """Draw the differences of one task, one below the other, with their intervals.

    Args:
        axes: the panel.
        task: its name, for the title.
        lines: what stands below one another, a heading without a row among them.
    """
    metric = next(line.row["metric"] for line in lines if line.row is not None)
    axes.axvline(0, color=GREY, linewidth=0.8)
    for y, (_, row) in enumerate(lines):
        if row is None:
            continue
        # Tables leave out columns that no row fills.
        low = row.get("low")
        high = row.get("high")
        # Filled and coloured only if the interval excludes 0.
        ink = GREY
        face = "white"
        label = ALONE
        marker = "x"
        if low is not None and high is not None:
            label = UNCLEAR
            marker = "o"
            if low > 0 or high < 0:
                label = CLEAR
                ink = colour(0)
                face = colour(0)
            axes.plot([low, high], [y, y], color=ink, solid_capstyle="butt")
        axes.plot(
            [row["value"]],
            [y],
            linestyle="none",
            label=label,
            marker=marker,
            markerfacecolor=face,
            markeredgecolor=ink,
        )
    axes.set_yticks(range(len(lines)), [text for text, _ in lines])
    for tick, (_, row) in zip(axes.get_yticklabels(), lines, strict=True):
        if row is None:
            tick.set_fontweight("bold")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"difference in {metric_words(metric)}")
    axes.set_title(task_words(task))


def draw_redundancy(
    axes: Axes, comparison: LastLayerCka, scores: Mapping[str, pl.DataFrame]
) -> None:
    """Draw one store's CKA with its last layer and its scores at all tasks against depth.

    Kornblith et al. 2019 draw the CKA of each layer with the last of the same network and the
    accuracy of a linear probe against depth: where both are flat, layers could be left out.

    Args:
        axes: the panel.
        comparison: the CKA of the store's sites with the last one.
        scores: task -> the store's curve, with the columns site, rel_depth and value.
    """
    cka = comparison.rows
    label = "CKA with the last layer"
    axes.plot(cka["rel_depth"], cka["value"], color=ink(), marker="o", label=label)
    if "low" in cka.columns:
        axes.fill_between(
            cka["rel_depth"],
            cka["low"],
            cka["high"],
            color=ink(),
            alpha=0.15,
            linewidth=0,
        )
    for i, (task, rows) in enumerate(scores.items()):
        sites = rows["site"].unique()
        block_outputs = [site for site in sites if site_kind(site) == "out"]
        curve = rows.filter(pl.col("site").is_in(block_outputs))
        if len(curve) == 0:
            continue
        # The first colours and markers belong to the stores of the panels above.
        axes.plot(
            curve["rel_depth"],
            curve["value"],
            color=colour(7 + i),
            marker=marker(i + 1),
            label=shorten(task_words(task), 44),
        )
    # CKA is at most 1, and most scores are shares: one axis for both.
    axes.set_ylim(min(0.0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel("CKA; score")
    store = shorten(comparison.store, 28)
    axes.set_title(f"{store}: CKA with {site_words(comparison.last)}")
