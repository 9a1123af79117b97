"""Differences of layers or models, a line each, those marked whose intervals exclude 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from vitsee_core.figures.panels import handles_of, legend_below, panels
from vitsee_core.figures.plotting import GREY, colour
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words, site_words, task_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LINE, MARGINS = 1.7, 7.0  # ems: of a line, above and below them
MOST_LETTERS = 44
CLEAR, UNCLEAR, ALONE = "95 % interval excludes 0", "95 % interval includes 0", "no interval"


def draw_differences(rows: pl.DataFrame) -> Figure:
    """One panel per task of `best_layer.compare`; below the name of what is compared a line for
    each difference to it, from the largest on."""
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
