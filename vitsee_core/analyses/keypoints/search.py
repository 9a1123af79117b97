"""The keypoints of all pairs at one site, in two passes over the store.

The first takes the feature of each source keypoint, the second looks for them in the target images.
Memory: one slab of the site as it is stored, one image in float32, the features of the distinct
source keypoints (6,000 of SPair-71k's test split), and a piece of similarities.

With a `map`, its processes search at one site each, or, where these are fewer than the processes,
for one part of the target images; the sources of a part are read for it.
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

from vitsee_core.analyses.keypoints.places import (
    CandidateAxis,
    Cells,
    candidates,
    cells_of,
)
from vitsee_core.features.matrix import not_finite
from vitsee_core.runtime.device import precision_context, resolve_device, to_device
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.truth.labels.labelled_rows import random_features
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.analyses.keypoints.places import Located
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


# Values of one piece of similarities: they stay in a core's cache.
PIECE_VALUES = 1 << 20
PIECE_VALUES_GPU = 1 << 26
SAMPLED_AT_ONCE = 64
LEAST_SQUARE = 1e-6  # of |f|: opposite tokens cancel, and no direction is left


def sample(
    tokens: torch.Tensor,
    cells: tuple[Cells, Cells],
    at: Float,
    match: str,
    size: tuple[int, int],
) -> torch.Tensor:
    """(points, dim) features at points of an image; their length is meaningless.

    Args:
        tokens: (rows, cols, dim) unit vectors.
        cells: rows and columns.
        at: (points, 2) x, y in pixels.
        match: one of `spair.MATCHES`.
        size: of the input, (height, width).
    """
    xy = at
    if match == "vit_analysis":
        last = np.array(size[::-1]) - 1
        xy = np.clip(np.stack([np.trunc(at[:, 0]), np.rint(at[:, 1])], 1), 0, last)
    down, across = (
        _weights(
            axis.nearest(xy[:, i]) if match == "token" else axis.weights(xy[:, i]), tokens
        )
        for axis, i in zip(cells, (1, 0), strict=True)
    )
    features = []
    for row, col in zip(
        down.split(SAMPLED_AT_ONCE), across.split(SAMPLED_AT_ONCE), strict=True
    ):
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
        match: one of `spair.MATCHES`.
    """
    down, across = (_weights(axis.weights, tokens) for axis in (rows, cols))
    scale = _inverse_norms(tokens, down, across) if match == "smooth" else None
    height, width, _ = tokens.shape
    at_once = PIECE_VALUES if sources.device.type == "cpu" else PIECE_VALUES_GPU
    places = []
    for piece in sources.split(max(1, at_once // (len(rows.at) * len(cols.at)))):
        similar = (piece @ tokens.flatten(0, 1).T).view(-1, width) @ across.T
        values = torch.matmul(down, similar.view(len(piece), height, -1))
        if scale is not None:
            values *= scale
        # The largest value of each row, then in the best row: argmax alone is ten times slower.
        row = values.amax(2).argmax(1)
        col = values[torch.arange(len(row), device=row.device), row].argmax(1)
        places.append(torch.stack([col, row]))
    best_col, best_row = torch.cat(places, 1).cpu().numpy()
    return np.stack([cols.at[best_col], rows.at[best_row]], 1)


def _weights(weights: Float, tokens: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(weights.astype(np.float32)).to(tokens.device)


def _inverse_norms(
    tokens: torch.Tensor, down: torch.Tensor, across: torch.Tensor
) -> torch.Tensor:
    """(candidate rows, candidate cols) 1 / |f|, 0 where f is 0. down, across: weights."""
    products = torch.linalg.vecdot
    down2 = down**2
    across2 = across**2
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


# ---------------------------------------------------------------- the two passes


WHOLE = slice(0, None)


def search(
    store: Store,
    site: SiteSpec,
    located: Located,
    match: str,
    *,
    device: torch.device,
    part: slice = WHOLE,
    noise: int | None = None,
    progress: Progress = SILENT,
) -> Float:
    """(points, 2) x, y on the input where each keypoint is found.

    Args:
        store: holds the images.
        site: with a grid.
        located: the keypoints.
        match: one of `spair.MATCHES`.
        device: computes the products.
        part: rows of the store: only these images are searched, the others give NaN.
        noise: a seed: search standard normal features instead of the store's.
        progress: advanced by `n_images(located, part)`.

    Raises:
        VitseeError: a number in the store is not finite.
    """
    layout = site.layout
    assert layout is not None
    cells = cells_of(layout)
    rows = located.source_row[located.pair]
    keys = np.concatenate([rows[:, None], located.source], 1)
    each, which = np.unique(keys, axis=0, return_inverse=True)
    bank = torch.zeros(len(each), site.dim, device=device)
    predicted = np.full_like(located.target, np.nan)
    among = _among(located, part)
    with precision_context(device, "fp32"):
        sources = located.source_row[among]
        for row, tokens in _images(store, site, sources, device, progress, noise):
            # All of the image's, whatever the part: products of fewer have other last digits.
            own = np.flatnonzero(each[:, 0] == row)
            features = sample(tokens, cells, each[own, 1:], match, located.size)
            bank[torch.from_numpy(own).to(device)] = features
        groups = located.groups()
        targets = np.array([group.row for group in groups], np.int64)
        targeted = located.target_row[among]
        for row, tokens in _images(store, site, targeted, device, progress, noise):
            for i in np.flatnonzero(targets == row):
                points = groups[i].points
                down, across = candidates(layout, located.size, groups[i].window, match)
                own_sources = bank[torch.from_numpy(which[points]).to(device)]
                predicted[points] = find(own_sources, tokens, down, across, match)
    return predicted


def n_images(located: Located, part: slice = WHOLE) -> int:
    """Number of images that a search reads: sources, then targets."""
    among = _among(located, part)
    both = located.source_row[among], located.target_row[among]
    return sum(len(np.unique(rows)) for rows in both)


def _among(located: Located, part: slice) -> Mask:
    """(pairs,) whose target is in these rows."""
    rows = located.target_row
    return (rows >= (part.start or 0)) & (rows < (part.stop or np.inf))


def parts_of(store: Store, n_sites: int, execution: Execution) -> list[slice]:
    """Rows of whole slabs, in order: enough parts that with the sites all processes are busy."""
    if execution.map is None:
        return [WHOLE]
    n = min(store.n_slabs, -(-execution.width // n_sites))
    edges = [int(k) * store.plan.slab for k in np.linspace(0, store.n_slabs, n + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def search_all(
    store: Store,
    sites: Sequence[SiteSpec],
    located: Located,
    match: str,
    parts: Sequence[slice],
    execution: Execution,
    noise: int | None = None,
) -> Iterator[Float]:
    """`search` at each site, assembled from these parts of the images."""
    work = partial(_search_part, store, replace(located, pairs=[]), match, noise)
    items = [(site, part) for site in sites for part in parts]
    results = execution.spread(work, items)
    for _ in sites:
        predicted = np.full_like(located.target, np.nan)
        for part in parts:
            predicted[_among(located, part)[located.pair]] = next(results)
        yield predicted


def _search_part(
    store: Store,
    located: Located,
    match: str,
    noise: int | None,
    execution: Execution,
    item: tuple[SiteSpec, slice],
) -> Float:
    """(points, 2) of the keypoints whose target is in a part, at one site."""
    site, part = item
    predicted = search(
        store,
        site,
        located,
        match,
        device=resolve_device(execution.device),
        part=part,
        noise=noise,
        progress=execution.progress,
    )
    return predicted[_among(located, part)[located.pair]]


def _images(
    store: Store,
    site: SiteSpec,
    rows: Integers,
    device: torch.device,
    progress: Progress,
    noise: int | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Row and (rows, cols, dim) unit tokens of each of these images, in the store's order; random
    if `noise` is a seed."""
    if noise is not None:
        assert site.layout is not None and site.layout.grid is not None
        height, width = site.layout.grid
        for row in np.unique(rows).tolist():
            drawn = random_features(height * width, site.dim, (noise, row))
            yield row, unit(to_device(drawn.reshape(height, width, site.dim), device))
            progress.advance(1)
        return
    mask = np.zeros(store.n_images, bool)
    mask[rows] = True
    work = partial(_read, site.name)
    for numbers, values in each_slab(
        store, work, rows=Rows(mask, 0, ""), progress=progress
    ):
        for row, tokens in zip(numbers, values, strict=True):
            if not np.isfinite(tokens).all():
                raise not_finite(store, site.name, row)
            yield int(row), unit(to_device(tokens, device))


def _read(site: str, slab: Slab) -> tuple[Integers, list[NDArray[Any]]]:
    """Indices of a slab's images that count, and (rows, cols, dim) of each, as stored."""
    values = slab.store.acts(site, "patches", partial=True)[slab.rows]
    own = np.flatnonzero(slab.valid)
    return slab.rows.start + own, [values[i] for i in own]
