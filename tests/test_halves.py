"""Gram matrices by the matrix unit: the layout, the unit itself, and how far off results are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.reference_cka import gram_hsic1
from tests.stores import write_sites
from vitsee_core import machine
from vitsee_core.grams import amx, amx_parts
from vitsee_core.grams.fused import shift_bytes
from vitsee_core.grams.halves import InPanels, Panels, in_rows, panels_bytes
from vitsee_core.grams.panels import (
    ROW_NUMBERS,
    into_panels,
    shift_bytes_into_panels,
    shift_into_panels,
)
from vitsee_core.grams.products import GramTile, products
from vitsee_core.grams.shift import Origin, raw_gram
from vitsee_core.similarity import Representation

Array = NDArray[Any]
needs_unit = pytest.mark.skipif(not amx.is_there(), reason="this processor has no AMX")


def fill(
    halves: Array, parts: int, mean: Array | None = None, cuts: tuple[int, ...] = ()
) -> Panels:
    """float16 (rows, columns) as panels, in pieces of columns."""
    n, p = halves.shape
    mean = np.zeros(p, np.float32) if mean is None else mean
    x = Panels.empty(n, p, parts, np.full(panels_bytes(n, p, parts), 0xFF, np.uint8))
    for a, b in zip((0, *cuts), (*cuts, p), strict=True):
        raw = np.ascontiguousarray(halves[:, a:b]).view(np.uint16)
        shift_into_panels(raw, mean[a:b], x.values, 0, a, np.zeros((0, 2), np.float32))
    return x


def dense(x: Panels) -> Array:
    """(parts, rows, columns) of all that is there, in float32."""
    bits = x.values.transpose(3, 1, 4, 5, 0, 2, 6).astype(np.uint32) << 16
    found = bits.view(np.float32)
    return found.reshape(found.shape[0], x.values.shape[1] * 32, -1)


def nearest(x: Array) -> Array:
    """To 8 bits: the significand in steps of 1/128, half to even."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.asarray(np.ldexp(np.round(fraction * 256) / 256, exponent))


def by_numpy(
    left: Array,
    right: Array,
    out: Array,
    turned: Array,
    symmetric: bool,
    every: bool,
    fresh: bool,
) -> None:
    """What `amx_parts.add_product` does."""
    n, m = left.shape[1] * 32, right.shape[1] * 32
    a, b = dense(Panels(left, n)), dense(Panels(right, m))
    made = a[0] @ b[0].T
    if len(b) > 1:
        made += a[0] @ b[1].T
    if len(a) > 1:
        made += a[1] @ b[0].T
    second = a[1] @ b[1].T if len(a) == len(b) > 1 else np.zeros_like(made)
    made, second = (
        x.reshape(n // 32, 32, m // 32, 32).transpose(2, 0, 1, 3)
        for x in (made + every * second, (1 - every) * second)
    )
    for j in range(len(out)):
        low = j if symmetric else 0
        if fresh:
            out[j, low:] = 0
        out[j, low:] += made[j, low:]
        if symmetric:
            out[j, j] += second[j, j]


NUMPY_UNIT: Any = SimpleNamespace(add_product=by_numpy)
UNITS = [pytest.param(amx_parts, marks=needs_unit), NUMPY_UNIT]


def test_parts_by_hand() -> None:
    # steps of 1/128 above 1, of 1/64 above 2: 1 + 5/512 is 1 + 1/128 and 1/512;
    # -2.0107421875 is -2 (-2 - 1/128 is halfway: to even) and what is left, 11/1024
    x = fill(
        np.array([[1 + 5 / 512, 4.5], [-2.0, 0.25]], np.float16), 2, np.array([0, 0], np.float32)
    )
    assert dense(x)[:, :2, :2].tolist() == [
        [[1 + 1 / 128, 4.5], [-2, 0.25]],
        [[1 / 512, 0], [0, 0]],
    ]
    mean = np.array([11 / 1024], np.float32)
    y = fill(np.array([[-2.0]], np.float16), 2, mean)
    assert dense(y)[:, 0, 0].tolist() == [-2.015625, 2.015625 - 2 - 11 / 1024]
    assert dense(fill(np.array([[1 + 5 / 512]], np.float16), 1))[0, 0, 0] == 1 + 1 / 128


@pytest.mark.parametrize("parts", [1, 2])
def test_every_piece_lands_in_its_tile(parts: int) -> None:
    rng = np.random.default_rng(0)
    n, p = 45, ROW_NUMBERS + 77
    halves, mean = (
        rng.normal(1, 2, (n, p)).astype(np.float16),
        rng.normal(size=p).astype(np.float32),
    )
    x = dense(fill(halves, parts, mean, (3, 40, 64, 300)))
    shifted = halves.astype(np.float32) - mean
    first = nearest(shifted)
    assert np.array_equal(x[0, :n, :p], first)
    if parts > 1:
        left = shifted.astype(np.float64) - first
        assert np.array_equal(x[1, :n, :p], nearest(left))
        assert (
            np.abs(x.astype(np.float64).sum(0)[:n, :p] - shifted).max()
            <= np.abs(shifted).max() / 2**16
        )
    assert not x[:, n:].any() and not x[:, :, p:].any()


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_taken(parts: int) -> None:
    halves = np.random.default_rng(0).normal(size=(100, 40)).astype(np.float16)
    x = fill(halves, parts)
    for places in (slice(32, 90), slice(5, 40), np.array([99, 0, 0, 31, 32, 64, 7])):
        some = x[places]
        assert len(some) == len(halves[places])
        assert np.array_equal(dense(some)[:, : len(some)], dense(x)[:, :100][:, places])
    assert np.shares_memory(x[32:64].values, x.values)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 70, 300), (64, 32, 1100), (550, 20, 40)])
def test_products(unit: Any, parts: int, shape: tuple[int, int, int]) -> None:
    n, m, p = shape
    rng = np.random.default_rng(0)
    backend = InPanels(unit, parts)
    x, y = (fill(rng.normal(size=(k, p)).astype(np.float16), parts) for k in (n, m))
    a, b = (dense(v).astype(np.float64)[:, : len(v)] for v in (x, y))
    memory = np.full(backend.product_size(n, max(n, m)), np.nan, np.float32)
    total = backend.zeros((n, m), symmetric=False)
    for _ in range(2):
        backend.add(total, backend.multiply(x, y, memory))
    want = a[0] @ b[0].T + (a[0] @ b[1].T + a[1] @ b[0].T if parts > 1 else 0)
    assert backend.host(total, symmetric=False) == pytest.approx(2 * want, abs=6e-6 * p)
    total = backend.zeros((n, n), symmetric=True)
    backend.add(total, backend.multiply(x, x, memory))
    found = backend.host(total, symmetric=True)
    want = a[0] @ a[0].T + (a[0] @ a[1].T + a[1] @ a[0].T if parts > 1 else 0)
    near = np.arange(n) // 32
    if parts > 1:
        want += (a[1] @ a[1].T) * (near[:, None] == near)
    assert found == pytest.approx(want, abs=3e-6 * p) and np.array_equal(found, found.T)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (2, 2)])
def test_products_of_several_parts(unit: Any, parts: tuple[int, int]) -> None:
    """Of left and right factors that differ, as of bytes with weights, and of all parts."""
    rng = np.random.default_rng(0)
    backend, n, m, p = InPanels(unit, 2), 70, 40, 650
    raw = [rng.normal(size=(k, p)).astype(np.float32) for k in (n, m)]
    left, right = (
        backend.panels(str(k), len(x), p, parts[k], beside=max(parts)) for k, x in enumerate(raw)
    )
    for x, side in zip(raw, (left, right), strict=True):
        into_panels(x, side.values)
    a, b = (dense(x).astype(np.float64)[:, : len(x)] for x in (left, right))
    assert all(
        np.abs(x.sum(0)[:, :p] - y).max() <= np.abs(y).max() / (2**8 if len(x) == 1 else 2**16)
        for x, y in zip((a, b), raw, strict=True)
    )
    blocks = backend.blocks(n, m, np.full(backend.product_size(n, m), np.nan, np.float32))
    backend.add_product(left, right, blocks, fresh=True)
    leading = a[0] @ b[0].T + sum(a[0] @ y.T for y in b[1:]) + sum(x @ b[0].T for x in a[1:])
    assert in_rows(blocks, n, m) == pytest.approx(leading, abs=2e-4)
    backend.add_product(left, right, blocks, every=True)
    both = leading + a.sum(0) @ b.sum(0).T
    assert in_rows(blocks, n, m) == pytest.approx(both, abs=4e-4)
    if sum(parts) == 4:
        assert np.abs(both - 2 * leading).max() > 1e-4  # what `every` adds is seen
    square = backend.blocks(m, m, np.full(backend.product_size(m, m), np.nan, np.float32))
    other = backend.panels("other", m, p, parts[0], beside=max(parts))
    into_panels(raw[1], other.values)
    backend.add_product(other, right, square, symmetric=True, fresh=True)
    below = np.tri(m, dtype=bool)
    want = dense(other).astype(np.float64).sum(0)[:m] @ b.sum(0).T
    assert in_rows(square, m, m)[below] == pytest.approx(want[below], abs=1e-3)


def test_bytes_are_shifted_and_scaled() -> None:
    raw = np.array([[0, 255, 7], [128, 1, 77]], np.uint8)
    mean, scale = np.array([2, 0.5, 7], np.float32), np.array([1, 0.25, 3], np.float32)
    backend = InPanels(amx, 2)
    x = backend.panels("x", 2, 3)
    shift_bytes_into_panels(raw, mean, scale, x.values, 0)
    # 254.5 / 4 is 63.5 and 1/8; 70 * 3 is exact in 8 bits
    assert dense(x)[:, :2, :3].tolist() == [
        [[-2, 63.5, 0], [126, 0.125, 210]],
        [[0, 0.125, 0], [0, 0, 0]],
    ]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (40, 768), dtype=np.uint8)
    mean, scale = (rng.normal(size=768).astype(np.float32) for _ in range(2))
    single, x = np.empty((40, 768), np.float32), backend.panels("x", 40, 768)
    shift_bytes(raw, mean, scale, single)
    shift_bytes_into_panels(raw, mean, scale, x.values, 0)
    found = dense(x).astype(np.float64).sum(0)[:40, :768]
    assert np.abs(found - single).max() <= np.abs(single).max() / 2**16


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(unit: Any, bad: float) -> None:
    halves = np.ones((40, 70), np.float16)
    halves[35, 66] = bad
    backend = InPanels(unit, 2)
    x = fill(halves, 2)
    total = backend.zeros((40, 40), symmetric=True)
    with np.errstate(invalid="ignore"):
        made = backend.multiply(x, x, np.empty(backend.product_size(40, 40), np.float32))
        backend.add(total, made)
    found = backend.host(total, symmetric=True)
    others = np.delete(np.arange(40), 35)
    assert not np.isfinite(found[35]).any() and (found[np.ix_(others, others)] == 70).all()


def features_of(folder: Path, x: Array, dtype: str = "float16") -> Any:
    store = write_sites(folder / f"{dtype}.zarr", {"x": x}, dtype=dtype, slab=32)
    return Representation(store, store.site("x")).features


def gram(features: Any, tiles: list[GramTile], **options: Any) -> list[Array]:
    n = features.store.plan.n_images
    how: dict[str, Any] = {"device": "cpu", "memory": 1 << 28, "fused": True} | options
    return list(products(features, np.arange(n), tiles, **how))


@needs_unit
@pytest.mark.parametrize(
    ("offset", "spread", "precision", "most"),
    [(0, 0, "fp32", 1e-6), (30, 0, "fp32", 1e-6), (0, 2, "fp32", 3e-5), (0, 0, "bf16", 2e-4)],
)
def test_a_pass_is_near_double_precision(
    tmp_path: Path, offset: float, spread: float, precision: str, most: float
) -> None:
    rng = np.random.default_rng(0)
    n, shape = 150, (150, 7, 900)
    x = (rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape[1:]))) + offset
    features, whole, origin = features_of(tmp_path, x), slice(0, n), Origin(n)
    odd, some = slice(3, 77), np.array([140, 2, 90, 91])
    tiles = [GramTile(whole, whole), GramTile(odd, odd), GramTile(some, odd), GramTile(some, some)]
    found = gram(features, tiles, precision=precision, origin=origin)
    stored = x.astype(np.float16).reshape(n, -1).astype(np.float64)
    centred = stored - stored.mean(0)
    want = centred @ centred.T
    # The pass has a centre of its own, the mean of some rows: the doubly centred matrix has none.
    of = found[0] - found[0].mean(0) - found[0].mean(1)[:, None] + found[0].mean()
    norms = np.sqrt(np.outer(want.diagonal(), want.diagonal()))
    assert 0 < (np.abs(of - want) / norms).max() < most
    raw = raw_gram(found[0], origin.shift) - stored @ stored.T
    assert np.abs(raw).max() < most * (stored**2).sum(1).max()
    for tile, made in zip(tiles[1:], found[1:], strict=True):
        part = found[0][tile.i][:, tile.j]
        assert made == pytest.approx(part, abs=2 * most * norms.max())


@needs_unit
def test_cka_is_as_near_to_double_precision_as_single_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    n, p = 256, 6300
    latent = rng.normal(size=(n, 20))
    grams: dict[str, list[Array]] = {"unit": [], "single": [], "double": []}
    for k in range(2):
        x = latent @ rng.normal(size=(20, p)) * 0.3 + rng.normal(size=(n, p))
        x = (x * np.exp(rng.normal(size=p))).reshape(n, 7, -1)
        (tmp_path / str(k)).mkdir()
        features, tile = features_of(tmp_path / str(k), x), [GramTile(slice(0, n), slice(0, n))]
        grams["unit"] += gram(features, tile)
        with monkeypatch.context() as patch:
            patch.setattr(amx, "is_there", lambda: False)
            grams["single"] += gram(features, tile)
        stored = x.astype(np.float16).reshape(n, -1).astype(np.float64)
        stored -= stored.mean(0)
        grams["double"].append(stored @ stored.T)

    def cka(of: list[Array]) -> float:
        a, b = of
        return float(gram_hsic1(a, b) / np.sqrt(gram_hsic1(a, a) * gram_hsic1(b, b)))

    found = {name: cka(of) for name, of in grams.items()}
    assert not np.array_equal(grams["unit"][0], grams["single"][0])
    assert found["single"] == pytest.approx(found["double"], abs=1e-7)
    assert found["unit"] == pytest.approx(found["double"], abs=1e-7)


@needs_unit
def test_the_number_of_threads_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(70, 7, 600))
    features, found = features_of(tmp_path, x), []
    monkeypatch.setattr("vitsee_core.grams.products.GOOD_COLUMNS", 256)
    for cores in (1, 3):
        monkeypatch.setattr(machine, "n_cores", lambda cores=cores: cores)
        found += gram(features, [GramTile(slice(0, 70), slice(0, 70))])
    assert np.array_equal(found[0], found[1])


def test_features_in_single_precision_keep_all_bits(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 7, 30)).astype(np.float32)
    features, tile = features_of(tmp_path, x, "float32"), [GramTile(slice(0, 40), slice(0, 40))]
    (plain,) = gram(features, tile, fused=False)
    (found,) = gram(features, tile)
    assert np.array_equal(plain, found)
