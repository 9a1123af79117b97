"""The search of `neighbours` on a CPU: products by tiles, and one compiled pass over each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.grams.bfloat16 import has_bfloat16
from vitsee_core.threads import run_split
from vitsee_core.types import Float32

# Products in float64 for each in bfloat16 that take longer than float32 takes in its place.
TOO_MANY = 1 / 50
TILE_ROWS = 1024
TILE_QUERIES = 256  # with a tile of rows their products stay in a core's own cache
ORTHOGONAL = 2.0**-40  # more than the rounding errors of a float64 product


class CpuNeighbours:
    """The k nearest rows of each query, among all rows given so far; see `Neighbours`.

    Where the CPU multiplies bfloat16, products of all tiles but the first are made of that, five
    times as fast: of vectors less one common vector, whose errors are smaller, as features often
    differ little. What these errors leave open is decided by the same products in float64, as
    after products in float32; where that is too much, the following tiles are in float32.
    """

    def __init__(self, queries: Float32, k: int, tile: int = 0) -> None:
        """Queries: (m, dim). tile: queries worked on at a time."""
        self._tile = min(tile or TILE_QUERIES, TILE_QUERIES)
        self._queries = normalised(queries)
        self._fast = _Tile.whole(self._queries)
        self._coarse: _Tile | None = None
        self._common = self._queries.mean(axis=0)
        self._cosines = np.full((len(queries), k), -np.inf, np.float32)
        self._rows = np.zeros((len(queries), k), np.int64)
        self._n = 0
        if has_bfloat16("cpu"):
            self._coarse = _Tile.coarse(self._queries, self._common)

    @property
    def in_bfloat16(self) -> bool:
        """Whether products of the next rows are made in bfloat16."""
        return self._coarse is not None

    def add(self, rows: Float32) -> None:
        """Count the next rows, (n, dim)."""
        if self._n == 0 and len(rows) > TILE_ROWS:  # the nearest of a few leave less of the others
            self.add(rows[:TILE_ROWS])
            rows = rows[TILE_ROWS:]
        coarse = self._coarse if self._n > 0 else None
        left = coarse or self._fast
        common = None if coarse is None else self._common
        starts = range(0, len(rows), TILE_ROWS)
        tiles: list[_Tile | None] = [None] * len(starts)

        def prepare(_: int, of: range) -> None:
            for at in of:
                tiles[at] = _Tile.of(rows[starts[at] :][:TILE_ROWS], common)

        m, n_threads = len(self._queries), torch.get_num_threads()
        run_split(prepare, len(tiles), min(n_threads, len(tiles)))
        looked_at = np.zeros(m, np.int64)

        def search(_: int, queries: range) -> None:
            for start in range(queries.start, queries.stop, self._tile):
                of = slice(start, min(start + self._tile, queries.stop))
                for at, tile in zip(starts, tiles, strict=True):
                    assert tile is not None
                    near = (left.factors[of] @ tile.factors.T).float().numpy()
                    take_nearest(
                        *(near, left.levels[of], left.errors[of], tile.levels, tile.errors),
                        *(self._queries[of], tile.exact, self._n + at),
                        *(self._cosines[of], self._rows[of], looked_at[of]),
                    )

        run_split(search, m, max(1, min(n_threads, m // self._tile)))
        if coarse is not None:
            usual = TOO_MANY + 2 * self._cosines.shape[1] / self._n
            if looked_at.sum() > usual * m * len(rows):
                self._coarse = None
        self._n += len(rows)

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Cosines and row numbers (m, k), nearest first; ties by row."""
        return self._cosines, self._rows


@dataclass(frozen=True)
class _Tile:
    """Vectors of length 1, and what their products are made of: a cosine is factors . factors +
    level + level, but for error * error. exact: (n, dim) in float64; factors: (n, dim); levels,
    errors: (n,)."""

    exact: NDArray[np.float64]
    factors: torch.Tensor
    levels: Float32
    errors: Float32

    @classmethod
    def of(cls, rows: Float32, common: NDArray[np.float64] | None) -> _Tile:
        """Of vectors of any length, in float32, or in bfloat16 less `common`."""
        exact = normalised(rows)
        return cls.whole(exact) if common is None else cls.coarse(exact, common)

    @classmethod
    def whole(cls, exact: NDArray[np.float64]) -> _Tile:
        """In float32."""
        n, dim = exact.shape
        # |error| of a float32 dot product of unit vectors, the rounding of both counted.
        errors = np.full(n, math.sqrt((dim + 8) * 2.0**-24), np.float32)
        factors = torch.from_numpy(exact.astype(np.float32))
        return cls(exact, factors, np.zeros(n, np.float32), errors)

    @classmethod
    def coarse(cls, exact: NDArray[np.float64], common: NDArray[np.float64]) -> _Tile:
        """In bfloat16, less a vector common to both sides: q.r = (q - c).(r - c) + q.c + r.c - c.c.

        Both factors and their product are rounded to 8 bits, sums are made in float32. The error of
        the levels, at most 2^-20, is counted by a length of at least 2^-4.
        """
        less = exact - common
        levels = exact @ common - common @ common / 2
        lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", less, less)), 2.0**-4)
        share = 3 * 2.0**-9 + 2.0**-12 + (exact.shape[1] + 8) * 2.0**-24
        errors = (lengths * math.sqrt(share)).astype(np.float32)
        factors = torch.from_numpy(less.astype(np.float32)).to(torch.bfloat16)
        return cls(exact, factors, levels.astype(np.float32), errors)


def normalised(rows: Float32) -> NDArray[np.float64]:
    """(n, dim) of length 1; a row of zeros stays, and has cosine 0 with everything."""
    wide = rows.astype(np.float64)
    length = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return np.divide(wide, np.where(length > 0, length, 1.0), out=wide)


@compiled
def take_nearest(
    near: NDArray[np.float32],
    levels: NDArray[np.float32],
    errors: NDArray[np.float32],
    of_rows: NDArray[np.float32],
    errors_of_rows: NDArray[np.float32],
    queries: NDArray[np.float64],
    rows: NDArray[np.float64],
    first: int,
    cosines: NDArray[np.float32],
    numbers: NDArray[np.int64],
    looked_at: NDArray[np.int64],
) -> None:
    """Put the rows of a tile that are among the nearest into their places.

    Args:
        near: (queries, rows) products.
        levels: (queries,) to be added to these, with that of the row, to be cosines.
        errors: (queries,) of these, times that of the row, at most.
        of_rows: (rows,) levels.
        errors_of_rows: (rows,) errors.
        queries: (queries, dim) of length 1.
        rows: (rows, dim) of length 1.
        first: the number of the first row.
        cosines: (queries, k), changed: the largest so far, in descending order.
        numbers: (queries, k), changed: their rows; of equal ones the lower first.
        looked_at: (queries,) changed: how many products are made in float64.
    """
    dim, last = queries.shape[1], cosines.shape[1] - 1
    for i in range(near.shape[0]):
        query, some, best, which = queries[i], near[i], cosines[i], numbers[i]
        bar, error = best[last] - levels[i], errors[i]
        for j in range(near.shape[1]):
            if some[j] + of_rows[j] + error * errors_of_rows[j] > bar:
                looked_at[i] += 1
                row = rows[j]
                dot = 0.0
                for k in range(dim):
                    dot += query[k] * row[k]
                # Those of orthogonal vectors are ties, which float32 alone would not make so.
                cosine = np.float32(0.0 if abs(dot) < ORTHOGONAL else dot)
                if cosine > best[last]:
                    place = last
                    while place > 0 and cosine > best[place - 1]:
                        best[place] = best[place - 1]
                        which[place] = which[place - 1]
                        place -= 1
                    best[place] = cosine
                    which[place] = first + j
                    bar = best[last] - levels[i]
