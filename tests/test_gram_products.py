"""Gram matrices of half precision that compiled code shifts: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import write_sites
from vitsee_core.kernels.backend import Cpu, is_worth_compiling, product_in, product_size
from vitsee_core.kernels.compiled import shift_half
from vitsee_core.similarity import GramOptions, Representation, hsic
from vitsee_core.similarity.products import GramTile, products
from vitsee_core.similarity.representation import FeatureOffset, raw_gram

N = 30


def test_every_half_is_the_single_of_the_same_value() -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)
    x, sums = np.full((64, 1030), 7, np.float32), np.zeros((64, 2), np.float32)
    shift_half(raw, np.zeros(1024, np.float32), x, 3, sums)
    want = raw.view(np.float16).astype(
        np.float32
    )  # subnormal numbers, infinities and NaN among it
    assert np.array_equal(x[:, 3:1027], want, equal_nan=True)
    assert (x[:, :3] == 7).all() and (x[:, 1027:] == 7).all()


def test_a_shift_and_its_sums_by_hand() -> None:
    raw = np.array([[1.5, 2.0], [-1.0, 0.25]], np.float16).view(np.uint16)
    x, sums = np.zeros((2, 2), np.float32), np.full((2, 2), 10, np.float32)
    shift_half(raw, np.array([0.5, 2.0], np.float32), x, 0, sums)
    assert x.tolist() == [[1.0, 0.0], [-1.5, -1.75]]
    # x . (0.5, 2): 0.5 and -4.25; sums of x: 1 and -3.25
    assert sums.tolist() == [[10.5, 11.0], [5.75, 6.75]]
    shift_half(raw, np.zeros(2, np.float32), x, 0, sums[:0])
    assert x.tolist() == [[1.5, 2.0], [-1.0, 0.25]]


def test_compiled_shifts_change_no_bit_of_a_gram_matrix(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(3, 1, size=(N, 7, 40))
    x[1, 0, 0] = 6e-8  # subnormal
    store = write_sites(tmp_path / "h.zarr", {"x": x}, dtype="float16", slab=7)
    features = Representation(store, store.site("x")).features
    rows, origins = (
        np.array([k for k in range(N) if k != 4]),
        [FeatureOffset(N - 1), FeatureOffset(N - 1)],
    )
    whole = slice(0, N - 1)
    plain, fused = (
        next(
            products(
                *(features, rows, [GramTile(whole, whole)]),
                device="cpu",
                memory=1 << 28,
                fused=fused,
                origin=origin,
            )
        )
        for fused, origin in zip((False, True), origins, strict=True)
    )
    assert np.array_equal(plain, fused)
    a, b = (origin.shift for origin in origins)
    assert b.along == pytest.approx(a.along, rel=1e-5) and b.means == pytest.approx(
        a.means
    )
    y = x.astype(np.float16)[rows].reshape(N - 1, -1).astype(np.float64)
    assert raw_gram(fused, b) == pytest.approx(y @ y.T, rel=1e-5)


def test_much_work_is_shifted_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sites = {f"x{k}": rng.normal(size=(N, 7, 4)) for k in range(3)}
    store = write_sites(tmp_path / "h.zarr", sites, dtype="float16")
    asked: list[bool] = []

    def watch(*args: Any, fused: bool, **kwargs: Any) -> Any:
        asked.append(fused)
        return products(*args, fused=fused, **kwargs)

    def compare() -> Any:
        of = [Representation(store, site) for site in store.select(["all"])]
        return hsic(of, options=GramOptions(use_cache=False)).cross

    monkeypatch.setattr("vitsee_core.similarity.comparison.products", watch)
    few = compare()
    monkeypatch.setattr(
        "vitsee_core.similarity.estimate.is_worth_compiling", lambda work: True
    )
    assert np.array_equal(compare(), few)
    assert asked == [False] * 3 + [True] * 3


def test_compiled_code_is_for_much_work() -> None:
    assert [is_worth_compiling(work) for work in (1e11, 1e12)] == [False, True]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (64, 100), (130, 9)])
def test_a_product_of_strips(n: int, k: int) -> None:
    wide = np.random.default_rng(n).normal(size=(n, k + 5)).astype(np.float32)
    x, y = wide[:, :k], wide[::-1, 2 : k + 2].copy()  # rows that do not follow each other
    memory = np.full(product_size(n, n), np.nan, np.float32)
    for other in (x, y):
        out = product_in(memory, n, n)
        Cpu().multiply(x, other, out)
        want = x.astype(np.float64) @ other.astype(np.float64).T
        assert out == pytest.approx(want, abs=1e-5 * k)
    assert np.array_equal(product_in(memory, n, n), out)
