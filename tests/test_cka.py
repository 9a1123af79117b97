"""vitsee cka: numbers against loops and by hand, which sites meet which, what a user sees."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from tests.features import activations, cnn_sites, vit_sites
from tests.printed_text import colour_bars, flat
from tests.reference_cka import gram_hsic1, loop_cka, loop_jackknife
from tests.stores import CNN, write_model, write_sites
from tests.tables import equal
from vitsee_cli import console
from vitsee_cli.main import main
from vitsee_core.analyses.cka import COLUMNS, plot, run
from vitsee_core.figures.heatmaps import data_limits
from vitsee_core.similarity import Estimator
from vitsee_core.similarity.estimators import InMemory
from vitsee_core.similarity.hsic_sums import as_one_batch, pair_totals, without_cell
from vitsee_core.similarity.options import choose_estimator
from vitsee_core.similarity.whole_tiles import Partition
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

Array = NDArray[Any]
N = 24
VIT = vit_sites(N)
TOLERANCE = 1e-6  # float32 Gram matrices


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores that tests only read: vit, other (other weights), cnn."""
    path = tmp_path_factory.mktemp("cka")
    write_model(path / "vit.zarr", VIT)
    write_model(path / "other.zarr", vit_sites(N, seed=3))
    write_model(path / "cnn.zarr", cnn_sites(N, CNN), layout=CNN)
    return path


def opened(folder: Path, *names: str) -> list[Store]:
    return [open_store(folder / f"{name}.zarr") for name in names]


def values_of(sites: Mapping[str, Any], name: str) -> Array:
    value = sites[name]
    found: Array = sites[value] if isinstance(value, str) else value
    return found


def compare(folder: Path, *names: str, **kwargs: Any) -> Table:
    return run(*opened(folder, *names), no_cache=True, **kwargs)


def matrix(table: Table) -> Array:
    n = len(set(zip(table["store_a"].tolist(), table["site_a"].tolist(), strict=True)))
    return table["value"].reshape(n, -1)


def title(axes: Any) -> str:
    return str(axes.get_title(loc="left"))


# ---------------------------------------------------------------- numbers


@pytest.mark.slow
def test_a_stopped_run_keeps_what_it_made_and_says_so(tmp_path: Path) -> None:
    sites = {f"blocks.{i}.out": activations(40, 64, seed=i) for i in range(300)}
    store = write_sites(tmp_path / "a.zarr", sites, slab=40)
    command = [sys.executable, "-m", "vitsee_cli", "cka", str(store.path), "-o"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "out.csv")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    folder = tmp_path / "a.zarr.grams"
    while process.poll() is None and not list(folder.glob("*.json")):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate()
    assert process.returncode == 75, errors
    assert b"interrupted; finished Gram matrices are kept" in errors and out == b""
    assert not (tmp_path / "out.csv").exists()
    assert not list(folder.glob("*.partial"))
    assert 0 < len(list(folder.glob("*.json"))) < 300


def test_by_hand(tmp_path: Path) -> None:
    # One feature, four images. x = 0 1 0 1: K~ is 1 between images 1 and 3 only; y = 1 0 0 1: L~
    # between 0 and 3 only. <K~,L~> = 0, r.r = 1, s s = 4:
    # HSIC_1(x, y) = (0 - 2/2 * 1 + 4/6) / 4 = -1/12, of each with itself (2 - 2 + 4/6) / 4 = 1/6
    x, y = np.array([[0.0, 1, 0, 1]]).T, np.array([[1.0, 0, 0, 1]]).T
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y}, slab=4)
    table = run(store, sites=["head"], no_cache=True)
    assert tuple(table.written.columns) == COLUMNS
    assert table["value"] == pytest.approx([1, -0.5, -0.5, 1], abs=TOLERANCE)
    assert table["site_a"].tolist() == ["pooled", "pooled", "logits", "logits"]
    assert table["site_b"].tolist() == ["pooled", "logits"] * 2
    assert table["spread"].tolist() == [""] * 4
    assert np.isnan(table["std"]).all()
    assert table["n_images"].tolist() == [4] * 4


def test_one_store_against_a_loop(folder: Path) -> None:
    table = compare(folder, "vit")
    names = ["embed", "blocks.0.out", "blocks.1.out"]
    assert table["site_a"].tolist() == [name for name in names for _ in names]
    assert table["site_b"].tolist() == names * 3
    assert table["depth_b"].tolist() == [0, 1, 2] * 3
    found = matrix(table)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            expected = loop_cka(values_of(VIT, a), values_of(VIT, b))
            assert found[i, j] == pytest.approx(expected, abs=TOLERANCE)
    assert np.array_equal(found, found.T)
    assert set(table["n_images"].tolist()) == {N}


def test_few_images_are_summed_in_float64() -> None:
    """From the same float32 Gram matrices CKA is exact, and so is its jackknife."""
    rng = np.random.default_rng(0)
    grams = [
        x @ x.T for x in (rng.standard_normal((16, 40), np.float32) + 0.3 for _ in "abc")
    ]
    blocks = Partition(np.arange(16), 16, crossing=True)
    rows = [InMemory(16, gram.copy) for gram in grams]
    (totals,), diagonals = pair_totals(rows, None, [blocks], device="cpu", tile=16)
    whole = as_one_batch(totals, diagonals)
    for keep, found in (
        (np.arange(16), whole.unbiased()),
        (np.arange(16) != 3, without_cell(whole, totals, blocks.labels, 3).unbiased()),
    ):
        exact = [np.asarray(gram, np.float64)[keep][:, keep] for gram in grams]
        expected = [[gram_hsic1(a, b) for b in exact] for a in exact]
        assert found.cross == pytest.approx(np.array(expected), rel=1e-12)


def test_two_stores_against_a_loop(folder: Path) -> None:
    table = compare(folder, "vit", "cnn")
    cnn = cnn_sites(N, CNN)
    assert len(table) == 3 * 3
    for k in range(len(table)):
        a, b = table["site_a"][k], table["site_b"][k]
        expected = loop_cka(values_of(VIT, a), values_of(cnn, b))
        assert table["value"][k] == pytest.approx(expected, abs=TOLERANCE)
    assert [*dict.fromkeys(table["store_a"])] == ["vit"]
    assert [*dict.fromkeys(table["store_b"])] == ["cnn"]


@pytest.mark.slow
def test_the_interval_is_the_jackknifes(tmp_path: Path) -> None:
    # 40 images of a shuffled store: 20 blocks of two neighbours
    x, y = (activations(40, seed=k)[:, 0] for k in (1, 2))
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y})
    table = run(store, sites=["head"], no_cache=True)
    assert set(table["spread"].tolist()) == {"jackknife"}
    expected = loop_jackknife(x, y, [np.array([i, i + 1]) for i in range(0, 40, 2)])
    assert table["std"][1] == pytest.approx(expected, abs=1e-5)
    half = t_quantile(19) * expected
    assert table["low"][1] == pytest.approx(table["value"][1] - half, abs=1e-4)
    assert table["high"][1] == pytest.approx(min(table["value"][1] + half, 1), abs=1e-4)


def test_rotated_scaled_and_shifted_features_are_the_same(tmp_path: Path) -> None:
    x = activations(N, seed=1)
    flat = x.reshape(N, -1)
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(flat.shape[1],) * 2))
    turned = (3.5 * flat @ q + 2).reshape(x.shape)
    stretched = x * np.linspace(0.1, 5, x.shape[-1])
    sites = {"embed": x, "blocks.0.out": turned, "blocks.1.out": stretched}
    table = run(write_model(tmp_path / "a.zarr", sites), no_cache=True)
    assert table["value"][1] == pytest.approx(1, abs=TOLERANCE)
    assert table["value"][2] < 0.99
    order = np.random.default_rng(1).permutation(N)
    moved = write_model(
        tmp_path / "b.zarr", {name: v[order] for name, v in sites.items()}
    )
    assert run(moved, no_cache=True)["value"] == pytest.approx(
        table["value"], abs=TOLERANCE
    )


def test_constant_features_are_said_and_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sites = {"embed": np.ones((N, 7, 4)), "blocks.0.out": activations(N)}
    store = write_model(tmp_path / "a.zarr", sites)
    table = run(store, no_cache=True)
    assert np.isnan(table["value"]).tolist() == [True, True, True, False]
    (remark,) = table.notes["remarks"]
    assert remark.startswith("no CKA for a embed: the HSIC with itself is not positive")
    assert remark in caplog.text
    (legend,) = plot(table).legends
    assert "no value" in legend.get_texts()[0].get_text()
    assert run(store, no_cache=True, sites=["blocks.0.out"]).notes["remarks"] == []
    same = write_model(tmp_path / "b.zarr", {name: np.ones((N, 7, 4)) for name in sites})
    (remark,) = run(same, no_cache=True).notes["remarks"]
    assert remark.startswith("no CKA for every site")


# ---------------------------------------------------------------- which sites meet which


def test_each_side_has_its_own_sites(folder: Path) -> None:
    table = compare(folder, "vit", "cnn", sites_a=["norms"], sites_b=["layer1.-1.out"])
    assert [*dict.fromkeys(table["site_a"])] == [
        f"blocks.{i}.norm{k}" for i in (0, 1) for k in (1, 2)
    ]
    assert [*dict.fromkeys(table["site_b"])] == ["layer1.1.out"]
    one_side = compare(folder, "vit", "cnn", sites_a=["norms"])
    assert [*dict.fromkeys(one_side["site_b"])] == [
        "stem",
        "layer1.0.out",
        "layer1.1.out",
    ]
    same = compare(folder, "vit", sites_a=["embed"], sites_b=["blocks.*.mid"])
    assert same["site_b"].tolist() == ["blocks.0.mid", "blocks.1.mid"]
    assert same["store_b"].tolist() == ["vit", "vit"]


THREE = ("vit", "other", "cnn")


@pytest.mark.parametrize(
    ("stores", "choice", "line"),
    [
        (
            "vit",
            {"sites": ["norms"], "sites_a": ["embed"], "sites_b": ["embed"]},
            "leave --sites",
        ),
        (THREE, {}, r"blocks chooses 3 of vit, 3 of other, 3 of cnn .*-1"),
        (THREE, {"sites_a": ["pooled"]}, "--sites-a and --sites-b"),
        (
            ("vit", "cnn"),
            {"sites": ["blocks", "layer9.*"]},
            r"no site matches 'layer9\.\*'",
        ),
        (("vit", "cnn"), {"sites": ["norms"]}, "no site matches 'norms'"),
        (("vit", "cnn"), {"sites_b": ["norms", "blocks"]}, "no site matches 'norms'"),
        (
            ("vit", "cnn"),
            {"pairs": "same-depth", "sites_a": ["norms"]},
            r"4 sites of vit against 3 of cnn; .*--sites-a",
        ),
        ("vit", {"pairs": "same-depth"}, r"two stores.*got one"),
        (("vit", "other"), {"pairs": "branch"}, "give one store"),
        (
            "vit",
            {"estimator": "exact", "batch": 8},
            "--batch belongs to .* minibatch, not to exact",
        ),
        ("vit", {"batch": 8}, "--batch belongs to --estimator minibatch: give that too"),
        (
            "vit",
            {"examples": 16},
            "--examples belongs to --estimator minibatch: give that too",
        ),
        (
            "vit",
            {"repeats": 2},
            "--repeats belongs to --estimator minibatch: give that too",
        ),
        ("vit", {"estimator": "linear"}, r"^no .*; expected "),
        ("vit", {"preset": "nguyen"}, r"^no .*; expected "),
        ("vit", {"pairs": "diagonal"}, r"^no .*; expected "),
        (
            "vit",
            {"preset": "vit_analysis"},
            r"vit holds them shuffled; .*--order dataset",
        ),
        ("vit", {"images": 3}, "expected at least 4"),
    ],
)
def test_refused(folder: Path, stores: Any, choice: dict[str, Any], line: str) -> None:
    with pytest.raises(VitseeError, match=line):
        compare(folder, *([stores] if isinstance(stores, str) else stores), **choice)


def test_models_are_compared_by_one_site_each(folder: Path) -> None:
    table = compare(
        folder, "vit", "other", "cnn", sites=["blocks.-1.out", "layer1.-1.out"]
    )
    assert len(table) == 9
    assert table["store_a"].tolist() == ["vit"] * 3 + ["other"] * 3 + ["cnn"] * 3
    assert (
        table["site_b"].tolist() == ["blocks.1.out", "blocks.1.out", "layer1.1.out"] * 3
    )
    found = matrix(table)
    assert np.array_equal(found, found.T)
    assert np.diag(found) == pytest.approx([1, 1, 1])
    pair = compare(folder, "vit", "cnn", sites=["blocks.-1.out", "layer1.-1.out"])
    assert pair["value"][0] == pytest.approx(found[0, 2], abs=TOLERANCE)
    expected = loop_cka(VIT["blocks.1.out"], cnn_sites(N, CNN)["layer1.1.out"])  # type: ignore[arg-type]
    assert pair["value"][0] == pytest.approx(expected, abs=TOLERANCE)


def test_same_depth(folder: Path) -> None:
    """By name, and one by one where the names differ; of several stores, each with the first."""
    table = compare(folder, *THREE, pairs="same-depth")
    assert table["store_b"].tolist() == ["other"] * 3 + ["cnn"] * 3
    names = ["embed", "blocks.0.out", "blocks.1.out"]
    assert table["site_a"].tolist() == names * 2
    assert table["site_b"].tolist() == [*names, "stem", "layer1.0.out", "layer1.1.out"]
    for k, other in enumerate(("other", "cnn")):
        whole = np.diag(matrix(compare(folder, "vit", other)))
        assert table["value"][3 * k : 3 * k + 3] == pytest.approx(whole, abs=TOLERANCE)
    alone = compare(
        folder,
        "vit",
        pairs="same-depth",
        sites_a=["blocks.*.mid"],
        sites_b=["blocks.*.out"],
    )
    assert alone["site_b"].tolist() == ["blocks.0.out", "blocks.1.out"]


def test_same_depth_by_name_in_another_order(tmp_path: Path) -> None:
    names = ["embed", "blocks.0.out", "blocks.1.out"]
    sites = {name: activations(N, seed=k) for k, name in enumerate(names)}
    write_model(tmp_path / "a.zarr", sites)
    write_model(tmp_path / "b.zarr", {name: sites[name] for name in reversed(names)})
    table = compare(tmp_path, "a", "b", pairs="same-depth")
    assert table["site_a"].tolist() == table["site_b"].tolist() == names
    assert table["value"] == pytest.approx([1, 1, 1])


def test_skips_against_branches(folder: Path) -> None:
    table = compare(folder, "vit", pairs="branch")
    skips = ["blocks.0.in", "blocks.0.in", "blocks.1.in", "blocks.1.in"]
    assert table["site_a"].tolist()[:4] == skips
    assert (
        table["site_b"].tolist()[:4]
        == ["blocks.0.attn.branch", "blocks.1.attn.branch"] * 2
    )
    assert table["site_a"].tolist()[4:] == [f"blocks.{i}.mid" for i in (0, 0, 1, 1)]
    assert (
        table["site_b"].tolist()[4:] == ["blocks.0.mlp.branch", "blocks.1.mlp.branch"] * 2
    )
    for k in range(8):
        a, b = table["site_a"][k], table["site_b"][k]
        expected = loop_cka(values_of(VIT, a), values_of(VIT, b))
        assert table["value"][k] == pytest.approx(expected, abs=TOLERANCE)
    last = compare(folder, "vit", pairs="branch", sites=["blocks.-1.out"])
    assert last["site_b"].tolist() == ["blocks.1.attn.branch", "blocks.1.mlp.branch"]


def test_shortcuts_of_a_cnn(folder: Path) -> None:
    table = compare(folder, "cnn", pairs="branch")
    assert (
        table["site_a"].tolist() == ["layer1.0.shortcut"] * 2 + ["layer1.1.shortcut"] * 2
    )
    assert table["site_b"].tolist() == ["layer1.0.branch", "layer1.1.branch"] * 2
    assert flat(title(plot(table).axes[0])) == "branch: all tokens, n = 24"


@pytest.mark.slow
def test_mixers_and_parallel_blocks(tmp_path: Path) -> None:
    names = ("in", "token.branch", "mid", "channel.branch", "out")
    sites = {f"blocks.0.{name}": activations(N, seed=k) for k, name in enumerate(names)}
    table = run(write_model(tmp_path / "m.zarr", sites), pairs="branch", no_cache=True)
    pairs = list(zip(table["site_a"].tolist(), table["site_b"].tolist(), strict=True))
    assert pairs == [
        ("blocks.0.in", "blocks.0.token.branch"),
        ("blocks.0.mid", "blocks.0.channel.branch"),
    ]
    titles = [flat(title(axes)) for axes in plot(table).axes[:2]]
    assert titles == [
        "token mixing: all tokens, n = 24",
        "channel mixing: all tokens, n = 24",
    ]
    sites = {
        f"blocks.0.{name}": activations(N, seed=k)
        for k, name in enumerate(("in", "branch"))
    }
    table = run(write_model(tmp_path / "p.zarr", sites), pairs="branch", no_cache=True)
    assert table["site_a"].tolist() == ["blocks.0.in"]


def test_branches_that_are_missing(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "a.zarr", {"embed": activations(N)})
    with pytest.raises(MissingInput, match="run: vitsee extract MODEL --sites residual"):
        run(plain, pairs="branch")
    why = {"residual": "no block whose branches are known"}
    swin = write_model(tmp_path / "b.zarr", {"embed": activations(N)}, left_out=why)
    with pytest.raises(MissingInput, match="no block whose branches are known"):
        run(swin, pairs="branch")
    sites = {"blocks.0.mlp.branch": activations(N)}
    half = write_model(tmp_path / "c.zarr", sites)
    with pytest.raises(
        MissingInput, match=r"without its skip blocks\.0\.mid; run: .*residual"
    ):
        run(half, pairs="branch")


def test_aliases_keep_the_name_that_was_given(folder: Path) -> None:
    table = compare(
        folder, "vit", sites_a=["blocks.1.in"], sites_b=["blocks.0.out", "embed"]
    )
    assert table["site_a"].tolist() == ["blocks.1.in"] * 2
    assert table["depth_a"].tolist() == [1, 1]
    assert table["site_b"].tolist() == ["embed", "blocks.0.out"]
    assert table["value"][1] == pytest.approx(1, abs=TOLERANCE)


# ---------------------------------------------------------------- estimators


def test_minibatches_are_noisy_and_say_so(folder: Path) -> None:
    sizes: dict[str, Any] = {
        "estimator": "minibatch",
        "batch": 8,
        "examples": 16,
        "repeats": 5,
    }
    table = compare(folder, "vit", **sizes)
    assert set(table["spread"].tolist()) == {"repeats"}
    assert np.isfinite(table["std"]).all() and np.isnan(table["low"]).all()
    notes = table.notes
    assert (notes["batch"], notes["batches"], notes["repeats"]) == (8, 2, 5)
    assert "noise" in notes["spread"]
    assert equal(table, compare(folder, "vit", **sizes))
    assert not equal(table, compare(folder, "vit", **sizes, seed=1))


def test_presets(folder: Path, tmp_path: Path) -> None:
    (vit,) = opened(folder, "vit")
    raghu = choose_estimator([vit], "raghu")
    assert raghu == Estimator("minibatch", 1024, 10240, 20)
    assert choose_estimator([vit], "raghu", batch=4, repeats=3) == Estimator(
        "minibatch", 4, 10240, 3
    )
    assert choose_estimator([vit], "raghu", "minibatch") == raghu
    for other in ("exact", "biased"):
        with pytest.raises(
            VitseeError, match=f"--estimator {other} excludes it; leave one of"
        ):
            choose_estimator([vit], "raghu", other)
    assert choose_estimator([vit], "walmer", images=17) == Estimator(
        "minibatch", 17, 17, 1
    )
    ordered = write_model(tmp_path / "ordered.zarr", {"embed": activations(2050, 1)},
                          slab=2050, order="dataset")  # fmt: skip
    three = Estimator("minibatch", 683, 2050, 1)  # equal batches
    assert choose_estimator([ordered], "walmer") == three
    theirs = Estimator("minibatch", 8, 2050, 1, rescale=True)
    assert choose_estimator([ordered], "vit_analysis") == theirs
    assert choose_estimator([vit], None).kind == "auto"


def test_walmers_text(folder: Path) -> None:
    table = compare(folder, "vit", "other", preset="walmer")
    assert table["site_a"].tolist() == table["site_b"].tolist() == ["blocks.1.out"]
    # one batch of all images is the exact value
    exact = compare(folder, "vit", "other", sites=["blocks.1.out"])
    assert table["value"][0] == pytest.approx(exact["value"][0], abs=TOLERANCE)
    assert table["spread"].tolist() == [""]
    assert "D.1" in table.notes["preset"]
    wide = compare(folder, "vit", "other", preset="walmer", sites=["blocks"])
    assert len(wide) == 9


def test_walmers_code_rescales_each_batch(tmp_path: Path) -> None:
    n = 30  # the last short batch is left out
    x, y = activations(n, seed=1), activations(n, seed=2)
    store = write_model(
        tmp_path / "a.zarr", {"embed": x, "blocks.0.out": y}, order="dataset"
    )
    table = run(store, preset="vit_analysis", no_cache=True)

    def grams(values: Array) -> list[Array]:
        flat = values.astype(np.float32).astype(np.float64).reshape(n, -1)
        parts = [flat[k : k + 8] @ flat[k : k + 8].T for k in range(0, 24, 8)]
        return [(k - k.min()) / (k - k.min()).max() for k in parts]

    def total(a: list[Array], b: list[Array]) -> float:
        return sum(map(gram_hsic1, a, b))

    k, m = grams(x), grams(y)
    expected = total(k, m) / np.sqrt(total(k, k) * total(m, m))
    assert table["value"][1] == pytest.approx(expected, abs=1e-5)
    assert table.notes["rescaled"]
    bar = plot(table).axes[0].images[0].colorbar
    assert bar is not None
    assert flat(bar.ax.get_ylabel()).startswith(
        "CKA (debiased, rescaled Grams), colours from"
    )


@pytest.mark.parametrize("choice", [{}, {"preset": "walmer"}, {"pairs": "same-depth"}])
def test_stores_of_other_images(
    folder: Path, tmp_path: Path, choice: dict[str, Any]
) -> None:
    write_model(tmp_path / "vit.zarr", VIT, name="photo")
    stores = [*opened(folder, "cnn"), open_store(tmp_path / "vit.zarr")]
    with pytest.raises(StoreMismatch, match="cnn and vit do not pair"):
        run(*stores, no_cache=True, **({"sites": ["stem", "embed"]} | choice))


# ---------------------------------------------------------------- notes and figure


def test_notes_say_what_was_compared(folder: Path) -> None:
    notes = compare(folder, "vit", "cnn", sites=["blocks"]).notes
    assert notes["sites_a"] == {"vit": ["embed", "blocks.0.out", "blocks.1.out"]}
    assert notes["sites_b"] == {"cnn": ["stem", "layer1.0.out", "layer1.1.out"]}
    assert notes["estimator"] == "exact"
    assert "jackknife" in notes["spread"]
    assert json.loads(json.dumps(notes)) == notes


def test_figure_of_one_store(folder: Path) -> None:
    figure = plot(compare(folder, "vit", sites=["norms", "blocks"]))
    axes = figure.axes[0]
    (image,) = axes.images
    low, high = image.get_clim()
    values = np.asarray(image.get_array())
    assert 0 < low <= values.min() < low + 0.05 and high == 1
    (bar,) = colour_bars(figure)
    assert flat(bar.get_ylabel()) == f"CKA (debiased), colours from {low:.3g} to 1"
    assert axes.get_ylim()[0] < axes.get_ylim()[1]  # the input is at the bottom
    assert axes.get_xlabel() == axes.get_ylabel() == "vit, block"
    texts = [text.get_text() for text in axes.get_xticklabels()]
    assert texts == [
        "embedding",
        "0 norm 1",
        "0 norm 2",
        "0",
        "1 norm 1",
        "1 norm 2",
        "1",
    ]
    assert len(axes.lines) == 2 * 2  # around block 0: after embed, before block 1
    assert title(axes) == "all tokens, n = 24"


def test_figure_of_two_stores(folder: Path) -> None:
    table = compare(folder, "vit", "cnn", tokens="mean")
    assert table.notes["tokens"] == "mean"
    axes = plot(table).axes[0]
    assert axes.get_ylabel() == "vit, block"
    assert flat(axes.get_xlabel()) == "cnn, block (layer.block)"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["stem", "1.0", "1.1"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["embedding", "0", "1"]
    assert not axes.lines
    assert flat(title(axes)) == "mean over patches, n = 24"
    # Each cell shows its own row of the table: rows are the first store's sites, upwards.
    (image,) = axes.images
    shown = np.asarray(image.get_array())
    rows = table.frame.select("site_a", "site_b", "value").rows()
    sites_a = ["embed", "blocks.0.out", "blocks.1.out"]
    sites_b = ["stem", "layer1.0.out", "layer1.1.out"]
    assert len(rows) == 9 and image.origin == "lower"
    for site_a, site_b, value in rows:
        assert shown[sites_a.index(site_a), sites_b.index(site_b)] == pytest.approx(value)
    assert not np.allclose(shown, shown.T)


def test_figure_of_many_stores(folder: Path) -> None:
    table = compare(folder, "vit", "other", "cnn", sites=["pooled", "stem"])
    axes = plot(table).axes[0]
    written = np.array([float(text.get_text()) for text in axes.texts]).reshape(3, 3)
    assert written == pytest.approx(matrix(table), abs=0.005)
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["vit: pooled", "other: pooled", "cnn: stem"]


def test_figure_of_skips_and_branches(folder: Path) -> None:
    panels = plot(compare(folder, "vit", pairs="branch")).axes[:2]
    assert [flat(title(axes)) for axes in panels] == [
        "attention: all tokens, n = 24",
        "MLP: all tokens, n = 24",
    ]
    assert flat(panels[0].get_ylabel()) == "vit, skip, input"
    assert flat(panels[1].get_xlabel()) == "vit, branch, MLP"


@pytest.mark.slow
def test_figure_over_depth(folder: Path) -> None:
    table = compare(folder, "vit", "other", "cnn", pairs="same-depth")
    figure = plot(table)
    axes = figure.axes[0]
    curves = [np.asarray(line.get_ydata()) for line in axes.lines]
    assert np.concatenate(curves).tolist() == table["value"].tolist()
    assert axes.get_ylim()[0] == 0
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "against other",
        "against cnn, block (layer.block)",
        "95 % interval over images",
    ]
    sizes: dict[str, Any] = {
        "estimator": "minibatch",
        "batch": 8,
        "examples": 16,
        "repeats": 3,
    }
    noisy = compare(folder, "vit", "other", pairs="same-depth", **sizes)
    texts = [text.get_text() for text in plot(noisy).legends[0].get_texts()]
    assert texts[-1] == "std over minibatch repeats (the estimator's noise)"


def made_table(rows: list[str], cols: list[str], value: Any, **notes: Any) -> Table:
    return Table.from_rows(
        (
            {
                "store_a": "a",
                "site_a": a,
                "depth_a": i,
                "store_b": "b",
                "site_b": b,
                "depth_b": j,
            }
            | {"metric": "cka", "value": value(i, j)}
            | {"std": 0.1, "low": 0.0, "high": 1.0, "spread": "jackknife"}
            | {"n_images": 50}
            for i, a in enumerate(rows)
            for j, b in enumerate(cols)
        ),
        COLUMNS,
        notes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(1, 1), (25, 3), (218, 12)])
def test_sizes_of_models(n: int, m: int) -> None:
    blocks = {f"blocks.{i}.p{k}": f"blocks.{i}" for i in range(40) for k in range(9)}
    names = list(blocks)
    figure = plot(made_table(names[:n], names[::-1][:m], lambda i, j: 0.5, blocks=blocks))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert 1 <= len(labels) <= 26
        boxes = [label.get_window_extent() for label in labels]
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    sides = axes.get_window_extent()
    assert sides.width / m == pytest.approx(sides.height / n)


def test_colours_span_the_values() -> None:
    for values, limits in (
        ((0.5, 0.62), (0.5, 0.65)),
        ((0.03, 0.43), (0.0, 0.45)),
        ((0.2, 1.0000001), (0.2, 1.0)),
        ((-0.3, 0.1), (-0.3, 0.1)),
        ((0.5, 0.5), (0.5, 0.55)),
        ((np.nan, np.nan), (0.0, 1.0)),
    ):
        assert data_limits([np.array(values)]) == pytest.approx(limits)


# ---------------------------------------------------------------- the command


def cka_command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["cka", *map(str, args)])


def test_gram_matrices_are_kept_beside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER", 0.0)
    write_model(tmp_path / "a.zarr", vit_sites(N, 1))
    first = cka_command(tmp_path / "a.zarr")
    assert any((tmp_path / "a.zarr.grams").iterdir())
    again = cka_command(tmp_path / "a.zarr")
    assert again.stdout == first.stdout
    assert "Gram matrices" in first.stderr
    assert "2/2" in first.stderr and "2/2" not in again.stderr


def test_usage(folder: Path) -> None:
    vit = folder / "vit.zarr"
    for args in (("--tokens", "each"), ("--batch", "2"), ("--cache", "x", "--no-cache")):
        assert cka_command(vit, *args).exit_code == 2
