"""The figure of single images: each one's picture, rollouts, and heads' maps of each query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from vitsee_core.figures.head_tiles import (
    Tiles,
    add_bar,
    cut_maps,
    draw_tiles,
    mark_cell,
    tile_grid,
    tile_table,
    value_range,
)
from vitsee_core.figures.panels import Grid, map_axes, name_part, small, stack
from vitsee_core.figures.plotting import GREY
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_stores.token_selection import parse_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table

ROLLOUTS = {"rollout": "rollout", "rollout_no_residual": "without residual term"}


def draw_images(table: Table, scale: str) -> Figure:
    """One line of panels per image: its picture, the rollouts over it, the heads' maps of each
    query (tiles; layers in rows and heads in columns where there are several layers, else the
    layer's heads wrapped). Of several stores see `draw_models_of_images`. Call it inside a function
    decorated with `styled`."""
    store = table.frame["store"][0]
    lines = [
        (picture_of(table.notes, store, image), shorten(image, 26), own, _queries(own))
        for (image,), own in table.frame.group_by("image", maintain_order=True)
    ]
    rollouts = [m for m in ROLLOUTS if m in table["metric"]]
    pictures = Grid(1 + len(rollouts), width=10, height=13, widest=13)
    grids = [g for *_, queries in lines for g in (pictures, *(tile_grid(q[1]) for q in queries))]
    figure, parts = stack(*grids)
    left = iter(parts)
    for picture, name, own, queries in lines:
        every = pictures.axes(next(left))
        show_picture(every[0], picture, name)
        for axes, metric in zip(every[1:], rollouts, strict=True):
            rolled = own.filter(metric=metric)
            if len(rolled):
                show_rollout(axes, rolled, picture, ROLLOUTS[metric])
            else:
                axes.set_axis_off()
        for token, tiles, numbered in queries:
            part = next(left)
            (axes,) = tile_grid(tiles).axes(part)
            where = f" in {site_words(own['site'][0])}" if numbered else ""
            name_part(part, f"attention of the {token_words(token)}{where}, by head")
            drawn = draw_tiles(axes, tiles, scale=scale, limits=value_range([tiles]))
            if (cell := parse_cell(token)) is not None:
                mark_cell(axes, tiles, cell)
            add_bar(axes, drawn, "attention", scale)
            if numbered:
                _number_heads(axes, tiles, numbered)
    return figure


def _queries(own: pl.DataFrame) -> list[tuple[str, Tiles, list[int]]]:
    """(token, its tiles, the heads' numbers where one layer's heads are wrapped) of one image."""
    heads = own.filter(metric="attention")
    by_token = heads.partition_by("token", maintain_order=True, as_dict=True).items()
    if heads["depth"].n_unique() > 1:
        return [(token, tiles, []) for (token,), maps in by_token for tiles in tile_table(maps)]
    return [
        (token, _wrapped(tile_table(maps)[0]), maps["head"].unique(maintain_order=True).to_list())
        for (token,), maps in by_token
    ]


def _wrapped(tiles: Tiles) -> Tiles:
    """One layer's heads in lines of about equal length."""
    n_columns = math.ceil(math.sqrt(len(tiles.maps)))
    placed = {divmod(i, n_columns): values for i, values in enumerate(tiles.maps.values())}
    return Tiles(placed, [""] * -(-len(placed) // n_columns), [""] * n_columns)


def picture_of(notes: Mapping[str, Any], store: str, image: str) -> NDArray[np.uint8] | None:
    """The image as a store's model saw it, from the notes; None where it could not be read."""
    own = notes.get("stores", {}).get(store, {})
    encoded = own.get("pictures", notes.get("pictures", {})).get(image)
    return None if encoded is None else decode(encoded)


def _plain(axes: Axes, title: str) -> None:
    map_axes(axes)
    axes.set_frame_on(False)
    axes.set_title(title)


def show_picture(axes: Axes, picture: NDArray[np.uint8] | None, title: str) -> None:
    _plain(axes, title)
    if picture is None:
        axes.text(0.5, 0.5, "no picture", ha="center", va="center", color=GREY)
        axes.set_aspect("equal")
        return
    axes.imshow(picture, origin="upper")


def show_rollout(
    axes: Axes, rows: pl.DataFrame, picture: NDArray[np.uint8] | None, title: str
) -> None:
    """The rollout over the grey picture, enlarged smoothly: its smallest value dark, its largest
    bright."""
    _plain(axes, title)
    ((_, _, _, values),) = cut_maps(rows)
    low, high = float(values.min()), float(values.max())
    axes.set_xlabel(f"{low:.3g} to {high:.3g}", fontsize=small())
    height, width = values.shape if picture is None else picture.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    look: dict[str, Any] = {"origin": "upper", "extent": extent}
    if picture is not None:
        axes.imshow(picture.mean(-1), cmap="gray", vmin=0, vmax=255, **look)
    look |= {"interpolation": "bilinear", "alpha": 0.65 if picture is not None else 1}
    axes.imshow(values, cmap="inferno", **look)


def _number_heads(axes: Axes, tiles: Tiles, heads: list[int]) -> None:
    """Write each head's number in the corner of its tile."""
    from matplotlib.patheffects import withStroke

    height, width = tiles.size
    outline = [withStroke(linewidth=1.2, foreground="black")]
    look: dict[str, Any] = {"color": "white", "fontsize": small(), "va": "top"}
    for (row, column), head in zip(tiles.maps, heads, strict=True):
        y, x = tiles.centre(row, column)
        axes.text(x - width * 0.46, y - height * 0.46, str(head), path_effects=outline, **look)
