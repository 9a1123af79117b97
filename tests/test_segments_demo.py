"""Segments from end to end: the miniature COCO and PartImageNet, two demo models, tables and
figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import vitsee
from tests.tables import having, unique
from vitsee_cli.main import main
from vitsee_core.analyses import cluster, probe
from vitsee_core.demo.coco import write_coco
from vitsee_core.figures.plotting import save_figure
from vitsee_core.runtime.execution import Execution
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks.segments import LabelledSegments, Segmentation, examples_of
from vitsee_stores import Store, open_store

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("demo")
    write_coco(folder, n_images=16)
    shared: dict[str, Any] = {"sites": ["blocks"], "attention": "none", "residual": False}
    for model in ("vit", "resnet"):
        vitsee.extract(
            f"demo:{model}", folder / "val2017", folder / f"{model}.zarr", **shared
        )
    vitsee.extract("demo:vit", folder / "parts", folder / "parts.zarr", **shared)
    yield folder


def vectors(
    store: Store, masks: Path, site: str, **choice: Any
) -> tuple[LabelledSegments, Any]:
    choice_ = Segmentation(masks, **choice)
    examples = examples_of(choice_, [(store, store.select([site]))], Execution())
    data = examples.rows(store)
    assert isinstance(data, LabelledSegments)
    features = examples.features(data, store.site(site))
    return data, np.concatenate(list(data.vectors(features, jobs=2, memory=10**9)))


def test_panoptic_segments_make_the_image(made: Path) -> None:
    """Every pixel has a segment, so that their vectors, weighted by their visible areas, are the
    mean over the patches: of landscape and portrait images, cropped."""
    store = open_store(made / "vit.zarr")
    masks = made / "annotations" / "panoptic_val2017.json"
    data, x = vectors(store, masks, "blocks.2.out")
    content = json.loads(masks.read_text())
    assert data.n_images == len(content["annotations"]) == 16
    # the visible area of each segment, of 8 x 8 cells, from its weights' shares of a cell
    layout = store.site("blocks.2.out").layout
    assert layout is not None
    weights = data.weights[layout]
    whole = store.pooled("blocks.2.out", "mean")[:].astype(float)
    for row in range(16):
        own = np.flatnonzero(data.rows == row)
        shares = np.zeros((64, len(own)))
        for k, number in enumerate(own):
            part = slice(weights.starts[number], weights.starts[number + 1])
            shares[weights.tokens[part], k] = weights.values[part]
        # areas a with shares @ a = 1 in every cell
        areas = np.linalg.lstsq(shares, np.ones(64), rcond=None)[0]
        assert shares @ areas == pytest.approx(np.ones(64), abs=1e-5)
        # tokens are float16, pooled means float32
        assert areas @ x[own] / 64 == pytest.approx(whole[row], abs=2e-3)


@pytest.mark.slow
def test_objects_of_two_models(made: Path, tmp_path: Path) -> None:
    """Walmer et al. 2023, Figs. 8, 26, 27: curves over depth of several models."""
    out, png = tmp_path / "objects.csv", tmp_path / "objects.png"
    masks = made / "annotations" / "instances_val2017.json"
    stores = [str(made / f"{model}.zarr") for model in ("vit", "resnet")]
    command = ["cluster", *stores, "--masks", str(masks), "--seeds", "2", "-o", str(out)]
    result = CliRunner().invoke(main, [*command, "--png", str(png), "--replicates"])
    assert result.exit_code == 0, result.output
    table = Table.read(out)
    assert unique(table, "store") == ["vit", "resnet"]
    assert unique(table, "metric") == ["segment_purity", "segment_nmi", "segment_ari"]
    for model in ("vit", "resnet"):
        rows = having(table, store=model, metric="segment_nmi")
        own, shuffled = (
            having(rows, baseline=name)["value"] for name in ("", "shuffled")
        )
        # colours are in the embedding
        assert own[0] > shuffled[0] + 0.05
    axes = cluster.plot(table).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert [text for text in labels if ":" not in text] == ["vit", "resnet"]
    best = CliRunner().invoke(main, ["best-layer", str(out), "--paired", "layers"])
    assert best.exit_code == 0, best.output
    assert "segment_purity" in best.stdout


@pytest.mark.slow
def test_parts_of_three_files(made: Path, tmp_path: Path) -> None:
    files = [made / "parts" / f"{split}.json" for split in ("train", "val", "test")]
    table = vitsee.cluster(made / "parts.zarr", masks=files, n_seeds=2, seed=1)
    assert unique(table, "k") == [8]
    assert unique(table, "n_images") == [56]
    rows = table.filter(site="embed", metric="segment_purity")
    value = dict(zip(rows["baseline"].tolist(), rows["value"].tolist(), strict=True))
    assert value[""] > value["shuffled"] + 0.1
    save_figure(cluster.plot(table), tmp_path / "parts.png")
    held = vitsee.probe(
        made / "parts.zarr", masks=files, holdout=0.3, per_class=True, sites="embed"
    )
    top1 = held.filter(metric="top1")
    assert top1["value"][0] > 0.5
    names = itertools.product(("Top", "Trouser", "Shoe", "Bag"), ("Upper", "Lower"))
    assert {*held.filter(metric="top1_class")["class"]} == {*map(" ".join, names)}
    save_figure(probe.plot(held), tmp_path / "probe.png")


@pytest.mark.slow
def test_images_of_several_sizes_on_a_canvas(made: Path, tmp_path: Path) -> None:
    """Tiled, as for dense features: what lies beside an image has no weight, and its panoptic
    segments make its mean over the patches that lie on it."""
    store = vitsee.extract(
        "demo:vit", made / "val2017", tmp_path / "tiled.zarr",
        images=6, short_side=64, tiles=True, sites=["blocks"],
    )  # fmt: skip
    masks = made / "annotations" / "panoptic_val2017.json"
    data, x = vectors(store, masks, "embed")
    assert not store.fills.all()
    whole = store.pooled("embed", "mean")[:].astype(float)
    content = json.loads(masks.read_text())
    by_name = {one["id"]: one["file_name"] for one in content["images"]}
    areas = {
        Path(by_name[one["image_id"]]).stem: [
            part["area"] for part in one["segments_info"]
        ]
        for one in content["annotations"]
    }
    for row in range(6):
        own = np.array(areas[Path(store.samples.id[row]).stem], float)
        # the image fills whole cells: all of it is seen, in proportion
        assert own @ x[data.rows == row] / own.sum() == pytest.approx(
            whole[row], abs=2e-3
        )
    published = vectors(store, masks, "embed", weights="vit_analysis")[1]
    assert published.shape == x.shape


def test_weights_differ_where_objects_are_small(made: Path) -> None:
    store = open_store(made / "vit.zarr")
    masks = made / "annotations" / "instances_val2017.json"
    found = {
        kind: vectors(store, masks, "embed", weights=kind)[1] for kind in ("area", "any")
    }
    published = vectors(store, masks, "embed", weights="vit_analysis")[1]
    assert np.abs(found["area"] - found["any"]).max() > 0.05
    gaps = np.linalg.norm(found["area"] - published, axis=1)
    # the same tokens, weighted otherwise
    assert 0 < np.median(gaps) < 0.5 * np.median(np.linalg.norm(found["area"], axis=1))


@pytest.mark.slow
def test_saliency_takes_things_for_objects(tmp_path: Path) -> None:
    """Of images without crowds, panoptic things and annotated objects are the same foreground."""
    write_coco(tmp_path, n_images=3)
    store = tmp_path / "vit.zarr"
    vitsee.extract(
        "demo:vit", tmp_path / "val2017", store, attention="rows", sites=["embed"]
    )
    annotations = tmp_path / "annotations"
    objects = vitsee.saliency(store, masks=annotations / "instances_val2017.json")
    moved = (annotations / "panoptic_val2017").rename(tmp_path / "elsewhere")
    out = tmp_path / "r.csv"
    masks = [
        "--masks",
        str(annotations / "panoptic_val2017.json"),
        "--panoptic",
        str(moved),
    ]
    result = CliRunner().invoke(main, ["saliency", str(store), *masks, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert Table.read(out)["value"].tolist() == objects["value"].tolist()
    assert np.isfinite(objects["value"].astype(float)).all()
