"""CNN stages made comparable: every stage's feature map is converted to the last stage's grid.

For CNNs, whose stages differ in channels and resolution, Raghu et al. 2021 (appendix A) split a
feature map into patches, flatten each, and pool to the last stage's grid; patch sizes are not
given. The rule here (`match_last_stage`): patches of p x p cells with the largest p such that
channels x p^2 is at most the last stage's channels and p divides the grid without leaving fewer
cells than the last stage has, then adaptive average pooling to the last stage's grid. ResNet-50: p
= 2, 2, 1, 1. If nothing needs conversion (every ViT) the tokens stay unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.types import Float32
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


@dataclass(frozen=True)
class Matching:
    """Conversion of a grid to the last stage's: patches of `patch` cells, then `grid` cells."""

    patch: int
    grid: tuple[int, int]

    def apply(self, maps: Float32) -> Float32:
        """(images, cells, channels) of maps (images, rows, cols, channels); of clips (clips, times,
        rows, cols, channels) each time by itself."""
        each = maps.reshape(-1, *maps.shape[-3:])
        cells = adaptive_average(flatten_patches(each, self.patch), self.grid)
        return cells.reshape(len(maps), -1, cells.shape[-1])


def match_last_stage(store: Store, site: SiteSpec) -> Matching | None:
    """A site's conversion to the last stage's grid; None if it needs none.

    Raises:
        MissingInput: the store lacks the output of the last block.
    """
    layout = site.layout
    if layout is None or layout.grid is None or layout.n_prefix:
        return None
    last = _last_stage(store)
    assert last.layout is not None
    grid, target = layout.grid, last.layout.grid
    if target is None:
        return None
    patch = largest_patch(site.dim, grid, last.dim, target)
    return None if patch == 1 and grid == target else Matching(patch, target)


def _last_stage(store: Store) -> SiteSpec:
    """The output of the model's last block."""
    outs = [s for s in store.sites.values() if "blocks" in s.groups and s.layout is not None]
    if not outs or outs[-1].rel_depth != 1 or outs[-1].layout is None:
        raise MissingInput(
            f"{store.label} lacks the output of the last block, whose grid and channels "
            "--match-last-stage needs; extract it with --sites blocks"
        )
    return outs[-1]


def largest_patch(dim: int, grid: tuple[int, int], last_dim: int, last: tuple[int, int]) -> int:
    """The largest p with dim x p^2 <= last_dim that divides the grid and leaves at least as many
    cells each way as the last stage has; 1 if there is none."""
    (rows, cols), (last_rows, last_cols) = grid, last
    return max(
        (
            p
            for p in range(2, math.isqrt(max(last_dim // dim, 1)) + 1)
            if rows % p == cols % p == 0 and rows // p >= last_rows and cols // p >= last_cols
        ),
        default=1,
    )


def flatten_patches(maps: Float32, patch: int) -> Float32:
    """(images, rows / p, cols / p, p * p * channels) of maps (images, rows, cols, channels)."""
    n, rows, cols, dim = maps.shape
    cut = maps.reshape(n, rows // patch, patch, cols // patch, patch, dim)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows // patch, cols // patch, -1)


def adaptive_average(maps: Float32, grid: tuple[int, int]) -> Float32:
    """Maps (images, rows, cols, channels) averaged to `grid` cells: cell i of k is the mean of the
    rows from floor(i n / k) to ceil((i + 1) n / k), like torch's adaptive average pooling."""
    out = maps
    for axis, k in zip((1, 2), grid, strict=True):
        n = out.shape[axis]
        if n == k:
            continue
        bins = [slice(i * n // k, -(-(i + 1) * n // k)) for i in range(k)]
        means = [out[(slice(None),) * axis + (b,)].mean(axis=axis, keepdims=True) for b in bins]
        out = np.concatenate(means, axis=axis)
    return out
