"""knn and probe with several stores that test."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.stores import write_labelled
from tests.tables import having, unique
from vitsee_cli.main import main
from vitsee_core.analyses import knn, probe
from vitsee_stores import Store
from vitsee_stores.errors import StoreMismatch, VitseeError

CENTRES = np.random.default_rng(0).normal(size=(3, 1, 4))


def made(path: Path, n: int, seed: int, **more: Any) -> Store:
    labels = np.arange(n) % 3
    noise = np.random.default_rng(seed).normal(size=(n, 3, 4))
    sites = {
        "embed": CENTRES[labels] + noise,
        "blocks.0.out": 2 * CENTRES[labels] + noise,
    }
    return write_labelled(path, sites, labels, **{"hash_offset": 1000 * seed, **more})


@pytest.fixture
def stores(tmp_path: Path) -> list[Store]:
    """One that trains and two of other sizes that test."""
    sizes = {"train": 30, "clean": 12, "blurred": 15}
    return [
        made(tmp_path / f"{name}.zarr", n, i)
        for i, (name, n) in enumerate(sizes.items(), 1)
    ]


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "knn": (knn.run, {"ks": [5], "baselines": ["random"]}),
    "probe": (probe.run, {"shots": [5], "seeds": 2, "baselines": ["random"]}),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_store_is_tested_as_alone(stores: list[Store], name: str) -> None:
    run, options = RUNS[name]
    train, *tests = stores
    table = run(train, *tests, **options)
    assert unique(table, "store") == ["clean", "blurred"]
    assert [about["store"] for about in table.notes["tests"]] == ["clean", "blurred"]
    assert [about["rows"] for about in table.notes["tests"]] == [12, 15]
    for test in tests:
        alone, rows = run(train, test, **options), having(table, store=test.label)
        for column in alone.written.columns:
            assert rows[column].tolist() == pytest.approx(
                alone[column].tolist(), nan_ok=True
            )
    real = [baseline == "" for baseline in table["baseline"].tolist()]
    assert real == sorted(real, reverse=True), "the baselines' rows come last"


@pytest.mark.parametrize("name", RUNS)
def test_the_last_is_checked_before_the_first_is_read(
    stores: list[Store], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = RUNS[name]
    other = made(tmp_path / "other.zarr", 9, 9, model="another")
    where = (
        "analyses.knn.voting.nearest"
        if name == "knn"
        else "analyses.probe.prober.Prober.each"
    )
    monkeypatch.setattr(f"vitsee_core.{where}", lambda *_: pytest.fail("work began"))
    with pytest.raises(
        StoreMismatch, match="train and other were made with different models"
    ):
        run(*stores, other, **options)
    same = made(tmp_path / "same.zarr", 9, 1)
    with pytest.raises(StoreMismatch, match="test images of same are in train too"):
        run(*stores, same, **options)


def test_something_has_to_test(stores: list[Store]) -> None:
    with pytest.raises(VitseeError, match="no store to test on"):
        knn.run(stores[0])
    with pytest.raises(VitseeError, match="give exactly one of TEST"):
        probe.run(stores[0])


@pytest.mark.parametrize("name", RUNS)
def test_commands(stores: list[Store], tmp_path: Path, name: str) -> None:
    paths = [str(store.path) for store in stores]
    options = ["--k", "5"] if name == "knn" else ["--shots", "5", "--seeds", "1"]
    png = tmp_path / "r.png"
    result = CliRunner().invoke(main, [name, *paths, *options, "--png", str(png)])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["store"] for row in rows} == {"clean", "blurred"}
    assert png.read_bytes()[1:4] == b"PNG"
    twice = CliRunner().invoke(main, [name, paths[0], paths[1], paths[1], *options])
    assert twice.exit_code == 2 and "two stores are called 'clean'" in twice.stderr
