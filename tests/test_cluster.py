"""Clusters against classes: numbers by hand and loops, and what a user sees."""

from __future__ import annotations

import io
import json
import logging
import math
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.stores import CNN_PAIR, write_labelled
from tests.tables import check_chosen_metrics, equal, having, unique
from vitsee_cli import console
from vitsee_cli.main import main
from vitsee_core.analyses.cluster import (
    BASELINES,
    COLUMNS,
    METRICS,
    plot,
    run,
)
from vitsee_core.analyses.cluster.agreement import agreement
from vitsee_core.analyses.cluster.clustering import k_means
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, VitseeError

Array = NDArray[Any]


def loop_purity(clusters: Array, labels: Array) -> float:
    total = 0
    for c in set(clusters.tolist()):
        own = [int(b) for a, b in zip(clusters, labels, strict=True) if a == c]
        total += max(own.count(b) for b in set(own))
    return total / len(labels)


def loop_entropy(values: list[Any]) -> float:
    shares = [values.count(v) / len(values) for v in set(values)]
    return -math.fsum(p * math.log(p) for p in shares)


def loop_nmi(clusters: Array, labels: Array) -> float:
    a, b = clusters.tolist(), labels.tolist()
    h_a, h_b = loop_entropy(a), loop_entropy(b)
    if h_a + h_b == 0:
        return 1.0
    mutual = h_a + h_b - loop_entropy(list(zip(a, b, strict=True)))
    return 2 * mutual / (h_a + h_b)


def loop_ari(clusters: Array, labels: Array) -> float:
    """Pair by pair: (together in both - expected) / (mean of both - expected)."""
    both = in_a = in_b = 0
    pairs = list(combinations(range(len(labels)), 2))
    for i, j in pairs:
        a, b = clusters[i] == clusters[j], labels[i] == labels[j]
        both, in_a, in_b = both + (a and b), in_a + a, in_b + b
    expected = in_a * in_b / len(pairs)
    top = (in_a + in_b) / 2
    return 1.0 if top == expected else float((both - expected) / (top - expected))


# ---------------------------------------------------------------- the scores


def test_agreement_by_hand() -> None:
    # cluster 0 holds classes 0 0 1, cluster 1 holds 1 1 0
    clusters, labels = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 0])
    found = agreement(clusters, labels)
    assert found["purity"] == 4 / 6
    # H = ln 2 each; joint: 1/3, 1/6, 1/6, 1/3
    joint = 2 / 3 * math.log(3) + 1 / 3 * math.log(6)
    assert found["nmi"] == pytest.approx(
        (2 * math.log(2) - joint) / math.log(2), rel=1e-12
    )
    # 15 pairs, 6 in a cluster, 6 in a class, 2 in both: (2 - 2.4) / (6 - 2.4)
    assert found["ari"] == pytest.approx(-1 / 9, rel=1e-12)


@given(st.integers(2, 25), st.integers(1, 5), st.integers(1, 4), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_agreement_against_loops(n: int, k: int, n_classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clusters, labels = rng.integers(0, k, n), rng.integers(0, n_classes, n)
    found = agreement(clusters, labels)
    assert found["purity"] == pytest.approx(loop_purity(clusters, labels), rel=1e-14)
    # entropies of a few nats in float64; near 0 only the absolute error is small
    assert found["nmi"] == pytest.approx(loop_nmi(clusters, labels), rel=1e-9, abs=1e-9)
    assert found["ari"] == pytest.approx(loop_ari(clusters, labels), rel=1e-9, abs=1e-12)
    # names of clusters and classes say nothing
    renamed = agreement(rng.permutation(k)[clusters], rng.permutation(n_classes)[labels])
    assert list(renamed.values()) == pytest.approx(
        list(found.values()), rel=1e-9, abs=1e-9
    )


def test_the_ends_of_the_scale() -> None:
    labels = np.repeat(np.arange(4), 5)
    assert agreement(labels, labels) == pytest.approx({"purity": 1, "nmi": 1, "ari": 1})
    alone = agreement(np.zeros(20, int), labels)
    assert alone == pytest.approx({"purity": 0.25, "nmi": 0, "ari": 0})
    # one cluster an image is pure and says nothing
    single = agreement(np.arange(20), labels)
    assert single["purity"] == 1 and single["ari"] == pytest.approx(0)


def test_k_means_finds_what_is_apart() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 4
    x = (20 * np.eye(4)[labels] + rng.normal(size=(60, 4))).astype(np.float32)
    before = x.copy()
    clusters = k_means(x, 4, 0)
    assert agreement(clusters, labels)["ari"] == 1
    assert np.array_equal(x, before)
    assert np.array_equal(clusters, k_means(x, 4, 0))


def test_equal_vectors_are_one_cluster() -> None:
    assert k_means(np.full((7, 3), 0.1, np.float32), 3, 0).tolist() == [0] * 7
    two = np.repeat(np.eye(2, dtype=np.float32), 4, axis=0)
    assert agreement(k_means(two, 3, 0), np.repeat([0, 1], 4))["ari"] == 1


# ---------------------------------------------------------------- run


def made(path: Path, n: int = 40, **kwargs: Any) -> Store:
    """Four classes; later sites know more about them."""
    labels = np.asarray(kwargs.pop("labels", np.arange(n) % 4))
    rng = np.random.default_rng(kwargs.pop("seed", 0))
    centres = rng.normal(size=(4, 1, 4))
    sites = {
        name: weight * centres[labels] + 0.5 * rng.normal(size=(n, 3, 4))
        for name, weight in (
            ("embed", 0.0),
            ("blocks.0.out", 1.0),
            ("blocks.1.out", 20.0),
        )
    }
    return write_labelled(path, sites, labels, **{"slab": 8, **kwargs})


def test_what_is_not_clustered_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one cluster there is nothing to do, and the progress does not end before its total."""
    monkeypatch.setattr(console, "SHOW_AFTER", 0.0)
    store = made(tmp_path / "a.zarr")
    ends = {}
    for k in ("1", "4"):
        result = CliRunner().invoke(
            main, ["cluster", str(store.path), "--k", k, "--seeds", "1"]
        )
        assert result.exit_code == 0, result.stderr
        (ends[k],) = (
            line for line in result.stderr.splitlines() if "images x sites" in line
        )
    assert ends["1"].startswith("cluster: 0/0 images x sites")
    assert ends["4"].startswith("cluster: 160/160 images x sites")


def test_columns_and_baselines(tmp_path: Path) -> None:
    table = run(made(tmp_path / "a.zarr"))
    assert tuple(table.written.columns) == COLUMNS
    assert len(table) == 3 * 3 * 3
    real = having(table, baseline="")
    assert real["metric"].tolist() == list(METRICS) * 3
    assert real["depth"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert set(table["k"].tolist()) == {4} and set(table["n_images"].tolist()) == {40}
    last = {m: having(real, site="blocks.1.out", metric=m) for m in METRICS}
    assert [last[m]["value"][0] for m in METRICS] == pytest.approx([1, 1, 1])
    for name in BASELINES:
        chance = having(table, baseline=name)
        assert chance.filter(metric="purity")["value"].min() >= 0.25
        # of 40 images and 4 clusters: noise in ARI is about 0.04
        assert abs(chance.filter(metric="ari")["value"]).max() < 0.2
    assert len({*table.filter(baseline="random", metric="nmi")["value"].tolist()}) == 1
    assert table.notes["seeds"] == [0, 1, 2]
    assert table.notes["tokens"]["a"]["embed"] == "cls"


def test_metrics_are_chosen(tmp_path: Path) -> None:
    work = partial(run, made(tmp_path / "a.zarr"), n_seeds=1)
    check_chosen_metrics(work, plot, {metric: [metric] for metric in METRICS}, "cluster")


@pytest.mark.slow
def test_values_are_means_over_seeds(tmp_path: Path) -> None:
    store = made(tmp_path / "a.zarr")
    table = run(store, sites=["embed"], tokens="rest", n_seeds=4, seed=5, k=6)
    x = store.acts("embed", "rest")[:]
    labels = store.samples.label
    for baseline in ("", "shuffled"):
        scores = []
        for seed in (5, 6, 7, 8):
            against = labels
            if baseline == "shuffled":
                against = np.random.default_rng((seed, 1)).permutation(labels)
            clusters = k_means(x, 6, seed)
            loops = (loop_purity, loop_nmi, loop_ari)
            scores.append([loop(clusters, against) for loop in loops])
        rows = having(table, baseline=baseline)
        assert rows["value"] == pytest.approx(np.mean(scores, 0), rel=1e-9, abs=1e-12)
        assert rows["std"] == pytest.approx(
            np.std(scores, 0, ddof=1), rel=1e-7, abs=1e-12
        )
    one = run(store, n_seeds=1)
    assert np.isnan(one["std"]).all() and not np.isnan(one["value"]).any()
    plot(one)


def test_k_counts_the_classes_that_occur(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four classes of a data set that names twelve: four clusters."""
    store = made(tmp_path / "a.zarr", classes=list("abcdefghijkl"))
    with caplog.at_level(logging.INFO):
        table = run(store, n_seeds=1)
    assert "a: 4 of its 12 classes occur, so k = 4" in caplog.messages
    assert set(table["k"].tolist()) == {4}
    (tmp_path / "b").mkdir()
    assert equal(table, run(made(tmp_path / "b" / "a.zarr"), n_seeds=1))


@pytest.mark.slow
def test_slabs_jobs_and_invalid_rows(tmp_path: Path) -> None:
    expected = run(made(tmp_path / "a.zarr", slab=40), n_seeds=2)
    for slab in (1, 7):
        (tmp_path / str(slab)).mkdir()
        store = made(tmp_path / str(slab) / "a.zarr", slab=slab)
        assert equal(run(store, n_seeds=2), expected)
        assert equal(run(store, n_seeds=2, jobs=3), expected)
    valid = [int(i % 9 != 2) for i in range(40)]
    labels = [-1 if i == 5 else i % 4 for i in range(40)]
    store = made(tmp_path / "b.zarr", valid=valid)
    table = run(store, n_seeds=1)
    assert set(table["n_images"].tolist()) == {35}
    assert not np.isnan(table["value"]).any()
    left = made(tmp_path / "c.zarr", labels=np.array(labels), slabs=[0, 1, 3])
    assert set(run(left, n_seeds=1)["n_images"].tolist()) == {8 * 3 - 1}


def test_refusals(tmp_path: Path) -> None:
    store = made(tmp_path / "a.zarr")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": 41}, r"41 clusters .* a has 40 labelled images; .*--k"),
        ({"baselines": ["gauss"]}, "no baseline 'gauss'"),
        ({"memory": 500}, r"takes 1\.9 kB of memory; --memory is 500 B .* 10 fit"),
        ({"n_seeds": 0}, "0 seeds"),
    ]
    for options, phrase in wrong:
        with pytest.raises(VitseeError, match=phrase):
            run(store, **options)
    with pytest.raises(MissingInput, match="no label"):
        run(made(tmp_path / "b.zarr", labels=np.full(40, -1), classes=list("abcd")))


@pytest.mark.parametrize(
    ("labels", "k", "said"),
    [
        (
            [0] * 6,
            2,
            "there is one class among its images, with which all clusters agree",
        ),
        (
            [0, 0, 1, 1, 2, 2],
            6,
            "k is the number of images (6), so that each is a cluster of its",
        ),
        ([0, 1, 2, 3, 4, 5], 3, "each of the 6 images has a class of its own"),
        ([0, 0, 1, 1, 2, 2], 1, "k is 1, so that all images are one cluster"),
        ([0], 1, "there is one image, with which all clusters agree"),
    ],
)
def test_what_no_features_could_change_has_no_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: list[int], k: int, said: str
) -> None:
    # That it is so: two kinds of features agree with the labels alike.
    rng, n = np.random.default_rng(0), len(labels)
    one, other = (
        agreement(
            k_means(rng.normal(size=(n, 4)).astype(np.float32), k, 0), np.array(labels)
        )
        for _ in range(2)
    )
    assert one["purity"] == other["purity"]
    store = write_labelled(
        tmp_path / "a.zarr", {"embed": rng.normal(size=(n, 3, 4))}, labels
    )
    table = run(store, k=k, n_seeds=1)
    assert np.isnan(table["value"]).all() and np.isnan(table["std"]).all()
    assert table["baseline"].tolist() == [
        name for name in ("", *BASELINES) for _ in METRICS
    ]
    assert f"a: no value: {said}" in caplog.text


def test_two_classes_have_values(tmp_path: Path) -> None:
    """One below and one above what is refused a value: k = n - 1, k = 2."""
    values = np.arange(5.0)[:, None, None] * np.ones((5, 3, 4))
    store = write_labelled(tmp_path / "a.zarr", {"embed": values}, [0, 0, 0, 1, 1])
    for k in (2, 4):
        assert np.isfinite(run(store, k=k, n_seeds=1, baselines=[])["value"]).all()


def test_constant_features_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = write_labelled(
        tmp_path / "a.zarr", {"embed": np.ones((12, 3, 4))}, [0, 1, 2] * 4
    )
    with caplog.at_level("INFO"):
        table = run(store, baselines=[])
    assert table["value"].tolist() == [1 / 3, 0, 0]
    assert set(table["std"].tolist()) == {0.0}
    assert "a embed: the cls vector of every image is the same" in caplog.text


# ---------------------------------------------------------------- the figure and the command


@pytest.mark.slow
def test_curves(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a.zarr"), np.random.default_rng(1).normal(size=(12, 2, 5))
    cnn = write_labelled(tmp_path / "b.zarr", {"stem": b}, [0, 1, 2] * 4, layout=CNN_PAIR)
    both = run(a, cnn, n_seeds=1)
    table = run(a, n_seeds=1)
    assert equal(both.filter(store="a"), table) and unique(
        both.filter(store="b"), "k"
    ) == [3]
    assert both.notes["tokens"]["b"] == {"stem": "mean"}
    for axes, metric in zip(plot(both).axes, METRICS, strict=True):
        lines = {str(line.get_label()): line for line in axes.lines}
        expected = having(table, metric=metric, baseline="")["value"].tolist()
        assert np.asarray(lines["a"].get_ydata()).tolist() == expected
        assert {"baseline: shuffled labels", "baseline: random features"} <= set(lines)
        assert axes.get_ylim()[0] <= 0


def cluster_command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["cluster", *map(str, args)])


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    csv, png = tmp_path / "r.csv", tmp_path / "r.png"
    store = made(tmp_path / "small.zarr", 16)
    result = cluster_command(
        f"mine={store.path}", "-o", csv, "--png", png, "--seeds", "2"
    )
    assert (result.exit_code, result.stdout) == (0, "")
    lines = csv.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS) and len(lines) == 1 + 27
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["baselines"] == ["shuffled", "random"]
    assert (
        sidecar["notes"]["seeds"] == [0, 1] and "n_init 10" in sidecar["notes"]["method"]
    )
    assert png.read_bytes()[1:4] == b"PNG"
    text = io.StringIO()
    run(store, n_seeds=1, baselines=[]).to_csv(text)
    printed = cluster_command(store.path, "-q", "--seeds", "1", "--baseline", "none")
    assert printed.stdout == text.getvalue()


def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    store = made(tmp_path / "a.zarr")
    plain = write_labelled(
        tmp_path / "plain.zarr", {"embed": np.ones((4, 3, 4))}, [-1] * 4
    )
    csv = tmp_path / "r.csv"
    for args, phrase in (
        ((plain.path,), "plain has no label"),
        ((store.path, "--k", "99"), "at most 40"),
        ((store.path, "--memory", "500"), "reading a chunk of"),
        (
            (store.path, "--seed", "4294967295", "--seeds", "2"),
            "k-means takes 0 to 4294967295",
        ),
        ((store.path, "--tokens", "5,5"), "5,5"),
        ((tmp_path / "none.zarr",), "none.zarr"),
    ):
        result = cluster_command(*args, "-o", csv, "-q")
        assert (result.exit_code, result.stdout) == (1, ""), args
        assert phrase in result.stderr and len(result.stderr.splitlines()) == 1
        assert not csv.exists()
    both = cluster_command(store.path, "--baseline", "none", "--baseline", "random")
    assert both.exit_code == 2
