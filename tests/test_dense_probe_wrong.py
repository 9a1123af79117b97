"""Wrong inputs of dense-probe: each gets one line on stderr that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.printed_text import flat
from tests.stores import write_sites
from tests.test_dense_probe import command, layout, made, transform
from vitsee_core.analyses.dense_probe import run
from vitsee_stores.errors import VitseeError

SITE = "blocks.0.out"
# Folder of maps -> what is done to the first of them.
DAMAGED: dict[str, Callable[[Path], object]] = {
    "rgb": Image.new("RGB", (23, 17)).save,
    "small": Image.new("L", (5, 5)).save,
    "high": Image.fromarray(np.full((17, 23), 300, np.uint16)).save,
    "text": lambda path: path.write_bytes(b"no picture"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:60]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores and maps of every kind; `a.zarr` with `a-masks` is as it should be."""
    path = tmp_path_factory.mktemp("wrong")
    store, masks = made(path, 4)
    made(path, 4, name="b", seed=1)
    made(path, 4, name="fine", seed=2, grid=(6, 8))
    made(path, 4, name="wide", seed=1, dim=7)
    made(path, 4, name="one", seed=1, sites=[SITE])
    made(path / "untrained", 4, sites=[SITE], seed=3)
    about: dict[str, Any] = {"sizes": store.sizes, "ids": store.samples.id.tolist()}
    about["transform"], ones = transform(12, 16), np.ones((4, 12, 2), np.float32)
    others: dict[str, dict[str, Any]] = {
        "nan": {"tokens": np.nan * ones}, "vectors": {"tokens": ones[:, 0], "where": None},
        "uneven": {"where": layout(3, 4, 3.5), "transform": transform(12, 14)},
        "bare": {"transform": {}}, "city": {"ids": [f"a{i}_leftImg8bit.png" for i in range(4)]},
    }  # fmt: skip
    for name, own in others.items():
        sites = {SITE: (own.pop("tokens", ones), own.pop("where", layout(3, 4)))}
        write_sites(path / f"{name}.zarr", sites, **about | own)
    for name, change in DAMAGED.items():
        shutil.copytree(masks, path / name)
        change(path / name / "a0.png")
    for name, place, value in (
        ("a{}.png", "VOC2012/SegmentationClass", 22), ("a{}.png", "ade/annotations", 12),
        ("a{}.png", "unnamed/annotations", 7), ("a{}_gtFine_labelIds.png", "gtFine", 34),
    ):  # fmt: skip
        (path / place).mkdir(parents=True)
        for i, size in enumerate(store.sizes.tolist()):
            labels = np.full(size, 7, np.uint8)
            labels[0, 0] = 7 if i else value
            Image.fromarray(labels).save(path / place / name.format(i))
    names = "".join(f"{k}\t0.1\t1\t1\t0\tclass {k}\n" for k in range(1, 11))
    (path / "ade/objectInfo150.txt").write_text(
        f"Idx\tRatio\tTrain\tVal\tStuff\tName\n{names}"
    )
    (path / "unnamed/objectInfo150.txt").write_text("Idx\tName\n7\twall\n")
    for name, value, first in (
        ("binary", 255, "a"),
        ("blank", 0, "a"),
        ("blank-b", 0, "b"),
    ):
        (path / name).mkdir()
        for i, size in enumerate(store.sizes.tolist()):
            labels = np.zeros(size, np.uint8)
            labels[2:9, 3:9] = value
            Image.fromarray(labels).save(path / name / f"{first}{i}.png")
    (path / "pictures").mkdir()
    Image.new("L", (5, 5)).save(path / "pictures/a0.jpg")
    shutil.copytree(masks, path / "renamed")
    for picture in (path / "renamed").glob("*.png"):
        picture.rename(picture.with_name("x" + picture.name))
    (path / "broken.json").write_text("{")
    images = [{"id": 1, "file_name": "a0.jpg", "height": 17, "width": 23}]
    (path / "bare.json").write_text(json.dumps({"images": images, "annotations": []}))
    (path / "others.txt").write_text("elsewhere/9\n")
    (path / "all.txt").write_text("a0\na1\na2\na3\n")
    return path


# Words after the command, where MASKS is --masks a-masks and HALF --holdout 0.5; and what is said.
WRONG = {
    "a.zarr HALF --masks rgb": "a0.png holds colours (mode RGB); expected one channel",
    "a.zarr HALF --masks small": "a0.png is 5 x 5 pixels, its image a0.jpg is 23 x 17",
    "a.zarr HALF --masks high": "a0.png has the value 300",
    "a.zarr HALF --masks text": "a0.png",
    "a.zarr HALF --masks cut": "a0.png",
    "a.zarr HALF --masks renamed": "expected the same names but for the ending",
    "a.zarr HALF --masks VOC2012": "a0.png has the value 22, which is no class",
    "a.zarr HALF --masks ade": "a0.png has the value 12, which is no class",
    "a.zarr HALF --masks unnamed": "objectInfo150.txt is not the table of ADE20K's",
    "city.zarr HALF --masks gtFine": "labelIds.png has the value 34, which is",
    "a.zarr HALF --masks binary": "2 training images of a that have a class in binary are of the "
    "class 0; expected two classes at least (pixels of value 255 are left out; --void none "
    "makes them a class)",
    "a.zarr HALF --masks binary --solver knn --k 2": "are of the class 0; expected two classes",
    "a.zarr HALF --masks blank --solver sgd --steps 2": "are of the class 0; expected two classes",
    "a.zarr b.zarr --masks a-masks --masks blank-b": "4 test images of b that have a class",
    "a.zarr HALF --masks pictures": "no .png files below pictures",
    "a.zarr HALF --masks none": "no file or folder",
    "a.zarr HALF --masks broken.json": "broken.json",
    "a.zarr HALF --masks bare.json": "bare.json",
    "a.zarr HALF MASKS --ignore dog": "--ignore dog: no class",
    "a.zarr HALF MASKS --ignore 256": "--ignore 256: no class",
    "a.zarr HALF MASKS --ignore 0,1,2,4": "training images of a has a class",
    "a.zarr MASKS": "give exactly one of TEST",
    "a.zarr b.zarr MASKS --masks b-masks HALF": "give exactly one of TEST",
    "a.zarr MASKS --split val": "has no split 'val'",
    "a.zarr MASKS --split others.txt": "others.txt",
    "a.zarr MASKS --split all.txt": "no image is left to train",
    "a.zarr again=a.zarr MASKS": "test images of again are in a too",
    "a.zarr b.zarr MASKS MASKS": "give each once",
    "a.zarr fine.zarr MASKS --masks fine-masks": "blocks.0.out differs between a and fine",
    "a.zarr wide.zarr MASKS --masks wide-masks": "blocks.0.out differs between a and wide",
    "a.zarr one.zarr MASKS --masks one-masks": "blocks.1.out",
    "a.zarr HALF MASKS --sites blocks.9.out": "blocks.9.out",
    "vectors.zarr HALF MASKS --sites head": "no grid of patches",
    "bare.zarr HALF MASKS": "does not say how its images were resized",
    "nan.zarr HALF MASKS": "nan holds numbers in blocks.0.out that are not finite",
    "uneven.zarr HALF MASKS --solver knn": "are not of equal whole pixels of the input",
    "none.zarr HALF MASKS": "none.zarr",
    "a.zarr HALF MASKS --untrained none.zarr": "none.zarr",
    "a.zarr HALF MASKS --untrained untrained/a.zarr --l2-relative 1": "lacks the site blocks.1",
    "a.zarr HALF MASKS --metric rmse": "no metric 'rmse'; metrics of dense",
    "a.zarr HALF MASKS --eigen-crop": "--eigen-crop",
    "a.zarr HALF MASKS --l2-relative holdout --l2-relative 1": "holdout chooses the value",
    "a.zarr MASKS --holdout 0.7": "l2 cannot be chosen",
    "a.zarr HALF MASKS --solver knn --l2-relative 1": "--l2-relative belongs to --solver ridge",
    "a.zarr HALF MASKS --solver sgd --l2-relative 1": "or logistic, not to sgd",
    "a.zarr HALF MASKS --k 3": "--k belongs to --solver knn or hummingbird, not to ridge",
    "a.zarr HALF MASKS --bank 3": "--bank belongs to --solver logistic",
    "a.zarr HALF MASKS --steps 3": "--steps belongs to --solver sgd, not to ridge",
    "a.zarr HALF MASKS --l2 1": "--l2-relative",
    "a.zarr HALF MASKS --distance l2": "--distance belongs to --solver knn, not to ridge",
    "a.zarr HALF MASKS --solver knn --balanced": "--balanced belongs to --solver ridge, not to kn",
    "a.zarr HALF MASKS --preset capi --solver ridge": "--preset capi has no --solver ridge",
    "a.zarr HALF MASKS --concat last0": "'last0'; expected lastN, like last4",
    "a.zarr HALF MASKS --concat four": "'four'; expected lastN",
    "a.zarr HALF MASKS --l2-relative 0": "'0'; expected a number above 0 or holdout",
}


@pytest.mark.parametrize("words", WRONG)
def test_one_line_names_what_is_wrong(
    folder: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    full = words.replace("HALF", "--holdout 0.5").replace("MASKS", "--masks a-masks")
    result = command(*full.split(), "-o", "-")
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2), result.output
    assert WRONG[words] in flat(result.stderr)
    assert result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["solver", "preset", "distance", "resolution"])
def test_unknown_words_are_refused(folder: Path, option: str) -> None:
    with pytest.raises(VitseeError, match=f"no {option} 'cell'; expected "):
        run(folder / "a.zarr", masks=folder / "a-masks", holdout=0.5, **{option: "cell"})
