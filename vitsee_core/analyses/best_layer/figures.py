"""The curves that were compared for a best layer, the best ones marked, and the table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitsee_core.analyses.best_layer.best_table import BestTable
from vitsee_core.figures.curve_looks import curve_looks, of_models, site_kind
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import (
    BEST,
    DEPTH_LABEL,
    add_curve_legend,
    draw_depth_curves,
    head_words,
)
from vitsee_core.figures.panels import Grid, em, handles_of, legend_below, note_count, panels, stack
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
    redundancy: Sequence[tuple[str, str, pl.DataFrame]],
) -> Figure:
    """One panel per task (-> the rows that were compared) and one per CKA self-comparison, from
    `layer_tasks.to_last`; below the table of the best rows."""
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


# ---------------------------------------------------------------- paired differences


LINE, MARGINS = 1.7, 7.0  # ems: of a line, above and below them
MOST_LETTERS = 44
CLEAR, UNCLEAR, ALONE = "95 % interval excludes 0", "95 % interval includes 0", "no interval"


def draw_differences(rows: pl.DataFrame) -> Figure:
    """One panel per task of `best_layer.compare`; below the name of what is compared a line for
    each difference to it, from the largest on, marked where its interval excludes 0."""
    by_task = rows.partition_by("task", maintain_order=True)
    tasks = [(str(own["task"][0]), _lines(own)) for own in by_task]
    most = max(len(lines) for _, lines in tasks)
    letters = max(len(text) for _, lines in tasks for text, _ in lines)
    width = 12 + 0.56 * letters
    figure, every = panels(
        len(tasks), width=width, widest=width + 8, height=most * LINE + MARGINS, most=2
    )
    for axes, (task, lines) in zip(every, tasks, strict=True):
        _draw(axes, task, lines)
    legend_below(figure, handles_of(every))
    return figure


def _lines(rows: pl.DataFrame) -> list[tuple[str, dict[str, Any] | None]]:
    """(text, row) from top to bottom; None for the row of a text that names the larger part."""
    lines: list[tuple[str, dict[str, Any] | None]] = []
    for (store, site), part in rows.group_by("store_a", "site_a", maintain_order=True):
        ordered = part.sort("value", descending=True, nulls_last=True, maintain_order=True)
        minuend = f"{store}: {site_words(site)}{_detail(part.row(0, named=True), 'a')} less"
        lines.append((shorten(minuend, MOST_LETTERS), None))
        for row in ordered.rows(named=True):
            other = site_words(row["site_b"]) + _detail(row, "b")
            if row["store_b"] != store:
                other = f"{row['store_b']}: {other}"
            lines.append((shorten(other, MOST_LETTERS), row))
    return lines


def _detail(row: dict[str, Any], side: str) -> str:
    """Which head or token it is, where the rows are of one."""
    cells = ((name, row.get(f"{name}_{side}", row.get(name))) for name in ("head", "token"))
    found = [f"{name} {value}" for name, value in cells if value is not None]
    return f" ({', '.join(found)})" if found else ""


def _draw(axes: Axes, task: str, lines: list[tuple[str, dict[str, Any] | None]]) -> None:
    metric = next(row["metric"] for _, row in lines if row is not None)
    axes.axvline(0, color=GREY, linewidth=0.8)
    for y, (_, row) in enumerate(lines):
        if row is None:
            continue
        low, high = row.get("low"), row.get("high")  # columns that no row fills are left out
        ink, face, label, marker = GREY, "white", ALONE, "x"
        if low is not None and high is not None:
            label, marker = UNCLEAR, "o"
            if low > 0 or high < 0:
                label, ink, face = CLEAR, colour(0), colour(0)
            axes.plot([low, high], [y, y], color=ink, solid_capstyle="butt")
        axes.plot(
            [row["value"]], [y], linestyle="none", label=label, marker=marker,
            markerfacecolor=face, markeredgecolor=ink,
        )  # fmt: skip
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
    axes: Axes, store: str, last: str, cka: pl.DataFrame, scores: Mapping[str, pl.DataFrame]
) -> None:
    """Draw one store's CKA to its last layer (from `to_last`), and its scores: task -> columns
    site, rel_depth, value.

    Kornblith et al. 2019 draw the CKA of each layer with the last of the same network and the
    accuracy of a linear probe against depth: where both are flat, layers could be left out.
    """
    label = "CKA with the last layer"
    axes.plot(cka["rel_depth"], cka["value"], color=ink(), marker="o", label=label)
    if "low" in cka.columns:
        axes.fill_between(
            cka["rel_depth"], cka["low"], cka["high"], color=ink(), alpha=0.15, linewidth=0
        )
    for i, (task, rows) in enumerate(scores.items()):
        outs = [site for site in rows["site"].unique() if site_kind(site) == "out"]
        own = rows.filter(pl.col("site").is_in(outs))
        if len(own) == 0:
            continue
        axes.plot(
            own["rel_depth"], own["value"], color=colour(7 + i), marker=marker(i + 1),
            label=shorten(task_words(task), 44),
        )  # fmt: skip
    axes.set_ylim(min(0.0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel("CKA; score")
    axes.set_title(f"{shorten(store, 28)}: CKA with {site_words(last)}")
