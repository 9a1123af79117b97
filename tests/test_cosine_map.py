"""Cosine maps: against scikit-learn, loops over pairs and by hand; where patches lie."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics.pairwise import cosine_similarity

from tests.command_line import said
from tests.extractions import VIT, extracted
from tests.stores import write_sites
from tests.tables import having, unique
from vitsee_core.analyses.cosine_map import plot, run
from vitsee_core.analyses.cosine_map.cosines import (
    Spot,
    map_statistics,
    offset_means,
    unit_vectors,
)
from vitsee_core.figures.patch_maps.views import View
from vitsee_core.figures.patch_sheets import MARK
from vitsee_core.figures.plotting import GREY, figure_bytes
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
GRID = TokenLayout(("cls",), (3, 4), stride_px=(8.0, 8.0))
FINE = TokenLayout((), (6, 8), stride_px=(4.0, 4.0))
N, DIM = 5, 6


def tokens(layout: TokenLayout = GRID, seed: int = 0) -> Array:
    found = np.random.default_rng(seed).normal(size=(N, layout.n_tokens, DIM)) + 0.5
    return found.astype(np.float32)


def map_of(table: Table, grid: tuple[int, int], **where: Any) -> Array:
    found = np.full(grid, np.nan)
    rows = having(table, metric="cosine", **where)
    for r, c, value in zip(
        *(rows[name].tolist() for name in ("row", "col", "value")), strict=True
    ):
        assert math.isnan(found[r, c])
        found[r, c] = value
    return found


# ---------------------------------------------------------------- pure functions


def test_cosines_by_hand() -> None:
    x = np.array([[3.0, 4.0], [-6.0, -8.0], [4.0, -3.0], [0.0, 0.0], [8.0, 6.0]])
    units = unit_vectors(x, np.array([True, True, True, True, False]))
    assert np.allclose(units[:3], [[0.6, 0.8], [-0.6, -0.8], [0.8, -0.6]], atol=1e-15)
    assert np.isnan(units[3:]).all()  # no length; not counted


def test_statistics_by_hand() -> None:
    """A row of five: the query in the middle. Others 0.8, 0.9, 0.1, -0.2: mean 0.4; above 0.7
    there are two of four; neighbours 0.9 and 0.1."""
    found = map_statistics(np.array([0.8, 0.9, 1.0, 0.1, -0.2]), 2, (1, 5))
    assert found["cosine_mean"] == pytest.approx(0.4, rel=1e-15)
    assert found["cosine_neighbours"] == pytest.approx(0.5, rel=1e-15)
    assert found["cosine_area"] == 0.5
    # Neighbours across a corner; a patch that does not count is none.
    cosines = np.array([1.0, math.nan, 0.2, 0.4, 0.6, 0.0])
    found = map_statistics(cosines, 0, (2, 3))
    assert found["cosine_neighbours"] == pytest.approx((0.4 + 0.6) / 2)
    assert found["cosine_mean"] == pytest.approx(0.3)
    alone = map_statistics(np.array([1.0, math.nan]), 0, (1, 2))
    assert all(math.isnan(value) for value in alone.values())


def loop_offsets(x: Array, keep: Array, grid: tuple[int, int]) -> Array:
    """Every pair of patches, one by one."""
    rows, cols = grid
    sums: dict[tuple[int, int], list[float]] = {}
    for a in np.flatnonzero(keep):
        for b in np.flatnonzero(keep):
            u, v = x[a].astype(float), x[b].astype(float)
            cosine = float(u @ v) / math.sqrt(float(u @ u) * float(v @ v))
            offset = (int(b // cols - a // cols), int(b % cols - a % cols))
            sums.setdefault(offset, []).append(cosine)
    found = np.full((2 * rows - 1, 2 * cols - 1), np.nan)
    for (dy, dx), values in sums.items():
        found[dy + rows - 1, dx + cols - 1] = math.fsum(values) / len(values)
    return found


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (4, 2)])
def test_means_by_offset_against_all_pairs(grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(grid[0] * grid[1], 7)) + 0.3
    keep = np.ones(len(x), bool)
    keep[[0, 3]] = False
    found = offset_means(unit_vectors(x, keep), grid)
    expected = loop_offsets(x, keep, grid)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    # The transform's rounding.
    assert np.allclose(found, expected, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "cell", "pixel"),
    [("3,5", (3, 5), None), ("0, 7", (0, 7), None), ("12,34px", None, (12, 34)),
     ("middle", None, None)],
)  # fmt: skip
def test_spots(text: str, cell: Any, pixel: Any) -> None:
    found = Spot.parse(text)
    assert (found.cell, found.pixel) == (cell, pixel)


@pytest.mark.parametrize("text", ["", "3", "3,5,7,9", "-1,2", "3.5,2px", "px", "center"])
def test_no_spots(text: str) -> None:
    with pytest.raises(
        VitseeError, match=r"no patch .*; expected ROW,COL of the token grid"
    ):
        Spot.parse(text)


# ---------------------------------------------------------------- the analysis


def test_maps_are_scikit_learns(tmp_path: Path) -> None:
    x = tokens()
    store = write_sites(tmp_path / "a.zarr", {"embed": x}, layout=GRID, slab=2)
    table = run(store, sites="embed", image=["3", "image1"], at=["2,1", "0,3"], to=["4"])
    assert unique(table.filter(metric="cosine"), "query") == ["image3", "image1"]
    for query in (3, 1):
        for at, cell in (("2,1", 2 * 4 + 1), ("0,3", 3)):
            for image in (query, 4):
                where = {"query": f"image{query}", "at": at, "image": f"image{image}"}
                expected = cosine_similarity(x[query, 1 + cell][None], x[image, 1:])[0]
                found = map_of(table, (3, 4), **where)
                # scikit-learn divides in single precision.
                assert np.allclose(found.ravel(), expected, atol=1e-6)
                assert set(having(table, **where)["token"].tolist()) == {at}
            own = map_of(
                table, (3, 4), query=f"image{query}", at=at, image=f"image{query}"
            )
            assert own.ravel()[cell] == pytest.approx(1, abs=1e-12)
            numbers = having(table, query=f"image{query}", at=at, metric="cosine_mean")
            others = np.delete(own.ravel(), cell)
            assert numbers["value"].tolist() == [pytest.approx(others.mean(), rel=1e-12)]
            assert numbers["row"].tolist() == [None]


def test_one_place_in_every_grid(tmp_path: Path) -> None:
    """Pixel 13,2 of 48 x 24 pixels: on an input of 32 x 24 of which the middle 32 columns are
    seen, x = 5 there; (0, 0) of cells of 8, (0, 1) of cells of 4."""
    transform = {
        "input_size": (3, 24, 32), "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": "center", "mean": (0.0,) * 3, "std": (1.0,) * 3,
    }  # fmt: skip
    sites: dict[str, Any] = {"embed": (tokens(), GRID), "next": (tokens(FINE), FINE)}
    store = write_sites(tmp_path / "a.zarr", sites, transform=transform, sizes=(24, 48))
    table = run(store, sites="*", image=["0"], at=["13,2px"])
    assert dict(zip(table["site"], table["token"], strict=True)) == {
        "embed": "0,0",
        "next": "0,1",
    }
    (mark,) = table.notes["marks"]
    assert mark["place"] == pytest.approx([2.5 / 24, 13.5 / 48])
    middle = run(store, sites="*", image=["0"])
    cells = dict(zip(middle["site"], middle["token"], strict=True))
    assert cells == {"embed": "1,2", "next": "3,4"}
    for at, line in (
        ("7,2px", r"embed of a has no patch of 'image0' at 7,2px"),
        ("48,2px", r"'image0' of a has 48 x 24 pixels.*no pixel 48,2"),
        ("3,0", r"a: embed has no token 3,0: .*a grid of 3 x 4"),
    ):
        with pytest.raises(VitseeError, match=line):
            run(store, sites="*", image=["0"], at=[at])


@pytest.mark.slow
def test_cells_beside_the_image_have_no_map(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "data" / "a.png")
    crop = ["--crop-mode", "border", "--crop-pct", 1]
    extracted(*VIT, *crop, "--data", tmp_path / "data", "-o", tmp_path / "v.zarr")
    store = open_store(tmp_path / "v.zarr")
    table = run(store, sites="blocks.0.out", at=["1,2"])
    assert np.isnan(map_of(table, (4, 6))).all(1).tolist() == [True, False, False, True]
    view = View.of(store, store.select(["blocks.0.out"]))
    (site,) = store.select(["blocks.0.out"])
    with pytest.raises(SiteError, match=r"no patch of 'a.png' at 0,2"):
        Spot.parse("0,2").index(store, site, view, 0)


def test_patches_without_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = tokens()
    x[0, 1] = 0
    store = write_sites(tmp_path / "a.zarr", {"embed": x}, layout=GRID)
    with caplog.at_level("INFO"):
        table = run(store, sites="embed", image=["0"], at=["0,0", "1,1"])
    assert "a: no cosine of a patch of length 0: embed image0 0,0" in caplog.text
    assert np.isnan(map_of(table, (3, 4), at="0,0")).all()
    other = map_of(table, (3, 4), at="1,1")
    assert np.isnan(other[0, 0]) and np.isnan(other).sum() == 1
    sheet, _ = plot(table).axes
    assert (
        len(sheet.patches) == 4 + 2
    )  # two photographs, two maps with the patch in a frame


@pytest.mark.slow
def test_offsets_are_means_over_images(tmp_path: Path) -> None:
    x = tokens()
    valid = [1, 1, 0, 1, 1]
    expected = np.stack(
        [loop_offsets(x[i, 1:], np.ones(12, bool), (3, 4)) for i in (0, 1, 3, 4)]
    )
    for slab in (2, 5):
        path = tmp_path / f"a{slab}.zarr"
        store = write_sites(path, {"embed": x}, layout=GRID, slab=slab, valid=valid)
        table = run(store, sites="embed", offsets=True)
        assert len(table) == 5 * 7
        assert table["row"][0] == -2 and table["col"][0] == -3 and table["col"][-1] == 3
        assert np.allclose(table["value"].reshape(5, 7), expected.mean(0), atol=1e-7)
        assert np.allclose(table["std"].reshape(5, 7), expected.std(0, ddof=1), atol=1e-6)
        assert set(table["n_images"].tolist()) == {4}
    sheet, _ = plot(table).axes
    assert len(sheet.images) == 1
    with pytest.raises(VitseeError, match="offsets are means over all images"):
        run(store, offsets=True, at=["0,0"])


def bounds(patch: Patch) -> Array:
    """Left, top, width, height."""
    assert isinstance(patch, Rectangle)
    return np.array(patch.get_bbox().bounds)


@pytest.mark.slow
def test_pictures_from_the_table_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sites = {"embed": tokens(), "next": 2 * tokens()}
        write_sites(tmp_path / f"{name}.zarr", sites, layout=GRID)
    words = [
        "a.zarr",
        "b.zarr",
        "--sites",
        "*",
        "--image",
        "1",
        "--at",
        "1,2",
        "--to",
        "0",
    ]
    said(tmp_path, "cosine-map", *words, "-o", "t.csv", "--png", "t.png")
    table = Table.read(tmp_path / "t.csv")
    figure = plot(table)
    assert figure_bytes(figure) == (tmp_path / "t.png").read_bytes()
    # Two lines of a photograph and two models with two layers, all framed, and a bar.
    sheet, _ = figure.axes
    frames, marked = (
        [
            bounds(patch)
            for patch in sheet.patches
            if same_color(patch.get_edgecolor(), edge)
        ]
        for edge in (GREY, MARK)
    )
    assert len(frames) == 2 * (1 + 2 * 2)
    # Of the first line alone, on the photograph, and in the maps around the patch.
    assert len(sheet.lines) == 2 and len(marked) == 4
    for line in sheet.lines:
        at = np.asarray(line.get_data()).ravel() - frames[0][:2]
        assert at / frames[0][2:] == pytest.approx(np.array([2.5 / 4, 1.5 / 3]))
    for frame, cell in zip(frames[1:5], marked, strict=True):
        assert cell[2:] / frame[2:] == pytest.approx(np.array([1 / 4, 1 / 3]))
        assert (cell[:2] - frame[:2]) / frame[2:] == pytest.approx(
            np.array([2 / 4, 1 / 3])
        )
    drawn = sheet.images[-8].get_array()
    assert drawn is not None
    expected = map_of(table, (3, 4), store="a", site="embed", image="image1")
    assert np.allclose(drawn, expected) and sheet.images[-8].get_clim()[1] == 1
    stretched = plot(table, "map").axes[0].images[-8].get_array()
    assert stretched is not None
    others = np.delete(np.asarray(stretched).ravel(), 6)
    assert others.min() == 0 and others.max() == 1 and stretched[1, 2] == 1


def test_what_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    x = tokens()
    write_sites(tmp_path / "a.zarr", {"embed": x, "pooled": x[:, 0]}, layout=GRID)
    write_sites(tmp_path / "pooled.zarr", {"embed": x}, layout=GRID, tokens="pooled")
    write_sites(tmp_path / "other.zarr", {"embed": x}, layout=GRID, name="photo")
    cases = {
        (
            "pooled.zarr",
        ): "pooled keeps embed pooled only: extract it with --tokens embed=all",
        ("a.zarr", "--sites", "pooled"): "pooled of a has no grid of patches to map",
        (
            "a.zarr",
            "--at",
            "9,9",
        ): "a: embed has no token 9,9: it has prefix cls and a grid of 3 x",
        ("a.zarr", "--image", "dog.png"): "a has no image 'dog.png'",
        ("a.zarr", "--to", "dog.png"): "a has no image 'dog.png'",
        ("a.zarr", "other.zarr"): "other has no image 'image0'",
        ("a.zarr", "--offsets", "--to", "1"): "offsets are means over all images",
    }
    for args, line in cases.items():
        stderr = said(tmp_path, "cosine-map", *args, "--png", "x.png", code=1)
        assert line in stderr and "Traceback" not in stderr, stderr
        assert not (tmp_path / "x.png").exists()
    stderr = said(tmp_path, "cosine-map", "a.zarr", "--at", "here", code=2)
    assert "expected ROW,COL of the token grid" in stderr
    with pytest.raises(MissingInput):
        run(open_store(tmp_path / "pooled.zarr"))
