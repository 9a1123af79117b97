"""First-layer filters and position embeddings: numbers against hand and loops, and what a user
sees."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.extractions import extracted, plant_images
from tests.models_helpers import VIT, small
from tests.tables import equal
from vitsee_cli.main import main
from vitsee_core.analyses import weights
from vitsee_core.analyses.weights import COLUMNS, cosines, plot, principal_components, run
from vitsee_core.analyses.weights.weights_figure import SCALES, colours, labels, percent
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.weights import (
    InputWeights,
    input_weights_of,
    stored_input_weights,
)
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

Array = NDArray[Any]


def loop_variance(filters: Array, direction: Array) -> float:
    """Of the filters along a direction, by loops."""
    mean = [
        math.fsum(f[j] for f in filters) / len(filters) for j in range(filters.shape[1])
    ]
    total = 0.0
    for f in filters:
        total += math.fsum((f[j] - mean[j]) * direction[j] for j in range(len(mean))) ** 2
    return total


def loop_cosine(a: Array, b: Array) -> float:
    na, nb = (math.sqrt(math.fsum(x * x for x in v)) for v in (a, b))
    return (
        math.fsum(x * y for x, y in zip(a, b, strict=True)) / (na * nb)
        if na and nb
        else math.nan
    )


@pytest.fixture(scope="module")
def vit() -> LoadedModel:
    return small("vit_tiny_patch16_224", (24, 32), **VIT)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, vit: LoadedModel) -> Any:
    """`made(filters, positions, **more)`: a table of weights made by hand."""

    def make(filters: Any = None, positions: Any = None, **more: Any) -> Table:
        given = {"filters": filters, "positions": positions}
        own = InputWeights(
            store="",
            model="tiny",
            weights="random 0",
            arrays={
                k: np.asarray(v, np.float32) for k, v in given.items() if v is not None
            },
            sites={"filters": "conv", "positions": "pos_embed"},
            kind="learned",
            absent={k: "for a reason" for k, v in given.items() if v is None},
        )
        monkeypatch.setattr(weights, "input_weights_of", lambda _: own)
        return run(vit, **more)

    return make


# ---------------------------------------------------------------- components


def test_components_by_hand() -> None:
    # Two directions with sums of squares 2 * 3^2 = 18 and 2 * 1^2 = 2 about a mean that is not 0.
    mean = np.array([[[[5.0, 7.0]], [[-1.0, 2.0]], [[0.0, 0.0]]]])
    first = np.zeros((1, 3, 1, 2))
    first[0, 1, 0, 1] = -3
    second = np.zeros((1, 3, 1, 2))
    second[0, 2] = [[-0.6, 0.8]]
    filters = np.concatenate([mean + first, mean - first, mean + second, mean - second])
    shares, vectors = principal_components(filters)
    assert shares == pytest.approx([0.9, 0.1, 0.0], abs=1e-15)
    # norm 1, the largest weight positive whatever the sign that made it
    assert vectors[0] == pytest.approx(-first[0] / 3, abs=1e-12)
    assert vectors[1] == pytest.approx(second[0], abs=1e-12)


@pytest.mark.parametrize(
    "shape", [(9, 3, 2, 2), (5, 3, 2, 3), (40, 3, 2, 2), (6, 1, 3, 3)]
)
def test_components_against_eigenvectors_and_loops(shape: tuple[int, ...]) -> None:
    filters = np.random.default_rng(0).normal(1.0, 1.0, shape)
    shares, vectors = principal_components(filters)
    flat, directions = (
        filters.reshape(len(filters), -1),
        vectors.reshape(len(vectors), -1),
    )
    n = min(len(filters) - 1, flat.shape[1])
    assert len(shares) == len(vectors) == n
    values, eigenvectors = np.linalg.eigh(np.cov(flat.T))
    values, eigenvectors = values[::-1], eigenvectors.T[::-1]
    assert np.allclose(shares, (values / values.sum())[:n], rtol=1e-10, atol=1e-14)
    total = sum(loop_variance(flat, axis) for axis in np.eye(flat.shape[1]))
    for k in range(n):
        assert shares[k] == pytest.approx(
            loop_variance(flat, directions[k]) / total, rel=1e-10
        )
        # eigenvectors are equal up to sign; gaps of random spectra cost digits
        assert abs(directions[k] @ eigenvectors[k]) == pytest.approx(1, abs=1e-8)
        assert directions[k].max() == np.abs(directions[k]).max()
    assert np.allclose(directions @ directions.T, np.eye(n), atol=1e-12)
    assert shares.sum() == pytest.approx(1, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-4, -1.0, 30.0]))
def test_shift_scale_and_order_of_filters_do_not_matter(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    filters = rng.normal(size=(7, 3, 2, 2)) * np.arange(1, 8).reshape(7, 1, 1, 1)
    shares, vectors = principal_components(filters)
    moved = scale * filters[rng.permutation(7)] + rng.normal(size=(3, 2, 2))
    other_shares, other_vectors = principal_components(moved)
    assert np.allclose(other_shares, shares, rtol=1e-8)
    first = (vectors[0].ravel() @ other_vectors[0].ravel(), shares[0] - shares[1])
    assert first[0] == pytest.approx(1, abs=1e-6) or first[1] < 1e-3


def test_a_tie_in_the_largest_weight_goes_to_the_first() -> None:
    edge = np.array([[[[-0.5, 0.5 + 1e-9], [-0.5, 0.5]]]])
    _, vectors = principal_components(np.concatenate([edge, -edge, 2 * edge]))
    assert np.sign(vectors[0]).ravel().tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_filters_that_are_all_alike(made: Any, value: float) -> None:
    table = made(np.full((5, 3, 2, 2), value))
    assert np.isnan(table.filter(metric="variance_share")["value"]).all()
    assert np.isnan(table.filter(metric="component")["value"]).all()
    plot(table)
    assert math.isnan(principal_components(np.ones((1, 3, 2, 2)))[0][0])


# ---------------------------------------------------------------- cosines


def test_cosines_by_hand() -> None:
    positions = np.zeros((1, 4, 2), np.float32)
    positions[0, :3] = [[2, 0], [0, 3], [-1, 1]]  # and a vector of zeros
    queries, values = cosines(positions)
    assert queries.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    root = math.sqrt(0.5)
    expected = [[1, 0, -root], [0, 1, root], [-root, root, 1]]
    assert np.allclose(values[:3, 0, :3], expected, rtol=1e-15, atol=1e-15)
    assert np.isnan(values[3]).all()
    assert np.isnan(values[:, 0, 3]).all()


@pytest.mark.parametrize(
    ("step", "rows", "cols"), [(1, 5, 7), (2, 5, 7), (3, 5, 7), (9, 5, 7)]
)
def test_cosines_against_loops(made: Any, step: int, rows: int, cols: int) -> None:
    positions = (
        np.random.default_rng(1).normal(0.3, 1, (rows, cols, 6)).astype(np.float32)
    )
    wide = positions.astype(np.float64)
    table = made(None, positions, what=("positions",), query_stride=step)
    down, across = (list(range((n - 1) % step // 2, n, step)) for n in (rows, cols))
    assert len(table) == len(down) * len(across) * rows * cols
    i = 0
    for r in down:
        for c in across:
            for y in range(rows):
                for x in range(cols):
                    place = [
                        table[k][i] for k in ("row", "col", "other_row", "other_col")
                    ]
                    assert place == [r, c, y, x]
                    expected = loop_cosine(wide[r, c], wide[y, x])
                    assert table["value"][i] == pytest.approx(expected, abs=1e-14)
                    i += 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_lengths_and_rotations_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions = rng.normal(size=(3, 4, 5))
    _, values = cosines(positions)
    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    _, other = cosines(positions @ rotation * rng.uniform(0.1, 9, (3, 4, 1)))
    assert np.allclose(other, values, atol=1e-12)
    square = values.reshape(12, 12)
    assert np.allclose(square, square.T, atol=1e-15)
    assert np.allclose(np.diag(square), 1, atol=1e-15)
    assert np.abs(square).max() <= 1


def test_an_embedding_of_waves_looks_alike_from_everywhere() -> None:
    waves = np.arange(1, 5) / 3
    y, x = np.indices((4, 6))
    parts = [
        f(np.multiply.outer(axis, waves)) for axis in (y, x) for f in (np.sin, np.cos)
    ]
    _, values = cosines(np.concatenate(parts, -1))
    maps = values.reshape(4, 6, 4, 6)
    assert np.allclose(maps[1, 2, 1:, 2:], maps[0, 0, :3, :4], atol=1e-12)


def test_large_grids_are_thinned_and_that_is_said(
    made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_ROWS", 1000)
    positions = np.random.default_rng(0).normal(size=(8, 8, 3))
    with caplog.at_level("INFO", logger="vitsee_core"):
        table = made(None, positions)
    # every third: 3 x 3 queries of 64; every second: 4 x 4 queries, 1024 rows
    assert len(table) == 9 * 64
    assert table.notes["sources"]["tiny"]["positions"] == {"kind": "learned", "every": 3}
    assert "one row and column in 3" in caplog.text
    monkeypatch.setattr(weights, "MAX_ROWS", 1)
    assert len(made(None, positions)) == 64


# ---------------------------------------------------------------- the table


def test_the_table(vit: LoadedModel) -> None:
    table = run(vit)
    assert tuple(table.written.columns) == COLUMNS
    shown = ["variance_share", "variance_cumulative", "component", "filter", "cosine"]
    assert [*dict.fromkeys(table["metric"])] == shown
    assert [*dict.fromkeys(table["store"])] == [""]
    assert [*dict.fromkeys(table["model"])] == ["vit_tiny_patch16_224"]
    shares = table.filter(metric="variance_share")
    assert shares["component"].tolist() == list(range(47))
    sums = table.filter(metric="variance_cumulative")["value"]
    assert np.allclose(sums, np.cumsum(shares["value"]), rtol=1e-15)
    assert sums[-1] == pytest.approx(1)
    filters = vit.module.get_parameter("patch_embed.proj.weight").numpy()
    expected, vectors = principal_components(filters)
    assert shares["value"].tolist() == expected.tolist()
    assert np.array_equal(table.filter(metric="component")["value"], vectors[:28].ravel())
    of_filters = table.filter(metric="filter")
    assert np.array_equal(of_filters["value"], filters.ravel())
    one = {"filter": 5, "channel": 2, "row": 3, "col": 7}
    assert of_filters.filter(**one)["value"].tolist() == [filters[5, 2, 3, 7]]
    pos = vit.module.get_parameter("pos_embed")[0, 1:].reshape(3, 4, -1).numpy()
    assert np.allclose(
        table.filter(metric="cosine")["value"], cosines(pos)[1].ravel(), atol=1e-6
    )
    assert [*dict.fromkeys(table.filter(metric="cosine")["site"])] == ["pos_embed"]


def test_the_csv_has_whole_numbers_and_empty_cells(made: Any) -> None:
    text = io.StringIO()
    made(np.random.default_rng(0).normal(size=(3, 1, 1, 2)), np.eye(2)[None]).to_csv(text)
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert {name: rows[0][name] for name in COLUMNS if rows[0][name]}.keys() == {
        *("model", "weights", "site", "metric", "component", "value")
    }
    last = [value for value in rows[-1].values() if value]
    assert last == ["tiny", "random 0", "pos_embed", "0", "1", "0", "1", "cosine", "1.0"]


def test_what_is_shown(made: Any) -> None:
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=(4, 3, 2, 2)), rng.normal(size=(129, 3, 2, 2))
    positions = rng.normal(size=(2, 2, 3))
    assert "filter" in made(few, positions)["metric"]
    assert "filter" not in made(many, positions)["metric"]
    assert [*dict.fromkeys(made(many, positions, what=("filters",))["metric"])] == [
        "filter"
    ]
    assert [*dict.fromkeys(made(few, positions, what=("positions",))["metric"])] == [
        "cosine"
    ]
    table = made(many, positions, what=("components",), components=2)
    assert len(table.filter(metric="component")) == 2 * 12
    assert len(table.filter(metric="variance_share")) == 12
    with pytest.raises(VitseeError, match="tiny has no positions to show: for a reason"):
        made(few, None, what=("positions",))
    with pytest.raises(VitseeError, match="tiny has no components to show: for a reason"):
        made(None, positions, what=("components",))
    with pytest.raises(VitseeError, match="no 'pos' in weights"):
        made(few, positions, what=("pos",))
    table = made(few, None)
    assert table.notes["sources"]["tiny"]["absent"] == {"positions": "for a reason"}
    assert len(made(None, None)) == 0


# ---------------------------------------------------------------- figure


def test_colours() -> None:
    values = np.zeros((2, 3, 1, 2))
    values[0, :, 0, 0] = [1.0, -2.0, 0.5]
    values[1, :, 0, 1] = [0.2, 0.2, 0.0]
    shared, largest = colours(values, "shared")
    assert largest == 2
    assert shared[0, 0, 0].tolist() == [0.75, 0.0, 0.625]
    assert shared[1, 0, 1] == pytest.approx([0.55, 0.55, 0.5])
    assert shared[0, 0, 1].tolist() == [0.5] * 3
    tile, _ = colours(values, "tile")
    assert tile[0, 0, 0] == pytest.approx([1.0, 0.0, 2.5 / 3])
    assert tile[1, 0, 1].tolist() == [1.0, 1.0, 0.0]
    for scale in SCALES:
        flat, _ = colours(values * 0, scale)
        assert (flat == 0.5).all()
        one, _ = colours(np.array([[[[1.0, -1.0]]]]), scale)
        assert one[0, 0].tolist() == [[1.0] * 3, [0.0] * 3]


def test_percent() -> None:
    values = [percent(x) for x in (0.114, 0.05, 0.0099, 0.0003, 4e-5, 0.0)]
    assert values == ["11.4 %", "5.0 %", "0.99 %", "0.03 %", "0.00 %", "0.00 %"]


def texts(table: Table, scale: str = "shared") -> str:
    figure = plot(table, scale)
    parts = [figure, *figure.subfigs]
    found = [part.get_suptitle().replace("\n", " ") for part in parts]
    found += [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes]
    all_axes = [a for axes in figure.axes for a in (axes, *axes.child_axes)]
    found += [(a.get_xlabel() + a.get_ylabel()).replace("\n", " ") for a in all_axes]
    return "\n".join(found)


@pytest.mark.slow
def test_panels(made: Any) -> None:
    rng = np.random.default_rng(0)
    filters, positions = rng.normal(size=(6, 3, 2, 2)), rng.normal(size=(2, 5, 3))
    table = made(filters, positions)
    figure = plot(table)
    assert len([a for a in figure.axes if a.images]) == 3
    tiles = figure.axes[0].images
    assert len(tiles) == 5  # of 6 filters
    _, vectors = principal_components(filters)
    drawn = np.asarray(tiles[1].get_array())
    assert np.allclose(drawn, colours(vectors, "shared")[0][1], atol=1e-12)
    said = texts(table)
    assert "(conv; 5 of 5, share of variance)" in said
    assert "6 filters of 2 x 2 px" in said
    assert "grey: 0, full colour: a weight of ±" in said
    assert "(pos_embed; learned)" in said
    assert "cosine similarity" in said
    assert "each tile over its own range" in texts(table, "tile")
    assert "positions: n/a: for a reason" in texts(made(filters, None))
    assert "mean of 4 channels" in texts(made(rng.normal(size=(5, 4, 2, 2)), None))
    plot(made(None, None))


def test_the_figure_comes_back_from_the_csv(made: Any) -> None:
    rng = np.random.default_rng(0)
    table = made(rng.normal(size=(6, 3, 2, 2)), rng.normal(size=(2, 3, 3)))
    text = io.StringIO()
    table.to_csv(text)
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    kinds = {
        "store": str,
        "model": str,
        "weights": str,
        "site": str,
        "metric": str,
        "value": float,
    }
    back = Table.from_rows(
        [{k: kinds.get(k, int)(v) for k, v in row.items() if v}
         for row in rows],
        COLUMNS,
    )  # fmt: skip
    for a, b in zip(plot(table).axes, plot(back).axes, strict=True):
        for one, other in zip(a.images, b.images, strict=True):
            first, second = (np.asarray(image.get_array()) for image in (one, other))
            assert np.array_equal(first, second, equal_nan=True)


@pytest.mark.slow
def test_a_large_grid_shows_some_patches(made: Any) -> None:
    positions = np.random.default_rng(0).normal(size=(20, 20, 3))
    table = made(None, positions)
    assert len(table) == 20**4
    said = texts(table)
    assert "100 of 400 patches" in said
    figure = plot(table)
    picture = figure.axes[0].images[0].get_array()
    assert picture is not None
    # tiles of 20 cells and gaps of 2; the second tile is the query (0, 2)
    expected = table.filter(row=0, col=2)["value"].reshape(20, 20)
    assert np.array_equal(np.asarray(picture)[:20, 22:42], expected)


# ---------------------------------------------------------------- stores


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of a ViT (`vit.zarr`) and of a ResNet (`cnn.zarr`), images beside them."""
    folder = tmp_path_factory.mktemp("weights")
    images = plant_images(folder / "images", 4)
    vit = [
        "test_vit",
        "--random-init",
        "0",
        "--img-size",
        "32x48",
        "--model-arg",
        "patch_size=8",
    ]
    cnn = ["test_resnet", "--random-init", "0", "--img-size", "64"]
    for name, model in (("vit", vit), ("cnn", cnn)):
        common = ["--data", images, "--tokens", "pooled", "--workers", "0"]
        extracted(*model, *common, "-o", folder / f"{name}.zarr")
    return folder


@pytest.mark.slow
def test_a_store_holds_them(stores: Path) -> None:
    model = load_model(
        "test_vit", random_init=0, img_size=(32, 48), model_args={"patch_size": 8}
    )
    store = open_store(stores / "vit.zarr")
    assert store.array("weights/filters").shape == (64, 3, 8, 8)
    assert store.array("weights/positions").shape == (4, 6, 64)
    table = run(store)
    table = run(store)
    assert equal(table, run(model), "store")
    mine, stored = input_weights_of(model), stored_input_weights(store)
    assert mine.record() == stored.record() and mine.arrays.keys() == stored.arrays.keys()
    for name, values in mine.arrays.items():
        assert np.array_equal(values, stored.arrays[name])
    assert replace(mine, arrays={}) == replace(stored, arrays={}, store="")
    cnn = open_store(stores / "cnn.zarr")
    assert [name for name, _ in cnn.plan.weights][:1] == ["filters"]
    assert not cnn.has("weights/positions")
    (notes,) = run(cnn).notes["sources"].values()
    (own,) = run(load_model("test_resnet", random_init=0)).notes["sources"].values()
    assert notes["absent"] == own["absent"] != {}
    with pytest.raises(VitseeError, match="no position embedding is added"):
        run(cnn, what=["positions"])


# ---------------------------------------------------------------- the command


def weights_command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["weights", *map(str, args)])


@pytest.mark.slow
def test_command_of_a_store(stores: Path, tmp_path: Path) -> None:
    csv_file, png = tmp_path / "w.csv", tmp_path / "w.png"
    result = weights_command(f"mine={stores / 'vit.zarr'}", "-o", csv_file, "--png", png)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "position embeddings (pos_embed): learned" in result.stderr
    lines = csv_file.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert lines[1].startswith(
        "mine,test_vit,random 0,patch_embed.proj,,,0,,,,,variance_share,"
    )
    sidecar = json.loads((tmp_path / "w.csv.json").read_text())
    assert sidecar["stores"][0]["label"] == "mine"
    notes = sidecar["notes"]["sources"]["mine"]
    assert notes["sites"]["positions"] == "pos_embed"
    assert "mean filter subtracted" in notes["components"]
    assert png.read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_command_of_a_model(tmp_path: Path) -> None:
    args = [
        "test_vit",
        "--random-init",
        "3",
        "--img-size",
        "32x48",
        "--model-arg",
        "patch_size=8",
    ]
    result = weights_command(*args, "--what", "positions")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1 + 24**2
    model = load_model(
        "test_vit", random_init=3, img_size=(32, 48), model_args={"patch_size": 8}
    )
    torch.save(model.module.state_dict(), tmp_path / "w.pth")
    args[1:3] = ["--checkpoint", str(tmp_path / "w.pth")]
    again = weights_command(*args, "--what", "positions").stdout
    assert again == result.stdout.replace(",random 3,", ",w.pth,")
    square = load_model(
        "test_vit", random_init=3, img_size=32, model_args={"patch_size": 8}
    )
    torch.save(square.module.state_dict(), tmp_path / "w.pth")
    args[args.index("32x48")] = "64"
    result = weights_command(*args, "--what", "positions")
    assert "w.pth: resampled: pos_embed (1, 17, 64) to (1, 65, 64)" in result.stderr
    out = tmp_path / "r.csv"
    result = weights_command(
        "test_resnet", "--random-init", "0", "-o", out, "--scale", "tile"
    )
    assert result.exit_code == 0
    assert (
        "positions: n/a: no position embedding is added to its features" in result.stderr
    )
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["parameters"]["models"][0]["random_init"] == 0


@pytest.mark.slow
def test_several_stores_and_models(stores: Path, tmp_path: Path) -> None:
    vit, cnn = stores / "vit.zarr", stores / "cnn.zarr"
    own = ["--random-init", "0", "--img-size", "64"]
    wanted: list[str | Path] = [f"a={vit}", "test_resnet", cnn, *own]
    png = tmp_path / "w.png"
    result = weights_command(*wanted, "-o", tmp_path / "w.csv", "--png", png)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert "a: position embeddings (pos_embed): learned" in result.stderr
    assert "cnn: positions: n/a: no position embedding is added" in result.stderr
    table = Table.read(tmp_path / "w.csv")
    assert labels(table) == ["a", "test_resnet", "cnn"]
    sidecar = json.loads((tmp_path / "w.csv.json").read_text())
    assert list(sidecar["notes"]["sources"]) == ["a", "test_resnet", "cnn"]
    # Each as it is alone, the random model as the store that was made with the same seed.
    alone = {name: run(open_store(stores / f"{name}.zarr")) for name in ("vit", "cnn")}
    both = run(*(open_store(stores / f"{name}.zarr") for name in ("vit", "cnn")))
    for name, single in alone.items():
        assert equal(both.filter(store=name), single)
    assert len(table.filter(store="cnn")) == len(table.filter(model="test_resnet")) // 2
    with Image.open(png) as picture:
        height = picture.size[1]
    weights_command(vit, "--png", tmp_path / "one.png", "-o", tmp_path / "one.csv")
    with Image.open(tmp_path / "one.png") as picture:
        assert height > 2 * picture.size[1]


def test_what_some_lack_is_a_remark(stores: Path) -> None:
    vit, cnn = stores / "vit.zarr", stores / "cnn.zarr"
    result = weights_command(vit, cnn, "--what", "positions")
    assert result.exit_code == 0
    assert "cnn: positions: n/a: no position embedding is added" in result.stderr
    assert {line.split(",")[0] for line in result.stdout.splitlines()[1:]} == {"vit"}
    result = weights_command(cnn, f"again={cnn}", "--what", "positions")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no positions to show" in result.stderr
    result = weights_command(vit, vit)
    assert (
        result.exit_code == 1 and "two of these have one name: vit, vit" in result.stderr
    )
    twice = ["test_vit", "test_resnet", "--checkpoint", "w.pth"]
    result = weights_command(*twice)
    assert (
        result.exit_code == 2
        and "--checkpoint is for one MODEL; here are 2" in result.stderr
    )


def test_command_refuses_in_one_line(stores: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.csv"
    taken.write_text("mine")
    vit = stores / "vit.zarr"
    wrong: tuple[tuple[tuple[Any, ...], str], ...] = (
        ((vit, "-o", taken), "--force"),
        ((vit, "-o", vit / "r.csv"), "do not go into a store"),
        ((tmp_path / "missing.zarr",), "missing.zarr"),
        ((tmp_path / "missing",), "missing"),
        ((tmp_path,), "no vitsee store"),
        (("vit_tinny_patch16_224",), "near names: vit_tiny_patch16_224"),
        (("test_vit", "--checkpoint", tmp_path / "none.pth"), "none.pth"),
        (
            (stores / "cnn.zarr", "--what", "positions", "-o", tmp_path / "p.csv"),
            "no positions",
        ),
    )
    for args, phrase in wrong:
        result = weights_command(*args)
        assert (result.exit_code, result.stdout) == (1, ""), (args, result.output)
        assert phrase in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert taken.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [taken]
    usage: tuple[tuple[Any, ...], ...] = (
        (vit, "--random-init", "0"),
        (vit, "--img-size", "64"),
        ("test_vit", "--checkpoint", "w.pth", "--random-init", "0"),
        (vit, "--what", "position"),
        (vit, "--query-stride", "0"),
    )
    for args in usage:
        result = weights_command(*args)
        assert (result.exit_code, result.stdout) == (2, ""), args
