"""Where in a target image the feature of a source keypoint is found again.

Features are never upsampled. A feature between tokens is f = sum_i w_i t_i, t_i the unit vectors of
the four tokens around it and w_i bilinear weights, so that for a source vector s

    s.f = sum_i w_i (s.t_i),        |f|^2 = sum_ij w_i w_j (t_i.t_j)

The first is the interpolation of the similarities at the tokens; the second needs the products of
neighbouring tokens only and is the same for all keypoints. With dim channels this is dim times less
work than interpolating features, and exact.

`vit_analysis` leaves |f| out. What remains is bilinear between the centres of tokens, and such a
function has its largest value at a corner: of all pixels only those next to the centres of tokens,
and the first of each border, can be chosen, and only those are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vitsee_core.analyses.keypoints.candidates import CandidateAxis, Cells
from vitsee_core.types import Float

# Values of one piece of similarities: they stay in a core's cache.
PIECE_VALUES = 1 << 20
PIECE_VALUES_GPU = 1 << 26
SAMPLED_AT_ONCE = 64
LEAST_SQUARE = 1e-6  # of |f|: opposite tokens cancel, and no direction is left


def sample(
    tokens: torch.Tensor, cells: tuple[Cells, Cells], at: Float, match: str, size: tuple[int, int]
) -> torch.Tensor:
    """(points, dim) features at points of an image; their length is meaningless.

    Args:
        tokens: (rows, cols, dim) unit vectors.
        cells: rows and columns.
        at: (points, 2) x, y in pixels.
        match: one of `protocol.MATCHES`.
        size: of the input, (height, width).
    """
    xy = at
    if match == "vit_analysis":
        last = np.array(size[::-1]) - 1
        xy = np.clip(np.stack([np.trunc(at[:, 0]), np.rint(at[:, 1])], 1), 0, last)
    down, across = (
        _weights(axis.nearest(xy[:, i]) if match == "token" else axis.weights(xy[:, i]), tokens)
        for axis, i in zip(cells, (1, 0), strict=True)
    )
    features = []
    for row, col in zip(down.split(SAMPLED_AT_ONCE), across.split(SAMPLED_AT_ONCE), strict=True):
        lines = torch.tensordot(row, tokens, dims=1)
        features.append(torch.linalg.vecdot(lines, col.unsqueeze(2), dim=1))
    return torch.cat(features)


def unit(tokens: torch.Tensor) -> torch.Tensor:
    """(..., dim) tokens in float32, scaled to length 1; zero stays zero."""
    return torch.nn.functional.normalize(tokens.to(torch.float32), dim=-1)


def find(
    sources: torch.Tensor,
    tokens: torch.Tensor,
    rows: CandidateAxis,
    cols: CandidateAxis,
    match: str,
) -> Float:
    """(points, 2) x, y of the candidate most similar to each source; of equal ones the first, by
    row.

    Args:
        sources: (points, dim).
        tokens: (rows, cols, dim) unit vectors of the target image.
        rows: candidates downwards.
        cols: candidates across.
        match: one of `protocol.MATCHES`.
    """
    down, across = (_weights(axis.weights, tokens) for axis in (rows, cols))
    scale = _inverse_norms(tokens, down, across) if match == "smooth" else None
    grid, flat = tokens.shape[:2], tokens.flatten(0, 1)
    places = [
        _best(piece, flat, grid, down, across, scale)
        for piece in _pieces(sources, len(rows.at) * len(cols.at))
    ]
    col, row = torch.cat(places, 1).cpu().numpy()
    return np.stack([cols.at[col], rows.at[row]], 1)


def _best(
    sources: torch.Tensor,
    flat: torch.Tensor,
    grid: torch.Size,
    down: torch.Tensor,
    across: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """(2, points) column and row of the best of all candidates, on the device; flat: (tokens,
    dim)."""
    similar = (sources @ flat.T).view(-1, grid[1]) @ across.T
    values = torch.matmul(down, similar.view(len(sources), grid[0], -1))
    if scale is not None:
        values *= scale
    # The largest value of each row, then in the best row: argmax alone is ten times slower.
    row = values.amax(2).argmax(1)
    col = values[torch.arange(len(row), device=row.device), row].argmax(1)
    return torch.stack([col, row])


def _weights(weights: Float, tokens: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(weights.astype(np.float32)).to(tokens.device)


def _pieces(sources: torch.Tensor, n_candidates: int) -> Iterator[torch.Tensor]:
    values = PIECE_VALUES if sources.device.type == "cpu" else PIECE_VALUES_GPU
    yield from sources.split(max(1, values // n_candidates))


def _inverse_norms(tokens: torch.Tensor, down: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """(candidate rows, candidate cols) 1 / |f|, 0 where f is 0. down, across: weights."""

    def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vecdot(a, b)

    down2, across2 = down**2, across**2
    # Weights of neighbours' products: both tokens between which a position lies.
    down11, across11 = (2 * w[:, :-1] * w[:, 1:] for w in (down, across))
    right = products(tokens[:, :-1], tokens[:, 1:])
    below = products(tokens[:-1], tokens[1:])
    diagonals = products(tokens[:-1, :-1], tokens[1:, 1:])
    diagonals = (diagonals + products(tokens[:-1, 1:], tokens[1:, :-1])) / 2
    square = down2 @ products(tokens, tokens) @ across2.T
    square += down2 @ right @ across11.T
    square += down11 @ below @ across2.T
    square += down11 @ diagonals @ across11.T
    return torch.where(square > LEAST_SQUARE, square.clamp_min(LEAST_SQUARE).rsqrt(), 0)
