"""Attention sinks and collapse: keys that take far more than their share, and queries that all
attend alike; their rows, then their figure.

For A (queries by keys) of one image and one head, T tokens, over spatial queries q and all keys k:

    received_k = mean_q A[q, k]          score_k = T received_k

so that a score is 1 on average over keys, 1 everywhere for even attention, and at most T. Where
queries see a window of patches and the class token (TimeSformer), even attention gives that token
far more than 1 / T: score_k is then received_k over what even attention gives k, which needs
`received_rows`.

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

from vitsee_core.attention.heads import StoredAttention, even_shares
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

THRESHOLD = 10.0  # a sink's score is above it
ROWS = "received_rows"  # the array of what each key receives
PATCHES = "patches"
COLUMNS = (
    *(*SITE, "token", "head"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
Key = tuple[str, str, str]  # metric, group, token


def sink_rows(
    store: Store,
    blocks: Sequence[StoredAttention],
    heads_by_block: Sequence[NDArray[np.int64]],
    rows: Rows,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Return the rows of one store: one per block, head and metric, and for `sink_share` another
    per kind of token.

    Args:
        store: with attention summaries.
        blocks: of the store.
        heads_by_block: the chosen heads of each block.
        rows: the chosen images.
        execution: resources.
    """
    # Where windows all see the prefix tokens, even attention gives tokens unequal shares.
    layouts = {block.group: block.layout for block in blocks}
    by_frame = store.plan.clip is not None and store.plan.clip.by_frame
    even = {
        block.group: even_shares(block)
        for block in blocks
        if block.window_text is not None and block.layout.n_prefix and not by_frame
    }
    make = partial(SlabMoments, partial(_read_sinks, layouts, even))
    with counting(execution.progress, rows.n):
        summaries: dict[Key, Summary] = execution.fold(store, make, rows).result()
    for block in blocks:
        if not _can_sink(block.layout):
            log.info(
                "%s: no sink_share for %s: of %d tokens none can get more than %g "
                "times its share",
                store.label,
                block.site,
                block.layout.n_tokens,
                THRESHOLD,
            )
    if not any(metric == "sink_median" for metric, *_ in summaries):
        log.info("%s: no sink_median (extract it with --attention rows)", store.label)
        for block in blocks:
            if block.group in even:
                log.info(
                    "%s: no scores of %s, whose windows all see the prefix tokens "
                    "(extract it with --attention rows)",
                    store.label,
                    block.site,
                )
    # By metric, then all tokens together, then the kinds of token.
    metrics = ("sink_max", "sink_median", "sink_share", "qk_nmi")
    kinds = {group: ["", *layout.prefix, PATCHES] for group, layout in layouts.items()}
    keys = sorted(
        summaries, key=lambda key: (metrics.index(key[0]), kinds[key[1]].index(key[2]))
    )
    table_rows = []
    for block, heads in zip(blocks, heads_by_block, strict=True):
        for metric, group, token in keys:
            if group != block.group:
                continue
            summary = summaries[metric, group, token]
            for head in heads.tolist():
                row = site_columns(store, block)
                row["token"] = token
                row["head"] = head
                row["metric"] = metric
                row.update(_within_limits(metric, summary.cells((block.row, head))))
                table_rows.append(row)
    return table_rows


def _read_sinks(
    layouts: dict[str, TokenLayout], even: dict[str, Float], slab: Slab
) -> dict[Key, Float]:
    """Return the numbers of a slab's valid images, key -> (images, blocks, heads).

    Args:
        layouts: group of blocks -> layout.
        even: for groups where it is not 1 / T, the share that even attention gives each token.
        slab: of a store with attention summaries.
    """
    values: dict[Key, Float] = {}
    for group, layout in layouts.items():
        largest = slab.attention("received_max", group)[slab.valid]
        largest_token = slab.attention("received_argmax", group)[slab.valid]
        values["qk_nmi", group, ""] = slab.attention("qk_nmi", group)[slab.valid]
        largest_score = layout.n_tokens * largest.astype(np.float64)
        folder = f"attention/{group}/" if group else "attention/"
        if slab.store.has(folder + ROWS):
            received = slab.attention(ROWS, group)[slab.valid].astype(np.float64)
            scores = received / even.get(group, 1 / layout.n_tokens)
            values["sink_median", group, ""] = np.median(scores, -1)
            if group in even:
                # The largest score need not be where most attention is received.
                largest_score = scores.max(-1)
                largest_token = scores.argmax(-1)
        elif group in even:
            continue  # scores need `received_rows`
        values["sink_max", group, ""] = largest_score
        if _can_sink(layout):
            values.update(_sink_shares(group, layout, largest_score, largest_token))
    return values


def _sink_shares(
    group: str, layout: TokenLayout, largest_score: Float, largest_token: NDArray[Any]
) -> dict[Key, Float]:
    """Return whether each head of each image has a sink, by kind of token.

    Args:
        group: name of a group of blocks, "" for the only one.
        layout: of its tokens.
        largest_score: (images, blocks, heads) of all tokens of the image.
        largest_token: (images, blocks, heads) which token has it.

    Returns:
        Key -> (images, blocks, heads), 1 or 0, NaN without a score.
    """
    is_sink = largest_score > THRESHOLD
    sinks_at = {"": is_sink}
    for i, name in enumerate(layout.prefix):
        sinks_at[name] = is_sink & (largest_token == i)
    sinks_at[PATCHES] = is_sink & (largest_token >= layout.n_prefix)
    return {
        ("sink_share", group, token): np.where(
            np.isnan(largest_score), np.nan, is_sink_here
        )
        for token, is_sink_here in sinks_at.items()
    }


def _can_sink(layout: TokenLayout) -> bool:
    """Return whether a score, which is at most the number of tokens, can be above the threshold."""
    return layout.n_tokens > THRESHOLD


def _within_limits(metric: str, cells: dict[str, float | int]) -> dict[str, float | int]:
    """Return the cells with their interval inside the metric's limits: a share's by its own method,
    an NMI's clipped to 0 to 1, a score's to 0 and above."""
    if metric == "sink_share":
        return as_share(cells)
    top = np.inf if metric in ("sink_max", "sink_median") else 1.0
    low = float(np.clip(cells["low"], 0.0, top))
    high = float(np.clip(cells["high"], 0.0, top))
    return {**cells, "low": low, "high": high}
