"""Tables about pairs of sites as pictures: heatmaps on one colour scale, or curves where each site
has one partner.

The origin is at the bottom left and both axes run from the input to the output, as in Raghu et
al. 2021, Figs. 1, 2 and Walmer et al. 2023, Figs. 20 to 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.panels import (
    PanelGrid,
    beyond,
    colour_bar,
    count,
    em,
    legend_below,
    map_axes,
    room,
    small,
    stack,
)
from vitsee_core.figures.plotting import GREY, colour, marker
from vitsee_core.figures.site_axes import SiteAxis, Ticks
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, token_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_core.tables.results import Table


COLOUR_MAP = "magma"
NO_VALUE = "#9FB4BD"  # bluish grey: not a colour of the map
BOUNDARY = "#A0A0A0"  # seen on both ends of the map
MOST_LABELS = 24
MOST_NUMBERS = 16  # cells of a single row or column that have room for their numbers
# ems of a colour bar with its label, and of a cell with a number
BAR = 6.0
NUMBER = 2.2
LARGEST = 2.8  # ems of a cell's side


@dataclass(frozen=True)
class Panel:
    """One heatmap.

    Attributes:
        values: (rows, cols), NaN for none.
        rows, cols: the sites.
        title: above it.
        numbers: whether they are written into the cells where there is room.
        limits: of the colours; None: those of the values of all panels without limits.
        label: of a colour bar of its own, "" where all panels have one together.
    """

    values: Float
    rows: SiteAxis
    cols: SiteAxis
    title: str = ""
    numbers: bool = False
    limits: tuple[float, float] | None = None
    label: str = ""

    def ticks(self, cell: float = LARGEST) -> tuple[Ticks, Ticks]:
        """The ticks of the rows and of the columns, as many as can be read beside cells whose side
        is so many ems."""
        y, x = (
            side.ticks(min(MOST_LABELS, max(2, int(n * cell / 1.3))))
            for side, n in zip((self.rows, self.cols), self.values.shape, strict=True)
        )
        return y, x

    def around(self) -> tuple[float, float]:
        """Ems beside and below the cells, for labels and a colour bar."""
        y, x = self.ticks()
        return y.longest + 4.5 + BAR, (x.longest if x.upright else 1.5) + 4.5

    def side(self, width: float) -> float:
        """Ems of a cell in a panel of this width."""
        rows, cols = self.values.shape
        return float(
            min(
                (width - self.around()[0]) / cols,
                34 / rows,
                max(LARGEST, 10 / max(rows, cols)),
            )
        )


def draw_heatmaps(
    panels: Sequence[Panel], label: str = "", absent: str = "a self-HSIC is not positive"
) -> Figure:
    """The panels side by side, cells square, each with a colour bar of its own or with those called
    `label` for all of them.

    Colours span the values, unless the panels say otherwise; their ends are rounded, and in the
    label of the bar where they are not 0 and 1. Cells without a value are grey, and a legend
    explains them with `absent`. Call it inside a function decorated with `styled`.
    """
    from matplotlib.patches import Patch

    limits = data_limits([panel.values for panel in panels if not panel.label])
    grid = _grid(panels)
    figure, (box,) = stack(grid)
    figure.set_layout_engine("compressed", w_pad=em(0.6), h_pad=em(0.5))
    every = grid.axes(box)
    width = grid.size[0] / em() / grid.across
    for i, (axes, panel) in enumerate(zip(every, panels, strict=True)):
        span = panel.limits or (data_limits([panel.values]) if panel.label else limits)
        image = _draw(axes, panel, span, panel.side(width))
        if panel.label or i % grid.across == grid.across - 1 or i == len(panels) - 1:
            of = [panel] if panel.label else panels
            _add_bar(axes, image, span, of, panel.label or label)
    if any(np.isnan(panel.values).any() for panel in panels):
        legend_below(figure, {f"no value: {absent}": Patch(facecolor=NO_VALUE)})
    return figure


def data_limits(values: Sequence[Float]) -> tuple[float, float]:
    """The range of values, rounded to twentieths; from 0 or to 1 where they come near."""
    every = np.concatenate([np.ravel(of) for of in values] or [np.zeros(0)])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low = float(every.min())
    high = float(every.max())
    low = 0.0 if -0.05 < low < 0.15 else np.floor(low / 0.05 + 1e-9) * 0.05
    high = 1.0 if 0.85 < high < 1.05 else np.ceil(high / 0.05 - 1e-9) * 0.05
    return float(low), float(high if high > low else low + 0.05)


def _grid(panels: Sequence[Panel]) -> PanelGrid:
    """Cells as large as is useful, and so many panels on a line that they can be read."""
    beside = max(panel.around()[0] for panel in panels)
    cols = max(panel.values.shape[1] for panel in panels)
    longest = max(max(panel.values.shape) for panel in panels)
    wanted = min(
        max(LARGEST, 10 / longest),
        max(26 / longest, NUMBER if any(p.numbers for p in panels) else 0.45),
    )
    width = min(room(), max(beside + cols * wanted, 16.0))
    grid = PanelGrid(len(panels), width=width, widest=width, most=3)
    wide = grid.size[0] / em() / grid.across
    height = max(len(p.rows) * p.side(wide) + p.around()[1] for p in panels) + 2
    return PanelGrid(
        len(panels), width=width, widest=width, most=3, height=max(height, 11.0)
    )


def with_range(label: str, span: tuple[float, float]) -> str:
    """The label of a colour bar with its ends, where they are not 0 and 1."""
    name = label.partition(", colours from")[0]
    if span == (0.0, 1.0):
        return name
    return f"{name}, colours from {span[0]:.3g} to {span[1]:.3g}"


def _add_bar(
    axes: Axes,
    image: AxesImage,
    span: tuple[float, float],
    of: Sequence[Panel],
    label: str,
) -> None:
    values = np.concatenate([one.values.ravel() for one in of])
    # Rounding lifts the CKA of a site with itself slightly above 1.
    extend = beyond(values, span[0] - 1e-9, span[1] + 1e-9)
    colour_bar(axes, image, with_range(label, span), extend=extend)


def _draw(axes: Axes, panel: Panel, span: tuple[float, float], cell: float) -> AxesImage:
    import matplotlib

    colours = matplotlib.colormaps[COLOUR_MAP].with_extremes(bad=NO_VALUE)
    image = axes.imshow(
        panel.values, cmap=colours, vmin=span[0], vmax=span[1], aspect="equal"
    )
    map_axes(axes)
    y, x = panel.ticks(cell)
    x.put_on(axes.xaxis)
    y.put_on(axes.yaxis)
    for draw, side in ((axes.axhline, panel.rows), (axes.axvline, panel.cols)):
        for edge in side.boundaries():
            draw(edge, color=BOUNDARY, linewidth=0.5, alpha=0.6)
    axes.set_title(panel.title)
    if panel.numbers and cell >= NUMBER:
        _write_numbers(axes, panel, span)
    return image


def _write_numbers(axes: Axes, panel: Panel, span: tuple[float, float]) -> None:
    for (i, j), value in np.ndenumerate(panel.values):
        if not np.isnan(value):
            text = f"{value:.2f}".replace("-0.00", "0.00")
            ink = "black" if (value - span[0]) / (span[1] - span[0]) > 0.62 else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=small(), color=ink)


def describe_scope(table: Table) -> str:
    """The tokens and the number of images that a table's similarities are of: `class token, n =
    2000`."""
    tokens = table.notes.get("tokens")
    n = f"n = {count(table.frame)}"
    return n if tokens is None else f"{token_words(tokens)}, {n}"


def describe_scale(table: Table) -> str:
    """The name of its values: which CKA they are, according to its notes."""
    kind = table.notes.get("estimator")
    if kind is None:
        return "CKA"
    if table.notes.get("rescaled"):
        return "CKA (debiased, rescaled Grams)"
    if kind == "minibatch":
        return f"CKA (debiased, batches of {table.notes['batch']})"
    return f"CKA ({'biased' if kind == 'biased' else 'debiased'})"


# ----------------------------------------------------------------------- from tables about pairs


def panels_of(
    table: Table, column: str = "value", about: str | None = None
) -> list[Panel]:
    """Heatmaps: rows upwards, columns to the right, from input to output; one panel for each kind
    of sublayer where skips are compared with branches; numbers in the cells where models are
    compared by one site each. about: the title; by default tokens and number of images."""
    a = _cells(table.frame, "a")
    b = _cells(table.frame, "b")
    partners: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row, col in zip(a, b, strict=True):
        partners.setdefault(row, []).append(col)
    values = dict(zip(zip(a, b, strict=True), table[column], strict=True))
    about = describe_scope(table) if about is None else about
    panels = []
    # Rows with the same partners are one panel.
    for cols in dict.fromkeys(map(tuple, partners.values())):
        rows = [row for row, others in partners.items() if tuple(others) == cols]
        panels.append(_panel(table, rows, cols, values, about))
    return panels


def _panel(
    table: Table,
    rows: Sequence[tuple[str, str]],
    cols: Sequence[tuple[str, str]],
    values: dict[Any, float],
    about: str,
) -> Panel:
    blocks = _blocks(table.frame)
    branch = table.notes.get("pairs") == "branch"
    roles = ("skip", "branch") if branch else ("", "")
    title = about
    if branch:
        site = cols[0][1]
        part = site.removeprefix(f"{blocks.get(site, '')}.")
        title = f"{PARTS.get(part, part)}: {about}"
    return Panel(
        np.array([[values[row, col] for col in cols] for row in rows], np.float64),
        SiteAxis.of(rows, blocks, roles[0]),
        SiteAxis.of(cols, blocks, roles[1]),
        title,
        numbers=max(len(rows), len(cols)) == 1
        or (min(len(rows), len(cols)) == 1 and max(len(rows), len(cols)) <= MOST_NUMBERS)
        or len({store for store, _ in rows}) > 1,
    )


def _cells(rows: pl.DataFrame, side: str) -> list[tuple[str, str]]:
    return rows.select(f"store_{side}", f"site_{side}").rows()


def one_to_one(table: Table) -> bool:
    """Whether, between two stores, each of several sites has one partner of its own."""
    if table.notes.get("pairs") == "branch":
        return False
    of = table.frame.select("store_a", "site_a", "store_b", "site_b")
    n_a = of.select("store_a", "site_a", "store_b").n_unique()
    n_b = of.select("store_a", "store_b", "site_b").n_unique()
    return n_a == n_b == len(of) > of.select("store_a", "store_b").n_unique()


def _blocks(rows: pl.DataFrame) -> dict[str, str]:
    """Site -> the path of its block, of those that lie in one."""
    return {
        site: block
        for side in "ab"
        for site, block in rows.select(f"site_{side}", f"block_{side}").unique().rows()
        if block
    }


def draw_curves(axes: Axes, rows: pl.DataFrame) -> dict[str, Any]:
    """One curve per pair of stores, over the sites of the one that all are compared with, else over
    relative depth, with the 95 % interval as a band or the estimator's noise as bars; label ->
    handle for a legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    blocks = _blocks(rows)
    first = list(dict.fromkeys(_cells(rows, "a")))
    places = {cell: k for k, cell in enumerate(first)}
    handles: list[Any] = []
    references = rows["store_a"].unique(maintain_order=True).to_list()
    order = list(dict.fromkeys([*references, *rows["store_b"]]))
    pairs = rows.partition_by("store_a", "store_b", maintain_order=True, as_dict=True)
    for number, ((reference, store), own) in enumerate(pairs.items()):
        i = number if len(references) > 1 else order.index(store)
        x: Any = [places[cell] for cell in _cells(own, "a")]
        text = f"against {shorten(store, 28)}"
        if own["site_a"].to_list() != own["site_b"].to_list():
            others = SiteAxis.of([(store, site) for site in own["site_b"]], blocks)
            text = f"against {others.ticks(len(others)).label}"
        if len(references) > 1:
            x = own["rel_depth_a"]
            text = f"{shorten(reference, 28)} {text}"
        if _has(own, "low"):
            axes.fill_between(
                x, own["low"], own["high"], color=colour(i), alpha=0.2, linewidth=0
            )
        elif _has(own, "std"):
            axes.errorbar(
                x, own["value"], own["std"], color=colour(i), fmt="none", capsize=2
            )
        handles += axes.plot(
            x, own["value"], color=colour(i), marker=marker(i), label=text
        )
        if _has(own, "tau"):
            axes.plot(x, own["tau"], color=colour(i), linestyle=(0, (1, 1.5)))
            axes.plot(x, own["null_mean"], color=colour(i), linestyle=(0, (4, 1.5)))
    if _has(rows, "low"):
        handles.append(
            Patch(color=GREY, alpha=0.3, linewidth=0, label="95 % interval over images")
        )
    elif _has(rows, "std"):
        label = "std over minibatch repeats (the estimator's noise)"
        handles.append(
            Line2D([], [], color=GREY, marker="|", linestyle="none", label=label)
        )
    if _has(rows, "tau"):
        for dash, label in ((4, "mean with images permuted"), (1, "its 5 % threshold")):
            handles.append(
                Line2D([], [], color=GREY, linestyle=(0, (dash, 1.5)), label=label)
            )
    if len(references) > 1:
        axes.set_xlabel("relative depth")
    else:
        ticks = SiteAxis.of(first, blocks).ticks(MOST_LABELS)
        ticks.put_on(axes.xaxis)
    return {handle.get_label(): handle for handle in handles}


def _has(rows: pl.DataFrame, name: str) -> bool:
    return name in rows.columns and rows[name].is_finite().any()
