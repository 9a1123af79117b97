"""Weights of open_clip's towers, of a tag and of a file: the rule that holds for every source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models_helpers import refusal
from vitsee_core.models.load import load_model

open_clip: Any = pytest.importorskip("open_clip")
State = dict[str, Tensor]
NAME = "tiny-clip"
TAG = "here"
CONFIG: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 32,
        "patch_size": 8,
        "head_width": 16,
    },
    "text_cfg": {
        "context_length": 8,
        "vocab_size": 50,
        "width": 16,
        "heads": 2,
        "layers": 1,
    },
}
POSITIONS = "visual.positional_embedding"
BY = ["tag", pytest.param("file", marks=pytest.mark.slow)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the tag of a tiny architecture stands for, with a whole model's weights."""
    from open_clip import factory, pretrained

    config = tmp_path / "configs" / f"{NAME}.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    monkeypatch.setattr(
        factory, "_MODEL_CONFIG_PATHS", [*factory._MODEL_CONFIG_PATHS, config]
    )
    monkeypatch.setattr(factory, "_MODEL_CONFIGS", dict(factory._MODEL_CONFIGS))
    factory._rescan_model_configs()
    path = tmp_path / "w.pt"
    entry = {"url": "", "mean": None, "std": None, "quick_gelu": False}
    monkeypatch.setitem(pretrained._PRETRAINED, NAME, {TAG: entry})
    monkeypatch.setattr(factory, "download_pretrained", lambda *_, **__: str(path))
    torch.manual_seed(1)
    torch.save(open_clip.create_model(NAME).state_dict(), path)
    yield path


def rewrite(file: Path, change: Callable[[State], Any]) -> None:
    torch.save(change(torch.load(file)), file)


def under(prefix: str) -> Callable[[State], State]:
    return lambda state: {f"{prefix}{name}": x for name, x in state.items()}


def inside(state: State) -> State:
    return {
        name.replace("resblocks.1.", "resblocks.1._checkpoint_wrapped_module."): x
        for name, x in state.items()
    }


def tower_alone(state: State) -> State:
    return {
        name.removeprefix("visual."): x
        for name, x in state.items()
        if name.startswith("visual.")
    }


def averaged_beside(state: State) -> State:
    return {f"ema.{name}": x + 1 for name, x in state.items()} | {
        f"net.{name}": x for name, x in state.items()
    }


SAME: dict[str, Callable[[State], Any]] = {
    "module": under("module."),
    "compiled": under("_orig_mod.module."),
    "lightning": under("net.model."),
    "inside": inside,
    "in a training file": lambda state: {
        "epoch": 3,
        "state_dict": under("module.")(state),
    },
    "the tower alone": tower_alone,
    "two copies": averaged_beside,
    "no text": lambda state: {
        n: x
        for n, x in state.items()
        if "transformer" not in n or n.startswith("visual.")
    },
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("case", SAME)
def test_the_tower_is_found_whatever_surrounds_its_names(
    case: str, by: str, file: Path
) -> None:
    expected = load_model(f"open_clip:{NAME}/{TAG}").weights
    assert expected["source"] == "pretrained" and "missing" not in expected
    rewrite(file, SAME[case])
    weights = loaded(by, file).weights
    assert weights["sha256"] == expected["sha256"]
    assert weights.get("missing", []) == []


def loaded(by: str, file: Path, **options: Any) -> Any:
    """The model by its tag, or with the tag's file as a checkpoint."""
    if by == "tag":
        return load_model(f"open_clip:{NAME}/{TAG}", **options)
    return load_model(f"open_clip:{NAME}", checkpoint=file, **options)


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "a layer missing": (
        lambda state: {
            n: x for n, x in state.items() if "visual.transformer.resblocks.1" not in n
        },
        "missing: 12",
    ),
    "the text alone": (
        lambda state: {n: x for n, x in state.items() if not n.startswith("visual.")},
        "missing: ",
    ),
    "an adapter": (
        lambda state: {**state, "visual.adapter.weight": torch.zeros(3)},
        "left over: 1 (adapter.weight)",
    ),
    "another block": (
        lambda state: {
            **state,
            "visual.transformer.resblocks.2.ln_1.weight": torch.zeros(32),
        },
        "left over: 1",
    ),
    "other filters": (
        lambda state: {**state, "visual.conv1.weight": torch.zeros(32, 3, 4, 4)},
        "of another size: 1",
    ),
    "integers": (
        lambda state: {
            n: x.to(torch.int8) if "resblocks" in n else x for n, x in state.items()
        },
        "is int8",
    ),
    "positions of no square": (
        lambda state: {**state, POSITIONS: torch.zeros(19, 32)},
        "has 18 positions, which are no square, and does not say its grid; expected --weights-size",
    ),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, by: str, file: Path) -> None:
    change, phrase = REFUSED[case]
    rewrite(file, change)
    name = f"open_clip:{NAME}/{TAG}"
    options = {} if by == "tag" else {"checkpoint": file}
    text = refusal(name, **options)
    assert phrase in text and "\n" not in text


@pytest.mark.parametrize("by", ["tag", "file"])
@pytest.mark.parametrize("size", [(16, 64), (64, 64), (48, 32)])
def test_positions_of_another_grid_are_resampled(
    size: tuple[int, int], by: str, file: Path
) -> None:
    """4 x 4 positions for 2 x 8, as many, and for more: torch's interpolation, written out."""
    stored = torch.load(file)[POSITIONS]
    model = loaded(by, file, img_size=size)
    grid = size[0] // 8, size[1] // 8
    table = stored[1:].T.reshape(1, 32, 4, 4)
    resized = functional.interpolate(table, grid, mode="bicubic", antialias=True)
    expected = torch.cat([stored[:1], resized[0].flatten(1).T])
    found = model.module.positional_embedding
    assert torch.allclose(found, expected, atol=1e-6)
    [text] = model.weights["resampled"]
    assert text.startswith("positional_embedding ")
    # The architecture of a tag says its images; a file does not.
    assert bool(model.weights.get("notes")) == (by == "file")


@pytest.mark.parametrize("by", ["tag", "file"])
def test_the_user_says_the_grid_of_the_weights(by: str, file: Path) -> None:
    stored = torch.load(file)[POSITIONS]
    model = loaded(by, file, img_size=(16, 64), weights_size=(16, 64))
    assert torch.equal(model.module.positional_embedding, stored)
    rewrite(file, lambda state: {**state, POSITIONS: torch.randn(19, 32)})
    model = loaded(by, file, weights_size=(16, 72))
    assert model.module.positional_embedding.shape == (17, 32)


ARGUMENTS = ["load_weights", "pretrained", "pretrained_image_path", "weights_only"]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_no_argument_chooses_the_weights(argument: str, file: Path) -> None:
    """load_weights=False would give random weights under the name of trained ones."""
    text = refusal(f"open_clip:{NAME}/{TAG}", model_args={argument: False})
    assert f"{argument}=False is not passed on to open_clip" in text


def activation(model: Any) -> str:
    """The class of the activation in the first block of a tower."""
    return type(model.module.transformer.resblocks[0].mlp.gelu).__name__


def test_weights_and_activation_belong_together(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from open_clip import pretrained

    name = f"open_clip:{NAME}/{TAG}"
    plain = load_model(name)
    assert activation(plain) == "GELU"
    assert "trained with GELU" in refusal(name, model_args={"quick_gelu": True})
    monkeypatch.setitem(pretrained._PRETRAINED[NAME][TAG], "quick_gelu", True)
    assert f"expected {name}?quick_gelu=true" in refusal(name)
    assert "expected open_clip:ViT-B-32-quickgelu/openai" in refusal(
        "open_clip:ViT-B-32/openai"
    )
    quick = load_model(name, model_args={"quick_gelu": True})
    assert activation(quick) == "QuickGELU"


def test_the_file_of_openai_computes_quickgelu(file: Path) -> None:
    """Its three sizes beside the weights say whose it is."""
    sizes = dict.fromkeys(
        ("input_resolution", "context_length", "vocab_size"), torch.tensor(8)
    )
    rewrite(file, lambda state: {**state, **sizes})
    model = load_model(f"open_clip:{NAME}", checkpoint=file)
    assert activation(model) == "QuickGELU"
    assert model.model_args["quick_gelu"] is True
