"""Exact and biased HSIC from the Gram matrices of all images, with a jackknife over images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes
from vitsee_core.similarity.cache import Tiles
from vitsee_core.similarity.comparison import Comparison
from vitsee_core.similarity.gram_file import LARGEST_TILE, GramFile, GramView, gram_bytes, tile_size
from vitsee_core.similarity.hsic import (
    Hsic,
    PairSums,
    as_one_batch,
    assembled,
    bytes_each,
    pair_totals,
    stacked,
    without_cell,
)
from vitsee_core.similarity.products import GramTile
from vitsee_core.similarity.representation import FeatureOffset, Representation
from vitsee_core.similarity.whole_tiles import Matrix, Partition
from vitsee_core.types import Integers

BLOCKS = 20
Work = Callable[..., list[Hsic]]


def over_all_images(comparison: Comparison, *, biased: bool) -> Hsic:
    """HSIC_1 or HSIC_0 over all images; each replicate leaves out one block of images."""
    grams = full_grams(comparison)
    partition = jackknife_blocks(comparison.n_images, comparison.shuffled, comparison.seed)
    work = partial(leave_one_out, partition=partition, biased=biased, device=comparison.device)
    values = in_groups(comparison, grams, work, [partition])
    notes = describe(biased, len(values) - 1)
    if len(values) == 1:
        return replace(values[0], notes=notes)
    replicates = stacked(values[1:])
    return replace(values[0], replicates=replicates, spread="jackknife", notes=notes)


def describe(biased: bool, n_blocks: int) -> dict[str, Any]:
    """Notes for a sidecar."""
    return {
        "estimator": "biased" if biased else "exact",
        "hsic": "HSIC_0 (biased) over all images" if biased else "HSIC_1 (unbiased), all images",
        "jackknife_blocks": n_blocks,
    }


def full_grams(comparison: Comparison) -> list[GramView]:
    """The Gram matrix of every representation over the comparison's images, computed if missing;
    see `Comparison.grams`."""

    def size(of: Representation) -> int:
        return gram_bytes(len(comparison.own_rows(of)))

    files = comparison.grams(comparison.find, _make, size)
    return [
        GramView(file, comparison.rows_of(r))
        for file, r in zip(files, comparison.representations, strict=True)
    ]


def _make(comparison: Comparison, of: Representation) -> GramFile:
    rows = comparison.own_rows(of)
    size = tile_size(len(rows))
    edges = [slice(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]
    numbered = {
        pair: k for k, pair in enumerate(combinations_with_replacement(range(len(edges)), 2))
    }
    # Tiles computed together share rows, whatever their number.
    order = sorted(numbered, key=_along_blocks)
    tiles = [GramTile(edges[a], edges[b]) for a, b in order]

    def make(origin: FeatureOffset) -> Tiles:
        made = comparison.products(of, rows, tiles, origin)
        return zip((numbered[pair] for pair in order), made, strict=True)

    made = comparison.cache.add(of.features, rows, size, make)
    comparison.progress.advance(1)
    return made


def _along_blocks(pair: tuple[int, int]) -> int:
    """A tile's position along the curve that fills each square of tiles before it leaves it: the
    bits of both indices, interleaved (Morton 1966)."""
    a, b = pair
    return sum(
        ((a >> bit & 1) << 2 * bit + 1) | ((b >> bit & 1) << 2 * bit)
        for bit in range(max(a, b).bit_length())
    )


def block_labels(n: int, seed: int | None) -> Integers:
    """The jackknife's blocks of images: at least 20 (below 24 images, one each), at most a tile
    long. Runs of a shuffled store are random samples; other orders are assigned with `seed`."""
    labels = np.arange(n) * _n_blocks(n) // n
    return labels if seed is None else np.random.default_rng(seed).permutation(labels)


def jackknife_blocks(n: int, shuffled: bool, seed: int) -> Partition:
    """`block_labels` of a shuffled store, or of one in the data's order."""
    labels = block_labels(n, None if shuffled else seed)
    return Partition(labels, int(labels.max()) + 1, crossing=True)


def most_left_out(n: int) -> int:
    """Size of the largest of these blocks."""
    return -(-n // _n_blocks(n))


def _n_blocks(n: int) -> int:
    return n if n < BLOCKS + 4 else max(BLOCKS, -(-n // LARGEST_TILE))


def leave_one_out(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    *,
    tile: int,
    partition: Partition,
    biased: bool,
    device: str,
) -> list[Hsic]:
    """HSIC over all images, then without each block (unless fewer than 4 would remain)."""
    (total,), diagonals = pair_totals(rows, cols, [partition], device=device, tile=tile)
    whole = as_one_batch(total, diagonals)

    def value(sums: PairSums) -> Hsic:
        return sums.biased() if biased else sums.unbiased()

    def without(cell: int) -> Hsic:
        return value(without_cell(whole, total, partition.labels, cell))

    cells = range(partition.n_cells if len(partition.labels) > 4 else 0)
    # Few partitions at a time: each holds the row sums of all images.
    with lane_pool(n_lanes(2)) as pool:
        return [value(whole), *in_order(without, cells, pool, 2)]


def in_groups(
    comparison: Comparison, matrices: Sequence[Matrix], work: Work, partitions: Sequence[Partition]
) -> list[Hsic]:
    """`work(rows, cols, tile=...)` on all matrices, or on groups of them whose tiles fit the memory
    together, with the results assembled."""
    n, budget = matrices[0].n, comparison.memory * 3 // 4
    tile = tile_size(n)  # as in the files: every tile is read once
    while 2 * bytes_each(n, partitions, tile) > budget and tile > 64:
        tile = -(-tile // 2)
    at_once = max(2, budget // bytes_each(n, partitions, tile))
    rows, cols = comparison.split(matrices)
    if len(matrices) <= at_once:
        return work(rows, cols, tile=tile)
    step = at_once // 2
    of_rows = [rows[k : k + step] for k in range(0, len(rows), step)]
    other = rows if cols is None else cols
    of_cols = [other[k : k + step] for k in range(0, len(other), step)]
    # A group with itself is its own columns, as in a single group.
    grid = [
        [work(a, None if cols is None and a is b else b, tile=tile) for b in of_cols]
        for a in (of_rows if cols is not None else of_cols)
    ]
    return assembled(grid)
