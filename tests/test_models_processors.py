"""Image processors of transformers: vitsee's pixels against what the processor itself gives, what
stores record of it, and code of repositories, which runs on a user's word alone."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image

from tests.every_command import vitsee
from tests.models_helpers import refusal
from vitsee_cli.main import main
from vitsee_core.features.compared import compared
from vitsee_core.images.placement import place
from vitsee_core.images.torch_transforms import largest_difference
from vitsee_core.images.transform import crop_corner, make_recipe, normalise
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import Pictures, model_of
from vitsee_core.models.sources.processor_record import processor_config
from vitsee_core.models.sources.processors import Processor
from vitsee_core.truth.masks.mask_truth import mask_recipe
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

transformers: Any = pytest.importorskip("transformers")
TINY = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 48, "image_size": 32, "patch_size": 8},
}
CLIP = {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}}
# The processor's class, its arguments, and how vitsee resizes by its torchvision backend.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "squash": ("ViTImageProcessor", {"size": {"height": 32, "width": 48}}, "torchvision"),
    "crop": ("CLIPImageProcessor", CLIP, "torchvision"),
    "squash and crop": (
        "DeiTImageProcessor",
        {"size": {"height": 41, "width": 41}, "crop_size": {"height": 32, "width": 32}},
        "torchvision",
    ),
    "a share": ("ConvNextImageProcessor", {"size": {"shortest_edge": 64}}, "torchvision"),
    "no share": (
        "ConvNextImageProcessor",
        {"size": {"shortest_edge": 384}},
        "torchvision",
    ),
    "a share with a crop": ("PoolFormerImageProcessor", {}, "torchvision"),
    "256 of 224": ("LevitImageProcessor", {}, "torchvision"),
    "unnormalised": ("ViTImageProcessor", {"do_normalize": False}, "torchvision"),
    "of floats": (
        "DINOv3ViTImageProcessor",
        {"size": {"height": 32, "width": 32}},
        "torchvision-float",
    ),
}


def photo(height: int, width: int) -> Image.Image:
    """Smooth colours with edges, which every filter treats in its own way."""
    y, x = np.mgrid[:height, :width]
    planes = [
        np.sin(x / 9 + k) + np.cos(y / 7 - k) + ((x // 13 + y // 11) % 2)
        for k in range(3)
    ]
    scaled = (np.stack(planes, -1) + 2) / 5 * 255
    return Image.fromarray(scaled.astype(np.uint8))


OLD = transformers.__version__.startswith("4.")
SUFFIXES = {"pil": "" if OLD else "Pil", "torchvision": "Fast" if OLD else ""}
# transformers 4 crops here alone at a corner that is rounded to even.
ANOTHER_CORNER = {("a share", "torchvision")} if OLD else set()
# The processors that this release has.
OFFERED = [
    (kind, backend)
    for kind, (name, *_) in KINDS.items()
    for backend in SUFFIXES
    if hasattr(transformers, name + SUFFIXES[backend])
    and (kind, backend) not in ANOTHER_CORNER
]


def made(kind: str, backend: str) -> Any:
    name, arguments, _ = KINDS[kind]
    return getattr(transformers, name + SUFFIXES[backend])(**arguments)


def test_every_kind_of_processor_is_tried() -> None:
    may_lack = {"a share", "of floats"} if OLD else set()
    assert {kind for kind, _ in OFFERED} >= {*KINDS} - may_lack


def given_to_the_model(image: Image.Image, config: dict[str, Any]) -> NDArray[np.float32]:
    pixels = torch.from_numpy(make_recipe(config).apply(image).copy())[None]
    return normalise(pixels, config, "cpu")[0].numpy()


@pytest.mark.parametrize(("kind", "backend"), OFFERED)
def test_pixels_are_those_of_the_processor(kind: str, backend: str) -> None:
    own = made(kind, backend)
    processor = Processor(own, "m")
    config = processor.config
    assert config["processor"] == (KINDS[kind][2] if backend == "torchvision" else "pil")
    assert processor.backend == backend
    assert "processor" in processor.origin() and processor.origin()["backend"] == backend
    json.dumps(processor.origin())
    for size in ((91, 120), (130, 67), (32, 32), (20, 29)):
        wanted = np.asarray(
            own(images=photo(*size), return_tensors="pt")["pixel_values"][0]
        )
        # Rounding a float to 8 bits changes it by half a level.
        level = (
            0.5 / 255 / min(config["std"])
            if config["processor"].endswith("float")
            else 0.0
        )
        np.testing.assert_allclose(
            given_to_the_model(photo(*size), config), wanted, rtol=0, atol=level + 2e-5
        )


def test_backends_and_timm_differ_where_they_should() -> None:
    """The corner of a crop by hand: 5 pixels too many are 2 on the left, and timm's 2; 3 are 1, and
    timm's 2 (half to even). Pillow's filters and torchvision's differ by a level here and there."""
    assert [crop_corner(37, 32, True), crop_corner(37, 32)] == [2, 2]
    assert [crop_corner(35, 32, True), crop_corner(35, 32)] == [1, 2]
    assert crop_corner(31, 32, True) == crop_corner(31, 32) == 0
    config = Processor(made("crop", "pil"), "m").config
    image = photo(91, 120)
    pixels = {
        name: make_recipe({**config, "processor": name}).apply(image).astype(int)
        for name in ("pil", "torchvision", "torchvision-float")
    }
    timm = make_recipe({key: x for key, x in config.items() if key != "processor"}).apply(
        image
    )
    assert np.abs(pixels["pil"] - pixels["torchvision-float"]).max() in (1, 2)
    assert np.abs(pixels["torchvision"] - pixels["torchvision-float"]).max() <= 2
    # 37 pixels of the short side, floor(37 * 120 / 91) = 48 of the long one: 16 too many, and 5.
    assert np.array_equal(pixels["pil"], timm)
    odd = {**config, "crop_pct": 32 / 35}
    low = make_recipe(odd).apply(image)
    del odd["processor"]
    assert not np.array_equal(low, make_recipe(odd).apply(image))


def test_points_and_masks_follow_the_corner() -> None:
    """An image of 35 x 35 pixels is cut to 32 behind its first row and column, not its second."""
    config = {"input_size": (3, 32, 32), "crop_pct": 32 / 35, "crop_mode": "center"}
    config |= {"interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert (place(config, (35, 35)).top, place(config, (35, 35)).left) == (-2, -2)
    for processor in ("pil", "torchvision"):
        found = place({**config, "processor": processor}, (35, 35))
        assert (found.top, found.left, found.bottom, found.right) == (-1, -1, 34, 34)
        mask = np.zeros((35, 35), np.uint8)
        mask[1, 1] = 1
        seen = mask_recipe({**config, "processor": processor}).apply(
            Image.fromarray(mask)
        )
        assert seen[0, 0, 0] == 1 and seen.sum() == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "phrase"),
    [
        (
            "MobileViTImageProcessor",
            {},
            "does more than resize, crop and normalise",
        ),  # BGR
        ("TextNetImageProcessor", {}, "the transform gives (3, 640, 7"),
        ("SamImageProcessor", {}, "which is no fixed size; give --transform timm"),
    ],
)
def test_processors_that_do_something_else(
    kind: str, arguments: dict[str, Any], phrase: str
) -> None:
    own = getattr(transformers, kind)(**arguments)
    with pytest.raises(ModelError) as error:
        _ = Processor(own, "m").config
    assert phrase in str(error.value) and "--transform timm" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_difference_that_is_no_number_is_one() -> None:
    config = Processor(made("squash", "pil"), "m").config
    found, _ = largest_difference(lambda _: torch.full((3, 32, 48), torch.nan), config)
    assert np.isnan(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: with a processor, with one whose size is not fixed, without, and with code."""
    place = tmp_path_factory.mktemp("processed")
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**TINY))
    for name in ("vit", "sam", "bare"):
        model.save_pretrained(place / name)
    transformers.CLIPImageProcessor(**CLIP).save_pretrained(place / "vit")
    transformers.SamImageProcessor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(
        place / "sam"
    )
    code = place / "code"
    code.mkdir()
    (code / "model_from_module.py").write_text(CODE)
    names = {
        "AutoConfig": "model_from_module.OwnConfig",
        "AutoModel": "model_from_module.OwnModel",
    }
    (code / "config.json").write_text(
        json.dumps({"model_type": "surely_own", "auto_map": names, "width": 12})
    )
    (place / "evil").mkdir()
    transformers.ViTConfig(**TINY).save_pretrained(place / "evil")
    with (place / "evil" / "pytorch_model.bin").open("wb") as file:
        pickle.dump(_Evil(str(place / "ran")), file)
    return place


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


CODE = """
from pathlib import Path
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "surely_own"
    def __init__(self, width=8, image_size=32, **given):
        super().__init__(**given)
        self.width, self.image_size = width, image_size

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    main_input_name = "pixel_values"
    def __init__(self, config):
        super().__init__(config)
        self.stem = nn.Conv2d(3, config.width, 4, 4)
        self.blocks = nn.ModuleList(nn.Conv2d(config.width, config.width, 1) for _ in range(3))
        self.post_init()
    def _init_weights(self, module):
        pass
    def forward(self, pixel_values):
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3))
"""


def test_the_default_is_the_processor_and_options_choose_others(folder: Path) -> None:
    name = f"transformers:{folder}/vit"
    own = transformers.AutoImageProcessor.from_pretrained(folder / "vit")
    model = load_model(name)
    wanted = own(images=photo(91, 120), return_tensors="pt")["pixel_values"][0]
    found = given_to_the_model(photo(91, 120), model.transform)
    np.testing.assert_allclose(found, np.asarray(wanted), rtol=0, atol=2e-5)
    assert model.origin["backend"] == Processor(own, name).backend
    assert model.origin["processor"]["size"] == {"shortest_edge": 37}
    assert load_model(name, processor="pil").transform["processor"] == "pil"
    assert (
        load_model(name, processor="torchvision").transform["processor"] == "torchvision"
    )
    timm = load_model(name, transform="timm").transform
    assert "processor" not in timm and timm["mean"] == model.transform["mean"]
    sized = load_model(name, img_size=48)
    assert sized.input_size == (3, 48, 48) and sized.transform["processor"]


def test_a_size_that_is_not_fixed_is_the_models(folder: Path) -> None:
    with pytest.raises(ModelError, match="no fixed size; give --transform timm"):
        load_model(f"transformers:{folder}/sam")
    model = load_model(f"transformers:{folder}/sam", transform="timm")
    assert model.input_size == (3, 32, 32) and model.transform["mean"] == (0.1, 0.2, 0.3)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "both": (
        "transformers:{}/vit",
        {"transform": "timm", "processor": "pil"},
        "--transform timm and --processor exclude each other",
    ),
    "no backend": (
        "transformers:{}/vit",
        {"processor": "cv2"},
        "expected one of: pil, torch",
    ),
    "no transform": ("transformers:{}/vit", {"transform": "own"}, "'own'; expected timm"),
    "no processor": (
        "transformers:{}/bare",
        {"processor": "pil"},
        "has none; leave it out",
    ),
    "a class": (
        "transformers:ViTModel",
        {"processor": "pil", "random_init": 0},
        "transformers:ViTModel has none; leave it out",
    ),
    "timm": (
        "test_vit",
        {"processor": "pil"},
        "--processor is for models of transformers",
    ),
    "torchvision": (
        "torchvision:resnet18",
        {"trust_remote_code": True},
        "--trust-remote-code is for models of transformers, and torchvision:resnet18 is none",
    ),
    "code": ("transformers:{}/code", {}, "which runs with --trust-remote-code alone"),
    "pickled code": ("transformers:{}/evil", {}, "cannot be loaded: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line(folder: Path, case: str) -> None:
    name, options, phrase = REFUSED[case]
    assert phrase in refusal(name.format(folder), **options)
    assert not (folder / "ran").exists()


@pytest.mark.slow
def test_stores_of_two_processors_pair_with_a_remark(
    folder: Path, tmp_path: Path
) -> None:
    name, names = f"transformers:{folder}/vit", ("pil", "torchvision")
    common = ("--data", "demo:test", "--images", "12", "--sites", "blocks", "--inputs")
    stores = []
    for backend in names:
        vitsee(
            "extract",
            name,
            "--processor",
            backend,
            *common,
            "-o",
            tmp_path / f"{backend}.zarr",
        )
        stores.append(open_store(tmp_path / f"{backend}.zarr"))
    vitsee("extract", f"{name}?transform=timm", *common, "-o", tmp_path / "timm.zarr")
    timm = open_store(tmp_path / "timm.zarr")
    record = compared([*stores, timm], "all")
    assert record["differences"] == [
        "processor: pil (pil), torchvision (torchvision), timm (timm)"
    ]
    table = tmp_path / "c.csv"
    vitsee("cka", *(store.place for store in stores), "-o", table)
    sidecar = json.loads(Path(f"{table}.json").read_text())
    assert "processor: pil (pil), torchvision (torchvision)" in json.dumps(sidecar)
    other = [*common[:-1], "--processor", "torchvision", "-o", tmp_path / "pil.zarr"]
    refused = CliRunner().invoke(main, ["extract", name, *map(str, other)])
    assert (
        refused.exit_code == 1
        and "transform.processor is pil, given torch" in refused.stderr
    )
    # What was stored, read again from the data by the store's own transform.
    bare = tmp_path / "bare.zarr"
    vitsee("extract", name, *common[:-1], "--processor", "torchvision", "-o", bare)
    again = Pictures(open_store(bare))(np.arange(4))
    assert np.array_equal(again, stores[1].array("input")[:4])
    assert open_store(bare).manifest.model["origin"]["backend"] == "torchvision"


@pytest.mark.slow
def test_workers_resize_as_the_process_does(folder: Path, tmp_path: Path) -> None:
    common = (
        f"transformers:{folder}/vit",
        "--data",
        "demo:test",
        "--images",
        "8",
        "--inputs",
    )
    for workers in (0, 2):
        vitsee(
            "extract", *common, "--workers", workers, "-o", tmp_path / f"{workers}.zarr"
        )
    here, there = (open_store(tmp_path / f"{n}.zarr").array("input")[:] for n in (0, 2))
    assert np.array_equal(here, there)


def test_code_of_a_repository_runs_on_a_users_word_alone(
    folder: Path, tmp_path: Path
) -> None:
    name, out = f"transformers:{folder}/code", tmp_path / "own.zarr"
    words = [
        name,
        "--data",
        "demo:test",
        "--images",
        "6",
        "--random-init",
        "0",
        "-o",
        str(out),
    ]
    refused = CliRunner().invoke(main, ["extract", *words])
    assert refused.exit_code == 1 and not out.exists()
    assert "runs with --trust-remote-code alone (read it first)" in refused.stderr
    vitsee("extract", *words, "--trust-remote-code", "--sites", "stem,blocks.*")
    store = open_store(out)
    assert store.manifest.model["origin"]["trust_remote_code"] is True
    assert len([site for site in store.sites if site.startswith("blocks")]) >= 3
    with pytest.raises(VitseeError, match="repeat the command with --trust-store"):
        model_of(store)
    sha = store.manifest.model["weights"]["sha256"]
    assert model_of(store, trust=True).weights["sha256"] == sha
    table = tmp_path / "w.csv"
    vitsee("norms", out, "--sites", "blocks.*", "-o", table)
    sidecar = Path(f"{table}.json")
    record = json.loads(sidecar.read_text())
    record["command"].append("--trust-remote-code")
    sidecar.write_text(json.dumps(record))
    again = CliRunner().invoke(main, ["rerun", str(table), "--force"])
    assert again.exit_code == 1 and "is not run again; copy it from there" in again.stderr


@pytest.mark.slow
def test_no_manifest_makes_a_file_run(tmp_path: Path) -> None:
    own, ran, out = tmp_path / "own.py", tmp_path / "ran", tmp_path / "own.zarr"
    code = (Path(__file__).resolve().parents[1] / "examples" / "own_vit.py").read_text()
    own.write_text(f"{code}\n__import__('pathlib').Path({str(ran)!r}).touch()\n")
    words = ("--data", "demo:test", "--images", "2", "--random-init", "0", "-o", out)
    vitsee("extract", f"{own}:build?depth=1&width=16&img_size=32", *words)
    assert ran.exists()
    ran.unlink()
    again = ("attn-map", str(out), "--image", "0", "-o", str(tmp_path / "m.csv"))
    refused = CliRunner().invoke(main, again)
    assert (
        refused.exit_code == 1
        and "repeat the command with --trust-store" in refused.stderr
    )
    assert not ran.exists() and not (tmp_path / "m.csv").exists()
    vitsee(*again, "--trust-store")
    assert ran.exists()


def test_numbers_of_a_record() -> None:
    """Two that are common: a fixed size, and a shortest edge with a crop."""
    clip = {"do_resize": True, "size": {"shortest_edge": 256}, "do_center_crop": True}
    clip |= {"crop_size": {"height": 224, "width": 224}, "resample": 3}
    found = processor_config(
        {**clip, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}, "m"
    )
    assert found["input_size"] == (3, 224, 224) and found["crop_pct"] == 0.875
    assert found["crop_mode"] == "center" and found["interpolation"] == "bicubic"
    assert found["mean"] == (0.5,) * 3 and found["std"] == (0.25,) * 3
    vit = {"size": {"height": 32, "width": 48}, "resample": 2, "do_normalize": False}
    found = processor_config(vit, "m")
    assert found["input_size"] == (3, 32, 48) and found["crop_mode"] == "squash"
    assert found["mean"] == (0.0,) * 3 and found["std"] == (1.0,) * 3
