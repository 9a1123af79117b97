"""Localisation by features that stay in memory as they are stored: as by features in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_localize import LAYOUT, PIXELS, STD, N, maps_of, tokens_of, write
from vitsee_core.analyses.localize import run
from vitsee_core.features import choose_features
from vitsee_core.similarity import on_the_fly
from vitsee_core.similarity.on_the_fly import bytes_per_value
from vitsee_core.similarity.runs import StoredRuns
from vitsee_core.similarity.stacks import PatchPixels, TokenStack
from vitsee_stores import Store
from vitsee_stores.layout import TokenLayout

# Patches of 5 pixels, cut to 2 and 3 at two edges.
UNEVEN = TokenLayout((), (2, 3), stride_px=(5.0, 5.0), offset_px=(0.0, 0.0))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stacks that were kept as they are stored."""
    found: list[str] = []
    real = StoredRuns._request

    def watch(self: StoredRuns, run: slice) -> Any:
        found.append(type(self.stack).__name__)
        return real(self, run)

    monkeypatch.setattr(StoredRuns, "_request", watch)
    return found


def both(store: Store, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> tuple[Any, Any]:
    """In float32, then as stored, in tiles of 11 images."""
    plain = run(store, **kwargs)
    monkeypatch.setattr(on_the_fly, "LARGE", 0.0)
    monkeypatch.setattr(on_the_fly, "GOOD_TILE", 11)
    monkeypatch.setattr(on_the_fly, "LARGEST_TILE", 11)
    return plain, run(store, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUT, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("tokens", [("each",), ("1,2", "0,1")])
@pytest.mark.parametrize("std", [STD, [0.3, 0.3, 0.3]], ids=["", "alike"])
def test_the_same_maps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    used: list[str],
    layout: TokenLayout,
    tokens: tuple[str, ...],
    std: list[float],
) -> None:
    monkeypatch.setattr("tests.test_localize.STD", std)
    acts = tokens_of(PIXELS, 4, layout=layout)
    valid = [int(k not in (2, 17)) for k in range(N)]
    sites = {"blocks.0.out": (acts.astype(np.float16), layout)}
    store = write(tmp_path / "a.zarr", sites, PIXELS, valid=valid, dtype="float16")
    plain, stored = both(store, monkeypatch, tokens=tokens)
    assert set(used) == {"TokenStack", "PatchPixels"}
    for name in ("value", "std", "low", "high"):
        assert stored[name] == pytest.approx(plain[name], abs=2e-6)
    assert stored["token"].tolist() == plain["token"].tolist()


@pytest.mark.parametrize("how", [{}, {"repeats": 1}, {"repeats": 2}], ids=str)
def test_cells_that_are_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[str], how: dict[str, Any]
) -> None:
    acts = tokens_of(PIXELS, 4).astype(np.float16)
    valid = [int(k not in (3, 11)) for k in range(N)]
    sites = {"blocks.0.out": (acts, LAYOUT)}
    store = write(
        tmp_path / "a.zarr", sites, PIXELS, valid=valid, dtype="float16", order="dataset"
    )
    if how:
        how = {"estimator": "minibatch", "batch": 8, **how}
    plain, stored = both(store, monkeypatch, **how)
    assert set(used) == {"TokenStack", "PatchPixels"}
    for name in ("value", "std"):
        # of eight images in a batch sums cancel more
        assert stored[name] == pytest.approx(
            plain[name], abs=1e-5 if how else 2e-6, nan_ok=True
        )


def test_what_is_constant_has_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[str]
) -> None:
    pixels = PIXELS.copy()
    pixels[:, :, :4, :4] = 77
    acts = tokens_of(pixels, 4).astype(np.float16)
    acts[:, 2] = 0.1
    store = write(
        tmp_path / "a.zarr", {"blocks.0.out": (acts, LAYOUT)}, pixels, dtype="float16"
    )
    _, stored = both(store, monkeypatch)
    maps = maps_of(stored)
    assert used and np.isnan(maps[:, 0]).all() and np.isnan(maps[1]).all()
    assert np.isfinite(np.delete(maps[:, 1:], 1, 0)).all()


def test_single_precision_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[str]
) -> None:
    acts = tokens_of(PIXELS, 4).astype(np.float32)
    sites = {"blocks.0.out": (acts, LAYOUT)}
    store = write(tmp_path / "a.zarr", sites, PIXELS)
    plain, stored = both(store, monkeypatch)
    assert set(used) == {"PatchPixels"}
    assert stored["value"] == pytest.approx(plain["value"], abs=2e-6)


def test_bytes_of_a_patch_by_hand(tmp_path: Path) -> None:
    acts = tokens_of(PIXELS, 4, layout=UNEVEN).astype(np.float16)
    store = write(
        tmp_path / "a.zarr", {"blocks.0.out": (acts, UNEVEN)}, PIXELS, dtype="float16"
    )
    patches = PatchPixels(store, store.inputs(), UNEVEN, np.array([5, 0]))
    found = patches.read_stored(slice(3, 9))
    assert found.shape == (2, 6, 3 * 5 * 5) and found.dtype == np.uint8
    corner = found[0].reshape(6, 3, 5, 5)  # rows 5 to 7, columns 10 and 11
    assert np.array_equal(corner[:, :, :3, :2], PIXELS[3:9, :, 5:8, 10:12])
    assert not corner[:, :, 3:].any() and not corner[:, :, :, 2:].any()
    assert np.array_equal(found[1].reshape(6, 3, 5, 5), PIXELS[3:9, :, :5, :5])
    assert patches.scale == pytest.approx(np.repeat(1 / (255 * np.array(STD)), 25))
    tokens = TokenStack(choose_features(store, store.site("blocks.0.out"), "patches"))
    assert [bytes_per_value(s, True) for s in (tokens, patches)] == [2, 1]
    assert [bytes_per_value(s, False) for s in (tokens, patches)] == [4, 4]
