"""Models of transformers and open_clip: structure against their own outputs, checkpoints, and what
is refused."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.every_command import vitsee
from tests.extractions import extracted
from tests.models_helpers import refusal
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sources import source_of
from vitsee_core.models.sources.transformers_inputs import refuse_others
from vitsee_core.study import catalogue
from vitsee_core.study.steps import label_of
from vitsee_stores import open_store
from vitsee_stores.weights_names import weights_name

transformers: Any = pytest.importorskip("transformers")
TINY = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 48, "image_size": 32, "patch_size": 8},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("try_transformers")


# Class, blocks' path, sublayers, blocks with attention, where the last hidden state is.
CLASSES = [
    ("ViTModel", "layer", 6, 3, "before"),
    ("Dinov2WithRegistersModel", "layer", 6, 3, "before"),
    ("CLIPVisionModel", "encoder.layers.0", 6, 3, "before"),
    ("BeitModel", "layer", 6, 3, "before"),
    ("SiglipVisionModel", "encoder.layers.0", 6, 3, "before"),
    ("ConvNextModel", "stages.0.layers.0", 5, 0, "before"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CLASSES, ids=lambda case: case[0])
def test_a_class_against_its_own_outputs(
    script: ModuleType, case: tuple[Any, ...]
) -> None:
    """Hidden states to the bit, eager's attention to 1e-6, sums proven."""
    name, path, residual, attention, last = case
    row = script.attempt(name)
    assert (row["outcome"], row["reason"]) == ("ok", "")
    assert path in row["blocks"] and row["residual"] == str(residual)
    assert f"last {last}" in row["hidden"]
    assert row["attention"] == (
        str(attention) if attention else "no block has a softmax over tokens"
    )
    assert not attention or float(row["eager"]) <= 1e-6


@pytest.mark.slow
def test_every_class(script: ModuleType) -> None:
    rows = [script.attempt(name) for name in script.names()]
    assert [row["class"] for row in rows if row["outcome"] == "FAILURE"] == []
    assert sum(row["outcome"] == "ok" for row in rows) >= 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that classifies, one of CLIP, and broken ones."""
    place = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    labels = dict(enumerate("abcd"))
    config = transformers.ViTConfig(**TINY, id2label=labels, num_labels=4)
    transformers.ViTForImageClassification(config).save_pretrained(place / "vit")
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32},
        image_mean=[0.1, 0.2, 0.3],
        image_std=[0.4, 0.5, 0.6],
    )
    processor.save_pretrained(place / "vit")
    text = {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "vocab_size": 50,
    }
    both = transformers.CLIPConfig(
        vision_config=TINY, text_config=text, projection_dim=12
    )
    transformers.CLIPModel(both).save_pretrained(place / "clip")
    for name, content in (
        (
            "remote",
            {
                "model_type": "new",
                "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"},
            },
        ),
        ("unknown", {"model_type": "surely_unknown"}),
        ("no-json", None),
    ):
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(content) if content else "{")
    (place / "remote" / "code.py").write_text("raise SystemExit('this code ran')\n")
    (place / "empty").mkdir()
    for name in ("cut", "mismatched"):
        shutil.copytree(place / "vit", place / name)
    weights = place / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:300])
    config = place / "mismatched" / "config.json"
    config.write_text(
        config.read_text().replace('"hidden_size": 24', '"hidden_size": 30')
    )
    return place


def test_the_name_of_a_folder_with_dots(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dot in it begins no tag, and neither do those of `..`; its parents do not count."""
    monkeypatch.chdir(tmp_path)
    for name in ("run.v2", "other.v2"):
        shutil.copytree(folder / "vit", tmp_path / name)
    shown = {}
    for name in (
        "run.v2",
        "other.v2/",
        f"../{tmp_path.name}/run.v2",
        str(folder / "vit"),
    ):
        model = load_model(f"transformers:{name}")
        shown[name] = weights_name({"weights": model.weights})
    assert [*shown.values()] == ["run.v2", "other.v2", "run.v2", "vit"]
    monkeypatch.chdir(tmp_path / "run.v2")
    assert label_of("transformers:.") == label_of("transformers:../run.v2/") == "run.v2"


def test_a_checkpoint_of_a_folder(folder: Path, tmp_path: Path) -> None:
    model = load_model(f"transformers:{folder}/vit")
    assert model.architecture == "transformers:ViTForImageClassification"
    assert model.class_names == ["a", "b", "c", "d"] and model.input_size == (3, 32, 32)
    assert (
        model.transform["mean"] == (0.1, 0.2, 0.3)
        and model.transform["crop_mode"] == "squash"
    )
    assert model.origin["processor"]["image_std"] == [0.4, 0.5, 0.6]
    plain = transformers.ViTForImageClassification.from_pretrained(folder / "vit").eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(model.module(x), plain(x).logits)
    assert {"norm", "pooled", "logits"} <= {site.name for site in site_table(model).sites}
    sized = load_model(f"transformers:{folder}/vit", img_size=48)
    assert site_table(sized)["blocks.0.out"].layout.grid == (6, 6)  # type: ignore[union-attr]
    torch.save(plain.state_dict(), tmp_path / "w.pth")
    loaded = load_model(f"transformers:{folder}/vit", checkpoint=tmp_path / "w.pth")
    random = load_model(f"transformers:{folder}/vit", random_init=1)
    assert loaded.weights["sha256"] == model.weights["sha256"] != random.weights["sha256"]


def test_the_tower_of_a_larger_model(folder: Path) -> None:
    whole = transformers.CLIPModel.from_pretrained(folder / "clip").eval()
    model = load_model(f"transformers:{folder}/clip")
    assert model.architecture == "transformers:CLIPVisionModel"
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = whole.vision_model(x).last_hidden_state
        assert torch.equal(model.module(x), wanted)
        part = load_model(f"transformers:{folder}/clip#vision_model")
        assert torch.equal(part.module(x), wanted)
    with pytest.raises(ModelError, match="no tower 'tower'; CLIPModel has #vision_model"):
        load_model(f"transformers:{folder}/clip#tower")


@pytest.mark.slow
def test_a_store_and_a_study_of_two_sources(folder: Path, tmp_path: Path) -> None:
    """Extraction, resume, both names of a site, and one report of two libraries."""
    name, out = f"transformers:{folder}/vit", tmp_path / "s.zarr"
    words = [name, "--data", "demo:test", "--images", "6", "--sites", "blocks,residual"]
    extracted(*words, "-o", out)
    store = open_store(out)
    assert store.plan.attention and len(store.plan.sublayers) == 4
    assert store.manifest.model["origin"]["library"] == "transformers"
    paths = {site.name: site.site_path for site in store.plan.sites}
    assert paths["blocks.1.out"] and paths["blocks.1.out"].endswith(
        ("layers.1", "layer.1")
    )
    assert "complete" in extracted(*words, "-o", out).output
    extracted(*words, "-o", tmp_path / "n.zarr", "--dry-run")
    assert not (tmp_path / "n.zarr").exists()
    for command in ("attn-dist", "normratio"):
        vitsee(command, out, "-o", tmp_path / f"{command}.csv")
        assert (tmp_path / f"{command}.csv").exists()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no name": ("transformers:", {}, "names no model"),
    "no weights": (
        "transformers:ViTModel",
        {},
        "is a class without weights; give --random-init",
    ),
    "no model": (
        "transformers:ViTConfig",
        {"random_init": 0},
        "ViTConfig of transformers is no",
    ),
    "text": (
        "transformers:BertModel",
        {"random_init": 0},
        "takes input_ids; expected a model of",
    ),
    "argument": (
        "transformers:ViTModel",
        {"random_init": 0, "model_args": {"depth": 3}},
        "does not take these arguments: ViTConfig has no 'depth'",
    ),
    "bad argument": (
        "transformers:ViTModel",
        {"random_init": 0, "model_args": {"hidden_act": "nobody"}},
        "transformers:ViTModel with hidden_act=nobody cannot be made",
    ),
    "argument that divides by zero": (
        "transformers:{}/vit",
        {"model_args": {"num_attention_heads": 0}},
        "/vit with num_attention_heads=0 cannot be loaded: ZeroDivisionError",
    ),
    "size of images as an argument of trained weights": (
        "transformers:{}/vit",
        {"model_args": {"image_size": 96}},
        "leave out image_size=96 (images of another size are --img-size SIZE), or give "
        "--random-init SEED",
    ),
    "argument that trained weights do not fit": (
        "transformers:{}/vit",
        {"model_args": {"hidden_size": 48}},
        "weights are for the model's own configuration: leave out hidden_size=48, or give",
    ),
    "argument of another type": (
        "transformers:ViTModel",
        {"random_init": 0, "model_args": {"hidden_size": "abc"}},
        "hidden_size=abc is not a value of ViTConfig; expected one as 768, its own",
    ),
    "negative argument": (
        "transformers:ViTModel",
        {"random_init": 0, "model_args": {"num_hidden_layers": -1}},
        "num_hidden_layers=-1 is not a value of ViTConfig; expected a number as 12, its own",
    ),
    "folder": ("transformers:{}/nowhere", {}, "no folder"),
    "no config": ("transformers:{}/empty", {}, "has no config.json"),
    "no json": ("transformers:{}/no-json", {}, "cannot be loaded"),
    "unknown type": ("transformers:{}/unknown", {}, "cannot be loaded"),
    "remote code": (
        "transformers:{}/remote",
        {},
        "needs code of its repository, which runs with --trust-remote-code alone",
    ),
    "cut weights": ("transformers:{}/cut", {}, "cannot be loaded: SafetensorError"),
    "other weights": (
        "transformers:{}/mismatched",
        {},
        "does not fit this model: of another size",
    ),
    "revision of a folder": (
        "transformers:{}/vit@main",
        {},
        "names the revision 'main' of a fol",
    ),
    "revision of a class": (
        "transformers:ViTModel@main",
        {"random_init": 0},
        "names the revision 'main' of a class; expected it of OWNER/NAME alone",
    ),
    "near a class": (
        "transformers:VitModel",
        {"random_init": 0},
        "(near names of classes: ",
    ),
    "weights that are not there": (
        "transformers:{}/config-alone",
        {},
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(folder: Path, case: str) -> None:
    (folder / "config-alone").mkdir(exist_ok=True)
    transformers.ViTConfig(**TINY).save_pretrained(folder / "config-alone")
    name, options, phrase = REFUSED[case]
    assert phrase in refusal(name.format(folder), **options)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("transformers:ViTModel", "transformers", "transformers"),
     ("open_clip:ViT-B-32", "open_clip", "open-clip")],
)  # fmt: skip
def test_a_library_that_is_not_there(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"\(pip install 'vitsee\[{extra}\]'\)"):
        load_model(name, random_init=0)


def test_names_of_classes() -> None:
    found = source_of("transformers:ViT*Model").matching()
    assert "transformers:ViTModel" in found
    with pytest.raises(ModelError, match="no class of transformers for images matches"):
        source_of("transformers:Nothing*").matching()


@pytest.mark.slow
def test_names_of_towers() -> None:
    """A class of images and text stands for its towers, whatever the case of the letters."""
    found = source_of("transformers:*qwen2vl*").matching()
    assert found == {"transformers:Qwen2VLModel#visual": []}
    found = source_of("transformers:LlavaM*").matching()
    assert found == {"transformers:LlavaModel#vision_tower": []}
    table = catalogue.run("transformers:*2*vlmodel*")
    left_out = dict(table.frame.select("model", "left_out").iter_rows())
    assert "for values to show" in left_out["transformers:Qwen2_5_VLModel#visual"]


def test_open_clip() -> None:
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    args = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    model = load_model("open_clip:ViT-B-32", random_init=0, model_args=args)
    table = site_table(model)
    assert model.input_size == (3, 32, 32) and model.transform["mean"][0] == 0.48145466
    assert len(table.attention) == 2 and len(table.sublayers) == 4
    assert model.origin == {"library": "open_clip", "version": open_clip.__version__}
    for name, phrase in (
        (
            "open_clip:ViT-B-23",
            "no model of open_clip is called 'ViT-B-23'; near names: ViT-B-32",
        ),
        ("open_clip:ViT-B-32/nobody", "has no weights 'nobody'; it has: openai"),
        ("open_clip:ViT-B-32", "names no weights: give open_clip:ViT-B-32/TAG (openai"),
    ):
        with pytest.raises(ModelError) as error:
            load_model(name)
        assert phrase in str(error.value)


def test_images_as_patches(script: ModuleType) -> None:
    """SigLIP 2 NaFlex: what transformers itself gives for patches that its own processor cuts."""
    args = {
        "num_patches": 16,
        "patch_size": 8,
        "hidden_size": 24,
        "num_attention_heads": 3,
    }
    args |= {"num_hidden_layers": 2, "intermediate_size": 48}
    name = "transformers:Siglip2VisionModel"
    model = load_model(name, random_init=0, model_args=args)
    assert model.input_size == (3, 32, 32)
    plain = transformers.Siglip2VisionModel(model.module.config).eval()
    plain.load_state_dict(model.module.state_dict())
    for size in ((32, 32), (24, 40)):
        x = torch.randn(2, 3, *size)
        patches, more = script.naflex(x, 8)
        with torch.inference_mode():
            given = plain(patches, **more).last_hidden_state
            assert torch.equal(model.module(x), given)
    wide = load_model(name, random_init=0, model_args=args, img_size=(24, 40))
    table = site_table(wide)
    layout = table["blocks.1.out"].layout
    assert layout is not None and (layout.prefix, layout.grid) == ((), (3, 5))
    assert layout.stride_px == (8.0, 8.0) and len(table.attention) == 2
    odd = load_model(name, random_init=0, model_args=args, img_size=36)
    with pytest.raises(
        ModelError, match=r"36 x 36 pixels: patches of 8 x 8 pixels do not divide"
    ):
        site_table(odd)


def test_what_needs_more_than_images_is_refused() -> None:
    class Pairs(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, boxes: torch.Tensor) -> None:
            """Never called."""

    with pytest.raises(
        ModelError, match="tower takes hidden_states with boxes; expected a model"
    ):
        refuse_others(Pairs(), "tower")


def test_a_grid_by_the_patch_size_that_is_stated() -> None:
    """RADIO cuts patches without a map, and has more tokens before them than the fewest that would
    leave a square."""
    args = {**TINY, "image_size": 64, "patch_size": 16}
    config = transformers.RadioConfig()
    given = {key: value for key, value in args.items() if hasattr(config, key)}
    model = load_model(
        "transformers:RadioModel", random_init=0, model_args=given, img_size=64
    )
    layout = site_table(model)["blocks.0.out"].layout
    assert layout is not None and layout.grid == (4, 4) and len(layout.prefix) > 1
