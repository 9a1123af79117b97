"""HSIC between many small representations, their Gram matrices made tile by tile and never kept.

For each tile of images the features of both its sides are read once for all representations,
centred, and multiplied; `pair_totals` takes the tiles as it does those from disk. So exact,
biased and minibatch values, and their spread, are those of `hsic` on the same images.

Cost: n (n + 1) (sum of features) for the Gram matrices, n (n + 1) R C for the pairs, and reading
each feature about n / (2 tile) times where they do not all fit the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.machine import human_bytes
from vitsee_core.progress import SILENT, Progress
from vitsee_core.similarity.batches import _draw, _sizes
from vitsee_core.similarity.hsic import METHODS, Hsic, stacked
from vitsee_core.similarity.job import Estimator, Rows
from vitsee_core.similarity.tiles import (
    Float32,
    Matrix,
    Partition,
    bytes_each,
    pair_totals,
    sum_over_cells,
)
from vitsee_core.similarity.whole import _block_labels, _leave_one_out
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store

LARGEST_TILE, GOOD_TILE, SMALLEST_TILE = 1024, 256, 32
TILES_ALONG = 6  # a square on the diagonal is multiplied whole: few large ones waste work
MEAN_ROWS = 256
Work = Callable[..., list[Hsic]]


class Stack(Protocol):
    """Feature matrices of the same images, all of one width, that are read together."""

    @property
    def store(self) -> Store:
        """Whose rows they have."""

    @property
    def n_matrices(self) -> int:
        """How many."""

    @property
    def n_features(self) -> int:
        """Columns of each."""

    def read(self, rows: slice) -> NDArray[Any]:
        """(rows, matrices, features) of consecutive rows of the store."""

    def part(self, wanted: slice) -> Stack:
        """Some of the matrices."""


def hsic_on_the_fly(
    rows: Sequence[Stack],
    cols: Sequence[Stack],
    images: Rows,
    *,
    estimator: Estimator,
    shuffled: bool = True,
    seed: int = 0,
    device: torch.device,
    memory: int,
    progress: Progress = SILENT,
) -> Hsic:
    """HSIC of every matrix in `rows` with every one in `cols`, as `hsic` gives it.

    Memory: `memory`, and the result with its replicates beside it.

    Args:
        rows: stacks of one store, R matrices together.
        cols: others of it, C matrices.
        images: rows of the store that count, ascending; at least 4.
        estimator: "exact" (and "auto"), "biased" or "minibatch", without `rescale`.
        shuffled: whether the store holds its images in random order.
        seed: of minibatches, and of the jackknife's blocks where it does not.
        device: where to multiply.
        memory: bytes to stay within.
        progress: told of each tile of images.

    Raises:
        VitseeError: too few images for a batch, too little memory, or a device without float64.
    """
    if device.type == "mps":
        raise VitseeError("--device mps has no float64; use --device cpu")
    if device.type == "cuda":
        memory = min(memory, torch.cuda.mem_get_info(device)[0] // 2)
    n = len(images)
    if estimator.kind == "minibatch":
        partitions, work, notes = _minibatch(n, estimator, seed, device)
        spread = "repeats" if len(partitions) > 1 else ""
    else:
        biased = estimator.kind == "biased"
        labels = _block_labels(n, None if shuffled else seed)
        partitions = [Partition(labels, int(labels.max()) + 1, crossing=True)]
        work = partial(_leave_one_out, partition=partitions[0], biased=biased, device=device)
        notes = {
            "estimator": "biased" if biased else "exact",
            "hsic": "HSIC_0 (biased) over all images"
            if biased
            else "HSIC_1 (unbiased), all images",
            "jackknife_blocks": partitions[0].n_cells,
        }
        spread = "jackknife" if n > 4 else ""
    plan = _divide(rows, cols, n, partitions, memory)
    values = _in_groups(plan, images, work, device, progress)
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


def _minibatch(
    n: int, estimator: Estimator, seed: int, device: torch.device
) -> tuple[list[Partition], Work, dict[str, Any]]:
    """One partition a repeat; all of them come from the same sums over pairs."""
    batch, examples, repeats = _sizes(estimator, n)
    partitions = []
    for cells in _draw(n, batch, examples, repeats, seed):
        labels = np.full(n, -1)
        for g, places in enumerate(cells):
            labels[places] = g
        partitions.append(Partition(labels, len(cells), crossing=False))

    def work(rows: Sequence[Matrix], cols: Sequence[Matrix], *, tile: int) -> list[Hsic]:
        totals, _ = pair_totals(rows, cols, partitions, device=device, tile=tile)
        return [sum_over_cells(t, p, batch) for t, p in zip(totals, partitions, strict=True)]

    notes = {
        "estimator": "minibatch",
        "hsic": "HSIC_1 (unbiased) in each batch; ratio of means over a repeat's batches",
        **{"batch": batch, "batches": examples // batch, "repeats": repeats},
    }
    return partitions, work, notes


# What is held at a time


@dataclass(frozen=True)
class _Plan:
    """Groups of stacks that are worked on together, the tiles' side, and of how many tiles' images
    the features can be kept."""

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
) -> _Plan:
    """Everything at once in large tiles if it fits; else smaller tiles, then groups of matrices
    (each group of rows makes the columns' Gram matrices again, and the other way round), then
    smaller tiles still.

    Raises:
        VitseeError: nothing of that fits.
    """

    def needs(tile: int, parts: tuple[int, int]) -> tuple[int, int]:
        """Bytes of the tiles and sums, and of the features of one side of a tile."""
        sums = side = 0
        for stacks, n_parts in zip((rows, cols), parts, strict=True):
            share = 1 / n_parts
            sums += int(share * sum(s.n_matrices for s in stacks) + 1) * bytes_each(
                n, partitions, tile
            )
            widths = sum(s.n_matrices * s.n_features for s in stacks)
            side += int(share * widths + max(s.n_features for s in stacks)) * tile * 4
        return sums, side

    def fits(tile: int, parts: tuple[int, int]) -> bool:
        sums, side = needs(tile, parts)
        return sums + 3 * side <= memory  # two sides, and one that is being read

    counts = sum(s.n_matrices for s in rows), sum(s.n_matrices for s in cols)
    tile, parts = int(np.clip(-(-n // TILES_ALONG), min(n, GOOD_TILE), LARGEST_TILE)), (1, 1)
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
            need = human_bytes(sums + 3 * side).replace(" ", "")
            raise VitseeError(
                f"{human_bytes(memory)} of memory are too few for {n} images; give --memory {need} "
                "or more, or fewer --images"
            )
    sums, side = needs(tile, parts)
    return _Plan(_split(rows, parts[0]), _split(cols, parts[1]), tile, (memory - sums) // side - 1)


def _split(stacks: Sequence[Stack], n_parts: int) -> list[list[Stack]]:
    """The matrices of all stacks in so many groups of consecutive ones."""
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
    plan: _Plan, images: Rows, work: Work, device: torch.device, progress: Progress
) -> list[Hsic]:
    """`work` on every group of rows with every group of columns, put together again."""
    along = -(-len(images) // plan.tile)
    progress.start(len(plan.rows) * len(plan.cols) * along * (along + 1) // 2)
    grid = []
    try:
        for of_rows in plan.rows:
            line = []
            for of_cols in plan.cols:
                rows = list(_matrices(of_rows, images, plan.kept, device, progress))
                cols = list(_matrices(of_cols, images, plan.kept, device, progress))
                rows[0] = _Counted(rows[0], progress)
                line.append(work(rows, cols, tile=plan.tile))
            grid.append(line)
    finally:
        progress.stop()
    return [
        Hsic(
            np.block([[part[k].cross for part in line] for line in grid]),
            np.concatenate([line[0][k].rows for line in grid]),
            np.concatenate([part[k].cols for part in grid[0]]),
        )
        for k in range(len(grid[0][0]))
    ]


# Gram matrices that are computed when they are read


@dataclass(frozen=True)
class _Gram:
    """The Gram matrix of one matrix of a stack."""

    features: _Features
    k: int

    @property
    def n(self) -> int:
        """Number of images."""
        return len(self.features.images)

    def block(self, i: slice, j: slice) -> Float32:
        """(len(i), len(j)) of its entries."""
        a, b = (x[self.k] for x in self.features.both(i, j))
        if a.is_cuda:
            product: Float32 = (a @ b.T).cpu().numpy()
        else:  # numpy calls syrk where both sides are the same memory: half the work
            product = np.matmul(a.numpy(), b.numpy().T)
        return product


@dataclass(frozen=True)
class _Counted:
    """A matrix that tells of each block that is asked of it."""

    matrix: Matrix
    progress: Progress

    @property
    def n(self) -> int:
        """Number of images."""
        return self.matrix.n

    def block(self, i: slice, j: slice) -> Float32:
        """(len(i), len(j)) of its entries."""
        self.progress.advance(1)
        return self.matrix.block(i, j)


def _matrices(
    stacks: Sequence[Stack], images: Rows, kept: int, device: torch.device, progress: Progress
) -> Iterator[Matrix]:
    for stack in stacks:
        features = _Features(stack, images, kept, device, progress)
        yield from (_Gram(features, k) for k in range(stack.n_matrices))


class _Features:
    """A stack's features by runs of images: (matrices, images, features) float32 on the device,
    less a fixed vector each, which changes no HSIC and keeps single precision good: the mean over
    the first images. Features that never change become 0, to the bit. `kept` runs stay in memory,
    at least two."""

    def __init__(
        self, stack: Stack, images: Rows, kept: int, device: torch.device, progress: Progress
    ) -> None:
        self.stack, self.images, self.device, self._progress = stack, images, device, progress
        self._kept = max(2, kept)
        self._runs: dict[int, Tensor] = {}
        self._mean: Tensor | None = None

    def both(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        """Of the images in `i` and of those in `j`, i <= j; one tensor twice where i is j."""
        for run in (i, j):
            if run.start not in self._runs:
                self._make_room(i.start, j.start)
                self._runs[run.start] = self._read(run)
        return self._runs[i.start], self._runs[j.start]

    def _make_room(self, i: int, j: int) -> None:
        """Tiles come row by row of the upper triangle: runs before i are not needed again, and of
        the others the last one before j is needed last."""
        while len(self._runs) >= self._kept:
            others = sorted(run for run in self._runs if run not in (i, j))
            below = [run for run in others if run < j]
            del self._runs[others[0] if others[0] < i else (below or others)[-1]]

    def _read(self, run: slice) -> Tensor:
        x = self._load(run)
        if self._mean is None:
            first = x[:, :1]
            self._mean = first + (x[:, :MEAN_ROWS] - first).mean(1, keepdim=True)
        return x.sub_(self._mean)

    def _load(self, run: slice) -> Tensor:
        rows, plan = self.images[run], self.stack.store.plan
        out = torch.empty(
            (self.stack.n_matrices, len(rows), self.stack.n_features), device=self.device
        )
        for slab in range(int(rows[0]) // plan.slab, int(rows[-1]) // plan.slab + 1):
            span = plan.rows(slab)
            low, high = np.searchsorted(rows, [span.start, span.stop])
            if high == low:
                continue
            inside = rows[low:high]
            values = self.stack.read(slice(int(inside[0]), int(inside[-1]) + 1))
            if len(values) > len(inside):
                values = values[inside - inside[0]]
            self._progress.advance(0, values.nbytes)
            out[:, low:high].copy_(torch.from_numpy(values).to(self.device).transpose(0, 1))
        return out
