"""The number of neighbours and the distance, chosen by the patches of held-out training images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe.metrics import counted, mean_iou
from vitsee_core.analyses.dense_probe.neighbour_heads import most_votes
from vitsee_core.analyses.dense_probe.neighbour_search import Scaling, Search
from vitsee_core.analyses.dense_probe.patch_bank import Bank
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.protocols import Solver

QUERIES_AT_ONCE = 1024


@dataclass(frozen=True)
class Neighbourhood:
    """What was chosen, with its mean IoU on held-out images."""

    k: int
    distance: str
    miou: float

    def describe(self) -> dict[str, Any]:
        """For a sidecar."""
        return {"k": self.k, "distance": self.distance, "miou_held_out": self.miou}


def make_search(bank: Bank, solver: Solver, distance: str, device: str) -> Search:
    """Among a bank's patches, standardised if the solver says so."""
    scaling = Scaling.of(bank.tokens) if solver.standardise else Scaling.none(bank.tokens.shape[1])
    return Search(scaling(bank.tokens).astype(np.float32), scaling, device, distance)


def choose_neighbours(
    bank: Bank, held_out: Mask, solver: Solver, device: str, site: str
) -> Neighbourhood:
    """The k and distance with the highest mean IoU on the pixels of held-out patches, by votes of
    the others; of equal ones the first.

    Args:
        bank: of all training images.
        held_out: (images,) of the store, which choose.
        solver: with those to choose from.
        device: of the products.
        site: for a message.

    Raises:
        VitseeError: too few patches to choose by.
    """
    held = held_out[bank.rows]
    fitted, queries = bank.part(~held), bank.part(held)
    ks = [k for k in solver.ks if k <= len(fitted.tokens)]
    if not ks or not len(queries.tokens):
        raise VitseeError(
            f"{site}: k cannot be chosen, as the training images that fit have "
            f"{len(fitted.tokens)} patches with a class and those held out {len(queries.tokens)}; "
            "give it with --k, or more images"
        )
    best = None
    for distance in solver.distances:
        search = make_search(fitted, solver, distance, device)
        counts = {k: np.zeros((3, IGNORED), np.int64) for k in ks}
        for start in range(0, len(queries.tokens), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            tokens = queries.tokens[part][None].astype(np.float64)
            _, rows = search.nearest(tokens, max(ks))
            truth = queries.labels[part]
            for k in ks:
                found = most_votes(fitted.labels[rows[:, :k]])
                found = np.where(truth == IGNORED, np.uint8(IGNORED), found)
                counts[k] += counted(found, truth)
        for k in ks:
            one = Neighbourhood(k, distance, float(mean_iou(counts[k])))
            if best is None or one.miou > best.miou:
                best = one
    assert best is not None
    return best
