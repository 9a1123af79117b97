"""Exact nearest neighbours by cosine, with torch on any device.

Cosines are float64 products rounded to float32; equal ones are ties, and the lower row comes first.
So neighbours and cosines do not depend on how the rows were split, nor on the device, up to a
float64 rounding error across a float32 boundary (about one similarity in 10^8).

A float32 product and `topk` find k + PAD candidates, whose cosines are recomputed in float64. Where
float32 rounding could hide a neighbour behind them (many equal or almost equal vectors), all
cosines of that query are computed in float64.

Cost: 2 n m d operations. Memory: 32 bytes per query and row of a tile, 12 d bytes per query.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.types import Float32

TILE_QUERIES = 1024
PAD = 8
GROUP = 32
PIECE = 16  # queries per product of candidates on a CPU: they stay in cache
ORTHOGONAL = 2.0**-40  # more than the rounding errors of a float64 product
UNUSED = torch.iinfo(torch.int64).min


class Neighbours:
    """The k nearest rows of each query, among all rows added so far."""

    def __init__(
        self, queries: Float32, k: int, device: torch.device, tile: int = 0
    ) -> None:
        """queries: (m, dim). tile: queries processed at a time."""
        # Metal has no float64: it computes only the first product.
        self._exact_device = torch.device("cpu") if device.type == "mps" else device
        self._device = device
        self._tile = tile or TILE_QUERIES
        self._queries = unit(queries, self._exact_device)
        self._fast = self._queries.float().to(device)
        shape = (len(queries), k)
        self._keys = torch.full(
            shape, UNUSED, dtype=torch.int64, device=self._exact_device
        )
        self._n = 0
        self._memory = self._fast.new_empty(0)
        # |error| of a float32 dot product of unit vectors, the rounding of both counted.
        self._error = (queries.shape[1] + 8) * 2.0**-24

    def add(self, rows: Float32) -> None:
        """Add the next rows, (n, dim)."""
        stored = torch.from_numpy(np.ascontiguousarray(rows)).to(self._exact_device)
        lengths = _lengths(stored)
        fast = (stored / lengths.float()[:, None]).to(self._device)
        width = self._keys.shape[1] + PAD
        size = min(self._tile, len(self._queries)) * (len(rows) + GROUP)
        if len(self._memory) < size:
            self._memory = fast.new_empty(size)
        for start in range(0, len(self._queries), self._tile):
            part = slice(start, start + self._tile)
            candidates = largest_products(self._fast[part], fast, width, self._memory)
            near, which = (x.to(self._exact_device) for x in candidates)
            queries = self._queries[part]
            keys = self._keys[part]
            best = self._best(keys, queries, stored, lengths, near, which)
            if near.shape[1] < len(rows):
                hidden = near[:, -1] >= _cosines_in(best[:, -1]) - self._error
                if hidden.any():
                    cosines = rounded(
                        queries[hidden] @ (stored.double() / lengths[:, None]).T
                    )
                    numbers = torch.arange(
                        self._n, self._n + len(rows), device=cosines.device
                    )
                    every = torch.cat([keys[hidden], keys_of(cosines, numbers)], 1)
                    best[hidden] = every.topk(keys.shape[1]).values
            self._keys[part] = best
        self._n += len(rows)

    def _best(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        near: torch.Tensor,
        which: torch.Tensor,
    ) -> torch.Tensor:
        """The best k among `keys` and the rows `which`, whose float32 cosines are `near`."""
        k = keys.shape[1]
        at_least = (
            torch.cat([_cosines_in(keys), near - self._error], 1).topk(k).values[:, -1:]
        )
        open_ = near >= at_least - self._error  # for a query the first columns
        products = torch.zeros_like(near, dtype=torch.float64)
        n_open = open_.sum(1)
        step = PIECE if queries.device.type == "cpu" else len(queries)
        for start in range(0, len(queries), step):
            some = slice(start, start + step)
            first = slice(0, int(n_open[some].max()))
            exact = rows[which[some, first]].double() @ queries[some, :, None]
            products[some, first] = exact[..., 0]
        new = keys_of(rounded(products / lengths[which]), which + self._n)
        return torch.cat([keys, torch.where(open_, new, UNUSED)], 1).topk(k).values

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Cosines and row numbers (m, k), nearest first; ties by row."""
        rows = 0xFFFFFFFF - (self._keys & 0xFFFFFFFF)
        return _cosines_in(self._keys).cpu().numpy(), rows.cpu().numpy()


class Cosines:
    """Cosines of queries (m, dim) with rows that arrive piece by piece."""

    def __init__(self, queries: Float32, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._queries = unit(queries, self._device)

    def __call__(self, rows: Float32) -> Float32:
        """(m, n) with rows (n, dim)."""
        return rounded(self._queries @ unit(rows, self._device).T).cpu().numpy()


def unit(rows: Float32, device: torch.device) -> torch.Tensor:
    """(n, dim) float64 of length 1; a row of zeros is unchanged, and has cosine 0 with
    everything."""
    stored = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    return stored.double().div_(_lengths(stored)[:, None])


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    """(n,) float64 lengths; 1 for a row of zeros."""
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return torch.where(lengths > 0, lengths, 1.0)


def largest_products(
    queries: torch.Tensor, rows: torch.Tensor, k: int, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest products of each query (m, dim) with rows (n, dim), and their rows; all
    products if there are fewer rows.

    They are in the k groups of products with the largest maxima: a pass over the maxima of groups
    takes a third of the time of `topk`. memory: (m (n + GROUP),) is overwritten.
    """
    m = len(queries)
    n = len(rows)
    width = -(-len(rows) // GROUP) * GROUP
    near = memory[: m * width].view(m, width)
    near[:, n:] = -torch.inf
    torch.mm(queries, rows.T, out=near[:, :n])
    if n <= k * GROUP:
        return near[:, :n].topk(min(n, k))
    groups = near.unflatten(1, (-1, GROUP))
    first = groups.amax(2).topk(k).indices
    values, places = (
        groups.gather(1, first[..., None].expand(-1, -1, GROUP)).flatten(1).topk(k)
    )
    return values, first.gather(1, places // GROUP) * GROUP + places % GROUP


def rounded(cosines: torch.Tensor) -> torch.Tensor:
    """Cosines in float32; those of orthogonal vectors 0, which float32 alone would not give."""
    return torch.where(cosines.abs() < ORTHOGONAL, 0.0, cosines).float()


def keys_of(cosines: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64 that order as (cosine, then lower row first): the cosine's bits above the row's.

    cosines: float32, any shape; rows: of the last axis, or of the same shape.
    """
    bits = (cosines + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 and 0 are a tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (0xFFFFFFFF - rows)


def _cosines_in(keys: torch.Tensor) -> torch.Tensor:
    """The float32 cosines in keys; -inf for an empty slot."""
    ordered = keys >> 32
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(torch.int32)
    return torch.where(keys == UNUSED, -torch.inf, bits.view(torch.float32))
