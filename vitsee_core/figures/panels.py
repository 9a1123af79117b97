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
        tallest: inches from which on letters get smaller, down to `smallest`, so that more panels
            stand side by side.
        font: size of the letters in points.
        smallest: the least of it.
        size: width and height that the figure gets, None where its content decides.
    """

    width: float
    tallest: float
    font: float
    smallest: float
    size: tuple[float, float] | None = None

    @property
    def em(self) -> float:
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
    """Figures are drawn for this medium: one of `MEDIA`, by default a page.

    size: width and height in inches of every figure; without a medium the letters follow the width.
    """
    chosen = MEDIA[medium] if isinstance(medium, str) else medium or _MEDIUM.get()
    if size is not None:
        font = chosen.font if medium else float(np.clip(size[0] / 3.5 + 6, 6, 8))
        chosen = Medium(size[0], size[1], font, min(font, chosen.smallest), size)
    before = _MEDIUM.set(chosen)
    try:
        yield
    finally:
        _MEDIUM.reset(before)


def medium() -> Medium:
    return _MEDIUM.get()


def smaller(figure: Figure) -> Medium | None:
    """The medium with smaller letters for a figure that is too tall for it; None: it fits, or its
    letters are the smallest."""
    now = medium()
    ratio = float(figure.get_figheight()) / now.tallest
    if now.size is not None or ratio < 1 + 1e-6 or now.font <= now.smallest:
        return None
    # Half the letters take a quarter of the room.
    return replace(now, font=max(now.smallest, now.font * min(0.97 / ratio**0.5, 0.9)))


def em(n: float = 1.0) -> float:
    return n * medium().em


def small() -> float:
    """Points of tick labels and legends."""
    return 0.88 * medium().font


def room() -> float:
    return medium().width / medium().em


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, at most as wide as the medium."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=medium().size or (min(width, medium().width), height))
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True)
class PanelGrid:
    """Panels side by side, as many as the width has room for, evenly on lines.

    Attributes:
        n: how many.
        width: ems that one needs with its labels.
        height: of one, in ems.
        widest: ems that one gets where there is room.
        most: so many on a line at most.
        extra: further ems of height, of what stands above or below all.
        together: so many panels, one after the other, stay on a line where it has room for them.
    """

    n: int
    width: float = 17.0
    height: float = 14.0
    widest: float = 30.0
    most: int = 4
    extra: float = 0.0
    together: int = 1

    @property
    def _fit(self) -> int:
        fit = max(1, min(self.most, int((room() + 1e-6) / self.width)))
        return fit - fit % self.together if fit > self.together else fit

    @property
    def down(self) -> int:
        return -(-self.n // self._fit)

    @property
    def across(self) -> int:
        least = -(-self.n // self.down)
        return min(self._fit, -(-least // self.together) * self.together)

    @property
    def size(self) -> tuple[float, float]:
        wide = min(room(), max(self.across * max(self.width, self.widest), NARROWEST))
        return em(wide), em(self.down * self.height + self.extra)

    def axes(self, box: Any, **options: Any) -> list[Axes]:
        """The panels in a figure or a part of one, line by line."""
        every = list(
            box.subplots(self.down, self.across, squeeze=False, **options).ravel()
        )
        for axes in every[self.n :]:
            axes.set_visible(False)
        return every[: self.n]


class Sized(Protocol):
    """Panels that know how much room they need."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of all in inches."""


def stack(*grids: Sized) -> tuple[Figure, list[Any]]:
    """A figure, and its parts for these grids below one another."""
    sizes = [grid.size for grid in grids]
    heights = [height for _, height in sizes]
    figure = new_figure(max(width for width, _ in sizes), sum(heights))
    if len(grids) == 1:
        return figure, [figure]
    parts = figure.subfigures(len(grids), 1, squeeze=False, height_ratios=heights)
    return figure, list(parts[:, 0])


def panels(n: int, **shape: Any) -> tuple[Figure, list[Axes]]:
    """A figure of n panels; shape: see `PanelGrid`."""
    grid = PanelGrid(max(n, 1), **shape)
    figure, (box,) = stack(grid)
    return figure, grid.axes(box)


def grow(figure: Figure, inches: float) -> None:
    """Make a figure taller, unless its size is given."""
    if medium().size is None:
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + inches)


def legend_below(figure: Any, found: Mapping[str, Any], **look: Any) -> None:
    """A legend of label -> handle below everything, in as many columns as there is room for."""
    if not found:
        return
    root = figure.get_figure(root=True)
    wide = root.bbox.width - 2 * em() * root.dpi
    place: dict[str, Any] = {"loc": "outside lower center", "columnspacing": 1.4, **look}
    columns = len(found)
    letters = max(12, int(wide / (0.6 * em() * root.dpi)) - 6)
    labels = ["\n".join(textwrap.wrap(label, letters)) or label for label in found]
    while True:
        legend = root.legend(list(found.values()), labels, ncols=columns, **place)
        box = legend.get_window_extent()
        if box.width <= wide or columns == 1:
            break
        legend.remove()
        columns = max(1, min(columns - 1, int(columns * wide / box.width)))
    grow(root, box.height / root.dpi + em(0.3))


def note_below(figure: Figure, text: str) -> None:
    """Write a line below all panels, above the legend's entries where there is one, and below what
    was written there before."""
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


def handles_of(every: Sequence[Axes]) -> dict[str, Any]:
    """Label -> handle of what is drawn in these panels, each label once."""
    found: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def colour_bar(axes: Axes, image: Any, label: str, **more: Any) -> Colorbar:
    """A colour bar at the right of a panel, as long as the panel."""
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    scale: Any = axes.figure.dpi_scale_trans  # type: ignore[union-attr]
    panel: Any = axes.transAxes
    beside = blended_transform_factory(scale + ScaledTranslation(1, 0, panel), panel)
    place = axes.inset_axes((em(0.7), 0.0, em(0.8), 1.0), transform=beside)
    bar = axes.figure.colorbar(image, cax=place, **more)
    bar.set_label(label)
    bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    place.grid(False)
    return bar


def name_part(part: Any, text: str) -> None:
    """Write a title above all panels of a part of a figure, at the left."""
    part.suptitle(text, x=0.01, ha="left", fontsize=medium().font)


def bars_at_ends(
    grid: PanelGrid, every: Sequence[Axes], image: Any, label: str, **more: Any
) -> None:
    """A colour bar at the end of each full line of a grid whose panels have one scale."""
    for i, axes in enumerate(every):
        if i % grid.across == grid.across - 1:
            colour_bar(axes, image, label, **more)


def small_maps(n: int, lines: int = 1, largest: float = 11.0) -> PanelGrid:
    """A grid of n small maps with some lines of text above, and a colour bar at the ends: as large
    as the room allows, from 6 ems up."""
    bar = 7.0
    across = min(max(n, 1), 14, max(1, int((room() - bar) / 6.2)))
    side = min((room() - bar) / across, largest)
    width = side + bar / across
    return PanelGrid(max(n, 1), width=width, height=side + lines, widest=width, most=14)


def map_title(axes: Axes, grid: PanelGrid, text: str) -> None:
    """Write above a small map, shortened to its width."""
    axes.set_title(
        shorten(text, max(8, int((grid.width - 1) / 0.54))),
        fontsize=small(),
        loc="center",
    )


def map_axes(axes: Axes) -> None:
    """A panel without ticks in a thin frame."""
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color="grey")


def count(rows: pl.DataFrame, name: str = "n_images") -> str:
    """`2000`, or `1990 to 2000`: the counts of rows with a value, "" without that column."""
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
    """All, or so many of them evenly spaced, with the first and the last."""
    places = np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int)
    return [items[k] for k in places]


def beyond(values: Any, low: float, high: float) -> str:
    """The ends of a colour bar that some of the values lie beyond, in matplotlib's words."""
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
    """Write `n = 2000` at the upper right of a panel."""
    if n := count(rows, name):
        text = f"n = {n}{word and ' '}{word.removesuffix('s') if n == '1' else word}"
        axes.set_title(text, loc="right", fontsize=small(), color="grey")
