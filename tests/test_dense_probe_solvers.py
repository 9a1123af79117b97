"""Dense probes of patches in memory: logistic regression, neighbours, and published protocols."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.text import Text
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import jaccard_score

from tests.tables import having
from tests.test_dense_probe import Array, command, every_pixel, layout, made, upsampled
from vitsee_cli.main import main
from vitsee_core.analyses.dense_probe import plot, run
from vitsee_core.analyses.dense_probe.bank import (
    RARE,
    Bank,
    choose_cells,
    choose_neighbours,
)
from vitsee_core.analyses.dense_probe.heads import Search, most_votes
from vitsee_core.analyses.dense_probe.options import TEMPERATURE, choose_solver
from vitsee_core.analyses.dense_probe.pixels import cell_pixels
from vitsee_core.kernels.logistic import Scaling, Targets, cross_entropy, fit
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

SITE = "blocks.0.out"
STEP = 4
GRID = (3, 4)


def patches(store: Store, masks: Path, rows: Sequence[int]) -> tuple[Array, Array]:
    """Tokens (n, dim) and labels (n, pixels) of all cells of squashed images, by Pillow."""
    xs, ys = [], []
    for row in rows:
        own = Image.open(masks / store.samples.id[row].replace("jpg", "png"))
        size = GRID[1] * STEP, GRID[0] * STEP
        seen = np.asarray(own.resize(size, Image.Resampling.NEAREST))
        xs.append(store.acts(SITE, "patches")[row : row + 1][0].reshape(-1, 5))
        for r, c in np.ndindex(*GRID):
            ys.append(seen[r * STEP : (r + 1) * STEP, c * STEP : (c + 1) * STEP].ravel())
    return np.concatenate(xs).astype(np.float64), np.stack(ys)


def seen_pixels(cells: Array) -> Array:
    """(height, width) of one image's (cells, pixels)."""
    return cells.reshape(*GRID, STEP, STEP).swapaxes(1, 2).reshape(GRID[0] * STEP, -1)


def miou(truth: Array, found: Array) -> float:
    keep = truth != IGNORED
    truth, found = truth[keep], found[keep]
    every = np.union1d(truth, found)
    return float(jaccard_score(truth, found, labels=every, average="macro"))


def value(table: Table, **wanted: Any) -> float:
    rows = having(table, site=SITE, metric="miou", baseline="", **wanted)
    assert len(rows) == 1
    return float(rows["value"][0])


@dataclass(frozen=True)
class Pair:
    """Two stores with their maps, and all patches of the first that have a class."""

    train: Store
    test: Store
    masks: list[Path]
    x: Array
    labels: Array
    classes: Array
    counts: Array  # (n, classes) pixels of each patch

    def run(self, **choice: Any) -> Table:
        return run(self.train, self.test, masks=self.masks, sites=[SITE], **choice)

    def miou_of(self, scores: Callable[[Array], Array]) -> float:
        """Of test images whose cells have these scores, interpolated to the input."""
        truths, predicted = [], []
        for row in range(5):
            own, cells = patches(self.test, self.masks[1], [row])
            size = GRID[0] * STEP, GRID[1] * STEP
            pixels = upsampled(scores(own).reshape(*GRID, -1), size)
            predicted.append(self.classes[pixels.argmax(1)])
            truths.append(seen_pixels(cells).ravel())
        return miou(np.concatenate(truths), np.concatenate(predicted))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    train, masks = made(folder, 8)
    test, others = made(folder, 5, name="b", seed=1)
    x, labels = patches(train, masks, range(8))
    there = (labels != IGNORED).any(1)
    x, labels = x[there], labels[there]
    classes = np.unique(labels[labels != IGNORED])
    counts = np.stack([(labels == number).sum(1) for number in classes], 1).astype(float)
    return Pair(train, test, [masks, others], x, labels, classes, counts)


# ---------------------------------------------------------------- logistic regression


def test_logistic_equals_that_of_explicit_pixels(pair: Pair) -> None:
    """Every pixel an example of scikit-learn's, with the features of its patch."""
    x, labels = pair.x, pair.labels
    z = (x - x.mean(0)) / x.std(0)
    keep = labels.ravel() != IGNORED
    pixels = np.repeat(z, labels.shape[1], 0)[keep]
    truth = labels.ravel()[keep]
    targets = Targets.of(z, pair.counts)
    found = fit(targets, [0.03, 0.3])
    for l2 in (0.03, 0.3):
        one = LogisticRegression(C=1 / (l2 * len(truth)), tol=1e-12, max_iter=10000)
        one.fit(pixels, truth)
        np.testing.assert_allclose(found[l2][:-1], one.coef_.T, atol=1e-6)
        bias = found[l2][-1] - found[l2][-1].mean()
        np.testing.assert_allclose(
            bias, one.intercept_ - one.intercept_.mean(), atol=1e-6
        )
        own = np.arange(len(truth)), np.searchsorted(pair.classes, truth)
        expected = -np.log(one.predict_proba(pixels)[own]).mean()
        assert cross_entropy(targets, found[l2]) == pytest.approx(expected, abs=1e-7)


def test_logistic_scores_are_interpolated(pair: Pair) -> None:
    table = pair.run(solver="logistic", l2_relative=[0.1], resolution="input")
    mean, std = pair.x.mean(0), pair.x.std(0)
    weights = fit(Targets.of((pair.x - mean) / std, pair.counts), [0.1])[0.1]
    expected = pair.miou_of(lambda own: (own - mean) / std @ weights[:-1] + weights[-1])
    assert value(table) == pytest.approx(expected, abs=1e-12)


def test_capi_s_logistic_regression_learns_most_frequent_labels(pair: Pair) -> None:
    table = pair.run(preset="capi", solver="logistic", l2_relative=[0.02])
    mean, std = pair.x.mean(0), pair.x.std(0)
    modes = torch.from_numpy(pair.labels.astype(np.int64)).mode(dim=-1).values.numpy()
    keep = modes != IGNORED
    one = LogisticRegression(C=1 / (0.02 * keep.sum()), tol=1e-12, max_iter=10000)
    one.fit(((pair.x - mean) / std)[keep], modes[keep])
    own, cells = patches(pair.test, pair.masks[1], range(5))
    found = np.repeat(one.predict((own - mean) / std)[:, None], cells.shape[1], 1)
    assert value(table) == pytest.approx(miou(cells.ravel(), found.ravel()), abs=1e-12)


# ---------------------------------------------------------------- neighbours


def cosines(queries: Array, rows: Array) -> Array:
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, rows)]
    return np.asarray(units[0] @ units[1].T)


@pytest.mark.parametrize("preset", [None, "capi"])
def test_knn_against_a_loop(pair: Pair, preset: str | None) -> None:
    table = pair.run(solver="knn", preset=preset, ks=[1, 5], resolution="input")
    x, labels = pair.x, pair.labels
    queries, truth = patches(pair.test, pair.masks[1], range(5))
    if preset == "capi":
        mean, std = x.mean(0), x.std(0)
        queries, x = ((part - mean) / std for part in (queries, x))
    nearest = np.argsort(-cosines(queries, x), axis=1, kind="stable")
    for k in (1, 5):
        found = np.empty_like(truth)
        for i, near in enumerate(nearest[:, :k]):
            every = labels[near]
            most = np.bincount(every[every != IGNORED]).argmax()
            for pixel in range(truth.shape[1]):
                votes = every[:, pixel]
                votes = votes[votes != IGNORED]
                found[i, pixel] = np.bincount(votes).argmax() if len(votes) else most
        assert value(table, k=k) == pytest.approx(
            miou(truth.ravel(), found.ravel()), abs=1e-12
        )


def test_hummingbird_against_torch(pair: Pair) -> None:
    table = pair.run(preset="hummingbird", ks=[7])
    shares = pair.counts / pair.counts.sum(1, keepdims=True)

    def scores(queries: Array) -> Array:
        near = torch.from_numpy(cosines(queries, pair.x)).topk(7)
        weights = torch.softmax(near.values / TEMPERATURE, -1).numpy()
        return np.asarray(np.einsum("ck,ckn->cn", weights, shares[near.indices.numpy()]))

    assert value(table) == pytest.approx(pair.miou_of(scores), abs=1e-12)


def test_votes_are_torch_s_mode() -> None:
    labels = np.random.default_rng(0).integers(0, 4, (6, 5, 9)).astype(np.uint8)
    expected = torch.from_numpy(labels.astype(np.int64)).mode(dim=1).values.numpy()
    assert (most_votes(labels) == expected).all()
    nothing = np.full((1, 3, 2), IGNORED, np.uint8)
    assert (most_votes(nothing) == IGNORED).all()
    # where none votes, the most frequent class of the whole patch
    some = np.array([[[2, IGNORED, 1], [2, IGNORED, 1], [2, IGNORED, 0]]], np.uint8)
    assert most_votes(some).tolist() == [[2, 2, 1]]


def test_the_bank_keeps_patches_with_rare_classes() -> None:
    """The rule of the released code, by a loop, with the same noise."""
    labels = (
        np.random.default_rng(0).choice([0, 0, 0, 1, IGNORED], (20, 6)).astype(np.uint8)
    )
    labels[3] = IGNORED
    labels[7] = 4
    there = [i for i in range(20) if (labels[i] != IGNORED).any()]
    noise = np.random.default_rng((3, 2)).random(len(there))
    scores = []
    for i, factor in zip(there, noise, strict=True):
        own = set(labels[i].tolist()) - {IGNORED}
        patches_of = [sum(number in labels[j] for j in there) for number in own]
        scores.append(sum(patches_of) * factor)
    expected = sorted(there[i] for i in np.argsort(scores)[:5])
    assert choose_cells(labels, 5, RARE, (3, 2)).tolist() == expected


def test_a_bounded_bank(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 10)
    choice: dict[str, Any] = {"masks": masks, "holdout": 0.4, "sites": [SITE], "ks": [3]}
    table = run(store, solver="hummingbird", bank=18, **choice)
    assert table.notes["train"]["patches_of_an_image_at_most"] == 3
    assert table.notes["train"]["patches"] <= 18
    again = run(store, solver="hummingbird", bank=18, jobs=3, **choice)
    assert again["value"].tolist() == table["value"].tolist()
    with pytest.raises(
        VitseeError, match=r"the bank has \d+ patches with a class; --k 500"
    ):
        run(store, solver="knn", **{**choice, "ks": [500]})
    with pytest.raises(VitseeError, match="do not fit into the memory"):
        run(store, solver="knn", bank=10**9, **choice)


def test_histograms_by_hand() -> None:
    bank = Bank(np.zeros((2, 1), np.float32), np.array([[0, 0, 5], [IGNORED, 5, 5]], np.uint8),
                np.zeros(2, np.int64))  # fmt: skip
    classes, counts, n = bank.histograms()
    assert classes.tolist() == [0, 5]
    assert counts.tolist() == [[2, 1], [0, 2]]
    assert n.tolist() == [3, 2]


def test_cells_have_to_be_whole_pixels() -> None:
    labels = np.arange(36, dtype=np.uint8).reshape(6, 6)
    cells = cell_pixels(labels, layout(2, 3, 2))
    assert cells is not None
    assert cells[1].tolist() == [2, 3, 8, 9]
    assert cells[3].tolist() == [12, 13, 18, 19]
    uneven = TokenLayout((), (4, 4), stride_px=(1.5, 1.5))
    assert cell_pixels(labels, uneven) is None


# ---------------------------------------------------------------- protocols


@pytest.mark.slow
def test_protocols_list_what_differs(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 10)
    choice: dict[str, Any] = {
        "masks": masks,
        "holdout": 0.4,
        "sites": [SITE],
        "metrics": ["miou"],
    }
    capi = run(store, preset="capi", ks=[1, 3], **choice)
    unlike = capi.notes["protocol"]["differences"]
    assert "an input of 16 x 12 px, not 224 x 224" in unlike
    assert capi.notes["solver"]["resolution"] == "input"
    assert having(capi, baseline="")["k"].tolist() == [1, 3]
    dino = run(store, preset="dinov3", steps=3, **choice)
    unlike = dino.notes["protocol"]["differences"]
    assert "3 steps, not 40,000; the warm-up is shorter in proportion" in unlike
    closed = run(store, preset="dinov3", solver="logistic", **choice)
    for table in (dino, closed):
        assert any(
            "no sliding window" in line for line in table.notes["protocol"]["differences"]
        )
    assert dino.notes["solver"]["resolution"] == "label"
    birds = run(store, preset="hummingbird", bank=60, **choice)
    assert having(birds, baseline="")["k"].tolist() == [30]
    for table in (capi, dino, birds):
        figure = plot(table)
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert any(text.startswith("after ") for text in texts)
    assert "protocol" not in run(store, l2_relative=[1.0], **choice).notes


def test_best_layer_compares_every_k_with_its_baselines(tmp_path: Path) -> None:
    store, masks = made(tmp_path, 10)
    args = (
        "--holdout",
        0.4,
        "--masks",
        masks,
        "--metric",
        "miou",
        "-o",
        tmp_path / "r.csv",
    )
    for more, tasks in (
        (("--solver", "knn", "--k", 1, "--k", 3), {"k = 1", "k = 3"}),
        (
            ("--l2-relative", 0.1, "--l2-relative", 1),
            {"l2_relative = 0.1", "l2_relative = 1.0"},
        ),
        ((), {"dense-probe miou"}),
    ):
        assert command(store.path, *args, *more, "--force").exit_code == 0
        found = CliRunner().invoke(
            main, ["best-layer", str(tmp_path / "r.csv"), "-o", "-"]
        )
        assert found.exit_code == 0, found.output
        rows = list(csv.DictReader(io.StringIO(found.stdout)))
        assert {row["task"].removeprefix("dense-probe miou, ") for row in rows} == tasks
        for task in {row["task"] for row in rows}:
            baselines = [row["baseline"] for row in rows if row["task"] == task]
            assert sorted(baselines) == ["", "majority", "position"]


# ---------------------------------------------------------------- distance, k, and balance


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_capi_chooses_k_and_distance(tmp_path: Path, distance: str) -> None:
    """CAPI standardises patches, chooses k on a tenth of the images, and refits on all."""
    train, masks = made(tmp_path, 20)
    test, others = made(tmp_path, 5, name="b", seed=1)
    choice: dict[str, Any] = {"masks": [masks, others], "preset": "capi", "sites": [SITE]}
    table = run(train, test, **choice)
    chosen = table.notes["train"]["chosen"][SITE]
    own = having(table, baseline="", metric="miou")
    assert own["k"].tolist() == [chosen["k"]]
    again = run(train, test, ks=[chosen["k"]], distance=chosen["distance"], **choice)
    assert value(again) == own["value"][0]
    fixed = run(train, test, distance=distance, **choice)
    assert fixed.notes["train"]["chosen"][SITE]["distance"] == distance
    best = max(
        chosen["miou_held_out"], fixed.notes["train"]["chosen"][SITE]["miou_held_out"]
    )
    assert best == chosen["miou_held_out"]


def test_the_choice_of_k_against_a_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bank = Bank(
        rng.normal(size=(60, 4)).astype(np.float32),
        rng.choice([0, 1, 2, IGNORED], (60, 9), p=[0.4, 0.3, 0.2, 0.1]).astype(np.uint8),
        np.repeat(np.arange(12), 5),
    )
    held_out = np.zeros(12, bool)
    held_out[[2, 7, 9]] = True
    solver = choose_solver(
        None, "capi", "class", l2s=(), ks=(), distance=None, bank=None, resolution=None,
        balanced=False, steps=None,
    )  # fmt: skip
    found = choose_neighbours(bank, held_out, solver, "cpu", SITE)
    held = held_out[bank.rows]
    mean, std = bank.tokens[~held].mean(0), bank.tokens[~held].std(0)
    z = (bank.tokens - mean) / std
    scores = {}
    for k in (1, 3, 10, 30):
        for distance in ("cosine", "l2"):
            far = 1 - cosines(z[held], z[~held])
            if distance == "l2":
                far = np.linalg.norm(z[held][:, None] - z[~held], axis=-1)
            near = np.argsort(far, axis=1)[:, :k]
            votes = most_votes(bank.labels[~held][near])
            scores[k, distance] = miou(bank.labels[held].ravel(), votes.ravel())
    best = max(scores.values())
    assert found["miou_held_out"] == pytest.approx(best, abs=1e-12)
    assert scores[found["k"], found["distance"]] == pytest.approx(best, abs=1e-12)


def test_neighbours_by_distance_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(5, 1, (300, 6)).astype(np.float32)
    queries = rng.normal(5, 1, (2, 4, 6))
    search = Search(rows, Scaling.none(6), "cpu", "l2")
    close, found = search.nearest(queries, 7)
    far = np.linalg.norm(queries.reshape(8, 1, 6) - rows, axis=-1)
    assert (found == np.argsort(far, axis=1)[:, :7]).all()
    np.testing.assert_allclose(-close, np.sort(far, axis=1)[:, :7] ** 2, rtol=1e-5)


def test_balanced_classes_weigh_alike(pair: Pair) -> None:
    """Against least squares on explicit pixels with a weight for each."""
    table = pair.run(l2_relative=[0.01], balanced=True, metrics=["miou"])
    x, labels = every_pixel(pair.train, SITE, pair.masks[0], range(8))
    classes, counts = np.unique(labels, return_counts=True)
    w = (len(labels) / (len(classes) * counts))[np.searchsorted(classes, labels)]
    y = (labels[:, None] == classes).astype(float)
    mean, level = np.average(x, 0, w), np.average(y, 0, w)
    centred = x - mean
    np.testing.assert_allclose(level, 1 / len(classes))
    scatter = (centred.T * w) @ centred
    ridge = 0.01 * np.trace(scatter) / x.shape[1]
    weights = np.linalg.solve(
        scatter + ridge * np.eye(x.shape[1]), (centred.T * w) @ (y - level)
    )
    z, truth = every_pixel(pair.test, SITE, pair.masks[1], range(5))
    found = classes[((z - mean) @ weights + level).argmax(1)]
    assert value(table) == pytest.approx(miou(truth, found), abs=1e-12)
    assert table.notes["train"]["training_pixels"] == len(labels)
    assert table.notes["solver"]["classes"].startswith("balanced")
