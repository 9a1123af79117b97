"""Features near 1, so that single precision holds products of their products.

HSIC multiplies entries of Gram matrices, which are products of features: float32 holds the fourth
power of 1e-10 or of 1e10 no more. Measures of similarity do not depend on the features' scale, so
that features far from 1 are multiplied by a power of two first, which rounds nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.matrix import FeatureMatrix, not_finite
from vitsee_core.types import Integers

# 2^20 to the fourth power, times the 2^40 products of a million features and images each, is 2^120
MAX_EXPONENT = 20
_COLUMNS = 1 << 16


def power_of_two(largest: float) -> float:
    """The power of two that brings features of this largest size near 1; 1 where they are not far
    from it (within 2^20), or all 0."""
    if largest == 0:
        return 1.0
    _, exponent = math.frexp(largest)
    if abs(exponent) <= MAX_EXPONENT:
        return 1.0
    return math.ldexp(1.0, -exponent)


def feature_scale(features: FeatureMatrix, rows: Integers) -> float:
    """The factor for the features of these rows of their store, ascending. Half precision holds
    nothing that is far from 1, and is not read.

    Raises:
        VitseeError: a number is not finite.
    """
    if features.dtype == np.float16:
        return 1.0
    largest = 0.0
    plan = features.store.plan
    for slab in range(plan.n_slabs):
        span = plan.rows(slab)
        first, last = np.searchsorted(rows, [span.start, span.stop])
        if first == last:
            continue
        inside = rows[first:last] - span.start
        for strip in features.strips(_COLUMNS):
            largest = max(largest, largest_size(strip.read(span)[inside]))
    if not math.isfinite(largest):
        raise not_finite(features.store, features.key[0])
    return power_of_two(largest)


def largest_size(values: NDArray[Any]) -> float:
    """The largest |x|; NaN where a value is."""
    return float(max(values.max(initial=0), -values.min(initial=0)))
