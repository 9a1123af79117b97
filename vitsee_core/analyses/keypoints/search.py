"""The keypoints of all pairs at one site, in two passes over the store.

The first takes the feature of each source keypoint, the second looks for them in the target images.
Memory: one slab of the site as it is stored, one image in float32, the features of the distinct
source keypoints (6,000 of SPair-71k's test split), and a piece of similarities.

With a `map` of `Execution`, each process searches at one site, or, where sites are fewer than the
processes, at one site in one range of target images; the sources of a range are read for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.analyses.keypoints.candidates import (
    CandidateAxis,
    TokenAxis,
    candidate_axes,
    token_axes,
)
from vitsee_core.features.matrix import not_finite
from vitsee_core.runtime.device import precision_context, resolve_device, to_device
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.truth.labels.labelled_rows import random_features
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.analyses.keypoints.positions import LocatedKeypoints
    from vitsee_stores import SiteSpec, Slab, Store


# ---------------------------------------------------------------- matching
#
# Where in a target image the feature of a source keypoint is found again.
#
# Features are never upsampled. A feature between tokens is f = sum_i w_i t_i, t_i the unit vectors
# of the four tokens around it and w_i bilinear weights, so that for a source vector s
#
#     s.f = sum_i w_i (s.t_i),        |f|^2 = sum_ij w_i w_j (t_i.t_j)
#
# The first is the interpolation of the similarities at the tokens; the second needs the products of
# neighbouring tokens only and is the same for all keypoints. With dim channels this is dim times
# less work than interpolating features, and exact.
#
# `vit_analysis` leaves |f| out. What remains is bilinear between the centres of tokens, and such a
# function has its largest value at a corner: of all pixels only those next to the centres of
# tokens, and the first of each border, can be chosen, and only those are looked at.


# Similarities computed at a time: on a CPU they stay in a core's cache.
PIECE_VALUES = 1 << 20
PIECE_VALUES_GPU = 1 << 26
SAMPLED_AT_ONCE = 64  # points; each takes a row of tokens in between
MIN_SQUARED_NORM = 1e-6  # |f|^2: opposite tokens cancel, and no direction is left


def sample_features(
    tokens: torch.Tensor,
    axes: tuple[TokenAxis, TokenAxis],
    points: Float,
    match: str,
    input_size: tuple[int, int],
) -> torch.Tensor:
    """Return the features at points of an image: (points, dim), of any length.

    Args:
        tokens: (rows, cols, dim) unit vectors.
        axes: rows and columns of the grid.
        points: (points, 2) x, y in pixels.
        match: one of `protocol.MATCHES`.
        input_size: (height, width) in pixels.
    """
    xy = points
    if match == "vit_analysis":
        # As in the released code: x is truncated, y rounded.
        last_pixel = np.array(input_size[::-1]) - 1
        pixels = np.stack([np.trunc(points[:, 0]), np.rint(points[:, 1])], axis=1)
        xy = np.clip(pixels, 0, last_pixel)
    row_axis, col_axis = axes
    if match == "token":
        row_weights = row_axis.nearest_weights(xy[:, 1])
        col_weights = col_axis.nearest_weights(xy[:, 0])
    else:
        row_weights = row_axis.bilinear_weights(xy[:, 1])
        col_weights = col_axis.bilinear_weights(xy[:, 0])
    features = []
    for down, across in zip(
        _weights_like(row_weights, tokens).split(SAMPLED_AT_ONCE),
        _weights_like(col_weights, tokens).split(SAMPLED_AT_ONCE),
        strict=True,
    ):
        token_rows = torch.tensordot(down, tokens, dims=1)  # (points, cols, dim)
        features.append(torch.linalg.vecdot(token_rows, across.unsqueeze(2), dim=1))
    return torch.cat(features)


def unit_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return (..., dim) tokens in float32, scaled to length 1; zero stays zero."""
    return torch.nn.functional.normalize(tokens.to(torch.float32), dim=-1)


def find_matches(
    sources: torch.Tensor,
    tokens: torch.Tensor,
    rows: CandidateAxis,
    cols: CandidateAxis,
    match: str,
) -> Float:
    """Return x, y of the candidate most similar to each source: (points, 2).

    Of equal candidates it is the first, by row.

    Args:
        sources: (points, dim).
        tokens: (rows, cols, dim) unit vectors of the target image.
        rows: candidates downwards.
        cols: candidates across.
        match: one of `protocol.MATCHES`.
    """
    down = _weights_like(rows.weights, tokens)  # (candidate rows, rows)
    across = _weights_like(cols.weights, tokens)  # (candidate cols, cols)
    inverse_norms = None
    if match == "smooth":
        inverse_norms = _inverse_norms(tokens, down, across)
    height, width, _ = tokens.shape
    max_values = PIECE_VALUES if sources.device.type == "cpu" else PIECE_VALUES_GPU
    n_candidates = len(rows.positions) * len(cols.positions)
    best_indices = []
    for piece in sources.split(max(1, max_values // n_candidates)):
        # Similarities at tokens, interpolated along rows, then along columns.
        at_tokens = (piece @ tokens.flatten(0, 1).T).view(-1, width)
        along_rows = (at_tokens @ across.T).view(len(piece), height, -1)
        similarities = torch.matmul(down, along_rows)  # (points, candidate rows, cols)
        if inverse_norms is not None:
            similarities *= inverse_norms
        # The largest value of each row, then in the best row: argmax alone is ten times slower.
        row = similarities.amax(2).argmax(1)
        points = torch.arange(len(row), device=row.device)
        col = similarities[points, row].argmax(1)
        best_indices.append(torch.stack([col, row]))
    best_col, best_row = torch.cat(best_indices, 1).cpu().numpy()
    return np.stack([cols.positions[best_col], rows.positions[best_row]], axis=1)


def _weights_like(weights: Float, tokens: torch.Tensor) -> torch.Tensor:
    """Return weights in float32 on the tokens' device."""
    return torch.from_numpy(weights.astype(np.float32)).to(tokens.device)


def _inverse_norms(
    tokens: torch.Tensor, down: torch.Tensor, across: torch.Tensor
) -> torch.Tensor:
    """Return 1 / |f| of each candidate, 0 where f is 0: (candidate rows, candidate cols).

    The sum over pairs of the four tokens around a position is separable: products of a token with
    itself, with its right and lower neighbours, and across a cell's diagonals.

    Args:
        tokens: (rows, cols, dim) unit vectors.
        down: (candidate rows, rows) bilinear weights.
        across: (candidate cols, cols) bilinear weights.
    """
    dot = torch.linalg.vecdot
    # Products of tokens: (rows, cols), one less along an axis of neighbours.
    itself = dot(tokens, tokens)
    right = dot(tokens[:, :-1], tokens[:, 1:])
    below = dot(tokens[:-1], tokens[1:])
    falling = dot(tokens[:-1, :-1], tokens[1:, 1:])
    rising = dot(tokens[:-1, 1:], tokens[1:, :-1])
    diagonals = (falling + rising) / 2
    # w_i^2, and 2 w_i w_(i + 1): both tokens between which a position lies.
    down_squares = down**2
    across_squares = across**2
    down_neighbours = 2 * down[:, :-1] * down[:, 1:]
    across_neighbours = 2 * across[:, :-1] * across[:, 1:]
    squared = down_squares @ itself @ across_squares.T
    squared += down_squares @ right @ across_neighbours.T
    squared += down_neighbours @ below @ across_squares.T
    squared += down_neighbours @ diagonals @ across_neighbours.T
    inverse = squared.clamp_min(MIN_SQUARED_NORM).rsqrt()
    return torch.where(squared > MIN_SQUARED_NORM, inverse, 0)


# ---------------------------------------------------------------- the two passes


ALL_ROWS = slice(0, None)


def search(
    store: Store,
    site: SiteSpec,
    located: LocatedKeypoints,
    match: str,
    *,
    device: torch.device,
    target_rows: slice = ALL_ROWS,
    noise_seed: int | None = None,
    progress: Progress = SILENT,
) -> Float:
    """Return x, y on the input where each keypoint is found: (points, 2).

    Args:
        store: holds the images.
        site: with a grid.
        located: the keypoints.
        match: one of `protocol.MATCHES`.
        device: computes the products.
        target_rows: rows of the store: only these images are searched, the others give NaN.
        noise_seed: search standard normal features of this seed instead of the store's.
        progress: advanced by `n_images(located, target_rows)`.

    Raises:
        VitseeError: a number in the store is not finite.
    """
    layout = site.layout
    assert layout is not None
    axes = token_axes(layout)
    # Distinct source keypoints: an image is the source of many pairs.
    source_rows = located.source_row[located.pair_index]
    keys = np.concatenate([source_rows[:, None], located.source_xy], axis=1)
    sources, source_index = np.unique(keys, axis=0, return_inverse=True)  # (sources, 3)
    bank = torch.zeros(len(sources), site.dim, device=device)
    predicted = np.full_like(located.target_xy, np.nan)
    searched = _searched_pairs(located, target_rows)
    read_images = partial(
        _read_images, store, site, device=device, progress=progress, noise_seed=noise_seed
    )
    with precision_context(device, "fp32"):
        for row, tokens in read_images(located.source_row[searched]):
            # All sources of the image, whatever the target rows: products of fewer points have
            # other last digits.
            indices = np.flatnonzero(sources[:, 0] == row)
            features = sample_features(
                tokens, axes, sources[indices, 1:], match, located.input_size
            )
            bank[torch.from_numpy(indices).to(device)] = features
        groups = located.search_groups()
        group_rows = np.array([group.row for group in groups], np.int64)
        for row, tokens in read_images(located.target_row[searched]):
            for i in np.flatnonzero(group_rows == row):
                points = groups[i].points
                rows, cols = candidate_axes(
                    layout, located.input_size, groups[i].window, match
                )
                features = bank[torch.from_numpy(source_index[points]).to(device)]
                predicted[points] = find_matches(features, tokens, rows, cols, match)
    return predicted


def n_images(located: LocatedKeypoints, target_rows: slice = ALL_ROWS) -> int:
    """Return the number of images that a search reads: sources, then targets."""
    searched = _searched_pairs(located, target_rows)
    n_sources = len(np.unique(located.source_row[searched]))
    return n_sources + len(np.unique(located.target_row[searched]))


def _searched_pairs(located: LocatedKeypoints, target_rows: slice) -> Mask:
    """Return which pairs have their target in these rows of the store: (pairs,)."""
    rows = located.target_row
    return (rows >= (target_rows.start or 0)) & (rows < (target_rows.stop or np.inf))


def split_target_rows(store: Store, n_sites: int, execution: Execution) -> list[slice]:
    """Return ranges of whole slabs, enough that with the sites all processes are busy.

    Args:
        store: the store whose rows are divided.
        n_sites: number of sites, each searched in every range.
        execution: the number of processes.
    """
    if execution.map is None:
        return [ALL_ROWS]
    n_per_site = -(-execution.width // n_sites)  # rounded up
    n_ranges = min(store.n_slabs, n_per_site)
    edges = [
        int(slab) * store.plan.slab
        for slab in np.linspace(0, store.n_slabs, n_ranges + 1)
    ]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def search_sites(
    store: Store,
    sites: Sequence[SiteSpec],
    located: LocatedKeypoints,
    match: str,
    *,
    row_ranges: Sequence[slice],
    execution: Execution,
    noise_seed: int | None = None,
) -> Iterator[Float]:
    """Yield the result of `search` at each site, assembled from ranges of target rows.

    Args:
        store: holds the images.
        sites: sites with a grid.
        located: the keypoints.
        match: one of `protocol.MATCHES`.
        row_ranges: ranges of target rows, a piece of work each.
        execution: processes, device and progress.
        noise_seed: search standard normal features of this seed instead of the store's.
    """
    # Without the pairs, which a search does not need and processes would be sent.
    points_only = replace(located, pairs=[])
    work = partial(_search_range, store, points_only, match, noise_seed)
    items = [(site, target_rows) for site in sites for target_rows in row_ranges]
    results = execution.spread(work, items)
    for _ in sites:
        predicted = np.full_like(located.target_xy, np.nan)
        for target_rows in row_ranges:
            searched = _searched_pairs(located, target_rows)
            predicted[searched[located.pair_index]] = next(results)
        yield predicted


def _search_range(
    store: Store,
    located: LocatedKeypoints,
    match: str,
    noise_seed: int | None,
    execution: Execution,
    item: tuple[SiteSpec, slice],
) -> Float:
    """Return (points, 2) of the keypoints whose target is in a range of rows, at one site."""
    site, target_rows = item
    predicted = search(
        store,
        site,
        located,
        match,
        device=resolve_device(execution.device),
        target_rows=target_rows,
        noise_seed=noise_seed,
        progress=execution.progress,
    )
    return predicted[_searched_pairs(located, target_rows)[located.pair_index]]


def _read_images(
    store: Store,
    site: SiteSpec,
    rows: Integers,
    *,
    device: torch.device,
    progress: Progress,
    noise_seed: int | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield row and (rows, cols, dim) unit tokens of these images, in the store's order.

    Tokens are standard normal if `noise_seed` is a number; an image's do not depend on the others.
    """
    if noise_seed is not None:
        assert site.layout is not None and site.layout.grid is not None
        height, width = site.layout.grid
        for row in np.unique(rows).tolist():
            noise = random_features(height * width, site.dim, (noise_seed, row))
            tokens = noise.reshape(height, width, site.dim)
            yield row, unit_tokens(to_device(tokens, device))
            progress.advance(1)
        return
    mask = np.zeros(store.n_images, bool)
    mask[rows] = True
    read_slab = partial(_read_slab, site.name)
    for slab_rows, slab_tokens in each_slab(
        store, read_slab, rows=Rows(mask, 0, ""), progress=progress
    ):
        for row, tokens in zip(slab_rows, slab_tokens, strict=True):
            if not np.isfinite(tokens).all():
                raise not_finite(store, site.name, row)
            yield int(row), unit_tokens(to_device(tokens, device))


def _read_slab(site: str, slab: Slab) -> tuple[Integers, list[NDArray[Any]]]:
    """Return the rows of a slab's images that count, and (rows, cols, dim) of each, as stored."""
    tokens = slab.store.acts(site, "patches", partial=True)[slab.rows]
    indices = np.flatnonzero(slab.valid)
    return slab.rows.start + indices, [tokens[i] for i in indices]
