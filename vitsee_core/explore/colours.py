"""PCA colours of the shown patches: as `vitsee pca --fit-shown` makes them, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.patch_maps.colours import CHANNELS, FEWEST, Colours, matched, rotation_to
from vitsee_core.patch_maps.photos import Shown
from vitsee_core.statistics.covariance import CovarianceSums, principal_axes
from vitsee_core.types import Float, Float32, Mask
from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class Scores:
    """The first three scores of a site's patches. of: (images, cells, 3), NaN where a patch does
    not count; explained: their share of the variance, NaN where all patches are alike."""

    shown: Shown
    layout: TokenLayout
    of: Float
    explained: float

    @property
    def counted(self) -> Float:
        found: Float = self.of[~np.isnan(self.of[..., 0])]
        return found


def scores_of(shown: Shown, layout: TokenLayout, x: Float32, counts: Mask) -> Scores | None:
    """Scores of patches (images, cells, dim); None where fewer than two count, or with fewer
    channels than colours have.

    Args:
        shown: which images.
        layout: of the site.
        x: rows that do not count may hold anything.
        counts: (images, cells).
    """
    own = x[counts]
    if len(own) < 2 or x.shape[-1] < CHANNELS:
        return None
    axes = principal_axes(CovarianceSums.of(own, own[0].astype(np.float64)), CHANNELS)
    scores = np.full((*counts.shape, CHANNELS), np.nan)
    scores[counts] = axes.scores(own)
    return Scores(shown, layout, scores, float(axes.shares.sum()))


def colours_of(scores: Scores, guide: Scores | None) -> NDArray[np.uint8]:
    """(images, cells, 3) red, green and blue, turned to be nearest to the guide's where that has
    patches enough in the same places; 0 where a patch does not count."""
    turned, n = None, 0
    if guide is not None and guide is not scores:
        pairs = [_pair(scores, guide, k) for k in range(len(scores.of))]
        own, lead = (np.concatenate(some) for some in zip(*pairs, strict=True))
        if len(own) >= FEWEST:
            turned, n = rotation_to(own, lead), len(own)
    colours = Colours.of(scores.counted, turned, n)
    found = np.nan_to_num(colours(scores.of))
    return np.rint(255 * found).astype(np.uint8)


def _pair(scores: Scores, guide: Scores, k: int) -> tuple[Float, Float]:
    """Scores of both in the places of the guide's patches of image k."""
    own, lead = scores.shown, guide.shown
    at = own.view.cells_like(scores.layout, own.rows[k], lead.view, guide.layout, lead.rows[k])
    return matched(scores.of[k], ~np.isnan(scores.of[k, :, 0]), at, guide.of[k])


def reference(found: Sequence[Scores | None]) -> Scores | None:
    """The last site of the first store that has scores."""
    return next((scores for scores in reversed(found) if scores is not None), None)
