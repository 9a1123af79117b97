"""Define the summaries of softmax attention over token grids.

Definitions, for A (queries by keys) of one image and one head. Queries are spatial, and means go
over them: entropy = -sum_k A ln A over all keys, in nats; prefix_mass = sum of A over prefix
keys; query_std = std over queries of A[q, k], mean over spatial keys; head_std = std over heads of
A[q, k], mean over spatial queries and keys (both with n - 1, as torch.std in the code of Walmer et
al. 2023, and 0 where there is one query or one head). distance_px, distance_unit and aligned take
A over spatial keys with its rows renormalised: a query without spatial mass is left out of them,
n_queries counts the others. distance_px_raw, the class token's row and the received mass use A
without renormalisation. received_max and received_argmax are the largest received mass, over all
keys, and its token (the first of equal ones). qk_nmi = [H(mean_q A') - mean_q H(A'_q)] / sqrt(ln Q
H(mean_q A')), with A' the renormalised rows and Q their number n_queries: the normalised mutual
information of queries and keys (Park et al. 2023), 0 where all queries attend alike, NaN for Q < 2
or H(mean_q A') = 0. Of clips distances and `aligned` are those of the places in the image, whatever
the time between them; distance_frames is the mean distance in time, in sampled frames, and
frame_mass the share of the keys of the query's own time, both of A over spatial keys with its rows
renormalised. A query that may attend to no key at all has no distribution: its image and head are
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

PER_IMAGE = (
    "distance_px",
    "distance_px_raw",
    "distance_unit",
    "prefix_mass",
    "entropy",
    "query_std",
    "n_queries",
    "received_max",
    "received_argmax",
    "qk_nmi",
    "head_std",
)

# For clips also these.
PER_CLIP = ("distance_frames", "frame_mass")


class AttentionScores(Protocol):
    """One attention call of the model, as far as summaries need it."""

    @property
    def n_images(self) -> int:
        """Number of images."""
        ...

    @property
    def n_heads(self) -> int:
        """Number of heads."""
        ...

    @property
    def n_tokens(self) -> int:
        """Number of tokens per image, prefix included."""
        ...

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """Return the scores before the softmax: (images, heads, tokens, tokens) float32, in
        `out`."""
        ...


@dataclass
class AttentionSummary:
    """One block's attention over one batch, on the model's device.

    Per image, float32 (images, heads): `distance_px`, `distance_unit` (NaN where no query has
    spatial mass), `distance_px_raw`, `prefix_mass`, `entropy`, `query_std`, `received_max` and
    `qk_nmi`; `n_queries` and `received_argmax` (a token, -1 where `received_max` is NaN) as int32;
    `head_std` (images,).
    Sums over the valid images, float64 where the device has it: `aligned` (heads, 2 gh - 1,
    2 gw - 1) by the offset key minus query, of total mass 1 per image; `cls_map` (heads, tokens),
    the class token's row, None without one; `received` (heads, tokens), the mean over queries.
    Of clips also `distance_frames` and `frame_mass`, NaN as `distance_px`, and the sum
    `aligned_frames` (heads, 2 times - 1), as `aligned` by the offset in time; None for images.
    On request: `head_mean` (images, tokens, tokens); `cls_rows` (None without a class token) and
    `received_rows` (images, heads, tokens); `full` (images, heads, tokens, tokens) float16.
    """

    distance_px: Tensor
    distance_px_raw: Tensor
    distance_unit: Tensor
    prefix_mass: Tensor
    entropy: Tensor
    query_std: Tensor
    n_queries: Tensor
    received_max: Tensor
    received_argmax: Tensor
    qk_nmi: Tensor
    head_std: Tensor
    aligned: Tensor
    cls_map: Tensor | None
    received: Tensor
    head_mean: Tensor | None = None
    cls_rows: Tensor | None = None
    received_rows: Tensor | None = None
    full: Tensor | None = None
    distance_frames: Tensor | None = None
    frame_mass: Tensor | None = None
    aligned_frames: Tensor | None = None


def distances(grid: tuple[int, int], step: tuple[float, float]) -> Tensor:
    """Return the Euclidean distance between all pairs of cells, (cells, cells) float64.

    Cells are in row-major order.

    `grid`: (rows, cols); `step`: the distance between neighbouring cells, (y, x).
    """
    gh, gw = grid
    cell = torch.arange(gh * gw)
    y = (cell // gw).double() * step[0]
    x = (cell % gw).double() * step[1]
    return torch.hypot(y[None, :] - y[:, None], x[None, :] - x[:, None])


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
    """Return `sum_by_offset` by one gather kernel on a GPU, without atomics; slow on a CPU."""
    # With queries in reverse order as the cells of a sliding window and keys as its positions, the
    # sum is `fold`.
    gh, gw = grid
    size = (2 * gh - 1, 2 * gw - 1)
    return torch.nn.functional.fold(pairs.flip(1), size, kernel_size=grid).squeeze(1)


@dataclass(frozen=True)
class GridDistances:
    """Distances between the cells of a grid, (cells, cells) float64."""

    px: Tensor  # in pixels
    unit: Tensor  # on the unit square
    # their ratio; None if it is not constant (grids or cells that are not square)
    unit_per_px: float | None


def grid_distances(
    grid: tuple[int, int], stride_px: tuple[float, float]
) -> GridDistances:
    """Return the distances in a grid whose cells are `stride_px` pixels (y, x) apart.

    On the unit square x = col / (gw - 1) and y = row / (gh - 1), as in the code of Walmer et al.
    2023, and 0 along an axis of length 1.
    """
    gh, gw = grid
    unit = distances(grid, (1.0 / max(gh - 1, 1), 1.0 / max(gw - 1, 1)))
    px = distances(grid, stride_px)
    ratio = float(unit.max() / px.max()) if px.max() > 0 else 1.0
    equal = torch.allclose(unit, px * ratio, rtol=1e-12)
    return GridDistances(px, unit, ratio if equal else None)
