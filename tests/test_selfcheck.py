"""The self-check passes on every architecture that is hooked rightly, and on no wrong hook."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models_helpers import SMALL, VIT, images, small
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import SelfCheck, self_check, underflowing_fraction
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import Point, SiteTable

CONVNET: dict[str, Any] = {}
GAP = {**VIT, "class_token": False, "global_pool": "avg"}
GATED = {**VIT, "mlp_layer": "swiglu", "qk_norm": True, "scale_attn_norm": True}
SCALING = {**VIT, "block_fn": "scaling", "init_values": 1e-5}
GROUPED = {
    **VIT,
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_fused": False,
    "attn_type": "rope",
}
SWIN = {"embed_dim": 24, "depths": (1, 2, 1, 1), "window_size": 4}
# id -> timm name, image size, arguments, number of residual sublayers, of attention blocks
ARCHITECTURES: dict[str, tuple[str, Any, dict[str, Any], int | None, int | None]] = {
    "vit-cls": ("vit_tiny_patch16_224", 32, VIT, 6, 3),
    "vit-wide-image": ("vit_tiny_patch16_224", (32, 48), VIT, 6, 3),
    "vit-gap": ("vit_tiny_patch16_224", 32, GAP, 6, 3),
    "vit-registers-only": ("vit_medium_patch16_reg4_gap_256", 32, VIT, 6, 3),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", 32, VIT, 6, 3),
    "deit3-layerscale": ("deit3_small_patch16_224", 32, VIT, 6, 3),
    "dinov2-registers": ("vit_small_patch14_reg4_dinov2", 32, VIT, 6, 3),
    "clip-pre-norm": ("vit_base_patch32_clip_quickgelu_224", 32, VIT, 6, 3),
    "siglip-attention-pool": ("vit_base_patch16_siglip_224", 32, VIT, 6, 3),
    "vit-post-norm": ("vit_tiny_patch16_224", 32, {**VIT, "block_fn": "post"}, 6, 3),
    "vit-swiglu-qk-norm": ("vit_tiny_patch16_224", 32, GATED, 6, 3),
    "vit-parallel-scaling": ("vit_tiny_patch16_224", 32, SCALING, 3, 3),
    "vit-parallel-things": ("vit_base_patch16_18x2_224", 32, VIT, 0, 0),
    "vit-differential": ("vit_tiny_patch16_224", 32, {**VIT, "attn_layer": "diff"}, 6, 0),
    "vit-relpos": ("vit_relpos_small_patch16_224", 32, VIT, 6, 3),
    "beit": ("beit_base_patch16_224", 32, VIT, 6, 3),
    "beitv2": ("beitv2_base_patch16_224", 32, VIT, 6, 3),
    "eva": ("eva02_tiny_patch14_224", 32, {**VIT, "num_classes": 7}, 6, 3),
    "eva-post-norm": ("eva02_tiny_patch14_224", 32, {**VIT, "use_post_norm": True}, 6, 3),
    "eva-gated-grouped-queries": ("vit_small_patch16_dinov3", 32, GROUPED, 6, 3),
    "dinov3": ("vit_small_patch16_dinov3", 32, VIT, 6, 3),
    "hybrid": ("vit_small_r26_s32_224", 64, SMALL, 14, 3),
    "naflexvit": ("naflexvit_base_patch16_gap", 32, VIT, 6, 3),
    "mixer": ("mixer_s32_224", 64, CONVNET, 16, 0),
    "resmlp": ("resmlp_12_224", 64, CONVNET, 24, 0),
    "gmlp": ("gmlp_ti16_224", 64, CONVNET, 30, 0),
    "resnet-basic": ("resnet10t", 64, CONVNET, 4, 0),
    "resnet-bottleneck": ("resnet26", 64, {"layers": [1, 2, 1, 1]}, 5, 0),
    "seresnet": ("seresnet18", 64, {"layers": [1, 1, 1, 1]}, 4, 0),
    "resnext": ("resnext26ts", 64, CONVNET, 8, 0),
    "resnetv2": ("resnetv2_18", 64, CONVNET, 8, 0),
    "bit": ("resnetv2_50x1_bit", 64, CONVNET, 16, 0),
    "convnext": ("test_convnext2", 64, CONVNET, 4, 0),
    "swin": ("swin_tiny_patch4_window7_224", 64, SWIN, 10, None),
    "swinv2": ("swinv2_tiny_window8_256", 64, SWIN, 0, None),
    "efficientnet": ("test_efficientnet", 64, CONVNET, 0, 0),
    "mobilenetv3": ("mobilenetv3_small_050", 64, CONVNET, 7, 0),
    "cait": ("cait_xxs24_224", 32, {"embed_dim": 48, "depth": 3, "patch_size": 8}, 6, 0),
    "levit": ("levit_128s", 64, CONVNET, 18, None),
    "hiera": (
        "hiera_tiny_224",
        64,
        {"embed_dim": 24, "stages": (1, 1, 2, 1)},
        None,
        None,
    ),
    "maxvit": ("test_maxvit", 64, CONVNET, 0, 0),
    "coatnet": ("test_coatnet", 64, CONVNET, None, None),
    "regnet": ("regnetx_002", 64, CONVNET, 13, 0),
    "vgg": ("vgg11", 32, {"mlp_ratio": 0.02}, 0, 0),
    "densenet": ("densenet121", 64, {"block_config": (1, 2, 1, 1)}, 0, 0),
    "xcit": ("xcit_nano_12_p8_224", 32, {"depth": 2}, 0, 0),
    "pvt": ("pvt_v2_b0", 64, {"depths": (1, 1, 1, 1)}, None, None),
    "mvit": ("mvitv2_tiny", 64, CONVNET, None, None),
    "crossvit": ("crossvit_tiny_240", None, {"depth": ([1, 1, 0],)}, None, None),
    "inception": ("inception_v3", 96, CONVNET, 0, 0),
    "repvgg": ("test_byobnet", 64, CONVNET, 4, 0),
}


def resolved(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments with their words replaced by timm's classes."""
    from timm.layers.mlp import SwiGLU
    from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock

    classes = {"post": ResPostBlock, "scaling": ParallelScalingBlock, "swiglu": SwiGLU}
    return {k: classes.get(v, v) if isinstance(v, str) else v for k, v in args.items()}


def checked(model: LoadedModel, table: SiteTable, **options: Any) -> SelfCheck:
    stored = [site for site in table.sites if site.alias_of is None]
    chosen = {"sites": stored, "sublayers": table.sublayers, "attention": table.attention}
    return self_check(model, table, images(model), **(chosen | options))


@pytest.mark.slow
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_every_site_of_every_architecture_passes(case: str) -> None:
    name, size, args, n_sublayers, n_attention = ARCHITECTURES[case]
    model = small(name, size, **resolved(args))
    table = site_table(model)
    result = checked(model, table)
    assert result.failures == []
    assert result.figures["output_max_abs_difference"] == 0.0
    assert any("blocks" in site.groups for site in table.sites)
    assert any("head" in site.groups for site in table.sites)
    assert any("modules" in site.groups for site in table.sites)
    if n_sublayers is not None:
        assert len(table.sublayers) == n_sublayers
    if n_attention is not None:
        assert len(table.attention) == n_attention
        assert (table.attention_refusal is None) == (n_attention > 0)
    assert result.figures["sums"]["n"] == len(table.sublayers)
    assert result.figures["attention"]["n"] == len(table.attention)


@pytest.fixture(scope="module")
def vit() -> tuple[LoadedModel, SiteTable]:
    model = small("deit3_small_patch16_224", 32, **VIT)
    return model, site_table(model)


@pytest.fixture(scope="module")
def resnet() -> tuple[LoadedModel, SiteTable]:
    model = small("resnet26", 64, layers=[1, 2, 1, 1])
    return model, site_table(model)


def moved(table: SiteTable, site: str, hook_point: HookPoint) -> SiteTable:
    """The table with one hook in the wrong place."""
    point = Point((hook_point,), table.points[site].view)
    return dataclasses.replace(table, points={**table.points, site: point})


# A fault -> the model, the site, and where it is looked for.
WRONG = {
    "branch before LayerScale": (
        "vit",
        "blocks.1.attn.branch",
        HookPoint("blocks.1.attn.proj"),
    ),
    "mlp before LayerScale": (
        "vit",
        "blocks.1.mlp.branch",
        HookPoint("blocks.1.mlp.fc2"),
    ),
    "mid taken as in": ("vit", "blocks.1.mid", HookPoint("blocks.1", "in")),
    "in taken as mid": ("vit", "blocks.1.in", HookPoint("blocks.1.norm2", "in")),
    "out of another block": ("vit", "blocks.1.out", HookPoint("blocks.0")),
    "another block's branch": (
        "vit",
        "blocks.1.attn.branch",
        HookPoint("blocks.2.drop_path1"),
    ),
    "after the in-place sum": (
        "resnet",
        "layer2.1.branch",
        HookPoint("layer2.1.act3", "in"),
    ),
    "branch before the norm": ("resnet", "layer2.1.branch", HookPoint("layer2.1.conv3")),
    "before downsample": (
        "resnet",
        "layer2.0.shortcut",
        HookPoint("layer2.0.downsample.0"),
    ),
    "out before the activation": ("resnet", "layer2.1.out", HookPoint("layer2.1.bn2")),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_hook_fails(request: pytest.FixtureRequest, fault: str) -> None:
    name, site, hook_point = WRONG[fault]
    model, table = request.getfixturevalue(name)
    result = checked(model, moved(table, site, hook_point))
    assert any(site[:8] in line for line in result.failures)


def test_attention_of_another_block_fails(vit: tuple[LoadedModel, SiteTable]) -> None:
    model, table = vit
    wrong = {**table.attention_modules, "blocks.1": table.attention_modules["blocks.2"]}
    wrong["blocks.2"] = table.attention_modules["blocks.1"]
    result = checked(model, dataclasses.replace(table, attention_modules=wrong))
    assert any("blocks.1: attention times values" in line for line in result.failures)


def test_a_tensor_kept_without_a_copy_fails(
    resnet: tuple[LoadedModel, SiteTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """timm adds the shortcut in place: what a late reader finds in the branch is the sum."""
    model, table = resnet
    on_site = Capture.on_site
    late: list[Any] = []

    def keep(self: Capture, name: str, consumer: Any) -> None:
        if name == "layer2.1.branch":
            on_site(self, name, lambda x: late.append((consumer, x)))
        elif name == "layer2.1.out":

            def then(x: Tensor) -> None:
                while late:
                    consume, kept = late.pop()
                    consume(kept)
                consumer(x)

            on_site(self, name, then)
        else:
            on_site(self, name, consumer)

    monkeypatch.setattr(Capture, "on_site", keep)
    result = checked(model, table)
    assert any("layer2.1.branch" in line for line in result.failures)


def test_a_module_called_another_number_of_times_fails(
    vit: tuple[LoadedModel, SiteTable],
) -> None:
    model, table = vit
    wrong = moved(table, "blocks.1.norm2", HookPoint("blocks.1.norm2", calls=2))
    result = checked(model, wrong)
    assert result.failures == [
        "blocks.1.norm2: module blocks.1.norm2 was called 1 times in one forward pass, expected 2"
    ]


def test_false_aliases_fail(vit: tuple[LoadedModel, SiteTable]) -> None:
    model, table = vit
    sites = tuple(
        dataclasses.replace(site, alias_of="blocks.1.out")
        if site.name == "blocks.1.in"
        else site
        for site in table.sites
    )
    result = checked(model, dataclasses.replace(table, sites=sites))
    assert any(
        "blocks.1.in is not equal to blocks.1.out" in line for line in result.failures
    )


def test_overflow_is_stored_in_float32_and_nan_fails(
    vit: tuple[LoadedModel, SiteTable],
) -> None:
    model, table = vit
    x = images(model)
    site = table["blocks.0.out"]
    with torch.no_grad():
        gamma = model.module.get_parameter("blocks.0.ls2.gamma")
        before = gamma.clone()
        gamma.mul_(1e6)
        try:
            result = self_check(model, table, x, sites=[site])
            wide = self_check(
                model, table, x, sites=[site], dtypes={site.name: "float32"}
            )
            gamma.fill_(float("nan"))
            broken = self_check(model, table, x, sites=[site])
        finally:
            gamma.copy_(before)
    assert result.ok and result.dtypes == {site.name: "float32"}
    assert any(site.name in note and "float32" in note for note in result.notes)
    assert result.figures["sites"][site.name]["max_abs"] > 65504
    assert wide.dtypes == {site.name: "float32"}
    assert not any("float32" in note for note in wide.notes)
    assert any("NaN" in line for line in broken.failures)


@pytest.mark.parametrize("scale", [1e-5, 1e-6])
def test_underflow_is_stored_in_float32(scale: float) -> None:
    """A LayerScale that training has not changed, as ConvNeXt, DeiT III and DINOv2 begin with."""
    model = load_model(
        "vit_tiny_patch16_224",
        random_init=0,
        img_size=32,
        model_args={**VIT, "init_values": scale},
    )
    result = checked(model, site_table(model))
    assert result.ok
    small_sites = {name for name, dtype in result.dtypes.items() if dtype == "float32"}
    branches = [f"blocks.{k}.{kind}.branch" for k in range(3) for kind in ("attn", "mlp")]
    assert small_sites == set(branches)
    (note,) = [note for note in result.notes if "float32" in note]
    assert note.startswith(
        "blocks.0.attn.branch, blocks.0.mlp.branch, blocks.1.attn.branch and 3"
    )


def test_the_share_of_vectors_that_float16_would_lose() -> None:
    """By hand: steps of 2^-24 are 2^-11 of 2^-13 at most, and half of a number as small."""
    sound = torch.tensor([[1.0, 1e-9], [2.0**-13 * 1.3, 0.0], [6e4, 1e-8]])
    assert underflowing_fraction(sound) == 0
    lost = torch.tensor([[3e-8, 3e-8], [1e-30, 0.0], [2.0**-20 * 1.03, 0.0]])
    assert underflowing_fraction(lost) == 1
    zeros = torch.zeros(5, 2)
    assert underflowing_fraction(zeros) == 0
    # Neither the dead tokens of a sound map count, nor the large, for which there is another rule.
    assert underflowing_fraction(torch.cat([sound, lost[:1], zeros])) == 1 / 4
    assert underflowing_fraction(torch.tensor([[1e6, 1.0]])) == 0


def test_offset_ratio_is_mean_square_over_variance(
    vit: tuple[LoadedModel, SiteTable],
) -> None:
    model, table = vit
    x = images(model, 4)
    site = table["blocks.1.out"]
    kept: list[Tensor] = []
    handle = model.module.get_submodule("blocks.1").register_forward_hook(
        lambda _m, _a, out: kept.append(out.clone())
    )
    with torch.inference_mode():
        model.module(x)
    handle.remove()
    flat = kept[0].double().flatten(1)
    expected = float(flat.mean(0).square().sum() / flat.var(0).sum())
    result = self_check(model, table, x, sites=[site])
    figures = result.figures["sites"][site.name]
    # Sums of float32 squares over some thousand values.
    assert figures["offset_ratio"] == pytest.approx(expected, rel=1e-5)
    assert figures["max_abs"] == pytest.approx(float(flat.abs().max()))
    alone = self_check(model, table, x[:1], sites=[site])
    assert alone.figures["sites"][site.name]["offset_ratio"] is None
