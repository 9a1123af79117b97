"""Class maps in their authors' layouts: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitsee_core.demo.class_maps import BORDER, CITYSCAPES, write_class_maps
from vitsee_core.demo.coco import write_coco
from vitsee_core.truth.masks.class_maps import open_class_maps
from vitsee_core.truth.masks.png_maps import CITYSCAPES as OFFICIAL
from vitsee_core.truth.masks.png_maps import IGNORED, VOC_CLASSES
from vitsee_stores.errors import VitseeError


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_class_maps(folder, n_images=2)
    write_coco(folder / "coco", n_images=4)
    return folder


def test_voc_s_indices_are_classes(sets: Path) -> None:
    maps = open_class_maps(sets / "VOC2012")
    assert list(maps.classes) == list(VOC_CLASSES)
    assert len(maps.keys) == 4
    file = sets / "VOC2012" / "SegmentationClass" / maps.keys[0]
    image = Image.open(file)
    assert image.mode == "P"
    assert (maps.read(0) == np.asarray(image)).all()
    assert (maps.read(0) == BORDER).any()
    assert open_class_maps(file.parent).layout == "Pascal VOC"
    ignored = open_class_maps(sets / "VOC2012", ["background"])
    assert (ignored.read(0)[np.asarray(image) == 0] == IGNORED).all()


def test_ade20k_s_zero_is_no_class(sets: Path) -> None:
    root = sets / "ADEChallengeData2016"
    maps = open_class_maps(root)
    assert len(maps.classes) == 150
    assert maps.classes[0] == "wall"
    at = list(maps.keys).index("training/ADE_train_00000001.png")
    values = np.asarray(Image.open(root / "annotations" / maps.keys[at]))
    found = maps.read(at)
    assert (found[values == 0] == IGNORED).all()
    assert (found[values > 0] == values[values > 0] - 1).all()
    assert list(open_class_maps(root / "annotations").classes) == list(maps.classes)


def test_cityscapes_has_nineteen_classes(sets: Path) -> None:
    """labelId -> trainId as the data set's own scripts have it."""
    assert list(OFFICIAL) == [
        *(7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
    ]
    maps = open_class_maps(sets / "cityscapes")
    assert len(maps.classes) == 19
    assert all(key.endswith("_leftImg8bit.png") for key in maps.keys)
    assert len(maps.keys) == 4  # instanceIds beside them are none
    found = maps.read(0)
    assert set(np.unique(found)) <= {
        IGNORED,
        *(list(OFFICIAL).index(v) for v in CITYSCAPES),
    }
    assert (found == IGNORED).any()


def test_coco_s_panoptic_segments_and_objects(sets: Path) -> None:
    annotations = sets / "coco" / "annotations"
    panoptic = open_class_maps(annotations / "panoptic_val2017.json")
    content = json.loads((annotations / "panoptic_val2017.json").read_text())
    names = {one["id"]: one["name"] for one in content["categories"]}
    found = panoptic.read(0)
    for segment in content["annotations"][0]["segments_info"]:
        number = list(panoptic.classes).index(names[segment["category_id"]])
        assert (found == number).sum() >= segment["area"]
    assert not (found == IGNORED).any()
    objects = open_class_maps(annotations / "instances_val2017.json")
    assert objects.classes[0] == "background"
    things = np.isin(
        found, [list(panoptic.classes).index(n) for n in objects.classes[1:]]
    )
    assert ((objects.read(0) > 0) == things).all()
    crowded = objects.read(3)  # every fourth image has a crowd
    assert (crowded == IGNORED).any()
    less = open_class_maps(annotations / "instances_val2017.json", ["background", "Bag"])
    assert (less.read(0)[~things] == IGNORED).all()
    assert "Bag" not in less.classes
    both = open_class_maps(
        [annotations / "panoptic_val2017.json", annotations / "panoptic_train2017.json"]
    )
    assert len(both.keys) == 8
    assert (
        both.read(4) == open_class_maps(annotations / "panoptic_train2017.json").read(0)
    ).all()


def test_a_plain_folder_s_values_are_classes(tmp_path: Path) -> None:
    values = np.array([[0, 3, 254, 255]], np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    maps = open_class_maps(tmp_path, ["3"])
    assert maps.read(0).tolist() == [[0, IGNORED, 254, IGNORED]]
    assert maps.rules["ignored values"] == "3, 255"
    Image.fromarray(values == 3).save(tmp_path / "a.png")
    assert open_class_maps(tmp_path).read(0).tolist() == [[0, 1, 0, 0]]


def test_the_value_without_a_class_of_a_plain_folder(tmp_path: Path) -> None:
    values = np.array([[0, 3, 253, 255]], np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    every = open_class_maps(tmp_path, void="none")
    assert every.read(0).tolist() == [[0, 3, 253, 254]]  # numbers end at 254
    assert every.classes[254] == "255" and every.classes[3] == "3"
    assert every.rules["ignored values"] == ""
    other = open_class_maps(tmp_path, void=3)
    assert other.read(0).tolist() == [[0, IGNORED, 253, 3]]
    assert other.classes[3] == "255" and other.rules["ignored values"] == "3"
    for void in (None, 255):
        same = open_class_maps(tmp_path, void=void)
        assert same.read(0).tolist() == [[0, 3, 253, IGNORED]] and not same.classes
    fewer = open_class_maps(tmp_path, ["255"], void="none")
    assert fewer.read(0).tolist() == [[0, 3, 253, IGNORED]]


def test_where_the_value_without_a_class_is_refused(sets: Path, tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 254, 255]], np.uint8)).save(tmp_path / "a.png")
    assert "has the value 254, and at most 255 classes" in refused(tmp_path, (), "none")
    assert "--void 256: no value of" in refused(tmp_path, (), 256)
    assert "leave out --void" in refused(sets / "VOC2012", (), "none")
    annotations = sets / "coco" / "annotations"
    assert "leave it out" in refused(annotations / "panoptic_val2017.json", (), "none")


def refused(path: Path, *more: Any) -> str:
    with pytest.raises(VitseeError) as caught:
        open_class_maps(path, *more).read(0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_refused(sets: Path, tmp_path: Path) -> None:
    assert "expected a folder of PNG class maps" in refused(tmp_path / "none")
    assert "no .png files below" in refused(tmp_path)
    voc = tmp_path / "SegmentationClass"
    voc.mkdir()
    Image.fromarray(np.full((2, 2), 21, np.uint8)).save(voc / "a.png")
    assert "a.png has the value 21, which is no class of Pascal VOC" in refused(voc)
    assert open_class_maps(voc, ["21"]).read(0).tolist() == [[IGNORED] * 2] * 2
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(voc / "a.png")
    assert "a.png holds colours (mode RGB)" in refused(voc)
    ade = tmp_path / "ade" / "annotations"
    ade.mkdir(parents=True)
    Image.fromarray(np.full((2, 2), 151, np.uint8)).save(ade / "a.png")
    names = sets / "ADEChallengeData2016" / "objectInfo150.txt"
    (tmp_path / "ade" / names.name).write_text(names.read_text())
    assert "a.png has the value 151, which is no class of ADE20K" in refused(ade.parent)
    (tmp_path / "ade" / names.name).write_text("Idx\tName\n7\twall\n")
    assert "objectInfo150.txt is not the table" in refused(ade.parent)
    panoptic = sets / "coco" / "annotations" / "panoptic_val2017.json"
    assert "--ignore 255: no category" in refused(panoptic, ["255"])
    assert "names no categories" in refused(_without_categories(panoptic, tmp_path))
    with pytest.raises(VitseeError, match="have different classes"):
        open_class_maps([panoptic, panoptic.with_name("instances_val2017.json")])


def _without_categories(panoptic: Path, folder: Path) -> Path:
    content = json.loads(panoptic.read_text()) | {"categories": []}
    bare = folder / panoptic.name
    bare.write_text(json.dumps(content))
    (folder / panoptic.stem).symlink_to(panoptic.with_suffix(""))
    return bare
