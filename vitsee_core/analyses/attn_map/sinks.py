"""Attention sinks and collapse: keys that take far more than their share, and queries that all
attend alike.

For A (queries by keys) of one image and one head, T tokens, over spatial queries q and all keys k:

    received_k = mean_q A[q, k]          score_k = T received_k

so that a score is 1 on average over keys, 1 everywhere for even attention, and at most T.

- `sink_max`: the largest score; `sink_median`: the median score over keys, what is left for an
  ordinary token (of stores that keep `received_rows`: extract --attention rows). Means over images.
- `sink_share`: images in which the largest score is above 10; with `token`, those in which it is
  and lies at that prefix token, or at some patch (`patches`). Its mean over a block's heads is the
  share of heads that have a sink. Of ten tokens or fewer none can have such a score: no value.
- `qk_nmi`: normalised mutual information of queries and keys, [H(mean_q A') - mean_q H(A'_q)] /
  sqrt(ln Q H(mean_q A')), with A' the Q rows renormalised over spatial keys: 0 where all queries
  attend alike (attention has collapsed), 1 where each attends to a key of its own (Park et al.
  2023). NaN where all attend to one and the same key.

Sinks at one token: Xiao et al. 2024 (language models), at patches of low information in ViTs:
Darcet et al. 2024. The factor 10 is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.heads import StoredAttention
from vitsee_core.runtime.progress import counting
from vitsee_core.statistics.moments import SlabMoments, Summary
from vitsee_core.statistics.shares import as_share
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.types import Float

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_core.runtime.streaming import Rows
    from vitsee_stores import Slab, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

THRESHOLD = 10.0
ROWS = "received_rows"
PATCHES = "patches"
COLUMNS = (*(*SITE, "token", "head"), *("metric", "value", "std", "low", "high", "n_images"))
Key = tuple[str, str, str]  # metric, group, token


def sink_rows(
    store: Store,
    blocks: Sequence[StoredAttention],
    picked: Sequence[NDArray[np.int64]],
    rows: Rows,
    execution: Execution,
) -> list[dict[str, Any]]:
    """The rows of one store, see `COLUMNS`: one per block, head and metric, and for `sink_share`
    another per kind of token.

    Args:
        store: with attention summaries.
        blocks: of it.
        picked: the heads of each block.
        rows: images.
        execution: resources.
    """
    layouts = {block.group: block.layout for block in blocks}
    make = partial(SlabMoments, partial(_read, layouts))
    with counting(execution.progress, rows.n):
        found: dict[Key, Summary] = execution.fold(store, make, rows).result()
    for block in blocks:
        if not _can_sink(block.layout):
            log.info(
                "%s: no sink_share for %s: of %d tokens none can get more than %g times its share",
                *(store.label, block.site, block.layout.n_tokens, THRESHOLD),
            )
    if not any(metric == "sink_median" for metric, *_ in found):
        log.info("%s: no sink_median (extract it with --attention rows)", store.label)
    keys = sorted(found, key=lambda key: _order(key, layouts))
    return [
        site_columns(store, block)
        | {"token": token, "head": head, "metric": metric}
        | _within(metric, found[metric, group, token].cells((block.row, head)))
        for block, heads in zip(blocks, picked, strict=True)
        for metric, group, token in keys
        if group == block.group
        for head in heads.tolist()
    ]


def _read(layouts: dict[str, TokenLayout], slab: Slab) -> dict[Key, Float]:
    """Key -> (images, blocks, heads) of a slab's valid images."""
    found: dict[Key, Float] = {}
    for group, layout in layouts.items():
        largest, place, nmi = (
            slab.attention(name, group)[slab.valid]
            for name in ("received_max", "received_argmax", "qk_nmi")
        )
        score = layout.n_tokens * largest.astype(np.float64)
        found["sink_max", group, ""] = score
        folder = f"attention/{group}/" if group else "attention/"
        if slab.store.has(folder + ROWS):
            received = slab.attention(ROWS, group)[slab.valid].astype(np.float64)
            found["sink_median", group, ""] = layout.n_tokens * np.median(received, -1)
        if _can_sink(layout):
            found |= _shares(group, layout, score, place)
        found["qk_nmi", group, ""] = nmi
    return found


def _shares(group: str, layout: TokenLayout, score: Float, place: NDArray[Any]) -> dict[Key, Float]:
    """For `sink_share`: 0 and 1, NaN without a score."""
    is_sink = score > THRESHOLD
    absent = np.isnan(score)
    kinds = {"": is_sink}
    kinds |= {name: is_sink & (place == i) for i, name in enumerate(layout.prefix)}
    kinds[PATCHES] = is_sink & (place >= layout.n_prefix)
    return {
        ("sink_share", group, token): np.where(absent, np.nan, there)
        for token, there in kinds.items()
    }


def _can_sink(layout: TokenLayout) -> bool:
    return layout.n_tokens > THRESHOLD


def _order(key: Key, layouts: dict[str, TokenLayout]) -> tuple[int, int]:
    """The order of rows: by metric, then the whole, then the kinds of token."""
    metric, group, token = key
    kinds = ["", *layouts[group].prefix, PATCHES]
    metrics = ("sink_max", "sink_median", "sink_share", "qk_nmi")
    return metrics.index(metric), kinds.index(token)


def _within(metric: str, cells: dict[str, float | int]) -> dict[str, float | int]:
    """The interval of a share by its own method; of an NMI clipped to 0 to 1, of a score from 0
    on."""
    if metric == "sink_share":
        return as_share(cells)
    top = np.inf if metric in ("sink_max", "sink_median") else 1.0
    return cells | {name: float(np.clip(cells[name], 0.0, top)) for name in ("low", "high")}
