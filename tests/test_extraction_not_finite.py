"""One image that gives NaN is named; its row is NaN with valid = 0, and the others are as without
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.extractions import extract, extracted, plant_images
from vitsee_stores import Store, open_store
from vitsee_stores.validation import validate

MODEL = '''
import timm
import torch
from torch import nn

TRANSFORM = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
TRANSFORM |= {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}


class Standardised(nn.Module):
    """Divides by the deviation of an image's pixels: 0 of a black one."""

    def forward(self, x):
        return x / x.flatten(1).std(1).view(-1, 1, 1, 1)


def build():
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=5, **size)
    return nn.Sequential(Standardised(), vit).eval(), TRANSFORM


def build_dense():
    """Patches alone, without a class token, so that tiles can be joined."""
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    none = {"class_token": False, "global_pool": "avg", "num_classes": 0}
    vit = timm.create_model("vit_tiny_patch16_224", **none, **size)
    return nn.Sequential(Standardised(), vit).eval(), TRANSFORM
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("code") / "model.py"
    path.write_text(MODEL)
    return f"{path}:build"


def black_among(folder: Path, *rows: int) -> Path:
    """Seven images in the data set's order, those at these rows black."""
    plant_images(folder, 7)
    paths = sorted(folder.rglob("*.png"))
    for row in rows:
        Image.new("RGB", (60, 50)).save(paths[row])
    return folder


def made(model: str, data: Path, *options: object) -> tuple[Store, str]:
    path = data.parent / f"{data.name}.zarr"
    sizes = ["--slab", 3, "--order", "dataset"]
    if "--batch-size" not in options:
        sizes += ["--batch-size", 2]
    result = extracted(model, "--data", data, "-o", path, *sizes, *options)
    return open_store(path), result.stderr


def numbers(store: Store) -> dict[str, Any]:
    """Per-image numbers of the store."""
    values: dict[str, Any] = {"logits": store.pooled("logits")[:]}
    for site in store.plan.sites:
        if site.kind == "tokens" and site.alias_of is None:
            values[site.name] = store.acts(site.name)[:]
    return values


@pytest.mark.parametrize("row", [4, 1])
def test_one_image_is_named_and_has_no_row(model: str, row: int, tmp_path: Path) -> None:
    """In the second slab; and among the images of the self-check."""
    data = black_among(tmp_path / "data", row)
    store, said = made(model, data)
    name = store.samples.id[row]
    assert (
        f"1 of 7 images make the model give NaN or inf: {name} (NaN or inf at embed)"
        in said
    )
    assert store.valid.tolist() == [k != row for k in range(7)]
    whole, _ = made(model, plant_images(tmp_path / "whole", 7))
    others = np.arange(7) != row
    expected = numbers(whole)
    for site, values in numbers(store).items():
        assert np.isnan(values[row]).all()
        np.testing.assert_allclose(
            values[others], expected[site][others], rtol=1e-3, atol=1e-5
        )
    extracted(
        model, "--data", data, "-o", store.path, "--order", "dataset"
    )  # nothing to do
    assert validate(store.path, deep=True) == []
    assert np.asarray(store.zarr["size"][row]).tolist() == [50, 60]


def test_sums_of_a_slab_leave_it_out(model: str, tmp_path: Path) -> None:
    """The mean attention of a slab is that of its two other images."""
    store, _ = made(model, black_among(tmp_path / "data", 4))
    received = store.zarr["attention/received"][1]
    whole, _ = made(model, plant_images(tmp_path / "whole", 7), "--attention", "rows")
    rows = np.asarray(whole.zarr["attention/received_rows"][3:6], np.float64)[[0, 2]].sum(
        0
    )
    np.testing.assert_allclose(received, rows, rtol=2e-3)
    assert store.zarr["n_valid"][:].tolist() == [3, 2, 1]


def test_several_and_unreadable_ones(model: str, tmp_path: Path) -> None:
    """An unreadable image is black to the model."""
    data = black_among(tmp_path / "data", 0, 5)
    sorted(data.rglob("*.png"))[3].write_bytes(b"no picture")
    store, said = made(model, data)
    assert store.valid.tolist() == [False, True, True, False, True, False, True]
    assert "1 of 7 images could not be read" in said
    assert "2 of 7 images make the model give NaN or inf" in said


def test_on_error_fail_names_it(model: str, tmp_path: Path) -> None:
    data = black_among(tmp_path / "data", 4)
    path = tmp_path / "store.zarr"
    options = ["--slab", 3, "--order", "dataset", "--on-error", "fail"]
    result = extract(model, "--data", data, "-o", path, *options)
    assert result.exit_code == 1
    (line,) = [
        line for line in result.stderr.splitlines() if line.startswith("vitsee extract: ")
    ]
    name = open_store(path, allow_partial=True).samples.id[4]
    assert line == (
        f"vitsee extract: {name}: NaN or inf at embed, where the model's output of other images "
        "is sound; expected finite values: --on-error nan leaves such images out"
    )
    assert not open_store(path, allow_partial=True).complete


def test_on_error_fail_counts_the_images_of_a_slab(model: str, tmp_path: Path) -> None:
    """No image of the second slab is sound, those of the first are."""
    data = black_among(tmp_path / "data", *range(3, 7))
    options = ["--slab", 3, "--order", "dataset", "--on-error", "fail"]
    result = extract(model, "--data", data, "-o", tmp_path / "store.zarr", *options)
    assert result.exit_code == 1
    assert "and 2 more of these images: NaN or inf at embed, where" in result.stderr
    assert "the model's own output is broken" not in result.stderr


def test_nothing_but_such_images_is_a_broken_model(model: str, tmp_path: Path) -> None:
    data = black_among(tmp_path / "data", *range(7))
    result = extract(model, "--data", data, "-o", tmp_path / "store.zarr")
    assert result.exit_code == 1
    assert "are the weights sound?" in result.stderr


def test_a_slab_of_such_images_alone(model: str, tmp_path: Path) -> None:
    """Rows 3 to 5 are the second slab."""
    store, said = made(model, black_among(tmp_path / "data", 3, 4, 5))
    assert "3 of 7 images make the model give NaN or inf" in said
    assert store.valid.tolist() == [True, True, True, False, False, False, True]
    assert store.zarr["n_valid"][:].tolist() == [3, 0, 1]


TILES = ["--short-side", 64, "--tiles"]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_one_image_in_tiles(model: str, batch_size: int, tmp_path: Path) -> None:
    """The lower right tile of one image is black: the image is named, and its row is NaN. The
    others are as without it. Eight tiles are two images at a time."""
    data = plant_images(tmp_path / "data", 7)
    sizes = [*TILES, "--batch-size", batch_size]
    whole, _ = made(f"{model}_dense", plant_images(tmp_path / "whole", 7), *sizes)
    path = sorted(data.rglob("*.png"))[4]
    image = Image.open(path).convert("RGB")
    # Tiles begin at 32 of 64 pixels, at 25 of 50 pixels of the file.
    image.paste((0, 0, 0), (22, 22, *image.size))
    image.save(path)
    store, said = made(f"{model}_dense", data, *sizes)
    name = store.samples.id[4]
    assert (
        f"1 of 7 images make the model give NaN or inf: {name} (NaN or inf at embed)"
        in said
    )
    assert store.valid.tolist() == [row != 4 for row in range(7)]
    others = np.arange(7) != 4
    for site in store.plan.sites:
        if site.kind != "tokens" or site.alias_of is not None:
            continue
        values = store.acts(site.name)[:]
        assert np.isnan(values[4]).all()
        np.testing.assert_array_equal(values[others], whole.acts(site.name)[:][others])


def test_on_error_fail_names_it_in_tiles(model: str, tmp_path: Path) -> None:
    data = black_among(tmp_path / "data", 4)
    path = tmp_path / "store.zarr"
    options = [*TILES, "--slab", 3, "--order", "dataset", "--on-error", "fail"]
    result = extract(f"{model}_dense", "--data", data, "-o", path, *options)
    assert result.exit_code == 1
    assert ".png: NaN or inf at embed" in result.stderr.splitlines()[-1]


def test_one_clip_by_frame(model: str, tmp_path: Path) -> None:
    """The last frame of one clip of three is black."""
    root = tmp_path / "clips"
    for clip in range(3):
        plant_images(root / f"clip{clip}", 2)
        for number, path in enumerate(sorted((root / f"clip{clip}").rglob("*.png"))):
            path.rename(root / f"clip{clip}" / f"{number}.png")
    Image.new("RGB", (60, 50)).save(root / "clip1" / "1.png")
    store, said = made(model, root, "--frames", 2)
    assert "1 of 3 clips make the model give NaN or inf: clip1" in said
    assert store.valid.tolist() == [True, False, True]
