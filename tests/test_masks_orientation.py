"""Files of masks are turned upright where the store's images were, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitsee
from tests.test_images_not_plain import photo
from vitsee_core.runtime.execution import DEFAULT
from vitsee_core.truth.masks import FOREGROUND, ground_truth, open_masks
from vitsee_core.truth.masks.class_maps import open_class_maps
from vitsee_core.truth.masks.orientation import oriented_as

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
