"""Medians and geometric means over images, and the jackknife of the latter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference_normratio import loop_statistic
from vitsee_core.statistics.image_statistics import block_labels, statistic
from vitsee_core.statistics.jackknife import cut


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 130),
    ties=st.booleans(),
    holes=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 99),
)
def test_statistics_against_loops(n: int, ties: bool, holes: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 4, (3, n)).astype(float) if ties else rng.exponential(size=(3, n))
    x[rng.random(x.shape) < holes] = np.nan
    labels = block_labels(n, seed)
    for estimator, metric in (
        ("median", "norm_ratio_median"),
        ("geomean", "norm_ratio_geomean"),
    ):
        of = statistic(x, estimator, labels)
        for t in range(3):
            row = x[t].tolist()
            assert of.value[t] == pytest.approx(
                loop_statistic(row, metric), nan_ok=True, rel=1e-12
            )
            if estimator == "median":
                continue
            expected = [
                loop_statistic(
                    [v for v, b in zip(row, labels, strict=True) if b != k], metric
                )
                for k in range(labels.max() + 1)
            ]
            assert of.trace[t] == pytest.approx(expected, nan_ok=True, rel=1e-12)


def test_blocks_of_images() -> None:
    assert block_labels(5, None).tolist() == [0, 1, 2, 3, 4]
    assert np.bincount(block_labels(50, None)).tolist() == [3, 2] * 10
    assert (np.diff(block_labels(50, None)) >= 0).all()
    dealt = block_labels(50, 3)
    assert np.bincount(dealt).tolist() == [3, 2] * 10
    assert (np.diff(dealt) < 0).any()


def test_a_jackknife_s_interval_by_hand() -> None:
    # Three images, each a block: the geometric mean is 4, and without each of them 8, 4 and 2; the
    # interval is that of Student's t with two degrees of freedom, whose quantile is 4.3027.
    of = statistic(np.array([[1.0, 4.0, 16.0]]), "geomean", np.arange(3)).estimates()
    assert of.without is not None
    assert of.without[0] == pytest.approx([8.0, 4.0, 2.0], rel=1e-14)
    mean = (8.0 + 4.0 + 2.0) / 3
    error = math.sqrt(2 / 3 * sum((x - mean) ** 2 for x in (8.0, 4.0, 2.0)))
    assert of.std == pytest.approx([error * math.sqrt(3)], rel=1e-12)
    assert of.low == pytest.approx([4 - 4.30265272991 * error], rel=1e-9)
    assert of.high == pytest.approx([4 + 4.30265272991 * error], rel=1e-9)


def test_limits_cut_an_interval_as_far_as_the_value_is_within_them() -> None:
    low, high = (np.array(ends) for ends in ([-0.2, -0.3, 0.9], [0.2, 0.1, 1.3]))
    value = np.array([0.0, -0.1, 1.1])  # an unbiased estimate may lie outside
    found = cut(value, low, high, (0.0, 1.0))
    assert [ends.tolist() for ends in found] == [[0.0, -0.1, 0.9], [0.2, 0.1, 1.1]]
