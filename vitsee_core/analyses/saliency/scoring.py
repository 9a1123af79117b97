"""The overlap of each head's attention with the foreground, per image, and its moments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.saliency.overlap import overlap, top_mass
from vitsee_core.attention.heads import StoredAttention
from vitsee_core.attention.recompute import attention_of_images
from vitsee_core.masks.labels import Labels
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks, block_sums, means_without
from vitsee_core.statistics.moments import Moments

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores import Slab, Store

log = logging.getLogger(__name__)

ARRAYS = {"cls": "cls_rows", "mean": "received_rows"}
TOKENS = tuple(ARRAYS)
Wanted = tuple[tuple[StoredAttention, tuple[str, ...]], ...]


def overlaps(
    store: Store,
    wanted: Wanted,
    labels: Mapping[str, Labels],
    rows: Rows,
    mass: float,
    blocks: Blocks,
    execution: Execution = DEFAULT,
    *,
    origin: Provenance | None = None,
) -> Overlaps:
    """The moments over these rows, from the store's rows of attention; where it has none, the
    attention is recomputed.

    Args:
        store: with attention summaries.
        wanted: blocks, and some of `TOKENS` for each.
        labels: group -> (images, tokens), as `MaskTruth` has them.
        rows: the images that count.
        mass: see `top_mass`.
        blocks: of these images.
        execution: what the work may use.
        origin: where data and weights are now.

    Raises:
        VitseeError: attention must be recomputed, and images or weights are gone.
    """
    make = partial(Overlaps, wanted, labels, mass, blocks.of_rows)
    if not _has_rows(store, wanted):
        found = make()
        _compute(store, found, wanted, rows, origin or Provenance(), execution)
        return found
    slab_bytes = _slab_bytes(store, wanted)
    with counting(execution.progress, rows.n):
        return execution.fold(store, make, rows, slab_bytes=slab_bytes)


class Overlaps:
    """Moments over images of each block's IoUs, and their means without each of the jackknife's
    blocks of images; to be filled by `streaming.fold` or with `add`."""

    def __init__(
        self, wanted: Wanted, labels: Mapping[str, Labels], mass: float, block_of: NDArray[np.int64]
    ) -> None:
        """labels: group -> (images, tokens), as `MaskTruth` has them; block_of: (images,)."""
        self._wanted, self._labels, self._mass = wanted, labels, mass
        self._block_of, self._n_blocks = block_of, int(block_of.max(initial=-1)) + 1
        # (heads, blocks) of the heads, (blocks,) of the oracle: sums, and how many images in them.
        self._sums: dict[tuple[str, str, str], list[NDArray[np.float64]]] = {}
        keys = [(block.site, token) for block, tokens in wanted for token in tokens]
        self.heads = {key: Moments() for key in keys}
        self.oracle = {key: Moments() for key in keys}

    def update(self, slab: Slab) -> None:
        valid = slab.valid
        rows = np.arange(slab.rows.start, slab.rows.stop)[valid]
        held: dict[tuple[str, str], NDArray[Any]] = {}
        for block, tokens in self._wanted:
            for token in tokens:
                array = ARRAYS[token], block.group
                if array not in held:
                    # One group at a time: for a model with several grids, a slab may be large.
                    held = {k: v for k, v in held.items() if k[1] == block.group}
                    held[array] = slab.attention(*array)[valid]
                self.add(block, token, held[array][:, block.row, : block.n_heads], rows)

    def add(
        self, block: StoredAttention, token: str, a: NDArray[Any], rows: NDArray[np.int64]
    ) -> None:
        """Add some images' attention over all keys, (images, heads, keys), rows of the store."""
        kept = top_mass(a[..., block.layout.n_prefix :], self._mass)
        iou = overlap(kept, self._labels[block.group][rows])
        highest = np.where(np.isnan(iou), -np.inf, iou).max(1)
        highest = np.where(np.isneginf(highest), np.nan, highest)
        for kind, values in (("heads", iou), ("oracle", highest)):
            getattr(self, kind)[block.site, token].add(values)
            there = ~np.isnan(values)
            parts = [
                block_sums(part, self._block_of[rows], self._n_blocks)
                for part in (np.where(there, values, 0.0), there)
            ]
            self._add_sums((kind, block.site, token), parts)

    def _add_sums(self, key: tuple[str, str, str], parts: list[NDArray[np.float64]]) -> None:
        own = self._sums.get(key)
        self._sums[key] = parts if own is None else [a + b for a, b in zip(own, parts, strict=True)]

    def without(self, kind: str, site: str, token: str) -> NDArray[np.float64] | None:
        """(heads, blocks) of the kind "heads", (blocks,) of "oracle": means without each block of
        images; None where no image counts."""
        key = (kind, site, token)
        return means_without(*self._sums[key]) if key in self._sums else None

    def merge(self, other: Overlaps) -> None:
        for key in self.heads:
            self.heads[key].merge(other.heads[key])
            self.oracle[key].merge(other.oracle[key])
        for sums_key, parts in other._sums.items():
            self._add_sums(sums_key, parts)

    def result(self) -> Overlaps:
        """The moments themselves: `heads` has entries (heads,), `oracle` scalars."""
        return self


def _has_rows(store: Store, wanted: Wanted) -> bool:
    folders = [(f"{b.group}/" if b.group else "", tokens) for b, tokens in wanted]
    return all(store.has(f"attention/{f}{ARRAYS[t]}") for f, tokens in folders for t in tokens)


def _slab_bytes(store: Store, wanted: Wanted) -> int:
    """A slab's rows of a group, and what one block takes while its maps are sorted."""
    largest = 0
    for block, tokens in wanted:
        stored = store.attention(ARRAYS[tokens[0]], block.group).size_bytes // store.n_slabs
        one = store.plan.slab * block.n_heads * block.layout.n_tokens
        largest = max(largest, stored + 40 * one)
    return largest


def _compute(
    store: Store,
    found: Overlaps,
    wanted: Wanted,
    used: Rows,
    origin: Provenance,
    execution: Execution,
) -> None:
    """Add the overlaps of a store without rows of attention."""
    log.info("%s has no rows of attention (extract --attention rows does)", store.label)
    tokens_of = {block.site: tokens for block, tokens in wanted}

    def take(block: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        maps = {}
        if "cls" in tokens_of[block.site]:
            maps["cls"] = a[:, :, block.layout.cls]
        if "mean" in tokens_of[block.site]:
            maps["mean"] = a[:, :, block.layout.n_prefix :].mean(2)
        return maps

    parts = attention_of_images(
        store, np.flatnonzero(used.mask), take,
        blocks=[block for block, _ in wanted], origin=origin,
        device=execution.device, progress=execution.progress,
    )  # fmt: skip
    for part in parts:
        for block, tokens in wanted:
            for token in tokens:
                # Rounded as in a store: stored rows give the same result.
                maps = part.values[block.site][token].astype(np.float16)
                found.add(block, token, maps, part.rows)
