"""Dot products, means and largest values of tokens on a CPU, compiled: one pass over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.compiled import compiled

if TYPE_CHECKING:
    from torch import Tensor

ZERO = np.float32(0)
MAGNITUDE = np.int32(2**31 - 1)
# Tokens per partial sum: sums of sums lose fewer digits than one long sum.
RUN = 16


def memory_of(x: Tensor) -> NDArray[np.float32]:
    """The whole memory that a float32 tensor is a view of, as one row."""
    n = x.untyped_storage().nbytes() // x.itemsize
    return x.detach().as_strided((n,), (1,), 0).numpy()


@compiled
def dot_products(
    z: NDArray[np.float32],
    f: NDArray[np.float32],
    n_channels: int,
    tokens: tuple[int, int],
    out: NDArray[np.float32],
) -> None:
    """z.z, f.f and z.f of the tokens from `tokens[0]` to `tokens[1]` - 1, in one pass.

    Args:
        z: (tokens dim,).
        f: of the same shape.
        n_channels: dim.
        tokens: the first, and the one after the last.
        out: (tokens 3,), filled.
    """
    for token in range(tokens[0], tokens[1]):
        at = np.uintp(token * n_channels)
        of_z = of_f = of_both = ZERO
        for channel in range(n_channels):
            x, y = z[at + np.uintp(channel)], f[at + np.uintp(channel)]
            of_z += x * x
            of_f += y * y
            of_both += x * y
        to = np.uintp(token * 3)
        out[to], out[to + np.uintp(1)], out[to + np.uintp(2)] = of_z, of_f, of_both


@compiled
def means_and_peak(
    memory: NDArray[np.float32],
    places: tuple[int, int, int],
    shape: tuple[int, int],
    images: tuple[int, int],
    means: NDArray[np.float32],
) -> np.float32:
    """The mean over tokens of every image; returns the largest |x| of all, NaN if any is NaN.

    Args:
        memory: contains the tokens, the channels of each contiguous.
        places: in it: the first number, and the strides by image and by token.
        shape: tokens, channels.
        images: the first, and the one after the last.
        means: (images, channels), filled.
    """
    n_tokens, n_channels = shape
    # Without sign bits, numbers sort like their bit patterns; NaN is above infinity.
    bits = memory.view(np.int32)
    largest = np.int32(0)
    some = np.empty(n_channels, np.float32)
    total = np.empty(n_channels, np.float32)
    for image in range(images[0], images[1]):
        total[:] = ZERO
        for first in range(0, n_tokens, RUN):
            some[:] = ZERO
            for token in range(first, min(first + RUN, n_tokens)):
                at = np.uintp(places[0] + image * places[1] + token * places[2])
                for channel in range(n_channels):
                    k = np.uintp(channel)
                    some[k] += memory[at + k]
                    largest = np.int32(max(largest, np.int32(bits[at + k] & MAGNITUDE)))
            for channel in range(n_channels):
                total[channel] += some[channel]
        for channel in range(n_channels):
            means[image, channel] = total[channel] / np.float32(n_tokens)
    return np.int32(largest).view(np.float32)
