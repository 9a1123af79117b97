"""Pairing the rows of several stores."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Integers
from vitsee_stores import require_paired
from vitsee_stores.errors import StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store


PAIR_BY = ("image", "id")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paired:
    """Rows that belong together."""

    rows: dict[str, Integers]  # store_id -> (n,) rows of every store, in the first one's order
    notes: dict[str, Any] = field(default_factory=dict)  # for a sidecar


def paired_rows(stores: Sequence[Store], chosen: Rows, pair_by: str = "image") -> Paired:
    """The rows of every store that hold the same image, if all of them could read it.

    Args:
        stores: distinct stores.
        chosen: rows of the first one.
        pair_by: "image": the stores hold the same images, by ids, labels and bytes, in the same
            order; "id": rows with the same id, whatever their bytes, labels and order (the same
            pictures clean and corrupted); a row without a partner in every store is left out, which
            is logged.

    Raises:
        StoreMismatch: "image": they do not hold the same images in the same order; "id": a store
            holds an id twice, or no id is in all stores.
        VitseeError: an unknown word.
    """
    if pair_by not in PAIR_BY:
        raise VitseeError(f"no way to pair by {pair_by!r}; expected {' or '.join(PAIR_BY)}")
    first, *others = stores
    names = [store.manifest.store_id for store in stores]
    mask = chosen.mask & first.valid
    if pair_by == "image":
        for other in others:
            mask = mask & require_paired(first, other)
        return Paired(dict.fromkeys(names, np.flatnonzero(mask)))
    for store in stores if others else ():
        _refuse_twice(store)
    rows = np.flatnonzero(mask)
    paired = [rows]
    for other in others:
        ids = other.samples.id
        order = np.argsort(ids, kind="stable")
        wanted = first.samples.id[rows]
        at = np.searchsorted(ids[order], wanted).clip(max=len(ids) - 1)
        partners = order[at]
        there = (ids[partners] == wanted) & other.valid[partners]
        paired = [*(of_store[there] for of_store in paired), partners[there]]
        rows = paired[0]
    n = len(rows)
    if others and not n:
        labels = ", ".join(store.label for store in stores)
        raise StoreMismatch(
            f"no image is in all of {labels} under the same id: {first.label} has ids like "
            f"{first.samples.id[0]!s}, {others[0].label} like {others[0].samples.id[0]!s}"
        )
    left = {store.label: int(store.valid.sum()) - n for store in stores}
    if any(left.values()) and others:
        counts = ", ".join(f"{count} of {label}" for label, count in left.items() if count)
        log.info("%d images are paired by id; left out: %s", n, counts)
    equal = np.ones(n, bool)
    for other, of_store in zip(others, paired[1:], strict=True):
        equal &= first.samples.hash[rows] == other.samples.hash[of_store]
    notes = {"paired": "by id", "left_out": left, "with_equal_bytes": int(equal.sum())}
    return Paired(dict(zip(names, paired, strict=True)), {"pairing": notes})


def _refuse_twice(store: Store) -> None:
    """Raises StoreMismatch if two rows of a store share an id."""
    ids, counts = np.unique(store.samples.id, return_counts=True)
    twice = ids[counts > 1]
    if len(twice):
        raise StoreMismatch(
            f"{store.label} holds {len(twice)} ids more than once ({twice[0]!s}, ...); rows cannot "
            "be paired by id"
        )
