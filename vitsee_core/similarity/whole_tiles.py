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
MAX_WAITING = 1 << 24


@dataclass(frozen=True)
class Partition:
    """A partition of the images into cells."""

    labels: Labels  # (n,) cell, counted from 0; -1 for none
    n_cells: int
    # Whether pairs of images in different cells count, too (blocks of a jackknife), not only those
    # within a cell (minibatches).
    crossing: bool


# Terms of a product of two cells below which adding it up costs more than making it.
FEW_TERMS = 1 << 7
OTHERS = -2  # in place of the number of a cell: the images of all other cells


class Piece(NamedTuple):
    """The entries of a tile for images of cell g (rows) and images of cell h (columns)."""

    g: int
    h: int  # a cell, or `OTHERS`: all cells but g
    rows: Labels  # positions in the tile of (some of) cell g's images
    cols: Labels  # positions in the tile of cell h's images
    # Rows and columns are images of one cell on the tile's diagonal: pieces of it have each pair
    # twice already, (i, j) and (j, i). Other pieces stand for their transpose, too.
    square: bool


class BlockSums(NamedTuple):
    """The sums of a piece and its transpose, in float64."""

    products: Float  # (R, C) inner products of each row's matrix with each column's
    self_products: Float  # (matrices,) inner product of each matrix with itself
    over_cols: NDArray[Any]  # (matrices, rows of the piece)
    over_rows: NDArray[Any] | None  # (matrices, columns of the piece); None if square


class RawSums(NamedTuple):
    """The sums of a piece without its transpose, as `BlockSums`."""

    products: Any
    self_products: Any
    over_cols: Any
    over_rows: Any


def pieces(partition: Partition, i: slice, j: slice) -> Iterator[Piece]:
    """Yield the pieces that the cells of a partition cut a tile into.

    A diagonal tile is cut into the pairs of cells on and below its diagonal. If all images are in
    one tile and cells are small, each cell gives two pieces, with itself and with all others:
    pairs of cells would be many pieces of few terms.

    Args:
        partition: of the n images into cells.
        i: the images of the tile's rows.
        j: the images of its columns.
    """
    row_cells = _positions_by_cell(partition.labels[i])
    col_cells = _positions_by_cell(partition.labels[j])
    n = len(partition.labels)
    on_diagonal = i == j
    terms_per_pair = (n / len(row_cells)) ** 2 if row_cells else 0.0
    if partition.crossing and i == j == slice(0, n) and terms_per_pair < FEW_TERMS:
        labelled = np.flatnonzero(partition.labels >= 0)
        for g, rows in row_cells.items():
            if len(rows) > 1:  # an image alone has no pair within its cell
                yield Piece(g=g, h=g, rows=rows, cols=rows, square=True)
            others = labelled[partition.labels[labelled] != g]
            yield Piece(g=g, h=OTHERS, rows=rows, cols=others, square=False)
        return
    for g, rows in row_cells.items():
        for h, cols in col_cells.items():
            if h > g and on_diagonal:
                continue  # the transpose of a piece that is yielded
            if partition.crossing or g == h:
                # At most TERMS terms are added in float32.
                step = max(1, TERMS // len(cols))
                for at in range(0, len(rows), step):
                    yield Piece(
                        g=g,
                        h=h,
                        rows=rows[at : at + step],
                        cols=cols,
                        square=g == h and on_diagonal,
                    )


def _positions_by_cell(labels: Labels) -> dict[int, Labels]:
    """Return cell -> the positions of its images, ascending."""
    order = np.argsort(labels, kind="stable")
    cells, starts = np.unique(labels[order], return_index=True)
    positions = np.split(order, starts[1:])
    return {
        int(cell): inside
        for cell, inside in zip(cells, positions, strict=True)
        if cell >= 0
    }


def as_run(positions: Labels) -> slice | Labels:
    """Return consecutive positions as a slice, which numpy reads without a copy, others as they
    are."""
    first = int(positions[0])
    last = int(positions[-1])
    if last - first + 1 == len(positions):
        return slice(first, last + 1)
    return positions


MIN_LOADING_JOBS = 256  # jobs that many matrices are loaded in


class Matrix(Protocol):
    """A Gram matrix of n images that is read in blocks."""

    @property
    def n(self) -> int:
        """The number of images."""

    def block(self, i: slice, j: slice) -> Any:
        """(len(i), len(j)) float32 entries, an array, or on the device where they were computed."""


class Computed(Matrix, Protocol):
    """A matrix whose blocks are computed on demand."""

    def loading_jobs(self, i: slice, j: slice) -> Sequence[Callable[[], None]]:
        """Jobs to run first, in any order; none the second time."""

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        """Like `Matrix.block`, into contiguous memory of the host."""


def is_computed(matrix: object) -> TypeGuard[Computed]:
    """Return whether a matrix computes its blocks, rather than reads them."""
    return hasattr(matrix, "compute")


def read(
    matrices: Sequence[object], i: slice, j: slice, pool: ThreadPoolExecutor | None
) -> None:
    """Read the features that blocks of some matrices are computed from."""
    jobs = [
        job
        for matrix in matrices
        if is_computed(matrix)
        for job in matrix.loading_jobs(i, j)
    ]
    run_all(lambda job: job(), jobs, pool)


class WholeTiles:
    """Tiles of matrices, one at a time.

    Args:
        device: where tiles are kept and multiplied: cpu, cuda or cuda:1.
        matrices: rows first, then columns (unless they are the rows).
        n_rows: how many of them are rows.
        first_col: the first column's index; 0 if the columns are the rows.
        side: of the largest tile, in images.
    """

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
        self._memory = _tile_memory(device, len(matrices) * side * side)
        # Rows and columns in turn: if read from different files, two threads read them.
        self._order = sorted(
            range(len(matrices)), key=lambda k: k - first_col if k >= n_rows else k
        )

    def sums(
        self, i: slice, j: slice, pieces: Sequence[Piece], pool: ThreadPoolExecutor | None
    ) -> tuple[Float32 | None, Iterator[BlockSums]]:
        """Return the sums of each piece of a tile.

        Args:
            i: images of the tile's rows.
            j: images of its columns.
            pieces: of the tile.
            pool: threads that load and multiply; None: the caller's alone.

        Returns:
            The diagonals of the matrices (matrices, images) if i == j, else None; and the pieces'
            sums, in their order.
        """
        memory = self._memory
        n_rows = self._n_rows
        first_col = self._first_col
        host = isinstance(memory, _HostTiles)
        shape = len(self._matrices), i.stop - i.start, j.stop - j.start
        values = memory.shaped(*shape)

        def load(matrix_indices: Sequence[int]) -> None:
            """Put the block of each of these matrices into the tile."""
            for k in matrix_indices:
                matrix = self._matrices[k]
                if host and is_computed(matrix):
                    matrix.compute(i, j, values[k])
                else:
                    memory.put(values, k, matrix.block(i, j))

        read(self._matrices, i, j, pool)
        # A thread takes several at a time: many matrices of few images are microseconds each.
        step = max(1, len(self._order) // MIN_LOADING_JOBS)
        run_all(
            load,
            [self._order[k : k + step] for k in range(0, len(self._order), step)],
            pool,
        )
        diagonals = memory.take_diagonals(values) if i == j else None
        if host:
            sums_of_piece: partial[BlockSums] = partial(
                _host_sums, values, n_rows, first_col
            )
            return diagonals, in_order(sums_of_piece, pieces, pool, 2 * n_lanes())
        cuts = [(piece.rows, piece.cols) for piece in pieces]
        raw_sums = memory.sums(values, cuts, n_rows, first_col)
        return diagonals, starmap(_with_transpose, zip(pieces, raw_sums, strict=True))


class _HostTiles:
    """`DeviceTiles` in host memory, except for the sums, which threads share."""

    def __init__(self, n: int) -> None:
        self._memory = np.empty(n, np.float32)

    def shaped(self, *shape: int) -> Float32:
        """Return memory for the next tile; the previous one is overwritten."""
        return self._memory[: math.prod(shape)].reshape(shape)

    def put(self, values: Float32, k: int, block: Float32) -> None:
        """Set the block of the k-th matrix."""
        values[k] = block

    def take_diagonals(self, values: Float32) -> Float32:
        """Return the diagonals (matrices, rows) of a square tile, and set them to zero in it."""
        within = np.arange(values.shape[1])
        diagonals: Float32 = values[:, within, within]
        values[:, within, within] = 0
        return diagonals


def _tile_memory(device: str, n_entries: int) -> Any:
    """Return memory for tiles on the device that multiplies them."""
    if device == "cpu":
        return _HostTiles(n_entries)
    return DeviceTiles(device, n_entries)


def _host_sums(values: Float32, n_rows: int, first_col: int, piece: Piece) -> BlockSums:
    """Return the sums of a piece of a tile (matrices, rows, cols), whose diagonal is 0."""
    block = _cut(values, piece.rows, piece.cols)
    flat = block.reshape(len(block), -1)  # (matrices, pairs of images)
    if piece.h == OTHERS:
        # As precise as pieces of two cells, whose few terms are added in float64.
        flat = flat.astype(np.float64)
    self_products = np.zeros(
        len(flat)
    )  # of columns that are the rows: on products' diagonal
    if first_col:
        self_products = np.linalg.vecdot(flat, flat)
    raw_sums = RawSums(
        products=np.matmul(flat[:n_rows], flat[first_col:].T),
        self_products=self_products,
        over_cols=block.sum(2, dtype=np.float64),
        over_rows=block.sum(1, dtype=np.float64),
    )
    return _with_transpose(piece, raw_sums)


def _with_transpose(piece: Piece, sums: RawSums) -> BlockSums:
    """Return the sums of a piece and its transpose; a square piece contains its transpose."""
    if piece.square:
        times = 1.0
        over_rows = None
    else:
        times = 2.0
        over_rows = sums.over_rows
    return BlockSums(
        products=np.multiply(sums.products, times, dtype=np.float64),
        self_products=np.multiply(sums.self_products, times, dtype=np.float64),
        over_cols=sums.over_cols,
        over_rows=over_rows,
    )


def _cut(values: Float32, rows: Labels, cols: Labels) -> Float32:
    """Return values[:, rows][:, :, cols], contiguous."""
    row_run = as_run(rows)
    col_run = as_run(cols)
    if isinstance(row_run, slice) and isinstance(col_run, slice):
        return np.ascontiguousarray(values[:, row_run, col_run])
    # One gather from the flattened tile, without the copy between two indexings.
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
        """Return memory for the next tile; the previous one is overwritten."""
        return self._memory[: int(np.prod(shape))].view(shape)

    def put(self, values: Tensor, k: int, block: Any) -> None:
        """Set the block of the k-th matrix, from this device or from the host."""
        from vitsee_core.runtime.device import to_device

        if isinstance(block, np.ndarray):
            block = to_device(block, self._device)
        values[k] = block

    def take_diagonals(self, values: Tensor) -> NDArray[Any]:
        """Return the diagonals (matrices, rows) of a square tile, and set them to zero in it."""
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
    ) -> Iterator[RawSums]:
        """Yield the sums of each piece, in float64 on the host.

        At most `TERMS` products are added in float32. The host waits for the GPU only when sums are
        copied, many pieces at a time.

        Args:
            values: the tile, (matrices, rows, cols), its diagonal 0.
            pieces: rows and columns of each in the tile.
            n_rows: how many matrices are rows.
            first_col: index of the first column's matrix.
        """
        import torch

        waiting: list[RawSums] = []
        n_waiting = 0  # elements
        for rows, cols in pieces:
            block = self._cut(values, rows, cols)
            flat = block.flatten(1)  # (matrices, pairs of images)
            self_products = flat.new_zeros(len(flat))
            if first_col:  # else they are the diagonal of the products
                self_products = torch.linalg.vecdot(flat, flat)
            sums = RawSums(
                products=(flat[:n_rows] @ flat[first_col:].T).double(),
                self_products=self_products.double(),
                over_cols=block.sum(2, dtype=torch.float64),
                over_rows=block.sum(1, dtype=torch.float64),
            )
            waiting.append(sums)
            n_waiting += sum(x.numel() for x in sums)
            if n_waiting > MAX_WAITING:
                yield from _copied_to_host(waiting)
                waiting = []
                n_waiting = 0
        yield from _copied_to_host(waiting)

    def _cut(self, values: Tensor, rows: Labels, cols: Labels) -> Tensor:
        """Return values[:, rows][:, :, cols], contiguous."""
        from vitsee_core.runtime.device import to_device

        row_run = as_run(rows)
        col_run = as_run(cols)
        if isinstance(row_run, slice) and isinstance(col_run, slice):
            return values[:, row_run, col_run].contiguous()
        flat = (rows[:, np.newaxis] * values.shape[2] + cols).ravel()
        indices = to_device(flat, self._device)
        return (
            values.flatten(1)
            .index_select(1, indices)
            .view(len(values), len(rows), len(cols))
        )


def _copied_to_host(waiting: Sequence[RawSums]) -> Iterator[RawSums]:
    """Yield the sums as arrays on the host, after a single copy of all of them."""
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
        yield RawSums(*arrays)
