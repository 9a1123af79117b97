"""Differences of layers and models over the same blocks of images, and what a user sees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

from tests.stores import write_labelled
from vitsee_cli.main import main
from vitsee_core.analyses.best_layer import compare, headline, plot, read
from vitsee_core.statistics.jackknife import largest_t
from vitsee_core.tables import replicates
from vitsee_core.tables.results import Table
from vitsee_stores.errors import StoreMismatch, VitseeError

T_3 = 3.182446305284263  # t(0.975) of 3 degrees of freedom
N = 40


def write(path: Path, digest: str = "same", **stores: dict[str, list[float]]) -> Path:
    """Tables by hand: store -> site -> its value and its replicates, in four blocks."""
    rows: list[dict[str, Any]] = [
        {
            "store": store,
            "model": "m",
            "site": site,
            "block": "",
            "depth": i,
            "rel_depth": i / 2,
        }
        | {"k": 20, "metric": "top1", "value": numbers[0], "n_images": 40, "baseline": ""}
        | {"replicates": np.array(numbers[1:])}
        for store, sites in stores.items()
        for i, (site, numbers) in enumerate(sites.items())
    ]
    table = Table.from_rows(rows, [name for name in rows[0] if name != "replicates"])
    table.write(path)
    assert table.replicates is not None
    Table(replicates.expand_replicates(table.frame)).write(
        replicates.replicates_path(path)
    )
    notes = {"replicates": {store: {"digest": digest, "n_blocks": 4} for store in stores}}
    sidecar = {"command": ["vitsee", "knn", "a.zarr"], "notes": notes}
    path.with_name(path.name + ".json").write_text(json.dumps(sidecar))
    return path


LOW, HIGH = [0.5, 0.5, 0.4, 0.6, 0.5], [0.8, 0.8, 0.8, 0.9, 0.7]


def test_by_hand(tmp_path: Path) -> None:
    """Replicates of the difference: 0.3, 0.4, 0.3, 0.2; mean 0.3; sqrt(3 / 4 * 0.02)."""
    path = write(tmp_path / "r.csv", vit={"embed": LOW, "blocks.0.out": HIGH})
    table = compare(read([path]))
    assert len(table) == 1
    row = table.frame.row(0, named=True)
    assert (row["site_a"], row["site_b"], row["task"]) == (
        "blocks.0.out",
        "embed",
        "knn top1, k = 20",
    )
    assert row["value"] == pytest.approx(0.3)
    assert row["std"] == pytest.approx(math.sqrt(0.015))
    assert row["low"] == pytest.approx(0.3 - T_3 * math.sqrt(0.015))
    assert row["high"] == pytest.approx(0.3 + T_3 * math.sqrt(0.015))
    assert (row["n_blocks"], row["n_images"], row["spread"]) == (4, 40, "jackknife")


def test_intervals_allow_for_the_choice(tmp_path: Path) -> None:
    """Of three layers: all pairs of them, or of those of both stores."""
    sites = {
        "embed": LOW,
        "blocks.0.out": HIGH,
        "blocks.1.out": [0.7, 0.7, 0.9, 0.2, 0.8],
    }
    other = {"embed": [0.6, 0.4, 0.6, 0.6, 0.8]}
    files = read([write(tmp_path / "r.csv", vit=sites, cnn=other)])
    own = np.array([of[1:] for of in sites.values()])
    for among, family in (
        ("layers", own),
        ("models", np.array([*own, other["embed"][1:]])),
    ):
        table = compare(files, among=among)
        reach = largest_t(family) * table["std"].astype(float)
        assert largest_t(family) > T_3
        assert table["high"] - table["value"] == pytest.approx(reach)
        assert table["value"] - table["low"] == pytest.approx(reach)
    assert "simultaneous" in str(table.notes["interval"])


def test_what_is_shared_cancels(tmp_path: Path) -> None:
    """A layer that is better by the same amount in every block: a difference without error."""
    shifted = [value + 0.1 for value in LOW]
    path = write(tmp_path / "r.csv", vit={"embed": LOW, "blocks.0.out": shifted})
    table = compare(read([path]))
    assert table["value"][0] == pytest.approx(0.1)
    assert table["std"][0] == pytest.approx(0, abs=1e-12)


def test_models(tmp_path: Path) -> None:
    """Each store's best layer less those of the stores after it, in several files."""
    sites = {"embed": LOW, "blocks.0.out": HIGH}
    one = write(tmp_path / "one.csv", vit=sites, cnn={"embed": LOW})
    two = write(tmp_path / "two.csv", mlp={"embed": HIGH})
    table = compare(read([one, two]), among="models")
    pairs = list(zip(table["store_a"].tolist(), table["store_b"].tolist(), strict=True))
    assert pairs == [("vit", "cnn"), ("vit", "mlp"), ("cnn", "mlp")]
    np.testing.assert_allclose(table["value"].astype(float), [0.3, 0, -0.3], atol=1e-12)
    assert table["site_a"].tolist() == ["blocks.0.out", "blocks.0.out", "embed"]
    with pytest.raises(VitseeError, match="of one layer only"):
        compare(read([two]))
    with pytest.raises(VitseeError, match="of one model only"):
        compare(read([two]), among="models")
    with pytest.raises(VitseeError, match="no comparison of 'heads'"):
        compare(read([two]), among="heads")


def test_other_images_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one.csv", vit={"embed": LOW})
    two = write(tmp_path / "two.csv", "other", mlp={"embed": HIGH})
    with pytest.raises(StoreMismatch, match="not tested on the same images"):
        compare(read([one, two]), among="models")
    replicates.replicates_path(two).unlink()
    with pytest.raises(VitseeError, match="has no replicates beside it"):
        compare(read([one, two]), among="models")
    Path(f"{one}.json").unlink()
    with pytest.raises(VitseeError, match="does not say over which images"):
        compare(read([one]))


def command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


@pytest.mark.slow
def test_from_stores_to_differences(tmp_path: Path) -> None:
    """knn --replicates, then --paired, against a loop over the replicates' file."""
    rng = np.random.default_rng(0)
    labels = np.arange(N) % 3

    def store(name: str, seed: int, hash_offset: int = 0) -> Path:
        x = np.random.default_rng(seed).normal(size=(N, 3, 4))
        x[:, :, 0] += labels[:, np.newaxis]
        sites = {"embed": rng.normal(size=(N, 3, 4)), "blocks.0.out": x}
        write_labelled(tmp_path / name, sites, labels, hash_offset=hash_offset)
        return tmp_path / name

    train, a, b = store("t.zarr", 1, 1000), store("a.zarr", 2), store("b.zarr", 3)
    out = tmp_path / "knn.csv"
    options = ("--sites", "all", "--k", "3", "-o", out, "--replicates")
    result = command("knn", train, a, b, *options)
    assert result.exit_code == 0, result.stderr
    differences = tmp_path / "d.csv"
    for among, pairs in (("layers", 2), ("models", 1)):
        result = command(
            "best-layer", out, "--paired", among, "-o", differences, "--force"
        )
        assert result.exit_code == 0, result.stderr
        found = Table.read(differences)
        assert len(found) == pairs
        kept = Table.read(replicates.replicates_path(out)).filter(
            pl.col("baseline").is_null()
        )
        for i in range(pairs):
            x, y = (
                kept.filter(
                    store=found[f"store_{s}"][i],
                    site=found[f"site_{s}"][i],
                    metric="top1",
                )
                for s in "ab"
            )
            d = [
                float(x[f"without_{k}"][0]) - float(y[f"without_{k}"][0])
                for k in range(20)
            ]
            mean = sum(d) / 20
            error = math.sqrt(19 / 20 * sum((one - mean) ** 2 for one in d))
            assert found["value"][i] == pytest.approx(
                float(x["value"][0]) - float(y["value"][0])
            )
            assert found["std"][i] == pytest.approx(error)
            assert found["n_images"][i] == N


def test_the_figure(tmp_path: Path) -> None:
    """A line per difference, from the largest on, below what they are differences to; blue where
    the interval excludes 0, hollow where it does not, a cross without one."""
    sure, unsure = [0.5, 0.5, 0.5, 0.6, 0.41], [0.7, 0.7, 0.9, 0.2, 0.8]
    sites = {"embed": unsure, "blocks.0.out": HIGH, "blocks.1.out": sure}
    alone = {"embed": LOW, "blocks.0.out": [0.55, *[math.nan] * 4]}
    path = write(tmp_path / "r.csv", vit=sites, cnn=alone)
    table = compare(read([path]))
    panel = plot(table).axes[0]
    labels = [text.get_text() for text in panel.get_yticklabels()]
    assert labels == [
        *("vit: block 0 less", "block 1", "embedding"),
        *("cnn: block 0 less", "embedding"),
    ]
    points: list[Any] = [
        line for line in panel.get_lines() if line.get_linestyle() == "None"
    ]
    places = [(round(line.get_xdata()[0], 9), line.get_ydata()[0]) for line in points]
    assert places == [(0.3, 1), (0.1, 2), (0.05, 4)]
    marks = ["95 % interval excludes 0", "95 % interval includes 0", "no interval"]
    assert [line.get_label() for line in points] == marks
    assert [line.get_markerfacecolor() for line in points][:2] == ["#0072B2", "white"]
    lines: list[Any] = panel.get_lines()
    bars = [
        line.get_xdata()
        for line in lines
        if list(line.get_ydata()) in ([1, 1], [2, 2], [4, 4])
    ]
    row = table.filter(site_b="blocks.1.out")
    np.testing.assert_allclose(bars[0], [row["low"][0], row["high"][0]])
    assert len(bars) == 2
    both = compare(read([path]), among="models")
    labels = [text.get_text() for text in plot(both).axes[0].get_yticklabels()]
    assert labels == ["vit: block 0 less", "cnn: block 0"]


def test_the_command_draws_it_and_misses_replicates(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", vit={"embed": LOW, "blocks.0.out": HIGH})
    result = command(
        "best-layer", path, "--paired", "layers", "--png", tmp_path / "x.png"
    )
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    replicates.replicates_path(path).unlink()
    result = command("best-layer", path, "--paired", "layers")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "r.csv has no replicates beside it (r.replicates.csv); run" in result.stderr


def test_the_answer_of_differences(tmp_path: Path) -> None:
    """How many intervals exclude 0, of each store: the headline of a report's card."""
    near, far = [0.2, 0.21, 0.2, 0.19, 0.2], [0.9, 0.9, 0.9, 0.9, 0.9]
    sites = {"a": near, "b": HIGH, "c": far}
    path = write(tmp_path / "r.csv", vit=sites, cnn={"a": LOW, "b": LOW})
    table = compare(read([path]))
    apart = table.frame.filter(pl.col("low") > 0)["store_a"].to_list()
    assert headline(table) == [
        ("vit", f"{apart.count('vit')} of 2 differences have an interval without 0"),
        ("cnn", "0 of 1 difference have an interval without 0"),
    ]
    assert apart.count("vit") == 1
