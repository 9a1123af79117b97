"""The images that train a probe, those that choose its l2, and those that test it.

All of it is decided in the data set's own order (`samples.index`), so that a shuffled store selects
the same images as an ordered one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.labels.labelled_rows import LabelledRows, labelled_rows
from vitsee_core.types import Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

HELD_OUT = 0.2  # of each class, to choose l2
SHOWN = 6


@dataclass(frozen=True)
class Draw:
    """The training images of one probe."""

    shots: int | None  # per class, None for all
    seed: int
    places: Integers  # (n,) among the labelled training rows, ascending
    held_out: Mask  # (n,) which of them choose l2, none if all classes have one image

    def __len__(self) -> int:
        return len(self.places)


def draw_images(train: LabelledRows, shots: int | None, seed: int) -> Draw:
    """All images, or `shots` per class: the first of a permutation of the class, drawn class after
    class by one generator, so that fewer shots are a subset of more (as in big_vision).

    Raises:
        VitseeError: classes with fewer images; names and counts them.
    """
    rng = np.random.default_rng(seed)
    order, classes = _by_class(train)
    picked = [members if shots is None else rng.permutation(members)[:shots] for members in classes]
    if shots is not None:
        _check_shots(train, picked, shots)
    places = np.sort(order[np.concatenate(picked)])
    held_out = np.zeros(len(train), bool)
    held_out[order[_share_of_each(picked, HELD_OUT, np.random.default_rng((seed, 1)))]] = True
    return Draw(shots, seed, places, held_out[places])


def _by_class(data: LabelledRows) -> tuple[Integers, list[Integers]]:
    """The labelled rows in the data set's order, and each class's positions in it."""
    order = np.argsort(data.index, kind="stable")
    labels = data.labels[order]
    return order, [np.flatnonzero(labels == number) for number in range(data.n_classes)]


def _check_shots(train: LabelledRows, picked: Sequence[Integers], shots: int) -> None:
    short = [
        f"{train.classes[number]} ({len(members)})"
        for number, members in enumerate(picked)
        # A class without any image requires none.
        if 0 < len(members) < shots
    ]
    if short:
        raise VitseeError(
            f"{len(short)} of the {train.n_classes} classes of {train.store.label} have fewer than "
            f"{shots} training {train.NOUN}s: {_shown(short)} (give a smaller --shots, or extract "
            "more images)"
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _share_of_each(classes: Sequence[Integers], share: float, rng: np.random.Generator) -> Integers:
    """The places of this share of each class's images: at least one but not all, none of a single
    one."""
    chosen = []
    for members in map(np.sort, classes):
        if (n := len(members)) > 1:
            some = min(max(1, round(share * n)), n - 1)
            chosen.append(np.sort(rng.permutation(members)[:some]))
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def check_classes(train: LabelledRows, test: LabelledRows, shots: Sequence[int]) -> list[str]:
    """Remarks on training images of a single class, and on tested classes without any. Raises
    VitseeError: there are any, and a number of images per class was requested."""
    tested = np.bincount(test.labels, minlength=train.n_classes)
    trained = np.bincount(train.labels, minlength=train.n_classes)
    missing = [train.classes[i] for i in np.flatnonzero((tested > 0) & (trained == 0))]
    remarks = []
    if np.count_nonzero(trained) == 1:
        only = train.classes[int(trained.argmax())]
        remarks.append(
            f"all training {train.NOUN}s are of one class, {only}: every {train.NOUN} is given it"
        )
    if not missing:
        return remarks
    names = _shown(missing)
    if shots:
        raise VitseeError(
            f"{len(missing)} of the {train.n_classes} classes are tested and have no {train.NOUN} "
            f"(0) in {train.store.label}: {names}; --shots {min(shots)} needs as many of each"
        )
    untrained = f"no training {train.NOUN} of {len(missing)} classes that are tested: {names}"
    return [untrained, *remarks]


def split_rows(
    train: Store,
    test: Store | None,
    *,
    test_split: str | None = None,
    holdout: float | None = None,
    rows: Callable[..., LabelledRows] = labelled_rows,
    seed: int = 0,
) -> tuple[LabelledRows, LabelledRows]:
    """The rows that train and those that test; one of `test`, `test_split` and `holdout` is given.

    Args:
        train: its labelled rows train.
        test: its labelled rows test.
        test_split: rows of this split of the data test, all others train.
        holdout: this share of each class tests, drawn with `seed`, at least one image of a class
            with two.
        rows: returns the labelled rows of a store, and of a `split` of its data.
        seed: of the held-out share.

    Raises:
        MissingInput: no labels, or no such split.
        VitseeError: nothing is left to train or test.
    """
    data = rows(train)
    if test is not None:
        return data, rows(test)
    if test_split is not None:
        tested = rows(train, split=test_split)
        rest = ~tested.mask[data.rows]
        trained = _subset(data, rest, f"{data.how}, not of split {test_split}", "train")
        return trained, tested
    assert holdout is not None
    if not 0 < holdout < 1:
        raise VitseeError(f"--holdout is {holdout}; expected a share between 0 and 1, e.g. 0.2")
    rng = np.random.default_rng((seed, 2))
    of_images = data.held_out(holdout, rng)
    held, of_what = np.zeros(len(data), bool), "each class"
    if of_images is not None:
        held, of_what = of_images, "the images"
    else:
        order, classes = _by_class(data)
        held[order[_share_of_each(classes, holdout, rng)]] = True
    how = f"{holdout:g} of {of_what} held out with seed {seed}"
    return (
        _subset(data, ~held, f"{data.how}, without {how}", "train"),
        _subset(data, held, f"{data.how}, the {how}", "test"),
    )


def _subset(data: LabelledRows, keep: Mask, how: str, use: str) -> LabelledRows:
    if not keep.any():
        raise VitseeError(
            f"{data.store.label}: none of the {len(data)} {data.WHAT} are left to {use} ({how})"
        )
    return data.subset(keep, how)
