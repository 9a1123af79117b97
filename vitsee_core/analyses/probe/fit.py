"""Ridge probes of a group of tokens, fitted in one pass over the training images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.analyses.probe.sources import Block, Source
from vitsee_core.kernels.ridge import (
    GRID,
    Algebra,
    Factors,
    HeldOut,
    LeaveOneOut,
    Linear,
    SufficientStats,
    ranks,
    solve,
)
from vitsee_core.kernels.ridge.sufficient_stats import Piece, TrainingSums, n_bytes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float, Integers, Mask

T = TypeVar("T")
Judges = Mapping[tuple[int, int], HeldOut | LeaveOneOut]  # of draws and tokens

ROWS = 4096
JUDGED = 1024  # images per thread


@dataclass(frozen=True)
class Task:
    """Settings shared by all probes of a run.

    Attributes:
        labels: (n,) of the labelled training images.
        l2s: given values, all of which are reported; empty if `choose`, "holdout" or "loo",
            decides.
        jobs: threads.
        memory: bytes.
    """

    labels: Integers
    n_classes: int
    algebra: Algebra
    l2s: tuple[float, ...]
    choose: str
    jobs: int
    memory: int

    def method(self, draw: Draw) -> str:
        """given, holdout or loo; loo if a draw has no images to hold out (one shot)."""
        if self.l2s:
            return "given"
        return self.choose if self.choose == "loo" or draw.held_out.any() else "loo"

    def judging(self, draw: Draw) -> Integers:
        """Places of the images that choose a draw's l2."""
        method = self.method(draw)
        if method == "given":
            return draw.places[:0]
        return draw.places if method == "loo" else draw.places[draw.held_out]

    @property
    def n_l2(self) -> int:
        """Number of l2 values that each probe is reported at."""
        return max(1, len(self.l2s))


@dataclass(frozen=True)
class Fitted:
    """One probe at one or several l2."""

    l2s: tuple[float, ...]
    model: Linear | Factors

    @property
    def blind(self) -> bool:
        """Whether it gives every image the same scores: its training features were all equal."""
        weights = self.model.weights if isinstance(self.model, Linear) else self.model.rhs
        return not weights.any()

    def ranks(self, x: Float, labels: Integers) -> Integers:
        """(l2s, m) number of classes ranked before each image's own, from features (m, dim) and
        labels (m,); among equal scores the lower class comes first."""
        if isinstance(self.model, Linear):
            return ranks(self.model.scores(x), labels)[np.newaxis]
        z = self.model.coordinates(x)
        return np.stack([ranks(self.model.scores(z, l2), labels) for l2 in self.l2s])


def token_bytes(task: Task, draws: Sequence[Draw], dim: int) -> int:
    """Approximate memory of one token while it is probed."""
    probes = sum(n_bytes(len(draw), dim, task.n_classes) for draw in draws)
    again = len(_looked_at_again(task, draws))
    return probes + (4 * again * dim if 4 * again * dim <= task.memory // 2 else 0)


def fit(source: Source, part: slice, draws: Sequence[Draw], task: Task) -> list[list[Fitted]]:
    """A probe for each draw and token of the part of the source's tokens. The training images are
    read once; twice if those that choose l2 do not fit the memory."""
    tokens = len(range(*part.indices(source.n_tokens)))
    n = len(task.labels)
    methods = [task.method(draw) for draw in draws]
    fit_to, judged_by = [np.zeros((len(draws), n), bool) for _ in range(2)]
    for d, (draw, method) in enumerate(zip(draws, methods, strict=True)):
        held = draw.held_out & (method == "holdout")
        fit_to[d, draw.places[~held]] = True
        judged_by[d, draw.places[held]] = True

    def empty_stats() -> list[list[SufficientStats]]:
        return [[SufficientStats(source.dim, task.n_classes) for _ in range(tokens)] for _ in draws]

    fitted, held_out = empty_stats(), empty_stats()
    again = _looked_at_again(task, draws)
    keep = len(again) > 0 and 4 * len(again) * tokens * source.dim <= task.memory // 2
    kept = np.empty((len(again) if keep else 0, tokens, source.dim), np.float32)
    wanted = np.zeros(n, bool)
    wanted[again] = keep
    done = 0
    every = [*zip(fit_to, fitted, strict=True), *zip(judged_by, held_out, strict=True)]
    used = [(mask, sums) for mask, sums in every if mask.any()]

    def pieces() -> Iterator[tuple[SufficientStats, Piece]]:
        """Images whose sums are due, as they are read."""
        nonlocal done
        for places, x in source.blocks(part, union([draw.places for draw in draws])):
            for mask, sums in used:
                rows, some = _chosen(mask[places], x)
                labels = task.labels[places[rows]]
                for t in range(tokens if len(labels) else 0):
                    if (piece := sums[t].wait(some[:, t], labels)) is not None:
                        yield sums[t], piece
            _, some = _chosen(wanted[places], x)
            kept[done : done + len(some)] = some
            done += len(some)

    def summed(due: tuple[SufficientStats, Piece]) -> tuple[SufficientStats, TrainingSums]:
        return due[0], due[0].sums_of(due[1])

    for sums, part_sums in thread_map(task.jobs)(summed, pieces()):
        sums.count(part_sums)
    pairs = [(d, t) for d in range(len(draws)) for t in range(tokens)]

    def read_again() -> Iterable[Block]:
        return _in_memory(again, kept) if keep else source.blocks(part, again)

    judges = _judge(pairs, methods, fitted, task, read_again, draws)

    def finish(pair: tuple[int, int]) -> Fitted:
        d, t = pair
        if methods[d] == "given":
            if len(task.l2s) > 1:
                return Fitted(task.l2s, Factors.of(fitted[d][t], task.algebra))
            l2 = task.l2s[0]
        else:
            l2 = judges[pair].best()
        whole = fitted[d][t].joined(held_out[d][t])
        return Fitted((l2,), solve(whole, task.algebra, l2))

    probes = list(thread_map(task.jobs)(finish, pairs))
    return [probes[d * tokens : (d + 1) * tokens] for d in range(len(draws))]


def _judge(
    pairs: Sequence[tuple[int, int]],
    methods: Sequence[str],
    fitted: Sequence[Sequence[SufficientStats]],
    task: Task,
    read: Callable[[], Iterable[Block]],
    draws: Sequence[Draw],
) -> Judges:
    """Evaluate each probe at every l2, on held-out images or by leave-one-out."""
    pairs = [pair for pair in pairs if methods[pair[0]] != "given"]
    if not pairs:
        return {}

    def decompose(pair: tuple[int, int]) -> HeldOut | LeaveOneOut:
        d, t = pair
        judge = LeaveOneOut if methods[d] == "loo" else HeldOut
        return judge(Factors.of(fitted[d][t], task.algebra), GRID)

    judges = dict(zip(pairs, list(thread_map(task.jobs)(decompose, pairs)), strict=True))
    masks = np.zeros((len(draws), len(task.labels)), bool)
    for mask, draw in zip(masks, draws, strict=True):
        mask[task.judging(draw)] = True
    _look(judges, read(), masks, task)
    return judges


def _look(judges: Judges, blocks: Iterable[Block], masks: Mask, task: Task) -> None:
    """Show the judges the images in (draws, images) `masks`."""

    def pieces() -> Iterator[tuple[tuple[int, int], NDArray[np.float32], Integers]]:
        """Pieces of a fixed number of images whatever the number of threads, as the order of sums
        decides the last digits."""
        for places, x in blocks:
            chosen = [np.flatnonzero(mask[places]) for mask in masks]
            for d, t in judges:
                for start in range(0, len(chosen[d]), JUDGED):
                    rows = chosen[d][start : start + JUDGED]
                    yield (d, t), x[rows, t], task.labels[places[rows]]

    def look(
        piece: tuple[tuple[int, int], NDArray[np.float32], Integers],
    ) -> tuple[tuple[int, int], Any]:
        pair, x, labels = piece
        return pair, judges[pair].judged(x, labels)

    for pair, judged in thread_map(task.jobs)(look, pieces()):
        judges[pair].count(judged)


def _chosen(mask: Mask, x: NDArray[np.float32]) -> tuple[slice | Integers, NDArray[np.float32]]:
    """Which images of a block are selected, and their features; without copying all of them."""
    if mask.all():
        return slice(None), x
    rows = np.flatnonzero(mask)
    return rows, x[rows]


def _in_memory(places: Integers, x: NDArray[np.float32]) -> Iterator[Block]:
    """Larger blocks than slabs: at every l2 each costs a division of the right-hand sides."""
    for start in range(0, len(places), ROWS):
        yield places[start : start + ROWS], x[start : start + ROWS]


def union(places: Sequence[Integers]) -> Integers:
    """All of these places once, ascending."""
    return np.unique(np.concatenate(places))


def _looked_at_again(task: Task, draws: Sequence[Draw]) -> Integers:
    """Places of the images that choose some draw's l2."""
    return union([task.judging(draw) for draw in draws])
