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
from vitsee_core import scipy_routines
from vitsee_core.grams import amx
from vitsee_core.ridge import (
    GRID,
    Algebra,
    Factors,
    Gathered,
    HeldOut,
    LeaveOneOut,
    from_kernel,
    solve,
    tridiagonal,
)
from vitsee_core.ridge.at_l2 import AtL2s, Mixture
from vitsee_core.ridge.solver import targets
from vitsee_core.ridge.tridiagonal import Resolvents, decomposed, three_diagonals

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


def gathered(x: Array, labels: Array, classes: int = 4, piece: int = 5) -> Gathered:
    out = Gathered(x.shape[1], classes)
    for start in range(0, len(x), piece):
        out.add(x[start : start + piece], labels[start : start + piece])
    return out


def test_by_hand() -> None:
    # x = 0, 1, 3 with targets -1, 1, 1 for class 1: mean 4/3, scatter 14/3, x'y = 4 - 4/3 = 8/3;
    # with l2 = 2/3 the weight is (8/3) / (16/3) = 1/2 and the intercept 1/3 - 1/2 x 4/3 = -1/3.
    x, labels = np.array([[0], [1], [3]], np.float32), np.array([0, 1, 1])
    linear = solve(gathered(x, labels, 2), PLAIN, 2 / 3)
    assert linear.weights == pytest.approx(np.array([[-0.5, 0.5]]), rel=1e-14)
    assert linear.bias == pytest.approx([1 / 3, -1 / 3], rel=1e-14)
    # with a constant column of 1, the mean target 1/3 shrinks by 3 / (3 + 2/3) = 9/11
    penalised = solve(gathered(x, labels, 2), Algebra(constant=1.0), 2 / 3)
    assert penalised.bias[1] == pytest.approx(1 / 3 * 9 / 11 - 0.5 * 4 / 3, rel=1e-14)


@pytest.mark.parametrize(("n", "dim"), SHAPES)
@pytest.mark.parametrize("l2", [1e-3, 1.0, 300.0])
def test_normal_equations_and_scikit_learn(n: int, dim: int, l2: float) -> None:
    x, labels = data(n, dim)
    weights, bias = ridge(x, labels, 4, l2)
    theirs = Ridge(alpha=l2).fit(x.astype(float), 2.0 * np.eye(4)[labels] - 1)
    one = solve(gathered(x, labels), PLAIN, l2)
    many = Factors.of(gathered(x, labels), PLAIN).linear(l2)
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
            solve(gathered(x, labels), BIG_VISION, l2),
            Factors.of(gathered(x, labels), BIG_VISION).linear(l2),
        ):
            # their X'X has entries of 1e4 n
            np.testing.assert_allclose(linear.scores(test), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("constant", [1e-200, 1e-3, 100.0, 1e200])
def test_a_constant_column_of_any_size(constant: float) -> None:
    x, labels = data(12, 3)
    images, algebra = gathered(x, labels), Algebra(constant=constant)
    shares = {1e-200: 0.0, 1e-3: 12e-6 / (12e-6 + 2), 100.0: 12e4 / (12e4 + 2), 1e200: 1.0}
    share = shares[constant]
    target = 2 * np.bincount(labels, minlength=4) / 12 - 1
    at_mean = solve(images, algebra, 2.0).scores(x.astype(float).mean(axis=0)[np.newaxis])[0]
    assert at_mean == pytest.approx(share * target, rel=1e-9, abs=1e-12)
    assert algebra.leverage(12, 2.0) == pytest.approx(share / 12, rel=1e-9)


def test_primal_is_dual() -> None:
    x, labels = data(12, 12)
    primal = Factors.of(gathered(x, labels), PLAIN)
    assert not gathered(x, labels).by_rows
    centred = x.astype(float) - x.mean(0, dtype=float)
    dual = from_kernel(centred @ centred.T, labels, 4, PLAIN)
    test, _ = data(5, 12, seed=2)
    others = (test - x.mean(0, dtype=float)) @ centred.T
    for l2 in (0.01, 10.0):
        a = primal.scores(primal.coordinates(test.astype(float)), l2)
        b = dual.scores(dual.coordinates(others), l2)
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 9), st.booleans())
def test_pieces_and_parts_do_not_matter(dim: int, cut: int, piece: int, standardise: bool) -> None:
    x, labels = data(40, dim)
    algebra = Algebra(standardise)
    whole = solve(gathered(x, labels, piece=40), algebra, 1.0)
    parts = gathered(x[:cut], labels[:cut], piece=piece)
    joined = parts.joined(gathered(x[cut:], labels[cut:], piece=piece))
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
    plain = solve(gathered(x, labels, 3), PLAIN, 0.5)
    moved = solve(gathered(x + np.float32(2**20), labels, 3), PLAIN, 0.5)
    np.testing.assert_allclose(moved.weights, plain.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algebra", [PLAIN, BIG_VISION])
@pytest.mark.parametrize("n", [3, 30])
def test_equal_features_give_equal_scores(algebra: Algebra, n: int) -> None:
    x, labels = np.full((n, 8), 0.1, np.float32), np.arange(n) % 3
    for linear in (
        solve(gathered(x, labels, 3), algebra, 2.0**-10),
        Factors.of(gathered(x, labels, 3), algebra).linear(2.0**-10),
    ):
        assert not linear.weights.any()


# ---------------------------------------------------------------- the choice of l2


@pytest.mark.parametrize(("n", "dim"), [(20, 6), (9, 30), (8, 8)])
def test_leave_one_out_is_brute_force(n: int, dim: int) -> None:
    x, labels = data(n, dim, classes=3)
    l2s = (0.1, 3.0, 200.0)
    judge = LeaveOneOut(Factors.of(gathered(x, labels, 3), PLAIN), l2s)
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


def test_leave_one_out_with_a_penalised_constant() -> None:
    x, labels = data(15, 4, classes=3)
    algebra, l2 = Algebra(constant=2.0), 5.0
    judge = LeaveOneOut(Factors.of(gathered(x, labels, 3), algebra), [l2])
    judge.add(x, labels)
    centred = x - x.mean(0, dtype=float)
    padded = np.concatenate([centred, np.full((15, 1), 2.0)], axis=1)
    y = 2.0 * np.eye(3)[labels] - 1
    error = 0.0
    for i in range(15):
        rest = np.arange(15) != i
        gram = padded[rest].T @ padded[rest] + l2 * np.eye(5)
        error += ((padded[i] @ np.linalg.solve(gram, padded[rest].T @ y[rest]) - y[i]) ** 2).sum()
    assert judge.squared_error[0] == pytest.approx(error, rel=1e-9)


def test_held_out_images_choose() -> None:
    x, labels = data(30, 6)
    others, own = data(50, 6, seed=3)
    judge = HeldOut(Factors.of(gathered(x, labels), PLAIN), GRID)
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


def test_features_that_say_nothing_get_the_largest_l2() -> None:
    x, labels = np.ones((12, 3), np.float32), np.arange(12) % 3
    judge = HeldOut(Factors.of(gathered(x, labels, 3), PLAIN), GRID)
    judge.add(x, labels)
    assert judge.best() == GRID[-1]


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
@pytest.mark.parametrize("least", [0.0, GRID[0]])
def test_ranks_at_every_l2(n: int, dim: int, algebra: Algebra, least: float) -> None:
    x, labels = data(n, dim)
    images = gathered(x, labels, classes=9)  # of five there is no image
    factors = Factors.of(images, algebra, least)
    others, own = data(200, dim, classes=9, seed=4)
    z = factors.coordinates(others.astype(float))
    found = AtL2s(factors, GRID).ranks(z, own)
    for l2, ranks in zip(GRID, found, strict=True):
        assert ranks.tolist() == counted_ranks(factors.scores(z, l2), own)


def test_scores_that_float32_cannot_tell_apart() -> None:
    # Of class c the score of z is z (1 + c 2^-40): float32 has 24 digits.
    rhs = np.array([[1 + c * 2.0**-40 for c in range(6)]])
    one, none = np.ones((1, 1)), np.zeros(0)
    factors = Factors(one, np.zeros(1), one[0], none, rhs, np.zeros(6), 8, PLAIN)
    z, labels = np.array([[3.0], [-3.0], [0.0]]), np.array([1, 1, 1])
    assert AtL2s(factors, (0.5, 4.0)).ranks(z, labels).tolist() == [[4, 1, 1]] * 2
    # beside a weight that makes float32 lose them, in a direction that an image may not have
    wide = np.concatenate([rhs, np.full((1, 6), 1e6)])
    for beside in (0.0, 0.5):
        more = np.array([beside])
        factors = Factors(np.eye(2), np.zeros(2), np.ones(2), more, wide, np.zeros(6), 8, PLAIN)
        z = np.array([[3.0, 1e4], [-3.0, 0.0]])
        expected = [counted_ranks(factors.scores(z, 1.0), labels[:2])]
        assert AtL2s(factors, (1.0,)).ranks(z, labels[:2]).tolist() == expected


def without(values: Array) -> Array:
    """Nothing beside the diagonal."""
    return np.zeros(len(values) - 1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 60), st.floats(0, 20), st.integers(1, 30), st.booleans()
)
def test_mixtures_are_off_by_no_more_than_they_say(
    seed: int, r: int, decades: float, n_l2: int, diagonal: bool
) -> None:
    rng = np.random.default_rng(seed)
    values = 10 ** rng.uniform(-decades / 2, decades / 2, r)
    beside = without(values) if diagonal else np.sqrt(values[1:] * values[:-1]) / 2
    rhs = rng.normal(size=(r, 4)) * rng.uniform(0, 3, (r, 1))
    rhs[:, 3] = 0  # a class without images
    resolvents = Resolvents.of(values, beside, GRID[:n_l2])
    weights, mixture = resolvents.weights(rhs), Mixture.of(resolvents, rhs)
    z = rng.normal(size=(20, r)).astype(np.float32)
    parts = weights.transpose(1, 0, 2).astype(np.float32)
    if mixture.weights is not None:
        parts = mixture.weights
    assert parts.shape[1] <= n_l2
    mixed = np.einsum("mr,rqc->qmc", z, parts)
    if mixture.weights is not None:
        mixed = np.einsum("lq,qmc->lmc", mixture.mix.astype(np.float32), mixed)
    exact = np.einsum("mr,lrc->lmc", z.astype(np.float64), weights)
    bound = mixture.error * np.linalg.norm(z, axis=1)[:, np.newaxis] * mixture.norms[:, np.newaxis]
    assert (abs(mixed - exact) <= bound).all()
    assert not bound[..., 3].any()


def test_how_many_parts_mixtures_have() -> None:
    rng = np.random.default_rng(0)
    rhs = rng.normal(size=(300, 5))
    alike, apart = (10 ** rng.uniform(low, high, 300) for low, high in ((3.8, 4.2), (-6, 9)))

    def of(values: Array, rhs: Array) -> Mixture:
        return Mixture.of(Resolvents.of(values, without(values), GRID), rhs)

    weights = of(alike, rhs).weights
    assert weights is not None and weights.shape == (300, 5, 5)
    wide = of(apart, rhs)
    assert wide.weights is None and wide.mix.shape == (30, 0)
    # a single direction is one part, at whatever l2, and of zeros there is none to tell apart
    single = of(alike[:1], rhs[:1]).weights
    assert single is not None and single.shape == (1, 1, 5)
    assert not of(alike, 0 * rhs).norms.any()


# ---------------------------------------------------------------- three diagonals


def dense(diagonal: Array, beside: Array) -> Array:
    found = np.diag(diagonal)
    found[np.arange(len(beside)), np.arange(len(beside)) + 1] = beside
    return np.asarray(np.triu(found) + np.triu(found, 1).T)


def test_three_diagonals_by_hand() -> None:
    # M + 2 I = [[4, 2], [2, 5]] = L D L^T, D = (4, 4), L = [[1, 0], [1/2, 1]];
    # its inverse [[5, -2], [-2, 4]] / 16; B = L sqrt(D) = [[2, 0], [1, 2]]
    found = Resolvents.of(np.array([2.0, 3.0]), np.array([2.0]), [8.0, 2.0])
    assert found.inverses[1].tolist() == [1 / 4, 1 / 4] and found.below[1].tolist() == [1 / 2]
    assert found.resolved(np.eye(2))[1].tolist() == [[5 / 16, -1 / 8], [-1 / 8, 1 / 4]]
    assert found.roots.tolist() == [2, 2]
    assert found.evened(np.array([[4.0, 2.0]])).tolist() == [[2, 0]]
    assert found.weights(np.eye(2))[1].tolist() == [[1 / 2, 0], [-1 / 4, 1 / 2]]


@pytest.mark.parametrize("r", [1, 2, 3, 9, 70, 130])
def test_three_diagonals_are_the_matrix(r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(r)
    x = rng.normal(size=(2 * r, r)) * 10 ** rng.uniform(-2, 2, r)
    square = x.T @ x
    found = three_diagonals(square.copy())
    assert found is not None
    basis, diagonal, beside = found
    size = float(np.linalg.norm(square))
    np.testing.assert_allclose(basis @ dense(diagonal, beside) @ basis.T, square, atol=1e-13 * size)
    np.testing.assert_allclose(basis.T @ basis, np.eye(r), atol=1e-13)
    l2s = (3.0, 0.25, 100.0)
    resolvents, rhs, z = Resolvents.of(diagonal, beside, l2s), rng.normal(size=(r, 20)), x @ basis
    for l2, weights in zip(l2s, resolvents.resolved(rhs), strict=True):
        expected = np.linalg.solve(square + l2 * np.eye(r), basis @ rhs)
        tolerance = 1e-11 * size / l2
        np.testing.assert_allclose(basis @ weights, expected, rtol=tolerance, atol=1e-12)
    # what is evened has the products that the coordinates have, and lengths that say what they are
    even = resolvents.evened(z)
    products = np.einsum("mr,lrc->lmc", even, resolvents.weights(rhs))
    plain = np.einsum("mr,lrc->lmc", z, resolvents.resolved(rhs))
    np.testing.assert_allclose(products, plain, rtol=1e-9, atol=1e-9 * abs(plain).max())
    inverse = np.linalg.inv(square + 0.25 * np.eye(r))
    np.testing.assert_allclose(even @ even.T, x @ inverse @ x.T, rtol=1e-7, atol=1e-8)
    monkeypatch.setattr(tridiagonal, "WEIGHT_BYTES", 8 * 3 * r * 7)  # of 7 columns
    blocks = [(some, weights.copy()) for some, weights in resolvents.by_class(rhs)]
    assert [(some.start, some.stop) for some, _ in blocks] == [(0, 6), (6, 13), (13, 20)]
    whole = np.concatenate([weights for _, weights in blocks], axis=2)
    np.testing.assert_array_equal(whole, resolvents.weights(rhs))


def test_only_as_far_as_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = data(40, 7)
    images = gathered(x, labels)
    eigen, less = Factors.of(images, PLAIN), Factors.of(images, PLAIN, 0.5)
    assert not eigen.beside.any() and less.beside.all()
    test = data(30, 7, seed=2)[0].astype(np.float64)
    for l2 in (0.5, 8.0, 1000.0):
        expected = eigen.linear(l2).scores(test)
        for scores in (less.linear(l2).scores(test), less.scores(less.coordinates(test), l2)):
            np.testing.assert_allclose(scores, expected, rtol=1e-10, atol=1e-11)
    with pytest.raises(ValueError, match="eigenvalues"):
        less.leverages(less.coordinates(test), [1.0])
    # rounding of a matrix as large as 1e4 is no less than 1e-12
    assert not Factors.of(images, PLAIN, 1e-12).beside.any()
    monkeypatch.setitem(scipy_routines.KINDS, "d", "another")
    assert not Factors.of(images, PLAIN, 0.5).beside.any()


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("far", "l2s"), [(3000, GRID), (300, (1e-6, 1e-3, 1.0))])
def test_a_first_image_far_from_all_others(
    far: float, l2s: tuple[float, ...], unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are taken about it: rounding then is that of numbers that are no part of the scatter
    matrix, which has fewer directions than channels, and may be below zero by more than l2."""
    if not unit:
        monkeypatch.setattr(amx, "is_there", lambda: False)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 20_000)
    some = rng.integers(-3, 4, (len(labels), 20))
    some[:, :10] += (labels[:, np.newaxis] == np.arange(10)) * 2
    x = (some @ rng.integers(-4, 5, (20, 128)) / 128).astype(np.float32)
    x[0] = rng.standard_normal(128) * far
    images = gathered(x, labels, 10, piece=512)
    tests, own = x[1:1001].astype(np.float64), labels[1:1001]
    found = []
    for factors in (Factors.of(images, PLAIN), Factors.of(images, PLAIN, min(l2s))):
        probes = AtL2s(factors, l2s)
        found.append((probes.ranks(factors.coordinates(tests), own) == 0).mean(axis=1))
    assert found[0].max() < 0.9  # not all are right
    assert found[1] == pytest.approx(found[0], abs=2e-3)  # rounding decides between near scores


def test_only_as_far_as_the_matrix_is_positive() -> None:
    square = np.array([[1.0, 1.5], [1.5, 1.75]])
    low = float(np.linalg.eigvalsh(square)[0])
    assert low < 0
    _, diagonal, beside = decomposed(square.copy(), -2.5 * low)
    assert beside.any() and diagonal.min() > 0
    basis, values, none = decomposed(square.copy(), -1.5 * low)
    assert not none.any() and values[0] == 0
    np.testing.assert_allclose(basis * values @ basis.T, square, atol=-1.01 * low)
    with pytest.raises(ValueError, match="positive definite"):
        Resolvents.of(diagonal, beside, [-0.5 * low])


@pytest.mark.parametrize(("n", "dim"), SHAPES)
@pytest.mark.parametrize("algebra", [PLAIN, BIG_VISION])
def test_held_out_images_by_three_diagonals(n: int, dim: int, algebra: Algebra) -> None:
    x, labels = data(n, dim)
    others, own = data(60, dim, seed=3)
    images = gathered(x, labels)
    eigen, less = (HeldOut(Factors.of(images, algebra, at), GRID) for at in (0.0, GRID[0]))
    for judge in (eigen, less):
        judge.add(others, own)
    assert eigen.right.tolist() == less.right.tolist() and eigen.best() == less.best()
    for l2 in GRID:
        assert less.squared_error(l2) == pytest.approx(eigen.squared_error(l2), rel=1e-7)


def test_scores_that_are_no_numbers_are_never_right() -> None:
    x, labels = data(40, 7)
    factors = Factors.of(gathered(x, labels), PLAIN)
    z = factors.coordinates(x[:2].astype(np.float64))
    z[1, 3] = np.nan
    found = AtL2s(factors, GRID).ranks(z, labels[:2])
    assert (found[:, 0] < 4).all() and (found[:, 1] >= 3).all()


@pytest.mark.parametrize("dim", [3, 40])  # with more channels than images no direction is left
def test_probes_that_know_nothing_give_the_lower_class(dim: int) -> None:
    x = np.ones((12, dim), np.float32)
    factors = Factors.of(gathered(x, np.arange(12) % 3, 3), PLAIN)
    z, labels = factors.coordinates(x.astype(float)), np.arange(12) % 3
    assert AtL2s(factors, GRID).ranks(z, labels).tolist() == [labels.tolist()] * len(GRID)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.floats(1e-7, 1))
def test_left_out_errors_in_float32_choose_what_exact_ones_do(
    seed: int, shape: tuple[int, int], step: float
) -> None:
    x, labels = data(*shape, seed=seed)
    factors = Factors.of(gathered(x, labels), PLAIN)
    l2s = [2.0 * (1 + step) ** k for k in range(12)]  # apart or not
    fast, exact = (LeaveOneOut(factors, l2s, exact=one) for one in (False, True))
    for judge in (fast, exact):
        judge.add(x, labels)
    z = factors.coordinates(x.astype(float))
    errors, doubts = AtL2s(factors, l2s).squared_errors(z, labels, exact=False)
    true, none = AtL2s(factors, l2s).squared_errors(z, labels, exact=True)
    assert (abs(errors - true) <= doubts).all() and not none.any()
    if (again := fast.undecided()) is not None:
        again.add(x, labels)
    assert (again or fast).best() == exact.best()
    assert exact.undecided() is None


def test_l2_too_near_to_tell_are_looked_at_again() -> None:
    x, labels = data(40, 7)
    l2s = (8.0, 8.0 + 1e-9, 8.0 - 1e-9, 2.0**18)
    judge = LeaveOneOut(Factors.of(gathered(x, labels), PLAIN), l2s, exact=False)
    judge.add(x, labels)
    assert (again := judge.undecided()) is not None and again.l2s == l2s[:3]
    apart = LeaveOneOut(judge.factors, (2.0**18, 8.0), exact=False)
    apart.add(x, labels)
    assert apart.undecided() is None and apart.best() == 8.0


# ---------------------------------------------------------------- pieces


def test_sums_made_ahead_are_those_made_at_once() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((50, 6)).astype(np.float32) + 100, rng.integers(0, 3, 50)
    once, ahead = Gathered(6, 3), Gathered(6, 3)
    due = []
    for start in range(0, 50, 4):
        some = slice(start, start + 4)
        once.add(x[some], labels[some])
        if (piece := ahead.wait(x[some], labels[some])) is not None:
            due.append(piece)
    assert [sum(len(x) for x, _ in piece) for piece in due] == [24] * 2
    # The last piece first: summing changes nothing, counting is in order.
    for sums in [ahead.sums_of(piece) for piece in due[::-1]][::-1]:
        ahead.count(sums)
    for a, b in zip(once.moments(), ahead.moments(), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=0)
    np.testing.assert_allclose(ahead.moments()[0], centred.T @ centred, rtol=1e-10, atol=1e-10)
