"""Attention maps of single images (Walmer et al. 2023, Figs. 11 to 13; Dosovitskiy et al. 2021,
Figs. 6, 13): the class token's and chosen queries' rows per head, and the rollout.

The full attention of these images is read from the store (`extract --attention full`) or recomputed
with the manifest's model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.head_maps import check_heads, spatial
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.attention.recompute import attention_of_images, find_rows, has_full
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.models.provenance import Pictures, Provenance
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.statistics.moments import Moments, Summary
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.errors import VitseeError
from vitsee_stores.token_selection import TokenSelection

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
    heads: Sequence[int] = (),
    query: Sequence[tuple[int, int]] = (),
    *,
    device: str = "auto",
    origin: Provenance | None = None,
    progress: Progress = SILENT,
) -> Table:
    """One row per cell of each map of each image.

    Columns: `COLUMNS`. `metric` is `attention` (of a head; `token` names the query: `cls`, without
    a class token `mean`, the mean over spatial queries, or ROW,COL), `rollout` or
    `rollout_no_residual` (of the whole model; `token` `cls` or `mean`). Values are not
    renormalised; prefix keys are left out. The notes hold the pictures, as PNG in base64, under
    `pictures`.

    Args:
        store: with attention summaries.
        names: images by id or row.
        shown: the blocks whose heads are shown.
        heads: of each block; by default all.
        query: cells (row, col) of the grid.
        device: on which what the store lacks is computed.
        origin: where data and weights are now, for the same purpose.
        progress: advanced by the images computed.

    Raises:
        VitseeError: no such image, block, head or cell; images or weights are gone.
    """
    every = attention_blocks(store)
    picked = dict(zip([b.site for b in shown], check_heads(store, shown, heads), strict=True))
    _check_cells(shown, query)
    rows = find_rows(store, list(dict.fromkeys(names)))
    rolled = store.plan.rollout
    if not rolled:
        reason = store.manifest.left_out.get("rollout", "the store has none")
        log.info("%s: no rollout: %s", store.label, reason)
    if any(block.layout.cls is None for block in shown):
        log.info("%s has no class token: mean over spatial queries instead", store.label)
    wanted = {block.site for block in shown}

    def take(block: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        found = dict(_tokens(block, a, query)) if block.site in wanted else {}
        return found | ({HEAD_MEAN: a.mean(1)} if rolled else {})

    origin = origin or Provenance()
    parts: list[dict[str, Array]] = []
    blocks = every if rolled else shown
    found = attention_of_images(
        store, rows, take, blocks=blocks, origin=origin, device=device, progress=progress
    )
    by_row: dict[int, list[dict[str, Array]]] = {}
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
                own += _rollouts(store, name, every[-1], means)
            by_row[row] = own
    for row in rows.tolist():
        parts += by_row[row]
    notes = {
        "images": [str(store.samples.id[row]) for row in rows],
        "attention": "stored (float16)" if has_full(store, blocks) else "recomputed",
        "pictures": _pictures(store, rows, origin),
    }
    return Table({name: np.concatenate([p[name] for p in parts]) for name in COLUMNS}, notes)


def mean_rollout(
    store: Store,
    rows: NDArray[np.int64],
    blocks: Sequence[StoredAttention],
    *,
    device: str,
    origin: Provenance | None,
    progress: Progress,
) -> Summary:
    """Moments over these images of the rollout without residual term, (tokens,)."""
    moments = Moments()
    found = attention_of_images(
        store,
        rows,
        lambda _, a: {HEAD_MEAN: a.mean(1)},
        blocks=blocks,
        origin=origin,
        device=device,
        progress=progress,
    )
    for some in found:
        means = [some.values[block.site][HEAD_MEAN] for block in blocks]
        moments.add(roll(means, blocks[0].layout, residual=False))
    return moments.summary()


def roll(head_means: Sequence[Array], layout: TokenLayout, residual: bool) -> Float:
    """(images, tokens): see `reductions.rollout`; in float64."""
    import torch

    from vitsee_core.reductions import rollout

    tensors = [torch.from_numpy(mean.astype(np.float64)) for mean in head_means]
    return rollout(tensors, layout, residual).numpy()


def _check_cells(blocks: Sequence[StoredAttention], query: Sequence[tuple[int, int]]) -> None:
    for block in blocks:
        for cell in query:
            TokenSelection.parse(cell).require(block.layout, block.site)


def _tokens(
    block: StoredAttention, a: Tensor, query: Sequence[tuple[int, int]]
) -> list[tuple[str, Tensor]]:
    """(token, (images, heads, keys)) of the class token and each query."""
    layout = block.layout
    if layout.cls is None:
        found = [("mean", a[:, :, layout.n_prefix :].mean(2))]
    else:
        found = [("cls", a[:, :, layout.cls])]
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
) -> dict[str, Array]:
    """The rows of one block's maps of one token; `values`: (heads, keys), or (keys,) without
    heads."""
    if heads is None:
        maps, numbers = spatial(values[None], block.layout), [None]
    else:
        maps, numbers = spatial(values[heads], block.layout), heads.tolist()
    n_maps, height, width = maps.shape
    constants: Mapping[str, Any] = {
        **site_columns(store, block),
        "image": image,
        "token": token,
        "metric": metric,
    }
    return {
        **{name: np.full(maps.size, value) for name, value in constants.items()},
        "head": np.repeat(np.array(numbers, object), height * width),
        "row": np.tile(np.repeat(np.arange(height), width), n_maps),
        "col": np.tile(np.arange(width), n_maps * height),
        "value": maps.ravel().astype(np.float64),
    }


def _rollouts(
    store: Store, image: str, last: StoredAttention, head_means: Sequence[Array]
) -> list[dict[str, Array]]:
    token = "mean" if last.layout.cls is None else "cls"
    return [
        _columns(store, image, last, token, None, roll(head_means, last.layout, on)[0], metric)
        for metric, on in ROLLOUTS.items()
    ]


def _pictures(store: Store, rows: NDArray[np.int64], origin: Provenance) -> dict[str, str]:
    """Image -> PNG in base64, without unreadable ones, which are logged."""
    try:
        pixels = Pictures(store, origin.data)(rows)
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        return {}
    found = {}
    for row, picture in zip(rows.tolist(), pixels, strict=True):
        channels_last = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
        found[str(store.samples.id[row])] = encode(channels_last)
    return found
