"""All pairs by one measure: values, jackknife replicates, and values of permuted images."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np

from vitsee_core.analyses.similarity.base import Measure
from vitsee_core.analyses.similarity.grams import Grams
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.runtime.progress import counting
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import VitseeError

log = logging.getLogger(__name__)

LEAST_IMAGES = 4
MOST_SLOW = 100  # pairs of a slow measure up to which there are intervals and calibration
STATES = 0.625  # of the memory; a quarter is for Gram matrices, the rest for what is being made
_SAID = 10  # seconds above which a slow measure's cost is logged first


@dataclass(frozen=True)
class Compared:
    """Results for the requested pairs."""

    value: Float  # (pairs,), NaN if a representation is constant
    without: Float | None  # (blocks, pairs) replicates; None for none
    null: Float | None  # (permutations, pairs); None for none
    n_images: int  # images counted
    remarks: list[str] = field(default_factory=list)  # what was left out


def compare_all(
    grams: Grams,
    measure: Measure,
    pairs: Integers,
    *,
    intervals: bool = True,
    permutations: int = 0,
) -> Compared:
    """A measure of pairs of representations.

    Args:
        grams: of the representations.
        measure: see `Measure`.
        pairs: (pairs, 2) indices of representations.
        intervals: whether to compute replicates without one block of images each.
        permutations: of the images, for the null.

    Raises:
        VitseeError: too few images.
    """
    remarks: list[str] = []
    constant, places = _images(grams, measure, np.unique(pairs), remarks)
    # Both orders of a symmetric pair are computed once.
    ordered = np.sort(pairs, 1) if measure.symmetric else pairs
    distinct, back = np.unique(ordered, axis=0, return_inverse=True)
    back = back.ravel()
    work = _Work(grams, measure, distinct, constant)
    if measure.slow and len(distinct) > MOST_SLOW and (intervals or permutations):
        remarks.append(
            f"{measure.name}: no intervals and no calibration of {len(distinct)} pairs, each takes "
            f"seconds; they are made of at most {MOST_SLOW} (--pairs same-depth, fewer --sites)"
        )
        intervals, permutations = False, 0
    labels = grams.labels[places]
    blocks = np.unique(labels)
    intervals = intervals and len(blocks) > 1 and len(places) > LEAST_IMAGES
    orders = draw_orders(len(places), permutations, grams.comparison.seed)
    rounds = 1 + (len(blocks) if intervals else 0)
    steps = rounds * work.steps(len(places))
    with counting(grams.comparison.progress, steps, f"matrices for {measure.name}"):
        parts = [np.flatnonzero(labels != block) for block in blocks] if intervals else []
        result = work.whole(places, orders, parts if measure.reduces else [], remarks)
        without = result.without
        if intervals and not measure.reduces:
            without = np.stack([work.value(places[part], result.kept) for part in parts])
    return Compared(
        result.value[back],
        without[:, back] if intervals else None,
        result.null[:, back] if permutations else None,
        len(places),
        remarks,
    )


def draw_orders(n: int, permutations: int, seed: int) -> list[Integers]:
    """Random orders of n images."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(n) for _ in range(permutations)]


def _images(
    grams: Grams, measure: Measure, used: Integers, remarks: list[str]
) -> tuple[set[int], Integers]:
    """Representations that are constant, and the images that count."""
    places = grams.sample(measure.most_images)
    if len(places) < (n := grams.comparison.n_images):
        remarks.append(f"{measure.name}: of {len(places)} of the {n} images, drawn at random")
    constant: set[int] = set()
    lacking = np.zeros(len(places), bool)
    for k in used.tolist():
        gram = grams.read(k, places)
        if gram.is_constant:
            constant.add(k)
        elif (lacks := measure.lacking(gram)) is not None:
            lacking |= lacks
    if constant:
        names = ", ".join(sorted({grams.name(k) for k in constant}))
        remarks.append(f"no {measure.name} for {names}: the features of all images are the same")
    if lacking.any():
        remarks.append(
            f"{measure.name}: {lacking.sum()} of {len(places)} images are left out, whose features "
            "are all 0 (or, for correlations, all the same) at some site"
        )
    if (left := len(places) - int(lacking.sum())) < LEAST_IMAGES:
        raise VitseeError(
            f"{left} images have features that are not all 0 at every site; expected at least "
            f"{LEAST_IMAGES} for {measure.name}"
        )
    return constant, places[~lacking]


@dataclass(frozen=True)
class _Found:
    """Results for distinct pairs."""

    value: Float  # (pairs,)
    null: Float  # (permutations, pairs)
    without: Float  # (parts, pairs) of some of the images
    # what replicates reuse, see `Measure.kept`
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """Distinct pairs of representations, in groups whose states fit the memory together."""

    grams: Grams
    measure: Measure
    pairs: Integers
    constant: set[int]

    def steps(self, n: int) -> int:
        """Number of states to compute."""
        return sum(len(members) for _, members in self._groups(n))

    def whole(
        self,
        places: Integers,
        orders: Sequence[Integers],
        parts: Sequence[Integers],
        remarks: list[str],
    ) -> _Found:
        """Values of all images, of permuted ones, and of the images at each of `parts` among
        `places`, for measures that reduce; remarks are appended to `remarks`."""
        n = len(self.pairs)
        rows = (1, len(orders), len(parts))
        (value,), null, without = (np.full((k, n), np.nan) for k in rows)
        result = _Found(value, null, without)
        for of, states in self._in_groups(places, {}):
            pairs = self.pairs[of]
            if self.measure.slow:
                self._say_cost(states, pairs, 1 + len(orders))
            value[of] = self.measure.compare(states, states, pairs)
            if (remark := self.measure.remark(states, states, pairs)) is not None:
                remarks.append(remark)
            if orders:
                null[:, of] = self._null(states, pairs, places, orders)
            with one_blas_thread():  # set once for all parts
                for row, part in zip(without, parts, strict=True):
                    row[of] = self._reduced(states, pairs, places, part)
            for k, state in enumerate(states):
                if state is not None:
                    left = {*result.kept.get(k, ()), *self.measure.kept(state)}
                    result.kept[k] = tuple(sorted(left))
        return result

    def _null(
        self, states: Sequence[Any], pairs: Integers, places: Integers, orders: Sequence[Integers]
    ) -> Float:
        """(permutations, pairs), in this process; or a range of permutations in each of a map's
        processes, which recompute the states, if their memory holds these."""
        used = np.unique(pairs).tolist()
        execution = self.grams.comparison.execution
        there = self.grams.elsewhere(used)
        memory = execution.budget // max(1, getattr(execution.map, "local", 0))
        need = 2 * self.measure.state_bytes(len(places)) * len(used)
        if there is None or need > STATES * memory:
            return self.measure.null(states, states, pairs, orders)
        work = _Null(there, self.measure, pairs, places, self.grams.comparison.seed)
        edges = np.linspace(0, len(orders), min(len(orders), execution.width) + 1).astype(int)
        ranges = [range(start, stop) for start, stop in pairwise(edges.tolist())]
        return np.concatenate(list(execution.spread(work, ranges)))

    def _reduced(
        self, states: Sequence[Any], pairs: Integers, places: Integers, part: Integers
    ) -> Float:
        """(pairs,) of the images at `part` among `places`, from the states of all of these."""

        def reduce(k: int) -> Any:
            if (made := self.measure.reduced(states[k], part)) is None:
                made = self.measure.prepare(self.grams.read(k, places[part]))
            self.grams.comparison.progress.advance(1)
            return made

        fewer = self.made(reduce, np.unique(pairs).tolist())
        value = np.full(len(pairs), np.nan)
        there = np.array([state is not None for state in fewer])[pairs].all(1)
        if there.any():
            value[there] = self.measure.compare(fewer, fewer, pairs[there])
        return value

    def value(self, places: Integers, kept: dict[int, tuple[int, ...]]) -> Float:
        """(pairs,) of some of the images."""
        value = np.full(len(self.pairs), np.nan)
        for of, states in self._in_groups(places, kept):
            value[of] = self.measure.compare(states, states, self.pairs[of])
        return value

    def _in_groups(
        self, places: Integers, kept: dict[int, tuple[int, ...]]
    ) -> Iterator[tuple[Integers, list[Any]]]:
        """Indices of pairs, and the states that they need, at their representations' places; pairs
        of representations without a state are left out."""

        def prepare(k: int) -> Any:
            made = None
            if k not in self.constant:
                made = self.measure.prepare(self.grams.read(k, places), kept.get(k, ()))
            self.grams.comparison.progress.advance(1)
            return made

        for of, members in self._groups(len(places)):
            states = self.made(prepare, members)
            there = np.array([state is not None for state in states])
            of = of[there[self.pairs[of]].all(1)]
            if len(of):
                yield of, states

    def made(self, make: Callable[[int], Any], members: list[int]) -> list[Any]:
        """`make` of each of these representations, on all cores, at its place; None elsewhere."""
        states: list[Any] = [None] * len(self.grams.views)
        with lane_pool(n_lanes()) as pool:
            made = in_order(make, members, pool, n_lanes() + 1)
            for k, state in zip(members, made, strict=True):
                states[k] = state
        return states

    def _groups(self, n: int) -> list[tuple[Integers, list[int]]]:
        """Indices of pairs, and the representations in them, whose states fit the memory."""
        used = np.unique(self.pairs)
        each = 2 * self.measure.state_bytes(n)  # also for permuted or reduced states
        most = max(2, int(STATES * self.grams.comparison.memory // each))
        if len(used) <= most:
            return [(np.arange(len(self.pairs)), used.tolist())]
        group_of = {int(k): at // (most // 2) for at, k in enumerate(used)}
        groups = np.vectorize(group_of.__getitem__)(self.pairs)
        grouped = []
        for a, b in combinations_with_replacement(range(max(group_of.values()) + 1), 2):
            of = np.flatnonzero((np.sort(groups, 1) == (a, b)).all(1))
            if len(of):
                grouped.append((of, np.unique(self.pairs[of]).tolist()))
        return grouped

    def _say_cost(self, states: list[Any], pairs: Integers, times: int) -> None:
        """Log the estimated time of all pairs, from one of them."""
        start = time.perf_counter()
        self.measure.compare(states, states, pairs[len(pairs) // 2][np.newaxis])
        seconds = (time.perf_counter() - start) * len(pairs) * times / n_lanes()
        if seconds > _SAID:
            log.warning(
                "%s: %d pairs, %d times, take about %.0f s",
                self.measure.name,
                len(pairs),
                times,
                seconds,
            )


@dataclass(frozen=True)
class _Null:
    """(permutations, pairs) of a range of the permutations, in another process."""

    grams: Grams
    measure: Measure
    pairs: Integers
    places: Integers
    seed: int

    def __call__(self, execution: Execution, of: range) -> Float:
        used = np.unique(self.pairs).tolist()
        self.grams.require(used)
        grams = replace(
            self.grams, comparison=replace(self.grams.comparison, memory=execution.budget)
        )
        work = _Work(grams, self.measure, self.pairs, set())
        states = work.made(lambda k: self.measure.prepare(grams.read(k, self.places)), used)
        orders = draw_orders(len(self.places), of.stop, self.seed)[of.start :]
        return self.measure.null(states, states, self.pairs, orders)
