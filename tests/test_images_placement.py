"""Where images lie on the input: against hand-computed edges, and the centres of blobs that Pillow
resized and cropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.stores import write_sites
from vitsee_core.images import DataError, ImageError
from vitsee_core.images.placement import Placement, box_pixels, place
from vitsee_core.images.transform import make_recipe
from vitsee_stores.errors import MissingInput

CLOSE = 0.02  # px: 8-bit grey levels move a centroid so far
Size = tuple[int, int]


def transform(
    mode: str, size: Size = (224, 224), pct: float = 1.0, **more: Any
) -> dict[str, Any]:
    return {
        "input_size": (3, *size), "interpolation": "bicubic", "crop_pct": pct, "crop_mode": mode,
        "mean": (0.0,) * 3, "std": (1.0,) * 3, **more,
    }  # fmt: skip


def blob(size: Size, x: float, y: float, sigma: float) -> Image.Image:
    """A white spot on black around pixel (x, y)."""
    rows, cols = np.mgrid[0 : size[0], 0 : size[1]]
    values = 255 * np.exp(-((rows - y) ** 2 + (cols - x) ** 2) / (2 * sigma**2))
    return Image.fromarray(np.repeat(values.round().astype(np.uint8)[..., None], 3, 2))


def centre(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """x, y of the light's centre of mass; pixels: (height, width)."""
    light = pixels.astype(np.float64)
    rows, cols = np.mgrid[0 : light.shape[0], 0 : light.shape[1]]
    found: NDArray[np.float64] = np.array([(cols * light).sum(), (rows * light).sum()])
    return found / float(light.sum())


@pytest.mark.parametrize(
    ("size", "mode", "edges"),
    [
        # height, width -> top, left, bottom, right, by hand
        ((333, 500), "squash", (0, 0, 224, 224)),
        (
            (333, 500),
            "border",
            (37, 0, 186, 224),
        ),  # 333 * 224 / 500 = 149.18, 75 rows to fill
        ((500, 333), "border", (0, 37, 224, 186)),
        ((334, 500), "border", (37, 0, 187, 224)),  # 149.6: 150 rows, 74 to fill
        (
            (333, 500),
            "center",
            (0, -56, 224, 280),
        ),  # 224 * 500 / 333 = 336.3, 112 too many
        ((500, 333), "center", (-56, 0, 280, 224)),
        (
            (224, 225),
            "center",
            (0, 0, 224, 225),
        ),  # half a column is rounded to the even side
        ((224, 227), "center", (0, -2, 224, 225)),
    ],
)
def test_edges_by_hand(size: Size, mode: str, edges: tuple[int, ...]) -> None:
    assert place(transform(mode), size) == Placement(*map(float, edges))


def test_points_by_hand() -> None:
    found = Placement(10.0, 0.0, 20.0, 40.0).points(
        np.array([[0, 0], [79, 19], [39.5, 9.5]]), (20, 80)
    )
    # half the size: the first pixel's centre comes to a quarter of a pixel less than its edge's
    np.testing.assert_allclose(
        found, [[-0.25, 9.75], [39.25, 19.25], [19.5, 14.5]], atol=1e-12
    )


@pytest.mark.parametrize(
    "size", [(333, 500), (500, 333), (334, 500), (301, 407), (224, 224)]
)
@pytest.mark.parametrize("target", [(224, 224), (225, 225), (160, 256)])
@pytest.mark.parametrize("mode", ["squash", "border", "center"])
@pytest.mark.parametrize("more", [{}, {"pct": 0.875}, {"crop_border_pixels": 7}])
def test_a_blob_goes_where_it_is_placed(
    size: Size, target: Size, mode: str, more: dict[str, Any]
) -> None:
    settings = transform(mode, target, **more)
    placed = place(settings, size)
    for x, y in ((0.5, 0.5), (0.41, 0.62)):
        at = np.array([[x * size[1], y * size[0]]])
        expected = placed.points(at, size)[0]
        seen = make_recipe(settings).apply(blob(size, at[0, 0], at[0, 1], 9.3))
        np.testing.assert_allclose(centre(seen[0]), expected, atol=CLOSE)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_filters_do_not_move_it(interpolation: str) -> None:
    settings = transform("border", interpolation=interpolation)
    seen = make_recipe(settings).apply(blob((333, 500), 240.3, 170.8, 12.0))
    expected = place(settings, (333, 500)).points(np.array([[240.3, 170.8]]), (333, 500))
    np.testing.assert_allclose(centre(seen[0]), expected[0], atol=CLOSE)


def test_a_box_is_cut_out_first() -> None:
    size, box = (333, 500), (101.4, 20.0, 400.6, 300.0)  # 101 to 401
    settings = transform("border", pct=0.9)
    image = blob(size, 240.3, 170.8, 9.0)
    expected = place(settings, size, box).points(np.array([[240.3, 170.8]]), size)
    seen = make_recipe(settings).apply(image.crop(box))  # type: ignore[arg-type]
    np.testing.assert_allclose(centre(seen[0]), expected[0], atol=CLOSE)
    # the part fills the input of its own size, the whole lies around it
    assert place(transform("squash", (280, 300)), size, box) == Placement(
        -20, -101, 313, 399
    )
    assert box_pixels(box, size) == (20, 101, 300, 401)


@settings(max_examples=60, deadline=None)
@example(size=(4, 64), target=(8, 8), pct=1.0, mode="border")
@given(
    size=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    target=st.tuples(st.integers(8, 90), st.integers(8, 90)),
    pct=st.floats(0.3, 1.2),
    mode=st.sampled_from(["center", "squash", "border"]),
)
def test_a_white_image_shows_its_edges(
    size: Size, target: Size, pct: float, mode: str
) -> None:
    """What is white on the input is what `place` says, to the pixel."""
    chosen = transform(mode, target, pct, interpolation="nearest")
    image = Image.new("RGB", size[::-1], "white")
    try:
        seen = make_recipe(chosen).apply(image)[0]
    except ImageError:  # a strip of which nothing is left
        with pytest.raises(DataError, match="has no place on the input"):
            place(chosen, size)
        return
    placed = place(chosen, size)
    rows, cols = (np.arange(n) + 0.5 for n in target)
    down = (rows > placed.top) & (rows < placed.bottom)
    expected = np.outer(down, (cols > placed.left) & (cols < placed.right))
    np.testing.assert_array_equal(seen > 0, expected)


@pytest.mark.parametrize(
    ("box", "phrase"),
    [
        (
            (10, 10, 10, 20),
            "the box 10 10 10 20 is empty; expected x0 y0 x1 y1 with x0 < x1",
        ),
        ((10, 20, 30, 10), "is empty"),
        ((-1, 0, 30, 10), "reaches out of its image, which has 50 x 40 pixels"),
        ((0, 0, 50, 41), "reaches out of its image"),
        ((0, 0, float("nan"), 4), "is not x0 y0 x1 y1 in pixels"),
        ((0, 0, 4), "is not x0 y0 x1 y1 in pixels"),
    ],
)
def test_boxes_that_are_none(box: tuple[float, ...], phrase: str) -> None:
    with pytest.raises(DataError, match=phrase):
        place(transform("squash"), (40, 50), box)


def test_what_has_no_place() -> None:
    with pytest.raises(DataError, match="an image of 0 x 4 pixels has no place"):
        place(transform("squash"), (4, 0))


def test_a_store_says_its_sizes(tmp_path: Path) -> None:
    sites = {"blocks.0.out": np.ones((3, 7, 2))}
    sizes = [[333, 500], [500, 333], [9, 9]]
    store = write_sites(tmp_path / "a.zarr", sites, sizes=sizes, valid=[1, 1, 0])
    assert store.sizes.tolist() == [[333, 500], [500, 333], [0, 0]]
    assert store.sizes.dtype == np.int32
    without = write_sites(tmp_path / "b.zarr", sites)
    with pytest.raises(
        MissingInput, match=r"^b does not say how large its .* extract anew"
    ):
        _ = without.sizes
