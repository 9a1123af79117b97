"""Checkpoints of the usual training codes, made from timm models by renaming their tensors."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models_helpers import VIT, redraw
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model

NAME = "vit_tiny_patch16_224"
State = dict[str, Tensor]


def weights(seed: int = 5, name: str = NAME, img_size: int = 32, **args: Any) -> State:
    model = load_model(
        name, random_init=seed, img_size=img_size, model_args={**VIT, **args}
    )
    redraw(model.module, seed)
    return {key: x.clone() for key, x in model.module.state_dict().items()}


def body(state: Mapping[str, Tensor]) -> State:
    """Without the classifier."""
    return {key: x for key, x in state.items() if not key.startswith("head.")}


def under(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {f"{prefix}{key}": x for key, x in state.items()}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def loaded(path: Path, name: str = NAME, **args: Any) -> Any:
    size, key = args.pop("img_size", 32), args.pop("checkpoint_key", None)
    own = {**VIT, **args}
    return load_model(
        name, checkpoint=path, checkpoint_key=key, img_size=size, model_args=own
    )


def holds(model: Any, state: Mapping[str, Tensor]) -> bool:
    own = model.module.state_dict()
    return all(torch.equal(own[key], x) for key, x in state.items())


HEAD = ["head.weight", "head.bias"]


def test_dino_takes_the_teacher_and_says_so(tmp_path: Path) -> None:
    teacher, student = body(weights(1)), body(weights(2))
    extra = {"head.mlp.0.weight": torch.zeros(4, 4)}
    content = {
        "student": under("module.backbone.", student) | under("module.", extra),
        "teacher": under("backbone.", teacher) | extra,
        "epoch": 3,
        "args": argparse.Namespace(arch="vit_tiny"),
    }
    model = loaded(saved(tmp_path / "dino.pth", content))
    assert holds(model, teacher)
    record = model.weights
    assert [record[key] for key in ("source", "key", "prefix")] == [
        *("checkpoint", "teacher", "backbone.")
    ]
    assert record["other_keys"] == ["student"]
    assert record["missing"] == HEAD and record["unexpected"] == ["head.* (1)"]
    other = loaded(tmp_path / "dino.pth#student")
    assert holds(other, student) and other.weights["prefix"] == "module.backbone."
    assert other.weights["sha256"] != record["sha256"]


def test_moco_v3_takes_the_base_encoder(tmp_path: Path) -> None:
    base, momentum = body(weights(1)), body(weights(2))
    state = under("module.momentum_encoder.", momentum) | under(
        "module.base_encoder.", base
    )
    state["module.base_encoder.head.0.weight"] = torch.zeros(3, 3)
    state["module.predictor.0.weight"] = torch.zeros(3, 3)
    model = loaded(saved(tmp_path / "moco.pth.tar", {"arch": "vit", "state_dict": state}))
    assert holds(model, base)
    record = model.weights
    assert record["prefix"] == "module.base_encoder." and record["key"] == "state_dict"
    assert f"momentum_encoder.* ({len(momentum)})" in record["unexpected"]
    assert "predictor.* (1)" in record["unexpected"]
    assert "head.0.weight" in record["unexpected"]


def test_mae_names_its_decoder(tmp_path: Path) -> None:
    state = body(weights())
    extra = {
        "mask_token": torch.zeros(1, 1, 8),
        "decoder_embed.weight": torch.zeros(2, 2),
    }
    model = loaded(saved(tmp_path / "mae.pth", {"model": state | extra}))
    assert holds(model, state)
    assert set(model.weights["unexpected"]) == set(extra)
    assert model.weights["key"] == "model" and model.weights["missing"] == HEAD


def clip_names(state: Mapping[str, Tensor]) -> State:
    """A timm CLIP tower under OpenAI's names."""
    renamed: State = {}
    for key, x in body(state).items():
        for timm_name, clip_name in (
            ("patch_embed.proj", "conv1"),
            ("pos_embed", "positional_embedding"),
            ("norm_pre", "ln_pre"),
            ("blocks.", "transformer.resblocks."),
            ("norm1", "ln_1"),
            ("norm2", "ln_2"),
            ("attn.qkv.", "attn.in_proj_"),
            ("attn.proj", "attn.out_proj"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
            ("cls_token", "class_embedding"),
        ):
            key = key.replace(timm_name, clip_name)
        key = "ln_post" + key.removeprefix("norm") if key.startswith("norm.") else key
        renamed[key] = x
    renamed["class_embedding"] = renamed["class_embedding"][0, 0]
    renamed["positional_embedding"] = renamed["positional_embedding"][0]
    return renamed


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_raw_clip_is_renamed(tmp_path: Path, wrapper: str) -> None:
    name = "vit_base_patch32_clip_quickgelu_224"
    state = weights(name=name)
    raw = under("visual.", clip_names(state))
    raw["visual.proj"] = torch.randn(48, 16)
    raw["token_embedding.weight"] = torch.zeros(3, 3)
    path = saved(tmp_path / "clip.pt", {"state_dict": under(wrapper, raw)})
    model = loaded(path, name)
    assert holds(model, body(state))
    assert any("head.weight (16, 48)" in line for line in model.weights["unexpected"])
    assert model.weights["missing"][0] == "head.weight"


def test_beit_with_its_shared_position_bias(tmp_path: Path) -> None:
    name = "beit_base_patch16_224"
    state = weights(name=name)
    raw = dict(state)
    raw["mask_token"] = torch.zeros(1, 1, 48)
    index = torch.zeros(17, 17, dtype=torch.int64)
    raw["blocks.0.attn.relative_position_index"] = index
    model = loaded(saved(tmp_path / "beit.pth", {"model": raw}), name)
    assert holds(model, state)
    assert model.weights["missing"] == []
    larger = loaded(tmp_path / "beit.pth", name, img_size=48)
    table = "blocks.0.attn.relative_position_bias_table"
    assert larger.module.state_dict()[table].shape == ((2 * 6 - 1) ** 2 + 3, 3)


def test_position_tables_of_another_size_are_resampled(tmp_path: Path) -> None:
    from timm.layers.pos_embed import resample_abs_pos_embed

    state = weights()
    path = saved(tmp_path / "w.pth", state)
    model = loaded(path, img_size=48)
    expected = resample_abs_pos_embed(state["pos_embed"], [6, 6], num_prefix_tokens=1)
    torch.testing.assert_close(model.module.state_dict()["pos_embed"], expected)
    assert model.input_size == (3, 48, 48)
    assert model.weights["resampled"] == ["pos_embed (1, 17, 48) to (1, 37, 48)"]
    assert model.notes()[1:] == ["w.pth: resampled: pos_embed (1, 17, 48) to (1, 37, 48)"]
    assert "resampled" not in loaded(path).weights


def test_ema_never_wins_silently(tmp_path: Path) -> None:
    state, averaged = weights(1), weights(2)
    both = saved(tmp_path / "both.pth", {"state_dict_ema": averaged, "state_dict": state})
    model = loaded(both)
    assert holds(model, state)
    assert model.weights["key"] == "state_dict" and model.weights["other_keys"] == [
        "state_dict_ema"
    ]
    assert holds(loaded(tmp_path / "both.pth#state_dict_ema"), averaged)
    alone = loaded(saved(tmp_path / "ema.pth", {"model_ema": averaged}))
    assert holds(alone, averaged) and alone.weights["key"] == "model_ema"


def test_the_key_may_be_named_and_is_said(tmp_path: Path) -> None:
    state, averaged = weights(1), weights(2)
    both = saved(tmp_path / "both.pth", {"model": state, "model_ema": averaged})
    model = loaded(both, checkpoint_key="model_ema")
    assert holds(model, averaged) and model.weights["key"] == "model_ema"
    _, note = model.notes()  # the first is about normalisation
    assert note == (
        "both.pth: taken: model_ema; other copies: model (--checkpoint-key model)"
    )
    assert "taken: model;" in loaded(both).notes()[1]
    alone = loaded(saved(tmp_path / "alone.pth", {"state_dict_ema": averaged}))
    assert alone.notes()[1:] == ["alone.pth: taken: state_dict_ema"]
    assert loaded(saved(tmp_path / "one.pth", {"model": state})).notes()[1:] == []
    text = refused(both, checkpoint_key="teacher")
    assert "no state dict under 'teacher'" in text and "it has: model, model_ema" in text
    with pytest.raises(ModelError, match="give --checkpoint FILE too"):
        load_model(NAME, checkpoint_key="model")


def test_counters_of_batches_may_be_missing(tmp_path: Path) -> None:
    """As in torch's own strict loading, which files from before torch 0.4.1 pass."""
    source = load_model("test_resnet", random_init=3)
    redraw(source.module, 3)
    state = {
        key: x
        for key, x in source.module.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    assert len(state) < len(source.module.state_dict())
    path = saved(tmp_path / "old.pth", state)
    model = load_model("test_resnet", checkpoint=path)
    assert holds(model, state) and model.weights["missing"] == []
    del state["bn1.running_mean"]
    with pytest.raises(ModelError, match=r"missing: 1 \(bn1.running_mean\)"):
        load_model("test_resnet", checkpoint=saved(path, state))


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "net.encoder.trunk."]
)
def test_wrappers_are_stripped(tmp_path: Path, prefix: str) -> None:
    state = weights()
    model = loaded(saved(tmp_path / "w.pth", under(prefix, state)))
    assert holds(model, state) and model.weights["prefix"] == prefix
    assert model.weights["missing"] == [] and model.weights["unexpected"] == []


def test_safetensors_and_the_hash(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = weights()
    save_file(state, tmp_path / "w.safetensors")
    one = loaded(tmp_path / "w.safetensors")
    two = loaded(saved(tmp_path / "w.pth", {"model": under("module.", state)}))
    assert holds(one, state)
    assert one.weights["sha256"] == two.weights["sha256"]
    assert len(one.weights["sha256"]) == 64


def test_layerscale_under_its_older_name(tmp_path: Path) -> None:
    name = "deit3_small_patch16_224"
    state = weights(name=name)
    older = {
        key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): x
        for key, x in state.items()
    }
    assert holds(loaded(saved(tmp_path / "deit3.pth", {"model": older}), name), state)


def refused(path: Path, **args: Any) -> str:
    with pytest.raises(ModelError) as error:
        loaded(path, **args)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.slow
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    state = weights()
    short = {
        key: x for key, x in state.items() if not key.startswith(("blocks.2.", "norm."))
    }
    for content, args, *phrases in (
        (short, {}, "missing: 14", "blocks.2"),
        (weights(depth=4), {}, "left over: 12 (blocks.3.norm1.weight"),
        (weights(embed_dim=24), {}, "of another size", "(24,"),
        (weights(init_values=0.1), {}, "left over: 6 (blocks.0.ls1.gamma"),
        (state, {"global_pool": "avg"}, "missing: 2 (fc_norm.weight", "norm.weight"),
    ):
        text = refused(saved(tmp_path / "w.pth", content), **args)
        assert all(phrase in text for phrase in phrases), text


def test_another_number_of_classes_is_only_the_head(tmp_path: Path) -> None:
    state = weights(num_classes=7)
    model = loaded(saved(tmp_path / "seven.pth", state))
    assert holds(model, body(state))
    assert model.weights["missing"] == HEAD
    assert any(
        "head.weight (7, 48) for (1000, 48)" in x for x in model.weights["unexpected"]
    )


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "no checkpoint at" in refused(tmp_path / "none.pth")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    assert "is no readable checkpoint" in refused(tmp_path / "junk.pth")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    assert "is no readable checkpoint" in refused(tmp_path / "junk.safetensors")
    np.savez(tmp_path / "x.npz", weight=np.zeros(3))
    assert "x.npz is a NumPy archive" in refused(tmp_path / "x.npz")
    assert "holds a Tensor" in refused(saved(tmp_path / "one.pth", torch.zeros(3)))
    assert "holds no state dict" in refused(saved(tmp_path / "other.pth", {"epoch": 3}))
    held = saved(tmp_path / "state.pth", {"model": weights()})
    assert "it has: model" in refused(held.with_name("state.pth#teacher"))


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("ran",)


def test_a_strangers_code_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(saved(tmp_path / "evil.pth", {"model": weights(), "x": Evil()}))
    assert "holds objects besides tensors" in text
    assert "ran" not in capsys.readouterr().out


def test_weights_that_are_all_0_are_a_remark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"img_size": 32, "model_args": {"patch_size": 8}}
    state = load_model("test_vit", random_init=0, **arguments).module.state_dict()
    for name, factor in (("zero.pt", 0), ("half.pt", 0.5)):
        torch.save({key: value * factor for key, value in state.items()}, tmp_path / name)
        caplog.clear()
        load_model("test_vit", checkpoint=tmp_path / name, **arguments)
        remarks = [text for text in caplog.messages if "all weights are 0" in text]
        assert len(remarks) == (name == "zero.pt")
