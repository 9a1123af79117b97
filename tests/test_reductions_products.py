"""Scores as compiled products, and their exponentials, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.attention_calls import PER_HEAD, SUMS
from vitsee_core.models.attention_watch import KernelCall
from vitsee_core.reductions import AttentionReducer, AttentionSummary
from vitsee_core.reductions.cpu_products import (
    LANES,
    QUERIES,
    VECTORS,
    Product,
    lay_out_keys,
    multiply,
    padded,
)
from vitsee_core.reductions.cpu_sums import LEAST_SCORE, exponential, subtract_largest, take
from vitsee_core.types import Float32
from vitsee_stores.layout import TokenLayout

LAYOUTS = {  # how (images, heads, tokens, channels) lie in memory
    "by image": (0, 1, 2, 3),
    "interleaved, as timm's qkv": (0, 2, 1, 3),
    "channels first": (0, 1, 3, 2),
    "tokens first": (2, 0, 1, 3),
}


def tensor(shape: tuple[int, ...], order: tuple[int, ...], seed: int) -> Tensor:
    """Random, in memory that has NaN before and after every row of the innermost axis."""
    generator = torch.Generator().manual_seed(seed)
    stored = [shape[axis] for axis in order]
    memory = torch.full((*stored[:-1], stored[-1] + 3), math.nan)
    memory[..., 1:-2] = torch.randn(stored, generator=generator)
    return memory[..., 1:-2].permute(*np.argsort(order).tolist())


def product(query: Tensor, key: Tensor, scale: float, image: int, n_prefix: int = 0) -> Float32:
    """(heads, tokens, width): an image's scores as they lie."""
    found = Product.of(query, key, scale)
    assert found is not None
    n_heads, n_tokens, n_channels = query.shape[1:]
    width = padded(n_prefix) + padded(n_tokens - n_prefix)
    keys = np.full(n_heads * (1 + n_channels) * width, np.nan, np.float32)
    lay_out_keys(*found, image, (0, n_heads), n_prefix, n_tokens, width, keys)
    out = np.full((n_heads, n_tokens, width), np.nan, np.float32)
    some = np.full(QUERIES * width, np.nan, np.float32)
    for head in range(n_heads):
        for first in range(0, n_tokens, QUERIES):
            run = first, min(QUERIES, n_tokens - first)
            multiply(*found, image, head, run, keys, head * (1 + n_channels) * width, width, some)
            out[head, first : first + QUERIES] = some.reshape(QUERIES, width)[: run[1]]
    return out


def without_gaps(rows: Float32, n_prefix: int, n_tokens: int) -> Float32:
    """Rows of whole vectors by token; what lies between must be no key."""
    begin = padded(n_prefix)
    at = np.r_[:n_prefix, begin : begin + n_tokens - n_prefix]
    assert np.isneginf(np.delete(rows, at, -1)).all()
    return rows[..., at]


WIDE = VECTORS * LANES


@pytest.mark.parametrize("order", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("n_heads", "n_key_heads", "n_tokens", "n_channels"),
    [(1, 1, 1, 1), (3, 3, 5, 3), (4, 2, 17, 24), (2, 1, 65, 6), (1, 1, 2 * WIDE + 3, 4)],
)
@pytest.mark.parametrize("n_prefix", [0, 1, 18])
def test_products_agree_with_float64(
    n_heads: int,
    n_key_heads: int,
    n_tokens: int,
    n_channels: int,
    order: tuple[int, ...],
    n_prefix: int,
) -> None:
    query = tensor((4, n_heads, n_tokens, n_channels), order, 0)
    key = tensor((4, n_key_heads, n_tokens, n_channels), order, 1)
    n = min(n_prefix, n_tokens)
    wide = key.double().repeat_interleave(n_heads // n_key_heads, 1)
    for image in (0, 3):
        found = without_gaps(product(query, key, 0.3, image, n), n, n_tokens)
        want = 0.3 * query[image].double() @ wide[image].transpose(1, 2)
        # Sums of up to 24 terms of about 1 in float32.
        np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=3e-6)


def test_a_product_by_hand() -> None:
    query = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    key = torch.tensor([[[[1.0, 0.0], [-1.0, 5.0]]]])
    rows = product(query, key, 0.5, 0)
    assert rows.shape == (1, 2, LANES)
    assert without_gaps(rows, 0, 2).tolist() == [[[0.5, 4.5], [1.5, 8.5]]]


def test_given_scores_lie_as_products_do() -> None:
    given = np.arange(12, dtype=np.float32)
    scores = np.full(QUERIES * 2 * LANES, np.nan, np.float32)
    take(given, 3, 2, 1, 3, 2 * LANES, scores)
    rows = scores.reshape(QUERIES, 2 * LANES)
    assert without_gaps(rows[:2], 1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert rows[0, LANES : LANES + 2].tolist() == [4, 5]  # the grid begins with a vector


def test_other_precisions_are_no_product_for_the_loops() -> None:
    x = torch.zeros(1, 1, 2, 2)
    assert Product.of(x, x.half(), 1.0) is None
    assert Product.of(x.double(), x.double(), 1.0) is None


def call_of(n_images: int, n_tokens: int) -> KernelCall:
    shape, order = (n_images, 3, n_tokens, 8), LAYOUTS["interleaved, as timm's qkv"]
    query, key = (4 * tensor(shape, order, seed) for seed in (0, 1))
    return KernelCall({"query": query, "key": key, "value": query}, query)


def summary(call: KernelCall) -> AttentionSummary:
    layout = TokenLayout(("cls",), (5, 4), stride_px=(16.0, 12.0))
    valid = torch.arange(call.n_images) != 2
    return AttentionReducer(layout, "cpu", rows=True).reduce(call, valid)


def test_summaries_of_products_are_those_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(5, 21)
    found = summary(call)
    monkeypatch.setattr(KernelCall, "factors", lambda _: None)
    want = summary(call)
    same = set()
    for name in (*PER_HEAD, *SUMS, "head_std", "head_mean", "cls_rows", "received_rows"):
        # The same sums of eight terms in another order.
        a, b = getattr(found, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=name)
        same |= {name} if torch.equal(a, b) else set()
    assert same < {"n_queries", "received_argmax", "head_std", "query_std"}


def test_the_batch_around_an_image_does_not_matter() -> None:
    call = call_of(6, 21)
    whole = summary(call)
    part = {"query": call.query[4:], "key": call.key[4:], "value": call.value[4:]}
    alone = summary(KernelCall(part, call.output[4:]))
    for name in (*PER_HEAD, "head_std", "head_mean", "cls_rows", "received_rows"):
        assert torch.equal(getattr(whole, name)[4:], getattr(alone, name)), name


def test_exponentials_are_within_a_unit_in_the_last_place() -> None:
    x = np.linspace(-87, 0, 20001, dtype=np.float32)
    found = np.array([exponential(value) for value in x], np.float64)
    want = np.exp(x.astype(np.float64))
    assert np.abs(found / want - 1).max() < 2**-23
    assert exponential(np.float32(0)) == 1.0
    assert exponential(np.float32(-88)) == 0.0
    assert math.isnan(exponential(np.float32(np.nan)))


def test_scores_minus_their_largest_by_hand() -> None:
    inf, nan, least = math.inf, math.nan, float(LEAST_SCORE)
    rows = np.array([1, -3, -inf, -200, -inf, -5, -5, -7, -8, -5.5, 9, 9], np.float32)
    subtract_largest(rows, 2, 5)
    assert rows.tolist() == [0, -4, least, least, least, 0, 0, -2, -3, -0.5, 9, 9]
    for broken in ([1, nan, 0], [nan, -inf, -inf], [-inf] * 3, [-1, -nan, -2]):
        rows = np.array(broken, np.float32)
        subtract_largest(rows, 1, 3)
        assert np.isnan(rows).any(), broken
