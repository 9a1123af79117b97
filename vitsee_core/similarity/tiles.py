"""From Gram matrices to sums over pairs of images: all representations at once, tile by tile.

A tile of every matrix is held at a time, (representations, t, t), and all pairs are one product
(Nguyen et al. 2021). Sub-blocks of a tile give the jackknife and the minibatches from the same
numbers, with no second look at the features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.similarity.hsic import Float, Hsic, PairSums

Labels = NDArray[np.int64]
Float32 = NDArray[np.float32]

# Products of float32 are added up in float64 after so many terms: errors stay near 1e-7.
TERMS = 1 << 14


class Matrix(Protocol):
    """A Gram matrix of n images that is read in blocks."""

    @property
    def n(self) -> int:
        """Number of images."""

    def block(self, i: slice, j: slice) -> Float32:
        """(len(i), len(j)) of its entries."""


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
    device: torch.device,
    tile: int,
) -> tuple[list[Totals], tuple[Float, Float]]:
    """The totals of each partition, and the diagonals, (R, n) and (C, n).

    Memory: a tile of every matrix, three times, and the row sums; see `bytes_each`.

    Args:
        rows: R matrices of the same n images.
        cols: C more; None for the same as `rows`.
        partitions: of the n images.
        device: where to multiply.
        tile: side of the tiles.
    """
    n, n_rows = rows[0].n, len(rows)
    n_cols = n_rows if cols is None else len(cols)
    matrices = [*rows, *(cols or ())]
    first_col = 0 if cols is None else n_rows
    totals = [_Running(len(matrices), n_rows, n_cols, first_col, n, p) for p in partitions]
    diagonals = np.zeros((len(matrices), n))
    memory = np.empty(len(matrices) * min(tile, n) ** 2, np.float32)
    for i, j in _tiles(n, tile):
        shape = (len(matrices), i.stop - i.start, j.stop - j.start)
        stack = memory[: math.prod(shape)].reshape(shape)
        for k, matrix in enumerate(matrices):
            stack[k] = matrix.block(i, j)
        if i == j:
            within = np.arange(i.stop - i.start)
            diagonals[:, i] = stack[:, within, within]
            stack[:, within, within] = 0
        values = torch.from_numpy(stack).to(device)
        for running in totals:
            running.add(values, i, j)
    return [r.finish() for r in totals], (diagonals[:n_rows], diagonals[first_col:])


def bytes_each(n: int, partitions: Sequence[Partition], tile: int) -> int:
    """Memory that `pair_totals` takes for each matrix."""
    side = min(tile, n)
    sums = sum(n * (p.n_cells if p.crossing else 1) for p in partitions)
    return 3 * side * side * 4 + 8 * (sums + n)


def _tiles(n: int, tile: int) -> Iterator[tuple[slice, slice]]:
    edges = [slice(at, min(at + tile, n)) for at in range(0, n, tile)]
    for a, i in enumerate(edges):
        for j in edges[a:]:
            yield i, j


class _Running:
    """Totals while they grow. Everything that is kept is in float64 on the host."""

    def __init__(
        self, n_all: int, n_rows: int, n_cols: int, first_col: int, n: int, partition: Partition
    ) -> None:
        self.partition, self.n_rows, self.first_col = partition, n_rows, first_col
        cells = partition.n_cells if partition.crossing else 1
        self.products = np.zeros((n_rows, n_cols))
        self.own = np.zeros(n_all)
        self.sums = np.zeros((n_all, n, cells))
        self.touch_products = np.zeros((cells, n_rows, n_cols))
        self.touch_own = np.zeros((cells, n_all))

    def add(self, values: Tensor, i: slice, j: slice) -> None:
        """A tile (matrices, len(i), len(j)), its diagonal 0."""
        labels = self.partition.labels
        of_i, of_j = _cells(labels[i]), _cells(labels[j])
        for g, rows in of_i.items():
            for h, cols in of_j.items():
                if not self.partition.crossing and g != h:
                    continue
                self._add_block(_cut(values, rows, cols), g, h, i, j, rows, cols)

    def _add_block(
        self,
        block: Tensor,
        g: int,
        h: int,
        i: slice,
        j: slice,
        rows: Labels,
        cols: Labels,
    ) -> None:
        twice = 1 if i == j else 2  # the tile below the diagonal is this one transposed
        products, own = self._multiply(block.reshape(len(block), -1))
        self.products += twice * products
        self.own += twice * own
        crossing = self.partition.crossing
        at_g, at_h = (g, h) if crossing else (0, 0)
        self.sums[:, i.start + rows, at_h] += block.sum(2, dtype=torch.float64).cpu().numpy()
        if twice == 2:
            self.sums[:, j.start + cols, at_g] += block.sum(1, dtype=torch.float64).cpu().numpy()
        if crossing:
            for cell in {g, h}:
                self.touch_products[cell] += twice * products
                self.touch_own[cell] += twice * own

    def _multiply(self, flat: Tensor) -> tuple[Float, Float]:
        """(R, C) inner products, and each matrix's own."""
        products, own = np.zeros(()), np.zeros(())
        for part in flat.split(TERMS, 1):
            product = part[: self.n_rows] @ part[self.first_col :].T
            products = products + product.double().cpu().numpy()
            own = own + torch.linalg.vecdot(part, part).double().cpu().numpy()
        return products, own

    def finish(self) -> Totals:
        """The totals as they are handed out."""
        r, c = slice(0, self.n_rows), slice(self.first_col, None)
        if self.first_col == 0:
            # The same sums in the same order as between different ones: CKA with itself is 1.
            self.own = np.diagonal(self.products).copy()
            self.touch_own = np.diagonal(self.touch_products, axis1=1, axis2=2).copy()
        return Totals(
            self.products,
            self.own[r],
            self.own[c],
            self.sums[r],
            self.sums[c],
            (self.touch_products, self.touch_own[:, r], self.touch_own[:, c]),
        )


def _cells(labels: Labels) -> dict[int, Labels]:
    """Cell -> places that are in it."""
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(name): part for name, part in zip(names, parts, strict=True) if name >= 0}


def _cut(values: Tensor, rows: Labels, cols: Labels) -> Tensor:
    """values[:, rows][:, :, cols], contiguous; by slices where they are runs."""
    out = values
    for axis, places in ((1, rows), (2, cols)):
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places):
            out = out.narrow(axis, first, len(places))
        else:
            out = out.index_select(axis, torch.from_numpy(places).to(values.device))
    return out.contiguous()


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
