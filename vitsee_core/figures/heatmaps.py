"""Similarity heatmaps: sites against sites on one fixed colour scale.

The origin is at the bottom left and both axes run from the input to the output, as in Raghu et
al. 2021, Figs. 1, 2 and Walmer et al. 2023, Figs. 20 to 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.figures.site_axes import CHARACTER_INCHES, SMALL_INCHES, SiteAxis, Ticks
from vitsee_core.plotting import GREY, new_figure
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_core.results import Table


COLOUR_MAP = "magma"
NO_VALUE = "#9FB4BD"  # bluish grey: not a colour of the map
BOUNDARY = "#A0A0A0"  # seen on both ends of the map
MOST_LABELS = 24
LABEL_INCHES = 0.17  # a line of tick labels, with its gap
TOKENS = {
    "all": "all tokens",
    "patches": "patches",
    "cls": "class token",
    "prefix": "prefix tokens",
    "mean": "mean over patches",
    "mean-all": "mean over all tokens",
    "first": "first token",
    "rest": "mean of all but the first token",
    "vectors": "vectors",
}


@dataclass(frozen=True)
class Panel:
    """One heatmap. values: (rows, cols), NaN for none; numbers: written into the cells. limits: of
    the colours; label: of a colour bar of its own, "" where all panels have one together."""

    values: Float
    rows: SiteAxis
    cols: SiteAxis
    title: str = ""
    numbers: bool = False
    limits: tuple[float, float] = (0.0, 1.0)
    label: str = ""

    @property
    def cell_inches(self) -> float:
        """Side of a cell: as large as is useful, the panel's longer side up to 6 inches, or more
        where numbers have to be read."""
        longest = max(len(self.rows), len(self.cols))
        if self.numbers:
            return max(1.5 / longest, min(max(5 / longest, 0.31), 0.5))
        return max(1.5 / longest, min(6 / longest, 0.3 if longest > 8 else 0.42))

    def ticks(self) -> tuple[Ticks, Ticks]:
        """The ticks of the rows and of the columns, as many as can be read."""
        most = 60 if self.numbers else MOST_LABELS
        y, x = (
            side.ticks(
                min(most, max(2, int(n * self.cell_inches / LABEL_INCHES))),
                int(n * self.cell_inches / SMALL_INCHES),
            )
            for side, n in zip((self.rows, self.cols), self.values.shape, strict=True)
        )
        return y, x


def draw_heatmaps(
    panels: Sequence[Panel],
    label: str = "",
    absent: str = "a self-HSIC is not positive",
    across: int | None = None,
) -> Figure:
    """The panels side by side, or so many `across`, cells square, each with a colour bar of its own
    or with one called `label` for all of them.

    The scale is that of the panels' limits, 0 to 1 unless they say others, whatever the values are;
    where some lie outside, the colour bar has an arrow at that end. Cells without a value are grey,
    and a legend explains them with `absent`. Call it inside a function decorated with `styled`.
    """
    from matplotlib.patches import Patch

    across = across or len(panels)
    figure = new_figure(*_figure_size(panels, across))
    figure.set_layout_engine("compressed")
    all_axes = figure.subplots(-(-len(panels) // across), across, squeeze=False).ravel()
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    all_axes = all_axes[: len(panels)]
    images = [_draw(axes, panel) for axes, panel in zip(all_axes, panels, strict=True)]
    if panels[0].label:
        for axes, image, panel in zip(all_axes, images, panels, strict=True):
            _add_bar(figure, axes, image, panel, [panel], panel.label)
    else:
        _add_bar(figure, all_axes[-1], images[-1], panels[-1], panels, label)
    if any(np.isnan(panel.values).any() for panel in panels):
        patch = Patch(facecolor=NO_VALUE, label=f"no value: {absent}")
        figure.legend(handles=[patch], loc="outside lower left")
    return figure


def _add_bar(
    figure: Figure, axes: Axes, image: AxesImage, panel: Panel, of: Sequence[Panel], label: str
) -> None:
    """A colour bar beside a panel, of the values of these."""
    values = np.concatenate([one.values.ravel() for one in of])
    low, high = panel.limits
    # Rounding lifts the CKA of a site with itself slightly above 1.
    outside = (bool((values < low - 1e-9).any()), bool((values > high + 1e-9).any()))
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max"}
    bar = figure.colorbar(
        image,
        cax=_beside(axes, panel),
        extend=extend.get(outside, "both"),
        ticks=np.linspace(low, high, 6 if _bar_inches(panel) > 1.8 else 3)
        if panel.limits == (0.0, 1.0)
        else None,
    )
    bar.set_label(label)
    bar.outline.set_linewidth(0.5)  # type: ignore[operator]


def _bar_inches(panel: Panel) -> float:
    """Length of the colour bar: the panel's height, or what its labels need."""
    return max(len(panel.rows) * panel.cell_inches, 1.2)


def _beside(axes: Axes, panel: Panel) -> Axes:
    """A place for the colour bar to the right of a panel, of one width whatever the panel's."""
    height, width = (n * panel.cell_inches for n in panel.values.shape)
    length = _bar_inches(panel) / height
    return axes.inset_axes((1 + 0.1 / width, (1 - length) / 2, 0.12 / width, length))


def _figure_size(panels: Sequence[Panel], across: int) -> tuple[float, float]:
    """Figure size in inches that fits the panels and their labels."""
    shared = 0.0 if panels[0].label else 0.85  # the colour bar of all
    widest = total = 0.0
    for at in range(0, len(panels), across):
        width, height = shared, 0.0
        for panel in panels[at : at + across]:
            y, x = panel.ticks()
            cols = len(panel.cols) * panel.cell_inches + (0.85 if panel.label else 0)
            width += cols + 0.45 + CHARACTER_INCHES * max(map(len, y.texts))
            names = CHARACTER_INCHES * max(map(len, x.texts))
            height = max(height, _bar_inches(panel) + 0.6 + names)
        widest, total = max(widest, width), total + height
    if any(np.isnan(panel.values).any() for panel in panels):
        total += 0.25
    return max(widest, 3.4), max(total, 2.2)


def _draw(axes: Axes, panel: Panel) -> AxesImage:
    import matplotlib

    colours = matplotlib.colormaps[COLOUR_MAP].with_extremes(bad=NO_VALUE)
    low, high = panel.limits
    image = axes.imshow(panel.values, cmap=colours, vmin=low, vmax=high, aspect="equal")
    axes.grid(False)
    y, x = panel.ticks()
    x.put_on(axes.xaxis, panel.cell_inches)
    y.put_on(axes.yaxis, panel.cell_inches)
    for edge in panel.rows.boundaries():
        axes.axhline(edge, color=BOUNDARY, linewidth=0.5, alpha=0.6)
    for edge in panel.cols.boundaries():
        axes.axvline(edge, color=BOUNDARY, linewidth=0.5, alpha=0.6)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color=GREY)
    axes.set_title(panel.title)
    if panel.numbers:
        _write_numbers(axes, panel)
    return image


def _write_numbers(axes: Axes, panel: Panel) -> None:
    size = min(8.5, panel.cell_inches * 72 / 3)
    for (i, j), value in np.ndenumerate(panel.values):
        if not np.isnan(value):
            text = f"{value:.2f}".replace("-0.00", "0.00")
            share = (value - panel.limits[0]) / (panel.limits[1] - panel.limits[0])
            ink = "black" if share > 0.62 else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=size, color=ink)


def describe_scope(table: Table) -> str:
    """What the similarities of a table are about: `class token, n = 2000`."""
    tokens = table.notes.get("tokens")
    low, high = table["n_images"].min(), table["n_images"].max()
    n = f"n = {low}" if low == high else f"n = {low} to {high}"
    return n if tokens is None else f"{TOKENS.get(tokens, f'token {tokens}')}, {n}"


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
