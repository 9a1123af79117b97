"""Arrays in .npz files and images in tar files."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import shards
from tests.image_files import encoded, refused
from vitsee_core.images import ImageError, open_source
from vitsee_core.images.decoding import hash64


def test_npz_with_everything(tmp_path: Path) -> None:
    images = np.arange(360).astype(np.uint8).reshape(4, 5, 6, 3)
    splits = np.array(["train", "test", "train", "train"])
    about: dict[str, Any] = {"labels": np.array([1, 0, -1, 1], np.int8)}
    about["class_names"] = np.array(["x", "y"])
    np.savez(tmp_path / "d.npz", images=images, splits=splits, **about)
    source = open_source(str(tmp_path / "d.npz"))
    assert source.ids == ["train/0", "test/1", "train/2", "train/3"]
    assert source.labels.tolist() == [1, 0, -1, 1]
    assert source.class_names == ["x", "y"]
    np.testing.assert_array_equal(np.asarray(source.read(2)[0]), images[2])
    part = open_source(str(tmp_path / "d.npz"), split="train[1:]")
    assert part.ids == ["train/2", "train/3"]
    assert part.read(0)[1] == source.read(2)[1]


def test_npz_of_grey_images_alone(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", images=np.zeros((3, 4, 4), np.uint8))
    source = open_source(str(tmp_path / "d.npz"))
    assert source.ids == ["0", "1", "2"]
    assert source.read(0)[0].mode == "L"
    # Equal pixels in another shape are another image.
    np.savez(tmp_path / "e.npz", images=np.zeros((1, 2, 8), np.uint8))
    assert open_source(str(tmp_path / "e.npz")).read(0)[1] != source.read(0)[1]


def test_npz_in_other_forms(tmp_path: Path) -> None:
    """Channels first and floats are the same images, with the same hashes."""
    images = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), np.uint8)
    forms = {
        "plain": images,
        "first": images.transpose(0, 3, 1, 2),
        "floats": (images / 255).astype(np.float32),
        "both": (images / 255).transpose(0, 3, 1, 2),
    }
    sources = []
    for name, array in forms.items():
        np.savez(tmp_path / f"{name}.npz", images=array)
        sources.append(open_source(str(tmp_path / f"{name}.npz")))
    for source in sources:
        for row in range(4):
            image, value = source.read(row)
            np.testing.assert_array_equal(np.asarray(image), images[row])
            assert value == sources[0].read(row)[1] and source.size(row) == (5, 6)
    # grey with an axis of its own, at either end; halves are rounded to even numbers
    for axis in (1, 3):
        np.savez(tmp_path / "g.npz", images=np.expand_dims(np.full((2, 4, 5), 0.1), axis))
        grey = open_source(str(tmp_path / "g.npz")).read(1)[0]
        assert grey.mode == "L" and grey.size == (5, 4) and np.asarray(grey)[0, 0] == 26
    # (N, 3, H, 3) is taken for channels last
    np.savez(tmp_path / "d.npz", images=np.zeros((2, 3, 4, 3), np.uint8))
    assert open_source(str(tmp_path / "d.npz")).size(0) == (3, 4)


PIXELS = np.zeros((2, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "phrase"),
    [
        ({"x": PIXELS}, "has 'x'; expected only: images"),
        ({"labels": np.zeros(2, int)}, "no array 'images'; found: labels"),
        (
            {"images": PIXELS.astype(np.int16)},
            "'images' of .* is int16 .* expected uint8 or float",
        ),
        (
            {"images": np.zeros((2, 2, 4, 4), np.uint8)},
            r"is uint8 \(2, 2, 4, 4\); expected",
        ),
        ({"images": PIXELS[0]}, "expected uint8"),
        (
            {"images": PIXELS - 0.5},
            "float64, and image 0 goes from -0.5 to -0.5; expected 0",
        ),
        (
            {"images": np.stack([PIXELS[0], PIXELS[0] + 1.01])},
            "1 goes from 1.01 to 1.01; .* not n",
        ),
        ({"images": PIXELS + np.nan}, "goes from nan to nan"),
        ({"images": np.zeros((2, 0, 4, 3), np.uint8)}, r"\(2, 0, 4, 3\): .* no pixels"),
        ({"images": np.array([None, 1], object)}, "Python objects"),
        (
            {"images": PIXELS, "labels": np.zeros(3, int)},
            "'labels' of .* expected integers",
        ),
        ({"images": PIXELS, "labels": np.zeros(2)}, "'labels' of .* is float64"),
        ({"images": PIXELS, "labels": np.array([0, -2])}, "go from -2 to 0"),
        (
            {
                "images": PIXELS,
                "labels": np.array([0, 2]),
                "class_names": np.array(["a", "b"]),
            },
            "from 0 below 2",
        ),
        ({"images": PIXELS, "splits": np.array(["a"])}, "'splits' of .* expected text"),
        (
            {"images": PIXELS, "class_names": np.array([1, 2])},
            "'class_names' of .* expected text",
        ),
    ],
)
def test_bad_arrays(tmp_path: Path, arrays: dict[str, Any], phrase: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    assert re.search(phrase, refused(tmp_path / "d.npz"))


def test_npz_that_is_none(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", PIXELS)
    for content in (b"not a zip", (tmp_path / "b.npy").read_bytes(), b""):
        (tmp_path / "a.npz").write_bytes(content)
        assert "cannot be read as .npz" in refused(tmp_path / "a.npz")


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    return shards.write_tar(path, list(members.items()))


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (b"no array", "d.npz cannot be read as .npz: labels in it is no array"),
        (
            b"\x93NUMPY\x01\x00\x48\x00{'descr': '<f4', 'fortran_order': False, "
            b"'shape': (1000000, 1000000000)}",
            "d.npz cannot be read as .npz: Unable to allocate",
        ),
    ],
    ids=["bytes", "huge"],
)
def test_npz_with_a_damaged_member(member: bytes, said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=np.zeros((3, 4, 4), np.uint8))
    with zipfile.ZipFile(tmp_path / "d.npz", "a") as archive:
        archive.writestr("labels.npy", member)
    assert said in refused(str(tmp_path / "d.npz"))


def test_one_tar_with_class_folders(tmp_path: Path) -> None:
    members = {"./b/1.png": encoded(1), "a/2.png": encoded(2), "a/read.me": b"x"}
    source = open_source(str(write_tar(tmp_path / "d.tar", members)))
    assert list(source.ids) == ["a/2.png", "b/1.png"]
    assert source.class_names == ["a", "b"]
    assert source.read(0)[1] == hash64(members["a/2.png"])
    assert source.read(1)[1] == hash64(members["./b/1.png"])


def test_folder_of_tars_and_tars_in_a_tar_are_class_folders(tmp_path: Path) -> None:
    cats, dogs = {"1.png": encoded(1)}, {"1.png": encoded(2), "0.png": encoded(3)}
    folder = tmp_path / "tars"
    folder.mkdir()
    inner = {
        "dog.tar": write_tar(folder / "dog.tar", dogs).read_bytes(),
        "cat.tar": write_tar(folder / "cat.tar", cats).read_bytes(),
    }
    for data in (folder, write_tar(tmp_path / "outer.tar", inner)):
        source = open_source(str(data))
        assert list(source.ids) == ["cat/1.png", "dog/0.png", "dog/1.png"]
        assert source.class_names == ["cat", "dog"]
        hashes = [source.read(k)[1] for k in range(3)]
        assert hashes == [
            hash64(b) for b in (cats["1.png"], dogs["0.png"], dogs["1.png"])
        ]


def test_member_appended_again_replaces_the_first(tmp_path: Path) -> None:
    shards.write_tar(tmp_path / "d.tar", [("a.png", encoded(1)), ("a.png", encoded(2))])
    source = open_source(str(tmp_path / "d.tar"))
    assert list(source.ids) == ["a.png"]
    assert source.read(0)[1] == hash64(encoded(2))


def test_a_tar_without_images(tmp_path: Path) -> None:
    assert "no images" in refused(write_tar(tmp_path / "f.tar", {"a.txt": b""}))


def test_tar_cut_short_is_bad_images(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "d.tar", {"a.png": encoded(1), "b.png": encoded(2)})
    source = open_source(str(path))
    path.write_bytes(path.read_bytes()[: 3 * 512 + 10])
    assert source.read(0)[0].size == (6, 4)
    with pytest.raises(ImageError, match="too early"):
        source.read(1)
