"""What the baselines learn of each cell of a grid: how often a class occurs, or the mean depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.cell_sums import CellSums
from vitsee_core.analyses.dense_probe.linear import FixedScores
from vitsee_core.types import Float, Integers

POSITION = "position"


@dataclass
class PlaceSums:
    """Sums over the pixels of a grid's cells, as cells have part in them. of_target: (targets,
    rows, cols) of the targets; weights: (rows, cols) of 1."""

    of_target: Float
    weights: Float

    @property
    def totals(self) -> Float:
        """(targets,) over all cells."""
        found: Float = self.of_target.sum((1, 2))
        return found

    def scores(self) -> tuple[Integers, FixedScores, FixedScores]:
        """The targets that occur, their mean everywhere, and at each cell (that of everywhere where
        no pixel counts)."""
        classes = np.flatnonzero(self.totals)
        everywhere = self.totals[classes] / self.weights.sum()
        here = self.of_target[classes] / np.where(self.weights > 0, self.weights, 1)
        here = np.where(self.weights > 0, here, everywhere[:, None, None])
        whole = np.broadcast_to(everywhere, (*self.weights.shape, len(classes)))
        return classes, FixedScores(whole), FixedScores(np.moveaxis(here, 0, -1))


Places = dict[str, PlaceSums]  # by grid


def count_places(places: Places, grid: str, sums: CellSums, n_targets: int) -> None:
    """Add an image."""
    if grid not in places:
        shape = sums.weights.shape
        places[grid] = PlaceSums(np.zeros((n_targets, *shape)), np.zeros(shape))
    places[grid].of_target[sums.present] += sums.targets
    places[grid].weights += sums.weights


def merge_places(places: Places, others: Places) -> None:
    """Add other images."""
    for grid, own in others.items():
        if grid in places:
            places[grid].of_target += own.of_target
            places[grid].weights += own.weights
        else:
            places[grid] = own
