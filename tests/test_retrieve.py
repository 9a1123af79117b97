"""Retrieval: against sorting, loops and scikit-learn, and what a user sees."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from tests.extractions import extracted
from tests.printed_text import flat
from tests.stores import write_labelled, write_sites
from tests.tables import groups_of, having, unique
from tests.test_retrieval_precision import loop_at, loop_precision
from vitsee_cli.main import main
from vitsee_core.analyses.retrieve import AT, COLUMNS, plot, run
from vitsee_core.analyses.retrieve.scoring import chance_precision
from vitsee_core.analyses.retrieve.truth import FORMS, RetrievalTruth, read_truth
from vitsee_core.demo.revisited import write_revisited
from vitsee_core.figures.plotting import GREY
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import random_features
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

Array = NDArray[Any]
SITES = ("embed", "blocks.0.out")
KINDS = {"easy": ("easy",), "medium": ("easy", "hard"), "hard": ("hard",)}


def gauss(n: int, seed: int, dim: int = 5) -> Array:
    """(n, dim), on a grid so coarse that some cosines are equal."""
    return np.random.default_rng(seed).integers(-2, 3, (n, dim)).astype(np.float32)


def vectors_store(
    path: Path, ids: Sequence[str], vectors: dict[str, Array], **more: Any
) -> Store:
    """A store whose images have these ids, and one vector at each site."""
    own = {"slab": 4, "hash_offset": 1000 * (1 + sum(map(ord, path.stem))), **more}
    own.setdefault("identity", {"model": {"architecture": "tiny"}, "weights": "w"})
    return write_sites(path, vectors, ids=ids, groups=["blocks"], **own)


def pictures(path: Path, ids: Sequence[str], seed: int = 0, **more: Any) -> Store:
    vectors = {site: gauss(len(ids), seed + i) for i, site in enumerate(SITES)}
    return vectors_store(path, ids, vectors, **more)


def truth_file(path: Path, n: int = 14, n_queries: int = 5, seed: int = 3) -> Path:
    """Lists of random places; the last query has no hard image."""
    rng = np.random.default_rng(seed)
    truth = []
    for i in range(n_queries):
        kind = rng.integers(0, 5, n)
        kind[:4] = (0, 1, 1, 2)
        if i == n_queries - 1:
            kind[kind == 1] = 4
        names = ("easy", "hard", "junk")
        lists = {name: np.flatnonzero(kind == k).tolist() for k, name in enumerate(names)}
        truth.append({"bbx": [0, 0, 5, 5], **lists})
    value = {
        "imlist": [f"im{i:02d}" for i in range(n)],
        "qimlist": [f"q{i}" for i in range(n_queries)],
        "gnd": truth,
    }
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(value, 2))
    else:
        path.write_text(json.dumps(value))
    return path


def ox_ids(n: int = 14, n_queries: int = 5, seed: int = 1) -> list[str]:
    """Of images and queries, shuffled, with some that are neither."""
    ids = [f"jpg/im{i:02d}.jpg" for i in range(n)] + [
        f"jpg/q{i}.jpg" for i in range(n_queries)
    ]
    ids += ["jpg/other1.jpg", "jpg/other2.jpg"]
    return [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))]


def order_of(query: Array, images: Array) -> list[int]:
    """Places from the nearest on, equal ones in their order."""
    a, b = query.astype(np.float64), images.astype(np.float64)
    lengths = np.linalg.norm(b, axis=1) * np.linalg.norm(a)
    exact = np.divide(b @ a, lengths, out=np.zeros(len(b)), where=lengths > 0)
    cosines = exact.astype(np.float32)
    cosines[np.abs(cosines) < 1e-9] = 0
    return sorted(range(len(images)), key=lambda i: (-cosines[i], i))


def stem(name: str) -> str:
    return name.partition("#")[0].rpartition("/")[2].partition(".")[0]


def expected(
    store: Store,
    truth: RetrievalTruth,
    site: str,
    queries: Store | None = None,
    more: Array | None = None,
) -> dict[str, list[Any]]:
    """Metric -> each query's value, of those that have one; by sorting. more: distractors."""
    own = store if queries is None else queries
    stems = {name: row for row, name in enumerate(map(stem, store.samples.id))}
    rows = sorted(stems[name] for name in truth.images)
    place = {name: rows.index(stems[name]) for name in truth.images}
    images = store.acts(site)[:][rows]
    images = images if more is None else np.concatenate([images, more])
    found: dict[str, list[Any]] = {}
    for query in truth.queries:
        ids = [*map(stem, own.samples.id)]
        order = order_of(own.acts(site)[:][ids.index(query.name)], images)
        for kind, right in KINDS.items():
            of = {k: {place[truth.images[i]] for i in v} for k, v in query.lists.items()}
            wanted = set().union(*(of[k] for k in right))
            out = set().union(*of.values()) - wanted
            ranking = [i in wanted for i in order if i not in out]
            if wanted:
                found.setdefault(f"map_{kind}", []).append(
                    loop_precision(ranking, "trapezoid")
                )
                for k in AT:
                    found.setdefault(f"mp@{k}_{kind}", []).append(loop_at(ranking, k))
    return found


def check(table: Table, site: str, values: dict[str, list[Any]]) -> None:
    rows = having(table, site=site, baseline="")
    assert rows["metric"].tolist() == list(values) or sorted(rows["metric"]) == sorted(
        values
    )
    for metric, each in values.items():
        (i,) = np.flatnonzero(rows["metric"] == metric)
        assert rows["value"][i] == pytest.approx(np.mean(each), abs=1e-12), metric
        assert rows["std"][i] == pytest.approx(np.std(each, ddof=1), abs=1e-12)
        assert rows["n_queries"][i] == len(each)


# ---------------------------------------------------------------- ROxford's form


@pytest.mark.parametrize("ending", [".pkl", ".json"])
def test_run_against_sorting(tmp_path: Path, ending: str) -> None:
    store = pictures(tmp_path / "ox.zarr", ox_ids())
    path = truth_file(tmp_path / f"gnd{ending}")
    table = run(store, truth=path)
    for site in SITES:
        check(table, site, expected(store, read_truth(path), site))
    assert list(table.written.columns) == [name for name in COLUMNS if name != "query"]
    assert set(table["n_images"].tolist()) == {14}
    # the last query has no hard image
    hard = having(table, metric="map_hard", baseline="")
    assert set(hard["n_queries"].tolist()) == {4}
    assert table.notes["average_precision"] == "trapezoid"
    assert len(table.notes["truth"]["sha256"]) == 64


def test_metrics_are_chosen(tmp_path: Path) -> None:
    store = pictures(tmp_path / "a.zarr", ox_ids())
    truth = truth_file(tmp_path / "truth.json")
    whole = run(store, truth=truth)
    for metric in unique(whole, "metric"):
        found = run(store, truth=truth, metrics=[metric])
        rows = having(whole, metric=metric)
        assert set(found["metric"].tolist()) == {metric}
        for name in ("value", "low", "high"):
            np.testing.assert_array_equal(found[name], rows[name])
        assert plot(found).axes
    with pytest.raises(
        VitseeError, match="no metric 'map'; metrics of retrieve: map_easy"
    ):
        run(store, truth=truth, metrics=["map"])


def test_by_hand(tmp_path: Path) -> None:
    """The benchmark's example: right, junk, wrong, right, wrong, right from the nearest on."""
    angles = np.radians([0, 10, 20, 30, 40, 50, 60])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    ids = ["q", *(f"im{i}" for i in range(6))]
    store = vectors_store(tmp_path / "s.zarr", ids, {"a": vectors})
    value = {"imlist": ids[1:], "qimlist": ["q"]}
    truth = {"bbx": [0, 0, 1, 1], "easy": [0, 3], "hard": [5], "junk": [1]}
    (tmp_path / "gnd.json").write_text(json.dumps({**value, "gnd": [truth]}))

    def values(**more: Any) -> dict[str, float]:
        table = having(
            run(store, truth=tmp_path / "gnd.json", sites="a", **more), baseline=""
        )
        return dict(zip(table["metric"].tolist(), table["value"].tolist(), strict=True))

    found = values()
    assert found["map_medium"] == pytest.approx((1 + 7 / 12 + 11 / 20) / 3, abs=1e-12)
    assert found["mp@10_medium"] == 0.6 and found["mp@1_medium"] == 1
    # easy: right, wrong, right, wrong; hard: wrong, wrong, right
    assert found["map_easy"] == pytest.approx((1 + 7 / 12) / 2, abs=1e-12)
    assert found["map_hard"] == pytest.approx((0 / 2 + 1 / 3) / 2, abs=1e-12)
    assert values(form="plain")["map_medium"] == pytest.approx(
        (1 + 2 / 3 + 3 / 5) / 3, abs=1e-12
    )
    rows = run(store, truth=tmp_path / "gnd.json", sites="a", per_query=True)
    own = rows.filter(query="q", metric="ap_medium")
    assert (
        own["value"].tolist() == [found["map_medium"]]
        and len(rows.filter(query="q")) == 3
    )
    assert (
        "query" in rows.written.columns and rows.notes[REPLICATES]["s"]["n_blocks"] == 1
    )


def test_queries_of_a_store_of_their_own(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.json")
    store = pictures(tmp_path / "ox.zarr", ox_ids())
    queries = pictures(tmp_path / "q.zarr", [f"q{i}" for i in (3, 0, 4, 2, 1)], seed=50)
    table = run(store, truth=path, queries=[queries])
    for site in SITES:
        check(table, site, expected(store, read_truth(path), site, queries))
    assert table.notes["searched"]["ox"]["queries"] == "q"


def test_distractors_are_counted(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.json")
    store = pictures(tmp_path / "ox.zarr", ox_ids())
    more = [
        pictures(
            tmp_path / f"{name}.zarr", [f"{name}{i}" for i in range(n)], seed, valid=valid
        )
        for name, n, seed, valid in (
            ("x", 9, 60, [i != 4 for i in range(9)]),
            ("y", 7, 70, [True] * 7),
        )
    ]
    table = run(store, truth=path, distractors=more)
    assert set(table["n_images"].tolist()) == {14 + 8 + 7}
    for site in SITES:
        vectors = np.concatenate(
            [np.delete(more[0].acts(site)[:], 4, 0), more[1].acts(site)[:]]
        )
        check(table, site, expected(store, read_truth(path), site, more=vectors))


@pytest.mark.slow
def test_what_changes_nothing(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.json")
    ids = ox_ids()
    rng = np.random.default_rng(0)
    normal = {name: rng.normal(size=(len(ids), 4)) for name in SITES}

    def made(name: str, order: Any = None, **more: Any) -> Store:
        (tmp_path / name).mkdir()
        order = np.arange(len(ids)) if order is None else order
        vectors = {site: x[order] for site, x in normal.items()}
        return vectors_store(
            tmp_path / name / "ox.zarr", [ids[i] for i in order], vectors, **more
        )

    def values(store: Store, **more: Any) -> list[float]:
        found: list[float] = having(run(store, truth=path, **more), baseline="")[
            "value"
        ].tolist()
        return found

    first = values(made("a"))
    assert values(made("b", rng.permutation(len(ids)))) == first
    assert values(made("c", slab=1), jobs=3, memory=1) == first
    assert values(made("d", slab=64), memory=1 << 40) == first
    # exactly opposite to every query is behind every image
    store = made("e")
    query_rows = [i for i, name in enumerate(ids) if "/q" in name]
    same = {site: np.abs(x) for site, x in normal.items()}
    mild = vectors_store(tmp_path / "mild.zarr", ids, same)
    against = {site: -np.abs(x[query_rows]) for site, x in normal.items()}
    far = vectors_store(tmp_path / "far.zarr", [f"far{i}" for i in range(5)], against)
    assert values(mild, distractors=[far]) == values(mild)
    assert values(store, distractors=[far]) != first


def test_a_copy_as_junk_changes_nothing(tmp_path: Path) -> None:
    value = json.loads(truth_file(tmp_path / "gnd.json").read_text())
    vectors = {site: gauss(19, 7 + i) for i, site in enumerate(SITES)}
    ids = [*value["imlist"], *value["qimlist"]]
    first = run(
        vectors_store(tmp_path / "a.zarr", ids, vectors), truth=tmp_path / "gnd.json"
    )
    value["imlist"].append("copy")
    for entry in value["gnd"]:
        entry["junk"].append(14)
    (tmp_path / "more.json").write_text(json.dumps(value))
    doubled = {site: np.concatenate([x, x[:1]]) for site, x in vectors.items()}
    again = run(
        vectors_store(tmp_path / "b.zarr", [*ids, "copy"], doubled),
        truth=tmp_path / "more.json",
    )
    assert (
        having(again, baseline="")["value"].tolist()
        == having(first, baseline="")["value"].tolist()
    )


def test_images_that_could_not_be_read_rank_last_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    angles = np.radians([0, 10, 20, 30, 40])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    ids = ["q", "im0", "im1", "im2", "im3"]
    valid = [True, False, True, True, True]
    store = vectors_store(tmp_path / "s.zarr", ids, {"a": vectors}, valid=valid)
    truth = {"bbx": [0, 0, 1, 1], "ok": [0, 2], "junk": []}
    value = {"imlist": ids[1:], "qimlist": ["q"], "gnd": [truth]}
    (tmp_path / "gnd.json").write_text(json.dumps(value))
    with caplog.at_level("INFO", "vitsee_core"):
        table = run(store, truth=tmp_path / "gnd.json", sites="a", form="plain")
    # im2 is second, im0 would be first and is last
    assert table["value"][0] == pytest.approx((1 / 2 + 2 / 4) / 2, abs=1e-12)
    assert table["metric"].tolist()[:4] == ["map", "mp@1", "mp@5", "mp@10"]
    assert "s: 1 image could not be read, last in every ranking (im0)" in caplog.text
    assert table.notes["searched"]["s"]["images"]["unreadable"] == 1


def test_equal_vectors_are_chance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = truth_file(tmp_path / "gnd.json")
    ids = ox_ids()
    random = gauss(len(ids), 0)
    zero = random.copy()
    zero[[i for i, name in enumerate(ids) if name == "jpg/q2.jpg"]] = 0
    sites = {"same": np.full((len(ids), 3), 0.3), "zero": zero, "random": random}
    store = vectors_store(tmp_path / "ox.zarr", ids, sites)
    with caplog.at_level("INFO", "vitsee_core"):
        table = run(store, truth=path, sites=list(sites), per_query=True)
    same, chance = (
        having(table, site="same", baseline=b, query=None) for b in ("", "chance")
    )
    assert same["value"].tolist() == pytest.approx(chance["value"].tolist(), abs=1e-15)
    assert (
        "ox same: the vector of every image is the same; its value is that" in caplog.text
    )
    assert "ox zero: 1 of 5 queries are zero" in caplog.text
    one = [
        having(table, site=s, query="q2", metric="ap_easy")["value"][0]
        for s in ("same", "zero")
    ]
    assert one[0] == one[1]
    others = [
        having(table, site=s, query="q1", metric="ap_easy")["value"][0] for s in sites
    ]
    assert others[1] == others[2] != others[0]
    # chance does not look at the features
    each = [having(table, site=s, baseline="chance")["value"].tolist() for s in sites]
    assert each[0] == each[1] == each[2]


@pytest.mark.slow
def test_chance_is_what_noise_gives(tmp_path: Path) -> None:
    """Means over 200 sites of noise, of which each has the same five queries."""
    path = truth_file(tmp_path / "gnd.json")
    ids = ox_ids()
    rng = np.random.default_rng(5)
    sites = {f"s{i:03d}": rng.normal(size=(len(ids), 3)) for i in range(200)}
    table = run(vectors_store(tmp_path / "n.zarr", ids, sites), truth=path, sites="s*")
    for metric in ("map_easy", "map_medium", "map_hard", "mp@5_medium"):
        rows = having(table, metric=metric)
        noise = having(rows, baseline="")["value"]
        (chance,) = {*rows.filter(baseline="chance")["value"].tolist()}
        error = noise.std(ddof=1) / np.sqrt(len(noise))
        assert abs(noise.mean() - chance) < 4 * error and error < 0.02, metric


# ---------------------------------------------------------------- GLDv2, labels


def test_a_csv_with_usage(tmp_path: Path) -> None:
    """All images of the store are searched, less the queries."""
    ids = [f"a/b/{name}.jpg" for name in ("i0", "q0", "i1", "i2", "q1", "q2", "i3")]
    vectors = (
        np.eye(7)[[0, 0, 0, 1, 1, 2, 3]]
        + 0.1 * np.arange(7)[:, None] * np.eye(7)[[4] * 7]
    )
    store = vectors_store(tmp_path / "g.zarr", ids, {"a": vectors})
    text = "id,images,Usage\nq0,i1 i0,Public\nq1,i3,Private\nq2,None,Ignored\n"
    (tmp_path / "s.csv").write_text(text)
    table = run(store, truth=tmp_path / "s.csv", sites="a", cutoffs=(2,), per_query=True)
    rows = having(table, baseline="", query=None)
    assert rows["metric"].tolist() == [
        "map@100",
        "mp@2",
        "map@100_public",
        "map@100_private",
    ]
    # q0: i0 and i1 are the nearest; q1: i2, then i3, which points more their common way
    assert rows["value"].tolist() == pytest.approx([0.75, 0.75, 1.0, 0.5], abs=1e-12)
    assert (
        rows["n_queries"].tolist() == [2, 2, 1, 1]
        and rows["n_images"].tolist() == [4] * 4
    )
    assert {*unique(table, "query")} == {"", "q0", "q1"}
    assert set(table.filter(query="q1")["metric"].tolist()) == {
        "ap@100",
        "ap@100_private",
    }
    chance = chance_precision(np.array([2, 1]), np.array([4, 4]), "plain", 100)
    found = table.filter(baseline="chance", metric="map@100")["value"]
    assert found.tolist() == pytest.approx([chance.mean()], abs=1e-12)
    with pytest.raises(
        VitseeError, match="map@100 is defined for the plain average precision"
    ):
        run(store, truth=tmp_path / "s.csv", sites="a", form="trapezoid")


def labelled(path: Path, n: int = 20, **more: Any) -> tuple[Store, Array]:
    labels = np.random.default_rng(1).integers(0, 4, n)
    labels[-1] = 4  # a class of one image
    sites = {site: gauss(n, 20 + i)[:, None].repeat(3, 1) for i, site in enumerate(SITES)}
    return write_labelled(path, sites, labels, **more), labels


@pytest.mark.parametrize("form", FORMS)
def test_labels_against_scikit_learn(tmp_path: Path, form: str) -> None:
    store, labels = labelled(tmp_path / "s.zarr")
    table = run(store, form=form, cutoffs=(1, 3), per_query=True)
    for site in SITES:
        x = store.pooled(site, "cls")[:]
        values: dict[str, list[float]] = {"map": [], "mp@1": [], "mp@3": []}
        for i in range(19):  # the last has no other of its class
            order = [j for j in order_of(x[i], x) if j != i]
            right = [bool(labels[j] == labels[i]) for j in order]
            values["map"].append(loop_precision(right, form))
            if form == "plain":
                score = average_precision_score(right, -np.arange(len(right)))
                assert values["map"][-1] == pytest.approx(score, abs=1e-12)
            values["mp@1"].append(loop_at(right, 1))
            values["mp@3"].append(loop_at(right, 3))
        rows = having(table, site=site, baseline="", query=None)
        check(rows, site, values)
        each = having(table, site=site, metric="ap")["value"].tolist()
        assert each == pytest.approx(values["map"], abs=1e-12)
    assert having(table, baseline="")["n_images"].tolist()[0] == 20


@pytest.mark.slow
def test_labels_in_blocks_of_queries(tmp_path: Path) -> None:
    store, _ = labelled(tmp_path / "s.zarr", 60, slab=7)
    whole = run(store)
    for memory in (1, 20_000):
        again = run(store, memory=memory, jobs=2)
        assert again["value"].tolist() == whole["value"].tolist()
    assert having(run(store, images=30), baseline="")["n_images"].tolist()[0] == 30


def test_labels_with_queries_of_their_own(tmp_path: Path) -> None:
    store, labels = labelled(tmp_path / "s.zarr")
    other = write_labelled(
        tmp_path / "q.zarr",
        {site: gauss(6, 40 + i)[:, None].repeat(3, 1) for i, site in enumerate(SITES)},
        [0, 1, 2, 3, 4, 0],
        hash_offset=500,
    )
    table = run(store, queries=[other])
    for site in SITES:
        x, y = (s.pooled(site, "cls")[:] for s in (store, other))
        orders = [order_of(query, x) for query in y]
        classes = [0, 1, 2, 3, 4, 0]
        right = [
            [bool(labels[j] == c) for j in o]
            for o, c in zip(orders, classes, strict=True)
        ]
        value = having(table, site=site, baseline="", metric="map")["value"][0]
        assert value == pytest.approx(
            np.mean([loop_precision(r, "plain") for r in right])
        )
    same = {site: gauss(3, 0)[:, None].repeat(3, 1) for site in SITES}
    twin = write_labelled(tmp_path / "twin.zarr", same, [0, 1, 4])
    with pytest.raises(
        StoreMismatch, match=r"the query 0-0 is among the images of s.*equal bytes"
    ):
        run(store, queries=[twin])


def test_replicates_are_searches_without_a_block(tmp_path: Path) -> None:
    """Its images are neither queries nor found; the query alone in its class is left out."""
    store, labels = labelled(tmp_path / "s.zarr", 41)
    table = run(store, cutoffs=(2,))
    assert table.replicates is not None
    x, block = store.pooled("embed", "cls")[:], np.arange(41) * 20 // 41
    expected: dict[str, list[float]] = {"map": [], "mp@2": []}
    for b in range(20):
        left = np.flatnonzero(block != b).tolist()
        found = []
        for i in left:
            order = [j for j in order_of(x[i], x) if j != i and j in left]
            right = [bool(labels[j] == labels[i]) for j in order]
            if any(right):
                found.append((loop_precision(right, "plain"), loop_at(right, 2)))
        for metric, values in zip(expected, zip(*found, strict=True), strict=True):
            expected[metric].append(float(np.mean(values)))
    for metric, means in expected.items():
        row = having(table, site="embed", baseline="", metric=metric)
        assert row.replicates is not None
        assert row.replicates[0] == pytest.approx(means, abs=1e-12)
        error = float(standard_error(row.replicates[0]))
        if metric == "map":
            reach = t_quantile(19) * error
            assert row["low"][0] == pytest.approx(row["value"][0] - reach)
            assert row["high"][0] == pytest.approx(row["value"][0] + reach)
        else:
            ends = jackknife_share(row["value"][0], row.replicates[0], 40)
            assert (row["low"][0], row["high"][0]) == pytest.approx(ends)


@pytest.mark.slow
def test_standard_errors_are_those_of_other_images(tmp_path: Path) -> None:
    """Over 60 samples of 80 images: the deviation of their values (error 9 %), and the root mean
    square of their standard errors; over queries alone these are 0.64 of it."""
    rng, values, errors = np.random.default_rng(0), [], []
    for k in range(60):
        labels = rng.integers(0, 4, 80)
        x = rng.normal(size=(80, 6)) + 0.8 * np.eye(6)[labels]
        table = run(
            write_labelled(tmp_path / f"{k}.zarr", {"pooled": x}, labels), sites=["head"]
        )
        row = having(table, metric="map", baseline="")
        assert row.replicates is not None
        values.append(float(row["value"][0]))
        errors.append(float(standard_error(row.replicates[0])))
    assert np.sqrt(np.mean(np.square(errors))) / np.std(values, ddof=1) == pytest.approx(
        1, abs=0.3
    )


# ---------------------------------------------------------------- refusals


def hashed(
    path: Path, first_pixel_hash: int | None, first_hash: int, n: int = 6
) -> Store:
    """Pictures of two classes whose hashes of pixels and of bytes count from these numbers."""
    pixel_hashes = None
    if first_pixel_hash is not None:
        pixel_hashes = first_pixel_hash + np.arange(n)
    ids = [f"{path.stem}{i}" for i in range(n)]
    return pictures(path, ids, hash_offset=first_hash, pixel_hashes=pixel_hashes)


def test_pictures_saved_anew_are_refused(tmp_path: Path) -> None:
    """Their bytes differ, their pixels do not."""
    store = hashed(tmp_path / "a.zarr", 1, 100)
    anew = hashed(tmp_path / "anew.zarr", 6, 200)  # its first is the last of `a`
    others = hashed(tmp_path / "others.zarr", 7, 300)
    unhashed = hashed(tmp_path / "unhashed.zarr", None, 400)
    line = r"1 distractor of anew is among .* \(anew0\), by bytes or pixels"
    with pytest.raises(StoreMismatch, match=line):
        run(store, distractors=[anew])
    line = r"the query anew0 is among the images of a .*\(a5, equal pixels\)"
    with pytest.raises(StoreMismatch, match=line):
        run(store, queries=[anew])
    for more in (others, unhashed):
        assert run(store, distractors=[more])["n_images"].tolist()[0] == 12
        run(store, queries=[more])
    # A distractor that equals a query, which is not among the images.
    with pytest.raises(StoreMismatch, match="6 distractors of again are among"):
        again = hashed(tmp_path / "again.zarr", 7, 500)
        run(store, queries=[others], distractors=[again])


def test_equal_ids_but_for_the_ending_are_a_remark(tmp_path: Path) -> None:
    """Pictures that were saved anew with loss have neither bytes nor pixels of before."""
    names = [f"{name}{i}" for i, name in enumerate("abcdef")]
    store = pictures(tmp_path / "a.zarr", [f"{name}.png" for name in names])
    anew = [f"{name}.jpg" for name in [*names[:2], "s", "t", "u", "v"]]
    more = pictures(tmp_path / "anew.zarr", anew, seed=9, hash_offset=100)
    for what, options in (
        ("distractors", {"distractors": [more]}),
        ("queries", {"queries": [more]}),
    ):
        remarks = run(store, **options).notes["remarks"]
        said = [remark for remark in remarks if "have ids of images" in remark]
        assert said == [
            f"2 of the 6 {what} of anew have ids of images of a (a0.jpg, b1.jpg; 2 but for the "
            "ending) but other bytes and pixels: other pictures of the same names, or the same "
            "ones saved anew with loss"
        ]


def test_pictures_that_occur_again_by_pixels(tmp_path: Path) -> None:
    ids = [f"x{i}" for i in range(6)]
    pixels = np.array([1, 2, 3, 4, 4, 1])
    store = pictures(tmp_path / "a.zarr", ids, pixel_hashes=pixels)
    assert (
        "a: 2 images occur again (equal pixels, 0 of them equal bytes)"
        in (run(store).notes["remarks"])
    )


@pytest.mark.slow
def test_refused_searches(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.json")
    ids = ox_ids()
    store = pictures(tmp_path / "ox.zarr", ids)
    identity = {"model": {"architecture": "tiny"}, "weights": "w"}
    other_model = {"model": {"architecture": "other"}, "weights": "w"}

    def extra(name: str, own: list[str], **more: Any) -> Store:
        return pictures(tmp_path / f"{name}.zarr", own, seed=9, **more)

    queries = [f"q{i}" for i in range(5)]
    few = extra("few", [i for i in ids if "im1" not in i])
    twice = extra("twice", [*ids, "again/q1.jpg"])
    bad = extra("bad", ids, valid=["q3" not in i for i in ids])
    smaller = {**identity, "transform": {"crop_pct": 0.9}}
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (MissingInput, r"few lacks 4 of the 14 images of .*gnd\.json \(im10, im11, im12, \.\.\.\); "
         r"its ids look like jpg/", {"stores": [few]}),
        (MissingInput, r"twice has 2 images that may be q1 of .*expected one", {"stores": [twice]}),
        (VitseeError, r"bad has 1 query of .*that could not be read \(q3\)", {"stores": [bad]}),
        (MissingInput, "lone lacks 4 of the 5 queries", {"queries": [extra("lone", ["q1"])]}),
        (StoreMismatch, r"alien \(tiny\) is of none of the models that are searched with",
         {"queries": [extra("alien", queries, identity=other_model)]}),
        (StoreMismatch, "alien2 .* extract the distractors with the same model",
         {"distractors": [extra("alien2", ["x"], identity=other_model)]}),
        (StoreMismatch, r"different transforms \(transform: not known against known\)",
         {"queries": [extra("smaller", queries, identity=smaller)]}),
        (StoreMismatch, "ox has q and qq of the stores of queries; expected one",
         {"queries": [extra("q", queries), extra("qq", queries)]}),
        (StoreMismatch, r"1 distractor of shared is among the queries and the images of their",
         {"distractors": [extra("shared", ["x0"],
                                hash_offset=int(store.samples.hash[ids.index("jpg/im01.jpg")]))]}),
        (StoreMismatch, r"the query q0 is among the images of ox that are searched",
         {"queries": [extra("same", queries,
                            hash_offset=int(store.samples.hash[ids.index("jpg/im05.jpg")]))]}),
        (VitseeError, "--images would leave out images", {"images": 5}),
        (VitseeError, "no average precision 'area'; expected trapezoid or plain", {"form": "area"}),
        (VitseeError, "precision at 0 was asked for", {"cutoffs": (0,)}),
    ]  # fmt: skip
    for kind, phrase, options in cases:
        stores = options.pop("stores", [store])
        with pytest.raises(kind, match=phrase) as caught:
            run(*stores, truth=path, **options)
        assert "\n" not in str(caught.value)
    both = [store, extra("m2", ids, identity=other_model)]
    with pytest.raises(StoreMismatch, match="m2 has none of the stores of queries"):
        run(*both, truth=path, queries=[extra("q3", queries)])
    with pytest.raises(
        StoreMismatch, match="none of the stores of distractors is of the model of m2"
    ):
        run(*both, truth=path, distractors=[extra("d", ["x", "y"])])
    value = json.loads(path.read_text())
    for entry in value["gnd"]:
        entry |= {"easy": [], "hard": []}
    path.write_text(json.dumps(value))
    with pytest.raises(VitseeError, match="no query of ox has a right image to be found"):
        run(store, truth=path)


def test_a_setting_without_queries_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = json.loads(truth_file(tmp_path / "gnd.json").read_text())
    for entry in value["gnd"]:
        entry["hard"] = []
    (tmp_path / "gnd.json").write_text(json.dumps(value))
    with caplog.at_level("INFO", "vitsee_core"):
        table = run(pictures(tmp_path / "ox.zarr", ox_ids()), truth=tmp_path / "gnd.json")
    assert {m.partition("_")[2] for m in unique(table, "metric")} == {"easy", "medium"}
    assert "map_hard is left out: no query has a right image for it" in caplog.text


def test_stores_of_labels_and_equal_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = write_sites(
        tmp_path / "n.zarr", {"a": gauss(4, 0)}, labels=[-1] * 4, groups=["blocks"]
    )
    with pytest.raises(MissingInput, match="n has no label for any of its 4"):
        run(store)
    lone = write_labelled(
        tmp_path / "l.zarr", {"a": gauss(3, 0)}, [0, 1, 2], groups=["blocks"]
    )
    with pytest.raises(VitseeError, match="no query of l has a right image"):
        run(lone)


@pytest.mark.slow
def test_several_models_and_their_figure(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.json")
    other = {"model": {"architecture": "other"}, "weights": "w"}
    stores = [
        pictures(tmp_path / "a.zarr", ox_ids(seed=1)),
        pictures(tmp_path / "b.zarr", ox_ids(seed=2), 30, identity=other, model="other"),
    ]
    queries = [
        pictures(tmp_path / "qb.zarr", [f"q{i}" for i in range(5)], 31, identity=other),
        pictures(tmp_path / "qa.zarr", [f"q{i}" for i in range(5)], 8),
    ]
    table = run(*stores, truth=path, queries=queries, per_query=True)
    for store, own in zip(stores, reversed(queries), strict=True):
        rows = having(table, store=store.label, query=None)
        for site in SITES:
            check(rows, site, expected(store, read_truth(path), site, own))
    digests = {note["digest"] for note in table.notes[REPLICATES].values()}
    assert len(digests) == 1, "the same queries pair"
    figure = plot(table)
    words = ("mean average precision", "mean precision at 10")
    assert [flat(axes.get_ylabel()) for axes in figure.axes] == [
        f"{what} ({setting})" for what in words for setting in ("easy", "medium", "hard")
    ]
    assert figure.axes[0].get_ylim() == figure.axes[2].get_ylim()
    # chance is the same for both stores, and has the colour of neither
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert len(dashed) > 1 and {line.get_color() for line in dashed} == {GREY}
    assert len(plot(run(labelled(tmp_path / "s.zarr")[0])).axes) == 2


# ---------------------------------------------------------------- the command


def vitsee(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.pkl")
    pictures(tmp_path / "ox.zarr", ox_ids())
    pictures(tmp_path / "q.zarr", [f"q{i}" for i in range(5)], seed=50)
    pictures(tmp_path / "d.zarr", [f"x{i}" for i in range(9)], seed=60)
    out, png = tmp_path / "r.csv", tmp_path / "r.png"
    both = ("--queries", tmp_path / "q.zarr", "--distractors", tmp_path / "d.zarr")
    result = vitsee(
        "retrieve", tmp_path / "ox.zarr", "--truth", path, *both, "-o", out, "--png", png,
        "--replicates", "--cutoff", 3,
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    table = Table.read(out)
    assert set(table["n_images"].tolist()) == {23}
    assert "mp@3_hard" in unique(table, "metric") and png.read_bytes()[:4] == b"\x89PNG"
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert [store["label"] for store in sidecar["stores"]] == ["ox", "q", "d"]
    assert sidecar["parameters"]["truth"] == str(path)
    assert sidecar["columns"]["n_queries"] == "integer"
    assert (tmp_path / "r.replicates.csv").exists()
    best = vitsee("best-layer", out, "--metric", "map_hard")
    assert best.exit_code == 0 and "retrieve map_hard" in best.stdout
    paired = vitsee("best-layer", out, "--metric", "map_hard", "--paired", "layers")
    assert paired.exit_code == 0, paired.stderr
    ((first, *cells),) = [line.split(",") for line in paired.stdout.splitlines()[1:]]
    # the better layer less the other, with an interval over blocks of the five queries
    assert first == "ox" and cells.count("map_hard") == 1 and cells[-1] == "5"


def test_the_command_refuses(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.pkl")
    store = tmp_path / "ox.zarr"
    pictures(store, ox_ids(), labels=[-1] * 21)
    (tmp_path / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    for code, phrase, arguments in (
        (1, "it asks for os.system", [store, "--truth", tmp_path / "evil.pkl"]),
        (1, "cannot read", [store, "--truth", tmp_path / "none.pkl"]),
        (1, "has no label", [store, "--truth", "labels"]),
        (2, "give a STORE to search", ["--truth", path]),
        (
            2,
            "need a STORE",
            ["--truth", path, "--export-truth", tmp_path / "t", "-o", "x.csv"],
        ),
        (2, "two stores are called 'ox'", [store, store, "--truth", path]),
        (2, "Missing option '--truth'", [store]),
        (1, "is an input", [store, "--truth", path, "--export-truth", path]),
    ):
        result = vitsee("retrieve", *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert phrase in result.stderr
    assert not (tmp_path / "t").exists()


@pytest.mark.slow
def test_the_miniature_from_pixels_to_picture(tmp_path: Path) -> None:
    """The published layout, queries cropped to their boxes."""
    write_revisited(tmp_path / "ox", n_queries=4, n_each=2, n_others=4)
    path = tmp_path / "ox/gnd_roxford5k.pkl"
    options = (
        "--tokens",
        "pooled",
        "--attention",
        "none",
        "--sites",
        "head",
        "--batch-size",
        8,
    )
    extracted(
        "demo:vit", "--data", tmp_path / "ox/jpg", *options, "-o", tmp_path / "ox.zarr"
    )
    result = vitsee("retrieve", "--truth", path, "--export-queries", tmp_path / "q.csv")
    assert result.exit_code == 0, result.stderr
    extracted(
        "demo:vit", "--data", tmp_path / "q.csv", *options, "-o", tmp_path / "q.zarr"
    )
    store, queries = (open_store(tmp_path / f"{name}.zarr") for name in ("ox", "q"))
    for own in (None, queries):
        out = tmp_path / f"{own is None}.csv"
        more = [] if own is None else ["--queries", own.path]
        arguments = ["--truth", path, *more, "--sites", "pooled", "-o", out]
        picture = out.with_suffix(".png")
        result = vitsee("retrieve", store.path, *arguments, "--png", picture)
        assert result.exit_code == 0, result.stderr
        assert picture.read_bytes()[:4] == b"\x89PNG"
        check(Table.read(out), "pooled", expected(store, read_truth(path), "pooled", own))


def test_exports_without_a_store(tmp_path: Path) -> None:
    path = truth_file(tmp_path / "gnd.pkl")
    result = vitsee("retrieve", "--truth", path, "--export-truth", tmp_path / "t.json")
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert read_truth(tmp_path / "t.json").queries == read_truth(path).queries


@pytest.mark.slow
def test_random_vectors_are_a_baseline(tmp_path: Path) -> None:
    """As a store of such vectors scores, with the queries apart or among the images."""
    ids, dim = ox_ids(), 5
    store = pictures(tmp_path / "a.zarr", ids)
    noise = [random_features(len(ids), dim, (3, i, 0)) for i in range(2)]
    known = vectors_store(tmp_path / "n.zarr", ids, {"embed": noise[0]})
    truth = truth_file(tmp_path / "gnd.json")
    table = run(store, truth=truth, baselines=["random"], seed=3)
    drawn = table.filter(baseline="random")
    assert unique(drawn, "site") == list(SITES)
    plain = having(run(known, truth=truth, seed=3), baseline="")
    for _, of_site in groups_of(drawn, "site"):
        for name in ("metric", "value", "std", "low", "high", "n_queries", "n_images"):
            assert of_site[name].tolist() == plain[name].tolist(), name
    own = pictures(tmp_path / "q.zarr", ids, seed=9)
    theirs = vectors_store(tmp_path / "m.zarr", ids, {"embed": noise[1]})
    both = {"truth": truth, "seed": 3, "sites": ["embed"]}
    apart = run(store, queries=[own], baselines=["random"], **both).filter(
        baseline="random"
    )
    expected_values = having(run(known, queries=[theirs], **both), baseline="")["value"]
    assert apart["value"].tolist() == expected_values.tolist()
    with pytest.raises(VitseeError, match="no baseline 'shuffled'; expected random"):
        run(store, truth=truth, baselines=["shuffled"])
    done = CliRunner().invoke(
        main,
        [
            "retrieve",
            str(tmp_path / "a.zarr"),
            "--truth",
            str(truth),
            "--baseline",
            "random",
        ],
    )
    assert done.exit_code == 0 and ",random\n" in done.stdout.replace("\r", "")
