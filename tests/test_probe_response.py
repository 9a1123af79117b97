"""Responses predicted from features: against loops, hand-computed values and planted truths."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from sklearn.linear_model import Ridge

from tests.command_line import said
from tests.tables import check_chosen_metrics
from vitsee_cli.main import main
from vitsee_core.analyses.probe import plot, run
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.kernels.ridge import Algebra, Factors
from vitsee_core.statistics.correlation import CorrelationSums, reliability
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

N, DIM = 240, 6
IDS = [f"image{i:03}" for i in range(N)]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, DIM)) + 3
W = RNG.normal(size=(DIM, 3))
# Two sites: the one that drives the responses, and noise.
FEATURES = {"layer.driving": X, "layer.noise": RNG.normal(size=(N, 2))}
SIGNAL = (X - X.mean(0)) @ W
SIGNAL /= SIGNAL.std(0)


def write_table(
    path: Path, values: Float, ids: list[str] = IDS, names: str = "abc"
) -> Path:
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["id", *names[: values.shape[1]]])
        out.writerows(
            [name, *row] for name, row in zip(ids, values.tolist(), strict=True)
        )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two sites and a table of noise-free responses."""
    path = tmp_path_factory.mktemp("responses")
    np.savez(path / "features.npz", **FEATURES)  # type: ignore[arg-type]
    (path / "ids.txt").write_text("\n".join(IDS))
    said(
        path, "import", "features.npz", "--ids", "ids.txt", "--model", "m", "-o", "s.zarr"
    )
    write_table(path / "clean.csv", SIGNAL)
    return path


def of(table: Table, metric: str, site: str = "layer.driving", **more: Any) -> float:
    own = table if "baseline" in more else table.filter(pl.col("baseline").is_null())
    own = own.filter(site=site, metric=metric, **more)
    assert len(own) == 1
    return float(own["value"][0])


def test_a_linear_map_without_noise_is_found(folder: Path) -> None:
    table = run(folder / "s.zarr", response=folder / "clean.csv", by_column=True)
    for metric in ("r_median", "r_mean", "r2_median", "r2_mean"):
        assert of(table, metric) > 0.999
        assert abs(of(table, metric, "layer.noise")) < 0.3
    assert of(table, "r", column="b") > 0.999
    low, high = (
        float(table.filter(metric="r_median")[name][0]) for name in ("low", "high")
    )
    assert low <= of(table, "r_median") <= high <= 1
    assert "ceiling" not in table["baseline"].tolist()
    assert table.replicates is not None


def test_metrics_are_chosen(folder: Path) -> None:
    work = partial(run, folder / "s.zarr", response=folder / "clean.csv")
    rows = {metric: [f"{metric}_median", f"{metric}_mean"] for metric in ("r", "r2")}
    check_chosen_metrics(work, plot, rows, "probe --response")


@pytest.mark.parametrize("n", [4, 60])
@pytest.mark.parametrize("standardise", [False, True])
def test_every_column_and_l2_is_scikit_learns(n: int, standardise: bool) -> None:
    """By rows where images are fewer than channels, by channels else."""
    x, y = X[:n] * np.arange(1, DIM + 1), RNG.normal(size=(n, 3)) + 5
    factors = Factors.from_targets(x, y, Algebra(standardise))
    scale = x.std(0) + 1e-5 if standardise else 1
    for l2 in (1e-2, 3.0, 200.0):
        for column in range(3):
            slow = Ridge(alpha=l2).fit(x / scale, y[:, column])
            ours = factors.scores(factors.coordinates(X[100:140]), l2)[:, column]
            assert np.allclose(ours, slow.predict(X[100:140] / scale), rtol=1e-8)


def slow_probe(y: Float, holdout: float, seed: int) -> tuple[Float, Float]:
    """r and r2 of each column, one fit at a time, with numpy and scikit-learn alone."""
    test = np.zeros(N, bool)
    test[np.random.default_rng((seed, 2)).permutation(N)[: round(holdout * N)]] = True
    x_fit, y_fit = X.astype(np.float32)[~test].astype(float), y[~test]
    held = np.zeros(len(x_fit), bool)
    order = np.random.default_rng((seed, 1)).permutation(len(x_fit))
    held[order[: round(0.2 * len(x_fit))]] = True
    r, r2 = [], []
    for column in range(y.shape[1]):

        def error(l2: float, column: int = column) -> float:
            inner = Ridge(alpha=l2).fit(x_fit[~held], y_fit[~held, column])
            return float(((inner.predict(x_fit[held]) - y_fit[held, column]) ** 2).sum())

        fit = Ridge(alpha=min(GRID, key=error)).fit(x_fit, y_fit[:, column])
        p, truth = fit.predict(X.astype(np.float32)[test].astype(float)), y[test, column]
        r.append(np.corrcoef(p, truth)[0, 1])
        r2.append(1 - ((truth - p) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())
    return np.array(r), np.array(r2)


def test_held_out_images_as_a_slow_loop_scores_them(folder: Path, tmp_path: Path) -> None:
    noisy = SIGNAL + np.random.default_rng(1).normal(size=SIGNAL.shape) * [0.5, 1, 3]
    path = write_table(tmp_path / "noisy.csv", noisy)
    table = run(folder / "s.zarr", response=path, holdout=0.25, by_column=True, seed=3)
    r, r2 = slow_probe(noisy, 0.25, 3)
    for at, column in enumerate("abc"):
        assert of(table, "r", column=column) == pytest.approx(r[at], abs=1e-8)
        assert of(table, "r2", column=column) == pytest.approx(r2[at], abs=1e-8)
    assert of(table, "r_median") == pytest.approx(np.median(r))
    assert of(table, "r2_mean") == pytest.approx(r2.mean())
    assert int(table["n_images"][0]) == 60


def test_scores_by_hand() -> None:
    """y = 1, 2, 3, 4 and p = 1, 1, 3, 3: r = 2 / sqrt(5), r2 = 1 - 2 / 5."""
    y, p = np.array([[1.0], [2], [3], [4]]), np.array([[1.0], [1], [3], [3]])
    sums = CorrelationSums.by_block(y, p, np.array([0, 0, 1, 1]), 2)
    assert sums.total().r == pytest.approx(2 / np.sqrt(5))
    assert sums.total().r2 == pytest.approx(0.6)
    flat = CorrelationSums.by_block(y, np.full((4, 1), 7.0), np.zeros(4, int), 1).total()
    assert flat.r == 0 and flat.r2 == pytest.approx(1 - (36 + 25 + 16 + 9) / 5)
    assert np.isnan(CorrelationSums.by_block(p * 0 + 2, p, np.zeros(4, int), 1).total().r)
    without = CorrelationSums.by_block(y, p, np.arange(4), 4).without()
    kept = [1, 2, 3]
    assert without.r[0, 0] == pytest.approx(np.corrcoef(y[kept, 0], p[kept, 0])[0, 1])


def test_spearman_brown_by_hand() -> None:
    """Two repeats that correlate by 0.5: 2 * 0.5 / 1.5; a repeat that is missing leaves its image
    out."""
    one, other = np.array([1.0, -1, 0, 0]), np.array([1.0, 0, 0, -1])
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(0.5)
    assert reliability(np.stack([one, other])[..., np.newaxis], 0) == pytest.approx(2 / 3)
    more = np.stack([np.append(one, 9.0), np.append(other, np.nan)])[..., np.newaxis]
    assert reliability(more, 0) == pytest.approx(2 / 3)
    assert reliability(one[np.newaxis, :, np.newaxis], 0) is None


@pytest.mark.parametrize("n_repeats", [2, 5, 8])
def test_planted_noise_gives_the_planted_ceiling(
    folder: Path, tmp_path: Path, n_repeats: int
) -> None:
    """Signal of variance 1 and noise of variance 2 per repeat: reliability R / (R + 2), odd R too;
    the driving site reaches the ceiling."""
    rng = np.random.default_rng(2)
    columns = np.tile(SIGNAL, (1, 10))
    repeats = columns + np.sqrt(2) * rng.normal(size=(n_repeats, *columns.shape))
    truth = n_repeats / (n_repeats + 2)
    found = reliability(repeats, 0)
    assert found is not None and found.mean() == pytest.approx(truth, abs=0.04)
    np.save(tmp_path / "r.npy", repeats)
    table = run(folder / "s.zarr", response=tmp_path / "r.npy")
    assert of(table, "r_normalised_median") == pytest.approx(1, abs=0.06)
    assert of(table, "r2_normalised_median") == pytest.approx(1, abs=0.12)
    ceiling = of(table, "r_median", baseline="ceiling")
    assert ceiling == pytest.approx(np.sqrt(truth), abs=0.03)
    assert of(table, "r_median") < ceiling + 0.03


def test_repeats_are_rows_of_one_id_or_an_axis(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    repeats = SIGNAL + rng.normal(size=(3, *SIGNAL.shape))
    np.save(tmp_path / "axis.npy", repeats)
    rows, ids = repeats.reshape(-1, 3), IDS * 3
    order = rng.permutation(len(ids))
    shuffled = write_table(tmp_path / "rows.csv", rows[order], [ids[i] for i in order])
    by_axis, by_rows = (
        run(folder / "s.zarr", response=path)
        for path in (tmp_path / "axis.npy", shuffled)
    )
    for metric in (
        "r_median",
        "r2_mean",
    ):  # the mean over repeats is the same in any order
        assert of(by_axis, metric) == pytest.approx(of(by_rows, metric), abs=1e-12)


def test_files_and_stores_agree(folder: Path, tmp_path: Path) -> None:
    said(folder, "import", "clean.csv", "-o", str(tmp_path / "r.zarr"))
    np.save(tmp_path / "r.npy", SIGNAL[::-1])
    (tmp_path / "ids.txt").write_text("\n".join(IDS[::-1]))
    tables = [
        run(folder / "s.zarr", response=folder / "clean.csv"),
        run(folder / "s.zarr", response=tmp_path / "r.zarr"),
        run(
            folder / "s.zarr",
            response=tmp_path / "r.npy",
            response_ids=tmp_path / "ids.txt",
        ),
    ]
    for table in tables[1:]:
        assert np.allclose(tables[0]["value"], table["value"], atol=1e-5)


def test_another_store_tests(folder: Path, tmp_path: Path) -> None:
    """Trained on some images, tested on others; ids tell whose the rows are."""
    new = np.random.default_rng(5).normal(size=(40, DIM)) + 3
    np.savez(tmp_path / "f.npz", **{"layer.driving": new, "layer.noise": new[:, :2]})  # type: ignore[arg-type]
    ids = [f"new{i}" for i in range(40)]
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    said(tmp_path, "import", "f.npz", "--ids", "ids.txt", "--model", "m", "-o", "t.zarr")
    scale = ((X - X.mean(0)) @ W).std(0)
    both = np.concatenate([SIGNAL, (new - X.mean(0)) @ W / scale])
    path = write_table(tmp_path / "both.csv", both, IDS + ids)
    table = run(folder / "s.zarr", tmp_path / "t.zarr", response=path)
    assert of(table, "r_median") > 0.999
    assert set(table["n_images"].tolist()) == {40} and set(table["store"].tolist()) == {
        "t"
    }


def test_given_l2_are_reported(folder: Path) -> None:
    table = run(folder / "s.zarr", response=folder / "clean.csv", l2=(1.0, 1e4))
    own = table.filter(site="layer.driving", metric="r2_median")
    assert np.allclose(own["l2"], [1, 1e4])
    assert own["value"][0] > own["value"][1]
    assert [axes.get_xlabel() for axes in plot(table).axes] == ["l2", "l2"]


def test_seeds_decide_the_folds_and_workers_nothing(folder: Path) -> None:
    one, same, other = (
        run(folder / "s.zarr", response=folder / "clean.csv", seed=seed, jobs=jobs)
        for seed, jobs in ((0, 1), (0, 3), (1, 1))
    )
    assert np.array_equal(one["value"], same["value"])
    assert not np.array_equal(one["value"], other["value"])


@pytest.fixture(scope="module")
def bad(folder: Path) -> Path:
    constant, missing = SIGNAL.copy(), SIGNAL.copy()
    constant[:, 1], missing[7, 2] = 4.0, np.nan
    write_table(folder / "constant.csv", constant)
    write_table(folder / "missing.csv", missing)
    write_table(folder / "others.csv", SIGNAL, [f"x{i}" for i in range(N)])
    write_table(folder / "few.csv", SIGNAL[:6], IDS[:6])
    (folder / "text.csv").write_text("id,a\nimage000,high\n")
    np.save(folder / "complex.npy", SIGNAL.astype(complex))
    np.save(folder / "short.npy", SIGNAL[:-1])
    np.save(folder / "deep.npy", SIGNAL[np.newaxis, np.newaxis])
    np.savez(folder / "two.npz", a=SIGNAL, b=SIGNAL)
    return folder


# What is wrong -> words after `probe s.zarr --response`, and what the line says.
BAD = {
    "a constant column": ("constant.csv", "column b is 4 for all 192 images of s"),
    "NaN": ("missing.csv", "column c has no number for 1 of the"),
    "other ids": ("others.csv", "no image of s has an id of others.csv"),
    "few images": ("few.csv", "expected at least 4 and 3: give more images"),
    "text": ("text.csv", "column a holds 'high'; expected numbers"),
    "complex": ("complex.npy", "of complex128; expected numbers"),
    "another length": ("short.npy", "without ids, and s has 240 images"),
    "axes": ("deep.npy", "has 4 axes; expected (images, columns)"),
    "two arrays": ("two.npz", "holds 2 arrays (a, b); expected one"),
    "no file": ("no.csv", "no.csv"),
    "another ending": ("ids.txt", "ids.txt"),
    "classes' options": ("clean.csv --shots 3", "--shots belongs to probes of classes"),
    "two ways": ("clean.csv --holdout 0.2 --folds 3", "give one of TEST"),
    "leave-one-out": ("clean.csv --l2 loo", "expected holdout, grid or numbers"),
    "no split": ("clean.csv --test-split val", "its data has no splits"),
    "no memory": ("clean.csv --memory 20KB", "are allowed; give --memory"),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_inputs_are_one_line(
    bad: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad)
    words, line = BAD[what]
    given = ["probe", "s.zarr", "--response", *words.split(), "-o", "r.csv"]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 1, done.output
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vitsee probe: ") and line in last
    assert done.stdout == "" and not (bad / "r.csv").exists()


def test_options_of_responses_need_them(folder: Path) -> None:
    said(folder, "probe", "s.zarr", "--holdout", "0.2", "--by-column", code=2)
    with pytest.raises(VitseeError, match="give exactly one of TEST"):
        run(folder / "s.zarr")


def test_the_figure_has_the_ceiling(folder: Path, tmp_path: Path) -> None:
    repeats = SIGNAL + np.random.default_rng(6).normal(size=(4, *SIGNAL.shape))
    np.save(tmp_path / "r.npy", repeats)
    table = run(folder / "s.zarr", response=tmp_path / "r.npy", by_column=True)
    figure = plot(table)
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert any("noise ceiling" in text for text in texts)
    assert len(figure.axes) == 2
    assert open_store(folder / "s.zarr").n_images == int(table["n_images"][0])
