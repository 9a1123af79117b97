"""Exact nearest neighbours by cosine, in tiles, with a running top-k merge.

Each tile of similarities is first made in float32, where it costs half; what could then reach the
k nearest (float32's error considered) is computed again in float64. Cosines that are equal in
float32 are ties, and the lower row comes first. So the neighbours and their cosines do not depend
on how the rows were cut into tiles, up to a float64 rounding error across a float32 boundary
(about one similarity in 10^8).

Cost: 2 n m d operations in float32. Memory: 32 bytes per cell of a tile, 14 d bytes per query. On a
CPU the same is done by compiled loops, whose cosines do not depend on tiles at all, after products
in bfloat16 where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.device import precision_context
from vitsee_core.labelled.cpu_neighbours import ORTHOGONAL, CpuNeighbours
from vitsee_core.progress import SILENT, Progress
from vitsee_core.types import Float32

TILE_ROWS = 1024
TILE_QUERIES = 1024
TILE_BYTES = 32
# Beyond this share of a tile one product of all of it is cheaper than many single ones.
FEW = 1 / 50
PIECE = 512  # vectors multiplied at a time: they stay in cache
UNUSED = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Nearest:
    """cosines, rows: (m, k), nearest first, ties by row. constant: all rows are the same."""

    cosines: Float32
    rows: NDArray[np.int64]
    constant: bool


class Neighbours:
    """The k nearest rows of each query, among all rows given so far; on a GPU, as few kernels."""

    def __init__(self, queries: Float32, k: int, device: torch.device, tile: int = 0) -> None:
        """Queries: (m, dim). tile: queries worked on at a time."""
        # Metal has no float64: there only the first product is made on the device.
        self._exact_device = torch.device("cpu") if device.type == "mps" else device
        self._device = device
        self._tile = tile or TILE_QUERIES
        self._queries = _normalised(queries, self._exact_device)
        self._fast = self._queries.to(torch.float32).to(device)
        shape = (len(queries), k)
        self._keys = torch.full(shape, UNUSED, dtype=torch.int64, device=self._exact_device)
        self._n = 0

    def add(self, rows: Float32) -> None:
        """Count the next rows, (n, dim)."""
        exact = _normalised(rows, self._exact_device)
        fast = exact.to(torch.float32).to(self._device)
        for start in range(0, len(self._queries), self._tile):
            part = slice(start, start + self._tile)
            keys = self._keys[part]
            nearest = keys[:, -1]
            bar = torch.where(nearest == UNUSED, -torch.inf, _cosine_of(nearest))
            # |error| of a float32 dot product of unit vectors, the rounding of both counted.
            error = (rows.shape[1] + 8) * 2.0**-24
            near = (self._fast[part] @ fast.T).to(self._exact_device) > (bar - error)[:, None]
            self._keys[part] = self._merge(keys, near, bar, self._queries[part], exact)
        self._n += len(rows)

    def _merge(
        self,
        keys: torch.Tensor,
        near: torch.Tensor,
        bar: torch.Tensor,
        queries: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """The best k of `keys` and the rows that `near` marks."""
        k = keys.shape[1]
        if int(torch.count_nonzero(near)) > FEW * near.numel():
            cosines = rounded(queries @ rows.T)
            numbers = torch.arange(self._n, self._n + len(rows), device=rows.device)
            new = keys_of(cosines, numbers)
        else:
            of, row = torch.nonzero(near, as_tuple=True)
            pieces = zip(of.split(PIECE), row.split(PIECE), strict=True)
            products = [torch.linalg.vecdot(queries[q], rows[r]) for q, r in pieces]
            cosines = rounded(torch.cat([*products, rows.new_empty(0)]))
            better = cosines > bar[of]
            of, row, cosines = of[better], row[better], cosines[better]
            counts = torch.bincount(of, minlength=len(keys))
            place = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[of]
            width = int(counts.max()) if len(of) else 0
            new = keys.new_full((len(keys), width), UNUSED)
            new[of, place] = keys_of(cosines, row + self._n)
        if new.shape[1] == 0:
            return keys
        return torch.topk(torch.cat([keys, new], 1), k, dim=1).values

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Cosines and row numbers (m, k), nearest first; ties by row."""
        keys = self._keys.cpu()
        rows = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
        return _cosine_of(keys).numpy(), rows.numpy()


def nearest(
    rows: Callable[[], Iterable[Float32]],
    queries: Callable[[], Iterable[Float32]],
    n_queries: int,
    dim: int,
    *,
    k: int,
    device: torch.device,
    memory: int,
    progress: Progress = SILENT,
) -> Nearest:
    """The k nearest of `rows` for each of `queries`.

    Args:
        rows: gives the pieces (n, dim) in order; called again where the queries do not fit.
        queries: gives the pieces (m, dim) in order.
        n_queries: how many they are in all.
        dim: their length.
        k: number of neighbours, at most the number of rows.
        device: makes the products.
        memory: bytes to stay within: two thirds for queries, a third for tiles.
        progress: counts rows, once in all passes.
    """
    at_once = max(64, min(n_queries, memory * 2 // 3 // (20 * dim + 32 * k)))
    # On a CPU, several tiles for each time that threads wait for each other.
    most = TILE_ROWS * (8 if device.type == "cpu" else 1)
    tile_rows = max(64, min(most, memory // 6 // (20 * dim)))
    tile = max(16, min(TILE_QUERIES, memory // 6 // (TILE_BYTES * tile_rows)))
    found: list[tuple[Float32, NDArray[np.int64]]] = []
    constant = True
    with precision_context(device, "fp32"):
        for some in in_tiles(queries(), at_once):
            search, first = neighbours(some, k, device, tile), None
            for piece in in_tiles(rows(), tile_rows):
                first = piece[0].copy() if first is None else first
                constant = constant and bool((piece == first).all())
                search.add(piece)
                progress.advance(round(len(piece) * len(some) / n_queries))
            found.append(search.result())
    cosines, numbers = zip(*found, strict=True)
    return Nearest(np.concatenate(cosines), np.concatenate(numbers), constant)


def neighbours(
    queries: Float32, k: int, device: torch.device, tile: int = 0
) -> Neighbours | CpuNeighbours:
    """What finds the k nearest rows of each query on this device."""
    if device.type == "cpu":
        return CpuNeighbours(queries, k, tile)
    return Neighbours(queries, k, device, tile)


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


def _normalised(rows: Float32, device: torch.device) -> torch.Tensor:
    """(n, dim) float64 of length 1; a row of zeros stays, and has cosine 0 with everything."""
    exact = torch.from_numpy(np.ascontiguousarray(rows)).to(device).to(torch.float64)
    length = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    return exact / torch.where(length > 0, length, 1.0)


def rounded(cosines: torch.Tensor) -> torch.Tensor:
    """Cosines in float32; those of orthogonal vectors 0, which float32 alone would not make so."""
    return torch.where(cosines.abs() < ORTHOGONAL, 0.0, cosines).to(torch.float32)


def keys_of(cosines: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64 that order as (cosine, then lower row first): the cosine's bits above the row's.

    cosines: float32, any shape; rows: of the last axis, or of the same shape.
    """
    bits = (cosines + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 and 0 are a tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (0xFFFFFFFF - rows)


def _cosine_of(keys: torch.Tensor) -> torch.Tensor:
    """The float32 cosines in keys."""
    ordered = keys >> 32
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(torch.int32).view(torch.float32)
