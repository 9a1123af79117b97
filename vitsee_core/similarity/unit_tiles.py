"""A tile of every Gram matrix on the CPU's matrix unit, and its sums.

    panels -> product in blocks -> runs of pairs -> panels -> inner products of all matrices

Each matrix's product is taken apart by the thread that made it, while it lies near; what all
matrices have of a piece is multiplied a thousand pairs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.grams.amx import PANEL
from vitsee_core.grams.halves import InPanels, in_rows
from vitsee_core.grams.panels import TILE_NUMBERS, into_panels
from vitsee_core.grams.scratch import Scratch
from vitsee_core.lanes import in_order, n_lanes, run_all
from vitsee_core.similarity.pair_runs import take_runs
from vitsee_core.similarity.pieces import TERMS, Partition, Piece, Sums
from vitsee_core.similarity.whole_tiles import read
from vitsee_core.types import Float, Float32

# Pairs that are multiplied at a time: panels of some hundred matrices stay in the second cache.
AT_ONCE = 1024
# Numbers behind an array that may be read, or written in turn.
BEHIND = TILE_NUMBERS


class OnUnit(Protocol):
    """A Gram matrix whose blocks the matrix unit makes."""

    @property
    def n(self) -> int:
        """Number of images."""

    def product(self, i: slice, j: slice, memory: Float32) -> Float32:
        """A block as those of `halves.Sums`, in this memory; where i is j, on and below the
        diagonal."""


class UnitTiles:
    """Tiles of R and C matrices, one at a time; of those on the diagonal what lies below it."""

    def __init__(self, unit: InPanels, matrices: Sequence[OnUnit], n_rows: int) -> None:
        self._unit, self._matrices, self._n_rows = unit, matrices, n_rows
        self._memory, self._scratch = np.empty(0, np.float32), Scratch()

    def sums(
        self, i: slice, j: slice, pieces: Sequence[Piece], pool: ThreadPoolExecutor | None
    ) -> tuple[Float32 | None, Iterator[Sums]]:
        """The diagonals (matrices, images) of a tile on the diagonal, and the sums of each
        piece."""
        cuts, ends = _cuts(pieces)
        n, (n_pairs, n_rows, n_cols) = len(self._matrices), ends[-1].tolist()
        values = self._shaped(n, n_pairs + BEHIND)
        over_cols, over_rows = (np.empty((n, k + BEHIND), np.float32) for k in (n_rows, n_cols))
        squares = np.empty((n, len(cuts)))
        diagonals = np.empty((n, i.stop - i.start), np.float32) if i == j else None
        size = self._unit.product_size(i.stop - i.start, j.stop - j.start) + BEHIND

        def load(k: int) -> None:
            memory = self._scratch.take("product", size, np.float32)
            blocks = self._matrices[k].product(i, j, memory)
            take_runs(blocks, cuts, values[k], over_cols[k], over_rows[k], squares[k])
            if diagonals is not None:
                places, inside = np.divmod(np.arange(diagonals.shape[1]), PANEL)
                diagonals[k] = blocks[places, places, inside, inside]

        read(self._matrices, i, j, pool)
        run_all(load, range(n), pool)

        def sums(p: int) -> Sums:
            pairs, rows, cols = (slice(*of) for of in ends[p : p + 2].T.tolist())
            products, own = 2 * self._products(values[:, pairs]), 2 * squares[:, p]
            return Sums(products, own, over_cols[:, rows], over_rows[:, cols])

        return diagonals, in_order(sums, range(len(cuts)), pool, 2 * n_lanes())

    def _products(self, pairs: Float32) -> Float:
        """(R, C) inner products of matrices over some pairs."""
        unit, n_rows = self._unit, self._n_rows
        shape = n_rows, len(pairs) - n_rows
        if pairs.shape[1] == 0:  # of a cell of one image
            return np.zeros(shape)
        memory = self._scratch.take("products", unit.product_size(*shape), np.float32)
        blocks = unit.blocks(*shape, memory)
        for at in range(0, pairs.shape[1], AT_ONCE):
            some = pairs[:, at : at + AT_ONCE]
            left = unit.panels("left pairs", n_rows, some.shape[1])
            right = unit.panels("right pairs", shape[1], some.shape[1])
            into_panels(some[:n_rows], left.values)
            into_panels(some[n_rows:], right.values)
            unit.add_product(left, right, blocks, every=True, fresh=at == 0)
        return in_rows(blocks, *shape).astype(np.float64)

    def _shaped(self, n: int, n_pairs: int) -> Float32:
        """(matrices, pairs), whose rows do not begin at the same place of a page."""
        wide = -(-n_pairs // 1024) * 1024 + 16
        if len(self._memory) < n * wide:
            self._memory = np.empty(0, np.float32)  # never both at a time
            self._memory = np.empty(n * wide, np.float32)
        return self._memory[: n * wide].reshape(n, wide)[:, :n_pairs]


def unit_bytes(n: int, partitions: Sequence[Partition], tile: int, widest: int) -> tuple[int, int]:
    """Memory that `UnitTiles` takes for each matrix, the sums of what `pair_totals` makes of it
    left out, and for each thread; widest: the most features of a matrix."""
    n_pairs = tile * (tile - 1) // 2 if tile >= n else tile**2
    each = 0
    for partition in partitions:
        cells, longest = min(tile, partition.n_cells), -(-n // partition.n_cells)
        if partition.in_runs:  # else each tile has images of all cells
            cells = min(cells, 2 + tile * partition.n_cells // n)
        n_pieces = cells**2 + tile**2 // TERMS
        each += n_pairs + n_pieces * (TILE_NUMBERS + min(tile, longest)) + cells * tile
    products, features = tile**2, 2 * 2 * tile * widest
    return 4 * (each + 1024), 4 * products + 2 * features


def _cuts(pieces: Sequence[Piece]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The argument `cuts` of `take_runs`, (pieces, 8), and (pieces + 1, 3) offsets: where each
    piece's pairs, its sums over columns and its sums over rows begin, and where all of them end."""
    cuts, ends = [], [(0, 0, 0)]
    for piece in pieces:
        (top, bottom), (left, right) = ((p[0], p[-1] + 1) for p in (piece.rows, piece.cols))
        n_pairs = (bottom - top) * (right - left)
        if piece.square:  # row k has k - left pairs
            n_pairs = ((bottom - left) * (bottom - left - 1) - (top - left) * (top - left - 1)) // 2
        first, row, col = ends[-1]
        cuts.append((top, bottom, left, right, piece.square, first, row, col))
        n_pairs += -n_pairs % TILE_NUMBERS
        ends.append((first + n_pairs, row + bottom - top, col + right - left))
    return np.array(cuts, np.int64).reshape(-1, 8), np.array(ends, np.int64)
