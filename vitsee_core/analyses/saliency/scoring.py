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
# The standard deviation of the centred map, in sides of the grid.
CENTRE_STD = 0.25
# Sums within a billionth of the threshold are on it: whether an even map keeps 6 or 7 of its 10
# tokens does not depend on rounding.
SLACK = 1e-9


def top_mass(maps: NDArray[Any], mass: float) -> Mask:
    """Return the smallest set of top tokens that holds the share `mass` of a map, (..., tokens).

    Sorted ascending, the tokens are kept whose cumulated share is above 1 - mass (Walmer et al.
    2023 with 0.6, as in their code). Of equal tokens the later ones are kept. Maps are non-negative
    and need not sum to 1; a map without mass, or with NaN, keeps nothing.
    """
    keys = maps
    if maps.dtype == np.float16:
        # The bits of non-negative float16 sort as its values do, seven times as fast.
        keys = maps.view(np.int16)
    order = np.argsort(keys, axis=-1, kind="stable")
    summed = np.take_along_axis(maps, order, -1).cumsum(-1, dtype=np.float64)
    # In shares of the total, summed[..., -1]: maps need not sum to 1.
    is_above = summed > (1 - mass + SLACK) * summed[..., -1:]
    is_top = np.zeros(maps.shape, bool)
    np.put_along_axis(is_top, order, is_above, -1)
    return is_top


def overlap(is_top: Mask, labels: Labels) -> Float:
    """Return the intersection over union of top tokens with the foreground, (images, ...).

    Void tokens are left out on both sides. It is NaN if no token is top, or none is foreground.

    Args:
        is_top: (images, ..., tokens) as `top_mass` gives it.
        labels: (images, tokens).
    """
    # The same labels for every head: axes of length 1 between images and tokens.
    n_middle_axes = is_top.ndim - 2
    labels = labels.reshape(len(labels), *(1,) * n_middle_axes, labels.shape[-1])
    is_foreground = labels == FOREGROUND
    intersection = (is_top & is_foreground).sum(-1)
    union = ((is_top & (labels != VOID)) | is_foreground).sum(-1)
    iou = intersection / np.maximum(union, 1)
    return np.where(is_top.any(-1) & is_foreground.any(-1), iou, np.nan)


def blind_overlaps(
    labels: Labels,
    grid: tuple[int, int],
    index: NDArray[np.int64],
    mass: float,
    seed: int,
) -> dict[str, Float]:
    """Return baseline -> (images,) the IoU of maps that do not depend on the image.

    `uniform` is even attention, where chance decides which of the equal tokens are kept. `centre`
    is a Gaussian about the middle, whose standard deviation is a quarter of the grid's sides.
    `random` is noise that makes every distribution over the tokens equally likely.

    Args:
        labels: (images, tokens).
        grid: rows and columns of tokens.
        index: (images,) each image's index in its data set; with the seed it decides the image's
            draws, whatever the store's order.
        mass: the share of each map that is kept.
        seed: the seed of the draws.
    """
    n, n_tokens = labels.shape
    even = top_mass(np.ones(n_tokens), mass)
    uniform = np.zeros((n, n_tokens), bool)
    noise = np.zeros((n, n_tokens))
    for i in range(n):
        rng = np.random.default_rng([seed, int(index[i])])
        uniform[i] = rng.permutation(even)
        # Exponential variates over their sum are uniform on the simplex.
        noise[i] = rng.exponential(size=n_tokens)
    # A Gaussian about the middle, in units of the grid's sides: -0.5 to 0.5.
    y = (np.arange(grid[0]) + 0.5) / grid[0] - 0.5
    x = (np.arange(grid[1]) + 0.5) / grid[1] - 0.5
    squares = np.add.outer(y**2, x**2)
    gaussian = np.exp(-squares / (2 * CENTRE_STD**2)).ravel()
    centre = np.broadcast_to(top_mass(gaussian, mass), labels.shape)
    return {
        "uniform": overlap(uniform, labels),
        "centre": overlap(centre, labels),
        "random": overlap(top_mass(noise, mass), labels),
    }


log = logging.getLogger(__name__)

ARRAYS = {"cls": "cls_rows", "mean": "received_rows"}
TOKENS = tuple(ARRAYS)
# Blocks, each with the tokens whose attention is scored there.
ScoredAttention = tuple[tuple[StoredAttention, tuple[str, ...]], ...]


def overlaps(
    store: Store,
    scored: ScoredAttention,
    labels: Mapping[str, Labels],
    rows: Rows,
    mass: float,
    blocks: Blocks,
    execution: Execution = DEFAULT,
    *,
    origin: Provenance | None = None,
) -> Overlaps:
    """Return the moments of overlaps over some images.

    The store's rows of attention are read; if it has none, the attention is computed again.

    Args:
        store: a store with attention summaries.
        scored: blocks, and some of `TOKENS` for each.
        labels: group of blocks -> (images, tokens), as `MaskTruth` has them.
        rows: the images that count.
        mass: the share of the attention that is kept, as for `top_mass`.
        blocks: the blocks of these images that the jackknife leaves out.
        execution: device and parallel work.
        origin: where images and weights are now.

    Raises:
        VitseeError: attention must be recomputed, and images or weights are gone.
    """
    make = partial(Overlaps, scored, labels, mass, blocks.of_rows)
    folders = [
        (f"attention/{block.group}/" if block.group else "attention/", tokens)
        for block, tokens in scored
    ]
    if not all(
        store.has(f"{folder}{ARRAYS[token]}")
        for folder, tokens in folders
        for token in tokens
    ):
        recomputed = make()
        _add_recomputed(
            store, recomputed, scored, rows, origin or Provenance(), execution
        )
        return recomputed
    slab_bytes = _slab_bytes(store, scored)
    with counting(execution.progress, rows.n):
        return execution.fold(store, make, rows, slab_bytes=slab_bytes)


class Overlaps:
    """Moments over images of each block's IoUs, and their means without each of the jackknife's
    blocks of images. Filled by `streaming.fold`, or with `add`.

    Attributes:
        heads: (block, token) -> moments of entries (heads,).
        oracle: (block, token) -> moments of each image's best head.
    """

    def __init__(
        self,
        scored: ScoredAttention,
        labels: Mapping[str, Labels],
        mass: float,
        block_of: NDArray[np.int64],
    ) -> None:
        """labels: group -> (images, tokens), as `MaskTruth` has them; block_of: (images,)."""
        self._scored = scored
        self._labels = labels
        self._mass = mass
        self._block_of = block_of
        self._n_blocks = int(block_of.max(initial=-1)) + 1
        # (heads, blocks) of the heads, (blocks,) of the oracle: sums, and how many images in them.
        self._sums: dict[tuple[str, str, str], list[NDArray[np.float64]]] = {}
        keys = [(block.site, token) for block, tokens in scored for token in tokens]
        self.heads = {key: Moments() for key in keys}
        self.oracle = {key: Moments() for key in keys}

    def update(self, slab: Slab) -> None:
        """Add the stored attention of a slab's valid images."""
        valid = slab.valid
        rows = np.arange(slab.rows.start, slab.rows.stop)[valid]
        arrays: dict[tuple[str, str], NDArray[Any]] = {}
        for block, tokens in self._scored:
            for token in tokens:
                array = ARRAYS[token], block.group
                if array not in arrays:
                    # One group at a time: for a model with several grids, a slab may be large.
                    arrays = {k: v for k, v in arrays.items() if k[1] == block.group}
                    arrays[array] = slab.attention(*array)[valid]
                self.add(block, token, arrays[array][:, block.row, : block.n_heads], rows)

    def add(
        self, block: StoredAttention, token: str, a: NDArray[Any], rows: NDArray[np.int64]
    ) -> None:
        """Add some images' attention.

        Args:
            block: the block.
            token: whose attention it is, one of `TOKENS`.
            a: (images, heads, keys) attention over all keys.
            rows: (images,) rows of the store.
        """
        # Prefix tokens dropped; top_mass works in shares, which is the renormalisation.
        is_top = top_mass(a[..., block.layout.n_prefix :], self._mass)
        # (images, heads)
        iou = overlap(is_top, self._labels[block.group][rows])
        # Not nanmax, which warns of images in which no head has a value.
        best = np.where(np.isnan(iou), -np.inf, iou).max(1)
        best = np.where(np.isneginf(best), np.nan, best)
        self.heads[block.site, token].add(iou)
        self._add_block_sums(("heads", block.site, token), iou, rows)
        self.oracle[block.site, token].add(best)
        self._add_block_sums(("oracle", block.site, token), best, rows)

    def _add_block_sums(
        self, key: tuple[str, str, str], values: Float, rows: NDArray[np.int64]
    ) -> None:
        """Add the values of some images, (images, ...), to the sums of their blocks."""
        has_value = ~np.isnan(values)
        block_of = self._block_of[rows]
        sums = block_sums(np.where(has_value, values, 0.0), block_of, self._n_blocks)
        counts = block_sums(has_value, block_of, self._n_blocks)
        self._add_sums(key, [sums, counts])

    def _add_sums(
        self, key: tuple[str, str, str], sums: list[NDArray[np.float64]]
    ) -> None:
        """Add sums and counts by block to those that the key has."""
        earlier = self._sums.get(key)
        if earlier is None:
            self._sums[key] = sums
        else:
            self._sums[key] = [a + b for a, b in zip(earlier, sums, strict=True)]

    def without(self, kind: str, site: str, token: str) -> NDArray[np.float64] | None:
        """Return the means without each block of images; None if no image counts.

        They are (heads, blocks) for the kind "heads" and (blocks,) for "oracle".
        """
        key = (kind, site, token)
        if key in self._sums:
            return means_without(*self._sums[key])
        return None

    def merge(self, later: Overlaps) -> None:
        """Add the moments and sums of later slabs to these."""
        for key in self.heads:
            self.heads[key].merge(later.heads[key])
            self.oracle[key].merge(later.oracle[key])
        for sums_key, sums in later._sums.items():
            self._add_sums(sums_key, sums)

    def result(self) -> Overlaps:
        """Return this object itself: its moments are the result."""
        return self


def _slab_bytes(store: Store, scored: ScoredAttention) -> int:
    """Return the memory of a slab's rows of a group, and of one block while its maps are sorted."""
    largest = 0
    for block, tokens in scored:
        stored = (
            store.attention(ARRAYS[tokens[0]], block.group).size_bytes // store.n_slabs
        )
        n_weights = store.plan.slab * block.n_heads * block.layout.n_tokens
        # Per weight: keys, order and gathered values in 8 bytes each, float64 sums, masks.
        largest = max(largest, stored + 40 * n_weights)
    return largest


def _add_recomputed(
    store: Store,
    overlaps_: Overlaps,
    scored: ScoredAttention,
    used: Rows,
    origin: Provenance,
    execution: Execution,
) -> None:
    """Compute the attention of a store without rows of attention, and add its overlaps."""
    log.info("%s has no rows of attention (extract --attention rows does)", store.label)
    tokens_of = {block.site: tokens for block, tokens in scored}

    def take(block: StoredAttention, a: Tensor) -> dict[str, Tensor]:
        """Return token -> (images, heads, keys) out of attention (images, heads, n, n)."""
        maps = {}
        if "cls" in tokens_of[block.site]:
            maps["cls"] = a[:, :, block.layout.cls]
        if "mean" in tokens_of[block.site]:
            maps["mean"] = a[:, :, block.layout.n_prefix :].mean(2)
        return maps

    # The model's full attention never leaves the device: `take` keeps two rows of it.
    batches = attention_of_images(
        store,
        np.flatnonzero(used.mask),
        take,
        blocks=[block for block, _ in scored],
        origin=origin,
        device=execution.device,
        progress=execution.progress,
    )
    for batch in batches:
        for block, tokens in scored:
            for token in tokens:
                # Rounded as in a store: stored rows give the same result.
                maps = batch.values[block.site][token].astype(np.float16)
                overlaps_.add(block, token, maps, batch.rows)
