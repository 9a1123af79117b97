"""The best layers drawn: the curves that were compared with the best ones marked, and below them a
table as for a paper, a row per model, a column per task, `0.372 (12)`.

The table is as Walmer et al. 2023 print their Tables 1 and 5: the layer in brackets, counted from 1
for the first block (`depth`; 0 is what enters it), controls below the models. The best value of a
column is bold where its 95 % interval lies apart from all others'; else the note names those that
are near.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import (
    HEAD,
    Curve,
    baselines_of,
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
    room,
    small,
    stack,
)
from vitsee_core.figures.plotting import GREY, colour, figure_bytes, ink, marker, styled
from vitsee_core.tables.formats import FIGURE_ENDINGS, ending_of
from vitsee_core.tables.headlines import picked
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import figure_text, shorten, visible
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
    between = [PanelGrid(len(redundancy))] if redundancy else []
    figure, (above, *middle, below) = stack(grid, *between, printed.grid())
    panels = grid.panels(above, compared)
    for axes, task, rows in panels:
        drawn = _curve(rows)
        draw_depth_curves(
            axes, drawn, ylabel=metric_words(rows["metric"][0]), among=everything
        )
        own = best.filter(pl.col("store").is_in([*rows["store"]]), task=task)
        _draw_stars(axes, own, drawn, everything)
        axes.set_title(task_words(task))
        note_count(axes, rows)
    grid.finish(panels)
    every = between[0].axes(middle[0]) if between else []
    for axes, (store, last, apart) in zip(every, redundancy, strict=True):
        scores = {
            task: of_models(_curve(of)).filter(store=store) for task, of in compared
        }
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
        zip(
            (text.get_text() for text in axes.get_xticklabels()),
            axes.get_xticks(),
            strict=True,
        )
    )
    for store, site, value in best.select("store", "site", "value").rows():
        if value is None:
            continue
        kind = site_kind(site)
        if kind == HEAD:
            x = places[head_words(site)]
        else:
            x = drawn.filter(store=store, site=site)["rel_depth"][0]
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


# ems: of a line, above and below them
LINE = 1.7
MARGINS = 7.0
MOST_LETTERS = 44
CLEAR = "95 % interval excludes 0"
UNCLEAR = "95 % interval includes 0"
ALONE = "no interval"


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
        ordered = part.sort(
            "value", descending=True, nulls_last=True, maintain_order=True
        )
        minuend = (
            f"{store}: {site_words(site)}{_detail(part.row(0, named=True), 'a')} less"
        )
        lines.append((shorten(minuend, MOST_LETTERS), None))
        for row in ordered.rows(named=True):
            other = site_words(row["site_b"]) + _detail(row, "b")
            if row["store_b"] != store:
                other = f"{row['store_b']}: {other}"
            lines.append((shorten(other, MOST_LETTERS), row))
    return lines


def _detail(row: dict[str, Any], side: str) -> str:
    """Which head or token it is, where the rows are of one."""
    cells = (
        (name, row.get(f"{name}_{side}", row.get(name))) for name in ("head", "token")
    )
    found = [f"{name} {value}" for name, value in cells if value is not None]
    return f" ({', '.join(found)})" if found else ""


def _draw(axes: Axes, task: str, lines: list[tuple[str, dict[str, Any] | None]]) -> None:
    metric = next(row["metric"] for _, row in lines if row is not None)
    axes.axvline(0, color=GREY, linewidth=0.8)
    for y, (_, row) in enumerate(lines):
        if row is None:
            continue
        # columns that no row fills are left out
        low = row.get("low")
        high = row.get("high")
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
    axes: Axes,
    store: str,
    last: str,
    cka: pl.DataFrame,
    scores: Mapping[str, pl.DataFrame],
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
            cka["rel_depth"],
            cka["low"],
            cka["high"],
            color=ink(),
            alpha=0.15,
            linewidth=0,
        )
    for i, (task, rows) in enumerate(scores.items()):
        outs = [site for site in rows["site"].unique() if site_kind(site) == "out"]
        own = rows.filter(pl.col("site").is_in(outs))
        if len(own) == 0:
            continue
        axes.plot(
            own["rel_depth"],
            own["value"],
            color=colour(7 + i),
            marker=marker(i + 1),
            label=shorten(task_words(task), 44),
        )
    axes.set_ylim(min(0.0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel("CKA; score")
    axes.set_title(f"{shorten(store, 28)}: CKA with {site_words(last)}")


ENDINGS = (".md", ".tex", *FIGURE_ENDINGS)
ARROWS = {"higher": "↑", "lower": "↓"}
_LATEX_ARROWS = {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
_NONE = "–"  # where there is no value
_STEP = 1.7  # ems from one line to the next
_LETTER = 0.55  # ems
# What controls are, for the line below the table.
CONTROLS = {
    "random": "Gaussian features of the same shape (Walmer et al. 2023 report uniform ones in "
    "[0, 1), whose cosines are all near 3/4)",
    "chance": "what is expected without looking at features, exactly",
    "shuffled": "the same clusters against shuffled labels",
    "image": "the whole image in place of its segments",
    "still": "nothing moves",
    "grid": "the best that the grid of tokens allows",
    "central": "a blob in the centre of the image",
}
_NOTE = (
    "In brackets the best layer, counted from 1 for the first block (0: what enters it). Bold: the "
    "best model, where its 95 % interval lies apart from all others'."
)
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"–": "--", **_LATEX_ARROWS},
}


@dataclass(frozen=True)
class Cell:
    """An entry's text, and whether it is the best of its column."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class BestTable:
    """header: of each column, the model's first. models, controls: rows of cells; note: below."""

    header: list[str]
    models: list[list[Cell]]
    controls: list[list[Cell]]
    note: str

    @classmethod
    def of(cls, table: Table) -> BestTable:
        """A table of `best_layer.run`."""
        tasks = table.frame["task"].unique(maintain_order=True).to_list()
        real = of_models(table.frame)
        controlled = baselines_of(table.frame)
        header = ["model"]
        winners = {}
        unclear = []
        for task in tasks:
            rows = real.filter(task=task)
            way = direction(str(rows["metric"][0]))
            header.append(f"{task_words(task)} {ARROWS[way]}")
            near = _nearest(rows, way)
            several = len(picked(rows)) > 1
            winners[task] = near[0] if len(near) == 1 and several else None
            if len(near) > 1:
                unclear.append(f"{task_words(task)}: {', '.join(near)}")
        models = []
        for store in real["store"].unique(maintain_order=True):
            row = [Cell(str(store))]
            for task in tasks:
                rows = real.filter(task=task, store=store)
                row.append(Cell(_entry(rows), winners[task] == store))
            models.append(row)
        controls = [
            [Cell(name), *(Cell(_range(rows.filter(task=task))) for task in tasks)]
            for name, rows in controlled.items()
        ]
        known = [f"{name}: {CONTROLS[name]}" for name in controlled if name in CONTROLS]
        if "iou" in table.frame["metric"] and "random" in controlled:
            known.append("of saliency, random: a map of noise")
        if unclear:
            known.append(f"not told apart by 95 % intervals: {'; '.join(unclear)}")
        note = " ".join([_NOTE, *(f"{line[:1].upper()}{line[1:]}." for line in known)])
        return cls(header, models, controls, note)

    def written(self, path: Path) -> bytes:
        """The table's bytes in the format of the path's ending.

        Raises:
            VitseeError: another ending than one of `ENDINGS`.
        """
        ending = ending_of(path, ENDINGS, "--table")
        if ending in FIGURE_ENDINGS:
            return figure_bytes(self.figure(), ending)
        return (self.markdown() if ending == ".md" else self.latex()).encode()

    def markdown(self) -> str:
        """The table in Markdown, as GitHub and pandoc read it."""

        def line(cells: Sequence[Cell]) -> str:
            texts = [visible(cell.text).replace("|", "\\|") for cell in cells]
            bold = [cell.bold for cell in cells]
            return " | ".join(
                f"**{t}**" if b else t for t, b in zip(texts, bold, strict=True)
            )

        rows = [[Cell(name) for name in self.header], *self.models, *self.controls]
        lines = [f"| {line(row)} |" for row in rows]
        rule = f"|---|{'---:|' * (len(self.header) - 1)}"
        return "\n".join([lines[0], rule, *lines[1:], "", self.note, ""])

    def latex(self) -> str:
        """A `tabular` with the rules of booktabs."""

        def line(cells: Sequence[Cell]) -> str:
            texts = [
                "".join(_LATEX.get(c, c) for c in visible(cell.text)) for cell in cells
            ]
            bold = [cell.bold for cell in cells]
            joined = (
                f"\\textbf{{{t}}}" if b else t for t, b in zip(texts, bold, strict=True)
            )
            return " & ".join(joined) + r" \\"

        columns = "l" + "r" * (len(self.header) - 1)
        below = [r"\midrule", *map(line, self.controls)] if self.controls else []
        lines = [
            *("% " + self.note, f"\\begin{{tabular}}{{{columns}}}", r"\toprule"),
            *(
                line([Cell(name) for name in self.header]),
                r"\midrule",
                *map(line, self.models),
            ),
            *(*below, r"\bottomrule", r"\end{tabular}", ""),
        ]
        return "\n".join(lines)

    @styled
    def figure(self) -> Figure:
        """Rules above and below, as in print; columns that find no room beside the others stand
        below them, with the models again."""
        figure, (box,) = stack(self.grid())
        self.draw(box)
        return figure

    def grid(self) -> PanelGrid:
        """The room that it takes in a figure."""
        lines = sum(
            self._height(band) + len(self.models) + len(self._controls(band)) + 1
            for band in self._bands()
        )
        width = max(sum(self._widths()[i] for i in band) for band in self._bands())
        notes = _STEP * 0.7 * (len(self._note(min(width + 2, room()))) + 1)
        return PanelGrid(
            1, width=width + 2, widest=width + 2, height=lines * _STEP + notes
        )

    def draw(self, box: Any) -> None:
        """Draw it into a figure, or a part of one, in which `grid` has its room."""
        axes = box.add_subplot()
        axes.set_axis_off()
        axes.set_in_layout(False)
        axes.set_position((0, 0, 1, 1))
        height = self.grid().height
        y = 0.3
        for band in self._bands():
            rows = [*self.models, *self._controls(band)]
            heads = [Cell("\n".join(self._head(i))) for i in band]
            widths = [self._widths()[i] for i in band]
            lines = self._height(band) + len(rows)
            table = axes.table(
                [
                    [cell.text for cell in heads],
                    *([_short(row[i]) for i in band] for row in rows),
                ],
                colWidths=[width / self.grid().width for width in widths],
                cellLoc="right",
                edges="horizontal",
                bbox=(
                    *(1 / self.grid().width, 1 - (y + lines * _STEP) / height),
                    *(sum(widths) / self.grid().width, lines * _STEP / height),
                ),
            )
            table.auto_set_font_size(False)
            for (line, column), cell in table.get_celld().items():
                cell.set_height((self._height(band) if line == 0 else 1) / lines)
                cell.set(edgecolor=GREY, linewidth=0.5)
                cell.set_fontsize(small())
                cell.PAD = 0.02
                text = cell.get_text()
                text.set_text(figure_text(text.get_text()))
                text.set_fontweight(
                    "bold" if line and rows[line - 1][band[column]].bold else "normal"
                )
                if column == 0:
                    text.set_ha("left")
                    cell._loc = "left"
            y += (lines + 1) * _STEP
        note = "\n".join(self._note(min(self.grid().width, room())))
        axes.text(
            1 / self.grid().width,
            1 - (y - 0.5 * _STEP) / height,
            note,
            va="top",
            fontsize=0.8 * small(),
            transform=axes.transAxes,
        )

    def _head(self, i: int) -> list[str]:
        """The lines above a column."""
        if i == 0:
            return [self.header[0]]
        task, _, arrow = self.header[i].replace(" = ", "\u00a0=\u00a0").rpartition(" ")
        return textwrap.wrap(f"{shorten(task, 60)}\u00a0{arrow}", 17)

    def _height(self, columns: Sequence[int]) -> int:
        """Lines of text above these columns."""
        return max(len(self._head(i)) for i in columns)

    def _widths(self) -> list[float]:
        """Ems of each column."""
        rows = [*self.models, *self.controls]
        return [
            _LETTER
            * max(*map(len, self._head(i)), *(len(_short(row[i])) for row in rows))
            + 1.6
            for i in range(len(self.header))
        ]

    def _bands(self) -> list[list[int]]:
        """The columns that stand side by side, each time the first and others, as evenly many as
        the width allows."""
        widths = self._widths()
        most = max(1, int((room() - 2 - widths[0]) / max(widths[1:], default=1.0)))
        others = range(1, len(widths))
        parts = np.array_split(others, max(1, -(-len(others) // most)))
        return [[0, *part.tolist()] for part in parts]

    def _note(self, width: float) -> list[str]:
        """The note's lines below a table that is `width` ems wide."""
        return textwrap.wrap(self.note, max(40, int(width / (0.8 * 0.88 * _LETTER))))

    def _controls(self, columns: Sequence[int]) -> list[list[Cell]]:
        """The controls that have a value in one of the columns."""
        return [
            row for row in self.controls if any(row[i].text != _NONE for i in columns[1:])
        ]


def _short(cell: Cell) -> str:
    return shorten(cell.text, 32)


def _nearest(rows: pl.DataFrame, way: str) -> list[str]:
    """The stores that may be the best: the best one, and those whose intervals reach its own, all
    others where one of both has none."""
    sign = -1 if way == "lower" else 1
    value = sign * rows["value"].to_numpy()
    if np.isnan(value).all():
        return []
    nothing = pl.Series([np.nan] * len(rows))
    ends = [rows.get_column(name, default=nothing).to_numpy() for name in ("low", "high")]
    low, high = [sign * end for end in ends][::sign]
    best = int(np.nanargmax(value))
    apart = (high < low[best]) | np.isnan(value)
    near = rows["store"].filter(~apart).to_list()
    return sorted(near, key=lambda store: store != str(rows["store"][best]))


def _entry(rows: pl.DataFrame) -> str:
    """`0.372 (12)`; the site's name where it is no block's output."""
    for site, depth, value in (
        rows.select("site", "depth", "value").drop_nulls("value").rows()
    ):
        counted = site_kind(site) == "out" and depth is not None
        return f"{value:.3f} ({int(depth) if counted else site})"
    return _NONE


def _range(rows: pl.DataFrame) -> str:
    """A control's value, or its range over stores."""
    values = picked(rows)["value"].to_numpy()
    if not len(values):
        return _NONE
    low = f"{values.min():.3f}"
    high = f"{values.max():.3f}"
    if low == high:
        return low
    if "-" in low + high:
        return f"{low} to {high}"
    return f"{low}–{high}"
