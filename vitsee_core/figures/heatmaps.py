"""Pictures of tables about pairs of sites: heatmaps, or curves where each site has one partner.

The origin is at the bottom left and both axes run from the input to the output, as in Raghu et
al. 2021, Figs. 1, 2 and Walmer et al. 2023, Figs. 20 to 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from vitsee_core.tables.words import BLOCK_PARTS, token_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_core.tables.results import Table


COLOUR_MAP = "magma"
NO_VALUE = "#9FB4BD"  # bluish grey: not a colour of the map
BOUNDARY = "#A0A0A0"  # seen on both ends of the map
MAX_LABELS = 24  # tick labels of an axis
MAX_NUMBERS = 16  # cells of a single row or column that have room for their numbers
# Lengths in ems.
BAR = 6.0  # a colour bar with its label
NUMBER = 2.2  # the least side of a cell with a number
LARGEST = 2.8  # the largest side of a cell in a map of many

# Line styles of the null distribution: its 5 % threshold and its mean.
DOTTED = (0, (1, 1.5))
DASHED = (0, (4, 1.5))

SiteOfStore = tuple[str, str]  # store, site


@dataclass(frozen=True)
class Panel:
    """One heatmap.

    Attributes:
        values: (rows, cols), NaN where there is no value.
        rows: the sites of the rows.
        cols: the sites of the columns.
        title: text above the panel.
        numbers: whether values are written into the cells where there is room.
        limits: lowest and highest value of the colours; None: the range of the values of all
            panels without a label, or of this panel's if it has one.
        label: label of a colour bar of the panel's own; "" where all panels share one.
    """

    values: Float
    rows: SiteAxis
    cols: SiteAxis
    title: str = ""
    numbers: bool = False
    limits: tuple[float, float] | None = None
    label: str = ""

    def ticks(self, cell: float = LARGEST) -> tuple[Ticks, Ticks]:
        """Return the ticks of the rows and of the columns, as many as can be read.

        Args:
            cell: ems of a cell's side.
        """
        n_rows, n_cols = self.values.shape
        return (
            self.rows.ticks(self._max_labels(n_rows, cell)),
            self.cols.ticks(self._max_labels(n_cols, cell)),
        )

    @staticmethod
    def _max_labels(n: int, cell: float) -> int:
        """The number of labels along n cells: a line of text takes 1.3 ems."""
        return min(MAX_LABELS, max(2, int(n * cell / 1.3)))

    def around(self) -> tuple[float, float]:
        """Return the ems beside and below the cells, for labels and a colour bar."""
        y, x = self.ticks()
        below = (
            x.longest if x.upright else 1.5
        )  # upright labels are as high as they are long
        return y.longest + 4.5 + BAR, below + 4.5

    def side(self, width: float) -> float:
        """Return the ems of a cell's side in a panel of this width."""
        rows, cols = self.values.shape
        fits_width = (width - self.around()[0]) / cols
        fits_height = 34 / rows
        # A map of few cells is 10 ems high, rather than as small as its cells.
        useful = max(LARGEST, 10 / max(rows, cols))
        return float(min(fits_width, fits_height, useful))


def draw_heatmaps(
    panels: Sequence[Panel], label: str = "", absent: str = "a self-HSIC is not positive"
) -> Figure:
    """Return a figure of heatmaps side by side, with square cells.

    Colours span the values, unless the panels say otherwise; the ends are rounded, and written into
    the label of the colour bar where they are not 0 and 1. Cells without a value are grey, and a
    legend explains them. Call it inside a function decorated with `styled`.

    Args:
        panels: the heatmaps.
        label: label of the colour bars of the panels that have none of their own; they share one
            scale, and have one bar at the end of each line.
        absent: why a cell may have no value, for the legend.
    """
    from matplotlib.patches import Patch

    shared_span = data_limits([panel.values for panel in panels if not panel.label])
    grid = _grid_for(panels)
    figure, (box,) = stack(grid)
    # "compressed": panels of fixed aspect stand close together, not apart in equal boxes.
    figure.set_layout_engine("compressed", w_pad=em(0.6), h_pad=em(0.5))
    panel_axes = grid.axes(box)
    width = grid.size[0] / em() / grid.across
    for i, (axes, panel) in enumerate(zip(panel_axes, panels, strict=True)):
        if panel.limits is not None:
            span = panel.limits
        elif panel.label:
            span = data_limits([panel.values])
        else:
            span = shared_span
        image = _draw_heatmap(axes, panel, span, panel.side(width))
        ends_line = i % grid.across == grid.across - 1 or i == len(panels) - 1
        if panel.label:
            _add_bar(axes, image, span, [panel], panel.label)
        elif ends_line:
            _add_bar(axes, image, span, panels, label)
    if any(np.isnan(panel.values).any() for panel in panels):
        legend_below(figure, {f"no value: {absent}": Patch(facecolor=NO_VALUE)})
    return figure


def data_limits(values: Sequence[Float]) -> tuple[float, float]:
    """Return the range of all finite values, rounded outwards to twentieths.

    It begins at 0 and ends at 1 where the values come near: similarities then have the same
    colours in most figures. (0, 1) without a finite value.
    """
    finite = np.concatenate([np.ravel(array) for array in values] or [np.zeros(0)])
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return 0.0, 1.0
    low = float(finite.min())
    high = float(finite.max())
    # 1e-9: a value that is a twentieth up to rounding stays where it is.
    if -0.05 < low < 0.15:
        low = 0.0
    else:
        low = float(np.floor(low / 0.05 + 1e-9) * 0.05)
    if 0.85 < high < 1.05:
        high = 1.0
    else:
        high = float(np.ceil(high / 0.05 - 1e-9) * 0.05)
    if high <= low:
        high = low + 0.05
    return low, high


def _grid_for(panels: Sequence[Panel]) -> PanelGrid:
    """Return the grid of heatmaps: cells as large as is useful, at most three panels on a line."""
    beside = max(panel.around()[0] for panel in panels)
    cols = max(panel.values.shape[1] for panel in panels)
    longest = max(max(panel.values.shape) for panel in panels)
    # Many cells get 26 ems together, unless they would be illegible or have no room for numbers.
    smallest_cell = NUMBER if any(panel.numbers for panel in panels) else 0.45
    cell = min(max(LARGEST, 10 / longest), max(26 / longest, smallest_cell))
    width = min(room(), max(beside + cols * cell, 16.0))
    grid = PanelGrid(len(panels), width=width, widest=width, most=3)
    # The height follows from the width that the panels really get on their lines.
    panel_width = grid.size[0] / em() / grid.across
    height = 2 + max(
        len(panel.rows) * panel.side(panel_width) + panel.around()[1] for panel in panels
    )
    return replace(grid, height=max(height, 11.0))


def with_range(label: str, span: tuple[float, float]) -> str:
    """Return the label of a colour bar with its ends, where they are not 0 and 1.

    The ends of an earlier range in the label are replaced.
    """
    name = label.partition(", colours from")[0]
    if span == (0.0, 1.0):
        return name
    return f"{name}, colours from {span[0]:.3g} to {span[1]:.3g}"


def _add_bar(
    axes: Axes,
    image: AxesImage,
    span: tuple[float, float],
    panels: Sequence[Panel],
    label: str,
) -> None:
    """Add a colour bar beside a panel, with arrows where values lie beyond its ends.

    Args:
        axes: the panel.
        image: its cells.
        span: lowest and highest value of the colours.
        panels: all panels that the bar is for.
        label: text along the bar.
    """
    values = np.concatenate([panel.values.ravel() for panel in panels])
    # Rounding lifts the CKA of a site with itself slightly above 1.
    extend = beyond(values, span[0] - 1e-9, span[1] + 1e-9)
    colour_bar(axes, image, with_range(label, span), extend=extend)


def _draw_heatmap(
    axes: Axes, panel: Panel, span: tuple[float, float], cell: float
) -> AxesImage:
    """Draw the cells of a heatmap, its ticks and the boundaries of blocks; return the cells.

    Args:
        axes: an empty panel.
        panel: what to draw.
        span: lowest and highest value of the colours.
        cell: ems of a cell's side.
    """
    import matplotlib

    colours = matplotlib.colormaps[COLOUR_MAP].with_extremes(bad=NO_VALUE)
    image = axes.imshow(
        panel.values, cmap=colours, vmin=span[0], vmax=span[1], aspect="equal"
    )
    map_axes(axes)
    y, x = panel.ticks(cell)
    x.put_on(axes.xaxis)
    y.put_on(axes.yaxis)
    boundary: dict[str, Any] = {"color": BOUNDARY, "linewidth": 0.5, "alpha": 0.6}
    for edge in panel.rows.boundaries():
        axes.axhline(edge, **boundary)
    for edge in panel.cols.boundaries():
        axes.axvline(edge, **boundary)
    axes.set_title(panel.title)
    if panel.numbers and cell >= NUMBER:
        _write_numbers(axes, panel, span)
    return image


def _write_numbers(axes: Axes, panel: Panel, span: tuple[float, float]) -> None:
    """Write the value into each cell, black on the light colours at the upper end of the map."""
    low, high = span
    for (i, j), value in np.ndenumerate(panel.values):
        if not np.isnan(value):
            text = f"{value:.2f}".replace("-0.00", "0.00")
            ink = "black" if (value - low) / (high - low) > 0.62 else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=small(), color=ink)


def describe_scope(table: Table) -> str:
    """Return which tokens of how many images a table compares: `class token, n = 2000`."""
    tokens = table.notes.get("tokens")
    n = f"n = {count(table.frame)}"
    return n if tokens is None else f"{token_words(tokens)}, {n}"


def describe_scale(table: Table) -> str:
    """Return the name of a table's values: which CKA they are, according to its notes."""
    estimator = table.notes.get("estimator")
    if estimator is None:
        return "CKA"
    if table.notes.get("rescaled"):
        return "CKA (debiased, rescaled Grams)"
    if estimator == "minibatch":
        return f"CKA (debiased, batches of {table.notes['batch']})"
    if estimator == "biased":
        return "CKA (biased)"
    return "CKA (debiased)"


# ----------------------------------------------------------------------- from tables about pairs


def panels_of(
    table: Table, column: str = "value", about: str | None = None
) -> list[Panel]:
    """Return the heatmaps of a table about pairs: rows upwards, columns to the right.

    Both axes run from input to output. There is one panel for each set of sites that share their
    partners: one for each kind of sublayer where skips are compared with branches. Numbers stand in
    the cells where models are compared by one site each.

    Args:
        table: with the columns store, site and block of both sides (`site_a`, ...).
        column: column of the cells' values.
        about: title of the panels; by default tokens and number of images.
    """
    a = _sites_of_side(table.frame, "a")
    b = _sites_of_side(table.frame, "b")
    partners: dict[SiteOfStore, list[SiteOfStore]] = {}
    for row, col in zip(a, b, strict=True):
        partners.setdefault(row, []).append(col)
    pairs = zip(a, b, strict=True)
    values = dict(zip(pairs, table[column], strict=True))
    if about is None:
        about = describe_scope(table)
    panels = []
    # Only rows with the same partners, in the same order, make a full matrix.
    for cols in dict.fromkeys(map(tuple, partners.values())):
        rows = [row for row, others in partners.items() if tuple(others) == cols]
        panels.append(_panel_of_matrix(table, rows, cols, values, about))
    return panels


def _panel_of_matrix(
    table: Table,
    rows: Sequence[SiteOfStore],
    cols: Sequence[SiteOfStore],
    values: dict[Any, float],
    about: str,
) -> Panel:
    """Return one heatmap.

    Args:
        table: the table, for its blocks and notes.
        rows: the sites of the rows.
        cols: the sites of the columns.
        values: (row, column) -> value.
        about: the title, behind the kind of sublayer where skips are compared with branches.
    """
    block_of = _block_of_sites(table.frame)
    title = about
    row_role = ""
    col_role = ""
    if table.notes.get("pairs") == "branch":
        site = cols[0][1]
        part = site.removeprefix(f"{block_of.get(site, '')}.")
        title = f"{BLOCK_PARTS.get(part, part)}: {about}"
        row_role = "skip"
        col_role = "branch"
    shorter, longer = sorted((len(rows), len(cols)))
    compares_stores = len({store for store, _ in rows}) > 1
    is_short_line = shorter == 1 and longer <= MAX_NUMBERS
    return Panel(
        values=np.array([[values[row, col] for col in cols] for row in rows], np.float64),
        rows=SiteAxis.of(rows, block_of, row_role),
        cols=SiteAxis.of(cols, block_of, col_role),
        title=title,
        numbers=is_short_line or compares_stores,
    )


def _sites_of_side(rows: pl.DataFrame, side: str) -> list[SiteOfStore]:
    """Return (store, site) of each row on side "a" or "b"."""
    return rows.select(f"store_{side}", f"site_{side}").rows()


def one_to_one(table: Table) -> bool:
    """Return whether, between two stores, each of several sites has one partner of its own."""
    if table.notes.get("pairs") == "branch":
        return False
    pairs = table.frame.select("store_a", "site_a", "store_b", "site_b")
    n_a = pairs.select("store_a", "site_a", "store_b").n_unique()
    n_b = pairs.select("store_a", "store_b", "site_b").n_unique()
    n_store_pairs = pairs.select("store_a", "store_b").n_unique()
    each_once = n_a == n_b == len(pairs)
    return each_once and len(pairs) > n_store_pairs


def _block_of_sites(rows: pl.DataFrame) -> dict[str, str]:
    """Return site -> path of its block, for the sites that lie in a block."""
    block_of = {}
    for side in "ab":
        columns = rows.select(f"site_{side}", f"block_{side}").unique()
        for site, block in columns.rows():
            if block:
                block_of[site] = block
    return block_of


def draw_curves(axes: Axes, rows: pl.DataFrame) -> dict[str, Any]:
    """Draw one curve per pair of stores, and return label -> artist for a legend.

    x are the sites of the store that all others are compared with, or relative depth where there
    are several such stores. The 95 % interval is a band, the noise of a minibatch estimator bars,
    the null distribution's mean and threshold dashed lines.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    block_of = _block_of_sites(rows)
    reference_sites = list(dict.fromkeys(_sites_of_side(rows, "a")))
    x_of_site = {site: k for k, site in enumerate(reference_sites)}
    handles: list[Any] = []
    references = rows["store_a"].unique(maintain_order=True).to_list()
    several_references = len(references) > 1
    order = list(dict.fromkeys([*references, *rows["store_b"]]))
    pairs = rows.partition_by("store_a", "store_b", maintain_order=True, as_dict=True)
    for pair_number, ((reference, store), pair_rows) in enumerate(pairs.items()):
        if several_references:
            look_number = pair_number
            x: Any = pair_rows["rel_depth_a"]
        else:  # colours are those of the other store, as in all figures
            look_number = order.index(store)
            x = [x_of_site[site] for site in _sites_of_side(pair_rows, "a")]
        if pair_rows["site_a"].to_list() == pair_rows["site_b"].to_list():
            label = f"against {shorten(store, 28)}"
        else:  # the sites of the other store are named, too
            others = [(store, site) for site in pair_rows["site_b"]]
            axis = SiteAxis.of(others, block_of)
            label = f"against {axis.ticks(len(axis)).label}"
        if several_references:
            label = f"{shorten(reference, 28)} {label}"
        handles += _draw_pair(axes, pair_rows, x, look_number, label)
    if _has_values(rows, "low"):
        handles.append(
            Patch(color=GREY, alpha=0.3, linewidth=0, label="95 % interval over images")
        )
    elif _has_values(rows, "std"):
        noise_label = "std over minibatch repeats (the estimator's noise)"
        handles.append(
            Line2D([], [], color=GREY, marker="|", linestyle="none", label=noise_label)
        )
    if _has_values(rows, "tau"):
        mean = Line2D([], [], color=GREY, linestyle=DASHED)
        mean.set_label("mean with images permuted")
        threshold = Line2D([], [], color=GREY, linestyle=DOTTED)
        threshold.set_label("its 5 % threshold")
        handles += [mean, threshold]
    if several_references:
        axes.set_xlabel("relative depth")
    else:
        ticks = SiteAxis.of(reference_sites, block_of).ticks(MAX_LABELS)
        ticks.put_on(axes.xaxis)
    return {handle.get_label(): handle for handle in handles}


def _draw_pair(
    axes: Axes, rows: pl.DataFrame, x: Any, look_number: int, label: str
) -> list[Any]:
    """Draw the curve of one pair of stores with its spread and its null; return the curve."""
    tint = colour(look_number)
    if _has_values(rows, "low"):
        axes.fill_between(
            x, rows["low"], rows["high"], color=tint, alpha=0.2, linewidth=0
        )
    elif _has_values(rows, "std"):
        axes.errorbar(x, rows["value"], rows["std"], color=tint, fmt="none", capsize=2)
    curve = axes.plot(
        x, rows["value"], color=tint, marker=marker(look_number), label=label
    )
    if _has_values(rows, "tau"):
        axes.plot(x, rows["tau"], color=tint, linestyle=DOTTED)
        axes.plot(x, rows["null_mean"], color=tint, linestyle=DASHED)
    return curve


def _has_values(rows: pl.DataFrame, name: str) -> bool:
    """Return whether a column exists and has a finite value."""
    return name in rows.columns and rows[name].is_finite().any()
