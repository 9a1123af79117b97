"""Blocks, branches, attention and prefix tokens of modules whose names say nothing, against what
their own code computes."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.every_command import vitsee
from tests.extractions import extracted
from tests.models_helpers import captured, images, redraw
from vitsee_core.models.attention_watch import (
    AttentionEvent,
    AttentionWatch,
    without_fast_path,
)
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.lasting_changes import ablate_skips
from vitsee_core.models.load import load_model, model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import scaled_error
from vitsee_core.models.site_tables import site_table
from vitsee_stores import open_store
from vitsee_stores.layout import TokenLayout, select_names

ROOT = Path(__file__).parents[1]
OWN = ROOT / "examples" / "own_vit.py"
SIZE = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_vit", OWN)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own(depth: int = 2) -> LoadedModel:
    args = {"depth": depth, "width": 24, "heads": 3, "img_size": 32}
    model = load_model(f"{OWN}:build", random_init=0, model_args=args)
    redraw(model.module)
    return model


def wrapped(module: nn.Module) -> LoadedModel:
    model = model_from_module(module, SIZE, name="toy")
    redraw(model.module)
    return model


@torch.inference_mode()
def test_the_example_is_read_as_its_code_computes() -> None:
    model = own()
    table, x = site_table(model), images(model)
    seen, module = captured(model, table, x), cast(Any, model.module)
    tokens = module.cut(x).flatten(2).transpose(1, 2)
    tokens = (
        torch.cat([module.class_token.expand(len(x), -1, -1), tokens], 1) + module.places
    )
    for i, layer in enumerate(module.tower):
        normed = layer.before_mixing(tokens)
        branch, weights = layer.mixing(normed, normed, normed, average_attn_weights=False)
        assert torch.allclose(seen.branches[f"blocks.{i}.attn"][0], tokens, atol=1e-6)
        assert torch.allclose(seen.branches[f"blocks.{i}.attn"][1], branch, atol=1e-6)
        assert torch.allclose(seen.scores[f"blocks.{i}"].softmax(-1), weights, atol=1e-6)
        mid = tokens + branch
        assert torch.allclose(seen.tokens(f"blocks.{i}.mid"), mid, atol=1e-5)
        hidden = layer.thinking[:2](layer.before_thinking(mid))
        assert torch.allclose(seen.tokens(f"blocks.{i}.mlp.hidden"), hidden, atol=1e-5)
        tokens = mid + layer.thinking(layer.before_thinking(mid))
        assert torch.allclose(seen.tokens(f"blocks.{i}.out"), tokens, atol=1e-5)
    last = module.last(tokens)
    assert torch.allclose(seen.tokens("norm"), last, atol=1e-5)
    assert torch.allclose(seen.sites["pooled"][1], last[:, 0], atol=1e-5)
    assert torch.allclose(seen.sites["logits"][1], module.answer(last[:, 0]), atol=1e-5)
    assert table["blocks.1.out"].layout == TokenLayout(
        ("cls",), (4, 4), stride_px=(8.0, 8.0)
    )
    assert table.rollout_refusal is None


@pytest.mark.slow
def test_both_names_select(tmp_path: Path) -> None:
    table = site_table(own())
    assert table["blocks.1.attn.branch"].site_path == "tower.1.mixing"
    assert table["blocks.1.mid"].site_path == "tower.1.before_thinking.in"
    assert (
        table["blocks.1.out"].site_path == "tower.1" and table["norm"].site_path == "last"
    )

    def chosen(pattern: str) -> list[str]:
        return [site.name for site in select_names([pattern], table.sites)]

    assert chosen("tower.1") == ["blocks.1.out"]
    assert chosen("tower.*.mixing") == ["blocks.0.attn.branch", "blocks.1.attn.branch"]
    assert chosen("tower.-1") == ["blocks.1.out"]
    words = [f"{OWN}:build?depth=2&width=24&heads=3&img_size=32", "--random-init", "0"]
    words += ["--data", "demo:test", "--images", "4", "--sites", "tower.1"]
    extracted(*words, "-o", tmp_path / "s.zarr")
    store = open_store(tmp_path / "s.zarr")
    assert [site.site_path for site in store.plan.sites] == ["tower.1"]
    assert store.plan.sublayers and store.plan.attention
    shown = vitsee("sites", f"{OWN}:build?depth=2")
    assert "tower.1.mixing" in shown and "site_path" in shown


class Layer(nn.Module):
    """A pre-norm block; kind: what is unusual about it."""

    def __init__(self, kind: str, dim: int = 24) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c, self.d = (nn.LayerNorm(dim) for _ in range(4))
        self.look = nn.MultiheadAttention(dim, 3, batch_first=True)
        self.think = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )
        self.one = nn.Parameter(torch.rand(dim))
        self.two = nn.Parameter(torch.rand(dim))

    def attend(self, x: Tensor) -> Tensor:
        return self.look(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Any:
        if self.kind == "scaled":
            x = x + self.one * self.attend(self.a(x))
            return x + self.two * self.think(self.b(x))
        if self.kind == "sandwich":
            x = x + self.b(self.attend(self.a(x)))
            return x + self.d(self.think(self.c(x)))
        if self.kind == "post":
            x = x + self.a(self.attend(x))
            return x + self.b(self.think(x)), None
        if self.kind == "in place":
            x = x.clone()
            x += self.attend(self.a(x))
            x += self.think(self.b(x))
            return x
        if self.kind == "parallel":
            return x + self.attend(self.a(x)) + self.think(self.b(x))
        if self.kind == "by token":
            return x + x.mean(-1, keepdim=True) * self.think(self.b(x))
        return 2 * x + self.attend(self.a(x))  # "doubled"


class Tower(nn.Module):
    def __init__(self, *kinds: str, registers: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.class_embedding = nn.Parameter(torch.rand(24))
        self.register_tokens = nn.Parameter(torch.rand(1, registers, 24))
        self.list = nn.ModuleList(Layer(kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        first = self.class_embedding.expand(len(x), 1, -1)
        x = torch.cat([first, self.register_tokens.expand(len(x), -1, -1), x], 1)
        for layer in self.list:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize("kind", ["scaled", "sandwich", "post"])
@torch.inference_mode()
def test_two_branches_of_any_build(kind: str) -> None:
    model = wrapped(Tower(kind, kind, registers=2))
    table, x = site_table(model), images(model)
    assert [s.name for s in table.sublayers[:2]] == ["blocks.0.attn", "blocks.0.mlp"]
    layout = table["blocks.0.out"].layout
    assert layout is not None and layout.prefix == ("cls", "reg0", "reg1")
    seen, layer = captured(model, table, x), cast(Any, model.module).list[1]
    tokens = seen.tokens("blocks.0.out")
    if kind == "scaled":
        branch = layer.one * layer.attend(layer.a(tokens))
    elif kind == "sandwich":
        branch = layer.b(layer.attend(layer.a(tokens)))
    else:
        branch = layer.a(layer.attend(tokens))
    skip, found = seen.branches["blocks.1.attn"]
    assert torch.equal(skip, tokens) and torch.allclose(found, branch, atol=1e-5)
    mid = seen.tokens("blocks.1.mid")
    assert torch.allclose(mid, tokens + branch, atol=1e-5)
    assert torch.allclose(
        mid + seen.branches["blocks.1.mlp"][1], seen.tokens("blocks.1.out")
    )


@pytest.mark.parametrize("kind", ["doubled", "parallel", "by token"])
def test_what_is_no_residual_block_is_not_called_one(kind: str) -> None:
    table = site_table(wrapped(Tower(kind, kind)))
    assert table.sublayers == () and table.residual_refusal is not None
    outs = [site.name for site in table.sites if site.part == "out"]
    assert outs == ["blocks.0.out", "blocks.1.out"]


def test_skips_of_blocks_without_names_are_taken_out() -> None:
    model = wrapped(Tower("sandwich", "post"))
    x = images(model)
    ablate_skips(model, ["blocks.0.attn", "blocks.1.mlp"])
    with torch.inference_mode():
        found = model.module(x)
        plain = cast(Any, wrapped(Tower("sandwich", "post")).module)
        plain.load_state_dict(model.module.state_dict())
        one, two = plain.list
        x = plain.patches(x).flatten(2).mT
        x = torch.cat([plain.class_embedding.expand(len(x), 1, -1), x], 1)
        x = one.b(one.attend(one.a(x)))
        x = x + one.d(one.think(one.c(x)))
        x = x + two.a(two.attend(x))
        assert torch.allclose(found, two.b(two.think(x)), atol=1e-5)
    scaled = wrapped(Tower("scaled", "scaled"))
    with pytest.raises(ModelError, match="its branch is scaled outside of any module"):
        ablate_skips(scaled, ["blocks.0.attn"])


def test_one_factor_per_channel_is_found_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    skip, given = torch.randn(2, 3, 5, 4, generator=generator)
    factors = torch.randn(4, generator=generator)
    assert scaled_error(skip + factors * given, skip, given) <= 1
    assert (
        scaled_error(skip + torch.arange(5.0)[None, :, None] * given, skip, given) > 1000
    )
    # By hand: 1 + f * 2 = 7 and 1 + f * 4 = 13 have f = 3; 1 + f * 4 = 12 has not.
    one, two = torch.ones(1, 2, 1), torch.tensor([[[2.0], [4.0]]])
    assert scaled_error(torch.tensor([[[7.0], [13.0]]]), one, two) == 0
    assert scaled_error(torch.tensor([[[7.0], [12.0]]]), one, two) > 1000
    assert scaled_error(one, one, two[:, :1]) == float("inf")


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_multihead_attention_is_seen_to_the_bit(weights: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=batch_first).eval()
    without_fast_path(layer)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    plain = layer(x, x, x, need_weights=weights)[0]
    found: list[AttentionEvent] = []
    with AttentionWatch(found.append):
        watched = layer(x, x, x, need_weights=weights)[0]
    assert torch.equal(plain, watched) and len(found) == 1
    (event,) = found
    n, tokens = (2, 5) if batch_first else (5, 2)
    assert (
        event.query == (n, 3, tokens)
        and event.n_keys == tokens
        and event.call is not None
    )
    assert torch.backends.mha.get_fastpath_enabled()
    torch_s = nn.MultiheadAttention(12, 3, batch_first=batch_first).train()
    torch_s.load_state_dict(layer.state_dict())  # whose fused path is for eval alone
    assert torch.equal(plain, torch_s(x, x, x, need_weights=weights)[0])
    exact = layer(x, x, x, average_attn_weights=False)[1]
    assert torch.allclose(event.call.scores(slice(None)).softmax(-1), exact, atol=1e-6)


def test_torch_s_own_encoder_layers() -> None:
    """Whose fused path calls none of their modules."""

    class Encoder(Tower):
        def __init__(self) -> None:
            super().__init__("post")
            layer = nn.TransformerEncoderLayer(
                24, 4, 48, batch_first=True, norm_first=True
            )
            self.list = nn.ModuleList(nn.TransformerEncoder(layer, 3).layers)

    model = wrapped(Encoder())
    table, x = site_table(model), images(model)
    assert len(table.attention) == 3 and len(table.sublayers) == 6
    with torch.inference_mode():
        plain = model.module(x)
    seen = captured(model, table, x)
    assert torch.equal(seen.tokens("blocks.2.out"), plain)


class Sequences(nn.Module):
    """Blocks that work on (tokens, images, dim), as nn.TransformerEncoderLayer does by itself."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.class_token = nn.Parameter(torch.rand(24))
        layer = nn.TransformerEncoderLayer(24, 3, 48, norm_first=True)
        self.list = nn.ModuleList(nn.TransformerEncoder(layer, 3).layers)
        for child in self.list if weights else ():
            cast(Any, child)._sa_block = partial(self.mixed, child)
        self.last = nn.LayerNorm(24)
        self.answer = nn.Linear(24, 5)

    def mixed(self, layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return layer.self_attn(x, x, x)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1).transpose(0, 1)
        for layer in self.list:
            x = layer(x)
        return self.answer(self.last(x)[0])


@pytest.mark.parametrize("weights", [True, False])
@torch.inference_mode()
def test_tokens_before_images(weights: bool) -> None:
    model = wrapped(Sequences(weights))
    table = site_table(model)
    assert len(table.attention) == 3 and len(table.sublayers) == 6
    assert table["blocks.1.out"].layout == TokenLayout(
        ("cls",), (4, 4), stride_px=(8.0, 8.0)
    )
    names = {site.name for site in table.sites}
    assert {
        "blocks.2.attn.heads",
        "blocks.2.mlp.hidden",
        "norm",
        "pooled",
        "logits",
    } <= names
    # As many images as tokens: the sizes alone say nothing.
    module, x = cast(Any, model.module), images(model, 17)
    seen = captured(model, table, x)
    tokens = seen.tokens("blocks.0.out")
    layer = module.list[1]
    normed = layer.norm1(tokens).transpose(0, 1)
    branch, attention = layer.self_attn(
        normed, normed, normed, average_attn_weights=False
    )
    skip, found = seen.branches["blocks.1.attn"]
    assert torch.equal(skip, tokens)
    assert torch.allclose(found, branch.transpose(0, 1), atol=1e-6)
    assert torch.allclose(seen.scores["blocks.1"].softmax(-1), attention, atol=1e-6)
    weight, bias = layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias
    heads = seen.tokens("blocks.1.attn.heads")
    assert torch.allclose(heads @ weight.T + bias, branch.transpose(0, 1), atol=1e-6)
    last = tokens
    for layer in module.list[1:]:
        last = layer(last.transpose(0, 1)).transpose(0, 1)
    assert torch.allclose(seen.tokens("blocks.2.out"), last, atol=1e-5)
    assert torch.allclose(seen.sites["pooled"][1], module.last(last)[:, 0], atol=1e-5)


@torch.inference_mode()
def test_heads_of_multihead_attention_by_its_formula() -> None:
    model = wrapped(Tower("sandwich", "post"))
    table, x = site_table(model), images(model)
    seen, layer = captured(model, table, x), cast(Any, model.module).list[0]
    normed = layer.a(seen.tokens(table["blocks.0.in"].alias_of or ""))
    weight, bias = layer.look.in_proj_weight, layer.look.in_proj_bias
    q, k, v = (normed @ weight.T + bias).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    heads = (q @ k.mT / 8**0.5).softmax(-1) @ v
    found = seen.tokens("blocks.0.attn.heads")
    assert torch.allclose(found, heads.transpose(1, 2).flatten(2), atol=1e-6)
    assert table["blocks.0.attn.heads"].site_path == "list.0.look.out_proj.in"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resnet18", "resnet50", "regnet_y_400mf"])
@torch.inference_mode()
def test_an_activation_behind_the_sum(kind: str) -> None:
    """torchvision's blocks, whose ReLU is one module of several calls and works in place."""
    from torchvision import models

    model = wrapped(models.get_model(kind, weights=None, num_classes=5))
    table, x = site_table(model), images(model)
    module, seen = cast(Any, model.module), captured(model, table, x)
    paths = [site.site_path or site.name for site in table.sites if site.part == "out"]
    assert len(table.sublayers) == len(paths)
    for path in paths[:3]:
        block = module.get_submodule(path)
        start = seen.tokens(table[f"{path}.shortcut"].alias_of or f"{path}.shortcut")
        skip, branch = seen.branches[path]
        assert torch.equal(skip, start)
        assert torch.allclose(
            (skip + branch).relu(), seen.tokens(f"{path}.out"), atol=1e-5
        )
        # The parts by themselves, of the block's input.
        below = paths[paths.index(path) - 1] if path != paths[0] else None
        entered = seen.sites[f"{below}.out"][1] if below else seen.sites["stem"][1]
        image = entered.permute(0, 3, 1, 2)
        layer = getattr(block, "downsample", None) or getattr(block, "proj", None)
        alone = image if layer is None else layer(image)
        assert torch.allclose(skip, alone.flatten(2).mT, atol=1e-5)


@pytest.mark.slow
def test_torchvision_s_towers() -> None:
    from torchvision import models
    from torchvision.models import swin_transformer as swin

    small: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 16, "depths": [1, 2]}
    small |= {"num_heads": [2, 2], "window_size": [4, 4]}
    second = {
        "block": swin.SwinTransformerBlockV2,
        "downsample_layer": swin.PatchMergingV2,
    }
    setting = models.convnext.CNBlockConfig
    for module, n_blocks, n_sublayers, n_attention in (
        (models.VisionTransformer(32, 8, 2, 2, 32, 64), 2, 4, 2),
        # One window is the whole map of the second stage.
        (models.SwinTransformer(**small), 3, 6, 2),
        (models.SwinTransformer(**small, **second), 3, 6, 2),
        (models.ConvNeXt([setting(16, 32, 2), setting(32, None, 2)]), 4, 4, 0),
        # A block is a convolution and two attentions, in windows and across: no sum of two.
        (models.MaxVit((32, 32), 8, 2, [8, 16], [1, 2], 8, 0.0), 3, 0, 0),
    ):
        table = site_table(wrapped(module))
        outs = [site for site in table.sites if site.part == "out"]
        assert (len(outs), len(table.sublayers)) == (n_blocks, n_sublayers)
        assert len(table.attention) == n_attention
        assert all(site.layout and site.layout.grid for site in outs)
        assert {"pooled", "logits"} <= {site.name for site in table.sites}
