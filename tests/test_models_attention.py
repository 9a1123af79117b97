"""Attention seen through fused kernels against timm's own unfused path, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models_helpers import VIT, Keeper, captured, images, small
from vitsee_core.models.attention_watch import (
    AttentionEvent,
    AttentionWatch,
    KernelCall,
    _scaled_products_at_once,
    _scaled_products_by_image,
)
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import CaptureError
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table

SERVED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", (32, 48), VIT),
    "qk-norm": ("vit_tiny_patch16_224", 32, {**VIT, "qk_norm": True}),
    "distilled": ("deit_tiny_distilled_patch16_224", 32, VIT),
    "relative position bias": ("beit_base_patch16_224", 32, VIT),
    "shared relative position": ("vit_relpos_base_patch16_rpn_224", 32, VIT),
    "rope": ("eva02_tiny_patch14_224", 32, VIT),
    "dinov3": ("vit_small_patch16_dinov3", 32, VIT),
    "grouped queries": (
        "vit_small_patch16_dinov3",
        32,
        {
            **VIT,
            "num_heads": 4,
            "num_kv_heads": 2,
            "qkv_fused": False,
            "attn_type": "rope",
        },
    ),
}


def fuse(model: LoadedModel, fused: bool) -> None:
    for module in model.module.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused  # type: ignore[assignment]


def unfused(model: LoadedModel, x: Tensor) -> dict[str, Tensor]:
    """timm's explicit softmax by block, from hooks on attn_drop."""
    found: dict[str, Tensor] = {}
    fuse(model, False)
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.module.named_modules():
            if name.endswith("attn_drop"):
                block = name.removesuffix(".attn_drop").removesuffix(".attn")
                hook = module.register_forward_hook(
                    lambda _m, _a, out, block=block: found.__setitem__(block, out.clone())
                )
                stack.enter_context(hook)
        model.module(x)
    return found


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("fused", [True, False])
def test_scores_are_the_unfused_paths(case: str, fused: bool) -> None:
    name, size, args = SERVED[case]
    model = small(name, size, **args)
    x = images(model, 2)
    expected = unfused(model, x)
    fuse(model, fused)
    table = site_table(model)
    assert [block.name for block in table.attention] == list(expected)
    keeper = captured(model, table, x, attention=table.attention)
    with torch.no_grad():
        assert torch.equal(model.module(x), keeper.output)
    for block, weights in expected.items():
        made = keeper.scores[block].softmax(-1)
        torch.testing.assert_close(made, weights, rtol=0, atol=1e-6)
        assert keeper.values[block].shape[:3] == weights.shape[:3]


def seen(function: Any) -> list[AttentionEvent]:
    events: list[AttentionEvent] = []
    with AttentionWatch(events.append):
        function()
    return events


def by_loops(q: Tensor, k: Tensor, mask: Any, causal: bool, scale: float) -> Tensor:
    shape = *q.shape[:3], k.shape[2]
    scores = torch.empty(shape, dtype=torch.float64)
    for i, h, a, b in np.ndindex(shape):
        value = (
            float(q[i, h, a].double() @ k[i, h // (shape[1] // k.shape[1]), b].double())
            * scale
        )
        if mask is not None and mask.dtype == torch.bool:
            value = value if mask.expand(shape)[i, h, a, b] else float("-inf")
        elif mask is not None:
            value += float(mask.expand(shape)[i, h, a, b])
        scores[i, h, a, b] = float("-inf") if causal and b > a else value
    return scores


@pytest.mark.parametrize(
    "case",
    ["plain", "scale", "causal", "bool", "bias", "bias per image", "grouped", "half"],
)
def test_kernel_arguments(case: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    n, heads, tokens, dim = 3, 4, 5, 6
    # Heads lie next to each other in memory, as a fused qkv projection leaves them.
    q, v = (draw(n, tokens, heads, dim).transpose(1, 2) for _ in range(2))
    k = draw(n, heads, tokens, dim)
    given: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
    }
    options = given.get(case, {})
    masks = {
        "bool": (draw(n, 1, tokens, tokens) > -1) | torch.eye(tokens, dtype=torch.bool),
        "bias": draw(1, heads, tokens, tokens),
        "bias per image": draw(n, heads, tokens, tokens),
    }
    mask = masks.get(case)
    if case == "grouped":
        k, v, options = k[:, :2], v[:, :2], {"enable_gqa": True}
    if case == "half":
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    out: list[Tensor] = []

    def attend() -> None:
        out.append(
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        )

    (event,) = seen(attend)
    assert event.call is not None and isinstance(event.call, KernelCall)
    call = event.call
    assert (call.n_images, call.n_heads, call.n_tokens) == (n, heads, tokens)
    assert event.n_keys == tokens
    scale = options.get("scale", dim**-0.5)
    expected = by_loops(q, k, mask, options.get("is_causal", False), scale)
    torch.testing.assert_close(
        call.scores(slice(None)), expected.float(), rtol=1e-5, atol=1e-5
    )
    buffer = torch.full((2, heads, tokens, tokens), 7.0)
    part = call.scores(slice(1, 3), out=buffer)
    assert part is buffer and part.dtype == torch.float32
    torch.testing.assert_close(part, expected[1:3].float(), rtol=1e-5, atol=1e-5)
    made = call.scores(slice(None)).softmax(-1) @ call.value.float()
    tolerance = 2e-2 if case == "half" else 1e-5
    torch.testing.assert_close(made, out[0].float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", ["method", "torch", "functional", "module"])
def test_explicit_softmax_is_reported_with_its_product(way: str) -> None:
    scores, value = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 4)

    def attend() -> None:
        ways: dict[str, Callable[[], Tensor]] = {
            "method": lambda: scores.softmax(dim=-1),
            "torch": lambda: torch.softmax(scores, -1),
            "functional": lambda: functional.softmax(scores, dim=3),
            "module": lambda: nn.Softmax(dim=-1)(scores),
        }
        weights = ways[way]()
        assert torch.equal(
            functional.dropout(weights, 0.5, training=False) @ value, weights @ value
        )

    (event,) = seen(attend)
    assert event.call is not None and not event.mixed
    assert torch.equal(event.call.scores(slice(1, 2)), scores[1:2])
    assert torch.equal(event.call.value, value)
    made = event.call.scores(slice(None)).softmax(-1) @ value
    assert torch.equal(made, event.call.output)


def test_a_product_from_the_right_is_the_same_attention() -> None:
    """values^T weights^T is (weights values)^T: LeViT's and SHViT's maps, channels before tokens.
    Not so values^T weights, though the shapes are those."""
    scores, value = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 4, 5)

    def attend() -> None:
        _ = value @ scores.softmax(-1).transpose(-2, -1)

    (event,) = seen(attend)
    assert event.call is not None and not event.mixed
    assert torch.equal(event.call.scores(slice(None)), scores)
    assert torch.equal(event.call.value, value.transpose(-2, -1))
    torch.testing.assert_close(
        event.call.output, scores.softmax(-1) @ value.transpose(-2, -1)
    )

    def other() -> None:
        _ = value @ scores.softmax(-1)

    (event,) = seen(other)
    assert event.mixed and event.call is None


def test_attention_of_maps_against_its_formula() -> None:
    """levit_conv: queries and keys of its own qkv layer, its position biases."""
    model = small("levit_conv_128s", None)
    table = site_table(model)
    assert len(table.attention) == 9
    block = table.attention[0]
    module = model.module.get_submodule(f"{block.name}.attn")
    found: list[Tensor] = []
    handle = module.get_submodule("qkv").register_forward_hook(
        lambda _m, _a, x: found.append(x)
    )
    x = images(model, 2)
    with torch.no_grad():
        model.module(x)
    handle.remove()
    keeper = captured(model, table, x, attention=[block])
    dim: Any = module.key_dim
    heads = found[0].unflatten(1, (block.n_heads, -1)).flatten(3)
    q, k = heads[:, :, :dim], heads[:, :, dim : 2 * dim]
    bias: Any = module.attention_biases
    index: Any = module.attention_bias_idxs
    expected = torch.einsum("bhdi,bhdj->bhij", q, k) * dim**-0.5 + bias[:, index]
    torch.testing.assert_close(keeper.scores[block.name], expected, rtol=1e-4, atol=1e-4)


def test_where_heads_go_is_after_the_attention() -> None:
    """TinyViT's attention has a norm of its own before queries, keys and values."""
    args = {
        "embed_dims": (16, 16, 16, 16),
        "num_heads": (2, 2, 2, 2),
        "depths": (1, 1, 1, 1),
    }
    table = site_table(small("tiny_vit_5m_224", 224, **args))
    assert [block.layout.grid for block in table.attention] == [(14, 14), (7, 7)]
    for block in table.attention:
        assert table.heads[block.name].module == f"{block.name}.attn.proj"


def test_softmax_that_weighs_nothing_is_mixed() -> None:
    def mix() -> None:
        weights = torch.randn(2, 3, 5, 5).softmax(-1)
        _ = torch.einsum("bhqk,hg->bgqk", weights, torch.randn(3, 3)) @ torch.randn(
            2, 3, 5, 4
        )

    (event,) = seen(mix)
    assert event.mixed and event.call is None


REFUSED: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "cait_xxs24_224": ({"embed_dim": 48, "depth": 2, "patch_size": 8}, 32, "mixed"),
    "shvit_s1": ({}, None, "attention over 3 dimensions"),
    "samvit_base_patch16_224": (
        {**VIT, "global_attn_indexes": (1,)},
        64,
        "3 attentions per image in the batch dimension",
    ),
    "xcit_nano_12_p8_224": ({"depth": 2}, 32, "entries, but the block has"),
    "vit_tiny_patch16_224": ({**VIT, "attn_layer": "diff"}, 32, "2 attention calls"),
    "vit_base_patch16_18x2_224": (VIT, 32, "2 attention calls"),
    "test_maxvit": ({}, 64, "2 attention calls"),
    "resnet10t": ({}, 32, "no block has a softmax"),
    "mixer_s32_224": ({}, 32, "no block has a softmax"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_not_token_to_token_is_refused(name: str) -> None:
    args, size, phrase = REFUSED[name]
    table = site_table(small(name, size, **args))
    assert table.attention == ()
    assert table.attention_refusal is not None and phrase in table.attention_refusal
    assert table.rollout_refusal is not None


def test_blocks_are_refused_one_by_one() -> None:
    """Swin has windows in the batch dimension; one that covers the map is token to token."""
    model = small(
        "swin_tiny_patch4_window7_224",
        64,
        embed_dim=24,
        depths=(1, 1, 1, 1),
        window_size=4,
    )
    table = site_table(model)
    assert [block.name for block in table.attention] == [
        "layers.2.blocks.0",
        "layers.3.blocks.0",
    ]
    assert "16 per image" in table.left_out["layers.0.blocks.0 attention"]
    assert table.rollout_refusal == "attention lies on several grids"
    pooled = site_table(small("pvt_v2_b0", 64, depths=(1, 1, 1, 1)))
    assert "pooled tokens: 256 queries" in pooled.left_out["stages.0.blocks.0 attention"]


def test_another_shape_while_running_stops() -> None:
    model = small("vit_tiny_patch16_224", 32, **VIT, dynamic_img_size=True)
    table = site_table(model)
    wrong = pytest.raises(
        CaptureError, match=r"blocks\.0: attention of sizes \(1, 3, 37\)"
    )
    capture = Capture(model, table, sites=(), attention=table.attention)
    with torch.no_grad(), capture, wrong:
        capture.run(torch.randn(1, 3, 48, 48), Keeper())


@pytest.mark.parametrize("gain", [1.0, 3.0])
def test_scores_are_those_of_a_kernel_under_autocast(gain: float) -> None:
    """Queries and keys that leave a normalisation in float32 reach the kernel in half precision."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 50, 32, generator=generator) for _ in range(3))
    q, k = gain * q, gain * k
    mask = torch.randn(50, 50, generator=generator)

    def attend() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    (event,) = seen(attend)
    assert isinstance(event.call, KernelCall)
    found = event.call.scores(slice(0, 2))
    half = [x.bfloat16().double() for x in (q, k, mask)]
    want = half[0] @ half[1].transpose(2, 3) * 32**-0.5 + half[2]
    # Sums of 32 products in float32; unrounded factors are 2^-8 away.
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    output = event.call.output
    again = torch.softmax(found, -1) @ event.call.value.float()
    # What is left is the rounding of weights and output: half of 2^-8 each.
    assert float((again - output.float()).abs().max() / output.float().abs().max()) < 8e-3


@pytest.mark.parametrize("n_heads", [1, 3])
def test_both_ways_to_scores_agree(n_heads: int) -> None:
    """Image by image from interleaved queries and keys, as on a CPU, and in one call."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(
        4, 7, 2, n_heads, 5, generator=generator
    )  # images, tokens, which, heads
    q, k = both.permute(2, 0, 3, 1, 4)
    want = q.double() @ k.double().transpose(2, 3) * 0.37
    for multiply in (_scaled_products_by_image, _scaled_products_at_once):
        out = torch.full((4, n_heads, 7, 7), torch.nan)
        multiply(q, k, 0.37, out)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
