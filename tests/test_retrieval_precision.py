"""Average precision, precision at k, their values by chance, and ranks by counting: against loops,
scikit-learn, all orders, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from vitsee_core.analyses.retrieve.passes import Counter, ListedPairs
from vitsee_core.analyses.retrieve.scoring import (
    RightRanks,
    average_precision,
    chance_precision,
    chance_precision_at,
    precision_at,
    rank_right_images,
)
from vitsee_core.kernels.neighbours import Cosines

Array = NDArray[Any]
CPU = torch.device("cpu")


def of_ranks(*ranks: Sequence[int]) -> RightRanks:
    """One query each."""
    n = np.array([len(own) for own in ranks])
    number = np.concatenate([np.arange(k) for k in n])
    flat = np.array([r for own in ranks for r in own], np.int64)
    return RightRanks(np.repeat(np.arange(len(ranks)), n), number, flat, n)


def loop_precision(order: Sequence[bool], form: str, top: int = 0) -> float:
    """Of a ranking from the nearest on, image by image; True is a right one."""
    n_right, hits, total = sum(order), 0, 0.0
    for place, right in enumerate(order):
        if not right or (top and place >= top):
            continue
        before = hits / place if place else 1.0
        hits += 1
        after = hits / (place + 1)
        total += (before + after) / 2 if form == "trapezoid" else after
    return total / (min(n_right, top) if top else n_right)


def loop_at(order: Sequence[bool], k: int) -> float:
    last = max(place for place, right in enumerate(order) if right) + 1
    m = min(k, last)
    return sum(order[:m]) / m


def test_by_hand() -> None:
    # Radenovic's example without its junk: right, wrong, right, wrong, right
    ours = of_ranks([0, 2, 4], [1], [0, 1, 2])
    # (1 + 1)/2, (1/2 + 2/3)/2, (2/4 + 3/5)/2: 2.1333 / 3
    trapezoid = [(1 + 7 / 12 + 11 / 20) / 3, 0.25, 1.0]
    assert average_precision(ours, "trapezoid") == pytest.approx(trapezoid, abs=1e-15)
    assert trapezoid[0] == pytest.approx(0.71111, abs=1e-5)
    plain = [(1 + 2 / 3 + 3 / 5) / 3, 0.5, 1.0]
    assert average_precision(ours, "plain") == pytest.approx(plain, abs=1e-15)
    assert plain[0] == pytest.approx(0.75556, abs=1e-5)
    # 3 of 5, as nothing is right beyond: not 3 of 10
    assert precision_at(ours, 10).tolist() == [0.6, 0.5, 1.0]
    assert precision_at(ours, 1).tolist() == [1.0, 0.0, 1.0]
    # the first two only: hits at 0, of min(3, 2) that could be there
    assert average_precision(ours, "plain", 2).tolist() == [0.5, 0.5, 1.0]


def test_queries_without_right_images_have_no_value() -> None:
    ours = RightRanks(*(np.empty(0, np.int64),) * 3, n_right=np.zeros(2, np.int64))
    for form in ("trapezoid", "plain"):
        assert np.isnan(average_precision(ours, form)).all()
        assert np.isnan(chance_precision(ours.n_right, np.array([3, 4]), form)).all()
    assert np.isnan(precision_at(ours, 3)).all()
    assert np.isnan(chance_precision_at(ours.n_right, np.array([3, 4]), 3)).all()


@given(st.lists(st.booleans(), min_size=1, max_size=60).filter(any), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_against_loops_and_scikit_learn(order: list[bool], k: int) -> None:
    ours = of_ranks(np.flatnonzero(order).tolist())
    plain, trapezoid = (
        average_precision(ours, form)[0] for form in ("plain", "trapezoid")
    )
    score = average_precision_score(order, -np.arange(len(order)))
    assert plain == pytest.approx(score, abs=1e-12)
    assert plain == pytest.approx(loop_precision(order, "plain"), abs=1e-12)
    assert trapezoid == pytest.approx(loop_precision(order, "trapezoid"), abs=1e-12)
    assert trapezoid <= plain + 1e-15
    top = average_precision(ours, "plain", k)[0]
    assert top == pytest.approx(loop_precision(order, "plain", k), abs=1e-12)
    assert precision_at(ours, k)[0] == loop_at(order, k)


@pytest.mark.parametrize(
    ("n_right", "n"), [(1, 1), (1, 6), (2, 6), (3, 7), (5, 5), (6, 8)]
)
def test_chance_is_the_mean_over_all_orders(n_right: int, n: int) -> None:
    orders = [
        [place in chosen for place in range(n)]
        for chosen in itertools.combinations(range(n), n_right)
    ]
    counts = np.array([n_right]), np.array([n])
    for form in ("plain", "trapezoid"):
        expected = np.mean([loop_precision(order, form) for order in orders])
        assert chance_precision(*counts, form)[0] == pytest.approx(expected, abs=1e-13)
    for k in (1, 2, 3, 6, 20):
        expected = np.mean([loop_precision(order, "plain", k) for order in orders])
        assert chance_precision(*counts, "plain", k)[0] == pytest.approx(
            expected, abs=1e-13
        )
        expected = np.mean([loop_at(order, k) for order in orders])
        assert chance_precision_at(*counts, k)[0] == pytest.approx(expected, abs=1e-13)


def test_chance_among_a_million() -> None:
    # H_N and the formula itself in exact sums
    n, r = 1_000_000, 40
    harmonic = math.fsum(1 / i for i in range(1, n + 1))
    expected = (harmonic + (r - 1) / (n - 1) * (n - harmonic)) / n
    found = chance_precision(np.array([r, 3]), np.array([n, 50]), "plain")[0]
    assert found == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------- ranks


def loop_ranks(
    queries: Array, images: Array, lists: Sequence[dict[str, Any]]
) -> list[list[int]]:
    """By sorting: places among the images that are in no list but `right`, ties to the earlier."""
    found = []
    for query, own in zip(queries.astype(np.float64), lists, strict=True):
        cosines = []
        for image in images.astype(np.float64):
            length = math.sqrt(math.fsum(query**2)) * math.sqrt(math.fsum(image**2))
            cosines.append(
                float(np.float32(math.fsum(query * image) / length)) if length else 0.0
            )
        out = {i for name, places in own.items() if name != "right" for i in places}
        order = sorted(
            (i for i in range(len(images)) if i not in out),
            key=lambda i: (-cosines[i], i),
        )
        found.append(
            [place for place, i in enumerate(order) if i in own.get("right", ())]
        )
    return found


def counted_ranks(
    queries: Array,
    images: Array,
    lists: Sequence[dict[str, Any]],
    cut: int,
    unread: Any = (),
) -> list[list[int]]:
    listed = ListedPairs.from_lists(
        [{k: np.array(v, np.int64) for k, v in own.items()} for own in lists]
    )
    there = np.array([i for i in range(len(images)) if i not in unread], np.int64)
    right, cosines = listed.in_lists(["right"]), Cosines(queries, CPU)
    counter = Counter(len(queries), listed, cosines)
    for step in (counter.find, counter.count):
        for start in range(0, len(there), cut):
            places = there[start : start + cut]
            step(places, images[places])
    if len(unread):
        counter.count(np.array(unread, np.int64), None)
    keys, above, in_block = counter.result()
    counted = Counter(len(queries), listed, cosines, np.arange(len(images)) % 3)
    for step in (counted.find, counted.count):
        step(there, images[there])
    if len(unread):
        counted.count(np.array(unread, np.int64), None)
    by_block = counted.result()
    assert np.array_equal(by_block[0], keys) and np.array_equal(by_block[1], above)
    assert np.array_equal(by_block[2].sum(1), above) and in_block.shape[1] == 0
    found = rank_right_images(
        len(queries), listed.query[right], keys[right], above[right]
    )
    return [found.rank[found.query == i].tolist() for i in range(len(queries))]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 99), st.booleans())
@settings(max_examples=60, deadline=None)
def test_counting_is_sorting(n: int, cut: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    vectors: Array = (
        rng.integers(-1, 2, (4 + n, 3)) if ties else rng.normal(size=(4 + n, 3))
    )
    queries, images = np.split(vectors.astype(np.float32), [4])
    lists = []
    for _ in queries:
        kind = rng.integers(0, 4, n)  # wrong, right, junk, of another list
        of = {"right": 1, "junk": 2, "other": 3}
        lists.append({name: np.flatnonzero(kind == k).tolist() for name, k in of.items()})
    expected = loop_ranks(queries, images, lists)
    assert counted_ranks(queries, images, lists, cut) == expected


def test_images_that_could_not_be_read_are_last() -> None:
    images = np.array([[1, 0], [0, 1], [-1, 0], [1, 1], [-1, 0.1]], np.float32)
    query = np.array([[1, 0]], np.float32)
    lists = [{"right": [1, 3, 4]}]
    # nearest to farthest: 0, 3, 1, 4, 2
    assert counted_ranks(query, images, lists, 2) == [[1, 2, 3]]
    # without 1 and 2: 0, 3, 4, then 1 and 2
    assert counted_ranks(query, images, lists, 2, unread=(1, 2)) == [[1, 2, 3]]
    assert counted_ranks(query, images, [{"right": [1, 2]}], 5, unread=(1, 2)) == [[3, 4]]
    # of unreadable images, too, the earlier one comes first: 0, 3, 4, 1, 2
    assert counted_ranks(query, images, [{"right": [2]}], 5, unread=(1, 2)) == [[4]]


def test_a_block_without_lists() -> None:
    queries, images = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
    assert counted_ranks(queries, images, [{}, {}], 3) == [[], []]
