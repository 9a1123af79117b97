"""The figure of a model's input weights: filters as tiles of colour, cosines as a grid of grids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.head_tiles import Tiles, draw_tiles
from vitsee_core.plotting import GREY, new_figure, shorten
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table


SCALES = ("shared", "tile")
ACROSS = 7  # components in a line, as in the paper
MOST_QUERIES = 16  # tiles of cosines in a line
GAP = 0.12  # of a tile
LABEL_ROOM = 0.3  # of a tile, above each component
SMALL, LARGE = 4.0, 7.5  # inches of a panel's height: as a rule, and for many cells
NARROWEST = 3.6  # inches that a panel's title needs
LEFT, RIGHT = 0.6, 1.0  # beside the cosines, for labels and the colour bar
TITLE, NUMBERS, BELOW = 0.5, 0.35, 0.35  # its lines; column numbers; the line about colours


@dataclass(frozen=True)
class _MetricPanel:
    """The rows of one metric, and how many tiles stand in a column and in a line."""

    metric: str
    cut: Table
    down: int
    across: int
    cells: int  # in a line

    @property
    def ratio(self) -> float:
        """Width over height."""
        if self.metric == "cosine":
            sides = [len(self.cut.unique(name)) for name in ("other_row", "other_col")]
            return min(max(sides[1] / sides[0], 0.4), 2.5)
        return self.across / (self.down * (1 + (LABEL_ROOM if self.metric == "component" else 0)))

    def margins(self) -> tuple[float, float]:
        """Inches left and right of the tiles."""
        return (LEFT, RIGHT) if self.metric == "cosine" else (0.15, 0.3)


@dataclass(frozen=True)
class _Band:
    """The panels of one store or model, from left to right; sizes in inches."""

    cut: Table
    panels: list[_MetricPanel]
    lines: list[str]  # the name above, then what is absent below
    notes: dict[str, Any]

    @property
    def tall(self) -> float:
        """Of the panels."""
        return LARGE if any(panel.cells > 300 for panel in self.panels) else SMALL

    @property
    def slots(self) -> list[float]:
        """Widths of the panels with what is beside them."""
        return [max(self.tall * p.ratio + sum(p.margins()), NARROWEST) for p in self.panels]

    @property
    def width(self) -> float:
        """Of all."""
        return max(sum(self.slots), 0.075 * max(map(len, self.lines)), 4.0)

    @property
    def above(self) -> float:
        """Between the panels and their titles."""
        return NUMBERS if any(panel.metric == "cosine" for panel in self.panels) else 0.05

    @property
    def below(self) -> float:
        """Under the panels."""
        return BELOW + 0.2 * (len(self.lines) - 1)

    @property
    def height(self) -> float:
        """Of all."""
        return 0.35 + (TITLE + self.above + self.tall if self.panels else 0.0) + self.below


def draw_weights(table: Table, scale: str) -> Figure:
    """The figure of `vitsee_core.analyses.weights.plot`. Call it inside a function decorated with
    `styled`."""
    bands = [_band(table, label) for label in labels(table)]
    width = max((band.width for band in bands), default=4.0)
    height = sum(band.height for band in bands) or 1.0
    # Laid out by hand: constrained layout wastes room where the tiles' shapes fix the sizes.
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    bottom = height
    for band in bands:
        bottom -= band.height
        _draw_band(figure, band, scale, bottom, (width, height))
    return figure


def labels(table: Table) -> list[str]:
    """The stores and models of a table, in its order, with those without rows, which its notes
    name."""
    named = [store or model for store, model in zip(table["store"], table["model"], strict=True)]
    return list(dict.fromkeys([*map(str, table.notes.get("sources", {})), *map(str, named)]))


def _band(table: Table, label: str) -> _Band:
    mine = [label == str(s or m) for s, m in zip(table["store"], table["model"], strict=True)]
    cut = table.take(np.flatnonzero(mine))
    notes = table.notes.get("sources", {}).get(label, {})
    found = [m for m in ("component", "filter", "cosine") if m in cut.unique("metric")]
    panels = [_panel(metric, cut.where(metric=metric)) for metric in found]
    absent = [f"{k}: n/a: {reason}" for k, reason in notes.get("absent", {}).items()]
    return _Band(cut, panels, [_name(cut, label), *absent], notes)


def _draw_band(
    figure: Figure, band: _Band, scale: str, bottom: float, size: tuple[float, float]
) -> None:
    width, height = size
    top = bottom + band.height
    figure.text(0.15 / width, (top - 0.27) / height, band.lines[0], fontsize=10)
    for i, line in enumerate(reversed(band.lines[1:])):
        figure.text(0.15 / width, (bottom + 0.1 + 0.2 * i) / height, line, fontsize=8)
    left, low = 0.0, bottom + band.below
    for panel, slot in zip(band.panels, band.slots, strict=True):
        start = left + panel.margins()[0]
        wide = band.tall * panel.ratio
        place = (start / width, low / height, wide / width, band.tall / height)
        axes = figure.add_axes(place)
        if panel.metric == "cosine":
            title = _draw_cosines(axes, panel, scale, band.notes.get("positions", {}))
        else:
            shares = band.cut.where(metric="variance_share")["value"]
            title = _draw_filters(axes, panel, shares, scale)
        above = low + band.tall + band.above + 0.05
        figure.text(start / width, above / height, title, fontsize=9.5)
        left += slot


def _name(cut: Table, label: str) -> str:
    if not len(cut):
        return shorten(label, 80)
    store, model = cut["store"][0], str(cut["model"][0])
    return f"{shorten(store, 30)} ({shorten(model, 50)})" if store else shorten(model, 80)


def _panel(metric: str, cut: Table) -> _MetricPanel:
    if metric == "cosine":
        queries = [len(cut.unique(name)) for name in ("row", "col")]
        step = -(-max(queries) // MOST_QUERIES)
        down, across = (-(-n // step) for n in queries)
        return _MetricPanel(metric, cut, down, across, across * len(cut.unique("other_col")))
    n = len(cut.unique(metric))
    across = min(n, ACROSS) if metric == "component" and n <= 49 else math.ceil(math.sqrt(n))
    return _MetricPanel(metric, cut, -(-n // across), across, across * len(cut.unique("col")))


def colours(values: Float, scale: str) -> tuple[Float, float]:
    """(tiles, height, width, 3) from 0 to 1, and the weight of full colour.

    Args:
        values: (tiles, channels, height, width); other than three channels are averaged to grey.
        scale: "shared": 0 is middle grey, the largest weight of all tiles full colour; "tile":
            each tile's least and largest weight are 0 and 1.
    """
    if values.shape[1] != 3:
        values = np.repeat(values.mean(1, keepdims=True), 3, axis=1)
    moved = np.moveaxis(values, 1, -1)
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    if scale == "shared":
        return 0.5 + moved / (2 * largest or 1.0), largest
    low, high = (f(moved, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    flat = np.full_like(moved, 0.5)
    return np.divide(moved - low, high - low, out=flat, where=high > low), largest


def _draw_filters(axes: Axes, panel: _MetricPanel, shares: Float, scale: str) -> str:
    """Draw tiles of weights; returns the panel's title."""
    metric, cut = panel.metric, panel.cut
    shape = [len(cut.unique(name)) for name in (metric, "channel", "row", "col")]
    n, channels, height, width = shape
    tiles, largest = colours(cut["value"].reshape(shape), scale)
    room = LABEL_ROOM * height if metric == "component" else 0.0
    gap = GAP * max(height, width)
    for i, tile in enumerate(np.nan_to_num(tiles, nan=1.0)):
        line, column = divmod(i, panel.across)
        top, left = line * (height + room + gap) + room, column * (width + gap)
        # One image each: in a single image, gaps would have to be whole pixels.
        axes.imshow(tile, extent=(left, left + width, top + height, top), origin="upper")
        if metric == "component" and not math.isnan(shares[i]):
            place = (left + width / 2, top - 0.03 * height)
            axes.text(*place, percent(shares[i]), ha="center", va="bottom", fontsize=6.5)
    axes.set(
        xlim=(0, panel.across * (width + gap) - gap),
        ylim=(panel.down * (height + room + gap) - gap, 0),
        xticks=[],
        yticks=[],
        aspect="equal",
        anchor="NW",
    )
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    seen = "" if channels == 3 else f"mean of {channels} channels, " if channels > 1 else ""
    scales = {
        "shared": f"{seen}grey: 0, full colour: a weight of ±{largest:.2g}",
        "tile": f"{seen}each tile over its own range",
    }
    axes.set_xlabel(scales[scale], loc="left", fontsize=8)
    site = shorten(str(cut["site"][0]), 28)
    if metric == "filter":
        return f"{n} filters of {height} x {width} px\n({site})"
    return (
        f"principal components of filters of {height} x {width} px\n"
        f"({site}; {n} of {len(shares)}, share of variance)"
    )


def percent(share: float) -> str:
    """`11.4 %`, `0.93 %`, `< 0.01 %`."""
    if share < 5e-5:
        return "< 0.01 %"
    return f"{100 * share:.1f} %" if share >= 0.00995 else f"{100 * share:.2f} %"


def _draw_cosines(axes: Axes, panel: _MetricPanel, scale: str, about: dict[str, Any]) -> str:
    """Draw a map for each query, at its place; returns the panel's title."""
    cut = panel.cut
    rows, cols, lines, columns = (
        sorted(set(cut[name].tolist())) for name in ("row", "col", "other_row", "other_col")
    )
    maps = cut["value"].reshape(len(rows), len(cols), len(lines), len(columns))
    step = -(-max(len(rows), len(cols)) // MOST_QUERIES)
    kept = [range((len(part) - 1) % step // 2, len(part), step) for part in (rows, cols)]
    tiles = Tiles(
        {(i, j): maps[r, c] for i, r in enumerate(kept[0]) for j, c in enumerate(kept[1])},
        [str(rows[r]) for r in kept[0]],
        [str(cols[c]) for c in kept[1]],
    )
    look = "plain" if scale == "shared" else "head"
    image = draw_tiles(axes, tiles, scale=look, limits=(-1.0, 1.0))
    axes.set_anchor("NW")
    axes.set_xlabel("column of the patch", labelpad=3)
    axes.set_ylabel("row of the patch")
    inches = axes.figure.get_size_inches()[0] * axes.get_position().width  # type: ignore[union-attr]
    beside = axes.inset_axes((1 + 0.12 / inches, 0.0, 0.15 / inches, 1.0))
    bar = axes.figure.colorbar(image, cax=beside)
    bar.outline.set(linewidth=0.5, edgecolor=GREY)  # type: ignore[operator]
    if scale == "shared":
        bar.set_label("cosine similarity")
    else:
        bar.set_label("cosine, each tile over its own range")
        bar.set_ticks([0, 1])
        bar.set_ticklabels(["least", "most"])
    all_patches, shown = len(lines) * len(columns), len(kept[0]) * len(kept[1])
    details = [shorten(str(cut["site"][0]), 28), about.get("kind", "")]
    details.append("" if shown == all_patches else f"{shown} of {all_patches} patches")
    return f"similarity of position embeddings\n({'; '.join(filter(None, details))})"
