"""Where cells lie on photographs, which part is shown, and colours that compare: by hand and on
pictures that were resized and cut."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from tests.extractions import VIT, extracted
from tests.stores import write_sites
from vitsee_core.figures.patch_maps.colours import Colours, matched, rotation_to
from vitsee_core.figures.patch_maps.photos import SheetImages, describe_sheet
from vitsee_core.figures.patch_maps.views import View, grid_sites, union
from vitsee_core.images.embedded_pictures import decode, encode
from vitsee_stores import Store, open_store
from vitsee_stores.errors import SiteError
from vitsee_stores.layout import TokenLayout

GRID = TokenLayout((), (2, 2), stride_px=(4.0, 4.0))


def transform(mode: str) -> dict[str, Any]:
    return {
        "input_size": (3, 8, 8), "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": mode,
        "mean": (0.0,) * 3, "std": (1.0,) * 3,
    }  # fmt: skip


def grid_store(
    folder: Path, name: str = "a", layout: TokenLayout = GRID, **more: Any
) -> Store:
    x = np.arange(3 * layout.n_tokens * 3, dtype=float).reshape(3, layout.n_tokens, 3)
    return write_sites(folder / f"{name}.zarr", {"embed": x}, layout=layout, **more)


def test_places_by_hand(tmp_path: Path) -> None:
    """An image of 8 x 16 (height x width) on an input of 8 x 8: cut in the middle it is seen from
    x = 4 to 12; filled up it is 4 high and 8 wide, from y = 2 to 6 of the input."""
    cut = grid_store(tmp_path, "cut", transform=transform("center"), sizes=(8, 16))
    view = View.of(cut, cut.select(["embed"]))
    assert view.seen(0) == (0, 0.25, 1, 0.75)
    assert view.grid_edges(GRID, 0) == (0, 0.25, 1, 0.75)
    expected = [[0.25, 0.375], [0.25, 0.625], [0.75, 0.375], [0.75, 0.625]]
    assert np.allclose(view.centres(GRID, 0), expected, atol=1e-15)
    places = np.array(
        [[0.1, 0.3], [0.1, 0.5], [0.99, 0.26], [0.5, 0.74], [0.5, 0.76], [0.5, 0.2]]
    )
    assert view.cells_at(GRID, 0, places).tolist() == [0, 1, 2, 3, -1, -1]
    assert view.on_image(GRID, np.array([0, 2])).all()

    fine = TokenLayout((), (4, 2), stride_px=(2.0, 4.0))
    filled = grid_store(
        tmp_path,
        "filled",
        fine,
        transform=transform("border"),
        sizes=[(8, 16), (8, 8), (8, 16)],
    )
    view = View.of(filled, filled.select(["embed"]))
    assert view.seen(0) == (0, 0, 1, 1)
    assert view.grid_edges(fine, 0) == (-0.5, 0, 1.5, 1)
    assert view.on_image(fine, np.arange(3)).tolist() == [
        [False, False, True, True, True, True, False, False],
        [True] * 8,
        [False, False, True, True, True, True, False, False],
    ]
    assert view.cells_at(fine, 0, np.array([[0.0, 0.6], [0.99, 0.1]])).tolist() == [3, 4]
    assert union([(0, 0.25, 1, 0.75), (0.1, 0, 0.9, 0.5)]) == (0, 0, 1, 0.75)


def test_a_store_that_does_not_know_its_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = grid_store(tmp_path)
    with caplog.at_level("INFO"):
        view = View.of(store, store.select(["embed"]))
    assert (
        "a: maps are drawn on the model's input, not on the original images"
        in caplog.text
    )
    assert view.input_size == (8, 8) and view.seen(1) == (0, 0, 1, 1)
    assert view.grid_edges(GRID, 1) == (0, 0, 1, 1)


def test_sites_without_a_map(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    rows = TokenLayout(("cls",), None, rows=3)
    one = TokenLayout((), (1, 1), stride_px=(8.0, 8.0))
    sites: dict[str, Any] = {
        "embed": (rng.normal(size=(2, 4, 3)), GRID),
        "plain": (rng.normal(size=(2, 4, 3)), rows),
        "single": (rng.normal(size=(2, 1, 3)), one),
        "pooled": rng.normal(size=(2, 3)),
    }
    store = write_sites(tmp_path / "a.zarr", sites)
    with caplog.at_level("INFO"):
        assert [site.name for site in grid_sites(store, ["*"])] == ["embed"]
    assert "a: no grid of patches in plain, single, pooled" in caplog.text
    for name in ("plain", "single", "pooled"):
        with pytest.raises(SiteError, match=f"{name} of a has no grid of patches to map"):
            grid_sites(store, [name])


@pytest.mark.slow
def test_the_photograph_is_the_original_cut_to_what_was_seen(tmp_path: Path) -> None:
    """Of 40 x 90 pixels on an input of 32 x 48 the middle 60 columns are seen (48 / 32 of 40)."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 90, 3), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    Image.fromarray(pixels).save(tmp_path / "data" / "one.png")
    extracted(
        *VIT, "--crop-pct", 1, "--data", tmp_path / "data", "-o", tmp_path / "v.zarr"
    )
    store = open_store(tmp_path / "v.zarr")
    sites = store.select(["blocks.0.out"])
    parts = [SheetImages(store, View.of(store, sites), [0], sites)]
    sheet = describe_sheet(parts, None)
    about = sheet["images"]["one.png"]
    assert about["frame"] == pytest.approx([0, 15 / 90, 1, 75 / 90])
    assert about["aspect"] == pytest.approx(40 / 60)
    assert about["edges"] == pytest.approx([0, 15 / 90, 1, 75 / 90])
    assert np.array_equal(decode(about["picture"]), pixels[:, 15:75])
    grid = sheet["grids"]["v"]["blocks.0.out"]
    assert grid["shape"] == [4, 6]
    assert grid["edges"]["one.png"] == pytest.approx([0, 15 / 90, 1, 75 / 90])
    # Another picture of that name is not shown.
    Image.fromarray(pixels[::-1]).save(tmp_path / "data" / "one.png")
    assert "picture" not in describe_sheet(parts, None)["images"]["one.png"]


@pytest.mark.parametrize("webp", [True, False])
def test_pictures_come_back(webp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check", lambda name: webp)
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(decode(encode(grey)), np.repeat(grey[..., None], 3, 2))
    noise = np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)
    assert np.array_equal(decode(encode(noise)), noise)
    long = np.zeros((1, 16384), np.uint8)  # a pixel more than a WebP has
    assert np.array_equal(decode(encode(long)), np.repeat(long[..., None], 3, 2))
    kinds = [base64.b64decode(encode(one))[:4] for one in (noise, long)]
    assert kinds == [b"RIFF" if webp else b"\x89PNG", b"\x89PNG"]


def test_the_rotation_is_found_and_colours_agree() -> None:
    rng = np.random.default_rng(0)
    lead = rng.normal(size=(200, 3)) * (5, 2, 1)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    turn[:, 0] *= -np.sign(np.linalg.det(turn))  # a mirrored one: axes have no sign
    own = 0.01 * lead @ turn.T + 7
    found = rotation_to(own, lead)
    assert np.allclose(found, turn, atol=1e-12)
    expected = Colours.of(lead)(lead)
    # Scores of another scale and mean, turned: the same colours.
    assert np.allclose(Colours.of(own, found, 200)(own), expected, atol=1e-9)
    assert np.allclose(
        Colours.read(Colours.of(own, found).describe())(own), expected, atol=1e-9
    )


def test_no_rotation_is_nearer() -> None:
    rng = np.random.default_rng(1)
    own, lead = rng.normal(size=(30, 3)), rng.normal(size=(30, 3)) * (3, 2, 1)
    own, lead = own - own.mean(0), lead - lead.mean(0)

    def miss(turn: Any) -> float:
        return float(((own @ turn - lead) ** 2).sum())

    best = miss(rotation_to(own, lead))
    others = [np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(300)]
    assert best < min(map(miss, others))


def test_colours_by_hand() -> None:
    """Median 2, deviations 2, 1, 0, 1, 6: MAD 1, so colours go from -1 to 5."""
    scores = np.stack([np.array([0.0, 1, 2, 3, 8]), np.arange(5.0), np.full(5, 4.0)], 1)
    found = Colours.of(scores)(scores)
    assert np.allclose(found[:, 0], [1 / 6, 2 / 6, 3 / 6, 4 / 6, 1])
    assert found[:, 2].tolist() == [0.5] * 5  # alike: no colour


def test_patches_are_matched_where_both_count() -> None:
    scores = np.arange(12.0).reshape(4, 3)
    lead = np.array([[1.0] * 3, [2.0] * 3, [math.nan] * 3, [4.0] * 3, [5.0] * 3])
    keep = np.array([True, True, True, False])
    own, other = matched(scores, keep, np.array([2, -1, 0, 3, 0]), lead)
    assert np.array_equal(own, scores[[2, 0]])
    assert other[:, 0].tolist() == [1, 5]
