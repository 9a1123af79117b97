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
# The table's note on its column `window`.
WINDOW = (
    "blocks whose queries see the keys of their window alone, of so many rows x columns "
    "of cells, tiling the grid from its top left corner: distances, shares and maps are "
    "over what a query sees, uniform attention is uniform within the window"
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
        """The text of the column `window`: "8 x 8", for clips "2 x 8 x 8" with the cells in time.

        None if a query sees all keys.
        """
        layout = self.layout
        sides = self.window or self.layout.grid
        if sides is None or (self.window is None and self.times is None):
            return None
        rows, cols = sides
        if layout.frames is None:
            return f"{rows} x {cols}"
        return f"{self.times or layout.frames} x {rows} x {cols}"


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
    # Windows of clips have three sides, the first one in time.
    times: int | None = window[0]
    if sides == layout.grid:
        sides = None
    if times == layout.frames:
        times = None
    return sides, times


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
        why = store.manifest.left_out.get("attention")
        if not why:
            why = "it was extracted with --attention none (expected --attention summary)"
        raise MissingInput(f"{store.label} has no attention summaries: {why}")
    depths = {
        name: (depth, rel_depth) for name, depth, rel_depth in store.manifest.plan.places
    }
    blocks = []
    for group in groups:
        window, times = _window_of_group(group)
        group_blocks = zip(group.blocks, group.n_heads, strict=True)
        for row, (name, n_heads) in enumerate(group_blocks):
            depth, rel_depth = depths[name]
            block = StoredAttention(
                name,
                depth=depth,
                rel_depth=rel_depth,
                layout=group.layout,
                group=group.prefix,
                row=row,
                n_heads=n_heads,
                window=window,
                times=times,
            )
            blocks.append(block)
    # Groups are blocks of one grid, which need not follow each other in the model.
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
    distance = 0.0
    share = 0.0
    # Time as a grid with a single column.
    windows = window_sizes((layout.frames, 1), (block.times or layout.frames, 1))
    for (n_times, _), n_windows in windows.items():
        times = np.arange(n_times)
        apart = np.abs(np.subtract.outer(times, times))
        # Of n_times queries each spreads its attention over n_times keys.
        distance += n_windows * float(apart.sum()) / n_times
        share += n_windows
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
    window_height, window_width = window or grid
    heights = _segment_lengths(grid[0], window_height)
    widths = _segment_lengths(grid[1], window_width)
    sizes = Counter[Grid]()
    for height, n_rows in heights.items():
        for width, n_cols in widths.items():
            sizes[height, width] = n_rows * n_cols
    return sizes


def _segment_lengths(n: int, length: int) -> Counter[int]:
    """Return length -> how many segments of that length n cells divide into; the last is cut."""
    return Counter(min(length, n - start) for start in range(0, n, length))


def keys_seen(block: StoredAttention) -> float:
    """Return how many spatial keys a query sees, on average over queries."""
    layout = block.layout
    # Tokens without a grid lie in a row.
    grid = layout.grid or (1, layout.n_body)
    n_times = layout.frames or 1
    # A window of n cells has n queries with n keys each: n^2 pairs.
    n_pairs = 0
    for (height, width), n_windows in window_sizes(grid, block.window).items():
        n_pairs += n_windows * (height * width) ** 2
    n_pairs_in_time = 0
    for length, n_windows in _segment_lengths(n_times, block.times or n_times).items():
        n_pairs_in_time += n_windows * length**2
    return n_pairs * n_pairs_in_time / layout.n_body


def even_shares(block: StoredAttention) -> NDArray[np.float64]:
    """Return (tokens,) the attention that each token gets if every query spreads its own evenly.

    It is the mean over spatial queries: 1 / tokens without windows. Prefix tokens are seen from
    all windows.
    """
    layout = block.layout
    n_prefix = block.layout.n_prefix
    n_times = layout.frames or 1
    rows, cols = layout.grid or (1, layout.n_body)
    window_height, window_width = block.window or (rows, cols)
    # The keys that the query of each cell sees: the product of its window's sides.
    seen = np.einsum(
        "t,r,c->trc",
        _lengths_by_cell(n_times, block.times or n_times),
        _lengths_by_cell(rows, window_height),
        _lengths_by_cell(cols, window_width),
    ).ravel()
    # A query spreads the mass 1 over these and the prefix tokens.
    per_key = 1 / (seen + n_prefix)
    # A token is seen by as many queries as it sees keys, since windows tile the grid.
    spatial_shares = seen * per_key / len(seen)
    return np.concatenate([np.full(n_prefix, per_key.mean()), spatial_shares])


def _lengths_by_cell(n: int, length: int) -> NDArray[np.int64]:
    """Return (n,) the length of the segment that each cell is in; the last segment is cut."""
    return np.array([min(length, n - i // length * length) for i in range(n)])


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
    # Before the metric: it says what a row is about.
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
