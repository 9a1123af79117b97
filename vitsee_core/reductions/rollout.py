"""Attention rollout: how much of every input token reaches the class token through all blocks.

Source: Abnar & Zuidema 2020; used by Dosovitskiy et al. 2021 (Figs. 6 and 13), whose text mentions
the averaging over heads and the recursive product, but not the residual term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vitsee_core.runtime.device import no_autocast

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout


def rollout(head_means: Sequence[Tensor], layout: TokenLayout, residual: bool = True) -> Tensor:
    """The class token's row of A_L ... A_1 with A = 0.5 (mean over heads) + 0.5 I.

    `head_means`: one (images, tokens, tokens) tensor per block, first block first. Rows are
    renormalised, so a result sums to 1 over its tokens; `residual=False` omits the identity.
    Without a class token the row is the mean over the spatial queries. Returns (images, tokens),
    prefix tokens included.

    Only one row of the product is needed, so a row is propagated from the last block to the first:
    T^2 multiplications per block instead of T^3 for the full product.
    """
    if not head_means:
        raise ValueError("rollout needs the head means of at least one block")
    with no_autocast(head_means[0].device):
        return _carried(head_means, layout, residual)


def _carried(head_means: Sequence[Tensor], layout: TokenLayout, residual: bool) -> Tensor:
    last = head_means[-1]
    row = torch.zeros(last.shape[0], 1, last.shape[-1], dtype=last.dtype, device=last.device)
    if layout.cls is not None:
        row[..., layout.cls] = 1.0
    else:
        row[..., layout.n_prefix :] = 1.0 / (layout.n_tokens - layout.n_prefix)
    for mean in reversed(head_means):
        total = mean.sum(-1).unsqueeze(1)
        if residual:
            # (A + I) / (its row sum): the identity is added to the product, not to the matrix.
            row = row / (total + 1.0)
            row = torch.baddbmm(row, row, mean)
        else:
            row = torch.bmm(row / total, mean)
    return row.squeeze(1)
