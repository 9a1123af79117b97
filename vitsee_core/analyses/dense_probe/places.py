"""What the baselines learn: how often each class occurs at each cell of a grid."""

from __future__ import annotations

import numpy as np

from vitsee_core.analyses.dense_probe.cell_sums import CellSums
from vitsee_core.analyses.dense_probe.linear import FixedHead
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Float

MAJORITY, POSITION = "majority", "position"

# Grid -> (classes, rows, cols) the pixels of each class that cells have part in.
Places = dict[str, Float]


def count_places(places: Places, grid: str, sums: CellSums) -> None:
    """Add an image."""
    if grid not in places:
        places[grid] = np.zeros((IGNORED, *sums.weights.shape))
    places[grid][sums.present] += sums.targets


def merge_places(places: Places, others: Places) -> None:
    """Add other images."""
    for grid, own in others.items():
        places[grid] = places[grid] + own if grid in places else own


def blind_heads(of_class: Float) -> dict[str, FixedHead]:
    """Baseline -> its head on a grid: the class that most pixels are of, and at each cell the
    shares of classes there (those of the whole where no pixel counts)."""
    totals = of_class.sum((1, 2))
    classes = np.flatnonzero(totals)
    shares = totals[classes] / totals.sum()
    here = of_class[classes]
    weights = here.sum(0)
    scores = np.where(weights > 0, here / np.where(weights > 0, weights, 1), shares[:, None, None])
    everywhere = np.broadcast_to(shares, (*weights.shape, len(classes)))
    return {
        MAJORITY: FixedHead(classes, everywhere),
        POSITION: FixedHead(classes, np.moveaxis(scores, 0, -1)),
    }
