"""One rule for the weights of every source: all of the model but its classifier is there, all of
the weights but known parts is used, and nothing random is called trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models_helpers import refusal
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model

transformers: Any = pytest.importorskip("transformers")
State = dict[str, Tensor]
TINY = {
    **{"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"intermediate_size": 48, "image_size": 32, "patch_size": 8},
}
KINDS = (
    "ViTModel",
    "ViTForImageClassification",
    "Dinov2WithRegistersModel",
    "CLIPVisionModel",
)


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
    return lambda state: {
        **state,
        **{n.replace("__", "."): x for n, x in tensors.items()},
    }


def inside(state: State) -> State:
    """As FSDP and activation checkpointing name layers."""
    return {
        name.replace(".layer.", "._fsdp_wrapped_module.layer.").replace(
            "attention.", "_checkpoint_wrapped_module.attention.", 1
        ): x
        for name, x in state.items()
    }


PREFIXES = ["module.", "_orig_mod.", "net.", "model.", "module._orig_mod.backbone."]


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("ViTModel", prefix) for prefix in PREFIXES]
    + [(kind, "module.") for kind in KINDS[1:]],
)
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
    load_model(
        f"transformers:{tmp_path}/m", random_init=0
    )  # which says that they are random


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
        config = transformers.CLIPConfig(
            vision_config=TINY, text_config={**text, "vocab_size": 9}
        )
    else:
        own = (
            {**TINY, "encoder_stride": 8} if kind == "ViTForMaskedImageModeling" else TINY
        )
        config = made.config_class(**own)
    torch.manual_seed(1)
    made(config).save_pretrained(tmp_path)
    weights = load_model(f"transformers:{tmp_path}").weights
    assert not [
        name for name in weights.get("missing", ()) if not name.startswith("pooler.")
    ]


def test_one_copy_of_two_in_a_folder(tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    expected = load_model(f"transformers:{place}").weights["sha256"]

    def twice(state: State) -> State:
        averaged = {f"ema_model.{name}": x + 1 for name, x in state.items()}
        return averaged | {f"online_model.{name}": x for name, x in state.items()}

    weights = load_model(rewritten(place, twice)).weights
    assert weights["sha256"] == expected and weights["other_keys"] == ["ema_model"]


# ------------------------------------------------------------------------ files, folders of timm

VIT = {"embed_dim": 24, "depth": 3, "num_heads": 3, "patch_size": 8}
PLAIN = "vit_tiny_patch16_224"


def trained(name: str = PLAIN, size: int | tuple[int, int] = 32, **args: Any) -> State:
    """Weights drawn anew, so that no two tensors are equal."""
    torch.manual_seed(4)
    module = timm.create_model(name, img_size=size, **{**VIT, **args})
    return {
        key: torch.randn_like(x) * 0.1 if x.is_floating_point() else x
        for key, x in module.state_dict().items()
    }


def opened(tmp_path: Path, content: Any, name: str = PLAIN, **options: Any) -> Any:
    torch.save(content, tmp_path / "w.pth")
    args = {**VIT, **options.pop("model_args", {})}
    options = {"img_size": 32, **options}
    return load_model(name, checkpoint=tmp_path / "w.pth", model_args=args, **options)


def unfit(tmp_path: Path, content: Any, name: str = PLAIN, **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        opened(tmp_path, content, name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def holds(model: Any, state: State) -> bool:
    own = model.module.state_dict()
    return all(torch.equal(own[key], x) for key, x in state.items())


def renamed(state: State, old: str, new: str) -> State:
    return {name.replace(old, new): x for name, x in state.items()}


EXTRA = [
    "fc_norm.weight", "reg_token", "norm_pre.weight", "blocks.0.adapter.down.weight",
    "rel_pos_bias.relative_position_bias_table", "blocks.0.ls1.gamma", "blocks.3.norm1.weight",
    "adapter.weight", "patch_embed.norm.weight", "blocks.0.attn.q_norm.weight",
]  # fmt: skip


@pytest.mark.parametrize("extra", EXTRA)
def test_what_a_file_has_and_the_model_lacks(extra: str, tmp_path: Path) -> None:
    state = {**trained(), extra: torch.ones(24)}
    for content in (state, {"model": under("module.")(state)}):
        text = unfit(tmp_path, content)
        assert f"left over: 1 ({extra})" in text


def test_parts_beside_the_model_are_known_or_refused(tmp_path: Path) -> None:
    state = under("backbone.")(trained())
    known = {
        "decode_head.conv.weight": torch.zeros(2), "neck.conv.weight": torch.zeros(2),
        "projection_head.0.weight": torch.zeros(2), "mask_token": torch.zeros(1, 1, 24),
    }  # fmt: skip
    model = opened(tmp_path, state | known)
    assert holds(model, trained()) and len(model.weights["unexpected"]) == 4
    text = unfit(tmp_path, {**state, "adapter.weight": torch.zeros(2)})
    assert "left over: 1 (adapter.weight)" in text
    # Whoever names the part asks for it alone.
    model = opened(
        tmp_path, {**state, "adapter.weight": torch.zeros(2)}, checkpoint_key="backbone"
    )
    assert holds(model, trained()) and model.weights["key"] == "backbone"


NUMBERS = [torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_tensors_that_are_no_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    state = trained()
    for name in ("blocks.1.mlp.fc1.weight", "pos_embed", "patch_embed.proj.weight"):
        changed = {**state, name: (state[name] * 100).to(dtype)}
        text = unfit(tmp_path, changed)
        assert (
            f"{name} is {str(dtype).removeprefix('torch.')} where the model has float32"
            in text
        )
    unfit(tmp_path, changed, img_size=48)  # resampled or not


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_narrow_floats_of_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {key: x.to(dtype) for key, x in trained().items()}
    assert holds(opened(tmp_path, state), {key: x.float() for key, x in state.items()})


def test_patches_of_another_size_are_refused_unless_asked_for(tmp_path: Path) -> None:
    state = trained(patch_size=4)
    text = unfit(tmp_path, state)
    assert "filters of 4 x 4 pixels, the model's have 8 x 8" in text
    assert "--resample-patches" in text
    model = opened(tmp_path, state, resample_patches=True)
    assert any("patch_embed.proj.weight" in line for line in model.weights["resampled"])
    assert model.weights["resample_patches"] is True


def test_a_table_of_another_grid_with_as_many_positions(tmp_path: Path) -> None:
    """4 x 4 positions for 2 x 8 patches: an interpolation by torch as oracle."""
    state = trained()
    model = opened(tmp_path, state, img_size=(16, 64))
    table = state["pos_embed"]
    square = table[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    wide = torch.nn.functional.interpolate(square, (2, 8), mode="bicubic", antialias=True)
    expected = torch.cat([table[:, :1], wide.flatten(2).transpose(1, 2)], 1)
    torch.testing.assert_close(model.module.state_dict()["pos_embed"], expected)
    assert model.weights["resampled"] == ["pos_embed 4 x 4 to 2 x 8"]
    assert any("assumed is 4 x 4" in line for line in model.notes())
    own = trained(size=(16, 64))
    model = opened(tmp_path, own, img_size=(16, 64), weights_size=(16, 64))
    assert holds(model, own) and "resampled" not in model.weights
    model = opened(tmp_path, own, img_size=32, weights_size=(16, 64))
    assert model.weights["resampled"] == ["pos_embed 2 x 8 to 4 x 4"]
    text = unfit(tmp_path, own, img_size=32, weights_size=(16, 16))
    assert "has 16 positions, and images of --weights-size have 2 x 2 patches" in text


COPIES = [
    ("online_model.", "ema_model."), ("backbone.", "momentum."), ("net.", "ema."),
    ("online_encoder.", "target_encoder."), ("encoder_q.", "encoder_k."), ("teacher.", "student."),
    ("module.model.", "module.model_ema.module."), ("", "ema."),
]  # fmt: skip


@pytest.mark.parametrize("prefixes", COPIES)
@pytest.mark.parametrize("flip", [False, True])
def test_one_of_two_copies_is_taken_and_said(
    prefixes: tuple[str, str], flip: bool, tmp_path: Path
) -> None:
    first, second = trained(), {key: x + 1 for key, x in trained().items()}
    copies = [under(prefixes[0])(first), under(prefixes[1])(second)]
    content = copies[1] | copies[0] if flip else copies[0] | copies[1]
    model = opened(tmp_path, {"state_dict": content})
    assert holds(model, first)
    (other,) = model.weights["other_keys"]
    assert any(f"(--checkpoint-key {other})" in line for line in model.notes())
    assert holds(opened(tmp_path, {"state_dict": content}, checkpoint_key=other), second)
    assert holds(opened(tmp_path, content, checkpoint_key=other), second)


def test_a_head_s_own_state_dict_is_never_taken_first(tmp_path: Path) -> None:
    state = trained()
    head = {name: x for name, x in state.items() if name.startswith("head.")}
    for key in ("model_state_dict", "net", "encoder"):
        model = opened(tmp_path, {"head_state_dict": head, key: state})
        assert holds(model, state) and model.weights["key"] == key
    nested = opened(tmp_path, {"state": {"model": state}, "epoch": 3})
    assert holds(nested, state) and nested.weights["key"] == "state.model"


INNER = [
    ("blocks.", "blocks._orig_mod."), (".attn.", "._fsdp_wrapped_module.attn."),
    ("blocks.0.", "blocks.0._orig_mod."), (".mlp.", "._checkpoint_wrapped_module.mlp."),
    ("blocks.1.", "_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module._orig_mod."),
]  # fmt: skip


@pytest.mark.parametrize("words", INNER)
def test_words_of_wrappers_inside_names(words: tuple[str, str], tmp_path: Path) -> None:
    state = trained()
    for prefix in ("", "module.", "_fsdp_wrapped_module."):
        assert holds(opened(tmp_path, under(prefix)(renamed(state, *words))), state)


def test_training_files_of_dinov2(tmp_path: Path) -> None:
    """The teacher's and the student's encoder in chunks of blocks, heads beside them."""
    name = "vit_small_patch14_dinov2"
    state = trained(name)
    headless = {key: x for key, x in state.items() if not key.startswith("head.")}
    chunks = {
        key.replace(f"blocks.{n}.", f"blocks.{n // 2}.{n}.")
        : x for n in range(3) for key, x in headless.items() if f"blocks.{n}." in key
    }  # fmt: skip
    chunks |= {key: x for key, x in headless.items() if "blocks." not in key}
    chunks |= {"mask_token": torch.zeros(1, 24)}
    heads = {
        "dino_head.mlp.0.weight": torch.zeros(2),
        "ibot_head.last_layer.weight": torch.ones(2),
    }
    teacher = under("backbone.")(chunks) | heads
    student = under("backbone.")({key: x + 1 for key, x in chunks.items()}) | heads
    for content in ({"teacher": teacher}, {"teacher": teacher, "student": student}):
        model = opened(tmp_path, content, name)
        assert holds(model, headless) and model.weights["key"] == "teacher"
    flat = under("teacher.")(teacher) | under("student.")(student)
    assert holds(opened(tmp_path, {"model": flat}, name), headless)


def test_dinov2_with_registers_is_said_as_it_is_read(tmp_path: Path) -> None:
    """Its class token takes its row of the position table: nothing is resampled or left over."""
    name = "vit_small_patch14_reg4_dinov2"
    state = trained(name)
    state = {key: x for key, x in state.items() if not key.startswith("head.")}
    place = torch.full((1, 1, 24), 0.25)
    raw = dict(state)
    raw["register_tokens"] = raw.pop("reg_token")
    raw["pos_embed"] = torch.cat([place, raw["pos_embed"]], 1)
    raw["cls_token"] = raw["cls_token"] - place
    model = opened(tmp_path, {**raw, "mask_token": torch.zeros(1, 24)}, name)
    assert "resampled" not in model.weights and model.weights["unexpected"] == [
        "mask_token"
    ]
    torch.testing.assert_close(model.module.state_dict()["pos_embed"], state["pos_embed"])
    assert not any(
        "resampled" in line or "register_tokens" in line for line in model.notes()
    )


# --------------------------------------------------------------------------------- other sources


def timm_folder(place: Path, state: State, args: dict[str, Any] | None = None) -> str:
    place.mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "architecture": PLAIN,
        "num_classes": 1000,
        "model_args": {**VIT, **(args or {})},
    }
    config["model_args"].setdefault("img_size", 32)
    config["pretrained_cfg"] = {"input_size": [3, 32, 32], "num_classes": 1000}
    config["pretrained_cfg"] |= {"first_conv": "patch_embed.proj", "classifier": "head"}
    (place / "config.json").write_text(json.dumps(config))
    save_file(
        {name: x.contiguous() for name, x in state.items()}, place / "model.safetensors"
    )
    return f"local-dir:{place}"


def test_a_folder_of_timm_s_goes_by_the_same_rule(tmp_path: Path) -> None:
    state = trained()
    for change in (under("module."), under("net."), under("module._orig_mod.backbone.")):
        assert holds(load_model(timm_folder(tmp_path / "m", change(state))), state)
    inner = renamed(state, "blocks.0.", "blocks.0._orig_mod.")
    assert holds(load_model(timm_folder(tmp_path / "m", inner)), state)
    twice = under("ema.")({key: x + 1 for key, x in state.items()}) | under("net.")(state)
    model = load_model(timm_folder(tmp_path / "m", twice))
    assert holds(model, state) and model.weights["other_keys"] == ["ema"]
    short = {key: x for key, x in state.items() if not key.startswith("blocks.1.")}
    assert "not in them 12" in refusal(timm_folder(tmp_path / "m", short))
    more = {**state, "reg_token": torch.zeros(1, 4, 24)}
    assert "left over: 1 (reg_token)" in refusal(timm_folder(tmp_path / "m", more))
    whole = {**state, "pos_embed": (state["pos_embed"] * 100).to(torch.int8)}
    assert "pos_embed is int8" in refusal(timm_folder(tmp_path / "m", whole))
    name = timm_folder(tmp_path / "m", {**state, "mask_token": torch.zeros(1, 1, 24)})
    assert holds(load_model(name), state)


def test_a_folder_of_timm_s_says_its_grid(tmp_path: Path) -> None:
    wide = trained(size=(16, 64))
    name = timm_folder(tmp_path / "wide", wide, {"img_size": [16, 64]})
    assert holds(load_model(name, img_size=(16, 64)), wide)
    model = load_model(timm_folder(tmp_path / "square", trained()), img_size=(16, 64))
    assert any("pos_embed" in line for line in model.weights["resampled"])
    assert not torch.equal(model.module.state_dict()["pos_embed"], trained()["pos_embed"])


FILE = """
import timm, torch
def build(how="right"):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2,
                              num_heads=3, patch_size=8)
    torch.manual_seed(5)
    state = {key: torch.randn_like(x) for key, x in model.state_dict().items()}
    if how == "prefix":
        state = {f"module.{key}": x for key, x in state.items()}
    if how == "short":
        state = {key: x for key, x in state.items() if "blocks.1" not in key}
    if how == "headless":
        state = {key: x for key, x in state.items() if "head" not in key}
    if how == "integers":
        state["norm.weight"] = torch.ones(24, dtype=torch.int8)
    table = state.pop("pos_embed") if how == "by hand" else None
    model.load_state_dict(state, strict=False)
    if table is not None:
        model.pos_embed.data.copy_(table)
    return model, {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
"""


def test_a_file_that_leaves_its_model_random(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(FILE)
    name = f"{tmp_path}/m.py:build"
    for how in ("right", "headless", "by hand"):
        assert load_model(name, model_args={"how": how}).weights["source"] == "file"
    for how, phrase in (
        ("prefix", "missing: 30"),
        ("short", "missing: 12"),
        ("integers", "int8"),
    ):
        assert phrase in refusal(name, model_args={"how": how})
    random = load_model(name, random_init=0, model_args={"how": "prefix"})
    assert random.weights["source"] == "random"


OWN = """
import copy, timm, torch
def made():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=1,
                             num_heads=3, patch_size=8)
STATE = {key: torch.zeros_like(x) + 0.5 for key, x in made().state_dict().items()}
WRAPPED = {f"module.{key}": x for key, x in STATE.items()}
AT_IMPORT = made()
AT_IMPORT.load_state_dict(WRAPPED, strict=False)
def build(how):
    model = made()
    if how == "import":
        model = AT_IMPORT
    if how in ("copied", "halved"):
        model.load_state_dict(WRAPPED, strict=False)
        model = copy.deepcopy(model) if how == "copied" else model.half()
    if how in ("swallowed", "tried again"):
        try:
            model.load_state_dict(WRAPPED)
        except RuntimeError:
            if how == "tried again":
                model.load_state_dict(STATE)
    if how == "size":
        try:
            model.load_state_dict(STATE | {"pos_embed": torch.zeros(1, 5, 24)})
        except RuntimeError:
            pass
    if how == "unchanged":
        try:
            model.load_state_dict(WRAPPED)
        except RuntimeError:
            model.load_state_dict({key: x.clone() for key, x in model.state_dict().items()})
    return model, {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
"""


@pytest.mark.parametrize(
    ("how", "phrase"),
    [
        ("import", "missing: 18"),
        ("copied", "missing: "),
        ("halved", "missing: 18"),
        ("swallowed", "missing: 18"),
        ("size", "missing: 1 (pos_embed)"),
        ("tried again", ""),
        ("unchanged", ""),
    ],
)
def test_ways_to_leave_a_model_random(how: str, phrase: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(OWN)
    name = f"{tmp_path}/m.py:build"
    if phrase:
        assert phrase in refusal(name, model_args={"how": how})
    else:
        assert load_model(name, model_args={"how": how}).weights["source"] == "file"


def test_a_tower_goes_by_the_same_rule(tmp_path: Path) -> None:
    text = {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "vocab_size": 9,
    }
    config = transformers.CLIPConfig(
        vision_config=TINY, text_config=text, projection_dim=12
    )
    torch.manual_seed(1)
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    names = [f"transformers:{tmp_path}", f"transformers:{tmp_path}#vision_model"]
    expected = [load_model(name).weights["sha256"] for name in names]
    layer = "vision_model.encoder.layers.1."
    for change in (under("module."), under("_orig_mod."), under("net.")):
        save_file(change(original), tmp_path / "model.safetensors", {"format": "pt"})
        assert [load_model(name).weights["sha256"] for name in names] == expected
    for change, phrase in (
        (without(layer), "missing: 16"),
        (
            lambda state: {**state, f"{layer}adapter.weight": torch.ones(2)},
            "left over: 1",
        ),
        (
            lambda state: {**state, f"{layer}mlp.fc1.weight": torch.ones(48, 24).char()},
            "nt8",
        ),
        (
            lambda state: {**state, f"{layer}mlp.fc1.bias": torch.ones(1)},
            "of another size: 1",
        ),
    ):
        save_file(change(original), tmp_path / "model.safetensors", {"format": "pt"})
        for name in names:
            assert phrase.lower() in refusal(name).lower().replace("is i8", "is int8")


def test_torch_files_in_a_folder_of_transformers(tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    expected = load_model(f"transformers:{place}").weights["sha256"]
    state = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    for change in (dict, under("module."), inside):
        torch.save(change(state), place / "pytorch_model.bin")
        assert load_model(f"transformers:{place}").weights["sha256"] == expected
    torch.save(
        {key: x.to(torch.int8) for key, x in state.items()}, place / "pytorch_model.bin"
    )
    assert "is int8" in refusal(f"transformers:{place}")


def test_a_copy_without_a_prefix_in_a_folder(tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    expected = load_model(f"transformers:{place}").weights["sha256"]
    name = rewritten(
        place, lambda s: {**s, **{f"ema.{key}": x + 1 for key, x in s.items()}}
    )
    weights = load_model(name).weights
    assert weights["sha256"] == expected and weights["other_keys"] == ["ema"]
    place = saved(tmp_path / "n")
    name = rewritten(
        place, lambda s: {**under("net.")(s), "adapter.weight": torch.ones(2)}
    )
    assert "left over: 1 (adapter.weight)" in refusal(name)


def test_moco_s_other_copy_keeps_its_layout(tmp_path: Path) -> None:
    """The number of heads that no shape shows belongs to both."""
    args = {"embed_dim": 384, "depth": 2, "num_heads": 12, "patch_size": 8}
    state = trained("vit_small_patch16_224", **args)
    both = under("module.base_encoder.")(state) | under("module.momentum_encoder.")(state)
    torch.save(
        {"state_dict": {**both, "module.predictor.x": torch.ones(2)}}, tmp_path / "w.pth"
    )
    del args["num_heads"]
    for key in (None, "momentum_encoder", "state_dict.momentum_encoder"):
        model = load_model(
            "vit_small_patch16_224", checkpoint=tmp_path / "w.pth", checkpoint_key=key,
            img_size=32, model_args=args,
        )  # fmt: skip
        assert (
            model.weights["layout"] == "MoCo v3" and model.model_args["num_heads"] == 12
        )
