"""The scores of small images as compiled products, and their exponentials, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.attention_calls import PER_HEAD, SUMS
from vitsee_core.models.attention_watch import KernelCall
from vitsee_core.reductions import AttentionReducer, AttentionSummary, cpu_passes
from vitsee_core.reductions.cpu_products import KEYS, Product, multiply_images
from vitsee_core.reductions.cpu_sums import LEAST_SCORE, exponential, subtract_largest
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


def product(query: Tensor, key: Tensor, scale: float, first: int, n_images: int) -> Float32:
    found = Product.of(query, key, scale)
    assert found is not None
    n_heads, n_tokens = query.shape[1:3]
    out = np.full((n_images, n_heads, n_tokens, n_tokens), np.nan, np.float32)
    multiply_images(*found, first, out)
    return out


@pytest.mark.parametrize("order", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("n_heads", "n_key_heads", "n_tokens", "n_channels"),
    [(1, 1, 1, 1), (3, 3, 5, 3), (4, 2, 17, 24), (2, 1, KEYS + 1, 6), (1, 1, 2 * KEYS + 3, 4)],
)
def test_products_agree_with_float64(
    n_heads: int, n_key_heads: int, n_tokens: int, n_channels: int, order: tuple[int, ...]
) -> None:
    query = tensor((4, n_heads, n_tokens, n_channels), order, 0)
    key = tensor((4, n_key_heads, n_tokens, n_channels), order, 1)
    found = product(query, key, 0.3, 1, 2)
    wide = key.double().repeat_interleave(n_heads // n_key_heads, 1)[1:3]
    want = 0.3 * query[1:3].double() @ wide.transpose(2, 3)
    # Sums of up to 24 terms of about 1 in float32.
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=3e-6)


def test_a_product_by_hand() -> None:
    query = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    key = torch.tensor([[[[1.0, 0.0], [-1.0, 5.0]]]])
    assert product(query, key, 0.5, 0, 1).tolist() == [[[[0.5, 4.5], [1.5, 8.5]]]]


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
    monkeypatch.setattr(cpu_passes, "FEW_TOKENS", 0)
    want = summary(call)
    for name in (*PER_HEAD, *SUMS, "head_std", "head_mean", "cls_rows", "received_rows"):
        # The same sums of eight terms in another order.
        a, b = getattr(found, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=name)
        assert not torch.equal(a, b) or name in ("n_queries", "received_argmax")


def test_the_batch_around_an_image_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(6, 21)
    whole = summary(call)
    monkeypatch.setattr(cpu_passes, "BLOCK_BYTES", 1)  # and each image by itself
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
    rows = np.array([1, -3, -inf, -200, 9, -5, -5, -7, -8, 9, 9, 9], np.float32)
    subtract_largest(rows, 2, 4, 5)
    assert rows.tolist() == [0, -4, least, least, least, 0, 0, -2, -3, least, 9, 9]
    for broken in ([1, nan, 0], [nan, -inf, -inf], [-inf] * 3, [-1, -nan, -2]):
        rows = np.array(broken, np.float32)
        subtract_largest(rows, 1, 3, 3)
        assert np.isnan(rows).any(), broken
