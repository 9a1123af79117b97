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
    LARGEST_TILE,
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

BLOCKS = 20
Work = Callable[..., list[Hsic]]


def over_all_images(comparison: Comparison, *, biased: bool) -> Hsic:
    """HSIC_1 or HSIC_0 over all images; each replicate leaves out one block of images."""
    grams = full_grams(comparison)
    partition = jackknife_blocks(
        comparison.n_images, comparison.shuffled, comparison.seed
    )
    work = partial(
        leave_one_out, partition=partition, biased=biased, device=comparison.device
    )
    values = in_groups(comparison, grams, work, [partition])
    notes = exact_notes(biased, len(values) - 1)
    if len(values) == 1:
        return replace(values[0], notes=notes)
    replicates = stacked(values[1:])
    return replace(values[0], replicates=replicates, spread="jackknife", notes=notes)


def exact_notes(biased: bool, n_blocks: int) -> dict[str, Any]:
    """Notes for a sidecar."""
    return {
        "estimator": "biased" if biased else "exact",
        "hsic": "HSIC_0 (biased) over all images"
        if biased
        else "HSIC_1 (unbiased), all images",
        "jackknife_blocks": n_blocks,
    }


def full_grams(comparison: Comparison) -> list[GramView]:
    """The Gram matrix of every representation over the comparison's images, computed if missing;
    see `Comparison.grams`."""

    def size(of: Representation) -> int:
        return gram_bytes(len(comparison.own_rows(of)))

    files = comparison.grams(comparison.find, _full_gram, size)
    return [
        GramView(file, comparison.rows_of(r))
        for file, r in zip(files, comparison.representations, strict=True)
    ]


def _full_gram(comparison: Comparison, of: Representation) -> GramFile:
    rows = comparison.own_rows(of)
    size = tile_size(len(rows))
    edges = [slice(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]
    numbered = {
        pair: k
        for k, pair in enumerate(combinations_with_replacement(range(len(edges)), 2))
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
    if seed is None:
        return labels
    return np.random.default_rng(seed).permutation(labels)


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
    comparison: Comparison,
    matrices: Sequence[Matrix],
    work: Work,
    partitions: Sequence[Partition],
) -> list[Hsic]:
    """`work(rows, cols, tile=...)` on all matrices, or on groups of them whose tiles fit the memory
    together, with the results assembled."""
    n = matrices[0].n
    budget = comparison.memory * 3 // 4
    tile = tile_size(n)  # as in the files: every tile is read once
    while 2 * bytes_per_matrix(n, partitions, tile) > budget and tile > 64:
        tile = -(-tile // 2)
    at_once = max(2, budget // bytes_per_matrix(n, partitions, tile))
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
    return assemble_groups(grid)


# Raghu et al. 2021, appendix A
BATCH = 1024
EXAMPLES = 10240
REPEATS = 20

# Number of shuffled images beyond which batches are runs, mixed within windows.
MANY = 1 << 14
RUN = 1 << 10
WINDOW = 1 << 14

# The Gram matrix of a batch, by the batch's number.
OfBatch = Callable[[int], Matrix]


def minibatch(comparison: Comparison, estimator: Estimator) -> Hsic:
    """The mean HSIC_1 over batches; replicates are the repeats."""
    n = comparison.n_images
    batch, examples, repeats = batch_sizes(estimator, n)
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
        grams = [_rescaled(comparison, r, drawn[0]) for r in comparison.representations]
        values = [weighted_sum(list(each_batch(comparison, grams, len(drawn[0]))))]
    elif _prefer_whole(comparison, repeats * examples * batch):
        partitions = partitions_of(drawn, n)
        work = partial(
            over_cells, partitions=partitions, batch=batch, device=comparison.device
        )
        values = in_groups(comparison, full_grams(comparison), work, partitions)
    else:
        batches = [places for cells in drawn for places in cells]
        parts = list(each_batch(comparison, own_grams(comparison, batches), len(batches)))
        step = len(drawn[0])
        values = [weighted_sum(parts[k : k + step]) for k in range(0, len(parts), step)]
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
    """Notes for a sidecar."""
    return {
        "estimator": "minibatch",
        "hsic": "HSIC_1 (unbiased) in each batch; ratio of means over a repeat's batches",
        **{"batch": batch, "batches": examples // batch, "repeats": repeats},
    }


def batch_sizes(estimator: Estimator, n: int) -> tuple[int, int, int]:
    """Batch, examples (a multiple of it) and repeats, capped by the data; caps are logged. Raises
    VitseeError: no batch of at least 4 images is possible."""
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
    for name, value in (("batch", batch), ("examples", examples)):
        if value > n:
            log.warning("%s %d: there are %d images, all are used", name, value, n)
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
    """Repeats of batches of image indices, ascending within a batch; in the images' order without a
    seed.

    From many images in random order, runs are drawn and mixed within windows of some batches:
    equally random, but a batch is read from a window's slabs. Drawn individually, its images would
    be in as many slabs, and every group of batches that fits the memory would read the whole store.
    """
    rng = np.random.default_rng(seed)

    def order() -> Integers:
        if seed is None:
            return np.arange(n)
        if not shuffled or n <= MANY:
            return rng.permutation(n)
        starts = rng.permutation(np.arange(0, n, RUN))
        runs = np.concatenate([np.arange(at, min(at + RUN, n)) for at in starts])
        window = min(max(WINDOW - WINDOW % batch, batch), examples)
        return np.concatenate(
            [rng.permutation(runs[at : at + window]) for at in range(0, examples, window)]
        )

    orders = [order() for _ in range(repeats)]
    return [
        [np.sort(of[at : at + batch]) for at in range(0, examples, batch)]
        for of in orders
    ]


def _prefer_whole(comparison: Comparison, batch_entries: int) -> bool:
    """Whether all images' Gram matrices exist, or have fewer entries than the batches'."""
    n = comparison.n_images
    if not comparison.in_order:  # features are read in each store's own order
        return True
    return n * n < batch_entries or all(
        comparison.find(r) is not None for r in comparison.representations
    )


def partitions_of(drawn: Sequence[Sequence[Integers]], n: int) -> list[Partition]:
    """The batches of each repeat as cells of the n images."""
    partitions = []
    for cells in drawn:
        labels = np.full(n, -1)
        for g, places in enumerate(cells):
            labels[places] = g
        partitions.append(Partition(labels, len(cells), crossing=False))
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
    """The sum of HSIC_1 for each partition, over its cells of `batch` images."""
    totals, _ = pair_totals(rows, cols, partitions, device=device, tile=tile)
    return [sum_over_cells(t, p, batch) for t, p in zip(totals, partitions, strict=True)]


# One Gram matrix per batch


@dataclass(frozen=True)
class InMemory:
    """A matrix of `n` images that `load` returns as a whole, possibly padded."""

    n: int
    load: Callable[[], Float32]

    @property
    def shift(self) -> Shift:
        """Not available, see `GramView.shift`. Raises MissingInput: always."""
        raise MissingInput(
            "Gram matrices of single batches or slabs are kept without what inner products of the "
            "features themselves need (cosine, Pearson); those of all images have it, which need "
            "the activations (extract --tokens SITE=all)"
        )

    def block(self, i: slice, j: slice) -> Float32:
        return self.load()[: self.n, : self.n][i, j]


def own_grams(comparison: Comparison, batches: Sequence[Integers]) -> list[OfBatch]:
    """The Gram matrices of every representation over each batch of image indices, cached like all
    Gram matrices."""

    def made(r: Representation) -> GramFile | None:
        return comparison.find(r, [comparison.rows_of(r)[places] for places in batches])

    size = 4 * len(batches) * max(map(len, batches)) ** 2

    def of_batch(file: GramFile, batch: int) -> Matrix:
        return InMemory(file.header.batches[batch], partial(file.tile, batch))

    files = comparison.grams(made, partial(_batch_grams, batches), lambda _: size)
    return [partial(of_batch, file) for file in files]


def _batch_grams(
    batches: Sequence[Integers], comparison: Comparison, of: Representation
) -> GramFile:
    lengths = tuple(map(len, batches))

    def make(origin: FeatureOffset) -> Tiles:
        tiles = [GramTile(places, places) for places in batches]
        return enumerate(comparison.products(of, comparison.rows_of(of), tiles, origin))

    rows = comparison.rows_of(of)[np.concatenate(batches)]
    made = comparison.cache.add(of.features, rows, max(lengths), make, lengths)
    comparison.progress.advance(1)
    return made


def _rescaled(
    comparison: Comparison, of: Representation, batches: Sequence[Integers]
) -> OfBatch:
    """Gram matrices of uncentred features, each minus its smallest entry and over its then largest;
    in memory, and in float64 until scaled, because they contain the features' offset."""
    tiles = products(
        of.features,
        comparison.rows_of(of),
        [GramTile(places, places) for places in batches],
        device=comparison.device,
        memory=comparison.memory,
        centred=False,
        dtype=np.float64,
    )
    scaled = []
    for gram in tiles:
        shifted = gram - gram.min()
        scaled.append((shifted / (shifted.max() or np.nan)).astype(np.float32))
    return lambda batch: InMemory(len(scaled[batch]), lambda: scaled[batch])


def each_batch(
    comparison: Comparison, grams: Sequence[OfBatch], n_batches: int
) -> Iterator[Hsic]:
    """HSIC_1 in each batch."""
    for batch in range(n_batches):
        matrices = [of(batch) for of in grams]
        whole = Partition(np.zeros(matrices[0].n, np.int64), 1, crossing=False)

        def work(rows: Any, cols: Any, tile: int, whole: Partition = whole) -> list[Hsic]:
            (total,), own = pair_totals(
                rows, cols, [whole], device=comparison.device, tile=tile
            )
            return [as_one_batch(total, own).unbiased()]

        yield from in_groups(comparison, matrices, work, [whole])
