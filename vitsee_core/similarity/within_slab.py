"""Minibatch HSIC for sites with only a Gram matrix within each slab (extract --grams)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vitsee_core.similarity.batches import InMemory, OfBatch, each_batch, own_grams
from vitsee_core.similarity.comparison import Comparison, Estimator
from vitsee_core.similarity.hsic import Hsic, stacked, weighted_sum
from vitsee_core.similarity.representation import Representation
from vitsee_core.similarity.whole_tiles import Matrix
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError
from vitsee_stores.manifest import few

FEWEST_SLABS = 10

log = logging.getLogger(__name__)


def within_slabs(comparison: Comparison, estimator: Estimator) -> Hsic:
    """The mean HSIC_1 over slabs, weighted by their images; replicates leave out one slab, if there
    are at least 10.

    Raises:
        MissingInput: the estimator needs pairs of images across slabs.
        StoreMismatch: the stores' slabs differ.
        VitseeError: no slab has 4 images.
    """
    slab, named = _require(comparison, estimator)
    rows = comparison.rows_of(comparison.representations[0])
    if not all(np.array_equal(rows, other) for other in comparison.rows.values()):
        raise StoreMismatch(
            f"{named}: slabs compare where the stores hold the same ids in the same order (extract "
            "both with the same --images, --seed and --order)"
        )
    labels = rows // slab
    cells = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    used = [cell for cell in cells if len(cell) >= 4]
    if not used:
        raise VitseeError(f"{named}, all slabs of fewer than 4 images; CKA needs at least 4")
    if len(used) < len(cells):
        log.warning("slabs of fewer than 4 images are left out: %d", len(cells) - len(used))
    log.warning("%s: minibatch CKA with slabs as batches, once (slabs: %d)", named, len(used))
    parts = list(each_batch(comparison, _grams(comparison, used, slab), len(used)))
    sizes = [len(cell) for cell in used]
    value = weighted_sum(parts, sizes)
    notes: dict[str, Any] = {
        "estimator": "minibatch",
        "hsic": "HSIC_1 (unbiased) in each slab; ratio of means over slabs, weighed by images",
        **{"batch": slab, "batches": len(used), "repeats": 1},
    }
    if len(used) < FEWEST_SLABS:
        notes["spread"] = f"none: fewer than {FEWEST_SLABS} slabs"
        log.warning("no error bars: fewer than %d slabs", FEWEST_SLABS)
        return replace(value, n_images=sum(sizes), notes=notes)
    without = [
        weighted_sum(parts, [0 if k == left_out else size for k, size in enumerate(sizes)])
        for left_out in range(len(used))
    ]
    return replace(
        value, replicates=stacked(without), spread="slabs", n_images=sum(sizes), notes=notes
    )


def _require(comparison: Comparison, estimator: Estimator) -> tuple[int, str]:
    """The slab size, and a description of the limited sites."""
    only = [r for r in comparison.representations if r.has_blocks_only]
    site = only[0].stored.name
    names = list(dict.fromkeys(f"{r.store.label} {r.stored.name}" for r in only))
    named = f"only Gram matrices within slabs were kept of {few(names)}"
    sizes = {r.store.plan.slab: r.store.label for r in only}
    if len(sizes) > 1:
        described = ", ".join(f"{label}: {size} images" for size, label in sizes.items())
        raise StoreMismatch(
            f"Gram matrices within slabs of different sizes ({described}) do not compare; extract "
            "both with the same --slab"
        )
    (slab,) = sizes
    if estimator.kind in ("exact", "biased"):
        raise MissingInput(
            f"{named}: --estimator {estimator.kind} needs pairs of images across slabs (extract "
            f"it with --tokens {site}=all)"
        )
    if estimator.rescale or estimator.examples or estimator.repeats not in (None, 1):
        raise MissingInput(
            f"{named}: the slabs are the batches, once; leave out --examples, --repeats, --preset"
        )
    if estimator.batch not in (None, slab):
        raise MissingInput(f"{named}: --batch {estimator.batch} is not their slab of {slab} images")
    return slab, named


def _grams(comparison: Comparison, cells: Sequence[Integers], slab: int) -> list[OfBatch]:
    """Every representation's Gram matrices within the slabs: stored ones, or computed now."""
    with_acts = [r for r in comparison.representations if not r.has_blocks_only]
    made = iter(own_grams(replace(comparison, representations=tuple(with_acts)), cells))
    return [
        partial(_stored, r, [comparison.rows_of(r)[cell] for cell in cells], slab)
        if r.has_blocks_only
        else next(made)
        for r in comparison.representations
    ]


def _stored(of: Representation, cells: Sequence[Integers], slab: int, batch: int) -> Matrix:
    rows = cells[batch]
    k = int(rows[0]) // slab
    places = rows - k * slab

    def load() -> Float32:
        return of.store.grams(of.stored.name)[k][np.ix_(places, places)]

    return InMemory(len(rows), load)
