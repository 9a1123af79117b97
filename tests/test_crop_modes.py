"""`--crop-mode` and `--fill`: which pixels the model gets, and that a store repeats them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.extractions import VIT, extract, extracted, plant_images
from vitsee_core.images.placement import place
from vitsee_core.models.provenance import Pictures, model_of
from vitsee_stores import open_store

SIZE = (32, 48)  # of VIT's input; the images are (50, 60)


def run(folder: Path, *options: Any) -> Any:
    data = folder / "data"
    if not data.exists():
        plant_images(data, 3)
    path = folder / "s.zarr"
    extracted(
        *VIT, "--data", data, "-o", path, "--inputs", "--tokens", "pooled", *options
    )
    return open_store(path)


def pillow(folder: Path, name: str, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """(3, height, width)."""
    image = Image.open(folder / "data" / name).convert("RGB")
    return np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC)).transpose(
        2, 0, 1
    )


@pytest.mark.slow
def test_squash_is_one_resize(tmp_path: Path) -> None:
    store = run(tmp_path, "--crop-mode", "squash", "--crop-pct", 1)
    for row, name in enumerate(store.samples.id):
        np.testing.assert_array_equal(
            store.array("input")[row], pillow(tmp_path, name, SIZE)
        )
    assert "fill" not in store.manifest.transform


@pytest.mark.slow
@pytest.mark.parametrize(("fill", "value"), [(None, 128), ("mean", 128), ("black", 0)])
def test_border_fills_up(tmp_path: Path, fill: str | None, value: int) -> None:
    options = [] if fill is None else ["--fill", fill]
    store = run(
        tmp_path, "--crop-mode", "border", "--crop-pct", 1, "--img-mean", "0.5", *options
    )
    # 50 x 60 into 32 x 48: 32 / 50 is the smaller ratio, so 32 x 38 (60 * 32 / 50 = 38.4)
    placed = place(store.manifest.transform, store.sizes[0])
    assert (placed.top, placed.left, placed.bottom, placed.right) == (0, 5, 32, 43)
    for row, name in enumerate(store.samples.id):
        seen = store.array("input")[row]
        np.testing.assert_array_equal(seen[:, :, 5:43], pillow(tmp_path, name, (32, 38)))
        assert (seen[:, :, :5] == value).all() and (seen[:, :, 43:] == value).all()


@pytest.mark.slow
def test_a_store_repeats_its_pixels(tmp_path: Path) -> None:
    store = run(tmp_path, "--crop-mode", "border", "--fill", "black")
    again = store.array("input")[:]
    (tmp_path / "s.zarr").rename(tmp_path / "with.zarr")
    command = [
        *VIT,
        "--data",
        tmp_path / "data",
        "-o",
        tmp_path / "s.zarr",
        "--tokens",
        "pooled",
    ]
    extracted(*command, "--crop-mode", "border", "--fill", "black")
    without = open_store(tmp_path / "s.zarr")
    found = Pictures(without)
    np.testing.assert_array_equal(found(np.arange(3)), again)
    found.check_decoding()
    assert model_of(without).input_size == (3, *SIZE)
    other = extract(*command, "--crop-mode", "border")
    assert (
        other.exit_code == 1 and "transform.fill is black, given nothing" in other.stderr
    )
    mode = extract(*command)
    assert (
        mode.exit_code == 1
        and "transform.crop_mode is border, given center" in mode.stderr
    )


@pytest.mark.slow
def test_what_cannot_be_filled_or_is_cut(tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", 3)
    command = [*VIT, "--data", data, "-o", tmp_path / "s.zarr", "--dry-run"]
    result = extract(*command, "--fill", "black")
    assert result.exit_code == 1 and result.stdout == ""
    assert (
        "--fill black is for what lies around an image, and --crop-mode center"
        in result.stderr
    )
    assert extract(*command, "--crop-mode", "stretch").exit_code == 2
    cut = extracted(*command, "--crop-mode", "squash", "--crop-pct", "0.9")
    assert "whole images" not in cut.stderr
    own = extracted(
        "resnet18", "--random-init", 0, *command[len(VIT) :], "--crop-mode", "squash"
    )
    assert "keeps 0.95 of the sides: give --crop-pct 1 for whole images" in own.stderr
