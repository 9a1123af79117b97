"""Slow, obvious statistics of residual dot products."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from scipy.stats import binom, norm

from vitsee_core.analyses.normratio.sublayer_estimates import METRICS

Array = NDArray[Any]


def loop_quantities(products: Array) -> dict[str, float]:
    """Of one token of one image."""
    zz, ff, zf = map(float, products)
    found = dict.fromkeys(("norm_ratio", "cos_branch", "cos_out"), math.nan)
    if ff > 0:
        found["norm_ratio"] = math.sqrt(zz) / math.sqrt(ff)
    if zz > 0 and ff > 0:
        found["cos_branch"] = zf / (math.sqrt(zz) * math.sqrt(ff))
    if zz > 0 and zz + 2 * zf + ff > 0:
        found["cos_out"] = (zz + zf) / (math.sqrt(zz) * math.sqrt(zz + 2 * zf + ff))
    return found | {"skip_norm": math.sqrt(zz), "branch_norm": math.sqrt(ff)}


def loop_statistic(values: Sequence[float], metric: str) -> float:
    kept = [v for v in values if not math.isnan(v)]
    if not kept:
        return math.nan
    if metric == "norm_ratio_median":
        return statistics.median(kept)
    if metric == "norm_ratio_geomean":
        return (
            math.exp(math.fsum(map(math.log, kept)) / len(kept)) if min(kept) > 0 else 0.0
        )
    return math.fsum(kept) / len(kept)


def loop_values(products: Array, metric: str) -> list[list[float]]:
    """tokens -> images."""
    name = METRICS[metric][0]
    return [
        [loop_quantities(products[i, t])[name] for i in range(len(products))]
        for t in range(products.shape[1])
    ]


def loop_jackknife(values: list[list[float]], metric: str, blocks: list[int]) -> float:
    """Standard error of the mean over tokens of a statistic."""
    without = [
        statistics.fmean(
            loop_statistic(
                [v for v, own in zip(of, blocks, strict=True) if own != b], metric
            )
            for of in values
        )
        for b in sorted(set(blocks))
    ]
    centre, m = statistics.fmean(without), len(without)
    return math.sqrt((m - 1) / m * math.fsum((v - centre) ** 2 for v in without))


def loop_median_shares(values: list[float]) -> tuple[float, float, list[float]]:
    """Ends of the interval of a median of images, and each image's share in its standard error."""
    n = len(values)
    ranks = [k for k in range(1, n // 2 + 1) if binom.cdf(k - 1, n, 0.5) <= 0.025]
    if not ranks:
        return math.nan, math.nan, [math.nan] * n
    k = max(ranks)
    low, high = sorted(values)[k - 1], sorted(values)[n - k]
    outside = 2 * float(binom.cdf(k - 1, n, 0.5))
    error = (high - low) / (2 * float(norm.ppf(1 - outside / 2)))
    middle = statistics.median(values)
    signs = [(v > middle) - (v < middle) for v in values]
    scale = error * math.sqrt((n - 1) / n / sum(s * s for s in signs))
    return low, high, [s * scale for s in signs]
