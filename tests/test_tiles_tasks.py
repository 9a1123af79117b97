"""Dense tasks on tiled stores: what lies on a canvas beside an image has no part in any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.extractions import extracted
from tests.tables import having
from vitsee_core.analyses import best_layer, cluster, propagate
from vitsee_core.demo.coco import write_coco
from vitsee_core.demo.davis import write_davis
from vitsee_core.runtime.execution import Execution
from vitsee_core.truth.masks.segments import Segmentation, examples_of
from vitsee_stores import Store, open_store

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)
MODEL = ["test_vit", "--random-init", 0, "--model-arg", "patch_size=8"]
SITES = ["--sites", "blocks.1.out", "--sites", "blocks.5.out"]
TILES = [
    *MODEL,
    "--img-size",
    32,
    *SITES,
    "--short-side",
    48,
    "--tiles",
    "--dtype",
    "float32",
]
SITE = "blocks.5.out"


def tiled(data: Path, path: Path, *more: Any) -> Store:
    # one image at a time: products of other batches differ in the last digits
    extracted(*TILES, "--data", data, "-o", path, "--batch-size", 1, *more)
    return open_store(path)


def only(path: Path, *lines: str) -> list[Any]:
    path.write_text("\n".join(lines))
    return ["--only", path]


@pytest.fixture(scope="module")
def davis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature DAVIS below `DAVIS`, and `dense.zarr`: its validation set on one canvas."""
    folder = tmp_path_factory.mktemp("davis")
    write_davis(folder / "DAVIS")
    lists = ["--only", folder / "DAVIS/ImageSets/2017/val.txt"]
    frames = folder / "DAVIS/JPEGImages/480p"
    store = tiled(frames, folder / "dense.zarr", "--order", "dataset", *lists)
    assert not store.fills.all() and store.fills.any()
    return folder


@pytest.mark.slow
def test_videos_do_not_see_the_canvas(davis: Path, tmp_path: Path) -> None:
    """Each video's scores are those of a store of its own, which it fills."""
    frames, masks = davis / "DAVIS/JPEGImages/480p", davis / "DAVIS"
    options: dict[str, Any] = {"masks": masks, "per_video": True, "radius": 2.0}
    whole = propagate.run(open_store(davis / "dense.zarr"), **options)
    videos = sorted({name for name in whole["video"] if name})
    assert len(videos) == 3
    for name in videos:
        path = tmp_path / f"{name}.zarr"
        store = tiled(frames, path, "--order", "dataset", *only(tmp_path / "l.txt", name))
        assert store.fills.all()
        alone = having(propagate.run(store, **options), video=name)
        both = having(whole, video=name)
        assert alone["metric"].tolist() == both["metric"].tolist()
        np.testing.assert_array_equal(alone["value"], both["value"])


@pytest.mark.slow
def test_table_4(davis: Path, tmp_path: Path) -> None:
    """Squashed against dense, one row per model in best-layer's table."""
    frames = davis / "DAVIS/JPEGImages/480p"
    extracted(
        *MODEL, "--img-size", 32, *SITES, "--crop-mode", "squash", "--crop-pct", 1,
        "--order", "dataset", "--data", frames, "-o", tmp_path / "n.zarr",
        "--only", davis / "DAVIS/ImageSets/2017/val.txt",
    )  # fmt: skip
    stores = [
        open_store(tmp_path / "n.zarr", label="normal"),
        open_store(davis / "dense.zarr", label="dense"),
    ]
    table = propagate.run(*stores, masks=davis / "DAVIS")
    grid = {
        name: float(having(table, store=name, baseline="grid", metric="j")["value"][0])
        for name in ("normal", "dense")
    }
    assert grid["dense"] > grid["normal"]  # 6 x 10 cells against 4 x 4
    table.write(tmp_path / "j.csv")
    best = best_layer.run(tmp_path / "j.csv")
    assert {"normal", "dense"} <= set(best["store"])


def vectors(store: Store, path: Path) -> dict[str, NDArray[np.float32]]:
    """Image -> (segments, dim)."""
    execution = Execution()
    sites = [(store, store.select([SITE]))]
    examples = examples_of(Segmentation(path), sites, execution)
    data = examples.rows(store)
    features = examples.features(data, store.site(SITE))
    found = np.concatenate(list(data.vectors(features, jobs=1, memory=10**9)))
    ids = store.samples.id[data.rows]
    return {name: found[ids == name] for name in dict.fromkeys(ids.tolist())}


@pytest.mark.slow
def test_segments_do_not_see_the_canvas(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco", n_images=6)
    data, masks = (
        tmp_path / "coco/val2017",
        tmp_path / "coco/annotations/instances_val2017.json",
    )
    store = tiled(data, tmp_path / "a.zarr")
    assert 0 < store.fills.sum() < 6 or not store.fills.any()
    whole = vectors(store, masks)
    assert len(whole) == 6
    by_size: dict[tuple[int, ...], list[str]] = {}
    for name, size in zip(store.samples.id.tolist(), store.sizes.tolist(), strict=True):
        by_size.setdefault(tuple(size), []).append(name)
    assert len(by_size) == 3
    for k, names in enumerate(by_size.values()):
        alone = tiled(data, tmp_path / f"{k}.zarr", *only(tmp_path / "l.txt", *names))
        assert alone.fills.all()
        for name, found in vectors(alone, masks).items():
            np.testing.assert_array_equal(found, whole[name])
    table = cluster.run(store, masks=Segmentation(masks), sites=SITE, n_seeds=1)
    assert np.isfinite(table.filter(metric="segment_purity")["value"].astype(float)).all()


@pytest.mark.slow
def test_segments_of_boxes(tmp_path: Path) -> None:
    """Parts of images with the whole files' masks: as cropped images with cropped masks."""
    write_coco(tmp_path / "coco", n_images=3)
    data = tmp_path / "coco/val2017"
    masks = json.loads((tmp_path / "coco/annotations/panoptic_val2017.json").read_text())
    pngs = tmp_path / "coco/annotations/panoptic_val2017"
    box = (16, 8, 96, 88)
    rows = ["path,box"]
    for about in masks["images"]:
        rows.append(f"{about['file_name']},16 8 96 88")
        name = about["file_name"].removesuffix(".jpg")
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut_masks").mkdir(exist_ok=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.open(data / about["file_name"]).crop(box).save(
            tmp_path / "cut" / f"{name}.png"
        )
        ids = np.asarray(Image.open(pngs / f"{name}.png"))[..., 0] % 5
        Image.fromarray(ids).save(tmp_path / "masks" / f"{name}.png")
        Image.fromarray(ids[8:88, 16:96]).save(tmp_path / "cut_masks" / f"{name}.png")
    (data / "boxes.csv").write_text("\n".join(rows))
    order = ["--order", "dataset"]
    boxed = tiled(data / "boxes.csv", tmp_path / "b.zarr", *order)
    cut = tiled(tmp_path / "cut", tmp_path / "c.zarr", *order)
    a, b = vectors(boxed, tmp_path / "masks"), vectors(cut, tmp_path / "cut_masks")
    assert [name.partition(".")[0] for name in a] == [
        name.partition(".")[0] for name in b
    ]
    for ours, theirs in zip(a.values(), b.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
