"""Distances and offsets between the cells of a token grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def distances(grid: tuple[int, int], step: tuple[float, float]) -> Tensor:
    """Euclidean distance between all pairs of cells: (cells, cells) float64, cells row-major.

    `grid`: (rows, cols); `step`: the distance between neighbouring cells, (y, x).
    """
    gh, gw = grid
    cell = torch.arange(gh * gw)
    y, x = (cell // gw).double() * step[0], (cell % gw).double() * step[1]
    return torch.hypot(y[None, :] - y[:, None], x[None, :] - x[:, None])


def unit_step(grid: tuple[int, int]) -> tuple[float, float]:
    """The step of a grid on the unit square, x = col / (gw - 1) and y = row / (gh - 1).

    The coordinates of the code of Walmer et al. 2023; an axis of length 1 has coordinate 0.
    """
    gh, gw = grid
    return 1.0 / max(gh - 1, 1), 1.0 / max(gw - 1, 1)


def sum_by_offset(pairs: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sum a query-by-key map over all pairs of cells with the same offset.

    `pairs`: (heads, cells, cells), query by key. Returns (heads, 2 gh - 1, 2 gw - 1) of the same
    dtype: [h, gh - 1 + dy, gw - 1 + dx] is the sum over pairs whose key minus query is (dy, dx).
    """
    gh, gw = grid
    if pairs.device.type == "cuda":
        return _sum_by_offset_fold(pairs, grid)
    n_heads = pairs.shape[0]
    # One axis at a time by shifted additions: a query's keys are shifted by its row, then by its
    # column. gh + gw additions of long runs; a scatter of single elements takes longer.
    by_row = pairs.new_zeros(n_heads, gw, 2 * gh - 1, gw)
    keys = pairs.reshape(n_heads, gh, gw, gh, gw)
    for row in range(gh):
        by_row[:, :, gh - 1 - row : 2 * gh - 1 - row] += keys[:, row]
    out = pairs.new_zeros(n_heads, 2 * gh - 1, 2 * gw - 1)
    for col in range(gw):
        out[..., gw - 1 - col : 2 * gw - 1 - col] += by_row[:, col]
    return out


def _sum_by_offset_fold(pairs: Tensor, grid: tuple[int, int]) -> Tensor:
    # With queries in reverse order as the cells of a sliding window and keys as its positions,
    # the sum is `fold`: one gather kernel on a GPU (no atomics), but slow on a CPU.
    gh, gw = grid
    size = (2 * gh - 1, 2 * gw - 1)
    return torch.nn.functional.fold(pairs.flip(1), size, kernel_size=grid).squeeze(1)


@dataclass(frozen=True)
class GridDistances:
    """Distances between the cells of a grid, (cells, cells) float64."""

    px: Tensor  # in pixels
    unit: Tensor  # on the unit square
    unit_per_px: float | None  # their ratio, None if it is not constant (non-square grids or cells)


def grid_distances(grid: tuple[int, int], stride_px: tuple[float, float]) -> GridDistances:
    """Distances in a grid whose cells are `stride_px` pixels (y, x) apart."""
    px, unit = distances(grid, stride_px), distances(grid, unit_step(grid))
    ratio = float(unit.max() / px.max()) if px.max() > 0 else 1.0
    equal = torch.allclose(unit, px * ratio, rtol=1e-12)
    return GridDistances(px, unit, ratio if equal else None)
