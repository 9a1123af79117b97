"""The figure of single images in several models: images by models, or each model's heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from vitsee_core.analyses.attn_map.image_figure import (
    ROLLOUTS,
    picture_of,
    show_picture,
    show_rollout,
)
from vitsee_core.figures.head_tiles import Tiles, bar_label, draw_tiles, tile_table, value_range
from vitsee_core.figures.model_tiles import BAR, draw_side_by_side, models_grid, models_of
from vitsee_core.figures.panels import (
    Grid,
    colour_bar,
    map_title,
    name_part,
    room,
    small_maps,
    stack,
)
from vitsee_core.tables.groups import by_group
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_stores.token_selection import parse_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST, LARGEST = 5.4, 9.0  # ems of a map
UNIT = "attention"
PICTURE = ["store", "image", "query"]
OWN = "own"  # the query of a model where no cell is asked for


def draw_models_of_images(table: Table, scale: str) -> Figure:
    """One map per store, image and query: a line per image, its picture and a column per store
    (Walmer et al. 2023, Fig. 13); the rollouts, which are of no head, are in the table alone. Of
    more: per image its picture with each store's rollout, then each store's heads side by side
    (Figs. 11, 12). Call it inside a function decorated with `styled`."""
    heads = table.frame.filter(metric=UNIT)
    queries = {t: t if parse_cell(t) is not None else OWN for t in heads["token"].unique()}
    token = pl.col("token").cast(pl.String)
    heads = heads.with_columns(query=token.replace_strict(queries, return_dtype=pl.String))
    one_each = (
        heads.select(*PICTURE, "depth", "head").n_unique() == heads.select(PICTURE).n_unique()
    )
    if one_each:
        return _draw_images_by_models(heads, table.notes, scale)
    return _draw_heads(table, heads, scale)


def _draw_images_by_models(heads: pl.DataFrame, notes: Mapping[str, Any], scale: str) -> Figure:
    stores = [s for _, rows in by_group(heads) for s in rows["store"].unique(maintain_order=True)]
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
    width, n = side + BAR / (1 + across), 1 + across
    grid = Grid(n * len(images), width, side + 0.8, width, most=n, extra=3.0)
    figure, parts = stack(*[grid] * len(lines))
    tiles_of = _by_picture(heads)
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


def _by_picture(heads: pl.DataFrame) -> dict[tuple[Any, ...], list[Tiles]]:
    """(store, image, query) -> its maps."""
    every = heads.partition_by(PICTURE, maintain_order=True, as_dict=True)
    return {key: tile_table(own) for key, own in every.items()}


def _named(rows: pl.DataFrame) -> str:
    """`attention of the class token, block 11 head 0`, the place where all models agree on it."""
    places = rows.select("site", "head").unique(maintain_order=True)
    site, head = places.row(0)
    where = f", {site_words(site)} head {head}" if len(places) == 1 else ", a head of each"
    return f"{_asked(rows)}{where}"


def _asked(rows: pl.DataFrame) -> str:
    words = [token_words(token) for token in rows["token"].unique(maintain_order=True)]
    return f"attention of the {' or '.join(words)}"


def _draw_heads(table: Table, heads: pl.DataFrame, scale: str) -> Figure:
    rollouts = table.frame.filter(metric=next(iter(ROLLOUTS)))
    grids: list[Grid] = []
    lines = []
    for (image,), of_image in heads.group_by("image", maintain_order=True):
        rolled = rollouts.filter(image=image).partition_by("store", maintain_order=True)
        queries = of_image.partition_by("query", maintain_order=True)
        models = [models_of(own) for own in queries]
        grids += [small_maps(1 + len(rolled), 4)]
        grids += [models_grid([tiles for _, tiles in own]) for own in models]
        lines.append((image, of_image["store"][0], rolled, queries, models))
    figure, parts = stack(*grids)
    left = iter(zip(grids, parts, strict=True))
    every = [tiles for *_, models in lines for own in models for _, tiles in own]
    limits = value_range(every)
    for image, store, rolled, queries, models in lines:
        grid, part = next(left)
        first, *others = grid.axes(part)
        show_picture(first, picture_of(table.notes, store, image), "")
        map_title(first, grid, image)
        for axes, own in zip(others, rolled, strict=True):
            show_rollout(axes, own, picture_of(table.notes, own["store"][0], image), "")
            map_title(axes, grid, own["store"][0])
        name_part(part, f"{shorten(image, 26)}, and the rollouts of each model over it")
        for own, tiles in zip(queries, models, strict=True):
            grid, part = next(left)
            title = f"{_asked(own)}, by head"
            draw_side_by_side(part, grid, tiles, title, UNIT, scale=scale, limits=limits)
    return figure
