"""Intervals of medians: exact ranks, Woodruff's interval, and how often they contain the truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm
from scipy.stats import t as student

from tests.stores import write_sites
from vitsee_core.analyses import norms
from vitsee_core.analyses.normratio.sublayer_estimates import TokenMean
from vitsee_core.statistics.image_statistics import block_labels, statistic
from vitsee_core.statistics.medians import (
    median_ranks,
    medians_over_images,
    pooled_median,
)

Array = NDArray[Any]


def all_present(x: Array) -> Array:
    return np.ones(x.shape, bool)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 20, 21, 100, 1000, 50_000])
def test_ranks_are_exact_by_the_binomial_distribution(n: int) -> None:
    ranks = median_ranks(n)
    assert ranks is not None
    # fewer than low + 1 images below the median, or fewer above it than n - high
    assert binom.cdf(ranks.low, n, 0.5) <= 0.025 < binom.cdf(ranks.low + 1, n, 0.5)
    assert ranks.high == n - 1 - ranks.low
    confidence = 1 - 2 * binom.cdf(ranks.low, n, 0.5)
    assert ranks.confidence == pytest.approx(confidence, rel=1e-9)


def test_ranks_of_few_images() -> None:
    assert [median_ranks(n) for n in (1, 2, 5)] == [None] * 3
    # six: the smallest and the largest; all on one side of the median is 2 / 64
    ranks = median_ranks(6)
    assert ranks is not None
    assert (ranks.low, ranks.high) == (0, 5)
    assert ranks.confidence == pytest.approx(62 / 64)


def test_a_median_s_interval_by_hand() -> None:
    # 20 values, 1 to 20: ranks 6 and 15, as in Conover's table of the sign test; 95.86 %
    x = np.random.default_rng(0).permutation(np.arange(1.0, 21))[np.newaxis]
    of = statistic(x, "median", block_labels(20, None)).estimates()
    assert (of.value[0], of.low[0], of.high[0], of.n[0]) == (10.5, 6.0, 15.0, 20)
    error = 9 / (2 * norm.ppf((1 + 0.95861) / 2))
    assert of.std[0] == pytest.approx(error * math.sqrt(20), rel=1e-4)
    # Replicates: an image above the median is worth as much as one below it costs.
    assert of.without is not None
    above = x[0] > 10.5
    m = len(of.without[0])
    assert m == 20
    gain = of.without[0] - 10.5
    assert (gain[above] < 0).all() and (gain[~above] > 0).all()
    assert np.ptp(np.abs(gain)) == pytest.approx(0, abs=1e-12)
    jackknife = math.sqrt((m - 1) / m * float(((gain - gain.mean()) ** 2).sum()))
    assert jackknife == pytest.approx(error, rel=1e-4)


def test_values_that_lack_and_values_that_tie() -> None:
    x = np.array(
        [
            [5.0] * 8,
            [1, 2, np.nan, 4, 5, 6, 7, 9],
            [1, 2, np.nan, np.nan, 3, 4, np.nan, 5],
        ]
    )
    of = statistic(x, "median", block_labels(8, None)).estimates()
    assert of.value.tolist() == [5.0, 5.0, 3.0]
    assert of.low[:2].tolist() == [5.0, 1.0] and of.high[:2].tolist() == [5.0, 9.0]
    assert of.std[0] == 0.0
    assert np.isnan([of.low[2], of.high[2], of.std[2]]).all()  # five images
    assert of.n.tolist() == [8, 7, 5]


def test_intervals_turn_and_stretch_with_their_values() -> None:
    x = np.random.default_rng(3).standard_cauchy((4, 51))
    here = medians_over_images(x, all_present(x))
    there = medians_over_images(7 - 2 * x, all_present(x))
    np.testing.assert_allclose(there.value, 7 - 2 * here.value, rtol=1e-12)
    np.testing.assert_allclose(there.low, 7 - 2 * here.high, rtol=1e-12)
    np.testing.assert_allclose(there.high, 7 - 2 * here.low, rtol=1e-12)
    np.testing.assert_allclose(there.shares, -2 * here.shares, rtol=1e-9, atol=1e-12)


def loop_woodruff(values: Array) -> tuple[float, float, float]:
    """Median and ends of Woodruff's interval of (images, tokens), by plain Python."""
    pooled = sorted(float(v) for image in values for v in image)
    middle = float(np.median(pooled))
    shares = [
        sum(1.0 if v < middle else 0.5 if v == middle else 0.0 for v in image)
        / len(image)
        for image in values
    ]
    n = len(shares)
    mean = math.fsum(shares) / n
    error = math.sqrt(math.fsum((p - mean) ** 2 for p in shares) / (n - 1) / n)
    reach = float(student.ppf(0.975, n - 1)) * error
    # the smallest values with more, and with at least, such a share of all at or below them
    low = next(v for k, v in enumerate(pooled, 1) if k / len(pooled) > 0.5 - reach)
    high = next(v for k, v in enumerate(pooled, 1) if k / len(pooled) >= 0.5 + reach)
    return middle, min(low, middle), max(high, middle)


@pytest.mark.parametrize(("n", "tokens"), [(5, 9), (20, 4), (33, 49)])
def test_pooled_medians_against_a_loop(n: int, tokens: int) -> None:
    rng = np.random.default_rng(n)
    values = np.exp(rng.normal(size=(n, 1)) / 2 + rng.normal(size=(n, tokens)))
    of = pooled_median(values)
    expected = loop_woodruff(values)
    assert (of.value[0], of.low[0], of.high[0]) == pytest.approx(expected, rel=1e-12)
    # the standard error that the images' shares give is the interval's width over 2 t
    error = math.sqrt(float((of.shares**2).sum()) * n / (n - 1))
    width = of.high[0] - of.low[0]
    assert error == pytest.approx(width / (2 * student.ppf(0.975, n - 1)), rel=1e-9)
    assert of.shares.sum() == pytest.approx(0, abs=1e-12)


def test_pooled_medians_at_their_limits() -> None:
    one_each = np.arange(1.0, 21)[:, np.newaxis]
    alone = pooled_median(one_each)
    assert (alone.low[0], alone.high[0]) == (6.0, 15.0)
    equal = pooled_median(np.full((8, 5), 3.0))
    assert (equal.value[0], equal.low[0], equal.high[0]) == (3.0, 3.0, 3.0)
    # the same in every image: no other images would move it
    alike = pooled_median(np.tile([1.0, 2.0, 4.0, 5.0], (8, 1)))
    assert (alike.value[0], alike.low[0], alike.high[0]) == (3.0, 3.0, 3.0)
    # three images that are all below or all above: anything is possible
    few = pooled_median(np.repeat([[1.0], [5.0], [9.0]], 4, axis=1))
    assert few.value[0] == 5.0 and np.isnan([few.low[0], few.high[0]]).all()
    assert np.isnan(pooled_median(np.ones((1, 4))).low[0])


def test_the_class_token_s_median_norm(tmp_path: Any) -> None:
    """One token an image: order statistics of its 20 norms, 1 to 20; patches by Woodruff's."""
    x = np.zeros((20, 7, 4))
    x[:, 0, 0] = np.random.default_rng(0).permutation(np.arange(1.0, 21))
    x[:, 1:, 1] = np.random.default_rng(1).lognormal(size=(20, 6))
    x = x.astype(np.float32).astype(float)
    table = norms.run(
        write_sites(tmp_path / "a.zarr", {"embed": x}), metrics=["norm_median"]
    )
    row = table.filter(token="cls")
    assert [row[name][0] for name in ("value", "low", "high", "n_images")] == [
        10.5,
        6,
        15,
        20,
    ]
    patches = table.filter(token="patches")
    expected = loop_woodruff(np.linalg.norm(x[:, 1:], axis=2))
    ends = [patches[name][0] for name in ("value", "low", "high")]
    assert ends == pytest.approx(expected, rel=1e-6)
    assert "order statistics" in table.notes["interval"]["norm_median"]


def mean_over_tokens(x: Array) -> tuple[float, float, float]:
    """Mean of the medians of (tokens, images), with its interval."""
    mean = TokenMean()
    mean.add(statistic(x, "median", block_labels(x.shape[1], None)), np.arange(len(x)))
    of = mean.estimates()
    return float(of.value[0]), float(of.low[0]), float(of.high[0])


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 100, 1000])
@pytest.mark.parametrize("skewed", [False, True])
def test_how_often_intervals_contain_the_median(n: int, skewed: bool) -> None:
    """95 % of the samples, of one value an image, of several, and of means over tokens.

    Order statistics are a little on the safe side, 95 to 97 % at these n. 400 samples: 95 % is
    within 3.3 of what is counted, three standard errors.
    """
    rng = np.random.default_rng(n)
    samples = 400

    def transform(z: Array) -> Array:
        return np.exp(z) if skewed else z

    truth = 1.0 if skewed else 0.0
    alone = transform(rng.normal(size=(samples, n)))
    of = medians_over_images(alone, all_present(alone))
    pooled = []
    means = []
    for _ in range(samples):
        shared = rng.normal(size=(1, n))
        tokens = transform((shared + rng.normal(size=(9, n))) / 2)
        pooled.append(pooled_median(np.ascontiguousarray(tokens.T)))
        means.append(mean_over_tokens(tokens))
    counts = {
        "one value an image": int(((of.low <= truth) & (truth <= of.high)).sum()),
        "pooled": sum(bool(m.low[0] <= truth <= m.high[0]) for m in pooled),
        # E of a sample's median is that of the population to within a tenth of the interval
        "mean over tokens": sum(low <= truth <= high for _, low, high in means),
    }
    for name, count in counts.items():
        assert 0.917 * samples <= count <= 0.985 * samples, (name, count)
