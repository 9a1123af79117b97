"""Summarise activations: residual dot products, pooled vectors, largest values.

On a CPU each is one compiled pass over the tokens.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.kernels.compiled import compiled
from vitsee_core.runtime.device import no_autocast
from vitsee_core.runtime.threads import by_chunks

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

ZERO = np.float32(0)
MAGNITUDE = np.int32(2**31 - 1)
# Tokens per partial sum: sums of sums lose fewer digits than one long sum.
RUN = 16


@compiled
def dot_products(
    z: NDArray[np.float32],
    f: NDArray[np.float32],
    n_channels: int,
    tokens: tuple[int, int],
    out: NDArray[np.float32],
) -> None:
    """Compute z.z, f.f and z.f of the tokens from `tokens[0]` to `tokens[1]` - 1, in one pass.

    Args:
        z: (tokens dim,).
        f: of the same shape.
        n_channels: dim.
        tokens: the first, and the one after the last.
        out: (tokens 3,), filled.
    """
    for token in range(tokens[0], tokens[1]):
        at = np.uintp(token * n_channels)
        zz = ff = zf = ZERO
        for channel in range(n_channels):
            x = z[at + np.uintp(channel)]
            y = f[at + np.uintp(channel)]
            zz += x * x
            ff += y * y
            zf += x * y
        target = np.uintp(token * 3)
        out[target] = zz
        out[target + np.uintp(1)] = ff
        out[target + np.uintp(2)] = zf


@compiled
def means_and_peak(
    memory: NDArray[np.float32],
    strides: tuple[int, int, int],
    shape: tuple[int, int],
    images: tuple[int, int],
    means: NDArray[np.float32],
) -> np.float32:
    """Fill the mean over tokens of every image, and return the largest |x|, NaN if any is NaN.

    Args:
        memory: flat, contains the tokens, the channels of each contiguous.
        strides: index of the first number in `memory`, and the strides by image and by token.
        shape: tokens, channels.
        images: the first, and the one after the last.
        means: (images, channels), filled.
    """
    n_tokens, n_channels = shape
    # Without sign bits, numbers sort like their bit patterns; NaN is above infinity.
    bits = memory.view(np.int32)
    largest = np.int32(0)
    run_sum = np.empty(n_channels, np.float32)
    total = np.empty(n_channels, np.float32)
    for image in range(images[0], images[1]):
        total[:] = ZERO
        for first in range(0, n_tokens, RUN):
            run_sum[:] = ZERO
            for token in range(first, min(first + RUN, n_tokens)):
                at = np.uintp(strides[0] + image * strides[1] + token * strides[2])
                for channel in range(n_channels):
                    k = np.uintp(channel)
                    run_sum[k] += memory[at + k]
                    largest = np.int32(max(largest, np.int32(bits[at + k] & MAGNITUDE)))
            for channel in range(n_channels):
                total[channel] += run_sum[channel]
        for channel in range(n_channels):
            means[image, channel] = total[channel] / np.float32(n_tokens)
    return np.int32(largest).view(np.float32)


def residual_products(z: Tensor, f: Tensor) -> Tensor:
    """Return the dot products z.z, f.f and z.f of each token, (images, tokens, 3) float32.

    The norm ratio |z| / |f| and the cosines of z with f and with z + f follow from these (Raghu et
    al. 2021, Figs. 7, E.1, E.2).

    Args:
        z: (images, tokens, dim) the skip input, of any strides and float dtype.
        f: (images, tokens, dim) the branch, likewise.
    """
    out = torch.empty(*z.shape[:2], 3, dtype=torch.float32, device=z.device)
    if z.device.type != "cpu":
        _multiply_at_once(z, f, out)
        return out
    n_tokens, n_channels = z.shape[1:]
    # The compiled loop reads contiguous float32 alone.
    can_compile = z.dtype == f.dtype == torch.float32
    can_compile = can_compile and z.is_contiguous() and f.is_contiguous()
    if can_compile:
        flat_z = z.detach().numpy().reshape(-1)
        flat_f = f.detach().numpy().reshape(-1)
        flat_out = out.numpy().reshape(-1)

    def multiply(images: slice) -> None:
        """Fill the products of some images."""
        if can_compile:
            tokens = images.start * n_tokens, images.stop * n_tokens
            dot_products(flat_z, flat_f, n_channels, tokens, flat_out)
            return
        # Channels-first views keep their order.
        x = z[images].float()
        y = f[images].float()
        products = out[images]
        torch.linalg.vecdot(x, x, out=products[..., 0])
        torch.linalg.vecdot(y, y, out=products[..., 1])
        torch.linalg.vecdot(x, y, out=products[..., 2])

    image_bytes = 4 * n_tokens * n_channels
    by_chunks(multiply, len(z), image_bytes, z.device, at_once=can_compile)
    return out


def _multiply_at_once(z: Tensor, f: Tensor, out: Tensor) -> None:
    """Fill `residual_products` on a GPU.

    There is one kernel per product, which reads the stored type and sums in float32.
    """
    for column, x in enumerate((z, f)):
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        torch.square(norm, out=out[..., column])
    with no_autocast(z.device):
        out[..., 2] = torch.linalg.vecdot(z.float(), f.float())


class SitePass(NamedTuple):
    """Results of one pass over a site's tokens.

    They are copies, which stay valid when the model overwrites its tensors.
    """

    cls: Tensor | None  # (images, dim) float32, the class token; None without one
    mean: Tensor  # (images, dim) float32, over grid cells or rows, without prefix tokens
    peak: Tensor  # the largest |x|, prefix included, a float32 scalar, NaN if any is NaN


def pass_over(prefix: Tensor | None, body: Tensor, layout: TokenLayout) -> SitePass:
    """Return the pooled vectors and the largest value of a site; sums are in float32.

    Args:
        prefix: (images, prefix tokens, dim), or None.
        body: (images, rows, cols, dim) or (images, rows, dim).
        layout: of the tokens.
    """
    cls = None
    if prefix is not None and layout.cls is not None:
        cls = prefix[:, layout.cls].to(torch.float32, copy=True)
    if is_by_token(body):
        mean = torch.empty(len(body), body.shape[-1], dtype=torch.float32)
        peak = take_tokens(body, mean, None)
    else:
        mean = body.flatten(1, -2).mean(1, dtype=torch.float32)
        peak = largest_magnitude(body)
    if prefix is not None and prefix.numel():
        peak = torch.maximum(peak, largest_magnitude(prefix))
    return SitePass(cls, mean, peak)


def take_tokens(body: Tensor, mean: Tensor, copies: Tensor | None) -> Tensor:
    """Fill means and copies of a site's tokens in one pass, and return their largest |x|.

    Args:
        body: tokens that satisfy `is_by_token`.
        mean: (images, dim) float32, contiguous, filled with means over cells or rows.
        copies: of the body's shape, contiguous, filled with the tokens in its own dtype; None for
            no copies.

    Returns:
        The largest |x|, a float32 scalar, NaN if any is NaN.
    """
    rows = body.flatten(1, -2)
    # All that the tensor is a view of, as one row.
    n = rows.untyped_storage().nbytes() // rows.itemsize
    memory = rows.detach().as_strided((n,), (1,), 0).numpy()
    shape = rows.shape[1], rows.shape[2]
    strides = int(rows.storage_offset()), rows.stride(0), rows.stride(1)
    means = mean.numpy()
    peaks = np.zeros(len(rows), np.float32)

    def take(images: slice) -> None:
        """Process some images; their largest |x| is put at the first of them."""
        bounds = images.start, images.stop
        peaks[images.start] = means_and_peak(memory, strides, shape, bounds, means)
        if copies is not None:
            copies[images] = body[images]

    by_chunks(take, len(rows), 4 * shape[0] * shape[1], body.device)
    return torch.tensor(peaks.max())


def is_by_token(body: Tensor) -> bool:
    """Return whether a compiled pass can process the tokens.

    They have to be float32 on a CPU, the channels of a token contiguous, and tokens in order.
    """
    if body.device.type != "cpu" or body.dtype != torch.float32 or body.stride(-1) != 1:
        return False
    steps = list(zip(body.shape, body.stride(), strict=True))[1:-1]
    return body.numel() > 0 and all(
        outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(steps)
    )


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest |x|, a float32 scalar, NaN if x has one.

    Strided tensors are read in place: `aminmax` would copy them first.
    """
    if x.device.type == "cuda":
        # One pass; on a CPU it takes ten times as long as the two below.
        return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return torch.maximum(-x.amin(), x.amax()).float()
