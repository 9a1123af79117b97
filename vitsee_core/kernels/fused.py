"""Casts half precision to single, shifts and sums it in one loop over the features.

With numpy and torch these are four passes over cached pieces (cast, subtract, product with the
mean, sum), which take twice the time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.compiled import compiled

# float16 as float32: its bits, moved to their places there, count 2^112 too small; from INFINITE on
# they are infinity or NaN, whose exponent is another.
SCALE = np.float32(2.0**112)
INFINITE, EXPONENT = np.uint32(0x0F800000), np.uint32(0x70000000)
SIZE, SIGN = np.uint32(0x7FFF), np.uint32(0x8000)
TO_SIZE, TO_SIGN = np.uint32(13), np.uint32(16)


@compiled
def _single(bits: np.uint16) -> np.float32:
    """float16 bits as float32."""
    half = np.uint32(bits)
    size = np.uint32((half & SIZE) << TO_SIZE)
    infinite = size >= INFINITE
    size = np.uint32(size + EXPONENT) if infinite else size
    sign = np.uint32((half & SIGN) << TO_SIGN)
    value = np.uint32(size | sign).view(np.float32)
    return value if infinite else value * SCALE


@compiled
def _shift(
    raw: NDArray[np.uint16], mean: NDArray[np.float32], x: NDArray[np.float32]
) -> tuple[np.float32, np.float32]:
    """x = raw - mean, for one row; returns its product with `mean`, and its sum."""
    along, total = np.float32(0), np.float32(0)
    for k in range(len(raw)):
        value = _single(raw[k]) - mean[k]
        x[k] = value
        along += value * mean[k]
        total += value
    return along, total


@compiled
def shift_half(
    raw: NDArray[np.uint16],
    mean: NDArray[np.float32],
    x: NDArray[np.float32],
    column: int,
    sums: NDArray[np.float32],
) -> None:
    """x = raw - mean, from one of its columns on, and its sums.

    Args:
        raw: (rows, columns) the bits of float16.
        mean: (columns,) subtracted.
        x: (rows, width), filled.
        column: where in `x` the first column goes.
        sums: (rows, 2), added to: each row's product with `mean`, and its sum; not computed if it
            has no rows.
    """
    rows, columns = raw.shape
    for i in range(rows):
        # Slices of rows, so that the compiler knows them to be contiguous.
        along, total = _shift(raw[i], mean, x[i][column : column + columns])
        if len(sums):
            sums[i, 0] += along
            sums[i, 1] += total


@compiled
def shift_bytes(
    raw: NDArray[np.uint8],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    x: NDArray[np.float32],
) -> None:
    """x = (raw - mean) scale, for (rows, columns), with a mean and a scale per column."""
    for i in range(raw.shape[0]):
        of, to = raw[i], x[i]
        for j in range(len(of)):
            to[j] = (np.float32(of[j]) - mean[j]) * scale[j]
