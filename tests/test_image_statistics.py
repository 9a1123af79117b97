"""Medians and geometric means over images, and their jackknife."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference_normratio import loop_statistic
from vitsee_core.statistics.image_statistics import block_labels, statistic


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 130),
    ties=st.booleans(),
    holes=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 99),
)
def test_medians_without_each_block(n: int, ties: bool, holes: float, seed: int) -> None:
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
            assert of.value[t] == pytest.approx(loop_statistic(row, metric), nan_ok=True, rel=1e-12)
            expected = [
                loop_statistic([v for v, b in zip(row, labels, strict=True) if b != k], metric)
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


def test_a_median_s_interval_covers_it() -> None:
    # 300 samples of 1,000: a 95 % interval of t(19) misses the true median in 15 +- 4
    rng = np.random.default_rng(0)
    found = statistic(rng.exponential(size=(300, 1000)), "median", block_labels(1000, None))
    of = found.estimates()
    covered = (of.low < math.log(2)) & (math.log(2) < of.high)
    assert 300 - 27 <= covered.sum() <= 300 - 4
