"""The estimators of HSIC: exact or biased over all images, with a jackknife over them, and the mean
of HSIC_1 over minibatches, in one or several repeats.

Every sum over batches is a weighted sum over pairs of images, so if the Gram matrices of all images
exist, or cost less than the batches' own, all repeats are computed from them. Otherwise each batch
has its own Gram matrix, and all of them grow while the features are read once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes
from vitsee_core.similarity.cache import Tiles
from vitsee_core.similarity.comparison import Comparison, Estimator
from vitsee_core.similarity.gram_file import (
    MAX_TILE,
    GramFile,
    GramView,
    gram_bytes,
    tile_size,
)
from vitsee_core.similarity.hsic_sums import (
    Hsic,
    PairSums,
    as_one_batch,
    assemble_groups,
    bytes_per_matrix,
    pair_totals,
    stacked,
    sum_over_cells,
    weighted_sum,
    without_cell,
)
from vitsee_core.similarity.products import GramTile, products
from vitsee_core.similarity.representation import FeatureOffset, Representation, Shift
from vitsee_core.similarity.whole_tiles import Matrix, Partition
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

log = logging.getLogger(__name__)

BLOCKS = 20  # of the jackknife
# (rows, columns, tile=) -> HSICs of these groups of matrices.
Work = Callable[..., list[Hsic]]


def over_all_images(comparison: Comparison, *, biased: bool) -> Hsic:
    """Return HSIC_1 or HSIC_0 over all images; each replicate leaves out one block of images."""
    grams = full_grams(comparison)
    partition = jackknife_blocks(
        comparison.n_images, comparison.shuffled, comparison.seed
    )
    work = partial(
        leave_one_out, partition=partition, biased=biased, device=comparison.device
    )
    # All images, then each replicate.
    values = in_groups(comparison, grams, work, [partition])
    notes = exact_notes(biased, len(values) - 1)
    if len(values) == 1:
        return replace(values[0], notes=notes)
    replicates = stacked(values[1:])
    return replace(values[0], replicates=replicates, spread="jackknife", notes=notes)


def exact_notes(biased: bool, n_blocks: int) -> dict[str, Any]:
    """Return the notes on an estimate over all images, for a table's sidecar."""
    notes: dict[str, Any] = {
        "estimator": "exact",
        "hsic": "HSIC_1 (unbiased), all images",
    }
    if biased:
        notes["estimator"] = "biased"
        notes["hsic"] = "HSIC_0 (biased) over all images"
    notes["jackknife_blocks"] = n_blocks
    return notes


def full_grams(comparison: Comparison) -> list[GramView]:
    """Return the Gram matrix of every representation over the comparison's images, computed if it
    is not in the cache."""

    def n_bytes(representation: Representation) -> int:
        """Return the size of a representation's matrix on disk."""
        return gram_bytes(len(comparison.own_rows(representation)))

    files = comparison.grams(comparison.find, _compute_full_gram, n_bytes)
    return [
        GramView(file, comparison.rows_of(r))
        for file, r in zip(files, comparison.representations, strict=True)
    ]


def _compute_full_gram(
    comparison: Comparison, representation: Representation
) -> GramFile:
    """Return the Gram matrix of a representation over the images that its store counts by itself,
    after it was computed and written to the cache."""
    rows = comparison.own_rows(representation)
    size = tile_size(len(rows))
    edges = [slice(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]
    # The file numbers the tiles of the upper triangle row by row.
    pairs = combinations_with_replacement(range(len(edges)), 2)
    number_of_pair = {pair: k for k, pair in enumerate(pairs)}
    # Along the curve tiles that are computed together share rows, however many these are.
    order = sorted(number_of_pair, key=_morton_index)
    tiles = [GramTile(edges[a], edges[b]) for a, b in order]

    def make(origin: FeatureOffset) -> Tiles:
        """Return (number, values) of each tile; the offset of the features is recorded."""
        values = comparison.products(representation, rows, tiles, origin)
        return zip((number_of_pair[pair] for pair in order), values, strict=True)

    file = comparison.cache.add(representation.features, rows, size, make)
    comparison.progress.advance(1)
    return file


def _morton_index(pair: tuple[int, int]) -> int:
    """Return a tile's position along the curve that fills each square of tiles before it leaves it:
    the bits of both indices, interleaved (Morton 1966)."""
    a, b = pair
    return sum(
        ((a >> bit & 1) << 2 * bit + 1) | ((b >> bit & 1) << 2 * bit)
        for bit in range(max(a, b).bit_length())
    )


def block_labels(n: int, seed: int | None) -> Integers:
    """Return the jackknife's block of each of n images.

    There are at least 20 blocks (below 24 images one each), each at most a tile long.

    Args:
        n: images.
        seed: assigns images to blocks at random; None: blocks are runs of images, which are random
            samples if the store is shuffled.
    """
    # Runs whose lengths differ by one at most.
    labels = np.arange(n) * _n_blocks(n) // n
    if seed is None:
        return labels
    return np.random.default_rng(seed).permutation(labels)


def jackknife_blocks(n: int, shuffled: bool, seed: int) -> Partition:
    """Return the jackknife's blocks of n images of a store, as a partition."""
    labels = block_labels(n, None if shuffled else seed)
    return Partition(labels, int(labels.max()) + 1, crossing=True)


def most_left_out(n: int) -> int:
    """Return the size of the largest of the jackknife's blocks of n images."""
    # Rounded up.
    return -(-n // _n_blocks(n))


def _n_blocks(n: int) -> int:
    """Return the number of the jackknife's blocks of n images."""
    if n < BLOCKS + 4:
        return n
    return max(BLOCKS, -(-n // MAX_TILE))


def leave_one_out(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    *,
    tile: int,
    partition: Partition,
    biased: bool,
    device: str,
) -> list[Hsic]:
    """Return HSIC over all images, then without each block (unless fewer than 4 would remain)."""
    (total,), diagonals = pair_totals(rows, cols, [partition], device=device, tile=tile)
    all_sums = as_one_batch(total, diagonals)

    def estimate(sums: PairSums) -> Hsic:
        """Return HSIC from sums over pairs."""
        return sums.biased() if biased else sums.unbiased()

    def without_block(block: int) -> Hsic:
        """Return HSIC of the images outside of a block."""
        return estimate(without_cell(all_sums, total, partition.labels, block))

    # HSIC_1 needs 4 images, which must remain without any block.
    n_replicates = partition.n_cells if len(partition.labels) > 4 else 0
    # Two at a time: each holds the row sums of all images.
    with lane_pool(n_lanes(2)) as pool:
        replicates = in_order(without_block, range(n_replicates), pool, 2)
        return [estimate(all_sums), *replicates]


def in_groups(
    comparison: Comparison,
    matrices: Sequence[Matrix],
    work: Work,
    partitions: Sequence[Partition],
) -> list[Hsic]:
    """Return the results of `work` (HSIC over all images, then its replicates; or one per repeat,
    or of one batch) for all rows and columns.

    It is done on groups of matrices whose tiles fit the memory.

    Args:
        comparison: says which matrices are rows, and the memory.
        matrices: of all representations.
        work: a `Work`; gives equally many results for each pair of groups.
        partitions: of the images, whose sums take memory.
    """
    n = matrices[0].n
    budget = comparison.memory * 3 // 4
    tile = tile_size(n)  # as in the files: every tile is read once
    # One matrix of the rows and one of the columns at least have to fit.
    while 2 * bytes_per_matrix(n, partitions, tile) > budget and tile > 64:
        tile = -(-tile // 2)
    at_once = max(2, budget // bytes_per_matrix(n, partitions, tile))
    rows, cols = comparison.split(matrices)
    if len(matrices) <= at_once:
        return work(rows, cols, tile=tile)
    # Half for the rows, half for the columns.
    step = at_once // 2
    row_groups = [rows[k : k + step] for k in range(0, len(rows), step)]
    col_groups = row_groups
    if cols is not None:
        col_groups = [cols[k : k + step] for k in range(0, len(cols), step)]
    grid = []
    for row_group in row_groups:
        results = []
        for col_group in col_groups:
            if col_group is row_group:  # with itself: as for matrices among themselves
                results.append(work(row_group, None, tile=tile))
            else:
                results.append(work(row_group, col_group, tile=tile))
        grid.append(results)
    return assemble_groups(grid)


# Raghu et al. 2021, appendix A
BATCH = 1024
EXAMPLES = 10240
REPEATS = 20

# Number of shuffled images beyond which batches are runs, mixed within windows.
MANY = 1 << 14
RUN = 1 << 10
WINDOW = 1 << 14

# The number of a batch -> the Gram matrix of its images.
BatchGrams = Callable[[int], Matrix]


def minibatch(comparison: Comparison, estimator: Estimator) -> Hsic:
    """Return the mean HSIC_1 over batches; replicates are the repeats."""
    n = comparison.n_images
    batch, examples, repeats = batch_sizes(estimator, n)
    # Rescaled batches are in the store's order, as in the code of Walmer et al. 2023.
    seed = None if estimator.rescale else comparison.seed
    drawn = draw_batches(n, batch, examples, repeats, seed, comparison.shuffled)
    notes = batch_notes(batch, examples, repeats)
    if estimator.rescale and not comparison.in_order:
        raise StoreMismatch(
            "batches in the store's order need the same order in every store (extract both with "
            "the same --images, --seed and --order)"
        )
    if estimator.rescale:
        if comparison.cache.precision != "fp32":
            raise VitseeError(
                f"Gram matrices that are scaled to [0, 1] are of features with their offset, which "
                f"need float64; leave out --precision {comparison.cache.precision}"
            )
        notes["hsic"] += (
            "; Gram matrices scaled to [0, 1] batch by batch, images in order"
        )
        grams = [
            _rescaled_grams(comparison, r, drawn[0]) for r in comparison.representations
        ]
        values = [weighted_sum(list(each_batch(comparison, grams, len(drawn[0]))))]
    elif _prefers_full_grams(comparison, repeats * examples * batch):
        partitions = partitions_of(drawn, n)
        work = partial(
            over_cells, partitions=partitions, batch=batch, device=comparison.device
        )
        values = in_groups(comparison, full_grams(comparison), work, partitions)
    else:
        # One after the other, so that all Gram matrices grow in one reading.
        batches = [images for repeat in drawn for images in repeat]
        grams = batch_grams(comparison, batches)
        batch_values = list(each_batch(comparison, grams, len(batches)))
        per_repeat = len(drawn[0])
        values = [
            weighted_sum(batch_values[k : k + per_repeat])
            for k in range(0, len(batch_values), per_repeat)
        ]
    if repeats == 1:
        return replace(values[0], n_images=examples, notes=notes)
    return replace(
        values[0],
        replicates=stacked(values),
        spread="repeats",
        n_images=examples,
        notes=notes,
    )


def batch_notes(batch: int, examples: int, repeats: int) -> dict[str, Any]:
    """Return the notes on an estimate over minibatches, for a table's sidecar."""
    return {
        "estimator": "minibatch",
        "hsic": "HSIC_1 (unbiased) in each batch; ratio of means over a repeat's batches",
        "batch": batch,
        "batches": examples // batch,
        "repeats": repeats,
    }


def batch_sizes(estimator: Estimator, n: int) -> tuple[int, int, int]:
    """Return the batch size, the examples in a repeat (a multiple of it) and the repeats.

    They are capped by the n images of the data; caps are logged.

    Raises:
        VitseeError: no batch of at least 4 images is possible.
    """
    batch = estimator.batch or BATCH
    examples = estimator.examples or (n if estimator.rescale else EXAMPLES)
    repeats = estimator.repeats or (1 if estimator.rescale else REPEATS)
    if batch < 4:
        raise VitseeError(
            f"--batch is {batch}; HSIC_1 needs at least 4 images in a batch"
        )
    if estimator.rescale and repeats > 1:
        raise VitseeError(
            "batches in the store's order are the same each time; give --repeats 1"
        )
    if batch > n:
        log.warning("batch %d: there are %d images, all are used", batch, n)
    if examples > n:
        log.warning("examples %d: there are %d images, all are used", examples, n)
    batch = min(batch, n)
    examples = min(examples, n)
    if examples < batch:
        raise VitseeError(f"--examples {examples} are fewer than a batch of {batch}")
    if batch == n and repeats > 1:
        log.warning("a batch of all %d images is the same each time: one repeat", n)
        repeats = 1
    return batch, examples - examples % batch, repeats


def draw_batches(
    n: int,
    batch: int,
    examples: int,
    repeats: int,
    seed: int | None,
    shuffled: bool = False,
) -> list[list[Integers]]:
    """Return the batches of each repeat: image indices, ascending within a batch.

    Without a seed batches are in the images' order. From many images in random order, runs are
    drawn and mixed within windows of some batches: equally random, but a batch is read from a
    window's slabs. Drawn individually, its images would be in as many slabs, and every group of
    batches that fits the memory would read the whole store.

    Args:
        n: images.
        batch: images in a batch.
        examples: images in a repeat, a multiple of `batch`.
        repeats: how often they are drawn.
        seed: of the draws; None: in order.
        shuffled: whether the images are in random order.
    """
    rng = np.random.default_rng(seed)

    def draw_order() -> Integers:
        """Return image indices, of which consecutive ones become batches."""
        if seed is None:
            return np.arange(n)
        if not shuffled or n <= MANY:
            return rng.permutation(n)
        # Runs of neighbouring images in random order, then mixed within a window of them.
        starts = rng.permutation(np.arange(0, n, RUN))
        runs = np.concatenate([np.arange(at, min(at + RUN, n)) for at in starts])
        # A multiple of the batch, so that no batch lies in two windows.
        window = min(max(WINDOW - WINDOW % batch, batch), examples)
        return np.concatenate(
            [rng.permutation(runs[at : at + window]) for at in range(0, examples, window)]
        )

    drawn = []
    for _ in range(repeats):
        order = draw_order()
        starts = range(0, examples, batch)
        # Ascending within a batch, as rows are read in order; HSIC does not depend on it.
        drawn.append([np.sort(order[start : start + batch]) for start in starts])
    return drawn


def _prefers_full_grams(comparison: Comparison, batch_entries: int) -> bool:
    """Return whether Gram matrices of all images are cheaper than those of batches: they exist, or
    have fewer entries than `batch_entries`."""
    if not comparison.in_order:
        return True  # batches cannot be read: features come in each store's own order
    if comparison.n_images**2 < batch_entries:
        return True
    return all(comparison.find(r) is not None for r in comparison.representations)


def partitions_of(drawn: Sequence[Sequence[Integers]], n: int) -> list[Partition]:
    """Return the batches of each repeat as cells of the n images."""
    partitions = []
    for batches in drawn:
        # -1: in no batch of this repeat
        labels = np.full(n, -1)
        for g, images in enumerate(batches):
            labels[images] = g
        partitions.append(Partition(labels, len(batches), crossing=False))
    return partitions


def over_cells(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    *,
    tile: int,
    partitions: Sequence[Partition],
    batch: int,
    device: str,
) -> list[Hsic]:
    """Return the sum of HSIC_1 for each partition, over its cells of `batch` images."""
    totals, _ = pair_totals(rows, cols, partitions, device=device, tile=tile)
    return [
        sum_over_cells(total, partition, batch)
        for total, partition in zip(totals, partitions, strict=True)
    ]


# One Gram matrix per batch


@dataclass(frozen=True)
class InMemory:
    """A matrix of `n` images that `load` returns as a whole, possibly padded."""

    n: int
    load: Callable[[], Float32]

    @property
    def shift(self) -> Shift:
        """Raise MissingInput: the features' common offset is not kept beside these matrices."""
        raise MissingInput(
            "Gram matrices of single batches or slabs are kept without what inner products of the "
            "features themselves need (cosine, Pearson); those of all images have it, which need "
            "the activations (extract --tokens SITE=all)"
        )

    def block(self, i: slice, j: slice) -> Float32:
        """Return the entries (len(i), len(j)) of these images."""
        return self.load()[: self.n, : self.n][i, j]


def batch_grams(comparison: Comparison, batches: Sequence[Integers]) -> list[BatchGrams]:
    """Return the Gram matrices of every representation within each batch, computed if they are not
    in the cache.

    Args:
        comparison: of the representations.
        batches: image indices of each.
    """

    def find(r: Representation) -> GramFile | None:
        """Return the cached matrices of a representation."""
        rows = comparison.rows_of(r)
        return comparison.find(r, [rows[images] for images in batches])

    # float32, each batch padded to the longest
    n_bytes = 4 * len(batches) * max(map(len, batches)) ** 2

    def gram_of_batch(file: GramFile, batch: int) -> Matrix:
        """Return one of a file's matrices."""
        return InMemory(file.header.batches[batch], partial(file.tile, batch))

    files = comparison.grams(
        find, partial(_compute_batch_grams, batches), lambda _: n_bytes
    )
    return [partial(gram_of_batch, file) for file in files]


def _compute_batch_grams(
    batches: Sequence[Integers], comparison: Comparison, representation: Representation
) -> GramFile:
    """Return the Gram matrices of a representation within each batch, after they were computed and
    written to the cache."""
    rows = comparison.rows_of(representation)
    lengths = tuple(map(len, batches))

    def make(origin: FeatureOffset) -> Tiles:
        """Return (number, values) of each batch; the offset of the features is recorded."""
        tiles = [GramTile(images, images) for images in batches]
        return enumerate(comparison.products(representation, rows, tiles, origin))

    file = comparison.cache.add(
        representation.features,
        rows[np.concatenate(batches)],
        max(lengths),
        make,
        lengths,
    )
    comparison.progress.advance(1)
    return file


def _rescaled_grams(
    comparison: Comparison, representation: Representation, batches: Sequence[Integers]
) -> BatchGrams:
    """Return Gram matrices of uncentred features, scaled to [0, 1] batch by batch.

    From each its smallest entry is subtracted, and it is divided by its then largest. They are in
    memory, and in float64 until scaled, because they contain the features' offset.
    """
    tiles = products(
        representation.features,
        comparison.rows_of(representation),
        [GramTile(images, images) for images in batches],
        device=comparison.device,
        memory=comparison.memory,
        centred=False,
        dtype=np.float64,
    )
    scaled = []
    # A constant batch has no scale: NaN.
    for gram in tiles:
        shifted = gram - gram.min()
        scaled.append((shifted / (shifted.max() or np.nan)).astype(np.float32))
    return lambda batch: InMemory(len(scaled[batch]), lambda: scaled[batch])


def each_batch(
    comparison: Comparison, grams: Sequence[BatchGrams], n_batches: int
) -> Iterator[Hsic]:
    """Yield HSIC_1 in each batch.

    Args:
        comparison: of the representations.
        grams: Gram matrices of each representation by batch.
        n_batches: how many there are.
    """
    for batch in range(n_batches):
        matrices = [gram_of_batch(batch) for gram_of_batch in grams]
        n = matrices[0].n
        # HSIC_1 over the batch is that of a partition of one cell.
        all_images = Partition(np.zeros(n, np.int64), n_cells=1, crossing=False)
        work = partial(
            _unbiased_of_one_cell, partition=all_images, device=comparison.device
        )
        yield from in_groups(comparison, matrices, work, [all_images])


def _unbiased_of_one_cell(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    *,
    tile: int,
    partition: Partition,
    device: str,
) -> list[Hsic]:
    """Return HSIC_1 over the images of a partition of one cell."""
    (total,), diagonals = pair_totals(rows, cols, [partition], device=device, tile=tile)
    return [as_one_batch(total, diagonals).unbiased()]
