"""Principal components of a site's patches.

Which patches count is decided here; one pass over them makes the axes, another the scores of
selected images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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

CENTRE = (0.25, 0.75)  # the middle of an image, in shares of its height and width
SIDES = {"positive": 1, "negative": -1}
FOREGROUND = ("none", *SIDES, "centre")
AXIS_METRICS = ("explained_variance", "axis_agreement")


@dataclass(frozen=True)
class Patches:
    """Selects and transforms a site's patches, as an `Examples` of `statistics.covariance`.

    Attributes:
        view: where the images lie on the model's input.
        layout: where the site's tokens lie.
        normalise: whether patches are brought to length 1; those of length 0 do not count.
        first_axes: axes of all patches; None if there is no foreground.
        side: 1 or -1, the sign that the foreground's score on the first of these axes has.
    """

    view: View
    layout: TokenLayout
    normalise: bool = False
    first_axes: PrincipalAxes | None = None
    side: int = 1

    def __call__(self, x: Float32, rows: Integers) -> tuple[Float32, Mask]:
        """Return the patches, (images, cells, dim), and which of them count, (images, cells)."""
        keep = self.view.on_image(self.layout, rows)
        if self.normalise:
            length = np.sqrt(np.einsum("ntd,ntd->nt", x, x, dtype=np.float64))
            keep &= length > 0
            # 0 for patches of length 0, without a warning.
            inverse = np.where(length > 0, 1 / np.where(length > 0, length, 1), 0)
            x = x * inverse[..., np.newaxis].astype(np.float32)
        if self.first_axes is not None:
            # Image by image: scores are in float64, twice as large as the patches.
            for patches, keep_patches in zip(x, keep, strict=True):
                first_scores = self.first_axes.scores(patches)[:, 0]
                keep_patches &= self.side * first_scores > 0
        return x, keep


class PatchScores(NamedTuple):
    """The scores of some images' patches.

    Attributes:
        rows: (images,) rows of the store, ascending.
        scores: (images, cells, k), NaN where a patch does not count.
    """

    rows: Integers
    scores: Float

    @property
    def counted(self) -> Float:
        """Return the scores of all patches that count, (patches, k)."""
        flat = self.scores.reshape(-1, self.scores.shape[-1])
        return flat[~np.isnan(flat[:, 0])]

    def image_scores(self, row: int) -> Float:
        """Return the scores of the image in this row of the store, (cells, k)."""
        return self.scores[np.searchsorted(self.rows, row)]


def project(
    features: SiteFeatures,
    patches: Patches,
    axes: PrincipalAxes,
    rows: Integers,
    execution: Execution,
) -> PatchScores:
    """Return the scores of some images' patches, computed one slab at a time.

    Args:
        features: the site's patches.
        patches: which of them count.
        axes: the axes that scores are along.
        rows: (images,) valid rows of the store.
        execution: jobs, memory and the map of a cluster.
    """
    mask = np.zeros(features.store.n_images, bool)
    mask[rows] = True
    # As many slabs at a time as fit into memory.
    jobs = max(1, min(execution.jobs, execution.budget // features.slab_bytes))
    slab_scores = each_slab(
        features.store,
        ReadScores(features, patches, axes),
        rows=Rows(mask, 0, ""),
        jobs=jobs,
        map=execution.map,
    )
    valid_rows = np.flatnonzero(mask & features.store.valid)
    return PatchScores(valid_rows, np.concatenate(list(slab_scores)))


@dataclass(frozen=True)
class ReadScores:
    """Reads the scores of a slab's patches; a class, as it is sent to other processes."""

    features: SiteFeatures
    patches: Patches
    axes: PrincipalAxes

    def __call__(self, slab: Slab) -> Float:
        """Return (images, cells, k), NaN where a patch does not count."""
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        x = self.features.of_slab(slab, slice(0, len(self.features.tokens)))
        x, keep = self.patches(x, rows)
        # Image by image, so that no slab stands in double precision.
        scores = np.stack([self.axes.scores(patches) for patches in x])
        return np.where(keep[..., np.newaxis], scores, np.nan)


def centre_side(patch_scores: PatchScores, view: View, layout: TokenLayout) -> int:
    """Return the sign of the first score that is more frequent in the middle of the images.

    It is 1 if the mean over the cells in the middle is at least the mean over the others, else -1.
    """
    # The sums and counts of the cells in the middle, and of the others.
    sums = np.zeros(2)
    counts = np.zeros(2)
    low, high = CENTRE
    first_scores = patch_scores.scores[..., 0]
    for row, scores in zip(patch_scores.rows.tolist(), first_scores, strict=True):
        centres = view.centres(layout, row)
        is_central = ((centres >= low) & (centres <= high)).all(1)
        # Frames of a clip have the same cells.
        is_central = np.tile(is_central, layout.frames or 1)
        is_counted = ~np.isnan(scores)
        for k, region in enumerate((is_central, ~is_central)):
            cells = region & is_counted
            sums[k] += scores[cells].sum()
            counts[k] += cells.sum()
    central_mean, outer_mean = sums / np.maximum(counts, 1)
    return 1 if central_mean >= outer_mean else -1


def axis_rows(
    sums: Sequence[CovarianceSums], axes_of_all: PrincipalAxes, n_images: int, jobs: int
) -> list[dict[str, Any]]:
    """Return rows of each axis' share of the variance, then of its agreement between two halves.

    Shares have the jackknife's interval and the values of the two halves. The agreement is the
    absolute cosine between the axes of the halves.

    Args:
        sums: second moments of each block of images.
        axes_of_all: the axes of all images.
        n_images: the number of images.
        jobs: threads.
    """
    k = len(axes_of_all.shares)
    # Every second block, so that a trend over the images is in both halves.
    half_a = _axes_unless_too_few(sums[0::2], k)
    half_b = _axes_unless_too_few(sums[1::2], k)
    # Shares without each block of images: (blocks, k).
    replicates = np.empty((0, k))
    if len(sums) > 1:
        shares_without = partial(_shares_without_block, total(sums), axes_of_all)
        replicates = np.array([*thread_map(jobs)(shares_without, sums)])
    share_rows: list[dict[str, Any]] = []
    agreement_rows: list[dict[str, Any]] = []
    for i in range(k):
        share = float(axes_of_all.shares[i])
        axis_cells = {"component": i + 1, "n_examples": axes_of_all.n}
        share_rows.append(
            {
                **axis_cells,
                "metric": AXIS_METRICS[0],
                "half_a": np.nan if half_a is None else float(half_a.shares[i]),
                "half_b": np.nan if half_b is None else float(half_b.shares[i]),
                **jackknife_cells(share, replicates[:, i], n_images, SHARE),
            }
        )
        agreement = np.nan
        if half_a is not None and half_b is not None and np.isfinite(share):
            agreement = abs(float(half_a.axes[i] @ half_b.axes[i]))
        agreement_rows.append(
            {
                **axis_cells,
                "metric": AXIS_METRICS[1],
                "value": agreement,
                "n_images": n_images,
            }
        )
    return share_rows + agreement_rows


def _axes_unless_too_few(sums: Sequence[CovarianceSums], k: int) -> PrincipalAxes | None:
    """Return the first k axes of some blocks; None if the blocks have fewer than two patches."""
    if sum(block.n for block in sums) > 1:
        return principal_axes(total(sums), k)
    return None


def _shares_without_block(
    all_sums: CovarianceSums, axes_of_all: PrincipalAxes, block: CovarianceSums
) -> Float:
    """Return the (k,) shares of variance without a block of images: those of axes found anew on
    the rest; NaN if fewer than two patches are left.

    Args:
        all_sums: second moments of all images.
        axes_of_all: the k axes of all images, where the iteration starts.
        block: second moments of the block.
    """
    # A copy, from which the block is subtracted: adding up the other blocks would take longer.
    rest = total([all_sums])
    rest.add(block, -1)
    if rest.n > 1:
        return leading_shares(rest, axes_of_all)
    return np.full(len(axes_of_all.shares), np.nan)
