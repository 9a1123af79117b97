"""cka --pair-by id: other pictures of the same names, in any order."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.reference_cka import loop_cka
from tests.stores import write_model
from vitsee_core.analyses.cka import run
from vitsee_stores import Store
from vitsee_stores.errors import StoreMismatch, VitseeError

Array = NDArray[np.float64]

N = 30
IDS = [f"class{i % 3}/{i:02d}.png" for i in range(N)]
RNG = np.random.default_rng(0)
CLEAN = RNG.normal(size=(N, 7, 4))
BLURRED = CLEAN + 0.7 * RNG.normal(size=(N, 7, 4))
ORDER = RNG.permutation(N)  # of the other store's rows


def write(
    path: Path, values: Array, ids: list[str], shift: int = 0, **more: Any
) -> Store:
    return write_model(
        path, {"embed": values}, ids=ids, hash_offset=shift, slab=8, **more
    )


@pytest.fixture
def clean(tmp_path: Path) -> Store:
    return write(tmp_path / "clean.zarr", CLEAN, IDS)


def expected(rows: Array | slice = slice(None)) -> float:
    return loop_cka(CLEAN[rows], BLURRED[rows])


def test_the_same_names_in_the_same_order(tmp_path: Path, clean: Store) -> None:
    other = write(tmp_path / "blur.zarr", BLURRED, IDS, shift=1000)
    with pytest.raises(StoreMismatch, match="was read from other bytes"):
        run(clean, other, no_cache=True)
    table = run(clean, other, no_cache=True, pair_by="id")
    assert table["value"] == pytest.approx([expected()], abs=2e-6)
    assert table["n_images"].tolist() == [N]
    assert table.notes["pairing"] == {
        "paired": "by id", "left_out": {"clean": 0, "blur": 0}, "with_equal_bytes": 0,
    }  # fmt: skip
    again = run(clean, clean, no_cache=True, pair_by="id", sites=["embed"])
    assert again["value"] == pytest.approx([1], abs=1e-6)


def test_any_order_and_rows_without_a_partner(
    tmp_path: Path, clean: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # 24 of the images in another order, one of them unreadable, and two that the first has not
    kept = ORDER[:24]
    values = np.concatenate([RNG.normal(size=(2, 7, 4)), BLURRED[kept]])
    ids = ["extra/0.png", "extra/1.png", *(IDS[i] for i in kept)]
    valid = [1] * 26
    valid[10] = 0
    other = write(tmp_path / "blur.zarr", values, ids, shift=1000, valid=valid)
    used = np.array(sorted(set(kept.tolist()) - {int(kept[8])}))
    for estimator in ("exact", "biased"):
        table = run(clean, other, no_cache=True, pair_by="id", estimator=estimator)
        back = run(other, clean, no_cache=True, pair_by="id", estimator=estimator)
        assert table["n_images"].tolist() == [23]
        assert back["value"] == pytest.approx(table["value"], abs=2e-6)
        if estimator == "exact":
            assert table["value"] == pytest.approx([expected(used)], abs=2e-6)
    assert "23 images are paired by id; left out: 7 of clean, 2 of blur" in caplog.text
    assert table.notes["pairing"]["left_out"] == {"clean": 7, "blur": 2}


def test_minibatches_and_the_cache_do_not_depend_on_the_other_order(
    tmp_path: Path, clean: Store
) -> None:
    moved = write(
        tmp_path / "moved.zarr", BLURRED[ORDER], [IDS[i] for i in ORDER], shift=1000
    )
    plain = write(tmp_path / "plain.zarr", BLURRED, IDS, shift=1000)
    sizes = {
        "batch": 8,
        "examples": 24,
        "repeats": 3,
        "pair_by": "id",
        "estimator": "minibatch",
    }
    a, b = (run(clean, other, **sizes) for other in (moved, plain))
    assert a["value"] == pytest.approx(b["value"], abs=2e-6)
    assert a["std"] == pytest.approx(b["std"], abs=2e-6)
    # The Gram matrix that was kept of one comparison serves the store's own.
    assert list((tmp_path / "moved.zarr.grams").glob("*.tiles"))
    before = {
        p: p.stat().st_mtime_ns for p in (tmp_path / "moved.zarr.grams").glob("*.tiles")
    }
    alone = run(moved, estimator="exact")
    after = {
        p: p.stat().st_mtime_ns for p in (tmp_path / "moved.zarr.grams").glob("*.tiles")
    }
    assert before == after and alone["value"] == pytest.approx([1], abs=1e-6)


def test_what_cannot_be_paired(tmp_path: Path, clean: Store) -> None:
    twice = write(tmp_path / "twice.zarr", BLURRED, [IDS[0], *IDS[:-1]])
    with pytest.raises(
        StoreMismatch, match=r"twice holds 1 ids more than once \(class0/00.png"
    ):
        run(clean, twice, no_cache=True, pair_by="id")
    foreign = write(tmp_path / "foreign.zarr", BLURRED, [f"x{i}" for i in range(N)])
    with pytest.raises(
        StoreMismatch, match=r"no image is in all of clean, foreign .* like x0$"
    ):
        run(clean, foreign, no_cache=True, pair_by="id")
    few = write(tmp_path / "few.zarr", BLURRED[:3], IDS[:3])
    with pytest.raises(
        VitseeError, match="3 images readable in all stores; expected at least 4"
    ):
        run(clean, few, no_cache=True, pair_by="id")
    moved = write(tmp_path / "moved.zarr", BLURRED[ORDER], [IDS[i] for i in ORDER])
    with pytest.raises(
        VitseeError, match="no way to pair by 'name'; expected image or id"
    ):
        run(clean, moved, no_cache=True, pair_by="name")
