"""Scatter matrices, sums of y y^T, in double precision: by the matrix unit where the processor has
one and the rows are worth it, else by BLAS."""

from __future__ import annotations

import numpy as np

from vitsee_core.compiled import compiled
from vitsee_core.grams import amx, amx_digits
from vitsee_core.grams.syrk import load_double_syrk
from vitsee_core.types import Float, Integers

LEAST_ROWS, LEAST_DIM = 256, 96  # from which on the unit is faster
MOST = 2.0**500  # magnitudes beyond this, and below its inverse, are left to BLAS
MAGNITUDE = 0x7FFFFFFFFFFFFFFF  # of the bits of a number of double precision all but the sign


class Scatter:
    """Adds y^T y of rows y to totals.

    largest: bits of the largest magnitude of each channel of y, (dim,), to be raised by
    `raise_magnitudes` while y is made; (0,) where nobody asks for it.
    """

    def __init__(self, n_rows: int, dim: int) -> None:
        worth = n_rows >= LEAST_ROWS and dim >= LEAST_DIM
        self.largest: Integers = np.zeros(dim if worth and amx.is_there() else 0, np.int64)

    def add(self, y: Float, total: Float) -> None:
        """y^T y of y (n, dim) is added to the lower triangle of `total` (dim, dim), or to all of
        it; both contiguous. To be called after `load_double_syrk`."""
        largest = self.largest.view(np.float64)
        some = largest[largest != 0]  # NaN among them
        if len(largest) and ((some < MOST) & (some > 1 / MOST)).all():
            amx_digits.add_squares(y, largest, total)
        else:
            load_double_syrk()(y, total)


@compiled
def raise_magnitudes(largest: Integers, y: Integers) -> None:
    """To those of y, if these are larger, of numbers given as bits: without the sign they are in
    the numbers' order, with NaN above all; `largest` may be empty."""
    for j in range(len(largest)):
        largest[j] = max(largest[j], y[j] & MAGNITUDE)
