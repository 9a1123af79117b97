"""What a reader may change of any finished figure: its theme, colours, range, title and axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitsee_core.plotting import GREY, styled
from vitsee_core.text import figure_text
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure

THEMES = ("light", "dark")
AXES = ("x", "y")
# The dark theme: black becomes light, white dark, and two colours that it would swallow lighter.
PAPER, INK, GRID = "#16181d", "#e8e6e3", "#3a3d45"
DARK = {"#000000": INK, "#ffffff": PAPER, "#0072b2": "#4aa8e8", "#009e73": "#2fc296"}


@dataclass(frozen=True)
class Look:
    """Changes to a figure that is drawn; without any it stays as it is.

    theme: one of `THEMES`. cmap: a colour map's name, for all panels that have one. range: lowest
    and highest value of the colours, or of the y axes where a figure has no colours. title: above
    all panels. log: which axes of panels with curves become logarithmic, of `AXES`.
    """

    theme: str = "light"
    cmap: str | None = None
    range: tuple[float, float] | None = None
    title: str | None = None
    log: tuple[str, ...] = ()

    @styled
    def put_on(self, figure: Figure) -> None:
        """Change the figure.

        Raises:
            VitseeError: no such colour map, one for a figure without colours, or a logarithmic axis
                without positive values.
        """
        bars = [bar for axes in _all_axes(figure) if (bar := _bar_of(axes)) is not None]
        coloured = _mappables(figure, bars)
        if self.cmap is not None:
            _recolour(coloured, self.cmap)
        for which in self.log:
            _make_logarithmic(figure, which)
        if self.range is not None:
            _limit(figure, coloured, bars, *self.range)
        if self.title is not None:
            # Where titles of panels begin at the left, so does this one.
            figure.suptitle(figure_text(self.title), x=0.01, ha="left", fontweight="bold")
        if self.theme == "dark":
            _darken(figure)


def _all_axes(figure: Figure) -> list[Axes]:
    """The figure's panels with those inside them, such as colour bars beside a heatmap."""
    found: list[Axes] = []
    queue: list[Axes] = list(figure.axes)
    for axes in queue:
        if axes not in found:
            found.append(axes)
            queue += cast("list[Axes]", axes.child_axes)
    return found


def _bar_of(axes: Axes) -> Colorbar | None:
    bar: Colorbar | None = getattr(axes, "_colorbar", None)
    return bar


def _is_picture(axes: Axes) -> bool:
    """Whether a panel shows a map: what is drawn upon it is coloured to be seen there."""
    from matplotlib.collections import QuadMesh

    meshes = any(isinstance(one, QuadMesh) for one in axes.collections)
    return bool(axes.images) or meshes or _bar_of(axes) is not None


def _curves(figure: Figure) -> list[Axes]:
    return [axes for axes in _all_axes(figure) if not _is_picture(axes) and axes.axison]


def _mappables(figure: Figure, bars: list[Colorbar]) -> list[ScalarMappable]:
    """What gives numbers a colour; neither photographs nor cells of one colour ("no value")."""
    found: list[ScalarMappable] = [bar.mappable for bar in bars]
    for axes in _all_axes(figure):
        if _bar_of(axes) is None:
            found += [*axes.images, *axes.collections]
    numbers: list[ScalarMappable] = []
    for one in found:
        values = one.get_array()
        if values is None or np.ndim(values) > 2 or one.cmap.N < 16 or one.cmap.name == "gray":
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
    figure: Figure, coloured: list[ScalarMappable], bars: list[Colorbar], low: float, high: float
) -> None:
    if not coloured:
        for axes in _curves(figure):
            if axes.get_yscale() == "log" and low <= 0:
                raise VitseeError(f"the y axis is logarithmic: a range from {low:g} is impossible")
            axes.set_ylim(low, high)
        return
    values = np.concatenate([np.asarray(one.get_array(), float).ravel() for one in coloured])
    outside = (bool((values < low).any()), bool((values > high).any()))
    for one in coloured:
        if _is_logarithmic(one) and low <= 0:
            raise VitseeError(f"the colours are logarithmic: a range from {low:g} is not possible")
        one.set_clim(low, high)
    for bar in bars:
        _renew(figure, bar, outside)


def _renew(figure: Figure, bar: Colorbar, outside: tuple[bool, bool]) -> None:
    """The colour bar again, with ticks of its new range and an arrow where values lie outside."""
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    axes = bar.ax
    upright = bar.orientation == "vertical"
    label = axes.get_ylabel() if upright else axes.get_xlabel()
    bar.mappable.callbacks.disconnect(cast(Any, bar.mappable).colorbar_cid)
    axes.clear()
    new = figure.colorbar(
        bar.mappable, cax=axes, orientation=bar.orientation, extend=ends.get(outside, "neither")
    )
    new.set_label(label)
    new.outline.set(linewidth=0.5, edgecolor=GREY)  # type: ignore[operator]


def _is_logarithmic(one: ScalarMappable) -> bool:
    from matplotlib.colors import LogNorm

    return isinstance(one.norm, LogNorm)


def _make_logarithmic(figure: Figure, which: str) -> None:
    from matplotlib.ticker import ScalarFormatter

    panels = _curves(figure)
    if not panels:
        raise VitseeError(f"this figure has no {which} axis of numbers to make logarithmic")
    for axes in panels:
        interval = axes.dataLim.intervaly if which == "y" else axes.dataLim.intervalx
        smallest = axes.dataLim.minposy if which == "y" else axes.dataLim.minposx
        if not np.isfinite(interval).all():
            continue
        if interval[1] <= 0 or not np.isfinite(smallest):
            raise VitseeError(f"no value is positive: the {which} axis cannot be logarithmic")
        low = interval[0] if interval[0] > 0 else smallest
        set_scale, set_limits = (
            (axes.set_yscale, axes.set_ylim) if which == "y" else (axes.set_xscale, axes.set_xlim)
        )
        set_scale("log")
        ratio = (interval[1] / low) ** 0.06 if interval[1] > low else 1.5
        set_limits(low / ratio, interval[1] * ratio)
        if interval[1] < 30 * low:  # within little more than a decade 1.8e1 is no help
            side = axes.yaxis if which == "y" else axes.xaxis
            side.set_major_formatter(ScalarFormatter())
            side.set_minor_formatter(ScalarFormatter())
    if which == "y":
        _legends_beside(panels)


def _legends_beside(panels: list[Axes]) -> None:
    """Legends that stood in a strip of a linear axis go where there is room."""
    for axes in panels:
        legend = axes.get_legend()
        if legend is not None:
            legend.set_loc("best")


# ------------------------------------------------------------------------------ the dark theme


def _darken(figure: Figure) -> None:
    figure.set_facecolor(PAPER)
    on_pictures: set[int] = set()
    for axes in _all_axes(figure):
        if _is_picture(axes):
            drawn = [*axes.lines, *axes.texts, *axes.patches, *axes.collections, *axes.images]
            on_pictures |= {id(one) for one in drawn}
        axes.set_facecolor(PAPER)
        axes.tick_params(which="both", colors=INK)
        for line in (*axes.get_xgridlines(), *axes.get_ygridlines()):
            line.set_color(GRID)
    for artist in _descendants(figure):
        if id(artist) not in on_pictures:
            _invert(artist)


def _descendants(artist: Artist) -> Iterator[Artist]:
    for child in artist.get_children():
        yield child
        yield from _descendants(child)


def _invert(artist: Artist) -> None:
    """Give an artist the colours of `DARK`."""
    for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
        read, write = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
        if read is None or write is None:
            continue
        changed = _inverted(read())
        if changed is not None:
            write(changed)


def _inverted(colour: Any) -> Any:
    """The colour, or the array of colours, in the dark theme; None where it stays."""
    from matplotlib.colors import to_hex, to_rgba, to_rgba_array

    try:
        before = to_rgba_array(colour)
    except (ValueError, TypeError):  # "none", "auto"
        return None
    names = [to_hex(one) for one in before]
    if not {*names} & {*DARK}:
        return None
    alphas = before[:, 3].tolist()
    after = [to_rgba(DARK.get(name, name), a) for name, a in zip(names, alphas, strict=True)]
    return after[0] if len(after) == 1 else after
