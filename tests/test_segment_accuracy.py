"""k-NN and probes of segments: against loops over the segments' vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.every_command import vitsee
from tests.tables import having, unique
from tests.test_segments import random_objects, store_of, vectors_of, write_coco
from vitsee_core.analyses import knn, probe
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.truth.masks.segments import Segmentation
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

Array = NDArray[Any]
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)
SITE = "blocks.0.out"
SIZE = (8, 12)
Pair = tuple[Store, Store, list[Path]]


def kinds(rng: np.random.Generator, objects: Any, noise: float) -> Array:
    """(images, cells, dim) tokens that lean to the category of what lies on them."""
    x = rng.normal(size=(len(objects), 6, 5)) * noise
    for image, of_image in enumerate(objects):
        for category, mask in of_image:
            x[image, :, category] += mask.reshape(2, 4, 3, 4).mean((1, 3)).ravel()
    return x


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A training and a test store with masks in a file each."""
    rng = np.random.default_rng(11)
    stores, files = [], []
    for number, (name, n) in enumerate((("train", 40), ("test", 23))):
        objects = random_objects(rng, n)
        x = kinds(rng, objects, 0.25)
        store = store_of(tmp_path / f"{name}.zarr", x, slab=7, hash_offset=1000 * number)
        path = write_coco(tmp_path / f"{name}.json", SIZE, objects)
        content = json.loads(path.read_text())
        for image in content["images"]:
            image["file_name"] = image["file_name"].replace("0-", f"{1000 * number}-")
        path.write_text(json.dumps(content))
        stores.append(store)
        files.append(path)
    return stores[0], stores[1], files


def truth(path: Path) -> tuple[Array, Array]:
    """Category and image of each segment, in the file's order."""
    annotations = json.loads(path.read_text())["annotations"]
    return (
        np.array([one["category_id"] for one in annotations]),
        np.array([one["image_id"] for one in annotations]),
    )


def rows_of(table: Any, **where: Any) -> dict[str, Any]:
    found = having(table, **where)
    assert len(found) == 1
    return {name: found[name][0] for name in found.written.columns}


def test_knn_against_a_loop(pair: Pair) -> None:
    train, test, files = pair
    table = knn.run(train, test, masks=files, ks=(3,), sites=SITE, per_class=True)
    assert tuple(table.written.columns) == knn.SEGMENT_COLUMNS
    a, b = vectors_of(train, files[0]), vectors_of(test, files[1])
    (labels, _), (own, images) = truth(files[0]), truth(files[1])
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b)]
    right = []
    for i, cosines in enumerate(unit[1] @ unit[0].T):
        nearest = np.argsort(-cosines, kind="stable")[:3]
        votes = np.zeros(4)
        for j in nearest:
            votes[labels[j]] += np.exp(cosines[j] / 0.07)
        right.append(votes.argmax() == own[i])
    row = rows_of(table, metric="top1")
    assert row["value"] == pytest.approx(np.mean(right), abs=1e-12)
    assert row["n_segments"] == len(own)
    assert row["n_images"] == len(set(images.tolist()))
    # left out are images, with all of their segments: runs of a shuffled store's rows
    assert table.replicates is not None
    with_one = np.unique(images)
    assert len(with_one) < 20  # each is a block
    without = [np.mean(np.array(right)[images != image]) for image in with_one]
    assert table.replicates[0] == pytest.approx(np.array(without), abs=1e-12)
    ends = jackknife_share(row["value"], np.array(without), len(with_one))
    assert (row["low"], row["high"]) == pytest.approx(ends)
    classes = table.filter(metric="top1_class")
    assert classes["class"].tolist() == [f"kind {i}" for i in range(4)]
    assert classes["n_segments"].tolist() == np.bincount(own, minlength=4).tolist()
    of_class = [np.mean(np.array(right)[own == c]) for c in range(3)]
    assert classes["value"][:3].tolist() == pytest.approx(of_class)
    assert (classes["low"][:3] < classes["value"][:3]).all()
    assert np.isnan(float(classes["low"][3]))
    assert row["value"] > 0.6


def test_ridge_against_the_normal_equations(pair: Pair) -> None:
    train, test, files = pair
    table = probe.run(train, test, masks=files, l2=[0.5], sites=SITE)
    assert tuple(table.written.columns) == tuple(
        n for n in probe.SEGMENT_COLUMNS if n != "class"
    )
    a, b = (
        v.astype(float) for v in (vectors_of(train, files[0]), vectors_of(test, files[1]))
    )
    (labels, _), (own, images) = truth(files[0]), truth(files[1])
    y = np.where(np.arange(4) == labels[:, None], 1.0, -1.0)
    centred = a - a.mean(0)
    w = np.linalg.solve(
        centred.T @ centred + 0.5 * np.eye(5), centred.T @ (y - y.mean(0))
    )
    right = ((b - a.mean(0)) @ w + y.mean(0)).argmax(1) == own
    row = rows_of(table, metric="top1")
    assert row["value"] == pytest.approx(right.mean(), abs=1e-12)
    assert (row["n_segments"], row["n_images"]) == (len(own), len(set(images.tolist())))
    assert row["token"] == ""
    assert table.replicates is not None
    ends = jackknife_share(row["value"], table.replicates[0], len(np.unique(images)))
    assert (row["low"], row["high"]) == pytest.approx(ends)


def test_l2_is_chosen_and_shots_are_segments(pair: Pair) -> None:
    train, test, files = pair
    table = probe.run(train, test, masks=files, shots=(5,), seeds=2, sites=SITE)
    # no segment is of kind 3; by chance a third are right
    assert rows_of(table, metric="top1")["value"] > 0.5
    with pytest.raises(VitseeError, match=r"fewer than 500 training segments: kind 0"):
        probe.run(train, test, masks=files, shots=(500,), sites=SITE)
    everything = probe.run(train, test, masks=files, solver="sgd", epochs=40, sites=SITE)
    assert rows_of(everything, metric="top1")["value"] > 0.6


def test_a_share_of_images_is_held_out(pair: Pair) -> None:
    train, _, files = pair
    table = probe.run(train, masks=files[0], holdout=0.25, sites=SITE, l2=[1.0])
    _, images = truth(files[0])
    n = len(set(images.tolist()))
    row = rows_of(table, metric="top1")
    assert row["n_images"] == round(0.25 * n)
    assert table.notes["tests"][0]["also_in_train"] == 0
    assert table.notes["tests"][0]["images"] + table.notes["train"]["images"] == n
    assert table.notes["tests"][0]["segments"] + table.notes["train"]["segments"] == len(
        images
    )


def test_a_split_of_the_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    objects = random_objects(rng, 40)
    splits = ["train" if i % 3 else "val" for i in range(40)]
    store = store_of(tmp_path / "a.zarr", kinds(rng, objects, 0.25), splits=splits)
    path = write_coco(tmp_path / "a.json", SIZE, objects)
    table = probe.run(store, masks=path, test_split="val", sites=SITE, l2=[1.0])
    _, images = truth(path)
    assert rows_of(table, metric="top1")["n_segments"] == int((images % 3 == 0).sum())
    assert table.notes["train"]["segments"] == int((images % 3 > 0).sum())
    with pytest.raises(VitseeError, match="a has no split 'dev'"):
        probe.run(store, masks=path, test_split="dev", sites=SITE)


def test_names_and_numbers_as_classes(pair: Pair, tmp_path: Path) -> None:
    """A COCO file for the one store, a folder of PNG values for the other."""
    train, test, files = pair
    folder = tmp_path / "png"
    folder.mkdir()
    for image in range(23):
        values = np.zeros(SIZE, np.uint8)
        values[:4], values[4:, 6:] = 10, 9
        Image.fromarray(values).save(folder / f"1000-{image}.png")
    table = knn.run(
        train, test, masks=[files[0], folder], sites=SITE, ks=(1,), per_class=True
    )
    assert unique(table, "class")[-5:] == ["9", "10", "kind 0", "kind 1", "kind 2"]
    assert rows_of(table, metric="top1")["value"] == 0


def test_the_same_images_on_both_sides(pair: Pair) -> None:
    train, _, files = pair
    with pytest.raises(
        VitseeError, match=r"^30 of the 30 test images of train are in train too"
    ):
        knn.run(train, train, masks=files[0], sites=SITE)
    with pytest.raises(VitseeError, match="there is one per segment"):
        knn.run(train, train, masks=files[0], tokens="cls", allow_shared=True)
    with pytest.raises(VitseeError, match="there is one per segment"):
        probe.run(train, holdout=0.5, masks=files[0], preset="raghu")
    with pytest.raises(
        VitseeError, match=r"but train has 60 segments; expected --k of at most 60"
    ):
        knn.run(train, train, masks=files[0], ks=(61,), allow_shared=True)


@pytest.mark.slow
def test_the_commands(pair: Pair, tmp_path: Path) -> None:
    train, test, files = pair
    masks = [word for file in files for word in ("--masks", file)]
    for command in ("knn", "probe"):
        out, png = tmp_path / f"{command}.csv", tmp_path / f"{command}.png"
        words = [*masks, "--baseline", "random", "-o", out, "--png", png]
        vitsee(command, train.path, test.path, *words)
        sidecar = json.loads(Path(f"{out}.json").read_text())
        assert "95 % interval over images" in sidecar["notes"]["interval"]
        assert "n_segments" in out.read_text().splitlines()[0]
        assert png.stat().st_size > 5000
    vitsee("best-layer", tmp_path / "knn.csv", tmp_path / "probe.csv")


@pytest.mark.slow
def test_the_images_own_classes_do_not_count(tmp_path: Path) -> None:
    """Stores whose labels do not fit together: they are not asked for."""
    rng = np.random.default_rng(13)
    objects = random_objects(rng, 16)
    x = kinds(rng, objects, 0.25)
    path = write_coco(tmp_path / "a.json", SIZE, objects)
    train = store_of(tmp_path / "train.zarr", x, classes=["cat", "dog"])
    others: list[dict[str, Any]] = [
        {"classes": []},
        {"labels": np.full(16, -1), "classes": []},
    ]
    for number, more in enumerate(others):
        test = store_of(tmp_path / f"{number}.zarr", x, **more)
        for run in (knn.run, probe.run):
            table = run(train, test, masks=path, sites=SITE, allow_shared=True)
            assert not [line for line in table.notes["remarks"] if "by number" in line]
            assert len(table.filter(metric="top1")) == 1


def test_any_choice_gives_the_same_as_its_fields(pair: Pair) -> None:
    train, test, files = pair
    plain = knn.run(train, test, masks=files, sites=SITE, ks=(5,))
    spelled = knn.run(
        train, test, masks=Segmentation(files, weights="area"), sites=SITE, ks=(5,)
    )
    assert plain["value"].tolist() == spelled["value"].tolist()
