"""Models by name: geometry, transform, weights and their hash; what cannot be loaded, in one true
line, at the right moment, with nothing asked of the network."""

from __future__ import annotations

import importlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.models_helpers import VIT, redraw, refusal
from vitsee_cli.main import main
from vitsee_core.models.load import hash_weights, load_model
from vitsee_core.models.sources.timm_create import local_only

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
    other = load_model("resnet10t", random_init=2**63 - 1)  # the largest
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
    source = load_model("test_resnet", random_init=4, model_args={"num_classes": 3})
    config = {
        "architecture": "test_resnet",
        "num_classes": 3,
        "pretrained_cfg": {"input_size": [3, 48, 48], "label_names": ["a", "b", "c"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(source.module.state_dict(), tmp_path / "model.safetensors")
    model = load_model(f"local-dir:{tmp_path}")
    assert model.weights == {
        "source": "local-dir",
        "folder": tmp_path.name,
        "sha256": source.weights["sha256"],
    }
    assert model.architecture == "test_resnet" and model.input_size == (3, 48, 48)
    assert model.class_names == ["a", "b", "c"]


RANDOM = {"random_init": 0}
SMALLER = "--img-size 3x3 is less than one patch of 16x16 pixels; choose a larger one"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "misspelt": (
        "vit_tny_patch16_224",
        {},
        "no timm model is called 'vit_tny_patch16_224'; near",
    ),
    "empty": ("", {}, "no timm model is called ''"),
    "tag": (f"{NAME}.nobody", RANDOM, "Invalid pretrained tag"),
    "folder": ("local-dir:/nowhere/at/all", {}, "no such folder"),
    "argument": (NAME, {**RANDOM, "model_args": {"bogus": 1}}, "does not take these"),
    "both": (NAME, {**RANDOM, "checkpoint": Path("x.pth")}, "exclude each other"),
    "image": (NAME, {**RANDOM, "img_size": 3}, SMALLER),
    # The size is judged before any weights are looked for.
    "image first": (NAME, {"img_size": 3}, SMALLER),
    "seed": (NAME, {"random_init": 2**63}, "expected 0 to"),
    "assertion": (
        *("vit_tiny_r_s16_p8_224", {**RANDOM, "img_size": (229, 229)}),
        "cannot be made with img_size=(229, 229): timm asks for self.feature_size[0] % ",
    ),
}
for key in ("checkpoint_path", "pretrained_cfg", "cache_dir", "features_only"):
    text = f"--model-arg {key}=x is not passed on to timm"
    REFUSED[key] = (NAME, {**RANDOM, "model_args": {key: "x"}}, text)
for given, hint in ((90, "; 0.90?"), (5, "; 0.05?"), (0, ""), (1.2, "")):
    text = f"--crop-pct is {given:g}; expected above 0, at most 1{hint}"
    REFUSED[f"crop {given}"] = (NAME, {**RANDOM, "crop_pct": given}, text)


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(case: str) -> None:
    name, options, phrase = REFUSED[case]
    assert phrase in refusal(name, **options)


def folder(path: Path, args: dict[str, Any] | None = None, **config: Any) -> str:
    """A local-dir: of test_vit with random weights."""
    path.mkdir()
    source = load_model("test_vit", random_init=4, model_args=args)
    redraw(source.module, 4)
    save_file(source.module.state_dict(), path / "model.safetensors")
    written = {
        "architecture": "test_vit",
        "model_args": args or {},
        "pretrained_cfg": config,
    }
    (path / "config.json").write_text(json.dumps(written))
    return f"local-dir:{path}"


@pytest.fixture
def no_way_out(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No name is resolved and nothing connected to; the attempts of this thread. Those that tests
    before left, of libraries and clusters, try on their own."""
    tried: list[Any] = []
    here = threading.get_ident()

    def refuse(*args: Any, **_: Any) -> None:
        if threading.get_ident() == here:
            tried.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


def test_weights_of_another_shape(tmp_path: Path) -> None:
    name = folder(tmp_path / "own")
    text = refusal(name, model_args={"depth": 3})
    assert "does not fit this model: left over: 36 (blocks.3." in text
    assert (
        "with depth=3" in text and "--random-init SEED" in text and "Error(s)" not in text
    )
    text = refusal(name, model_args={"embed_dim": 48})
    assert "do not fit embed_dim=48: of another size" in text


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "mean": ({"mean": ["x"]}, "has mean ['x']; expected finite numbers"),
    "mean of two": ({"mean": [0.5, 0.5]}, "has mean [0.5, 0.5]"),
    "std": ({"std": [0, 1, 1]}, "expected numbers above 0"),
    "crop_pct": ({"crop_pct": "much"}, "has crop_pct much; expected one number"),
    "input_size": ({"input_size": [3, "a", 160]}, "has input_size [3, 'a', 160]"),
    "labels": ({"label_names": 7}, "has label_names '7'; expected a list"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_folder_whose_configuration_is_wrong(tmp_path: Path, case: str) -> None:
    config, phrase = CONFIGS[case]
    assert phrase in refusal(folder(tmp_path / "own", **config))


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("{", "its config.json is no JSON"),
        ("[" * 100_000, "its config.json is no JSON"),
        ("[]", "says architecture 'None'"),
        ('{"architecture": "nobody"}', "says architecture 'nobody'"),
        (
            '{"architecture": "test_vit", "model_args": 3}',
            "model_args in its config.json",
        ),
        (
            '{"architecture": "test_vit", "model_args": {"checkpoint_path": "x.pth"}}',
            "model_args of its config.json: checkpoint_path=x.pth is not passed on",
        ),
    ],
)
def test_a_folder_whose_config_is_none(tmp_path: Path, text: str, phrase: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert phrase in refusal(f"local-dir:{tmp_path}")


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        (("--random-init", "9" * 23), "is not in the range"),
        (("--crop-pct", "90"), "did you mean 0.90?"),
        (("--crop-pct", "5"), "above 0 and at most 1"),
        (("--crop-pct", "nan"), "above 0 and at most 1"),
        (("--checkpoint-key", "ema"), "give --checkpoint too"),
    ],
)
def test_options_that_are_refused(options: tuple[str, ...], phrase: str) -> None:
    result = CliRunner().invoke(main, ["sites", "test_vit", *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert phrase in result.stderr


def hub_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HF_")}


def test_without_a_network_one_line_at_once(
    no_way_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", False
    )  # whatever the user's
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = hub_settings()
    text = refusal("test_vit")
    assert "the weights of test_vit are not on this machine, and http" in text
    assert "does not answer" in text and "--random-init SEED" in text
    assert len(no_way_out) <= 2  # the hub's client alone would try 22 times
    assert hub_settings() == before
    assert "does not answer" in refusal("hf-hub:nobody/nothing")


def test_without_a_network_nothing_is_asked(
    no_way_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("test_vit", "legacy_seresnet18.in1k"):
        text = refusal(name, foreign="s.zarr")
        assert "are not on this machine, and nothing is fetched for a store" in text
    assert no_way_out == []


def test_the_ways_out_are_open_again() -> None:
    import torch.hub

    hub: Any = importlib.import_module("timm.models._hub")
    before = hub.hf_hub_download, hub.download_url_to_file, torch.hub.download_url_to_file
    with local_only():
        assert hub.hf_hub_download is not before[0]
    assert before == (
        hub.hf_hub_download,
        hub.download_url_to_file,
        torch.hub.download_url_to_file,
    )


@pytest.mark.slow
def test_pretrained_weights_fitted_to_other_arguments_are_named(tmp_path: Path) -> None:
    fixed: dict[str, Any] = {"input_size": [3, 160, 160], "fixed_input_size": True}
    name = folder(tmp_path / "own", **fixed, num_classes=1000, classifier="head")
    assert load_model(name).weights.keys() == {"source", "sha256", "folder"}
    same = load_model(name, img_size=160)
    assert same.notes() == [] and "missing" not in same.weights
    other = load_model(name, img_size=96, model_args={"num_classes": 3})
    assert other.weights["missing"] == ["head.weight", "head.bias"]
    old, new = (160 // 16) ** 2 + 1, (96 // 16) ** 2 + 1
    (line,) = other.weights["resampled"]
    assert line.startswith(f"pos_embed (1, {old}, ") and f"to (1, {new}, " in line
    (note,) = other.notes()
    assert note.startswith(
        "weights: not in these weights, so random: head.weight, head.bias; "
    )
    # The head is drawn with a seed of its own: the same again.
    again = load_model(name, img_size=96, model_args={"num_classes": 3})
    assert again.weights == other.weights


def test_random_weights_have_nothing_missing() -> None:
    model = load_model(
        NAME, random_init=0, img_size=32, model_args={**VIT, "num_classes": 3}
    )
    assert model.notes() == [] and "missing" not in model.weights
