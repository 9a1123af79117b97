"""Dot products, means and largest values of tokens on a CPU, compiled: one pass over them."""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted

if TYPE_CHECKING:
    from torch import Tensor

ZERO = np.float32(0)
MAGNITUDE = np.int32(2**31 - 1)
# Tokens that are summed up by themselves: sums of sums lose fewer digits than one long sum.
RUN = 16
# Numbers of a vector.
LANES = 16


def memory_of(x: Tensor) -> NDArray[np.float32]:
    """All of the memory that a float32 tensor is a view of, as one row."""
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


@functools.cache
def narrows() -> bool:
    """Whether the processor makes float16 of float32 by itself, which `narrow` needs."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("f16c"))


@emitted
def narrow(builder: Any, memory: Any, at: Any, out: Any, to: Any) -> None:
    """`LANES` numbers from a place on, rounded to float16, to another."""
    from llvmlite import ir

    wide, half = (ir.VectorType(kind(), LANES) for kind in (ir.FloatType, ir.HalfType))
    found = builder.load(builder.bitcast(builder.gep(memory, [at]), wide.as_pointer()))
    found.align = 4
    where = builder.bitcast(builder.gep(out, [to]), half.as_pointer())
    builder.store(builder.fptrunc(found, half), where).align = 2


@compiled
def means_and_peak(
    memory: NDArray[np.float32],
    places: tuple[int, int, int],
    shape: tuple[int, int],
    images: tuple[int, int],
    means: NDArray[np.float32],
    halves: NDArray[np.uint16],
) -> np.float32:
    """The mean over tokens of every image; returns the largest |x| of all, NaN where one is NaN.

    Args:
        memory: with the tokens in it, the channels of each one after another.
        places: in it: the first number, and the strides by image and by token.
        shape: tokens, channels.
        images: the first, and the one after the last.
        means: (images, channels), filled.
        halves: (images tokens channels,), filled: the tokens as the bits of float16, of `LANES`
            channels or more; or empty.
    """
    n_tokens, n_channels = shape
    # Without their sign bits the order of numbers is that of their bits; NaN is above infinity.
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
                if halves.shape[0]:
                    to = np.uintp((image * n_tokens + token) * n_channels)
                    for channel in range(0, n_channels, LANES):
                        k = np.uintp(min(channel, n_channels - LANES))
                        narrow(memory, at + k, halves, to + k)
            for channel in range(n_channels):
                total[channel] += some[channel]
        for channel in range(n_channels):
            means[image, channel] = total[channel] / np.float32(n_tokens)
    return np.int32(largest).view(np.float32)
