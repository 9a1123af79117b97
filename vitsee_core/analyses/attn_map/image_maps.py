"""Attention maps of single images (Walmer et al. 2023, Figs. 11 to 13; Dosovitskiy et al. 2021,
Figs. 6, 13): the class token's and chosen queries' rows per head, and the rollout.

The full attention of these images is read from the store (`extract --attention full`) or recomputed
with the manifest's model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.head_maps import check_heads, map_columns, spatial
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.attention.recompute import (
    Attended,
    attention_of_images,
    find_rows,
    has_full,
)
from vitsee_core.figures.patch_maps.photos import describe_clips, model_inputs
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.moments import Moments, Summary
from vitsee_core.tables.columns import SITE, with_frame_column
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.selectors import TokenSelection

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

Array = NDArray[Any]

COLUMNS = (*SITE, "token", "row", "col", "head", "image", "metric", "value")
ROLLOUTS = {"rollout": True, "rollout_no_residual": False}  # metric -> with residual term
HEAD_MEAN = "head mean"  # beside the names of tokens


def map_images(
    store: Store,
    names: Sequence[str],
    blocks: Sequence[StoredAttention],
    heads: Sequence[int],
    query: Sequence[tuple[int, ...]],
    origin: Provenance | None,
    execution: Execution,
) -> Table:
    """Return the maps of single images, one row per cell of each map of each image.

    The columns are `COLUMNS`. `metric` is `attention` for a head's map, whose `token` is the query:
    `cls`, without a class token `mean` (the mean over spatial queries), or ROW,COL. It is `rollout`
    or `rollout_no_residual` for the model's, whose `token` is `cls` or `mean`. Values are not
    renormalised; prefix keys are left out. The notes hold the pictures, as PNG in base64, under
    `pictures`. Clips have a column `frame`, their queries are FRAME,ROW,COL, and the notes hold
    what `describe_clips` returns under `sheet`.

    Args:
        store: with attention summaries.
        names: images by id or row.
        blocks: the blocks whose heads have maps; a rollout goes through all blocks.
        heads: numbers of the heads of each block; by default all.
        query: cells (row, col) of the grid, of clips (frame, row, col).
        origin: where data and weights are now, to compute what the store lacks.
        execution: on which device, and the progress.

    Raises:
        VitseeError: no such image, block, head or cell; images or weights are gone.
    """
    heads_by_block = check_heads(store, blocks, heads)
    heads_by_site = {
        block.site: block_heads
        for block, block_heads in zip(blocks, heads_by_block, strict=True)
    }
    for block, cell in itertools.product(blocks, query):
        TokenSelection.parse(cell).require(block.layout, block.site)
    rows = find_rows(store, list(dict.fromkeys(names)))
    has_rollout = store.plan.rollout
    _log_what_is_missing(store, blocks)

    def reduce_attention(block: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        """Return what is kept of a block's attention (images, heads, queries, keys): rows of it by
        token, and its mean over heads for the rollout."""
        reduced: dict[str, Tensor] = {}
        if block.site in heads_by_site:
            reduced.update(_query_rows(block, a, query))
        if has_rollout:
            reduced[HEAD_MEAN] = a.mean(1)
        return reduced

    origin = origin or Provenance()
    all_blocks = attention_blocks(store)
    needed_blocks = all_blocks if has_rollout else blocks
    batches = attention_of_images(
        store,
        rows,
        reduce_attention,
        blocks=needed_blocks,
        origin=origin,
        device=execution.device,
        progress=execution.progress,
    )
    columns_by_row: dict[int, list[dict[str, Any]]] = {}
    for batch in batches:
        for i, row in enumerate(batch.rows.tolist()):
            columns = _head_columns(store, batch, i, blocks, heads_by_site)
            if has_rollout:
                columns += _rollout_columns(store, batch, i, all_blocks)
            columns_by_row[row] = columns
    # Batches are in the store's order; the table is in that of the names.
    in_order = [columns for row in rows.tolist() for columns in columns_by_row[row]]
    is_stored = has_full(store, needed_blocks)
    notes: dict[str, Any] = {
        "images": [str(store.samples.id[row]) for row in rows],
        "attention": "stored (float16)" if is_stored else "recomputed",
        **_pictures(store, rows.tolist(), needed_blocks, query, origin.data),
    }
    layouts = [block.layout for block in blocks]
    return Table.concat(in_order, with_frame_column(COLUMNS, layouts), notes)


def _log_what_is_missing(store: Store, blocks: Sequence[StoredAttention]) -> None:
    """Log why there is no rollout, and what stands for a class token."""
    if not store.plan.rollout:
        reason = store.manifest.left_out.get("rollout", "the store has none")
        log.info("%s: no rollout: %s", store.label, reason)
    if any(not block.layout.cls_tokens for block in blocks):
        log.info("%s has no class token: mean over spatial queries instead", store.label)


def _head_columns(
    store: Store,
    batch: Attended,
    i: int,
    blocks: Sequence[StoredAttention],
    heads_by_site: Mapping[str, NDArray[np.int64]],
) -> list[dict[str, Any]]:
    """Return the columns of the heads' maps of the i-th image of a batch, by block and query."""
    image = str(store.samples.id[batch.rows[i]])
    columns = []
    for block in blocks:
        heads = heads_by_site[block.site]
        for token, values in batch.values[block.site].items():
            if token == HEAD_MEAN:
                continue
            # (images, heads, keys) -> (chosen heads, rows, cols)
            maps = spatial(values[i][heads], block.layout)
            columns.append(
                _map_columns_of_image(
                    store, image, block, token, maps, heads=heads.tolist()
                )
            )
    return columns


def _rollout_columns(
    store: Store, batch: Attended, i: int, all_blocks: Sequence[StoredAttention]
) -> list[dict[str, Any]]:
    """Return the columns of both rollouts of the i-th image of a batch."""
    image = str(store.samples.id[batch.rows[i]])
    # (1, tokens, tokens) of each block
    head_means = [batch.values[block.site][HEAD_MEAN][i : i + 1] for block in all_blocks]
    last = all_blocks[-1]
    token = "cls" if last.layout.cls_tokens else "mean"
    columns = []
    for metric, residual in ROLLOUTS.items():
        maps = spatial(roll(head_means, last.layout, residual), last.layout)
        columns.append(
            _map_columns_of_image(
                store, image, last, token, maps, heads=[None], metric=metric
            )
        )
    return columns


def _pictures(
    store: Store,
    rows: Sequence[int],
    blocks: Sequence[StoredAttention],
    query: Sequence[tuple[int, ...]],
    data: str | None,
) -> dict[str, Any]:
    """Return the notes with the pictures of images, or with what strips of clips need."""
    if store.plan.clip is not None:
        layouts = [block.layout for block in blocks]
        n = layouts[0].frames or 1
        # The middle of each query's frame, as a share of the sampled frames.
        times = [(cell[0] + 0.5) / n for cell in query]
        return {"sheet": describe_clips(store, rows, layouts, data, times)}
    inputs = model_inputs(store, rows, data)
    pictures = {
        str(store.samples.id[row]): encode(picture) for row, picture in inputs.items()
    }
    return {"pictures": pictures}


def mean_rollout(
    store: Store,
    rows: NDArray[np.int64],
    blocks: Sequence[StoredAttention],
    origin: Provenance | None,
    execution: Execution,
) -> Summary:
    """Return the moments over these images of the rollout without residual term, (tokens,)."""
    moments = Moments()

    def mean_over_heads(_: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        """Return attention (images, heads, queries, keys) averaged over heads."""
        return {HEAD_MEAN: a.mean(1)}

    batches = attention_of_images(
        store,
        rows,
        mean_over_heads,
        blocks=blocks,
        origin=origin,
        device=execution.device,
        progress=execution.progress,
    )
    for batch in batches:
        means = [batch.values[block.site][HEAD_MEAN] for block in blocks]
        moments.add(roll(means, blocks[0].layout, residual=False))
    return moments.summary()


def roll(head_means: Sequence[Array], layout: TokenLayout, residual: bool) -> Float:
    """Return the attention rollout (Abnar & Zuidema 2020), (images, tokens) in float64.

    Args:
        head_means: each block's attention averaged over heads, (images, tokens, tokens).
        layout: of the tokens.
        residual: whether each block's matrix is averaged with the identity, for its skip.
    """
    import torch

    from vitsee_core.summaries import rollout

    # Float64: a product over all blocks would lose digits in what stores keep, float16.
    tensors = [torch.from_numpy(mean.astype(np.float64)) for mean in head_means]
    return rollout(tensors, layout, residual).numpy()


def _query_rows(
    block: StoredAttention, a: Tensor, query: Sequence[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the rows of attention of the class token and of each query.

    Args:
        block: whose attention it is.
        a: (images, heads, queries, keys).
        query: cells of the grid.

    Returns:
        The token's name -> (images, heads, keys). Without a class token the first is `mean`, over
        spatial queries.
    """
    layout = block.layout
    if layout.cls_tokens:
        name = "cls"
        first = layout.cls_tokens  # of clips frame by frame there is one a frame
    else:
        name = "mean"
        first = range(layout.n_prefix, layout.n_tokens)
    rows = {name: a[:, :, first.start : first.stop].mean(2)}
    for cell in query:
        selection = TokenSelection.parse(cell)
        (token,) = selection.members(layout)
        rows[str(selection)] = a[:, :, token]
    return rows


def _map_columns_of_image(
    store: Store,
    image: str,
    block: StoredAttention,
    token: str,
    maps: Array,
    *,
    heads: Sequence[int | None],
    metric: str = "attention",
) -> dict[str, Any]:
    """Return the table's columns for the maps of one image, block and token.

    Args:
        store: of the image.
        image: its id.
        block: whose maps they are.
        token: the query.
        maps: (heads, rows, cols).
        heads: their numbers; None for a map of no head.
        metric: what the values are.
    """
    uncounted = np.zeros(len(maps), np.int64)  # a single image has no number of images
    numbers = np.array(heads, object)
    columns = map_columns(
        store, block, numbers, maps.astype(np.float64), uncounted, metric
    )
    columns["image"] = image
    columns["token"] = token
    return columns
