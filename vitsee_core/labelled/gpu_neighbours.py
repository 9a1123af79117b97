"""The search of `neighbours` on a GPU, by torch.

Each tile of similarities is first made in float32, where it costs half; what could then reach the
k nearest (float32's error considered) is computed again in float64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.labelled.exact_cosines import ORTHOGONAL, parts_of_keys
from vitsee_core.types import Float32

TILE_QUERIES = 1024
# Beyond this share of a tile one product of all of it is cheaper than many single ones.
FEW = 1 / 50
PIECE = 512  # vectors multiplied at a time: they stay in cache
UNUSED = torch.iinfo(torch.int64).min


class GpuNeighbours:
    """`Neighbours` as few kernels."""

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
        return parts_of_keys(self._keys.cpu().numpy())


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
