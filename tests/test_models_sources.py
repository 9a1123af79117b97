"""Models of sources other than timm: what a name stands for, and what is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.every_command import vitsee
from tests.extractions import extract, extracted
from tests.models_helpers import refusal
from vitsee_cli.main import main
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.sources import runs_code, source_of
from vitsee_core.models.without_weights import list_sites
from vitsee_stores import open_store

MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.BatchNorm2d(width)),
            nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)),
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))

def build(width=8, img_size=32):
    transform = {"input_size": (3, img_size, img_size), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    return Small(width, img_size), transform, ["a", "b", "c"]

def bare(width=8):
    return Small(width, 32)

def fixed(width=8):
    torch.manual_seed(7)
    return Small(width, 32)

class Scaled(Small):
    def forward(self, x):
        return super().forward(x / float(x.abs().max()))  # a number, which no shape has

def by_values():
    torch.manual_seed(7)
    return Scaled(8, 32)

def loads(pretrained=True):
    if pretrained:
        torch.manual_seed(7)
    return Small(4, 32)

def in_part(how):
    module = Small(4, 32)
    if how != "all random":
        torch.manual_seed(7)
        state = Small(4, 32).state_dict()
    if how == "a part":
        prefix = "blocks.0."
        module.blocks[0].load_state_dict({
            key.removeprefix(prefix): x
            for key, x in state.items() if key.startswith(prefix)
        })
    if how == "by strict loading":
        module.load_state_dict(state)
    if how == "by values":
        for key, parameter in module.named_parameters():
            parameter.data = state[key]
    return module

def nothing():
    pass

def text():
    return "model"

def fails():
    raise KeyError("weights.pth")

def needs(width):
    return Small(width, 32)

def odd_transform():
    return Small(4, 32), lambda image: image

def odd_names():
    return Small(4, 32), None, "abc"

def empty():
    return nn.Identity()

def four():
    return Small(4, 32), None, None, 4

def on_meta():
    with torch.device("meta"):
        return Small(4, 32)

class Two(Small):
    def forward(self, x, y):
        return x

def two():
    return Two(4, 32)

class Lacks(Small):
    def forward(self, x):
        return self.nothing(x)

def lacks():
    return Lacks(4, 32)

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3 * 32 * 32, 5))

    def forward(self, x):
        return x.flatten(1) @ self.weight

def plain():
    return Plain(), {"input_size": (3, 32, 32)}

value = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file, broken ones, and a clone with a hubconf.py."""
    place = tmp_path_factory.mktemp("models")
    (place / "mine.py").write_text(MODEL)
    (place / "broken.py").write_text("import torch\ndef build(:\n")
    (place / "raises.py").write_text("raise RuntimeError('no\\n licence')\n")
    (place / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (place / "lacks.py").write_text("import surely_not_installed\n")
    (place / "broken.safetensors").write_bytes(b"\x80\0\0\0\0\0\0\0{")
    clone = place / "clone"
    clone.mkdir()
    (clone / "small.py").write_text(MODEL)
    (clone / "hubconf.py").write_text(
        "dependencies = ['torch']\nfrom small import bare as tiny, loads as own\n"
        "def late():\n    import small\n    return small.bare(4)\n"
    )
    needy = place / "needy"
    needy.mkdir()
    (needy / "hubconf.py").write_text(
        "dependencies = ['torch', 'surely_not_installed']\n"
    )
    return place


def test_a_file_gives_module_transform_and_names(folder: Path) -> None:
    model = load_model(f"{folder}/mine.py:build", random_init=3, model_args={"width": 6})
    assert model.input_size == (3, 32, 32) and model.class_names == ["a", "b", "c"]
    assert (
        model.transform["mean"] == (0.5, 0.5, 0.5)
        and model.transform["std"] == (0.25,) * 3
    )
    assert model.architecture == "mine.py:build (Small)" and model.model_args == {
        "width": 6
    }
    assert len(model.origin["sha256"]) == 64 and "notes" not in model.origin
    assert not model.module.training
    again = load_model(f"{folder}/mine.py:build", random_init=3, model_args={"width": 6})
    other = load_model(f"{folder}/mine.py:build", random_init=4, model_args={"width": 6})
    assert model.weights["sha256"] == again.weights["sha256"] != other.weights["sha256"]
    sized = load_model(f"{folder}/mine.py:build", random_init=3, img_size=48)
    assert (
        sized.input_size == (3, 48, 48)
        and sized.module(torch.zeros(1, 3, 48, 48)).shape[1] == 3
    )


def test_what_a_file_does_not_say_is_assumed_and_said(folder: Path) -> None:
    model = load_model(f"{folder}/mine.py:bare", random_init=0)
    assert model.input_size == (3, 224, 224)
    assert model.transform["mean"] == (0.485, 0.456, 0.406)
    (note,) = model.notes()
    assert "says no transform: assumed are 224 x 224" in note
    given = load_model(
        f"{folder}/mine.py:bare",
        random_init=0,
        img_size=32,
        img_mean=(0.5,),
        img_std=(0.5,),
    )
    assert given.transform["mean"] == (0.5,) and given.input_size == (3, 32, 32)


def test_own_weights_random_ones_and_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    name = f"{folder}/mine.py:loads"
    own, random = load_model(name), load_model(name, random_init=5)
    assert own.weights["source"] == "file" and random.weights["source"] == "random"
    assert own.weights["sha256"] != random.weights["sha256"]
    # The switch as an argument changes nothing where it says the same.
    assert (
        load_model(name, model_args={"pretrained": True}).weights["sha256"]
        == own.weights["sha256"]
    )
    assert (
        load_model(name, random_init=5, model_args={"pretrained": False}).weights
        == random.weights
    )
    torch.save({"state_dict": own.module.state_dict()}, tmp_path / "w.pth")
    loaded = load_model(name, checkpoint=tmp_path / "w.pth")
    assert (
        loaded.weights["source"] == "checkpoint" and loaded.weights["key"] == "state_dict"
    )
    assert loaded.weights["sha256"] == own.weights["sha256"]
    # A function that sets the seed itself has no random weights, and needs none for a file's.
    name = f"{folder}/mine.py:fixed"
    fixed = load_model(name).module.state_dict()
    torch.save({key: x + 1 for key, x in fixed.items()}, tmp_path / "w.pth")
    loaded = load_model(name, checkpoint=tmp_path / "w.pth")
    assert all(
        torch.equal(x, fixed[key] + 1) for key, x in loaded.module.state_dict().items()
    )
    # Its sites are listed, also where shapes alone do not say them.
    assert [
        site.name for site in list_sites(f"{folder}/mine.py:by_values").table.sites
    ] == [site.name for site in list_sites(name).table.sites]


def test_a_file_without_weights_is_not_called_trained(folder: Path) -> None:
    name = f"{folder}/mine.py:in_part"
    refused = refusal(name, model_args={"how": "all random"})
    assert "mine.py:in_part leaves parameters random: " in refused
    assert "change with the seed (" in refused and "--random-init SEED" in refused
    # Two convolutions have weights and biases; those of the norms and the classifier do not count.
    assert ": 4 of 10 change" in refused
    a_part = refusal(name, model_args={"how": "a part"})
    assert ": 2 of 10 change with the seed (blocks.1.0.weight" in a_part
    whole = [
        load_model(name, model_args={"how": how}).weights["sha256"]
        for how in ["by strict loading", "by values"]
    ]
    assert whole[0] == whole[1]
    # Nothing is refused where weights do not matter.
    assert list_sites(name, model_args={"how": "all random"}).table.sites


@pytest.mark.parametrize("entry", ["tiny", "late"])
def test_a_local_clone_of_torch_hub(folder: Path, entry: str) -> None:
    model = load_model(f"torchhub:{folder}/clone:{entry}", img_size=32, random_init=1)
    assert model.architecture == f"torchhub:clone:{entry}"
    assert model.origin["kind"] == "torchhub" and f"{folder}/clone" not in sys.path


@pytest.mark.slow
def test_torchvision_by_name(tmp_path: Path) -> None:
    import torchvision

    model = load_model(
        "torchvision:resnet18", random_init=2, model_args={"num_classes": 4}
    )
    assert model.architecture == "torchvision:resnet18"
    assert model.origin == {"library": "torchvision", "version": torchvision.__version__}
    assert model.transform["crop_pct"] == pytest.approx(224 / 256)
    assert model.transform["interpolation"] == "bilinear"
    assert model.module(torch.zeros(1, 3, 64, 64)).shape == (1, 4)
    torch.save(model.module.state_dict(), tmp_path / "r.pth")
    loaded = load_model(
        "torchvision:resnet18",
        checkpoint=tmp_path / "r.pth",
        model_args={"num_classes": 4},
    )
    assert loaded.weights["sha256"] == model.weights["sha256"]
    vit = source_of("torchvision:vit_b_16").without_weights({"img_size": (64, 64)})
    assert vit.image_size == 64
    found = source_of("torchvision:vit_b_*").matching()
    assert list(found) == ["torchvision:vit_b_16", "torchvision:vit_b_32"]
    assert "IMAGENET1K_V1" in found["torchvision:vit_b_32"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no function": ("{}/mine.py", {}, "names no function; expected FILE.py:NAME"),
    "no name": ("{}/mine.py:", {}, "names no function"),
    "no file": ("{}/yours.py:build", {}, "no file "),
    "no such function": (
        "{}/mine.py:bild",
        {},
        "has no function 'bild'; its functions: build",
    ),
    "no callable": ("{}/mine.py:value", {}, "has no function 'value'"),
    "nothing": ("{}/mine.py:nothing", {}, "gives NoneType; expected a torch.nn.Module"),
    "text": ("{}/mine.py:text", {}, "gives str; expected a torch.nn.Module"),
    "raises": ("{}/mine.py:fails", {}, "cannot be made: KeyError: 'weights.pth'"),
    "missing argument": ("{}/mine.py:needs", {}, "does not take these arguments"),
    "alien argument": (
        "{}/mine.py:build",
        {"model_args": {"depth": 2}},
        "does not take these",
    ),
    "syntax": ("{}/broken.py:build", {}, "broken.py raises SyntaxError"),
    "file raises": (
        "{}/raises.py:build",
        {},
        "raises.py raises RuntimeError: no licence",
    ),
    "file exits": ("{}/exits.py:build", {}, "exits.py raises SystemExit: 3"),
    "missing import": ("{}/lacks.py:build", {}, "No module named 'surely_not_installed'"),
    "same weights": (
        "{}/mine.py:fixed",
        {"random_init": 1},
        "the same weights for every seed",
    ),
    "random and trained weights": (
        "{}/mine.py:loads",
        {"random_init": 1, "model_args": {"pretrained": True}},
        "and the argument pretrained=True exclude each other; expected one of them",
    ),
    "random and trained weights of a hub": (
        "torchhub:{}/clone:own",
        {"random_init": 1, "model_args": {"pretrained": "in1k"}},
        "and the argument pretrained='in1k' exclude each other; expected one of them",
    ),
    "no parameters": (
        "{}/mine.py:empty",
        {},
        "gives a module without parameters; expected a net",
    ),
    "four things": (
        "{}/mine.py:four",
        {},
        "gives 4 things; expected a module, or (module, trans",
    ),
    "no values": (
        "{}/mine.py:on_meta",
        {},
        "parameters on the meta device, which have no values",
    ),
    "a folder": ("{}:build", {}, "no timm model is called"),
    "broken weights": (
        "{}/mine.py:build",
        {"checkpoint": "{}/broken.safetensors"},
        "is no readable checkpoint",
    ),
    "a transform of code": (
        "{}/mine.py:odd_transform",
        {"random_init": 0},
        "cannot be kept in a store",
    ),
    "names": (
        "{}/mine.py:odd_names",
        {"random_init": 0},
        "gives class names 'abc'; expected a list",
    ),
    "mean": (
        "{}/mine.py:build",
        {"img_mean": (1.0, 2.0), "random_init": 0},
        "--img-mean has 2 numbers",
    ),
    "no checkpoint": (
        "{}/mine.py:build",
        {"checkpoint": Path("x.pth")},
        "no checkpoint at x.pth",
    ),
    "both": (
        "{}/mine.py:build",
        {"random_init": 0, "checkpoint": Path("x.pth")},
        "exclude each other",
    ),
    "hub without entry": ("torchhub:{}/clone", {}, "names no entry of a repository"),
    "hub entry": (
        "torchhub:{}/clone:huge",
        {},
        "has no entry 'huge'; it has: tiny, own, late",
    ),
    "hub folder": ("torchhub:{}/nowhere:tiny", {}, "names no entry of a repository"),
    "no hubconf": ("torchhub:{}:tiny", {}, "has no hubconf.py"),
    "hub dependency": (
        "torchhub:{}/needy:tiny",
        {},
        "(pip install surely_not_installed)",
    ),
    "torchvision": ("torchvision:vit_b_61", {}, "of torchvision is called 'vit_b_61'"),
    "a detector": ("torchvision:ssd300_vgg16", {}, "no classifier of torchvision"),
    "torchvision weights": (
        "torchvision:vit_b_16/V9",
        {},
        "has no weights 'V9'; it has: IMAGENET",
    ),
    "torchvision argument": (
        "torchvision:resnet18",
        {"random_init": 0, "model_args": {"depth": 3}},
        "does not take these arguments",
    ),
    "prefix": (
        "torchvison:vit_b_16",
        {},
        "no timm model is called 'torchvison:vit_b_16'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(folder: Path, case: str) -> None:
    name, options, phrase = REFUSED[case]
    if isinstance(options.get("checkpoint"), str):
        options = {"checkpoint": Path(options["checkpoint"].format(folder))}
    assert phrase in refusal(name.format(folder), **options)


UNEXTRACTED = {
    "two arguments": (
        "mine.py:two?random-init=0",
        "raises TypeError: Two.forward() missing 1 required",
    ),
    "its own fault": (
        "mine.py:lacks?random-init=0",
        "raises AttributeError: 'Lacks' object has no attribute",
    ),
    "no blocks": ("mine.py:plain", "no site matches 'blocks'; sites of this model: none"),
    "two values": ("mine.py:build?width=6&width=8", "width takes one value"),
    "no value": ("mine.py:build?width", "expected MODEL?OPTION=VALUE"),
    "timm's": ("test_vit?depth=3", "no option 'depth' of a model; expected checkpoint"),
}


@pytest.mark.parametrize("case", UNEXTRACTED)
def test_what_cannot_be_extracted_leaves_nothing(
    folder: Path, tmp_path: Path, case: str
) -> None:
    name, phrase = UNEXTRACTED[case]
    place, out = f"{folder}/{name}" if ".py" in name else name, tmp_path / "s.zarr"
    words = [place, "--data", "demo:test", "--images", "4", "-o", str(out)]
    done = extract(*words)
    assert done.exit_code in (1, 2) and phrase in done.stderr and not out.exists()
    assert isinstance(done.exception, SystemExit) and done.stdout == ""


def test_weights_that_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    with pytest.raises(
        ModelError, match="are not on this machine, and cannot be fetched"
    ):
        load_model("torchvision:resnet18")
    monkeypatch.setattr("torch.hub.list", refuse)
    with pytest.raises(
        ModelError, match="cannot be fetched from GitHub: no network; give a local"
    ):
        load_model("torchhub:someone/repository:entry")


def test_a_store_of_a_file_and_what_it_may_not_do(folder: Path, tmp_path: Path) -> None:
    """The store says which code made it; only the user's word runs that again."""
    from vitsee_core.models.provenance import model_of

    out, name = tmp_path / "m.zarr", f"{folder}/mine.py:build?width=6"
    words = [
        name,
        "--data",
        "demo:test",
        "--images",
        "6",
        "-o",
        out,
        "--random-init",
        "0",
    ]
    extracted(*words)
    store = open_store(out)
    assert store.manifest.model["args"] == {"width": 6}
    assert store.manifest.model["origin"]["kind"] == "file"
    assert store.manifest.model["name"] == f"{folder}/mine.py:build"
    assert "complete" in extracted(*words).output
    with pytest.raises(Exception, match="repeat the command with --trust-store"):
        model_of(store)
    assert (
        model_of(store, trust=True).weights["sha256"]
        == store.manifest.model["weights"]["sha256"]
    )


def test_no_sidecar_makes_code_run(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "w.csv"
    name = f"{folder}/mine.py:bare?random-init=0"
    words = ["weights", name, "--img-size", "32", "-o", str(table)]
    vitsee(*words)
    refused = CliRunner().invoke(main, ["rerun", str(table), "--force"])
    assert (
        refused.exit_code == 1
        and "is not run again; copy it from there" in refused.stderr
    )
    assert runs_code("a/b.py:build") and runs_code("torchhub:a/b:c")
    assert not any(
        map(runs_code, ("vit_tiny_patch16_224", "demo:vit", "torchvision:vit_b_16"))
    )


def test_sites_and_models_of_a_file(folder: Path) -> None:
    listed = vitsee("sites", f"{folder}/mine.py:build?width=6", "--json")
    names = [site["site"] for site in json.loads(listed)["sites"]]
    assert "blocks.0.out" in names
    rows = json.loads(vitsee("models", "torchvision:vit_b_*", "--names", "--json"))
    assert [row["model"] for row in rows] == [
        "torchvision:vit_b_16",
        "torchvision:vit_b_32",
    ]


def test_a_study_names_them(folder: Path) -> None:
    from vitsee_core.study.steps import label_of

    assert label_of("torchvision:vit_b_16/IMAGENET1K_V1") == "vit_b_16"
    assert label_of(f"{folder}/mine.py:build?width=6") == "mine"
    assert label_of(f"torchhub:{folder}/clone:tiny") == "tiny"


@pytest.mark.slow
def test_a_source_that_is_not_used_is_not_imported() -> None:
    code = (
        "import sys, vitsee_core.models.load; from vitsee_core.models.sources import source_of; "
        "source_of('vit_tiny_patch16_224').check(); "
        "found = [m for m in sys.modules if m.startswith('vitsee_core.models.sources.')]; "
        "print(*(m.rpartition('.')[2] for m in found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"tagged", "python_file", "transformers"} & set(done.stdout.split())


def test_names_are_completed_without_torch_and_timm() -> None:
    code = (
        "import sys; from vitsee_core.models.sources import known_names; names = known_names(); "
        "print('vit_tiny_patch16_224' in names and 'demo:vit' in names, "
        "{'torch', 'timm'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True set()"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "{}/mine.py:build?width=6&random-init=0",
        "torchhub:{}/clone:tiny?img-size=32&random-init=0",
        "torchvision:squeezenet1_1?img-size=32&random-init=0",
        "transformers:{}/hf",
        "transformers:ViTModel?num_hidden_layers=1&hidden_size=24&image_size=32&random-init=0",
        'open_clip:ViT-B-32?embed_dim=16&random-init=0&vision_cfg={"image_size": 32, "layers": 2, '
        '"width": 64, "patch_size": 8}&text_cfg={"width": 32, "heads": 2, "layers": 1}',
        "test_vit?random-init=0&img-size=32",
    ],
)
def test_shards_and_a_resumed_run_make_the_same_store(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """One process for everything; one for each half; one that goes on where a half ended."""
    if name.startswith(("transformers:", "open_clip:")):
        pytest.importorskip(name.partition(":")[0])
    if name.endswith("/hf"):
        transformers: Any = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
        config |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8}
        transformers.ViTModel(transformers.ViTConfig(**config)).save_pretrained(
            folder / "hf"
        )
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(
            folder / "hf"
        )
    common = [
        name.replace("{}", str(folder)),
        "--data",
        "demo:test",
        "--images",
        "8",
        "--slab=4",
    ]
    runs: dict[str, list[list[str]]] = {
        "whole": [[]],
        "halves": [["--shard", "0/2"], ["--shard", "1/2"]],
        "resumed": [["--shard", "1/2"], []],
    }
    stores = {}
    for label, several in runs.items():
        out = tmp_path / f"{label}.zarr"
        for number, words in enumerate(several):
            extracted(*common, "-o", out, *words)
            last = number == len(several) - 1
            assert open_store(out, allow_partial=True).committed.sum() == (
                2 if last else 1
            )
        stores[label] = open_store(out)
    whole = stores.pop("whole")
    names = [site.name for site in whole.plan.sites if site.alias_of is None]
    assert names
    for other in stores.values():
        for site in names:
            assert np.array_equal(
                whole.acts(site)[:], other.acts(site)[:], equal_nan=True
            ), site
