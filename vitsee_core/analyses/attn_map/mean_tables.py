"""Maps, rollouts and numbers of heads as means over images: the table of one store and kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.attn_map import sinks
from vitsee_core.analyses.attn_map.image_maps import mean_rollout
from vitsee_core.attention.head_maps import (
    SUMS,
    check_class_token,
    check_heads,
    map_columns,
    mean_maps,
    per_query,
    spatial,
    sum_slabs,
)
from vitsee_core.attention.heads import StoredAttention, attention_blocks, read_heads
from vitsee_core.figures.patch_maps.photos import frames_seen
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.moments import INTERVAL_METHOD, SlabMoments, Summary
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.tables.columns import SITE, site_columns, with_frame_column
from vitsee_core.tables.results import Table

if TYPE_CHECKING:
    from vitsee_stores import Store

# Kind -> the stored number of each head.
NUMBERS = {"prefix-mass": "prefix_mass", "entropy": "entropy"}
SPREAD = ("value", "std", "low", "high", "n_images")
MAP_COLUMNS = (*SITE, "row", "col", "head", "metric", "value", "n_images")
ROLLOUT_COLUMNS = (*SITE, "row", "col", "head", "metric", *SPREAD)
NUMBER_COLUMNS = (*SITE, "head", "metric", *SPREAD)


def mean_table(
    store: Store,
    blocks: list[StoredAttention],
    kind: str,
    *,
    heads: Sequence[int],
    coverage: bool,
    residual: bool,
    origin: Provenance | None,
    execution: Execution,
) -> Table:
    """Return the table of one store and kind of map or number.

    Args:
        store: with attention summaries.
        blocks: the chosen blocks.
        kind: one of `attn_map.KINDS`.
        heads: numbers of the heads of each block; empty for all.
        coverage: correct `aligned` for the number of queries that have a key at each offset.
        residual: have the residual term in a `rollout`.
        origin: where data and weights are now, for recomputing.
        execution: which images, and what the work may use.

    Raises:
        MissingInput: the store has no such summaries, or no class token.
        VitseeError: a block has no such head.
    """
    # Maps are kept as one sum for each slab, numbers for each image.
    images = execution.rows(store, whole_slabs=kind in SUMS)
    notes: dict[str, Any] = {"kind": kind, "seed": execution.seed}
    notes["images"] = images.describe()
    frames = frames_seen(store)
    if frames:
        notes["clip"] = frames
    if kind == "rollout":
        notes["interval"] = INTERVAL_METHOD
        summary, block = _summarise_rollout(store, images, residual, origin, execution)
        metric = "rollout" if residual else "rollout_no_residual"
        columns = _rollout_columns(store, block, summary, metric)
        return Table.concat(
            [columns], with_frame_column(ROLLOUT_COLUMNS, [block.layout]), notes
        )
    heads_by_block = check_heads(store, blocks, heads)
    if kind == "sink":
        notes["interval"] = INTERVAL_METHOD
        notes["sink_share_interval"] = SHARES
        notes["threshold"] = sinks.THRESHOLD
        rows = sinks.sink_rows(store, blocks, heads_by_block, images, execution)
        return Table.from_rows(rows, sinks.COLUMNS, notes)
    if kind in NUMBERS:
        notes["interval"] = INTERVAL_METHOD
        rows = _number_rows(
            store, blocks, heads_by_block, NUMBERS[kind], images, execution
        )
        return Table.from_rows(rows, NUMBER_COLUMNS, notes)
    if kind == "mean-cls":
        without_cls = [block for block in blocks if not block.layout.cls_tokens]
        check_class_token(store, without_cls, "take --kind mean-spatial")
    columns_of_blocks = _mean_map_columns(
        store,
        blocks,
        heads_by_block,
        kind,
        coverage=coverage,
        rows=images,
        execution=execution,
    )
    # Offsets in time are not places of a token, so that aligned maps have no column `frame`.
    layouts = [] if kind == "aligned" else [block.layout for block in blocks]
    return Table.concat(columns_of_blocks, with_frame_column(MAP_COLUMNS, layouts), notes)


def _mean_map_columns(
    store: Store,
    blocks: Sequence[StoredAttention],
    heads_by_block: Sequence[NDArray[np.int64]],
    kind: str,
    *,
    coverage: bool,
    rows: Rows,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Return the columns of each block's maps, means over the chosen images.

    Args:
        store: with attention summaries.
        blocks: of the store.
        heads_by_block: the chosen heads of each block.
        kind: one of `SUMS`.
        coverage: correct the maps for the number of queries at each offset.
        rows: the chosen images, whole slabs.
        execution: resources.
    """
    metric = kind.replace("-", "_")
    if coverage:
        metric += "_coverage"
    keys = list(dict.fromkeys((SUMS[kind], block.group) for block in blocks))
    with counting(execution.progress, rows.n):
        total = sum_slabs(store, keys, rows, execution)
    columns = []
    for block, heads in zip(blocks, heads_by_block, strict=True):
        # Entry 0: `sum_slabs` adds up all slabs unless it is asked for parts. (heads, ...)
        sums = total.sums[SUMS[kind], block.group][0, block.row, heads]
        maps, counts = mean_maps(sums, int(total.n_images[0]), block.layout, kind)
        if coverage:
            maps = per_query(maps, block.window)
        columns.append(map_columns(store, block, heads, maps, counts, metric))
    return columns


def _summarise_rollout(
    store: Store,
    rows: Rows,
    residual: bool,
    origin: Provenance | None,
    execution: Execution,
) -> tuple[Summary, StoredAttention]:
    """Return the moments over images of the rollout to each token, and the block where it starts.

    Raises:
        MissingInput: the attention of the blocks cannot be multiplied; says why.
    """
    store.attention("rollout")  # raises if there is none
    blocks = attention_blocks(store)
    if residual:
        key = ("rollout", "")
        make = partial(SlabMoments, partial(read_heads, (key,)))
        with counting(execution.progress, rows.n):
            folded = execution.fold(store, make, rows)
        return folded.result()[key], blocks[-1]
    # Stores keep rollouts with the residual term alone.
    row_indices = np.flatnonzero(rows.mask & store.valid)
    return mean_rollout(store, row_indices, blocks, origin, execution), blocks[-1]


def _rollout_columns(
    store: Store, block: StoredAttention, summary: Summary, metric: str
) -> dict[str, Any]:
    """Return the columns of a rollout, one row per cell of the grid and no head."""
    layout = block.layout
    assert layout.grid is not None
    # `map_columns` is about heads: it gets the rollout as a single one, whose number is replaced.
    head = np.zeros(1, np.int64)
    means = spatial(summary.mean, layout)[None]  # (1, rows, cols)
    columns = map_columns(store, block, head, means, head, metric)
    columns["std"] = spatial(summary.std, layout).ravel()
    columns["low"] = spatial(summary.low, layout).ravel()
    columns["high"] = spatial(summary.high, layout).ravel()
    columns["head"] = None
    counts = spatial(summary.n.astype(np.float64), layout)
    columns["n_images"] = counts.ravel().astype(np.int64)
    return columns


def _number_rows(
    store: Store,
    blocks: Sequence[StoredAttention],
    heads_by_block: Sequence[NDArray[np.int64]],
    metric: str,
    rows: Rows,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Return a number of each chosen head, its mean over images with the interval.

    Args:
        store: with attention summaries.
        blocks: of the store.
        heads_by_block: the chosen heads of each block.
        metric: one of `NUMBERS`, as stores name it.
        rows: the chosen images.
        execution: resources.
    """
    keys = tuple(dict.fromkeys((metric, block.group) for block in blocks))
    make = partial(SlabMoments, partial(read_heads, keys))
    with counting(execution.progress, rows.n):
        summaries = execution.fold(store, make, rows).result()
    table_rows = []
    for block, heads in zip(blocks, heads_by_block, strict=True):
        summary = summaries[metric, block.group]
        for head in heads.tolist():
            row = site_columns(store, block)
            row["metric"] = metric
            row["head"] = head
            row.update(summary.cells((block.row, head)))
            table_rows.append(row)
    return table_rows
