"""`vitsee findings`: which stores stand for which models, the numbers, and what is not measured."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.command_line import invoke, one_line
from tests.extractions import extracted
from vitsee_core.analyses import attn_dist, knn
from vitsee_core.study.findings import verdicts
from vitsee_core.study.findings.verdicts import COLUMNS, run
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two models the test images, of one the images to learn from."""
    made = tmp_path_factory.mktemp("stores")
    for name, model, data in (
        ("a", "vit", "test"),
        ("c", "resnet", "test"),
        ("a-train", "vit", "train"),
    ):
        words = (f"demo:{model}", "--data", f"demo:{data}", "--images", 60, "--slab", 10)
        extracted(*words, "-o", made / f"{name}.zarr")
    return made


def stores(folder: Path, *labels: str) -> list[Store]:
    """`label` or `label=file`."""
    pairs = [label.rpartition("=") for label in labels]
    return [
        open_store(folder / f"{file}.zarr", label=name or file) for name, _, file in pairs
    ]


def row(table: Table, name: str) -> dict[str, object]:
    (found,) = table.frame.filter(name=name).rows(named=True)
    return found


@pytest.mark.slow
def test_numbers_are_those_of_the_analyses(folder: Path) -> None:
    """Of the upper three blocks of six less the lower three; of the last block less the best of
    the others."""
    vit, cnn, train = stores(folder, "a", "c", "a-train")
    found = run(vit, cnn, train)
    distances = attn_dist.run(vit, metrics="distance_relative")
    values = distances["value"].astype(float).reshape(6, 4)
    rise = row(found, "distance-rises")
    assert rise["value"] == pytest.approx(values[3:].mean() - values[:3].mean(), rel=1e-9)
    assert rise["stores"] == "vit=a" and rise["reason"] is None and rise["n_blocks"] == 20
    scores = knn.run(train, vit).filter(pl.col("baseline").is_null(), metric="top1")
    by_depth = dict(
        zip(scores["rel_depth"].tolist(), scores["value"].tolist(), strict=True)
    )
    best = row(found, "best-classes")
    last = by_depth.pop(1.0)
    assert best["value"] == pytest.approx(last - max(by_depth.values()), abs=1e-12)
    uniform = row(found, "uniform")
    assert uniform["stores"] == "vit=a resnet=c" and np.isfinite(
        float(str(uniform["value"]))
    )
    for one in (rise, best, uniform):
        low, high = (float(str(one[name])) for name in ("low", "high"))
        expected = "holds" if low > 0 else "does not hold" if high < 0 else "undecided"
        assert one["verdict"] == expected
    missing = row(found, "fields-low")
    assert missing["verdict"] == "not measured" and missing["value"] is None
    assert "receptive fields" in str(missing["reason"])
    assert found.notes["left_out"]["mixer"] == "no store is of a mixer"


def test_a_name_says_what_a_store_is(folder: Path) -> None:
    """Stores of one kind are looked at one by one; a named one for its own findings."""
    given = stores(folder, "a", "other=a", "vit-gap=a", "c")
    found = run(
        *given, findings=["distance-rises", "uniform", "uniform-gap", "best-classes"]
    )
    assert list(zip(found["name"], found["stores"], strict=True)) == [
        ("uniform", "vit=a resnet=c"),
        ("uniform", "vit=other resnet=c"),
        ("uniform-gap", "vit-gap=vit-gap resnet=c"),
        ("distance-rises", "vit=a"),
        ("distance-rises", "vit=other"),
        ("best-classes", "vit=a"),
        ("best-classes", "vit=other"),
    ]
    assert found["value"][0] == found["value"][2], "the same store by another name"
    assert list(found["reason"][-2:]) == [
        f"there is no store {name}-train of images to learn from"
        for name in ("a", "other")
    ]


def test_some_images_alone(folder: Path) -> None:
    """Also where an interval is made of attention that the store keeps."""
    (vit,) = stores(folder, "a")
    found = run(vit, findings=["distance-rises"], images=30)
    few = attn_dist.run(vit, metrics="distance_relative", images=30)["value"].astype(
        float
    )
    values = few.reshape(6, 4)
    assert found["value"][0] == pytest.approx(
        values[3:].mean() - values[:3].mean(), rel=1e-9
    )
    assert found["low"][0] < found["value"][0] < found["high"][0]


def test_what_cannot_be_looked_for(folder: Path) -> None:
    vit, cnn = stores(folder, "a", "c")
    with pytest.raises(
        VitseeError, match="no finding 'nope'; findings: uniform, uniform-gap"
    ):
        run(vit, findings=["nope"])
    with pytest.raises(
        VitseeError, match="nothing to look for: uniform: no store is of a vit"
    ):
        run(cnn, findings=["uniform"])
    assert {"vit", "resnet", "vit-gap"} < verdicts.ROLES


@pytest.mark.slow
def test_no_line_is_said_twice(folder: Path) -> None:
    """Several findings are of the heads of one store, and all are of some of its images."""
    words = [word for name in ("offset-heads", "repeating", "local-heads", "distance-rises")
             for word in ("--finding", name)]  # fmt: skip
    done = invoke("findings", folder / "a.zarr", "--images", 25, *words)
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    assert any("heads keep their type" in line for line in lines)
    assert any("rounded up" in line for line in lines)
    assert sorted({*lines}) == sorted(lines)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    a = folder / "a.zarr"
    done = invoke(
        "findings", a, "--finding", "distance-rises", "--finding", "fields-branch"
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert tuple(rows[0]) == COLUMNS
    assert [one["verdict"] for one in rows][1] == "not measured" and not rows[1]["value"]
    out = tmp_path / "f.csv"
    assert (
        invoke("findings", f"x={a}", "--finding", "distance-rises", "-o", out).exit_code
        == 0
    )
    assert (
        Table.read(out)["stores"].tolist() == ["vit=x"]
        and out.with_name("f.csv.json").exists()
    )
    for words, code, expected in (
        ((a, "--finding", "nope"), 1, "vitsee findings: no finding 'nope'"),
        ((tmp_path / "no.zarr",), 1, "no.zarr"),
        ((a, "-o", out), 1, "exists"),
        ((), 2, "STORE"),
    ):
        assert expected in one_line("findings", *words, code=code)
