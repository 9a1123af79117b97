"""A tile of every Gram matrix on a GPU, and its sums, which are copied to the host together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.runtime.device import to_device

if TYPE_CHECKING:
    from torch import Tensor

Labels = NDArray[np.int64]
# Elements of sums that may wait on the device: 128 MB.
MOST_WAITING = 1 << 24


class DeviceTiles:
    """Memory for one tile (matrices, rows, cols) float32 at a time."""

    def __init__(self, device: str, n: int) -> None:
        self._device = torch.device(device)
        self._memory = torch.empty(n, device=self._device)

    def shaped(self, *shape: int) -> Tensor:
        """Memory for the next tile; the previous one is lost."""
        return self._memory[: int(np.prod(shape))].view(shape)

    def put(self, values: Tensor, k: int, block: Any) -> None:
        """Set one matrix's block, from this device or from the host."""
        values[k] = block if isinstance(block, torch.Tensor) else to_device(block, self._device)

    def without_diagonals(self, values: Tensor) -> NDArray[Any]:
        """(matrices, rows) diagonals of a square tile, which are then set to zero."""
        diagonals = values.diagonal(dim1=1, dim2=2)
        on_host: NDArray[Any] = diagonals.cpu().numpy().copy()
        diagonals.zero_()
        return on_host

    def sums(
        self, values: Tensor, pieces: Sequence[tuple[Labels, Labels]], n_rows: int, first_col: int
    ) -> Iterator[tuple[Any, ...]]:
        """The sums of each piece (rows and columns of the tile): (R, C) inner products, each
        matrix's own, sums over its columns and over its rows, in float64. At most `TERMS` products
        (see `hsic.Totals`) are added in float32; there is no synchronisation in between."""
        waiting: list[tuple[Tensor, ...]] = []
        size = 0
        for rows, cols in pieces:
            block = self._cut(values, rows, cols)
            part = block.flatten(1)
            none = part.new_zeros(len(part))
            waiting.append(
                (
                    (part[:n_rows] @ part[first_col:].T).double(),
                    (torch.linalg.vecdot(part, part) if first_col else none).double(),
                    block.sum(2, dtype=torch.float64),
                    block.sum(1, dtype=torch.float64),
                )
            )
            size += sum(x.numel() for x in waiting[-1])
            if size > MOST_WAITING:
                yield from _fetched(waiting)
                waiting, size = [], 0
        yield from _fetched(waiting)

    def _cut(self, values: Tensor, rows: Labels, cols: Labels) -> Tensor:
        """values[:, rows][:, :, cols], contiguous; runs become slices."""
        a, b = (slice(int(p[0]), int(p[-1]) + 1) for p in (rows, cols))
        if a.stop - a.start == len(rows) and b.stop - b.start == len(cols):
            return values[:, a, b].contiguous()
        flat = (rows[:, np.newaxis] * values.shape[2] + cols).ravel()
        places = to_device(flat, self._device)
        return values.flatten(1).index_select(1, places).view(len(values), len(rows), len(cols))


def _fetched(waiting: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Any, ...]]:
    """The sums on the host, in one copy."""
    if not waiting:
        return
    host = torch.cat([x.flatten() for sums in waiting for x in sums]).cpu().numpy()
    at = 0
    for sums in waiting:
        arrays = []
        for x in sums:
            arrays.append(host[at : at + x.numel()].reshape(x.shape))
            at += x.numel()
        yield tuple(arrays)
