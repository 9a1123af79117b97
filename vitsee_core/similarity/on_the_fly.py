"""HSIC between many small representations, whose Gram matrices are computed tile by tile and never
stored.

For each tile of images the features of both sides are read once for all representations, centred,
and multiplied; `pair_totals` takes these tiles like those from disk. So exact, biased and minibatch
values, and their spread, equal those of `hsic` on the same images.

A product of some hundred columns is bound by memory. `benchmarks/localize.py` prints the share of
the rate of a large product in float32.

Cost: n (n + 1) (sum of features) for the Gram matrices, n (n + 1) R C for the pairs, and reading
each feature about n / (2 tile) times if they do not all fit the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from vitsee_core.kernels.backend import (
    LARGE,
    MatmulBackend,
    choose_device,
    full_precision,
    matmul_backend,
)
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.similarity.comparison import Estimator
from vitsee_core.similarity.estimators import (
    batch_notes,
    batch_sizes,
    draw_batches,
    exact_notes,
    jackknife_blocks,
    leave_one_out,
    over_cells,
    partitions_of,
)
from vitsee_core.similarity.hsic_sums import (
    METHODS,
    Hsic,
    assemble_groups,
    bytes_per_matrix,
    stacked,
)
from vitsee_core.similarity.runs import Runs, StoredRuns
from vitsee_core.similarity.stacks import Stack, TokenStack
from vitsee_core.similarity.whole_tiles import Partition
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import VitseeError

LARGEST_TILE = 512
GOOD_TILE = 256
SMALLEST_TILE = 32
MIN_GROUP = 8  # matrices in a group that is not divided further before tiles are
TILES_ALONG = 2  # diagonal squares are computed whole for sums over pairs
# (rows, columns, tile=): two groups of matrices in tiles.
Work = Callable[..., list[Hsic]]
Shape = tuple[int, int]


def hsic_on_the_fly(
    rows: Sequence[Stack],
    cols: Sequence[Stack],
    images: Integers,
    *,
    estimator: Estimator,
    shuffled: bool = True,
    seed: int = 0,
    device: str = "cpu",
    memory: int,
    progress: Progress = SILENT,
) -> Hsic:
    """Return the HSIC of every matrix in `rows` with every one in `cols`, as `hsic` would.

    It takes `memory`, plus the result with its replicates.

    Args:
        rows: stacks of one store, R matrices in total.
        cols: other stacks of it, C matrices.
        images: rows of the store that count, ascending; at least 4.
        estimator: "exact" (and "auto"), "biased" or "minibatch", without `rescale`.
        shuffled: whether the store holds its images in random order.
        seed: of minibatches, and of the jackknife's blocks in unshuffled stores.
        device: where to multiply, see `choose_device`.
        memory: bytes to stay within.
        progress: counts tiles of images.

    Raises:
        VitseeError: too few images for a batch, too little memory, or a device without float64.
    """
    n = len(images)
    mults = multiplications(shapes(rows), shapes(cols), n)
    device = choose_device(device, mults)
    backend = matmul_backend(device)
    memory = min(memory, backend.free_bytes() or memory)
    work: Work
    if estimator.kind == "minibatch":
        batch, examples, repeats = batch_sizes(estimator, n)
        drawn = draw_batches(n, batch, examples, repeats, seed, shuffled)
        partitions = partitions_of(drawn, n)
        work = partial(over_cells, partitions=partitions, batch=batch, device=device)
        notes = batch_notes(batch, examples, repeats)
        spread = "repeats" if repeats > 1 else ""
    else:
        biased = estimator.kind == "biased"
        blocks = jackknife_blocks(n, shuffled, seed)
        partitions = [blocks]
        work = partial(leave_one_out, partition=blocks, biased=biased, device=device)
        notes = exact_notes(biased, blocks.n_cells)
        spread = "jackknife" if n > 4 else ""
    # Features in their stored type take less memory, and are converted where they are multiplied;
    # that costs more than it saves in small products.
    stored = device == "cpu" and mults > LARGE
    plan = _divide_work(rows, cols, n, partitions, memory, stored)
    read = partial(
        lazy_grams,
        images=images,
        kept_tiles=plan.kept_tiles,
        backend=backend,
        progress=progress,
        stored=stored,
    )
    with full_precision(device), backend.one_thread():
        values = _in_groups(plan, n, work, read, progress)
    replicates = None
    if spread == "repeats":
        replicates = stacked(values)
    elif (
        spread == "jackknife" and len(values) > 1
    ):  # the first value is that of all images
        replicates = stacked(values[1:])
    notes["spread"] = METHODS[spread]
    notes["images"] = n
    notes["seed"] = seed
    images_per_repeat = int((partitions[0].labels >= 0).sum())
    return replace(
        values[0],
        replicates=replicates,
        spread=spread,
        n_images=images_per_repeat,
        notes=notes,
    )


def multiplications(rows: Sequence[Shape], cols: Sequence[Shape], n: int) -> float:
    """Return the number of multiplications for n images: a triangle of each Gram matrix, and the
    product of all pairs of them."""
    widths = sum(count * width for count, width in (*rows, *cols))
    pairs = sum(count for count, _ in rows) * sum(count for count, _ in cols)
    return n * (n + 1) / 2 * (widths + pairs)


def shapes(stacks: Sequence[Stack]) -> list[Shape]:
    """Return (number of matrices, number of features) of each stack."""
    return [(stack.n_matrices, stack.n_features) for stack in stacks]


# What is in memory at a time


@dataclass(frozen=True)
class _WorkDivision:
    """The parts of the work that are in memory at a time."""

    rows: list[list[Stack]]  # groups of stacks that are processed together
    cols: list[list[Stack]]
    tile: int  # side of a tile, in images
    kept_tiles: int  # tiles' sides whose features stay in memory


def _divide_work(
    rows: Sequence[Stack],
    cols: Sequence[Stack],
    n: int,
    partitions: Sequence[Partition],
    memory: int,
    stored: bool,
) -> _WorkDivision:
    """Return how the work is divided, so that it fits the memory.

    Everything at once in large tiles if it fits; else smaller tiles, then groups of matrices (each
    group of rows recomputes the columns' Gram matrices, and vice versa), then even smaller tiles.

    Args:
        rows: stacks.
        cols: other stacks.
        n: images.
        partitions: of the images, whose sums take memory.
        memory: in bytes.
        stored: whether features are kept in their stored type, if possible.

    Raises:
        VitseeError: nothing of that fits.
    """

    def needs(tile: int, row_groups: int, col_groups: int) -> tuple[int, int]:
        """Return the bytes of tiles and sums, and of the features of one side of a tile."""
        tile_bytes = bytes_per_matrix(n, partitions, tile)
        rows_sums, rows_side = _group_bytes(rows, row_groups, tile, tile_bytes, stored)
        cols_sums, cols_side = _group_bytes(cols, col_groups, tile, tile_bytes, stored)
        return rows_sums + cols_sums, rows_side + cols_side

    def total(tile: int, row_groups: int, col_groups: int) -> int:
        """Return the bytes that are needed at a time."""
        sums, side = needs(tile, row_groups, col_groups)
        return sums + _sides_in_memory(n, tile) * side

    n_rows = sum(stack.n_matrices for stack in rows)
    n_cols = sum(stack.n_matrices for stack in cols)
    row_groups = 1
    col_groups = 1
    tile = int(np.clip(-(-n // TILES_ALONG), min(n, GOOD_TILE), LARGEST_TILE))
    if tile % 64 == 0 and tile < n:
        tile += 8  # at strides of a power of two, columns of a product share lines of the cache
    while tile > GOOD_TILE and total(tile, row_groups, col_groups) > memory:
        tile = max(GOOD_TILE, -(-tile // 2))
    while total(tile, row_groups, col_groups) > memory:
        rows_in_group = n_rows / row_groups
        cols_in_group = n_cols / col_groups
        if max(rows_in_group, cols_in_group) > MIN_GROUP:
            if rows_in_group >= cols_in_group:
                row_groups += 1
            else:
                col_groups += 1
        elif tile > SMALLEST_TILE:
            tile = -(-tile // 2)
        else:
            needed = human_bytes(total(tile, row_groups, col_groups)).replace(" ", "")
            raise VitseeError(
                f"{human_bytes(memory)} of memory are too few for {n} images; give --memory "
                f"{needed} or more, or fewer --images"
            )
    sums, side = needs(tile, row_groups, col_groups)
    # What is left keeps the features of tiles that are read again.
    kept_tiles = (memory - sums) // side - _sides_in_memory(n, tile) + 2
    return _WorkDivision(
        rows=_split_stacks(rows, row_groups),
        cols=_split_stacks(cols, col_groups),
        tile=tile,
        kept_tiles=kept_tiles,
    )


def _group_bytes(
    stacks: Sequence[Stack], n_groups: int, tile: int, tile_bytes: int, stored: bool
) -> tuple[int, int]:
    """Return the bytes that the largest of `n_groups` groups of these stacks takes.

    Args:
        stacks: of rows or columns.
        n_groups: into which they are divided.
        tile: its side.
        tile_bytes: what tiles and sums take for each matrix.
        stored: whether features are kept in their stored type.

    Returns:
        Bytes of tiles and sums, and of the features of one side of a tile.
    """
    share = 1 / n_groups
    n_matrices = sum(stack.n_matrices for stack in stacks)
    image_bytes = [stack.n_features * bytes_per_value(stack, stored) for stack in stacks]
    all_image_bytes = sum(
        stack.n_matrices * size for stack, size in zip(stacks, image_bytes, strict=True)
    )
    sums = int(share * n_matrices + 1) * tile_bytes
    # A group may have one matrix more than its share.
    side = int(share * all_image_bytes + max(image_bytes)) * tile
    return sums, side


def _sides_in_memory(n: int, tile: int) -> int:
    """Return the number of tile sides in memory: two, and one being read, which takes twice."""
    return 4 if n > tile else 3


def _split_stacks(stacks: Sequence[Stack], n_groups: int) -> list[list[Stack]]:
    """Return the matrices of all stacks in `n_groups` groups of consecutive ones."""
    ends = np.cumsum([stack.n_matrices for stack in stacks])
    edges = np.linspace(0, ends[-1], n_groups + 1).round().astype(int)
    groups = []
    for low, high in pairwise(edges):
        group = []
        for stack, end in zip(stacks, ends, strict=True):
            start = end - stack.n_matrices
            inside = slice(int(max(low - start, 0)), int(min(high, end) - start))
            if inside.stop > inside.start:
                group.append(stack.take(inside))
        groups.append(group)
    return groups


def _in_groups(
    plan: _WorkDivision,
    n: int,
    work: Work,
    read: Callable[[Sequence[Stack]], Iterator[StackGram]],
    progress: Progress,
) -> list[Hsic]:
    """Return the results of `work` for all rows and columns.

    It is done on every group of rows with every group of columns.

    Args:
        plan: the groups and the tile.
        n: images.
        work: a `Work`; gives equally many results for each pair of groups.
        read: stacks -> their Gram matrices.
        progress: counts pairs of tiles.
    """
    tiles_along = -(-n // plan.tile)
    tiles = tiles_along * (tiles_along + 1) // 2  # of a triangle with its diagonal
    steps = len(plan.rows) * len(plan.cols) * tiles
    progress.start(steps, unit="pairs of tiles")
    grid = []
    try:
        for row_stacks in plan.rows:
            results = []
            for col_stacks in plan.cols:
                # One matrix counts the tiles for all.
                first, *others = read(row_stacks)
                rows = [replace(first, progress=progress), *others]
                cols = list(read(col_stacks))
                results.append(work(rows, cols, tile=plan.tile))
            grid.append(results)
    finally:
        progress.stop()
    return assemble_groups(grid)


# Gram matrices that are computed when read


@dataclass(frozen=True)
class StackGram:
    """The Gram matrix of one matrix of a stack, computed when it is read."""

    features: Runs  # of the stack
    k: int  # which matrix of the stack
    progress: Progress = SILENT  # counts its blocks

    @property
    def n(self) -> int:
        """The number of images."""
        return len(self.features.images)

    def loading_jobs(self, i: slice, j: slice) -> Sequence[Callable[[], None]]:
        """Return jobs to run, in any order, before a block is computed; none the second time."""
        return self.features.loading_jobs(i, j)

    def block(self, i: slice, j: slice) -> Any:
        """Return the entries (len(i), len(j)), on the device of the features."""
        left, right = self._features_of(i, j)
        return left @ right.T

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        """Write the entries (len(i), len(j)) into `out`, on the host."""
        left, right = self._features_of(i, j)
        self.features.backend.multiply(left, right, out)

    def _features_of(self, i: slice, j: slice) -> tuple[Any, Any]:
        """Return the features of the images in `i` and of those in `j`; one array twice if they are
        the same."""
        self.progress.advance(1)
        left = self.features.features(self.k, i, "left")
        if i == j:
            return left, left
        return left, self.features.features(self.k, j, "right")


def bytes_per_value(stack: Stack, stored: bool) -> int:
    """Return the bytes of memory that each number of a stack takes.

    Args:
        stack: of tokens or pixels.
        stored: whether they are kept in their stored type, if possible.
    """
    if not stored or not StoredRuns.supports(stack):
        return 4  # float32
    return 2 if isinstance(stack, TokenStack) else 1  # float16 tokens, uint8 pixels


def lazy_grams(
    stacks: Sequence[Stack],
    images: Integers,
    kept_tiles: int,
    backend: MatmulBackend,
    progress: Progress,
    stored: bool,
) -> Iterator[StackGram]:
    """Yield, for each representation in the stacks, its Gram matrix, computed when it is read.

    Args:
        stacks: of one store.
        images: rows of the store.
        kept_tiles: how many tiles' features stay in memory, at least two.
        backend: multiplies.
        progress: counts the bytes read.
        stored: whether features are kept in their stored type, if possible.
    """
    for stack in stacks:
        features: Runs
        if stored and StoredRuns.supports(stack):
            features = StoredRuns(stack, images, kept_tiles, backend, progress)
        else:
            features = Runs(stack, images, kept_tiles, backend, progress)
        yield from (StackGram(features, k) for k in range(stack.n_matrices))
