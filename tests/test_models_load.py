"""Models by name: geometry, transform, weights and their hash, and what goes wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models_helpers import VIT, refusal
from vitsee_core.models.load import hash_weights, load_model

NAME = "vit_tiny_patch16_224"


def test_a_loaded_model_is_ready() -> None:
    model = load_model(NAME, random_init=3, img_size=32, model_args=VIT)
    assert not model.module.training
    assert not any(p.requires_grad for p in model.module.parameters())
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert model.input_size == (3, 32, 32) and model.architecture == NAME
    assert model.weights["source"] == "random" and model.weights["seed"] == 3
    assert model.model_args == VIT and model.class_names is None
    assert {*model.transform} == {
        *("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    }
    assert model.transform["mean"] == (0.5, 0.5, 0.5)


def test_the_seed_decides_the_weights() -> None:
    torch.manual_seed(0)
    one = load_model("resnet10t", random_init=1)
    torch.manual_seed(9)
    state = torch.random.get_rng_state()
    two = load_model("resnet10t", random_init=1)
    assert torch.equal(state, torch.random.get_rng_state())
    other = load_model("resnet10t", random_init=2)
    assert one.weights["sha256"] == two.weights["sha256"] != other.weights["sha256"]
    with torch.no_grad():
        next(two.module.parameters()).view(-1)[0] += 1
    assert hash_weights(two.module) != one.weights["sha256"]


def test_overrides_reach_the_transform() -> None:
    model = load_model(
        "resnet10t",
        random_init=0,
        img_size=(64, 96),
        img_mean=(0.1, 0.2, 0.3),
        img_std=(0.4, 0.5, 0.6),
        crop_pct=1.0,
    )
    assert model.input_size == (3, 64, 96)
    assert model.transform["input_size"] == (3, 64, 96)
    assert model.transform["mean"] == (0.1, 0.2, 0.3)
    assert model.transform["std"] == (0.4, 0.5, 0.6)
    assert model.transform["crop_pct"] == 1.0
    json.dumps(model.transform | model.weights)


def test_a_local_folder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = load_model("test_resnet", random_init=4, model_args={"num_classes": 3})
    config = {
        "architecture": "test_resnet",
        "num_classes": 3,
        "pretrained_cfg": {"input_size": [3, 48, 48], "label_names": ["a", "b", "c"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(source.module.state_dict(), tmp_path / "model.safetensors")
    model = load_model(f"local-dir:{tmp_path}")
    assert model.weights == {"source": "local-dir", "sha256": source.weights["sha256"]}
    assert model.architecture == "test_resnet" and model.input_size == (3, 48, 48)
    assert model.class_names == ["a", "b", "c"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "misspelt": ("vit_tny_patch16_224", {}, "no timm model is called 'vit_tny_patch16_224'; near"),
    "empty": ("", {}, "no timm model is called ''"),
    "tag": (f"{NAME}.nobody", {"random_init": 0}, "Invalid pretrained tag"),
    "folder": ("local-dir:/nowhere/at/all", {}, "no such folder"),
    "argument": (NAME, {"random_init": 0, "model_args": {"bogus": 1}}, "does not take these"),
    "both": (NAME, {"random_init": 0, "checkpoint": Path("x.pth")}, "exclude each other"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(case: str) -> None:
    name, options, phrase = REFUSED[case]
    assert phrase in refusal(name, **options)
