"""From Gram matrices to sums over pairs of images: all representations at once, tile by tile.

One tile of every matrix is in memory at a time, (representations, t, t), and all pairs are one
product (Nguyen et al. 2021). Sub-blocks of a tile give the jackknife and the minibatches from the
same numbers; features are not read a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vitsee_core.grams.lanes import in_order, lane_pool, n_lanes, run_all
from vitsee_core.similarity.hsic import Hsic, PairSums
from vitsee_core.types import Float, Float32

Labels = NDArray[np.int64]

# Products of float32 are added up in float64 after so many terms: errors stay near 1e-7.
TERMS = 1 << 14
# Multiplications of a tile below which threads cost more than they save.
FEW = 1 << 24


class Matrix(Protocol):
    """A Gram matrix of n images that is read in blocks."""

    @property
    def n(self) -> int:
        """Number of images."""

    def block(self, i: slice, j: slice) -> Any:
        """(len(i), len(j)) float32 of its entries, an array, or on the device where it was made."""


@runtime_checkable
class Computed(Protocol):
    """A matrix whose blocks are made where they are wanted."""

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        """As `Matrix.block`, into contiguous memory of the host."""


@dataclass(frozen=True)
class Partition:
    """Images in cells: labels (n,), -1 for those in none; cells count from 0.

    crossing: pairs of images in different cells count too (blocks of a jackknife), not only those
    within a cell (minibatches).
    """

    labels: Labels
    n_cells: int
    crossing: bool


@dataclass
class Totals:
    """Sums of one partition over pairs of different images that count.

    products (R, C), own_rows (R,), own_cols (C,): all pairs. With `crossing`, touching: the same
    of the pairs with an image in a cell, by cell (leading axis). rows, cols: (R, n, G) row sums
    over each cell where crossing, else (R, n, 1) over the image's own cell.
    """

    products: Float
    own_rows: Float
    own_cols: Float
    rows: Float
    cols: Float
    touching: tuple[Float, Float, Float] = field(
        default_factory=lambda: (np.zeros(0), np.zeros(0), np.zeros(0))
    )


def pair_totals(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    partitions: Sequence[Partition],
    *,
    device: str,
    tile: int,
) -> tuple[list[Totals], tuple[Float, Float]]:
    """The totals of each partition, and the diagonals, (R, n) and (C, n).

    Sums are taken in the same order whatever the number of threads. Memory: see `bytes_each`.

    Tiles are not spread over processes. To be added in this order, the sums of every piece would
    have to come here, R C products and R row and column sums for each TERMS pairs of images: with
    50 matrices of 16,384 images 0.9 GB, 1/30 of the matrices. Added up by tile where they are
    made, they are few, but others in the last digits.

    Args:
        rows: R matrices of the same n images.
        cols: C more; None for the same as `rows`.
        partitions: of the n images.
        device: where to multiply: cpu, cuda or cuda:1.
        tile: side of the tiles.
    """
    n, n_rows = rows[0].n, len(rows)
    matrices = list(rows) if cols is None else [*rows, *cols]
    first_col = 0 if cols is None else n_rows
    side = min(tile, n)
    memory = _tile_memory(device, len(matrices) * side * side)
    host = isinstance(memory, _HostTiles)
    diagonals = np.empty((len(matrices), n))
    n_cols = len(matrices) - first_col
    totals = [_Running(len(matrices), n_rows, n_cols, first_col, n, p) for p in partitions]
    work = n_rows * n_cols * side * side
    lanes = 1 if work < FEW else n_lanes(max(1, side * side // TERMS))
    # Rows and columns in turn: where they are read from different files, two threads read them.
    order = sorted(range(len(matrices)), key=lambda k: k - first_col if k >= n_rows else k)
    with lane_pool(lanes) as pool:
        for i, j in _tiles(n, tile):
            shape = len(matrices), i.stop - i.start, j.stop - j.start
            values = memory.shaped(*shape)

            def load(k: int, i: slice = i, j: slice = j, values: Any = values) -> None:
                matrix = matrices[k]
                if host and isinstance(matrix, Computed):
                    matrix.compute(i, j, values[k])
                else:
                    memory.put(values, k, matrix.block(i, j))

            run_all(load, order, pool)
            if i == j:
                diagonals[:, i] = memory.without_diagonals(values)
            blocks = [piece for running in totals for piece in running.pieces(i, j)]
            if host:
                sums: partial[_Sums] = partial(_sums, values, n_rows, first_col)
                made = in_order(sums, blocks, pool, 2 * lanes)
            else:
                cuts = [(piece.rows, piece.cols) for piece in blocks]
                made = starmap(_Sums, memory.sums(values, cuts, n_rows, first_col))
            for piece, of_piece in zip(blocks, made, strict=True):
                piece.running.add(piece, of_piece)
    return [r.finish() for r in totals], (diagonals[:n_rows], diagonals[first_col:])


def bytes_each(n: int, partitions: Sequence[Partition], tile: int) -> int:
    """Memory that `pair_totals` takes for each matrix, and what is made of its sums: a tile, and as
    much again in pieces; row sums by cell, and eight numbers an image more."""
    side = min(tile, n)
    sums = sum(n * (p.n_cells if p.crossing else 1) for p in partitions)
    return 2 * side * side * 4 + 8 * (sums + 8 * n)


def _tiles(n: int, tile: int) -> Iterator[tuple[slice, slice]]:
    edges = [slice(at, min(at + tile, n)) for at in range(0, n, tile)]
    for a, i in enumerate(edges):
        for j in edges[a:]:
            yield i, j


class _RowRange(NamedTuple):
    """Some rows of a block of a tile: places within the tile of the images of cell g and of those
    of cell h, and where in all images the tile begins. times: 2 where the transposed block is made
    by no other, as the matrices are symmetric, else 1."""

    running: _Running
    g: int
    h: int
    rows: Labels
    cols: Labels
    first_row: int
    first_col: int
    times: int


class _HostTiles:
    """`DeviceTiles` in host memory, but for the sums, which threads share."""

    def __init__(self, n: int) -> None:
        self._memory = np.empty(n, np.float32)

    def shaped(self, *shape: int) -> Float32:
        return self._memory[: math.prod(shape)].reshape(shape)

    def put(self, values: Float32, k: int, block: Float32) -> None:
        values[k] = block

    def without_diagonals(self, values: Float32) -> Float32:
        within = np.arange(values.shape[1])
        found: Float32 = values[:, within, within]
        values[:, within, within] = 0
        return found


def _tile_memory(device: str, n: int) -> Any:
    """Memory for tiles where they are multiplied."""
    if device == "cpu":
        return _HostTiles(n)
    from vitsee_core.similarity.device_tiles import DeviceTiles

    return DeviceTiles(device, n)


class _Sums(NamedTuple):
    """Of a piece: (R, C) inner products, each matrix's own, sums over its columns and rows."""

    products: Float
    own: Float
    over_cols: Float
    over_rows: Float


def _sums(values: Float32, n_rows: int, first_col: int, piece: _RowRange) -> _Sums:
    """Of a tile (matrices, rows, cols), its diagonal 0."""
    block = _cut(values, piece.rows, piece.cols)
    part = block.reshape(len(block), -1)
    products = np.matmul(part[:n_rows], part[first_col:].T)
    own = np.linalg.vecdot(part, part) if first_col else np.zeros(len(part))
    over = [block.sum(axis, dtype=np.float64) for axis in (2, 1)]
    return _Sums(products, own, over[0], over[1])


class _Running:
    """Totals while they grow. Everything that is kept is in float64 on the host."""

    def __init__(
        self, n_all: int, n_rows: int, n_cols: int, first_col: int, n: int, partition: Partition
    ) -> None:
        self.partition, self.n_rows, self.first_col = partition, n_rows, first_col
        cells = partition.n_cells if partition.crossing else 1
        self.products = np.zeros((n_rows, n_cols))
        self.own = np.zeros(n_all)
        self.sums = np.zeros((n_all, cells, n))
        self.touch_products = np.zeros((cells, n_rows, n_cols))
        self.touch_own = np.zeros((cells, n_all))

    def pieces(self, i: slice, j: slice) -> Iterator[_RowRange]:
        """What a tile is cut into; of one on the diagonal, the cells on and above its diagonal."""
        labels = self.partition.labels
        of_i, of_j = _cells(labels[i]), _cells(labels[j])
        for g, rows in of_i.items():
            for h, cols in of_j.items():
                if h < g and i == j:
                    continue
                if self.partition.crossing or g == h:
                    step, times = max(1, TERMS // len(cols)), 1 if g == h and i == j else 2
                    for at in range(0, len(rows), step):
                        some = rows[at : at + step]
                        yield _RowRange(self, g, h, some, cols, i.start, j.start, times)

    def add(self, piece: _RowRange, sums: _Sums) -> None:
        """A piece's."""
        twice = piece.times
        self.products += twice * sums.products.astype(np.float64)
        self.own += twice * sums.own.astype(np.float64)
        crossing = self.partition.crossing
        at_g, at_h = (piece.g, piece.h) if crossing else (0, 0)
        self.sums[:, at_h][:, _run(piece.first_row + piece.rows)] += sums.over_cols
        if twice == 2:
            self.sums[:, at_g][:, _run(piece.first_col + piece.cols)] += sums.over_rows
        if crossing:
            for cell in {piece.g, piece.h}:
                self.touch_products[cell] += twice * sums.products.astype(np.float64)
                self.touch_own[cell] += twice * sums.own.astype(np.float64)

    def finish(self) -> Totals:
        """The totals as they are handed out."""
        r, c = slice(0, self.n_rows), slice(self.first_col, None)
        if self.first_col == 0:
            # The same sums in the same order as between different ones: CKA with itself is 1.
            self.own = np.diagonal(self.products).copy()
            self.touch_own = np.diagonal(self.touch_products, axis1=1, axis2=2).copy()
        sums = self.sums.swapaxes(1, 2)
        return Totals(
            self.products,
            self.own[r],
            self.own[c],
            sums[r],
            sums[c],
            (self.touch_products, self.touch_own[:, r], self.touch_own[:, c]),
        )


def _cells(labels: Labels) -> dict[int, Labels]:
    """Cell -> places that are in it."""
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(name): part for name, part in zip(names, parts, strict=True) if name >= 0}


def _cut(values: Float32, rows: Labels, cols: Labels) -> Float32:
    """values[:, rows][:, :, cols], contiguous; by slices where they are runs."""
    a, b = _run(rows), _run(cols)
    if isinstance(a, slice) and isinstance(b, slice):
        return np.ascontiguousarray(values[:, a, b])
    flat = (rows[:, np.newaxis] * values.shape[2] + cols).ravel()
    found: Float32 = values.reshape(len(values), -1).take(flat, 1)
    return found.reshape(len(values), len(rows), len(cols))


def _run(places: Labels) -> slice | Labels:
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == len(places) else places


def as_one_batch(total: Totals, diagonals: tuple[Float, Float]) -> PairSums:
    """All images as one batch."""
    sums = total.rows.sum(2), total.cols.sum(2)
    return PairSums(total.products, total.own_rows, total.own_cols, *sums, *diagonals)


def without_cell(whole: PairSums, total: Totals, labels: Labels, cell: int) -> PairSums:
    """`whole` without the images of one cell."""
    keep = labels != cell
    products, own_rows, own_cols = (part[cell] for part in total.touching)
    return PairSums(
        whole.products - products,
        whole.own_rows - own_rows,
        whole.own_cols - own_cols,
        (whole.sums_rows - total.rows[:, :, cell])[:, keep],
        (whole.sums_cols - total.cols[:, :, cell])[:, keep],
        whole.diag_rows[:, keep],
        whole.diag_cols[:, keep],
    )


def sum_over_cells(total: Totals, partition: Partition, size: int) -> Hsic:
    """The sum over cells of `size` images each of the cells' HSIC_1."""
    cells = [partition.labels == g for g in range(partition.n_cells)]

    def value(products: Float, a: Float, b: Float, outer: bool) -> Float:
        s, t = (np.stack([x[:, cell].sum(1) for cell in cells], 1) for x in (a, b))
        q, st = (a @ b.T, s @ t.T) if outer else ((a * b).sum(1), (s * t).sum(1))
        numerator: Float = products - 2 / (size - 2) * q + st / ((size - 1) * (size - 2))
        return numerator / (size * (size - 3))

    a, b = total.rows[:, :, 0], total.cols[:, :, 0]
    return Hsic(
        value(total.products, a, b, True),
        value(total.own_rows, a, a, False),
        value(total.own_cols, b, b, False),
    )
