"""Small maps side by side in one picture: layers in rows, heads in columns; pictures of several
models side by side.

All tiles of one grid size are one image, so that 512 heads are drawn as fast as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from vitsee_core.tables.columns import window_of
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
GAP = 0.08  # of a tile
FINE_CELLS = 400  # across a picture, from which on lines have to be thin
MIDLINE = "#E8002B"
NOT_FROM_ZERO = "colours do not start at 0"
# ems of a tile, and of a single one
LARGEST = 8.5
ALONE = 26.0
BAR = 5.0  # ems of the colour bar with its numbers
# ems of a tile, and of all tiles of a model
SMALLEST = 0.9
TALLEST = 60.0


@dataclass(frozen=True)
class Tiles:
    """Maps of one size. maps: (row, column) -> (height, width); labels of the rows and columns."""

    maps: dict[tuple[int, int], Float]
    row_labels: list[str]
    column_labels: list[str]

    @property
    def size(self) -> tuple[int, int]:
        height, width = next(iter(self.maps.values())).shape
        return height, width

    def gaps(self) -> tuple[int, int]:
        height, width = self.size
        gap = max(1, round(GAP * max(height, width)))
        return gap, gap

    def centre(self, row: int, column: int) -> tuple[float, float]:
        """The middle of a tile in the picture, (y, x)."""
        (height, width), (down, across) = self.size, self.gaps()
        return row * (height + down) + (height - 1) / 2, column * (width + across) + (
            width - 1
        ) / 2

    def shape(self) -> tuple[int, int]:
        (height, width), (down, across) = self.size, self.gaps()
        n_rows = len(self.row_labels)
        n_columns = len(self.column_labels)
        return n_rows * (height + down) - down, n_columns * (width + across) - across


def cut_maps(rows: pl.DataFrame) -> Iterator[tuple[int, int, str, Float]]:
    """(depth, head, site, map) of each head of a table with columns row and col, by depth and head;
    a row without a head counts as head 0. The cells of a map are in the table once each."""
    filled = rows.with_columns(pl.col("head").fill_null(0))
    ordered = filled.sort("depth", "head", "row", "col", maintain_order=True)
    for (depth, site, head), own in ordered.group_by(
        "depth", "site", "head", maintain_order=True
    ):
        height = own["row"].n_unique()
        yield depth, head, str(site), own["value"].to_numpy().reshape(height, -1)


Convert = Callable[[Float, tuple[int, int] | None], Float]


def tile_table(rows: pl.DataFrame, convert: Convert | None = None) -> list[Tiles]:
    """The maps of a store, each converted by `convert` (which gets the window of its block, too),
    by grid size, the largest first; rows are the layers that have it."""
    windows = (
        dict(rows.select("site", "window").unique().iter_rows())
        if "window" in rows
        else {}
    )
    by_size: dict[tuple[int, ...], list[tuple[int, int, str, Float]]] = {}
    for entry in cut_maps(rows):
        by_size.setdefault(entry[-1].shape, []).append(entry)
    found = []
    for entries in by_size.values():
        layers = list(dict.fromkeys(site for _, _, site, _ in entries))
        heads = sorted({entry[1] for entry in entries})
        maps = {
            (layers.index(site), heads.index(h)): convert(
                values, window_of(windows.get(site))
            )
            if convert
            else values
            for _, h, site, values in entries
        }
        labels = [shorten(site_words(site), 18) for site in layers]
        found.append(Tiles(maps, labels, [str(h) for h in heads]))
    return sorted(found, key=lambda tiles: -np.prod(tiles.size))


def value_range(tiles: Sequence[Tiles]) -> tuple[float, float]:
    """The limits of colours for all tiles, see `colour_range`."""
    return colour_range(
        np.concatenate([m.ravel() for t in tiles for m in t.maps.values()])
    )


def colour_range(values: Float) -> tuple[float, float]:
    """0 and the largest value; the least and the largest where the least is more than half of the
    largest: on a scale from 0 such values, for example of heads near uniform attention, would be
    one colour. Differences below 1e-4 of the values stay invisible.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    if high <= 0:
        return 0.0, 1.0
    narrow = low > high / 2 and high - low > 1e-4 * high
    return (low if narrow else 0.0), high


def draw_tiles(
    axes: Axes,
    tiles: Tiles,
    *,
    scale: str,
    limits: tuple[float, float],
    midlines: bool = False,
) -> AxesImage:
    """Draw the tiles into `axes`, which loses its frame; returns what `imshow` returns.

    Shared colours from 0 follow the cube root: beside one head that looks at one key, all others
    would be black on a linear scale (uniform attention on 16 x 16 cells is 1 / 256 of it).

    Args:
        axes: below `styled`.
        tiles: the maps.
        scale: "shared" or "plain": values as they are over `limits`, coloured by their cube root
            (linearly where `limits` do not start at 0) or linearly; "head": each map over its own
            range, 0 its least and 1 its largest value.
        limits: of the colours, unless "head".
        midlines: red lines through the middle of each tile.
    """
    from matplotlib.colors import Normalize, PowerNorm

    whole = np.full(tiles.shape(), np.nan)
    (height, width), (down, across) = tiles.size, tiles.gaps()
    for (row, column), values in tiles.maps.items():
        top = row * (height + down)
        left = column * (width + across)
        shown = stretched(values) if scale == "head" else values
        whole[top : top + height, left : left + width] = shown
    norms = {
        "head": Normalize(0, 1),
        "plain": Normalize(*limits),
        "shared": PowerNorm(1 / 3, *limits) if limits[0] == 0 else Normalize(*limits),
    }
    image = axes.imshow(whole, origin="upper", aspect="equal", norm=norms[scale])
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
    """A map over its own range, 0 to 1; 0 where it is constant, NaN as it is."""
    if np.isnan(values).all():
        return values
    low = np.nanmin(values)
    high = np.nanmax(values)
    if high > low:
        return (values - low) / (high - low)
    return np.where(np.isnan(values), values, 0.0)


def _draw_midlines(axes: Axes, tiles: Tiles) -> None:
    from matplotlib.collections import LineCollection

    height, width = tiles.size
    thin = 0.5 if len(tiles.column_labels) * width < FINE_CELLS else 0.2
    lines = []
    for row, column in tiles.maps:
        y, x = tiles.centre(row, column)
        lines.append([(x - width / 2, y), (x + width / 2, y)])
        lines.append([(x, y - height / 2), (x, y + height / 2)])
    axes.add_collection(
        LineCollection(lines, colors=MIDLINE, linewidths=thin, alpha=0.75)
    )


def mark_middle(axes: Axes, size: tuple[int, ...]) -> None:
    """Red lines through the middle of one map of this size, drawn by `imshow`."""
    axes.axhline((size[0] - 1) / 2, color=MIDLINE, linewidth=0.5, alpha=0.75)
    axes.axvline((size[1] - 1) / 2, color=MIDLINE, linewidth=0.5, alpha=0.75)


def mark_cell(axes: Axes, tiles: Tiles, cell: tuple[int, int]) -> None:
    """A frame around one cell of every tile."""
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
    bar = colour_bar(axes, image, bar_label(unit, scale, image.get_clim()[0]))
    if scale == "head":
        bar.set_ticks([0, 1])
        bar.set_ticklabels(["least", "most"])


def bar_label(unit: str, scale: str, low: float | None) -> str:
    """The label of a colour bar beside tiles. low: where its colours start."""
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
    """The maps of a store, one picture per grid size, below one another, the largest grid first.

    Call it inside a function decorated with `styled`.

    Args:
        table: with columns row and col.
        title: of the figure, after the store's label.
        scale: see `draw_tiles`.
        unit: what the values are.
        midlines: see `draw_tiles`.
        convert: map -> what is drawn; by default the map itself.
    """
    all_tiles = tile_table(table.frame, convert)
    alone = len(all_tiles) == 1 and len(all_tiles[0].maps) == 1
    limits = value_range(all_tiles)
    if alone:
        scale = "plain"
    grids = [tile_grid(tiles) for tiles in all_tiles]
    figure, parts = stack(*grids)
    for tiles, grid, part in zip(all_tiles, grids, parts, strict=True):
        (axes,) = grid.axes(part)
        image = draw_tiles(axes, tiles, scale=scale, limits=limits, midlines=midlines)
        rows, columns = tiles.size
        of = (
            ""
            if len(all_tiles) == 1
            else f" of the blocks with maps of {rows} x {columns}"
        )
        axes.set_xlabel(f"head{of}")
        if alone:
            axes.set(xticks=[], yticks=[], xlabel="")
        add_bar(axes, image, unit, scale)
    first = table.frame.row(0, named=True)
    who = shorten(first["store"], 28)
    if alone:
        head = "" if first["head"] is None else f" head {first['head']}"
        who = f"{who}, {all_tiles[0].row_labels[0]}{head}"
    name_part(figure, f"{who}: {title} (n = {count(table.frame)})")
    return figure


def tile_grid(tiles: Tiles) -> PanelGrid:
    """The room of one picture of tiles in a figure: tiles as large as is useful."""
    height, width = tiles.shape()
    side = LARGEST if len(tiles.maps) > 1 else ALONE
    around = 0.52 * max(map(len, tiles.row_labels)) + 9
    cell = min(side / max(tiles.size), (room() - around) / width, 110 / height)
    whole = width * cell + around
    return PanelGrid(1, width=whole, widest=whole, height=height * cell + 5)


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
    """The maps of several stores side by side on one scale, each store's heads in a picture of its
    own. Call it inside a function decorated with `styled`; arguments: see `draw_grid`."""
    models = models_of(table.frame, convert)
    limits = value_range([tiles for _, tiles in models])
    grid = models_grid([tiles for _, tiles in models])
    figure, (part,) = stack(grid)
    title = f"{title} (n = {count(table.frame)})"
    draw_side_by_side(
        part, grid, models, title, unit, scale=scale, limits=limits, midlines=midlines
    )
    return figure


def models_of(
    rows: pl.DataFrame, convert: Convert | None = None
) -> list[tuple[str, Tiles]]:
    """(label, tiles) of each store and grid size, the stores of a group beside each other."""
    return [
        (store, tiles)
        for _, of_group in by_group(rows)
        for (store,), own in of_group.group_by("store", maintain_order=True)
        for tiles in tile_table(own, convert)
    ]


def models_grid(models: Sequence[Tiles]) -> PanelGrid:
    """The room of pictures of tiles side by side: as large as is useful, as small as is legible."""
    columns = max(len(tiles.column_labels) for tiles in models)
    beside = (
        1.0 if max(len(tiles.maps) for tiles in models) == 1 else 3.0
    )  # of blocks' numbers
    least = 6.2 if beside == 1 else max(11.0, SMALLEST * columns + beside)
    across = max(1, min(len(models), int((room() - BAR) / least)))
    across = -(-len(models) // -(-len(models) // across))  # lines of about equal length
    side = min((room() - BAR) / across - beside, LARGEST * columns)
    ratio = max(tiles.shape()[0] / tiles.shape()[1] for tiles in models)
    width = side + beside + BAR / across
    height = min(side * ratio, TALLEST) + (2.2 if beside == 1 else 4.4)
    return PanelGrid(len(models), width, height, width, most=across, extra=1.5)


def draw_side_by_side(
    part: Any,
    grid: PanelGrid,
    models: Sequence[tuple[str, Tiles]],
    title: str,
    unit: str,
    *,
    scale: str,
    limits: tuple[float, float],
    midlines: bool = False,
) -> None:
    """(name, tiles) of each model in a part of a figure, the title above them with what colours
    are; the rest: see `draw_tiles`."""
    every = grid.axes(part)
    for axes, (name, tiles) in zip(every, models, strict=True):
        numbered = Tiles(
            tiles.maps,
            [label.removeprefix("block ") for label in tiles.row_labels],
            tiles.column_labels,
        )
        image = draw_tiles(axes, numbered, scale=scale, limits=limits, midlines=midlines)
        axes.xaxis.tick_bottom()
        if len(tiles.maps) == 1:
            axes.set(xticks=[], yticks=[])
        else:
            axes.xaxis.set_label_position("bottom")
            axes.set(xlabel="head", ylabel="block")
        map_title(axes, replace(grid, width=grid.width - BAR / grid.across), name)
    bars_at_ends(grid, every, image, "")
    name_part(part, f"{title}; colours: {bar_label(unit, scale, image.get_clim()[0])}")
