"""Folders and the demo: ids, order, labels, splits, and one line for what is no data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.image_files import encoded, plant, refused
from vitsee_core.images import ImageSource, open_source
from vitsee_core.images.class_labels import natural_key
from vitsee_core.images.decoding import hash64


def test_class_folders_give_sorted_ids_and_labels(tmp_path: Path) -> None:
    source = open_source(
        str(plant(tmp_path, "b/2.png", "a/x.JPG", "b/deep/1.png", "a/10.png"))
    )
    assert source.ids == ["a/10.png", "a/x.JPG", "b/2.png", "b/deep/1.png"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.class_names == ["a", "b"]
    assert source.samples.fingerprint() == source.samples.fingerprint()
    assert source.samples.index.tolist() == [0, 1, 2, 3]


def test_order_does_not_depend_on_the_directory_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, *(f"c{k}/{i}.png" for k in range(3) for i in range(12)))
    scandir = os.scandir
    listings = []
    for step in (1, -1):

        class Listing(list[Any]):
            def __init__(self, folder: Any, step: int = step) -> None:
                super().__init__(sorted(scandir(folder), key=lambda e: e.name)[::step])

            def __enter__(self) -> Listing:
                return self

            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(os, "scandir", Listing)
        listings.append(open_source(str(tmp_path)).ids)
    assert listings[0] == listings[1] == sorted(listings[0])


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    source = open_source(str(plant(tmp_path, "1.png", "0.png")))
    assert source.ids == ["0.png", "1.png"]
    assert source.labels.tolist() == [-1, -1]
    assert source.class_names is None
    assert source.splits == ["", ""]


def test_classes_in_natural_order_hidden_and_other_files_left_out(tmp_path: Path) -> None:
    plant(tmp_path, "10/a.png", "2/a.png", ".cache/a.png", "2/._a.png")
    (tmp_path / "2" / "notes.txt").write_text("x")
    source = open_source(str(tmp_path))
    assert source.class_names == ["2", "10"]
    assert (source.ids, source.labels.tolist()) == (["10/a.png", "2/a.png"], [1, 0])


def test_natural_key_orders_names_as_people_do() -> None:
    names = ["n10", "N9", "n2", "a", "A", "10", "9b"]
    assert sorted(names, key=natural_key) == ["9b", "10", "A", "a", "n2", "N9", "n10"]


def test_split_folders_are_no_classes(tmp_path: Path) -> None:
    plant(tmp_path, "train/cat/1.png", "train/dog/2.png", "validation/cat/3.png")
    source = open_source(str(tmp_path))
    assert source.class_names == ["cat", "dog"]
    assert source.splits == ["train", "train", "validation"]
    part = open_source(str(tmp_path), split="val")
    assert (part.ids, part.splits) == (["validation/cat/3.png"], ["validation"])
    assert part.labels.tolist() == [0]
    assert open_source(str(tmp_path), split="train+val").ids == source.ids
    assert "its splits: train, validation" in refused(tmp_path, "test")


def test_a_folder_named_test_among_others_is_a_class(tmp_path: Path) -> None:
    source = open_source(str(plant(tmp_path, "test/1.png", "other/1.png")))
    assert source.class_names == ["other", "test"]
    assert "has no splits" in refused(tmp_path, "test")


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    plant(tmp_path / "real", "a.png")
    (tmp_path / "real" / "again").symlink_to(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert open_source(str(tmp_path)).ids == ["link/a.png", "real/a.png"]


def test_read_gives_the_image_and_the_hash_of_its_file(tmp_path: Path) -> None:
    source = open_source(str(plant(tmp_path, "a.png", "b.png")))
    image, value = source.read(1)
    assert image.size == (6, 4)
    assert value == hash64((tmp_path / "b.png").read_bytes()) != source.read(0)[1]


def test_the_hash_is_blake2b_and_never_the_mark_of_a_bad_image() -> None:
    # b2sum -l 64 of the three bytes, least significant byte first.
    assert hash64(b"abc") == int.from_bytes(bytes.fromhex("d8bb14d833d59559"), "little")


def test_name_that_is_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes(encoded(0))
    except OSError:
        pytest.skip("the file system refuses such names")
    assert "no images below" in refused(tmp_path)
    assert "not UTF-8" in caplog.text


def test_what_is_no_data_set(tmp_path: Path) -> None:
    assert "no file or folder" in refused(tmp_path / "nowhere")
    assert "no images below" in refused(tmp_path)
    (tmp_path / "a.doc").write_text("x")
    assert "is no data set; expected an image folder" in refused(tmp_path / "a.doc")
    plant(tmp_path, "a.png")
    assert "is a single file" in refused(tmp_path / "a.png")


def test_a_folder_whose_name_looks_like_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, "torch/cats/1.png")
    monkeypatch.chdir(tmp_path)
    source: ImageSource = open_source("torch/cats")
    assert source.ids == ["1.png"]
    assert isinstance(source, ImageSource)
    monkeypatch.chdir("/")
    assert source.read(0)[0].size == (6, 4)


@pytest.mark.slow
def test_demo() -> None:
    source = open_source("demo:train")
    assert len(source) == len(open_source("demo:test")) == 2000
    assert np.bincount(source.labels).tolist() == [200] * 10
    assert source.class_names is not None and source.class_names[9] == "Ankle boot"
    assert source.read(0)[0].size == (28, 28)
    assert len(open_source("demo")) == len(open_source("demo:train+test")) == 4000
    assert len(open_source("demo", split="test[:10%]")) == 200
    hashes = {open_source("demo").read(k)[1] for k in range(0, 4000, 100)}
    assert len(hashes) == 40
    assert "its splits: train, test" in refused("demo:trian")
    assert "is a model; the demo's data: demo:train, demo:test" in refused("demo:vit")
    assert "names a split already" in refused("demo:train", "test")
