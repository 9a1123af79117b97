"""Files of transformers' older names by `--checkpoint`: the library's conversion, then the rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models_helpers import refusal
from tests.test_models_weights_rule import saved
from vitsee_core.models.load import load_model

transformers: Any = pytest.importorskip("transformers")
State = dict[str, Tensor]
SLOW_KINDS = [
    "ViTForImageClassification",
    "Dinov2WithRegistersModel",
    "BeitModel",
    "DINOv3ViTModel",
]
KINDS = [
    "ViTModel",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model of a class, made once."""
    root = tmp_path_factory.mktemp("transformers")

    def folder(kind: str) -> Path:
        place = root / kind
        if not place.exists():
            saved(place, kind)
        return place

    return folder


def older_state(folder: Path) -> State:
    """The tensors of a folder, by the names of transformers 4, which it keeps in files."""
    return load_file(folder / "model.safetensors")


def under(prefix: str) -> Callable[[State], State]:
    return lambda state: {f"{prefix}{name}": x for name, x in state.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_older_names_are_converted_as_the_library_does(
    kind: str, folders: Callable[[str], Path]
) -> None:
    folder = folders(kind)
    expected = load_model(f"transformers:{folder}")
    assert older_state(folder).keys() != expected.module.state_dict().keys()
    random_state = torch.random.get_rng_state()
    model = load_model(f"transformers:{folder}", checkpoint=folder / "model.safetensors")
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert model.weights["sha256"] == expected.weights["sha256"]
    assert not model.weights["missing"] and not model.weights["unexpected"]


WRAPPED: dict[str, Callable[[State], Any]] = {
    "module": under("module."),
    "lightning": lambda state: {"state_dict": under("net.")(state), "epoch": 1},
    "two copies": lambda state: {
        **{f"ema_model.{name}": x + 1 for name, x in state.items()},
        **under("online_model.")(state),
    },
    "without its prefix": lambda state: {
        name.removeprefix("vit."): x for name, x in state.items()
    },
    "half precision": lambda state: {name: x.half() for name, x in state.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRAPPED)
def test_wrapped_older_names(
    case: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("ViTForImageClassification")
    expected = load_model(f"transformers:{folder}")
    file = tmp_path / "w.pt"
    torch.save(WRAPPED[case](older_state(folder)), file)
    model = load_model(f"transformers:{folder}", checkpoint=file)
    assert not model.weights["missing"]
    if case == "half precision":
        pairs = zip(model.module.parameters(), expected.module.parameters(), strict=True)
        assert all(torch.equal(x, y.half().float()) for x, y in pairs)
    else:
        assert model.weights["sha256"] == expected.weights["sha256"]


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "a layer missing": (
        lambda state: {name: x for name, x in state.items() if "layer.1." not in name},
        "missing: 16 (vit.layers.1.",
    ),
    "one layer more": (
        lambda state: {
            **state,
            **{
                name.replace("layer.1.", "layer.3."): x.clone()
                for name, x in state.items()
                if "layer.1." in name
            },
        },
        "left over: 16 (vit.encoder.layer.3.",
    ),
    "an adapter": (
        lambda state: {**state, "vit.encoder.layer.0.adapter.weight": torch.zeros(2)},
        "left over: 1 (vit.encoder.layer.0.adapter.weight)",
    ),
    "integers": (
        lambda state: {
            name: x.to(torch.int8) if "layer.1." in name else x
            for name, x in state.items()
        },
        "is int8",
    ),
    "another width": (
        lambda state: {
            name: x[..., :12] if "layer.1.intermediate.dense.weight" in name else x
            for name, x in state.items()
        },
        "does not fit this model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_older_names_that_do_not_fit(
    case: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("ViTForImageClassification")
    change, phrase = REFUSED[case]
    file = tmp_path / "w.pt"
    torch.save(change(older_state(folder)), file)
    text = refusal(f"transformers:{folder}", checkpoint=file)
    assert phrase in text and "\n" not in text


def test_the_classifier_alone_may_be_random(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("ViTForImageClassification")
    encoder = {
        name: x for name, x in older_state(folder).items() if "classifier" not in name
    }
    torch.save(encoder, tmp_path / "w.pt")
    model = load_model(f"transformers:{folder}", checkpoint=tmp_path / "w.pt")
    assert sorted(model.weights["missing"]) == ["classifier.bias", "classifier.weight"]


def test_positions_of_another_grid_are_resampled(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """4 x 4 positions for 8 x 8: torch's interpolation, written out."""
    folder = folders("ViTModel")
    stored = older_state(folder)["embeddings.position_embeddings"]
    model = load_model(
        f"transformers:{folder}",
        checkpoint=folder / "model.safetensors",
        model_args={"image_size": 64},
    )
    table = stored[0, 1:].T.reshape(1, -1, 4, 4)
    resized = torch.nn.functional.interpolate(
        table, (8, 8), mode="bicubic", antialias=True
    )
    found = model.module.state_dict()["embeddings.position_embeddings"]
    assert torch.allclose(found[0, 1:].T, resized[0].flatten(1), atol=1e-6)
    assert torch.equal(found[0, 0], stored[0, 0])
    assert model.weights["resampled"] and model.weights["notes"]


def test_a_folder_with_as_many_positions_in_another_grid(
    folders: Callable[[str], Path],
) -> None:
    """The folder's 4 x 4 positions are not those of 2 x 8 patches."""
    name = f"transformers:{folders('ViTModel')}"
    text = refusal(name, model_args={"image_size": [16, 64]})
    assert "positions of 4 x 4 patches" in text and "the model has 2 x 8" in text
    assert "--img-size" in text
    load_model(name, model_args={"image_size": [32, 32]})
    assert load_model(name, img_size=(16, 64)).input_size == (3, 16, 64)
