"""The model's attention on the shown images, and its classifier's answers for their patches.

Both are read from the store, or computed anew with its model. Attention is of every head from the
class token, and of patches on a coarse grid of queries, the mean over heads. Its rows are over
spatial keys, not renormalised; each has its largest value in 16 bits and its values in 8 bits of
that, so that they are within 1/510 of the row's largest. Answers are those of the classifier for
every patch, site by site: the class with the largest logit and its share of the softmax (the logit
lens, see `vitsee lens`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.attention.recompute import attention_of_images, has_full
from vitsee_core.figures.patch_maps.photos import SheetImages
from vitsee_core.models.provenance import Classifiers, Provenance
from vitsee_core.models.weights import Classifier, stored_classifier
from vitsee_core.pages.explore.tokens import coarse_layout, pooled
from vitsee_core.runtime.progress import Progress
from vitsee_core.types import Float, Float32
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

QUERIES = 8  # along a side of the grid, at most
ROW_MOST = 65535
VALUE_MOST = 255
HEADS = "heads"
PATCHES = "patches"


@dataclass(frozen=True)
class BlockAttention:
    """The attention of one block. heads: (images, heads, cells) from the class token, or without
    one the mean over spatial queries; patches: (images, queries, cells), the mean over heads; None
    where the store has none."""

    block: StoredAttention
    heads: Float32
    patches: Float32 | None


def attention_of(
    shown: SheetImages, origin: Provenance | None, device: str, progress: Progress
) -> list[BlockAttention]:
    """The attention of every block of a store that has one over a grid.

    Args:
        shown: which images.
        origin: where data and weights are now, to compute what the store lacks; None: do not.
        device: on which.
        progress: advanced by the images computed.

    Raises:
        MissingInput: the store has none; names what brings it.
    """
    store = shown.store
    blocks = [
        block
        for block in attention_blocks(store)
        if block.layout.grid and block.layout.stride_px and block.layout.n_body > 1
    ]
    if not blocks:
        raise MissingInput(f"the attention of {store.label} is over no grid of patches")
    if origin is not None or has_full(store, blocks):
        try:
            return _whole(shown, blocks, origin, device, progress)
        except VitseeError as error:
            if not any(_has_rows(store, block) for block in blocks):
                raise MissingInput(str(error)) from None
            log.warning("attention of patches is left out: %s", error)
    kept = [block for block in blocks if _has_rows(store, block)]
    if not kept:
        raise MissingInput(
            f"{store.label} keeps no attention of single images: extract it with "
            "--attention rows (heads) or full (heads and patches) -o NEW.zarr, or let "
            "explore --recompute it"
        )
    return [BlockAttention(block, _stored_rows(shown, block), None) for block in kept]


def query_cells(grid: tuple[int, int]) -> list[int]:
    """The cells, counted row by row, whose attention is shown: of every s x s cells the one in the
    middle, with the smallest s that makes at most `QUERIES` a side; see `query_step`."""
    step = query_step(grid)
    rows, cols = ([min(at + step // 2, n - 1) for at in range(0, n, step)] for n in grid)
    return [row * grid[1] + col for row in rows for col in cols]


def query_step(grid: tuple[int, int]) -> int:
    return -(-max(grid) // QUERIES)


def _whole(
    shown: SheetImages,
    blocks: Sequence[StoredAttention],
    origin: Provenance | None,
    device: str,
    progress: Progress,
) -> list[BlockAttention]:
    import torch

    def take(block: StoredAttention, a: Tensor) -> Mapping[str, Tensor]:
        layout = block.layout
        assert layout.grid is not None
        body = slice(layout.n_prefix, None)
        tokens = layout.cls_tokens or range(layout.n_prefix, layout.n_tokens)
        first = a[:, :, tokens.start : tokens.stop].mean(2)[..., body]
        n = layout.n_body // shown.times  # cells of a frame
        patches = []
        for start in range(layout.n_prefix, layout.n_tokens, n):
            cells = [start + cell for cell in query_cells(layout.grid)]
            patches.append(a[:, :, cells].mean(1)[..., start : start + n])
        heads = first.reshape(*first.shape[:2], shown.times, n).transpose(1, 2)
        return {HEADS: heads, PATCHES: torch.stack(patches, 1)}

    place = {row: k for k, row in enumerate(shown.once)}
    found: dict[str, dict[str, Any]] = {block.site: {} for block in blocks}
    parts = attention_of_images(
        shown.store,
        np.array(shown.once, np.int64),
        take,
        blocks=blocks,
        origin=origin,
        device=device,
        progress=progress,
    )
    for part in parts:
        at = [place[row] for row in part.rows.tolist()]
        for site, values in part.values.items():
            for name, of_part in values.items():
                if name not in found[site]:
                    shape = (len(shown.once), *of_part.shape[1:])
                    found[site][name] = np.zeros(shape, np.float32)
                found[site][name][at] = of_part
    whole = {
        site: [_flat(own[name]) for name in (HEADS, PATCHES)]
        for site, own in found.items()
    }
    return [BlockAttention(block, *whole[block.site]) for block in blocks]


def _flat(values: NDArray[np.float32]) -> Float32:
    """(images, ...) of (images, times, ...)."""
    return values.reshape(-1, *values.shape[2:])


def _rows_name(block: StoredAttention) -> str:
    return "cls_rows" if block.layout.cls_tokens else "received_rows"


def _has_rows(store: Store, block: StoredAttention) -> bool:
    folder = f"attention/{block.group}/" if block.group else "attention/"
    return store.has(f"{folder}{_rows_name(block)}")


def _stored_rows(shown: SheetImages, block: StoredAttention) -> Float32:
    array = shown.store.attention(_rows_name(block), block.group)
    found = array[shown.once][:, block.row, : block.n_heads, block.layout.n_prefix :]
    of_times = found.astype(np.float32).reshape(*found.shape[:2], shown.times, -1)
    return _flat(of_times.swapaxes(1, 2))


def pack_rows(values: Float32) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """(...,) the largest of each row and (..., cells) the values in parts of it."""
    known = np.nan_to_num(values, nan=0.0).clip(0, 1)
    most = np.ceil(known.max(-1) * ROW_MOST).astype(np.uint16)
    step = np.where(most > 0, most.astype(np.float32) / (ROW_MOST * VALUE_MOST), 1)
    return most, np.rint(known / step[..., np.newaxis]).clip(0, VALUE_MOST).astype(
        np.uint8
    )


SHARE_MOST = 255
MOST_CLASSES = 1 << 16


@dataclass(frozen=True)
class SiteAnswers:
    """classes: (images, 1 + cells) of the tokens pooled as the model does, then of each patch
    alone; shares: of the softmax, in parts of `SHARE_MOST`."""

    classes: NDArray[np.uint16]
    shares: NDArray[np.uint8]


def answers_of(shown: SheetImages, origin: Provenance | None) -> dict[str, SiteAnswers]:
    """Site -> answers, of those sites that the classifier can read.

    Args:
        shown: which images and sites.
        origin: where the weights are now, to build the model of a store that keeps no classifier;
            None: do not.

    Raises:
        MissingInput: no classifier, or none that reads these sites.
    """
    store = shown.store
    head = stored_classifier(store) if origin is None else Classifiers(origin)(store)
    if head.n_classes > MOST_CLASSES:
        raise MissingInput(
            f"the classifier of {store.label} has {head.n_classes} classes"
        )
    found = {
        site.name: _answers(store, head, site, shown.rows)
        for site in _readable(shown, head)
    }
    if not found:
        raise MissingInput(
            f"the classifier of {store.label} reads {head.width} channels, which none of "
            "the shown sites has"
        )
    return found


def _readable(shown: SheetImages, head: Classifier) -> Iterator[SiteSpec]:
    for site in shown.sites:
        layout = shown.store.site(site.name).layout
        past_norm = "head" in site.groups and site.name != head.site
        needs_cls = head.pool == "cls" and (layout is None or layout.cls is None)
        if site.dim == head.width and not past_norm and not needs_cls:
            yield site


def _answers(
    store: Store, head: Classifier, site: SiteSpec, rows: list[int]
) -> SiteAnswers:
    layout = store.site(site.name).layout
    assert layout is not None
    tokens = store.acts(site.name, partial=True)[rows]
    kind = head.pooled_kind
    whole = (
        head.logits(tokens, layout)
        if kind is None
        else head.of_tokens(store.pooled(site.name, kind)[rows])
    )
    n = len(rows)
    cells = coarse_layout(layout).n_body
    classes = np.zeros((n, 1 + cells), np.uint16)
    shares = np.zeros((n, 1 + cells), np.uint8)
    classes[:, 0], shares[:, 0] = _first(whole)
    for i in range(n):  # an image at a time: logits are wide
        body = tokens[i : i + 1, layout.n_prefix :].astype(np.float32)
        shown, _ = pooled(body, np.ones((1, layout.n_body), bool), layout)
        classes[i, 1:], shares[i, 1:] = _first(head.of_tokens(shown[0]))
    return SiteAnswers(classes, shares)


def _first(logits: Float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(...,) the class of the largest logit, and its softmax in parts of `SHARE_MOST`; 0 where a
    logit is not finite."""
    known = np.asarray(np.isfinite(logits).all(-1))
    safe = np.where(known[..., np.newaxis], logits, 0)
    top = safe.max(-1, keepdims=True)
    share = 1 / np.exp(safe - top).sum(-1)
    return safe.argmax(-1), np.rint(np.where(known, share, 0) * SHARE_MOST).astype(
        np.int64
    )
