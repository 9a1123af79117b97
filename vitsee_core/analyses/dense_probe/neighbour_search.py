"""The nearest patches of a bank: by cosine, or by Euclidean distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.types import Float, Float32, Integers

COSINE, L2 = DISTANCES = ("cosine", "l2")
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Scaling:
    """(dim,) what is taken off features, and what they are multiplied by."""

    mean: Float
    factor: Float

    @classmethod
    def none(cls, dim: int) -> Scaling:
        """Features as they are."""
        return cls(np.zeros(dim), np.ones(dim))

    @classmethod
    def of(cls, tokens: Float32) -> Scaling:
        """Mean 0 and standard deviation 1 over tokens (n, dim); constant features become 0."""
        mean, std = tokens.mean(0, dtype=np.float64), tokens.std(0, dtype=np.float64)
        return cls(mean, np.divide(1, std, out=np.zeros_like(std), where=std > 0))

    def __call__(self, tokens: Float | Float32) -> Float:
        """(..., dim) scaled."""
        found: Float = (tokens - self.mean) * self.factor
        return found


@dataclass(frozen=True)
class Search:
    """The patches of a bank, scaled: (n, dim); device: of the products."""

    rows: Float32
    scaling: Scaling
    device: str
    distance: str = COSINE

    def nearest(self, tokens: Float, k: int) -> tuple[Float32, Integers]:
        """Closeness and rows (cells, k), nearest first; tokens: (rows, cols, dim). Closeness is the
        cosine, with ties by row, or minus the squared distance."""
        from vitsee_core.kernels.neighbours import Neighbours
        from vitsee_core.runtime.device import resolve_device

        queries = self.scaling(tokens.reshape(-1, tokens.shape[-1])).astype(np.float32)
        device = resolve_device(self.device)
        if self.distance == L2:
            return _nearest_by_l2(queries, self.rows, k, device)
        found = Neighbours(queries, k, device)
        found.add(self.rows)
        return found.result()


def _nearest_by_l2(
    queries: Float32, rows: Float32, k: int, device: object
) -> tuple[Float32, Integers]:
    """Minus |q - r|^2 = 2 qr - |q|^2 - |r|^2, in float64, some rows at a time."""
    import torch

    assert isinstance(device, torch.device)
    exact = torch.device("cpu") if device.type == "mps" else device  # Metal has no float64
    q = torch.from_numpy(queries).to(exact).double()
    best = q.new_empty(len(q), 0)
    which = torch.empty(len(q), 0, dtype=torch.int64, device=exact)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        r = torch.from_numpy(rows[start : start + ROWS_AT_ONCE]).to(exact).double()
        close = 2 * q @ r.T - (r**2).sum(1) - (q**2).sum(1)[:, None]
        near = close.topk(min(k, len(r)), dim=1)
        values = torch.cat([best, near.values], 1)
        numbers = torch.cat([which, near.indices + start], 1)
        best, places = values.topk(min(k, values.shape[1]), dim=1)
        which = numbers.gather(1, places)
    return best.float().cpu().numpy(), which.cpu().numpy()
