"""The figure of attention maps of clips: a strip over time for each head; of single clips below
their frames, with the rollout first and the strips of each query below one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.figures.clip_strips import ClipLine, ClipSheet, Strip
from vitsee_core.figures.head_tiles import bar_label, colour_range, stretched
from vitsee_core.figures.panels import count, evenly
from vitsee_core.figures.patch_sheets import place_values, places_in
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_core.types import Float
from vitsee_stores.token_selection import parse_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 24  # strips of a store, an image and a query
LAYERS, HEADS = 6, 4  # drawn of each where there are more
ROLLOUT = "rollout"
UNIT = "attention"


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
    values = [strip.values for line in lines for strip in line.strips if strip.title != ROLLOUT]
    look, bar = _look(values, scale)
    caption = [title, *dict.fromkeys(caption)]
    notes = _sheet(table.notes) if single else table.notes
    return ClipSheet(lines, notes, caption, look, bar, photos=single).draw()


def _sheet(notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The notes on the clips; with several stores those of the first."""
    if "sheet" in notes:
        found: Mapping[str, Any] = notes["sheet"]
        return found
    return next((own["sheet"] for own in notes.get("stores", {}).values() if "sheet" in own), {})


def _of_clip(image: str, rows: pl.DataFrame, scale: str, caption: list[str]) -> list[ClipLine]:
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


def _rollouts(rows: pl.DataFrame, heads: Sequence[Strip]) -> list[Strip]:
    """The rollout of each store, over the range of the drawn heads."""
    top = max((float(np.nanmax(strip.values)) for strip in heads), default=1.0)
    return [
        Strip(str(own["store"][0]), ROLLOUT, stretched(_values(own)) * top)
        for own in rows.partition_by("store", maintain_order=True)
    ]


def _strips(
    rows: pl.DataFrame, scale: str, caption: list[str], cell: Sequence[int] | None = None
) -> list[Strip]:
    """A strip per store, block and head."""
    found = []
    for own in rows.partition_by("store", maintain_order=True):
        places = own.select("site", "head").unique(maintain_order=True)
        sites = places["site"].unique(maintain_order=True).to_list()
        heads = sorted(places["head"].drop_nulls().unique())
        if len(places) > MOST:
            sites, heads = evenly(sites, LAYERS), evenly(heads, HEADS)
            caption.append("evenly spaced blocks and heads; the table has all")
        of_head = own.partition_by("site", "head", as_dict=True, maintain_order=True)
        for (site, head), maps in of_head.items():
            if site not in sites or (head is not None and head not in heads):
                continue
            values = _values(maps)
            name = site_words(str(site)) + ("" if head is None else f"\nhead {head}")
            shown = stretched(values) if scale == "head" else values
            found.append(Strip(shorten(str(own["store"][0]), 40), name, shown, cell=cell))
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
