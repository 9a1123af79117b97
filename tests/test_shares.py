"""Intervals of proportions: by hand, and how often they contain the truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from vitsee_core.statistics.moments import Moments, t_quantile
from vitsee_core.statistics.shares import (
    as_share,
    jackknife_share,
    share_interval,
    wilson,
)

Array = NDArray[Any]


def cells(values: Array) -> dict[str, float]:
    moments = Moments()
    moments.add(values)
    return {name: float(x) for name, x in moments.summary().cells().items()}


@pytest.mark.parametrize(("k", "n"), [(0, 20), (1, 20), (7, 20), (20, 20), (3, 1000)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    found = binomtest(k, n).proportion_ci(method="wilson")
    expected = (found.low, found.high)
    assert wilson(k / n, n) == pytest.approx(expected, abs=1e-12)
    answers = np.arange(n) < k
    whole = as_share(cells(answers))
    assert (whole["low"], whole["high"]) == pytest.approx(expected, abs=1e-12)


def test_fractions_by_hand() -> None:
    """Images with 0, 0, 1/2, 1/2: mean 1/4, variance 1/12, error^2 1/48, so 3/16 * 48 + 1 = 10
    answers; z^2 = 3.8415: centre (0.25 + 0.19207) / 1.38415, half 1.96 sqrt(0.01875 + 0.0096) /
    1.38415."""
    found = as_share(cells(np.array([0, 0, 0.5, 0.5])))
    centre, half = (
        (0.25 + 0.192073) / 1.384146,
        1.959964 * math.sqrt(0.01875 + 0.0096036) / 1.384146,
    )
    assert (found["low"], found["high"]) == pytest.approx(
        (centre - half, centre + half), abs=1e-5
    )


def test_equal_fractions_have_no_width_but_at_the_ends() -> None:
    equal = as_share(cells(np.full(9, 0.25)))
    assert (equal["low"], equal["high"]) == (0.25, 0.25)
    for k in (0.0, 1.0):
        same = as_share(cells(np.full(9, k)))
        assert (same["low"], same["high"]) == pytest.approx(wilson(k, 9))
        assert same["high"] - same["low"] > 0.29
    alone = as_share(cells(np.array([0.25])))
    assert math.isnan(alone["low"]) and math.isnan(alone["high"])


def test_jackknife_shares_by_hand() -> None:
    """Replicates 0.2, 0.3, 0.4: error^2 2/3 * 0.02, and Student's quantile of two degrees."""
    expected = share_interval(0.3, math.sqrt(2 / 3 * 0.02), 50, t_quantile(2))
    assert jackknife_share(0.3, np.array([0.2, 0.3, 0.4]), 50) == pytest.approx(expected)
    assert jackknife_share(0.0, np.zeros(20), 50) == pytest.approx(
        wilson(0, 50, t_quantile(19))
    )
    assert np.isnan(jackknife_share(0.3, np.array([0.3]), 50)).all()


def yes(rng: np.random.Generator) -> Array:
    return (rng.random(50) < 0.02).astype(float)


def fractions(rng: np.random.Generator) -> Array:
    """A tenth of the images have some of 64 tokens, a fifth of these on average."""
    return (rng.random(50) < 0.1) * rng.binomial(64, rng.beta(2, 8, 50)) / 64


@pytest.mark.parametrize("draw", [yes, fractions])
def test_rare_shares_are_covered(draw: Callable[[np.random.Generator], Array]) -> None:
    """At least 0.90 of 1,000 samples (three standard errors, 0.02, below what larger simulations
    give, 0.92); symmetric intervals cover 0.63 and 0.87."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        found = as_share(cells(draw(rng)))
        covered += found["low"] <= 0.02 <= found["high"]
    assert covered >= 895
