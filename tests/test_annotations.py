"""COCO annotation files whose labels would vanish: taken right, counted and named, or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.stores import write_sites
from vitsee_core.analyses.spatial import run as spatial
from vitsee_core.demo.class_maps import write_class_maps
from vitsee_core.runtime.execution import Execution
from vitsee_core.truth.masks import open_masks
from vitsee_core.truth.masks.class_maps import open_class_maps
from vitsee_core.truth.masks.coco import lies_outside, pixels_of
from vitsee_core.truth.masks.labels import BACKGROUND, FOREGROUND, VOID
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_core.truth.masks.segments import LabelledSegments, Segmentation, examples_of
from vitsee_core.truth.masks.sources import lost_annotations
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

pytest.importorskip("pycocotools")

SQUARE = [[1, 1, 3, 1, 3, 3, 1, 3]]  # 2 x 2 pixels from 1, 1
CORNER = [[0, 0, 1, 0, 1, 1, 0, 1]]  # the first pixel
IMAGES = [
    {"id": 1, "file_name": "a.jpg", "height": 4, "width": 6},
    {"id": 2, "file_name": "b.jpg", "height": 4, "width": 6},
]
CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]


def annotation(number: int, **changes: Any) -> dict[str, Any]:
    first = {
        "id": number,
        "image_id": 1,
        "category_id": 1,
        "segmentation": SQUARE,
        "iscrowd": 0,
    }
    return first | changes


def written(folder: Path, *annotations: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "a.json"
    content = {"images": IMAGES, "annotations": annotations, "categories": CATEGORIES}
    path.write_text(json.dumps(content | changes))
    return path


def square(value: int, background: int = BACKGROUND) -> list[list[int]]:
    pixels = np.full((4, 6), background)
    pixels[1:3, 1:3] = value
    return pixels.tolist()


def refused(path: Path) -> str:
    with pytest.raises(VitseeError) as caught:
        open_masks(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("in_images", "in_annotations"), [(7, "7"), ("7", 7), ("x7", "x7")]
)
def test_an_id_as_text_is_that_of_its_number(
    tmp_path: Path, in_images: Any, in_annotations: Any
) -> None:
    """Programs that keep ids as keys of a dictionary make text of them; before, every pixel became
    background."""
    images = [IMAGES[0] | {"id": in_images}]
    categories = [{"id": in_images, "name": "cat"}]
    entry = annotation(5, image_id=in_annotations, category_id=in_annotations)
    path = written(tmp_path, entry, images=images, categories=categories)
    assert open_masks(path).read(0).tolist() == square(FOREGROUND)
    assert open_masks(path).segments(0)[0].category == "cat"
    assert open_class_maps(path).read(0).tolist() == square(1)
    assert "annotations of no image" not in open_masks(path).rules


def test_the_exact_id_comes_first(tmp_path: Path) -> None:
    images = [IMAGES[0], IMAGES[1] | {"id": "1"}]
    path = written(tmp_path, annotation(5), annotation(6, image_id="1", segmentation=CORNER),
                   images=images)  # fmt: skip
    first, second = (open_masks(path).read(i) for i in (0, 1))
    assert first.tolist() == square(FOREGROUND)
    assert second.sum() == second[0, 0] == FOREGROUND


def test_annotations_of_no_image_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [annotation(number, image_id=number) for number in (7, 8)]
    path = written(tmp_path, annotation(1), *others)
    with caplog.at_level(logging.WARNING):
        masks = open_masks(path)
    assert (
        "2 of 3 annotations are of none of its images (image_id 7, 8) and left"
        in caplog.text
    )
    assert masks.rules["annotations of no image"] == "2 of 3"
    assert open_class_maps(path).rules["annotations of no image"] == "2 of 3"
    assert masks.read(0).tolist() == square(FOREGROUND)


@pytest.mark.parametrize("number", ["007", 7, "a.jpg", 1.5, None, -1])
def test_annotations_of_no_image_at_all_are_refused(tmp_path: Path, number: Any) -> None:
    line = refused(written(tmp_path, annotation(5, image_id=number)))
    assert "none of its 1 annotations is of an image of it" in line
    assert f"image_id {json.dumps(number)}, its images the ids 1," in line


@pytest.mark.parametrize(
    ("value", "crowd"),
    [
        (0, False), (1, True), ("0", False), ("1", True), (False, False), (True, True),
        (None, False), ("false", False), ("True", True), (0.0, False), (1.0, True), ("", False),
    ],
)  # fmt: skip
def test_iscrowd_as_text(tmp_path: Path, value: Any, crowd: bool) -> None:
    """`"0"` is no crowd, whose pixels would be void."""
    path = written(tmp_path, annotation(5, iscrowd=value))
    assert open_masks(path).read(0).tolist() == square(VOID if crowd else FOREGROUND)
    assert open_masks(path).segments(0)[0].crowd == crowd
    assert open_class_maps(path).read(0).tolist() == square(IGNORED if crowd else 1)


@pytest.mark.parametrize("value", [2, -1, "no", "yes", [], {}, 0.5])
def test_iscrowd_that_is_neither(tmp_path: Path, value: Any) -> None:
    line = refused(written(tmp_path, annotation(5, iscrowd=value)))
    assert f"iscrowd is {value!r} in the annotation 5, expected 0 or 1" in line


def test_two_images_of_one_id_are_refused(tmp_path: Path) -> None:
    """As in files that were merged: each would have the objects of both."""
    images = [IMAGES[0], IMAGES[1] | {"id": 1}]
    assert "a.jpg and b.jpg have the id 1" in refused(
        written(tmp_path, annotation(5), images=images)
    )


def test_two_categories_of_one_id_are_refused(tmp_path: Path) -> None:
    categories = [*CATEGORIES, {"id": 1, "name": "cow"}]
    line = refused(written(tmp_path, annotation(5), categories=categories))
    assert "the category 1 is called cat and cow" in line
    twice = [*CATEGORIES, CATEGORIES[0]]
    assert open_masks(written(tmp_path, annotation(5), categories=twice)).categories == [
        "cat",
        "dog",
    ]


WITHOUT_MASK: dict[str, Any] = {
    "an empty list": [],
    "none": None,
    "no text": "",
    "an outline without points": [[]],
    "two points": [[0, 0, 4, 3]],
    "shares of the image": [[0.1, 0.1, 0.7, 0.1, 0.7, 0.9, 0.1, 0.9]],
    "one point, thrice": [[2, 2, 2, 2, 2, 2]],
    "a horizontal line": [[0, 2, 3, 2, 5, 2]],
    "a slanted line": [[0, 0, 2, 2, 3, 3, 1, 1]],
    "runs of background": {"counts": [24], "size": [4, 6]},
    "runs of background and none": {"counts": [24, 0], "size": [4, 6]},
    "a string of background": {"counts": "h0", "size": [4, 6]},
}


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_objects_without_a_mask_are_counted_and_named(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = annotation(7, segmentation=WITHOUT_MASK[name], bbox=[1, 1, 2, 2])
    with caplog.at_level(logging.WARNING):
        masks = open_masks(written(tmp_path, annotation(5), entry))
    assert "1 of 2 annotations have no mask (7)" in caplog.text
    assert masks.rules["annotations without a mask"] == "1 of 2"
    caplog.clear()
    assert "expected" in refused(written(tmp_path, entry))
    nameless = written(tmp_path, annotation(5), entry | {"id": [7]})
    assert open_masks(nameless).rules["annotations without a mask"] == "1 of 2"
    boxes = {key: value for key, value in entry.items() if key != "segmentation"}
    assert "no segmentation in any annotation" in refused(written(tmp_path, boxes))


@pytest.mark.parametrize(
    "shape",
    [
        CORNER,
        [[0.2, 0.2, 1.4, 0.2, 1.4, 1.4, 0.2, 1.4]],
        [[1, 1, 3, 3, 3, 1, 1, 3]],  # crosses itself: its area with sign is 0
        [[0, 0, 4, 3], SQUARE[0]],
        {"counts": [23, 1], "size": [4, 6]},
    ],
)
def test_small_masks_are_masks(
    tmp_path: Path, shape: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        masks = open_masks(written(tmp_path, annotation(5, segmentation=shape)))
    assert caplog.text == ""
    assert masks.read(0).any()


FAR_RIGHT = [[6, 1, 9, 1, 9, 3, 6, 3]]  # of 4 x 6 pixels
OUTSIDE = {
    "to the right": FAR_RIGHT,
    "below": [[1, 4, 3, 4, 3, 6, 1, 6]],
    "to the left": [[-3, 1, 0, 1, 0, 3, -3, 3]],
    "above": [[1, -3, 3, -3, 3, 0, 1, 0]],
    "to both sides": [*FAR_RIGHT, [-3, 1, 0, 1, 0, 3, -3, 3]],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_objects_outside_of_their_image_are_counted_and_named(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes of the resized image with the outlines of the original; before, without a line."""
    entry = annotation(7, segmentation=OUTSIDE[name])
    with caplog.at_level(logging.WARNING):
        masks = open_masks(written(tmp_path, annotation(5), entry))
    assert "1 of 2 annotations lie wholly outside of their image (7)" in caplog.text
    for rules in (masks.rules, open_class_maps(tmp_path / "a.json").rules):
        assert rules["annotations outside of their image"] == "1 of 2"
    assert masks.read(0).tolist() == square(FOREGROUND)
    line = refused(written(tmp_path, entry))
    assert "no outline reaches into its image (annotations 7); expected x and y" in line
    without_mask = annotation(8, segmentation=[])
    assert "(annotations 7)" in refused(written(tmp_path, entry, without_mask))


def test_what_is_lost_reaches_sidecars(tmp_path: Path) -> None:
    """Commands count them whether they read masks of images (`spatial`) or segments (`cluster`,
    `knn`)."""
    left = annotation(5, segmentation=[[0, 0, 2, 0, 2, 1, 0, 1]])
    right = annotation(6, category_id=2, segmentation=[[4, 2, 6, 2, 6, 4, 4, 4]])
    outside = annotation(7, segmentation=FAR_RIGHT)
    path = written(tmp_path, left, right, outside, images=IMAGES[:1])
    pixels = np.random.default_rng(0).normal(size=(1, 24, 3))
    layout = TokenLayout(prefix=(), grid=(4, 6), stride_px=(1.0, 1.0))
    store = write_sites(
        tmp_path / "s.zarr",
        {"blocks.0.out": pixels},
        layout=layout,
        ids=["a.jpg"],
        sizes=(4, 6),
        transform={"input_size": (3, 4, 6), "crop_mode": "squash", "crop_pct": 1.0,
                   "interpolation": "nearest", "mean": (0.5,) * 3, "std": (0.5,) * 3},
    )  # fmt: skip
    counts = {"annotations outside of their image": "1 of 3"}
    table = spatial(store, masks=path, metrics="srss")
    assert table.notes["masks"] == {"source": str(path), "foreground": "any"} | counts
    segments = examples_of(
        Segmentation(path), [(store, store.select(["blocks"]))], Execution()
    )
    data = segments.rows(store)
    assert isinstance(data, LabelledSegments)
    assert data.source.items() >= counts.items()
    others = written(tmp_path / "more", annotation(8, image_id=2), annotation(9, image_id=9),
                     images=IMAGES[1:])  # fmt: skip
    assert lost_annotations(open_masks([path, others])) == {
        "annotations outside of their image": f"1 of 3 in {path}",
        "annotations of no image": f"1 of 2 in {others}",
    }


def test_what_lies_outside_has_no_pixel() -> None:
    """Against pycocotools: outlines that are called outside cover nothing, and of those that
    reach half a pixel and more into the image none is."""
    rng = np.random.default_rng(0)
    n_outside = 0
    for _ in range(300):
        corner = rng.uniform(-8, 12, 2)
        width, height = rng.uniform(1, 5, 2)
        x, y = corner
        outline = [x, y, x + width, y, x + width, y + height, x, y + height]
        n_pixels = int(pixels_of([outline], (4, 6)).sum())
        outside = lies_outside([outline], (4, 6))
        n_outside += outside
        assert not (outside and n_pixels)
        if x < 5.5 and x + width > 0.5 and y < 3.5 and y + height > 0.5:
            assert not outside
    assert 100 < n_outside < 250


@pytest.mark.parametrize("shape", [[["a", 1]], [[1, 2, 3]], [[float("nan")] * 6]])
def test_damaged_outlines_are_refused_where_they_are_read(
    tmp_path: Path, shape: Any
) -> None:
    masks = open_masks(
        written(tmp_path, annotation(5), annotation(7, segmentation=shape))
    )
    with pytest.raises(VitseeError, match="cannot read the annotation 7"):
        masks.read(0)


# ---------------------------------------------------------------- panoptic files


def panoptic(folder: Path, *entries: dict[str, Any], **changes: Any) -> Path:
    (folder / "a").mkdir(exist_ok=True)
    Image.fromarray(np.full((4, 6, 3), [5, 0, 0], np.uint8)).save(folder / "a" / "a.png")
    first = {
        "image_id": 1,
        "file_name": "a.png",
        "segments_info": [{"id": 5, "category_id": 1}],
    }
    things = [one | {"isthing": 1} for one in CATEGORIES]
    annotations = [first | entry for entry in entries]
    return written(folder, *annotations, **{"categories": things} | changes)


def test_panoptic_ids_and_flags_as_text(tmp_path: Path) -> None:
    segments = [{"id": 5, "category_id": "1", "iscrowd": "0"}]
    path = panoptic(tmp_path, {"image_id": "1", "segments_info": segments})
    assert (open_masks(path).read(0) == FOREGROUND).all()
    assert open_masks(path).segments(0)[0].category == "cat"
    assert not open_masks(path).segments(0)[0].crowd
    stuff = [one | {"isthing": "0"} for one in CATEGORIES]
    assert (
        open_masks(panoptic(tmp_path, {}, categories=stuff)).read(0) == BACKGROUND
    ).all()


def test_panoptic_entries_that_are_there_twice(tmp_path: Path) -> None:
    line = refused(panoptic(tmp_path, {}, {"file_name": "b.png"}))
    assert "a.png and b.png are of the image 1" in line
    twice = [{"id": 5, "category_id": 1}, {"id": 5, "category_id": 2}]
    line = refused(panoptic(tmp_path, {"segments_info": twice}))
    assert "the segment 5 of a.png is there twice" in line
    assert "the file 7 has no name" in refused(panoptic(tmp_path, {"file_name": 7}))
    odd = [{"id": 5, "category_id": 1, "iscrowd": "maybe"}]
    assert "iscrowd is 'maybe'" in refused(panoptic(tmp_path, {"segments_info": odd}))


# ---------------------------------------------------------------- folders of PNG files


def test_ade20k_is_found_from_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its splits is no plain folder, in which 0 would be a class."""
    write_class_maps(tmp_path, n_images=1)
    root = tmp_path / "ADEChallengeData2016"
    every = open_class_maps(root)
    for path in (root / "annotations", root / "annotations" / "validation"):
        maps = open_class_maps(path)
        assert maps.layout == every.layout and maps.classes == every.classes
    values = np.asarray(Image.open(next(path.glob("*.png"))))
    assert (maps.read(0)[values == 0] == IGNORED).all()
    assert (maps.read(0)[values > 0] == values[values > 0] - 1).all()
    monkeypatch.chdir(root / "annotations" / "validation")
    assert open_class_maps(Path(".")).layout == every.layout


def test_ade20k_without_its_table_is_no_plain_folder(tmp_path: Path) -> None:
    """Neither by the names of its files nor by the name of its folder."""
    write_class_maps(tmp_path, n_images=1)
    root = tmp_path / "ADEChallengeData2016"
    (root / "objectInfo150.txt").unlink()
    moved = tmp_path / "maps"
    moved.mkdir()
    values = np.array([[0, 3, 255]], np.uint8)
    Image.fromarray(values).save(moved / "ADE_val_00000007.png")
    for path in (tmp_path, root, root / "annotations" / "training", moved):
        with pytest.raises(VitseeError, match=r"objectInfo150\.txt is not beside"):
            open_class_maps(path)
    assert open_class_maps(moved, void=0).read(0).tolist() == [[IGNORED, 3, 0]]
    assert open_class_maps(moved, void=255).read(0).tolist() == [[0, 3, IGNORED]]


def test_voc_s_other_folders(tmp_path: Path) -> None:
    for name in ("SegmentationClassAug", "SegmentationObject"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.array([[0, 3, 255]], np.uint8)).save(tmp_path / name / "a.png")
    more = open_class_maps(tmp_path / "SegmentationClassAug")
    assert more.layout == "Pascal VOC" and more.read(0).tolist() == [[0, 3, IGNORED]]
    with pytest.raises(
        VitseeError, match="numbers the objects of each image, not classes"
    ):
        open_class_maps(tmp_path / "SegmentationObject")
    assert open_masks(tmp_path / "SegmentationObject").read(0).tolist() == [
        [BACKGROUND, FOREGROUND, VOID]
    ]


def test_numbers_of_objects_are_no_categories(tmp_path: Path) -> None:
    """Segments of `SegmentationObject` would have the first, second, ... object as classes."""
    Image.fromarray(np.eye(4, dtype=np.uint8)).save(tmp_path / "a.png")
    folder = tmp_path / "SegmentationObject"
    folder.mkdir()
    (tmp_path / "a.png").rename(folder / "a.png")
    with pytest.raises(VitseeError, match="no categories; expected the folder Segm"):
        Segmentation(folder).open()
    assert open_masks(folder).read(0)[0, 0] == FOREGROUND


def test_cityscapes_train_ids(tmp_path: Path) -> None:
    """What its scripts make; where the labels lie beside them, these are read."""
    city = tmp_path / "gtFine" / "val" / "x"
    city.mkdir(parents=True)
    train_ids = np.array([[0, 18, 255]], np.uint8)
    Image.fromarray(train_ids).save(city / "x_000_gtFine_labelTrainIds.png")
    maps = open_class_maps(tmp_path)
    assert maps.layout == "Cityscapes" and len(maps.classes) == 19
    assert list(maps.keys) == ["val/x/x_000_leftImg8bit.png"]
    assert maps.read(0).tolist() == [[0, 18, IGNORED]]
    label_ids = np.array([[7, 33, 0]], np.uint8)
    Image.fromarray(label_ids).save(city / "x_000_gtFine_labelIds.png")
    assert open_class_maps(tmp_path).read(0).tolist() == maps.read(0).tolist()
    assert open_class_maps(city).layout == "Cityscapes"
    Image.fromarray(np.array([[19]], np.uint8)).save(
        city / "y_000_gtFine_labelTrainIds.png"
    )
    (city / "x_000_gtFine_labelIds.png").unlink()
    with pytest.raises(
        VitseeError, match="has the value 19, which is no class of Cityscapes"
    ):
        open_class_maps(tmp_path).read(1)
