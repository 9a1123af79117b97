"""The search of `neighbours` on a CPU: products by tiles, and one compiled pass over each."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.threads import run_split
from vitsee_core.types import Float32

TILE_QUERIES = 256  # with a tile of rows their products stay in a core's own cache
ORTHOGONAL = 2.0**-40  # more than the rounding errors of a float64 product


class CpuNeighbours:
    """The k nearest rows of each query, among all rows given so far; see `Neighbours`."""

    def __init__(self, queries: Float32, k: int, tile: int = 0) -> None:
        """Queries: (m, dim). tile: queries worked on at a time."""
        self._tile = min(tile or TILE_QUERIES, TILE_QUERIES)
        self._queries = normalised(queries)
        self._fast = torch.from_numpy(self._queries.astype(np.float32))
        self._cosines = np.full((len(queries), k), -np.inf, np.float32)
        self._rows = np.zeros((len(queries), k), np.int64)
        self._n = 0

    def add(self, rows: Float32) -> None:
        """Count the next rows, (n, dim)."""
        exact = normalised(rows)
        fast = torch.from_numpy(exact.astype(np.float32)).T
        # |error| of a float32 dot product of unit vectors, the rounding of both counted.
        error = np.float32((rows.shape[1] + 8) * 2.0**-24)

        def search(_: int, queries: range) -> None:
            for start in range(queries.start, queries.stop, self._tile):
                stop = min(start + self._tile, queries.stop)
                near = (self._fast[start:stop] @ fast).numpy()
                mine = self._queries[start:stop], self._cosines[start:stop], self._rows[start:stop]
                take_nearest(near, error, mine[0], exact, self._n, mine[1], mine[2])

        m = len(self._queries)
        run_split(search, m, max(1, min(torch.get_num_threads(), m // self._tile)))
        self._n += len(rows)

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Cosines and row numbers (m, k), nearest first; ties by row."""
        return self._cosines, self._rows


def normalised(rows: Float32) -> NDArray[np.float64]:
    """(n, dim) of length 1; a row of zeros stays, and has cosine 0 with everything."""
    wide = rows.astype(np.float64)
    length = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return np.divide(wide, np.where(length > 0, length, 1.0), out=wide)


@compiled
def take_nearest(
    near: NDArray[np.float32],
    error: np.float32,
    queries: NDArray[np.float64],
    rows: NDArray[np.float64],
    first: int,
    cosines: NDArray[np.float32],
    numbers: NDArray[np.int64],
) -> None:
    """Put the rows of a tile that are among the nearest into their places.

    Args:
        near: (queries, rows) products in float32.
        error: of these, at most.
        queries: (queries, dim) of length 1.
        rows: (rows, dim) of length 1.
        first: the number of the first row.
        cosines: (queries, k), changed: the largest so far, in descending order.
        numbers: (queries, k), changed: their rows; of equal ones the lower first.
    """
    dim, last = queries.shape[1], cosines.shape[1] - 1
    for i in range(near.shape[0]):
        query, some, best, which = queries[i], near[i], cosines[i], numbers[i]
        bar = best[last] - error
        for j in range(near.shape[1]):
            if some[j] > bar:
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
                    bar = best[last] - error
