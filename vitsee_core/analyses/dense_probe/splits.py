"""Which images train a dense probe, which of them choose its l2, and which test it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.features import require_comparable
from vitsee_core.images.errors import DataError
from vitsee_core.images.only import named_only
from vitsee_core.labels.labelled_rows import in_split
from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Mask
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution

CHOOSING = 0.1  # of the training images

Images = tuple[Store, Rows]


def pairs(
    train: Store,
    tests: Sequence[Store],
    split: str | None,
    holdout: float | None,
    execution: Execution,
) -> list[tuple[Images, Images]]:
    """What trains and what tests, for each store that tests."""
    if not tests:
        ours, theirs = split_images(train, execution, split, holdout)
        return [((train, ours), (train, theirs))]
    require_comparable(train, tests)
    ours = execution.rows(train)
    return [((train, ours), (test, execution.rows(test))) for test in tests]


def pairs_of_untrained(
    places: Sequence[Path],
    n_tests: int,
    split: str | None,
    holdout: float | None,
    execution: Execution,
) -> list[tuple[Images, Images]]:
    """The same of the stores of an untrained model.

    Raises:
        VitseeError: not one for each of the trained model's.
    """
    if not places:
        return []
    if len(places) != 1 + n_tests:
        raise VitseeError(
            f"--untrained was given {len(places)} times; expected {1 + n_tests}: the stores of a "
            f"model with random weights for {'TRAIN and each TEST' if n_tests else 'the store'}, "
            "in this order"
        )
    first, *others = [open_store(place) for place in places]
    return pairs(first, others, split, holdout, execution)


def split_images(
    store: Store, execution: Execution, split: str | None, holdout: float | None
) -> tuple[Rows, Rows]:
    """The images of one store that train, and those that test.

    Args:
        store: gives both.
        execution: which images are chosen, and the seed of those held out.
        split: test on these: a split of the store's data, or a file that lists images.
        holdout: test on this share, drawn over the data set's own order.

    Raises:
        VitseeError: no such split, or nothing is left to train or to test.
    """
    rows = execution.rows(store)
    if split is not None:
        tested, how = _named(store, split), f"of split {split}"
    else:
        assert holdout is not None
        tested = drawn(store, rows.mask, holdout, (execution.seed, 2))
        how = f"{holdout:g} held out with seed {execution.seed}"
    parts = rows.mask & ~tested, rows.mask & tested
    for mask, use in zip(parts, ("train", "test"), strict=True):
        if not (mask & store.valid).any():
            raise VitseeError(f"{store.label}: no image is left to {use} ({rows.how}, {how})")
    return tuple(  # type: ignore[return-value]
        replace(rows, mask=mask, n_invalid=int((mask & ~store.valid).sum()), how=f"{use} {how}")
        for mask, use in zip(parts, ("not", "those"), strict=True)
    )


def _named(store: Store, split: str) -> Mask:
    """(images,) those of a split, or of a list in a file."""
    if not Path(split).is_file():
        return in_split(store, split)
    try:
        return named_only(Path(split), store.samples.id.tolist(), store.label)
    except DataError as error:
        raise VitseeError(str(error)) from None


def drawn(store: Store, among: Mask, share: float, seed: tuple[int, ...]) -> Mask:
    """(images,) this share of some images, one at least and not all, drawn over the data set's own
    order, so that a shuffled store gives the same ones."""
    places = np.flatnonzero(among & store.valid)
    found = np.zeros(len(among), bool)
    if len(places) < 2:
        return found
    places = places[np.argsort(store.samples.index[places], kind="stable")]
    n = min(max(1, round(share * len(places))), len(places) - 1)
    found[np.random.default_rng(seed).permutation(places)[:n]] = True
    return found
