"""A whole tile of every Gram matrix in memory, on the host or on a GPU, and its sums over pieces:
the pairs of images of two cells of a partition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.lanes import in_order, n_lanes, run_all
from vitsee_core.types import Float, Float32

if TYPE_CHECKING:
    from torch import Tensor

Labels = NDArray[np.int64]

# Terms of a float32 sum before it is added in float64: errors stay near 1e-7.
TERMS = 1 << 14
# Elements of sums that may wait on a GPU to be copied to the host together: 128 MB.
MOST_WAITING = 1 << 24


@dataclass(frozen=True)
class Partition:
    """A partition of the images into cells."""

    labels: Labels  # (n,) cell, counted from 0; -1 for none
    n_cells: int
    # count pairs of images in different cells, too (blocks of a jackknife), not only those within a
    # cell (minibatches)
    crossing: bool


# Terms of a product of two cells below which adding it up costs more than making it.
FEW_TERMS = 1 << 7
OTHERS = -2  # in place of a cell: all but the other one


class Piece(NamedTuple):
    """Some rows of a block of a tile: positions in the tile of the images of cell g and of those of
    cell h, or of all `OTHERS`. square: both are the images of one cell in the same order, or some
    of those and all of them, so that pairs below the diagonal equal those above it."""

    g: int
    h: int
    rows: Labels
    cols: Labels
    square: bool


class BlockSums(NamedTuple):
    """Sums of a piece and its transpose: (R, C) inner products, each matrix's own, in float64; sums
    over columns and over rows, None where the latter equal the former."""

    products: Float
    own: Float
    over_cols: NDArray[Any]
    over_rows: NDArray[Any] | None


def pieces(partition: Partition, i: slice, j: slice) -> Iterator[Piece]:
    """The pieces of a tile; of a diagonal tile, the cells on and below its diagonal. Of small
    cells, if all are in one tile, each with itself and with the others, so that pieces are few."""
    of_i = _cells(partition.labels[i])
    of_j = _cells(partition.labels[j])
    n = len(partition.labels)
    if partition.crossing and i == j == slice(0, n) and (n / len(of_i)) ** 2 < FEW_TERMS:
        everyone = np.flatnonzero(partition.labels >= 0)
        for g, rows in of_i.items():
            if len(rows) > 1:  # one alone has no pair
                yield Piece(g, g, rows, rows, True)
            yield Piece(g, OTHERS, rows, everyone[partition.labels[everyone] != g], False)
        return
    for g, rows in of_i.items():
        for h, cols in of_j.items():
            if h > g and i == j:
                continue
            if partition.crossing or g == h:
                step = max(1, TERMS // len(cols))
                for at in range(0, len(rows), step):
                    yield Piece(g, h, rows[at : at + step], cols, g == h and i == j)


def _cells(labels: Labels) -> dict[int, Labels]:
    """Cell -> positions in it."""
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(name): part for name, part in zip(names, parts, strict=True) if name >= 0}


def as_run(places: Labels) -> slice | Labels:
    """Consecutive positions as a slice."""
    first = int(places[0])
    last = int(places[-1])
    if last - first + 1 == len(places):
        return slice(first, last + 1)
    return places


AT_LEAST = 256  # jobs that many matrices are loaded in


class Matrix(Protocol):
    """A Gram matrix of n images that is read in blocks."""

    @property
    def n(self) -> int:
        """The number of images."""

    def block(self, i: slice, j: slice) -> Any:
        """(len(i), len(j)) float32 entries, an array, or on the device where they were computed."""


class Computed(Matrix, Protocol):
    """A matrix whose blocks are computed on demand."""

    def reading(self, i: slice, j: slice) -> Sequence[Callable[[], None]]:
        """Jobs to run first, in any order; none the second time."""

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        """Like `Matrix.block`, into contiguous memory of the host."""


def is_computed(matrix: object) -> TypeGuard[Computed]:
    return hasattr(matrix, "compute")


def read(
    matrices: Sequence[object], i: slice, j: slice, pool: ThreadPoolExecutor | None
) -> None:
    """Read the features that blocks of some matrices are computed from."""
    jobs = [
        job for matrix in matrices if is_computed(matrix) for job in matrix.reading(i, j)
    ]
    run_all(lambda job: job(), jobs, pool)


class WholeTiles:
    """Tiles of matrices, one at a time."""

    def __init__(
        self,
        device: str,
        matrices: Sequence[Matrix],
        n_rows: int,
        first_col: int,
        side: int,
    ) -> None:
        self._matrices = matrices
        self._n_rows = n_rows
        self._first_col = first_col
        self._memory = _memory(device, len(matrices) * side * side)
        # Rows and columns in turn: if read from different files, two threads read them.
        self._order = sorted(
            range(len(matrices)), key=lambda k: k - first_col if k >= n_rows else k
        )

    def sums(
        self, i: slice, j: slice, pieces: Sequence[Piece], pool: ThreadPoolExecutor | None
    ) -> tuple[Float32 | None, Iterator[BlockSums]]:
        """The diagonals (matrices, images) of a diagonal tile, and the sums of each piece."""
        memory = self._memory
        n_rows = self._n_rows
        first_col = self._first_col
        host = isinstance(memory, _HostTiles)
        shape = len(self._matrices), i.stop - i.start, j.stop - j.start
        values = memory.shaped(*shape)

        def load(some: Sequence[int]) -> None:
            for k in some:
                matrix = self._matrices[k]
                if host and is_computed(matrix):
                    matrix.compute(i, j, values[k])
                else:
                    memory.put(values, k, matrix.block(i, j))

        read(self._matrices, i, j, pool)
        # A thread takes several at a time: many matrices of few images are microseconds each.
        each = max(1, len(self._order) // AT_LEAST)
        run_all(
            load,
            [self._order[k : k + each] for k in range(0, len(self._order), each)],
            pool,
        )
        diagonals = memory.without_diagonals(values) if i == j else None
        if host:
            of_piece: partial[BlockSums] = partial(_sums, values, n_rows, first_col)
            return diagonals, in_order(of_piece, pieces, pool, 2 * n_lanes())
        cuts = [(piece.rows, piece.cols) for piece in pieces]
        made = memory.sums(values, cuts, n_rows, first_col)
        return diagonals, starmap(_both_ways, zip(pieces, made, strict=True))


class _HostTiles:
    """`DeviceTiles` in host memory, except for the sums, which threads share."""

    def __init__(self, n: int) -> None:
        self._memory = np.empty(n, np.float32)

    def shaped(self, *shape: int) -> Float32:
        return self._memory[: math.prod(shape)].reshape(shape)

    def put(self, values: Float32, k: int, block: Float32) -> None:
        values[k] = block

    def without_diagonals(self, values: Float32) -> Float32:
        within = np.arange(values.shape[1])
        diagonals: Float32 = values[:, within, within]
        values[:, within, within] = 0
        return diagonals


def _memory(device: str, n: int) -> Any:
    """Memory for tiles on the device that multiplies them."""
    if device == "cpu":
        return _HostTiles(n)
    return DeviceTiles(device, n)


def _sums(values: Float32, n_rows: int, first_col: int, piece: Piece) -> BlockSums:
    """Sums of a piece of a tile (matrices, rows, cols), whose diagonal is 0."""
    block = _cut(values, piece.rows, piece.cols)
    part = block.reshape(len(block), -1)
    if (
        piece.h == OTHERS
    ):  # few terms, which cells added in float64 before they were one piece
        part = part.astype(np.float64)
    products = np.matmul(part[:n_rows], part[first_col:].T)
    own = np.linalg.vecdot(part, part) if first_col else np.zeros(len(part))
    over_cols, over_rows = (block.sum(axis, dtype=np.float64) for axis in (2, 1))
    return _both_ways(piece, (products, own, over_cols, over_rows))


def _both_ways(piece: Piece, made: tuple[Any, ...]) -> BlockSums:
    """Add the transpose of a piece, unless it is square."""
    products, own, over_cols, over_rows = made
    times = 1.0 if piece.square else 2.0
    products, own = (np.multiply(x, times, dtype=np.float64) for x in (products, own))
    return BlockSums(products, own, over_cols, None if piece.square else over_rows)


def _cut(values: Float32, rows: Labels, cols: Labels) -> Float32:
    """values[:, rows][:, :, cols], contiguous; runs become slices."""
    a = as_run(rows)
    b = as_run(cols)
    if isinstance(a, slice) and isinstance(b, slice):
        return np.ascontiguousarray(values[:, a, b])
    flat = (rows[:, np.newaxis] * values.shape[2] + cols).ravel()
    taken: Float32 = values.reshape(len(values), -1).take(flat, 1)
    return taken.reshape(len(values), len(rows), len(cols))


class DeviceTiles:
    """Memory on a GPU for one tile (matrices, rows, cols) float32 at a time."""

    def __init__(self, device: str, n: int) -> None:
        import torch

        self._device = torch.device(device)
        self._memory = torch.empty(n, device=self._device)

    def shaped(self, *shape: int) -> Tensor:
        """Memory for the next tile; the previous one is lost."""
        return self._memory[: int(np.prod(shape))].view(shape)

    def put(self, values: Tensor, k: int, block: Any) -> None:
        """Set one matrix's block, from this device or from the host."""
        from vitsee_core.runtime.device import to_device

        values[k] = (
            to_device(block, self._device) if isinstance(block, np.ndarray) else block
        )

    def without_diagonals(self, values: Tensor) -> NDArray[Any]:
        """(matrices, rows) diagonals of a square tile, which are then set to zero."""
        diagonals = values.diagonal(dim1=1, dim2=2)
        on_host: NDArray[Any] = diagonals.cpu().numpy().copy()
        diagonals.zero_()
        return on_host

    def sums(
        self,
        values: Tensor,
        pieces: Sequence[tuple[Labels, Labels]],
        n_rows: int,
        first_col: int,
    ) -> Iterator[tuple[Any, ...]]:
        """The sums of each piece (rows and columns of the tile): (R, C) inner products, each
        matrix's own, sums over its columns and over its rows, in float64. At most `TERMS` products
        (see `hsic_sums.Totals`) are added in float32; there is no synchronisation in between."""
        import torch

        waiting: list[tuple[Tensor, ...]] = []
        size = 0
        for rows, cols in pieces:
            block = self._cut(values, rows, cols)
            part = block.flatten(1)
            none = part.new_zeros(len(part))
            waiting.append(
                (
                    (part[:n_rows] @ part[first_col:].T).double(),
                    (torch.linalg.vecdot(part, part) if first_col else none).double(),
                    block.sum(2, dtype=torch.float64),
                    block.sum(1, dtype=torch.float64),
                )
            )
            size += sum(x.numel() for x in waiting[-1])
            if size > MOST_WAITING:
                yield from _fetched(waiting)
                waiting = []
                size = 0
        yield from _fetched(waiting)

    def _cut(self, values: Tensor, rows: Labels, cols: Labels) -> Tensor:
        """values[:, rows][:, :, cols], contiguous; runs become slices."""
        from vitsee_core.runtime.device import to_device

        a, b = (slice(int(p[0]), int(p[-1]) + 1) for p in (rows, cols))
        if a.stop - a.start == len(rows) and b.stop - b.start == len(cols):
            return values[:, a, b].contiguous()
        flat = (rows[:, np.newaxis] * values.shape[2] + cols).ravel()
        places = to_device(flat, self._device)
        return (
            values.flatten(1)
            .index_select(1, places)
            .view(len(values), len(rows), len(cols))
        )


def _fetched(waiting: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Any, ...]]:
    """The sums on the host, in one copy."""
    if not waiting:
        return
    import torch

    host = torch.cat([x.flatten() for sums in waiting for x in sums]).cpu().numpy()
    at = 0
    for sums in waiting:
        arrays = []
        for x in sums:
            arrays.append(host[at : at + x.numel()].reshape(x.shape))
            at += x.numel()
        yield tuple(arrays)
