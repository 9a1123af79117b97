"""The model's attention on the shown images, and its classifier's answers for their patches.

Both are read from the store, or computed anew with its model.

Attention is that of every head from the class token, and the mean over heads from patches on a
coarse grid of queries. Its rows are over spatial keys, not renormalised; each is packed as its
largest value in 16 bits and its values in 8 bits of that, so that they are within 1/510 of the
row's largest.

Answers are those of the classifier for every patch, site by site: the class with the largest logit
and its share of the softmax (the logit lens of `vitsee lens`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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

MAX_QUERIES = 8  # along a side of the grid
MAX_ROW_CODE = 65535  # 16 bits
MAX_VALUE_CODE = 255  # 8 bits
HEADS = "heads"
PATCHES = "patches"


@dataclass(frozen=True)
class BlockAttention:
    """The attention of one block on the shown images.

    Attributes:
        block: its heads and layout.
        heads: (images, heads, cells) from the class token; without one, the mean over spatial
            queries.
        patches: (images, queries, cells) from patches, the mean over heads; None if the store has
            none.
    """

    block: StoredAttention
    heads: Float32
    patches: Float32 | None


def attention_of(
    shown: SheetImages, origin: Provenance | None, device: str, progress: Progress
) -> list[BlockAttention]:
    """Return the attention of every block of a store whose attention is over a grid.

    Args:
        shown: the store and the images.
        origin: where data and weights are now, to compute what the store lacks; None to compute
            nothing.
        device: on which it is computed.
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
            return _full_attention(shown, blocks, origin, device, progress)
        except VitseeError as error:
            # The rows of the class token may be stored all the same.
            if not any(_has_rows(store, block) for block in blocks):
                raise MissingInput(str(error)) from None
            log.warning("attention of patches is left out: %s", error)
    stored_blocks = [block for block in blocks if _has_rows(store, block)]
    if not stored_blocks:
        raise MissingInput(
            f"{store.label} keeps no attention of single images: extract it with "
            "--attention rows (heads) or full (heads and patches) -o NEW.zarr, or let "
            "explore --recompute it"
        )
    return [
        BlockAttention(block, heads=_stored_rows(shown, block), patches=None)
        for block in stored_blocks
    ]


def query_cells(grid: tuple[int, int]) -> list[int]:
    """Return the cells, counted row by row, whose attention is shown.

    Of every s x s cells it is the one in the middle, with s = `query_step`.
    """
    n_rows, n_cols = grid
    step = query_step(grid)
    middle = step // 2
    # The last square may be cut off by the grid's edge.
    rows = [min(row + middle, n_rows - 1) for row in range(0, n_rows, step)]
    cols = [min(col + middle, n_cols - 1) for col in range(0, n_cols, step)]
    return [row * n_cols + col for row in rows for col in cols]


def query_step(grid: tuple[int, int]) -> int:
    """Return the smallest s that makes at most `MAX_QUERIES` squares of s x s cells a side."""
    return -(-max(grid) // MAX_QUERIES)  # rounded up


def _full_attention(
    shown: SheetImages,
    blocks: Sequence[StoredAttention],
    origin: Provenance | None,
    device: str,
    progress: Progress,
) -> list[BlockAttention]:
    """Return the attention of heads and of patches, from matrices stored in full or computed."""
    import torch

    def select_rows(block: StoredAttention, attention: Tensor) -> Mapping[str, Tensor]:
        """Return the rows that the page shows of (images, heads, queries, keys).

        `HEADS` is (images, times, heads, cells), `PATCHES` (images, times, queries, cells).
        """
        layout = block.layout
        assert layout.grid is not None
        body = slice(layout.n_prefix, None)
        queries = layout.cls_tokens or range(layout.n_prefix, layout.n_tokens)
        of_heads = attention[:, :, queries.start : queries.stop].mean(2)[..., body]
        n_cells = layout.n_body // shown.times  # of a frame
        of_patches = []
        for start in range(layout.n_prefix, layout.n_tokens, n_cells):
            # Of a clip: queries of a frame, on keys of that frame.
            tokens = [start + cell for cell in query_cells(layout.grid)]
            rows = attention[:, :, tokens].mean(1)
            of_patches.append(rows[..., start : start + n_cells])
        n_images, n_heads = of_heads.shape[:2]
        of_heads = of_heads.reshape(n_images, n_heads, shown.times, n_cells)
        return {
            HEADS: of_heads.transpose(1, 2),
            PATCHES: torch.stack(of_patches, 1),
        }

    index = {row: k for k, row in enumerate(shown.unique_rows)}
    arrays: dict[str, dict[str, Any]] = {block.site: {} for block in blocks}
    batches = attention_of_images(
        shown.store,
        np.array(shown.unique_rows, np.int64),
        select_rows,
        blocks=blocks,
        origin=origin,
        device=device,
        progress=progress,
    )
    for batch in batches:
        indices = [index[row] for row in batch.rows.tolist()]
        for site, values in batch.values.items():
            for name, rows in values.items():
                if name not in arrays[site]:
                    shape = (len(shown.unique_rows), *rows.shape[1:])
                    arrays[site][name] = np.zeros(shape, np.float32)
                arrays[site][name][indices] = rows
    return [
        BlockAttention(
            block,
            heads=_merge_times(arrays[block.site][HEADS]),
            patches=_merge_times(arrays[block.site][PATCHES]),
        )
        for block in blocks
    ]


def _merge_times(values: NDArray[np.float32]) -> Float32:
    """Return (images x times, ...) from (images, times, ...): a frame is an image of its own."""
    return values.reshape(-1, *values.shape[2:])


def _rows_name(block: StoredAttention) -> str:
    """Return the store's array of attention rows: of the class token, else received by cells."""
    return "cls_rows" if block.layout.cls_tokens else "received_rows"


def _has_rows(store: Store, block: StoredAttention) -> bool:
    """Return whether the store has a block's attention rows of single images."""
    folder = f"attention/{block.group}/" if block.group else "attention/"
    return store.has(f"{folder}{_rows_name(block)}")


def _stored_rows(shown: SheetImages, block: StoredAttention) -> Float32:
    """Return (images x times, heads, cells): a block's stored attention rows."""
    array = shown.store.attention(_rows_name(block), block.group)
    rows = array[shown.unique_rows][
        :, block.row, : block.n_heads, block.layout.n_prefix :
    ]
    # (images, heads, times, cells)
    of_times = rows.astype(np.float32).reshape(*rows.shape[:2], shown.times, -1)
    return _merge_times(of_times.swapaxes(1, 2))


def pack_rows(values: Float32) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Return codes of attention rows (..., cells): (...,) of the largest, (..., cells) of values.

    A value is value code / 255 x row code / 65535.
    """
    finite = np.nan_to_num(values, nan=0.0).clip(0, 1)
    # Rounded up, so that no value is above the largest.
    row_codes = np.ceil(finite.max(-1) * MAX_ROW_CODE).astype(np.uint16)
    largest = row_codes.astype(np.float32)
    step = np.where(row_codes > 0, largest / (MAX_ROW_CODE * MAX_VALUE_CODE), 1)
    value_codes = np.rint(finite / step[..., np.newaxis]).clip(0, MAX_VALUE_CODE)
    return row_codes, value_codes.astype(np.uint8)


MAX_SHARE_CODE = 255  # 8 bits
MAX_CLASSES = 1 << 16  # 16 bits


@dataclass(frozen=True)
class SiteAnswers:
    """The answers of the classifier at one site.

    Attributes:
        classes: (images, 1 + cells): of the tokens pooled as the model does, then of each patch
            alone.
        shares: (images, 1 + cells) of the softmax, in 1 / `MAX_SHARE_CODE`.
    """

    classes: NDArray[np.uint16]
    shares: NDArray[np.uint8]


def answers_of(shown: SheetImages, origin: Provenance | None) -> dict[str, SiteAnswers]:
    """Return site -> answers, of those sites that the classifier can read.

    Args:
        shown: the store, its images and sites.
        origin: where the weights are now, to build the model of a store that keeps no classifier;
            None to build none.

    Raises:
        MissingInput: no classifier, or none that reads these sites.
    """
    store = shown.store
    head = stored_classifier(store) if origin is None else Classifiers(origin)(store)
    if head.n_classes > MAX_CLASSES:
        raise MissingInput(
            f"the classifier of {store.label} has {head.n_classes} classes"
        )
    answers = {}
    for site in shown.sites:
        layout = store.site(site.name).layout
        # A site of the head lies behind the final norm, which the classifier would apply again.
        is_past_norm = "head" in site.groups and site.name != head.site
        lacks_cls = head.pool == "cls" and (layout is None or layout.cls is None)
        if site.dim == head.width and not is_past_norm and not lacks_cls:
            answers[site.name] = _site_answers(store, head, site, shown.rows)
    if not answers:
        raise MissingInput(
            f"the classifier of {store.label} reads {head.width} channels, which none of "
            "the shown sites has"
        )
    return answers


def _site_answers(
    store: Store, head: Classifier, site: SiteSpec, rows: list[int]
) -> SiteAnswers:
    """Return the classifier's answers for the images of these rows at one site."""
    layout = store.site(site.name).layout
    assert layout is not None
    tokens = store.acts(site.name, partial=True)[rows]
    if head.pooled_kind is None:
        image_logits = head.logits(tokens, layout)
    else:
        image_logits = head.of_tokens(store.pooled(site.name, head.pooled_kind)[rows])
    n_images = len(rows)
    n_cells = coarse_layout(layout).n_body
    classes = np.zeros((n_images, 1 + n_cells), np.uint16)
    shares = np.zeros((n_images, 1 + n_cells), np.uint8)
    classes[:, 0], shares[:, 0] = _top_class(image_logits)
    for i in range(n_images):  # an image at a time: (cells, classes) logits are large
        body = tokens[i : i + 1, layout.n_prefix :].astype(np.float32)
        patches, _ = pooled(body, np.ones((1, layout.n_body), bool), layout)
        classes[i, 1:], shares[i, 1:] = _top_class(head.of_tokens(patches[0]))
    return SiteAnswers(classes, shares)


def _top_class(logits: Float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (...,) the class of the largest logit, and the code of its softmax.

    The code is 0 where a logit is not finite.
    """
    is_finite = np.asarray(np.isfinite(logits).all(-1))
    finite_logits = np.where(is_finite[..., np.newaxis], logits, 0)
    largest = finite_logits.max(-1, keepdims=True)
    # softmax = exp(l - max) / sum exp(l - max), and the largest logit's numerator is 1.
    share = 1 / np.exp(finite_logits - largest).sum(-1)
    codes = np.rint(np.where(is_finite, share, 0) * MAX_SHARE_CODE)
    return finite_logits.argmax(-1), codes.astype(np.int64)
