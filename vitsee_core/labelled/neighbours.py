"""Exact nearest neighbours by cosine, in tiles, with a running top-k merge.

Cosines are products in float64, rounded to float32; equal ones are ties, and the lower row comes
first. So the neighbours and their cosines do not depend on how the rows were cut into tiles, nor on
which of three ways finds them, up to a float64 rounding error across a float32 boundary (about one
similarity in 10^8):

    few    those of little work by numpy, before torch or a compiled loop would be loaded
    cpu    products in float32, or bfloat16, and what they leave open in float64, by compiled loops
    gpu    products in float32, and what they leave open in float64, by torch

Cost: 2 n m d operations. Memory: 32 bytes per cell of a tile, 14 d bytes per query; of few, 32
bytes per cell of `FEW_CELLS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.labelled.exact_cosines import HostCosines, keys_of, parts_of_keys
from vitsee_core.progress import SILENT, Progress
from vitsee_core.types import Float32

TILE_ROWS = 1024
TILE_QUERIES = 1024
TILE_BYTES = 32
# Queries times rows, and that times channels, up to which torch and compiled loops, which take two
# seconds to be imported, would save a tenth of a second at most.
FEW_CELLS, FEW_PRODUCTS = 1 << 21, 1 << 30
UNUSED = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Nearest:
    """cosines, rows: (m, k), nearest first, ties by row. constant: all rows are the same."""

    cosines: Float32
    rows: NDArray[np.int64]
    constant: bool


class Neighbours(Protocol):
    """The k nearest rows of each of some queries, among all rows given so far."""

    def add(self, rows: Float32) -> None:
        """Count the next rows, (n, dim)."""

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Cosines and row numbers (m, k), nearest first; ties by row."""


Search = Callable[[Float32, int, int], Neighbours]  # of queries (m, dim), k and queries at a time


class FewNeighbours:
    """`Neighbours` by numpy."""

    def __init__(self, queries: Float32, k: int, tile: int = 0) -> None:
        """Queries: (m, dim). tile: queries worked on at a time."""
        tile = tile or TILE_QUERIES
        self._parts = [slice(start, start + tile) for start in range(0, len(queries), tile)]
        self._cosines = [HostCosines(queries[part]) for part in self._parts]
        self._keys = np.full((len(queries), k), UNUSED)
        self._n = 0

    def add(self, rows: Float32) -> None:
        """Count the next rows, (n, dim)."""
        numbers = np.arange(self._n, self._n + len(rows))
        for part, cosines in zip(self._parts, self._cosines, strict=True):
            both = np.concatenate([self._keys[part], keys_of(cosines(rows), numbers)], axis=1)
            self._keys[part] = np.partition(both, len(rows), axis=1)[:, len(rows) :]
        self._n += len(rows)

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Cosines and row numbers (m, k), nearest first; ties by row."""
        return parts_of_keys(-np.sort(-self._keys, axis=1))


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
    """The k nearest of `rows` for each of `queries`.

    Args:
        rows: gives the pieces (n, dim) in order; called again where the queries do not fit.
        queries: gives the pieces (m, dim) in order.
        shape: how many queries and rows there are in all, and their length dim.
        k: number of neighbours, at most the number of rows.
        device: makes the products; see `device.resolve_device`.
        memory: bytes to stay within: two thirds for queries, a third for tiles.
        progress: counts rows, once in all passes.

    Raises:
        VitseeError: there is no such device.
    """
    n_queries, n_rows, dim = shape
    n_cells = n_queries * n_rows
    few = n_cells <= FEW_CELLS and n_cells * dim <= FEW_PRODUCTS and device in ("auto", "cpu")
    search, precision, on_cpu = (FewNeighbours, nullcontext(), True) if few else _on(device)
    at_once = max(64, min(n_queries, memory * 2 // 3 // (20 * dim + 32 * k)))
    # On a CPU, several tiles for each time that threads wait for each other.
    tile_rows = max(64, min(TILE_ROWS * (8 if on_cpu else 1), memory // 6 // (20 * dim)))
    tile = max(16, min(TILE_QUERIES, memory // 6 // (TILE_BYTES * tile_rows)))
    found: list[tuple[Float32, NDArray[np.int64]]] = []
    constant = True
    with precision:
        for some in in_tiles(queries(), at_once):
            own, first = search(some, k, tile), None
            for piece in in_tiles(rows(), tile_rows):
                first = piece[0].copy() if first is None else first
                constant = constant and bool((piece == first).all())
                own.add(piece)
                progress.advance(round(len(piece) * len(some) / n_queries))
            found.append(own.result())
    cosines, numbers = zip(*found, strict=True)
    return Nearest(np.concatenate(cosines), np.concatenate(numbers), constant)


def _on(text: str) -> tuple[Search, AbstractContextManager[None], bool]:
    """What finds neighbours on a device, within which context, and whether it is the CPU."""
    from vitsee_core.device import precision_context, resolve_device

    device = resolve_device(text)
    if device.type == "cpu":
        from vitsee_core.labelled.cpu_neighbours import CpuNeighbours

        return CpuNeighbours, precision_context(device, "fp32"), True
    from vitsee_core.labelled.gpu_neighbours import GpuNeighbours

    return (
        lambda queries, k, tile: GpuNeighbours(queries, k, device, tile),
        precision_context(device, "fp32"),
        False,
    )


def in_tiles(pieces: Iterable[Float32], size: int = TILE_ROWS) -> Iterator[Float32]:
    """The same rows in order, `size` of them at a time, the last piece perhaps shorter."""
    held: list[Float32] = []
    n = 0
    for piece in pieces:
        held.append(piece)
        n += len(piece)
        if n >= size:
            rows = np.concatenate(held)
            whole = n - n % size
            yield from (rows[i : i + size] for i in range(0, whole, size))
            held, n = [rows[whole:]], n - whole
    if n:
        yield np.concatenate(held)
