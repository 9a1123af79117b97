"""Features with clipped outliers: values beyond a bound become the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.matrix import FeatureMatrix
from vitsee_core.types import Integers, Mask
from vitsee_stores.chunks import Box
from vitsee_stores.errors import VitseeError
from vitsee_stores.lazy import LazyArray

RADIX_BITS = 16  # of a float32, that one pass of the radix selection counts
_ROWS = 256
_COLUMNS = 1 << 16


class ClampedArray(LazyArray):
    """An array whose values are clipped to [-bound, bound]."""

    def __init__(self, array: LazyArray, bound: float):
        self.array, self.bound = array, bound
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def rows_per_chunk(self) -> int:
        return self.array.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        bound = self.dtype.type(self.bound)
        return np.clip(self.array.load(box), -bound, bound)


def clamped(features: FeatureMatrix, bound: float) -> FeatureMatrix:
    """The same features, clipped to [-bound, bound]."""
    parts = [(ClampedArray(array, bound), box) for array, box in features.parts]
    return FeatureMatrix(features.store, (*features.key, f"clamped at {bound!r}"), parts)


def quantile_of_sizes(matrices: Sequence[FeatureMatrix], mask: Mask, share: float) -> float:
    """The value below which this share of all |x| lies: the floor(share m)-th of m ascending
    values, counted from 0; |x| as float32.

    Two passes over the features, in constant memory: the first counts the upper halves of the
    numbers' bit patterns, which sort like the numbers, the second the lower halves within the half
    that contains the quantile.

    Args:
        matrices: together one sample.
        mask: (rows,) of their store, the images that count.
        share: from 0 to below 1.

    Raises:
        VitseeError: a number is not finite.
    """
    n = int(mask.sum())
    place = int(share * (n * sum(matrix.n_features for matrix in matrices)))
    upper = _count(matrices, mask, None)
    high = int(np.searchsorted(np.cumsum(upper), place, "right"))
    place -= int(upper[:high].sum())
    lower = _count(matrices, mask, high)
    low = int(np.searchsorted(np.cumsum(lower), place, "right"))
    return float(np.uint32(high << RADIX_BITS | low).view(np.float32))


def _count(matrices: Sequence[FeatureMatrix], mask: Mask, high: int | None) -> Integers:
    """Counts of upper halves, or of lower halves below the upper half `high`."""
    counts = np.zeros(1 << RADIX_BITS, np.int64)
    for matrix in matrices:
        for strip in matrix.strips(_COLUMNS):
            for start in range(0, len(mask), _ROWS):
                rows = slice(start, min(start + _ROWS, len(mask)))
                if not mask[rows].any():
                    continue
                sizes = np.abs(strip.read(rows)[mask[rows]].astype(np.float32))
                if not np.isfinite(sizes).all():
                    raise VitseeError(
                        f"{matrix.store.label} holds numbers in {matrix.key[0]} that are not "
                        "finite (look at it with vitsee validate)"
                    )
                bits = sizes.view(np.uint32).ravel()
                halves = bits >> RADIX_BITS
                if high is not None:
                    halves = bits[halves == high] & ((1 << RADIX_BITS) - 1)
                counts += np.bincount(halves, minlength=1 << RADIX_BITS)
    return counts
