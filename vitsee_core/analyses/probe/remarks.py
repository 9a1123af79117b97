"""Remarks on probes whose values could be overinterpreted."""

from __future__ import annotations

import numpy as np

from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.tally import Tally
from vitsee_core.features import SiteFeatures
from vitsee_core.kernels.ridge import GRID


def remarks_on(features: SiteFeatures, tally: Tally, task: Task, one_class: bool) -> list[str]:
    """One sentence each on SGD that diverged, equal features, and an l2 at an end of the grid.

    Args:
        features: the probed features.
        tally: its result.
        task: its settings.
        one_class: all training images have the same label, so that equal scores say nothing about
            the features.
    """
    name, out = features.site.name, []
    if tally.failed.any():
        out.append(
            f"{name}: SGD diverged for {int(tally.failed.sum())} of {tally.failed.size} "
            "probes, which have no value (give a smaller --lr)"
        )
    if tally.blind.any() and not one_class:
        tokens = tally.blind.any((0, 1))
        count = f" of {int(tokens.sum())} of {tokens.size} tokens" if tokens.size > 1 else ""
        which = "" if count or features.site.layout is None else f"{features.selection} "
        out.append(
            f"{name}: the {which}features{count} are the same in all training images; their "
            "probe gives every image the class that most of them have"
        )
    ends = np.isin(tally.l2s, (GRID[0], GRID[-1])) & ~tally.blind
    if ends.any() and not task.l2s:
        out.append(
            f"{name}: the chosen l2 of {int(ends.sum())} of {tally.l2s.size} probes is at an end "
            "of the grid"
        )
    return out
