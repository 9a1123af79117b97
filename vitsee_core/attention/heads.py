"""The attention heads of a store, and the distance of uniform attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.tables.columns import StoredPart
from vitsee_stores.errors import MissingInput
from vitsee_stores.layout import TokenLayout, select_names

if TYPE_CHECKING:
    from vitsee_stores import Slab, Store

Array = tuple[str, str]


@dataclass(frozen=True)
class StoredAttention(StoredPart):
    """The stored attention of one block: its place in the store's attention arrays (`group`, `row`
    of the block axis), its heads and their tokens."""

    group: str
    row: int
    n_heads: int


def attention_blocks(store: Store, patterns: Sequence[str] = ("blocks",)) -> list[StoredAttention]:
    """The blocks of a store that have attention summaries, in the model's order.

    Raises:
        MissingInput: there are none.
        SiteError: a pattern without a match.
    """
    groups = store.attention_blocks
    if not groups:
        reason = store.manifest.left_out.get("attention")
        why = reason or "it was extracted with --attention none (expected --attention summary)"
        raise MissingInput(f"{store.label} has no attention summaries: {why}")
    depths = {name: (depth, rel_depth) for name, depth, rel_depth in store.manifest.plan.places}
    blocks = [
        StoredAttention(name, *depths[name], group.layout, group.prefix, row, heads)
        for group in groups
        for row, (name, heads) in enumerate(zip(group.blocks, group.n_heads, strict=True))
    ]
    blocks.sort(key=lambda block: block.depth)
    chosen = select_names(
        patterns,
        [block.as_site("blocks") for block in blocks],
        what="store's attention",
        hint=f"vitsee info {store.place}",
    )
    names = {site.name for site in chosen}
    return [block for block in blocks if block.site in names]


def read_heads(arrays: Sequence[Array], slab: Slab) -> dict[Array, NDArray[Any]]:
    """Stored arrays (name, group) -> (images, blocks, heads) of a slab's valid images, for
    `SlabMoments`; NaN for a head without spatial mass in an image, or beyond its block's heads."""
    return {array: slab.attention(*array)[slab.valid] for array in arrays}


def uniform_distance(layout: TokenLayout) -> float:
    """The distance in pixels of uniform attention over the grid: 116.5 on 14 x 14 cells of 16 px; 0
    on a single cell. Every offset is weighted by the number of pairs that have it."""
    if layout.grid is None or layout.stride_px is None:
        return np.nan
    (gh, gw), (step_y, step_x) = layout.grid, layout.stride_px
    dy, dx = np.arange(1 - gh, gh), np.arange(1 - gw, gw)
    pairs = np.outer(gh - abs(dy), gw - abs(dx))
    lengths = np.hypot(dy[:, np.newaxis] * step_y, dx * step_x)
    return float((pairs * lengths).sum() / (gh * gw) ** 2)
