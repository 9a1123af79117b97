"""The column `weights`: trained, random, loaded and ablated stores of one model never mix."""

from __future__ import annotations

import csv
import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.every_command import vitsee
from tests.manifests import edited
from tests.stores import write_sites
from tests.test_best_layer import scores, write
from vitsee_core.analyses import best_layer
from vitsee_core.pages.report.cards import Headings, group_results
from vitsee_core.pages.report.materials import find_materials
from vitsee_core.pages.report.overview import stores_by_model
from vitsee_core.pages.report.pictures import Addresses
from vitsee_core.runtime.progress import SILENT
from vitsee_stores.weights_names import weights_name

RANDOM: dict[str, Any] = {"weights": {"source": "random", "seed": 0}}
LOADED: dict[str, Any] = {
    "weights": {"source": "checkpoint", "file": "dino.pth", "key": "teacher"}
}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (
            {
                "weights": {
                    "source": "pretrained",
                    "pretrained": "vit_base_patch16_224.dino",
                }
            },
            "dino",
        ),
        (
            {"weights": {"source": "pretrained", "pretrained": "resnet50.a1_in1k.v2"}},
            "a1_in1k.v2",
        ),
        ({"weights": {"source": "pretrained", "pretrained": "resnet50"}}, "pretrained"),
        ({"weights": {"source": "local-dir", "sha256": "ab" * 32}}, "pretrained"),
        ({"weights": {"source": "local-dir", "folder": "run.v2"}}, "run.v2"),
        (
            {
                "weights": {
                    "source": "pretrained",
                    "pretrained": "../A/run.v2",
                    "folder": "run.v2",
                }
            },
            "run.v2",
        ),
        ({"weights": {"source": "pretrained", "pretrained": "../A/vit"}}, "pretrained"),
        (
            {"weights": {"source": "pretrained", "pretrained": "some/vit-2.5-b@v1.0"}},
            "pretrained",
        ),
        (
            {"weights": {"source": "pretrained", "pretrained": "hf-hub:a/vit.dino"}},
            "dino",
        ),
        (RANDOM, "random 0"),
        (LOADED, "dino.pth"),
        (
            {"weights": {**LOADED["weights"], "other_keys": ["student"]}},
            "dino.pth#teacher",
        ),
        (
            {"weights": {"source": "module", "sha256": "0123456789" * 6}},
            "module 01234567",
        ),
        ({"weights": {"sha256": "0123456789" * 6}}, "01234567"),
        (RANDOM | {"ablate_skip": ["blocks.3.attn"]}, "random 0, without blocks.3.attn"),
        (
            RANDOM
            | {
                "ablate_skip": [
                    "blocks.0.attn",
                    "blocks.0.mlp",
                    "blocks.1.attn",
                    "blocks.3.attn",
                ]
            },
            "random 0, without blocks.0-1.attn, blocks.3.attn, blocks.0.mlp",
        ),
        (
            RANDOM | {"ablate_skip": ["layer1.0", "layer1.1", "layer2.0", "last"]},
            "random 0, without last, layer1.0-1, layer2.0",
        ),
        (
            RANDOM
            | {"ablate_skip": ["last"], "interventions": ["cls=mean at blocks.6.out"]},
            "random 0, without last, cls=mean at blocks.6.out",
        ),
        ({"weights": None}, ""),
        ({}, ""),
        ({"weights": "other", "ablate_skip": None}, ""),
        ({"weights": {"source": 3}}, ""),
    ],
)
def test_names_of_weights(model: dict[str, Any], name: str) -> None:
    assert weights_name(model) == name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two stores called `vit` of one architecture, a random and a trained one, and their norms."""
    for sub, record in (("random", RANDOM), ("trained", LOADED)):
        (tmp_path / sub).mkdir()
        values = {"blocks.0.out": np.random.default_rng(0).normal(size=(12, 7, 4))}
        store = tmp_path / sub / "vit.zarr"
        write_sites(store, values, model="vit")
        with edited(store) as manifest:
            manifest["model"] |= record
        vitsee("norms", store, "-o", tmp_path / sub / "norms.csv")
    return tmp_path


def test_tables_info_and_sidecars_have_the_name(folder: Path) -> None:
    store = folder / "random" / "vit.zarr"
    text = vitsee("norms", store, f"b={folder / 'trained' / 'vit.zarr'}")
    rows = {
        (r["store"], r["model"], r["weights"]) for r in csv.DictReader(io.StringIO(text))
    }
    assert rows == {("vit", "vit", "random 0"), ("b", "vit", "dino.pth")}
    assert vitsee("info", store, "-f", "weights") == "random 0\n"
    assert "random 0" in vitsee("info", store)
    both = vitsee("info", store, folder / "trained" / "vit.zarr").splitlines()
    assert "random 0" in both[1] and "dino.pth" in both[2]
    sidecar = json.loads((folder / "trained" / "norms.csv.json").read_text())
    assert sidecar["stores"][0]["weights"] == "dino.pth"


@pytest.mark.slow
def test_a_report_tells_stores_of_one_name_apart(folder: Path) -> None:
    materials = find_materials(folder)
    assert [*stores_by_model(materials)] == ["vit (random 0)", "vit (dino.pth)"]
    with closing(Addresses({}, ())) as addresses:
        groups = group_results(
            materials.results,
            Headings({}, figures={}),
            folder / "r.html",
            stores={},
            left_out={},
            addresses=addresses,
            progress=SILENT,
        )
    ((group,),) = groups.values()
    assert {card.label for card in group.cards} == {"vit (random 0)", "vit (dino.pth)"}
    assert {store for store, _ in group.answers} == {"vit (random 0)", "vit (dino.pth)"}
    lines = {
        line["name"] for card in group.cards for c in card.charts for line in c["lines"]
    }
    assert all("(random 0)" in name or "(dino.pth)" in name for name in lines)


def test_best_layers_of_one_label_are_told_apart(tmp_path: Path) -> None:
    trained = scores([0.1, 0.2, 0.6, 0.5], weights="dino.pth")
    random = scores([0.4, 0.2, 0.1, 0.1], metric="accuracy", weights="random 0")
    files = [
        write(tmp_path / "knn.csv", trained, "knn"),
        write(tmp_path / "probe.csv", random, "probe"),
    ]
    table = best_layer.run(files)
    assert table["store"].tolist() == ["vit (dino.pth)", "vit (random 0)"]
    assert table["weights"].tolist() == ["dino.pth", "random 0"]
    best_layer.plot(table, best_layer.read(files))
    # One label, two models of equally named weights.
    other = [row | {"model": "demo:other", "weights": "dino.pth"} for row in random]
    files[1] = write(tmp_path / "other.csv", other, "probe")
    assert best_layer.run(files)["store"].tolist() == [
        "vit (demo:vit, dino.pth)",
        "vit (demo:other, dino.pth)",
    ]


def test_tables_of_before_the_column_keep_their_labels(tmp_path: Path) -> None:
    old = write(tmp_path / "old.csv", scores([0.1, 0.2, 0.6, 0.5]), "knn")
    new = scores([0.4, 0.2, 0.1, 0.1], metric="accuracy", weights="random 0")
    table = best_layer.run([old])
    assert table["store"].tolist() == ["vit"] and "weights" not in table.written.columns
    table = best_layer.run([old, write(tmp_path / "new.csv", new, "probe")])
    assert table["store"].tolist() == ["vit", "vit"]
    assert table["weights"].tolist() == ["", "random 0"]


@pytest.mark.slow
def test_a_result_of_before_the_column_is_drawn_and_reported(
    folder: Path, tmp_path: Path
) -> None:
    path = folder / "random" / "norms.csv"
    rows = list(csv.reader(path.open()))
    place = rows[0].index("weights")
    with path.open("w") as file:
        csv.writer(file).writerows([*row[:place], *row[place + 1 :]] for row in rows)
    beside = path.with_name("norms.csv.json")
    sidecar = json.loads(beside.read_text())
    del sidecar["columns"]["weights"], sidecar["sha256"], sidecar["stores"][0]["weights"]
    beside.write_text(json.dumps(sidecar))
    vitsee("plot", folder / "random" / "norms.csv", "-o", tmp_path / "old.png")
    assert (tmp_path / "old.png").stat().st_size
    vitsee("report", folder, "-o", tmp_path / "r.html")
    assert "vit (dino.pth)" in (tmp_path / "r.html").read_text()


def of_folder(place: str, digest: str, **more: Any) -> dict[str, Any]:
    """The record of a model of transformers from a folder, as extract writes it."""
    weights = {"source": "pretrained", "pretrained": place, "folder": Path(place).name}
    return {
        "name": f"transformers:{place}",
        "weights": {**weights, "sha256": digest},
    } | more


def of_local_dir(place: str, digest: str) -> dict[str, Any]:
    weights = {"source": "local-dir", "folder": Path(place).name, "sha256": digest}
    return {"name": f"local-dir:{place}", "weights": weights}


def of_file(place: str, digest: str) -> dict[str, Any]:
    file = {"source": "checkpoint", "file": Path(place).name, "sha256": digest}
    return {"name": "vit", "weights": file, "info": {"checkpoint": place}}


A = "a" * 64
B = "b" * 64
NAMESAKES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "two folders": (
        of_folder("../runA/vit", A),
        of_folder("../runB/vit", B),
        ["runA/vit", "runB/vit"],
    ),
    "deeper": (
        of_folder("/x/1/best/vit", A),
        of_folder("/x/2/best/vit", B),
        ["1/best/vit", "2/best/vit"],
    ),
    "timm's folders": (
        of_local_dir("../runA/vit", A),
        of_local_dir("../runB/vit", B),
        ["runA/vit", "runB/vit"],
    ),
    "two libraries": (
        of_folder("../runA/vit", A),
        of_local_dir("../runB/vit", B),
        ["runA/vit", "runB/vit"],
    ),
    "from two working folders": (
        of_folder("./vit", A, info={"data_folder": "/w/one"}),
        of_folder("./vit", B, info={"data_folder": "/w/two"}),
        ["one/vit", "two/vit"],
    ),
    "two files": (
        of_file("a/last.ckpt", A),
        of_file("b/last.ckpt", B),
        ["a/last.ckpt", "b/last.ckpt"],
    ),
    "without skips": (
        of_folder("../runA/vit", A, ablate_skip=["last"]),
        of_folder("../runB/vit", B, ablate_skip=["last"]),
        ["runA/vit, without last", "runB/vit, without last"],
    ),
    "trained on in one place": (
        of_folder("../run/vit", A),
        of_folder("../run/vit", B),
        ["vit (aaaaaaaa)", "vit (bbbbbbbb)"],
    ),
    "the same weights": (
        of_folder("../run/vit", A),
        of_folder("./copy/vit", A),
        ["vit", "vit"],
    ),
    "other names": (of_folder("../r/vit", A), of_folder("../r/vit2", B), ["vit", "vit2"]),
    "a tag": (
        {
            "name": "x",
            "weights": {"source": "pretrained", "pretrained": "x.dino", "sha256": A},
        },
        {
            "name": "y",
            "weights": {"source": "pretrained", "pretrained": "y.dino", "sha256": B},
        },
        ["dino", "dino"],
    ),
}


@pytest.mark.parametrize("case", NAMESAKES)
def test_of_two_folders_two_labels(case: str, tmp_path: Path) -> None:
    """In the table of both stores and in its sidecar; of one alone it is the folder's name."""
    *records, expected = NAMESAKES[case]
    values = {"blocks.0.out": np.random.default_rng(0).normal(size=(12, 7, 4))}
    for label, record in zip("ab", records, strict=True):
        write_sites(tmp_path / f"{label}.zarr", values)
        with edited(tmp_path / f"{label}.zarr") as manifest:
            manifest["info"] |= record.get("info", {})
            manifest["model"] |= {k: x for k, x in record.items() if k != "info"}
    stores = [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    vitsee("norms", *stores, "-o", tmp_path / "norms.csv")
    with (tmp_path / "norms.csv").open() as file:
        found = {row["store"]: row["weights"] for row in csv.DictReader(file)}
    assert [found["a"], found["b"]] == expected
    sidecar = json.loads((tmp_path / "norms.csv.json").read_text())
    assert [store["weights"] for store in sidecar["stores"]] == expected
    if case == "two folders":
        pairs = [*csv.DictReader(io.StringIO(vitsee("cka", *stores)))]
        sides = {(row["weights_a"], row["weights_b"]) for row in pairs}
        assert ("runA/vit", "runB/vit") in sides
        alone = csv.DictReader(io.StringIO(vitsee("norms", stores[0])))
        assert {row["weights"] for row in alone} == {"vit"}
