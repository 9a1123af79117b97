"""The figures of single images and of clips.

Images: each one's picture, rollouts, and heads' maps of each query; of several models, images by
models, or each model's heads side by side. Clips: a strip over time for each head; of single clips
below their frames, with the rollout first and the strips of each query below one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, ClipStrip
from vitsee_core.figures.head_tiles import (
    BAR,
    Tiles,
    add_bar,
    bar_label,
    colour_range,
    cut_maps,
    draw_side_by_side,
    draw_tiles,
    mark_cell,
    models_grid,
    models_of,
    stretched,
    tile_grid,
    tile_table,
    value_range,
)
from vitsee_core.figures.panels import (
    PanelGrid,
    colour_bar,
    count,
    evenly,
    map_axes,
    map_title,
    name_part,
    room,
    small,
    small_maps,
    stack,
)
from vitsee_core.figures.patch_sheets import place_values, places_in
from vitsee_core.figures.plotting import GREY
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.tables.groups import by_group
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_core.types import Float, pl
from vitsee_stores.selectors import parse_cell, parse_place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLLOUTS = {"rollout": "rollout", "rollout_no_residual": "without residual term"}
# ems of a map
SMALLEST = 5.4
LARGEST = 9.0
UNIT = "attention"
PICTURE = ["store", "image", "query"]
OWN = "own"  # the query of a model where no cell is asked for
MOST = 24  # strips of a store, an image and a query
# drawn of each where there are more
LAYERS = 6
HEADS = 4
ROLLOUT = "rollout"


def draw_images(table: Table, scale: str) -> Figure:
    """Draw one line of panels per image of one store: its picture, the rollouts over it, and the
    heads' maps of each query.

    The maps have layers in rows and heads in columns if there are several layers; the heads of a
    single layer are wrapped into lines. Call it inside a function decorated with `styled`.
    """
    store = table.frame["store"][0]
    rollouts = [metric for metric in ROLLOUTS if metric in table["metric"]]
    picture_grid = PanelGrid(1 + len(rollouts), width=10, height=13, widest=13)
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
            if query.heads:
                title += f" in {site_words(rows['site'][0])}"
            name_part(box, f"{title}, by head")
            limits = value_range([query.tiles])
            drawn = draw_tiles(axes, query.tiles, scale=scale, limits=limits)
            cell = parse_cell(query.token)
            if cell is not None:
                mark_cell(axes, query.tiles, cell)
            add_bar(axes, drawn, "attention", scale)
            if query.heads:
                _number_heads(axes, query.tiles, query.heads)
    return figure


class QueryTiles(NamedTuple):
    """The maps of one query of an image."""

    token: str
    tiles: Tiles
    heads: list[
        int
    ]  # numbers of the heads of a single layer, wrapped into lines; else empty


def _query_tiles(rows: pl.DataFrame) -> list[QueryTiles]:
    """Return the maps of each query of one image."""
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
    placed = {
        divmod(i, n_columns): values for i, values in enumerate(tiles.maps.values())
    }
    return Tiles(placed, [""] * -(-len(placed) // n_columns), [""] * n_columns)


def picture_of(
    notes: Mapping[str, Any], store: str, image: str
) -> NDArray[np.uint8] | None:
    """Return the image as a store's model saw it, from the notes; None if it could not be read."""
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
    """Show a rollout over the grey picture, enlarged smoothly: its smallest value dark, its largest
    bright."""
    _prepare_picture_axes(axes, title)
    ((_, _, _, values),) = cut_maps(rows)
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
    """Write each head's number in the corner of its tile."""
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
    """One map per store, image and query: a line per image, its picture and a column per store
    (Walmer et al. 2023, Fig. 13); the rollouts, which are of no head, are in the table alone. Of
    more: per image its picture with each store's rollout, then each store's heads side by side
    (Figs. 11, 12). Call it inside a function decorated with `styled`."""
    heads = table.frame.filter(metric=UNIT)
    queries = {
        t: t if parse_cell(t) is not None else OWN for t in heads["token"].unique()
    }
    token = pl.col("token").cast(pl.String)
    heads = heads.with_columns(
        query=token.replace_strict(queries, return_dtype=pl.String)
    )
    one_each = (
        heads.select(*PICTURE, "depth", "head").n_unique()
        == heads.select(PICTURE).n_unique()
    )
    if one_each:
        return _draw_images_by_models(heads, table.notes, scale)
    return _draw_heads_of_models(table, heads, scale)


def _draw_images_by_models(
    heads: pl.DataFrame, notes: Mapping[str, Any], scale: str
) -> Figure:
    stores = [
        s
        for _, rows in by_group(heads)
        for s in rows["store"].unique(maintain_order=True)
    ]
    most = max(1, int((room() - BAR) / SMALLEST) - 1)  # beside the picture
    n_lines = -(-len(stores) // most)
    across = -(-len(stores) // n_lines)  # lines of about equal length
    lines = [
        (query, stores[i : i + across])
        for query in heads["query"].unique(maintain_order=True)
        for i in range(0, len(stores), across)
    ]
    images = heads["image"].unique(maintain_order=True)
    side = min((room() - BAR) / (1 + across), LARGEST)
    width = side + BAR / (1 + across)
    n = 1 + across
    grid = PanelGrid(n * len(images), width, side + 0.8, width, most=n, extra=3.0)
    figure, parts = stack(*[grid] * len(lines))
    every_picture = heads.partition_by(PICTURE, maintain_order=True, as_dict=True)
    tiles_of = {key: tile_table(own) for key, own in every_picture.items()}
    limits = value_range([tiles for every in tiles_of.values() for tiles in every])
    for (query, some), part in zip(lines, parts, strict=True):
        every = grid.axes(part)
        for i, image in enumerate(images):
            line = every[n * i : n * (i + 1)]
            show_picture(line[0], picture_of(notes, some[0], image), "")
            for axes in line[1 + len(some) :]:
                axes.set_visible(False)
            for axes, store in zip(line[1:], some, strict=False):
                (tiles,) = tiles_of[store, image, query]
                drawn = draw_tiles(axes, tiles, scale=scale, limits=limits)
                axes.set(xticks=[], yticks=[])
                if not i:
                    map_title(axes, grid, store)
        low, high = drawn.get_clim()
        label = bar_label(UNIT, scale, low)
        bar = colour_bar(every[len(some)], drawn, "", ticks=[low, high])
        bar.ax.set_yticklabels([f"{low:.2g}", f"{high:.2g}"])
        name_part(part, f"{_named(heads.filter(query=query))}; colours: {label}")
    return figure


def _named(rows: pl.DataFrame) -> str:
    """The title of a part, as `attention of the class token, block 11 head 0`; the block and head
    are named where all models show the same."""
    places = rows.select("site", "head").unique(maintain_order=True)
    site, head = places.row(0)
    where = (
        f", {site_words(site)} head {head}" if len(places) == 1 else ", a head of each"
    )
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
    next_part = iter(zip(grids, boxes, strict=True))
    for image_rows in images:
        image = image_rows["image"][0]
        grid, box = next(next_part)
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
            grid, box = next(next_part)
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


def draw_clips(table: Table, scale: str, titles: Mapping[str, str]) -> Figure:
    """A strip per store, block and head; of a single clip below its frames. Of many heads evenly
    spaced ones of evenly spaced blocks. Rollouts are over their own range, as they are of another
    size; of single clips the one with residual term. Call it inside a function decorated with
    `styled`.

    Args:
        table: of `attn-map`, with a column `frame`.
        scale: "shared": one scale for all heads, or "head": each over its own range.
        titles: what the kinds of maps are called.
    """
    rows = table.frame
    single = "image" in rows.columns
    lines: list[ClipLine] = []
    caption: list[str] = []
    if single:
        metric = UNIT
        for (image,), own in rows.group_by("image", maintain_order=True):
            lines += _of_clip(str(image), own, scale, caption)
        title = "attention to the patches of each frame, by block and head; rollout: own range"
    else:
        metric = str(rows["metric"][0])
        lines.append(ClipLine("", "", _strips(rows, scale, caption)))
        title = f"{titles[metric]}, n = {count(rows)}"
    values = [
        strip.values for line in lines for strip in line.strips if strip.title != ROLLOUT
    ]
    look, bar = _look(values, scale)
    caption = [title, *dict.fromkeys(caption)]
    notes = _sheet(table.notes) if single else table.notes
    return ClipSheet(lines, notes, caption, look, bar, photos=single).draw()


def _sheet(notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The notes on the clips; with several stores those of the first."""
    if "sheet" in notes:
        found: Mapping[str, Any] = notes["sheet"]
        return found
    return next(
        (own["sheet"] for own in notes.get("stores", {}).values() if "sheet" in own), {}
    )


def _of_clip(
    image: str, rows: pl.DataFrame, scale: str, caption: list[str]
) -> list[ClipLine]:
    """A line for the rollouts and each query of one clip."""
    lines = []
    heads = rows.filter(metric=UNIT)
    for (token,), own in heads.group_by("token", maintain_order=True):
        cell = parse_place(str(token))
        strips = _strips(own, scale, caption, cell)
        mark = None
        if cell is not None:
            shape = _shape(own)
            mark = tuple((place + 0.5) / n for place, n in zip(cell, shape, strict=True))
        elif len(rolled := rows.filter(metric=ROLLOUT)):
            strips = [*_rollouts(rolled, strips), *strips]
        words = f"{image}: attention of the {token_words(str(token))}"
        lines.append(ClipLine(image, words, strips, mark))  # type: ignore[arg-type]
    return lines


def _rollouts(rows: pl.DataFrame, heads: Sequence[ClipStrip]) -> list[ClipStrip]:
    """The rollout of each store, over the range of the drawn heads."""
    top = max((float(np.nanmax(strip.values)) for strip in heads), default=1.0)
    return [
        ClipStrip(str(own["store"][0]), ROLLOUT, stretched(_values(own)) * top)
        for own in rows.partition_by("store", maintain_order=True)
    ]


def _strips(
    rows: pl.DataFrame, scale: str, caption: list[str], cell: Sequence[int] | None = None
) -> list[ClipStrip]:
    """A strip per store, block and head."""
    found = []
    for own in rows.partition_by("store", maintain_order=True):
        places = own.select("site", "head").unique(maintain_order=True)
        sites = places["site"].unique(maintain_order=True).to_list()
        heads = sorted(places["head"].drop_nulls().unique())
        if len(places) > MOST:
            sites = evenly(sites, LAYERS)
            heads = evenly(heads, HEADS)
            caption.append("evenly spaced blocks and heads; the table has all")
        of_head = own.partition_by("site", "head", as_dict=True, maintain_order=True)
        for (site, head), maps in of_head.items():
            if site not in sites or (head is not None and head not in heads):
                continue
            values = _values(maps)
            name = site_words(str(site)) + ("" if head is None else f"\nhead {head}")
            shown = stretched(values) if scale == "head" else values
            found.append(
                ClipStrip(shorten(str(own["store"][0]), 40), name, shown, cell=cell)
            )
    return found


def _shape(rows: pl.DataFrame) -> list[int]:
    return [largest + 1 for largest in rows.select(places_in(rows)).max().row(0)]


def _values(rows: pl.DataFrame) -> Float:
    """(frames, rows, cols) of one head."""
    return place_values(rows, _shape(rows))


def _look(values: Sequence[Float], scale: str) -> tuple[dict[str, Any], str]:
    from matplotlib.colors import Normalize, PowerNorm

    if scale == "head":
        return {"norm": Normalize(0, 1)}, bar_label(UNIT, scale, None)
    low, high = colour_range(np.concatenate([own.ravel() for own in values]))
    norm = PowerNorm(1 / 3, low, high) if low == 0 else Normalize(low, high)
    return {"norm": norm}, bar_label(UNIT, scale, low)
