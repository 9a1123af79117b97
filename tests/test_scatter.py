"""Scatter matrices in double precision: digits, their products by the matrix unit, exact sums."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitsee_core.grams import amx, amx_digits
from vitsee_core.grams.scatter import Scatter, raise_magnitudes

Array = NDArray[Any]
needs_unit = pytest.mark.skipif(not amx.is_there(), reason="this processor has no AMX")
SHAPES = [(1, 1), (5, 3), (64, 16), (63, 33), (130, 70), (2049, 40)]


def features(n: int, dim: int, seed: int = 0) -> Array:
    """Of float32, of channels of different sizes; an image and a channel of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim)) * np.exp(3 * rng.standard_normal(dim))
    x[n // 2], x[:, dim // 2] = 0, 0
    return x.astype(np.float32).astype(np.float64)


def digits(y: Array, scale: Array) -> Array:
    """(digits, rows, channels) of all that is laid out, with their signs."""
    panels, blocks = -(-y.shape[1] // 32), -(-len(y) // 128)
    out = np.full((blocks, panels, 6, 2, 2, 16, 64), 0x55, np.uint8)
    padded = np.concatenate([scale, np.ones(panels * 32 - len(scale))])
    amx_digits.take_digits(y, padded, out)
    # rows: blocks, tiles, lines, 4 side by side; channels: panels, halves, 16 of a line
    by_four = out.view(np.int8).reshape(blocks, panels, 6, 2, 2, 16, 16, 4)
    return by_four.transpose(2, 0, 3, 5, 7, 1, 4, 6).reshape(6, blocks * 128, panels * 32)


def exact(y: Array) -> Array:
    """The lower triangle of y^T y: products of numbers of single precision are exact, and so are
    these sums."""
    found = np.zeros((y.shape[1],) * 2)
    for i in range(len(found)):
        for j in range(i + 1):
            found[i, j] = math.fsum(y[:, i] * y[:, j])
    return found


def lower(square: Array) -> Array:
    return square[np.tril_indices(len(square))]


def test_digits_by_hand() -> None:
    # 200 is one of 256 less 56; -3 256^5; half a step goes to the even one
    y = np.array([[200.0, -3.0 * 256**5], [0.5, 256.0 * 127 + 128]])
    found = digits(y, np.ones(2))
    assert found[:, 0, 0].tolist() == [0, 0, 0, 0, 1, -56]
    assert found[:, 0, 1].tolist() == [-3, 0, 0, 0, 0, 0]
    assert found[:, 1, 0].tolist() == [0] * 6
    assert found[:, 1, 1].tolist() == [0, 0, 0, 1, -128, -128]
    assert not found[:, 2:].any() and not found[:, :, 2:].any()


@pytest.mark.parametrize(("n", "dim"), SHAPES)
def test_digits_are_the_numbers(n: int, dim: int) -> None:
    y = features(n, dim)
    exponents = np.frexp(abs(y).max(0))[1]
    found = digits(y, np.ldexp(1.0, 46 - exponents))
    steps = np.tensordot(256.0 ** np.arange(5, -1, -1), found.astype(np.float64), 1)
    assert np.array_equal(steps[:n, :dim], np.rint(np.ldexp(y, 46 - exponents)))
    assert not steps[n:].any() and not steps[:, dim:].any()


@needs_unit
@pytest.mark.parametrize(("n", "dim"), SHAPES)
def test_squares_are_exact_sums(n: int, dim: int) -> None:
    y = features(n, dim)
    total = np.full((dim, dim), 0.0)
    amx_digits.add_squares(y, abs(y).max(0), total)
    expected, lengths = exact(y), np.linalg.norm(y, axis=0)
    bound = n * 2.0**-41 * np.outer(*[abs(y).max(0)] * 2)
    assert (lower(abs(total - expected)) <= lower(bound)).all()
    assert (lower(abs(total - expected)) <= 1e-13 * lower(np.outer(lengths, lengths))).all()
    amx_digits.add_squares(y, abs(y).max(0), total)  # added
    assert np.allclose(lower(total), 2 * lower(expected), rtol=0, atol=4 * bound.max())


@needs_unit
@pytest.mark.parametrize("digits", [0x7F7F7F7F7F, 0x4040404040, 0x0101010101])
def test_numbers_chosen_to_be_far_off(digits: int) -> None:
    """Just above half of what the steps allow; all digits after the first are the same, so that the
    products which are not made have one sign."""
    y = np.full((256, 3), 0.5 + digits / 2.0**46)
    total = np.zeros((3, 3))
    amx_digits.add_squares(y, abs(y).max(0), total)
    fractions = [Fraction(value) for value in y[:, 0]]
    expected = float(sum(value * value for value in fractions))
    assert (lower(abs(total - expected)) <= 256 * 2.0**-41 * y.max() ** 2).all()
    assert total[2, 0] == total[0, 0]


@needs_unit
@pytest.mark.parametrize("steps", [2, 2**7, 2**15, 2**22])
def test_numbers_of_few_digits_lose_nothing(steps: int) -> None:
    """Of one, two, three and four digits that are not 0."""
    rng = np.random.default_rng(0)
    y = rng.integers(-steps, steps + 1, (300, 45)).astype(np.float64)
    y[0] = steps
    total = np.zeros((45, 45))
    amx_digits.add_squares(y, abs(y).max(0), total)
    whole = y.astype(np.int64).astype(object)
    expected = (whole.T @ whole).astype(np.float64)
    assert np.array_equal(lower(total), lower(expected))


@needs_unit
def test_equal_channels_have_equal_entries() -> None:
    x = features(500, 40)
    y = np.ascontiguousarray(np.concatenate([x, x], axis=1))
    total = np.zeros((80, 80))
    amx_digits.add_squares(y, abs(y).max(0), total)
    whole = np.tril(total) + np.tril(total, -1).T
    blocks = whole.reshape(2, 40, 2, 40).transpose(0, 2, 1, 3)
    for i, j in np.ndindex(2, 2):
        assert np.array_equal(blocks[i, j], blocks[0, 0])


@needs_unit
def test_how_many_digits_are_used() -> None:
    shape = (2, 3, 6, 2, 2, 16, 64)
    assert amx_digits.used_digits(np.zeros(shape, np.uint8)) == 0
    for place in ((0, 0, 0, 0, 0, 0, 0), (1, 2, 3, 1, 1, 15, 63), (0, 1, 5, 0, 0, 3, 3)):
        x = np.zeros(shape, np.uint8)
        x[place] = 1
        assert amx_digits.used_digits(x) == place[2] + 1


def scatter(y: Array) -> tuple[Array, bool]:
    """By `Scatter`, and whether it asks for magnitudes."""
    squares, total = Scatter(*y.shape), np.zeros((y.shape[1],) * 2)
    for row in y.view(np.int64):
        raise_magnitudes(squares.largest, row)
    if len(squares.largest):
        np.testing.assert_array_equal(squares.largest.view(np.float64), abs(y).max(0))
    squares.add(y, total)
    return total, len(squares.largest) > 0


@pytest.mark.parametrize(("n", "dim"), [(255, 96), (256, 95), (256, 96), (300, 130)])
def test_scatter_with_the_unit_and_without(n: int, dim: int) -> None:
    y = features(n, dim)
    total, by_unit = scatter(y)
    assert by_unit == (amx.is_there() and n >= 256 and dim >= 96)
    lengths = np.linalg.norm(y, axis=0)
    assert (lower(abs(total - y.T @ y)) <= 1e-13 * lower(np.outer(lengths, lengths))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_channel(value: float) -> None:
    y = features(300, 100)
    y[7, 3] = value
    y[8:, 3] = 1.0  # a NaN is not forgotten
    total, _ = scatter(y)
    bad = ~np.isfinite(np.tril(total))
    with np.errstate(invalid="ignore"):
        assert np.array_equal(bad, ~np.isfinite(np.tril(y.T @ y)))
    assert bad[3, :4].all() and not bad[:3].any()


@pytest.mark.parametrize("size", [1e-155, 1e151])
def test_numbers_beyond_all_features(size: float) -> None:
    y = features(300, 100) / 1e4 * size
    total, _ = scatter(y)
    lengths = np.linalg.norm(y, axis=0)
    assert (lower(abs(total - y.T @ y)) <= 1e-13 * lower(np.outer(lengths, lengths))).all()
