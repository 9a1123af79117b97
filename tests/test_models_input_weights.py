"""First-layer filters and position embeddings of many architectures, against timm's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch import Tensor, nn

from tests.models_helpers import VIT, small
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.weights.input import (
    InputArray,
    find_filters,
    find_positions,
    is_sine_cosine,
)


def positions(model: LoadedModel) -> InputArray:
    found = find_positions(model)
    assert isinstance(found, InputArray), found
    return found


def filters(model: LoadedModel) -> InputArray:
    found = find_filters(model)
    assert isinstance(found, InputArray), found
    return found


def table(model: LoadedModel, name: str = "pos_embed") -> Tensor:
    return model.module.get_parameter(name).detach()


TINY: dict[str, tuple[str, dict[str, Any], int]] = {
    # name: architecture, arguments, prefix tokens that the table has
    "cls": ("vit_tiny_patch16_224", VIT, 1),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT, 2),
    "registers": ("vit_small_patch14_reg4_dinov2", VIT, 0),
    "no_embed_class": ("deit3_small_patch16_224", VIT, 0),
    "pooled": ("vit_base_patch16_gap_224", VIT, 0),
    "norm_before_blocks": ("vit_base_patch32_clip_224", VIT, 1),
    "rope_and_table": ("eva02_tiny_patch14_224", VIT, 1),
    "convit": ("convit_tiny", {**VIT, "num_heads": 4, "local_up_to_layer": 1}, 0),
}


@pytest.mark.parametrize("name", TINY)
def test_the_table_without_its_prefix(name: str) -> None:
    architecture, args, n_prefix = TINY[name]
    model = small(architecture, (32, 48), **args)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    found = positions(model)
    own = table(model)
    assert own.shape[1] == n_prefix + 24
    expected = own[0, n_prefix:].reshape(4, 6, -1).numpy()
    assert found.values.dtype == np.float32
    # a difference of float32 sums of the same size
    assert np.allclose(found.values, expected, rtol=0, atol=1e-6)
    assert (found.site, found.kind) == ("pos_embed", "learned")
    for key, value in model.module.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.slow
def test_tables_in_other_shapes() -> None:
    pit = small("pit_ti_224", 224)  # (1, dim, rows, cols), overlapping patches
    assert np.allclose(positions(pit).values, table(pit)[0].permute(1, 2, 0), atol=1e-6)
    crossvit = small("crossvit_tiny_240", 240)  # a table for each branch: the first
    found = positions(crossvit)
    assert found.site == "pos_embed_0"
    expected = table(crossvit, "pos_embed_0")[0, 1:].reshape(20, 20, -1)
    assert np.allclose(found.values, expected, atol=1e-6)
    tnt = small("tnt_s_patch16_224", 64, embed_dim=48, inner_dim=8, depth=1)
    found = positions(tnt)  # and not `pixel_pos`, which is alike in every patch
    assert found.site == "patch_pos"
    assert np.allclose(
        found.values, table(tnt, "patch_pos")[0, 1:].reshape(4, 4, -1), atol=1e-6
    )


def test_a_table_resampled_when_the_model_is_made() -> None:
    base = load_model("vit_tiny_patch16_224", random_init=3, model_args=VIT, img_size=32)
    state = base.module.state_dict()
    other = load_model(
        "vit_tiny_patch16_224", random_init=0, model_args=VIT, img_size=(24, 56)
    )
    resampled = resample_abs_pos_embed(
        state["pos_embed"], [3, 7], [4, 4], num_prefix_tokens=1
    )
    other.module.load_state_dict(state | {"pos_embed": resampled})
    expected = resampled[0, 1:].reshape(3, 7, -1).numpy()
    assert np.allclose(positions(other).values, expected, atol=1e-6)


def test_a_table_resampled_in_the_forward_pass() -> None:
    args = {**VIT, "dynamic_img_size": True}
    model = small("vit_tiny_patch16_224", 32, **args)
    model.input_size = (3, 40, 56)
    expected = resample_abs_pos_embed(table(model), [5, 7], [4, 4], num_prefix_tokens=1)
    found = positions(model)
    assert np.allclose(found.values, expected[0, 1:].reshape(5, 7, -1), atol=2e-6)
    naflex = load_model(
        "naflexvit_base_patch16_gap", random_init=0, model_args=SMALL_NAFLEX
    )
    naflex.input_size = (3, 48, 32)
    found = positions(naflex)
    assert (found.site, found.values.shape) == ("embeds.pos_embed", (6, 4, 48))


SMALL_NAFLEX = {"embed_dim": 48, "depth": 1, "num_heads": 3, "patch_size": 8}


def test_fixed_tables_are_named() -> None:
    model = small("vit_tiny_patch16_224", 32, **VIT)
    waves = build_sincos2d_pos_embed([4, 4], dim=48)
    assert is_sine_cosine(waves.reshape(4, 4, 48).numpy())
    shuffled = waves[:, torch.randperm(48, generator=torch.Generator().manual_seed(0))]
    table(model)[0, 1:] = shuffled.half().float()
    assert positions(model).kind == "sine-cosine"
    table(model)[0, 1:] *= 1.05
    assert positions(model).kind == "learned"
    own = table(model).clone()
    del model.module.pos_embed
    model.module.register_buffer("pos_embed", own)
    assert positions(model).kind == "fixed"
    xcit = small("xcit_nano_12_p16_224", 64, depth=1)
    found = positions(xcit)
    assert (found.site, found.kind) == ("pos_embed", "computed")
    encoder: Any = xcit.module.get_submodule("pos_embed")
    made = encoder(1, 4, 4)[0].permute(1, 2, 0)
    assert np.allclose(found.values, made, atol=1e-5)


def test_a_table_of_zeros_is_a_table() -> None:
    model = small("vit_tiny_patch16_224", 32, **VIT)
    table(model).zero_()
    assert not positions(model).values.any()


def refusal(name: str, size: Any = 32, **args: Any) -> str:
    found = find_positions(small(name, size, **args))
    assert isinstance(found, str), found
    return found


@pytest.mark.slow
def test_no_table_for_a_reason() -> None:
    beit = refusal("beit_base_patch16_224", **VIT)
    assert "relative position biases (blocks.0.attn.relative_position_bias_table)" in beit
    rope = {"embed_dim": 48, "depth": 1, "num_heads": 3, "patch_size": 8}
    assert "by position (rope)" in refusal("vit_small_patch16_dinov3", **rope)
    swin = {"embed_dim": 24, "depths": (1, 1), "num_heads": (3, 3), "window_size": 4}
    assert "relative position biases (layers.0." in refusal(
        "swin_tiny_patch4_window7_224", **swin
    )
    for name, args in (
        ("resnet18", {}),
        ("test_resnet", {}),
        ("mixer_s32_224", {}),
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}),
    ):
        reason = refusal(name, 64 if args == {} else 32, **args)
        assert reason == "no position embedding is added to its features"
    # a square by chance: 16 blocks of 16 patches
    nest = refusal("nest_tiny", 64)
    assert (
        "levels.0.pos_embed is added to features (16 x 16 x 96) that do not lie" in nest
    )


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("name", "size", "args", "site"),
    [
        ("vit_tiny_patch16_224", 32, VIT, "patch_embed.proj"),
        ("resnet18", 64, {}, "conv1"),
        ("convnext_atto", 32, {"depths": (1, 1, 1, 1)}, "stem.0"),
        ("mixer_s16_224", 32, {}, "stem.proj"),
        ("tf_efficientnet_lite0", 32, {}, "conv_stem"),  # pads its input itself
        (
            "vit_tiny_patch16_224",
            (32, 48),
            {**VIT, "patch_size": (8, 16)},
            "patch_embed.proj",
        ),
    ],
)
def test_filters_are_the_weights(
    name: str, size: Any, args: dict[str, Any], site: str
) -> None:
    model = small(name, size, **args)
    found = filters(model)
    assert found.site == site
    assert np.array_equal(
        found.values, model.module.get_parameter(f"{site}.weight").numpy()
    )


def test_a_linear_layer_over_cut_patches() -> None:
    model = load_model(
        "naflexvit_base_patch16_gap", random_init=0, model_args=SMALL_NAFLEX
    )
    model.input_size = (3, 48, 32)
    found = filters(model)
    assert (found.site, found.values.shape) == ("embeds.proj", (48, 3, 8, 8))
    weight = model.module.get_parameter("embeds.proj.weight")
    # rows, then columns, then channels
    expected = weight.reshape(48, 8, 8, 3).permute(0, 3, 1, 2)
    assert np.array_equal(found.values, expected.numpy())


@pytest.mark.slow
def test_standardised_weights_as_the_layer_uses_them() -> None:
    model = small("resnetv2_50x1_bit", 64)
    found = filters(model)
    assert found.site == "stem.conv"
    flat = model.module.get_parameter("stem.conv.weight").flatten(1).double()
    expected = (flat - flat.mean(1, keepdim=True)) / flat.std(
        1, keepdim=True, unbiased=False
    )
    # the layer adds 1e-8 to the variance
    assert np.allclose(found.values.reshape(64, -1), expected, rtol=1e-4, atol=1e-4)


def test_the_stem_of_a_hybrid() -> None:
    found = filters(
        small("vit_tiny_r_s16_p8_224", 64, embed_dim=48, depth=1, num_heads=3)
    )
    assert found.site == "patch_embed.backbone.conv"
    assert found.values.shape == (64, 3, 7, 7)


@pytest.mark.slow
def test_pixels_in_another_order_and_parallel_branches() -> None:
    folded = small(
        "tresnet_m", 64, layers=(1, 1, 1, 1)
    )  # 4 x 4 pixels to a cell, then 3 x 3 cells
    found = filters(folded)
    assert found.values.shape == (64, 3, 12, 12)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    layer = folded.module.get_submodule(found.site)
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _m, _i, output: seen.append(output))
    with torch.no_grad():
        folded.module(image)
        mine = nn.functional.conv2d(image, torch.from_numpy(found.values), stride=4)
    hook.remove()
    assert torch.allclose(seen[0][:, :, 1:-1, 1:-1], mine, rtol=1e-4, atol=1e-4)
    assert filters(small("repvgg_a0", 32)).values.shape[1:] == (3, 3, 3)


class Preprocessed(nn.Module):
    """Looks at other things than single pixels."""

    def __init__(self, prepare: Callable[[Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.prepare, self.layer = prepare, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.prepare(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("prepare", "layer", "phrase"),
    [
        (
            lambda x: x * 0.3,
            nn.Conv2d(3, 4, 3),
            "layer, layer, does not work on single pixels",
        ),
        (
            lambda x: x[:, :1].expand(-1, 3, -1, -1),
            nn.Conv2d(3, 4, 3),
            "does not work on single",
        ),
        (lambda x: x, nn.Conv2d(3, 4, 3, dilation=2), "does not work on single pixels"),
        (lambda x: x, nn.ReLU(), "no convolution or linear layer"),
    ],
)
def test_no_filters_for_a_reason(
    prepare: Callable[[Tensor], Tensor], layer: nn.Module, phrase: str
) -> None:
    module = Preprocessed(prepare, layer)
    found = find_filters(LoadedModel("made", module, (3, 16, 16), {}, {}, "made"))
    assert isinstance(found, str)
    assert phrase in found
