"""`--only`: lines of published lists against ids, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.extractions import VIT, extract, extracted, plant_images
from tests.image_files import plant
from vitsee_core.images import DataError, open_source, select
from vitsee_core.images.selection import named_only
from vitsee_stores import open_store

VIDEOS = [
    "480p/bear/00000.jpg",
    "480p/bear/00001.jpg",
    "480p/bus/00000.jpg",
    "480p/sub/bear.jpg",
]


def lines(path: Path, *texts: str) -> Path:
    path.write_text("\n".join(texts))
    return path


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("480p/bear/00001.jpg", [1]),  # an id
        ("480p/bear/00001", [1]),  # without its ending
        ("480p/bear", [0, 1]),  # a folder
        ("480p/bear/", [0, 1]),
        ("./480p/bus", [2]),
        ("bus", [2]),  # the folder's own name
        ("bus autobus, coach\nbear  bear", [0, 1, 2]),  # as LOC_synset_mapping.txt
        ("480p", [0, 1, 2, 3]),
        ("bear", [0, 1]),  # a folder, before the file of that name
        ("00001", [1]),  # a file's name that occurs once
        ("480p/bus\n\n  480p/sub/bear.jpg  \n", [2, 3]),
        ("\ufeff480p/bus\r\n480p/bus", [2]),
    ],
)
def test_lines_by_hand(text: str, places: list[int], tmp_path: Path) -> None:
    path = tmp_path / "val.txt"
    path.write_bytes(text.encode())
    assert np.flatnonzero(named_only(path, VIDEOS, "DAVIS")).tolist() == places


@pytest.mark.parametrize(
    ("texts", "phrase"),
    [
        (
            ["bus", "cow"],
            "line 2 of .*val.txt, 'cow', names no image of DAVIS; expected ids as",
        ),
        (
            ["cow", "bus", "cat", "bu"],
            "line 1 of .*, 'cow', .* DAVIS, and 2 more lines; expected",
        ),
        (["0000"], "names no image"),
        (
            ["00000"],
            r"names 2 images of DAVIS: 480p/bear/00000\.jpg and 480p/bus/00000\.jpg;",
        ),
        (["bear\\00000"], "names no image"),
        ([" ", ""], "is empty; --only expects a list"),
    ],
)
def test_every_line_names_something(
    texts: list[str], phrase: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=phrase) as caught:
        named_only(lines(tmp_path / "val.txt", *texts), VIDEOS, "DAVIS")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_lists(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^no file .*nowhere\.txt; --only expects a list of images"
    ):
        named_only(tmp_path / "nowhere.txt", VIDEOS, "DAVIS")
    with pytest.raises(DataError, match="no file"):
        named_only(tmp_path, VIDEOS, "DAVIS")
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        named_only(tmp_path / "a.bin", VIDEOS, "DAVIS")


def test_the_chosen_images_are_ordered_as_ever(tmp_path: Path) -> None:
    data = plant(tmp_path / "d", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    source = open_source(str(data))
    only = lines(tmp_path / "only.txt", "b", "a/3")
    everything = select(source).samples.ids
    found = select(source, only=only)
    wanted = [name for name in everything if name.startswith("b/") or name == "a/3.png"]
    assert found.samples.ids == wanted and len(wanted) == 6
    assert found.identity["only"] == str(only)
    in_order = select(source, only=only, order="dataset", images=3)
    assert in_order.samples.index.tolist() == sorted(in_order.samples.index.tolist())
    assert set(in_order.samples.ids) <= set(wanted) and len(in_order) == 3
    assert select(source, only=only, per_class=1).samples.labels.tolist().count(0) == 1
    assert "has 6 images, fewer than 7" in select(source, only=only, images=7).notes[0]


@pytest.mark.slow
def test_extract_only(tmp_path: Path) -> None:
    data = plant_images(tmp_path / "data", 6)
    only = lines(tmp_path / "only.txt", "class1", "000")
    command = [*VIT, "--data", data, "-o", tmp_path / "s.zarr", "--tokens", "pooled"]
    extracted(*command, "--only", only)
    store = open_store(tmp_path / "s.zarr")
    assert sorted(store.samples.id) == [
        "class0/000.png", "class1/001.png", "class1/003.png", "class1/005.png"
    ]  # fmt: skip
    extracted(*command, "--only", only)  # complete
    other = extract(*command)
    assert other.exit_code == 1 and "n_images is 4, given 6" in other.stderr
    swapped = extract(*command, "--only", lines(tmp_path / "o.txt", "class0", "001"))
    assert swapped.exit_code == 1 and "samples_fingerprint is" in swapped.stderr
    wrong = extract(*command, "--only", lines(tmp_path / "w.txt", "class7"))
    assert wrong.exit_code == 1 and "line 1 of" in wrong.stderr and wrong.stdout == ""
