"""Summaries of activations: residual dot products and pooled vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vitsee_core.device import no_autocast
from vitsee_core.reductions.cpu_dots import dot_products
from vitsee_core.threads import by_chunks

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout


def residual_products(z: Tensor, f: Tensor) -> Tensor:
    """The dot products z.z, f.f and z.f of every token, summed over channels in float32.

    `z`, the skip input, and `f`, the branch: (images, tokens, dim), of any strides and float
    dtype. Returns (images, tokens, 3) float32, from which the norm ratio |z| / |f| and the
    cosines of z with f and with z + f follow (Raghu et al. 2021, Figs. 7, E.1, E.2).
    """
    out = torch.empty(*z.shape[:2], 3, dtype=torch.float32, device=z.device)
    if z.device.type != "cpu":
        _multiply_at_once(z, f, out)
        return out
    plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in (z, f))

    def multiply(images: slice) -> None:
        if plain:
            left, right, dots = (x.detach().numpy() for x in (z, f, out))
            dot_products(left, right, dots, images.start, images.stop)
            return
        # Channels-first views stay in their order.
        x, y, here = z[images].float(), f[images].float(), out[images]
        for column, (a, b) in enumerate(((x, x), (y, y), (x, y))):
            torch.linalg.vecdot(a, b, out=here[..., column])

    by_chunks(multiply, len(z), 4 * z.shape[1] * z.shape[2], z.device)
    return out


def _multiply_at_once(z: Tensor, f: Tensor, out: Tensor) -> None:
    """`residual_products` where memory is wide: one kernel per product, which reads the stored type
    and sums in float32."""
    for column, x in enumerate((z, f)):
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        torch.square(norm, out=out[..., column])
    with no_autocast(z.device):
        out[..., 2] = torch.linalg.vecdot(z.float(), f.float())


def pool_sites(
    prefix: Tensor | None, body: Tensor, layout: TokenLayout
) -> tuple[Tensor | None, Tensor]:
    """The class token and the mean over a site's grid cells (or its rows).

    `prefix`: (images, prefix tokens, dim) or None; `body`: (images, rows, cols, dim) or (images,
    rows, dim). Returns two float32 tensors of shape (images, dim), sums in float32; the first is
    None where the layout has no class token. Prefix tokens are not part of the mean. Both are
    copies, so they stay valid when the model overwrites its tensors.
    """
    cls = None
    if prefix is not None and layout.cls is not None:
        cls = prefix[:, layout.cls].to(torch.float32, copy=True)
    return cls, body.flatten(1, -2).mean(1, dtype=torch.float32)
