"""Mean attention maps of heads, from the sums over slabs in a store.

A map is an array over spatial keys, (rows, cols) of the grid, or for `aligned` over the offsets key
minus query, (2 rows - 1, 2 cols - 1), starting at -(rows - 1) and -(cols - 1). Of clips a map over
keys is (frames, rows, cols); one over offsets adds those of all times up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.heads import (
    Grid,
    StoredAttention,
    attention_blocks,
    offset_pairs,
    window_sizes,
)
from vitsee_core.runtime.store_selection import StoreSelection, select_each
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.tables.columns import site_columns
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.manifest import by_reason

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab, Store
    from vitsee_stores.layout import TokenLayout

Key = tuple[str, str]  # array and group

log = logging.getLogger(__name__)

# Follows a block's name in the manifest's list of what was left out.
LEFT_OUT_SUFFIX = " attention"
SUMS = {"mean-cls": "cls_map", "mean-spatial": "received", "aligned": "aligned"}
ALIGNED_FRAMES = "aligned_frames"  # of clips, by the offset in time


class SlabSums(NamedTuple):
    """Sums of attention maps over images, in parts: runs of consecutive slabs.

    Attributes:
        sums: (array, group) -> (parts, blocks, ...) float64, NaN where an image has none.
        n_images: (parts,) valid images in each part.
    """

    sums: dict[Key, Float]
    n_images: NDArray[np.int64]


def sum_slabs(
    store: Store, keys: Sequence[Key], rows: Rows, execution: Execution, *, parts: int = 1
) -> SlabSums:
    """Return the stored sums of some slabs, added in float64 to at most `parts` parts.

    Memory: `parts` times the arrays, and `jobs` slabs of them (fewer if `memory` is short).

    Args:
        store: the store.
        keys: arrays and their groups; of arrays that are stored per image, the sum is that over
            the valid images.
        rows: complete slabs; they are counted in the execution's progress.
        execution: parallel work, memory and progress.
        parts: the most parts, for spreads over parts.
    """
    counted = rows.mask & store.valid
    # Slabs without an image that counts are not read.
    n_slabs = 0
    for k in range(store.n_slabs):
        if counted[store.plan.rows(k)].any():
            n_slabs += 1
    parts = max(1, min(parts, n_slabs))
    sums: dict[Key, Float] = {}
    n_images = np.zeros(parts, np.int64)
    work = partial(_read_slab_sums, tuple(keys))
    slab_bytes = sum(store.attention(*key).size_bytes for key in keys) // store.n_slabs
    jobs = execution.jobs
    # Per job: the stored array, its valid rows, and the sums in float64.
    if execution.memory is not None:
        jobs = min(jobs, max(1, execution.memory // max(1, 3 * slab_bytes)))
    # In the order of slabs, so that sums are equal to the bit however many jobs there are.
    slab_sums = each_slab(
        store, work, rows=rows, jobs=jobs, map=execution.map, progress=execution.progress
    )
    for i, (n, arrays) in enumerate(slab_sums):
        # Runs of slabs whose lengths differ by one at most.
        part_index = i * parts // n_slabs
        n_images[part_index] += n
        for key, array in zip(keys, arrays, strict=True):
            if key not in sums:
                sums[key] = np.zeros((parts, *array.shape))
            sums[key][part_index] += array
    return SlabSums(sums, n_images)


def _read_slab_sums(keys: Sequence[Key], slab: Slab) -> tuple[int, list[NDArray[Any]]]:
    """Return the number of valid images in a slab, and the sum of each array over them."""
    sums = []
    for name, group in keys:
        if name in (*SUMS.values(), ALIGNED_FRAMES):
            sums.append(slab.attention_sums(name, group))
        else:
            sums.append(slab.attention(name, group)[slab.valid].sum(0, dtype=np.float64))
    return int(slab.valid.sum()), sums


def spatial(per_token: Float, layout: TokenLayout) -> Float:
    """Return (..., tokens) without prefix tokens on the grid, not renormalised.

    The result is (..., rows, cols), for clips (..., frames, rows, cols).
    """
    assert layout.grid is not None
    return per_token[..., layout.n_prefix :].reshape(*per_token.shape[:-1], *layout.body)


def mean_maps(
    sums: Float, n_images: int, layout: TokenLayout, kind: str
) -> tuple[Float, NDArray[np.int64]]:
    """Return the means over images of one block's heads, and the number of images in each.

    Maps of `mean-cls` and `mean-spatial` are not renormalised, so that a map's total is 1 minus
    the mass on prefix tokens. Maps of `aligned` have the total mass 1; an image without spatial
    mass in a head is excluded there. They are NaN if no image is left.

    Args:
        sums: (heads, ...) as stored under `SUMS[kind]`.
        n_images: the images in the sums.
        layout: the block's tokens.
        kind: one of `SUMS`.
    """
    n_heads = len(sums)
    if kind != "aligned":
        return spatial(sums / n_images, layout), np.full(n_heads, n_images)
    # Each image's map has mass 1 or 0.
    mass = sums.sum((-2, -1), keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        maps = np.where(mass > 0, sums / mass, np.nan)
    counted = np.nan_to_num(np.rint(mass[:, 0, 0])).astype(np.int64)
    return maps, counted


def query_coverage(grid: Grid, window: Grid | None = None) -> Float:
    """Return the share of queries that have a key at each offset, in their window if any.

    (2 rows - 1, 2 cols - 1): 1 in the middle, 1 / cells in the corners.
    """
    return _over_windows(grid, window, offset_pairs)


def uniform_map(grid: Grid, window: Grid | None = None) -> Float:
    """Return the aligned map of uniform attention, (2 rows - 1, 2 cols - 1) of mass 1.

    It is `query_coverage` divided by its sum if all windows have one size.
    """
    return _over_windows(
        grid, window, lambda size: offset_pairs(size) / (size[0] * size[1])
    )


def _over_windows(
    grid: Grid, window: Grid | None, window_map: Callable[[Grid], Float]
) -> Float:
    """Return the sum of maps by offset of all windows of a grid, divided by its cells.

    window_map: size of a window -> its map by offset, (2 rows - 1, 2 cols - 1).
    """
    gh, gw = grid
    total = np.zeros((2 * gh - 1, 2 * gw - 1))
    for (height, width), n_windows in window_sizes(grid, window).items():
        # The offset (0, 0) is at [gh - 1, gw - 1] of the grid's map.
        rows = slice(gh - height, gh + height - 1)
        cols = slice(gw - width, gw + width - 1)
        total[rows, cols] += n_windows * window_map((height, width))
    return total / (gh * gw)


def per_query(aligned: Float, window: Grid | None = None) -> Float:
    """Return mass by offset as the mean attention of the queries that have a key there.

    It is constant for uniform attention, whose mass is not, and NaN where no query has a key.

    Args:
        aligned: (..., 2 rows - 1, 2 cols - 1) mass by offset.
        window: rows and columns of the windows that queries see; None for the grid.
    """
    height, width = aligned.shape[-2:]
    coverage = query_coverage(((height + 1) // 2, (width + 1) // 2), window)
    # Divided by 1 where there is no query: NumPy computes both sides of `where`.
    divisor = np.where(coverage > 0, coverage, 1)
    with np.errstate(invalid="ignore"):
        return np.where(coverage > 0, aligned / divisor, np.nan)


def blocks_of_each(
    stores: Sequence[Store], sites: Sequence[str]
) -> StoreSelection[StoredAttention]:
    """Return the stores with attention, and the blocks of each that `sites` choose.

    Blocks whose attention extract left out are logged with their reasons.

    Raises:
        MissingInput: no store has attention.
        SiteError: a pattern matches no block, or one without attention.
    """
    selection = select_each(stores, sites, _select_attention_blocks)
    for store in selection.stores:
        for line in by_reason(_without_attention(store)):
            log.info("%s lacks the attention of %s", store.label, line)
    return selection


def chosen_blocks(store: Store, sites: Sequence[str]) -> list[StoredAttention]:
    """Return the blocks of one store that `sites` choose; errors are those of `blocks_of_each`."""
    return blocks_of_each([store], sites).chosen[0]


def _select_attention_blocks(store: Store, sites: Sequence[str]) -> list[StoredAttention]:
    """Return the blocks that `sites` choose; refuse one whose attention extract left out."""
    left_out = _without_attention(store)
    for site in sites:
        if site in left_out:
            raise SiteError(f"{store.label} has no attention of {site}: {left_out[site]}")
    return attention_blocks(store, sites)


def _without_attention(store: Store) -> dict[str, str]:
    """Return block -> why extract left out its attention."""
    return {
        name.removesuffix(LEFT_OUT_SUFFIX): reason
        for name, reason in store.manifest.left_out.items()
        if name.endswith(LEFT_OUT_SUFFIX)
    }


def check_class_token(
    store: Store, blocks: Sequence[StoredAttention], instead: str
) -> None:
    """Refuse blocks without a class token.

    Raises:
        MissingInput: names the block; `instead` says what to run in place of this.
    """
    for block in blocks:
        if block.layout.cls is None:
            prefix_names = ", ".join(block.layout.prefix) or "none"
            raise MissingInput(
                f"{store.label} has no class token in {block.site} "
                f"(prefix tokens: {prefix_names}); {instead}"
            )


def check_heads(
    store: Store, blocks: Sequence[StoredAttention], heads: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Return the chosen heads of each block; without a choice all.

    Raises:
        VitseeError: a head that some block does not have.
    """
    for block in blocks:
        missing = [head for head in heads if not 0 <= head < block.n_heads]
        if missing:
            raise VitseeError(
                f"{store.label} has no head {missing[0]} in {block.site}; expected 0 to "
                f"{block.n_heads - 1}"
            )
    if heads:
        return [np.array(sorted(set(heads)), np.int64) for _ in blocks]
    # Blocks may have different numbers of heads.
    return [np.arange(block.n_heads, dtype=np.int64) for block in blocks]


def map_columns(
    store: Store,
    block: StoredAttention,
    heads: NDArray[np.int64],
    maps: Float,
    n_images: NDArray[np.int64],
    metric: str,
) -> dict[str, Any]:
    """Return the rows of one block's maps as columns, a row per head and cell.

    Args:
        store: the store.
        block: the block.
        heads: (heads,) their numbers.
        maps: (heads, height, width), for clips (heads, frames, height, width).
        n_images: (heads,) the images in each map.
        metric: the name of the maps; those of `aligned` have offsets in row and col, the others
            cells.
    """
    n_heads, *in_time, height, width = maps.shape
    n_frames = in_time[0] if in_time else 1
    n_cells = n_frames * height * width
    rows = np.arange(height)
    cols = np.arange(width)
    if metric.startswith("aligned"):
        # The offset 0 is in the middle: heights and widths of these maps are odd.
        rows = rows - height // 2
        cols = cols - width // 2
    columns = site_columns(store, block)
    columns["metric"] = metric
    columns["head"] = np.repeat(heads, n_cells)
    # All columns are in the order of maps.ravel(): head, frame, row, col.
    if in_time:
        frames = np.repeat(np.arange(n_frames), height * width)
        columns["frame"] = np.tile(frames, n_heads)
    columns["row"] = np.tile(np.repeat(rows, width), n_heads * n_frames)
    columns["col"] = np.tile(cols, n_heads * n_frames * height)
    columns["value"] = maps.ravel()
    columns["n_images"] = np.repeat(n_images, n_cells)
    return columns
