"""Cosines of patches: of one patch with all others of an image, and means by offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.patch_maps.views import View
from vitsee_core.statistics.covariance import autocorrelation
from vitsee_core.types import Float, Mask

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import Slab

STATISTICS = ("cosine_mean", "cosine_neighbours", "cosine_area")


def unit_vectors(x: NDArray[np.floating], keep: Mask) -> Float:
    """(cells, dim) of length 1 in float64; NaN if a patch has length 0 or does not count.

    Args:
        x: (cells, dim).
        keep: (cells,) which count.
    """
    values = x.astype(np.float64)
    length = np.linalg.norm(values, axis=1)
    there = keep & (length > 0)
    return np.where(
        there[:, np.newaxis], values / np.where(length > 0, length, 1)[:, np.newaxis], np.nan
    )


def map_statistics(cosines: Float, query: int, body: tuple[int, ...]) -> dict[str, float]:
    """How far one patch's similarity extends over the other patches of its image, or its clip.

    `cosine_mean`: mean over them. `cosine_neighbours`: mean over its up to eight neighbours, in its
    own frame.
    `cosine_area`: share of them whose cosine is above the midpoint between that mean and 1. NaN
    where there is none.

    Args:
        cosines: (cells,) with the query, NaN where a patch does not count.
        query: its place.
        body: (rows, cols), of clips (frames, rows, cols).
    """
    there = ~np.isnan(cosines)
    there[query] = False
    places = np.stack(np.unravel_index(np.arange(len(cosines)), body))
    *other_time, down, across = np.abs(places - places[:, query : query + 1])
    near = there & (np.maximum(down, across) == 1)
    for apart in other_time:
        near &= apart == 0
    found = dict.fromkeys(STATISTICS, np.nan)
    if there.any():
        mean = float(cosines[there].mean())
        found["cosine_mean"] = mean
        found["cosine_area"] = float((cosines[there] > (mean + 1) / 2).mean())
    if near.any():
        found["cosine_neighbours"] = float(cosines[near].mean())
    return found


def offset_means(units: Float, grid: tuple[int, int]) -> Float:
    """(2 rows - 1, 2 cols - 1) mean cosine of the pairs of patches at each offset (dy, dx),
    starting at -(rows - 1), -(cols - 1); NaN without a pair.

    By autocorrelation over the grid: T log T instead of T^2 for all pairs. Of clips pairs within
    one frame.

    Args:
        units: (cells, dim), NaN where a patch does not count; of clips frame by frame.
        grid: (rows, cols).
    """
    frames = units.reshape(-1, grid[0] * grid[1], units.shape[-1])
    sums, pairs = (sum(parts) for parts in zip(*(_sums(one, grid) for one in frames), strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(pairs > 0, sums / pairs, np.nan)
    at = [np.arange(-n + 1, n) for n in grid]
    return means[np.ix_(*at)]


def _sums(units: Float, grid: tuple[int, int]) -> tuple[Float, Float]:
    """The sums of cosines at each offset within one frame, and the numbers of pairs."""
    rows, cols = grid
    there = ~np.isnan(units[:, 0])
    known = np.where(there[:, np.newaxis], units, 0).reshape(rows, cols, -1)
    pairs = np.rint(autocorrelation(there.astype(np.float64).reshape(rows, cols, 1)))
    return autocorrelation(known), pairs


@dataclass(frozen=True)
class ReadOffsets:
    """Site -> (images, 2 rows - 1, 2 cols - 1) of a slab; see `offset_means`."""

    features: tuple[SiteFeatures, ...]
    view: View

    def __call__(self, slab: Slab) -> dict[str, Float]:
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        found = {}
        for features in self.features:
            layout = features.site.layout
            assert layout is not None and layout.grid is not None
            x = features.of_slab(slab, slice(0, len(features.tokens)))
            keep = self.view.on_image(layout, rows)
            found[features.site.name] = np.stack(
                [
                    offset_means(unit_vectors(one, on), layout.grid)
                    for one, on in zip(x, keep, strict=True)
                ]
            )
        return found
