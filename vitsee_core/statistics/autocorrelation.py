"""Inner products of the tokens of a grid, summed by offset."""

from __future__ import annotations

import numpy as np

from vitsee_core.types import Float


def autocorrelation(x: Float) -> Float:
    """(2 rows, 2 cols) sum over tokens of x_t . x_(t + offset); offset 0 is at the origin, offsets
    beyond the middle are negative, the middle itself is none."""
    shape = (2 * x.shape[0], 2 * x.shape[1])
    spectrum = np.fft.rfft2(x, shape, axes=(0, 1))
    power = np.einsum("yxd,yxd->yx", spectrum, spectrum.conj()).real
    return np.fft.irfft2(power, shape)
