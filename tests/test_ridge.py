"""Ridge regression in closed form: against hand, normal equations, scikit-learn and brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import Ridge, RidgeCV

from tests.reference_probe import padded_ridge, ridge
from vitsee_core.kernels import l2_choice
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import (
    Algebra,
    Factors,
    SufficientStats,
    from_kernel,
    rank_true_classes,
    solve,
    targets,
)

Array = NDArray[Any]

PLAIN = Algebra()
BIG_VISION = Algebra(standardise=True, constant=100.0)
SHAPES = [(40, 7), (7, 40), (12, 12), (13, 12), (11, 12)]


def data(n: int, dim: int, classes: int = 4, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    labels[:classes] = np.arange(classes)
    scales = rng.uniform(0.1, 5, dim)
    x = (rng.normal(size=(n, dim)) + 0.5 * labels[:, np.newaxis]) * scales + 3
    return x.astype(np.float32), labels


def stats_of(
    x: Array, labels: Array, classes: int = 4, piece: int = 5
) -> SufficientStats:
    out = SufficientStats(x.shape[1], classes)
    for start in range(0, len(x), piece):
        out.add(x[start : start + piece], labels[start : start + piece])
    return out


def test_by_hand() -> None:
    # x = 0, 1, 3 with targets -1, 1, 1 for class 1: mean 4/3, scatter 14/3, x'y = 4 - 4/3 = 8/3;
    # with l2 = 2/3 the weight is (8/3) / (16/3) = 1/2 and the intercept 1/3 - 1/2 x 4/3 = -1/3.
    x, labels = np.array([[0], [1], [3]], np.float32), np.array([0, 1, 1])
    linear = solve(stats_of(x, labels, 2), PLAIN, 2 / 3)
    assert linear.weights == pytest.approx(np.array([[-0.5, 0.5]]), rel=1e-14)
    assert linear.bias == pytest.approx([1 / 3, -1 / 3], rel=1e-14)
    # with a constant column of 1, the mean target 1/3 shrinks by 3 / (3 + 2/3) = 9/11
    penalised = solve(stats_of(x, labels, 2), Algebra(constant=1.0), 2 / 3)
    assert penalised.bias[1] == pytest.approx(1 / 3 * 9 / 11 - 0.5 * 4 / 3, rel=1e-14)


@pytest.mark.parametrize(("n", "dim"), SHAPES)
@pytest.mark.parametrize("l2", [1e-3, 300.0])
def test_normal_equations_and_scikit_learn(n: int, dim: int, l2: float) -> None:
    x, labels = data(n, dim)
    weights, bias = ridge(x, labels, 4, l2)
    theirs = Ridge(alpha=l2).fit(x.astype(float), 2.0 * np.eye(4)[labels] - 1)
    one = solve(stats_of(x, labels), PLAIN, l2)
    many = Factors.from_stats(stats_of(x, labels), PLAIN).linear(l2)
    for linear in (one, many):
        # X'X has entries of 1e3 and l2 goes down to 1e-3: six digits of float64 are lost
        np.testing.assert_allclose(linear.weights, weights, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(linear.bias, bias, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(linear.weights, theirs.coef_.T, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(linear.bias, theirs.intercept_, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("n", "dim"), SHAPES)
def test_constant_column_of_big_vision(n: int, dim: int) -> None:
    x, labels = data(n, dim)
    test, _ = data(9, dim, seed=1)
    for l2 in (1.0, 1024.0, 2.0**19):
        expected = padded_ridge(x, labels, test, 4, l2)
        for linear in (
            solve(stats_of(x, labels), BIG_VISION, l2),
            Factors.from_stats(stats_of(x, labels), BIG_VISION).linear(l2),
        ):
            # their X'X has entries of 1e4 n
            np.testing.assert_allclose(
                linear.scores(test), expected, rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("constant", [1e-200, 1e-3, 100.0, 1e200])
def test_a_constant_column_of_any_size(constant: float) -> None:
    x, labels = data(12, 3)
    images, algebra = stats_of(x, labels), Algebra(constant=constant)
    shares = {
        1e-200: 0.0,
        1e-3: 12e-6 / (12e-6 + 2),
        100.0: 12e4 / (12e4 + 2),
        1e200: 1.0,
    }
    share = shares[constant]
    target = 2 * np.bincount(labels, minlength=4) / 12 - 1
    at_mean = solve(images, algebra, 2.0).scores(
        x.astype(float).mean(axis=0)[np.newaxis]
    )[0]
    assert at_mean == pytest.approx(share * target, rel=1e-9, abs=1e-12)
    assert algebra.leverage(12, 2.0) == pytest.approx(share / 12, rel=1e-9)


def test_primal_is_dual() -> None:
    x, labels = data(12, 12)
    primal = Factors.from_stats(stats_of(x, labels), PLAIN)
    assert not stats_of(x, labels).by_rows
    centred = x.astype(float) - x.mean(0, dtype=float)
    dual = from_kernel(centred @ centred.T, labels, 4, PLAIN)
    test, _ = data(5, 12, seed=2)
    others = (test - x.mean(0, dtype=float)) @ centred.T
    for l2 in (0.01, 10.0):
        a = primal.scores(primal.coordinates(test.astype(float)), l2)
        b = dual.scores(dual.coordinates(others), l2)
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 9), st.booleans())
def test_pieces_and_parts_do_not_matter(
    dim: int, cut: int, piece: int, standardise: bool
) -> None:
    x, labels = data(40, dim)
    algebra = Algebra(standardise)
    whole = solve(stats_of(x, labels, piece=40), algebra, 1.0)
    parts = stats_of(x[:cut], labels[:cut], piece=piece)
    joined = parts.merge(stats_of(x[cut:], labels[cut:], piece=piece))
    assert joined.n == 40
    # other order of float64 additions, and divisions by standard deviations
    np.testing.assert_allclose(
        solve(joined, algebra, 1.0).weights, whole.weights, rtol=1e-9, atol=1e-10
    )
    assert parts.n == cut


@pytest.mark.parametrize(("n", "dim"), [(40, 7), (7, 40)])
def test_a_large_common_offset_costs_nothing(n: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    x = rng.integers(-8, 8, (n, dim)).astype(np.float32)  # exact beside 2^20 in float32
    plain = solve(stats_of(x, labels, 3), PLAIN, 0.5)
    moved = solve(stats_of(x + np.float32(2**20), labels, 3), PLAIN, 0.5)
    np.testing.assert_allclose(moved.weights, plain.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algebra", [PLAIN, BIG_VISION])
@pytest.mark.parametrize("n", [3, 30])
def test_equal_features_give_equal_scores(algebra: Algebra, n: int) -> None:
    x, labels = np.full((n, 8), 0.1, np.float32), np.arange(n) % 3
    for linear in (
        solve(stats_of(x, labels, 3), algebra, 2.0**-10),
        Factors.from_stats(stats_of(x, labels, 3), algebra).linear(2.0**-10),
    ):
        assert not linear.weights.any()


# ---------------------------------------------------------------- the choice of l2


@pytest.mark.parametrize(("n", "dim"), [(20, 6), (9, 30), (8, 8)])
def test_leave_one_out_is_brute_force(n: int, dim: int) -> None:
    x, labels = data(n, dim, classes=3)
    l2s = (0.1, 3.0, 200.0)
    judge = LeaveOneOut(Factors.from_stats(stats_of(x, labels, 3), PLAIN), l2s)
    judge.add(x[:5], labels[:5])
    judge.add(x[5:], labels[5:])
    y = 2.0 * np.eye(3)[labels] - 1
    for l2, found in zip(l2s, judge.squared_error, strict=True):
        error = 0.0
        for i in range(n):
            rest = np.arange(n) != i
            weights, bias = ridge(x[rest], labels[rest], 3, l2)
            error += float(((x[i] @ weights + bias - y[i]) ** 2).sum())
        assert found == pytest.approx(error, rel=1e-7)
    theirs = RidgeCV(alphas=l2s).fit(x.astype(float), y)
    assert judge.best() == theirs.alpha_


def test_leave_one_out_of_features_without_variance() -> None:
    """The probe answers with the mean target of the other images, at every l2."""
    labels = np.array([0, 0, 1, 1, 1])
    judge = LeaveOneOut(
        Factors.from_stats(stats_of(np.ones((5, 3), np.float32), labels, 2), PLAIN), GRID
    )
    judge.add(np.ones((5, 3), np.float32), labels)
    # Of class 0: its own target is 1, the others' mean (1 - 3) / 4; of class 1: 1 and 0.
    expected = 2 * (2 * (1 + 0.5) ** 2 + 3 * (1 - 0) ** 2)
    assert judge.squared_error.tolist() == pytest.approx([expected] * len(GRID))


def test_leave_one_out_with_a_penalised_constant() -> None:
    x, labels = data(15, 4, classes=3)
    algebra, l2 = Algebra(constant=2.0), 5.0
    judge = LeaveOneOut(Factors.from_stats(stats_of(x, labels, 3), algebra), [l2])
    judge.add(x, labels)
    centred = x - x.mean(0, dtype=float)
    padded = np.concatenate([centred, np.full((15, 1), 2.0)], axis=1)
    y = 2.0 * np.eye(3)[labels] - 1
    error = 0.0
    for i in range(15):
        rest = np.arange(15) != i
        gram = padded[rest].T @ padded[rest] + l2 * np.eye(5)
        error += (
            (padded[i] @ np.linalg.solve(gram, padded[rest].T @ y[rest]) - y[i]) ** 2
        ).sum()
    assert judge.squared_error[0] == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(("n", "dim"), [(300, 20), (60, 50), (30, 60)])
def test_left_out_errors_at_many_l2_are_those_at_each(
    n: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From mixtures of fewer weights, where images are many more than directions."""
    x, labels = data(n, dim)
    factors = Factors.from_stats(stats_of(x, labels), PLAIN)
    monkeypatch.setattr(l2_choice, "BLOCK", 30 * 4 * 7)  # 7 images
    monkeypatch.setattr(l2_choice, "COMPONENT_BLOCK", 30 * 4 * 16)
    together = LeaveOneOut(factors, GRID)
    together.add(x, labels)
    for l2, error in zip(GRID, together.squared_error, strict=True):
        alone = LeaveOneOut(factors, [l2])
        alone.add(x, labels)
        assert error == pytest.approx(alone.squared_error[0], rel=1e-9)
    mix, weights = l2_choice.mixture(factors, GRID)
    assert len(weights) == mix.shape[1] and (mix.shape[1] < 30) == (n > dim)
    for l2, share in zip(GRID, mix, strict=True):
        expected = factors.weights(l2)
        mixed = np.tensordot(share, weights, 1)
        np.testing.assert_allclose(
            mixed, expected, rtol=0, atol=1e-9 * abs(expected).max()
        )


def test_held_out_images_choose() -> None:
    x, labels = data(30, 6)
    others, own = data(50, 6, seed=3)
    judge = HeldOut(Factors.from_stats(stats_of(x, labels), PLAIN), GRID)
    judge.add(others[:20], own[:20])
    judge.add(others[20:], own[20:])
    right, errors = [], []
    for l2 in GRID:
        weights, bias = ridge(x, labels, 4, l2)
        scores = others @ weights + bias
        right.append(int((scores.argmax(1) == own).sum()))
        errors.append(float(((scores - (2.0 * np.eye(4)[own] - 1)) ** 2).sum()))
    assert judge.right.tolist() == right
    assert [judge.squared_error(l2) for l2 in GRID] == pytest.approx(errors, rel=1e-7)
    best = max(range(30), key=lambda i: (right[i], -errors[i]))
    assert judge.best() == GRID[best]


@pytest.mark.parametrize(
    "dim", [3, 40]
)  # with more channels than images no direction is left
def test_features_that_say_nothing(dim: int) -> None:
    """They get the largest l2, and the lower class."""
    x, labels = np.ones((12, dim), np.float32), np.arange(12) % 3
    factors = Factors.from_stats(stats_of(x, labels, 3), PLAIN)
    judge = HeldOut(factors, GRID)
    judge.add(x, labels)
    assert judge.best() == GRID[-1]
    z = factors.coordinates(x.astype(float))
    assert rank_true_classes(factors.scores(z, 1.0), labels).tolist() == labels.tolist()


def test_targets() -> None:
    assert targets(np.array([0, 1, 1]), 2).tolist() == [
        pytest.approx([4 / 3, -4 / 3]),
        pytest.approx([-2 / 3, 2 / 3]),
        pytest.approx([-2 / 3, 2 / 3]),
    ]


# ---------------------------------------------------------------- several l2 at a time


def counted_ranks(scores: Array, labels: Array) -> list[int]:
    """Classes before each image's own, one by one."""
    return [
        sum(s > row[own] or (s == row[own] and c < own) for c, s in enumerate(row))
        for row, own in zip(scores.tolist(), labels.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("n", "dim"), SHAPES)
@pytest.mark.parametrize("algebra", [PLAIN, BIG_VISION])
def test_ranks_at_every_l2(n: int, dim: int, algebra: Algebra) -> None:
    x, labels = data(n, dim)
    factors = Factors.from_stats(
        stats_of(x, labels, classes=9), algebra
    )  # of five there is no image
    others, own = data(200, dim, classes=9, seed=4)
    z = factors.coordinates(others.astype(float))
    for l2 in GRID:
        scores = factors.scores(z, l2)
        assert rank_true_classes(scores, own).tolist() == counted_ranks(scores, own)
        expected = (
            others.astype(float) @ factors.linear(l2).weights + factors.linear(l2).bias
        )
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_first_image_far_from_all_others() -> None:
    """Sums are taken about it: rounding then is that of numbers that are no part of the scatter
    matrix, which has fewer directions than channels, and may be below zero by more than l2."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 5000)
    some = rng.integers(-3, 4, (len(labels), 20))
    some[:, :10] += (labels[:, np.newaxis] == np.arange(10)) * 2
    x = (some @ rng.integers(-4, 5, (20, 128)) / 128).astype(np.float32)
    first = x.copy()
    first[0] = rng.standard_normal(128) * 300
    tests, own = x[1:1001].astype(np.float64), labels[1:1001]
    right = []
    for l2 in (1e-6, 1.0):
        made = Factors.from_stats(stats_of(first, labels, 10, piece=512), PLAIN)
        weights, bias = ridge(first, labels, 10, l2)
        for scores in (made.scores(made.coordinates(tests), l2), tests @ weights + bias):
            right.append((rank_true_classes(scores, own) == 0).mean())
    assert max(right) < 0.95  # not all are right
    assert right[::2] == pytest.approx(
        right[1::2], abs=2e-3
    )  # rounding decides near scores


def test_scores_that_are_no_numbers_are_never_right() -> None:
    x, labels = data(40, 7)
    factors = Factors.from_stats(stats_of(x, labels), PLAIN)
    z = factors.coordinates(x[:2].astype(np.float64))
    z[1, 3] = np.nan
    found = rank_true_classes(factors.scores(z, 1.0), labels[:2])
    assert found[0] < 4 and found[1] == 4


# ---------------------------------------------------------------- pieces


def test_sums_made_ahead_are_those_made_at_once() -> None:
    rng = np.random.default_rng(0)
    x, labels = (
        rng.standard_normal((50, 6)).astype(np.float32) + 100,
        rng.integers(0, 3, 50),
    )
    once, ahead = SufficientStats(6, 3), SufficientStats(6, 3)
    due = []
    for start in range(0, 50, 4):
        some = slice(start, start + 4)
        once.add(x[some], labels[some])
        if (piece := ahead.queue(x[some], labels[some])) is not None:
            due.append(piece)
    assert [sum(len(x) for x, _ in piece) for piece in due] == [24] * 2
    # The last piece first: summing changes nothing, counting is in order.
    for sums in [ahead.compute_sums(piece) for piece in due[::-1]][::-1]:
        ahead.add_sums(sums)
    for a, b in zip(once.moments(), ahead.moments(), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=0)
    np.testing.assert_allclose(
        ahead.moments()[0], centred.T @ centred, rtol=1e-10, atol=1e-10
    )
