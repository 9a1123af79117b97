"""Compute one measure of all pairs, its jackknife replicates, and its values of permuted images.

`compare_all` reads the Gram matrix of each representation (`Grams`), prepares a state of it
(`Measure.prepare`), in groups whose states fit the memory, and makes all numbers from pairs of
states.

`calibrate` says what the values of permuted images tell about the value itself. Under the null
hypothesis the images are exchangeable: any order of one side's goes with the other's. With
s_1 .. s_B of B permutations (arXiv 2602.14486):

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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.analyses.similarity.gram_reader import Grams
from vitsee_core.analyses.similarity.measure import Measure
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes, one_blas_thread
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import NULL
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import VitseeError

log = logging.getLogger(__name__)

MIN_IMAGES = 4
# Pairs of a slow measure beyond which there are no intervals and no calibration.
MAX_SLOW_PAIRS = 100
# Of the memory, for states; `GRAMS_SHARE` is for matrices that were read, the rest for what is
# being computed.
STATES_SHARE = 0.625
LOG_SECONDS = 10  # an estimated cost of a slow measure above this is logged first

# Representation -> what replicates reuse from the state of all images (`Measure.choices`).
Choices = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class PairResults:
    """What `compare_all` found for the requested pairs."""

    values: Float  # (pairs,), NaN if a representation is constant
    replicates: (
        Float | None
    )  # (blocks, pairs) without one block of images each; None for none
    null: Float | None  # (permutations, pairs); None for none
    n_images: int  # images counted
    remarks: list[str] = field(default_factory=list)  # what was left out, in words


def compare_all(
    grams: Grams,
    measure: Measure,
    pairs: Integers,
    *,
    intervals: bool = True,
    permutations: int = 0,
) -> PairResults:
    """Return a measure of pairs of representations.

    Args:
        grams: of the representations.
        measure: what to compute.
        pairs: (pairs, 2) indices of representations.
        intervals: whether to compute replicates without one block of images each.
        permutations: number of random orders of one side's images, for the null.

    Raises:
        VitseeError: too few images.
    """
    remarks: list[str] = []
    constant, image_indices = _choose_images(grams, measure, np.unique(pairs), remarks)
    n_images = len(image_indices)
    # Both orders of a symmetric pair are computed once; `pair_of` leads back to the requested ones.
    ordered = np.sort(pairs, 1) if measure.symmetric else pairs
    distinct, pair_of = np.unique(ordered, axis=0, return_inverse=True)
    pair_of = pair_of.ravel()
    if measure.slow and len(distinct) > MAX_SLOW_PAIRS and (intervals or permutations):
        remarks.append(
            f"{measure.name}: no intervals and no calibration of {len(distinct)} pairs, each takes "
            f"seconds; they are made of at most {MAX_SLOW_PAIRS} (--pairs same-depth, fewer "
            "--sites)"
        )
        intervals = False
        permutations = 0
    labels = grams.labels[image_indices]
    blocks = np.unique(labels)
    intervals = intervals and len(blocks) > 1 and n_images > MIN_IMAGES
    # Each replicate's images, as indices into `image_indices`.
    subsets: list[Integers] = []
    if intervals:
        subsets = [np.flatnonzero(labels != block) for block in blocks]
    orders = draw_orders(n_images, permutations, grams.comparison.seed)
    work = _PairWork(grams, measure, distinct, constant)
    steps = (1 + len(subsets)) * work.count_states(n_images)
    with counting(grams.comparison.progress, steps, f"matrices for {measure.name}"):
        values, null, replicates, choices = work.compute_all(
            image_indices,
            orders=orders,
            subsets=subsets if measure.can_restrict else [],
            remarks=remarks,
        )
        if intervals and not measure.can_restrict:
            replicates = np.stack(
                [work.compute(image_indices[subset], choices) for subset in subsets]
            )
    return PairResults(
        values=values[pair_of],
        replicates=replicates[:, pair_of] if intervals else None,
        null=null[:, pair_of] if permutations else None,
        n_images=n_images,
        remarks=remarks,
    )


def draw_orders(n: int, permutations: int, seed: int) -> list[Integers]:
    """Return random orders of n images, the first ones the same for any number of them."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(n) for _ in range(permutations)]


def _choose_images(
    grams: Grams, measure: Measure, used: Integers, remarks: list[str]
) -> tuple[set[int], Integers]:
    """Return the representations that are constant, and the indices of the images that count.

    Args:
        grams: of all representations.
        measure: may take a sample of images, and images may lack a value in it.
        used: indices of the representations in any pair.
        remarks: gets a sentence for whatever is left out.

    Raises:
        VitseeError: fewer than `MIN_IMAGES` images are left.
    """
    image_indices = grams.sample(measure.most_images)
    n_sampled = len(image_indices)
    n_all = grams.comparison.n_images
    if n_sampled < n_all:
        remarks.append(
            f"{measure.name}: of {n_sampled} of the {n_all} images, drawn at random"
        )
    constant: set[int] = set()
    # An image without a value at one site is left out at all, so that all pairs have the same.
    is_lacking = np.zeros(n_sampled, bool)
    for k in used.tolist():
        gram = grams.read(k, image_indices)
        if gram.is_constant:
            constant.add(k)
            continue
        lacking = measure.images_without_value(gram)
        if lacking is not None:
            is_lacking |= lacking
    if constant:
        names = ", ".join(sorted({grams.name(k) for k in constant}))
        remarks.append(
            f"no {measure.name} for {names}: the features of all images are the same"
        )
    if is_lacking.any():
        remarks.append(
            f"{measure.name}: {is_lacking.sum()} of {n_sampled} images are left out, whose "
            "features are all 0 (or, for correlations, all the same) at some site"
        )
    n_left = n_sampled - int(is_lacking.sum())
    if n_left < MIN_IMAGES:
        raise VitseeError(
            f"{n_left} images have features that are not all 0 at every site; expected at least "
            f"{MIN_IMAGES} for {measure.name}"
        )
    return constant, image_indices[~is_lacking]


class _PairGroup(NamedTuple):
    """Pairs whose representations' states fit the memory together."""

    pair_indices: Integers  # among the distinct pairs
    members: list[int]  # the representations in them


@dataclass(frozen=True)
class _PairWork:
    """The numbers of distinct pairs of representations.

    Lists of states have one entry per representation, None for those without a state.
    """

    grams: Grams
    measure: Measure
    pairs: Integers  # (pairs, 2)
    constant: set[int]  # representations without a state

    def count_states(self, n: int) -> int:
        """Return the number of states of n images to compute; one may be in several groups."""
        return sum(len(group.members) for group in self._groups(n))

    def compute_all(
        self,
        image_indices: Integers,
        *,
        orders: Sequence[Integers],
        subsets: Sequence[Integers],
        remarks: list[str],
    ) -> tuple[Float, Float, Float, Choices]:
        """Return the values of all images and all that follows from their states.

        Args:
            image_indices: the images.
            orders: permutations of the second side's images.
            subsets: each replicate's images, as indices into `image_indices`; none for measures
                that cannot restrict a state.
            remarks: gets the measure's caveats.

        Returns:
            Values (pairs,), values of permuted images (permutations, pairs), of the subsets
            (subsets, pairs), and what replicates reuse.
        """
        n = len(self.pairs)
        values = np.full(n, np.nan)
        null = np.full((len(orders), n), np.nan)
        replicates = np.full((len(subsets), n), np.nan)
        choices: Choices = {}
        for at, states in self._prepared_groups(image_indices, {}):
            pairs = self.pairs[at]
            if self.measure.slow:
                self._log_cost(states, pairs, 1 + len(orders))
            values[at] = self.measure.compare(states, states, pairs)
            remark = self.measure.remark(states, states, pairs)
            if remark is not None:
                remarks.append(remark)
            if orders:
                null[:, at] = self._permute(states, pairs, image_indices, orders)
            with one_blas_thread():  # set once for all subsets
                for row, subset in zip(replicates, subsets, strict=True):
                    row[at] = self._restrict(states, pairs, image_indices, subset)
            # After `compare`, which makes the choices; of several groups they are merged.
            for k, state in enumerate(states):
                if state is not None:
                    merged = {*choices.get(k, ()), *self.measure.choices(state)}
                    choices[k] = tuple(sorted(merged))
        return values, null, replicates, choices

    def compute(self, image_indices: Integers, choices: Choices) -> Float:
        """Return the values (pairs,) of these images alone, from new states."""
        values = np.full(len(self.pairs), np.nan)
        for at, states in self._prepared_groups(image_indices, choices):
            values[at] = self.measure.compare(states, states, self.pairs[at])
        return values

    def _permute(
        self,
        states: Sequence[Any],
        pairs: Integers,
        image_indices: Integers,
        orders: Sequence[Integers],
    ) -> Float:
        """Return the values of permuted images, (permutations, pairs).

        They are computed in this process, or a range of permutations in each of a map's processes,
        which prepare the states again, if their memory holds these.
        """
        used = np.unique(pairs).tolist()
        execution = self.grams.comparison.execution
        remote_grams = self.grams.for_workers(used)
        memory = execution.budget // max(1, getattr(execution.map, "local", 0))
        # Twice: the states, and those of one permutation.
        need = 2 * self.measure.state_bytes(len(image_indices)) * len(used)
        if remote_grams is None or need > STATES_SHARE * memory:
            return self.measure.null(states, states, pairs, orders)
        work = partial(
            _permute_on_worker, remote_grams, self.measure, pairs, image_indices
        )
        n_ranges = min(len(orders), execution.width)
        edges = np.linspace(0, len(orders), n_ranges + 1).astype(int)
        ranges = [range(start, stop) for start, stop in pairwise(edges.tolist())]
        return np.concatenate(list(execution.spread(work, ranges)))

    def _restrict(
        self,
        states: Sequence[Any],
        pairs: Integers,
        image_indices: Integers,
        subset: Integers,
    ) -> Float:
        """Return the values (pairs,) of a subset of the images, from the states of all of them.

        subset: indices into `image_indices`.
        """

        def restrict(k: int) -> Any:
            """Return the state of the subset; None if it has no value."""
            state = self.measure.restrict(states[k], subset)
            if state is None:
                state = self.measure.prepare(self.grams.read(k, image_indices[subset]))
            self.grams.comparison.progress.advance(1)
            return state

        fewer = self.make_states(restrict, np.unique(pairs).tolist())
        values = np.full(len(pairs), np.nan)
        has_state = np.array([state is not None for state in fewer])
        is_defined = has_state[pairs].all(1)
        if is_defined.any():
            values[is_defined] = self.measure.compare(fewer, fewer, pairs[is_defined])
        return values

    def _prepared_groups(
        self, image_indices: Integers, choices: Choices
    ) -> Iterator[tuple[Integers, list[Any]]]:
        """Yield indices of pairs, and the states that they need, group by group.

        Pairs of representations without a state are left out.
        """

        def prepare(k: int) -> Any:
            """Return the state of representation k; None if it is constant."""
            state = None
            if k not in self.constant:
                gram = self.grams.read(k, image_indices)
                state = self.measure.prepare(gram, choices.get(k, ()))
            self.grams.comparison.progress.advance(1)
            return state

        for group in self._groups(len(image_indices)):
            states = self.make_states(prepare, group.members)
            has_state = np.array([state is not None for state in states])
            is_defined = has_state[self.pairs[group.pair_indices]].all(1)
            if is_defined.any():
                yield group.pair_indices[is_defined], states

    def make_states(self, make: Callable[[int], Any], members: list[int]) -> list[Any]:
        """Return `make(k)` of each of these representations, computed on all cores."""
        states: list[Any] = [None] * len(self.grams.views)
        with lane_pool(n_lanes()) as pool:
            # One result ahead of the threads at most, as each may be a large matrix.
            results = in_order(make, members, pool, n_lanes() + 1)
            for k, state in zip(members, results, strict=True):
                states[k] = state
        return states

    def _groups(self, n: int) -> list[_PairGroup]:
        """Return the pairs in groups whose states of n images fit the memory.

        If not all fit, the representations are cut into sets of half the number that fits, and a
        group has the pairs of one set with another, or with itself.
        """
        used = np.unique(self.pairs)
        bytes_per_state = 2 * self.measure.state_bytes(n)  # also permuted or restricted
        memory = STATES_SHARE * self.grams.comparison.memory
        max_states = max(2, int(memory // bytes_per_state))
        if len(used) <= max_states:
            return [_PairGroup(np.arange(len(self.pairs)), used.tolist())]
        set_of = {int(k): index // (max_states // 2) for index, k in enumerate(used)}
        pair_sets = np.sort(np.vectorize(set_of.__getitem__)(self.pairs), 1)
        groups = []
        n_sets = max(set_of.values()) + 1
        for set_pair in combinations_with_replacement(range(n_sets), 2):
            at = np.flatnonzero((pair_sets == set_pair).all(1))
            if len(at):
                groups.append(_PairGroup(at, np.unique(self.pairs[at]).tolist()))
        return groups

    def _log_cost(self, states: list[Any], pairs: Integers, rounds: int) -> None:
        """Log the estimated time of all pairs, `rounds` times each, from one of them."""
        start = time.perf_counter()
        self.measure.compare(states, states, pairs[len(pairs) // 2][np.newaxis])
        seconds = (time.perf_counter() - start) * len(pairs) * rounds / n_lanes()
        if seconds > LOG_SECONDS:
            log.warning(
                "%s: %d pairs, %d times, take about %.0f s",
                self.measure.name,
                len(pairs),
                rounds,
                seconds,
            )


def _permute_on_worker(
    grams: Grams,
    measure: Measure,
    pairs: Integers,
    image_indices: Integers,
    execution: Execution,
    permutations: range,
) -> Float:
    """Return the values of these permutations, (permutations, pairs), in another process.

    The orders are drawn again from the seed, rather than sent.
    """
    used = np.unique(pairs).tolist()
    grams.require_files(used)
    grams = replace(grams, comparison=replace(grams.comparison, memory=execution.budget))
    work = _PairWork(grams, measure, pairs, constant=set())
    states = work.make_states(
        lambda k: measure.prepare(grams.read(k, image_indices)), used
    )
    orders = draw_orders(len(image_indices), permutations.stop, grams.comparison.seed)
    return measure.null(states, states, pairs, orders[permutations.start :])


ALPHA = 0.05
ROUNDING = 1e-9
MIN_PERMUTATIONS = 19  # that give a 5 % threshold
METHOD = (
    "permutations of the images of side b, one for all layers; tau the 5 % threshold, p one-sided, "
    "p_family against the largest of all layers of two stores in each permutation"
)


def calibrate(
    value: Float, null: Float, families: Integers, *, distance: bool
) -> dict[str, Float]:
    """Return what values of permuted images say about values: the columns `NULL`, (pairs,) each.

    Args:
        value: (pairs,), NaN for none.
        null: (permutations, pairs) likewise.
        families: (pairs,) pairs with one number are tested together.
        distance: a lower value is nearer.
    """
    # From here on larger is nearer.
    sign = -1.0 if distance else 1.0
    signed_value = sign * value
    signed_null = sign * null
    n_draws = len(null)
    # Rounding must not turn 19.000000001 into 20.
    rank = int(np.ceil((1 - ALPHA) * (n_draws + 1) - 1e-9))
    tau = np.sort(signed_null, 0)[rank - 1]
    # (permutations, pairs) the largest value of the pair's family in each permutation.
    family_null = np.empty_like(signed_null)
    for family in np.unique(families):
        is_member = families == family
        with_value = is_member & np.isfinite(value)
        largest = signed_null[:, with_value].max(1, initial=-np.inf)
        family_null[:, is_member] = largest[:, np.newaxis]
    with np.errstate(invalid="ignore", divide="ignore"):
        if distance:
            calibrated = np.maximum(0, (signed_value - tau) / -tau)
        else:
            calibrated = np.maximum(0, (np.minimum(signed_value, 1) - tau) / (1 - tau))
    # A permutation that does not change a pair counts, despite rounding.
    threshold = signed_value - ROUNDING
    p = (1 + (signed_null >= threshold).sum(0)) / (n_draws + 1)
    p_family = (1 + (family_null >= threshold).sum(0)) / (n_draws + 1)
    columns = [null.mean(0), sign * tau, p, p_family, calibrated]
    is_absent = ~np.isfinite(value)
    return {
        name: np.where(is_absent, np.nan, column)
        for name, column in zip(NULL, columns, strict=True)
    }
