"""Cosines in float64, rounded to float32, and how they are ordered; by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float32, Integers

ORTHOGONAL = 2.0**-40  # more than the rounding errors of a float64 product


class HostCosines:
    """Cosines of some queries with rows that come piece by piece."""

    def __init__(self, queries: Float32) -> None:
        """Queries: (m, dim)."""
        self._queries = normalised(queries)

    def __call__(self, rows: Float32) -> Float32:
        """(m, n) with rows (n, dim)."""
        return rounded(self._queries @ normalised(rows).T)


def normalised(rows: Float32) -> NDArray[np.float64]:
    """(n, dim) of length 1; a row of zeros stays, and has cosine 0 with everything."""
    wide = rows.astype(np.float64)
    length = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return np.divide(wide, np.where(length > 0, length, 1.0), out=wide)


def rounded(cosines: NDArray[np.float64]) -> Float32:
    """Cosines in float32; those of orthogonal vectors 0, which float32 alone would not make so."""
    found = cosines.astype(np.float32)
    found[np.abs(found) < ORTHOGONAL] = 0
    return found


def keys_of(cosines: Float32, rows: Integers) -> NDArray[np.int64]:
    """int64 that order as (cosine, then lower row first): the cosine's bits above the row's.

    cosines: any shape; rows: of the last axis, or of the same shape.
    """
    bits = (cosines + np.float32(0)).view(np.int32).astype(np.int64)  # + 0: -0 and 0 are a tie
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    found: NDArray[np.int64] = (ordered << 32) | (0xFFFFFFFF - rows)
    return found


def parts_of_keys(keys: NDArray[np.int64]) -> tuple[Float32, NDArray[np.int64]]:
    """The cosines and rows in keys."""
    ordered = keys >> 32
    bits: NDArray[Any] = np.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).astype(np.int32)
    return bits.view(np.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)
