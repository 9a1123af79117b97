"""Data sets of torchvision and Hugging Face, and those that can only be read in order."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.image_files import encoded, plant, refused
from vitsee_core.images import ImageError, open_source
from vitsee_core.images.decoding import hash64


def write_mnist(root: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A FashionMNIST folder as torchvision keeps it: 5 training and 3 test images."""
    rng = np.random.default_rng(0)
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = rng.integers(0, 256, (8, 28, 28), np.uint8)
    labels = np.arange(8, dtype=np.uint8)
    for stem, rows in (("train", slice(0, 5)), ("t10k", slice(5, 8))):
        for name, values in (
            ("images-idx3", images[rows]),
            ("labels-idx1", labels[rows]),
        ):
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (raw / f"{stem}-{name}-ubyte").write_bytes(head + values.tobytes())
    return images, labels


def test_torchvision_arrays(tmp_path: Path) -> None:
    images, labels = write_mnist(tmp_path)
    data = f"torch/fashion_mnist:{tmp_path}"
    source = open_source(data, split="train[2:]+test")
    assert source.ids == ["train/2", "train/3", "train/4", "test/0", "test/1", "test/2"]
    assert source.labels.tolist() == labels[2:].tolist()
    assert source.class_names is not None and source.class_names[0] == "T-shirt/top"
    for k in range(6):
        np.testing.assert_array_equal(np.asarray(source.read(k)[0]), images[2 + k])
    assert "needs a split" in refused(data)
    assert "no split 'trian'" in refused(data, "trian")
    elsewhere = refused(f"torch/fashion_mnist:{tmp_path}/x", "test")
    assert f"torchvision finds no fashion_mnist in the folder {tmp_path}/x" in elsewhere
    assert "download=True" not in elsewhere
    assert "cannot open torch/nothing" in refused("torch/nothing", "test")


def test_torchvision_image_folder(tmp_path: Path) -> None:
    plant(tmp_path, "train/a/1.png", "train/b/1.png", "val/b/2.png")
    source = open_source(f"torch/image_folder:{tmp_path}", split="val")
    assert source.ids == ["val/b/2.png"]
    assert source.labels.tolist() == [1]


def test_torchvision_that_lists_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = plant(tmp_path, "val/n01/a.png", "val/n02/b.png")
    listing = types.SimpleNamespace(
        root=str(root),
        samples=[(str(root / "val/n01/a.png"), 0), (str(root / "val/n02/b.png"), 1)],
        classes=[("tench", "Tinca tinca"), ("goldfish",)],
    )
    import timm.data.dataset_factory

    monkeypatch.setattr(
        timm.data.dataset_factory, "create_dataset", lambda *_, **__: listing
    )
    source = open_source(f"torch/imagenet:{root}", split="val")
    assert source.ids == ["val/val/n01/a.png", "val/val/n02/b.png"]
    assert source.class_names == ["tench", "goldfish"]
    assert source.read(1)[0].size == (6, 4)


@pytest.mark.parametrize("data", ["wds/imagenet", "tfds/cifar10", "hfids/org/name"])
def test_iterable_data_are_refused(data: str) -> None:
    assert "unpack it to a folder, list its files" in refused(data, "train")


def test_hugging_face_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitsee_core.images.sources.libraries.find_spec", lambda _: None)
    assert "pip install datasets" in refused("hfds/cifar10", "train")


class Rows(list[dict[str, Any]]):
    """As much of a Hugging Face data set as is used."""

    features: dict[str, Any]

    def __getitem__(self, key: Any) -> Any:
        return (
            [row[key] for row in self]
            if isinstance(key, str)
            else super().__getitem__(key)
        )

    def select_columns(self, columns: list[str]) -> Rows:
        return self

    cast_column: Callable[..., Any] = lambda self, name, kind: self


def test_hugging_face_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "a.png")
    library: Any = types.ModuleType("datasets")
    library.Image = type("Image", (), {"__init__": lambda self, decode=True: None})
    rows = Rows([
        {"img": {"bytes": encoded(1), "path": "x.png"}, "label": 1},
        {"img": {"bytes": None, "path": str(tmp_path / "a.png")}, "label": None},
        {"img": None, "label": 0},
    ])  # fmt: skip
    label = types.SimpleNamespace(names=["cat", "dog"])
    rows.features = {"img": library.Image(), "label": label}
    asked: dict[str, Any] = {}

    def load_dataset(name: str, split: str, cache_dir: str | None) -> Rows:
        asked.update(name=name, split=split, cache_dir=cache_dir)
        if split != "train":
            raise ValueError(f"Unknown split {split}\nand more")
        return rows

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr("vitsee_core.images.sources.libraries.find_spec", lambda _: True)
    source = open_source("hfds/org/pets:/cache", split="train")
    assert asked == {"name": "org/pets", "split": "train", "cache_dir": "/cache"}
    assert source.ids == ["train/0", "train/1", "train/2"]
    assert source.labels.tolist() == [1, -1, 0]
    assert source.class_names == ["cat", "dog"]
    assert source.read(0)[1] == hash64(encoded(1))
    assert source.read(1)[1] == hash64((tmp_path / "a.png").read_bytes())
    with pytest.raises(ImageError, match="cannot read train/2: the row has no image"):
        source.read(2)
    assert refused("hfds/org/pets", "test").endswith("split test: Unknown split test")
    rows.features = {"label": label}
    assert "has 0 image columns" in refused("hfds/org/pets", "train")
