"""The best layers as a table for a paper: a row per model, a column per task, `0.372 (12)`.

Written as Walmer et al. 2023 print their Tables 1 and 5: the layer in brackets, counted from 1 for
the first block (`depth`; 0 is what enters it), controls below the models. The best value of each
column is bold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.depth_curves import site_kind
from vitsee_core.formats import FIGURE_ENDINGS, ending_of
from vitsee_core.metrics import direction
from vitsee_core.plotting import figure_bytes, new_figure, shorten, styled
from vitsee_core.results import Table
from vitsee_core.text import figure_text, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".md", ".tex", *FIGURE_ENDINGS)
ARROWS = {"higher": "↑", "lower": "↓"}
_LATEX_ARROWS = {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
_WIDEST = 11.0  # inches of columns side by side
_NONE = "–"  # where there is no value
_STEP = 0.21  # inches from one line to the next
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
    "best model."
)
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"–": "--", **_LATEX_ARROWS},
}


@dataclass(frozen=True)
class Cell:
    """text, and whether it is the best of its column."""

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
        tasks = table.unique("task")
        real = table.where(baseline="")
        cells = zip(*(real[name].tolist() for name in ("task", "store", "value")), strict=True)
        values = {(task, store): value for task, store, value in cells}
        header, best = ["model"], {}
        for task in tasks:
            way = direction(str(table.where(task=task)["metric"][0]))
            header.append(f"{task} {ARROWS[way]}")
            own = [v for (of, _), v in values.items() if of == task and v == v]
            best[task] = (min if way == "lower" else max)(own) if len(own) > 1 else np.nan
        models = []
        for store in real.unique("store"):
            row = [Cell(str(store))]
            for task in tasks:
                rows = real.where(task=task, store=store)
                value = values.get((task, store), np.nan)
                row.append(Cell(_entry(rows, value), _equal(value, best[task])))
            models.append(row)
        names = [name for name in table.unique("baseline") if name]
        controls = [
            [Cell(name), *(Cell(_range(table.where(task=t, baseline=name))) for t in tasks)]
            for name in names
        ]
        known = [f"{name}: {CONTROLS[name]}" for name in names if name in CONTROLS]
        note = " ".join([_NOTE, *(f"{line[:1].upper()}{line[1:]}." for line in known)])
        return cls(header, models, controls, note)

    def written(self, path: Path) -> bytes:
        """In the format of the ending.

        Raises:
            VitseeError: another ending than one of `ENDINGS`.
        """
        ending = ending_of(path, ENDINGS, "--table")
        if ending in FIGURE_ENDINGS:
            return figure_bytes(self.figure(), ending)
        return (self.markdown() if ending == ".md" else self.latex()).encode()

    def markdown(self) -> str:
        """As GitHub and pandoc read it."""

        def line(cells: Sequence[Cell]) -> str:
            texts = [visible(cell.text).replace("|", "\\|") for cell in cells]
            bold = [cell.bold for cell in cells]
            return " | ".join(f"**{t}**" if b else t for t, b in zip(texts, bold, strict=True))

        rows = [[Cell(name) for name in self.header], *self.models, *self.controls]
        lines = [f"| {line(row)} |" for row in rows]
        rule = f"|---|{'---:|' * (len(self.header) - 1)}"
        return "\n".join([lines[0], rule, *lines[1:], "", self.note, ""])

    def latex(self) -> str:
        """A `tabular` with the rules of booktabs."""

        def line(cells: Sequence[Cell]) -> str:
            texts = ["".join(_LATEX.get(c, c) for c in visible(cell.text)) for cell in cells]
            bold = [cell.bold for cell in cells]
            joined = (f"\\textbf{{{t}}}" if b else t for t, b in zip(texts, bold, strict=True))
            return " & ".join(joined) + r" \\"

        columns = "l" + "r" * (len(self.header) - 1)
        below = [r"\midrule", *map(line, self.controls)] if self.controls else []
        return "\n".join(
            [
                "% " + self.note,
                f"\\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                line([Cell(name) for name in self.header]),
                r"\midrule",
                *map(line, self.models),
                *below,
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    @styled
    def figure(self) -> Figure:
        """Rules above and below, as in print; columns that find no room beside the others stand
        below them, with the models again."""
        import textwrap

        heads = [self.header[:1]]
        for name in self.header[1:]:
            task, _, arrow = name.replace(" = ", "\u00a0=\u00a0").rpartition(" ")
            heads.append(textwrap.wrap(f"{shorten(task, 60)}\u00a0{arrow}", 17))
        rows = [*self.models, *self.controls]
        longest = [
            max(*(len(cell) for cell in head), *(len(row[i].text) for row in rows))
            for i, head in enumerate(heads)
        ]
        widths = [0.075 * min(n, 32) + 0.25 for n in longest]
        bands = _bands(widths)
        width = max(sum(widths[i] for i in band) for band in bands)
        note = textwrap.wrap(self.note, max(40, int(width * 16)))
        n_lines = sum(
            max(len(heads[i]) for i in band) + len(self.models) + len(self._controls(band)) + 1
            for band in bands
        )
        height = _STEP * (n_lines + 0.5) + 0.15 * len(note)
        figure = new_figure(width + 0.3, height)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(-0.15, width + 0.15)
        axes.set_ylim(height, 0)
        y = _STEP / 2
        for number, band in enumerate(bands):
            y += 0.8 * _STEP * (number > 0)
            y = self._draw(axes, y, [heads[i] for i in band], band, [widths[i] for i in band])
        for k, part in enumerate(note):
            axes.text(0, y + 0.19 + 0.15 * k, part, va="center", fontsize=6.5)
        return figure

    def _controls(self, columns: Sequence[int]) -> list[list[Cell]]:
        """Those that have a value in one of the columns."""
        return [row for row in self.controls if any(row[i].text != _NONE for i in columns[1:])]

    def _draw(
        self,
        axes: Axes,
        y: float,
        heads: Sequence[Sequence[str]],
        columns: Sequence[int],
        widths: Sequence[float],
    ) -> float:
        """Some of the columns below y, in inches; where they end.

        Args:
            axes: in inches, from the top.
            y: where they begin.
            heads: of each, its lines.
            columns: their numbers.
            widths: of each.
        """
        right = np.cumsum(widths)
        n_head = max(map(len, heads))

        def write(i: int, y: float, text: str, weight: str = "normal") -> None:
            x = 0.0 if i == 0 else float(right[i]) - 0.08
            align = "left" if i == 0 else "right"
            axes.text(x, y, figure_text(text), ha=align, va="center", fontsize=8, weight=weight)

        def rule(y: float, width: float) -> None:
            axes.plot([0, float(right[-1])], [y, y], color="black", linewidth=width)

        rule(y, 1.0)
        for i, head in enumerate(heads):
            for k, part in enumerate(head):
                write(i, y + _STEP * (n_head - len(head) + k + 0.6), part)
        y += _STEP * (n_head + 0.2)
        rule(y, 0.6)
        for number, row in enumerate([*self.models, *self._controls(columns)]):
            if number == len(self.models):
                rule(y + 0.02, 0.4)
            for i, column in enumerate(columns):
                text = shorten(row[column].text, 32)
                write(i, y + _STEP * 0.6, text, weight="bold" if row[column].bold else "normal")
            y += _STEP
        rule(y + 0.06, 1.0)
        return y


def _bands(widths: Sequence[float]) -> list[list[int]]:
    """The columns that stand side by side, each time the first and others, as evenly many as a
    page's width allows."""
    most = max(1, int((_WIDEST - widths[0]) / max(widths[1:], default=1.0)))
    others = range(1, len(widths))
    n = max(1, -(-len(others) // most))
    return [[0, *part.tolist()] for part in np.array_split(others, n)]


def _equal(a: float, b: float) -> bool:
    """Whether they are printed alike; not without a value."""
    return a == a and f"{a:.3f}" == f"{b:.3f}"


def _entry(rows: Table, value: float) -> str:
    """`0.372 (12)`; the site's name where it is no block's output."""
    if value != value:
        return _NONE
    site, depth = str(rows["site"][0]), rows["depth"][0]
    place = f"{int(depth)}" if site_kind(site) == "out" and depth is not None else site
    return f"{value:.3f} ({place})"


def _range(rows: Table) -> str:
    """A control's value, or its range over stores."""
    values = rows["value"].astype(float)
    values = values[np.isfinite(values)]
    if not len(values):
        return _NONE
    low, high = f"{values.min():.3f}", f"{values.max():.3f}"
    return low if low == high else f"{low} to {high}" if "-" in low + high else f"{low}–{high}"
