"""Dot products of activations on a CPU, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled

ZERO = np.float32(0)


@compiled
def dot_products(
    z: NDArray[np.float32], f: NDArray[np.float32], out: NDArray[np.float32], start: int, stop: int
) -> None:
    """z.z, f.f and z.f of every token of the images from `start` to `stop` - 1, in one pass.

    Args:
        z: (images, tokens, dim).
        f: of the same shape.
        out: (images, tokens, 3), filled.
        start: the first image.
        stop: the one after the last.
    """
    for image in range(start, stop):
        for token in range(z.shape[1]):
            left, right, dots = z[image, token], f[image, token], out[image, token]
            of_z = of_f = of_both = ZERO
            for k in range(z.shape[2]):
                x, y = left[k], right[k]
                of_z += x * x
                of_f += y * y
                of_both += x * y
            dots[0], dots[1], dots[2] = of_z, of_f, of_both
