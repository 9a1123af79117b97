"""k-nearest neighbours: against loops and scikit-learn, and what a user sees."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.stores import CNN_PAIR, write_labelled
from tests.tables import equal, having, unique
from vitsee_cli.main import main
from vitsee_core.analyses.knn import COLUMNS, VOTES, plot, run
from vitsee_core.analyses.knn.voting import ranks
from vitsee_core.kernels.neighbours import PAD, Neighbours
from vitsee_core.truth.labels.neighbours import in_tiles, nearest
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

Array = NDArray[Any]
CPU = torch.device("cpu")


def gauss(n: int, dim: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((n, dim), np.float32)


def loop_neighbours(train: Array, test: Array, k: int) -> list[list[tuple[float, int]]]:
    """(cosine, row) of the k nearest, one by one; equal in float32: the lower row first."""
    found = []
    for query in test.astype(np.float64):
        all_ = []
        for row, other in enumerate(train.astype(np.float64)):
            length = math.sqrt(math.fsum(query**2)) * math.sqrt(math.fsum(other**2))
            cosine = math.fsum(query * other) / length if length else 0.0
            all_.append((float(np.float32(cosine)), row))
        found.append(sorted(all_, key=lambda pair: (-pair[0], pair[1]))[:k])
    return found


def loop_classes(
    found: list[tuple[float, int]],
    labels: Array,
    n_classes: int,
    vote: str,
    temperature: float,
) -> list[int]:
    """The classes that got a vote, most voted first, equal ones in ascending order."""
    votes = [0.0] * n_classes
    for cosine, row in found:
        votes[labels[row]] += math.exp(cosine / temperature) if vote == "softmax" else 1.0
    return [
        c for c in sorted(range(n_classes), key=lambda c: (-votes[c], c)) if votes[c] > 0
    ]


# ---------------------------------------------------------------- the search


def search(train: Array, test: Array, k: int, cut: int = 10_000, tile: int = 0) -> Any:
    found = Neighbours(test, k, CPU, tile)
    for start in range(0, len(train), cut):
        found.add(train[start : start + cut])
    return found.result()


def test_threads_of_the_search_do_not_matter() -> None:
    train, test, found = gauss(700, 6, 1), gauss(600, 6, 2), []
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            found.append(search(train, test, 5, 300, 100))
    finally:
        torch.set_num_threads(before)
    for cosines, rows in found[1:]:
        assert np.array_equal(cosines, found[0][0]) and np.array_equal(rows, found[0][1])


@pytest.mark.parametrize(
    ("n", "cut", "tile"), [(60, 60, 0), (60, 7, 3), (200, 1, 0), (200, 90, 5)]
)
def test_search_against_a_loop(n: int, cut: int, tile: int) -> None:
    train, test = gauss(n, 6, 1), gauss(9, 6, 2)
    cosines, rows = search(train, test, 5, cut, tile)
    for i, expected in enumerate(loop_neighbours(train, test, 5)):
        assert rows[i].tolist() == [row for _, row in expected]
        # the same float64 sum in another order, rounded to float32
        assert cosines[i] == pytest.approx([c for c, _ in expected], rel=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_vectors_that_float32_cannot_tell_apart(spread: float) -> None:
    """Around one vector: the rounding of float32 hides neighbours behind the candidates."""
    train, test = (
        (1 + spread * gauss(n, 24, seed)).astype(np.float32)
        for n, seed in ((3000, 1), (6, 2))
    )
    for cut in (3000, 1024, 700):
        cosines, rows = search(train, test, 7, cut)
        for i, expected in enumerate(loop_neighbours(train, test, 7)):
            assert rows[i].tolist() == [row for _, row in expected]
            assert cosines[i] == pytest.approx([c for c, _ in expected], rel=2e-7)


def test_more_ties_than_candidates() -> None:
    """Equal vectors, more than are looked at again, the nearest behind all of them."""
    n = 3 * (4 + PAD)
    train = np.repeat(np.array([[1.0, 1.0]], np.float32), n, 0)
    train[-1], train[n // 2] = (1, 1.0001), (0, 0)
    cosines, rows = search(train, np.array([[1, 1], [0, 3]], np.float32), 4)
    assert rows.tolist() == [[0, 1, 2, 3], [n - 1, 0, 1, 2]]
    assert cosines[0].tolist() == [1.0] * 4 and cosines[1, 0] > cosines[1, 1]


def test_equal_and_zero_vectors() -> None:
    constant = np.full((9, 3), 0.1, np.float32)
    for cut in (2, 4, 9):
        cosines, rows = search(constant, constant[:2], 4, cut)
        assert rows.tolist() == [[0, 1, 2, 3]] * 2
        assert cosines.tolist() == [[1.0] * 4] * 2
    zero = np.zeros((3, 3), np.float32)
    cosines, rows = search(np.concatenate([zero, -constant]), constant[:1], 4)
    assert cosines.tolist() == [[0, 0, 0, -1]]
    assert rows.tolist() == [[0, 1, 2, 3]]


SIZES = st.integers(1, 30), st.integers(1, 4), st.integers(1, 8), st.integers(0, 9)


@given(*SIZES, st.floats(1e-3, 1e3))
@settings(max_examples=25, deadline=None)
def test_cuts_and_scale_do_not_matter(
    n: int, dim: int, cut: int, seed: int, scale: float
) -> None:
    # whole numbers: many ties
    rng = np.random.default_rng(seed)
    train = rng.integers(-2, 3, (n, dim)).astype(np.float32)
    test = rng.integers(-2, 3, (5, dim)).astype(np.float32)
    k = min(n, 4)
    whole = search(train, test, k)
    assert np.array_equal(whole[1], search(train, test, k, cut, 2)[1])
    scaled = np.float32(scale) * train
    assert np.allclose(whole[0], search(scaled, test, k)[0], rtol=1e-6, atol=1e-7)
    expected = [[row for _, row in found] for found in loop_neighbours(train, test, k)]
    assert whole[1].tolist() == expected


# 64 queries at a time are the least
@pytest.mark.parametrize(("memory", "passes"), [(1, 3), (40_000, 2), (10**9, 1)])
def test_memory_does_not_matter(memory: int, passes: int) -> None:
    train, test = gauss(300, 6, 6), gauss(150, 6, 7)
    calls: list[int] = []

    def rows() -> Any:
        calls.append(1)
        yield from (train[:100], train[100:])

    found = nearest(rows, lambda: [test], (150, 300, 6), k=3, device="cpu", memory=memory)
    whole = search(train, test, 3)
    assert np.array_equal(found.rows, whole[1]) and np.array_equal(
        found.cosines, whole[0]
    )
    assert len(calls) == passes
    assert not found.constant


def test_tiles_keep_the_rows() -> None:
    x = gauss(23, 2, 0)
    tiles = list(in_tiles([x[:1], x[1:4], x[4:19], x[19:]], 5))
    assert [len(tile) for tile in tiles] == [5, 5, 5, 5, 3]
    assert np.array_equal(np.concatenate(tiles), x)


# ---------------------------------------------------------------- the vote


def test_vote_by_hand() -> None:
    # one neighbour of class 2 at cosine 1, two of class 0 at 0.95: exp(14.29) = 1.6e6 against
    # 2 exp(13.57) = 1.56e6
    cosines = np.array([[1.0, 0.95, 0.95]], np.float32)
    voters = np.array([[2, 0, 0]])

    def ranked(own: int, vote: str) -> int:
        return int(ranks(cosines, voters, np.array([own]), 4, vote)[0])

    assert [ranked(own, "softmax") for own in range(4)] == [1, 4, 0, 4]
    assert [ranked(own, "majority") for own in range(4)] == [0, 4, 1, 4]


def test_equal_votes_go_to_the_lower_class() -> None:
    cosines = np.ones((1, 4), np.float32)
    voters = np.array([[3, 1, 3, 1]])
    for vote in VOTES:
        assert [
            int(ranks(cosines, voters, np.array([c]), 4, vote)[0]) for c in (1, 3)
        ] == [0, 1]


def test_small_temperatures_stay_finite() -> None:
    cosines = np.array([[0.9, 0.2]], np.float32)
    assert ranks(
        cosines, np.array([[1, 0]]), np.array([1]), 2, "softmax", 1e-4
    ).tolist() == [0]
    with warnings.catch_warnings(action="error"):
        found = ranks(cosines, np.array([[1, 0]]), np.array([1]), 2, "softmax", 1e-320)
    assert found.tolist() == [0]


# ---------------------------------------------------------------- run


def pair(path: Path, n: int = 40, m: int = 23, **kwargs: Any) -> tuple[Store, Store]:
    """Train and test stores of seven classes whose features know something about them."""
    centres, made = np.random.default_rng(0).normal(size=(7, 1, 4)), []
    for name, size, seed in (("train", n, 1), ("test", m, 2)):
        labels = np.random.default_rng(seed).integers(0, 7, size)
        labels[:7] = np.arange(7)[:size]
        noise = np.random.default_rng(seed + 10)
        sites = {
            site: centres[labels] * weight + noise.normal(size=(size, 3, 4))
            for site, weight in (
                ("embed", 0.3),
                ("blocks.0.out", 1.0),
                ("blocks.1.out", 2.0),
            )
        }
        sites["pooled"] = sites["blocks.1.out"].mean(1)
        options = {"slab": 8, "hash_offset": 10_000 * seed, **kwargs}
        made.append(write_labelled(path / f"{name}.zarr", sites, labels, **options))
    return made[0], made[1]


def test_the_temperature_decides_between_one_near_and_two_farther(tmp_path: Path) -> None:
    """Class 0 has one neighbour of cosine 0.99, class 1 two of 0.9: exp(99) > 2 exp(90), and
    exp(0.99) < 2 exp(0.9)."""
    cosines = np.array([0.99, 0.9, 0.9])
    train = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)
    query = np.array([[1.0, 0.0]])
    sites = {"pooled": train}, {"pooled": query}
    stores = [
        write_labelled(tmp_path / "train.zarr", sites[0], [0, 1, 1]),
        write_labelled(tmp_path / "test.zarr", sites[1], [1], hash_offset=100),
    ]
    tops = {}
    for temperature in (0.01, 1.0):
        table = run(*stores, sites=["pooled"], ks=[3], temperature=temperature)
        (tops[temperature],) = table["value"].tolist()
    assert tops == {0.01: 0.0, 1.0: 1.0}


@pytest.mark.parametrize("vote", VOTES)
def test_run_against_a_loop(tmp_path: Path, vote: str) -> None:
    valid = [i not in (3, 11) for i in range(40)]
    train, test = pair(tmp_path)
    train = write_labelled(
        tmp_path / "holes.zarr",
        {name: np.asarray(train.acts(name)[:]) for name in ("embed", "blocks.0.out")},
        np.where(np.arange(40) == 20, -1, train.samples.label),
        classes=list("abcdefg"),
        valid=[int(v) for v in valid],
        hash_offset=10_000,
    )
    keep = np.flatnonzero([v and i != 20 for i, v in enumerate(valid)])
    sites = ["embed", "blocks.0.out"]
    table = run(train, test, sites=sites, ks=(5, 1), vote=vote, per_class=True)
    labels = train.samples.label[keep]
    for site in sites:
        a = train.pooled(site, "cls")[:][keep]
        found = loop_neighbours(a, test.pooled(site, "cls")[:], 5)
        for k in (1, 5):
            votes = [loop_classes(one[:k], labels, 7, vote, 0.07) for one in found]
            right = [
                c[0] == own for c, own in zip(votes, test.samples.label, strict=True)
            ]
            rows = having(table, site=site, k=k)
            assert rows.filter(metric="top1")["value"].tolist() == [np.mean(right)]
            top5 = [
                own in c[:5] for c, own in zip(votes, test.samples.label, strict=True)
            ]
            expected = [np.mean(top5)] if k >= 5 else []
            assert rows.filter(metric="top5")["value"].tolist() == expected
            classes = rows.filter(metric="top1_class")
            assert classes["class"].tolist() == list("abcdefg")
            for number in range(7):
                own = np.array(right)[test.samples.label == number]
                assert classes["value"][number] == own.mean()
                assert classes["n_images"][number] == len(own)
    assert table.notes["train"]["left_out"] == {"invalid": 2, "unlabelled": 1}


def test_metrics_are_chosen(tmp_path: Path) -> None:
    train, test = pair(tmp_path)
    whole = run(train, test, ks=[5])
    for metric in unique(whole, "metric"):
        rows, found = (
            having(whole, metric=metric),
            run(train, test, ks=[5], metrics=[metric]),
        )
        assert set(found["metric"].tolist()) == {metric}
        assert found["value"].tolist() == rows["value"].tolist()
    with pytest.raises(VitseeError, match="no metric 'map'; metrics of knn: top1, top5"):
        run(train, test, metrics=["map"])
    with pytest.raises(VitseeError, match="no top5: it needs --k of 5 and more"):
        run(train, test, ks=[1], metrics=["top5"])


def test_columns_and_places(tmp_path: Path) -> None:
    train, test = pair(tmp_path)
    table = run(train, test, baselines=["random"])
    assert list(table.written.columns) == [name for name in COLUMNS if name != "class"]
    assert unique(table, "store") == ["test"]
    real = having(table, baseline="", metric="top1")
    assert real["site"].tolist() == ["embed", "blocks.0.out", "blocks.1.out"]
    assert real["depth"].tolist() == [0, 1, 2]
    assert set(real["k"].tolist()) == {20}
    chance = table.filter(baseline="random", metric="top1")
    # one draw for each number of channels, and all sites have four
    assert len(chance) == 3 and len(set(chance["value"].tolist())) == 1
    assert table.notes["compared"]["tokens"] == dict.fromkeys(
        real["site"].tolist(), "cls"
    )


def test_separable_and_unlearnable(tmp_path: Path) -> None:
    n = 300
    labels = np.arange(n) % 6
    clear = np.eye(6)[labels] + 0.01 * gauss(n, 6, 0)
    noise = gauss(n, 6, 1)
    train = write_labelled(
        tmp_path / "a.zarr", {"clear": clear, "noise": noise}, labels, slab=64
    )
    other = {"clear": np.eye(6)[labels] + 0.01 * gauss(n, 6, 2), "noise": gauss(n, 6, 3)}
    test = write_labelled(tmp_path / "b.zarr", other, labels, slab=64, hash_offset=1000)
    table = run(train, test, sites=["clear", "noise"], baselines=["random"])
    top1 = table.filter(metric="top1")
    assert having(top1, site="clear", baseline="")["value"].tolist() == [1.0]
    chance = [having(top1, site="noise", baseline=b)["value"][0] for b in ("", "random")]
    # five standard errors around 1/6
    assert all(abs(value - 1 / 6) < 5 * math.sqrt(5 / 36 / n) for value in chance)


@pytest.mark.slow
def test_slabs_jobs_and_memory_do_not_matter(tmp_path: Path) -> None:
    def made(slab: int) -> tuple[Store, Store]:
        (tmp_path / str(slab)).mkdir()
        return pair(tmp_path / str(slab), slab=slab)

    options: Any = {"ks": (1, 5), "baselines": ["random"], "per_class": True}
    expected = run(*made(40), **options)
    stores = made(7)
    assert equal(run(*stores, **options), expected)
    assert equal(run(*stores, **options, jobs=3, memory=1), expected)


@pytest.mark.slow
def test_top5_needs_five_neighbours_and_six_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, test = pair(tmp_path)
    assert unique(run(train, test, ks=(4,)), "metric") == ["top1"]
    values = {"pooled": gauss(20, 3, 0)}
    labels = np.arange(20) % 5
    a = write_labelled(tmp_path / "a.zarr", values, labels)
    b = write_labelled(tmp_path / "b.zarr", values, labels, hash_offset=99)
    with caplog.at_level("INFO"):
        assert unique(run(a, b, sites=["pooled"], ks=(8,)), "metric") == ["top1"]
    assert "k >= 5 and more than 5 classes" in caplog.text


def test_cnn_one_test_image_and_one_neighbour(tmp_path: Path) -> None:
    a = write_labelled(
        tmp_path / "a.zarr",
        {"stem": gauss(12, 8, 0).reshape(6, 2, 8)},
        [0, 1] * 3,
        layout=CNN_PAIR,
    )
    b = write_labelled(
        tmp_path / "b.zarr", {"stem": a.acts("stem")[:1].reshape(1, 2, 8)}, [0],
        classes=["a", "b"], layout=CNN_PAIR, hash_offset=9,
    )  # fmt: skip
    table = run(a, b, ks=(1,), per_class=True)
    assert table["value"].tolist()[:2] == [1.0, 1.0]
    # nothing to say about a class without a test image
    assert math.isnan(table["value"][2]) and table["n_images"][2] == 0
    assert math.isnan(table["std"][0]) and table["low"][0] < 1
    assert table.notes["compared"]["tokens"] == {"stem": "mean"}


def test_constant_features_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = [2, 1, 0] * 4
    values = {"pooled": np.ones((12, 3))}
    a = write_labelled(tmp_path / "a.zarr", values, labels)
    b = write_labelled(tmp_path / "b.zarr", values, labels, hash_offset=99)
    with caplog.at_level("INFO"):
        table = run(a, b, sites=["pooled"], ks=(1,))
    assert table["value"].tolist() == [pytest.approx(1 / 3)]
    assert "pooled: the vector of every training image is the same" in caplog.text
    assert len(table.notes["remarks"]) == 1


def test_committed_slabs_only(tmp_path: Path) -> None:
    train, test = pair(tmp_path, slabs=[0, 2])
    table = run(train, test, ks=(3,))
    assert set(table["n_images"].tolist()) == {8 + 7}
    assert table.notes["train"]["rows"] == 16


@pytest.mark.slow
def test_refusals(tmp_path: Path) -> None:
    train, test = pair(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ks": (41,)}, r"41 neighbours .* train has 40 labelled images; .*--k"),
        ({"ks": (0,)}, "k is 0"),
        ({"vote": "max"}, "no vote 'max'"),
        ({"baselines": ["shuffled"]}, "no baseline 'shuffled'"),
        ({"temperature": 0}, "temperature is 0"),
    ]
    for options, phrase in wrong:
        with pytest.raises(VitseeError, match=phrase):
            run(train, test, **options)
    with pytest.raises(StoreMismatch, match="40 of the 40 test images"):
        run(train, train)
    assert run(train, train, ks=(1,), allow_shared=True)["value"].min() == 1.0
    fewer = {"embed": gauss(120, 4, 0).reshape(40, 3, 4)}
    less = write_labelled(
        tmp_path / "less.zarr", fewer, train.samples.label, hash_offset=77777
    )
    with pytest.raises(
        MissingInput, match=r"less: no site matches 'blocks.0.out'.*--sites"
    ):
        run(less, test)


# ---------------------------------------------------------------- the figure and the command


@pytest.mark.slow
def test_panels(tmp_path: Path) -> None:
    train, test = pair(tmp_path)
    sites = ["blocks", "head"]
    table = run(train, test, sites=sites, ks=(1, 9), baselines=["random"])
    figure = plot(table)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "top-1 accuracy",
        "top-5 accuracy",
    ]
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    assert {"test, k = 1", "test, k = 9", "baseline: random features"} <= set(lines)
    drawn = np.asarray(lines["test, k = 9"].get_ydata())
    curve = having(table, metric="top1", k=9, baseline="")
    assert drawn.tolist() == curve["value"][:3].tolist()
    # a curve has one colour in all panels
    other = next(
        line for line in figure.axes[1].lines if line.get_label() == "test, k = 9"
    )
    assert other.get_color() == lines["test, k = 9"].get_color()
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()][-1] == "pooled"
    plot(table.filter(site="pooled"))


def knn_command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["knn", *map(str, args)])


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    train, test = pair(tmp_path)
    csv, png = tmp_path / "r.csv", tmp_path / "r.png"
    options = ["--k", "5", "--baseline", "random", "--device", "cpu"]
    result = knn_command(
        train.path, f"mine={test.path}", "-o", csv, "--png", png, *options
    )
    assert (result.exit_code, result.stdout) == (0, "")
    lines = csv.read_text().splitlines()
    assert lines[0] == ",".join(name for name in COLUMNS if name != "class")
    assert len(lines) == 1 + 2 * 3 * 2 and lines[1].startswith(
        "mine,tiny,,embed,,0,0.0,5,top1,"
    )
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["ks"] == [5]
    assert [store["label"] for store in sidecar["stores"]] == ["train", "mine"]
    assert "Wilson" in sidecar["notes"]["interval"]
    assert png.read_bytes()[1:4] == b"PNG"
    text = io.StringIO()
    run(train, test, ks=(5,), tokens="rest").to_csv(text)
    printed = knn_command(train.path, test.path, "-q", "--k", "5", "--tokens", "rest")
    assert printed.stdout == text.getvalue()


@pytest.mark.slow
def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    train, test = pair(tmp_path)
    plain = write_labelled(tmp_path / "plain.zarr", {"pooled": gauss(4, 3, 0)}, [-1] * 4)
    other = write_labelled(
        tmp_path / "other.zarr", {"pooled": gauss(4, 3, 0)}, [0, 1] * 2
    )
    csv = tmp_path / "r.csv"
    for args, phrase in (
        ((train.path, train.path), "--allow-shared"),
        ((train.path, plain.path), "plain has no label"),
        ((other.path, test.path), "2 classes against 7"),
        ((train.path, tmp_path / "none.zarr"), "none.zarr"),
        ((train.path, test.path, "--k", "500"), "at most 40"),
        ((train.path, test.path, "--tokens", "7,7"), "7,7"),
    ):
        result = knn_command(*args, "-o", csv, "-q")
        assert (result.exit_code, result.stdout) == (1, ""), args
        assert phrase in result.stderr and len(result.stderr.splitlines()) == 1
        assert not csv.exists()
    for words in (["--tokens", "all"], ["--temperature", "0"]):
        assert knn_command(train.path, test.path, *words).exit_code == 2
    assert knn_command(train.path).exit_code == 2
