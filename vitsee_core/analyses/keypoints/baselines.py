"""Baselines without features: chance, the same place, and the best possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.keypoints.candidates import candidates
from vitsee_core.types import Float

if TYPE_CHECKING:
    from vitsee_core.analyses.keypoints.located import Located
    from vitsee_stores.layout import TokenLayout

BASELINES = ("chance", "still", "grid")


def found_without_features(
    located: Located, layout: TokenLayout, match: str, alphas: Sequence[float]
) -> dict[str, Float]:
    """Baseline -> (points, alphas), 1 where a keypoint is found.

    chance: the probability that a candidate drawn at random is near enough. still: the same place
    relative to the image. grid: the candidate nearest to the keypoint, the upper bound.
    """
    shape = len(located), len(alphas)
    nearest, probable = np.empty_like(located.target), np.empty(shape)
    for group in located.groups():
        rows, cols = candidates(layout, located.size, group.window, match)
        # Many pairs have the same target.
        points = np.concatenate([located.target, located.unit, located.side[:, None]], 1)
        each, which = np.unique(points[group.points], axis=0, return_inverse=True)
        best, chance = np.empty((len(each), 2)), np.empty((len(each), len(alphas)))
        for i, (x, y, across, down, side) in enumerate(each.tolist()):
            dx2, dy2 = ((cols.at - x) * across) ** 2, ((rows.at - y) * down) ** 2
            best[i] = cols.at[dx2.argmin()], rows.at[dy2.argmin()]
            dx2.sort()
            near = [np.searchsorted(dx2, (alpha * side) ** 2 - dy2).sum() for alpha in alphas]
            chance[i] = np.array(near) / (len(dx2) * len(dy2))
        nearest[group.points], probable[group.points] = best[which], chance[which]
    return {
        "chance": probable,
        "still": within(located, located.still, alphas),
        "grid": within(located, nearest, alphas),
    }


def within(located: Located, found: Float, alphas: Sequence[float]) -> Float:
    """(points, alphas) 1 where positions (points, 2) are nearer to the keypoint than alpha times
    the side, else 0."""
    reach = np.multiply.outer(located.side, np.asarray(alphas)) ** 2
    return (located.squared_error(found)[:, None] < reach).astype(np.float64)
