"""One rule for the weights of every source: all of the model but its classifier is there, all of
the weights but known parts is used, and nothing random is called trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models_helpers import refusal
from vitsee_core.models.load import load_model

transformers: Any = pytest.importorskip("transformers")
State = dict[str, Tensor]
TINY = {
    **{"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"intermediate_size": 48, "image_size": 32, "patch_size": 8},
}
KINDS = ("ViTModel", "ViTForImageClassification", "Dinov2WithRegistersModel", "CLIPVisionModel")


def saved(place: Path, kind: str = "ViTModel", **config: Any) -> Path:
    made = getattr(transformers, kind)
    torch.manual_seed(3)
    made(made.config_class(**{**TINY, **config})).save_pretrained(place)
    return place


def rewritten(place: Path, change: Callable[[State], State]) -> str:
    """The model's name, after its file of weights was changed."""
    file = place / "model.safetensors"
    state = {name: x.clone() for name, x in change(load_file(file)).items()}
    save_file(state, file, {"format": "pt"})
    return f"transformers:{place}"


def under(prefix: str) -> Callable[[State], State]:
    return lambda state: {f"{prefix}{name}": x for name, x in state.items()}


def without(word: str) -> Callable[[State], State]:
    return lambda state: {name: x for name, x in state.items() if word not in name}


def beside(**tensors: Tensor) -> Callable[[State], State]:
    return lambda state: {**state, **{n.replace("__", "."): x for n, x in tensors.items()}}


def inside(state: State) -> State:
    """As FSDP and activation checkpointing name layers."""
    return {
        name.replace(".layer.", "._fsdp_wrapped_module.layer.").replace(
            "attention.", "_checkpoint_wrapped_module.attention.", 1
        ): x
        for name, x in state.items()
    }


PREFIXES = ["module.", "_orig_mod.", "net.", "model.", "module._orig_mod.backbone."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_in_a_folder_are_cut(kind: str, prefix: str, tmp_path: Path) -> None:
    place = saved(tmp_path / "m", kind)
    expected = load_model(f"transformers:{place}").weights["sha256"]
    weights = load_model(rewritten(place, under(prefix))).weights
    assert weights["sha256"] == expected
    assert not weights.get("missing") and not weights.get("unexpected")


def test_words_inside_names_are_cut(tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    expected = load_model(f"transformers:{place}").weights["sha256"]
    assert load_model(rewritten(place, inside)).weights["sha256"] == expected


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "a layer missing": (without("layer.1."), "missing: 16"),
    "all renamed": (under("x.y.z.a.b"), "missing: "),
    "registers": (beside(embeddings__register_tokens=torch.zeros(1, 4, 24)), "left over: 1"),
    "an adapter": (beside(encoder__layer__0__adapter__weight=torch.zeros(2, 2)), "left over: 1"),
    "integers": (
        lambda s: {n: x.to(torch.int8) if "layer.1" in n else x for n, x in s.items()},
        "is I8",
    ),
    "complex": (
        lambda s: {n: x.to(torch.complex64) if "layer.1" in n else x for n, x in s.items()},
        "is C64",
    ),
    "scales": (
        beside(encoder__layer__0__output__dense__weight_scale=torch.ones(24)), "left over: 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_do_not_fit(case: str, tmp_path: Path) -> None:
    change, phrase = REFUSED[case]
    text = refusal(rewritten(saved(tmp_path / "m"), change))
    assert phrase in text and "\n" not in text
    load_model(f"transformers:{tmp_path}/m", random_init=0)  # which says that they are random


@pytest.mark.parametrize("n", [2, 4])
def test_another_number_of_layers_than_the_file_s(n: int, tmp_path: Path) -> None:
    place = saved(tmp_path / "m", "ViTForImageClassification")
    phrase = "left over: 16" if n == 2 else "missing: 16"
    assert phrase in refusal(f"transformers:{place}", model_args={"num_hidden_layers": n})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "num_hidden_layers": n}))
    assert phrase in refusal(f"transformers:{place}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_floats_are_right(dtype: torch.dtype, tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    wide = load_model(f"transformers:{place}").module.state_dict()
    name = rewritten(place, lambda state: {key: x.to(dtype) for key, x in state.items()})
    narrow = load_model(name).module.state_dict()
    assert all(torch.equal(narrow[key], x.to(dtype).float()) for key, x in wide.items())


def test_known_parts_may_be_left_over(tmp_path: Path) -> None:
    """Mask tokens, decoders, projections, text; the classifier and the pooler may be missing."""
    place = saved(tmp_path / "m", "ViTForImageClassification")
    name = rewritten(place, without("classifier"))
    weights = load_model(name).weights
    assert weights["missing"] == ["classifier.bias", "classifier.weight"]
    extra = beside(
        decoder__layer__0__weight=torch.zeros(2), mask_token=torch.zeros(1, 1, 24),
        text_model__x=torch.zeros(2), visual_projection__weight=torch.zeros(2, 24),
        logit_scale=torch.zeros(()),
    )  # fmt: skip
    place = saved(tmp_path / "n")
    weights = load_model(rewritten(place, extra)).weights
    assert not weights.get("missing") and len(weights["unexpected"]) == 5
    weights = load_model(rewritten(place, without("pooler"))).weights
    assert weights["missing"] == ["pooler.dense.bias", "pooler.dense.weight"]


@pytest.mark.parametrize(
    "kind",
    [
        "ViTForMaskedImageModeling",
        "ViTMAEForPreTraining",
        "BeitForMaskedImageModeling",
        "CLIPModel",
    ],
)
def test_encoders_of_other_tasks(kind: str, tmp_path: Path) -> None:
    made = getattr(transformers, kind)
    if kind == "CLIPModel":
        text = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
        config = transformers.CLIPConfig(vision_config=TINY, text_config={**text, "vocab_size": 9})
    else:
        own = {**TINY, "encoder_stride": 8} if kind == "ViTForMaskedImageModeling" else TINY
        config = made.config_class(**own)
    torch.manual_seed(1)
    made(config).save_pretrained(tmp_path)
    weights = load_model(f"transformers:{tmp_path}").weights
    assert not [name for name in weights.get("missing", ()) if not name.startswith("pooler.")]


def test_one_copy_of_two_in_a_folder(tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    expected = load_model(f"transformers:{place}").weights["sha256"]

    def twice(state: State) -> State:
        averaged = {f"ema_model.{name}": x + 1 for name, x in state.items()}
        return averaged | {f"online_model.{name}": x for name, x in state.items()}

    weights = load_model(rewritten(place, twice)).weights
    assert weights["sha256"] == expected and weights["other_keys"] == ["ema_model"]
