"""Figures of logit attribution, drawn from the table's columns and notes alone.

Bars show what each sublayer adds, with their running sum, and colours what each head adds; a table
of `--patches` has maps beside photographs.
"""

from __future__ import annotations

import math
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
from vitsee_core.tables.words import BLOCK_PARTS, block_words, site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Part -> its words and colour; `block` is the branch of a block that is a single sublayer.
KINDS = {
    "input": ("where the stream begins", GREY),
    "attn": (BLOCK_PARTS["attn"], COLOURS[0]),
    "mlp": (BLOCK_PARTS["mlp"], COLOURS[1]),
    "token": (BLOCK_PARTS["token"], COLOURS[2]),
    "channel": (BLOCK_PARTS["channel"], COLOURS[3]),
    "block": ("block", COLOURS[4]),
    "bias": ("bias of norm and classifier", "#BDBDBD"),
}
LOGIT = "logit"  # part
MAX_PANELS = 12  # further stores and classes are in the table alone
MAX_TICKS = 16


@styled
def draw_attributions(table: Table) -> Figure:
    """Draw what each sublayer adds to the logit, and below it what each head adds.

    Each store (and class, the first twelve) has a panel with a bar per sublayer in the model's
    order, its 95 % interval, the running sum of the bars as a line, and the logit dashed, where the
    line ends. If the table has heads, each has a panel of heads by blocks, all on one scale of
    colours.
    """
    sublayer_rows = []
    head_rows = []
    # A panel for each store and class, in the order of the table.
    for rows in table.frame.partition_by("store", "class", maintain_order=True):
        store = rows["store"][0]
        class_name = rows["class"][0]
        title = shorten(store, 28)
        if class_name:
            title = f"{shorten(store, 24)}: {class_name}"
        is_about_head = pl.col("head").is_not_null()
        sublayer_rows.append((title, rows.filter(~is_about_head)))
        if rows["head"].count():
            head_rows.append((title, rows.filter(is_about_head)))
    # The room that each part needs, then the figure, then what is drawn in it.
    sublayer_rows = sublayer_rows[:MAX_PANELS]
    head_rows = head_rows[:MAX_PANELS]
    bar_grid = PanelGrid(len(sublayer_rows), width=24, widest=46, height=16, most=2)
    head_grid = PanelGrid(len(head_rows), width=17, widest=23, height=15)
    grids = [bar_grid, head_grid] if head_rows else [bar_grid]
    figure, boxes = stack(*grids)
    bar_axes = bar_grid.axes(boxes[0])
    for axes, (title, rows) in zip(bar_axes, sublayer_rows, strict=True):
        _draw_bars(axes, rows, title=title, target_words=_target_words(table, rows))
    if head_rows:
        matrices = [_head_matrix(rows) for _, rows in head_rows]
        # White is 0, and all panels share the scale.
        limit = max(float(np.nanmax(np.abs(values))) for values, _ in matrices) or 1.0
        head_axes = head_grid.axes(boxes[1])
        for axes, (title, _), (values, blocks) in zip(
            head_axes, head_rows, matrices, strict=True
        ):
            image = _draw_head_matrix(axes, title, values, blocks, limit)
        bars_at_ends(head_grid, head_axes, image, "logit, by head")
    legend_below(figure, handles_of(bar_axes))
    return figure


def _target_words(table: Table, rows: pl.DataFrame) -> str:
    """Return the words for the class whose logit a panel shows, for its y axis."""
    class_name = rows["class"][0]
    if class_name:
        return shorten(class_name, 24)
    target = table.notes.get("target", {}).get(rows["store"][0])
    words = {"label": "the label", "predicted": "the predicted class"}
    return words.get(target, "the class")


def _draw_bars(axes: Axes, rows: pl.DataFrame, *, title: str, target_words: str) -> None:
    """Draw a bar per sublayer, the running sum, and the model's logit.

    Args:
        axes: where to draw.
        rows: rows of one store and class, but those about heads.
        title: title of the panel.
        target_words: the class whose logit it is, for the y axis.
    """
    bars = rows.filter(pl.col("part").is_in(KINDS)).with_row_index("x")
    # One call per kind, for one entry of the legend each.
    for kind, (words, colour) in KINDS.items():
        kind_bars = bars.filter(part=kind)
        if len(kind_bars):
            axes.bar(
                kind_bars["x"],
                kind_bars["value"],
                width=0.8,
                color=colour,
                label=words,
                linewidth=0,
            )
    x = bars["x"].to_numpy()
    # Intervals need two images.
    if bars["low"].count():
        axes.vlines(
            x,
            bars["low"].to_numpy(),
            bars["high"].to_numpy(),
            color=ink(),
            linewidth=0.7,
            label="95 % interval",
        )
    axes.plot(
        x,
        bars["value"].cum_sum(),
        color=ink(),
        linewidth=1.1,
        drawstyle="steps-mid",
        marker=".",
        markersize=3,
        label="running sum",
    )
    axes.axhline(0, color=GREY, linewidth=0.6)
    for logit in rows.filter(part=LOGIT)["value"]:
        reference_line(axes, logit, "the model's logit")
    positions, texts = _block_ticks(bars)
    axes.set_xticks(positions, texts, rotation=_label_rotation(texts))
    axes.grid(False, axis="x")
    axes.set_xlabel("from input to output, by block")
    axes.set_ylabel(f"part of the logit of {target_words}")
    axes.set_title(title)
    note_count(axes, rows)


def _block_ticks(bars: pl.DataFrame) -> tuple[list[float], list[str]]:
    """Return positions and texts of the ticks.

    They are at the first sublayer of each block, by its number, as many as can be read, and in
    words at the beginning of the stream and the bias.
    """
    blocks = bars["block"].fill_null("").to_list()
    texts: dict[int, str] = {0: "input"}
    # Bar 0 is the beginning of the stream, which may name the first block, too.
    starts = [
        i
        for i in range(1, len(blocks))
        if blocks[i] and (i == 1 or blocks[i] != blocks[i - 1])
    ]
    step = math.ceil(len(starts) / MAX_TICKS) or 1
    for i in starts[::step]:
        texts[i] = block_words(blocks[i]).removeprefix("block ")
    for i, part in enumerate(bars["part"].to_list()):
        if part == "bias":
            texts[i] = "bias"
    return [float(i) for i in texts], [*texts.values()]


def _label_rotation(texts: list[str]) -> int:
    """Return the angle of tick labels in degrees: upright if one is too long beside others."""
    return 90 if max(len(text) for text in texts) > 4 else 0


def _head_matrix(rows: pl.DataFrame) -> tuple[Float, list[str]]:
    """Return what each head adds, (heads, blocks), and the words for the blocks."""
    by_block = rows.pivot("block", index="head", values="value").sort("head").drop("head")
    blocks = [block_words(name).removeprefix("block ") for name in by_block.columns]
    return by_block.to_numpy(), blocks


def _draw_head_matrix(
    axes: Axes, title: str, values: Float, blocks: list[str], limit: float
) -> Any:
    """Draw what each head adds as colours, and return matplotlib's image.

    Args:
        axes: where to draw.
        title: title of the panel.
        values: (heads, blocks).
        blocks: words for the blocks.
        limit: colours go from minus this to this.
    """
    image = axes.imshow(
        values, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", origin="upper"
    )
    column_step = math.ceil(len(blocks) / MAX_TICKS)
    texts = blocks[::column_step]
    axes.set_xticks(
        range(0, len(blocks), column_step), texts, rotation=_label_rotation(texts)
    )
    row_step = math.ceil(len(values) / MAX_TICKS)
    axes.set_yticks(range(0, len(values), row_step))
    axes.grid(False)
    axes.set(xlabel="block", ylabel="head", title=title)
    return image


# ---------------------------------------------------------------- maps beside photographs


TOTAL = "patches"  # part: the sum of all terms
SCALES = ("shared", "map")


@styled
def draw_patch_parts(table: Table, scale: str) -> Figure:
    """Draw what each patch adds to the logit, beside the photographs.

    Each image (and class) has a line: the photograph, the sum of all terms, and evenly spaced
    terms, models below one another. White is 0.

    Args:
        table: a table of `patches.patch_table`.
        scale: "shared" for one scale of colours, or "map" for each map over its own range.
    """
    cells = table.frame.filter(pl.col("row").is_not_null())
    sheet = table.notes.get("sheet", {})
    sites = {
        store_rows["store"][0]: _drawn_sites(store_rows)
        for store_rows in cells.partition_by("store")
    }
    lines = []
    peaks = []  # the largest value of each map, for the shared scale
    for line_rows in cells.partition_by("image", "class", maintain_order=True):
        image = line_rows["image"][0]
        maps = []
        for store_rows in line_rows.partition_by("store", maintain_order=True):
            store = store_rows["store"][0]
            total_site = sites[store][0]
            # All maps of a store lie on the grid of the one site that the classifier reads.
            grid_site = next(iter(sheet.get("grids", {}).get(store, {"": None})))
            tiles = []
            for site in sites[store]:
                site_rows = store_rows.filter(site=site)
                shape, edges = grid_of(site_rows, sheet, grid_site, image)
                values = place_values(site_rows, shape)
                if scale == "map":
                    values = values / (float(np.nanmax(np.abs(values))) or 1.0)
                title = site_words(site).replace(", ", "\n")
                if site == total_site:
                    title = "all"
                tiles.append(Map(title, values, edges))
                peaks.append(float(np.nanmax(np.abs(values))))
            maps.append((store, tiles))
        lines.append(SheetLine(image, line_rows["class"][0] or "", maps))
    limit = max(peaks, default=1.0) or 1.0
    # Below the sheet: what colours mean, and which layers are left out.
    images = ", ".join(cells["image"].unique(maintain_order=True))
    caption = [
        "what each patch adds to the logit, directly (red: for the class)",
        f"images: {images}",
        *thinned(cells, sites),
    ]
    look = {"vmin": -limit, "vmax": limit, "cmap": DIVERGING}
    bar = "part of logit" if scale == "shared" else "each map over its own range"
    return Sheet(lines, sheet.get("images", {}), caption, look, bar).draw()


def _drawn_sites(rows: pl.DataFrame) -> list[str]:
    """Return the sites that are drawn: the sum of all terms, then evenly spaced terms.

    The sum stands last in the table.
    """
    *terms, total = rows["site"].unique(maintain_order=True)
    n = min(len(terms), len(shown_sites(rows)) - 1)
    indices = np.linspace(0, len(terms) - 1, n).round().astype(int)
    return [total, *(terms[i] for i in indices)]
