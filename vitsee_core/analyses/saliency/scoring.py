"""The overlap of each head's attention with the foreground, per image, and its moments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.heads import StoredAttention
from vitsee_core.attention.recompute import attention_of_images
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks, block_sums, means_without
from vitsee_core.statistics.moments import Moments
from vitsee_core.truth.masks.labels import FOREGROUND, VOID, Labels
from vitsee_core.types import Float, Mask

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores import Slab, Store

BASELINES = ("uniform", "centre", "random")
CENTRE_STD = 0.25  # of the centred map, in sides of the grid
# Sums within a billionth of the threshold are on it: whether an even map keeps 6 or 7 of its 10
# tokens does not depend on rounding.
SLACK = 1e-9


def top_mass(maps: NDArray[Any], mass: float) -> Mask:
    """(..., tokens) the smallest set of top tokens that holds the share `mass` of a map.

    Sorted ascending, the tokens are kept whose cumulated share is above 1 - mass (Walmer et al.
    2023 with 0.6, as in their code). Of equal tokens the later ones are kept. Maps are non-negative
    and need not sum to 1; a map without mass, or with NaN, keeps nothing.
    """
    # The bits of non-negative float16 sort as its values do, seven times as fast.
    keys = maps.view(np.int16) if maps.dtype == np.float16 else maps
    order = np.argsort(keys, axis=-1, kind="stable")
    summed = np.take_along_axis(maps, order, -1).cumsum(-1, dtype=np.float64)
    kept = np.zeros(maps.shape, bool)
    np.put_along_axis(kept, order, summed > (1 - mass + SLACK) * summed[..., -1:], -1)
    return kept


def overlap(kept: Mask, labels: Labels) -> Float:
    """Intersection over union with the foreground, void tokens left out on both sides.

    kept: (images, ..., tokens); labels: (images, tokens). NaN where nothing is kept at all or
    nothing is foreground.
    """
    labels = labels.reshape(len(labels), *(1,) * (kept.ndim - 2), labels.shape[-1])
    on = labels == FOREGROUND
    both = (kept & on).sum(-1)
    either = ((kept & (labels != VOID)) | on).sum(-1)
    iou = both / np.maximum(either, 1)
    return np.where(kept.any(-1) & on.any(-1), iou, np.nan)


def blind_overlaps(
    labels: Labels,
    grid: tuple[int, int],
    index: NDArray[np.int64],
    mass: float,
    seed: int,
) -> dict[str, Float]:
    """Baseline -> (images,): the IoU of maps that do not depend on the image.

    `uniform`: even attention, where chance decides which of the equal tokens are kept. `centre`: a
    Gaussian about the middle, of a quarter of the grid's sides. `random`: noise, every distribution
    over the tokens being equally likely. Drawn for each image with `seed` and its `index` in the
    data set, whatever the store's order.
    """
    n, n_tokens = labels.shape
    even = top_mass(np.ones(n_tokens), mass)
    uniform = np.zeros((n, n_tokens), bool)
    noise = np.zeros((n, n_tokens))
    for i in range(n):
        rng = np.random.default_rng([seed, int(index[i])])
        uniform[i] = rng.permutation(even)
        noise[i] = rng.exponential(size=n_tokens)
    centre = np.broadcast_to(top_mass(_centred(grid), mass), labels.shape)
    kept = {"uniform": uniform, "centre": centre, "random": top_mass(noise, mass)}
    return {name: overlap(kept[name], labels) for name in BASELINES}


def _centred(grid: tuple[int, int]) -> Float:
    y, x = ((np.arange(n) + 0.5) / n - 0.5 for n in grid)
    squares = np.add.outer(y**2, x**2)
    return np.exp(-squares / (2 * CENTRE_STD**2)).ravel()


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
    folders = [
        (f"attention/{b.group}/" if b.group else "attention/", own) for b, own in wanted
    ]
    if not all(store.has(f"{f}{ARRAYS[t]}") for f, tokens in folders for t in tokens):
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
        self,
        wanted: Wanted,
        labels: Mapping[str, Labels],
        mass: float,
        block_of: NDArray[np.int64],
    ) -> None:
        """labels: group -> (images, tokens), as `MaskTruth` has them; block_of: (images,)."""
        self._wanted = wanted
        self._labels = labels
        self._mass = mass
        self._block_of = block_of
        self._n_blocks = int(block_of.max(initial=-1)) + 1
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

    def _add_sums(
        self, key: tuple[str, str, str], parts: list[NDArray[np.float64]]
    ) -> None:
        own = self._sums.get(key)
        self._sums[key] = (
            parts if own is None else [a + b for a, b in zip(own, parts, strict=True)]
        )

    def without(self, kind: str, site: str, token: str) -> NDArray[np.float64] | None:
        """(heads, blocks) of the kind "heads", (blocks,) of "oracle": means without each block of
        images; None where no image counts."""
        key = (kind, site, token)
        if key in self._sums:
            return means_without(*self._sums[key])
        return None

    def merge(self, other: Overlaps) -> None:
        for key in self.heads:
            self.heads[key].merge(other.heads[key])
            self.oracle[key].merge(other.oracle[key])
        for sums_key, parts in other._sums.items():
            self._add_sums(sums_key, parts)

    def result(self) -> Overlaps:
        """The moments themselves: `heads` has entries (heads,), `oracle` scalars."""
        return self


def _slab_bytes(store: Store, wanted: Wanted) -> int:
    """A slab's rows of a group, and what one block takes while its maps are sorted."""
    largest = 0
    for block, tokens in wanted:
        stored = (
            store.attention(ARRAYS[tokens[0]], block.group).size_bytes // store.n_slabs
        )
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
        store,
        np.flatnonzero(used.mask),
        take,
        blocks=[block for block, _ in wanted],
        origin=origin,
        device=execution.device,
        progress=execution.progress,
    )
    for part in parts:
        for block, tokens in wanted:
            for token in tokens:
                # Rounded as in a store: stored rows give the same result.
                maps = part.values[block.site][token].astype(np.float16)
                found.add(block, token, maps, part.rows)
