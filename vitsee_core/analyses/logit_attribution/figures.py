"""The figures of logit attribution: what each sublayer adds, their running sum, and heads; of
`--patches` maps beside photographs. Both are drawn from the table's columns and notes alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    handles_of,
    legend_below,
    note_count,
    stack,
)
from vitsee_core.figures.patch_sheets import (
    Map,
    Sheet,
    SheetLine,
    grid_of,
    place_values,
    shown_sites,
    thinned,
)
from vitsee_core.figures.plotting import COLOURS, GREY, ink, reference_line, styled
from vitsee_core.figures.token_maps import DIVERGING
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, block_words, site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Part -> its words and colour; of a block that is one sublayer, the branch.
KINDS = {
    "input": ("where the stream begins", GREY),
    "attn": (PARTS["attn"], COLOURS[0]),
    "mlp": (PARTS["mlp"], COLOURS[1]),
    "token": (PARTS["token"], COLOURS[2]),
    "channel": (PARTS["channel"], COLOURS[3]),
    "block": ("block", COLOURS[4]),
    "bias": ("bias of norm and classifier", "#BDBDBD"),
}
LOGIT = "logit"
MOST = 12  # panels: further classes are in the table alone
MOST_TICKS = 16


@styled
def draw_attributions(table: Table) -> Figure:
    """A panel per store (and class, the first twelve): a bar per sublayer in the model's order with
    its 95 % interval, their running sum as a line, and dashed the logit where it ends; below, where
    the table has heads, what each adds by block, on one scale of colours."""
    wholes = []
    heads = []
    for rows in table.frame.partition_by("store", "class", maintain_order=True):
        store = rows["store"][0]
        name = rows["class"][0]
        title = f"{shorten(store, 24)}: {name}" if name else shorten(store, 28)
        of_head = pl.col("head").is_not_null()
        wholes.append((title, rows.filter(~of_head)))
        if rows["head"].count():
            heads.append((title, rows.filter(of_head)))
    wholes = wholes[:MOST]
    heads = heads[:MOST]
    bars = PanelGrid(len(wholes), width=24, widest=46, height=16, most=2)
    tiles = PanelGrid(len(heads), width=17, widest=23, height=15)
    figure, parts = stack(bars, *([tiles] if heads else []))
    every = bars.axes(parts[0])
    for axes, (title, rows) in zip(every, wholes, strict=True):
        _draw_bars(axes, rows, title, _of_which(table, rows))
    if heads:
        values = [_head_values(rows) for _, rows in heads]
        top = max(float(np.nanmax(np.abs(grid))) for grid, _ in values) or 1.0
        panels = tiles.axes(parts[1])
        for axes, (title, _), (grid, blocks) in zip(panels, heads, values, strict=True):
            image = _draw_heads(axes, title, grid, blocks, top)
        bars_at_ends(tiles, panels, image, "logit, by head")
    legend_below(figure, handles_of(every))
    return figure


def _of_which(table: Table, rows: pl.DataFrame) -> str:
    """The words for the class whose logit a panel shows, for its y axis."""
    if name := rows["class"][0]:
        return shorten(name, 24)
    target = table.notes.get("target", {}).get(rows["store"][0])
    return {"label": "the label", "predicted": "the predicted class"}.get(
        target, "the class"
    )


def _draw_bars(axes: Axes, rows: pl.DataFrame, title: str, of_which: str) -> None:
    shown = rows.filter(pl.col("part").is_in(KINDS)).with_row_index("x")
    for kind, (words, colour) in KINDS.items():
        own = shown.filter(part=kind)
        if len(own):
            axes.bar(own["x"], own["value"], 0.8, color=colour, label=words, linewidth=0)
    x, low, high = (shown[name].to_numpy() for name in ("x", "low", "high"))
    if shown["low"].count():
        axes.vlines(x, low, high, color=ink(), linewidth=0.7, label="95 % interval")
    axes.plot(
        x,
        shown["value"].cum_sum(),
        color=ink(),
        linewidth=1.1,
        drawstyle="steps-mid",
        marker=".",
        markersize=3,
        label="running sum",
    )
    axes.axhline(0, color=GREY, linewidth=0.6)
    for whole in rows.filter(part=LOGIT)["value"]:
        reference_line(axes, whole, "the model's logit")
    places, texts = _ticks(shown)
    axes.set_xticks(places, texts, rotation=90 if max(map(len, texts)) > 4 else 0)
    axes.grid(False, axis="x")
    axes.set_xlabel("from input to output, by block")
    axes.set_ylabel(f"part of the logit of {of_which}")
    axes.set_title(title)
    note_count(axes, rows)


def _ticks(shown: pl.DataFrame) -> tuple[list[float], list[str]]:
    """The first sublayer of each block, by number, as many as can be read; where the stream begins
    and the bias in words."""
    blocks = shown["block"].fill_null("").to_list()
    kinds = shown["part"].to_list()
    after = range(1, len(blocks))
    starts = [i for i in after if blocks[i] and (i == 1 or blocks[i] != blocks[i - 1])]
    step = -(-len(starts) // MOST_TICKS) or 1
    found: dict[int, str] = {0: "input"}
    for i in starts[::step]:
        found[i] = block_words(blocks[i]).removeprefix("block ")
    found |= {i: "bias" for i, kind in enumerate(kinds) if kind == "bias"}
    return [float(i) for i in found], [*found.values()]


def _head_values(rows: pl.DataFrame) -> tuple[Float, list[str]]:
    """(heads, blocks) and the blocks' words."""
    by_block = rows.pivot("block", index="head", values="value").sort("head").drop("head")
    return by_block.to_numpy(), [
        block_words(b).removeprefix("block ") for b in by_block.columns
    ]


def _draw_heads(axes: Axes, title: str, grid: Any, blocks: list[str], top: float) -> Any:
    image = axes.imshow(
        grid, cmap=DIVERGING, vmin=-top, vmax=top, aspect="auto", origin="upper"
    )
    step = -(-len(blocks) // MOST_TICKS)
    texts = blocks[::step]
    axes.set_xticks(
        range(0, len(blocks), step), texts, rotation=90 if max(map(len, texts)) > 4 else 0
    )
    rows = -(-len(grid) // MOST_TICKS)
    axes.set_yticks(range(0, len(grid), rows))
    axes.grid(False)
    axes.set(xlabel="block", ylabel="head", title=title)
    return image


# ---------------------------------------------------------------- maps beside photographs


TOTAL = "patches"
SCALES = ("shared", "map")


@styled
def draw_patch_parts(table: Table, scale: str) -> Figure:
    """A line per image (and class): the photograph, what each patch adds to the logit in all, and
    in evenly spaced layers, models below one another; white is 0. scale: "shared", one scale of
    colours, or "map", each map over its own."""
    cells = table.frame.filter(pl.col("row").is_not_null())
    sheet = table.notes.get("sheet", {})
    order = {own["store"][0]: _shown(own) for own in cells.partition_by("store")}
    lines = []
    for own in cells.partition_by("image", "class", maintain_order=True):
        image = own["image"][0]
        name = own["class"][0]
        maps = []
        for rows in own.partition_by("store", maintain_order=True):
            tiles = []
            store = rows["store"][0]
            key = next(iter(sheet.get("grids", {}).get(store, {"": None})))
            for site in order[store]:
                of_site = rows.filter(site=site)
                shape, edges = grid_of(of_site, sheet, key, image)
                title = site_words(site).replace(", ", "\n")
                title = "all" if site == order[store][0] else title
                values = place_values(of_site, shape)
                if scale == "map":
                    values = values / (float(np.nanmax(np.abs(values))) or 1.0)
                tiles.append(Map(title, values, edges))
            maps.append((store, tiles))
        lines.append(SheetLine(image, name or "", maps))
    every = [tile.values for line in lines for _, tiles in line.maps for tile in tiles]
    top = max((float(np.nanmax(np.abs(one))) for one in every), default=1.0) or 1.0
    caption = ["what each patch adds to the logit, directly (red: for the class)"]
    caption.append(f"images: {', '.join(cells['image'].unique(maintain_order=True))}")
    caption += thinned(cells, order)
    look = {"vmin": -top, "vmax": top, "cmap": DIVERGING}
    bar = "part of logit" if scale == "shared" else "each map over its own range"
    return Sheet(lines, sheet.get("images", {}), caption, look, bar).draw()


def _shown(rows: pl.DataFrame) -> list[str]:
    """The sum of all terms, which stands last in the table, then evenly spaced ones."""
    *every, total = rows["site"].unique(maintain_order=True)
    n = min(len(every), len(shown_sites(rows)) - 1)
    return [
        total,
        *(every[k] for k in np.linspace(0, len(every) - 1, n).round().astype(int)),
    ]
