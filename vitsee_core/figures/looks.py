"""The looks of a finished figure that a reader may change: theme, colours, range, title and
axes."""

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
        cmap: a colour map's name, for all panels that have one.
        range: lowest and highest value of the colours, or of the y axes where there are none.
        title: above all panels.
        log: which axes of panels with curves become logarithmic, of `AXES`; `NONE` makes both
            linear.
    """

    theme: str = "light"
    cmap: str | None = None
    range: tuple[float, float] | None = None
    title: str | None = None
    log: tuple[str, ...] = ()

    def put_on(self, figure: Figure) -> None:
        """Change a figure in all but its theme, which it has from `plotting.drawn_as`.

        Raises:
            VitseeError: no such colour map, one for a figure without colours, or a logarithmic axis
                without positive values.
        """
        bars = [bar for axes in all_axes(figure) if (bar := _bar_of(axes)) is not None]
        coloured = _mappables(figure, bars)
        if self.cmap is not None:
            _recolour(coloured, self.cmap)
        for which in self.log:
            if which == NONE:
                _make_linear(figure)
            else:
                _make_logarithmic(figure, which)
        if self.range is not None:
            _limit(figure, coloured, bars, *self.range)
        if self.title is not None:
            below = f"\n{figure.get_suptitle()}" if figure.get_suptitle() else ""
            # Where titles of panels begin at the left, so does this one.
            above = figure.suptitle(
                f"{figure_text(self.title)}{below}", x=0.01, ha="left", fontweight="bold"
            )
            above.set_fontsize(medium().font)


def _bar_of(axes: Axes) -> Colorbar | None:
    return getattr(axes, "_colorbar", None)


def _is_picture(axes: Axes) -> bool:
    """Whether a panel shows a map: what is drawn upon it is coloured to be seen there."""
    from matplotlib.collections import QuadMesh

    meshes = any(isinstance(one, QuadMesh) for one in axes.collections)
    return bool(axes.images) or meshes or _bar_of(axes) is not None


def _curves(figure: Figure) -> list[Axes]:
    return [axes for axes in all_axes(figure) if not _is_picture(axes) and axes.axison]


def _mappables(figure: Figure, bars: list[Colorbar]) -> list[ScalarMappable]:
    """The artists that give numbers a colour. Photographs and cells of one colour ("no value") do
    not."""
    found: list[ScalarMappable] = [bar.mappable for bar in bars]
    for axes in all_axes(figure):
        if _bar_of(axes) is None:
            found += [*axes.images, *axes.collections]
    numbers: list[ScalarMappable] = []
    for one in found:
        values = one.get_array()
        if (
            values is None
            or np.ndim(values) > 2
            or one.cmap.N < 16
            or one.cmap.name == "gray"
        ):
            continue
        if not any(one is other for other in numbers):
            numbers.append(one)
    return numbers


def _recolour(coloured: list[ScalarMappable], name: str) -> None:
    import matplotlib

    if name not in matplotlib.colormaps:
        import difflib

        near = difflib.get_close_matches(name, list(matplotlib.colormaps), n=3)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise VitseeError(f"matplotlib has no colour map {name!r}{hint}")
    if not coloured:
        raise VitseeError("this figure has no colour map to change")
    for one in coloured:
        bad = tuple(one.cmap.get_bad().tolist())
        one.set_cmap(matplotlib.colormaps[name].with_extremes(bad=bad))


def _limit(
    figure: Figure,
    coloured: list[ScalarMappable],
    bars: list[Colorbar],
    low: float,
    high: float,
) -> None:
    from matplotlib.colors import LogNorm

    if not coloured:
        for axes in _curves(figure):
            if axes.get_yscale() == "log" and low <= 0:
                raise VitseeError(
                    f"the y axis is logarithmic: a range from {low:g} is impossible"
                )
            axes.set_ylim(low, high)
        return
    values = np.concatenate(
        [np.asarray(one.get_array(), float).ravel() for one in coloured]
    )
    for one in coloured:
        if isinstance(one.norm, LogNorm) and low <= 0:
            raise VitseeError(
                f"the colours are logarithmic: a range from {low:g} is not possible"
            )
        one.set_clim(low, high)
    for bar in bars:
        _renew(figure, bar, beyond(values, low, high))


def _renew(figure: Figure, bar: Colorbar, extend: str) -> None:
    """The colour bar again, with ticks of its new range and an arrow where values lie outside."""
    axes = bar.ax
    upright = bar.orientation == "vertical"
    label = axes.get_ylabel() if upright else axes.get_xlabel()
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
    from matplotlib.ticker import EngFormatter

    for axes in _curves(figure):
        for which in AXES:
            side = getattr(axes, f"{which}axis")
            if side.get_scale() != "linear":
                low, high = getattr(axes.dataLim, f"interval{which}")
                limits = low - 0.05 * (high - low), high + 0.05 * (high - low)
                axes.set(**{f"{which}scale": "linear", f"{which}lim": limits})
                side.set_major_formatter(EngFormatter(sep=""))
                side.set_label_text(side.get_label_text().removesuffix(" (logarithmic)"))


def _make_logarithmic(figure: Figure, which: str) -> None:
    from matplotlib.ticker import ScalarFormatter

    panels = _curves(figure)
    if not panels:
        raise VitseeError(
            f"this figure has no {which} axis of numbers to make logarithmic"
        )
    for axes in panels:
        if getattr(axes, f"get_{which}scale")() == "symlog":  # which has a place for 0
            continue
        interval = getattr(axes.dataLim, f"interval{which}")
        smallest = getattr(axes.dataLim, f"minpos{which}")
        if not np.isfinite(interval).all():
            continue
        if interval[1] <= 0 or not np.isfinite(smallest):
            raise VitseeError(
                f"no value is positive: the {which} axis cannot be logarithmic"
            )
        low = interval[0] if interval[0] > 0 else smallest
        ratio = (interval[1] / low) ** 0.06 if interval[1] > low else 1.5
        limits = low / ratio, interval[1] * ratio
        axes.set(**{f"{which}scale": "log", f"{which}lim": limits})
        if interval[1] < 30 * low:  # within little more than a decade 1.8e1 is no help
            side = getattr(axes, f"{which}axis")
            side.set_major_formatter(ScalarFormatter())
            side.set_minor_formatter(ScalarFormatter())
