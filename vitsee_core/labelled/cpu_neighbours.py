"""The search of `neighbours` on a CPU: products by tiles, and one compiled pass over each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.grams.bfloat16 import has_bfloat16
from vitsee_core.labelled.exact_cosines import ORTHOGONAL, normalised
from vitsee_core.threads import run_split
from vitsee_core.types import Float32

T = TypeVar("T")
R = TypeVar("R")

# Products in float64 for each in bfloat16 that take longer than float32 takes in its place.
TOO_MANY = 1 / 50
TILE_ROWS = 1024
MARGIN = np.float32(2.0**-20)  # more than cosines lose that are rounded to float32
LINE = 64  # cosines that are compared at once
TILE_QUERIES = 256  # with a tile of rows their products stay in a core's own cache


class CpuNeighbours:
    """The k nearest rows of each query, among all rows given so far; see `Neighbours`.

    Where the CPU multiplies bfloat16, products of all tiles but the first are made of that, five
    times as fast: of vectors less one common vector, whose errors are smaller, as features often
    differ little. What these errors leave open is decided by the same products in float64, as
    after products in float32; where that is too much, the following tiles are in float32.
    """

    def __init__(self, queries: Float32, k: int, tile: int = 0) -> None:
        """Queries: (m, dim). tile: queries worked on at a time."""
        m, step = len(queries), min(tile or TILE_QUERIES, TILE_QUERIES)
        self._parts = [slice(start, min(start + step, m)) for start in range(0, m, step)]
        exact = _each(lambda part: normalised(queries[part]), self._parts)
        self._common = np.concatenate(exact).mean(axis=0)
        self._fast = _each(_Tile.whole, exact)
        self._coarse: list[_Tile] | None = None
        if has_bfloat16("cpu"):
            self._coarse = _each(lambda part: _Tile.coarse(part, self._common), exact)
        self._cosines = np.full((m, k), -np.inf, np.float32)
        self._rows = np.zeros((m, k), np.int64)
        self._n = 0

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
        common = None if coarse is None else self._common
        starts = range(0, len(rows), TILE_ROWS)
        tiles = _each(lambda at: _Tile.of(rows[at : at + TILE_ROWS], common), starts)
        looked_at = np.zeros(len(self._cosines), np.int64)

        def search(_: int, numbers: range) -> None:
            memory = _Memory(self._parts[0].stop, TILE_ROWS)
            for number in numbers:
                of, left = self._parts[number], (coarse or self._fast)[number]
                for at, tile in zip(starts, tiles, strict=True):
                    bits = memory.products(left, tile)
                    shift = np.uint32(32 - 8 * bits.itemsize)
                    take_nearest(
                        *(bits, shift, left.levels, left.errors, tile.levels, tile.errors),
                        *(left.exact, tile.exact, self._n + at),
                        *(self._cosines[of], self._rows[of], looked_at[of]),
                    )

        _run(search, len(self._parts))
        if coarse is not None:
            usual = TOO_MANY + 2 * self._cosines.shape[1] / self._n
            if looked_at.sum() > usual * looked_at.size * len(rows):
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


class _Memory:
    """Of one thread, for products of tiles: new memory would be filled with zeros every time."""

    def __init__(self, n_queries: int, n_rows: int) -> None:
        self._halves, self._singles = (
            torch.empty(n_queries * n_rows, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float32)
        )

    def products(self, left: _Tile, right: _Tile) -> NDArray[Any]:
        """(queries, rows) the bits, of bfloat16 or float32; valid until the next are made."""
        shape = len(left.exact), len(right.exact)
        coarse = left.factors.dtype == torch.bfloat16
        made = (self._halves if coarse else self._singles)[: math.prod(shape)].view(shape)
        torch.mm(left.factors, right.factors.T, out=made)
        bits: NDArray[Any] = made.view(torch.int16 if coarse else torch.int32).numpy()
        return bits.view(np.uint16 if coarse else np.uint32)


def _run(work: Callable[[int, range], None], n: int) -> None:
    """`run_split` of n items by as many threads as torch has, or as there are items."""
    run_split(work, n, max(1, min(torch.get_num_threads(), n)))


def _each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`work` of every item, by these threads."""
    found: dict[int, R] = {}

    def some(_: int, numbers: range) -> None:
        found.update((k, work(items[k])) for k in numbers)

    _run(some, len(items))
    return [found[k] for k in range(len(items))]


@compiled
def put(value: np.float32, largest: NDArray[np.float32]) -> int:
    """Put a value among the largest so far, (k,) descending, after its equals; where it is now."""
    place = len(largest) - 1
    while place > 0 and value > largest[place - 1]:
        largest[place] = largest[place - 1]
        place -= 1
    largest[place] = value
    return place


@compiled
def take_nearest(
    bits: NDArray[Any],
    shift: np.uint32,
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

    Products in float64 are made of those that may be among the nearest after all of the tile was
    seen: k others are not surely nearer.

    Args:
        bits: (queries, rows) of products.
        shift: by which they become those of float32.
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
    least = np.empty(last + 1, np.float32)
    candidates = np.empty(bits.shape[1], np.int64)
    largest = np.empty(bits.shape[1], np.float32)
    words = np.empty(LINE, np.uint32)
    a = words.view(np.float32)
    for i in range(bits.shape[0]):
        query, some, best, which = queries[i], bits[i], cosines[i], numbers[i]
        level, error, n = levels[i], errors[i], 0
        for k in range(last + 1):
            least[k] = best[k] - level
        for start in range(0, bits.shape[1], LINE):
            line = slice(start, min(start + LINE, bits.shape[1]))
            part, b, c = some[line], of_rows[line], errors_of_rows[line]
            for j in range(len(part)):
                words[j] = np.uint32(part[j]) << shift
            above, bar = 0, least[last]
            for j in range(len(part)):  # vectors are compared at once
                above += a[j] + b[j] + error * c[j] > bar
            if above == 0:
                continue
            for j in range(len(part)):
                middle, apart = a[j] + b[j], error * c[j]
                if middle + apart > least[last]:
                    candidates[n], largest[n] = start + j, middle + apart
                    n += 1
                    if middle - apart - MARGIN > least[last]:
                        put(middle - apart - MARGIN, least)
        for at in range(n):
            j = candidates[at]
            bar = max(least[last], best[last] - level)
            if largest[at] > bar:
                looked_at[i] += 1
                row = rows[j]
                dot = 0.0
                for k in range(dim):
                    dot += query[k] * row[k]
                # Those of orthogonal vectors are ties, which float32 alone would not make so.
                cosine = np.float32(0.0 if abs(dot) < ORTHOGONAL else dot)
                if cosine > best[last]:
                    place = put(cosine, best)
                    for k in range(last, place, -1):
                        which[k] = which[k - 1]
                    which[place] = first + j
