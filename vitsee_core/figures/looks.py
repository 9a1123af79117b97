"""Changes to the looks of a finished figure: theme, colours, range, title and axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitsee_core.figures.fitting import all_axes
from vitsee_core.figures.heatmaps import with_range
from vitsee_core.figures.panels import beyond, medium
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.text import figure_text
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

AXES = ("x", "y")
NONE = "none"


@dataclass(frozen=True)
class Look:
    """Changes to figures; without any they stay as they are.

    Attributes:
        theme: one of `plotting.THEMES`.
        cmap: name of a colour map, for all panels that have one.
        range: lowest and highest value of the colours, or of the y axes where there are none.
        title: text above all panels.
        log: the axes ("x", "y") of panels with curves that become logarithmic; `NONE` makes both
            linear.
    """

    theme: str = "light"
    cmap: str | None = None
    range: tuple[float, float] | None = None
    title: str | None = None
    log: tuple[str, ...] = ()

    def put_on(self, figure: Figure) -> None:
        """Change a figure in all but its theme, which `plotting.drawn_as` has given it.

        Raises:
            VitseeError: there is no such colour map, a figure without colours is to have one, or
                an axis without positive values is to be logarithmic.
        """
        bars = [bar for axes in all_axes(figure) if (bar := _bar_of(axes)) is not None]
        coloured = _mappables(figure, bars)
        if self.cmap is not None:
            _recolour(coloured, self.cmap)
        for axis_name in self.log:
            if axis_name == NONE:
                _make_linear(figure)
            else:
                _make_logarithmic(figure, axis_name)
        if self.range is not None:
            low, high = self.range
            _limit(figure, coloured, bars, low, high)
        if self.title is not None:
            below = f"\n{figure.get_suptitle()}" if figure.get_suptitle() else ""
            # At the left, where titles of panels begin, too.
            above = figure.suptitle(
                f"{figure_text(self.title)}{below}", x=0.01, ha="left", fontweight="bold"
            )
            above.set_fontsize(medium().font)


def _bar_of(axes: Axes) -> Colorbar | None:
    """Return the colour bar that fills these axes, None if they are a panel."""
    return getattr(axes, "_colorbar", None)


def _is_picture(axes: Axes) -> bool:
    """Return whether axes show a map or a colour bar, rather than curves."""
    from matplotlib.collections import QuadMesh

    has_mesh = any(isinstance(artist, QuadMesh) for artist in axes.collections)
    return bool(axes.images) or has_mesh or _bar_of(axes) is not None


def _panels_with_curves(figure: Figure) -> list[Axes]:
    """Return the panels whose axes are numbers that may be scaled."""
    return [axes for axes in all_axes(figure) if not _is_picture(axes) and axes.axison]


def _mappables(figure: Figure, bars: list[Colorbar]) -> list[ScalarMappable]:
    """Return the artists that give numbers a colour, each once.

    Photographs and cells of a single colour ("no value") do not.
    """
    candidates: list[ScalarMappable] = [bar.mappable for bar in bars]
    for axes in all_axes(figure):
        if _bar_of(axes) is None:
            candidates += [*axes.images, *axes.collections]
    coloured: list[ScalarMappable] = []
    for artist in candidates:
        values = artist.get_array()
        if values is None:
            continue
        is_photograph = np.ndim(values) > 2 or artist.cmap.name == "gray"
        has_few_colours = artist.cmap.N < 16  # colours of kinds, not of numbers
        if is_photograph or has_few_colours:
            continue
        if not any(artist is other for other in coloured):
            coloured.append(artist)
    return coloured


def _recolour(coloured: list[ScalarMappable], name: str) -> None:
    """Give artists another colour map, with their own colour of cells without a value.

    Raises:
        VitseeError: matplotlib has no such map, or nothing is coloured.
    """
    import matplotlib

    if name not in matplotlib.colormaps:
        import difflib

        near = difflib.get_close_matches(name, list(matplotlib.colormaps), n=3)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise VitseeError(f"matplotlib has no colour map {name!r}{hint}")
    if not coloured:
        raise VitseeError("this figure has no colour map to change")
    for artist in coloured:
        no_value = tuple(artist.cmap.get_bad().tolist())
        artist.set_cmap(matplotlib.colormaps[name].with_extremes(bad=no_value))


def _limit(
    figure: Figure,
    coloured: list[ScalarMappable],
    bars: list[Colorbar],
    low: float,
    high: float,
) -> None:
    """Give the colours of a figure a range; a figure without colours gets it on its y axes.

    Args:
        figure: what is changed.
        coloured: its artists with colours.
        bars: its colour bars, which are drawn again.
        low: lowest value.
        high: highest value.

    Raises:
        VitseeError: the range reaches 0 where the scale is logarithmic.
    """
    from matplotlib.colors import LogNorm

    if not coloured:
        for axes in _panels_with_curves(figure):
            if axes.get_yscale() == "log" and low <= 0:
                raise VitseeError(
                    f"the y axis is logarithmic: a range from {low:g} is impossible"
                )
            axes.set_ylim(low, high)
        return
    values = np.concatenate(
        [np.asarray(artist.get_array(), float).ravel() for artist in coloured]
    )
    for artist in coloured:
        if isinstance(artist.norm, LogNorm) and low <= 0:
            raise VitseeError(
                f"the colours are logarithmic: a range from {low:g} is not possible"
            )
        artist.set_clim(low, high)
    for bar in bars:
        _redraw_bar(figure, bar, beyond(values, low, high))


def _redraw_bar(figure: Figure, bar: Colorbar, extend: str) -> None:
    """Draw a colour bar again, with ticks of its new range.

    Args:
        figure: the figure.
        bar: the old bar, whose axes are emptied and used again.
        extend: the ends with an arrow, as `beyond` gives them.
    """
    axes = bar.ax
    upright = bar.orientation == "vertical"
    label = axes.get_ylabel() if upright else axes.get_xlabel()
    # The old bar would otherwise go on following its artist, and draw into the same axes.
    bar.mappable.callbacks.disconnect(cast(Any, bar.mappable).colorbar_cid)
    axes.clear()
    new = figure.colorbar(
        bar.mappable, cax=axes, orientation=bar.orientation, extend=extend
    )
    if ", colours from" in label:
        label = with_range(label, bar.mappable.get_clim())
    new.set_label(label)
    new.outline.set(linewidth=0.5, edgecolor=GREY)  # type: ignore[operator]


def _make_linear(figure: Figure) -> None:
    """Make both axes of panels with curves linear, with plain numbers, and say so in labels."""
    from matplotlib.ticker import EngFormatter

    for axes in _panels_with_curves(figure):
        for name in AXES:
            axis = getattr(axes, f"{name}axis")
            if axis.get_scale() != "linear":
                low, high = getattr(axes.dataLim, f"interval{name}")
                margin = 0.05 * (high - low)
                limits = low - margin, high + margin
                axes.set(**{f"{name}scale": "linear", f"{name}lim": limits})
                axis.set_major_formatter(EngFormatter(sep=""))
                axis.set_label_text(axis.get_label_text().removesuffix(" (logarithmic)"))


def _make_logarithmic(figure: Figure, name: str) -> None:
    """Make an axis of all panels with curves logarithmic.

    Args:
        figure: the figure.
        name: "x" or "y".

    Raises:
        VitseeError: no panel has curves, or none of a panel's values is positive.
    """
    from matplotlib.ticker import ScalarFormatter

    panels = _panels_with_curves(figure)
    if not panels:
        raise VitseeError(
            f"this figure has no {name} axis of numbers to make logarithmic"
        )
    for axes in panels:
        scale = getattr(axes, f"get_{name}scale")()
        if scale == "symlog":  # is logarithmic already, and has a place for 0
            continue
        low, high = getattr(axes.dataLim, f"interval{name}")
        smallest_positive = getattr(axes.dataLim, f"minpos{name}")
        if not np.isfinite([low, high]).all():
            continue
        if high <= 0 or not np.isfinite(smallest_positive):
            raise VitseeError(
                f"no value is positive: the {name} axis cannot be logarithmic"
            )
        if low <= 0:
            low = smallest_positive
        # A margin of 6 % of the axis at each end, as a factor.
        ratio = (high / low) ** 0.06 if high > low else 1.5
        limits = low / ratio, high * ratio
        axes.set(**{f"{name}scale": "log", f"{name}lim": limits})
        if (
            high < 30 * low
        ):  # plain numbers: within little more than a decade 1.8e1 is no help
            axis = getattr(axes, f"{name}axis")
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(ScalarFormatter())
