"""Principal components of a site's patches: which patches count, one pass for the axes, one for the
scores of selected images, and the rows about the axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.patch_maps.views import View
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.streaming import Rows, each_slab, thread_map
from vitsee_core.statistics.covariance import (
    CovarianceSums,
    PrincipalAxes,
    leading_shares,
    principal_axes,
    total,
)
from vitsee_core.statistics.jackknife import SHARE, jackknife_cells
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import Slab
    from vitsee_stores.layout import TokenLayout

CENTRE = (0.25, 0.75)  # shares of height and width: the middle of an image
SIDES = {"positive": 1, "negative": -1}
FOREGROUND = ("none", *SIDES, "centre")
OF_AXES = ("explained_variance", "axis_agreement")


@dataclass(frozen=True)
class Patches:
    """Selects and transforms a site's patches; see `covariance.sums.Examples`.

    normalise: to length 1 (those of length 0 do not count). on, side: only those whose score on the
    first of these axes has this sign.
    """

    view: View
    layout: TokenLayout
    normalise: bool = False
    on: PrincipalAxes | None = None
    side: int = 1

    def __call__(self, x: Float32, rows: Integers) -> tuple[Float32, Mask]:
        """(images, cells, dim) and (images, cells), see above."""
        keep = self.view.on_image(self.layout, rows)
        if self.normalise:
            length = np.sqrt(np.einsum("ntd,ntd->nt", x, x, dtype=np.float64))
            keep &= length > 0
            inverse = np.where(length > 0, 1 / np.where(length > 0, length, 1), 0)
            x = x * inverse[..., np.newaxis].astype(np.float32)
        if self.on is not None:
            for one, counts in zip(x, keep, strict=True):
                counts &= self.side * self.on.scores(one)[:, 0] > 0
        return x, keep


@dataclass(frozen=True)
class Projected:
    """Scores of some images."""

    rows: Integers  # (images,) of the store, ascending
    scores: Float  # (images, cells, k), NaN where a patch does not count

    @property
    def counted(self) -> Float:
        """(patches, k) of those that count."""
        flat = self.scores.reshape(-1, self.scores.shape[-1])
        return flat[~np.isnan(flat[:, 0])]

    def of(self, row: int) -> Float:
        """(cells, k) of one image."""
        return self.scores[np.searchsorted(self.rows, row)]


def project(
    features: SiteFeatures,
    patches: Patches,
    axes: PrincipalAxes,
    rows: Integers,
    use: Execution,
) -> Projected:
    """Scores of the site's patches that count, one slab at a time. rows: (images,) of the store,
    valid ones."""
    mask = np.zeros(features.store.n_images, bool)
    mask[rows] = True
    jobs = max(1, min(use.jobs, use.budget // features.slab_bytes))
    work = _Project(features, patches, axes)
    parts = list(
        each_slab(features.store, work, rows=Rows(mask, 0, ""), jobs=jobs, map=use.map)
    )
    return Projected(np.flatnonzero(mask & features.store.valid), np.concatenate(parts))


@dataclass(frozen=True)
class _Project:
    features: SiteFeatures
    patches: Patches
    axes: PrincipalAxes

    def __call__(self, slab: Slab) -> Float:
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        x = self.features.of_slab(slab, slice(0, len(self.features.tokens)))
        x, keep = self.patches(x, rows)
        # Image by image, so that no slab stands in double precision.
        scores = np.stack([self.axes.scores(one) for one in x])
        return np.where(keep[..., np.newaxis], scores, np.nan)


def centre_side(found: Projected, view: View, layout: TokenLayout) -> int:
    """The sign of the first score that is more frequent in the middle of the images: 1 if the mean
    over cells in it is above the mean over the others, else -1."""
    sums = np.zeros(2)
    counts = np.zeros(2)
    low, high = CENTRE
    for row, scores in zip(found.rows.tolist(), found.scores[..., 0], strict=True):
        at = view.centres(layout, row)
        within = np.tile(((at >= low) & (at <= high)).all(1), layout.frames or 1)
        for k, part in enumerate((within, ~within)):
            there = part & ~np.isnan(scores)
            sums[k] += scores[there].sum()
            counts[k] += there.sum()
    middle, rest = sums / np.maximum(counts, 1)
    return 1 if middle >= rest else -1


def axis_rows(
    sums: Sequence[CovarianceSums], axes: PrincipalAxes, n_images: int, jobs: int
) -> list[dict[str, Any]]:
    """For each axis its share of the variance, with the jackknife's interval and the value of two
    halves; then for each the absolute cosine between the halves' axes. sums: of each block of
    images, axes and n_images: of all of them."""
    m = len(sums)
    k = len(axes.shares)
    first, second = (_axes_of(sums[start::2], k) for start in (0, 1))
    work = partial(_shares_without, total(sums), axes)
    left = np.array([*thread_map(jobs)(work, sums)]) if m > 1 else np.empty((0, k))
    shares: list[dict[str, Any]] = []
    agreements: list[dict[str, Any]] = []
    for i in range(k):
        about = {"component": i + 1, "n_examples": axes.n}
        a, b = (
            np.nan if one is None else float(one.shares[i]) for one in (first, second)
        )
        cells = jackknife_cells(float(axes.shares[i]), left[:, i], n_images, SHARE)
        shares.append({**about, "metric": OF_AXES[0], "half_a": a, "half_b": b, **cells})
        agreement = np.nan
        if first is not None and second is not None and np.isfinite(axes.shares[i]):
            agreement = abs(float(first.axes[i] @ second.axes[i]))
        numbers = {"value": agreement, "n_images": n_images}
        agreements.append({**about, "metric": OF_AXES[1], **numbers})
    return shares + agreements


def _axes_of(sums: Sequence[CovarianceSums], k: int) -> PrincipalAxes | None:
    """Axes of some blocks; None if these have too few patches."""
    if sum(part.n for part in sums) > 1:
        return principal_axes(total(sums), k)
    return None


def _shares_without(
    whole: CovarianceSums, axes: PrincipalAxes, block: CovarianceSums
) -> Float:
    """(k,) shares of the axes of all patches but a block's; NaN if these are too few."""
    left = total([whole])
    left.add(block, -1)
    if left.n > 1:
        return leading_shares(left, axes)
    return np.full(len(axes.shares), np.nan)
