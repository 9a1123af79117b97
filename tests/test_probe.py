"""Linear probes: numbers against loops, what does not matter, and what a user sees."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from threadpoolctl import threadpool_info, threadpool_limits

from tests import stores
from tests.features import balanced, class_features
from tests.reference_probe import padded_ridge, ridge, shots_of, top
from tests.stores import VIT
from tests.tables import check_chosen_metrics
from vitsee_cli.main import main
from vitsee_core.analyses.probe import COLUMNS, plot, run
from vitsee_core.analyses.probe.inputs import draw_images, split_rows
from vitsee_core.analyses.probe.sites import _mean_l2
from vitsee_core.features.reader import adaptive_average, flatten_patches, largest_patch
from vitsee_core.kernels.ridge import Linear
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import accuracy_interval, labelled_rows
from vitsee_stores import Store, TokenLayout
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError

Array = NDArray[Any]
N, N_TEST, CLASSES, DIM = 90, 60, 3, 5


def write_labelled(
    path: Path, sites: Mapping[str, Any], labels: Array, **more: Any
) -> Store:
    """Classes are called c0, c1, ... by default."""
    names = [f"c{i}" for i in range(int(labels.max()) + 1)]
    return stores.write_labelled(
        path, sites, labels, **{"classes": names, "slab": 16, **more}
    )


def write_vectors(
    path: Path, x: Array, labels: Array, hash_offset: int = 0, **more: Any
) -> Store:
    """One vector per image."""
    return write_labelled(
        path, {"pooled": (x, None)}, labels, hash_offset=hash_offset, **more
    )


def grid(rows: int, cols: int) -> TokenLayout:
    """A CNN's locations."""
    return TokenLayout((), (rows, cols), stride_px=(8.0, 8.0))


class Pair:
    """A training and a test store with the same sites, and their numbers in the data's order."""

    def __init__(
        self, folder: Path, *, n: int = N, n_test: int = N_TEST, classes: int = CLASSES,
        dim: int = DIM, layout: Any = VIT, signal: float = 0.6, **kwargs: Any,
    ) -> None:  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.labels, self.test_labels = (
            balanced(n, classes, 1),
            balanced(n_test, classes, 2),
        )
        t = layout.n_tokens
        self.x = class_features(self.labels, t, dim, signal=signal, seed=3)
        self.y = class_features(self.test_labels, t, dim, signal=signal, seed=4)
        order = np.random.default_rng(9).permutation(n)
        sites = {"blocks.0.out": (self.x, layout), "pooled": (self.x[:, 0], None)}
        theirs = {"blocks.0.out": (self.y, layout), "pooled": (self.y[:, 0], None)}
        self.train = write_labelled(
            folder / "train.zarr", sites, self.labels, rows=order, **kwargs
        )
        self.test = write_labelled(
            folder / "test.zarr", theirs, self.test_labels, hash_offset=1000, **kwargs
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def values(table: Table, **where: Any) -> list[float]:
    found: list[float] = table.filter(metric="top1", **where)["value"].tolist()
    return found


def same(a: Table, b: Table) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return list(a.written.columns) == list(b.written.columns) and all(
        [x != x or x == y for x, y in zip(a[c].tolist(), b[c].tolist(), strict=True)]
        for c in a.written.columns
    )


# ---------------------------------------------------------------- numbers


def test_metrics_are_chosen(pair: Pair, tmp_path: Path) -> None:
    six = Pair(tmp_path, n=30, n_test=12, classes=6)
    work = partial(run, six.train, six.test, l2=[1.0])
    rows = {metric: [metric] for metric in ("top1", "top5")}
    check_chosen_metrics(work, plot, rows, "probe")
    assert {*work(metrics=["top5"], per_class=True)["metric"]} == {"top5", "top1_class"}
    each = plot(work(metrics=["top5"], tokens=["each"]))
    assert [axes.get_ylabel() for axes in each.axes if axes.has_data()] == [
        "top-5 accuracy"
    ]
    with pytest.raises(VitseeError, match="no top5: it needs more than 5 classes"):
        run(pair.train, pair.test, metrics=["top5"])


def test_few_shots_against_a_loop(pair: Pair) -> None:
    table = run(pair.train, pair.test, shots=[4, 2], seeds=2, seed=5, l2=[0.5])
    assert tuple(table.written.columns) == tuple(
        name for name in COLUMNS if name != "class"
    )
    assert table["shots"].tolist() == [2, 4]
    x, y = pair.x[:, 0], pair.y[:, 0]
    for row, shots in enumerate((2, 4)):
        accuracies, ends = [], []
        for seed in (5, 6):
            chosen = shots_of(pair.labels, CLASSES, shots, seed)
            weights, bias = ridge(x[chosen], pair.labels[chosen], CLASSES, 0.5)
            scores = y @ weights + bias
            accuracies.append(top(scores, pair.test_labels, 1))
            ends.append(accuracy_interval(scores.argmax(1) == pair.test_labels)[2:])
        assert table["value"][row] == pytest.approx(np.mean(accuracies), rel=1e-14)
        assert table["std"][row] == pytest.approx(np.std(accuracies, ddof=1), rel=1e-12)
        assert table["low"][row] == pytest.approx(np.mean([low for low, _ in ends]))
        assert table["high"][row] == pytest.approx(np.mean([high for _, high in ends]))
    first = [table[name][0] for name in ("store", "site", "token", "l2", "n_images")]
    assert first == ["test", "blocks.0.out", "cls", 0.5, N_TEST]


def test_all_images_against_a_loop(pair: Pair) -> None:
    table = run(
        pair.train, pair.test, tokens=["mean", "rest", "1,2"], l2=[3.0], per_class=True
    )
    means = {
        "mean": (pair.x[:, 1:].mean(1), pair.y[:, 1:].mean(1)),
        "rest": (pair.x[:, 1:].mean(1), pair.y[:, 1:].mean(1)),
        "1,2": (pair.x[:, 6], pair.y[:, 6]),
    }
    for word, (x, y) in means.items():
        weights, bias = ridge(x, pair.labels, CLASSES, 3.0)
        scores = y @ weights + bias
        own = table.filter(token=word)
        assert values(own) == [pytest.approx(top(scores, pair.test_labels, 1))]
        for c in range(CLASSES):
            row = own.filter(**{"class": f"c{c}"})
            is_c = pair.test_labels == c
            assert row["value"].tolist() == [
                pytest.approx((scores[is_c].argmax(1) == c).mean())
            ]
            assert row["n_images"].tolist() == [is_c.sum()]
    assert np.isnan(table["std"]).all()
    cell = table.filter(token="1,2")
    assert (cell["row"][0], cell["col"][0]) == (1, 2)


def test_by_hand(tmp_path: Path) -> None:
    # test_ridge's example: class 1 scores x / 2 - 1/3 above class 0's negative, so x > 2/3 is 1
    x = np.array([[0], [1], [3]], np.float32)
    y = np.array([[0.6], [0.7], [5.0], [-1.0]], np.float32)
    train = write_vectors(tmp_path / "a.zarr", x, np.array([0, 1, 1]))
    test = write_vectors(tmp_path / "b.zarr", y, np.array([0, 1, 0, 1]), 9)
    table = run(train, test, sites=["pooled"], l2=[2 / 3])
    assert values(table) == [0.5]
    assert table["token"].tolist() == [""]


def test_big_vision_is_their_protocol(tmp_path: Path) -> None:
    pair = Pair(tmp_path, n=120, classes=6, dim=12)
    table = run(pair.train, pair.test, preset="big_vision", shots=[1, 5, 10])
    for metric, k in (("top1", 1), ("top5", 5)):
        found = table.filter(metric=metric)
        assert found["site"].tolist() == ["pooled"] * 3
        assert set(found["l2"].tolist()) == {1024.0}
        for i, shots in enumerate((1, 5, 10)):
            accuracies = []
            for seed in range(3):
                chosen = shots_of(pair.labels, 6, shots, seed)
                x = pair.x[chosen, 0]
                scores = padded_ridge(x, pair.labels[chosen], pair.y[:, 0], 6, 1024.0)
                accuracies.append(top(scores, pair.test_labels, k))
            assert found["value"][i] == pytest.approx(np.mean(accuracies), rel=1e-14)
            assert found["std"][i] == pytest.approx(np.std(accuracies, ddof=1), rel=1e-12)


def test_options_win_over_presets(pair: Pair) -> None:
    table = run(
        pair.train, pair.test, preset="big_vision", sites=["blocks"], l2=[2.0], seed=1
    )
    assert table["site"].tolist() == ["blocks.0.out"]
    assert table["l2"].tolist() == [2.0]
    assert table.notes["solver"]["features"].startswith("standardised")
    other = run(
        pair.train,
        pair.test,
        preset="big_vision",
        standardise=False,
        intercept="free",
        l2=[1.0],
    )
    assert values(other) == values(run(pair.train, pair.test, sites=["pooled"], l2=[1.0]))
    raghu = run(pair.train, pair.test, preset="raghu")
    assert (raghu["token"].tolist(), raghu["shots"].tolist()) == (["mean-all"], [10])
    assert values(raghu) == values(
        run(pair.train, pair.test, tokens=["mean-all"], shots=[10])
    )
    assert run(pair.train, pair.test, preset="raghu", shots=[3])["shots"].tolist() == [3]


def test_held_out_l2_against_a_loop(pair: Pair) -> None:
    for shots in (None, 10):
        table = run(
            pair.train,
            pair.test,
            shots=[shots] if shots else [],
            seeds=1 if shots else None,
        )
        draw = draw_images(labelled_rows(pair.train), shots, 0)
        index = labelled_rows(pair.train).index[draw.indices]
        held, rest = index[draw.held_out], index[~draw.held_out]
        assert np.bincount(pair.labels[held]).tolist() == [2 if shots else 6] * CLASSES
        x, labels = pair.x[:, 0], pair.labels
        best, chosen = (-1.0, -np.inf), 0.0
        for l2 in 2.0 ** np.arange(-10, 20):
            weights, bias = ridge(x[rest], labels[rest], CLASSES, l2)
            scores = x[held] @ weights + bias
            error = float(((scores - (2 * np.eye(CLASSES)[labels[held]] - 1)) ** 2).sum())
            if (top(scores, labels[held], 1), -error) > best:
                best, chosen = (top(scores, labels[held], 1), -error), l2
        assert table["l2"].tolist() == [chosen]
        weights, bias = ridge(x[index], labels[index], CLASSES, chosen)
        expected = top(pair.y[:, 0] @ weights + bias, pair.test_labels, 1)
        assert values(table) == [pytest.approx(expected, rel=1e-14)]


def test_leave_one_out_and_one_shot(pair: Pair) -> None:
    table = run(pair.train, pair.test, shots=[1], seeds=1)
    assert same(table, run(pair.train, pair.test, shots=[1], seeds=1, l2=["loo"]))
    loo = run(pair.train, pair.test, l2=["loo"])
    fixed = run(pair.train, pair.test, l2=[float(loo["l2"][0])])
    assert values(loo) == values(fixed)


def test_a_grid_reports_every_value(pair: Pair) -> None:
    table = run(pair.train, pair.test, l2=["grid", 0.3])
    assert table["l2"].tolist() == sorted([*2.0 ** np.arange(-10, 20), 0.3])
    for l2 in (0.3, 16.0, 2.0**19):
        assert values(table, l2=l2) == values(run(pair.train, pair.test, l2=[l2]))


def test_top5_needs_more_than_five_classes(tmp_path: Path, pair: Pair) -> None:
    assert set(run(pair.train, pair.test)["metric"].tolist()) == {"top1"}
    six = Pair(tmp_path, classes=6)
    table = run(six.train, six.test, l2=[1.0])
    weights, bias = ridge(six.x[:, 0], six.labels, 6, 1.0)
    scores = six.y[:, 0] @ weights + bias
    assert table["value"].tolist() == [
        pytest.approx(top(scores, six.test_labels, k)) for k in (1, 5)
    ]


def test_separable_and_unlearnable(tmp_path: Path) -> None:
    clear = Pair(tmp_path / "a", signal=30.0)
    assert set(values(run(clear.train, clear.test, sites=["all"]))) == {1.0}
    noise = Pair(tmp_path / "b", signal=0.0, n_test=600)
    table = run(noise.train, noise.test)
    # 600 images at chance: std 0.019
    assert values(table)[0] == pytest.approx(1 / 3, abs=0.08)


def test_equal_features_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = np.array([0, 1, 1, 1, 0, 2] * 4)
    x = np.full((24, 1, 4), 0.1, np.float32)
    sites = {"blocks.0.out": (x, grid(1, 1))}
    train = write_labelled(tmp_path / "a.zarr", sites, labels)
    test = write_labelled(tmp_path / "b.zarr", sites, labels, hash_offset=99)
    table = run(train, test)
    assert values(table) == [0.5]  # class 1 has half of the images
    assert "the same in all training images" in table.notes["remarks"][0]


def test_one_class_is_not_called_equal_features(tmp_path: Path, pair: Pair) -> None:
    labels = np.zeros(12, int)
    x = class_features(labels, 7, DIM)
    names = ["c0", "c1", "c2"]
    one = write_labelled(
        tmp_path / "a.zarr",
        {"blocks.0.out": (x, VIT)},
        labels,
        classes=names,
        hash_offset=500,
    )
    remarks = run(one, pair.test).notes["remarks"]
    assert "all training images are of one class, c0: every image is given it" in remarks
    assert not any("the same in all" in remark for remark in remarks)


def test_the_mean_of_several_l2_is_a_round_number() -> None:
    assert _mean_l2(np.array([2.0**17, 2.0**19])) == 2.0**18


# ---------------------------------------------------------------- each, all


def test_products_of_numpy_use_one_thread_each(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    scores = Linear.scores

    def looked(self: Linear, x: Any) -> Any:
        seen.extend(
            lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"
        )
        return scores(self, x)

    monkeypatch.setattr(Linear, "scores", looked)
    with threadpool_limits(2, "blas"):
        before = threadpool_info()
        run(pair.train, pair.test, l2=[1.0])
        assert threadpool_info() == before
    assert set(seen) == {1}


def test_each_token_alone(pair: Pair) -> None:
    table = run(pair.train, pair.test, tokens=["each"], l2=[1.0])
    names = ["cls", *(f"{r},{c}" for r in range(2) for c in range(3))]
    assert table["token"].tolist() == [*names, "each"]
    assert table["row"].tolist() == [None, 0, 0, 0, 1, 1, 1, None]
    singles = [
        values(run(pair.train, pair.test, tokens=[name], l2=[1.0]))[0] for name in names
    ]
    assert values(table)[:-1] == singles
    assert values(table)[-1] == pytest.approx(
        np.mean(singles[1:]), rel=1e-6
    )  # float32 shares


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"l2": ["loo"]}, {"l2": [0.1, 5.0]}, {"shots": [3, 8]}]
)
def test_memory_jobs_and_slabs_do_not_matter(tmp_path: Path, options: Any) -> None:
    dim, n = 40, 60
    a = Pair(tmp_path / "a", n=n, dim=dim, slab=16)
    b = Pair(tmp_path / "b", n=n, dim=dim, slab=7)
    expected = run(a.train, a.test, tokens=["each"], **options)
    assert same(run(a.train, a.test, tokens=["each"], jobs=3, **options), expected)
    # one to four of the seven tokens at a time: a token takes 55 to 170 kB
    small = run(a.train, a.test, tokens=["each"], memory=250_000, jobs=2, **options)
    other = run(b.train, b.test, tokens=["each"], **options)
    for table in (small, other):
        assert table["token"].tolist() == expected["token"].tolist()
        assert values(table) == pytest.approx(values(expected), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"l2": [0.5]},
        {"l2": [0.5, 4.0]},
        {},
        {"l2": ["loo"]},
        {"shots": [1, 4], "standardise": True, "intercept": 100.0},
    ],
)
def test_all_tokens_side_by_side(tmp_path: Path, options: Any) -> None:
    # 35 features and 30 images: by inner products; the vector of the same features by rows
    pair = Pair(tmp_path, n=30, dim=5)
    flat = [
        write_vectors(tmp_path / f"{offset}.zarr", x.reshape(len(x), -1), labels, offset)
        for x, labels, offset in (
            (pair.x, pair.labels, 0),
            (pair.y, pair.test_labels, 1000),
        )
    ]
    table = run(pair.train, pair.test, tokens=["all"], **options)
    assert set(table["token"].tolist()) == {"all"}
    expected = run(*flat, sites=["pooled"], **options)
    assert values(table) == pytest.approx(values(expected), rel=1e-12)
    assert table["l2"].tolist() == pytest.approx(expected["l2"].tolist())
    in_batches = run(pair.train, pair.test, tokens=["all"], memory=80_000, **options)
    assert values(in_batches) == pytest.approx(values(table), rel=1e-12)


def test_all_tokens_of_many_images(pair: Pair) -> None:
    table = run(pair.train, pair.test, tokens=["all"], l2=[2.0])
    x, y = (v.reshape(len(v), -1) for v in (pair.x, pair.y))
    weights, bias = ridge(x, pair.labels, CLASSES, 2.0)
    assert values(table) == [pytest.approx(top(y @ weights + bias, pair.test_labels, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("l2", ["holdout", "loo"])
def test_images_that_do_not_fit_the_memory_are_read_again(
    tmp_path: Path, l2: str
) -> None:
    pair = Pair(tmp_path, n=400, dim=4)
    expected = run(pair.train, pair.test, l2=[l2])
    # the held-out images take 1280 bytes, all of them 6400
    assert same(run(pair.train, pair.test, l2=[l2], memory=2000), expected)


def test_too_little_memory_is_said(pair: Pair) -> None:
    with pytest.raises(
        VitseeError, match=r"probing blocks.0.out \(cls\) takes about .*--memory"
    ):
        run(pair.train, pair.test, memory=100)
    with pytest.raises(VitseeError, match=r"--tokens all of 3 training .*--memory"):
        run(pair.train, pair.test, tokens=["all"], shots=[1], seeds=1, memory=1000)


# ---------------------------------------------------------------- which images


def test_the_same_shots_from_a_shuffled_and_an_ordered_store(
    tmp_path: Path, pair: Pair
) -> None:
    sites = {"blocks.0.out": (pair.x, VIT), "pooled": (pair.x[:, 0], None)}
    ordered = write_labelled(tmp_path / "o.zarr", sites, pair.labels, slab=11)
    for options in ({"shots": [3]}, {"shots": [10], "l2": ["loo"]}, {}):
        a = run(pair.train, pair.test, **options)  # type: ignore[arg-type]
        b = run(ordered, pair.test, **options)  # type: ignore[arg-type]
        assert values(a) == values(b)
        assert a["l2"].tolist() == b["l2"].tolist()
    a, b = run(pair.train, holdout=0.2, l2=[1.0]), run(ordered, holdout=0.2, l2=[1.0])
    assert values(a) == values(b)


def test_shots_are_nested(pair: Pair) -> None:
    data = labelled_rows(pair.train)
    drawn = [set(draw_images(data, shots, 7).indices.tolist()) for shots in (1, 5, 20)]
    assert drawn[0] < drawn[1] < drawn[2]
    assert drawn[2] != set(draw_images(data, 20, 8).indices.tolist())


def test_holdout_is_stratified(pair: Pair) -> None:
    table = run(pair.train, holdout=0.2, per_class=True, l2=[1.0])
    assert table.filter(metric="top1_class")["n_images"].tolist() == [6, 6, 6]
    assert table.notes["train"]["rows"] == 72
    assert table["store"][0] == "train"
    held = [
        split_rows(pair.train, None, holdout=0.2, seed=s)[1].index.tolist()
        for s in (0, 0, 1)
    ]
    assert held[0] == held[1] != held[2]


def test_a_large_share_leaves_an_image_of_each_class_to_train(pair: Pair) -> None:
    notes = run(pair.train, holdout=0.999).notes
    assert (notes["train"]["rows"], notes["tests"][0]["rows"]) == (CLASSES, N - CLASSES)


def test_a_single_image_of_each_class_cannot_be_held_out(tmp_path: Path) -> None:
    labels = np.arange(3)
    store = write_vectors(
        tmp_path / "a.zarr", class_features(labels, 1, DIM)[:, 0], labels
    )
    with pytest.raises(
        VitseeError, match="none of the 3 labelled images are left to test"
    ):
        run(store, holdout=0.5, sites=["pooled"])


def test_a_split_tests(tmp_path: Path) -> None:
    labels = balanced(40, 2)
    x = class_features(labels, 1, 3)
    splits = ["val" if i % 4 == 0 else "train" for i in range(40)]
    order = np.random.default_rng(0).permutation(40)
    store = write_vectors(tmp_path / "a.zarr", x[:, 0], labels, splits=splits, rows=order)
    table = run(store, test_split="val", sites=["pooled"], l2=[1.0])
    is_val = np.array(splits) == "val"
    weights, bias = ridge(x[~is_val, 0], labels[~is_val], 2, 1.0)
    assert values(table) == [
        pytest.approx(top(x[is_val, 0] @ weights + bias, labels[is_val], 1))
    ]
    with pytest.raises(MissingInput, match="no split 'test'; its data has splits"):
        run(store, test_split="test", sites=["pooled"])


def test_invalid_unlabelled_and_uncommitted_rows_count_nowhere(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "whole", n=40)
    labels, keep = pair.labels.copy(), np.ones(40, bool)
    labels[[3, 8]] = -1
    keep[[3, 8, 5, 30]] = False
    keep[32:] = False  # the third slab of 16
    valid = np.ones(40)
    valid[[5, 30]] = 0
    store = write_labelled(
        tmp_path / "a.zarr",
        {"blocks.0.out": (pair.x, VIT)},
        labels,
        valid=valid,
        slabs=[0, 1],
    )
    table = run(store, pair.test, l2=[1.0])
    weights, bias = ridge(pair.x[keep, 0], pair.labels[keep], CLASSES, 1.0)
    scores = pair.y[:, 0] @ weights + bias
    assert values(table) == [pytest.approx(top(scores, pair.test_labels, 1))]
    assert table.notes["train"]["left_out"] == {"invalid": 2, "unlabelled": 2}


def test_bad_pairs(tmp_path: Path, pair: Pair) -> None:
    sites = {"blocks.0.out": (pair.x, VIT)}
    with pytest.raises(StoreMismatch, match=r"90 of the 90 test images .*--allow-shared"):
        run(pair.train, pair.train)
    shared = run(pair.train, pair.train, allow_shared=True, l2=[1.0])
    assert shared.notes["tests"][0]["also_in_train"] == 90
    for labels, more, phrase in (
        (pair.labels, {"classes": ["a", "b", "c"]}, "class 0 is 'c0' against 'a'"),
        (np.full(90, -1), {"classes": []}, "other has no label"),
        (pair.labels, {"model": "big"}, "different model"),
    ):
        folder = tmp_path / phrase[:5]
        folder.mkdir()
        about: dict[str, Any] = {"hash_offset": 500, **more}
        other = write_labelled(folder / "other.zarr", sites, labels, **about)
        with pytest.raises((StoreMismatch, MissingInput), match=phrase):
            run(pair.train, other)


def test_too_few_images_of_a_class(tmp_path: Path, pair: Pair) -> None:
    labels = np.array([0] * 9 + [1] * 3 + [2] * 5)
    x = class_features(labels, 7, DIM)
    few = write_labelled(
        tmp_path / "a.zarr", {"blocks.0.out": (x, VIT)}, labels, hash_offset=500
    )
    with pytest.raises(
        VitseeError, match=r"2 of the 3 classes of a have fewer than 6 .*c1 \(3\), c2"
    ):
        run(few, pair.test, shots=[6])
    none = write_labelled(
        tmp_path / "b.zarr", {"blocks.0.out": (x[:9], VIT)}, labels[:9],
        classes=["c0", "c1", "c2"], hash_offset=500,
    )  # fmt: skip
    with pytest.raises(
        VitseeError, match=r"2 of the 3 classes are tested and have no image"
    ):
        run(none, pair.test, shots=[1])
    assert "no training image of 2 classes" in run(none, pair.test).notes["remarks"][0]


def test_bad_choices(pair: Pair) -> None:
    for options, phrase in (
        ({"preset": "kornblith"}, "no preset 'kornblith'"),
        ({"l2": ["loo", 3.0]}, "loo chooses the value"),
        ({"l2": ["best"]}, "'best'; expected a number, grid, holdout or loo"),
        ({"l2": [0.0]}, "above 0"),
        ({"seeds": 3}, "give --shots too"),
        ({"solver": "sgd", "l2": [1.0]}, "--l2 belongs to --solver ridge"),
        (
            {"solver": "sgd", "standardise": True},
            "--standardise belongs to --solver ridge",
        ),
        ({"solver": "sgd", "intercept": 1.0}, "--intercept belongs to --solver ridge"),
        (
            {"solver": "sgd", "preset": "big_vision"},
            "--preset big_vision belongs to --solver rid",
        ),
        ({"batch_norm": True}, "--batch-norm belongs to --solver sgd"),
        ({"epochs": 3}, "--epochs belongs to --solver sgd"),
        ({"lr": 0.1}, "--lr belongs to --solver sgd"),
        ({"intercept": 0.0}, "expected free or a number above 0"),
        ({"solver": "lbfgs"}, "no solver"),
        ({"baselines": ["zero"]}, "no baseline"),
        ({"intercept": "none"}, "expected free or a number"),
    ):
        with pytest.raises(VitseeError, match=phrase):
            run(pair.train, pair.test, **options)  # type: ignore[arg-type]
    with pytest.raises(SiteError, match="no token 5,5"):
        run(pair.train, pair.test, tokens=["5,5"])


def test_pooled_stores_serve_what_they_hold(tmp_path: Path, pair: Pair) -> None:
    lean = Pair(tmp_path, tokens="pooled")
    expected = values(run(pair.train, pair.test, tokens=["cls", "mean"], l2=[1.0]))
    assert (
        values(run(lean.train, lean.test, tokens=["cls", "mean"], l2=[1.0])) == expected
    )
    with pytest.raises(MissingInput, match=r"keeps blocks\.0\.out pooled only"):
        run(lean.train, lean.test, tokens=["each"])


# ---------------------------------------------------------------- CNNs


def test_patch_rule() -> None:
    stages = [(256, 56), (512, 28), (1024, 14), (2048, 7)]  # ResNet-50
    assert [largest_patch(c, (k, k), 2048, (7, 7)) for c, k in stages] == [2, 2, 1, 1]
    assert largest_patch(64, (8, 8), 512, (1, 1)) == 2
    assert largest_patch(64, (9, 9), 4096, (1, 1)) == 3  # 8 does not divide 9
    assert largest_patch(4, (8, 8), 4096, (4, 4)) == 2  # larger ones leave fewer cells


def test_flattening_and_pooling() -> None:
    maps = np.random.default_rng(0).normal(size=(3, 6, 8, 2)).astype(np.float32)
    flat = flatten_patches(maps, 2)
    assert flat.shape == (3, 3, 4, 8)
    for r, c in np.ndindex(3, 4):
        patch = maps[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2]
        assert (flat[:, r, c] == patch.reshape(3, -1)).all()
    for target in ((3, 2), (4, 3), (1, 1), (6, 8)):
        theirs = torch.nn.functional.adaptive_avg_pool2d(
            torch.from_numpy(maps).permute(0, 3, 1, 2).double(), target
        )
        expected = theirs.permute(0, 2, 3, 1).numpy()
        np.testing.assert_allclose(
            adaptive_average(maps, target), expected, rtol=1e-5, atol=1e-6
        )


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store, Array, Array]:
    folder = tmp_path_factory.mktemp("cnn")
    labels, other = balanced(40, 3, 1), balanced(30, 3, 2)

    def write(name: str, labels: Array, seed: int, offset: int) -> tuple[Store, Array]:
        early = class_features(labels, 16, 3, seed=seed)
        late = class_features(labels, 4, 12, seed=seed)
        sites = {"layer1.0.out": (early, grid(4, 4)), "layer2.0.out": (late, grid(2, 2))}
        store = write_labelled(folder / name, sites, labels, hash_offset=offset)
        return store, early

    train, x = write("a.zarr", labels, 1, 0)
    test, y = write("b.zarr", other, 2, 1000)
    return train, test, x, y


def test_maps_at_the_last_stage(cnn: tuple[Store, Store, Array, Array]) -> None:
    train, test, x, y = cnn
    labels, other = train.samples.label, test.samples.label
    # 3 x 2^2 = 12 channels on 2 x 2 cells: no pooling is left to do
    flat = [flatten_patches(v.reshape(-1, 4, 4, 3), 2).reshape(-1, 4, 12) for v in (x, y)]
    table = run(
        train, test, match_last_stage=True, tokens=["each", "mean", "rest"], l2=[1.0]
    )
    early = table.filter(site="layer1.0.out")
    names = ["0,0", "0,1", "1,0", "1,1", "each", "mean", "rest"]
    assert early["token"].tolist() == names
    pairs = [(flat[0][:, t], flat[1][:, t]) for t in range(4)]
    pairs += [
        (flat[0].mean(1), flat[1].mean(1)),
        (flat[0][:, 1:].mean(1), flat[1][:, 1:].mean(1)),
    ]
    for name, (a, b) in zip([*names[:4], *names[5:]], pairs, strict=True):
        weights, bias = ridge(a, labels, 3, 1.0)
        assert values(early, token=name) == [
            pytest.approx(top(b @ weights + bias, other, 1))
        ]
    assert table.notes["matched_to_last_stage"] == {
        "layer1.0.out": "patches of 2 x 2 cells flattened to 12 channels, averaged to 2 x 2 cells"
    }
    plain = run(train, test, sites=["layer2.0.out"], tokens=["mean"], l2=[1.0])
    assert values(table, site="layer2.0.out", token="mean") == values(plain)
    with pytest.raises(SiteError, match=r"no token 3,3: .*grid of 2 x 2"):
        run(train, test, match_last_stage=True, tokens=["3,3"])
    with pytest.raises(SiteError, match="no class token"):
        run(train, test, match_last_stage=True, tokens=["cls"])


def test_one_token_has_no_rest(tmp_path: Path) -> None:
    labels = balanced(12, 3, 1)
    early, late = class_features(labels, 4, 3), class_features(labels, 1, 12)
    sites = {"layer1.0.out": (early, grid(2, 2)), "layer2.0.out": (late, grid(1, 1))}
    store = write_labelled(tmp_path / "a.zarr", sites, labels)
    run(store, holdout=0.5, sites=["layer1.0.out"], tokens=["rest"])
    for site, match in (("layer2.0.out", False), ("layer1.0.out", True)):
        with pytest.raises(SiteError, match="no tokens but the first"):
            run(store, holdout=0.5, sites=[site], tokens=["rest"], match_last_stage=match)


# ---------------------------------------------------------------- baseline, SGD


def test_random_features(pair: Pair) -> None:
    table = run(
        pair.train, pair.test, tokens=["each"], baselines=["random"], sites=["all"]
    )
    random = table.filter(baseline="random")
    assert random["site"].tolist() == ["blocks.0.out", "pooled"]
    assert random["token"].tolist() == ["each", ""]
    low, high = random["low"], random["high"]
    assert ((low < 1 / 3 + 0.15) & (high > 1 / 3 - 0.15)).all()
    again = run(pair.train, pair.test, baselines=["random"])
    assert values(again, baseline="random") == [random["value"][0]]
    both = run(pair.train, pair.test, tokens=["all"], baselines=["random"], shots=[3])
    assert both["baseline"].tolist() == ["", "random"]


@pytest.mark.slow
def test_sgd(pair: Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = {"solver": "sgd", "device": "cpu", "batch": 16}
    table = run(pair.train, pair.test, **options)
    ridge_value = values(run(pair.train, pair.test))[0]
    assert values(table)[0] == pytest.approx(ridge_value, abs=0.12)
    assert table["l2"].tolist() == [None]
    assert same(table, run(pair.train, pair.test, **options))
    normed = run(
        pair.train, pair.test, batch_norm=True, tokens=["each"], shots=[20], **options
    )
    assert min(values(normed)) > 0.4
    assert "batch-normalised" in normed.notes["solver"]
    wide = run(pair.train, pair.test, tokens=["all"], **options)
    assert values(wide)[0] > values(table)[0]


def test_batch_normalisation_ignores_the_scale_of_channels(
    pair: Pair, tmp_path: Path
) -> None:
    scale = np.array([1e-3, 1, 1, 1, 1e3], np.float32)
    a = write_vectors(tmp_path / "a.zarr", pair.x[:, 0] * scale, pair.labels)
    b = write_vectors(tmp_path / "b.zarr", pair.y[:, 0] * scale, pair.test_labels, 1000)
    options: dict[str, Any] = {
        "solver": "sgd",
        "device": "cpu",
        "sites": ["pooled"],
        "batch": 30,
    }
    plain = values(run(pair.train, pair.test, batch_norm=True, holdout=None, **options))
    scaled = values(run(a, b, batch_norm=True, **options))
    # the training store is shuffled there; 1e-6 is added to a variance of 1e-6
    assert scaled[0] == pytest.approx(plain[0], abs=0.1)


def test_one_image_cannot_be_batch_normalised(tmp_path: Path) -> None:
    labels = np.zeros(4, int)
    store = write_vectors(
        tmp_path / "a.zarr", class_features(labels, 1, DIM)[:, 0], labels
    )
    with pytest.raises(VitseeError, match="at least 2 training images"):
        run(
            store, holdout=0.5, sites=["pooled"], shots=[1], solver="sgd", batch_norm=True,
            device="cpu",
        )  # fmt: skip


def test_training_that_diverges_has_no_value(pair: Pair) -> None:
    table = run(
        pair.train, pair.test, solver="sgd", lr=9e38, device="cpu", tokens=["each"]
    )
    assert np.isnan(table["value"]).all()
    assert "SGD diverged" in table.notes["remarks"][0]
    plot(table)


# ---------------------------------------------------------------- figure


@pytest.mark.slow
def test_maps_and_curves(pair: Pair, tmp_path: Path) -> None:
    table = run(
        pair.train, pair.test, sites=["all"], tokens=["each", "mean"], shots=[2, 5],
        baselines=["random"], per_class=True,
    )  # fmt: skip
    table.write(tmp_path / "r.csv")
    for drawn in (table, Table.read(tmp_path / "r.csv")):
        figure = plot(drawn)
        images = [image for axes in figure.axes for image in axes.images]
        assert len(images) == 1
        cells = table.filter(
            pl.col("baseline").is_null(), metric="top1", site="blocks.0.out", shots=5
        )
        cells = cells.filter(pl.col("token").cast(pl.String).str.count_matches(",") == 1)
        assert (
            np.asarray(images[0].get_array()).ravel().tolist() == cells["value"].tolist()
        )
    alone = run(pair.train, pair.test, tokens=["0,1"])
    assert not [image for axes in plot(alone).axes for image in axes.images]


def test_curves_against_l2(pair: Pair) -> None:
    axes = plot(run(pair.train, pair.test, l2=["grid"])).axes
    assert [(panel.get_xlabel(), len(panel.lines)) for panel in axes] == [("l2", 1)]
    figure = plot(run(pair.train, pair.test, l2=["grid"], shots=[2, 5], seeds=1))
    axes, (legend,) = figure.axes, figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["shots = 2", "shots = 5"]
    assert len({str(line.get_marker()) for line in axes[0].lines}) == 2


def test_several_stores_in_one_picture(
    pair: Pair, cnn: tuple[Store, Store, Array, Array]
) -> None:
    tables = [run(pair.train, pair.test, tokens=["each"]), run(*cnn[:2], tokens=["each"])]
    table = Table.concat(tables)
    assert len([image for axes in plot(table).axes for image in axes.images]) == 3


# ---------------------------------------------------------------- the command


def command(*args: object) -> Result:
    return CliRunner().invoke(main, ["probe", *map(str, args)])


@pytest.mark.slow
def test_command_writes_files(pair: Pair, tmp_path: Path) -> None:
    out, png = tmp_path / "r.csv", tmp_path / "r.png"
    result = command(
        pair.train.path, f"mine={pair.test.path}", "--shots", 2, "--shots", 4, "--l2", "loo",
        "--tokens", "each", "--baseline", "random", "-o", out, "--png", png,
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    rows = list(csv.DictReader(out.open()))
    assert rows[0]["store"] == "mine"
    assert {row["shots"] for row in rows} == {"2", "4"}
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["l2"] == ["loo"]
    assert sidecar["notes"]["seeds"] == [0, 1, 2]
    assert [store["label"] for store in sidecar["stores"]] == ["train", "mine"]
    assert png.read_bytes()[1:4] == b"PNG"


def test_command_refuses_in_one_line(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("mine")
    train, test = pair.train.path, pair.test.path
    for args, code, phrase in (
        ((train, test, "-o", tmp_path / "r.csv"), 1, "--force"),
        ((train, tmp_path / "missing.zarr"), 1, "missing.zarr"),
        ((train, train), 1, "--allow-shared"),
        ((train, test, "--shots", 40), 1, "3 of the 3 classes"),
        ((train, "--test-split", "val"), 1, "no split 'val'; its data has no splits"),
        ((train, test, "--sites", "blocks.7"), 1, "no site matches 'blocks.7'"),
        (
            (train, test, "--preset", "raghu", "--solver", "sgd", "--l2", 3),
            1,
            "--solver ridge",
        ),
        ((train,), 1, "exactly one of TEST"),
        ((train, test, "--holdout", 0.2), 1, "exactly one of TEST"),
        ((train, test, "--l2", "-1"), 2, "expected a number above 0, holdout, loo, grid"),
        ((train, test, "--intercept", "x"), 2, "expected free or a number"),
        ((train, test, "--tokens", "prefix"), 2, "expected cls, mean"),
    ):
        result = command(*args)
        assert (result.exit_code, result.stdout) == (code, ""), (args, result.output)
        assert phrase in result.stderr, result.stderr
        assert code == 2 or len(result.stderr.splitlines()) == 1
    assert (tmp_path / "r.csv").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.csv"]
