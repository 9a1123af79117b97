"""Cosines by torch, on any device: as `HostCosines`, for work that deserves its import."""

from __future__ import annotations

import torch

from vitsee_core.labelled.gpu_neighbours import rounded
from vitsee_core.types import Float32


class DeviceCosines:
    """Cosines of some queries with rows that come piece by piece."""

    def __init__(self, queries: Float32, device: torch.device) -> None:
        """Queries: (m, dim)."""
        # Metal has no float64.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._queries = _unit(torch.from_numpy(queries).to(self._device, torch.float64))
        self._buffer = self._queries.new_empty((0, queries.shape[1]))

    def __call__(self, rows: Float32) -> Float32:
        """(m, n) with rows (n, dim)."""
        if len(self._buffer) < len(rows):
            self._buffer = self._buffer.new_empty((len(rows), rows.shape[1]))
        exact = self._buffer[: len(rows)].copy_(torch.from_numpy(rows))
        length = torch.linalg.vector_norm(exact, dim=1)
        products = self._queries @ exact.T
        found: Float32 = rounded(products.div_(torch.where(length > 0, length, 1.0))).cpu().numpy()
        return found


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Of length 1; a row of zeros stays, and has cosine 0 with everything."""
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, 1.0)
