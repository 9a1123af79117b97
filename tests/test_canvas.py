"""Canvases: sizes in whole numbers, where images lie, what readers refuse."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.random_stores import PLANS, tokens_site
from tests.stores import CNN, write
from vitsee_core.images import ImageError
from vitsee_core.images.placement import Placement, place
from vitsee_core.images.transform import make_recipe
from vitsee_stores import SiteError, Store
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.plan import Canvas, corner_size
from vitsee_stores.schema import check_plan, checked

B4 = Canvas((448, 1072), 448, 16, (224, 224))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        # height, width of DAVIS, COCO and squares: to 448, and the patch of 16
        ((480, 854), (448, 784)),  # 797.07
        ((480, 910), (448, 848)),  # 849.3
        ((480, 1152), (448, 1072)),  # 1075.2
        ((480, 640), (448, 592)),  # 597.3
        ((854, 480), (784, 448)),
        # squares to which floats give a patch less: 448 / 299 * 299 is below 448
        *(((side, side), (448, 448)) for side in (299, 428, 612, 448, 1)),
    ],
)
def test_sizes_by_hand(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert corner_size(size, 448, 16) == expected == B4.image(size)


def test_sizes_of_other_multiples() -> None:
    # DINO's: short side 480, long side a multiple of 64
    assert corner_size((480, 854), 480, 64) == (480, 832)
    assert corner_size((480, 910), 480, 64) == (480, 896)
    assert corner_size((500, 500), 480, 64) == (480, 448)


def test_which_images_fill_the_canvas() -> None:
    sizes = np.array(
        [[480, 1152], [480, 854], [0, 0], [960, 2304], [1152, 480]], np.int32
    )
    assert B4.filled(sizes).tolist() == [True, False, True, True, False]
    assert B4.filled(np.zeros((0, 2), np.int32)).tolist() == []


def corner(canvas: Canvas, interpolation: str = "bicubic") -> dict[str, Any]:
    return {
        "input_size": (3, *canvas.size), "interpolation": interpolation, "crop_mode": "corner",
        "short_side": canvas.short_side, "multiple": canvas.multiple,
        "mean": (0.5,) * 3, "std": (0.5,) * 3,
    }  # fmt: skip


@pytest.mark.parametrize("size", [(48, 85), (91, 48), (48, 48), (500, 333)])
def test_an_image_lies_in_the_corner(size: tuple[int, int]) -> None:
    canvas = Canvas((64, 72), 32, 8)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
    height, width = canvas.image(size)
    seen = make_recipe(corner(canvas)).apply(image)
    alone = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(seen[:, :height, :width], alone.transpose(2, 0, 1))
    assert seen.shape == (3, 64, 72) and seen.sum() == alone.sum()
    assert place(corner(canvas), size) == Placement(0.0, 0.0, height, width)


def test_cells_on_the_image() -> None:
    layout = TokenLayout((), (8, 9), stride_px=(8.0, 8.0))
    on = Placement(0.0, 0.0, 32.0, 56.0).on_image(layout)
    assert on.sum() == 4 * 7 and on[:4, :7].all()
    # centres decide: half a cell and more belongs to it; what is cropped has no cell
    on = Placement(-8.0, 4.0, 20.1, 19.9).on_image(layout)
    assert np.flatnonzero(on.any(1)).tolist() == [0, 1, 2]
    assert np.flatnonzero(on.any(0)).tolist() == [
        1
    ]  # centres 4 and 20 are at or beyond its edges
    shifted = replace(layout, offset_px=(-4.0, 3.0))
    assert Placement(0.0, 0.0, 9.0, 16.0).on_image(shifted).sum() == 2 * 2 - 2 * 1 + 0
    with pytest.raises(ValueError, match="no cells"):
        Placement(0, 0, 1, 1).on_image(TokenLayout((), None, rows=3))


def test_an_image_that_outgrew_its_canvas() -> None:
    recipe = make_recipe(corner(Canvas((32, 40), 32, 8)))
    with pytest.raises(ImageError, match="to 48 x 32 on a canvas of 40 x 32 pixels"):
        recipe.apply(Image.new("RGB", (150, 100)))


# ---------------------------------------------------------------- in stores


def tiled(canvas: Canvas = B4, **more: Any) -> StorePlan:
    grid = TokenLayout((), (28, 67), stride_px=(16.0, 16.0))
    return StorePlan(
        3, 2, "none", (tokens_site("embed", grid), tokens_site("blocks.0.out", grid, depth=1)),
        canvas=canvas, **more,
    )  # fmt: skip


def test_a_canvas_survives_json() -> None:
    for plan in (tiled(), tiled(replace(B4, tiles=None))):
        assert checked(json.loads(json.dumps(asdict(plan))), StorePlan) == plan
        assert plan.features == ("canvas",)
    assert asdict(B4)["crop_mode"] == "corner"


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"size": [448]}, "plan.canvas.size"),
        ({"size": [0, 8]}, "plan.canvas.size"),
        ({"short_side": 0}, "plan.canvas.short_side is 0, expected a whole number >= 1"),
        ({"multiple": "16"}, "plan.canvas.multiple"),
        ({"tiles": [224, 0]}, "plan.canvas.tiles"),
        ({"crop_mode": "center"}, "plan.canvas.crop_mode"),
    ],
)
def test_no_canvas(change: dict[str, Any], phrase: str) -> None:
    data = json.loads(json.dumps(asdict(tiled())))
    data["canvas"] |= change
    with pytest.raises(ValueError, match=phrase):
        checked(data, StorePlan, "plan")


@pytest.mark.parametrize("name", ["vit", "cnn", "registers"])
def test_tiles_have_no_more_than_grids(name: str) -> None:
    with pytest.raises(ValueError, match="has tiles, beside what tiles do not have"):
        check_plan(replace(PLANS[name], canvas=B4))


def on_canvas(path: Path, sizes: list[tuple[int, int]], **more: Any) -> Store:
    """A store of 2 x 3 cells of 16 pixels, the canvas of images of 32 x 48."""
    layout = TokenLayout((), (2, 3), stride_px=(16.0, 16.0))
    sites = tuple(
        SiteSpec(
            name, "out", f"blocks.{i}", ("blocks", "all"), "tokens", 4, (6, 4), layout, i + 1,
            (i + 1) / 2, tokens="all", dtype="float32",
        )
        for i, name in enumerate(("blocks.0.out", "blocks.1.out"))
    )  # fmt: skip
    n = len(sizes)
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {}
    for site in sites:
        x = rng.normal(size=(n, 2, 3, 4)).astype(np.float32)
        values |= {
            f"acts/{site.name}/grid": x,
            f"pooled/{site.name}/mean": x.mean((1, 2)),
        }
    plan = StorePlan(n, 8, "none", sites, canvas=Canvas((32, 48), 32, 16, (32, 32)))
    labels = more.pop("labels", np.arange(n) % 2)
    return write(path, plan, values, sizes=sizes, labels=labels, **more)


def test_readers_refuse_images_that_do_not_fill_the_canvas(tmp_path: Path) -> None:
    sizes = [(100, 150), (50, 75), (32, 32), (60, 60)]
    store = on_canvas(tmp_path / "a.zarr", sizes)
    assert store.fills.tolist() == [True, True, False, False]
    line = "^a has 2 of 4 images that do not fill its canvas of 48 x 32 .* take it, --tokens mean"
    for tokens in ("all", "patches", "each", "mean-all", "rest", (1, 2)):
        with pytest.raises(SiteError, match=line):
            store.acts("blocks.0.out", tokens)
        assert store.acts("blocks.0.out", tokens, partial=True)[:1].shape[0] == 1
    assert store.acts("blocks.0.out", "mean")[:].shape == (4, 4)
    with pytest.raises(SiteError, match=line):
        next(store.slabs()).acts("blocks.0.out")
    assert next(store.slabs()).acts("blocks.0.out", "patches", partial=True).shape == (
        4,
        2,
        3,
        4,
    )
    whole = on_canvas(tmp_path / "b.zarr", [(100, 150), (50, 75)])
    assert whole.acts("blocks.0.out", "patches")[:].shape == (2, 2, 3, 4)
    # an unreadable image hinders nobody
    invalid = on_canvas(tmp_path / "c.zarr", sizes, valid=[1, 1, 0, 0])
    assert invalid.fills.all() and invalid.acts("blocks.0.out")[:].shape == (4, 6, 4)


@pytest.mark.parametrize("command", ["cka", "knn", "probe", "cluster"])
def test_every_analysis_of_tokens_refuses_them(command: str, tmp_path: Path) -> None:
    """One line and exit code 1; what is pooled can be read."""
    from click.testing import CliRunner

    from vitsee_cli.main import main

    n = 24
    sizes = [(100, 150) if i % 3 else (50, 50) for i in range(n)]
    labels = np.arange(n) % 2
    path = tmp_path / "a.zarr"
    on_canvas(path, sizes, labels=labels)
    stores = [str(path)]
    if command in ("knn", "probe"):
        on_canvas(
            tmp_path / "b.zarr", sizes, labels=labels, hash_offset=100, name="other"
        )
        stores.append(str(tmp_path / "b.zarr"))
    refused = CliRunner().invoke(
        main, [command, *stores, "--tokens", "patches" if command == "cka" else "rest"]
    )
    assert refused.exit_code == 1 and refused.stdout == ""
    assert "8 of 24 images that do not fill its canvas" in refused.stderr
    assert refused.stderr.count("\n") == 1
    done = CliRunner().invoke(main, [command, *stores, "--tokens", "mean"])
    assert done.exit_code == 0, done.stderr


def test_grid_of_cnn_is_untouched(tmp_path: Path) -> None:
    """Stores without a canvas: every image fills the input, whatever its size was."""
    from tests.stores import write_sites

    store = write_sites(
        tmp_path / "a.zarr", {"a": np.ones((2, 4, 3))}, layout=CNN, sizes=[(3, 9), (9, 3)]
    )
    assert store.fills.all() and store.acts("a")[:].shape == (2, 4, 3)
