"""Images in zip files, read in place."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.extractions import VIT, array_bytes, extracted
from tests.image_files import encoded, refused
from vitsee_core.images import ImageError, ImageSource, open_source
from vitsee_core.images.decoding import hash64


def pack(path: Path, *names: str, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A zip of images, each of a colour of its own."""
    with zipfile.ZipFile(path, "w", method) as file:
        for k, name in enumerate(names):
            file.writestr(name, encoded(k, "BMP"))
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_the_files(tmp_path: Path, method: int) -> None:
    names = [
        "train/b/1.bmp",
        "train/a/2.bmp",
        "val/a/10.bmp",
        "notes.txt",
        "train/a/.hid.bmp",
    ]
    path = pack(tmp_path / "d.zip", *names, "__MACOSX/train/._1.bmp", method=method)
    source = open_source(str(path))
    assert source.ids == ["train/a/2.bmp", "train/b/1.bmp", "val/a/10.bmp"]
    assert source.splits == ["train", "train", "val"] and source.class_names == ["a", "b"]
    for row, k in enumerate((1, 0, 2)):
        image, value = source.read(row)
        assert image.getpixel((0, 0)) == (k, 0, 255 - k)
        assert value == source.hash(row) == hash64(encoded(k, "BMP"))
        assert source.size(row) == (4, 6)
    assert open_source(str(path), split="val").ids == ["val/a/10.bmp"]


def test_folders_of_zips_are_classes(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("dog", "cat"):
        pack(tmp_path / "d" / f"{name}.zip", "1.bmp", "sub/2.bmp")
    source = open_source(str(tmp_path / "d"))
    assert source.ids == ["cat/1.bmp", "cat/sub/2.bmp", "dog/1.bmp", "dog/sub/2.bmp"]
    assert source.class_names == ["cat", "dog"]
    assert source.read(3)[0].size == (6, 4)


def test_zips_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK no")
    assert "a.zip cannot be read as a zip file" in refused(tmp_path / "a.zip")
    assert "no images in" in refused(pack(tmp_path / "b.zip", "a.txt"))
    packed = pack(tmp_path / "c.zip", "1.bmp", method=zipfile.ZIP_BZIP2)
    assert "packed by another method than deflate; unpack it" in refused(packed)
    secret = bytearray(pack(tmp_path / "e.zip", "1.bmp").read_bytes())
    secret[secret.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "e.zip").write_bytes(secret)
    assert "is encrypted; unpack it" in refused(tmp_path / "e.zip")


def damaged(path: Path, change: slice, data: bytes) -> ImageSource:
    """The zip, with these bytes changed after it was listed."""
    source = open_source(str(path))
    whole = bytearray(path.read_bytes())
    whole[change] = data
    path.write_bytes(whole)
    return source


def test_damage_is_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    for k, (change, data, phrase) in enumerate(
        [
            (slice(0, 2), b"xx", "no member where one should be"),
            (slice(40, 44), b"\xff" * 4, "the zip file is damaged"),
            (slice(60, None), b"", "the zip file is damaged"),
            (slice(0, None), b"", "no member where one should be"),
        ]
    ):
        source = damaged(pack(tmp_path / f"{k}.zip", "1.bmp"), change, data)
        with pytest.raises(ImageError, match=phrase):
            source.read(0)
    source = damaged(
        pack(tmp_path / "s.zip", "1.bmp", method=zipfile.ZIP_STORED),
        slice(80, 81),
        b"\x07",
    )
    with pytest.raises(ImageError, match="other bytes than it lists"):
        source.read(0)


def test_a_member_that_unpacks_to_more_than_it_says(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("1.bmp", bytes(10_000_000))
    data = bytearray(file.getvalue())
    central = data.index(b"PK\x01\x02")
    data[central + 24 : central + 28] = (1000).to_bytes(4, "little")
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(ImageError, match="other bytes than it lists"):
        open_source(str(tmp_path / "b.zip")).read(0)


@pytest.mark.slow
def test_a_store_of_a_zip_is_that_of_its_files(tmp_path: Path) -> None:
    path = pack(tmp_path / "d.zip", *(f"{c}/{i}.bmp" for c in "ab" for i in range(2)))
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "d")
    for data, workers in ((path, 0), (path, 1), (tmp_path / "d", 0)):
        out = tmp_path / f"{data.name}{workers}.zarr"
        extracted(
            *VIT, "--data", data, "-o", out, "--tokens", "pooled", "--workers", workers
        )
    first = array_bytes(tmp_path / "d.zip0.zarr")
    assert (
        first
        == array_bytes(tmp_path / "d.zip1.zarr")
        == array_bytes(tmp_path / "d0.zarr")
    )
    assert np.frombuffer(first["samples/label/c.0"][:-4], np.int64).tolist().count(1) == 2
