"""vitsee cka: numbers against loops and by hand, which sites meet which, what a user sees."""

from __future__ import annotations

import io
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
from tests.reference_cka import biased_cka, loop_cka, loop_hsic1, loop_jackknife
from tests.stores import CNN, write_model, write_sites
from tests.tables import equal
from vitsee_cli import console
from vitsee_cli.main import main
from vitsee_core.analyses.cka import COLUMNS, plot, run
from vitsee_core.figures.heatmaps import data_limits
from vitsee_core.figures.plotting import figure_bytes
from vitsee_core.similarity.presets import choose_estimator
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError

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
        [*command, str(tmp_path / "out.csv")], stderr=subprocess.PIPE, stdout=subprocess.PIPE
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


def test_results_do_not_go_into_a_store(tmp_path: Path) -> None:
    store = write_sites(tmp_path / "a.zarr", {"x": activations(8), "y": activations(8, seed=1)})
    result = CliRunner().invoke(main, ["cka", str(store.path), "-o", str(store.path / "out.csv")])
    assert result.exit_code == 1
    assert "results do not go into a store" in result.stderr
    assert not (store.path / "out.csv").exists()


def test_by_hand(tmp_path: Path) -> None:
    # One feature, four images. x = 0 1 0 1: K~ is 1 between images 1 and 3 only; y = 1 0 0 1: L~
    # between 0 and 3 only. <K~,L~> = 0, r.r = 1, s s = 4:
    # HSIC_1(x, y) = (0 - 2/2 * 1 + 4/6) / 4 = -1/12, of each with itself (2 - 2 + 4/6) / 4 = 1/6
    x, y = np.array([[0.0, 1, 0, 1]]).T, np.array([[1.0, 0, 0, 1]]).T
    store = write_model(tmp_path / "a.zarr", {"pooled": x, "logits": y}, slab=4)
    table = run(store, sites=["head"], no_cache=True)
    assert tuple(table.columns) == COLUMNS
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


def test_two_stores_against_a_loop(folder: Path) -> None:
    table = compare(folder, "vit", "cnn")
    cnn = cnn_sites(N, CNN)
    assert len(table) == 3 * 3
    for k in range(len(table)):
        a, b = table["site_a"][k], table["site_b"][k]
        expected = loop_cka(values_of(VIT, a), values_of(cnn, b))
        assert table["value"][k] == pytest.approx(expected, abs=TOLERANCE)
    assert table.unique("store_a") == ["vit"]
    assert table.unique("store_b") == ["cnn"]


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


def test_biased_is_kornbliths(folder: Path) -> None:
    table = compare(folder, "vit", estimator="biased")
    expected = biased_cka(values_of(VIT, "embed"), values_of(VIT, "blocks.1.out"))
    assert table["value"][2] == pytest.approx(expected, abs=TOLERANCE)
    assert table.notes["estimator"] == "biased"


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        ("patches", lambda v: v[:, 1:]),
        ("cls", lambda v: v[:, 0]),
        ("mean", lambda v: v[:, 1:].mean(1)),
        ("rest", lambda v: v[:, 1:].mean(1)),
        ("1,2", lambda v: v[:, 1 + 5]),
    ],
)
def test_tokens(folder: Path, tokens: str, chosen: Any) -> None:
    table = compare(folder, "vit", tokens=tokens)
    a, b = (chosen(values_of(VIT, name)) for name in ("embed", "blocks.1.out"))
    assert table["value"][2] == pytest.approx(loop_cka(a, b), abs=TOLERANCE)
    assert table.notes["tokens"] == tokens


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


def test_other_data_are_not_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sites = {name: rng.normal(size=(40, 7, 8)) for name in ("embed", "blocks.0.out")}
    table = run(write_model(tmp_path / "a.zarr", sites), no_cache=True)
    assert abs(table["value"][1]) < 0.1
    biased = run(open_store(tmp_path / "a.zarr"), no_cache=True, estimator="biased")
    assert biased["value"][1] > 0.4


def test_constant_features_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites = {"embed": np.ones((N, 7, 4)), "blocks.0.out": activations(N)}
    store = write_model(tmp_path / "a.zarr", sites)
    table = run(store, no_cache=True)
    (remark,) = table.notes["remarks"]
    assert remark.startswith("no CKA for a embed: the HSIC with itself is not positive")
    assert remark in caplog.text
    assert run(store, no_cache=True, sites=["blocks.0.out"]).notes["remarks"] == []
    same = {name: np.ones((N, 7, 4)) for name in sites}
    path = write_model(tmp_path / "b.zarr", same).path
    result = CliRunner().invoke(main, ["cka", str(path), "--no-cache"])
    assert result.exit_code == 0
    assert "no CKA for every site" in result.stderr


def test_tokens_are_given_once(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["cka", "a", "--tokens", "cls", "--tokens", "mean"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--tokens is given 2 times; expected once" in result.stderr


def test_constant_features_have_no_value_and_are_drawn(tmp_path: Path) -> None:
    sites = {"embed": np.ones((N, 7, 4)), "blocks.0.out": activations(N)}
    table = run(write_model(tmp_path / "a.zarr", sites), no_cache=True)
    assert np.isnan(table["value"]).tolist() == [True, True, True, False]
    figure = plot(table)
    (legend,) = figure.legends
    assert "no value" in legend.get_texts()[0].get_text()
    figure_bytes(figure)


def test_invalid_images_count_in_neither_store(tmp_path: Path) -> None:
    a, b = vit_sites(N, 1), vit_sites(N, 1, seed=2)
    write_model(tmp_path / "a.zarr", a, valid=[i != 3 for i in range(N)])
    write_model(tmp_path / "b.zarr", b, valid=[i != 17 for i in range(N)])
    table = compare(tmp_path, "a", "b")
    keep = [i for i in range(N) if i not in (3, 17)]
    expected = loop_cka(values_of(a, "embed")[keep], values_of(b, "embed")[keep])
    assert table["value"][0] == pytest.approx(expected, abs=TOLERANCE)
    assert set(table["n_images"].tolist()) == {N - 2}


def test_images_and_slabs(folder: Path, tmp_path: Path) -> None:
    table = compare(folder, "vit", images=16)
    x, y = (values_of(VIT, name)[:16] for name in ("embed", "blocks.0.out"))
    assert table["value"][1] == pytest.approx(loop_cka(x, y), abs=TOLERANCE)
    assert set(table["n_images"].tolist()) == {16}
    part = write_model(tmp_path / "part.zarr", VIT, slabs=[0, 2])
    rows = [*range(8), *range(16, 24)]
    x, y = (values_of(VIT, name)[rows] for name in ("embed", "blocks.0.out"))
    assert run(part, no_cache=True)["value"][1] == pytest.approx(loop_cka(x, y), abs=TOLERANCE)


# ---------------------------------------------------------------- which sites meet which


def test_each_side_has_its_own_sites(folder: Path) -> None:
    table = compare(folder, "vit", "cnn", sites_a=["norms"], sites_b=["layer1.-1.out"])
    assert table.unique("site_a") == [f"blocks.{i}.norm{k}" for i in (0, 1) for k in (1, 2)]
    assert table.unique("site_b") == ["layer1.1.out"]
    one_side = compare(folder, "vit", "cnn", sites_a=["norms"])
    assert one_side.unique("site_b") == ["stem", "layer1.0.out", "layer1.1.out"]
    same = compare(folder, "vit", sites_a=["embed"], sites_b=["blocks.*.mid"])
    assert same["site_b"].tolist() == ["blocks.0.mid", "blocks.1.mid"]
    assert same["store_b"].tolist() == ["vit", "vit"]
    with pytest.raises(VitseeError, match="leave --sites out"):
        compare(folder, "vit", sites=["norms"], sites_a=["embed"], sites_b=["embed"])


def test_models_are_compared_by_one_site_each(folder: Path) -> None:
    table = compare(folder, "vit", "other", "cnn", sites=["blocks.-1.out", "layer1.-1.out"])
    assert len(table) == 9
    assert table["store_a"].tolist() == ["vit"] * 3 + ["other"] * 3 + ["cnn"] * 3
    assert table["site_b"].tolist() == ["blocks.1.out", "blocks.1.out", "layer1.1.out"] * 3
    found = matrix(table)
    assert np.array_equal(found, found.T)
    assert np.diag(found) == pytest.approx([1, 1, 1])
    pair = compare(folder, "vit", "cnn", sites=["blocks.-1.out", "layer1.-1.out"])
    assert pair["value"][0] == pytest.approx(found[0, 2], abs=TOLERANCE)
    expected = loop_cka(VIT["blocks.1.out"], cnn_sites(N, CNN)["layer1.1.out"])  # type: ignore[arg-type]
    assert pair["value"][0] == pytest.approx(expected, abs=TOLERANCE)


def test_several_sites_of_many_models_are_refused(folder: Path) -> None:
    with pytest.raises(VitseeError, match=r"blocks chooses 3 of vit, 3 of other, 3 of cnn .*-1"):
        compare(folder, "vit", "other", "cnn")
    with pytest.raises(VitseeError, match="--sites-a and --sites-b"):
        compare(folder, "vit", "other", "cnn", sites_a=["pooled"])


def test_a_selector_has_to_match_somewhere(folder: Path) -> None:
    with pytest.raises(SiteError, match=r"no site matches 'layer9\.\*'"):
        compare(folder, "vit", "cnn", sites=["blocks", "layer9.*"])
    with pytest.raises(SiteError, match=r"no site matches 'norms'"):
        compare(folder, "vit", "cnn", sites=["norms"])
    with pytest.raises(SiteError, match=r"no site matches 'norms'"):
        compare(folder, "vit", "cnn", sites_b=["norms", "blocks"])


def test_same_depth_by_name(folder: Path) -> None:
    table = compare(folder, "vit", "other", pairs="same-depth")
    assert table["site_a"].tolist() == table["site_b"].tolist()
    whole = compare(folder, "vit", "other")
    assert table["value"].tolist() == np.diag(matrix(whole)).tolist()


def test_same_depth_one_by_one(folder: Path) -> None:
    table = compare(folder, "vit", "cnn", pairs="same-depth")
    assert table["site_a"].tolist() == ["embed", "blocks.0.out", "blocks.1.out"]
    assert table["site_b"].tolist() == ["stem", "layer1.0.out", "layer1.1.out"]
    alone = compare(
        folder, "vit", pairs="same-depth", sites_a=["blocks.*.mid"], sites_b=["blocks.*.out"]
    )
    assert alone["site_b"].tolist() == ["blocks.0.out", "blocks.1.out"]


def test_same_depth_with_several_stores(folder: Path) -> None:
    table = compare(folder, "vit", "other", "cnn", pairs="same-depth")
    assert table["store_b"].tolist() == ["other"] * 3 + ["cnn"] * 3
    pair = compare(folder, "vit", "cnn", pairs="same-depth")
    assert table["value"][3:] == pytest.approx(pair["value"], abs=TOLERANCE)


def test_same_depth_by_name_in_another_order(tmp_path: Path) -> None:
    names = ["embed", "blocks.0.out", "blocks.1.out"]
    sites = {name: activations(N, seed=k) for k, name in enumerate(names)}
    write_model(tmp_path / "a.zarr", sites)
    write_model(tmp_path / "b.zarr", {name: sites[name] for name in reversed(names)})
    table = compare(tmp_path, "a", "b", pairs="same-depth")
    assert table["site_a"].tolist() == table["site_b"].tolist() == names
    assert table["value"] == pytest.approx([1, 1, 1])


def test_same_depth_refuses_unequal_lists(folder: Path) -> None:
    with pytest.raises(VitseeError, match=r"4 sites of vit against 3 of cnn; .*--sites-a"):
        compare(folder, "vit", "cnn", pairs="same-depth", sites_a=["norms"])
    with pytest.raises(VitseeError, match=r"two stores.*got one"):
        compare(folder, "vit", pairs="same-depth")


def test_skips_against_branches(folder: Path) -> None:
    table = compare(folder, "vit", pairs="branch")
    skips = ["blocks.0.in", "blocks.0.in", "blocks.1.in", "blocks.1.in"]
    assert table["site_a"].tolist()[:4] == skips
    assert table["site_b"].tolist()[:4] == ["blocks.0.attn.branch", "blocks.1.attn.branch"] * 2
    assert table["site_a"].tolist()[4:] == [f"blocks.{i}.mid" for i in (0, 0, 1, 1)]
    assert table["site_b"].tolist()[4:] == ["blocks.0.mlp.branch", "blocks.1.mlp.branch"] * 2
    for k in range(8):
        a, b = table["site_a"][k], table["site_b"][k]
        expected = loop_cka(values_of(VIT, a), values_of(VIT, b))
        assert table["value"][k] == pytest.approx(expected, abs=TOLERANCE)
    last = compare(folder, "vit", pairs="branch", sites=["blocks.-1.out"])
    assert last["site_b"].tolist() == ["blocks.1.attn.branch", "blocks.1.mlp.branch"]


def test_shortcuts_of_a_cnn(folder: Path) -> None:
    table = compare(folder, "cnn", pairs="branch")
    assert table["site_a"].tolist() == ["layer1.0.shortcut"] * 2 + ["layer1.1.shortcut"] * 2
    assert table["site_b"].tolist() == ["layer1.0.branch", "layer1.1.branch"] * 2
    assert flat(title(plot(table).axes[0])) == "branch: all tokens, n = 24"


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
    assert titles == ["token mixing: all tokens, n = 24", "channel mixing: all tokens, n = 24"]
    sites = {f"blocks.0.{name}": activations(N, seed=k) for k, name in enumerate(("in", "branch"))}
    table = run(write_model(tmp_path / "p.zarr", sites), pairs="branch", no_cache=True)
    assert table["site_a"].tolist() == ["blocks.0.in"]


def test_branches_that_are_missing(folder: Path, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "a.zarr", {"embed": activations(N)})
    with pytest.raises(MissingInput, match="run: vitsee extract MODEL --sites residual"):
        run(plain, pairs="branch")
    why = {"residual": "no block whose branches are known"}
    swin = write_model(tmp_path / "b.zarr", {"embed": activations(N)}, left_out=why)
    with pytest.raises(MissingInput, match="no block whose branches are known"):
        run(swin, pairs="branch")
    sites = {"blocks.0.mlp.branch": activations(N)}
    half = write_model(tmp_path / "c.zarr", sites)
    with pytest.raises(MissingInput, match=r"without its skip blocks\.0\.mid; run: .*residual"):
        run(half, pairs="branch")
    with pytest.raises(VitseeError, match="give one store"):
        compare(folder, "vit", "other", pairs="branch")


def test_aliases_keep_the_name_that_was_given(folder: Path) -> None:
    table = compare(folder, "vit", sites_a=["blocks.1.in"], sites_b=["blocks.0.out", "embed"])
    assert table["site_a"].tolist() == ["blocks.1.in"] * 2
    assert table["depth_a"].tolist() == [1, 1]
    assert table["site_b"].tolist() == ["embed", "blocks.0.out"]
    assert table["value"][1] == pytest.approx(1, abs=TOLERANCE)


# ---------------------------------------------------------------- estimators


def test_minibatches_are_noisy_and_say_so(folder: Path) -> None:
    table = compare(folder, "vit", estimator="minibatch", batch=8, examples=16, repeats=5)
    assert set(table["spread"].tolist()) == {"repeats"}
    assert np.isfinite(table["std"]).all()
    assert np.isnan(table["low"]).all()
    notes = table.notes
    assert (notes["batch"], notes["batches"], notes["repeats"]) == (8, 2, 5)
    assert "noise" in notes["spread"]
    assert equal(
        table, compare(folder, "vit", estimator="minibatch", batch=8, examples=16, repeats=5)
    )
    assert not equal(
        table,
        compare(folder, "vit", estimator="minibatch", batch=8, examples=16, repeats=5, seed=1),
    )


def test_presets(folder: Path, tmp_path: Path) -> None:
    (vit,) = opened(folder, "vit")
    raghu = choose_estimator([vit], "raghu")
    assert (raghu.kind, raghu.batch, raghu.examples, raghu.repeats) == (
        "minibatch",
        1024,
        10240,
        20,
    )
    mine = choose_estimator([vit], "raghu", batch=4, repeats=3)
    assert (mine.batch, mine.examples, mine.repeats) == (4, 10240, 3)
    assert choose_estimator([vit], "raghu", "minibatch") == raghu
    for other in ("exact", "biased"):
        with pytest.raises(VitseeError, match=f"--estimator {other} excludes it"):
            choose_estimator([vit], "raghu", other)
    walmer = choose_estimator([vit], "walmer", images=17)
    assert (walmer.batch, walmer.examples, walmer.repeats) == (17, 17, 1)
    ordered = write_model(tmp_path / "ordered.zarr", {"embed": activations(2050, 1)},
                          slab=2050, order="dataset")  # fmt: skip
    walmer = choose_estimator([ordered], "walmer")
    assert (walmer.batch, walmer.examples) == (683, 2050)  # three equal batches
    theirs = choose_estimator([ordered], "vit_analysis")
    assert (theirs.batch, theirs.examples, theirs.repeats) == (8, 2050, 1)
    assert theirs.rescale and not walmer.rescale
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


def test_walmers_code_rescales_each_batch(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VitseeError, match=r"vit holds them shuffled; .*--order dataset"):
        compare(folder, "vit", preset="vit_analysis")
    x, y = activations(N, seed=1), activations(N, seed=2)
    sites = {"embed": x, "blocks.0.out": y}
    store = write_model(tmp_path / "a.zarr", sites, order="dataset")
    table = run(store, preset="vit_analysis", no_cache=True)

    def grams(values: Array) -> list[Array]:
        flat = values.astype(np.float32).astype(np.float64).reshape(N, -1)
        parts = [flat[k : k + 8] @ flat[k : k + 8].T for k in range(0, N, 8)]
        return [(k - k.min()) / (k - k.min()).max() for k in parts]

    def total(a: list[Array], b: list[Array]) -> float:
        return sum(_hsic_of_grams(k, m) for k, m in zip(a, b, strict=True))

    k, m = grams(x), grams(y)
    expected = total(k, m) / np.sqrt(total(k, k) * total(m, m))
    assert table["value"][1] == pytest.approx(expected, abs=1e-5)
    assert table.notes["rescaled"]
    bar = plot(table).axes[0].images[0].colorbar
    assert bar is not None
    assert flat(bar.ax.get_ylabel()).startswith("CKA (debiased, rescaled Grams), colours from")


def _hsic_of_grams(k: Array, m: Array) -> float:
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    ones = np.ones(n)
    total = np.trace(k @ m) + (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return float(total - 2 / (n - 2) * ones @ k @ m @ ones) / (n * (n - 3))


def test_choices_that_do_not_go_together(folder: Path) -> None:
    with pytest.raises(VitseeError, match="--batch belongs to --estimator minibatch, not to exact"):
        compare(folder, "vit", estimator="exact", batch=8)
    for sizes in ({"batch": 8}, {"examples": 16}, {"repeats": 2}):
        name = f"--{next(iter(sizes))}"
        with pytest.raises(VitseeError, match=f"{name} belongs to --estimator minibatch: give th"):
            compare(folder, "vit", **sizes)
    for kwargs in ({"estimator": "linear"}, {"preset": "nguyen"}, {"pairs": "diagonal"}):
        with pytest.raises(VitseeError, match=r"^no .*; expected "):
            compare(folder, "vit", **kwargs)


def test_stores_of_other_images(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "vit.zarr", VIT, name="photo")
    stores = [*opened(folder, "cnn"), open_store(tmp_path / "vit.zarr")]
    for kwargs in ({}, {"preset": "walmer"}, {"pairs": "same-depth"}):
        with pytest.raises(StoreMismatch, match="cnn and vit do not pair"):
            run(*stores, no_cache=True, **({"sites": ["stem", "embed"]} | kwargs))  # type: ignore[arg-type]


def test_what_a_store_cannot_give(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="no class token"):
        compare(folder, "cnn", tokens="cls")
    pooled = write_model(tmp_path / "a.zarr", {"embed": activations(N)}, tokens="pooled")
    with pytest.raises(MissingInput, match=r"--tokens embed=all.*--grams"):
        run(pooled, no_cache=True)
    assert run(pooled, tokens="mean", no_cache=True)["value"].tolist() == pytest.approx([1])


def test_gram_matrices_within_slabs_serve_where_activations_are_missing(tmp_path: Path) -> None:
    sites = {"embed": activations(N, seed=1), "blocks.0.out": activations(N, seed=2)}
    store = write_sites(tmp_path / "a.zarr", sites, tokens="pooled", grams=True)
    table = run(store, no_cache=True)
    slabs = [slice(k, k + 8) for k in range(0, N, 8)]

    def total(a: str, b: str) -> float:
        x, y = (sites[name].reshape(N, -1) for name in (a, b))
        return sum(loop_hsic1(x[rows], y[rows]) for rows in slabs)

    both = total("embed", "embed") * total("blocks.0.out", "blocks.0.out")
    expected = total("embed", "blocks.0.out") / np.sqrt(both)
    assert table["value"][1] == pytest.approx(expected, abs=TOLERANCE)
    assert table["spread"].tolist() == [""] * 4
    with pytest.raises(VitseeError, match="exact"):
        run(store, estimator="exact", no_cache=True)


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
    assert texts == ["embedding", "0 norm 1", "0 norm 2", "0", "1 norm 1", "1 norm 2", "1"]
    assert len(axes.lines) == 2 * 2  # around block 0: after embed, before block 1
    assert title(axes) == "all tokens, n = 24"


def test_figure_of_two_stores(folder: Path) -> None:
    axes = plot(compare(folder, "vit", "cnn", tokens="mean")).axes[0]
    assert axes.get_ylabel() == "vit, block"
    assert flat(axes.get_xlabel()) == "cnn, block (layer.block)"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["stem", "1.0", "1.1"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["embedding", "0", "1"]
    assert not axes.lines
    assert flat(title(axes)) == "mean over patches, n = 24"


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
    noisy = compare(
        folder,
        "vit",
        "other",
        pairs="same-depth",
        estimator="minibatch",
        batch=8,
        examples=16,
        repeats=3,
    )
    texts = [text.get_text() for text in plot(noisy).legends[0].get_texts()]
    assert texts[-1] == "std over minibatch repeats (the estimator's noise)"


def test_figures_need_only_the_columns(folder: Path) -> None:
    for kwargs in ({}, {"pairs": "same-depth"}):
        table = compare(folder, "vit", "other", **kwargs)  # type: ignore[arg-type]
        bare = plot(Table(table.columns))
        assert len(bare.axes) == len(plot(table).axes)


def made_table(rows: list[str], cols: list[str], value: Any, **notes: Any) -> Table:
    return Table.from_rows(
        (
            {"store_a": "a", "site_a": a, "depth_a": i, "store_b": "b", "site_b": b, "depth_b": j}
            | {"metric": "cka", "value": value(i, j)}
            | {"std": 0.1, "low": 0.0, "high": 1.0, "spread": "jackknife"}
            | {"n_images": 50}
            for i, a in enumerate(rows)
            for j, b in enumerate(cols)
        ),
        COLUMNS,
        notes,
    )


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 24), (25, 3), (98, 60), (218, 12)])
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


def test_command_prints_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER", 0.0)
    paths: list[str | Path] = [folder / "vit.zarr", f"net={folder / 'cnn.zarr'}"]
    result = cka_command(*paths, "--no-cache")
    assert result.exit_code == 0
    text = io.StringIO()
    vit, cnn = folder / "vit.zarr", folder / "cnn.zarr"
    run(open_store(vit), open_store(cnn, label="net"), no_cache=True).to_csv(text)
    assert result.stdout == text.getvalue()
    assert "Gram matrices" in result.stderr
    assert cka_command(*paths, "--no-cache", "-q").stderr == ""


def test_command_writes_files(folder: Path, tmp_path: Path) -> None:
    csv, png, cache = tmp_path / "r.csv", tmp_path / "r.png", tmp_path / "cache"
    result = cka_command(
        *(folder / "vit.zarr", folder / "cnn.zarr", "-o", csv, "--png", png, "--cache", cache),
        *("--pairs", "same-depth", "--tokens", "mean", "--images", "20"),
    )
    assert (result.exit_code, result.stdout) == (0, "")
    lines = csv.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert len(lines) == 1 + 3
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    parameters = sidecar["parameters"]
    assert (parameters["pairs"], parameters["images"]) == ("same-depth", 20)
    assert "progress" not in parameters
    assert sidecar["notes"]["tokens"] == "mean"
    assert sidecar["notes"]["images"] == 20
    assert sidecar["notes"]["sites_a"]["vit"][0] == "embed"
    assert png.read_bytes()[1:4] == b"PNG"
    assert any(cache.iterdir())


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


def test_command_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    vit, cnn, other = (folder / f"{name}.zarr" for name in ("vit", "cnn", "other"))
    write_model(tmp_path / "photos.zarr", VIT, name="photo")
    (tmp_path / "r.csv").write_text("mine")
    refused: tuple[tuple[tuple[str | Path, ...], str], ...] = (
        ((vit, "-o", tmp_path / "r.csv"), "--force"),
        ((tmp_path / "missing.zarr",), "missing.zarr"),
        ((vit, tmp_path / "photos.zarr"), "do not pair"),
        ((vit, "--sites", "blocks.9.out"), "no site matches 'blocks.9.out'"),
        ((cnn, "--tokens", "cls"), "no class token"),
        ((vit, cnn, other), "--sites pooled, --sites blocks.-1.out"),
        ((vit, cnn, "--pairs", "same-depth", "--sites-a", "norms"), "4 sites of vit against 3"),
        ((vit, "--preset", "vit_analysis"), "--order dataset"),
        ((vit, "--estimator", "exact", "--repeats", "3"), "--estimator minibatch"),
        ((vit, "--images", "3"), "at least 4"),
        ((vit, "--preset", "raghu", "--estimator", "exact"), "excludes it; leave one of them out"),
    )
    for args, phrase in refused:
        new: tuple[str | Path, ...] = ("-o", tmp_path / "new.csv", "--no-cache")
        output = () if "-o" in args else new
        result = cka_command(*args, *output)
        assert (result.exit_code, result.stdout) == (1, ""), args
        assert phrase in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
    assert (tmp_path / "r.csv").read_text() == "mine"
    assert not (tmp_path / "new.csv").exists()
    for args in (
        (vit, "--tokens", "each"),
        (vit, "--batch", "2"),
        (vit, "--cache", "x", "--no-cache"),
    ):
        assert cka_command(*args).exit_code == 2
