"""Attention maps of single images (Walmer et al. 2023, Figs. 11 to 13; Dosovitskiy et al. 2021,
Figs. 6, 13): the class token's and chosen queries' rows per head, and the rollout.

The full attention of these images is read from the store (`extract --attention full`) or recomputed
with the manifest's model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.head_maps import check_heads, map_columns, spatial
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.attention.recompute import attention_of_images, find_rows, has_full
from vitsee_core.figures.patch_maps.photos import describe_clips, model_inputs
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.moments import Moments, Summary
from vitsee_core.tables.columns import SITE, in_time
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.selectors import TokenSelection

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

Array = NDArray[Any]

COLUMNS = (*(*SITE, "token", "row", "col", "head", "image"), *("metric", "value"))
ROLLOUTS = {"rollout": True, "rollout_no_residual": False}
HEAD_MEAN = "head mean"


def map_images(
    store: Store,
    names: Sequence[str],
    shown: Sequence[StoredAttention],
    heads: Sequence[int],
    query: Sequence[tuple[int, ...]],
    origin: Provenance | None,
    execution: Execution,
) -> Table:
    """One row per cell of each map of each image.

    Columns: `COLUMNS`. `metric` is `attention` (of a head; `token` names the query: `cls`, without
    a class token `mean`, the mean over spatial queries, or ROW,COL), `rollout` or
    `rollout_no_residual` (of the whole model; `token` `cls` or `mean`). Values are not
    renormalised; prefix keys are left out. The notes hold the pictures, as PNG in base64, under
    `pictures`. Of clips there is a column `frame`, a query is FRAME,ROW,COL, and the notes hold
    what `describe_clips` says under `sheet`.

    Args:
        store: with attention summaries.
        names: images by id or row.
        shown: the blocks whose heads are shown.
        heads: of each block; by default all.
        query: cells (row, col) of the grid, of clips (frame, row, col).
        origin: where data and weights are now, to compute what the store lacks.
        execution: on which device, and the progress.

    Raises:
        VitseeError: no such image, block, head or cell; images or weights are gone.
    """
    every = attention_blocks(store)
    picked = dict(
        zip([b.site for b in shown], check_heads(store, shown, heads), strict=True)
    )
    for block, cell in itertools.product(shown, query):
        TokenSelection.parse(cell).require(block.layout, block.site)
    rows = find_rows(store, list(dict.fromkeys(names)))
    rolled = store.plan.rollout
    if not rolled:
        reason = store.manifest.left_out.get("rollout", "the store has none")
        log.info("%s: no rollout: %s", store.label, reason)
    if any(not block.layout.cls_tokens for block in shown):
        log.info("%s has no class token: mean over spatial queries instead", store.label)
    wanted = {block.site for block in shown}

    def take(block: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        found = dict(_tokens(block, a, query)) if block.site in wanted else {}
        return found | ({HEAD_MEAN: a.mean(1)} if rolled else {})

    origin = origin or Provenance()
    blocks = every if rolled else shown
    found = attention_of_images(
        store,
        rows,
        take,
        blocks=blocks,
        origin=origin,
        device=execution.device,
        progress=execution.progress,
    )
    by_row: dict[int, list[dict[str, Any]]] = {}
    for some in found:
        for i, row in enumerate(some.rows.tolist()):
            name = str(store.samples.id[row])
            own = [
                _columns(store, name, block, token, picked[block.site], values[i])
                for block in shown
                for token, values in some.values[block.site].items()
                if token != HEAD_MEAN
            ]
            if rolled:
                means = [some.values[block.site][HEAD_MEAN][i : i + 1] for block in every]
                last = every[-1]
                token = "cls" if last.layout.cls_tokens else "mean"
                for metric, residual in ROLLOUTS.items():
                    values = roll(means, last.layout, residual)
                    own.append(_columns(store, name, last, token, None, values, metric))
            by_row[row] = own
    parts = [part for row in rows.tolist() for part in by_row[row]]
    notes = {
        "images": [str(store.samples.id[row]) for row in rows],
        "attention": "stored (float16)" if has_full(store, blocks) else "recomputed",
        **_pictures(store, rows.tolist(), blocks, query, origin.data),
    }
    return Table.concat(parts, in_time(COLUMNS, [block.layout for block in shown]), notes)


def _pictures(
    store: Store,
    rows: Sequence[int],
    blocks: Sequence[StoredAttention],
    query: Sequence[tuple[int, ...]],
    data: str | None,
) -> dict[str, Any]:
    """The pictures of images, or what strips of clips need, for the notes."""
    if store.plan.clip is not None:
        layouts = [block.layout for block in blocks]
        n = layouts[0].frames or 1
        times = [(cell[0] + 0.5) / n for cell in query]
        return {"sheet": describe_clips(store, rows, layouts, data, times)}
    inputs = model_inputs(store, rows, data)
    return {
        "pictures": {
            str(store.samples.id[row]): encode(own) for row, own in inputs.items()
        }
    }


def mean_rollout(
    store: Store,
    rows: NDArray[np.int64],
    blocks: Sequence[StoredAttention],
    origin: Provenance | None,
    execution: Execution,
) -> Summary:
    """Moments over these images of the rollout without residual term, (tokens,)."""
    moments = Moments()

    def take(_: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        return {HEAD_MEAN: a.mean(1)}

    found = attention_of_images(
        store,
        rows,
        take,
        blocks=blocks,
        origin=origin,
        device=execution.device,
        progress=execution.progress,
    )
    for some in found:
        means = [some.values[block.site][HEAD_MEAN] for block in blocks]
        moments.add(roll(means, blocks[0].layout, residual=False))
    return moments.summary()


def roll(head_means: Sequence[Array], layout: TokenLayout, residual: bool) -> Float:
    """The rollout, (images, tokens) in float64, of each block's mean over heads, (images, tokens,
    tokens); see `reductions.attention`."""
    import torch

    from vitsee_core.summaries import rollout

    tensors = [torch.from_numpy(mean.astype(np.float64)) for mean in head_means]
    return rollout(tensors, layout, residual).numpy()


def _tokens(
    block: StoredAttention, a: Tensor, query: Sequence[tuple[int, ...]]
) -> list[tuple[str, Tensor]]:
    """The rows of attention of the class token (or the mean) and of each query: the token's name
    with (images, heads, keys)."""
    layout = block.layout
    tokens = layout.cls_tokens  # of clips frame by frame there is one a frame
    name, queries = (
        ("cls", tokens) if tokens else ("mean", range(layout.n_prefix, layout.n_tokens))
    )
    found = [(name, a[:, :, queries.start : queries.stop].mean(2))]
    for cell in map(TokenSelection.parse, query):
        (token,) = cell.members(layout)
        found.append((str(cell), a[:, :, token]))
    return found


def _columns(
    store: Store,
    image: str,
    block: StoredAttention,
    token: str,
    heads: NDArray[np.int64] | None,
    values: Array,
    metric: str = "attention",
) -> dict[str, Any]:
    """The rows of one block's maps of one token; `values`: (heads, keys), or (1, keys) of no
    head."""
    maps = spatial(values if heads is None else values[heads], block.layout)
    numbers = np.array([None] if heads is None else heads.tolist(), object)
    uncounted = np.zeros(len(maps), np.int64)
    columns = map_columns(
        store, block, numbers, maps.astype(np.float64), uncounted, metric
    )
    return columns | {"image": image, "token": token}
