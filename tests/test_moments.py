"""Mean, spread and interval of samples that arrive in pieces."""

from __future__ import annotations

import math
import statistics
import warnings

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import stdtrit

from vitsee_core.statistics.moments import Moments, mean_over_tokens, t_quantile


def moments_of(*pieces: object) -> Moments:
    moments = Moments()
    for piece in pieces:
        moments.add(np.asarray(piece, float))
    return moments


def test_by_hand() -> None:
    # 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, t(0.975, 3) = 3.182446
    summary = moments_of([[1.0], [2.0]], [[3.0], [6.0]]).summary()
    assert summary.n.tolist() == [4]
    assert summary.mean[0] == 3.0
    assert summary.std[0] == pytest.approx(math.sqrt(14 / 3), rel=1e-14)
    half = 3.182446305284 * math.sqrt(14 / 3) / 2
    assert summary.low[0] == pytest.approx(3 - half, rel=1e-11)
    assert summary.high[0] == pytest.approx(3 + half, rel=1e-11)


def test_interval_is_the_delete_one_jackknifes() -> None:
    x = np.random.default_rng(0).normal(size=17)
    left_out = np.array([np.delete(x, i).mean() for i in range(17)])
    error = math.sqrt(16 / 17 * ((left_out - left_out.mean()) ** 2).sum())
    summary = moments_of(x).summary()
    half = float(summary.high - summary.mean)
    assert half == pytest.approx(t_quantile(16) * error, rel=1e-12)


def test_the_quantile_that_needs_no_scipy_is_scipys() -> None:
    assert t_quantile(19) == pytest.approx(stdtrit(19, 0.975), rel=1e-15)
    assert round(t_quantile(19), 3) == 2.093  # of printed tables


def test_nan_entries_are_left_out_one_by_one() -> None:
    summary = moments_of([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]]).summary()
    assert summary.n.tolist() == [2, 1, 0]
    assert summary.mean[:2].tolist() == [2.0, 5.0]
    assert np.isnan(summary.mean[2])
    assert summary.std[0] == pytest.approx(math.sqrt(2), rel=1e-15)
    for spread in (summary.std, summary.low, summary.high):
        assert np.isnan(spread[1:]).all()


def test_constant_examples_have_no_spread_at_all() -> None:
    # 0.1 has no exact binary form: a sum divided by n would miss it, and spread would appear
    summary = moments_of([[0.1]] * 7, [[0.1]] * 3).summary()
    assert (summary.mean[0], summary.std[0], summary.low[0]) == (0.1, 0.0, 0.1)


def test_large_mean_costs_no_digits() -> None:
    x = np.random.default_rng(1).normal(size=1000)
    near, far = (
        moments_of(x).summary(),
        moments_of(x[:300] + 1e9, x[300:] + 1e9).summary(),
    )
    # adding 1e9 rounds each example to 1e-7; the naive sum of squares would be off by 1e2
    assert float(far.std) == pytest.approx(float(near.std), rel=1e-6)


def test_nothing_counted() -> None:
    moments = moments_of(np.empty((0, 3)))
    assert np.isnan(moments.summary().mean).all()
    other = moments_of([[1.0, 2.0]])
    moments.merge(other)
    assert moments.summary().mean.tolist() == [1.0, 2.0]
    moments.merge(other)
    assert moments.summary().n.tolist() == [2, 2] and other.summary().n.tolist() == [1, 1]


@example([5e-324, 0.0], [])  # the mean is no number
@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_any_cut_gives_the_oracles_numbers(values: list[float], cuts: list[int]) -> None:
    x = np.array(values)
    total = Moments()
    for piece in np.split(x, sorted(min(c, len(x)) for c in cuts)):
        total.merge(moments_of(piece))
    present = [v for v in values if not math.isnan(v)]
    summary = total.summary()
    assert int(summary.n) == len(present)
    scale = max(map(abs, present), default=0.0)
    if present:
        # 30 roundings of numbers up to `scale`, or of the smallest numbers there are
        close = max(1e-14 * scale, 30 * 5e-324)
        assert float(summary.mean) == pytest.approx(statistics.fmean(present), abs=close)
    if len(present) > 1:
        # squares below 1e-308 are 0
        close = max(1e-12 * scale, 1e-150)
        assert float(summary.std) == pytest.approx(statistics.stdev(present), abs=close)


def test_the_mean_over_tokens_leaves_out_what_is_not_a_number() -> None:
    values = np.random.default_rng(3).normal(size=(6, 5))
    values[1, 2:4], values[4] = np.nan, np.nan
    expected = []
    for image in values:
        numbers = [value for value in image if value == value]
        expected.append(sum(numbers) / len(numbers) if numbers else np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # numpy's nanmean warns of an image without a number
        np.testing.assert_allclose(mean_over_tokens(values), expected, rtol=1e-15)
    by_hand = mean_over_tokens([[1.0, np.nan, 3.0], [np.nan] * 3])
    np.testing.assert_array_equal(by_hand, [2.0, np.nan])
