"""`import vitsee`: what it offers, what it costs, and extraction of a caller's own module."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

import vitsee
import vitsee_core.analyses
from tests.extractions import VIT, array_bytes, extracted, plant_images
from vitsee_cli.main import main
from vitsee_core.extraction.options import OptionError
from vitsee_core.images.errors import DataError
from vitsee_core.images.torch_transforms import transform_config
from vitsee_core.images.transform import make_recipe, normalise
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import model_of
from vitsee_stores.errors import IdentityMismatch, MissingInput

ANALYSES = {m.name for m in pkgutil.iter_modules(vitsee_core.analyses.__path__)}
SIZE: dict[str, Any] = {
    "random_init": 0,
    "img_size": (32, 48),
    "model_args": {"patch_size": 8},
}

# ---------------------------------------------------------------- names


def test_every_analysis_is_there_under_its_name() -> None:
    assert {"cka", "attn_dist", "best_layer"} <= ANALYSES
    assert set(dir(vitsee)) == ANALYSES | {
        *("Monitor", "NotebookProgress", "Segmentation", "Store", "Table", "VitseeError"),
        *("explore", "extract", "open_store"),
    }
    for name in ANALYSES:
        module = importlib.import_module(f"vitsee_core.analyses.{name}")
        assert getattr(vitsee, name) is module.run
    with pytest.raises(AttributeError, match="'vitsee' has no attribute 'atn_dist'"):
        _ = vitsee.atn_dist


def test_importing_it_imports_nothing() -> None:
    code = "import sys, vitsee; dir(vitsee); print([m for m in {} if m in sys.modules])"
    heavy = [
        "torch",
        "timm",
        "zarr",
        "matplotlib",
        "scipy",
        "sklearn",
        "click",
        "rich",
        "numpy",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code.format(heavy)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- results


@pytest.mark.slow
def test_a_table_that_was_made_in_python_has_a_sidecar(tmp_path: Path) -> None:
    """plot and report take it as a command's; there is no command line to run again."""
    data, place = plant_images(tmp_path / "data", 6), tmp_path / "a.zarr"
    extracted(*VIT, "--data", data, "-o", place)
    table = vitsee.attn_dist(place, sites="blocks.-1", images=4)
    table.write(tmp_path / "dist.csv")
    found = json.loads((tmp_path / "dist.csv.json").read_text())
    assert found["command"] == ["vitsee", "attn-dist"] and found["notes"] == table.notes
    assert found["python"] == f"vitsee.attn_dist({str(place)!r}, ...)"
    given = found["parameters"]
    assert given["sites"] == ["blocks.-1"] and given["images"] == 4 and given["seed"] == 0
    (store,) = found["stores"]
    assert store["store_id"] == vitsee.open_store(place).manifest.store_id
    with pytest.raises(vitsee.VitseeError, match="exists; give another name"):
        table.write(tmp_path / "dist.csv")
    run = CliRunner()
    words = [str(tmp_path / "dist.csv"), "-o", str(tmp_path / "dist.png")]
    assert run.invoke(main, ["plot", *words]).exit_code == 0
    assert run.invoke(main, ["report", str(tmp_path)]).exit_code == 0
    assert "vitsee.attn_dist(" in (tmp_path / "report.html").read_text()
    again = run.invoke(main, ["rerun", f"{words[0]}.json", "--force"])
    assert again.exit_code == 1 and again.stdout == "" and again.stderr.count("\n") == 1
    assert "was made in Python, by vitsee.attn_dist(" in again.stderr
    part = table.with_frame(table.frame.head(1))
    part.write(tmp_path / "part.csv")
    assert vitsee.Table.read(tmp_path / "part.csv").notes == table.notes
    assert "command" not in json.loads((tmp_path / "part.csv.json").read_text())


# ---------------------------------------------------------------- extract


@pytest.mark.slow
def test_extract_by_name_is_the_commands(tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", 6)
    extracted(
        *VIT, "--data", data, "-o", tmp_path / "a.zarr", "--slab", 4, "--sites", "blocks"
    )
    store = vitsee.extract(
        "test_vit", data, str(tmp_path / "b.zarr"), **SIZE, slab=4, sites="blocks"
    )
    assert isinstance(store, vitsee.Store)
    assert array_bytes(tmp_path / "a.zarr") == array_bytes(store.path)
    identity = [
        vitsee.open_store(tmp_path / s).manifest.identity for s in ("a.zarr", "b.zarr")
    ]
    assert identity[0] == identity[1]


@pytest.mark.slow
def test_timms_own_module_is_the_model_of_its_name(tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", 6)
    named = vitsee.extract("test_vit", data, tmp_path / "a.zarr", **SIZE, slab=4)
    module = load_model("test_vit", **SIZE).module.train().requires_grad_(True)
    own = vitsee.extract(module, data, tmp_path / "b.zarr", slab=4)
    assert array_bytes(named.path) == array_bytes(own.path)
    assert own.manifest.model["name"] == "test_vit"
    assert own.manifest.transform == named.manifest.transform
    assert all(m.training for m in module.modules()), "the caller's module is not touched"
    assert all(p.requires_grad for p in module.parameters())


class Small(nn.Module):
    """A module that timm does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(2)
        )
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to three logits."""
        x = self.drop(self.conv(x).relu())
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.fc(x.mean((2, 3)))
        return out


OWN = v1.Compose(
    [
        v1.Resize(40),
        v1.CenterCrop(32),
        v1.ToTensor(),
        v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 1)),
    ]
)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    """Its activations are those of a plain forward pass on what the caller's transform gives."""
    data, module = plant_images(tmp_path / "data", 6), small()
    store = vitsee.extract(
        *(module, data, tmp_path / "own.zarr"),
        **{
            "transform": OWN,
            "name": "mine",
            "sites": ["blocks", "conv"],
            "dtype": "float32",
        },
    )
    assert {"conv", "blocks.0.out", "blocks.1.out"} <= set(store.sites)
    seen: dict[str, torch.Tensor] = {}
    module.eval()
    for name in ("conv", "blocks.1"):
        module.get_submodule(name).register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out.clone()})
        )
    for row, path in enumerate(store.samples.id):
        with torch.no_grad():
            module(OWN(Image.open(data / path).convert("RGB"))[None])
        for site, name in (("conv", "conv"), ("blocks.1.out", "blocks.1")):
            expected = seen[name][0].permute(1, 2, 0).numpy()
            np.testing.assert_allclose(
                store.acts(site)[row].reshape(expected.shape),
                expected,
                rtol=1e-5,
                atol=1e-6,
            )
    table = vitsee.cka(store, sites="blocks", no_cache=True)
    assert set(table["model_a"]) == {"mine"}
    np.testing.assert_allclose(
        table["value"][table["site_a"] == table["site_b"]], 1, atol=1e-6
    )


def test_the_module_decides_which_store_it_is(tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", 6)
    keep: dict[str, Any] = {"transform": OWN, "slab": 2}
    half = vitsee.extract(small(), data, tmp_path / "s.zarr", **keep, shard="0/2")
    assert half.committed.tolist() == [True, False, True]
    whole = vitsee.extract(small(), data, tmp_path / "s.zarr", **keep)
    assert whole.committed.all()
    with pytest.raises(IdentityMismatch, match="weights"):
        vitsee.extract(small(1), data, tmp_path / "s.zarr", **keep)
    with pytest.raises(MissingInput, match="made in Python from a torch module"):
        model_of(whole, trust=True)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"image": 3}, "no option 'image' of extract; did you mean images"),
        ({"xyzzy": 3}, "options: checkpoint, "),
        (
            {"attention": "some"},
            "attention is 'some'; expected none, summary, rows, full",
        ),
        ({"images": 0}, "images is 0; expected a whole number above 0"),
        ({"slab": True}, "slab is True; expected a whole number above 0"),
        ({"sites": [3]}, r"sites is \(3,\); expected texts"),
        ({"name": "mine"}, "belong to a torch module"),
        ({"shard": "3/2"}, "shards count from 0"),
    ],
)
def test_options_that_do_not_exist(
    tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionError, match=line):
        vitsee.extract("demo:vit", "demo:test", tmp_path / "s.zarr", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_module_says_how_images_are_prepared(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Small is not a timm model: give its transform"):
        vitsee.extract(small(), "demo:test", tmp_path / "s.zarr")
    with pytest.raises(OptionError, match="checkpoint belongs to a model's name"):
        vitsee.extract(
            small(), "demo:test", tmp_path / "s.zarr", transform=OWN, checkpoint="x.pth"
        )
    assert list(tmp_path.iterdir()) == []


class Held(nn.Module):
    """Keeps a tensor that autograd computed, which torch does not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen = self.scale * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images as they are."""
        return x * self.seen


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (nn.Sequential(nn.AvgPool2d(4)), "Sequential has no parameters"),
        (Held(), "Held cannot be copied: Only Tensors created explicitly"),
        (nn.Sequential(nn.Linear(7, 3)), "does not run on images of 32 x 32 pixels"),
    ],
)
def test_modules_that_are_refused(tmp_path: Path, module: nn.Module, line: str) -> None:
    with pytest.raises(ModelError, match=line):
        vitsee.extract(module, "demo:test", tmp_path / "s.zarr", transform=OWN, images=4)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- transforms

TO_FLOAT = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
SQUASH = v1.Compose([v1.Resize((30, 44), v1.InterpolationMode.BICUBIC), v1.ToTensor()])
ODD = v1.Compose(
    [v1.Resize(235), v1.CenterCrop(224), v1.ToTensor()]
)  # 224 / (224 / 235) < 235
LATE = v2.Compose([v2.ToImage(), v2.Resize(40), v2.CenterCrop(32), TO_FLOAT])
TWICE = v1.Compose([v1.CenterCrop(32), v1.Resize(40), v1.ToTensor()])
GREY = v1.Compose([v1.Grayscale(), v1.Resize(32), v1.CenterCrop(28), v1.ToTensor()])


@pytest.mark.parametrize(
    ("transform", "size"),
    [
        (OWN, (3, 32, 32)),
        (SQUASH, (3, 30, 44)),
        (ODD, (3, 224, 224)),
        (GREY, (1, 28, 28)),
        (v2.Compose([v2.Resize(40), v2.CenterCrop(32), TO_FLOAT]), (3, 32, 32)),
    ],
)
def test_a_transform_is_read_from_its_steps(
    transform: Any, size: tuple[int, int, int]
) -> None:
    """The input of a picture, by the transform and by the configuration that a store keeps."""
    config = transform_config(transform)
    assert config["input_size"] == size
    image = Image.fromarray(
        np.random.default_rng(5).integers(0, 256, (61, 83, 3), np.uint8)
    )
    pixels = torch.from_numpy(make_recipe(config).apply(image).copy())[None]
    expected = transform(image)
    torch.testing.assert_close(
        normalise(pixels, config, "cpu")[0], expected, rtol=0, atol=1e-6
    )


def test_torchvisions_preset_is_read() -> None:
    from torchvision.transforms._presets import ImageClassification

    config = transform_config(ImageClassification(crop_size=224, resize_size=232))
    assert (config["input_size"], config["interpolation"]) == ((3, 224, 224), "bilinear")
    assert np.floor(224 / config["crop_pct"]) == 232
    assert config["mean"] == (0.485, 0.456, 0.406)


def test_a_mapping_is_completed() -> None:
    config = transform_config({"input_size": [3, 32, 40], "mean": [0.5], "other": 1})
    how = {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
    assert config == {"input_size": (3, 32, 40), "mean": (0.5,), "std": (1.0,)} | how


@pytest.mark.parametrize(
    ("transform", "line"),
    [
        (v1.Compose([v1.ColorJitter(0.5), OWN]), "ColorJitter cannot be kept in a store"),
        (lambda image: image, "function cannot be kept"),
        (v1.Compose([v1.Resize(40), v1.ToTensor()]), "not bring every image to one size"),
        (
            v1.Compose([v1.CenterCrop(40), v1.ToTensor()]),
            "not bring every image to one size",
        ),
        (LATE, "resize before the conversion to a tensor"),
        (TWICE, r"gives \(3, 40, 40\); expected \(3, 32, 32\)"),
        ({"mean": (0.5,)}, "needs input_size"),
        ({"input_size": (3, 32, 32), "std": (0.0,)}, "std above 0"),
        ({"input_size": (3, 32, 32), "interpolation": "sharp"}, "timm cannot build"),
        ({"input_size": (4, 32, 32)}, "expected 1 .grey. or 3"),
    ],
)
def test_a_transform_that_no_store_can_keep(transform: Any, line: str) -> None:
    with pytest.raises(DataError, match=line):
        transform_config(transform)


def test_the_signature_says_what_comes_first() -> None:
    names = list(inspect.signature(vitsee.extract).parameters)
    assert names[:3] == ["model", "data", "output"]


@pytest.mark.parametrize(
    ("analysis", "keyword", "expected"),
    [
        ("attn_dist", "site", "attn_dist() has no keyword 'site'; did you mean sites?"),
        ("cka", "image", "cka() has no keyword 'image'; did you mean images?"),
        ("knn", "zz", "knn() has no keyword 'zz'; it takes train, tests, "),
    ],
)
def test_a_wrong_keyword_names_the_function_and_the_nearest(
    analysis: str, keyword: str, expected: str
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(vitsee, analysis)("nowhere.zarr", **{keyword: 1})
    assert str(caught.value).startswith(expected)
