"""The table of best layers as for a paper, a row per model, a column per task, `0.372 (12)`.

It follows Tables 1 and 5 of Walmer et al. 2023: the layer stands in brackets, counted from 1 for
the first block (`depth`; 0 is the input of the first block), and controls stand below the models.
The best value of a column is bold if its 95 % interval lies apart from all others'; if not, the
note below the table names the models that are near it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.figures.curve_looks import baselines_of, of_models, site_kind
from vitsee_core.figures.panels import PanelGrid, room, small, stack
from vitsee_core.figures.plotting import GREY, figure_bytes, styled
from vitsee_core.tables.formats import FIGURE_ENDINGS, ending_of
from vitsee_core.tables.headlines import picked
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import figure_text, shorten, visible
from vitsee_core.tables.words import task_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Formats of `--table`.
ENDINGS = (".md", ".tex", *FIGURE_ENDINGS)
ARROWS = {"higher": "↑", "lower": "↓"}
_LATEX_ARROWS = {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
# Stands where a model has no value.
_NONE = "–"
# From one line to the next, and the mean width of a letter, in ems.
_STEP = 1.7
_LETTER = 0.55
# Baseline -> its explanation in the note below the table.
CONTROLS = {
    "random": (
        "Gaussian features of the same shape (Walmer et al. 2023 report uniform ones in "
        "[0, 1), whose cosines are all near 3/4)"
    ),
    "chance": "what is expected without looking at features, exactly",
    "shuffled": "the same clusters against shuffled labels",
    "image": "the whole image in place of its segments",
    "still": "nothing moves",
    "grid": "the best that the grid of tokens allows",
    "central": "a blob in the centre of the image",
}
_NOTE = (
    "In brackets the best layer, counted from 1 for the first block (0: what enters "
    "it). Bold: the best model, where its 95 % interval lies apart from all others'."
)
# Letters that mean something in LaTeX, and those that its fonts may lack.
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"–": "--", **_LATEX_ARROWS},
}


class Cell(NamedTuple):
    """An entry's text, and whether it is the best of its column and printed bold."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class BestTable:
    """The printed table: a row per model, a column per task, controls below the models.

    Attributes:
        header: the text above each column, the column of the models first.
        models: one row of cells per model, as many cells as the header.
        controls: one row of cells per baseline.
        note: the text below the table.
    """

    header: list[str]
    models: list[list[Cell]]
    controls: list[list[Cell]]
    note: str

    @classmethod
    def from_result(cls, table: Table) -> BestTable:
        """Return the printed form of a table of `best_layer.run`."""
        tasks = table.frame["task"].unique(maintain_order=True).to_list()
        model_rows = of_models(table.frame)
        control_rows = baselines_of(table.frame)
        header = ["model"]
        # Task -> the store whose value is bold, None for none.
        winners: dict[str, str | None] = {}
        unclear = []
        for task in tasks:
            rows = model_rows.filter(task=task)
            better = direction(str(rows["metric"][0]))
            header.append(f"{task_words(task)} {ARROWS[better]}")
            near_best = _stores_near_best(rows, better)
            if len(near_best) > 1:
                unclear.append(f"{task_words(task)}: {', '.join(near_best)}")
            # A model without a rival has not won.
            winners[task] = None
            if len(near_best) == 1 and len(picked(rows)) > 1:
                winners[task] = near_best[0]
        models = []
        for store in model_rows["store"].unique(maintain_order=True):
            cells = [Cell(str(store))]
            for task in tasks:
                rows = model_rows.filter(task=task, store=store)
                cells.append(Cell(_value_and_layer(rows), bold=winners[task] == store))
            models.append(cells)
        controls = []
        for name, rows in control_rows.items():
            ranges = [Cell(_value_range(rows.filter(task=task))) for task in tasks]
            controls.append([Cell(name), *ranges])
        sentences = [
            f"{name}: {CONTROLS[name]}" for name in control_rows if name in CONTROLS
        ]
        if "iou" in table.frame["metric"] and "random" in control_rows:
            sentences.append("of saliency, random: a map of noise")
        if unclear:
            sentences.append(f"not told apart by 95 % intervals: {'; '.join(unclear)}")
        capitalised = [f"{text[:1].upper()}{text[1:]}." for text in sentences]
        return cls(header, models, controls, note=" ".join([_NOTE, *capitalised]))

    def written(self, path: Path) -> bytes:
        """Return the table's bytes in the format of the path's ending.

        Raises:
            VitseeError: the ending is not one of `ENDINGS`.
        """
        ending = ending_of(path, ENDINGS, "--table")
        if ending in FIGURE_ENDINGS:
            return figure_bytes(self.figure(), ending)
        if ending == ".md":
            return self.markdown().encode()
        return self.latex().encode()

    def markdown(self) -> str:
        """Return the table in Markdown, as GitHub and pandoc read it."""
        rows = [[Cell(name) for name in self.header], *self.models, *self.controls]
        lines = [f"| {_markdown_cells(row)} |" for row in rows]
        rule = f"|---|{'---:|' * (len(self.header) - 1)}"
        return "\n".join([lines[0], rule, *lines[1:], "", self.note, ""])

    def latex(self) -> str:
        """Return a LaTeX `tabular` with the rules of the package booktabs."""
        columns = "l" + "r" * (len(self.header) - 1)
        lines = [
            "% " + self.note,
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _latex_row([Cell(name) for name in self.header]),
            r"\midrule",
        ]
        lines += [_latex_row(cells) for cells in self.models]
        if self.controls:
            lines.append(r"\midrule")
            lines += [_latex_row(cells) for cells in self.controls]
        lines += [r"\bottomrule", r"\end{tabular}", ""]
        return "\n".join(lines)

    @styled
    def figure(self) -> Figure:
        """Return the table as a figure of its own, with rules above and below, as in print."""
        figure, (box,) = stack(self.grid())
        self.draw(box)
        return figure

    def grid(self) -> PanelGrid:
        """Return the size that the table takes in a figure."""
        bands = self._bands()
        widths = self._widths()
        # One empty line follows each band.
        n_lines = sum(
            self._header_lines(band) + len(self.models) + len(self._controls(band)) + 1
            for band in bands
        )
        width = max(sum(widths[i] for i in band) for band in bands) + 2
        # The note is smaller than the table, by about 0.7.
        note_height = _STEP * 0.7 * (len(self._note_lines(min(width, room()))) + 1)
        return PanelGrid(
            1, width=width, widest=width, height=n_lines * _STEP + note_height
        )

    def draw(self, box: Any) -> None:
        """Draw the table into a figure or subfigure that has the size of `grid`.

        Columns that do not fit beside the others stand below them, with the models' names again.
        """
        axes = box.add_subplot()
        axes.set_axis_off()
        axes.set_in_layout(False)
        axes.set_position((0, 0, 1, 1))
        grid = self.grid()
        all_widths = self._widths()
        # All sizes are in ems, measured from the top; axes count from 0 to 1 from the bottom.
        y = 0.3
        for band in self._bands():
            rows = [*self.models, *self._controls(band)]
            header_texts = ["\n".join(self._header_text(i)) for i in band]
            texts = [[_shortened(row[i]) for i in band] for row in rows]
            widths = [all_widths[i] for i in band]
            header_lines = self._header_lines(band)
            n_lines = header_lines + len(rows)
            left = 1 / grid.width
            bottom = 1 - (y + n_lines * _STEP) / grid.height
            table = axes.table(
                [header_texts, *texts],
                colWidths=[width / grid.width for width in widths],
                cellLoc="right",
                edges="horizontal",
                bbox=(
                    left,
                    bottom,
                    sum(widths) / grid.width,
                    n_lines * _STEP / grid.height,
                ),
            )
            table.auto_set_font_size(False)
            for (line, column), cell in table.get_celld().items():
                is_header = line == 0
                cell.set_height((header_lines if is_header else 1) / n_lines)
                cell.set(edgecolor=GREY, linewidth=0.5)
                cell.set_fontsize(small())
                cell.PAD = 0.02
                text = cell.get_text()
                text.set_text(figure_text(text.get_text()))
                if not is_header and rows[line - 1][band[column]].bold:
                    text.set_fontweight("bold")
                if column == 0:
                    text.set_ha("left")
                    # matplotlib places the text by `_loc` when it draws, and has no setter for it.
                    cell._loc = "left"
            y += (n_lines + 1) * _STEP
        axes.text(
            1 / grid.width,
            1 - (y - 0.5 * _STEP) / grid.height,
            "\n".join(self._note_lines(min(grid.width, room()))),
            va="top",
            fontsize=0.8 * small(),
            transform=axes.transAxes,
        )

    def _header_text(self, column: int) -> list[str]:
        """Return the lines above a column."""
        if column == 0:
            return [self.header[0]]
        # No-break spaces keep `k = 20` together, and the arrow with the last word.
        header = self.header[column].replace(" = ", "\u00a0=\u00a0")
        task, _, arrow = header.rpartition(" ")
        return textwrap.wrap(f"{shorten(task, 60)}\u00a0{arrow}", 17)

    def _header_lines(self, columns: Sequence[int]) -> int:
        """Return the number of lines of text above these columns."""
        return max(len(self._header_text(i)) for i in columns)

    def _widths(self) -> list[float]:
        """Return the width of each column in ems."""
        rows = [*self.models, *self.controls]
        widths = []
        for i in range(len(self.header)):
            texts = [*self._header_text(i), *(_shortened(row[i]) for row in rows)]
            widths.append(_LETTER * max(len(text) for text in texts) + 1.6)
        return widths

    def _bands(self) -> list[list[int]]:
        """Return the columns that stand side by side, for each band from top to bottom.

        Each band begins with the column of the models. The others are divided as evenly as the
        width of the page allows.
        """
        widths = self._widths()
        widest = max(widths[1:], default=1.0)
        max_columns = max(1, int((room() - 2 - widths[0]) / widest))
        columns = range(1, len(widths))
        n_bands = max(1, math.ceil(len(columns) / max_columns))
        return [[0, *band.tolist()] for band in np.array_split(columns, n_bands)]

    def _note_lines(self, width: float) -> list[str]:
        """Return the note's lines below a table that is `width` ems wide."""
        # The note has 0.8 of the font size, and its letters are narrower than those of numbers.
        return textwrap.wrap(self.note, max(40, int(width / (0.8 * 0.88 * _LETTER))))

    def _controls(self, columns: Sequence[int]) -> list[list[Cell]]:
        """Return the controls that have a value in one of the columns."""
        return [
            row for row in self.controls if any(row[i].text != _NONE for i in columns[1:])
        ]


def _markdown_cells(cells: Sequence[Cell]) -> str:
    """Return the cells of one row, with `|` between them."""
    texts = []
    for cell in cells:
        text = visible(cell.text).replace("|", "\\|")
        texts.append(f"**{text}**" if cell.bold else text)
    return " | ".join(texts)


def _latex_row(cells: Sequence[Cell]) -> str:
    """Return one row of a `tabular`, with the letters escaped that mean something in LaTeX."""
    texts = []
    for cell in cells:
        text = "".join(_LATEX.get(letter, letter) for letter in visible(cell.text))
        texts.append(f"\\textbf{{{text}}}" if cell.bold else text)
    return " & ".join(texts) + r" \\"


def _shortened(cell: Cell) -> str:
    """Return the cell's text in at most 32 letters, as drawn."""
    return shorten(cell.text, 32)


def _stores_near_best(rows: pl.DataFrame, better: str) -> list[str]:
    """Return the stores that may be the best, the one with the best value first.

    These are the best one and those whose interval overlaps its interval. A store without an
    interval may always be the best.

    Args:
        rows: one task's row of each store.
        better: "higher" or "lower".
    """
    sign = -1 if better == "lower" else 1
    value = sign * rows["value"].to_numpy()
    if np.isnan(value).all():
        return []
    # Comparisons with NaN are false: without an interval no store is apart.
    missing = pl.Series([np.nan] * len(rows))
    low = rows.get_column("low", default=missing).to_numpy()
    high = rows.get_column("high", default=missing).to_numpy()
    # The ends of the interval with the sign that makes larger better.
    best_end = high if sign > 0 else -low
    worst_end = low if sign > 0 else -high
    best = int(np.nanargmax(value))
    apart = (best_end < worst_end[best]) | np.isnan(value)
    near = rows["store"].filter(~apart).to_list()
    best_store = str(rows["store"][best])
    return sorted(near, key=lambda store: store != best_store)


def _value_and_layer(rows: pl.DataFrame) -> str:
    """Return `0.372 (12)` for the first row with a value.

    The site's name stands in place of the number if the site is not a block's output.
    """
    scored = rows.select("site", "depth", "value").drop_nulls("value")
    if len(scored) == 0:
        return _NONE
    site, depth, value = scored.row(0)
    layer = site
    if site_kind(site) == "out" and depth is not None:
        layer = int(depth)
    return f"{value:.3f} ({layer})"


def _value_range(rows: pl.DataFrame) -> str:
    """Return a control's value, or its range over stores."""
    values = picked(rows)["value"].to_numpy()
    if len(values) == 0:
        return _NONE
    low = f"{values.min():.3f}"
    high = f"{values.max():.3f}"
    if low == high:
        return low
    # A dash between numbers would read as a minus.
    if "-" in low + high:
        return f"{low} to {high}"
    return f"{low}–{high}"
