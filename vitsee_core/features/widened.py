"""Stored features in float32, as analyses use them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.compiled import compiled
from vitsee_core.types import Float32

# Numbers above which a compiled loop is worth its import: it reads them once, numpy twice and at a
# fifth of the rate.
LARGE = 1 << 20
AT_ONCE = 4096
TO_FLOAT32 = np.float32(2.0**112)  # between the exponents of both types


def widened(values: NDArray[Any]) -> tuple[Float32, bool]:
    """The values in float32 (unchanged if they are), and whether all are finite."""
    if values.dtype == np.float16 and values.size >= LARGE and values.flags.c_contiguous:
        out = np.empty(values.shape, np.float32)
        bits = out.reshape(-1).view(np.uint32)
        if widen(values.reshape(-1).view(np.uint16), bits, out.reshape(-1)):
            return out, True
    wide: Float32 = values.astype(np.float32, copy=False)
    return wide, bool(np.isfinite(wide).all())


@compiled
def widen(halves: NDArray[np.uint16], bits: NDArray[np.uint32], out: Float32) -> bool:
    """Convert float16 to float32; returns False, with `out` undefined, if some are not finite.

    Args:
        halves: (n,) the bits of the float16.
        bits: (n,) the memory of `out`.
        out: (n,) filled.
    """
    largest = np.uint32(0)
    for start in range(0, len(halves), AT_ONCE):
        stop = start + AT_ONCE
        some, to, numbers = halves[start:stop], bits[start:stop], out[start:stop]
        for i in range(len(some)):
            half = np.uint32(some[i])
            number = half & np.uint32(0x7FFF)
            largest = max(largest, number)
            to[i] = (number << np.uint32(13)) | ((half & np.uint32(0x8000)) << np.uint32(16))
        for i in range(len(some)):
            numbers[i] *= TO_FLOAT32  # also correct for subnormal numbers
    return bool(largest < np.uint32(0x7C00))
