"""The settings of probes (user options, with defaults from published protocols), the images that
train a probe, choose its l2 and test it, and the sources of features: a store, a random generator.

Images are drawn in the data set's own order (`samples.index`), so that a shuffled store selects the
same images as an ordered one.

`raghu`: Raghu et al. 2021, appendix A: 10 images per class, the mean of all tokens, l2 tuned on a
held-out part of the training images; CNNs converted to the last stage's grid and channels. They
follow Dosovitskiy et al. 2021 and say nothing of scaling: features are centred, the intercept is
not penalised. Seeds and the held-out share are not given.

`big_vision`: the few-shot evaluation of Dosovitskiy et al. 2021 in its published code
(google-research/big_vision, evaluators/fewshot_lsr.py): standardised features, a constant column of
100, l2 = 2^10, the pooled vector. With shots 1, 5, 10, 25 and seeds 0 to 2 it is that protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from vitsee_core.features import SiteFeatures
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import Algebra
from vitsee_core.truth.labels.labelled_rows import (
    LabelledRows,
    labelled_rows,
    random_pieces,
    word_or_number,
)
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

PRESETS = ("raghu", "big_vision")
SEEDS = 3
CHOOSERS = ("holdout", "loo")
FREE = "free"
SOLVERS = ("ridge", "sgd")
MOMENTUM = 0.9

WORDS = (*CHOOSERS, "grid")
parse_l2 = partial(
    word_or_number, words=WORDS, expected=f"a number above 0, {', '.join(WORDS)}"
)  # of --l2
parse_intercept = partial(
    word_or_number, words=(FREE,), expected=f"{FREE} or a number above 0, e.g. 100"
)
HELD_OUT = 0.2  # of each class, to choose l2
SHOWN = 6


@dataclass(frozen=True)
class Settings:
    """Settings of all probes."""

    sites: tuple[str, ...]
    tokens: tuple[str, ...]  # () for each site's default
    shots: tuple[int, ...]  # () for all images
    seeds: tuple[int, ...]
    algebra: Algebra
    l2s: tuple[float, ...]  # values to report; () if `choose` decides
    choose: str
    match_last_stage: bool

    def describe(self) -> dict[str, str]:
        algebra = self.algebra
        features = (
            "standardised (std over training images + 1e-5)"
            if algebra.standardise
            else ""
        )
        intercept = "not penalised"
        if algebra.constant is not None:
            intercept = f"weight of a constant column of {algebra.constant:g}, penalised"
        return {
            "features": features or "centred, not scaled",
            "intercept": intercept,
            "l2": self._l2_in_words(),
        }

    def _l2_in_words(self) -> str:
        if self.l2s:
            return "given"
        grid = f"of 2^-10 to 2^19 ({len(GRID)} values)"
        if self.choose == "loo":
            return f"{LeaveOneOut.method} {grid}, exact"
        return (
            f"{grid}, by {HELD_OUT:.0%} of each class of the training images, held out with the "
            f"probe's seed: {HeldOut.method}; then fitted to all training images; with one image "
            f"a class: {LeaveOneOut.method}"
        )


def choose_settings(
    preset: str | None = None,
    *,
    sites: Sequence[str] = (),
    tokens: Sequence[str] = (),
    shots: Sequence[int] = (),
    seeds: int | None = None,
    seed: int = 0,
    l2: Sequence[float | str] = (),
    standardise: bool | None = None,
    intercept: float | str | None = None,
    match_last_stage: bool | None = None,
) -> Settings:
    """The user's options, else the preset's, else the defaults.

    Args:
        tokens: () for each site's default.
        seeds: number of draws.
        seed: of the first draw.
        l2: numbers and `grid`, or one of `CHOOSERS`.
        intercept: `free`, or the value of a penalised constant column.
        match_last_stage: see `features.reader`.

    Raises:
        VitseeError: an unknown word, or choices that exclude each other.
    """
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    raghu = preset == "raghu"
    big_vision = preset == "big_vision"
    shots = tuple(sorted(set(shots))) or ((10,) if raghu else ())
    if shots and shots[0] < 1:
        raise VitseeError(f"--shots is {shots[0]}; expected at least 1")
    if seeds is not None and not shots:
        raise VitseeError(
            "--seeds counts draws of --shots images per class; give --shots too"
        )
    if seeds is not None and seeds < 1:
        raise VitseeError(f"--seeds is {seeds}; expected at least 1")
    first = seed + (seeds or SEEDS if shots else 1)
    if intercept is None:
        intercept = 100.0 if big_vision else FREE
    if isinstance(intercept, str) and intercept != FREE:
        raise VitseeError(f"--intercept is {intercept!r}; expected {FREE} or a number")
    if not isinstance(intercept, str) and not 0 < intercept < float("inf"):
        raise VitseeError(
            f"--intercept is {intercept}; expected {FREE} or a number above 0"
        )
    l2s, choose = _parse_l2(l2 or ((1024.0,) if big_vision else ()))
    return Settings(
        tuple(sites) or (("pooled",) if big_vision else ("blocks",)),
        tuple(dict.fromkeys(tokens)) or (("mean-all",) if raghu else ()),
        shots,
        tuple(range(seed, first)),
        Algebra(
            big_vision if standardise is None else standardise,
            None if isinstance(intercept, str) else float(intercept),
        ),
        l2s,
        choose,
        raghu if match_last_stage is None else match_last_stage,
    )


def _parse_l2(values: Sequence[float | str]) -> tuple[tuple[float, ...], str]:
    words = [value for value in values if isinstance(value, str)]
    choosers = [word for word in words if word in CHOOSERS]
    if unknown := [word for word in words if word not in WORDS]:
        raise VitseeError(
            f"--l2 is {unknown[0]!r}; expected a number, grid, {' or '.join(CHOOSERS)}"
        )
    if choosers and len(values) > 1:
        raise VitseeError(
            f"--l2 {choosers[0]} chooses the value; give no other --l2 beside it"
        )
    if choosers or not values:
        return (), choosers[0] if choosers else "holdout"
    numbers = {float(value) for value in values if not isinstance(value, str)}
    if numbers and not 0 < min(numbers) <= max(numbers) < float("inf"):
        raise VitseeError("--l2: expected finite numbers above 0")
    return tuple(sorted(numbers | set(GRID if "grid" in words else ()))), "given"


@dataclass(frozen=True)
class Training:
    """Epochs, learning rate for 256 images, images per step, whether features are batch-normalised,
    and the torch device."""

    epochs: int = 20
    lr: float = 0.1
    batch: int = 1024
    batch_norm: bool = False
    device: str = "cpu"

    def describe(self) -> str:
        norm = "batch-normalised features" if self.batch_norm else "features as they are"
        return (
            f"SGD on {norm}: {self.epochs} epochs, batches of {self.batch}, cross-entropy, "
            f"momentum {MOMENTUM}, no weight decay, learning rate {self.lr:g} x batch / 256 "
            "falling to 0 along a cosine"
        )


def choose_training(
    solver: str, device: str, *, sgd: Mapping[str, Any], ridge: Mapping[str, Any]
) -> Training | None:
    """Settings of SGD; None for ridge. sgd, ridge: the options of either alone by name, None if not
    given; those of SGD are `Training`'s fields.

    Raises:
        VitseeError: an unknown solver, or options of the other one.
    """
    if solver not in SOLVERS:
        raise VitseeError(f"no solver {solver!r}; expected {' or '.join(SOLVERS)}")
    other, others = ("ridge", ridge) if solver == "sgd" else ("sgd", sgd)
    if wrong := [name for name, value in others.items() if value is not None]:
        raise VitseeError(
            f"{wrong[0]} belongs to --solver {other}, not to {solver}; leave it out"
        )
    if solver == "ridge":
        return None
    given = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in sgd.items()
        if value is not None
    }
    return Training(device=device, **given)


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
    picked = [
        members if shots is None else rng.permutation(members)[:shots]
        for members in classes
    ]
    if shots is not None:
        _check_shots(train, picked, shots)
    places = np.sort(order[np.concatenate(picked)])
    held_out = np.zeros(len(train), bool)
    held_out[
        order[_share_of_each(picked, HELD_OUT, np.random.default_rng((seed, 1)))]
    ] = True
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


def _share_of_each(
    classes: Sequence[Integers], share: float, rng: np.random.Generator
) -> Integers:
    """The places of this share of each class's images: at least one but not all, none of a single
    one."""
    chosen = []
    for members in map(np.sort, classes):
        if (n := len(members)) > 1:
            some = min(max(1, round(share * n)), n - 1)
            chosen.append(np.sort(rng.permutation(members)[:some]))
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def check_classes(
    train: LabelledRows, test: LabelledRows, shots: Sequence[int]
) -> list[str]:
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
    untrained = (
        f"no training {train.NOUN} of {len(missing)} classes that are tested: {names}"
    )
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
        raise VitseeError(
            f"--holdout is {holdout}; expected a share between 0 and 1, e.g. 0.2"
        )
    rng = np.random.default_rng((seed, 2))
    of_images = data.held_out(holdout, rng)
    held = np.zeros(len(data), bool)
    of_what = "each class"
    if of_images is not None:
        held = of_images
        of_what = "the images"
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


Block = tuple[Integers, Float32]  # places and features


class Source(Protocol):
    """Features of some labelled images, one vector for each of `n_tokens` tokens."""

    @property
    def n_tokens(self) -> int:
        """Number of vectors per image."""

    @property
    def dim(self) -> int:
        """Channels of a vector."""

    def groups(self, n_tokens: int) -> list[slice]:
        """The tokens in groups of about `n_tokens` that are read together."""

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        """Blocks of places and features (m, tokens of the part, dim), until all `places` are done.

        Args:
            part: of the tokens.
            places: which of the labelled images, ascending.
        """


@dataclass(frozen=True)
class Stored:
    """A store's features of the labelled rows `data`, read slab by slab, `jobs` at a time."""

    features: SiteFeatures
    data: LabelledRows
    jobs: int
    memory: int

    @property
    def n_tokens(self) -> int:
        return len(self.features.tokens)

    @property
    def dim(self) -> int:
        return self.features.dim

    def groups(self, n_tokens: int) -> list[slice]:
        return self.features.groups(n_tokens)

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        yield from self.data.read(
            self.features, places, part, jobs=self.jobs, memory=self.memory // 4
        )


@dataclass(frozen=True)
class Random:
    """Independent standard normal numbers instead of features: for n images, `n_tokens` vectors of
    `dim` channels each."""

    n: int
    n_tokens: int
    dim: int
    seed: Sequence[int]

    def groups(self, n_tokens: int) -> list[slice]:
        step = max(1, n_tokens)
        return [
            slice(a, min(a + step, self.n_tokens)) for a in range(0, self.n_tokens, step)
        ]

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        wanted = np.zeros(self.n, bool)
        wanted[places] = True
        tokens = [
            random_pieces(self.n, self.dim, (*self.seed, token))
            for token in range(*part.indices(self.n_tokens))
        ]
        start = 0
        for pieces in zip(*tokens, strict=True):
            stop = start + len(pieces[0])
            rows = np.flatnonzero(wanted[start:stop])
            if len(rows):
                yield rows + start, np.stack([piece[rows] for piece in pieces], axis=1)
            start = stop


@dataclass(frozen=True)
class ConcatenatedTokens:
    """All tokens of a source as one vector."""

    source: Source
    n_tokens: int = 1

    @property
    def dim(self) -> int:
        return self.source.n_tokens * self.source.dim

    def groups(self, n_tokens: int) -> list[slice]:
        del n_tokens
        return [slice(0, 1)]

    def blocks(self, part: slice, places: Integers) -> Iterator[Block]:
        del part
        for where, x in self.source.blocks(slice(0, self.source.n_tokens), places):
            yield where, x.reshape(len(x), 1, -1)
