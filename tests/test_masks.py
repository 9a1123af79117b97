"""Masks: their sources, names, geometry, and the overlap with a map, against hand and loops."""

from __future__ import annotations

import builtins
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.stores import write_sites
from vitsee_core.analyses.saliency.scoring import blind_overlaps, overlap, top_mass
from vitsee_core.images.transform import make_recipe
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.truth.masks import BACKGROUND, FOREGROUND, VOID, open_masks
from vitsee_core.truth.masks.coco import pixels_of, unpack_counts
from vitsee_core.truth.masks.mask_truth import (
    as_seen,
    mask_recipe,
    match_names,
    match_rows,
    token_labels,
)
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
B, F, V = BACKGROUND, FOREGROUND, VOID
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)


def transform(height: int, width: int, **more: Any) -> dict[str, Any]:
    plain = {
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
    return {"input_size": (3, height, width), **plain, **more}


def save(path: Path, values: Any, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, np.uint8))
    if mode == "P":
        image = image.convert("L")
        image.putpalette(list(range(255, -1, -1)) * 3)
    elif mode is not None:
        image = image.convert(mode)
    image.save(path)
    return path


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(VitseeError) as caught:
        masks = open_masks(path, **options)
        masks.read(0)
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---------------------------------------------------------------- the top set and its overlap


def slow_top(p: Array, mass: float) -> Array:
    """Take the largest (of equal ones the last) until the share is reached."""
    kept, order = np.zeros(len(p), bool), sorted(range(len(p)), key=lambda k: (p[k], k))
    total = float(sum(float(v) for v in p))
    if not total > 0:
        return kept
    below = 0.0
    for k in order:
        below += float(p[k])
        kept[k] = below / total > 1 - mass + 1e-9
    return kept


def slow_iou(p: Array, labels: Array, mass: float) -> float:
    kept = slow_top(p, mass)
    both = either = 0
    for k, label in enumerate(labels):
        both += bool(kept[k]) and label == F
        either += (bool(kept[k]) or label == F) and label != V
    return both / either if kept.any() and (labels == F).any() else np.nan


def test_top_mass_by_hand() -> None:
    # ascending 0.1 0.2 0.3 0.4, summed 0.1 0.3 0.6 1.0: the upper two are above 0.4
    assert top_mass(np.array([0.3, 0.1, 0.4, 0.2]), 0.6).tolist() == [
        True,
        False,
        True,
        False,
    ]
    assert top_mass(np.array([3.0, 1, 4, 2]), 0.6).tolist() == [True, False, True, False]
    # 0.1 0.3 0.6 1.0 are all above 0.05
    assert top_mass(np.array([0.3, 0.1, 0.4, 0.2]), 0.95).all()
    assert top_mass(np.array([0, 0, 5.0]), 0.6).tolist() == [False, False, True]
    assert not top_mass(np.zeros(3), 0.6).any()
    assert not top_mass(np.array([np.nan, 1, 2]), 0.6).any()


@pytest.mark.parametrize("n", [5, 10, 49, 196, 197, 784])
def test_an_even_map_keeps_its_last_tokens(n: int) -> None:
    # the first floor(0.4 n) are summed to 0.4 at most, for which rounding does not count
    kept = top_mass(np.full(n, 1 / n), 0.6)
    n_left = (4 * n) // 10
    assert kept.tolist() == [False] * n_left + [True] * (n - n_left)
    assert np.array_equal(
        kept, top_mass(np.full(n, np.float16(1 / n)).astype(float), 0.6)
    )


def test_ties_at_the_threshold_keep_the_later_token() -> None:
    # ascending 1 (first), 1 (last), 2: sums 1 2 4, above 1.6 the last 1 and the 2
    assert top_mass(np.array([1.0, 2, 1]), 0.6).tolist() == [False, True, True]


def test_overlap_by_hand() -> None:
    kept = np.array([[[True, True, False, False, True]]])
    labels = np.array([[F, B, F, B, V]], np.uint8)
    assert overlap(kept, labels)[0, 0] == pytest.approx(1 / 3)
    assert np.isnan(overlap(kept, np.array([[B, B, B, B, V]], np.uint8))[0, 0])
    assert np.isnan(overlap(np.zeros_like(kept), labels)[0, 0])
    # all that was kept is void: nothing was found, and nothing was wrong
    assert overlap(np.array([[[False, False, False, False, True]]]), labels)[0, 0] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.95), st.integers(1, 3))
def test_overlap_against_a_loop(seed: int, mass: float, digits: int) -> None:
    rng = np.random.default_rng(seed)
    # few digits: many ties
    maps = np.round(rng.exponential(size=(3, 2, 12)), digits)
    maps[0, 0] = 0
    labels = rng.choice([B, F, V], (3, 12), p=[0.5, 0.4, 0.1]).astype(np.uint8)
    found = overlap(top_mass(maps, mass), labels)
    expected = [[slow_iou(m, labels[i], mass) for m in maps[i]] for i in range(3)]
    # sums in another order: a threshold that rounding could decide is not among these
    assert found == pytest.approx(np.array(expected), rel=1e-12, nan_ok=True)
    # half precision is sorted in a way of its own
    short = maps.astype(np.float16)
    assert np.array_equal(top_mass(short, mass), top_mass(short.astype(np.float64), mass))
    # a map's scale does not count
    assert np.array_equal(
        found, overlap(top_mass(8 * maps, mass), labels), equal_nan=True
    )


def test_blind_maps() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permuted(np.repeat([[F] * 9 + [B] * 21], 400, 0), axis=1).astype(
        np.uint8
    )
    index = np.arange(400)
    found = blind_overlaps(labels, (5, 6), index, 0.6, 0)
    assert list(found) == ["uniform", "centre", "random"]
    # 18 of 30 tokens by chance, 9 of them foreground: hypergeometric, about 5.4 / (18 + 9 - 5.4)
    draws = [len({*rng.permutation(30)[:18]} & set(range(9))) for _ in range(4000)]
    by_chance = np.mean([k / (27 - k) for k in draws])
    assert found["uniform"].mean() == pytest.approx(
        by_chance, abs=0.01
    )  # four standard errors
    assert found["random"].mean() < found["uniform"].mean()
    # an object in the middle is what the centred map covers, one at the rim is not
    middle = np.zeros((1, 5, 6), np.uint8)
    middle[0, 1:4, 1:5] = F
    assert blind_overlaps(middle.reshape(1, -1), (5, 6), index, 0.6, 0)["centre"][0] > 0.6
    rim = np.where(middle == F, B, F).astype(np.uint8)
    assert blind_overlaps(rim.reshape(1, -1), (5, 6), index, 0.6, 0)["centre"][0] < 0.1
    # an image's draws depend on its place in the data set only
    back = blind_overlaps(labels[::-1], (5, 6), index[::-1], 0.6, 0)
    assert all(np.array_equal(found[name], back[name][::-1]) for name in found)
    assert not np.array_equal(
        found["random"], blind_overlaps(labels, (5, 6), index, 0.6, 1)["random"]
    )


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"crop_pct": 0.8},
        {"crop_mode": "squash"},
        {"crop_mode": "border"},
        {"crop_pct": 0.8, "crop_mode": "border"},
    ],
)
@pytest.mark.parametrize("size", [(40, 40), (56, 40), (40, 90)])
@pytest.mark.parametrize("target", [(32, 32), (32, 48)])
def test_a_mask_goes_where_its_square_goes(
    size: tuple[int, int], target: tuple[int, int], more: dict[str, Any]
) -> None:
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[size[0] // 2 - 12 : size[0] // 2 + 4, size[1] // 2 - 4 : size[1] // 2 + 14] = (
        255
    )
    labels = (pixels[..., 0] > 0).astype(np.uint8)
    settings = transform(*target, mean=(0.0,) * 3, **more)
    seen = make_recipe(settings).apply(Image.fromarray(pixels))[0]
    mask = as_seen(labels, mask_recipe(settings), "m.png")
    assert mask.shape == target
    assert 0.02 < mask.mean() < 0.9
    # bicubic edges are soft by a pixel or two, the square's place is not
    assert (mask == (seen > 127)).mean() > 0.97
    layout = TokenLayout((), (target[0] // 8, target[1] // 8), stride_px=(8.0, 8.0))
    tokens = token_labels(mask, layout, "half").reshape(layout.grid)
    blocks = (seen > 127).reshape(target[0] // 8, 8, target[1] // 8, 8).mean((1, 3))
    clear = abs(blocks - 0.5) > 0.15
    assert clear.sum() > 4
    assert np.array_equal(tokens[clear], (blocks >= 0.5)[clear])


def test_border_and_steps_unknown() -> None:
    # an image smaller than the input is placed in the middle, the rim is background
    settings = transform(8, 8, crop_mode="border", crop_pct=2.0)
    mask = as_seen(np.ones((4, 4), np.uint8), mask_recipe(settings), "m.png")
    assert mask[0].tolist() == [0] * 8
    assert mask.sum() == 16
    with pytest.raises(VitseeError, match=r"^m\.png: the mask cannot be resized"):
        as_seen(np.ones((1, 60000), np.uint8), mask_recipe(transform(224, 224)), "m.png")


def test_tokens_by_hand() -> None:
    labels = np.zeros((4, 8), np.uint8)
    labels[:2, :4] = F  # 8 of 16 pixels of the left token
    labels[0, 4] = F
    layout = TokenLayout(("cls",), (1, 2), stride_px=(4.0, 4.0))
    assert token_labels(labels, layout, "half").tolist() == [F, B]
    assert token_labels(labels, layout, "any").tolist() == [F, F]
    labels[1, 0] = B
    assert token_labels(labels, layout, "half").tolist() == [B, B]
    # 7 foreground, 2 void: 7 of 14
    labels[3, :2] = V
    assert token_labels(labels, layout, "half").tolist() == [F, B]
    # 8 void pixels are not more than the others, 9 are
    labels[:2, 4:] = V
    assert token_labels(labels, layout, "any").tolist() == [F, B]
    labels[2, 4] = V
    assert token_labels(labels, layout, "any").tolist() == [F, V]


def test_tokens_that_do_not_fill_the_input() -> None:
    labels = np.zeros((5, 10), np.uint8)
    labels[:, 8:] = F  # beyond the last cell
    layout = TokenLayout((), (2, 2), stride_px=(2.0, 4.0))
    assert token_labels(labels, layout, "any").tolist() == [B, B, B, B]
    # cells of 2.5 pixels begin at round(0), round(2.5) and end at round(5)
    labels = np.zeros((5, 10), np.uint8)
    labels[2:, :5] = F
    layout = TokenLayout((), (2, 2), stride_px=(2.5, 5.0))
    assert token_labels(labels, layout, "half").tolist() == [B, B, F, B]
    with pytest.raises(VitseeError, match="no stride"):
        token_labels(labels, replace(layout, stride_px=None), "half")
    # cells outside of the image are void
    layout = TokenLayout((), (3, 1), stride_px=(5.0, 10.0))
    assert token_labels(labels, layout, "any").tolist() == [F, V, V]


def test_tokens_that_begin_within_or_before_the_input() -> None:
    labels = np.zeros((6, 10), np.uint8)
    labels[0, 2:] = F
    labels[2:4, 3:6] = F
    # rows 1-2 and 3-4, columns 3-5 and 6-8: row 0 belongs to no token
    inside = TokenLayout((), (2, 2), stride_px=(2.0, 3.0), offset_px=(1.0, 3.0))
    assert token_labels(labels, inside, "half").tolist() == [F, B, F, B]
    # rows -2 to 1 and 2-5, columns -1 to 4 and 5-9 (cut): what lies outside does not count
    before = TokenLayout((), (2, 2), stride_px=(4.0, 6.0), offset_px=(-2.0, -1.0))
    assert token_labels(labels, before, "any").tolist() == [F, F, F, F]
    assert token_labels(labels, before, "half").tolist() == [B, F, B, B]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["half", "any"]))
def test_tokens_against_a_loop(seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.choice([B, F, V], (9, 14), p=rng.dirichlet([1, 1, 1])).astype(np.uint8)
    layout = TokenLayout(("cls",), (3, 4), stride_px=(3.0, 3.5))
    found = token_labels(labels, layout, rule).reshape(3, 4)
    columns = [0, 4, 7, 10, 14]  # numpy rounds 3.5 to 4 and 10.5 to 10
    for r in range(3):
        for c in range(4):
            cell = labels[3 * r : 3 * r + 3, columns[c] : columns[c + 1]].ravel().tolist()
            known = [v for v in cell if v != V]
            on = known.count(F)
            expected = B
            if cell.count(V) > len(known):
                expected = V
            elif on and (rule == "any" or on / len(known) >= 0.5):
                expected = F
            assert found[r, c] == expected


# ---------------------------------------------------------------- names


def test_names_match_by_path_then_by_file() -> None:
    images = ["a/1.jpg", "b/1.jpg", "test/7", "JPEGImages/2007.x.jpg", "lone.png", "v1.5"]
    masks = ["a/1.png", "test/7.png", "SegmentationClass/2007.x.png", "v1.5.png", "1.png"]
    # b/1 has no mask of its own, and 1.png could be a's as well
    assert match_names(images, masks).tolist() == [0, -1, 1, 2, -1, 3]
    assert match_names(["x/1.jpg"], ["p/1.png", "q/1.png"]).tolist() == [-1]
    assert match_names(["x/1.jpg", "y/2.JPEG"], ["2.png", "1.png"]).tolist() == [1, 0]
    assert match_names(["x/1.jpg"], []).tolist() == [-1]
    # Names in annotation files that were written on Windows.
    assert match_names(["x/1.jpg", "y/1.jpg"], ["y\\1.jpg"]).tolist() == [-1, 0]
    assert match_names(["1.jpg"], ["val\\1.jpg"]).tolist() == [0]


def test_names_that_match_no_image_say_why(tmp_path: Path) -> None:
    store = write_sites(
        tmp_path / "s.zarr", {"blocks.0.out": np.zeros((1, 2))}, ids=["1.jpg"]
    )
    cases = {
        "2 masks are called 1 (a/1.png, b/1.png): give the folder": [
            "a/1.png",
            "b/1.png",
        ],
        "dense-probe alone knows whose they are": ["x/1_gtFine_labelIds.png"],
        "expected the same names but for the ending": ["2.png"],
    }
    for line, names in cases.items():
        for name in names:
            (tmp_path / line[:5] / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.eye(4, dtype=np.uint8)).save(tmp_path / line[:5] / name)
        with pytest.raises(VitseeError) as caught:
            match_rows(store, open_masks(tmp_path / line[:5]), choose_rows(store))
        assert line in str(caught.value)


# ---------------------------------------------------------------- PNG folders


def test_png_values(tmp_path: Path) -> None:
    values = np.array([[0, 1, 2], [255, 7, 0]])
    save(tmp_path / "masks" / "a.png", values)
    save(tmp_path / "masks" / "b" / "p.png", values, "P")
    save(tmp_path / "masks" / "c.png", values, "1")  # dithering aside: 0 and 255
    (tmp_path / "masks" / "a.jpg").write_bytes(b"an image beside its mask")
    masks = open_masks(tmp_path / "masks")
    assert masks.keys == ["a.png", "b/p.png", "c.png"]
    for i in (0, 1):
        assert masks.read(i).tolist() == [[B, F, F], [V, F, B]]
    assert set(masks.read(2).ravel().tolist()) <= {B, F}
    assert open_masks(tmp_path / "masks", void="none").read(0).tolist() == [
        [B, F, F],
        [F, F, B],
    ]
    other = open_masks(tmp_path / "masks", background=(0, 1), void=7)
    assert other.read(0).tolist() == [[B, B, F], [F, V, B]]
    assert other.rules["background"] == "0, 1"


def test_sixteen_bits(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 300], [255, 65535]], np.uint16)).save(
        tmp_path / "a.png"
    )
    assert open_masks(tmp_path).read(0).tolist() == [[B, F], [V, F]]
    assert open_masks(tmp_path, void=65535).read(0).tolist() == [[B, F], [F, V]]


def test_png_folders_that_are_refused(tmp_path: Path) -> None:
    assert "expected a folder of PNG masks or a COCO .json" in refused(tmp_path / "none")
    (tmp_path / "text.txt").write_text("no masks")
    assert "text.txt has no masks" in refused(tmp_path / "text.txt")
    assert "no .png files below" in refused(tmp_path)
    colours = tmp_path / "colours"
    save(colours / "a.png", np.zeros((2, 2, 3)))
    assert "a.png holds colours (mode RGB); expected one channel" in refused(colours)
    assert "both --background and --void" in refused(colours, background=(255,))
    damaged = tmp_path / "damaged"
    file = save(damaged / "a.png", np.zeros((50, 50)))
    file.write_bytes(file.read_bytes()[:-40])
    assert "cannot read a.png" in refused(damaged)


# ---------------------------------------------------------------- COCO


def coco(path: Path, annotations: list[dict[str, Any]], **more: Any) -> Path:
    images = [{"id": 9, "file_name": "a.jpg", "height": 4, "width": 6}]
    made = [{"id": k, "image_id": 9, **a} for k, a in enumerate(annotations)]
    path.write_text(json.dumps({"images": images, "annotations": made, **more}))
    return path


SQUARE = {
    "segmentation": [[1, 1, 3, 1, 3, 3, 1, 3]],
    "iscrowd": 0,
}  # 2 x 2 pixels from 1, 1


def test_coco_polygons_and_runs(tmp_path: Path) -> None:
    mask = pytest.importorskip("pycocotools.mask")
    masks = open_masks(coco(tmp_path / "a.json", [SQUARE]))
    expected = np.zeros((4, 6), np.uint8)
    expected[1:3, 1:3] = F
    assert masks.keys == ["a.jpg"]
    assert masks.read(0).tolist() == expected.tolist()
    # run lengths go down the columns: 20 background, then 4 foreground, the last column
    runs: dict[str, Any] = {"segmentation": {"counts": [20, 4], "size": [4, 6]}}
    both = expected.copy()
    both[:, 5] = F
    found = open_masks(coco(tmp_path / "b.json", [SQUARE, runs])).read(0)
    assert found.tolist() == both.tolist()
    packed = mask.encode(np.asfortranarray(both == F).astype(np.uint8))
    packed = {"counts": packed["counts"].decode(), "size": [4, 6]}
    found = open_masks(coco(tmp_path / "c.json", [{"segmentation": packed}])).read(0)
    assert found.tolist() == both.tolist()


def test_coco_crowds_are_void_below_objects(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    crowd = {"segmentation": {"counts": [4, 8, 12], "size": [4, 6]}, "iscrowd": 1}
    expected = np.zeros((4, 6), np.uint8)
    expected[:, 1:3] = V
    expected[1:3, 1:3] = F
    for order in ([crowd, SQUARE], [SQUARE, crowd]):
        masks = open_masks(coco(tmp_path / "a.json", order))
        assert masks.read(0).tolist() == expected.tolist()


def test_an_image_without_annotations_is_background(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    path = coco(tmp_path / "a.json", [SQUARE])
    found = json.loads(path.read_text())
    found["images"].append({"id": 99, "file_name": "b.jpg", "height": 2, "width": 3})
    path.write_text(json.dumps(found))
    assert open_masks(path).read(1).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_coco_files_that_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    path = tmp_path / "a.json"
    for text, phrase in (
        ("{", "is not JSON"),
        ("[]", "has list; expected a COCO file"),
        ('{"images": []}', "has images; expected a COCO file"),
        (
            '{"images": [{"id": 1}], "annotations": []}',
            "cannot be read (it has no field 'file_name')",
        ),
        ('{"images": [1], "annotations": []}', "cannot be read (TypeError"),
        (
            '{"images": [{"id": 1, "file_name": "a", "height": 0, "width": -3}],'
            ' "annotations": []}',
            "a is -3 x 0 pixels",
        ),
        ('{"images": [], "annotations": []}', "no segmentation in any"),
        (
            '{"images": [], "annotations": [{"image_id": 1}]}',
            "none of its 1 annotations is of an",
        ),
    ):
        path.write_text(text)
        assert phrase in refused(path)
    assert "leave them out" in refused(coco(path, [SQUARE]), void=255)
    for shape, phrase in (
        ({"counts": [4, 4], "size": [2, 4]}, "is of 4 x 2 pixels; expected 6 x 4"),
        ({"size": [4, 6]}, "cannot read the annotation 0 of a.jpg in"),
        ([["x"]], "cannot read the annotation 0 of a.jpg in"),
    ):
        assert phrase in refused(coco(path, [{"segmentation": shape}]))


def test_runs_are_read_as_pycocotools_reads_them() -> None:
    mask = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 0.98, 1.0):
        for size in ((1, 1), (7, 5), (60, 90)):
            pixels = (rng.random(size) < share).astype(np.uint8)
            pixels = np.kron(
                pixels, np.ones((3, 40), np.uint8)
            )  # runs of several characters
            packed = mask.encode(np.asfortranarray(pixels))
            found = pixels_of(packed, pixels.shape)  # type: ignore[arg-type]
            assert np.array_equal(found, pixels == 1)
            runs = {
                "counts": list(unpack_counts(packed["counts"])),
                "size": list(pixels.shape),
            }
            assert mask.frPyObjects(runs, *pixels.shape)["counts"] == packed["counts"]


# Each of them ended the process, took what memory there was, or was taken for something else.
HOSTILE: dict[str, tuple[Any, str]] = {
    "far": ([[1e308, 1, 3, 1, 3, 3]], "an outline goes to 1e+308; the image has 6 x 4"),
    "infinite": ([[1, 1, float("inf"), 1, 3, 3]], "an outline goes to inf"),
    "none": ([[1, 1, float("nan"), 1, 3, 3]], "an outline goes to nan"),
    "outside": ([[1, 1, -25, 1, 3, 3]], "an outline goes to -25"),
    "a box": ([[1, 1, 1e9, 1e9]], "an outline goes to 1e+09"),
    "odd": ([[1, 1, 3, 1, 3, 3, 1]], "an outline has 7 numbers"),
    "three": ([[1, 1, 3]], "an outline has 3 numbers"),
    "deep": ([[[1, 1], [3, 1], [3, 3]]], "an outline has 6 numbers"),
    "long": (
        [[1, 1, 5, 3] * 500_000],
        "an outline is 4000000 pixels long; at most 1677721",
    ),
    "sizes": (
        {"counts": [10**10], "size": [10**5, 10**5]},
        "is of 100000 x 100000 pixels",
    ),
    "runs": (
        {"counts": [20, 10**9], "size": [4, 6]},
        "its runs cover 1000000020 pixels, of 24",
    ),
    "huge runs": ({"counts": [20, 10**400], "size": [4, 6]}, "OverflowError"),
    "missing runs": ({"counts": [20], "size": [4, 6]}, "its runs cover 20 pixels, of 24"),
    "negative": ({"counts": [30, -6], "size": [4, 6]}, "no whole numbers from 0 on"),
    "halves": ({"counts": [20.5, 3.5], "size": [4, 6]}, "no whole numbers from 0 on"),
    "words": ({"counts": ["a"], "size": [4, 6]}, "cannot read the annotation 0"),
    "cut": ({"counts": "P", "size": [4, 6]}, "its run lengths are cut short"),
    "endless": ({"counts": "P" * 100, "size": [4, 6]}, "no COCO string"),
    "characters": ({"counts": "~~~", "size": [4, 6]}, "no COCO string"),
    "other letters": ({"counts": "ü", "size": [4, 6]}, "cannot read the annotation 0"),
    "no list": ({"counts": 7, "size": [4, 6]}, "cannot read the annotation 0"),
    "one size": ({"counts": [24], "size": [4]}, "cannot read the annotation 0"),
    "a word": ("x", "expected a list of outlines, or size and counts"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_what_compiled_code_cannot_take_never_reaches_it(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip("pycocotools")
    shape, phrase = HOSTILE[name]
    line = refused(coco(tmp_path / "a.json", [{"segmentation": shape}, SQUARE]))
    assert phrase in line and len(line) < 600 and "\n" not in line


def test_coco_images_that_no_memory_holds(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    path = coco(tmp_path / "a.json", [SQUARE])
    found = json.loads(path.read_text())
    for height, width, phrase in (
        (10**5, 10**5, "a.jpg is 100000 x 100000 pixels; 1 to 178956970 are read"),
        (1e308, 1, "is 1 x 1e+308 pixels"),
        (float("inf"), 1, "OverflowError"),
        ("4", None, "TypeError"),
    ):
        found["images"][0] |= {"height": height, "width": width}
        path.write_text(json.dumps(found))
        assert phrase in refused(path)
    path.write_text("[" * 200_000)
    assert "is not JSON" in refused(path)


def test_masks_are_files_or_folders(tmp_path: Path) -> None:
    pipe = tmp_path / "a.json"
    os.mkfifo(pipe)
    assert "has no masks" in refused(pipe)


def test_without_pycocotools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pycocotools"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert "pip install 'vitsee[coco]'" in refused(coco(tmp_path / "a.json", [SQUARE]))
