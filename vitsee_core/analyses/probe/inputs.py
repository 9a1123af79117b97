"""The inputs of probes: which images train, choose l2 and test, and where their features
come from.

Images are drawn in the data set's own order (`samples.index`), so that a shuffled store
selects the same images as an ordered one. Features come from a store, or from a random
generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import numpy as np

from vitsee_core.features import SiteFeatures
from vitsee_core.runtime.options import Option
from vitsee_core.truth.labels.labelled_rows import (
    ALLOW_SHARED,
    TRAIN_IMAGES,
    LabelledRows,
    labelled_rows,
    random_pieces,
)
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

HELD_OUT = 0.2  # share of each class that chooses l2
MAX_NAMES = 6  # class names in a message
# Indices (m,) of images, and their features (m, tokens, dim).
Block = tuple[Integers, Float32]


@dataclass(frozen=True)
class SplitOptions:
    """Which images train, which test, and whether some may do both."""

    test_split: Annotated[
        str | None,
        Option(
            "Without TEST: test on images of this split of the data, train on all others.",
            metavar="NAME",
            default="none",
        ),
    ] = None
    holdout: Annotated[
        float | None,
        Option(
            "Without TEST: test on this share of each class, e.g. 0.2.",
            metavar="SHARE",
            above=0,
            below=1,
            default="none",
        ),
    ] = None
    train_images: Annotated[int | None, TRAIN_IMAGES] = None
    allow_shared: Annotated[bool, ALLOW_SHARED] = False


class ProbedStores(NamedTuple):
    """The stores of a probe.

    Attributes:
        train: store whose images train.
        tests: stores whose images test; without any, a part of `train` tests.
        split: which part that is.
    """

    train: Store
    tests: tuple[Store, ...]
    split: SplitOptions

    @property
    def all(self) -> tuple[Store, ...]:
        """The training store, then the test stores."""
        return (self.train, *self.tests)

    @property
    def n_ways_of_testing(self) -> int:
        """The number of TEST, --test-split and --holdout that were given."""
        has_tests = len(self.tests) > 0
        has_split = self.split.test_split is not None
        has_holdout = self.split.holdout is not None
        return has_tests + has_split + has_holdout


class TrainAndTest(NamedTuple):
    """The labelled rows that train and those that test."""

    train: LabelledRows
    test: LabelledRows


def split_rows(
    train: Store,
    test: Store | None,
    *,
    test_split: str | None = None,
    holdout: float | None = None,
    rows: Callable[..., LabelledRows] = labelled_rows,
    seed: int = 0,
) -> TrainAndTest:
    """Return the rows that train and those that test.

    One of `test`, `test_split` and `holdout` is given.

    Args:
        train: store whose labelled rows train.
        test: store whose labelled rows test.
        test_split: rows of this split of the data test, all others train.
        holdout: this share of each class tests, drawn with `seed`, at least one image of a
            class with two.
        rows: returns the labelled rows of a store, and of a `split` of its data.
        seed: seed of the held-out share.

    Raises:
        MissingInput: no labels, or no such split.
        VitseeError: nothing is left to train or test.
    """
    data = rows(train)
    if test is not None:
        return TrainAndTest(data, rows(test))
    if test_split is not None:
        tested = rows(train, split=test_split)
        is_untested = ~tested.mask[data.rows]
        how = f"{data.how}, not of split {test_split}"
        return TrainAndTest(_subset(data, is_untested, how, "train"), tested)
    assert holdout is not None
    if not 0 < holdout < 1:
        raise VitseeError(
            f"--holdout is {holdout}; expected a share between 0 and 1, e.g. 0.2"
        )
    rng = np.random.default_rng((seed, 2))
    # Segments of one image are alike: they are held out together, by image rather than by
    # class.
    is_tested = data.held_out(holdout, rng)
    unit = "the images"
    if is_tested is None:
        unit = "each class"
        order, positions_of_classes = _positions_by_class(data)
        is_tested = np.zeros(len(data), bool)
        is_tested[order[_draw_share(positions_of_classes, holdout, rng)]] = True
    how = f"{holdout:g} of {unit} held out with seed {seed}"
    return TrainAndTest(
        train=_subset(data, ~is_tested, f"{data.how}, without {how}", "train"),
        test=_subset(data, is_tested, f"{data.how}, the {how}", "test"),
    )


def _subset(data: LabelledRows, mask: Mask, how: str, use: str) -> LabelledRows:
    """Return the labelled rows of a mask.

    Args:
        data: labelled rows.
        mask: (rows,) which of them.
        how: how they were selected, for notes and errors.
        use: "train" or "test", for errors.
    """
    if not mask.any():
        raise VitseeError(
            f"{data.store.label}: none of the {len(data)} {data.WHAT} are left to {use} "
            f"({how})"
        )
    return data.subset(mask, how)


def check_classes(
    train: LabelledRows, test: LabelledRows, shots: Sequence[int]
) -> list[str]:
    """Return remarks on training images of a single class, and on tested classes without
    any.

    Raises:
        VitseeError: a tested class has no training image, and a number of images per class
            was requested.
    """
    n_tested = np.bincount(test.labels, minlength=train.n_classes)
    n_trained = np.bincount(train.labels, minlength=train.n_classes)
    untrained = np.flatnonzero((n_tested > 0) & (n_trained == 0))
    remarks = []
    if len(untrained):
        names = _abbreviated([train.classes[i] for i in untrained])
        if shots:
            raise VitseeError(
                f"{len(untrained)} of the {train.n_classes} classes are tested and have "
                f"no {train.NOUN} (0) in {train.store.label}: {names}; --shots "
                f"{min(shots)} needs as many of each"
            )
        remarks.append(
            f"no training {train.NOUN} of {len(untrained)} classes that are tested: "
            f"{names}"
        )
    if np.count_nonzero(n_trained) == 1:
        only = train.classes[int(n_trained.argmax())]
        remarks.append(
            f"all training {train.NOUN}s are of one class, {only}: every {train.NOUN} is "
            "given it"
        )
    return remarks


@dataclass(frozen=True)
class Draw:
    """The training images of one probe.

    Attributes:
        shots: images per class; None for all.
        seed: seed of the draw.
        indices: (n,) which of the labelled training rows, ascending.
        held_out: (n,) which of them choose l2; none if all classes have one image.
    """

    shots: int | None
    seed: int
    indices: Integers
    held_out: Mask

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.indices)


def draw_images(train: LabelledRows, shots: int | None, seed: int) -> Draw:
    """Draw the training images of one probe: all of them, or `shots` per class.

    The shots are the first of a permutation of the class, drawn class after class by one
    generator, so that fewer shots are a subset of more (as in big_vision).

    Raises:
        VitseeError: classes with fewer images; names and counts them.
    """
    rng = np.random.default_rng(seed)
    order, positions_of_classes = _positions_by_class(train)
    picked = positions_of_classes
    if shots is not None:
        picked = [rng.permutation(positions)[:shots] for positions in picked]
        _require_shots(train, picked, shots)
    indices = np.sort(order[np.concatenate(picked)])
    # A generator of its own: whether l2 is chosen does not change which images are drawn.
    held_out_rng = np.random.default_rng((seed, 1))
    held_out = np.zeros(len(train), bool)
    held_out[order[_draw_share(picked, HELD_OUT, held_out_rng)]] = True
    return Draw(shots, seed, indices, held_out[indices])


def _positions_by_class(data: LabelledRows) -> tuple[Integers, list[Integers]]:
    """Return the labelled rows in the data set's order, and each class's positions in
    it."""
    order = np.argsort(data.index, kind="stable")
    labels = data.labels[order]
    return order, [np.flatnonzero(labels == number) for number in range(data.n_classes)]


def _require_shots(train: LabelledRows, picked: Sequence[Integers], shots: int) -> None:
    """Refuse a number of shots that some class does not have.

    picked: the drawn images of each class.
    """
    short = [
        f"{train.classes[number]} ({len(members)})"
        for number, members in enumerate(picked)
        # A class without any image is not in these data: `check_classes` tells of it.
        if 0 < len(members) < shots
    ]
    if short:
        raise VitseeError(
            f"{len(short)} of the {train.n_classes} classes of {train.store.label} have "
            f"fewer than {shots} training {train.NOUN}s: {_abbreviated(short)} (give a "
            "smaller --shots, or extract more images)"
        )


def _abbreviated(names: Sequence[str]) -> str:
    """Return the first names separated by commas, with an ellipsis for the rest."""
    listed = ", ".join(names[:MAX_NAMES])
    return f"{listed}, ..." if len(names) > MAX_NAMES else listed


def _draw_share(
    classes: Sequence[Integers], share: float, rng: np.random.Generator
) -> Integers:
    """Draw a share of the images of each class.

    A class gives at least one image but not all of them, and none if it has a single one.

    Args:
        classes: positions of each class's images.
        share: between 0 and 1.
        rng: generator of the draw.
    """
    drawn = []
    for positions in classes:
        n_images = len(positions)
        if n_images < 2:
            continue
        n_drawn = min(max(1, round(share * n_images)), n_images - 1)
        # Sorted first, so that the draw depends on the set of images and not on their
        # order.
        drawn.append(np.sort(rng.permutation(np.sort(positions))[:n_drawn]))
    if not drawn:
        return np.zeros(0, np.int64)
    return np.concatenate(drawn)


class Source(Protocol):
    """Features of some labelled images, one vector for each of `n_tokens` tokens."""

    @property
    def n_tokens(self) -> int:
        """Number of vectors per image."""

    @property
    def dim(self) -> int:
        """Channels of a vector."""

    def groups(self, n_tokens: int) -> list[slice]:
        """Return the tokens in groups of about `n_tokens` that are read together."""

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield blocks (indices (m,), features (m, tokens of the slice, dim)) of some
        images.

        Args:
            token_slice: which tokens.
            indices: which of the labelled images, ascending.
        """


@dataclass(frozen=True)
class Stored:
    """Reads the features of labelled rows from a store, slab by slab.

    Attributes:
        features: the features of one site.
        data: the labelled rows of the store.
        jobs: slabs that are read at a time.
        memory: bytes of the whole fit; a quarter of them is for reading.
    """

    features: SiteFeatures
    data: LabelledRows
    jobs: int
    memory: int

    @property
    def n_tokens(self) -> int:
        """Number of vectors per image."""
        return len(self.features.tokens)

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        return self.features.dim

    def groups(self, n_tokens: int) -> list[slice]:
        """Return groups of about `n_tokens` tokens that follow the store's chunks."""
        return self.features.groups(n_tokens)

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield (indices (m,), features (m, tokens of the slice, dim)), one slab at a
        time."""
        yield from self.data.read(
            self.features, indices, token_slice, jobs=self.jobs, memory=self.memory // 4
        )


@dataclass(frozen=True)
class Random:
    """Draws independent standard normal numbers in place of features.

    Attributes:
        n: number of images.
        n_tokens: vectors per image.
        dim: channels of a vector.
        seed: with a token's number it seeds the generator of that token.
    """

    n: int
    n_tokens: int
    dim: int
    seed: Sequence[int]

    def groups(self, n_tokens: int) -> list[slice]:
        """Return the tokens in groups of `n_tokens`."""
        step = max(1, n_tokens)
        return [
            slice(start, min(start + step, self.n_tokens))
            for start in range(0, self.n_tokens, step)
        ]

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield (indices (m,), features (m, tokens of the slice, dim)).

        Numbers are drawn for every image and those of other images are dropped, so that an
        image has the same features whichever images are read with it.
        """
        is_read = np.zeros(self.n, bool)
        is_read[indices] = True
        pieces_of_tokens = [
            random_pieces(self.n, self.dim, (*self.seed, token))
            for token in range(*token_slice.indices(self.n_tokens))
        ]
        start = 0
        for pieces in zip(*pieces_of_tokens, strict=True):
            stop = start + len(pieces[0])
            rows = np.flatnonzero(is_read[start:stop])
            if len(rows):
                yield rows + start, np.stack([piece[rows] for piece in pieces], axis=1)
            start = stop


@dataclass(frozen=True)
class ConcatenatedTokens:
    """All tokens of another source, side by side as one vector."""

    source: Source
    n_tokens: int = 1

    @property
    def dim(self) -> int:
        """Channels of all tokens together."""
        return self.source.n_tokens * self.source.dim

    def groups(self, n_tokens: int) -> list[slice]:
        """Return a single group, as there is only one vector per image."""
        del n_tokens
        return [slice(0, 1)]

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        """Yield (indices (m,), features (m, 1, dim)) of some images."""
        del token_slice
        every_token = slice(0, self.source.n_tokens)
        for block_indices, x in self.source.blocks(every_token, indices):
            yield block_indices, x.reshape(len(x), 1, -1)
