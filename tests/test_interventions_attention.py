"""Blocked attention, against attention written out in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tests.extractions import VIT, array_bytes, extracted, plant_images
from tests.models_helpers import SMALL, images, small
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.intervention_spec import parse
from vitsee_core.models.interventions.changes import (
    BlockedAttention,
    blocked_pairs,
    prove,
)
from vitsee_core.models.interventions.switching import Switch
from vitsee_core.models.load import load_model, model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_stores import open_store
from vitsee_stores.layout import TokenLayout

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
GRID = TokenLayout(("cls", "reg0"), (2, 3))


def test_pairs_by_hand() -> None:
    def pairs(what: str) -> NDArray[np.bool_]:
        return blocked_pairs(what, GRID, "here")

    wanted = np.zeros((8, 8), bool)
    wanted[0, 2:] = True
    np.testing.assert_array_equal(pairs("cls<-patches"), wanted)
    np.testing.assert_array_equal(pairs("patches<-cls"), wanted.T)
    np.testing.assert_array_equal(pairs("own"), np.eye(8, dtype=bool))
    assert pairs("cls,registers<-all").sum() == 16
    far = pairs("distance>2")  # of cells (0, 0) and (1, 2): sqrt(5)
    assert {(int(q), int(k)) for q, k in np.argwhere(far)} == {
        (2, 7),
        (7, 2),
        (4, 5),
        (5, 4),
    }
    assert not pairs("distance>3").any()


@pytest.mark.parametrize("explicit", [False, True])
def test_rows_are_renormalised(explicit: bool) -> None:
    """Equal scores: the weights are one over the number of keys that are left."""
    blocked = np.array([[0, 0, 1], [1, 0, 1], [0, 0, 0]], bool)
    zero, value = torch.zeros(1, 1, 3, 3), torch.eye(3)[None, None]
    with BlockedAttention(blocked) as mode:
        if explicit:
            found = (zero @ zero).softmax(dim=-1) @ value
        else:
            found = functional.scaled_dot_product_attention(zero, zero, value)
    wanted = [[1 / 2, 1 / 2, 0], [0, 1, 0], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(found[0, 0].numpy(), np.array(wanted), rtol=1e-6)
    assert mode.calls == 1


@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_masks_of_the_model_stay(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    blocked = torch.zeros(4, 4, dtype=torch.bool)
    blocked[1, 0] = blocked[3, 1] = True
    mask = torch.rand(2, 1, 4, 4) < 0.8
    mask |= torch.eye(4, dtype=torch.bool)
    own: dict[str, Any] = {"attn_mask": mask}
    added = torch.zeros(2, 1, 4, 4).masked_fill(~mask, float("-inf"))
    if kind == "float":
        added = torch.randn(2, 1, 4, 4)
        own = {"attn_mask": added}
    elif kind == "causal":
        own = {"is_causal": True}
        added = torch.zeros(4, 4).masked_fill(
            torch.ones(4, 4).triu(1).bool(), float("-inf")
        )
    with BlockedAttention(blocked.numpy()):
        found = functional.scaled_dot_product_attention(q, k, v, **own)
    scores = (q @ k.transpose(2, 3) * 8**-0.5 + added).masked_fill(blocked, float("-inf"))
    np.testing.assert_allclose(found, scores.softmax(-1) @ v, **CLOSE)


# whole models ------------------------------------------------------------------------------------


def lively(name: str, fused: bool, **args: Any) -> LoadedModel:
    """A small model in which attention matters."""
    model = small(name, patch_size=8, **SMALL, **args)
    for child in model.module.modules():
        if hasattr(child, "fused_attn"):
            child.fused_attn = fused  # type: ignore[assignment]
        if isinstance(child, nn.Linear):
            child.weight *= 6
    return model


def with_changes(model: LoadedModel, *texts: str, x: Tensor) -> Tensor:
    """The model's output with attention blocked, proven as an extraction proves it."""
    table = site_table(model)
    changes = Switch(model.name, table, parse(block_attention=texts)).changes(
        model.module
    )
    changes.index = np.arange(len(x))
    prove(model, table, changes, x)
    with torch.inference_mode(), changes.applied():
        changes.at(slice(0, len(x)))
        found: Tensor = model.module(x)
        changes.check()
    with torch.inference_mode():
        assert not torch.allclose(found, model.module(x), **CLOSE)
    return found


def by_hand(module: nn.Module, blocked: NDArray[np.bool_], heads: int) -> None:
    """Write out the attention of a timm ViT's block."""

    def forward(x: Tensor, **_: Any) -> Tensor:
        own: Any = module
        n, tokens, dim = x.shape
        q, k, v = (
            own.qkv(x).reshape(n, tokens, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        )
        scores = own.q_norm(q) @ own.k_norm(k).transpose(2, 3) * (dim // heads) ** -0.5
        weights = scores.masked_fill(torch.from_numpy(blocked), float("-inf")).softmax(-1)
        joined = (weights @ v).transpose(1, 2).reshape(n, tokens, dim)
        return own.proj(own.norm(joined))

    module.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "what", ["cls<-patches", "patches<-registers", "own", "distance>1.5"]
)
def test_timm_by_hand(what: str, fused: bool) -> None:
    model = lively("vit_tiny_patch16_224", fused, reg_tokens=2)
    x = images(model)
    found = with_changes(model, f"{what}@blocks.1..2", x=x)
    plain = lively("vit_tiny_patch16_224", fused, reg_tokens=2)
    layout = site_table(model).attention[0].layout
    pairs = blocked_pairs(what, layout, "here")
    for i in (1, 2):
        block: Any = plain.module.get_submodule(f"blocks.{i}")
        by_hand(block.attn, pairs, block.attn.num_heads)
    with torch.inference_mode():
        np.testing.assert_allclose(found, plain.module(x), **CLOSE)


def test_a_bias_of_positions_stays() -> None:
    """BEiT adds one to the scores, as a mask of the kernel, or before an explicit softmax."""
    found = []
    for fused in (True, False):
        model = lively("beit_base_patch16_224", fused)
        found.append(with_changes(model, "patches<-patches@blocks.*", x=images(model)))
    np.testing.assert_allclose(found[0], found[1], **CLOSE)


class Layers(nn.Module):
    """Patches, a class token, and blocks around nn.MultiheadAttention; `mask` is what the plain
    layer takes for blocked pairs."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.need_weights = need_weights
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 24))
        self.blocks = nn.ModuleList(_Layer(need_weights) for _ in range(3))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens[:, 0])


class _Layer(nn.Module):
    mask: Tensor | None = None

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens."""
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=self.need_weights, attn_mask=self.mask)[0]
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights: bool) -> None:
    size = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    plain = Layers(need_weights).eval()
    model = model_from_module(plain, {**size, "interpolation": "bilinear", "crop_pct": 1.0,
                              "crop_mode": "center"})  # fmt: skip
    x = torch.randn(3, 3, 32, 32)
    layout = site_table(model).attention[0].layout
    assert layout.n_tokens == 17
    found = with_changes(model, "all<-patches@blocks.1", x=x)
    mask = torch.zeros(17, 17, dtype=torch.bool)
    mask[:, layout.n_prefix :] = True
    plain.blocks[1].mask = mask
    with torch.no_grad():
        np.testing.assert_allclose(found, plain(x), **CLOSE)


def test_models_without_such_attention() -> None:
    swin = {"depths": (1, 1), "embed_dim": 24, "num_heads": (2, 4)}
    for name, options in (("test_resnet", {}), ("swin_tiny_patch4_window7_224", swin)):
        model = load_model(name, random_init=0, model_args=options)
        with pytest.raises(ModelError) as caught:
            Switch(name, site_table(model), parse(block_attention=["own@last"])).lines()
        assert f"own@last cannot be done in {name}: " in str(caught.value)


# stores ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stores(tmp_path: Path) -> None:
    """Nothing blocked is the plain store to the bit; what is blocked has no weight in the maps."""
    folder = plant_images(tmp_path / "images", 3)
    given = [*VIT, "--data", folder, "--attention", "full", "--sites", "blocks,head"]
    extracted(*given, "-o", tmp_path / "plain.zarr")
    extracted(
        *given,
        "-o",
        tmp_path / "same.zarr",
        "--block-attention",
        "distance>1000@blocks.*",
    )
    assert array_bytes(tmp_path / "plain.zarr") == array_bytes(tmp_path / "same.zarr")
    same = open_store(tmp_path / "same.zarr")
    assert same.manifest.model["interventions"] == ["no distance>1000 at blocks.0-5"]
    extracted(
        *given,
        "-o",
        tmp_path / "cut.zarr",
        "--block-attention",
        "cls<-patches@blocks.2..3",
    )
    cut, plain = open_store(tmp_path / "cut.zarr"), open_store(tmp_path / "plain.zarr")
    for block in range(6):
        weights = np.asarray(cut.attention(f"full/blocks.{block}"), np.float32)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=5e-3)
        assert (weights[:, :, 0, 1:].max() == 0) == (block in (2, 3))
        if block < 2:
            np.testing.assert_array_equal(
                weights, plain.attention(f"full/blocks.{block}")
            )
