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
from vitsee_core.similarity.stacks import Runs, Stack, StoredRuns, TokenStack
from vitsee_core.similarity.whole_tiles import Partition
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import VitseeError

LARGEST_TILE = 512
GOOD_TILE = 256
SMALLEST_TILE = 32
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
    """HSIC of every matrix in `rows` with every one in `cols`, as `hsic` gives it.

    Memory: `memory`, plus the result with its replicates.

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
        spread = "repeats" * (repeats > 1)
    else:
        biased = estimator.kind == "biased"
        blocks = jackknife_blocks(n, shuffled, seed)
        partitions = [blocks]
        work = partial(leave_one_out, partition=blocks, biased=biased, device=device)
        notes = exact_notes(biased, blocks.n_cells)
        spread = "jackknife" * (n > 4)
    stored = device == "cpu" and mults > LARGE
    plan = _divide(rows, cols, n, partitions, memory, stored)
    read = partial(
        matrices,
        images=images,
        kept=plan.kept,
        backend=backend,
        progress=progress,
        stored=stored,
    )
    with full_precision(device), backend.one_thread():
        values = _in_groups(plan, n, work, read, progress)
    counted = int((partitions[0].labels >= 0).sum())  # of a repeat
    replicates = {"jackknife": values[1:], "repeats": values, "": []}[spread]
    notes |= {"spread": METHODS[spread], "images": n, "seed": seed}
    return replace(
        values[0],
        replicates=stacked(replicates) if replicates else None,
        spread=spread,
        n_images=counted,
        notes=notes,
    )


def multiplications(rows: Sequence[Shape], cols: Sequence[Shape], n: int) -> float:
    """The multiplications for n images: a triangle of each Gram matrix, and the product of all
    pairs of them."""
    widths = sum(count * width for count, width in (*rows, *cols))
    pairs = sum(count for count, _ in rows) * sum(count for count, _ in cols)
    return n * (n + 1) / 2 * (widths + pairs)


def shapes(stacks: Sequence[Stack]) -> list[Shape]:
    """(number of matrices, number of features) of each stack."""
    return [(stack.n_matrices, stack.n_features) for stack in stacks]


# What is in memory at a time


@dataclass(frozen=True)
class _Division:
    """Groups of stacks that are processed together, the tiles' side, and the number of tiles whose
    features stay in memory."""

    rows: list[list[Stack]]
    cols: list[list[Stack]]
    tile: int
    kept: int


def _divide(
    rows: Sequence[Stack],
    cols: Sequence[Stack],
    n: int,
    partitions: Sequence[Partition],
    memory: int,
    stored: bool,
) -> _Division:
    """Everything at once in large tiles if it fits; else smaller tiles, then groups of matrices
    (each group of rows recomputes the columns' Gram matrices, and vice versa), then even smaller
    tiles. Raises VitseeError: nothing of that fits."""

    def needs(tile: int, parts: tuple[int, int]) -> tuple[int, int]:
        """Bytes of the tiles and sums, and of the features of one side of a tile."""
        sums = side = 0
        each = bytes_per_matrix(n, partitions, tile)
        for stacks, n_parts in zip((rows, cols), parts, strict=True):
            share = 1 / n_parts
            sums += int(share * sum(s.n_matrices for s in stacks) + 1) * each
            sizes = [s.n_features * bytes_per_value(s, stored) for s in stacks]
            widths = sum(
                s.n_matrices * size for s, size in zip(stacks, sizes, strict=True)
            )
            side += int(share * widths + max(sizes)) * tile
        return sums, side

    def fits(tile: int, parts: tuple[int, int]) -> bool:
        sums, side = needs(tile, parts)
        return sums + _sides(n, tile) * side <= memory

    counts = sum(s.n_matrices for s in rows), sum(s.n_matrices for s in cols)
    tile = int(np.clip(-(-n // TILES_ALONG), min(n, GOOD_TILE), LARGEST_TILE))
    parts = (1, 1)
    if tile % 64 == 0 and tile < n:
        tile += 8  # at strides of a power of two, columns of a product share lines of the cache
    while tile > GOOD_TILE and not fits(tile, parts):
        tile = max(GOOD_TILE, -(-tile // 2))
    while not fits(tile, parts):
        sizes = [count / n_parts for count, n_parts in zip(counts, parts, strict=True)]
        if max(sizes) > 8:
            parts = (parts[0] + (sizes[0] >= sizes[1]), parts[1] + (sizes[0] < sizes[1]))
        elif tile > SMALLEST_TILE:
            tile = -(-tile // 2)
        else:
            sums, side = needs(tile, parts)
            need = human_bytes(sums + _sides(n, tile) * side).replace(" ", "")
            raise VitseeError(
                f"{human_bytes(memory)} of memory are too few for {n} images; give --memory {need} "
                "or more, or fewer --images"
            )
    sums, side = needs(tile, parts)
    kept = (memory - sums) // side - _sides(n, tile) + 2
    return _Division(_split(rows, parts[0]), _split(cols, parts[1]), tile, kept)


def _sides(n: int, tile: int) -> int:
    """Number of tile sides in memory: two, and one being read, which takes twice."""
    return 4 if n > tile else 3


def _split(stacks: Sequence[Stack], n_parts: int) -> list[list[Stack]]:
    """The matrices of all stacks in `n_parts` groups of consecutive ones."""
    ends = np.cumsum([stack.n_matrices for stack in stacks])
    edges = np.linspace(0, ends[-1], n_parts + 1).round().astype(int)
    groups = []
    for low, high in pairwise(edges):
        group = []
        for stack, end in zip(stacks, ends, strict=True):
            at = end - stack.n_matrices
            inside = slice(int(max(low - at, 0)), int(min(high, end) - at))
            if inside.stop > inside.start:
                group.append(stack.part(inside))
        groups.append(group)
    return groups


def _in_groups(
    plan: _Division,
    n: int,
    work: Work,
    read: Callable[[Sequence[Stack]], Iterator[StackGram]],
    progress: Progress,
) -> list[Hsic]:
    """`work` on every group of rows with every group of columns, assembled."""
    along = -(-n // plan.tile)
    steps = len(plan.rows) * len(plan.cols) * along * (along + 1) // 2
    progress.start(steps, unit="pairs of tiles")
    grid = []
    try:
        for of_rows in plan.rows:
            line = []
            for of_cols in plan.cols:
                first, *rest = read(of_rows)
                rows = [replace(first, progress=progress), *rest]
                line.append(work(rows, list(read(of_cols)), tile=plan.tile))
            grid.append(line)
    finally:
        progress.stop()
    return assemble_groups(grid)


# Gram matrices that are computed when read


@dataclass(frozen=True)
class StackGram:
    """The Gram matrix of one matrix of a stack, computed when read. progress: counts its blocks."""

    features: Runs
    k: int
    progress: Progress = SILENT

    @property
    def n(self) -> int:
        return len(self.features.images)

    def reading(self, i: slice, j: slice) -> Sequence[Callable[[], None]]:
        """Jobs to run, in any order, before its blocks are computed; none the second time."""
        return self.features.reading(i, j)

    def block(self, i: slice, j: slice) -> Any:
        """(len(i), len(j)) entries, on the device of the features."""
        a, b = self._both(i, j)
        return a @ b.T

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        self.features.backend.multiply(*self._both(i, j), out)

    def _both(self, i: slice, j: slice) -> tuple[Any, Any]:
        """The features of the images in `i` and of those in `j`; one array twice if i is j."""
        self.progress.advance(1)
        x = self.features.of(self.k, i, "left")
        return x, x if i == j else self.features.of(self.k, j, "right")


def bytes_per_value(stack: Stack, stored: bool) -> int:
    """Bytes of memory per number of a stack; see `matrices`."""
    if not stored or not StoredRuns.takes(stack):
        return 4
    return 2 if isinstance(stack, TokenStack) else 1


def matrices(
    stacks: Sequence[Stack],
    images: Integers,
    kept: int,
    backend: MatmulBackend,
    progress: Progress,
    stored: bool,
) -> Iterator[StackGram]:
    """The Gram matrix of each of their matrices over `images`, rows of the store; the features of
    `kept` (at least two) tiles' images stay in memory, and `progress` counts the bytes read.
    stored: they are kept in their stored type, if possible."""
    for stack in stacks:
        features: Runs
        if stored and StoredRuns.takes(stack):
            features = StoredRuns(stack, images, kept, backend, progress)
        else:
            features = Runs(stack, images, kept, backend, progress)
        yield from (StackGram(features, k) for k in range(stack.n_matrices))
