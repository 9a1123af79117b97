"""The figures of clips: a strip over time for each head; of single clips below their frames, with
the rollout first and the strips of each query below one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.attn_map.figures import UNIT
from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, ClipStrip
from vitsee_core.figures.head_tiles import bar_label, colour_range, stretched
from vitsee_core.figures.panels import count, evenly
from vitsee_core.figures.patch_sheets import place_values, places_in
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_core.types import Float, pl
from vitsee_stores.selectors import parse_position

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLLOUT = "rollout"
MAX_STRIPS = (
    24  # of a store, a clip and a query; of more these blocks and heads are drawn
)
N_LAYERS = 6
N_HEADS = 4


def draw_clips(table: Table, scale: str, titles: Mapping[str, str]) -> Figure:
    """Draw a strip over time per store, block and head; of a single clip below its frames.

    Of many heads evenly spaced ones of evenly spaced blocks are drawn. Rollouts are over their own
    range, as they are of another size; of single clips the one with residual term is drawn. Call it
    inside a function decorated with `styled`.

    Args:
        table: of `attn-map`, with a column `frame`.
        scale: "shared": one scale for all heads, or "head": each over its own range.
        titles: what the kinds of maps are called.
    """
    rows = table.frame
    has_single_clips = "image" in rows.columns
    lines: list[ClipLine] = []
    remarks: list[str] = []
    if has_single_clips:
        for (image,), clip_rows in rows.group_by("image", maintain_order=True):
            lines += _lines_of_clip(str(image), clip_rows, scale, remarks)
        title = (
            "attention to the patches of each frame, by block and head; rollout: own "
            "range"
        )
        notes = _clip_notes(table.notes)
    else:
        lines.append(ClipLine("", "", _head_strips(rows, scale, remarks)))
        title = f"{titles[str(rows['metric'][0])]}, n = {count(rows)}"
        notes = table.notes
    head_values = []
    for line in lines:
        head_values += [s.values for s in line.strips if s.title != ROLLOUT]
    look, bar = _colours(head_values, scale)
    caption = [title, *dict.fromkeys(remarks)]
    return ClipSheet(lines, notes, caption, look, bar, photos=has_single_clips).draw()


def _clip_notes(notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the notes on the clips, of several stores those of the first; {} without any."""
    if "sheet" in notes:
        sheet: Mapping[str, Any] = notes["sheet"]
        return sheet
    for store_notes in notes.get("stores", {}).values():
        if "sheet" in store_notes:
            store_sheet: Mapping[str, Any] = store_notes["sheet"]
            return store_sheet
    return {}


def _lines_of_clip(
    image: str, rows: pl.DataFrame, scale: str, remarks: list[str]
) -> list[ClipLine]:
    """Return a line for each query of one clip; the rollouts stand above the model's own query.

    A remark is added to `remarks` if blocks or heads are left out.
    """
    lines = []
    heads = rows.filter(metric=UNIT)
    rollouts = rows.filter(metric=ROLLOUT)
    for (token,), query_rows in heads.group_by("token", maintain_order=True):
        cell = parse_position(str(token))
        strips = _head_strips(query_rows, scale, remarks, cell)
        mark = None
        if cell is not None:
            # The middle of the cell, as shares of the clip and a frame.
            n_frames, n_rows, n_cols = _grid_shape(query_rows)
            frame, row, col = cell
            mark = (
                (frame + 0.5) / n_frames,
                (row + 0.5) / n_rows,
                (col + 0.5) / n_cols,
            )
        elif len(rollouts):
            strips = [*_rollout_strips(rollouts, strips), *strips]
        title = f"{image}: attention of the {token_words(str(token))}"
        lines.append(ClipLine(image, title, strips, mark))
    return lines


def _rollout_strips(rows: pl.DataFrame, heads: Sequence[ClipStrip]) -> list[ClipStrip]:
    """Return the rollout of each store, stretched to the range of the strips of heads."""
    top = max((float(np.nanmax(strip.values)) for strip in heads), default=1.0)
    strips = []
    for store_rows in rows.partition_by("store", maintain_order=True):
        values = stretched(_map_values(store_rows)) * top
        strips.append(ClipStrip(str(store_rows["store"][0]), ROLLOUT, values))
    return strips


def _head_strips(
    rows: pl.DataFrame,
    scale: str,
    remarks: list[str],
    cell: Sequence[int] | None = None,
) -> list[ClipStrip]:
    """Return a strip per store, block and head.

    Args:
        rows: of one query, or means over clips.
        scale: "shared", or "head": values are over each head's own range.
        remarks: the list that a remark is added to if blocks or heads are left out.
        cell: the query's cell to frame, None for none.
    """
    strips = []
    for store_rows in rows.partition_by("store", maintain_order=True):
        blocks_and_heads = store_rows.select("site", "head").unique(maintain_order=True)
        sites = blocks_and_heads["site"].unique(maintain_order=True).to_list()
        heads = sorted(blocks_and_heads["head"].drop_nulls().unique())
        if len(blocks_and_heads) > MAX_STRIPS:
            sites = evenly(sites, N_LAYERS)
            heads = evenly(heads, N_HEADS)
            remarks.append("evenly spaced blocks and heads; the table has all")
        store = shorten(str(store_rows["store"][0]), 40)
        rows_by_head = store_rows.partition_by(
            "site", "head", as_dict=True, maintain_order=True
        )
        for (site, head), head_rows in rows_by_head.items():
            # A rollout is of no head.
            if site not in sites or (head is not None and head not in heads):
                continue
            values = _map_values(head_rows)
            if scale == "head":
                values = stretched(values)
            name = site_words(str(site))
            if head is not None:
                name += f"\nhead {head}"
            strips.append(ClipStrip(store, name, values, cell=cell))
    return strips


def _grid_shape(rows: pl.DataFrame) -> list[int]:
    """Return the number of frames, rows and columns of a clip's grid."""
    return [largest + 1 for largest in rows.select(places_in(rows)).max().row(0)]


def _map_values(rows: pl.DataFrame) -> Float:
    """Return (frames, rows, cols) the map of one head."""
    return place_values(rows, _grid_shape(rows))


def _colours(values: Sequence[Float], scale: str) -> tuple[dict[str, Any], str]:
    """Return the keywords of `imshow` for all strips of heads, and the colour bar's label."""
    from matplotlib.colors import Normalize, PowerNorm

    if scale == "head":
        return {"norm": Normalize(0, 1)}, bar_label(UNIT, scale, None)
    low, high = colour_range(np.concatenate([v.ravel() for v in values]))
    # A cube root from 0 on: a few keys get most attention, and would leave the rest dark.
    norm = PowerNorm(1 / 3, low, high) if low == 0 else Normalize(low, high)
    return {"norm": norm}, bar_label(UNIT, scale, low)
