"""The attention heads of a store, and the distance of uniform attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.tables.columns import StoredPart
from vitsee_core.types import Float, pl
from vitsee_stores.errors import MissingInput
from vitsee_stores.layout import TokenLayout, select_names

if TYPE_CHECKING:
    from vitsee_core.tables.results import Table
    from vitsee_stores import AttentionGroup, Slab, Store

Array = tuple[str, str]
Grid = tuple[int, int]
WINDOW = (
    "blocks whose queries see the keys of their window alone, of so many rows x columns of cells, "
    "tiling the grid from its top left corner: distances, shares and maps are over what a query "
    "sees, uniform attention is uniform within the window"
)
WINDOW_OF_CLIPS = "; of clips so many times x rows x columns"


@dataclass(frozen=True)
class StoredAttention(StoredPart):
    """The stored attention of one block.

    Attributes:
        group: name of the group of arrays that has it.
        row: index on the block axis of these arrays.
        n_heads: number of heads.
        window: (rows, cols) of cells in which a query sees keys; None if it sees all.
        times: for clips, the cells in time that a window has; None if it has all.
    """

    group: str
    row: int
    n_heads: int
    window: Grid | None = None
    times: int | None = None

    @property
    def window_text(self) -> str | None:
        """The cell of the column `window`, `8 x 8`, of clips with the cells in time before them;
        None where a query sees all keys."""
        layout = self.layout
        sides = self.window or self.layout.grid
        if sides is None or (self.window is None and self.times is None):
            return None
        in_time = () if layout.frames is None else (self.times or layout.frames,)
        return " x ".join(map(str, (*in_time, *sides)))


def _window_of_group(group: AttentionGroup) -> tuple[Grid | None, int | None]:
    """Return (rows, cols) and the cells in time of a group's windows.

    None stands for windows that cover the grid, and all of its times.
    """
    layout = group.layout
    window = group.window
    if window is None:
        return None, None
    sides: Grid | None = window[-2], window[-1]
    if layout.frames is None:
        return sides, None
    return (
        None if sides == layout.grid else sides,
        None if window[0] == layout.frames else window[0],
    )


def attention_blocks(
    store: Store, patterns: Sequence[str] = ("blocks",)
) -> list[StoredAttention]:
    """Return the blocks of a store that have attention summaries, in the model's order.

    Raises:
        MissingInput: there are none.
        SiteError: a pattern without a match.
    """
    groups = store.attention_blocks
    if not groups:
        reason = store.manifest.left_out.get("attention")
        why = (
            reason
            or "it was extracted with --attention none (expected --attention summary)"
        )
        raise MissingInput(f"{store.label} has no attention summaries: {why}")
    depths = {
        name: (depth, rel_depth) for name, depth, rel_depth in store.manifest.plan.places
    }
    blocks = [
        StoredAttention(
            name,
            *depths[name],
            group.layout,
            group.prefix,
            row,
            heads,
            *_window_of_group(group),
        )
        for group in groups
        for row, (name, heads) in enumerate(zip(group.blocks, group.n_heads, strict=True))
    ]
    blocks.sort(key=lambda block: block.depth)
    chosen = select_names(
        patterns,
        [block.as_site("blocks") for block in blocks],
        owner="store's attention",
        hint=f"vitsee info {store.place}",
    )
    names = {site.name for site in chosen}
    return [block for block in blocks if block.site in names]


def read_heads(arrays: Sequence[Array], slab: Slab) -> dict[Array, NDArray[Any]]:
    """Return (name, group) -> (images, blocks, heads) of a slab's valid images.

    For `SlabMoments`. NaN for a head without spatial mass in an image, or beyond its block's
    heads.
    """
    return {array: slab.attention(*array)[slab.valid] for array in arrays}


def uniform_distance(layout: TokenLayout, window: Grid | None = None) -> float:
    """Return the mean distance, in pixels, of attention that is uniform over the grid.

    116.5 on 14 x 14 cells of 16 px; 0 on a single cell; NaN without a grid or its stride.

    Args:
        layout: positions of the tokens.
        window: (rows, cols) of cells within which attention is uniform; None for the grid.
    """
    if layout.grid is None or layout.stride_px is None:
        return np.nan
    step_y, step_x = layout.stride_px
    total = 0.0
    for (gh, gw), n_windows in window_sizes(layout.grid, window).items():
        dy = np.arange(1 - gh, gh)
        dx = np.arange(1 - gw, gw)
        lengths = np.hypot(dy[:, np.newaxis] * step_y, dx * step_x)
        # Every offset counts by the number of pairs (query, key) that have it.
        sum_of_pairs = (offset_pairs((gh, gw)) * lengths).sum()
        # A query spreads its attention over the gh * gw keys of its window.
        total += n_windows * float(sum_of_pairs / (gh * gw))
    return total / math.prod(layout.grid)


def uniform_in_time(block: StoredAttention) -> tuple[float, float]:
    """Return (distance, share) in time of attention spread evenly over what a query sees.

    The distance is the mean one in sampled frames, the share that of the keys at the query's own
    time. For T times they are (T^2 - 1) / (3 T) times the frames between times, and 1 / T; within
    a frame 0 and 1. NaN for images.
    """
    layout = block.layout
    if layout.frames is None or layout.stride_frames is None:
        return math.nan, math.nan
    distance = share = 0.0
    for (times, _), n in window_sizes(
        (layout.frames, 1), (block.times or layout.frames, 1)
    ).items():
        apart = np.abs(np.subtract.outer(np.arange(times), np.arange(times)))
        distance += n * float(apart.sum()) / times
        share += n
    return distance * layout.stride_frames / layout.frames, share / layout.frames


def offset_pairs(grid: Grid) -> Float:
    """Return the number of pairs of cells at each offset key minus query.

    (2 rows - 1, 2 cols - 1), the offset (0, 0) in the middle.
    """
    (gh, gw) = grid
    dy = np.arange(1 - gh, gh)
    dx = np.arange(1 - gw, gw)
    return np.outer(gh - abs(dy), gw - abs(dx)).astype(np.float64)


def window_sizes(grid: Grid, window: Grid | None) -> Counter[Grid]:
    """Return size -> how many windows of that size tile a grid.

    The last ones of a row or column are cut. Without windows it is the grid itself, once.
    """
    sides = [
        Counter(min(side, n - start) for start in range(0, n, side))
        for n, side in zip(grid, window or grid, strict=True)
    ]
    return Counter(
        {(a, b): n * m for a, n in sides[0].items() for b, m in sides[1].items()}
    )


def keys_seen(block: StoredAttention) -> float:
    """Return how many spatial keys a query sees, on average over queries."""
    layout = block.layout
    grid = layout.grid or (1, layout.n_body)
    times = layout.frames or 1
    in_time = window_sizes((times, 1), (block.times or times, 1))
    seen = sum(n * (a * b) ** 2 for (a, b), n in window_sizes(grid, block.window).items())
    return seen * sum(n * a**2 for (a, _), n in in_time.items()) / layout.n_body


def even_shares(block: StoredAttention) -> NDArray[np.float64]:
    """Return (tokens,) the attention that each token gets if every query spreads its own evenly.

    It is the mean over spatial queries: 1 / tokens without windows. Prefix tokens are seen from
    all windows.
    """
    layout = block.layout
    n_prefix = block.layout.n_prefix
    body = layout.frames or 1, *(layout.grid or (1, layout.n_body))
    sides = block.times or body[0], *(block.window or body[1:])
    lengths = [
        np.array([min(side, n - i // side * side) for i in range(n)])
        for n, side in zip(body, sides, strict=True)
    ]
    seen = np.einsum("t,r,c->trc", *lengths).ravel()
    each = 1 / (seen + n_prefix)
    return np.concatenate([np.full(n_prefix, each.mean()), seen * each / len(seen)])


def with_windows(
    table: Table, members: Iterable[tuple[Store, Sequence[StoredAttention]]]
) -> Table:
    """Return a table with the column `window` and its note, if any block has windows.

    The column is "8 x 8", null where a query sees all keys. Without windows the table is
    unchanged.

    Args:
        table: with rows about blocks.
        members: each store with its blocks.
    """
    window_rows = [
        {"store": store.label, "site": block.site, "window": block.window_text}
        for store, blocks in members
        for block in blocks
        if block.window_text is not None
    ]
    if not window_rows:
        return table
    frame = table.frame
    metric_index = frame.columns.index("metric")
    windows = pl.DataFrame(window_rows).with_columns(
        pl.col("store", "site").cast(pl.Categorical())
    )
    joined = frame.join(windows, on=["store", "site"], how="left", maintain_order="left")
    columns = [*frame.columns[:metric_index], "window", *frame.columns[metric_index:]]
    # Windows of clips have three sides: "2 x 8 x 8".
    has_clips = any(row["window"].count(" x ") > 1 for row in window_rows)
    table.notes["window"] = WINDOW + (WINDOW_OF_CLIPS if has_clips else "")
    return table.with_frame(joined.select(columns))
