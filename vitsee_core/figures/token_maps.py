"""A map of tokens against sublayers: prefix tokens named, on top; patches row by row below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.plotting import DECADES, FINE, GREY, plain_log_ticks
from vitsee_core.figures.site_axes import SiteAxis, Ticks
from vitsee_core.tables.words import token_words
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage

# A sublayer, and the value of each of its tokens, by name or by (row, col); of clips by (frame,
# row, col).
Column = tuple[str, Mapping[Any, float]]

NO_VALUE = "#C9C9C9"
SEQUENTIAL = "viridis"
DIVERGING = "RdBu_r"
# Heights, in units of the height of all patches.
PREFIX_HEIGHT = 0.08  # of each prefix token
GAP = 0.012  # between the prefix tokens and the patches
MAX_TICKS = 7
MEANS = ("patches", "registers", "flat")  # names of means over several tokens


@dataclass(frozen=True)
class MapPanel:
    """One store's map of one kind of sublayer: tokens downwards, sublayers to the right.

    Attributes:
        title: text above it.
        store: the store's label.
        sites: the sublayers, one per column.
        prefix: names of the prefix tokens (class token, registers).
        prefix_values: (prefix tokens, columns), NaN where a column lacks a token.
        bodies: the values of each column's other tokens, (tokens,), in order.
        cells: their (row, col), of clips (frame, row, col); empty where the columns' differ.
    """

    title: str
    store: str
    sites: tuple[str, ...]
    prefix: tuple[str, ...]
    prefix_values: Float
    bodies: tuple[Float, ...]
    cells: tuple[Any, ...]

    @classmethod
    def of(cls, title: str, store: str, columns: Sequence[Column]) -> MapPanel:
        """Return a panel made of the tokens of each column.

        Means over several tokens are left out, as they have no place in a map.

        Args:
            title: text above it.
            store: the store's label.
            columns: each sublayer with the values of its tokens.
        """
        names: dict[str, None] = {}
        for _, values in columns:
            names |= dict.fromkeys(token for token in values if isinstance(token, str))
        prefix = tuple(n for n in names if n not in MEANS and not n.isdigit())
        prefix_values = np.array(
            [[values.get(name, np.nan) for _, values in columns] for name in prefix]
        )
        cells = []
        bodies = []
        for _, values in columns:
            column_cells = sorted(token for token in values if isinstance(token, tuple))
            cells.append(column_cells)
            bodies.append(np.array([values[cell] for cell in column_cells]))
        same_cells = all(column_cells == cells[0] for column_cells in cells)
        return cls(
            title=title,
            store=store,
            sites=tuple(site for site, _ in columns),
            prefix=prefix,
            prefix_values=prefix_values.reshape(len(prefix), len(columns)),
            bodies=tuple(bodies),
            cells=tuple(cells[0]) if same_cells else (),
        )

    def all_values(self) -> Float:
        """Return the values of all tokens in all columns, flat."""
        return np.concatenate([self.prefix_values.ravel(), *self.bodies])

    def ticks(self) -> Ticks:
        """Return the labels of the sublayers."""
        axis = SiteAxis.of([(self.store, site) for site in self.sites], {})
        return axis.ticks(MAX_TICKS)


def colour_scale(metric: str, values: Float) -> Normalize:
    """Return a colour scale from the smallest to the largest value.

    It is logarithmic for ratios and norms that span more than a factor of 10, symmetric about 0 for
    `cos_branch`, and ends at 1 for `cos_out`. NaN is ignored.
    """
    from matplotlib.colors import LogNorm, Normalize

    finite = values[np.isfinite(values)]
    if not len(finite):
        return Normalize(0, 1)
    low = float(finite.min())
    high = float(finite.max())
    if metric == "cos_branch":
        reach = max(abs(low), abs(high)) or 1.0
        return Normalize(-reach, reach)
    if not metric.startswith("cos") and low > 0 and high > 10 * low:
        return LogNorm(low, high)
    if metric == "cos_out":
        return Normalize(min(low, 0.9), 1)
    if high <= low:  # one value: a scale needs two ends
        high = 1.1 * low + 0.1
    return Normalize(low, high)


def value_ticks(axis: Axis, scale: Normalize) -> None:
    """Label an axis with plain numbers (0.5, 2, 10; powers of 10 beyond) if its scale is
    logarithmic."""
    from matplotlib.colors import LogNorm

    if not isinstance(scale, LogNorm):
        return
    decades = np.log10(float(scale.vmax or 1) / float(scale.vmin or 1))
    plain_log_ticks(axis, FINE if decades < 2.5 else DECADES)


def draw_map(axes: Axes, panel: MapPanel, scale: Normalize) -> AxesImage:
    """Draw a map of tokens, and return one of its images, for a colour bar.

    Call it inside a function decorated with `styled`.

    Args:
        axes: an empty panel.
        panel: what to draw.
        scale: its colours, from `colour_scale`.
    """
    n = len(panel.sites)
    n_prefix = len(panel.prefix)
    # y runs downwards: the patches fill 0 to 1, prefix tokens stand above them, below 0.
    tops = [-GAP - PREFIX_HEIGHT * (n_prefix - i) for i in range(n_prefix)]
    for top, values in zip(tops, panel.prefix_values, strict=True):
        image = _draw_cells(
            axes,
            values[np.newaxis],  # (1, columns)
            scale,
            x=(-0.5, n - 0.5),
            y=(top, top + PREFIX_HEIGHT),
        )
    # Columns may have different numbers of tokens: each is an image of its own.
    for k, values in enumerate(panel.bodies):
        if len(values):
            image = _draw_cells(
                axes,
                values[:, np.newaxis],  # (tokens, 1)
                scale,
                x=(k - 0.5, k + 0.5),
                y=(0, 1),
            )
    axes.set_xlim(-0.5, n - 0.5)
    axes.set_ylim(1, min([0.0, *tops]))
    axes.set_title(panel.title)
    panel.ticks().put_on(axes.xaxis)
    axes.set_xlabel("block")
    _label_tokens(axes, panel, tops)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color=GREY)
    return image


def _draw_cells(
    axes: Axes,
    values: Float,
    scale: Normalize,
    *,
    x: tuple[float, float],
    y: tuple[float, float],
) -> AxesImage:
    """Draw values (rows, cols) as cells that fill a box, the first row on top.

    Args:
        axes: the panel.
        values: the cells.
        scale: their colours; one that is symmetric about 0 has a diverging colour map.
        x: left and right edge of the box.
        y: upper and lower edge of the box.
    """
    import matplotlib

    diverging = scale.vmin is not None and scale.vmin == -(scale.vmax or 0)
    colours = matplotlib.colormaps[DIVERGING if diverging else SEQUENTIAL]
    return axes.imshow(
        values,
        cmap=colours.with_extremes(bad=NO_VALUE),
        norm=scale,
        aspect="auto",
        origin="upper",
        extent=(*x, y[1], y[0]),
    )


def _label_tokens(axes: Axes, panel: MapPanel, tops: Sequence[float]) -> None:
    """Label the y axis: prefix tokens by name, patches by their row or frame.

    Where the columns have different grids only the first and the last patch are labelled.

    Args:
        axes: the panel.
        panel: what it shows.
        tops: y of the upper edge of each prefix token.
    """
    ticks = [top + PREFIX_HEIGHT / 2 for top in tops]
    texts = ["CLS" if name == "cls" else token_words(name) for name in panel.prefix]
    if panel.cells:
        # Cells in the first column of the grid begin a row; of clips the first of each frame.
        first = panel.cells[0]
        starts = [k for k, cell in enumerate(panel.cells) if cell[1:] == first[1:]]
        step = -(-len(starts) // 6)  # six labels at most
        labelled = starts[::step]
        ticks += [(k + 0.5) / len(panel.cells) for k in labelled]
        texts += [str(panel.cells[k][0]) for k in labelled]
        unit = "row of the grid" if len(first) == 2 else "frame"
        ylabel = f"patches, by {unit}"
    else:
        ticks += [0, 1]
        texts += ["first", "last"]
        ylabel = "location, row by row"
    axes.set_yticks(ticks, texts)
    axes.tick_params(length=2, width=0.5)
    axes.set_ylabel(ylabel)
