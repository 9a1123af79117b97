"""The figure of a model's input weights: filters as tiles of colour, cosines as a grid of grids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.head_tiles import Tiles, draw_tiles
from vitsee_core.figures.panels import (
    PanelGrid,
    colour_bar,
    map_axes,
    name_part,
    room,
    small,
    stack,
)
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table


SCALES = ("shared", "tile")
ACROSS = 7  # components in a line, as in the paper
MOST_QUERIES = 16  # tiles of cosines in a line
GAP = 0.12  # of a tile
LABEL_ROOM = 0.3  # of a tile, above each component


@dataclass(frozen=True)
class _MetricPanel:
    """The rows of one metric, and the number of tiles per column and per line."""

    metric: str
    cut: pl.DataFrame
    down: int
    across: int
    cells: int  # in a line

    @property
    def ratio(self) -> float:
        if self.metric == "cosine":
            sides = [self.cut[name].n_unique() for name in ("other_row", "other_col")]
            return min(max(sides[1] / sides[0], 0.4), 2.5)
        return self.across / (
            self.down * (1 + (LABEL_ROOM if self.metric == "component" else 0))
        )


@dataclass(frozen=True)
class _Band:
    """The panels of one store or model, from left to right."""

    cut: pl.DataFrame  # the rows
    panels: list[_MetricPanel]  # of these
    lines: list[str]  # the name above, then what is missing
    notes: dict[str, Any]  # on the source

    def grids(self) -> list[tuple[PanelGrid, list[_MetricPanel]]]:
        """The panels side by side if there is room, else below one another."""
        wide = min(
            room(), 44.0 if any(panel.cells > 300 for panel in self.panels) else 30.0
        )
        fit = max(1, int(room() / wide))
        rows = [self.panels[i : i + fit] for i in range(0, len(self.panels), fit)] or [[]]
        grids = []
        for row in rows:
            tall = max(
                (min(room() / fit - 9, wide - 9) / panel.ratio for panel in row),
                default=0,
            )
            lines = 1.3 * len(self.lines) if row is rows[0] else 0.0
            height = tall + 7 + lines
            grids.append(
                (PanelGrid(max(len(row), 1), width=wide, widest=wide, height=height), row)
            )
        return grids


def draw_weights(table: Table, scale: str) -> Figure:
    """The figure of `vitsee_core.analyses.weights.plot`. Call it inside a function decorated with
    `styled`."""
    bands = [_band(table, label) for label in labels(table)]
    rows = [(band, *row) for band in bands for row in band.grids()]
    figure, parts = stack(*(grid for _, grid, _ in rows))
    named: list[_Band] = []
    for part, (band, grid, panels) in zip(parts, rows, strict=True):
        if not any(band is other for other in named):
            name_part(part, "\n".join(band.lines))
            named.append(band)
        every = grid.axes(part)
        if not panels:
            every[0].set_axis_off()
        for axes, panel in zip(every, panels, strict=False):
            if panel.metric == "cosine":
                _draw_cosines(axes, panel, scale, band.notes.get("positions", {}))
            else:
                shares = band.cut.filter(metric="variance_share")["value"]
                _draw_filters(axes, panel, shares.to_numpy(), scale)
    return figure


def named_by() -> pl.Expr:
    """The store's name of each row, else the model's."""
    return pl.coalesce(pl.col("store", "model").cast(pl.String))


def labels(table: Table) -> list[str]:
    """The stores and models of a table, in its order, with those without rows, which its notes
    name."""
    named = table.frame.select(named_by()).to_series().unique(maintain_order=True)
    return list(dict.fromkeys([*map(str, table.notes.get("sources", {})), *named]))


def _band(table: Table, label: str) -> _Band:
    cut = table.frame.filter(label == named_by())
    notes = table.notes.get("sources", {}).get(label, {})
    found = [m for m in ("component", "filter", "cosine") if m in cut["metric"]]
    panels = [_panel(metric, cut.filter(metric=metric)) for metric in found]
    absent = [f"{k}: n/a: {reason}" for k, reason in notes.get("absent", {}).items()]
    return _Band(cut, panels, [_name(cut, label), *absent], notes)


def _name(cut: pl.DataFrame, label: str) -> str:
    if not len(cut):
        return shorten(label, 80)
    store, model = cut.select("store", pl.col("model").cast(pl.String).fill_null("")).row(
        0
    )
    if store:
        return f"{shorten(store, 30)} ({shorten(model, 50)})"
    return shorten(model, 80)


def _panel(metric: str, cut: pl.DataFrame) -> _MetricPanel:
    if metric == "cosine":
        queries = [cut[name].n_unique() for name in ("row", "col")]
        step = -(-max(queries) // MOST_QUERIES)
        down, across = (-(-n // step) for n in queries)
        return _MetricPanel(
            metric, cut, down, across, across * cut["other_col"].n_unique()
        )
    n = cut[metric].n_unique()
    across = (
        min(n, ACROSS) if metric == "component" and n <= 49 else math.ceil(math.sqrt(n))
    )
    return _MetricPanel(
        metric, cut, -(-n // across), across, across * cut["col"].n_unique()
    )


def colours(values: Float, scale: str) -> tuple[Float, float]:
    """(tiles, height, width, 3) from 0 to 1, and the weight of full colour.

    Args:
        values: (tiles, channels, height, width); any number of channels other than three is
            averaged to grey.
        scale: "shared": 0 is middle grey, the largest weight of all tiles full colour; "tile": each
            tile's least and largest weight are 0 and 1.
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


def _draw_filters(axes: Axes, panel: _MetricPanel, shares: Float, scale: str) -> None:
    metric = panel.metric
    cut = panel.cut
    shape = [cut[name].n_unique() for name in (metric, "channel", "row", "col")]
    n, channels, height, width = shape
    tiles, largest = colours(cut["value"].to_numpy().reshape(shape), scale)
    room = LABEL_ROOM * height if metric == "component" else 0.0
    gap = GAP * max(height, width)
    for i, tile in enumerate(np.nan_to_num(tiles, nan=1.0)):
        line, column = divmod(i, panel.across)
        top = line * (height + room + gap) + room
        left = column * (width + gap)
        # One image each: in a single image, gaps would have to be whole pixels.
        axes.imshow(tile, extent=(left, left + width, top + height, top), origin="upper")
        if metric == "component" and not math.isnan(shares[i]):
            place = (left + width / 2, top - 0.03 * height)
            axes.text(
                *place,
                percent(shares[i]),
                ha="center",
                va="bottom",
                fontsize=_share_size(axes, panel),
            )
    axes.set(
        xlim=(0, panel.across * (width + gap) - gap),
        ylim=(panel.down * (height + room + gap) - gap, 0),
        aspect="equal",
    )
    map_axes(axes)
    axes.set_frame_on(False)
    seen = (
        "" if channels == 3 else f"mean of {channels} channels, " if channels > 1 else ""
    )
    scales = {
        "shared": f"{seen}grey: 0, full colour: a weight of ±{largest:.2g}",
        "tile": f"{seen}each tile over its own range",
    }
    axes.set_xlabel(scales[scale])
    site = shorten(str(cut["site"][0]), 28)
    if metric == "filter":
        axes.set_title(f"{n} filters of {height} x {width} px\n({site})")
        return
    axes.set_title(
        f"principal components of filters of {height} x {width} px\n"
        f"({site}; {n} of {len(shares)}, share of variance)"
    )


def _share_size(axes: Axes, panel: _MetricPanel) -> float:
    """Font size of the shares above components: five letters per tile."""
    tile = axes.get_window_extent().width / axes.figure.dpi * 72 / panel.across  # type: ignore[union-attr]
    return min(small(), tile / 4.5)


def percent(share: float) -> str:
    """`11.4 %`, `0.93 %`."""
    if share < 5e-5:
        return "0.00 %"
    if share >= 0.00995:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.2f} %"


def _draw_cosines(
    axes: Axes, panel: _MetricPanel, scale: str, about: dict[str, Any]
) -> None:
    """Draw a map for each query, at its place."""
    cut = panel.cut
    rows, cols, lines, columns = (
        cut[name].unique().sort().to_list()
        for name in ("row", "col", "other_row", "other_col")
    )
    maps = cut["value"].to_numpy().reshape(len(rows), len(cols), len(lines), len(columns))
    step = -(-max(len(rows), len(cols)) // MOST_QUERIES)
    kept = [range((len(part) - 1) % step // 2, len(part), step) for part in (rows, cols)]
    tiles = Tiles(
        {
            (i, j): maps[r, c]
            for i, r in enumerate(kept[0])
            for j, c in enumerate(kept[1])
        },
        [str(rows[r]) for r in kept[0]],
        [str(cols[c]) for c in kept[1]],
    )
    look = "plain" if scale == "shared" else "head"
    image = draw_tiles(axes, tiles, scale=look, limits=(-1.0, 1.0))
    axes.set_xlabel("column of the patch")
    axes.set_ylabel("row of the patch")
    bar = colour_bar(axes, image, "cosine similarity")
    if scale != "shared":
        bar.set_label("cosine, each tile over its own range")
        bar.set_ticks([0, 1])
        bar.set_ticklabels(["least", "most"])
    all_patches = len(lines) * len(columns)
    shown = len(kept[0]) * len(kept[1])
    details = [shorten(str(cut["site"][0]), 28), about.get("kind", "")]
    details.append("" if shown == all_patches else f"{shown} of {all_patches} patches")
    axes.set_title(
        f"similarity of position embeddings\n({'; '.join(filter(None, details))})"
    )
