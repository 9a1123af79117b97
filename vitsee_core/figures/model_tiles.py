"""Maps of heads of several models side by side: each model's layers in rows, heads in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.head_tiles import (
    LARGEST,
    Convert,
    Tiles,
    bar_label,
    draw_tiles,
    tile_table,
    value_range,
)
from vitsee_core.figures.panels import Grid, bars_at_ends, count, map_title, name_part, room, stack
from vitsee_core.tables.groups import by_group

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

BAR = 5.0  # ems of the colour bar with its numbers
SMALLEST, TALLEST = 0.9, 60.0  # ems of a tile, and of all tiles of a model


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


def models_of(rows: pl.DataFrame, convert: Convert | None = None) -> list[tuple[str, Tiles]]:
    """(label, tiles) of each store and grid size, the stores of a group beside each other."""
    return [
        (store, tiles)
        for _, of_group in by_group(rows)
        for (store,), own in of_group.group_by("store", maintain_order=True)
        for tiles in tile_table(own, convert)
    ]


def models_grid(models: Sequence[Tiles]) -> Grid:
    """The room of pictures of tiles side by side: as large as is useful, as small as is legible."""
    columns = max(len(tiles.column_labels) for tiles in models)
    beside = 1.0 if max(len(tiles.maps) for tiles in models) == 1 else 3.0  # of blocks' numbers
    least = 6.2 if beside == 1 else max(11.0, SMALLEST * columns + beside)
    across = max(1, min(len(models), int((room() - BAR) / least)))
    across = -(-len(models) // -(-len(models) // across))  # lines of about equal length
    side = min((room() - BAR) / across - beside, LARGEST * columns)
    ratio = max(tiles.shape()[0] / tiles.shape()[1] for tiles in models)
    width = side + beside + BAR / across
    height = min(side * ratio, TALLEST) + (2.2 if beside == 1 else 4.4)
    return Grid(len(models), width, height, width, most=across, extra=1.5)


def draw_side_by_side(
    part: Any,
    grid: Grid,
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
            tiles.maps, [label.removeprefix("block ") for label in tiles.row_labels],
            tiles.column_labels,
        )  # fmt: skip
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
