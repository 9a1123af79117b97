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

# Sublayer; token's name or (row, col), of clips (frame, row, col) -> value.
Column = tuple[str, Mapping[Any, float]]

NO_VALUE = "#C9C9C9"
SEQUENTIAL = "viridis"
DIVERGING = "RdBu_r"
# Heights, the patches' being 1: of each prefix token, and of the line below them.
PREFIX_SHARE = 0.08
GAP = 0.012
MOST_TICKS = 7
MEANS = ("patches", "registers", "flat")  # are means over several tokens


@dataclass(frozen=True)
class MapPanel:
    """One store's map of one kind of sublayer. sites: the columns. prefix: names and (prefix
    tokens, columns). bodies: each column's other tokens in order; cells: their (row, col), of
    clips (frame, row, col), empty where the columns differ."""

    title: str
    store: str
    sites: tuple[str, ...]
    prefix: tuple[str, ...]
    prefix_values: Float
    bodies: tuple[Float, ...]
    cells: tuple[Any, ...]

    @classmethod
    def of(cls, title: str, store: str, columns: Sequence[Column]) -> MapPanel:
        """A panel made of the tokens of each column; means over several tokens are not part of a
        map."""
        names = dict.fromkeys(t for _, of in columns for t in of if isinstance(t, str))
        prefix = tuple(n for n in names if n not in MEANS and not n.isdigit())
        values = np.array(
            [[of.get(name, np.nan) for _, of in columns] for name in prefix]
        )
        cells = [sorted(t for t in of if isinstance(t, tuple)) for _, of in columns]
        bodies = tuple(
            np.array([of[t] for t in own])
            for (_, of), own in zip(columns, cells, strict=True)
        )
        alike = all(own == cells[0] for own in cells)
        return cls(
            title,
            store,
            tuple(site for site, _ in columns),
            prefix,
            values.reshape(len(prefix), len(columns)),
            bodies,
            tuple(cells[0]) if alike else (),
        )

    def all_values(self) -> Float:
        return np.concatenate([self.prefix_values.ravel(), *self.bodies])

    def ticks(self) -> Ticks:
        axis = SiteAxis.of([(self.store, site) for site in self.sites], {})
        return axis.ticks(MOST_TICKS)


def colour_scale(metric: str, values: Float) -> Normalize:
    """A colour scale from the smallest to the largest value; logarithmic for ratios and norms that
    span more than a factor of 10, symmetric about 0 for `cos_branch`, up to 1 for `cos_out`."""
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
    return Normalize(low, high if high > low else 1.1 * low + 0.1)


def value_ticks(axis: Axis, scale: Normalize) -> None:
    """Plain numbers (0.5, 2, 10; powers of 10 beyond) on an axis with a logarithmic scale; others
    stay as they are."""
    from matplotlib.colors import LogNorm

    if not isinstance(scale, LogNorm):
        return
    decades = np.log10(float(scale.vmax or 1) / float(scale.vmin or 1))
    plain_log_ticks(axis, FINE if decades < 2.5 else DECADES)


def draw_map(axes: Axes, panel: MapPanel, scale: Normalize) -> AxesImage:
    """Draw the panel, below `styled`; its image, for a colour bar.

    Args:
        axes: an empty panel.
        panel: what to draw.
        scale: from `colour_scale`.
    """
    n = len(panel.sites)
    tops = [
        -GAP - PREFIX_SHARE * (len(panel.prefix) - i) for i in range(len(panel.prefix))
    ]
    for top, values in zip(tops, panel.prefix_values, strict=True):
        image = _image(
            axes, values[np.newaxis], scale, (-0.5, n - 0.5), (top, top + PREFIX_SHARE)
        )
    for k, values in enumerate(panel.bodies):
        if len(values):
            image = _image(axes, values[:, np.newaxis], scale, (k - 0.5, k + 0.5), (0, 1))
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


def _image(
    axes: Axes,
    values: Float,
    scale: Normalize,
    x: tuple[float, float],
    y: tuple[float, float],
) -> AxesImage:
    """Cells that fill the box x, y; the first row on top."""
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
    """Prefix tokens by name; rows of the grid where all columns have one, else its ends."""
    places = [top + PREFIX_SHARE / 2 for top in tops]
    texts = ["CLS" if name == "cls" else token_words(name) for name in panel.prefix]
    if panel.cells:
        starts = [
            k for k, place in enumerate(panel.cells) if place[1:] == panel.cells[0][1:]
        ]
        shown = starts[:: -(-len(starts) // 6)]
        places += [(k + 0.5) / len(panel.cells) for k in shown]
        texts += [str(panel.cells[k][0]) for k in shown]
        word = f"patches, by {'row of the grid' if len(panel.cells[0]) == 2 else 'frame'}"
    else:
        places += [0, 1]
        texts += ["first", "last"]
        word = "location, row by row"
    axes.set_yticks(places, texts)
    axes.tick_params(length=2, width=0.5)
    axes.set_ylabel(word)
