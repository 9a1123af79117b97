"""Passes over attention matrices, written so that few of them touch the whole matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def by_caches(x: Tensor) -> bool:
    """Whether passes over a tensor are arranged for a CPU's caches (else in few kernels, for a
    GPU)."""
    return x.device.type == "cpu"


def row_entropies(p: Tensor, scores: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """-sum p ln p of every row, over all keys and over the spatial ones alone.

    `p`, `scores`: (images, heads, queries, keys), prefix keys first; p is the softmax of `scores`,
    which are overwritten. `mass`: (images, heads, queries), the sum of p over spatial keys.
    Returns two (images, heads, queries) in nats; the second of the row restricted to the spatial
    keys and divided by its mass, and NaN where the mass is 0. Keys without mass contribute 0, and a
    row with NaN is NaN.
    """
    n_prefix = scores.shape[-1] - scores.shape[-2]
    if not by_caches(p):
        return _entropies(torch.special.entr(p, out=scores), mass, n_prefix)
    # ln p = score - lse, so the entropy is lse - sum p score, without a logarithm per element
    # (those take longer than all other passes together); lse from one key of each row.
    first = p[..., 0]
    lse: Tensor = scores[..., 0] - first.log()
    # The direct formula is for a key whose logarithm is inexact, and for scores so far from 0 that
    # the difference would lose more than 1e-4 nats.
    plain = ~((first > 1e-30) & (lse.abs() < 256.0))
    expected = torch.mul(p, scores, out=scores)
    within = expected[..., n_prefix:].sum(-1)
    total = within + expected[..., :n_prefix].sum(-1) if n_prefix else within
    # Of the renormalised row ln p = score - lse - ln mass. Subtracting the prefix keys' share from
    # the full entropy instead would divide its rounding error by the mass.
    spatial = (lse + mass.log()).sub_(within.div_(mass)).clamp_(min=0.0)
    entropy = lse.sub_(total).clamp_(min=0.0)
    if plain.any() or not entropy.sum().isfinite():
        plain |= ~entropy.isfinite()  # masked keys give 0 * -inf
        terms = torch.special.entr(p[plain])
        entropy[plain], spatial[plain] = _entropies(terms, mass[plain], n_prefix)
    return entropy, spatial


def _entropies(terms: Tensor, mass: Tensor, n_prefix: int) -> tuple[Tensor, Tensor]:
    """`row_entropies` from the terms -p ln p (..., keys)."""
    within = terms[..., n_prefix:].sum(-1)
    total = within + terms[..., :n_prefix].sum(-1) if n_prefix else within
    return total, (within / mass + mass.log()).clamp_(min=0.0)


def spread_over_queries(rows: Tensor, mean: Tensor, scratch: Tensor) -> Tensor:
    """Standard deviation over queries with n - 1, 0 for one: (images, heads, keys).

    `rows`: (images, heads, queries, keys); `mean`: (images, heads, keys), their mean over queries;
    `scratch`: of the shape of `rows`, overwritten. Squares of differences from the mean: a
    difference of sums of squares loses all digits where rows are nearly alike.
    """
    n = rows.shape[2]
    if not by_caches(rows):
        return torch.std(rows, 2, correction=min(1, n - 1))
    apart = torch.sub(rows, mean.unsqueeze(2), out=scratch)
    return apart.square_().sum(2).mul_(1.0 / max(1, n - 1)).sqrt_()


def spread_over_heads(a: Tensor, mean: Tensor, scratch: Tensor) -> Tensor:
    """Standard deviation over heads with n - 1, 0 for one: (images, queries, keys).

    `a`: (images, heads, queries, keys); `mean`: (images, queries, keys), their mean over heads;
    `scratch`: of the shape of `a`, overwritten.
    """
    n = a.shape[1]
    if n == 1:
        return torch.zeros_like(mean)
    if not by_caches(a):
        return torch.std(a, 1)
    # One head at a time: its differences and their sum stay in the nearest cache.
    apart, total = scratch[:, 0], scratch[:, 1].zero_()
    for head in a.unbind(1):
        torch.sub(head, mean, out=apart)
        total.addcmul_(apart, apart)
    return total.mul_(1.0 / (n - 1)).sqrt_()


def shared_information(mean: Tensor, entropy: Tensor, n_queries: Tensor) -> Tensor:
    """[H(mean) - entropy] / sqrt(ln n_queries H(mean)): (images, heads).

    `mean`: (images, heads, keys), the mean row; `entropy`: the rows' mean entropy; `n_queries`:
    how many rows. NaN (0 / 0) for one query, and where all rows are the same single key.
    """
    of_keys = torch.special.entr(mean).sum(-1)
    shared = (of_keys - entropy).clamp_(min=0.0)
    found: Tensor = shared / (n_queries.log() * of_keys).sqrt()
    return found


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis, term by term: equal bits whatever else is computed at the same
    time."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
