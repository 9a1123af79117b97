"""Site names against forward passes written by hand from the blocks' own submodules."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models_helpers import VIT, Keeper, captured, images, small
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable

# One matrix product summed in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def got(keeper: Keeper, table: SiteTable, name: str) -> Tensor:
    """A site's tokens through its alias, if it is one."""
    return keeper.tokens(table[name].alias_of or name)


def flat(maps: Tensor) -> Tensor:
    """Channels-first maps as (images, locations, channels)."""
    return maps.flatten(2).transpose(1, 2)


def attend(attn: Any, x: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
    """Scores and heads of plain attention, image by image and head by head."""
    n, tokens, width = x.shape
    dim = width // n_heads
    qkv = attn.qkv(x)
    heads, scores = torch.zeros(n, tokens, width), torch.zeros(n, n_heads, tokens, tokens)
    for i in range(n):
        for h in range(n_heads):
            cut = slice(h * dim, (h + 1) * dim)
            q, k, v = (qkv[i, :, part * width :][:, cut] for part in range(3))
            scores[i, h] = q @ k.T / dim**0.5
            heads[i, :, cut] = scores[i, h].softmax(-1) @ v
    return scores, heads


@torch.no_grad()
def test_transformer_block_by_hand() -> None:
    """deit3 has LayerScale, so a branch before it is off by its factor."""
    model = small("deit3_small_patch16_224", 32, **VIT)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    module: Any = model.module
    stream = module._pos_embed(module.patch_embed(x))
    torch.testing.assert_close(got(kept, table, "embed"), stream, **CLOSE)
    for i, block in enumerate(module.blocks):
        path = f"blocks.{i}"
        expected: dict[str, Tensor] = {"in": stream, "norm1": block.norm1(stream)}
        scores, expected["attn.heads"] = attend(block.attn, expected["norm1"], 3)
        projected = block.attn.proj(expected["attn.heads"])
        expected["attn.branch"] = projected * block.ls1.gamma
        expected["mid"] = stream + expected["attn.branch"]
        expected["norm2"] = block.norm2(expected["mid"])
        expected["mlp.hidden"] = functional.gelu(block.mlp.fc1(expected["norm2"]))
        expected["mlp.branch"] = block.mlp.fc2(expected["mlp.hidden"]) * block.ls2.gamma
        stream = expected["out"] = expected["mid"] + expected["mlp.branch"]
        for part, value in expected.items():
            torch.testing.assert_close(
                got(kept, table, f"{path}.{part}"), value, **CLOSE, msg=f"{path}.{part}"
            )
        torch.testing.assert_close(kept.scores[path], scores, **CLOSE)
        z, f = kept.branches[f"{path}.mlp"]
        torch.testing.assert_close(z, expected["mid"], **CLOSE)
        torch.testing.assert_close(f, expected["mlp.branch"], **CLOSE)
    normed = module.norm(stream)
    torch.testing.assert_close(got(kept, table, "norm"), normed, **CLOSE)
    torch.testing.assert_close(kept.sites["pooled"][1], normed[:, 0], **CLOSE)
    torch.testing.assert_close(
        kept.sites["logits"][1], module.head(normed[:, 0]), **CLOSE
    )


@torch.no_grad()
def test_post_norm_block_by_hand() -> None:
    from timm.models.vision_transformer import ResPostBlock

    model = small("vit_tiny_patch16_224", 32, **VIT, block_fn=ResPostBlock)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    block: Any = model.module.get_submodule("blocks.1")
    stream = got(kept, table, "blocks.1.in")
    attended = block.attn.proj(attend(block.attn, stream, 3)[1])
    branch = block.norm1(attended)
    torch.testing.assert_close(got(kept, table, "blocks.1.norm1"), branch, **CLOSE)
    torch.testing.assert_close(got(kept, table, "blocks.1.attn.branch"), branch, **CLOSE)
    mid = stream + branch
    torch.testing.assert_close(got(kept, table, "blocks.1.mid"), mid, **CLOSE)
    out = mid + block.norm2(block.mlp.fc2(functional.gelu(block.mlp.fc1(mid))))
    torch.testing.assert_close(got(kept, table, "blocks.1.out"), out, **CLOSE)


@torch.no_grad()
def test_gated_mlp_hidden_is_the_gated_product() -> None:
    model = small("eva02_tiny_patch14_224", 32, **VIT)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    mlp: Any = model.module.get_submodule("blocks.1.mlp")
    given = got(kept, table, "blocks.1.norm2")
    if hasattr(mlp, "fc1_g"):
        product = functional.silu(mlp.fc1_g(given)) * mlp.fc1_x(given)
    else:
        gate, value = mlp.fc1(given).chunk(2, -1)
        product = functional.silu(gate) * value
    torch.testing.assert_close(got(kept, table, "blocks.1.mlp.hidden"), product, **CLOSE)


@torch.no_grad()
def test_mixer_block_by_hand() -> None:
    model = small("mixer_s32_224", 64)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    module: Any = model.module
    stream = module.stem(x)
    for i, block in enumerate(module.blocks[:3]):
        expected: dict[str, Tensor] = {"in": stream, "norm1": block.norm1(stream)}
        turned = expected["norm1"].transpose(1, 2)
        expected["token.hidden"] = functional.gelu(block.mlp_tokens.fc1(turned))
        mixed = block.mlp_tokens.fc2(expected["token.hidden"])
        expected["token.branch"] = mixed.transpose(1, 2)
        expected["mid"] = stream + expected["token.branch"]
        expected["norm2"] = block.norm2(expected["mid"])
        hidden = functional.gelu(block.mlp_channels.fc1(expected["norm2"]))
        expected["channel.hidden"] = hidden
        expected["channel.branch"] = block.mlp_channels.fc2(hidden)
        stream = expected["out"] = expected["mid"] + expected["channel.branch"]
        for part, value in expected.items():
            name = f"blocks.{i}.{part}"
            torch.testing.assert_close(got(kept, table, name), value, **CLOSE, msg=name)
    rows = table["blocks.0.token.hidden"]
    assert rows.kind == "rows" and rows.layout is not None
    assert rows.layout.grid is None and rows.layout.rows == 512
    assert [s.name for s in table.sublayers[:2]] == ["blocks.0.token", "blocks.0.channel"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "last"), [("resnet26", 3), ("resnet18", 2), ("seresnet18", 2)]
)
def test_resnet_block_by_hand(name: str, last: int) -> None:
    model = small(name, 64)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    module: Any = model.module
    stream = module.maxpool(module.act1(module.bn1(module.conv1(x))))
    torch.testing.assert_close(got(kept, table, "stem"), flat(stream), **CLOSE)
    for path in ("layer1.0", "layer1.1", "layer2.0", "layer2.1"):
        block = module.get_submodule(path)
        value, expected = stream, {}
        for i in range(1, last + 1):
            value = getattr(block, f"conv{i}")(value)
            expected[f"conv{i}"] = value.clone()
            value = getattr(block, f"bn{i}")(value)
            expected[f"bn{i}"] = value.clone()
            if i < last:
                value = functional.relu(value)
                expected[f"act{i}"] = value.clone()
        if block.se is not None:
            value = block.se(value)
        expected["branch"] = value.clone()
        expected["shortcut"] = (
            stream if block.downsample is None else block.downsample(stream)
        )
        stream = functional.relu(expected["branch"] + expected["shortcut"])
        expected[f"act{last}"] = expected["out"] = stream
        for part, wanted in expected.items():
            site = f"{path}.{part}"
            torch.testing.assert_close(
                got(kept, table, site), flat(wanted), **CLOSE, msg=site
            )
        z, f = kept.branches[path]
        torch.testing.assert_close(z, flat(expected["shortcut"]), **CLOSE)
        torch.testing.assert_close(f, flat(expected["branch"]), **CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_bit_block_by_hand() -> None:
    model = small("resnetv2_50x1_bit", 64)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    module: Any = model.module
    stream = module.stem(x)
    for path in [*(f"stages.0.blocks.{i}" for i in range(3)), "stages.1.blocks.0"]:
        block = module.get_submodule(path)
        first = block.norm1(stream)
        shortcut = stream if block.downsample is None else block.downsample(first)
        second = block.norm2(block.conv1(first))
        third = block.norm3(block.conv2(second))
        branch = block.conv3(third)
        stream = branch + shortcut
        wanted = {"norm1": first, "norm2": second, "norm3": third, "branch": branch}
        for part, value in {**wanted, "shortcut": shortcut, "out": stream}.items():
            site = f"{path}.{part}"
            torch.testing.assert_close(
                got(kept, table, site), flat(value), **CLOSE, msg=site
            )


@pytest.mark.slow
@torch.no_grad()
def test_hiera_tokens_come_in_image_geometry() -> None:
    """Hiera keeps its tokens in windows; timm's own intermediates put them back in rows."""
    model = small("hiera_tiny_224", 64)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    maps = model.module.forward_intermediates(  # type: ignore[operator]
        x, indices=4, output_fmt="NHWC", intermediates_only=True
    )
    ends = [f"blocks.{i}.out" for i in model.module.stage_ends]  # type: ignore[union-attr]
    for name, expected in zip(ends, maps, strict=True):
        torch.testing.assert_close(kept.sites[name][1], expected)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow),
        *("convnext_atto", "levit_128s", "test_maxvit"),
    ],
)
def test_maps_come_rows_first(name: str) -> None:
    """Against timm's own intermediate feature maps, (images, channels, rows, cols)."""
    model = small(name, 64)
    table, x = site_table(model), images(model)
    kept = captured(model, table, x)
    maps = model.module.forward_intermediates(x, intermediates_only=True)  # type: ignore[operator]
    outs = {n: body for n, (_, body) in kept.sites.items() if n.endswith(".out")}
    for expected in maps[-3:]:
        turned = expected.permute(0, 2, 3, 1)
        same = [n for n, body in outs.items() if body.shape == turned.shape]
        assert any(torch.allclose(outs[n], turned, atol=1e-5) for n in same)


# A head each: one linear layer, with a batch norm around it, two of these, a norm before or after
# pooling, a hidden layer, a convolution after pooling, attention pooling.
HEADS: list[tuple[str, int | None, dict[str, Any]]] = [
    ("deit_tiny_distilled_patch16_224", 32, VIT),
    ("vit_base_patch16_siglip_gap_224", 32, VIT),
    ("vit_base_patch16_siglip_224", 32, VIT),
    ("beit_base_patch16_224", 32, VIT),
    ("efficientvit_m0", None, {}),
    ("shvit_s1", 64, {}),
    ("levit_128s", None, {}),
    ("repvit_m0_9", 64, {}),
    ("test_convnext", 64, {}),
    (
        "convnext_atto",
        64,
        {"head_hidden_size": 16, "depths": (1, 1, 1, 1), "dims": (8,) * 4},
    ),
    ("mobilenetv3_small_050", 64, {}),
    ("test_resnet", 64, {}),
    ("test_nfnet", 64, {}),
    ("efficientvit_b0", 64, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "args"), HEADS, ids=[head[0] for head in HEADS])
@torch.no_grad()
def test_pooled_is_timms_pre_logits(
    name: str, size: int | None, args: dict[str, Any]
) -> None:
    model = small(name, size, **args)
    table, x = site_table(model), images(model)
    sites = [site for site in table.sites if site.name in ("pooled", "logits")]
    kept, module = captured(model, table, x, sites=sites), cast("Any", model.module)
    expected = module.forward_head(module.forward_features(x), pre_logits=True).flatten(1)
    torch.testing.assert_close(kept.sites["pooled"][1], expected)
    if "logits" in kept.sites:
        torch.testing.assert_close(kept.sites["logits"][1], module(x))
