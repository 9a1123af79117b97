"""Passes over attention matrices, written so that few of them touch the whole matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def row_entropy(p: Tensor, scores: Tensor) -> Tensor:
    """-sum p ln p of every row; overwrites `scores`, whose softmax p is.

    `p`, `scores`: (images, heads, queries, keys). Returns (images, heads, queries) in nats; keys
    without mass count 0, and a row that is no distribution (NaN) is NaN.
    """
    if p.device.type != "cpu":
        entropies: Tensor = torch.special.entr(p, out=scores)
        return entropies.sum(-1)
    # ln p = score - lse, so the entropy is lse - sum p score, without a logarithm an element
    # (those take longer than all other passes together); lse from one key of each row.
    first = p[..., 0]
    lse: Tensor = scores[..., 0] - first.log()
    # What the plain way is for: a key whose logarithm is inexact, and scores so far from 0 that
    # the difference would lose more than 1e-4 nats.
    plain = ~((first > 1e-30) & (lse.abs() < 256.0))
    entropy = lse.sub_(torch.mul(p, scores, out=scores).sum(-1)).clamp_(min=0.0)
    if plain.any() or not entropy.sum().isfinite():
        plain |= ~entropy.isfinite()  # masked keys give 0 * -inf
        entropy[plain] = torch.special.entr(p[plain]).sum(-1)
    return entropy


def spread(sum_of_squares: Tensor, mean: Tensor, n: int) -> Tensor:
    """Standard deviation of n values with n - 1; 0 for n = 1. Overwrites `sum_of_squares`."""
    if n == 1:
        return torch.zeros_like(mean)
    squares: Tensor = sum_of_squares.addcmul_(mean, mean, value=-n)
    return squares.clamp_(min=0.0).sqrt_().mul_((n - 1) ** -0.5)
