"""The nearest neighbours of examples that are read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.types import Float32

TILE_ROWS = 20480
TILE_QUERIES = 512
TILE_BYTES = 32


@dataclass(frozen=True)
class Nearest:
    """Neighbours (m, k), nearest first, ties by row."""

    cosines: Float32
    rows: NDArray[np.int64]
    constant: bool  # all rows are the same


def nearest(
    rows: Callable[[], Iterable[Float32]],
    queries: Callable[[], Iterable[Float32]],
    shape: tuple[int, int, int],
    *,
    k: int,
    device: str,
    memory: int,
    progress: Progress = SILENT,
) -> Nearest:
    """The k nearest of `rows` for each of `queries`; see `kernels.neighbours`.

    Args:
        rows: yields the pieces (n, dim) in order; called again if the queries do not fit.
        queries: yields the pieces (m, dim) in order.
        shape: total number of queries and of rows, and their length dim.
        k: number of neighbours, at most the number of rows.
        device: computes the products; see `device.resolve_device`.
        memory: bytes to stay within: two thirds for queries, a third for tiles.
        progress: counts rows, once in all passes.

    Raises:
        VitseeError: there is no such device.
    """
    n_queries, _, dim = shape
    at_once = max(64, min(n_queries, memory * 2 // 3 // (20 * dim + 32 * k)))
    tile_rows = max(64, min(TILE_ROWS, memory // 6 // (20 * dim)))
    tile = max(16, min(TILE_QUERIES, memory // 6 // (TILE_BYTES * tile_rows)))
    of_blocks: list[tuple[Float32, NDArray[np.int64]]] = []
    constant = True
    for some in in_tiles(queries(), at_once):
        from vitsee_core.kernels.neighbours import Neighbours
        from vitsee_core.runtime.device import precision_context, resolve_device

        where = resolve_device(device)
        first = None
        with precision_context(where, "fp32"):
            own = Neighbours(some, k, where, tile)
            for piece in in_tiles(rows(), tile_rows):
                first = piece[0].copy() if first is None else first
                constant = constant and bool((piece == first).all())
                own.add(piece)
                progress.advance(round(len(piece) * len(some) / n_queries))
            of_blocks.append(own.result())
    cosines, numbers = zip(*of_blocks, strict=True)
    return Nearest(np.concatenate(cosines), np.concatenate(numbers), constant)


def in_tiles(pieces: Iterable[Float32], size: int = TILE_ROWS) -> Iterator[Float32]:
    """The same rows in order, `size` at a time; the last piece may be shorter."""
    held: list[Float32] = []
    n = 0
    for piece in pieces:
        held.append(piece)
        n += len(piece)
        if n >= size:
            rows = np.concatenate(held)
            whole = n - n % size
            yield from (rows[i : i + size] for i in range(0, whole, size))
            held = [rows[whole:]]
            n = n - whole
    if n:
        yield np.concatenate(held)
