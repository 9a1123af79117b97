"""All pairs by one measure: values, jackknife replicates, values of permuted images, and what the
latter say of the former.

Gram matrices are read on demand (`Grams`). `compare_all` computes the states of the representations
in groups that fit the memory, and from them all numbers.

`calibrate`: under the null hypothesis the images are exchangeable: any order of one side's goes
with the other's. With s_1 .. s_B of B permutations (arXiv 2602.14486):

    p          = (1 + #{s_b >= s}) / (B + 1)
    tau        = the ceil((1 - alpha)(B + 1))-th smallest s_b, alpha = 0.05
    calibrated = max(0, (s - tau) / (1 - tau))

and, for the many layers of two models, p_family with the largest s_b of all of them in the place of
each (Westfall & Young 1993). For a distance, signs are reversed and calibrated = max(0, (tau - d) /
tau).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np

from vitsee_core.analyses.similarity.measure import Measure, SiteGram
from vitsee_core.kernels.backend import full_precision
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes, one_blas_thread
from vitsee_core.runtime.progress import counting
from vitsee_core.similarity import Representation
from vitsee_core.similarity.comparison import SHARE, Comparison
from vitsee_core.similarity.estimate import comparing
from vitsee_core.similarity.estimators import full_grams, jackknife_blocks
from vitsee_core.similarity.gram_file import DamagedGram, GramView
from vitsee_core.tables.columns import NULL
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import MissingInput, VitseeError

log = logging.getLogger(__name__)

LEAST_IMAGES = 4
MOST_SLOW = 100  # pairs of a slow measure up to which there are intervals and calibration
STATES = 0.625  # of the memory; a quarter is for Gram matrices, the rest for what is being made
Kept = dict[int, tuple[int, ...]]  # of each representation, see `Measure.kept`
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
        intervals = False
        permutations = 0
    labels = grams.labels[places]
    blocks = np.unique(labels)
    intervals = intervals and len(blocks) > 1 and len(places) > LEAST_IMAGES
    orders = draw_orders(len(places), permutations, grams.comparison.seed)
    rounds = 1 + (len(blocks) if intervals else 0)
    steps = rounds * work.steps(len(places))
    with counting(grams.comparison.progress, steps, f"matrices for {measure.name}"):
        parts = [np.flatnonzero(labels != block) for block in blocks] if intervals else []
        value, null, without, kept = work.whole(
            places, orders, parts if measure.reduces else [], remarks
        )
        if intervals and not measure.reduces:
            without = np.stack([work.value(places[part], kept) for part in parts])
    return Compared(
        value[back],
        without[:, back] if intervals else None,
        null[:, back] if permutations else None,
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
    """The representations that are constant, and the images that count; remarks are appended."""
    places = grams.sample(measure.most_images)
    if len(places) < (n := grams.comparison.n_images):
        remarks.append(
            f"{measure.name}: of {len(places)} of the {n} images, drawn at random"
        )
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
        remarks.append(
            f"no {measure.name} for {names}: the features of all images are the same"
        )
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
    ) -> tuple[Float, Float, Float, Kept]:
        """The values of all images (pairs,), of permuted ones (permutations, pairs), of the images
        at each of `parts` among `places` (parts, pairs), for measures that reduce, and what
        replicates reuse. Remarks are appended to `remarks`."""
        n = len(self.pairs)
        rows = (1, len(orders), len(parts))
        (value,), null, without = (np.full((k, n), np.nan) for k in rows)
        kept: Kept = {}
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
                    kept[k] = tuple(sorted({*kept.get(k, ()), *self.measure.kept(state)}))
        return value, null, without, kept

    def _null(
        self,
        states: Sequence[Any],
        pairs: Integers,
        places: Integers,
        orders: Sequence[Integers],
    ) -> Float:
        """The values of permuted images, (permutations, pairs): in this process, or a range of
        permutations in each of a map's processes, which recompute the states, if their memory holds
        these."""
        used = np.unique(pairs).tolist()
        execution = self.grams.comparison.execution
        there = self.grams.elsewhere(used)
        memory = execution.budget // max(1, getattr(execution.map, "local", 0))
        need = 2 * self.measure.state_bytes(len(places)) * len(used)
        if there is None or need > STATES * memory:
            return self.measure.null(states, states, pairs, orders)
        work = partial(_null_elsewhere, there, self.measure, pairs, places)
        edges = np.linspace(0, len(orders), min(len(orders), execution.width) + 1).astype(
            int
        )
        ranges = [range(start, stop) for start, stop in pairwise(edges.tolist())]
        return np.concatenate(list(execution.spread(work, ranges)))

    def _reduced(
        self, states: Sequence[Any], pairs: Integers, places: Integers, part: Integers
    ) -> Float:
        """The values of the images at `part` among `places`, (pairs,), from the states of all of
        these."""

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

    def value(self, places: Integers, kept: Kept) -> Float:
        """The values of some of the images, (pairs,)."""
        value = np.full(len(self.pairs), np.nan)
        for of, states in self._in_groups(places, kept):
            value[of] = self.measure.compare(states, states, self.pairs[of])
        return value

    def _in_groups(
        self, places: Integers, kept: Kept
    ) -> Iterator[tuple[Integers, list[Any]]]:
        """The pairs in groups: indices of pairs, and the states that they need, at their
        representations' places. Pairs of representations without a state are left out."""

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


def _null_elsewhere(
    grams: Grams,
    measure: Measure,
    pairs: Integers,
    places: Integers,
    execution: Execution,
    some: range,
) -> Float:
    """The values of these permutations, (permutations, pairs), in another process."""
    used = np.unique(pairs).tolist()
    grams.require(used)
    grams = replace(grams, comparison=replace(grams.comparison, memory=execution.budget))
    states = _Work(grams, measure, pairs, set()).made(
        lambda k: measure.prepare(grams.read(k, places)), used
    )
    orders = draw_orders(len(places), some.stop, grams.comparison.seed)[some.start :]
    return measure.null(states, states, pairs, orders)


HELD = 0.25  # of the memory, for matrices that are read once


@dataclass(frozen=True)
class Grams:
    """Gram matrices, each read on demand, and kept if the memory allows it."""

    comparison: Comparison
    views: Sequence[GramView]
    _held: dict[int, SiteGram] = field(default_factory=dict)

    @cached_property
    def labels(self) -> Integers:
        """The jackknife's block of each image, (images,), as in `vitsee cka`."""
        of = self.comparison
        return jackknife_blocks(of.n_images, of.shuffled, of.seed).labels

    def sample(self, most: int | None) -> Integers:
        """The places of at most this many of the images, ascending: the first ones of a store in
        random order, else drawn."""
        of = self.comparison
        n = self.comparison.n_images
        if most is None or n <= most:
            return np.arange(n)
        if of.shuffled:
            return np.arange(most)
        return np.sort(np.random.default_rng(of.seed).choice(n, most, replace=False))

    def elsewhere(self, used: Sequence[int]) -> Grams | None:
        """A picklable reader for another process; None if there are no files."""
        own = self.comparison
        among = [self.comparison.representations[k] for k in used]
        if own.map is None or not all(
            own.cache.is_shared(of.store, own.map) for of in among
        ):
            return None
        return Grams(own.alone, self.views)

    def require(self, used: Sequence[int]) -> None:
        """Refuse files that this process does not find. Raises VitseeError: names one."""
        for path in (self.views[k].file.path for k in used):
            if not path.exists():
                raise VitseeError(
                    f"the Gram matrix {path} is not on a worker's disk: {SHARE}"
                )

    def name(self, k: int) -> str:
        of = self.comparison.representations[k]
        return f"{of.store.label} {of.site.name}"

    def read(self, k: int, places: Integers) -> SiteGram:
        """The Gram matrix of the k-th representation, over some of the images. Raises DamagedGram:
        its file is not what was written."""
        whole = self._held.get(k)
        n = self.comparison.n_images
        if whole is None:
            view = self.views[k]
            whole = SiteGram(view.block(slice(0, n), slice(0, n)), view.shift)
            if (
                len(self._held) + 1
            ) * whole.shifted.nbytes <= HELD * self.comparison.memory:
                self._held[k] = whole
        return whole if len(places) == n else whole.of(places)


@contextmanager
def grams_of(
    rows: Sequence[Representation], cols: Sequence[Representation] | None, **choice: Any
) -> Iterator[Grams]:
    """The Gram matrices of `rows`, then of `cols`, computed as in `vitsee cka` if not cached; see
    `similarity.estimate.hsic` for the other arguments and errors."""
    for one in (*rows, *(cols or ())):
        if one.has_blocks_only:
            raise MissingInput(
                f"{one.store.label} keeps only Gram matrices within slabs of {one.site.name}, "
                "which serve cka alone; run: vitsee cka, or give --tokens mean, or run: vitsee "
                "extract MODEL --tokens all ..."
            )
    with comparing(rows, cols, **choice) as comparison:
        yield Grams(comparison, _whole(comparison))


def _whole(comparison: Comparison) -> list[GramView]:
    """Views of verified tiles; damaged ones are recomputed."""
    for _ in range(len(comparison.representations)):
        with full_precision(comparison.device), one_blas_thread():
            views = full_grams(comparison)
        try:
            for view in views:
                for k in range(view.file.header.n_tiles):
                    view.file.tile(k)
        except DamagedGram as error:
            error.path.unlink(missing_ok=True)
        else:
            return views
    with full_precision(comparison.device), one_blas_thread():
        return full_grams(comparison)


ALPHA = 0.05
ROUNDING = 1e-9
LEAST = 19  # permutations that give a 5 % threshold
METHOD = (
    "permutations of the images of side b, one for all layers; tau the 5 % threshold, p one-sided, "
    "p_family against the largest of all layers of two stores in each permutation"
)


def calibrate(
    value: Float, null: Float, families: Integers, *, distance: bool
) -> dict[str, Float]:
    """The columns `NULL`, (pairs,) each, of values beside those of permuted images.

    Args:
        value: (pairs,), NaN for none.
        null: (permutations, pairs) likewise.
        families: (pairs,) which pairs are tested together.
        distance: a lower value is nearer.
    """
    sign = -1.0 if distance else 1.0
    s = sign * value
    of_null = sign * null
    draws = len(null)
    place = int(np.ceil((1 - ALPHA) * (draws + 1) - 1e-9))
    tau = np.sort(of_null, 0)[place - 1]
    largest = np.empty_like(of_null)
    for family in np.unique(families):
        members = families == family
        there = members & np.isfinite(value)
        most = of_null[:, there].max(1, initial=-np.inf)
        largest[:, members] = most[:, np.newaxis]
    with np.errstate(invalid="ignore", divide="ignore"):
        if distance:
            calibrated = np.maximum(0, (s - tau) / -tau)
        else:
            calibrated = np.maximum(0, (np.minimum(s, 1) - tau) / (1 - tau))
    # A permutation that does not change a pair counts, despite rounding.
    p = (1 + (of_null >= s - ROUNDING).sum(0)) / (draws + 1)
    p_family = (1 + (largest >= s - ROUNDING).sum(0)) / (draws + 1)
    absent = ~np.isfinite(value)
    columns = zip(NULL, (null.mean(0), sign * tau, p, p_family, calibrated), strict=True)
    return {name: np.where(absent, np.nan, one) for name, one in columns}
