"""Sums over pairs of images from Gram matrices: all representations at once, tile by tile.

One tile of every matrix is in memory at a time, (representations, t, t), and all pairs are one
product (Nguyen et al. 2021). Sub-blocks of a tile give the jackknife and the minibatches from the
same numbers; features are not read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitsee_core.runtime.lanes import lane_pool, n_lanes
from vitsee_core.similarity.hsic import Hsic, PairSums, self_hsic
from vitsee_core.similarity.whole_tiles import (
    OTHERS,
    TERMS,
    BlockSums,
    Labels,
    Matrix,
    Partition,
    Piece,
    WholeTiles,
    as_run,
    pieces,
)
from vitsee_core.types import Float

# Multiplications of a tile below which threads cost more than they save.
FEW = 1 << 24


@dataclass
class Totals:
    """Sums of one partition over pairs of different images that count."""

    products: Float  # (R, C) of all pairs
    own_rows: Float  # (R,)
    own_cols: Float  # (C,)
    # (R, n, G) row sums over each cell if crossing, else (R, n, 1) over the image's own cell
    rows: Float
    cols: Float  # likewise
    # with `crossing`, the same sums for the pairs with an image in a cell, by cell (leading axis)
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

    Sums are added in the same order whatever the number of threads. Memory: see `bytes_each`.

    Tiles are not distributed over processes. To be added in this order, the sums of every piece
    would have to be sent, R C products and R row and column sums for each TERMS pairs of images:
    with 50 matrices of 16,384 images 0.9 GB, 1/30 of the matrices. Added per tile where they are
    computed, they are few, but differ in the last digits.

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
    n_cols, side = len(matrices) - first_col, min(tile, n)
    made = WholeTiles(device, matrices, n_rows, first_col, side)
    diagonals = np.empty((len(matrices), n))
    totals = [_Running(len(matrices), n_rows, n_cols, first_col, n, p) for p in partitions]
    work = n_rows * n_cols * side * side
    lanes = 1 if work < FEW else n_lanes(max(1, side * side // TERMS))
    with lane_pool(lanes) as pool:
        for i, j in _tiles(n, tile):
            cut = [(total, piece) for total in totals for piece in pieces(total.partition, i, j)]
            of_tile, sums = made.sums(i, j, [piece for _, piece in cut], pool)
            if of_tile is not None:
                diagonals[:, i] = of_tile
            for (total, piece), of_piece in zip(cut, sums, strict=True):
                total.add(piece, of_piece, i.start, j.start)
    return [r.finish() for r in totals], (diagonals[:n_rows], diagonals[first_col:])


def bytes_each(n: int, partitions: Sequence[Partition], tile: int) -> int:
    """Memory of `pair_totals` per matrix: a tile and as much again in pieces; row sums by cell, and
    eight more numbers per image."""
    side = min(tile, n)
    sums = sum(n * (p.n_cells if p.crossing else 1) for p in partitions) + 8 * n
    return 2 * side * side * 4 + 8 * sums


def _tiles(n: int, tile: int) -> Iterator[tuple[slice, slice]]:
    edges = [slice(at, min(at + tile, n)) for at in range(0, n, tile)]
    for a, i in enumerate(edges):
        for j in edges[a:]:
            yield i, j


class _Running:
    """Running totals, in float64 on the host; products and own count pairs within a cell."""

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

    def add(self, piece: Piece, sums: BlockSums, first_row: int, first_col: int) -> None:
        """Add a piece of a tile that begins at these images."""
        crossing = self.partition.crossing
        if piece.g == piece.h:
            self.products += sums.products
            self.own += sums.own
        at_g, at_h = (piece.g, piece.h) if crossing else (0, 0)
        if piece.h != OTHERS:  # else their sums over the rows say the same
            self.sums[:, at_h][:, as_run(first_row + piece.rows)] += sums.over_cols
        if sums.over_rows is not None:
            self.sums[:, at_g][:, as_run(first_col + piece.cols)] += sums.over_rows
        if crossing:
            for cell in {piece.g, piece.h} - {OTHERS}:
                self.touch_products[cell] += sums.products
                self.touch_own[cell] += sums.own

    def finish(self) -> Totals:
        r, c = slice(0, self.n_rows), slice(self.first_col, None)
        if self.partition.crossing:  # a pair of two cells touches both
            self.products = (self.products + self.touch_products.sum(0)) / 2
            self.own = (self.own + self.touch_own.sum(0)) / 2
        if self.first_col == 0:
            # Same order of sums as for different matrices, so that CKA with itself is 1.
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


def as_one_batch(total: Totals, diagonals: tuple[Float, Float]) -> PairSums:
    """All images as one batch."""
    sums = total.rows.sum(2), total.cols.sum(2)
    n = total.rows.shape[1]
    return PairSums(total.products, total.own_rows, total.own_cols, *sums, *diagonals, n)


def without_cell(whole: PairSums, total: Totals, labels: Labels, cell: int) -> PairSums:
    """`whole` without the images of one cell."""
    keep = labels != cell
    products, own_rows, own_cols = (part[cell] for part in total.touching)
    sums = whole.sums_rows - total.rows[:, :, cell], whole.sums_cols - total.cols[:, :, cell]
    for of_cell in sums:
        of_cell *= keep
    return PairSums(
        whole.products - products,
        whole.own_rows - own_rows,
        whole.own_cols - own_cols,
        *sums,
        *(whole.diag_rows * keep, whole.diag_cols * keep),
        int(keep.sum()),
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
        self_hsic(value(total.own_rows, a, a, False), total.own_rows, size),
        self_hsic(value(total.own_cols, b, b, False), total.own_cols, size),
    )
