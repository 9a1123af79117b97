"""Checks that the rows of two stores are the same images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import StoreMismatch

if TYPE_CHECKING:
    from vitsee_stores.store import Store


def require_paired(a: Store, b: Store) -> NDArray[np.bool_]:
    """(images,) the rows that are valid in both stores.

    Raises:
        StoreMismatch: other images or another order: ids and labels differ, or the encoded bytes of
            an image that both could read.
    """
    names = f"{a.label} and {b.label}"
    if a.manifest.samples_fingerprint != b.manifest.samples_fingerprint:
        raise StoreMismatch(
            f"{names} do not pair: {_first_difference(a, b)} (extract both from the same --data "
            "with the same --images, --seed and --order)"
        )
    both = a.valid & b.valid
    differing = np.flatnonzero(both & (a.samples.hash != b.samples.hash))
    if differing.size:
        row = int(differing[0])
        raise StoreMismatch(
            f"{names} do not pair: row {row} ({a.samples.id[row]}) was read from other bytes, as "
            f"were {differing.size} of {int(both.sum())} images (extract both from the same --data)"
        )
    return both


def _first_difference(a: Store, b: Store) -> str:
    if a.n_images != b.n_images:
        return f"{a.n_images} images against {b.n_images}"
    for what in ("id", "label"):
        ours, theirs = getattr(a.samples, what), getattr(b.samples, what)
        rows = np.flatnonzero(ours != theirs)
        if rows.size:
            row = int(rows[0])
            return f"the {what} in row {row} is {ours[row]} against {theirs[row]}"
    return "their samples_fingerprints differ"
