"""The figures of single images: each one's picture, rollouts, and heads' maps of each query; of
several models, images by models, or each model's heads side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.head_tiles import (
    BAR,
    Tiles,
    add_bar,
    bar_label,
    cut_maps,
    draw_side_by_side,
    draw_tiles,
    mark_cell,
    models_grid,
    models_of,
    tile_grid,
    tile_table,
    value_range,
)
from vitsee_core.figures.panels import (
    PanelGrid,
    colour_bar,
    map_axes,
    map_title,
    name_part,
    room,
    small,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import GREY
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.tables.groups import by_group
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_core.types import pl
from vitsee_stores.selectors import parse_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLLOUTS = {"rollout": "rollout", "rollout_no_residual": "without residual term"}
UNIT = "attention"
PICTURE = ["store", "image", "query"]  # columns that tell pictures of maps apart
# The query of a model where no cell is asked for: the class token, or the mean over patches. One
# name, so that models with and without a class token stand side by side.
MODEL_QUERY = "own"
# Widths of a map in ems.
MIN_WIDTH = 5.4
MAX_WIDTH = 9.0
MAX_STRIPS = (
    24  # of a store, a clip and a query; of more these blocks and heads are drawn
)
N_LAYERS = 6
N_HEADS = 4


def draw_images(table: Table, scale: str) -> Figure:
    """Draw one line of panels per image of one store: its picture, the rollouts over it, and the
    heads' maps of each query.

    The maps have layers in rows and heads in columns if there are several layers; the heads of a
    single layer are wrapped into lines. Call it inside a function decorated with `styled`.

    Args:
        table: of single images and one store, with their pictures in its notes.
        scale: "shared": one scale for all heads of an image, or "head": each over its own range.
    """
    store = table.frame["store"][0]
    rollouts = [metric for metric in ROLLOUTS if metric in table["metric"]]
    picture_grid = PanelGrid(1 + len(rollouts), width=10, height=13, widest=13)
    # Sizes first, as a figure is made for all its panels; then the panels, in the same order.
    images = table.frame.partition_by("image", maintain_order=True)
    queries_by_image = [_query_tiles(rows) for rows in images]
    grids: list[PanelGrid] = []
    for queries in queries_by_image:
        grids.append(picture_grid)
        grids += [tile_grid(query.tiles) for query in queries]
    figure, boxes = stack(*grids)
    next_box = iter(boxes)
    for rows, queries in zip(images, queries_by_image, strict=True):
        image = rows["image"][0]
        picture = picture_of(table.notes, store, image)
        first, *others = picture_grid.axes(next(next_box))
        show_picture(first, picture, shorten(image, 26))
        for axes, metric in zip(others, rollouts, strict=True):
            rollout_rows = rows.filter(metric=metric)
            if len(rollout_rows):
                show_rollout(axes, rollout_rows, picture, ROLLOUTS[metric])
            else:
                axes.set_axis_off()
        for query in queries:
            box = next(next_box)
            (axes,) = tile_grid(query.tiles).axes(box)
            title = f"attention of the {token_words(query.token)}"
            if query.is_single_layer:
                title += f" in {site_words(rows['site'][0])}"
            name_part(box, f"{title}, by head")
            limits = value_range([query.tiles])
            drawn = draw_tiles(axes, query.tiles, scale=scale, limits=limits)
            cell = parse_cell(query.token)
            if cell is not None:
                mark_cell(axes, query.tiles, cell)
            add_bar(axes, drawn, "attention", scale)
            if query.is_single_layer:
                _number_heads(axes, query.tiles, query.heads)
    return figure


class QueryTiles(NamedTuple):
    """The maps of one query of an image.

    Attributes:
        token: name of the query.
        tiles: the maps; the heads of a single layer are wrapped into lines.
        heads: numbers of a single layer's heads, in the tiles' order; [] for several layers.
    """

    token: str
    tiles: Tiles
    heads: list[int]

    @property
    def is_single_layer(self) -> bool:
        """Whether the maps are of one layer."""
        return len(self.heads) > 0


def _query_tiles(rows: pl.DataFrame) -> list[QueryTiles]:
    """Return the maps of each query of one image.

    Of several layers there is an entry for each grid of tokens, as tiles have one size.

    rows: about one image and store.
    """
    heads = rows.filter(metric="attention")
    by_token = heads.partition_by("token", maintain_order=True, as_dict=True)
    has_several_layers = heads["depth"].n_unique() > 1
    queries = []
    for (token,), maps in by_token.items():
        if has_several_layers:
            queries += [QueryTiles(token, tiles, []) for tiles in tile_table(maps)]
        else:
            tiles = _wrapped(tile_table(maps)[0])
            numbers = maps["head"].unique(maintain_order=True).to_list()
            queries.append(QueryTiles(token, tiles, numbers))
    return queries


def _wrapped(tiles: Tiles) -> Tiles:
    """Return the heads of one layer in lines of about equal length."""
    n_columns = math.ceil(math.sqrt(len(tiles.maps)))
    maps = {divmod(i, n_columns): values for i, values in enumerate(tiles.maps.values())}
    n_lines = math.ceil(len(maps) / n_columns)
    # Names of layers and heads would not be of a line or column: they stand in the tiles.
    return Tiles(maps, [""] * n_lines, [""] * n_columns)


def picture_of(
    notes: Mapping[str, Any], store: str, image: str
) -> NDArray[np.uint8] | None:
    """Return the image as a store's model saw it; None if it could not be read.

    Args:
        notes: of the table. Of several stores each has its pictures under `stores`.
        store: its label.
        image: its id.
    """
    store_notes = notes.get("stores", {}).get(store, {})
    encoded = store_notes.get("pictures", notes.get("pictures", {})).get(image)
    return None if encoded is None else decode(encoded)


def _prepare_picture_axes(axes: Axes, title: str) -> None:
    """Set the title of a panel, and remove its ticks and frame."""
    map_axes(axes)
    axes.set_frame_on(False)
    axes.set_title(title)


def show_picture(axes: Axes, picture: NDArray[np.uint8] | None, title: str) -> None:
    """Show a picture in a panel, or say that there is none."""
    _prepare_picture_axes(axes, title)
    if picture is None:
        axes.text(0.5, 0.5, "no picture", ha="center", va="center", color=GREY)
        axes.set_aspect("equal")
        return
    axes.imshow(picture, origin="upper")


def show_rollout(
    axes: Axes, rows: pl.DataFrame, picture: NDArray[np.uint8] | None, title: str
) -> None:
    """Show a rollout over the grey picture, enlarged smoothly.

    Args:
        axes: the panel.
        rows: the rollout of one image and store; its smallest value is dark, its largest bright.
        picture: what the model saw; without it the rollout is shown alone.
        title: text above the panel.
    """
    _prepare_picture_axes(axes, title)
    ((_, _, _, values),) = cut_maps(rows)
    # The range stands below, as it differs from image to image.
    low = float(values.min())
    high = float(values.max())
    axes.set_xlabel(f"{low:.3g} to {high:.3g}", fontsize=small())
    height, width = values.shape if picture is None else picture.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    look: dict[str, Any] = {"origin": "upper", "extent": extent}
    if picture is not None:
        axes.imshow(picture.mean(-1), cmap="gray", vmin=0, vmax=255, **look)
    look |= {"interpolation": "bilinear", "alpha": 0.65 if picture is not None else 1}
    axes.imshow(values, cmap="inferno", **look)


def _number_heads(axes: Axes, tiles: Tiles, heads: list[int]) -> None:
    """Write each head's number in the corner of its tile, white with a black outline.

    heads: the numbers, in the tiles' order.
    """
    from matplotlib.patheffects import withStroke

    height, width = tiles.size
    outline = [withStroke(linewidth=1.2, foreground="black")]
    look: dict[str, Any] = {"color": "white", "fontsize": small(), "va": "top"}
    for (row, column), head in zip(tiles.maps, heads, strict=True):
        y, x = tiles.centre(row, column)
        axes.text(
            x - width * 0.46, y - height * 0.46, str(head), path_effects=outline, **look
        )


def draw_models_of_images(table: Table, scale: str) -> Figure:
    """Draw the single images of several stores.

    With one map per store, image and query: a line per image, its picture and a column per store
    (Walmer et al. 2023, Fig. 13); the rollouts, which are of no head, are in the table alone. With
    more: per image its picture with each store's rollout, then each store's heads side by side
    (Figs. 11, 12). Call it inside a function decorated with `styled`.
    """
    heads = table.frame.filter(metric=UNIT)
    queries = {}
    for token in heads["token"].unique():
        queries[token] = token if parse_cell(token) is not None else MODEL_QUERY
    query = pl.col("token").cast(pl.String)
    heads = heads.with_columns(
        query=query.replace_strict(queries, return_dtype=pl.String)
    )
    n_maps = heads.select(*PICTURE, "depth", "head").n_unique()
    n_pictures = heads.select(PICTURE).n_unique()
    if n_maps == n_pictures:
        return _draw_images_by_models(heads, table.notes, scale)
    return _draw_heads_of_models(table, heads, scale)


def _draw_images_by_models(
    heads: pl.DataFrame, notes: Mapping[str, Any], scale: str
) -> Figure:
    """Draw one map per image and store: for each query lines of a picture and its maps.

    Args:
        heads: rows with a column `query`, one map for each store, image and query.
        notes: of the table, with the pictures.
        scale: "shared" or "head".
    """
    stores: list[str] = []
    for _, rows in by_group(heads):
        stores += rows["store"].unique(maintain_order=True).to_list()
    images = heads["image"].unique(maintain_order=True)
    # As many stores beside a picture as fit, in lines of about equal length.
    max_across = max(1, int((room() - BAR) / MIN_WIDTH) - 1)
    n_lines = math.ceil(len(stores) / max_across)
    across = math.ceil(len(stores) / n_lines)
    # A part of the figure for each query and line of stores, with all images below one another.
    parts = []
    for query in heads["query"].unique(maintain_order=True):
        for start in range(0, len(stores), across):
            parts.append((query, stores[start : start + across]))
    n_columns = 1 + across  # the picture, and a map per store
    side = min((room() - BAR) / n_columns, MAX_WIDTH)
    width = side + BAR / n_columns
    grid = PanelGrid(
        n_columns * len(images),
        width=width,
        height=side + 0.8,
        widest=width,
        most=n_columns,
        extra=3.0,
    )
    figure, boxes = stack(*[grid] * len(parts))
    rows_by_picture = heads.partition_by(PICTURE, maintain_order=True, as_dict=True)
    tiles_by_picture = {key: tile_table(rows) for key, rows in rows_by_picture.items()}
    limits = value_range(
        [tiles for picture in tiles_by_picture.values() for tiles in picture]
    )
    for (query, part_stores), box in zip(parts, boxes, strict=True):
        panels = grid.axes(box)
        for i, image in enumerate(images):
            first, *others = panels[n_columns * i : n_columns * (i + 1)]
            show_picture(first, picture_of(notes, part_stores[0], image), "")
            for axes in others[len(part_stores) :]:
                axes.set_visible(False)
            # Not strict: the last line may have fewer stores than columns.
            for axes, store in zip(others, part_stores, strict=False):
                (tiles,) = tiles_by_picture[store, image, query]
                drawn = draw_tiles(axes, tiles, scale=scale, limits=limits)
                axes.set(xticks=[], yticks=[])
                if i == 0:
                    map_title(axes, grid, store)
        low, high = drawn.get_clim()
        bar = colour_bar(panels[len(part_stores)], drawn, "", ticks=[low, high])
        bar.ax.set_yticklabels([f"{low:.2g}", f"{high:.2g}"])
        label = bar_label(UNIT, scale, low)
        name_part(box, f"{_describe_maps(heads.filter(query=query))}; colours: {label}")
    return figure


def _describe_maps(rows: pl.DataFrame) -> str:
    """Return what some maps show, as `attention of the class token, block 11 head 0`.

    The block and head are named where all models show the same.
    """
    shown_heads = rows.select("site", "head").unique(maintain_order=True)
    site, head = shown_heads.row(0)
    where = ", a head of each"
    if len(shown_heads) == 1:
        where = f", {site_words(site)} head {head}"
    return f"{_query_words(rows)}{where}"


def _query_words(rows: pl.DataFrame) -> str:
    """Return the queries of some rows in words, as `attention of the class token`."""
    words = [token_words(token) for token in rows["token"].unique(maintain_order=True)]
    return f"attention of the {' or '.join(words)}"


def _draw_heads_of_models(table: Table, heads: pl.DataFrame, scale: str) -> Figure:
    """Draw, for each image, its picture with each store's rollout, and below it for each query the
    heads of the stores side by side.

    Args:
        table: of single images and several stores.
        heads: its rows about heads, with a column `query`.
        scale: "shared" or "head".
    """
    rollouts = table.frame.filter(metric=next(iter(ROLLOUTS)))
    images = heads.partition_by("image", maintain_order=True)
    grids: list[PanelGrid] = []
    all_tiles: list[Tiles] = []
    for image_rows in images:
        image_rollouts = rollouts.filter(image=image_rows["image"][0])
        grids.append(small_maps(1 + image_rollouts["store"].n_unique(), 4))
        for query_rows in image_rows.partition_by("query", maintain_order=True):
            tiles = [model_tiles for _, model_tiles in models_of(query_rows)]
            grids.append(models_grid(tiles))
            all_tiles += tiles
    figure, boxes = stack(*grids)
    limits = value_range(all_tiles)
    next_grid_and_box = iter(zip(grids, boxes, strict=True))
    for image_rows in images:
        image = image_rows["image"][0]
        grid, box = next(next_grid_and_box)
        first, *others = grid.axes(box)
        show_picture(first, picture_of(table.notes, image_rows["store"][0], image), "")
        map_title(first, grid, image)
        by_store = rollouts.filter(image=image).partition_by("store", maintain_order=True)
        for axes, store_rows in zip(others, by_store, strict=True):
            store = store_rows["store"][0]
            show_rollout(axes, store_rows, picture_of(table.notes, store, image), "")
            map_title(axes, grid, store)
        name_part(box, f"{shorten(image, 26)}, and the rollouts of each model over it")
        for query_rows in image_rows.partition_by("query", maintain_order=True):
            grid, box = next(next_grid_and_box)
            draw_side_by_side(
                box,
                grid,
                models_of(query_rows),
                f"{_query_words(query_rows)}, by head",
                UNIT,
                scale=scale,
                limits=limits,
            )
    return figure
