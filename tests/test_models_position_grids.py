"""Position tables of images that are not square, in models whose grid is another: the grid that
the user says counts, and a number of positions that is not a square is never taken for one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model

State = dict[str, Tensor]
VIT: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8}
TNT: dict[str, Any] = {"inner_dim": 8, "num_heads_inner": 2, "num_heads_outer": 3}
TNT |= {"embed_dim": 24, "depth": 2, "patch_size": 8}
HYBRID: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3}
ABSOLUTE = {"use_abs_pos_emb": True, "use_rel_pos_bias": False}
TABLE = "pos_embed"
# Architecture, arguments, and the name of its table: with a class token, with registers and a class
# token that the table leaves out, with a distillation token, without a token.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ViT": ("vit_tiny_patch16_224", VIT, TABLE),
    "registers": ("vit_small_patch14_reg4_dinov2", VIT, TABLE),
    "DeiT": ("deit_tiny_distilled_patch16_224", VIT, TABLE),
    "SigLIP": ("vit_base_patch16_siglip_224", VIT, TABLE),
    "EVA": ("eva02_tiny_patch14_224", VIT, TABLE),
    "BEiT": ("beit_base_patch16_224", {**VIT, **ABSOLUTE}, TABLE),
    "CaiT": ("cait_xxs24_224", VIT, TABLE),
    "ConViT": ("convit_tiny", {**VIT, "embed_dim": 8}, TABLE),
    "TNT": ("tnt_s_patch16_224", TNT, "patch_pos"),
}
GRIDS = [(2, 6), (8, 12), (2, 8)]


def trained(model: str, size: tuple[int, int]) -> State:
    """Weights drawn anew of a model for images of this size."""
    name, args, _ = MODELS[model]
    torch.manual_seed(4)
    state: State = timm.create_model(name, img_size=size, **args).state_dict()
    for x in state.values():
        if x.is_floating_point():
            x.copy_(torch.randn_like(x) * 0.1)
    return state


def opened(tmp_path: Path, state: State, model: str, **options: Any) -> Any:
    name, args, _ = MODELS[model]
    torch.save(state, tmp_path / "w.pth")
    options = {"img_size": 32, **options}
    return load_model(name, checkpoint=tmp_path / "w.pth", model_args=args, **options)


def resized(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A table (1, prefix tokens + positions, channels) on another grid, by torch's function."""
    n_prefix = table.shape[1] - old[0] * old[1]
    grid = table[:, n_prefix:].reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, new, mode="bicubic", antialias=True)
    return torch.cat([table[:, :n_prefix], grid.flatten(2).transpose(1, 2)], 1)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_grid_that_is_said_counts(
    model: str, grid: tuple[int, int], tmp_path: Path
) -> None:
    rows, cols = grid
    size = rows * 8, cols * 8
    state = trained(model, size)
    table = MODELS[model][2]
    loaded = opened(tmp_path, state, model, weights_size=size)
    weights = loaded.module.state_dict()
    expected = resized(state[table], grid, (4, 4))
    torch.testing.assert_close(weights[table], expected, rtol=1e-5, atol=1e-6)
    [text] = loaded.weights["resampled"]
    assert text.startswith(table)


@pytest.mark.parametrize("grid", GRIDS[:2])
@pytest.mark.parametrize("model", MODELS)
def test_a_grid_that_is_not_said_or_wrong(
    model: str, grid: tuple[int, int], tmp_path: Path
) -> None:
    rows, cols = grid
    state = trained(model, (rows * 8, cols * 8))
    table = MODELS[model][2]
    with pytest.raises(ModelError) as unsaid:
        opened(tmp_path, state, model)
    assert str(unsaid.value) == (
        f"{tmp_path / 'w.pth'}: {table} has {rows * cols} positions, which are no square, and "
        "does not say its grid; expected --weights-size ROWSxCOLS, the size in pixels of the "
        "images that the weights were trained with"
    )
    with pytest.raises(ModelError) as wrong:
        opened(tmp_path, state, model, weights_size=(16, 16))
    assert (
        f"{table} has {rows * cols} positions, and images of --weights-size have 2 x 2 patches"
        in str(wrong.value)
    )


def test_a_table_in_a_foreign_layout(tmp_path: Path) -> None:
    """DINOv2 with registers as its authors name it: the table has a row for the class token, which
    timm adds to that token."""
    state = trained("registers", (16, 48))
    foreign = {name: x for name, x in state.items() if not name.startswith("head.")}
    foreign["mask_token"] = torch.zeros(1, 24)
    foreign["register_tokens"] = foreign.pop("reg_token")
    row = torch.full((1, 1, 24), 0.25)
    foreign[TABLE] = torch.cat([row, foreign[TABLE]], 1)
    foreign["cls_token"] = foreign["cls_token"] - row
    foreign = {f"teacher.backbone.{name}": x for name, x in foreign.items()}
    model = opened(tmp_path, foreign, "registers", weights_size=(16, 48))
    weights = model.module.state_dict()
    torch.testing.assert_close(weights[TABLE], resized(state[TABLE], (2, 6), (4, 4)))
    torch.testing.assert_close(weights["cls_token"], state["cls_token"])
    with pytest.raises(ModelError, match=r"12 positions.* expected --weights-size"):
        opened(tmp_path, foreign, "registers")


def test_patches_behind_a_stem(tmp_path: Path) -> None:
    """Positions of a hybrid are 32 pixels apart, whatever the filters of its stem."""
    name = "vit_small_r26_s32_224"
    torch.manual_seed(4)
    made = timm.create_model(name, img_size=(64, 192), **HYBRID)
    torch.save(made.state_dict(), tmp_path / "w.pth")
    options: dict[str, Any] = {"checkpoint": tmp_path / "w.pth", "img_size": 128}
    options["model_args"] = HYBRID
    model = load_model(name, weights_size=(64, 192), **options)
    expected = resized(made.state_dict()[TABLE], (2, 6), (4, 4))
    torch.testing.assert_close(
        model.module.state_dict()[TABLE], expected, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ModelError, match="expected --weights-size"):
        load_model(name, **options)


def test_other_faults_are_named_before_the_grid(tmp_path: Path) -> None:
    state = trained("ViT", (16, 48))
    state["fc_norm.weight"] = torch.ones(24)
    with pytest.raises(ModelError, match=r"of another size: 1 .*left over: 1 \(fc_norm"):
        opened(tmp_path, state, "ViT")


def test_a_square_that_is_assumed_is_remarked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """16 positions may be 2 x 8. Nothing is said of models at their published size, and of grids
    with a prime number of rows."""
    caplog.set_level(logging.INFO, "vitsee_core")
    state = trained("ViT", (16, 64))
    opened(tmp_path, state, "ViT")
    remark = f"{tmp_path / 'w.pth'}: pos_embed does not say its grid, assumed is 4 x 4"
    assert [remark in text for text in caplog.messages].count(True) == 1
    quiet = {"ViT": (224, 224), "DeiT": (40, 40)}
    for model, size in quiet.items():
        caplog.clear()
        opened(tmp_path, trained(model, size), model, img_size=size)
        assert not [text for text in caplog.messages if "its grid" in text]
    caplog.clear()
    opened(tmp_path, state, "ViT", weights_size=(16, 64))
    assert not [text for text in caplog.messages if "its grid" in text]
