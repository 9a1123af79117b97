"""Draw a model's input weights: filters as tiles of colour, cosines as a grid of grids."""

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
PANEL_METRICS = ("component", "filter", "cosine")  # from left to right
ACROSS = 7  # components in a line, as in the paper
MAX_COMPONENTS = ACROSS**2  # more of them are drawn as a square
MAX_QUERIES = 16  # tiles of cosines in a line
GAP = 0.12  # share of a tile
LABEL_ROOM = 0.3  # share of a tile, above each component
PANEL_WIDTH = 30.0  # ems
WIDE_PANEL_WIDTH = 44.0  # ems, of a panel of more than `WIDE_CELLS` in a line
WIDE_CELLS = 300


@dataclass(frozen=True)
class _MetricPanel:
    """The rows of one metric, and how their tiles are laid out.

    Attributes:
        metric: component, filter or cosine.
        rows: the metric's rows of the table.
        down: number of lines of tiles.
        across: number of tiles in a line.
        cells: number of weights or cosines in a line.
    """

    metric: str
    rows: pl.DataFrame
    down: int
    across: int
    cells: int

    @property
    def ratio(self) -> float:
        """Return the panel's width over its height."""
        if self.metric == "cosine":
            # The tiles have the shape of the grid of patches, within limits that leave room.
            n_rows = self.rows["other_row"].n_unique()
            n_cols = self.rows["other_col"].n_unique()
            return min(max(n_cols / n_rows, 0.4), 2.5)
        label_room = LABEL_ROOM if self.metric == "component" else 0
        return self.across / (self.down * (1 + label_room))


@dataclass(frozen=True)
class _Band:
    """The panels of one store or model, from left to right.

    Attributes:
        rows: its rows of the table.
        panels: one for each of its metrics that is drawn.
        lines: the name above, then what is missing.
        notes: the table's notes on it.
    """

    rows: pl.DataFrame
    panels: list[_MetricPanel]
    lines: list[str]
    notes: dict[str, Any]

    def grids(self) -> list[tuple[PanelGrid, list[_MetricPanel]]]:
        """Return lines of panels, each a grid with its panels.

        There is one line if the page has room for all side by side.
        """
        width = PANEL_WIDTH
        if any(panel.cells > WIDE_CELLS for panel in self.panels):
            width = WIDE_PANEL_WIDTH
        width = min(room(), width)
        n_beside = max(1, int(room() / width))
        lines_of_panels = [
            self.panels[start : start + n_beside]
            for start in range(0, len(self.panels), n_beside)
        ]
        if not lines_of_panels:
            lines_of_panels = [[]]  # a line for the name alone
        grids = []
        for i, panels in enumerate(lines_of_panels):
            # 9 ems beside the tiles, and 7 above and below them, are for ticks and titles.
            tile_width = min(room() / n_beside - 9, width - 9)
            tallest = max((tile_width / panel.ratio for panel in panels), default=0)
            name_height = 1.3 * len(self.lines) if i == 0 else 0.0
            grid = PanelGrid(
                max(len(panels), 1),
                width=width,
                widest=width,
                height=tallest + 7 + name_height,
            )
            grids.append((grid, panels))
        return grids


def draw_weights(table: Table, scale: str) -> Figure:
    """Draw the figure of `vitsee_core.analyses.weights.plot`.

    Call it inside a function decorated with `styled`.

    Args:
        table: from `run`.
        scale: "shared" or "tile", as `colours` takes it.
    """
    grids: list[PanelGrid] = []
    contents: list[tuple[_Band, list[_MetricPanel]]] = []  # of each grid
    for label in labels(table):
        band = _band_of(table, label)
        for grid, panels in band.grids():
            grids.append(grid)
            contents.append((band, panels))
    figure, boxes = stack(*grids)
    named_band: _Band | None = None
    for box, grid, (band, panels) in zip(boxes, grids, contents, strict=True):
        # Of several grids of a band the first has its name.
        if band is not named_band:
            name_part(box, "\n".join(band.lines))
            named_band = band
        all_axes = grid.axes(box)
        if not panels:
            all_axes[0].set_axis_off()
        for axes, panel in zip(all_axes, panels, strict=False):
            if panel.metric == "cosine":
                _draw_cosines(axes, panel, scale, band.notes.get("positions", {}))
            else:
                shares = band.rows.filter(metric="variance_share")["value"]
                _draw_filters(axes, panel, shares.to_numpy(), scale)
    return figure


def named_by() -> pl.Expr:
    """Return the expression for the store's name of each row, else the model's."""
    return pl.coalesce(pl.col("store", "model").cast(pl.String))


def labels(table: Table) -> list[str]:
    """Return the names of a table's stores and models, in its order.

    The notes also name those that have no rows.
    """
    in_notes = [str(name) for name in table.notes.get("sources", {})]
    in_rows = table.frame.select(named_by()).to_series().unique(maintain_order=True)
    return list(dict.fromkeys([*in_notes, *in_rows]))


def _band_of(table: Table, label: str) -> _Band:
    """Return the panels of the store or model of that name."""
    rows = table.frame.filter(label == named_by())
    notes = table.notes.get("sources", {}).get(label, {})
    panels = []
    for metric in PANEL_METRICS:
        if metric in rows["metric"]:
            panels.append(_panel_of(metric, rows.filter(metric=metric)))
    lines = [_title_of(rows, label)]
    for name, reason in notes.get("absent", {}).items():
        lines.append(f"{name}: n/a: {reason}")
    return _Band(rows=rows, panels=panels, lines=lines, notes=notes)


def _title_of(rows: pl.DataFrame, label: str) -> str:
    """Return the title of a band: its store and model; `label` if the table has no rows of it."""
    if not len(rows):
        return shorten(label, 80)
    store = rows["store"][0]
    model = str(rows["model"][0] or "")
    if store:
        return f"{shorten(store, 30)} ({shorten(model, 50)})"
    return shorten(model, 80)


def _panel_of(metric: str, rows: pl.DataFrame) -> _MetricPanel:
    """Return the layout of a metric's tiles: components in lines of `ACROSS`, filters in a square,
    cosines as the grid of patches, of which every n-th row and column has a tile."""
    if metric == "cosine":
        n_rows = rows["row"].n_unique()
        n_cols = rows["col"].n_unique()
        step = _query_step(n_rows, n_cols)
        down = math.ceil(n_rows / step)
        across = math.ceil(n_cols / step)
        cells = across * rows["other_col"].n_unique()
    else:
        n_tiles = rows[metric].n_unique()
        if metric == "component" and n_tiles <= MAX_COMPONENTS:
            across = min(n_tiles, ACROSS)
        else:
            across = math.ceil(math.sqrt(n_tiles))
        down = math.ceil(n_tiles / across)
        cells = across * rows["col"].n_unique()
    return _MetricPanel(metric, rows, down=down, across=across, cells=cells)


def _query_step(n_rows: int, n_cols: int) -> int:
    """Return the step between the queries that have a tile, at most `MAX_QUERIES` in a line."""
    return math.ceil(max(n_rows, n_cols) / MAX_QUERIES)


def colours(values: Float, scale: str) -> tuple[Float, float]:
    """Return (tiles, height, width, 3) from 0 to 1, and the weight of full colour.

    Args:
        values: (tiles, channels, height, width); any number of channels other than three is
            averaged to grey.
        scale: "shared": 0 is middle grey, the largest weight of all tiles full colour; "tile": each
            tile's least and largest weight are 0 and 1.
    """
    if values.shape[1] != 3:
        values = np.repeat(values.mean(1, keepdims=True), 3, axis=1)
    pixels = np.moveaxis(values, 1, -1)  # (tiles, height, width, 3)
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    if scale == "shared":
        # Where all weights are 0, all tiles are middle grey.
        return 0.5 + pixels / (2 * largest or 1.0), largest
    low = np.min(pixels, axis=(1, 2, 3), keepdims=True)
    high = np.max(pixels, axis=(1, 2, 3), keepdims=True)
    middle_grey = np.full_like(pixels, 0.5)  # of tiles whose weights are all alike
    scaled = np.divide(pixels - low, high - low, out=middle_grey, where=high > low)
    return scaled, largest


def _draw_filters(axes: Axes, panel: _MetricPanel, shares: Float, scale: str) -> None:
    """Draw filters or components as tiles of colour.

    Args:
        axes: where to draw.
        panel: of the metric filter or component.
        shares: (components,) shares of variance, which stand above components.
        scale: "shared" or "tile", as `colours` takes it.
    """
    metric = panel.metric
    rows = panel.rows
    n_tiles = rows[metric].n_unique()
    n_channels = rows["channel"].n_unique()
    height = rows["row"].n_unique()
    width = rows["col"].n_unique()
    # Rows of the table run over tiles, channels, rows and columns, in this order.
    weights = rows["value"].to_numpy().reshape(n_tiles, n_channels, height, width)
    tiles, largest = colours(weights, scale)

    # Positions are in pixels of a filter, y downwards.
    label_height = LABEL_ROOM * height if metric == "component" else 0.0
    gap = GAP * max(height, width)
    line_height = height + label_height + gap
    for i, tile in enumerate(np.nan_to_num(tiles, nan=1.0)):
        line, column = divmod(i, panel.across)
        top = line * line_height + label_height
        left = column * (width + gap)
        # One image each: in a single image, gaps would have to be whole pixels.
        axes.imshow(tile, extent=(left, left + width, top + height, top), origin="upper")
        if metric == "component" and not math.isnan(shares[i]):
            axes.text(
                left + width / 2,
                top - 0.03 * height,
                percent(shares[i]),
                ha="center",
                va="bottom",
                fontsize=_share_font_size(axes, panel),
            )
    axes.set(
        xlim=(0, panel.across * (width + gap) - gap),
        ylim=(panel.down * line_height - gap, 0),
        aspect="equal",
    )
    map_axes(axes)
    axes.set_frame_on(False)

    caption = f"grey: 0, full colour: a weight of ±{largest:.2g}"
    if scale == "tile":
        caption = "each tile over its own range"
    if n_channels not in (1, 3):
        caption = f"mean of {n_channels} channels, {caption}"
    axes.set_xlabel(caption)
    site = shorten(str(rows["site"][0]), 28)
    if metric == "filter":
        axes.set_title(f"{n_tiles} filters of {height} x {width} px\n({site})")
        return
    axes.set_title(
        f"principal components of filters of {height} x {width} px\n"
        f"({site}; {n_tiles} of {len(shares)}, share of variance)"
    )


def _share_font_size(axes: Axes, panel: _MetricPanel) -> float:
    """Return the font size, in points, of the shares above components: five letters per tile."""
    assert axes.figure is not None
    axes_inches = axes.get_window_extent().width / axes.figure.dpi
    tile_points = axes_inches * 72 / panel.across
    return min(small(), tile_points / 4.5)


def percent(share: float) -> str:
    """Return a share with three digits, at most two behind the point: `11.4 %`, `0.93 %`."""
    if share < 5e-5:
        return "0.00 %"
    if share >= 0.00995:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.2f} %"


def _draw_cosines(
    axes: Axes, panel: _MetricPanel, scale: str, position_notes: dict[str, Any]
) -> None:
    """Draw a map of cosines for each query, at the query's position in the grid of patches.

    Args:
        axes: where to draw.
        panel: of the metric cosine.
        scale: "shared": all maps from -1 to 1; "tile": each over its own range.
        position_notes: the table's notes on the position embeddings.
    """
    rows = panel.rows
    query_rows = rows["row"].unique().sort().to_list()
    query_cols = rows["col"].unique().sort().to_list()
    n_rows = rows["other_row"].n_unique()
    n_cols = rows["other_col"].n_unique()
    maps = rows["value"].to_numpy()
    maps = maps.reshape(len(query_rows), len(query_cols), n_rows, n_cols)

    # Every n-th query has a tile, as far from one border of the grid as from the other.
    step = _query_step(len(query_rows), len(query_cols))
    row_indices = range((len(query_rows) - 1) % step // 2, len(query_rows), step)
    col_indices = range((len(query_cols) - 1) % step // 2, len(query_cols), step)
    maps_by_tile = {}
    for i, row_index in enumerate(row_indices):
        for j, col_index in enumerate(col_indices):
            maps_by_tile[i, j] = maps[row_index, col_index]
    tiles = Tiles(
        maps_by_tile,
        [str(query_rows[index]) for index in row_indices],
        [str(query_cols[index]) for index in col_indices],
    )
    tile_scale = "plain" if scale == "shared" else "head"
    image = draw_tiles(axes, tiles, scale=tile_scale, limits=(-1.0, 1.0))
    axes.set_xlabel("column of the patch")
    axes.set_ylabel("row of the patch")
    bar = colour_bar(axes, image, "cosine similarity")
    if scale != "shared":
        bar.set_label("cosine, each tile over its own range")
        bar.set_ticks([0, 1])
        bar.set_ticklabels(["least", "most"])

    n_patches = n_rows * n_cols
    n_tiles = len(maps_by_tile)
    details = [shorten(str(rows["site"][0]), 28)]
    if position_notes.get("kind"):
        details.append(position_notes["kind"])
    if n_tiles < n_patches:
        details.append(f"{n_tiles} of {n_patches} patches")
    axes.set_title(f"similarity of position embeddings\n({'; '.join(details)})")
