"""vitsee similarity: measures against slow versions and by hand, calibration, what users see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from scipy.stats import kstest

from tests import reference_measures as reference
from tests.printed_text import flat
from tests.stores import write_model
from vitsee_cli.main import main
from vitsee_core.analyses import cka
from vitsee_core.analyses.similarity import COLUMNS, MEASURES, choose_measures, plot, run
from vitsee_core.analyses.similarity.comparing import calibrate
from vitsee_core.analyses.similarity.decompositions import Procrustes, RidgeR2, Svcca
from vitsee_core.analyses.similarity.measure import (
    Cknna,
    Measure,
    MutualKnn,
    SiteGram,
    nearest,
)
from vitsee_core.analyses.similarity.products import Cka, Gulp, Rsa
from vitsee_core.similarity.estimators import block_labels
from vitsee_core.similarity.representation import Shift
from vitsee_core.statistics.jackknife import standard_error
from vitsee_stores.errors import MissingInput, VitseeError

Array = NDArray[Any]
N = 24
PAIR = np.array([[0, 1]])


def features(n: int, dim: int, seed: int = 0, offset: float = 0.0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, dim)) + offset


def related(seed: int = 0, n: int = N) -> tuple[Array, Array]:
    """Features that share a part, with a common offset each."""
    x = features(n, 7, seed, 0.5)
    rotation = features(7, 5, seed + 1)
    return x, x @ rotation + features(n, 5, seed + 2) - 0.3


def gram_of(x: Array, shift: float = 0.1) -> SiteGram:
    """As the cache has it: of features less some vector."""
    c = np.full(x.shape[1], shift)
    moved = x - c
    of = Shift(moved @ c, x.mean(1), float(c @ c), x.shape[1])
    return SiteGram((moved @ moved.T).astype(np.float32), of)


def value(measure: Measure, x: Array, y: Array) -> float:
    states = [measure.prepare(gram_of(z)) for z in (x, y)]
    return float(measure.compare(states, states, PAIR)[0])


REFERENCES = [
    (MutualKnn(5), lambda x, y: reference.mutual_knn(x, y, 5)),
    (Cknna(5), lambda x, y: reference.cknna(x, y, 5)),
    (Rsa("pearson"), lambda x, y: reference.rsa(x, y, "pearson")),
    (Rsa("euclidean"), lambda x, y: reference.rsa(x, y, "euclidean")),
    (Procrustes(), reference.procrustes),
    (Svcca(0.9), lambda x, y: reference.svcca(x, y, 0.9)),
    (Gulp(0.01), lambda x, y: reference.gulp(x, y, 0.01)),
    (Gulp(1.0), lambda x, y: reference.gulp(x, y, 1.0)),
    (RidgeR2(), reference.ridge_r2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "slow"), REFERENCES, ids=lambda one: getattr(one, "name", "")
)
def test_against_slow_versions_from_features(measure: Measure, slow: Any) -> None:
    for seed in range(3):
        x, y = related(seed)
        assert value(measure, x, y) == pytest.approx(slow(x, y), abs=2e-5)
        if not measure.symmetric:
            assert value(measure, y, x) == pytest.approx(slow(y, x), abs=2e-5)


def test_neighbours_by_hand() -> None:
    # On a circle: 0, 10, 30, 70 degrees. Nearest: 0 -> 1, 1 -> 0, 2 -> 1, 3 -> 2.
    angles = np.deg2rad([0, 10, 30, 70])
    x = np.stack([np.cos(angles), np.sin(angles)], 1)
    # 0, 50, 59, 70: 0 -> 1, 1 -> 2, 2 -> 1, 3 -> 2
    y = np.stack([np.cos(turned := np.deg2rad([0, 50, 59, 70])), np.sin(turned)], 1)
    assert value(MutualKnn(1), x, y) == 3 / 4
    assert value(MutualKnn(3), x, y) == 1


def test_ties_go_to_the_lower_index_and_oneself_is_no_neighbour() -> None:
    assert nearest(np.ones((4, 4)), 2).astype(int).tolist() == [
        [0, 1, 1, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]
    with pytest.raises(
        VitseeError, match="--k 4 neighbours of 4 images; expected at most 3"
    ):
        MutualKnn(4).prepare(gram_of(features(4, 3)))


def test_rsa_by_hand() -> None:
    # One feature: 0, 1, 3 and 0, 2, 3. Distances 1 3 2 and 2 3 1: ranks 1 3 2 and 2 3 1,
    # Spearman 1 - 6 (1 + 0 + 1) / (3 * 8) = 0.5
    x, y = np.array([[0.0], [1], [3]]), np.array([[0.0], [2], [3]])
    assert value(Rsa("euclidean"), x, y) == pytest.approx(0.5, abs=1e-6)


def test_procrustes_and_gulp_by_hand() -> None:
    # Orthogonal features of one dimension each: Xc^T Yc = 0, an angle of 90 degrees
    x, y = np.array([[1.0, 1, -1, -1]]).T, np.array([[1.0, -1, 1, -1]]).T
    assert value(Procrustes(), x, y) == pytest.approx(0, abs=1e-6)
    # A and B have the eigenvalue 1 / (1 + l), for different vectors: 2 / (1 + l)^2
    assert value(Gulp(0.25), x, y) == pytest.approx(2 / 1.25**2, abs=1e-6)
    assert value(Svcca(), x, y) == pytest.approx(0, abs=1e-6)
    # 45 degrees between x and x + y, scaled so that they weigh the same: cos = 1 / sqrt(2)
    assert value(Procrustes(), x, x + y) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    "measure", [one for one, _ in REFERENCES], ids=lambda one: one.name
)
def test_invariances(measure: Measure) -> None:
    """To rotation and scale, of permuted images, and with itself."""
    x, y = related()
    moved = 3 * x @ np.linalg.qr(features(7, 7, 9))[0]
    if isinstance(measure, Rsa) and measure.rdm == "pearson":
        moved = 3 * x + 1  # correlations over features are not of rotations
    assert value(measure, moved, y) == pytest.approx(value(measure, x, y), abs=1e-4)
    order = np.random.default_rng(0).permutation(N)
    states = [measure.prepare(gram_of(z)) for z in (x, y)]
    found = measure.null(states, states, PAIR, [order])[0, 0]
    assert found == pytest.approx(value(measure, x, y[order]), abs=1e-4)
    z = features(N, 9)
    same = 0 if measure.distance else 1
    close = 1e-3 if isinstance(measure, RidgeR2) else 2e-4
    assert value(measure, z, z) == pytest.approx(same, abs=close)


def test_cka_is_that_of_vitsee_cka(tmp_path: Path) -> None:
    x, y = related(n=40)
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    found = run(store, metrics=["cka"], sites=["head"], no_cache=True)
    expected = cka.run(store, sites=["head"], no_cache=True)
    assert found["value"] == pytest.approx(expected["value"], abs=1e-6)
    assert found["std"][1] == pytest.approx(expected["std"][1], rel=1e-3)
    assert found["metric"].tolist() == ["cka"] * 4


# ---------------------------------------------------------------- intervals and the null


@pytest.mark.parametrize("name", ["mutual-knn", "rsa", "gulp"])
def test_intervals_are_a_jackknifes_that_starts_anew(tmp_path: Path, name: str) -> None:
    n = 40
    x, y = (z.astype(np.float32) for z in related(n=n))
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    table = run(store, metrics=[name], sites=["head"], no_cache=True, k=5)
    (measure,) = choose_measures([name], k=5, rdm="pearson", ridge=0.01, variance=0.99)
    labels = block_labels(n, None)
    kept = [labels != block for block in range(labels.max() + 1)]
    without = np.array([value(measure, x[of], y[of]) for of in kept])
    assert table["std"][1] == pytest.approx(standard_error(without), rel=2e-3)
    assert table["spread"].tolist() == ["jackknife"] * 4
    assert table["low"][1] < table["value"][1] < table["high"][1]
    assert table["high"][0] <= 1 + 1e-6 or measure.distance


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "measure", [MutualKnn(5), Cknna(5), Rsa("pearson"), Rsa("euclidean"), Cka()],
    ids=lambda one: one.name,
)  # fmt: skip
def test_what_is_left_of_a_state_is_that_of_fewer_images(
    measure: Measure, seed: int
) -> None:
    x, y = (np.round(z, 1) for z in related(seed, n=40))  # with ties
    places = np.setdiff1d(np.arange(40), [seed, 17 + seed])
    of = [gram_of(z).take(places) for z in (x, y)]
    anew = [measure.prepare(one) for one in of]
    states = [measure.prepare(gram_of(z)) for z in (x, y)]
    left = [measure.restrict(one, places) for one in states]
    assert all(one is not None for one in left)
    expected = measure.compare(anew, anew, PAIR)
    assert measure.compare(left, left, PAIR) == pytest.approx(expected, abs=2e-6)
    # In a state of neighbours there are as many more as a block of the jackknife may hold.
    if isinstance(measure, MutualKnn):
        assert measure.restrict(states[0], places[:20]) is None


@pytest.mark.slow
def test_gram_matrices_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import Counter

    from vitsee_core.similarity.gram_file import GramView

    sites = {f"m{i}": features(40, 5, i) for i in range(3)}
    store = write_model(tmp_path / "a.zarr", sites)
    read: Counter[str] = Counter()
    block = GramView.block

    def counted(self: GramView, i: slice, j: slice) -> Any:
        read[self.file.path.name] += 1
        return block(self, i, j)

    monkeypatch.setattr(GramView, "block", counted)
    every = ["rsa", "gulp", "ridge-r2", "mutual-knn", "cknna", "cka"]
    found = run(store, metrics=every, sites=["*"])
    assert [*read.values()] == [1, 1, 1]
    read.clear()
    # Without room they are read again, to the same end.
    again = run(store, metrics=every, sites=["*"], memory=4000)
    assert min(read.values()) > 20
    for column in ("value", "std"):
        assert again[column] == pytest.approx(found[column], abs=1e-6)


def test_the_ridge_of_replicates_is_that_of_all_images(tmp_path: Path) -> None:
    x, y = related(n=40)
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    table = run(store, metrics=["ridge-r2"], sites=["head"], no_cache=True)
    labels = block_labels(40, None)
    measure = RidgeR2()
    states = [measure.prepare(gram_of(z)) for z in (x, y)]
    measure.compare(states, states, PAIR)
    ridges = measure.choices(states[1])
    assert len(ridges) == 1
    without = []
    for block in range(20):
        of = labels != block
        kept = [measure.prepare(gram_of(z[of]), ridges) for z in (x, y)]
        without.append(measure.compare(kept, kept, PAIR)[0])
    assert table["std"][1] == pytest.approx(standard_error(np.array(without)), rel=1e-2)


@pytest.mark.slow
def test_p_values_are_uniform_where_nothing_is_shared() -> None:
    found = []
    measure, draws = Rsa("euclidean"), 19
    for seed in range(100):
        rng = np.random.default_rng(seed)
        states: Any = [
            measure.prepare(gram_of(rng.normal(size=(12, 30)))) for _ in range(2)
        ]
        orders = [rng.permutation(12) for _ in range(draws)]
        null = measure.null(states, states, PAIR, orders)
        seen = measure.compare(states, states, PAIR)
        found.append(calibrate(seen, null, np.zeros(1, int), distance=False)["p"][0])
    # Of 20 possible p-values each is as likely: spread them evenly, and compare with uniform.
    spread = np.array(found) - np.random.default_rng(0).uniform(
        0, 1 / (draws + 1), len(found)
    )
    assert kstest(spread, "uniform").pvalue > 0.01
    assert 0.01 <= np.mean(np.array(found) <= 0.05) <= 0.11


def test_calibration_by_hand() -> None:
    # 19 draws: the threshold is the largest but none: ceil(0.95 * 20) = 19th
    null = np.arange(19.0)[:, np.newaxis] / 40  # 0 .. 0.45
    found = calibrate(np.array([0.725]), null, np.zeros(1, int), distance=False)
    assert found["tau"][0] == pytest.approx(0.45)
    assert found["p"][0] == 1 / 20
    assert found["calibrated"][0] == pytest.approx((0.725 - 0.45) / 0.55)
    assert found["null_mean"][0] == pytest.approx(0.225)
    low = calibrate(np.array([0.3]), null, np.zeros(1, int), distance=False)
    assert low["calibrated"][0] == 0
    assert low["p"][0] == (1 + 7) / 20  # 0.3 itself and the six above
    # A distance: the threshold is the smallest
    near = calibrate(np.array([0.1]), null + 0.2, np.zeros(1, int), distance=True)
    assert near["tau"][0] == pytest.approx(0.2)
    assert near["calibrated"][0] == pytest.approx(0.5)
    assert near["p"][0] == 1 / 20


def test_many_layers_are_tested_together() -> None:
    null = np.array([[0.1, 0.9]] * 10 + [[0.1, 0.0]] * 9)
    value_of = np.array([0.5, 0.5])
    together = calibrate(value_of, null, np.zeros(2, int), distance=False)
    assert together["p"].tolist() == [1 / 20, 11 / 20]
    assert together["p_family"].tolist() == [11 / 20, 11 / 20]
    apart = calibrate(value_of, null, np.arange(2), distance=False)
    assert apart["p_family"].tolist() == apart["p"].tolist()


@pytest.mark.slow
def test_independent_wide_features_are_alike_by_chance_alone(tmp_path: Path) -> None:
    x, y = features(300, 5000, 3), features(300, 5000, 4)
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    biased = cka.run(store, sites=["head"], estimator="biased", no_cache=True)
    assert biased["value"][1] == pytest.approx(0.943, abs=0.01)
    table = run(
        store,
        metrics=["cka", "procrustes", "mutual-knn"],
        sites=["head"],
        calibrate=39,
        no_cache=True,
    )
    of_pair = {row: k for k, row in enumerate(table["metric"].tolist()) if k % 4 == 1}
    assert abs(table["value"][of_pair["cka"]]) < 0.02
    assert table["value"][of_pair["procrustes"]] > 0.5  # biased upward
    for k in of_pair.values():
        assert table["calibrated"][k] < 0.01
        assert table["p"][k] > 0.05


@pytest.mark.slow
def test_a_clear_likeness_is_significant(tmp_path: Path) -> None:
    x, y = related(n=60)
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    names = [
        "mutual-knn",
        "cknna",
        "rsa",
        "gulp",
        "ridge-r2",
        "procrustes",
        "svcca",
        "cka",
    ]
    table = run(store, metrics=names, sites=["head"], calibrate=19, no_cache=True)
    assert tuple(table.written.columns) == COLUMNS
    assert table["p"].tolist() == [1 / 20] * len(table)
    assert (table["calibrated"] > 0).all()
    assert set(table["metric"].tolist()) == {name.replace("-", "_") for name in MEASURES}
    assert set(table["k"][table["metric"] == "rsa"].tolist()) == {None}
    assert set(table["k"][table["metric"] == "cknna"].tolist()) == {10}


# ---------------------------------------------------------------- what a user sees


@pytest.mark.slow
def test_both_directions_of_a_prediction_are_rows(tmp_path: Path) -> None:
    x, y = related(n=40)
    a = write_model(tmp_path / "a.zarr", {"pooled": x})
    b = write_model(tmp_path / "b.zarr", {"pooled": y})
    table = run(a, b, metrics=["ridge-r2", "gulp"], sites=["pooled"], no_cache=True)
    cells = list(zip(table["metric"], table["store_a"], table["store_b"], strict=True))
    assert cells == [("ridge_r2", "a", "b"), ("ridge_r2", "b", "a"), ("gulp", "a", "b")]
    assert table["value"][0] == pytest.approx(reference.ridge_r2(x, y), abs=1e-3)
    assert table["value"][1] == pytest.approx(reference.ridge_r2(y, x), abs=1e-3)


def test_constant_sites_and_images_of_zeros(tmp_path: Path) -> None:
    x, y = related(n=30)
    x[3] = 0
    same = np.ones((30, 4))
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y, "norm": same})
    table = run(
        store, metrics=["mutual-knn"], sites=["pooled", "logits", "norm"], no_cache=True
    )
    assert set(table["n_images"].tolist()) == {29}
    named = {
        frozenset(pair): v
        for *pair, v in zip(table["site_a"], table["site_b"], table["value"], strict=True)
    }
    assert np.isnan(named[frozenset(["pooled", "norm"])])
    rest = np.delete(np.arange(30), 3)
    expected = reference.mutual_knn(
        x[rest].astype(np.float32), y[rest].astype(np.float32), 10
    )
    assert named[frozenset(["pooled", "logits"])] == pytest.approx(expected)
    remarks = " ".join(table.notes["remarks"])
    assert "1 of 30 images are left out" in remarks
    assert "no mutual_knn for a norm: the features of all images are the same" in remarks


@pytest.mark.slow
def test_groups_that_do_not_fit_the_memory_give_the_same(tmp_path: Path) -> None:
    sites = {f"blocks.{i}.out": features(30, 14, i).reshape(30, 7, 2) for i in range(5)}
    store = write_model(tmp_path / "a.zarr", sites)
    whole = run(store, metrics=["rsa", "cknna"], no_cache=True, calibrate=19)
    small = run(
        store, metrics=["rsa", "cknna"], no_cache=True, calibrate=19, memory=20_000
    )
    for column in ("value", "std", "p", "tau"):
        assert small[column] == pytest.approx(whole[column], abs=1e-6, nan_ok=True)
    assert np.array_equal(
        whole["value"][:25].reshape(5, 5), whole["value"][:25].reshape(5, 5).T
    )


def test_blocks_within_slabs_serve_cka_alone(tmp_path: Path) -> None:
    from tests.stores import write_sites

    x = features(24, 24).reshape(24, 6, 4)
    store = write_sites(
        tmp_path / "a.zarr", {"blocks.0.out": x}, slab=8, tokens="pooled", grams=True
    )
    with pytest.raises(MissingInput, match="serve cka alone; run: vitsee cka"):
        run(store, no_cache=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metrics": ["cca"]},
            "no metric 'cca'; metrics of similarity: mutual_knn, cknna",
        ),
        ({"metrics": []}, "no metric; expected some of"),
        ({"calibrate": 5}, "5 permutations give no 5 % threshold; expected 19"),
        ({"k": 0}, "0 neighbours; expected 1 and more"),
        ({"rdm": "cosine"}, "no dissimilarities 'cosine'"),
        ({"variance": 1.5}, "a share of 1.5 of the variance"),
        ({"ridge": 0}, "a ridge of 0; expected above 0"),
        ({"k": 99}, "--k 99 neighbours of 24 images"),
    ],
)
def test_choices_that_cannot_be(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    store = write_model(
        tmp_path / "a.zarr", {"pooled": features(24, 3), "logits": features(24, 2)}
    )
    with pytest.raises(VitseeError, match=message):
        run(store, sites=["head"], no_cache=True, **given)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", ["all", "same-depth"])
def test_the_figure_has_panels_for_each_measure(tmp_path: Path, pairs: str) -> None:
    stores = []
    for name, seed in (("a", 0), ("b", 5)):
        sites = {
            f"blocks.{i}.out": features(30, 14, seed + i).reshape(30, 7, 2)
            for i in range(3)
        }
        stores.append(write_model(tmp_path / f"{name}.zarr", sites))
    table = run(
        *stores, metrics=["gulp", "mutual-knn"], pairs=pairs, calibrate=19, no_cache=True
    )
    assert "permutations of the images" in json.dumps(table.notes)
    figure = plot(table)
    shown = [one for axes in figure.axes for one in (axes, *axes.child_axes)]
    labels = {flat(axes.get_ylabel()).partition(", colours")[0] for axes in shown}
    # By chance 10 of 29 others are neighbours.
    assert {"GULP distance (0: alike)", "mutual k-NN, k = 10 (chance 0.34)"} <= labels
    if (
        pairs == "all"
    ):  # heatmaps, plain and calibrated; a calibrated distance is a similarity
        assert len(figure.axes) == 4 and "GULP, calibrated (0: chance)" in labels


def test_components_beyond_the_images_are_said(tmp_path: Path) -> None:
    x, y = features(30, 100, 1), features(30, 100, 2)
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    table = run(store, metrics=["svcca"], sites=["head"], no_cache=True)
    assert table["value"][1] > 0.9
    assert (
        "some correlations are 1 whatever the features are" in table.notes["remarks"][0]
    )


def test_metrics_have_one_option_under_two_names(tmp_path: Path) -> None:
    """--metric, and --measure as before; words with `_` as in tables, or with `-`."""
    write_model(
        tmp_path / "a.zarr", {"pooled": features(24, 3), "logits": features(24, 2)}
    )
    shown = []
    for words in (
        ["--metric", "mutual_knn,ridge_r2"],
        ["--measure", "mutual-knn,ridge-r2"],
    ):
        args = [
            "similarity",
            str(tmp_path / "a.zarr"),
            "--sites",
            "head",
            "--no-cache",
            *words,
        ]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.stderr
        shown.append(result.stdout)
    assert (
        shown[0] == shown[1] and ",mutual_knn," in shown[0] and ",ridge_r2," in shown[0]
    )
    wrong = CliRunner().invoke(main, ["similarity", "a.zarr", "--metric", "cca"])
    assert wrong.exit_code == 2 and "'mutual_knn', 'cknna'" in wrong.stderr
