"""Ridge probes of every site, with l2 chosen on held-out images, and the baselines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.cells import Head, Places
from vitsee_core.analyses.dense_probe.labelled_images import CHOOSING, drawn
from vitsee_core.analyses.dense_probe.protocols import Solver
from vitsee_core.analyses.dense_probe.ridge import (
    GRID,
    PixelSums,
    Solutions,
    Training,
    TrainingSums,
    choose_l2,
)
from vitsee_core.analyses.dense_probe.work import HeadKey, Part, Trained, blind_heads
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution


def train_ridge(part: Part, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of every site, and the baselines of every grid.

    Raises:
        VitseeError: no pixel counts, or there are too few images to choose l2.
    """
    held_out = np.zeros(part.store.n_images, bool)
    if not solver.l2s:
        held_out = drawn(part.store, part.truth.mask, CHOOSING, (execution.seed, 3))
    weights = None
    if solver.balanced:
        weights = balanced_weights(count_truth(part, execution))
    sums = _fold_training(part, held_out, weights, execution)
    shifts, task = _shifts(part), part.task
    heads: dict[HeadKey, Head] = {}
    chosen, notes = {}, dict[str, object]()
    for site, features in part.features.items():
        fitted, held = sums.parts(site, features.dim, task.n_targets)
        whole = fitted + held
        if not whole.n:
            raise part.no_pixel("training")
        values = list(solver.l2s) or [_chosen(fitted, held, site)]
        solutions = Solutions.of(whole)
        for l2 in values:
            scores = solutions.scores(l2, shifts[site])
            heads[HeadKey(site, l2)] = task.head(solutions.classes, scores)
        chosen[site] = values
        notes["training_pixels"] = round(whole.n)
        notes["n_trained"] = len(solutions.classes)
    notes["l2_relative"] = chosen
    if not solver.l2s:
        notes["held_out_images"] = int(held_out.sum())
    return Trained(heads | blind_heads(task, sums.places), notes)


def count_truth(part: Part, execution: Execution) -> Places:
    """Count the training pixels, without reading tokens.

    Raises:
        VitseeError: none counts.
    """
    found = _fold_training(replace(part, features={}), np.zeros(0, bool), None, execution).places
    if not any(own.weights.any() for own in found.values()):
        raise part.no_pixel("training")
    return found


def balanced_weights(places: Places) -> Float:
    """(256,) weight of a pixel of each class, n / (C n_c); those of all pixels add up to n."""
    totals = next(iter(places.values())).totals
    there = totals > 0
    found = np.zeros(IGNORED + 1)
    found[:IGNORED][there] = totals.sum() / (there.sum() * totals[there])
    return found


def _chosen(fitted: PixelSums, held: PixelSums, site: str) -> float:
    if not fitted.n or not held.n:
        raise VitseeError(
            f"{site}: l2 cannot be chosen, as the training images that fit have {fitted.n:.0f} "
            f"pixels that count and those held out {held.n:.0f}; give it with --l2-relative, or "
            "more images"
        )
    return choose_l2(fitted, held, GRID)


def _shifts(part: Part) -> dict[str, Float]:
    """A token of each site; sums of features minus it lose no digits."""
    first = int(np.flatnonzero(part.truth.mask)[0])
    tokens = {site: own.load(first)[0].astype(np.float64) for site, own in part.features.items()}
    return {site: np.where(np.isfinite(token), token, 0.0) for site, token in tokens.items()}


def _fold_training(
    part: Part, held_out: Mask, weights: Float | None, execution: Execution
) -> TrainingSums:
    make = partial(TrainingSums, Training(part, _shifts(part), held_out, weights))
    dims = [own.dim for own in part.features.values()]
    sums = sum(8 * 2 * dim * (dim + part.task.n_targets) for dim in dims)
    return part.fold(make, execution, part.slab_bytes + sums)
