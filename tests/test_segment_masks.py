"""Segments of mask sources: COCO's objects, panoptic segments, several files, PNG values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitsee_core.demo.coco import SIZES, category_id, outlines, run_lengths, write_coco
from vitsee_core.demo.scenes import class_names, random_scene
from vitsee_core.truth.masks import FOREGROUND, VOID, open_masks
from vitsee_core.truth.masks.coco import pixels_of
from vitsee_stores.errors import VitseeError

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    write_coco(folder, n_images=4)
    return folder


def write_json(path: Path, **changes: Any) -> Path:
    content = {
        "images": [{"id": 7, "file_name": "a.jpg", "height": 3, "width": 4}],
        "annotations": [
            {
                "id": 1,
                "image_id": 7,
                "category_id": 2,
                "segmentation": [[0, 0, 2, 0, 2, 2, 0, 2]],
            }
        ],
        "categories": [{"id": 2, "name": "cat"}, {"id": 5, "name": "dog"}],
    }
    path.write_text(json.dumps(content | changes))
    return path


def refused(*paths: Path, **options: Any) -> str:
    with pytest.raises(VitseeError) as caught:
        open_masks(paths, **options).segments(0)
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---------------------------------------------------------------- the miniature sets


def test_objects_are_those_of_the_scenes(coco: Path) -> None:
    source = open_masks(coco / "annotations" / "instances_val2017.json")
    assert source.keys == [f"{139 + 1000 + 17 * k:012d}.jpg" for k in range(4)]
    names = class_names()
    for k in range(3):
        scene = random_scene(SIZES[k], 4, (0, 1, k))
        seen = [i for i in range(4) if scene.masks[i].any()]
        found = source.segments(k)
        assert [one.category for one in found] == [names[scene.classes[i]] for i in seen]
        assert not any(one.crowd for one in found)
        for one, i in zip(found, seen, strict=True):
            assert np.array_equal(one.mask, scene.masks[i])
    # the fourth image has a crowd, as run lengths
    scene = random_scene(SIZES[0], 4, (0, 1, 3))
    crowd = source.segments(3)[0]
    assert crowd.crowd
    assert np.array_equal(crowd.mask, scene.masks[0] | scene.masks[1])


def test_panoptic_segments_cover_every_pixel_once(coco: Path) -> None:
    annotations = coco / "annotations"
    source = open_masks(annotations / "panoptic_val2017.json")
    objects = open_masks(annotations / "instances_val2017.json")
    for k in range(3):
        found = source.segments(k)
        assert (np.sum([one.mask for one in found], axis=0) == 1).all()
        assert [one.category for one in found[-2:]] == ["floor", "wall"]
        for one, other in zip(found, objects.segments(k), strict=False):
            assert one.category == other.category
            assert np.array_equal(one.mask, other.mask)
        # for saliency: things before stuff
        assert np.array_equal(source.read(k) == FOREGROUND, objects.read(k) == FOREGROUND)
    moved = annotations / "elsewhere.json"
    shutil.copy(annotations / "panoptic_val2017.json", moved)
    where = annotations / "panoptic_val2017"
    again = open_masks(moved, panoptic=where).segments(0)
    for one, other in zip(again, source.segments(0), strict=True):
        assert np.array_equal(one.mask, other.mask)
    assert "no folder" in refused(moved)
    assert refused(moved).endswith("say where with --panoptic DIR")


def test_parts_of_three_files(coco: Path) -> None:
    files = [coco / "parts" / f"{split}.json" for split in ("train", "val", "test")]
    source = open_masks(files)
    single = [open_masks(file) for file in files]
    assert source.keys == [key for one in single for key in one.keys]
    at = len(single[0].keys) + 1
    assert source.where(at) == single[1].where(1)
    assert [one.category for one in source.segments(at)] == ["Top Upper", "Top Lower"]
    assert np.array_equal(source.segments(at)[0].mask, single[1].segments(1)[0].mask)
    assert np.array_equal(source.read(at), single[1].read(1))
    # image 0 of each class has an outline of two points before its others
    first = json.loads(files[0].read_text())["annotations"][0]
    assert len(first["segmentation"][0]) == 4
    assert source.segments(0)[0].mask.sum() == first["area"]
    again = Path(shutil.copy(files[0], coco / "again.json"))
    assert f"is in {files[0]} and in {again}" in refused(files[0], again)
    assert f"is in {files[0]} twice" in refused(files[0], files[0])
    assert source.rules == single[0].rules
    assert source.void == "those of crowd regions"


# ---------------------------------------------------------------- shapes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_outlines_and_run_lengths_are_the_same_pixels(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((int(rng.integers(1, 12)), int(rng.integers(1, 12)))) < share
    assert np.array_equal(pixels_of(outlines(mask), mask.shape), mask)
    assert np.array_equal(pixels_of(run_lengths(mask), mask.shape), mask)


def test_an_outline_of_two_points_is_no_box(tmp_path: Path) -> None:
    square = [1, 1, 3, 1, 3, 3, 1, 3]
    short = [0, 0, 4, 3]  # pycocotools takes the whole list for boxes x, y, width, height
    both = pixels_of([short, square], (3, 4))
    assert np.array_equal(both, pixels_of([square], (3, 4)))
    assert both.sum() == 4
    assert not pixels_of([short], (3, 4)).any()
    entries = [
        {"id": number, "image_id": 7, "category_id": 2, "segmentation": [outline]}
        for number, outline in enumerate((short, square))
    ]
    source = open_masks(write_json(tmp_path / "a.json", annotations=entries))
    assert not source.segments(0)[0].mask.any()
    line = refused(write_json(tmp_path / "a.json", annotations=entries[:1]))
    assert "no outline encloses a pixel (annotations 0)" in line


# ---------------------------------------------------------------- PNG folders


def test_values_are_categories(tmp_path: Path) -> None:
    values = np.array([[0, 3, 3], [40, 12, 255]], np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    found = open_masks(tmp_path).segments(0)
    assert [one.category for one in found] == ["3", "12", "40"]
    assert found[0].mask.tolist() == [[False, True, True], [False, False, False]]
    # PartImageNet (Seg): parts from 0 on, 40 is background
    other = open_masks(tmp_path, background=[40], void="none").segments(0)
    assert [one.category for one in other] == ["0", "3", "12", "255"]
    assert sum(one.mask.sum() for one in other) == 5


# ---------------------------------------------------------------- refusals


def test_categories_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for categories in ([], [{"id": 3, "name": "cow"}], [{"id": 2, "name": ""}]):
        line = refused(write_json(path, categories=categories))
        assert "the annotation 1 is of category 2, which has no name" in line
    # saliency asks for no name
    assert (open_masks(path).read(0) == FOREGROUND).sum() == 4


def test_two_categories_of_one_name_stay_apart(tmp_path: Path) -> None:
    entry = {"image_id": 7, "segmentation": [[0, 0, 2, 0, 2, 2]]}
    path = write_json(
        tmp_path / "a.json",
        categories=[
            {"id": i, "name": name} for i, name in ((1, "head"), (2, "head"), (3, "foot"))
        ],
        annotations=[entry | {"id": i, "category_id": i} for i in (1, 2, 3)],
    )
    names = [one.category for one in open_masks(path).segments(0)]
    assert names == ["head (1)", "head (2)", "foot"]


def test_run_lengths_of_another_size(tmp_path: Path) -> None:
    runs = {"counts": [0, 12], "size": [4, 3]}
    entry = {"id": 9, "image_id": 7, "category_id": 2, "segmentation": runs}
    line = refused(write_json(tmp_path / "a.json", annotations=[entry]))
    assert "annotation 9" in line
    assert "is of 3 x 4 pixels; expected 4 x 3" in line


def panoptic(folder: Path, colours: Any, **changes: Any) -> Path:
    png = folder / "p"
    png.mkdir(exist_ok=True)
    Image.fromarray(np.asarray(colours, np.uint8)).save(png / "a.png")
    number = 2 + 256 * 3 + 65536
    segments = [
        {"id": number, "category_id": 2},
        {"id": 9, "category_id": 5, "iscrowd": 1},
    ]
    one = {"image_id": 7, "file_name": "a.png", "segments_info": segments} | changes
    return write_json(folder / "p.json", annotations=[one])


def test_panoptic_by_hand(tmp_path: Path) -> None:
    path = panoptic(tmp_path, [[[2, 3, 1], [9, 0, 0]], [[0, 0, 0], [2, 3, 1]]])
    source = open_masks(path)
    first, second = source.segments(0)
    assert (first.category, second.category) == ("cat", "dog")
    assert first.mask.tolist() == [[True, False], [False, True]]
    assert second.mask.tolist() == [[False, True], [False, False]]
    assert (first.crowd, second.crowd) == (False, True)
    # no isthing: all is stuff; the crowd and the pixel of no segment are void
    assert (source.read(0) == VOID).tolist() == [[False, True], [True, False]]


def test_panoptic_refusals(tmp_path: Path) -> None:
    path = panoptic(tmp_path, [[[5, 0, 0], [9, 0, 0]]])
    assert f"a.png has segment 5, which {path} does not list" in refused(path)
    other = Path(shutil.copy(path, tmp_path / "q.json"))
    assert "of one panoptic file's PNG files" in refused(
        path, other, panoptic=tmp_path / "p"
    )
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "has mode L"),
        ({"file_name": "../a.png"}, "is not below the folder"),
        ({"file_name": "/etc/a.png"}, "is not below the folder"),
        ({"file_name": "missing.png"}, "cannot read missing.png"),
        ({"segments_info": [{"id": "5", "category_id": 2}]}, "has the number '5'"),
        ({"segments_info": [{"id": 5}]}, "has the category None"),
        ({"segments_info": [{"id": 5, "category_id": [1]}]}, "has the category [1]"),
        ({"segments_info": [5]}, "cannot be read (TypeError"),
        ({"image_id": 8}, "is of image 8, which is none"),
    )
    for change, phrase in changes:
        assert phrase in refused(panoptic(tmp_path, [[5]], **change))


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json")
    assert "leave it out" in refused(path, panoptic=tmp_path)
    assert "--background and --void" in refused(path, background=[3])
    assert "no masks were given" in refused()


def test_the_writer_is_deterministic(coco: Path, tmp_path: Path) -> None:
    write_coco(tmp_path, n_images=4)
    files = sorted(path.relative_to(coco) for path in coco.rglob("*") if path.is_file())
    for name in files:
        if name.name not in ("elsewhere.json", "again.json"):
            assert (tmp_path / name).read_bytes() == (coco / name).read_bytes()
    written = json.loads((coco / "annotations" / "instances_val2017.json").read_text())
    ids = [one["id"] for one in written["categories"]]
    assert ids == [category_id(i) for i in range(10)] == list(range(1, 20, 2))
