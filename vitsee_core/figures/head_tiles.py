"""Pictures of many small maps: layers in rows, heads in columns, models side by side.

All maps of one size are tiles of a single image, so that 512 heads are drawn as fast as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    colour_bar,
    count,
    map_title,
    name_part,
    room,
    stack,
)
from vitsee_core.tables.columns import parse_window
from vitsee_core.tables.groups import by_group
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_core.tables.results import Table


SCALES = ("shared", "head")
GAP = 0.08  # between tiles, as a share of a tile
FINE_CELLS = 400  # cells across a picture, from which on lines have to be thin
MIDLINE = "#E8002B"
NOT_FROM_ZERO = "colours do not start at 0"
# Lengths in ems.
LARGEST = 8.5  # side of a tile
ALONE = 26.0  # side of a single tile
BAR = 5.0  # a colour bar with its numbers
SMALLEST = 0.9  # width of a tile
TALLEST = 60.0  # height of all tiles of a model


@dataclass(frozen=True)
class Tiles:
    """Maps of one size, laid out in rows and columns.

    Attributes:
        maps: (row, column) -> map (height, width); places may be empty.
        row_labels: text beside each row: a layer.
        column_labels: text below each column: a head.
    """

    maps: dict[tuple[int, int], Float]
    row_labels: list[str]
    column_labels: list[str]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a map in cells."""
        height, width = next(iter(self.maps.values())).shape
        return height, width

    def gap(self) -> int:
        """Return the cells between two tiles, in both directions."""
        return max(1, round(GAP * max(self.size)))

    def corner(self, row: int, column: int) -> tuple[int, int]:
        """Return the upper left cell of a tile in the picture, (y, x)."""
        height, width = self.size
        return row * (height + self.gap()), column * (width + self.gap())

    def centre(self, row: int, column: int) -> tuple[float, float]:
        """Return the middle of a tile in the picture, (y, x); a cell's middle is a whole number."""
        height, width = self.size
        top, left = self.corner(row, column)
        return top + (height - 1) / 2, left + (width - 1) / 2

    def shape(self) -> tuple[int, int]:
        """Return height and width of the picture in cells."""
        # The corner of the tile behind the last one is a gap too far.
        bottom, right = self.corner(len(self.row_labels), len(self.column_labels))
        return bottom - self.gap(), right - self.gap()


class HeadMap(NamedTuple):
    """The map of one head of a table."""

    depth: int
    head: int
    site: str
    values: Float  # (height, width)


def cut_maps(rows: pl.DataFrame) -> Iterator[HeadMap]:
    """Yield the map of each head of a table with the columns row and col, by depth and head.

    A row without a head counts as head 0. Each cell of a map is in the table once.
    """
    filled = rows.with_columns(pl.col("head").fill_null(0))
    ordered = filled.sort("depth", "head", "row", "col", maintain_order=True)
    heads = ordered.group_by("depth", "site", "head", maintain_order=True)
    for (depth, site, head), cells in heads:
        height = cells["row"].n_unique()
        values = cells["value"].to_numpy().reshape(height, -1)
        yield HeadMap(depth, head, str(site), values)


# A map and the window of its block's attention, None without one -> the map that is drawn.
Convert = Callable[[Float, tuple[int, int] | None], Float]


def tile_table(rows: pl.DataFrame, convert: Convert | None = None) -> list[Tiles]:
    """Return the maps of a store as tiles, one picture per map size, the largest maps first.

    Args:
        rows: a store's rows, with the columns row and col.
        convert: changes each map before it is drawn; by default maps stay as they are.
    """
    windows: dict[str, Any] = {}
    if "window" in rows:
        windows = dict(rows.select("site", "window").unique().iter_rows())
    by_size: dict[tuple[int, ...], list[HeadMap]] = {}
    for head_map in cut_maps(rows):
        by_size.setdefault(head_map.values.shape, []).append(head_map)
    pictures = []
    for head_maps in by_size.values():
        layers = list(dict.fromkeys(head_map.site for head_map in head_maps))
        heads = sorted({head_map.head for head_map in head_maps})
        maps = {}
        for head_map in head_maps:
            values = head_map.values
            if convert is not None:
                values = convert(values, parse_window(windows.get(head_map.site)))
            maps[layers.index(head_map.site), heads.index(head_map.head)] = values
        row_labels = [shorten(site_words(site), 18) for site in layers]
        pictures.append(Tiles(maps, row_labels, [str(head) for head in heads]))
    return sorted(pictures, key=lambda tiles: -np.prod(tiles.size))


def value_range(tiles: Sequence[Tiles]) -> tuple[float, float]:
    """Return the `colour_range` of all maps in all tiles together."""
    maps: list[Float] = []
    for picture in tiles:
        maps += picture.maps.values()
    return colour_range(np.concatenate([values.ravel() for values in maps]))


def colour_range(values: Float) -> tuple[float, float]:
    """Return the limits of the colours of values: 0 and the largest, as far as that is legible.

    If the least value is more than half of the largest the limits are the least and the largest:
    on a scale from 0 such values (of heads near uniform attention, for example) would be one
    colour. Differences below 1e-4 of the values are not stretched, as they are rounding. (0, 1)
    without a positive value.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    low = float(finite.min())
    high = float(finite.max())
    if high <= 0:
        return 0.0, 1.0
    if low > high / 2 and high - low > 1e-4 * high:
        return low, high
    return 0.0, high


def draw_tiles(
    axes: Axes,
    tiles: Tiles,
    *,
    scale: str,
    limits: tuple[float, float],
    midlines: bool = False,
) -> AxesImage:
    """Draw tiles into a panel, which loses its frame, and return the image.

    Shared colours from 0 follow the cube root: beside one head that looks at one key, all others
    would be black on a linear scale (uniform attention on 16 x 16 cells is 1 / 256 of it).

    Call it inside a function decorated with `styled`.

    Args:
        axes: an empty panel.
        tiles: the maps.
        scale: "shared" or "plain": values as they are over `limits`, coloured by their cube root
            (linearly where `limits` do not start at 0) or linearly; "head": each map over its own
            range, 0 its least and 1 its largest value.
        limits: of the colours, unless "head".
        midlines: red lines through the middle of each tile.
    """
    from matplotlib.colors import Normalize, PowerNorm

    picture = np.full(tiles.shape(), np.nan)  # NaN: gaps and places without a map
    height, width = tiles.size
    for (row, column), values in tiles.maps.items():
        top, left = tiles.corner(row, column)
        if scale == "head":
            values = stretched(values)
        picture[top : top + height, left : left + width] = values
    low, high = limits
    if scale == "head":
        norm = Normalize(0, 1)
    elif scale == "shared" and low == 0:
        norm = PowerNorm(1 / 3, low, high)
    else:
        norm = Normalize(low, high)
    image = axes.imshow(picture, origin="upper", aspect="equal", norm=norm)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, pad=2)
    columns = range(len(tiles.column_labels))
    axes.set_xticks([tiles.centre(0, c)[1] for c in columns], tiles.column_labels)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_yticks([tiles.centre(r, 0)[0] for r in range(len(tiles.row_labels))])
    axes.set_yticklabels(tiles.row_labels)
    if midlines:
        _draw_midlines(axes, tiles)
    return image


def stretched(values: Float) -> Float:
    """Return a map scaled to its own range, 0 to 1: all 0 if it is constant; NaN stays."""
    if np.isnan(values).all():
        return values
    low = np.nanmin(values)
    high = np.nanmax(values)
    if high > low:
        return (values - low) / (high - low)
    return np.where(np.isnan(values), values, 0.0)


def _draw_midlines(axes: Axes, tiles: Tiles) -> None:
    """Draw red lines through the middle of each tile, as one artist."""
    from matplotlib.collections import LineCollection

    height, width = tiles.size
    linewidth = 0.5 if len(tiles.column_labels) * width < FINE_CELLS else 0.2
    lines = []
    for row, column in tiles.maps:
        y, x = tiles.centre(row, column)
        lines.append([(x - width / 2, y), (x + width / 2, y)])
        lines.append([(x, y - height / 2), (x, y + height / 2)])
    axes.add_collection(
        LineCollection(lines, colors=MIDLINE, linewidths=linewidth, alpha=0.75)
    )


def mark_middle(axes: Axes, size: tuple[int, ...]) -> None:
    """Draw red lines through the middle of one map that `imshow` drew.

    Args:
        axes: the panel.
        size: (height, width) of the map in cells.
    """
    axes.axhline((size[0] - 1) / 2, color=MIDLINE, linewidth=0.5, alpha=0.75)
    axes.axvline((size[1] - 1) / 2, color=MIDLINE, linewidth=0.5, alpha=0.75)


def mark_cell(axes: Axes, tiles: Tiles, cell: tuple[int, int]) -> None:
    """Draw a red frame around one cell, (row, col), of every tile."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    height, width = tiles.size
    frames = []
    for row, column in tiles.maps:
        y, x = tiles.centre(row, column)
        top = y - (height - 1) / 2 + cell[0] - 0.5
        left = x - (width - 1) / 2 + cell[1] - 0.5
        frames.append(Rectangle((left, top), 1, 1))
    axes.add_collection(
        PatchCollection(frames, facecolor="none", edgecolor=MIDLINE, linewidths=0.9)
    )


def add_bar(axes: Axes, image: AxesImage, unit: str, scale: str) -> None:
    """Add the colour bar of tiles.

    Args:
        axes: their panel.
        image: what `draw_tiles` returned.
        unit: what the values are.
        scale: the scale that `draw_tiles` had.
    """
    bar = colour_bar(axes, image, bar_label(unit, scale, image.get_clim()[0]))
    if scale == "head":
        bar.set_ticks([0, 1])
        bar.set_ticklabels(["least", "most"])


def bar_label(unit: str, scale: str, low: float | None) -> str:
    """Return the label of a colour bar beside tiles.

    Args:
        unit: what the values are.
        scale: "shared", "plain" or "head".
        low: the value at which the colours start.
    """
    if scale == "head":
        return "each head scaled to its own range"
    if low:
        return f"{unit} ({NOT_FROM_ZERO})"
    if scale == "shared":
        return f"{unit} (cube-root colours)"
    return unit


# ---------------------------------------------------------------- whole figures


def draw_grid(
    table: Table,
    title: str,
    scale: str,
    unit: str,
    *,
    midlines: bool = False,
    convert: Convert | None = None,
) -> Figure:
    """Return a figure of a store's maps, one picture per map size, the largest maps on top.

    Call it inside a function decorated with `styled`.

    Args:
        table: one store's maps, with the columns row and col.
        title: title of the figure, after the store's label.
        scale: "shared": one scale for all maps, coloured by the cube root; "plain": one linear
            scale; "head": each map over its own range.
        unit: what the values are.
        midlines: whether red lines go through the middle of each map.
        convert: changes each map before it is drawn; by default maps stay as they are.
    """
    all_tiles = tile_table(table.frame, convert)
    alone = len(all_tiles) == 1 and len(all_tiles[0].maps) == 1
    limits = value_range(all_tiles)
    if alone:
        scale = "plain"
    grids = [tile_grid(tiles) for tiles in all_tiles]
    figure, boxes = stack(*grids)
    for tiles, grid, box in zip(all_tiles, grids, boxes, strict=True):
        (axes,) = grid.axes(box)
        image = draw_tiles(axes, tiles, scale=scale, limits=limits, midlines=midlines)
        if alone:
            axes.set(xticks=[], yticks=[], xlabel="")
        elif len(all_tiles) == 1:
            axes.set_xlabel("head")
        else:
            rows, columns = tiles.size
            axes.set_xlabel(f"head of the blocks with maps of {rows} x {columns}")
        add_bar(axes, image, unit, scale)
    first = table.frame.row(0, named=True)
    name = shorten(first["store"], 28)
    if alone:
        name += f", {all_tiles[0].row_labels[0]}"
        if first["head"] is not None:
            name += f" head {first['head']}"
    name_part(figure, f"{name}: {title} (n = {count(table.frame)})")
    return figure


def tile_grid(tiles: Tiles) -> PanelGrid:
    """Return the room of one picture of tiles in a figure, with tiles as large as is useful."""
    height, width = tiles.shape()
    side = LARGEST if len(tiles.maps) > 1 else ALONE
    # Ems beside the picture: row labels at 0.52 em per letter, and the colour bar.
    beside = 0.52 * max(map(len, tiles.row_labels)) + 9
    fits_width = (room() - beside) / width
    fits_height = 110 / height
    cell = min(side / max(tiles.size), fits_width, fits_height)
    panel_width = width * cell + beside
    return PanelGrid(1, width=panel_width, widest=panel_width, height=height * cell + 5)


# ------------------------------------------------------------------------------- several models


def draw_models(
    table: Table,
    title: str,
    scale: str,
    unit: str,
    *,
    midlines: bool = False,
    convert: Convert | None = None,
) -> Figure:
    """Return a figure of the maps of several stores side by side, all on one scale.

    Each store's heads are a picture of their own. Call it inside a function decorated with
    `styled`.

    Args:
        table: maps of several stores, with the columns row and col.
        title: title of the figure.
        scale: "shared", "plain" or "head", as in `draw_grid`.
        unit: what the values are.
        midlines: whether red lines go through the middle of each map.
        convert: changes each map before it is drawn; by default maps stay as they are.
    """
    models = models_of(table.frame, convert)
    limits = value_range([tiles for _, tiles in models])
    grid = models_grid([tiles for _, tiles in models])
    figure, (box,) = stack(grid)
    title = f"{title} (n = {count(table.frame)})"
    draw_side_by_side(
        box, grid, models, title, unit, scale=scale, limits=limits, midlines=midlines
    )
    return figure


def models_of(
    rows: pl.DataFrame, convert: Convert | None = None
) -> list[tuple[str, Tiles]]:
    """Return (label, tiles) of each store and map size, the stores of a group beside each other."""
    models = []
    for _, group_rows in by_group(rows):
        stores = group_rows.group_by("store", maintain_order=True)
        for (store,), store_rows in stores:
            for tiles in tile_table(store_rows, convert):
                models.append((store, tiles))
    return models


def models_grid(models: Sequence[Tiles]) -> PanelGrid:
    """Return the room of pictures of tiles side by side: as large as is useful, but legible."""
    columns = max(len(tiles.column_labels) for tiles in models)
    # Lengths in ems: what stands beside and above the tiles, and the least width of a picture.
    if max(len(tiles.maps) for tiles in models) == 1:  # one map each: no labels
        beside = 1.0
        above = 2.2
        min_width = 6.2
    else:
        beside = 3.0
        above = 4.4
        min_width = max(11.0, SMALLEST * columns + beside)
    max_across = max(1, min(len(models), int((room() - BAR) / min_width)))
    # As few on a line as the number of lines allows: 5 are 3 and 2, not 4 and 1.
    n_lines = -(-len(models) // max_across)
    across = -(-len(models) // n_lines)
    side = min((room() - BAR) / across - beside, LARGEST * columns)
    ratio = max(tiles.shape()[0] / tiles.shape()[1] for tiles in models)
    width = side + beside + BAR / across
    return PanelGrid(
        n=len(models),
        width=width,
        height=min(side * ratio, TALLEST) + above,
        widest=width,
        most=across,
        extra=1.5,
    )


def draw_side_by_side(
    box: Any,
    grid: PanelGrid,
    models: Sequence[tuple[str, Tiles]],
    title: str,
    unit: str,
    *,
    scale: str,
    limits: tuple[float, float],
    midlines: bool = False,
) -> None:
    """Draw the tiles of several models side by side, with a title that says what colours are.

    Args:
        box: a figure or a subfigure.
        grid: its panels, from `models_grid`.
        models: label and tiles of each model.
        title: text above all panels.
        unit: what the values are.
        scale: "shared", "plain" or "head", as `draw_tiles` takes it.
        limits: lowest and highest value of the colours.
        midlines: whether red lines go through the middle of each map.
    """
    panels = grid.axes(box)
    for axes, (name, tiles) in zip(panels, models, strict=True):
        # The y axis says "block", so that labels are numbers.
        numbers = [label.removeprefix("block ") for label in tiles.row_labels]
        numbered = replace(tiles, row_labels=numbers)
        image = draw_tiles(axes, numbered, scale=scale, limits=limits, midlines=midlines)
        axes.xaxis.tick_bottom()
        if len(tiles.maps) == 1:
            axes.set(xticks=[], yticks=[])
        else:
            axes.xaxis.set_label_position("bottom")
            axes.set(xlabel="head", ylabel="block")
        map_title(axes, replace(grid, width=grid.width - BAR / grid.across), name)
    bars_at_ends(grid, panels, image, "")
    name_part(box, f"{title}; colours: {bar_label(unit, scale, image.get_clim()[0])}")
