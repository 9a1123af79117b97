"""Summaries of activations: residual dot products, pooled vectors, largest values."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vitsee_core.reductions.cpu_tokens import dot_products, means_and_peak, memory_of
from vitsee_core.runtime.device import no_autocast
from vitsee_core.runtime.threads import by_chunks

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout


def residual_products(z: Tensor, f: Tensor) -> Tensor:
    """The dot products z.z, f.f and z.f of every token, summed over channels in float32.

    `z`, the skip input, and `f`, the branch: (images, tokens, dim), of any strides and float dtype.
    Returns (images, tokens, 3) float32, from which the norm ratio |z| / |f| and the cosines of z
    with f and with z + f follow (Raghu et al. 2021, Figs. 7, E.1, E.2).
    """
    out = torch.empty(*z.shape[:2], 3, dtype=torch.float32, device=z.device)
    if z.device.type != "cpu":
        _multiply_at_once(z, f, out)
        return out
    plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in (z, f))

    if plain:
        flat = [x.detach().numpy().reshape(-1) for x in (z, f, out)]

    def multiply(images: slice) -> None:
        if plain:
            tokens = images.start * z.shape[1], images.stop * z.shape[1]
            dot_products(flat[0], flat[1], z.shape[2], tokens, flat[2])
            return
        # Channels-first views keep their order.
        x, y, here = z[images].float(), f[images].float(), out[images]
        for column, (a, b) in enumerate(((x, x), (y, y), (x, y))):
            torch.linalg.vecdot(a, b, out=here[..., column])

    by_chunks(multiply, len(z), 4 * z.shape[1] * z.shape[2], z.device, at_once=plain)
    return out


def _multiply_at_once(z: Tensor, f: Tensor, out: Tensor) -> None:
    """`residual_products` on a GPU: one kernel per product, which reads the stored type and sums in
    float32."""
    for column, x in enumerate((z, f)):
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        torch.square(norm, out=out[..., column])
    with no_autocast(z.device):
        out[..., 2] = torch.linalg.vecdot(z.float(), f.float())


class SitePass(NamedTuple):
    """Results of one pass over a site's tokens; copies, so they stay valid when the model
    overwrites its tensors."""

    cls: Tensor | None  # (images, dim) float32, the class token, None if the layout has none
    mean: Tensor  # (images, dim) float32, over grid cells or rows, without prefix tokens
    peak: Tensor  # the largest |x|, prefix included, a float32 scalar, NaN if any is NaN


def pass_over(prefix: Tensor | None, body: Tensor, layout: TokenLayout) -> SitePass:
    """Pooled vectors and the largest value of a site.

    `prefix`: (images, prefix tokens, dim) or None; `body`: (images, rows, cols, dim) or (images,
    rows, dim). Sums are in float32.
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


def take_tokens(body: Tensor, mean: Tensor, kept: Tensor | None) -> Tensor:
    """One pass over the tokens of a site, which must satisfy `is_by_token`.

    `mean`: (images, dim) float32, filled with means over cells or rows; `kept`: of the body's
    shape, filled with the tokens in its own dtype, or None. Both are contiguous. Returns the
    largest |x|, a float32 scalar, NaN if any is NaN.
    """
    rows = body.flatten(1, -2)
    memory, shape = memory_of(rows), (rows.shape[1], rows.shape[2])
    places = int(rows.storage_offset()), rows.stride(0), rows.stride(1)
    means, peaks = mean.numpy(), np.zeros(len(rows), np.float32)

    def take(images: slice) -> None:
        run = images.start, images.stop
        peaks[images.start] = means_and_peak(memory, places, shape, run, means)
        if kept is not None:
            kept[images] = body[images]

    by_chunks(take, len(rows), 4 * shape[0] * shape[1], body.device)
    return torch.tensor(peaks.max())


def is_by_token(body: Tensor) -> bool:
    """Whether a compiled pass can process the tokens: float32 on a CPU, channels of a token
    contiguous, and tokens in order."""
    if body.device.type != "cpu" or body.dtype != torch.float32 or body.stride(-1) != 1:
        return False
    steps = list(zip(body.shape, body.stride(), strict=True))[1:-1]
    return body.numel() > 0 and all(
        outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(steps)
    )


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest |x|, a float32 scalar, NaN if x has one. Strided tensors are read in place:
    `aminmax` would copy them first."""
    if x.device.type == "cuda":  # one pass; on a CPU it takes ten times as long as two of these
        return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return torch.maximum(-x.amin(), x.amax()).float()
