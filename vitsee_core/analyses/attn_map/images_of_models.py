"""The figure of single images in several models: images by models, or each model's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.attn_map.image_figure import (
    ROLLOUTS,
    picture_of,
    show_picture,
    show_rollout,
)
from vitsee_core.figures.head_tiles import bar_label, draw_tiles, tile_table, value_range
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
OWN = "own"  # the query of a model where no cell is asked for


def draw_models_of_images(table: Table, scale: str) -> Figure:
    """One map per store, image and query: a line per image, its picture and a column per store
    (Walmer et al. 2023, Fig. 13); the rollouts, which are of no head, are in the table alone. Of
    more: per image its picture with each store's rollout, then each store's heads side by side
    (Figs. 11, 12). Call it inside a function decorated with `styled`."""
    heads = table.where(metric=UNIT)
    tokens = heads["token"].tolist()
    queries = np.array([t if parse_cell(t) is not None else OWN for t in tokens], object)
    heads = Table({**heads.columns, "query": queries}, heads.notes)
    names = ("store", "image", "query", "depth", "head")
    keys = {*zip(*(heads[name].tolist() for name in names), strict=True)}
    one_each = len({key[:3] for key in keys}) == len(keys)
    return _draw_images_by_models(heads, scale) if one_each else _draw_heads(table, heads, scale)


def _draw_images_by_models(heads: Table, scale: str) -> Figure:
    stores = [store for _, rows in by_group(heads) for store in rows.unique("store")]
    most = max(1, int((room() - BAR) / SMALLEST) - 1)  # beside the picture
    n_lines = -(-len(stores) // most)
    across = -(-len(stores) // n_lines)  # lines of about equal length
    lines = [
        (query, stores[i : i + across])
        for query in heads.unique("query")
        for i in range(0, len(stores), across)
    ]
    images = heads.unique("image")
    side = min((room() - BAR) / (1 + across), LARGEST)
    width, n = side + BAR / (1 + across), 1 + across
    grid = Grid(n * len(images), width, side + 0.8, width, most=n, extra=3.0)
    figure, parts = stack(*[grid] * len(lines))
    limits = value_range([tiles for _, maps in _by_picture(heads) for tiles in tile_table(maps)])
    for (query, some), part in zip(lines, parts, strict=True):
        every = grid.axes(part)
        for i, image in enumerate(images):
            line = every[n * i : n * (i + 1)]
            show_picture(line[0], picture_of(heads, some[0], image), "")
            for axes in line[1 + len(some) :]:
                axes.set_visible(False)
            for axes, store in zip(line[1:], some, strict=False):
                (tiles,) = tile_table(heads.where(store=store, image=image, query=query))
                drawn = draw_tiles(axes, tiles, scale=scale, limits=limits)
                axes.set(xticks=[], yticks=[])
                if not i:
                    map_title(axes, grid, store)
        low, high = drawn.get_clim()
        label = bar_label(UNIT, scale, low)
        bar = colour_bar(every[len(some)], drawn, "", ticks=[low, high])
        bar.ax.set_yticklabels([f"{low:.2g}", f"{high:.2g}"])
        name_part(part, f"{_named(heads.where(query=query))}; colours: {label}")
    return figure


def _by_picture(heads: Table) -> list[tuple[str, Table]]:
    """Each store's maps of each image and query."""
    return [
        (store, own)
        for store, of_store in heads.groups("store")
        for _, of_image in of_store.groups("image")
        for _, own in of_image.groups("query")
    ]


def _named(rows: Table) -> str:
    """`attention of the class token, block 11 head 0`, the place where all models agree on it."""
    places = {*zip(rows["site"].tolist(), rows["head"].tolist(), strict=True)}
    site, head = next(iter(places))
    where = f", {site_words(site)} head {head}" if len(places) == 1 else ", a head of each"
    return f"{_asked(rows)}{where}"


def _asked(rows: Table) -> str:
    words = [token_words(token) for token in rows.unique("token")]
    return f"attention of the {' or '.join(words)}"


def _draw_heads(table: Table, heads: Table, scale: str) -> Figure:
    rollouts = table.where(metric=next(iter(ROLLOUTS)))
    grids: list[Grid] = []
    for image, of_image in heads.groups("image"):
        grids.append(small_maps(1 + len(rollouts.where(image=image).unique("store")), 4))
        grids += [
            models_grid([t for _, t in models_of(own)]) for _, own in of_image.groups("query")
        ]
    figure, parts = stack(*grids)
    left = iter(zip(grids, parts, strict=True))
    limits = value_range([tiles for _, maps in _by_picture(heads) for tiles in tile_table(maps)])
    for image, of_image in heads.groups("image"):
        grid, part = next(left)
        first, *others = grid.axes(part)
        show_picture(first, picture_of(table, of_image["store"][0], image), "")
        map_title(first, grid, image)
        rolled = rollouts.where(image=image)
        for axes, (store, own) in zip(others, rolled.groups("store"), strict=True):
            show_rollout(axes, own, picture_of(table, store, image), "")
            map_title(axes, grid, store)
        name_part(part, f"{shorten(image, 26)}, and the rollouts of each model over it")
        for _, own in of_image.groups("query"):
            grid, part = next(left)
            title = f"{_asked(own)}, by head"
            draw_side_by_side(part, grid, models_of(own), title, UNIT, scale=scale, limits=limits)
    return figure
