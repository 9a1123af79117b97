"""Train images among the test images: by their bytes, their pixels, their ids."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from tests.extractions import VIT, extracted
from vitsee_cli.main import main
from vitsee_core.images.folders import image_stem
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import _without_endings
from vitsee_stores import open_store, validate

CLASSES = ("cat", "dog")
N = 12


def pictures(seed: int) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
    return [
        Image.fromarray(one).resize((60, 50), Image.Resampling.BICUBIC) for one in small
    ]


def save(
    folder: Path, ending: str, seed: int = 0, name: str = "", level: int = 6
) -> Path:
    """The pictures of a seed in one folder a class, as files of a format."""
    for i, picture in enumerate(pictures(seed)):
        path = folder / CLASSES[i % 2] / f"{name}{i:02d}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, compress_level=level, quality=60)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of pictures as PNG (train), saved anew, and of others."""
    path = tmp_path_factory.mktemp("pixels")
    options = (
        "--sites",
        "blocks,head",
        "--tokens",
        "pooled",
        "--attention",
        "none",
        "--inputs",
    )
    places = {
        "train": save(path / "train", ".png"),
        "bmp": save(path / "bmp", ".bmp", name="other"),
        "packed": save(path / "packed", ".png", name="x", level=0),
        "lossy": save(path / "lossy", ".jpg"),
        "others": save(path / "others", ".png", seed=1),
        "strangers": save(path / "strangers", ".png", seed=2, name="s"),
    }
    same_names = path / "same-names"
    for source in (places["lossy"]).rglob("*.jpg"):
        target = same_names / source.parent.name / f"{source.stem}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(source).save(target)
    places["same-names"] = same_names
    for name, data in places.items():
        extracted(*VIT, "--data", data, *options, "-o", path / f"{name}.zarr")
    return path


def run(folder: Path, command: str, test: str, *words: str) -> Result:
    stores = [str(folder / f"{name}.zarr") for name in ("train", test)]
    more = ("--k", "3") if command == "knn" else ("--l2", "1")
    out = str(folder / f"{command}-{test}.csv")
    return CliRunner().invoke(
        main, [command, *stores, *more, *words, "-o", out, "--force"]
    )


def test_what_a_store_keeps_of_pixels(folder: Path) -> None:
    """The hash is that of the pixels that `input` holds."""
    store = open_store(folder / "train.zarr")
    inputs, hashes = store.array("input")[:], store.samples.pixel_hash
    assert hashes is not None
    for pixels, value in zip(inputs, hashes, strict=True):
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=8).digest()
        assert int.from_bytes(digest, "little") == value
    assert validate(folder / "train.zarr", deep=True) == []
    assert "pixel_hash" in store.manifest.features


@pytest.mark.parametrize("command", ["probe", "knn"])
@pytest.mark.parametrize("test", ["bmp", "packed"])
def test_the_same_pictures_saved_anew_are_refused(
    folder: Path, command: str, test: str
) -> None:
    result = run(folder, command, test)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert f"{N} of the {N} test images of {test} are in train too" in line
    assert f"{N} in other files with equal pixels" in line
    counted = run(folder, command, test, "--allow-shared")
    assert counted.exit_code == 0, counted.output
    notes = Table.read(folder / f"{command}-{test}.csv").notes
    assert notes["tests"][0]["also_in_train"] == N


@pytest.mark.parametrize("command", ["probe", "knn"])
@pytest.mark.parametrize(
    ("test", "remarked", "ending"),
    [
        ("others", True, ""),
        ("same-names", True, ""),
        ("lossy", True, f"; {N} but for the ending"),
        ("strangers", False, ""),
    ],
)
def test_equal_ids_alone_are_a_remark(
    folder: Path, command: str, test: str, remarked: bool, ending: str
) -> None:
    """Other pictures of the same names, and the same pictures with loss."""
    result = run(folder, command, test)
    assert result.exit_code == 0, result.output
    remarks = Table.read(folder / f"{command}-{test}.csv").notes["remarks"]
    said = [text for text in remarks if "have ids of images of train" in text]
    assert len(said) == remarked
    if remarked:
        assert said[0].startswith(f"{N} of the {N} test images of {test}")
        assert f"{ending}) but other bytes and pixels" in said[0]
        assert ("but for the ending" in said[0]) == bool(ending)
        assert said[0] in result.stderr


def test_ids_without_their_endings() -> None:
    """By arrays as one by one."""
    ids = [
        "a/b.png",
        "a/b.JPG",
        "b.jpeg",
        "b.txt",
        ".png",
        "a/.png",
        "a.b/c",
        "x.png#0,1",
    ]
    ids += ["a.png.jpg", "é/ü.webp", ""]
    encoded = np.array([name.encode() for name in ids])
    stems = [stem.decode() for stem in _without_endings(encoded).tolist()]
    assert stems == [image_stem(name) for name in ids]


def test_one_picture_of_both(folder: Path, tmp_path: Path) -> None:
    """A single picture among strangers, in another format, is named."""
    data = save(tmp_path / "data", ".png", seed=2, name="s")
    pictures(0)[4].save(data / "cat" / "again.tiff")
    options = ("--sites", "blocks,head", "--tokens", "pooled", "--attention", "none")
    extracted(*VIT, "--data", data, *options, "-o", folder / "mixed.zarr")
    result = run(folder, "probe", "mixed")
    assert result.exit_code == 1
    assert (
        "1 of the 13 test images of mixed are in train too (cat/again.tiff"
        in result.stderr
    )
