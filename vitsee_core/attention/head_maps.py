"""Mean attention maps of heads, from the sums over slabs in a store.

A map is an array over spatial keys, (rows, cols) of the grid, or for `aligned` over the offsets key
minus query, (2 rows - 1, 2 cols - 1), starting at -(rows - 1) and -(cols - 1). Of clips a map over
keys is (frames, rows, cols); one over offsets adds those of all times up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class SlabSums:
    """Sums of attention maps over images."""

    # (array, group) -> (parts, blocks, ...) float64, NaN where an image has none
    sums: dict[Key, Float]
    n_images: NDArray[
        np.int64
    ]  # (parts,) valid images in each part, a run of consecutive slabs


def sum_slabs(
    store: Store, keys: Sequence[Key], rows: Rows, execution: Execution, *, parts: int = 1
) -> SlabSums:
    """Return the stored sums of some slabs, added in float64 to at most `parts` parts.

    Of arrays that are stored per image, they are the sums over the valid images.

    Memory: `parts` times the arrays, and `jobs` slabs of them (fewer if `memory` is short). `rows`
    must be whole slabs; they are counted in the execution's progress.
    """
    counted = rows.mask & store.valid
    places = [store.plan.rows(k) for k in range(store.n_slabs)]
    n_slabs = sum(bool(counted[place].any()) for place in places)
    parts = max(1, min(parts, n_slabs))
    sums: dict[Key, Float] = {}
    n_images = np.zeros(parts, np.int64)
    work = partial(_read_slab_sums, tuple(keys))
    slab_bytes = sum(store.attention(*key).size_bytes for key in keys) // store.n_slabs
    jobs = execution.jobs
    if execution.memory is not None:
        jobs = min(jobs, max(1, execution.memory // max(1, 3 * slab_bytes)))
    of_slabs = each_slab(
        store, work, rows=rows, jobs=jobs, map=execution.map, progress=execution.progress
    )
    for i, (n, arrays) in enumerate(of_slabs):
        part = i * parts // n_slabs
        n_images[part] += n
        for key, array in zip(keys, arrays, strict=True):
            if key not in sums:
                sums[key] = np.zeros((parts, *array.shape))
            sums[key][part] += array
    return SlabSums(sums, n_images)


def _read_slab_sums(keys: Sequence[Key], slab: Slab) -> tuple[int, list[NDArray[Any]]]:
    sums = []
    for name, group in keys:
        if name in (*SUMS.values(), ALIGNED_FRAMES):
            sums.append(slab.attention_sums(name, group))
        else:
            sums.append(slab.attention(name, group)[slab.valid].sum(0, dtype=np.float64))
    return int(slab.valid.sum()), sums


def spatial(per_token: Float, layout: TokenLayout) -> Float:
    """(..., tokens) without prefix tokens as (..., rows, cols), of clips (..., frames, rows, cols);
    not renormalised."""
    assert layout.grid is not None
    return per_token[..., layout.n_prefix :].reshape(*per_token.shape[:-1], *layout.body)


def mean_maps(
    sums: Float, n_images: int, layout: TokenLayout, kind: str
) -> tuple[Float, NDArray[np.int64]]:
    """Return the means over images of one block's heads, and the number of images in each.

    sums: (heads, ...) as stored under `SUMS[kind]`. `mean-cls` and `mean-spatial`: attention
    without renormalisation, so that a map's total is 1 minus the mass on prefix tokens. `aligned`:
    total mass 1; an image without spatial mass in a head is excluded there. NaN if no image is
    left.
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
    grid: Grid, window: Grid | None, each: Callable[[Grid], Float]
) -> Float:
    """Return the sum of maps by offset of all windows of a grid, divided by its cells.

    each: size of a window -> its map by offset, (2 rows - 1, 2 cols - 1).
    """
    gh, gw = grid
    total = np.zeros((2 * gh - 1, 2 * gw - 1))
    for (height, width), n_windows in window_sizes(grid, window).items():
        # The offset (0, 0) is at [gh - 1, gw - 1] of the grid's map.
        rows = slice(gh - height, gh + height - 1)
        cols = slice(gw - width, gw + width - 1)
        total[rows, cols] += n_windows * each((height, width))
    return total / (gh * gw)


def per_query(aligned: Float, window: Grid | None = None) -> Float:
    """Mass by offset, (..., 2 rows - 1, 2 cols - 1), as the mean attention of the queries that have
    a key there: constant for uniform attention, whose mass is not. NaN where no query has one."""
    height, width = aligned.shape[-2:]
    coverage = query_coverage(((height + 1) // 2, (width + 1) // 2), window)
    with np.errstate(invalid="ignore"):
        return np.where(
            coverage > 0, aligned / np.where(coverage > 0, coverage, 1), np.nan
        )


def blocks_of_each(
    stores: Sequence[Store], sites: Sequence[str]
) -> StoreSelection[StoredAttention]:
    """The blocks of every store that `sites` choose (see `attention_blocks`, `select_each`); those
    whose attention extract left out are named with their reasons.

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
    return [
        np.array(sorted(set(heads)) or range(block.n_heads), np.int64) for block in blocks
    ]


def map_columns(
    store: Store,
    block: StoredAttention,
    heads: NDArray[np.int64],
    maps: Float,
    n_images: NDArray[np.int64],
    metric: str,
) -> dict[str, Any]:
    """The rows of one block's maps, (heads, height, width), of clips (heads, frames, height,
    width), as a block of a table. `aligned` maps have offsets in row and col, the others cells."""
    n_heads, *in_time, height, width = maps.shape
    first = (-(height // 2), -(width // 2)) if metric.startswith("aligned") else (0, 0)
    n_frames = in_time[0] if in_time else 1
    cells = n_frames * height * width
    frames = np.tile(np.repeat(np.arange(n_frames), height * width), n_heads)
    return {
        **site_columns(store, block),
        "metric": metric,
        "head": np.repeat(heads, cells),
        **({"frame": frames} if in_time else {}),
        "row": np.tile(
            np.repeat(np.arange(height) + first[0], width), n_heads * n_frames
        ),
        "col": np.tile(np.arange(width) + first[1], n_heads * n_frames * height),
        "value": maps.ravel(),
        "n_images": np.repeat(n_images, cells),
    }
