"""Segments: weights of tokens, vectors, clusters; against hand, loops and exact areas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.command_line import refused, said
from tests.stores import write_labelled
from tests.tables import having, unique
from vitsee_core.analyses.cluster import (
    SEGMENT_COLUMNS,
    plot,
    run,
)
from vitsee_core.analyses.cluster.agreement import agreement, agreement_without
from vitsee_core.analyses.cluster.clustering import k_means
from vitsee_core.demo.coco import outlines, run_lengths
from vitsee_core.images.placement import place
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks.segments import LabelledSegments, Segmentation, examples_of
from vitsee_core.truth.masks.segments.vectors import SegmentWeights
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)
GRID = TokenLayout((), (2, 3), stride_px=(4.0, 4.0))
PLAIN = {
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
}
SITE = "blocks.0.out"


def transform(height: int, width: int, **more: Any) -> dict[str, Any]:
    return {"input_size": (3, height, width), **PLAIN, **more}


def dense(
    mask: Array, layout: TokenLayout, how: dict[str, Any], kind: str = "area"
) -> Array:
    """(rows, cols) weights."""
    size = (mask.shape[0], mask.shape[1])
    weigher = SegmentWeights(size, place(how, size), layout, tuple(how["input_size"][1:]))
    found = weigher.of(mask.astype(bool), kind)
    assert layout.grid is not None
    whole = np.zeros(layout.grid[0] * layout.grid[1])
    if found is not None:
        whole[found[0]] = found[1]
    return whole.reshape(layout.grid)


# ---------------------------------------------------------------- weights


def test_two_cells_and_half_of_a_third() -> None:
    mask = np.zeros((8, 12), bool)
    mask[:4, :10] = True
    shares = np.array([[0.4, 0.4, 0.2], [0, 0, 0]])
    assert dense(mask, GRID, transform(8, 12)) == pytest.approx(shares)
    assert dense(mask, GRID, transform(8, 12), "any") == pytest.approx((shares > 0) / 3)
    # an image of twice the size is the same
    large = mask.repeat(2, 0).repeat(2, 1)
    assert dense(large, GRID, transform(8, 12)) == pytest.approx(shares)


def test_one_pixel_is_not_lost() -> None:
    mask = np.zeros((480, 640), bool)
    mask[3, 639] = True
    layout = TokenLayout((), (14, 14), stride_px=(16.0, 16.0))
    found = dense(mask, layout, transform(224, 224, crop_mode="squash"))
    assert found[0, 13] == 1
    assert found.sum() == 1
    # beyond the centre crop it is
    assert dense(mask, layout, transform(224, 224)).sum() == 0
    assert dense(np.zeros((480, 640), bool), layout, transform(224, 224)).sum() == 0


def by_sampling(mask: Array, layout: TokenLayout, how: dict[str, Any], n: int) -> Array:
    """The area in each cell by n x n points in each pixel of the image, in a loop."""
    height, width = mask.shape
    where = place(how, (height, width))
    assert layout.grid is not None and layout.stride_px is not None
    out = np.zeros(layout.grid)
    down, across = (where.bottom - where.top) / height, (where.right - where.left) / width
    for y, x in zip(*np.nonzero(mask), strict=True):
        for i in range(n):
            for j in range(n):
                at_y = where.top + (y + (i + 0.5) / n) * down
                at_x = where.left + (x + (j + 0.5) / n) * across
                seen = (
                    0 <= at_y < how["input_size"][1] and 0 <= at_x < how["input_size"][2]
                )
                row = int((at_y - layout.offset_px[0]) // layout.stride_px[0])
                col = int((at_x - layout.offset_px[1]) // layout.stride_px[1])
                if seen and 0 <= row < layout.grid[0] and 0 <= col < layout.grid[1]:
                    out[row, col] += 1
    shares: Array = out / max(out.sum(), 1)
    return shares


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["center", "squash", "border"]),
    st.sampled_from([(2.0, 0.0), (4.0, 0.0), (4.0, 1.0), (5.0, -2.0), (4.5, 0.0)]),
)
def test_areas_against_points(seed: int, mode: str, cells: tuple[float, float]) -> None:
    rng = np.random.default_rng(seed)
    size = tuple(rng.integers(4, 20, 2).tolist())
    mask = rng.random(size) < rng.uniform(0.05, 0.6)
    stride, offset = cells
    layout = TokenLayout(
        (), (3, 3), stride_px=(stride, stride), offset_px=(offset, offset)
    )
    how = transform(14, 12, crop_mode=mode)
    found, expected = dense(mask, layout, how), by_sampling(mask, layout, how, 12)
    if expected.sum() > 0:
        # a row of points at each edge may be counted for the neighbour
        assert found == pytest.approx(expected, abs=0.08)
        assert found.sum() == pytest.approx(1)
        assert np.array_equal(dense(mask, layout, how, "any") > 0, found > 0)


def test_bicubic_weights_are_the_published_ones() -> None:
    """Of the central square, by Pillow's default resize of 0 and 255."""
    rng = np.random.default_rng(0)
    # with differences of 21, 23 and 27 pixels, whose halves are rounded up, up and down
    for height, width in (
        (40, 61),
        (55, 32),
        (48, 48),
        (41, 68),
        (37, 80),
        (41, 70),
        (300, 401),
    ):
        mask = rng.random((height, width)) < 0.1
        short = min(height, width)
        top, left = (height - short) / 2, (width - short) / 2
        square = Image.fromarray(mask.astype(np.uint8) * 255).crop(
            (left, top, left + short, top + short)  # type: ignore[arg-type]
        )
        small = np.asarray(square.resize((7, 7))).astype(float)
        layout = TokenLayout((), (7, 7), stride_px=(8.0, 8.0))
        found = dense(mask, layout, transform(56, 56), "vit_analysis")
        assert found == pytest.approx(small / small.sum(), abs=1e-6)
    # dense: the whole image, whatever its shape
    layout = TokenLayout((), (5, 8), stride_px=(8.0, 8.0))
    small = np.asarray(
        Image.fromarray(mask.astype(np.uint8) * 255).resize((8, 5))
    ).astype(float)
    found = dense(mask, layout, transform(40, 64, crop_mode="squash"), "vit_analysis")
    assert found == pytest.approx(small / small.sum(), abs=1e-6)
    # on a canvas that the image fills in part: the whole image to its own cells
    mask = rng.random((30, 47)) < 0.1
    how = transform(64, 64, crop_mode="corner", short_side=40, multiple=8)
    small = np.asarray(
        Image.fromarray(mask.astype(np.uint8) * 255).resize((7, 5))
    ).astype(float)
    found = dense(
        mask, TokenLayout((), (8, 8), stride_px=(8.0, 8.0)), how, "vit_analysis"
    )
    assert found[:5, :7] == pytest.approx(small / small.sum(), abs=1e-6)
    assert found.sum() == pytest.approx(1)


# ---------------------------------------------------------------- stores and masks


def write_coco(
    path: Path, size: tuple[int, int], objects: list[list[tuple[int, Array]]], **more: Any
) -> Path:
    """One image a list, called 0-0.png, ...: (category, mask) each; category 9 is a crowd of 0."""
    annotations: list[dict[str, Any]] = []
    for image, of_image in enumerate(objects):
        for category, mask in of_image:
            crowd = category == 9
            annotations.append({
                "id": len(annotations), "image_id": image, "iscrowd": int(crowd),
                "category_id": 0 if crowd else category,
                "segmentation": run_lengths(mask) if crowd else outlines(mask),
            })  # fmt: skip
    images = [
        {"id": i, "file_name": f"0-{i}.png", "height": size[0], "width": size[1]}
        for i in range(len(objects))
    ]
    categories = [{"id": i, "name": f"kind {i}"} for i in range(4)]
    content = {
        "images": images,
        "annotations": annotations,
        "categories": categories,
    } | more
    path.write_text(json.dumps(content))
    return path


def store_of(
    path: Path, x: Array, size: tuple[int, int] = (8, 12), slab: int = 4, **more: Any
) -> Store:
    """(images, cells, dim) at one site, and the same times two at another."""
    layout = more.pop("layout", TokenLayout(("cls",), (2, 3), stride_px=(4.0, 4.0)))
    first = np.full((len(x), layout.n_prefix, x.shape[2]), 7.0)
    tokens = np.concatenate([first, x], 1)
    return write_labelled(
        path, {SITE: tokens, "blocks.1.out": 2 * tokens}, more.pop("labels", np.arange(len(x)) % 2),
        layout=layout, slab=slab, transform=more.pop("how", transform(8, 12)), sizes=size, **more,
    )  # fmt: skip


def random_objects(
    rng: np.random.Generator, n: int, size: tuple[int, int] = (8, 12)
) -> Any:
    """Rectangles; some images have none."""
    found = []
    for image in range(n):
        of_image = []
        for _ in range(image % 4):
            mask = np.zeros(size, bool)
            top, left = (
                int(rng.integers(0, size[0] - 1)),
                int(rng.integers(0, size[1] - 1)),
            )
            bottom, right = top + int(rng.integers(1, 6)), left + int(rng.integers(1, 8))
            mask[top:bottom, left:right] = True
            of_image.append((int(rng.integers(0, 3)), mask))
        found.append(of_image)
    return found


def segments_of(store: Store, path: Path, **choice: Any) -> LabelledSegments:
    sites = [(store, store.select(["blocks"]))]
    data = examples_of(Segmentation(path, **choice), sites, Execution()).rows(store)
    assert isinstance(data, LabelledSegments)
    return data


def vectors_of(store: Store, path: Path, site: str = SITE, **choice: Any) -> Array:
    execution = Execution()
    examples = examples_of(
        Segmentation(path, **choice), [(store, store.select([site]))], execution
    )
    data = examples.rows(store)
    features = examples.features(data, store.site(site))
    return np.concatenate(list(data.vectors(features, jobs=1, memory=10**9)))


@pytest.mark.parametrize("slab", [1, 4, 64])
def test_vectors_against_a_loop(tmp_path: Path, slab: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(13, 6, 5))
    objects = random_objects(rng, 13)
    valid = np.arange(13) != 7
    store = store_of(tmp_path / "a.zarr", x, slab=slab, valid=valid)
    path = write_coco(tmp_path / "a.json", (8, 12), objects)
    expected, labels, rows = [], [], []
    for image in np.flatnonzero(valid).tolist():
        for category, mask in objects[image]:
            weights = mask.reshape(2, 4, 3, 4).sum((1, 3)).ravel() / mask.sum()
            expected.append(weights @ x[image].astype(np.float32))
            labels.append(category)
            rows.append(image)
    found = vectors_of(store, path)
    # weights and sums in float32
    assert found == pytest.approx(np.array(expected), abs=1e-5)
    assert vectors_of(store, path, "blocks.1.out") == pytest.approx(2 * found, abs=1e-6)
    data = segments_of(store, path)
    assert data.labels.tolist() == labels
    assert data.rows.tolist() == rows
    assert data.n_images == len(set(rows))
    assert data.classes == [f"kind {i}" for i in range(4)]


def test_slabs_and_chunks_do_not_count(tmp_path: Path, monkeypatch: Any) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(17, 6, 8))
    path = write_coco(tmp_path / "a.json", (8, 12), random_objects(rng, 17))
    found = vectors_of(store_of(tmp_path / "a.zarr", x, slab=5), path)
    assert np.array_equal(
        found, vectors_of(store_of(tmp_path / "b.zarr", x, slab=17), path)
    )
    monkeypatch.setattr("vitsee_core.truth.masks.segments.vectors.GROUP_BYTES", 1)
    assert np.array_equal(
        found, vectors_of(store_of(tmp_path / "c.zarr", x, slab=5), path)
    )


def test_all_segments_make_the_image(tmp_path: Path) -> None:
    """A partition's vectors, weighted by their areas, are the mean over the image's patches."""
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 3, (6, 16, 24))
    objects = [[(k, numbers[i] == k) for k in range(3)] for i in range(6)]
    x = rng.normal(size=(6, 6, 5))
    store = store_of(tmp_path / "a.zarr", x, size=(16, 24))
    found = vectors_of(store, write_coco(tmp_path / "a.json", (16, 24), objects))
    areas = np.array([mask.sum() for of_image in objects for _, mask in of_image])
    whole = (areas[:, None] * found).reshape(6, 3, 5).sum(1) / (16 * 24)
    assert whole == pytest.approx(x.mean(1), abs=1e-6)


def test_turned_by_a_quarter(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=(5, 3, 3, 4))
    layout = TokenLayout((), (3, 3), stride_px=(4.0, 4.0))
    masks = [rng.random((12, 12)) < 0.3 for _ in range(5)]
    found = []
    for turns in range(4):
        turned = np.rot90(x, turns, (1, 2)).reshape(5, 9, 4)
        objects = [[(0, np.rot90(mask, turns))] for mask in masks]
        more: dict[str, Any] = {"layout": layout, "how": transform(12, 12)}
        store = store_of(tmp_path / f"{turns}.zarr", turned, (12, 12), **more)
        found.append(
            vectors_of(store, write_coco(tmp_path / "a.json", (12, 12), objects))
        )
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-6)


def test_grids_of_several_sizes(tmp_path: Path) -> None:
    """As of a CNN's stages: each site has weights of its own grid."""
    rng = np.random.default_rng(7)
    fine, coarse = rng.normal(size=(3, 24, 2)), rng.normal(size=(3, 6, 2))
    sites = {
        "blocks.0.out": (fine, TokenLayout((), (4, 6), stride_px=(2.0, 2.0))),
        "blocks.1.out": (coarse, TokenLayout((), (2, 3), stride_px=(4.0, 4.0))),
    }
    store = write_labelled(
        tmp_path / "a.zarr", sites, [0, 1, 0], transform=transform(8, 12), sizes=(8, 12)
    )
    mask = np.zeros((8, 12), bool)
    mask[:2, :4] = True
    path = write_coco(tmp_path / "a.json", (8, 12), [[(0, mask)], [(1, mask)], []])
    assert vectors_of(store, path) == pytest.approx(fine[:2, :2].mean(1), abs=1e-6)
    assert vectors_of(store, path, "blocks.1.out") == pytest.approx(
        coarse[:2, 0], abs=1e-6
    )


def test_which_segments(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    mask = np.zeros((8, 12), bool)
    mask[2:5, 3:7] = True
    objects = [
        [(0, mask), (9, mask)],
        [(1, mask)],
        [(9, mask)],
        [(2, np.zeros_like(mask))],
        [],
    ]
    path = write_coco(tmp_path / "a.json", (8, 12), objects)
    content = json.loads(path.read_text())
    content["annotations"][4]["segmentation"] = [[0, 0, 1, 1]]  # an outline of two points
    path.write_text(json.dumps(content))
    store = store_of(tmp_path / "a.zarr", rng.normal(size=(6, 6, 2)))
    data = segments_of(store, path)
    assert data.rows.tolist() == [0, 1]
    assert data.describe() == {
        "images": 2, "segments": 2, "chosen": "all", "left_out_images_without_mask": 1,
        "left_out_crowds": 2, "left_out_empty": 1, "left_out_not_visible": 0,
        "masks": str(path), "weights": "area", "crowd": False,
        "annotations without a mask": "1 of 5",
    }  # fmt: skip
    with_crowds = segments_of(store, path, crowd=True)
    assert with_crowds.rows.tolist() == [0, 0, 1, 2]
    assert with_crowds.labels.tolist() == [0, 0, 1, 0]
    assert segments_of(store, path, crowd=True, first=2).rows.tolist() == [0, 0, 1]
    assert segments_of(store, path, crowd=True, segments=3).how.startswith(
        "all, 3 segments of"
    )
    blocks = with_crowds.jackknife(0)
    assert blocks.labels.tolist() == [0, 0, 1, 2]


def test_a_sample_of_segments_is_of_images(tmp_path: Path) -> None:
    """The same in any order of the store, whole images but for the last one."""
    rng = np.random.default_rng(9)
    x, objects = rng.normal(size=(20, 6, 2)), random_objects(rng, 20)
    path = write_coco(tmp_path / "a.json", (8, 12), objects)
    rows = rng.permutation(20)
    store = store_of(tmp_path / "a.zarr", x)
    other = store_of(tmp_path / "b.zarr", x, rows=rows)
    data, again = (segments_of(s, path, segments=7) for s in (store, other))
    assert len(data) == len(again) == 7
    assert sorted(data.index.tolist()) == sorted(again.index.tolist())
    numbers, counts = np.unique(data.index, return_counts=True)
    whole = [counts[i] == len(objects[n]) for i, n in enumerate(numbers.tolist())]
    assert sum(not one for one in whole) <= 1
    assert np.isin(again.rows, np.flatnonzero(again.mask)).all()


# ---------------------------------------------------------------- clusters


def test_agreement_without_blocks_against_sklearn() -> None:
    rng = np.random.default_rng(0)
    for n, k, c in ((200, 7, 5), (30, 4, 9), (12, 1, 3), (12, 12, 12)):
        clusters = rng.integers(0, k, n) if k < n else np.arange(n)
        labels = rng.integers(0, c, n) if c < n else np.arange(n)
        of = rng.integers(0, 5, n)
        blocks = Blocks(of, of, "")
        found = agreement_without(clusters, labels, blocks)
        for b in range(5):
            kept = of != b
            expected = agreement(clusters[kept], labels[kept])
            assert {m: found[m][b] for m in found} == pytest.approx(expected, abs=1e-12)
    alone = agreement_without(clusters, labels, Blocks(np.zeros(12, int), of, ""))
    assert all(np.isnan(values).all() for values in alone.values())


def by_kind(
    tmp_path: Path, n: int = 12, noise: float = 0.0, name: str = "a"
) -> tuple[Store, Path]:
    """Images of two cells of one kind and one of another: tokens are one-hot of the kind."""
    rng = np.random.default_rng(1)
    x, objects = rng.normal(size=(n, 6, 4)) * noise, []
    for image in range(n):
        a, b = image % 3, (image + 1) % 3
        left, right = np.zeros((8, 12), bool), np.zeros((8, 12), bool)
        left[:4, :8], right[4:, 4:8] = True, True
        x[image, :2, a] += 1
        x[image, 4, b] += 1
        objects.append([(a, left), (b, right)])
    path = write_coco(tmp_path / f"{name}.json", (8, 12), objects)
    return store_of(tmp_path / f"{name}.zarr", x), path


def value(table: Table, baseline: str = "", site: str = SITE) -> dict[str, float]:
    rows = having(table, baseline=baseline, site=site)
    return dict(zip(rows["metric"].tolist(), rows["value"].tolist(), strict=True))


def test_one_colour_per_category(tmp_path: Path) -> None:
    store, path = by_kind(tmp_path)
    table = run(store, masks=path, n_seeds=2)
    assert tuple(table.written.columns) == SEGMENT_COLUMNS
    assert value(table) == {"segment_purity": 1, "segment_nmi": 1, "segment_ari": 1}
    assert list(dict.fromkeys(table["baseline"])) == ["", "shuffled", "random", "image"]
    assert unique(table, "k") == [3]
    assert unique(table, "n_images") == [12]
    assert unique(table, "n_segments") == [24]
    assert value(table, "shuffled")["segment_purity"] < 0.7
    assert value(table, "random")["segment_ari"] < 0.5
    # an image's mean is the same for both of its segments, which are of different categories
    assert value(table, "image")["segment_purity"] == 0.5
    own = having(table, baseline="", site=SITE)
    assert own["high"].tolist() == [1, 1, 1] and own["low"].tolist()[1:] == [1, 1]
    # of purity, a share, that of 12 images which all agree: 1 / (1 + t(0.975, 11)^2 / 12)
    assert own["low"][0] == pytest.approx(1 / (1 + 2.200985**2 / 12), rel=1e-6)
    assert table.replicates is not None
    assert table.replicates.shape == (len(table), 12)
    # five times the same segments, and more: k = 1 gives the share of the largest category
    assert np.isnan(value(run(store, masks=path, k=1, n_seeds=1))["segment_purity"])


def test_the_interval_is_over_images(tmp_path: Path) -> None:
    """The clusters stay; blocks of images are left out, with all their segments."""
    store, path = by_kind(tmp_path, n=9, noise=0.9)
    table = run(store, masks=Segmentation(path), n_seeds=1, baselines=[], sites=SITE)
    data = segments_of(store, path)
    clusters = k_means(vectors_of(store, path).astype(np.float32), 3, 0)
    assert table.replicates is not None
    for m, metric in enumerate(("purity", "nmi", "ari")):
        without = [
            agreement(clusters[data.rows != image], data.labels[data.rows != image])[
                metric
            ]
            for image in range(9)
        ]
        assert table.replicates[m] == pytest.approx(np.array(without), abs=1e-12)
        error = np.sqrt(8 * np.var(without))
        lowest = -1 if metric == "ari" else 0
        low, high = (
            float(table["value"][m]) + sign * 2.306004 * error for sign in (-1, 1)
        )
        ends = float(table["low"][m]), float(table["high"][m])
        if metric == "purity":
            low, high = jackknife_share(float(table["value"][m]), np.array(without), 9)
        assert ends == pytest.approx((max(low, lowest), min(high, 1)), rel=1e-6)


def test_the_preset_is_the_published_protocol(tmp_path: Path) -> None:
    store, path = by_kind(tmp_path, n=45)
    table = run(store, masks=path, preset="walmer", n_seeds=1, baselines=[], sites=SITE)
    about = table.notes["images"]["a"]
    assert unique(table, "k") == [80]
    assert about["weights"] == "vit_analysis"
    assert about["crowd"] is True
    assert "of the first 999 images of the masks" in about["chosen"]
    masks = Segmentation(path, weights="any", crowd=False)
    beside = run(
        store, masks=masks, preset="walmer", k=2, n_seeds=1, baselines=[], sites=SITE
    )
    assert unique(beside, "k") == [2]
    assert beside.notes["images"]["a"]["weights"] == "any"
    assert beside.notes["images"]["a"]["crowd"] is False


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    store, path = by_kind(tmp_path)
    command = ("cluster", str(store.path), "--masks", str(path), "--seeds", "1")
    said(tmp_path, *command, "-o", "r.csv", "--replicates", "--png", "r.png")
    table = Table.read(tmp_path / "r.csv")
    assert value(table)["segment_nmi"] == 1
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["masks"]["masks"] == [str(path)]
    assert "jackknife" in sidecar["notes"]["interval"]
    assert (tmp_path / "r.replicates.csv").exists()
    figure = plot(table)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["k = 3"] * 3
    assert [axes.get_title(loc="right") for axes in figure.axes] == [
        "n = 24 segments"
    ] * 3
    rows = said(tmp_path, *command, "--baseline", "none").splitlines()
    assert rows[0] == ",".join(SEGMENT_COLUMNS) and len(rows) == 1 + 6


def test_png_folders_and_several_files(tmp_path: Path) -> None:
    store, path = by_kind(tmp_path, n=6)
    folder = tmp_path / "png"
    folder.mkdir()
    for image in range(6):
        values = np.full((8, 12), 40, np.uint8)
        values[:4, :8], values[4:, 4:8] = image % 3, (image + 1) % 3
        Image.fromarray(values).save(folder / f"0-{image}.png")
    plain = vectors_of(store, path)
    found = segments_of(store, folder, background=[40], void="none")
    assert found.classes == ["0", "1", "2"]
    vectors = vectors_of(store, folder, background=[40], void="none")
    # of each image the lower value comes first
    order = [int(i) for k in range(6) for i in np.argsort([k % 3, (k + 1) % 3]) + 2 * k]
    assert vectors == pytest.approx(plain[order], abs=1e-7)
    content = json.loads(path.read_text())
    parts = []
    for n, keep in enumerate((range(4), range(4, 6))):
        some = [one for one in content["images"] if one["id"] in keep]
        parts.append(tmp_path / f"{n}.json")
        parts[-1].write_text(json.dumps(content | {"images": some}))
    masks = [word for part in parts for word in ("--masks", str(part))]
    words = ["cluster", str(store.path), *masks, "--seeds", "1", "--baseline", "none"]
    assert ",6,12," in said(tmp_path, *words)


@pytest.mark.slow
def test_refusals(tmp_path: Path) -> None:
    store, path = by_kind(tmp_path)
    command, masked = ("cluster", store.path), ("cluster", store.path, "--masks", path)
    wrong = refused(*command, "--weights", "any", "--segments", 3, code=2)
    assert "has no effect without --masks" in wrong
    for words, phrase in (
        ((*masked, "--k", 25), "25 clusters were asked for, but a has 24 segments"),
        ((*masked, "--tokens", "cls"), "with --masks there is one per segment"),
        (
            (*command, "--preset", "walmer"),
            "--preset walmer is of segments: give --masks too",
        ),
        ((*command, "--baseline", "image"), "no baseline 'image'"),
    ):
        assert phrase in refused(*words)
    masks = tmp_path / "other.json"
    for size, category, phrase in (
        ((8, 12), 1, "all 3 segments of a are of one category, kind 1"),
        ((8, 12), 9, "no segment but crowds (--crowd takes them)"),
        ((9, 12), 1, "is 12 x 9 pixels, its image 0-0 is 12 x 8"),
    ):
        write_coco(masks, size, [[(category, np.ones(size, bool))]] * 3)
        assert phrase in refused(*command, "--masks", masks)
    content = json.loads(path.read_text())
    images = content["images"]
    for others, phrase in (
        ([*images, images[0] | {"id": 99}], "the image 0-0.png is there twice"),
        (
            [i | {"file_name": f"x{i['id']}.png"} for i in images],
            "no image of a has a mask",
        ),
    ):
        masks.write_text(json.dumps(content | {"images": others}))
        assert phrase in refused(*command, "--masks", masks)


def test_sites_without_a_grid(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 6, 2))
    layout = TokenLayout((), (2, 3), stride_px=(4.0, 4.0))
    store = write_labelled(
        tmp_path / "a.zarr", {SITE: (x, layout), "pooled": (x[:, 0], None)}, [0, 1, 0, 1],
        transform=transform(8, 12), sizes=(8, 12),
    )  # fmt: skip
    mask = np.ones((8, 12), bool)
    path = write_coco(tmp_path / "a.json", (8, 12), [[(0, mask)], [(1, mask)]])
    with pytest.raises(SiteError, match=r"^pooled of a has no grid of patches"):
        run(store, masks=path, sites=(SITE, "pooled"), n_seeds=1)
    with pytest.raises(VitseeError, match="no weights 'bicubic'"):
        run(store, masks=Segmentation(path, weights="bicubic"))
