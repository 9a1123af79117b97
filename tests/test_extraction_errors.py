"""`vitsee extract` on wrong input: one line, exit code 1, empty stdout, no half-made result."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import Result
from PIL import Image

from tests.extractions import RESNET, VIT, extract, extracted, plant_images
from vitsee_core.extraction import run
from vitsee_core.extraction.options import parse_dtypes, parse_tokens
from vitsee_stores import StoreError, open_store
from vitsee_stores.creation import max_disk_bytes
from vitsee_stores.layout import n_bytes

BLOCK = 4096  # bytes of a file at least, on most disks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), 6)


def refused(result: Result, *phrases: str, exit_code: int = 1) -> None:
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    lines = [
        line for line in result.stderr.splitlines() if line.startswith("vitsee extract: ")
    ]
    assert len(lines) == 1, result.stderr
    for phrase in phrases:
        assert phrase in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "phrases"),
    [
        (["vit_bse_patch16_224", "--random-init", "0"], ["vit_bse_patch16_224"]),
        (["demo:vgg"], ["vgg", "demo:vit"]),
        (["local-dir:/nowhere/at/all"], ["/nowhere/at/all"]),
        ([VIT[0], "--checkpoint", "/nowhere.pth"], ["/nowhere.pth"]),
        ([*VIT, "--sites", "blokcs.*"], ["blokcs.*", "vitsee sites"]),
        ([*VIT, "--device", "cuda:7"], ["--device cuda:7"]),
        ([*VIT, "--precision", "tf32", "--device", "cpu"], ["CUDA only"]),
        ([*VIT, "--slab", "1000000000", "--images", "6"], []),
        ([*RESNET, "--attention", "summary"], ["--attention summary is not supported"]),
        (["test_efficientnet", "--random-init", "0", "--residual"], ["--residual"]),
    ],
)
def test_options_that_cannot_be_served(
    model: list[str], phrases: list[str], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.zarr"
    result = extract(*model, "--data", folder, "-o", path)
    if not phrases:  # an explicit slab is kept, at most the images there are
        assert result.exit_code == 0, result.output
        return
    refused(result, *phrases)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "phrase"),
    [
        (["--tokens", "some"], "--tokens is 'some'"),
        (["--dtype", "bfloat16"], "--dtype is 'bfloat16'"),
        (["--dtype", "=float32"], "--dtype is '=float32'"),
        (
            ["--tokens", "all", "--tokens", "pooled"],
            "is both all and pooled for all sites",
        ),
        (
            ["--dtype", "norms=float32", "--dtype", "norms=float16"],
            "is both float32 and float16 for norms",
        ),
        (["--shard", "3/3"], "count from 0"),
    ],
)
def test_values_that_no_extraction_takes(
    given: list[str], phrase: str, folder: Path, tmp_path: Path
) -> None:
    result = extract(*VIT, "--data", folder, "-o", tmp_path / "store.zarr", *given)
    refused(result, phrase, exit_code=2)
    assert list(tmp_path.iterdir()) == []


def test_the_same_value_twice_is_one() -> None:
    assert parse_tokens(["pooled", "norms=all", "pooled"]) == ("pooled", {"norms": "all"})
    assert parse_dtypes(["norms=float32"]) == ("float16", {"norms": "float32"})


@pytest.mark.slow
def test_a_store_of_another_model(folder: Path, tmp_path: Path) -> None:
    """Said before the sites are chosen, whose names are the other model's."""
    path = tmp_path / "store.zarr"
    extracted(*VIT, "--data", folder, "-o", path, "--sites", "logits", "--sites", "embed")
    refused(
        extract(*RESNET, "--data", folder, "-o", path),
        f"{path} is a store of test_vit (test_vit), not of test_resnet (test_resnet)",
    )


@pytest.mark.slow
def test_other_weights_are_named_by_the_options_that_chose_them(
    folder: Path, tmp_path: Path
) -> None:
    torch.save(
        timm.create_model("test_vit", img_size=32).state_dict(), tmp_path / "w.pth"
    )
    base = [
        "test_vit",
        "--data",
        folder,
        "-o",
        tmp_path / "store.zarr",
        "--tokens",
        "pooled",
    ]
    size, drawn = ["--img-size", "32"], ["--random-init", "0"]
    extracted(*base, *size, *drawn)
    for other, expected in (
        ([*size, "--random-init", "1"], "weights is --random-init 0, given --random-init 1 ("),
        ([*size, "--checkpoint", tmp_path / "w.pth"],
         "weights is --random-init 0, given --checkpoint w.pth ("),
        ([*size, *drawn, "--model-arg", "depth=3"],
         "choices: model.args.depth is nothing, given 3 ("),
        ([*drawn, "--img-size", "48"],
         "choices: model.input_size is [3, 32, 32], given [3, 48, 48];"),
    ):  # fmt: skip
        refused(extract(*base, *other), expected)


def test_empty_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--data "$UNSET"` gives; the current folder is not meant."""
    monkeypatch.chdir(plant_images(tmp_path / "here", 2))
    for data in ("", " "):
        refused(
            extract(*VIT, "--data", data, "-o", tmp_path / "store.zarr"),
            "--data is empty",
        )
    assert not (tmp_path / "store.zarr").exists()


@pytest.mark.slow
def test_an_image_of_very_many_pixels_is_a_line_with_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = plant_images(tmp_path / "data", 5, (10, 10))
    Image.new("RGB", (60, 50)).save(large / "class0" / "big.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    path = tmp_path / "store.zarr"
    options = [*VIT, "--sites", "logits", "--data", large, "--order", "dataset"]
    with warnings.catch_warnings(record=True) as raw:
        warnings.simplefilter("always")
        said = extracted(*options, "-o", path, "--workers", 0).stderr
    assert not raw
    assert (
        "class0/big.png (too many pixels: 60 x 50, expected at most 2000; make it" in said
    )
    assert open_store(path).valid.sum() == 5


@pytest.mark.slow
def test_one_image_is_no_plural(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    command = [*VIT, "--data", folder, "-o", path, "--images", 1, "--sites", "logits"]
    for said in (extracted(*command).stderr, extracted(*command).stderr):
        assert re.search(r"\b1 image\b", said)
        assert not re.search(
            r"(?<![\d.])1 (images|slabs)\b", said
        )  # "40.1 images/s" is a rate


def test_missing_data_and_data_without_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "store.zarr"
    for data, phrase in ((tmp_path / "none", "none"), (tmp_path / "empty", "no image")):
        refused(extract(*VIT, "--data", data, "-o", path), phrase)
    assert not path.exists()


def test_none_of_the_images_can_be_read(tmp_path: Path) -> None:
    folder = plant_images(tmp_path / "data", 4)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    path = tmp_path / "store.zarr"
    refused(
        extract(*VIT, "--data", folder, "-o", path),
        "none of the first 4 images can be read",
    )
    assert not path.exists()


def test_an_output_that_is_no_store_is_left_alone(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter1.tex").write_text("dear reader")
    for extra in ([], ["--force"]):
        refused(extract(*VIT, "--data", folder, "-o", path, *extra), str(path))
    assert (path / "chapter1.tex").read_text() == "dear reader"


@pytest.mark.slow
def test_an_output_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    refused(extract(*VIT, "--data", folder, "-o", file / "store.zarr"), "file")
    refused(extract(*VIT, "--data", folder, "-o", "/proc/store.zarr"), "/proc")


def test_more_than_the_free_disk_is_refused_before_anything_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "free_disk_bytes", lambda _path: 1000)
    path = tmp_path / "store.zarr"
    refused(extract(*VIT, "--data", folder, "-o", path), "1.0 kB free", "--dry-run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "more",
    [
        [
            "--slab",
            5,
            "--attention",
            "rows",
            "--inputs",
            "--head-weights",
            "--sites",
            "all",
        ],
        ["--slab", 1, "--tokens", "pooled", "--grams"],
    ],
)
def test_what_a_store_takes_of_a_disk(
    more: list[object],
    codec: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files and folders take whole blocks: with small chunks several times the numbers' bytes."""
    path = tmp_path / "store.zarr"
    command = [*VIT, "--data", folder, "--codec", codec, *more, "-o", path]
    extracted(*command)
    blocks = sum(
        -(-file.stat().st_size // BLOCK) * BLOCK for file in (path, *path.rglob("*"))
    )
    manifest = open_store(path).manifest
    need = max_disk_bytes(manifest, BLOCK)
    assert blocks <= need < (1.1 if codec == "none" else 1.5) * blocks
    numbers = sum(n_bytes(manifest.plan).values())
    assert numbers < 0.8 * blocks
    shutil.rmtree(path)
    monkeypatch.setattr(run, "disk_block_bytes", lambda _path: BLOCK)
    # A finished manifest holds more than a planned one: up to a block, which counts twice.
    monkeypatch.setattr(run, "free_disk_bytes", lambda _path: need - 2 * BLOCK - 1)
    refused(extract(*command), "would take up to", "--dry-run")
    monkeypatch.setattr(run, "free_disk_bytes", lambda _path: need)
    extracted(*command)


@pytest.mark.slow
def test_a_disk_that_fills_up_on_the_way(folder: Path, tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the same path through the writer."""
    path = tmp_path / "store.zarr"
    command = [sys.executable, "-m", "vitsee_cli", "extract", *VIT]
    command += ["--data", str(folder), "-o", str(path), "--slab", "6"]
    limited = "import resource, signal, sys, os; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)); "
    limited += "os.execv(sys.argv[1], sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", limited, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    with pytest.raises(StoreError):
        open_store(path)
    extracted(
        *VIT, "--data", folder, "-o", path, "--slab", "6"
    )  # space again: it resumes
    assert np.isfinite(open_store(path).acts("blocks.0.out")[:]).all()


@pytest.mark.slow
def test_defaults_that_a_model_has_not_are_left_out(folder: Path, tmp_path: Path) -> None:
    """A trunk without norm, pooled vector and logits; asked for by name they are refused."""
    bare = [*RESNET, "--model-arg", "num_classes=0", "--model-arg", "global_pool="]
    out = tmp_path / "bare.zarr"
    result = extracted(*bare, "--data", folder, "-o", out)
    assert "left out: head: the model has none of these sites" in result.stderr
    store = open_store(out)
    assert store.manifest.left_out["head"] == "the model has none of these sites"
    assert next(site.name for site in store.select("blocks")) == "stem"
    again = extracted(*bare, "--data", folder, "-o", out)
    assert "nothing to do" in again.stderr
    asked = extract(
        *bare, "--sites", "head", "--data", folder, "-o", tmp_path / "other.zarr"
    )
    refused(asked, "no site matches 'head'")
