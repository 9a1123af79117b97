"""Choose a power of two that brings features near 1, so that float32 holds products of products.

HSIC multiplies entries of Gram matrices, which are products of features themselves: of features of
1e-10 or 1e10 these are 1e-40 or 1e40, which float32 does not hold. Measures of
similarity do not depend on the features' scale, so features that are far from 1 are multiplied by
a power of two first, which rounds nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.matrix import FeatureMatrix, not_finite

if TYPE_CHECKING:
    from vitsee_stores import Store

# float32 ends at 2^128. (2^20)^4, times the 2^40 products that are summed over a million features
# and a million images, is 2^120.
MAX_EXPONENT = 20
_COLUMNS = 1 << 16  # that are read at a time


def power_of_two(largest: float) -> float:
    """Return the power of two that brings features near 1.

    largest: their largest absolute value. Between 2^-20 and 2^20, and for 0, the result is 1.
    """
    if largest == 0:
        return 1.0
    _, exponent = math.frexp(largest)
    if abs(exponent) <= MAX_EXPONENT:
        return 1.0
    return math.ldexp(1.0, -exponent)


def feature_scale(features: FeatureMatrix) -> float:
    """Return the power of two that brings the features of a site near 1; 1 if they are near it.

    The order of magnitude is that of the first slab with a feature other than 0, so that one slab
    is read again and not the site. It depends on the site alone: Gram matrices of other rows of the
    same site, those of another minibatch or worker, have the same scale and add up. Features of
    other slabs may differ by 2^20 from those of the first before float32 loses any of them.

    Raises:
        VitseeError: a number of that slab is not finite.
    """
    if features.dtype == np.float16:
        return 1.0  # float16 holds 2^-24 to 2^16: near enough to 1
    store = features.store
    for slab in range(store.plan.n_slabs):
        rows = store.plan.rows(slab)
        valid = store.valid[rows]  # (images,) unreadable images are NaN
        largest = 0.0
        for strip in features.strips(_COLUMNS):
            largest = max(largest, largest_size(strip.read(rows)[valid]))
        if not math.isfinite(largest):
            raise not_finite(store, features.key[0])
        if largest > 0:
            return power_of_two(largest)
    return 1.0


def stored_gram_scale(store: Store, site: str) -> float:
    """Return the power of two for features of which a store keeps Gram matrices within slabs alone.

    It follows from the first slab with an entry other than 0, as in `feature_scale`; the largest
    entry is a sum of squares of features.
    """
    stored = store.grams(site)
    for slab in range(store.plan.n_slabs):
        largest = largest_size(np.nan_to_num(stored[slab], posinf=0, neginf=0))
        if largest > 0:
            return power_of_two(math.sqrt(largest))
    return 1.0


def largest_size(values: NDArray[Any]) -> float:
    """Return the largest |x|, without a copy of `values`; NaN if any value is."""
    return float(max(values.max(initial=0), -values.min(initial=0)))
