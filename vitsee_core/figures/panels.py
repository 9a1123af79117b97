"""Figures laid out for a column, a page or a slide: wrapped panels, legends, colour bars.

Lengths are in ems, the size of the letters: a panel of 17 ems is 1.7 inches wide in a column with
letters of 7 points, and 3.5 on a slide with letters of 15.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from vitsee_core.tables.text import shorten
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

Item = TypeVar("Item")


@dataclass(frozen=True)
class Medium:
    """Where a figure is printed or shown.

    Attributes:
        width: inches that a figure may be wide.
        tallest: height in inches above which letters get smaller, down to `smallest`, so that
            more panels stand side by side.
        font: size of the letters in points.
        smallest: least size of the letters in points.
        size: width and height of every figure in inches; None where its content decides.
    """

    width: float
    tallest: float
    font: float
    smallest: float
    size: tuple[float, float] | None = None

    @property
    def em(self) -> float:
        """Inches of one em: a point is 1/72 inch."""
        return self.font / 72


MEDIA = {
    "column": Medium(3.5, 9.0, 7, 7),
    "page": Medium(7.0, 9.0, 8, 8),
    "slide": Medium(12.0, 6.4, 15, 9),
}
NARROWEST = 26.0  # ems of a figure
_MEDIUM: ContextVar[Medium] = ContextVar("medium", default=MEDIA["page"])


@contextmanager
def drawn_for(
    medium: str | Medium | None = None, size: tuple[float, float] | None = None
) -> Iterator[None]:
    """Draw the figures inside this context for a medium.

    Args:
        medium: name of one of `MEDIA`, or a medium; by default the one of the context around.
        size: width and height in inches of every figure. Without a medium the letters follow the
            width.
    """
    if isinstance(medium, str):
        chosen = MEDIA[medium]
    else:
        chosen = medium or _MEDIUM.get()
    if size is not None:
        width, height = size
        if medium:
            font = chosen.font
        else:  # 7 points in a column of 3.5 inches, 8 on a page of 7
            font = float(np.clip(width / 3.5 + 6, 6, 8))
        chosen = Medium(
            width=width,
            tallest=height,
            font=font,
            smallest=min(font, chosen.smallest),
            size=size,
        )
    before = _MEDIUM.set(chosen)
    try:
        yield
    finally:
        _MEDIUM.reset(before)


def medium() -> Medium:
    """Return the medium that figures are drawn for now."""
    return _MEDIUM.get()


def smaller(figure: Figure) -> Medium | None:
    """Return the medium with smaller letters for a figure that is too tall.

    None if the figure fits, its size is given, or its letters are the smallest already.
    """
    now = medium()
    ratio = float(figure.get_figheight()) / now.tallest
    if now.size is not None or ratio < 1 + 1e-6 or now.font <= now.smallest:
        return None
    # Letters of half the size take a quarter of the area: the root of the ratio is enough, 3 %
    # less so that it is. Each attempt shrinks by a tenth at least, so that there are few.
    return replace(now, font=max(now.smallest, now.font * min(0.97 / ratio**0.5, 0.9)))


def em(n: float = 1.0) -> float:
    """Return the inches of n ems in the current medium."""
    return n * medium().em


def small() -> float:
    """Return the size of tick labels and legends in points."""
    return 0.88 * medium().font


def room() -> float:
    """Return the width of the current medium in ems."""
    return medium().width / medium().em


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, at most as wide as the medium.

    It has a canvas of its own and is unknown to pyplot, which would keep it in memory.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=medium().size or (min(width, medium().width), height))
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True)
class PanelGrid:
    """Panels side by side, as many as the width has room for, evenly on lines.

    Attributes:
        n: number of panels.
        width: ems that a panel needs with its labels.
        height: ems of a panel's height with its labels.
        widest: ems that a panel gets where there is room.
        most: largest number of panels on a line.
        extra: further ems of height, for what stands above or below all panels.
        together: number of consecutive panels that stay on one line where it has room for them.
    """

    n: int
    width: float = 17.0
    height: float = 14.0
    widest: float = 30.0
    most: int = 4
    extra: float = 0.0
    together: int = 1

    @property
    def _max_across(self) -> int:
        """The largest number of panels on a line: a multiple of `together` where that fits."""
        # 1e-6: three panels of a third of the room fit, whichever way floats round.
        n_fitting = max(1, min(self.most, int((room() + 1e-6) / self.width)))
        if n_fitting > self.together:
            return n_fitting - n_fitting % self.together
        return n_fitting

    @property
    def down(self) -> int:
        """The number of lines."""
        return -(-self.n // self._max_across)

    @property
    def across(self) -> int:
        """The number of panels on a full line: as few as `down` lines allow, so that 5 panels
        are 3 and 2 rather than 4 and 1."""
        fewest = -(-self.n // self.down)
        n_sets = -(-fewest // self.together)
        return min(self._max_across, n_sets * self.together)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of all panels in inches."""
        wide = min(room(), max(self.across * max(self.width, self.widest), NARROWEST))
        return em(wide), em(self.down * self.height + self.extra)

    def axes(self, box: Any, **options: Any) -> list[Axes]:
        """Make the panels, line by line, and hide the empty places of the last line.

        Args:
            box: a figure or a subfigure.
            options: keywords of matplotlib's `subplots`.
        """
        panels = list(
            box.subplots(self.down, self.across, squeeze=False, **options).ravel()
        )
        for axes in panels[self.n :]:
            axes.set_visible(False)
        return panels[: self.n]


class Sized(Protocol):
    """Panels that know how much room they need."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of all in inches."""


def stack(*grids: Sized) -> tuple[Figure, list[Any]]:
    """Return a figure with room for grids below one another, and the box of each grid.

    Boxes are subfigures, as high as their grids; a single grid has the figure itself.
    """
    sizes = [grid.size for grid in grids]
    heights = [height for _, height in sizes]
    figure = new_figure(max(width for width, _ in sizes), sum(heights))
    if len(grids) == 1:
        return figure, [figure]
    subfigures = figure.subfigures(len(grids), 1, squeeze=False, height_ratios=heights)
    return figure, list(subfigures[:, 0])


def panels(n: int, **shape: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure and its n panels.

    Args:
        n: number of panels.
        shape: fields of `PanelGrid`: `width`, `height`, `widest`, `most`, ...
    """
    grid = PanelGrid(max(n, 1), **shape)
    figure, (box,) = stack(grid)
    return figure, grid.axes(box)


def grow(figure: Figure, inches: float) -> None:
    """Make a figure taller by so many inches, unless the user gave its size."""
    if medium().size is None:
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + inches)


def legend_below(figure: Any, handles: Mapping[str, Any], **look: Any) -> None:
    """Add a legend below everything, in as many columns as there is room for.

    The figure grows by the legend's height, so that the panels keep theirs.

    Args:
        figure: a figure or a subfigure; the legend is the figure's.
        handles: label -> artist; without any there is no legend.
        look: further keywords of matplotlib's `legend`.
    """
    if not handles:
        return
    root = figure.get_figure(root=True)
    max_width = root.bbox.width - 2 * em() * root.dpi  # in pixels
    keywords: dict[str, Any] = {
        "loc": "outside lower center",
        "columnspacing": 1.4,
        **look,
    }
    columns = len(handles)
    # A letter is 0.6 em wide on average; a handle and its gaps take the place of six.
    letters = max(12, int(max_width / (0.6 * em() * root.dpi)) - 6)
    labels = ["\n".join(textwrap.wrap(label, letters)) or label for label in handles]
    # Only a drawn legend knows its width: try fewer columns until it fits.
    while True:
        legend = root.legend(list(handles.values()), labels, ncols=columns, **keywords)
        box = legend.get_window_extent()
        if box.width <= max_width or columns == 1:
            break
        legend.remove()
        columns = max(1, min(columns - 1, int(columns * max_width / box.width)))
    grow(root, box.height / root.dpi + em(0.3))


def note_below(figure: Figure, text: str) -> None:
    """Write a grey line below all panels, and below an earlier note.

    Where the figure has a legend the note is its title, so that the two cannot overlap.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    look: dict[str, Any] = {"ha": "left", "fontsize": small(), "color": "grey"}
    laid_out = isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine)
    if figure.legends:
        before = figure.legends[-1].get_title().get_text()
        figure.legends[-1].set_title(f"{before}\n{text}" if before else text)
        figure.legends[-1].get_title().set(fontsize=small(), color="grey")
    elif laid_out:
        figure.supxlabel(text, x=0.01, **look)
    else:
        figure.supxlabel(text, x=0.01, y=em(0.4) / float(figure.get_figheight()), **look)
    if laid_out:
        grow(figure, em(1.4))


def handles_of(panels: Sequence[Axes]) -> dict[str, Any]:
    """Return label -> artist of all that is labelled in these panels, each label once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles


def colour_bar(axes: Axes, image: Any, label: str, **more: Any) -> Colorbar:
    """Add a colour bar at the right of a panel, as long as the panel, and return it.

    Args:
        axes: the panel.
        image: artist whose colours it explains.
        label: text along the bar.
        more: further keywords of matplotlib's `colorbar`.
    """
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    scale: Any = axes.figure.dpi_scale_trans  # type: ignore[union-attr]
    panel: Any = axes.transAxes
    # x counts inches from the panel's right edge, y is the panel's: the bar is as thick in a wide
    # panel as in a narrow one, and follows the panel when the figure is laid out.
    beside = blended_transform_factory(scale + ScaledTranslation(1, 0, panel), panel)
    bar_axes = axes.inset_axes((em(0.7), 0.0, em(0.8), 1.0), transform=beside)
    bar = axes.figure.colorbar(image, cax=bar_axes, **more)
    bar.set_label(label)
    bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    bar_axes.grid(False)
    return bar


def name_part(box: Any, text: str) -> None:
    """Write a title above all panels of a figure or a subfigure, at the left."""
    box.suptitle(text, x=0.01, ha="left", fontsize=medium().font)


def bars_at_ends(
    grid: PanelGrid, panels: Sequence[Axes], image: Any, label: str, **more: Any
) -> None:
    """Add a colour bar at the end of each full line of a grid whose panels have one scale.

    Args:
        grid: the grid of the panels.
        panels: its panels, line by line.
        image: artist whose colours the bars explain.
        label: text along each bar.
        more: further keywords of matplotlib's `colorbar`.
    """
    for i, axes in enumerate(panels):
        is_last_of_line = i % grid.across == grid.across - 1
        if is_last_of_line:
            colour_bar(axes, image, label, **more)


def small_maps(n: int, lines: int = 1, largest: float = 11.0) -> PanelGrid:
    """Return a grid of n small square maps with a colour bar at the end of each line.

    Maps are as large as the room allows, from about 6 ems up.

    Args:
        n: number of maps.
        lines: lines of text above each map.
        largest: ems of a map's side at most.
    """
    bar = 7.0  # ems of the colour bar with its label
    max_across = 14
    across = min(max(n, 1), max_across, max(1, int((room() - bar) / 6.2)))
    side = min((room() - bar) / across, largest)
    # matplotlib makes all panels of a line equally wide: each gets its share of the bar.
    width = side + bar / across
    return PanelGrid(
        max(n, 1), width=width, height=side + lines, widest=width, most=max_across
    )


def map_title(axes: Axes, grid: PanelGrid, text: str) -> None:
    """Write a title above a small map of this grid, shortened to the map's width."""
    letters = int((grid.width - 1) / 0.54)  # a small letter is 0.54 em wide on average
    axes.set_title(shorten(text, max(8, letters)), fontsize=small(), loc="center")


def map_axes(axes: Axes) -> None:
    """Take a panel's grid and ticks away and give it a thin frame."""
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color="grey")


def count(rows: pl.DataFrame, name: str = "n_images") -> str:
    """Return the counts of the rows with a value in words: `2000`, or `1990 to 2000`.

    Args:
        rows: a table's rows.
        name: column of the counts; the text is "" where the rows lack it.
    """
    if name not in rows.columns:
        return ""
    if "value" in rows.columns:
        rows = rows.filter(pl.col("value").is_not_null())
    low, high = cast(
        "tuple[int | None, int | None]", (rows[name].min(), rows[name].max())
    )
    if low is None:
        return ""
    if low == high:
        return f"{high:.0f}"
    return f"{low:.0f} to {high:.0f}"


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, evenly spaced, with the first and the last."""
    indices = np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int)
    return [items[k] for k in indices]


def beyond(values: Any, low: float, high: float) -> str:
    """Return the ends of a colour bar that values lie beyond, as `colorbar(extend=...)` takes it.

    One of "neither", "min", "max" and "both"; NaN lies nowhere.
    """
    below = bool((values < low).any())
    above = bool((values > high).any())
    if below and above:
        return "both"
    if below:
        return "min"
    if above:
        return "max"
    return "neither"


def note_count(
    axes: Axes, rows: pl.DataFrame, name: str = "n_images", word: str = ""
) -> None:
    """Write `n = 2000`, or `n = 2000 tokens`, at the upper right of a panel.

    Args:
        axes: the panel.
        rows: its rows; nothing is written where they are not counted.
        name: column of the counts.
        word: plural of what is counted, "" for none.
    """
    n = count(rows, name)
    if not n:
        return
    text = f"n = {n}"
    if word:
        text += f" {word.removesuffix('s') if n == '1' else word}"
    axes.set_title(text, loc="right", fontsize=small(), color="grey")
