"""Find exact nearest neighbours by cosine, with torch on any device.

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

TILE_QUERIES = 1024  # queries that are processed at a time
PAD = 8  # candidates beyond k
GROUP = 32  # neighbouring rows of which the largest product is found first
QUERIES_AT_ONCE = 16  # per product with candidates on a CPU: these stay in cache
ORTHOGONAL = 2.0**-40  # more than the rounding errors of a float64 product
UNUSED = torch.iinfo(torch.int64).min  # key of an empty slot


class Neighbours:
    """The k nearest rows of each query, among all rows added so far.

    Args:
        queries: (m, dim).
        k: number of neighbours.
        device: where to multiply.
        tile: queries processed at a time; 0 for `TILE_QUERIES`.
    """

    def __init__(
        self, queries: Float32, k: int, device: torch.device, tile: int = 0
    ) -> None:
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
            tile = slice(start, start + self._tile)
            # (queries, width) float32 cosines, largest first, and the rows that they are of.
            fast_cosines, candidates = largest_products(
                self._fast[tile], fast, width, self._memory
            )
            fast_cosines = fast_cosines.to(self._exact_device)
            candidates = candidates.to(self._exact_device)
            queries = self._queries[tile]
            keys = self._keys[tile]
            best = self._best_keys(
                keys,
                queries,
                rows=stored,
                lengths=lengths,
                fast_cosines=fast_cosines,
                candidates=candidates,
            )
            if fast_cosines.shape[1] < len(rows):
                # The last candidate could, by float32's error, be as near as the k-th neighbour: so
                # could rows that are no candidates.
                kth_cosines = _cosines_in(best[:, -1])
                is_doubtful = fast_cosines[:, -1] >= kth_cosines - self._error
                if is_doubtful.any():
                    unit_rows = stored.double() / lengths[:, None]
                    cosines = rounded(queries[is_doubtful] @ unit_rows.T)
                    row_numbers = torch.arange(
                        self._n, self._n + len(rows), device=cosines.device
                    )
                    new_keys = keys_of(cosines, row_numbers)
                    all_keys = torch.cat([keys[is_doubtful], new_keys], 1)
                    best[is_doubtful] = all_keys.topk(keys.shape[1]).values
            self._keys[tile] = best
        self._n += len(rows)

    def _best_keys(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor,
        *,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        fast_cosines: torch.Tensor,
        candidates: torch.Tensor,
    ) -> torch.Tensor:
        """Return the keys (queries, k) of the best among earlier ones and candidates.

        Args:
            keys: (queries, k) of the best so far.
            queries: (queries, dim) float64, of length 1.
            rows: (n, dim) as they were added.
            lengths: (n,) their lengths.
            fast_cosines: (queries, width) float32, largest first.
            candidates: (queries, width) the rows that these are of.
        """
        k = keys.shape[1]
        # The k-th best cosine is at least this, whatever float32's errors are.
        lower_bounds = torch.cat([_cosines_in(keys), fast_cosines - self._error], 1)
        kth_bound = lower_bounds.topk(k).values[:, -1:]
        is_open = fast_cosines >= kth_bound - self._error  # for a query the first columns
        n_open = is_open.sum(1)
        products = torch.zeros_like(fast_cosines, dtype=torch.float64)
        on_cpu = queries.device.type == "cpu"
        step = QUERIES_AT_ONCE if on_cpu else len(queries)
        for start in range(0, len(queries), step):
            batch = slice(start, start + step)
            columns = slice(0, int(n_open[batch].max()))
            chosen = rows[candidates[batch, columns]].double()  # (queries, columns, dim)
            products[batch, columns] = (chosen @ queries[batch, :, None])[..., 0]
        cosines = rounded(products / lengths[candidates])
        new_keys = torch.where(is_open, keys_of(cosines, candidates + self._n), UNUSED)
        return torch.cat([keys, new_keys], 1).topk(k).values

    def result(self) -> tuple[Float32, NDArray[np.int64]]:
        """Return cosines and row numbers (m, k), nearest first; ties by row."""
        rows = 0xFFFFFFFF - (self._keys & 0xFFFFFFFF)
        return _cosines_in(self._keys).cpu().numpy(), rows.cpu().numpy()


class Cosines:
    """Computes cosines of queries (m, dim) with rows that arrive batch by batch."""

    def __init__(self, queries: Float32, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._queries = unit(queries, self._device)

    def __call__(self, rows: Float32) -> Float32:
        """Return the cosines (m, n) with rows (n, dim)."""
        return rounded(self._queries @ unit(rows, self._device).T).cpu().numpy()


def unit(rows: Float32, device: torch.device) -> torch.Tensor:
    """Return rows (n, dim) in float64 with length 1; a row of zeros is unchanged, and has cosine 0
    with any other."""
    stored = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    return stored.double().div_(_lengths(stored)[:, None])


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    """Return the lengths (n,) in float64; 1 for a row of zeros."""
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return torch.where(lengths > 0, lengths, 1.0)


def largest_products(
    queries: torch.Tensor, rows: torch.Tensor, k: int, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest products of each query with the rows, and the indices of these rows.

    They are in the k groups of products with the largest maxima: a pass over the maxima of groups
    takes a third of the time of `topk`.

    Args:
        queries: (m, dim).
        rows: (n, dim).
        k: number of products; all are returned if there are fewer rows.
        memory: (m (n + GROUP),), overwritten.
    """
    m = len(queries)
    n = len(rows)
    width = -(-len(rows) // GROUP) * GROUP
    products = memory[: m * width].view(m, width)
    products[:, n:] = -torch.inf  # pads the last group
    torch.mm(queries, rows.T, out=products[:, :n])
    if n <= k * GROUP:
        return products[:, :n].topk(min(n, k))
    groups = products.unflatten(1, (-1, GROUP))
    best_groups = groups.amax(2).topk(k).indices  # (m, k)
    group_columns = best_groups[..., None].expand(-1, -1, GROUP)
    in_best_groups = groups.gather(1, group_columns).flatten(1)  # (m, k * GROUP)
    values, positions = in_best_groups.topk(k)
    first_rows = best_groups.gather(1, positions // GROUP) * GROUP
    return values, first_rows + positions % GROUP


def rounded(cosines: torch.Tensor) -> torch.Tensor:
    """Return cosines in float32; those of orthogonal vectors are 0, not a rounding error of the
    float64 product, so that they tie."""
    return torch.where(cosines.abs() < ORTHOGONAL, 0.0, cosines).float()


def keys_of(cosines: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that order by cosine, then lower row first.

    The cosine's bits are above the row's, so that one `topk` of whole numbers breaks ties.

    Args:
        cosines: float32, any shape.
        rows: row numbers, of the last axis or of the same shape.
    """
    bits = (cosines + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 and 0 are a tie
    # Of negative floats the larger bits are the smaller number: all but the sign are flipped.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (0xFFFFFFFF - rows)


def _cosines_in(keys: torch.Tensor) -> torch.Tensor:
    """Return the float32 cosines in keys; -inf for an empty slot."""
    ordered = keys >> 32
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(torch.int32)
    return torch.where(keys == UNUSED, -torch.inf, bits.view(torch.float32))
