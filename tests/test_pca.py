"""Principal components of patches: against scikit-learn, by hand, and with known turns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.decomposition import PCA

from tests.command_line import said
from tests.extractions import VIT, extracted
from tests.stores import write_sites
from tests.tables import having, unique
from vitsee_core.analyses.pca import plot, run
from vitsee_core.figures.patch_maps.colours import Colours
from vitsee_core.figures.plotting import figure_bytes
from vitsee_core.statistics.covariance import CovarianceSums, principal_axes
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
GRID = TokenLayout(("cls",), (3, 4), stride_px=(8.0, 8.0))
BARE = TokenLayout((), (3, 4), stride_px=(8.0, 8.0))
N, DIM = 10, 6


def tokens(
    layout: TokenLayout = GRID, n: int = N, dim: int = DIM, seed: int = 0
) -> Array:
    """Correlated channels of different spread, with a mean."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(dim, dim)) * np.linspace(3, 0.5, dim)[:, None]
    x: Array = (rng.normal(size=(n, layout.n_tokens, dim)) @ mix + 5).astype(np.float32)
    return x


def scikit(x: Array, k: int) -> PCA:
    return PCA(k, svd_solver="full").fit(x.astype(np.float64))


def signed(axes: Array) -> Array:
    """Each with its entry of largest magnitude positive, one by one."""
    return np.array(
        [axis * (1 if axis[np.argmax(np.abs(axis))] > 0 else -1) for axis in axes]
    )


def scores_of(
    table: Table, image: str, grid: tuple[int, int], k: int = 3, **where: Any
) -> Array:
    found = np.full((*grid, k), np.nan)
    rows = having(table, metric="score", image=image, **where)
    columns = (rows[name].tolist() for name in ("row", "col", "component", "value"))
    for r, c, component, value in zip(*columns, strict=True):
        assert math.isnan(found[r, c, component - 1])
        found[r, c, component - 1] = value
    return found


def colours_of(
    table: Table, image: str, grid: tuple[int, int], store: str, site: str
) -> Array:
    of = Colours.read(table.notes["colours"][store][site])
    return of(scores_of(table, image, grid, store=store, site=site))


# ---------------------------------------------------------------- axes


def test_axes_by_hand() -> None:
    """Along (3, 4) / 5 there are -10, 10, along (4, -3) / 5 -5, 5: shares 0.8 and 0.2."""
    x = np.array([[6.0, 8.0, 1], [-6, -8, 1], [4, -3, 1], [-4, 3, 1]]) + 2
    found = principal_axes(CovarianceSums.from_examples(x, x[0]), 3)
    assert np.allclose(
        found.axes, [[0.6, 0.8, 0.0], [0.8, -0.6, 0.0], [0.0, 0.0, 1.0]], atol=1e-14
    )
    assert np.allclose(found.shares, [0.8, 0.2, 0], atol=1e-14)
    assert np.allclose(found.scores(x), [[10, 0, 0], [-10, 0, 0], [0, 5, 0], [0, -5, 0]])
    alike = principal_axes(CovarianceSums.from_examples(np.ones((4, 3)), np.ones(3)), 3)
    assert np.isnan(alike.shares).all()


def test_axes_are_scikit_learns() -> None:
    x = tokens().reshape(-1, DIM)
    found = principal_axes(CovarianceSums.from_examples(x, x[3].astype(np.float64)), 4)
    expected = scikit(x, 4)
    assert np.allclose(found.axes, signed(expected.components_), atol=1e-9)
    assert np.allclose(found.shares, expected.explained_variance_ratio_, rtol=1e-10)
    assert np.allclose(found.mean, expected.mean_, rtol=1e-12)


# ---------------------------------------------------------------- the analysis


@pytest.mark.parametrize("normalise", [False, True])
def test_scores_are_scikit_learns(tmp_path: Path, normalise: bool) -> None:
    """Over the patches of all images that count, the class token left out."""
    x = tokens()
    valid = np.arange(N) != 4
    store = write_sites(
        tmp_path / "a.zarr", {"embed": x}, layout=GRID, slab=4, valid=valid
    )
    table = run(
        store, sites="embed", components=4, normalise=normalise, image=["0", "image7"]
    )
    patches = x[valid][:, 1:].astype(np.float64)
    if normalise:
        patches /= np.linalg.norm(patches, axis=-1, keepdims=True)
    # Normalised in single precision, as stored.
    close = 1e-6 if normalise else 1e-9
    expected = scikit(patches.reshape(-1, DIM), 4)
    axes = signed(expected.components_)
    explained = table.filter(metric="explained_variance")
    assert explained["component"].tolist() == [1, 2, 3, 4]
    assert np.allclose(explained["value"], expected.explained_variance_ratio_, rtol=close)
    assert set(explained["n_images"].tolist()) == {9}
    assert set(explained["n_examples"].tolist()) == {9 * 12}
    for name, place in (("image0", 0), ("image7", 6)):
        scores = (patches[place] - expected.mean_) @ axes.T
        assert np.allclose(
            scores_of(table, name, (3, 4), 4).reshape(12, 4), scores, atol=close
        )


def test_intervals_and_halves_against_a_loop(tmp_path: Path) -> None:
    """10 images are 10 blocks of the jackknife; halves are every second of them."""
    x = tokens()
    table = run(
        write_sites(tmp_path / "a.zarr", {"embed": x}, layout=GRID), sites="embed"
    )
    store = write_sites(tmp_path / "b.zarr", {"embed": x}, layout=GRID, slab=3)
    other = run(store, sites="embed", jobs=2)
    for name in ("value", "high"):  # whatever the slabs and jobs
        assert np.allclose(
            other[name], table[name], rtol=1e-9, atol=1e-11, equal_nan=True
        )
    metrics = ["explained_variance"] * 3 + ["axis_agreement"] * 3 + ["score"] * 4 * 36
    assert table["metric"].tolist() == metrics

    def shares(some: Array) -> Array:
        found: Array = scikit(some[:, 1:].reshape(-1, DIM), 3).explained_variance_ratio_
        return found

    explained = table.filter(metric="explained_variance")
    left = np.array([shares(np.delete(x, i, 0)) for i in range(N)])
    error = np.sqrt((N - 1) / N * ((left - left.mean(0)) ** 2).sum(0))
    assert np.allclose(explained["std"], math.sqrt(N) * error, rtol=1e-7)
    half = 2.2621571628540993 * error  # Student's t, 9 degrees of freedom
    assert np.allclose(explained["high"] - explained["value"], half, rtol=1e-7)
    assert np.allclose(explained["half_a"], shares(x[::2]), rtol=1e-9)
    assert np.allclose(explained["half_b"], shares(x[1::2]), rtol=1e-9)
    assert table.replicates is not None
    assert np.allclose(table.replicates[:3], left.T, rtol=1e-9)
    axes = [
        scikit(some[:, 1:].reshape(-1, DIM), 3).components_ for some in (x[::2], x[1::2])
    ]
    cosines = [abs(float(a @ b)) for a, b in zip(*axes, strict=True)]
    assert np.allclose(table.filter(metric="axis_agreement")["value"], cosines, atol=1e-9)


def test_few_images_and_shown_ones(tmp_path: Path) -> None:
    x = tokens()
    store = write_sites(tmp_path / "a.zarr", {"embed": x}, layout=GRID)
    few = run(store, sites="embed", images=5)
    expected = scikit(x[:5, 1:].reshape(-1, DIM), 3).explained_variance_ratio_
    assert np.allclose(few["value"][:3], expected, rtol=1e-9)
    assert unique(few.filter(metric="score"), "image") == [f"image{i}" for i in range(4)]
    shown = run(store, sites="embed", fit_shown=True, image=["8"])
    expected = scikit(x[8, 1:], 3).explained_variance_ratio_
    assert np.allclose(shown["value"][:3], expected, rtol=1e-9)
    # One image: a value, no interval, no halves.
    assert np.isnan(shown["low"]).all() and np.isnan(shown["half_b"]).all()
    assert shown["n_images"][0] == 1


def objects(layout: TokenLayout, middle: Array) -> Array:
    """Images whose patches in `middle` (rows, cols) are far from the others along one channel."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, *middle.shape, DIM)) * np.linspace(2, 0.5, DIM)
    x[:, middle, 3] += 20
    x[:, ~middle, 3] -= 20
    prefix = np.zeros((N, layout.n_prefix, DIM))
    return np.concatenate([prefix, x.reshape(N, -1, DIM)], 1).astype(np.float32)


def test_the_foreground_has_axes_of_its_own(tmp_path: Path) -> None:
    layout = TokenLayout((), (4, 4), stride_px=(8.0, 8.0))
    middle = np.zeros((4, 4), bool)
    middle[1:3, 1:3] = True
    x = objects(layout, middle)
    x[:, :, 3] *= -1  # the middle is on the negative side of channel 3
    store = write_sites(tmp_path / "a.zarr", {"embed": x}, layout=layout)
    grid = x.reshape(N, 4, 4, DIM)
    for side, on in (("centre", middle), ("negative", middle), ("positive", ~middle)):
        table = run(store, sites="embed", foreground=side)
        expected = scikit(grid[:, on].reshape(-1, DIM), 3)
        explained = table.filter(metric="explained_variance")
        assert np.allclose(
            explained["value"], expected.explained_variance_ratio_, rtol=1e-8
        )
        assert explained["n_examples"][0] == N * on.sum()
        scores = scores_of(table, "image2", (4, 4))
        assert np.array_equal(~np.isnan(scores[..., 0]), on)
        centred = grid[2, on].astype(np.float64) - expected.mean_
        assert np.allclose(
            scores[on], centred @ signed(expected.components_).T, atol=1e-6
        )
        notes = table.notes["colours"]["a"]["embed"]
        assert notes["foreground_side"] == (1 if side == "positive" else -1)


def test_colours_of_turned_features_are_alike(tmp_path: Path) -> None:
    """The same features in turned channels and another scale, and at half the grid's steps: the
    colours of the first store's layer, where without alignment they differ."""
    rng = np.random.default_rng(0)
    x = tokens(BARE)
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    fine = TokenLayout((), (6, 8), stride_px=(4.0, 4.0))
    twice = x.reshape(N, 3, 4, DIM).repeat(2, 1).repeat(2, 2).reshape(N, 48, DIM)
    lead = write_sites(tmp_path / "lead.zarr", {"embed": x}, layout=BARE, dtype="float32")
    other = write_sites(
        tmp_path / "other.zarr",
        {"embed": (x @ turn * -3 + 1, BARE), "next": (twice @ turn, fine)},
    )
    table = run(lead, other, sites=["embed", "next"], image=["1"], reference="embed")
    expected = colours_of(table, "image1", (3, 4), "lead", "embed")
    assert np.allclose(
        colours_of(table, "image1", (3, 4), "other", "embed"), expected, atol=1e-4
    )
    found = colours_of(table, "image1", (6, 8), "other", "next")
    assert np.allclose(found, expected.repeat(2, 0).repeat(2, 1), atol=1e-4)
    assert table.notes["aligned_to"] == {"store": "lead", "site": "embed"}
    assert table.notes["colours"]["other"]["next"]["aligned_on_patches"] == N * 12
    plain = run(lead, other, sites=["embed", "next"], image=["1"], align=False)
    rotation = plain.notes["colours"]["other"]["embed"]["rotation"]
    assert rotation == np.eye(3).tolist() and plain.notes["aligned_to"] is None
    apart = colours_of(plain, "image1", (3, 4), "other", "embed")
    assert not np.allclose(apart, expected, atol=0.1)


@pytest.mark.slow
def test_cells_beside_the_image_do_not_count(tmp_path: Path) -> None:
    """Images of 20 x 60 on an input of 32 x 48: 16 rows of pixels in the middle, half the cells."""
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        pixels = rng.integers(0, 256, (20, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / f"{i}.png")
    crop = ["--crop-mode", "border", "--crop-pct", 1]
    extracted(*VIT, *crop, "--data", tmp_path / "data", "-o", tmp_path / "v.zarr")
    store = open_store(tmp_path / "v.zarr")
    table = run(store, sites="blocks.0.out")
    seen = store.acts("blocks.0.out", "patches")[:][:, 1:3].reshape(-1, 64)
    expected = scikit(seen, 3).explained_variance_ratio_
    assert np.allclose(table["value"][:3], expected, rtol=1e-8)
    scores = scores_of(table, "0.png", (4, 6))[..., 0]
    assert np.array_equal(~np.isnan(scores).any(1), [False, True, True, False])


@pytest.mark.slow
def test_pictures_from_the_table_alone(tmp_path: Path) -> None:
    x = tokens(BARE)
    stores = [
        write_sites(
            tmp_path / f"{name}.zarr", {"embed": x, "next": x * factor}, layout=BARE
        )
        for name, factor in (("a", 1), ("$b^$", -2))
    ]
    names = ["a.zarr", "$b^$.zarr"]
    said(tmp_path, "pca", *names, "--sites", "*", "-o", "t.csv", "--png", "t.png")
    sidecar = json.loads((tmp_path / "t.csv.json").read_text())
    assert sidecar["notes"]["sheet"]["grids"]["a"]["embed"]["shape"] == [3, 4]
    figure = plot(Table.read(tmp_path / "t.csv"))
    assert figure_bytes(figure) == (tmp_path / "t.png").read_bytes()
    # Four images, two stores, two layers, and the photograph of each image, framed.
    (sheet,) = figure.axes
    assert len(sheet.patches) == 4 * (1 + 2 * 2)
    texts = [text.get_text() for text in figure.texts]
    assert "turned to be nearest to a next" in texts
    # The tile is what the colours say, upright.
    table = run(*stores, sites="*")
    drawn = sheet.images[1].get_array()
    assert drawn is not None
    expected = colours_of(table, "image0", (3, 4), "a", "embed")
    assert (
        np.allclose(drawn[..., :3], expected, atol=1e-12) and (drawn[..., 3] == 1).all()
    )
    assert sheet.images[1].origin == "upper"
    # Without the notes too: over the whole image, colours from the scores in the table.
    assert len(plot(Table(table.written)).axes[0].patches) == 20


@pytest.mark.slow
def test_what_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    x = tokens()
    write_sites(tmp_path / "a.zarr", {"embed": x, "pooled": x[:, 0]}, layout=GRID)
    write_sites(tmp_path / "pooled.zarr", {"embed": x}, layout=GRID, tokens="pooled")
    only_cls = TokenLayout(("cls",), None, rows=1)
    write_sites(tmp_path / "cls.zarr", {"embed": x[:, :2]}, layout=only_cls)
    write_sites(tmp_path / "thin.zarr", {"embed": x[..., :2]}, layout=GRID)
    write_sites(tmp_path / "other.zarr", {"embed": x}, layout=GRID, name="photo")
    cases = {
        (
            "pooled.zarr",
        ): "pooled keeps embed pooled only: extract it with --tokens embed=all",
        ("cls.zarr", "--sites", "embed"): "embed of cls has no grid of patches to map",
        ("a.zarr", "--sites", "pooled"): "pooled of a has no grid of patches to map",
        (
            "thin.zarr",
        ): "embed of thin has 2 channels and so no more components; 3 were asked for",
        (
            "a.zarr",
            "--components",
            "7",
        ): "embed of a has 6 channels and so no more components; 7",
        ("a.zarr", "--image", "dog.png"): "a has no image 'dog.png'",
        ("a.zarr", "other.zarr"): "other has no image 'image0'",
        ("a.zarr", "--reference", "pooled"): "pooled of a has no grid of patches to map",
        ("a.zarr", "--memory", "1K"): "reading a chunk of a takes",
        (
            "a.zarr",
            "--no-align",
            "--reference",
            "embed",
        ): "a reference is for aligned colours",
    }
    for args, line in cases.items():
        stderr = said(tmp_path, "pca", *args, "--png", "x.png", code=1)
        assert line in stderr and "Traceback" not in stderr, stderr
    with pytest.raises(VitseeError, match=r"the axes of embed of a \(6 channels\) take"):
        run(tmp_path / "a.zarr", memory=1000)
        assert not (tmp_path / "x.png").exists()
    assert "--components" in said(tmp_path, "pca", "a.zarr", "--components", "2", code=2)
    store = open_store(tmp_path / "a.zarr")
    for wrong, kind in (
        ({"components": 2}, VitseeError),
        ({"foreground": "left"}, VitseeError),
        ({"sites": "nothing"}, SiteError),
    ):
        with pytest.raises(kind):
            run(store, **wrong)
    with pytest.raises(MissingInput):
        run(open_store(tmp_path / "pooled.zarr"))


@pytest.mark.slow
def test_patches_that_are_all_alike(tmp_path: Path) -> None:
    store = write_sites(tmp_path / "a.zarr", {"embed": np.ones((4, 13, 5))}, layout=GRID)
    table = run(store, sites="embed")
    assert np.isnan(table.filter(metric="explained_variance")["value"]).all()
    assert np.isnan(table.filter(metric="axis_agreement")["value"]).all()
    assert (table.filter(metric="score")["value"] == 0).all()
    assert len(plot(table).axes[0].patches) == 8
    with pytest.raises(VitseeError, match="embed of a has 0 patches that count"):
        run(store, sites="embed", foreground="positive")
