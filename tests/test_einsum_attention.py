"""Attention written with `torch.einsum` is captured as the same attention written with products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models_helpers import captured, images
from tests.test_batch_independence import DIM, TRANSFORM, checked, vit
from vitsee_core.models.attention_watch import AttentionEvent, AttentionWatch
from vitsee_core.models.einsum_attention import read_einsum
from vitsee_core.models.load import model_from_module
from vitsee_core.models.site_tables import site_table

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
SCALE = (DIM // 2) ** -0.5


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) * SCALE).softmax(-1) @ v).transpose(1, 2)


def by_einsum(scores: str, outputs: str, values_first: bool = False) -> Multiply:
    """Attention by two equations: of queries and keys, of weights and values. The second gives
    (images, queries, heads, dim)."""

    def multiply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum(scores, q, k) * SCALE).softmax(-1)
        if values_first:
            return torch.einsum(outputs, v, weights)
        return torch.einsum(outputs, weights, v)

    return multiply


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With heads behind tokens, as big_vision and JAX have them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def heads_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights with heads between queries and keys."""
    weights = (torch.einsum("bhqd,bhkd->bqhk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bqhk,bhkd->bqhd", weights, v)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (
        (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1).transpose(-2, -1)
    )
    return torch.einsum("bhji,bhjd->bihd", weights, v)


def by_lists(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores: Tensor = torch.einsum(q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4])  # type: ignore
    weights = (scores * SCALE).softmax(-1)
    return torch.einsum(weights, [0, 1, 2, 4], v, [0, 1, 4, 3], [0, 2, 1, 3])  # type: ignore


def keys_first(scores: str, outputs: str, dim: int) -> Multiply:
    """Scores with keys before queries, and a softmax over keys there; then as `by_einsum`."""

    def multiply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum(scores, q, k) * SCALE).softmax(dim)
        return torch.einsum(outputs, weights, v)

    return multiply


def keys_first_by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (k @ q.transpose(-2, -1) * SCALE).softmax(-2)
    return (weights.transpose(-2, -1) @ v).transpose(1, 2)


def channels_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values of (images, heads, dim, keys) times weights of keys and queries."""
    weights = (k @ q.transpose(-2, -1) * SCALE).softmax(dim=2)
    return (v.transpose(-2, -1) @ weights).permute(0, 3, 1, 2)


SPELLINGS: dict[str, Multiply] = {
    "keys first": keys_first("bhid,bhjd->bhji", "bhji,bhjd->bihd", dim=-2),
    "keys first, from the front": keys_first("bhid,bhjd->bhji", "bhji,bhjd->bihd", 2),
    "keys before heads": keys_first("bhid,bhjd->bjhi", "bjhi,bhjd->bihd", dim=1),
    "keys before queries and heads": keys_first("bhid,bhjd->bjih", "bjih,bhjd->bihd", 1),
    "keys first, by products": keys_first_by_matmul,
    "keys first, channels first": channels_first,
    "images and heads last, as in XLNet": keys_first(
        "bhid,bhjd->ijbh", "ijbh,bhjd->bihd", 1
    ),
    "the same, keys before all": keys_first("bhid,bhjd->jibh", "jibh,bhjd->bihd", dim=0),
    "images between queries and keys": keys_first(
        "bhid,bhjd->ibjh", "ibjh,bhjd->bihd", 2
    ),
    "plain": by_einsum("bhid,bhjd->bhij", "bhij,bhjd->bihd"),
    "values first": by_einsum("bhid,bhjd->bhij", "bhjd,bhij->bihd", values_first=True),
    "blanks": by_einsum("b h i d, b h j d -> b h i j", "b h i j, b h j d -> b i h d"),
    "dots": lambda q, k, v: by_einsum("...id,...jd->...ij", "...ij,...jd->...id")(
        q, k, v
    ).transpose(1, 2),
    "tokens first": tokens_first,
    "heads behind": heads_behind,
    "turned": turned,
    "lists": by_lists,
}


class Attention(nn.Module):
    def __init__(self, attention: Any, multiply: Multiply) -> None:
        super().__init__()
        self.qkv, self.proj, self.multiply = attention.qkv, attention.proj, multiply

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        projected: Tensor = self.proj(self.multiply(q, k, v).flatten(2))
        return projected


def with_attention(multiply: Multiply) -> Any:
    module = vit()
    for block in module.blocks:
        block.attn = Attention(block.attn, multiply)
    return module


@pytest.mark.parametrize("case", SPELLINGS)
def test_scores_and_values_are_those_of_products(case: str) -> None:
    module = with_attention(SPELLINGS[case])
    assert checked(module).ok
    model = model_from_module(module, TRANSFORM, name="mine")
    by_products = model_from_module(with_attention(by_matmul), TRANSFORM, name="mine")
    table = site_table(model)
    assert [block.name for block in table.attention] == ["blocks.0", "blocks.1"]
    keeper = captured(model, table, images(model))
    expected = captured(by_products, site_table(by_products), images(model))
    for name in ("blocks.0", "blocks.1"):
        torch.testing.assert_close(keeper.scores[name], expected.scores[name])
        torch.testing.assert_close(keeper.values[name], expected.values[name])


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries compete for keys, as slots do."""
    return ((q @ k.transpose(-2, -1) * SCALE).softmax(-2) @ v).transpose(1, 2)


def over_queries_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-2)
    return torch.einsum("bhij,bhjd->bihd", weights, v)


@pytest.mark.parametrize("multiply", [over_queries, over_queries_by_einsum])
def test_a_softmax_over_queries_is_said(multiply: Multiply) -> None:
    module = with_attention(multiply)
    table = site_table(model_from_module(module, TRANSFORM, name="mine"))
    assert not table.attention
    reason = table.left_out["blocks.0 attention"]
    assert reason.startswith("the softmax is not over the last axis of its argument")


def test_keys_normalised_by_themselves_are_no_attention() -> None:
    """Linear attention: softmax over tokens of k, then k^T v."""

    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = k.softmax(-2).transpose(-2, -1) @ v
        return (q.softmax(-1) @ context).transpose(1, 2)

    table = site_table(model_from_module(with_attention(linear), TRANSFORM, name="mine"))
    assert not table.attention
    assert "not over the last axis" not in str(table.left_out)


def test_keys_normalised_by_themselves_in_as_many_images_are_no_attention() -> None:
    """There are as many images as tokens: the first axis could be taken for one of queries."""
    keys = torch.randn(5, 5, 3)
    events: list[AttentionEvent] = []
    with AttentionWatch(events.append):
        torch.einsum("bnd,bne->bde", keys.softmax(1), torch.randn(5, 5, 4))
        torch.einsum("bnd,nde->bne", keys.softmax(0), torch.randn(5, 3, 4))
    assert not events


def test_attention_that_waits_is_not_displaced() -> None:
    """A choice between as many branches as images, between softmax and product."""
    scores = torch.randn(2, 3, 5, 5)
    value = torch.randn(2, 3, 5, 4)
    events: list[AttentionEvent] = []
    with AttentionWatch(events.append):
        weights = scores.softmax(-1)
        torch.randn(2, 2, 7).softmax(1)
        weights @ value
    assert [event.mixed for event in events] == [False]


def test_heads_mixed_after_the_softmax_are_said() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1)
        return torch.einsum("bhij,bgjd->bigd", weights, v)

    table = site_table(model_from_module(with_attention(mixed), TRANSFORM, name="mine"))
    assert not table.attention
    assert (
        "not multiplied by the softmax as it is" in table.left_out["blocks.0 attention"]
    )


def laid_out(
    equation: str, scores: Tensor, weights: Tensor, value: Tensor, result: Tensor
) -> Any:
    """What `read_einsum` makes of the weights of a softmax over the last axis."""
    return read_einsum(
        (equation, weights, value),
        scores,
        weights_at=0,
        turned=False,
        softmax_axis=-1,
        result=result,
    )


def test_an_einsum_is_laid_out_as_products() -> None:
    scores, value = (
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 5, 6),
    )  # values that heads share
    weights = scores.softmax(-1)
    result = torch.einsum("bhqk,bkd->bqhd", weights, value)
    product = laid_out("bhqk,bkd->bqhd", scores, weights, value, result)
    assert product is not None
    assert torch.equal(product.scores, scores)
    assert product.value.shape == (2, 3, 5, 6)
    torch.testing.assert_close(product.scores.softmax(-1) @ product.value, product.output)


@pytest.mark.parametrize(
    ("equation", "shape"),
    [
        ("bhqk,bhkd->bqd", (2, 3, 5, 6)),  # summed over heads
        ("bhqk,bhqd->bhkd", (2, 3, 4, 6)),  # values of the queries
        ("bhqk,bhkde->bhqde", (2, 3, 5, 6, 2)),  # values that are matrices
        ("bhqk,bhkd->bhqkd", (2, 3, 5, 6)),  # not summed over keys
        ("bhqk,bhk->bhq", (2, 3, 5)),  # one number a key
    ],
)
def test_another_einsum_is_no_attention(equation: str, shape: tuple[int, ...]) -> None:
    scores, value = torch.randn(2, 3, 4, 5), torch.randn(shape)
    weights = scores.softmax(-1)
    result = torch.einsum(equation, weights, value)
    assert laid_out(equation, scores, weights, value, result) is None


def test_an_equation_without_an_arrow() -> None:
    """The axes that occur once, in alphabetical order."""
    scores, value = torch.randn(4, 5), torch.randn(5, 6)
    weights = scores.softmax(-1)
    result = torch.einsum("qk,kd", weights, value)  # d before q
    product = laid_out("qk,kd", scores, weights, value, result)
    assert product is not None
    torch.testing.assert_close(product.output, weights @ value)
