"""Files of masks and depths are turned upright where the store's images were, and nowhere else."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitsee
from tests.test_images_not_plain import photo
from tests.videos import two_videos
from vitsee_core.analyses.propagate.davis import find_masks, find_videos, oriented_masks
from vitsee_core.runtime.execution import DEFAULT
from vitsee_core.truth.masks import FOREGROUND, ground_truth, open_masks
from vitsee_core.truth.masks.class_maps import open_class_maps
from vitsee_core.truth.masks.depth_maps import open_depth_maps
from vitsee_core.truth.masks.orientation import (
    has_orientation,
    oriented_as,
    say_orientations,
)

UPRIGHT = np.zeros((24, 16), np.uint8)
UPRIGHT[:12] = 7  # the upper half of the upright image, 16 wide and 24 high


def write_mask(
    path: Path, values: np.ndarray[Any, Any], orientation: int | None = None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(values).save(path, exif=exif)
    return path.parent


# In the file of orientation 6 the image lies turned to the left.
TURNED = np.rot90(UPRIGHT)


@pytest.mark.parametrize("opened", [open_masks, open_class_maps])
def test_files_follow_the_rule_of_the_images(tmp_path: Path, opened: Any) -> None:
    source = opened(write_mask(tmp_path / "m" / "a.png", np.ascontiguousarray(TURNED), 6))
    assert source.read(0).shape == (16, 24)
    assert oriented_as({}, source).read(0).shape == (16, 24)
    upright = oriented_as({"exif": True}, source).read(0)
    expected = opened(write_mask(tmp_path / "n" / "a.png", UPRIGHT)).read(0)
    np.testing.assert_array_equal(upright, expected)


def test_several_sources_follow_it_too(tmp_path: Path) -> None:
    folders = [
        write_mask(tmp_path / name / f"{name}.png", np.ascontiguousarray(TURNED), 6)
        for name in "ab"
    ]
    source = oriented_as({"exif": True}, open_masks(folders))
    assert [source.read(k).shape for k in range(2)] == [(24, 16), (24, 16)]


def test_masks_of_a_store_of_upright_images(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jpg").write_bytes(photo("JPEG", 6))
    options: dict[str, Any] = {"sites": "blocks", "attention": "none", "residual": False}
    stores = {
        exif: vitsee.extract(
            "demo:vit", tmp_path / "d", tmp_path / f"{exif}.zarr", exif=exif, **options
        )
        for exif in (True, False)
    }
    masks = {
        "upright": open_masks(write_mask(tmp_path / "m" / "a.png", UPRIGHT)),
        "turned": open_masks(
            write_mask(tmp_path / "n" / "a.png", np.ascontiguousarray(TURNED), 6)
        ),
    }

    def foreground(exif: bool, kind: str) -> Any:
        store = stores[exif]
        layout = store.site("blocks.0.out").layout
        assert layout is not None
        rows = DEFAULT.rows(store)
        truth = ground_truth(
            store, masks[kind], rows, {"g": layout}, foreground="any", execution=DEFAULT
        )
        return (truth.labels["g"][0] == FOREGROUND).reshape(layout.grid)

    for kind in masks:
        grid = foreground(True, kind)
        half = len(grid) // 2
        assert grid[:half].all() and not grid[half:].any(), kind
    left = foreground(
        False, "turned"
    )  # as the pixels of the file: the upper half lies left
    assert left[:, : len(left) // 2].all() and not left[:, len(left) // 2 :].any()
    with pytest.raises(vitsee.VitseeError, match="one of both is turned by EXIF"):
        foreground(False, "upright")


# ---------------------------------------------------------------- depths, panoptic files, videos


def test_depth_maps_follow_the_rule(tmp_path: Path) -> None:
    depths = np.arange(1, 24 * 16 + 1, dtype=np.uint16).reshape(24, 16)
    turned = np.ascontiguousarray(np.rot90(depths))
    folder = write_mask(tmp_path / "d" / "a.png", turned, 6)
    maps = open_depth_maps(folder, scale=100)
    np.testing.assert_allclose(maps.read(0), turned / 100, rtol=1e-6)
    np.testing.assert_allclose(oriented_as({}, maps).read(0), turned / 100, rtol=1e-6)
    upright = oriented_as({"exif": True}, maps)
    np.testing.assert_allclose(upright.read(0), depths / 100, rtol=1e-6)


def panoptic_file(folder: Path) -> Path:
    """A file of one image whose PNG, of orientation 6, has segment 7 in its upright upper half."""
    colours = np.zeros((24, 16, 3), np.uint8)
    colours[:12, :, 0] = 7
    write_mask(folder / "p" / "a.png", np.ascontiguousarray(np.rot90(colours)), 6)
    segment = {"id": 7, "category_id": 1, "iscrowd": 0}
    annotation = {"image_id": 1, "file_name": "a.png", "segments_info": [segment]}
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": 24, "width": 16}],
        "annotations": [annotation],
        "categories": [{"id": 1, "name": "cat", "isthing": 1}],
    }
    path = folder / "p.json"
    path.write_text(json.dumps(content))
    return path


def test_panoptic_files_follow_the_rule_also_in_other_processes(tmp_path: Path) -> None:
    path = panoptic_file(tmp_path)
    masks = open_masks(path)
    maps = open_class_maps(path)
    assert masks.read(0).shape == maps.read(0).shape == (16, 24)
    upright = oriented_as({"exif": True}, masks)
    for source in (upright, pickle.loads(pickle.dumps(upright))):
        np.testing.assert_array_equal(source.read(0) == FOREGROUND, UPRIGHT == 7)
        (segment,) = source.segments(0)
        np.testing.assert_array_equal(segment.mask, UPRIGHT == 7)
    upright_maps = oriented_as({"exif": True}, maps)
    np.testing.assert_array_equal(upright_maps.read(0) == 0, UPRIGHT == 7)


def test_masks_of_videos_follow_the_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, root = two_videos(tmp_path)
    folder = root / "Annotations" / "480p" / "a"
    upright = {
        path: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))
    }
    masks = find_masks(root)
    (video, _) = find_videos([store], masks)
    store.manifest.transform["exif"] = True
    before = masks.read(video)
    with caplog.at_level(logging.INFO):
        assert oriented_masks([store], masks, [video]).exif
    assert not caplog.records
    for path, values in upright.items():
        # Orientation 3 is a turn by 180 degrees, which no size tells.
        write_mask(path, np.ascontiguousarray(np.rot90(values, 2)), 3)
    with caplog.at_level(logging.INFO):
        turned = oriented_masks([store], masks, [video])
    assert "7 of 7 masks have an EXIF orientation and were turned upright" in caplog.text
    np.testing.assert_array_equal(turned.read(video), before)
    plain, _ = two_videos(tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        left = oriented_masks([plain], masks, [video])
    np.testing.assert_array_equal(left.read(video), before[:, ::-1, ::-1])
    assert "were left as they are, as the images were" in caplog.text
    with pytest.raises(
        vitsee.VitseeError, match="extract both with --exif, or both without"
    ):
        oriented_masks([store, plain], masks, [video])


# ------------------------------------------------------------------------------------ the remark


def test_masks_with_an_orientation_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turned = np.ascontiguousarray(TURNED)
    write_mask(tmp_path / "m" / "a.png", turned, 6)
    write_mask(tmp_path / "m" / "b.png", turned, 1)
    folder = write_mask(tmp_path / "m" / "c.png", turned)
    masks = open_masks(folder)
    with caplog.at_level(logging.INFO):
        say_orientations("s", False, masks, [1, 2])
    assert not caplog.records
    with caplog.at_level(logging.INFO):
        say_orientations("s", False, masks, range(3))
        say_orientations("s", True, masks, range(3))
    assert [record.getMessage() for record in caplog.records] == [
        "s: 1 of 3 masks have an EXIF orientation and were left as they are, as the images were "
        "(extract --exif turns both)",
        "s: 1 of 3 masks have an EXIF orientation and were turned upright by it, as images are "
        "with --exif",
    ]


def test_where_an_orientation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m" / "a.png"
    write_mask(path, UPRIGHT, 6)
    assert has_orientation(path)
    data = path.read_bytes()
    at = data.index(b"eXIf") - 4
    length = int.from_bytes(data[at : at + 4], "big") + 12
    end = data.index(b"IEND") - 4
    chunk = data[at : at + length]
    path.write_bytes(data[:at] + data[at + length : end] + chunk + data[end:])
    assert has_orientation(path)  # behind the pixels
    path.write_bytes(data[: at + 6])
    assert not has_orientation(path)  # cut off: reading its pixels says so
    assert not has_orientation(tmp_path / "none.png")
    (tmp_path / "a.json").write_text("{}")
    assert not has_orientation(tmp_path / "a.json")
