"""vitsee cka-heads: groups of heads against concatenated features, and what a user sees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.features import activations, cnn_sites
from tests.reference_cka import loop_cka, loop_hsic0, loop_jackknife
from tests.stores import CNN, write_model
from vitsee_cli.main import main
from vitsee_core.analyses.cka_heads import COLUMNS, over_groups, plot, run
from vitsee_core.figures.plotting import figure_bytes
from vitsee_core.similarity import Hsic
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError

Array = NDArray[Any]
N, HEADS, WIDTH = 24, 6, 2
OUTPUTS = activations(N, HEADS * WIDTH, 7)  # of all heads, side by side
# Mean distances of the heads, in px: the most local first is 3 0 5 1 4 2.
MEANS = (20.0, 40.0, 60.0, 10.0, 50.0, 30.0)
ORDER = (3, 0, 5, 1, 4, 2)
TOLERANCE = 1e-6  # float32 Gram matrices
CNN_SITES = cnn_sites(N, CNN)


def distances(n: int = N) -> Array:
    """(n, blocks, heads): in block 0 they vary about `MEANS`, in block 1 in reverse."""
    wobble = np.linspace(-4, 4, n)[:, np.newaxis]
    return np.stack([np.array(MEANS) + wobble, np.array(MEANS)[::-1] + wobble], axis=1)


def vit(path: Path, **kwargs: Any) -> Store:
    sites = {
        "embed": activations(N, 4, 1),
        "blocks.0.attn.heads": OUTPUTS,
        "blocks.0.out": activations(N, 4, 2),
        "blocks.1.attn.heads": activations(N, HEADS * WIDTH, 8),
        "blocks.1.out": activations(N, 4, 3),
    }
    left = kwargs.pop("without", ())
    defaults: dict[str, Any] = {"distances": distances()}
    kept = {name: values for name, values in sites.items() if name not in left}
    return write_model(path, kept, **defaults | kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores that tests only read: vit and cnn."""
    path = tmp_path_factory.mktemp("heads")
    vit(path / "vit.zarr")
    write_model(path / "cnn.zarr", CNN_SITES, layout=CNN)
    return path


def stores(folder: Path) -> tuple[Store, Store]:
    return open_store(folder / "vit.zarr"), open_store(folder / "cnn.zarr")


def compare(folder: Path, **kwargs: Any) -> Table:
    return run(*stores(folder), no_cache=True, **kwargs)


def outputs_of(heads: str) -> Array:
    """What those heads say, concatenated."""
    return np.concatenate(
        [OUTPUTS[..., h * WIDTH : (h + 1) * WIDTH] for h in map(int, heads.split())],
        axis=-1,
    )


def site(name: str) -> Array:
    value = CNN_SITES[name]
    return CNN_SITES[value] if isinstance(value, str) else value  # type: ignore[return-value]


# ---------------------------------------------------------------- numbers


def test_groups_are_concatenated_features(folder: Path) -> None:
    table = compare(folder)  # windows of a third of the heads
    assert tuple(table.written.columns) == COLUMNS
    groups = [" ".join(map(str, ORDER[k : k + 2])) for k in range(5)]
    lower = ["stem", "layer1.0.out"]  # relative depths 0 and 1/2
    assert table["heads"].tolist() == [group for group in groups for _ in lower]
    assert table["site_b"].tolist() == lower * 5
    assert table["distance_px"][::2] == pytest.approx([15, 25, 35, 45, 55], rel=1e-6)
    for k in range(len(table)):
        expected = loop_cka(outputs_of(table["heads"][k]), site(table["site_b"][k]))
        assert table["value"][k] == pytest.approx(expected, abs=TOLERANCE)
    first = {name: table[name][0] for name in ("store_a", "site_a", "depth_a", "store_b")}
    assert first == {
        "store_a": "vit",
        "site_a": "blocks.0.attn.heads",
        "depth_a": 0,
        "store_b": "cnn",
    }
    assert set(table["n_images"].tolist()) == {N}


def test_cumulative_groups_end_with_all_heads(folder: Path) -> None:
    table = compare(folder, cumulative=True, sites_b=["layer1.1.out"])
    assert table["heads"].tolist() == [
        " ".join(map(str, ORDER[: k + 1])) for k in range(HEADS)
    ]
    assert table["distance_px"] == pytest.approx([10, 15, 20, 25, 30, 35], rel=1e-6)
    # all heads are the whole site, in whatever order
    assert table["value"][-1] == pytest.approx(
        loop_cka(OUTPUTS, site("layer1.1.out")), abs=TOLERANCE
    )
    assert table["value"][0] == pytest.approx(
        loop_cka(outputs_of("3"), site("layer1.1.out")), abs=TOLERANCE
    )


@pytest.mark.slow
def test_the_interval_is_that_of_the_group(tmp_path: Path) -> None:
    n = 40
    outputs, other = activations(n, 4, 1)[:, :1], activations(n, 3, 2)[:, :1]
    tokens = np.repeat(outputs, 7, axis=1)
    a = write_model(
        tmp_path / "a.zarr",
        {"blocks.0.attn.heads": tokens},
        distances=np.broadcast_to([1.0, 2.0], (n, 1, 2)),
    )
    b = write_model(tmp_path / "b.zarr", {"logits": other[:, 0]})
    table = run(a, b, sites_b=["logits"], window=2, no_cache=True)
    blocks = [np.array([i, i + 1]) for i in range(0, n, 2)]
    expected = loop_jackknife(outputs[:, 0], other[:, 0], blocks)
    assert table["spread"].tolist() == ["jackknife"]
    assert table["std"][0] == pytest.approx(expected, abs=1e-5)
    assert table["low"][0] < table["value"][0] < table["high"][0]


@pytest.mark.slow
def test_biased_and_minibatch_groups(folder: Path) -> None:
    biased = compare(folder, window=3, estimator="biased", sites_b=["stem"])
    expected = loop_cka(outputs_of(biased["heads"][0]), site("stem"), loop_hsic0)
    assert biased["value"][0] == pytest.approx(expected, abs=TOLERANCE)
    noisy = compare(
        folder, window=3, estimator="minibatch", batch=8, examples=16, repeats=4
    )
    assert set(noisy["spread"].tolist()) == {"repeats"}
    assert np.isfinite(noisy["std"]).all()
    # one batch of everything is the exact value
    once = compare(
        folder, window=3, estimator="minibatch", batch=N, examples=N, repeats=1
    )
    assert once["value"] == pytest.approx(
        compare(folder, window=3)["value"], abs=TOLERANCE
    )


def test_group_algebra_by_hand() -> None:
    # two heads and one site; HSIC between the heads 1, of each with itself 4 and 9
    heads_and_site = np.array([[4.0, 1.0, 2.0], [1.0, 9.0, 3.0]])
    h = Hsic(heads_and_site, np.array([4.0, 9.0]), np.array([4.0, 9.0, 5.0]))
    members = np.array([[1.0, 0.0], [1.0, 1.0]])
    found = over_groups(h, members)
    assert found.cross.tolist() == [[2.0], [5.0]]
    assert found.rows.tolist() == [4.0, 4 + 9 + 2 * 1]
    assert found.cols.tolist() == [5.0]
    cross, rows, cols = (np.stack([v, 2 * v]) for v in (h.cross, h.rows, h.cols))
    stacked = Hsic(cross, rows, cols)
    twice = over_groups(stacked, members)
    assert twice.cross.tolist() == [[[2.0], [5.0]], [[4.0], [10.0]]]
    assert twice.rows.tolist() == [[4.0, 15.0], [8.0, 30.0]]


def test_both_count_the_images_of_both_stores(tmp_path: Path) -> None:
    skewed = distances()
    skewed[5, 0, 3] = 1e4  # the most local head, in an image that only vit can read
    a = vit(tmp_path / "vit.zarr", distances=skewed, valid=[i != 9 for i in range(N)])
    b = write_model(
        tmp_path / "cnn.zarr", CNN_SITES, layout=CNN, valid=[i != 5 for i in range(N)]
    )
    table = run(a, b, window=1, no_cache=True)
    keep = [i for i in range(N) if i not in (5, 9)]
    assert table["heads"][0] == "3"
    assert table["distance_px"][0] == pytest.approx(
        distances()[keep, 0, 3].mean(), rel=1e-6
    )
    expected = loop_cka(outputs_of("3")[keep], site("stem")[keep])
    assert table["value"][0] == pytest.approx(expected, abs=TOLERANCE)
    assert set(table["n_images"].tolist()) == {N - 2}


@pytest.mark.slow
def test_heads_without_spatial_mass_come_last(tmp_path: Path, folder: Path) -> None:
    blind = distances()
    blind[:, 0, 3] = np.nan
    a = vit(tmp_path / "vit.zarr", distances=blind)
    table = run(a, stores(folder)[1], window=1, sites_b=["stem"], no_cache=True)
    assert table["heads"].tolist() == ["0", "5", "1", "4", "2", "3"]
    assert math.isnan(table["distance_px"][-1])
    assert np.isfinite(table["value"]).all()
    figure_bytes(plot(table))


def test_another_block(folder: Path) -> None:
    table = compare(folder, block="blocks.-1", window=6)
    assert table["site_a"].tolist() == ["blocks.1.attn.heads"] * 2
    assert table["heads"][0] == " ".join(str(5 - h) for h in ORDER)


# ---------------------------------------------------------------- refusals


def test_missing_inputs_name_the_options_of_extract(folder: Path, tmp_path: Path) -> None:
    a, b = stores(folder)
    bare = vit(tmp_path / "bare.zarr", without=("blocks.0.attn.heads",))
    wanted = r"extract MODEL --sites blocks --sites blocks\.0\.attn\.heads"
    with pytest.raises(MissingInput, match=wanted):
        run(bare, b)
    with pytest.raises(MissingInput, match=wanted):
        run(vit(tmp_path / "pooled.zarr", tokens="pooled"), b)
    blind = vit(tmp_path / "blind.zarr", distances=None)
    with pytest.raises(MissingInput, match="--attention summary"):
        run(blind, b)
    with pytest.raises(MissingInput, match="--attention summary"):
        run(b, a)


def test_wrong_choices(folder: Path, tmp_path: Path) -> None:
    a, b = stores(folder)
    with pytest.raises(VitseeError, match="expected two stores, got 1"):
        run(a)
    choices: list[tuple[dict[str, Any], str]] = [
        ({"window": 2, "cumulative": True}, "exclude each other"),
        ({"block": "blocks.*"}, "chooses 2 blocks"),
        ({"block": "blocks.7"}, r"no site matches 'blocks\.7'"),
        ({"sites_b": ["layer9"]}, "no site matches 'layer9'"),
    ]
    for choice, line in choices:
        with pytest.raises(VitseeError, match=line):
            compare(folder, **choice)
    photos = write_model(tmp_path / "photos.zarr", CNN_SITES, layout=CNN, name="photo")
    with pytest.raises(StoreMismatch, match="vit and photos do not pair"):
        run(a, photos)
    odd = vit(tmp_path / "odd.zarr", distances=distances()[:, :, :5])
    with pytest.raises(VitseeError, match="12 channels for 5 heads"):
        run(odd, b)


# ---------------------------------------------------------------- notes, figure, command


def test_notes(folder: Path) -> None:
    notes = compare(folder, window=2, preset="raghu", batch=8).notes
    assert notes["groups"] == "windows of 2 heads"
    assert notes["head_distances_px"] == pytest.approx(list(MEANS), rel=1e-6)
    assert notes["batch"] == 8
    assert "Raghu" in notes["preset"]
    assert json.loads(json.dumps(notes)) == notes
    assert (
        compare(folder, cumulative=True)
        .notes["groups"]
        .startswith("the most local heads")
    )


@pytest.mark.slow
def test_figure(folder: Path) -> None:
    table = compare(folder, window=2)
    figure = plot(table)
    axes = figure.axes[0]
    curves = [
        line for line in axes.lines if line.get_linestyle() == "-"
    ]  # beside error bars' caps
    assert len(curves) == 2
    assert (
        np.asarray(curves[0].get_xdata()).tolist() == table["distance_px"][::2].tolist()
    )
    assert np.asarray(curves[1].get_ydata()).tolist() == table["value"][1::2].tolist()
    assert axes.get_title(loc="left").startswith("windows of 2 heads, n = ")
    assert "(px)" in axes.get_xlabel() and "vit, block 0" in axes.get_xlabel()
    assert axes.get_ylabel() == "CKA (debiased)"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["cnn, stem", "cnn, layer1.0"]
    figure_bytes(figure)
    plot(Table(table.frame))
    noisy = plot(
        compare(folder, window=2, estimator="minibatch", batch=8, examples=16, repeats=3)
    )
    assert "std over minibatch repeats" in noisy.axes[0].get_title(loc="left")


def test_many_sites_have_a_short_legend(folder: Path) -> None:
    row = compare(folder, window=6, sites_b=["stem"])
    sites = pl.Series([f"layer1.{i}.out" for i in range(57)])
    figure = plot(Table(pl.concat([row.frame] * 57).with_columns(site_b=sites)))
    assert len(figure.axes[0].lines) == 57
    assert len(figure.legends[0].get_texts()) <= 10


def test_command_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    a, b = folder / "vit.zarr", folder / "cnn.zarr"
    args = ["cka-heads", str(a), str(b), "-o", str(tmp_path / "r.csv"), "--no-cache"]
    result = CliRunner().invoke(main, [*args, "--window", "9"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "vitsee cka-heads: --window is 9; the block has 6 heads\n"
    assert not any(tmp_path.glob("r.csv*"))
    assert CliRunner().invoke(main, [*args, "--preset", "walmer"]).exit_code == 2
