"""Gram matrices from products in bfloat16: how far off, where refused, kept apart from others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.features import activations
from tests.reference_cka import gram_hsic1, loop_hsic1
from tests.stores import write_sites
from vitsee_cli.main import main
from vitsee_core import machine
from vitsee_core.grams import bfloat16
from vitsee_core.grams.arithmetic import Arithmetic
from vitsee_core.grams.products import GramTile, products
from vitsee_core.similarity import (
    Estimator,
    GramOptions,
    Representation,
    centred_alignment,
    hsic,
    summarise,
)
from vitsee_core.similarity.gram_file import Header
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

Array = NDArray[Any]
N = 30
SITES = {f"blocks.{i}.out": activations(N, seed=i) + 3 * i for i in range(3)}
WHOLE = slice(0, N)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic is the same where it is imitated."""
    monkeypatch.setattr(bfloat16, "has_bfloat16", lambda device: True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_sites(tmp_path / "a.zarr", SITES)


def compare(store: Store, precision: str, estimator: str = "exact", **kwargs: Any) -> Array:
    sites = [Representation(store, site) for site in store.select(["all"])]
    how = Estimator(estimator)
    h = hsic(sites, estimator=how, options=GramOptions(precision=precision, **kwargs))
    return centred_alignment(h.cross, h.rows, h.cols)


def multiply(x: Array, y: Array | None = None, backend: Arithmetic | None = None) -> Array:
    """By the code under test, all of it."""
    backend = backend or bfloat16.in_bfloat16("cpu")
    a = backend.take(x.astype(np.float32))
    b = a if y is None else backend.take(y.astype(np.float32))
    out = backend.buffer(np.full(len(x) * len(x if y is None else y), np.nan, np.float32))
    total = backend.zeros((len(a), len(b)), y is None)
    backend.add(total, backend.multiply(a, b, out))
    return backend.host(total, y is None)


def rounded(x: Array) -> Array:
    """To 8 bits by hand: the significand in steps of 1/128, half to even."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.asarray(np.ldexp(np.round(fraction * 256) / 256, exponent))


def test_factors_are_rounded_to_8_bits_by_hand() -> None:
    # 1 + 1/256 lies between 1 and 1 + 1/128 and goes to the even one, 1; 1 + 3/256 to 1 + 1/64
    x = np.array([[1 + 1 / 256, 0.0], [1 + 3 / 256, 2.0], [-3.0, 1.0]])
    # 65/64 * 65/64 + 4 = 5.0315 and -3 * 65/64 + 2 = -1.046875, themselves rounded to 8 bits
    want = [[1.0, 65 / 64, -3.0], [65 / 64, 5.03125, -1.046875], [-3.0, -1.046875, 10.0]]
    assert multiply(x).tolist() == want


@pytest.mark.parametrize("shape", [(5, 3), (300, 7), (257, 5000), (520, 4097)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_products_are_those_of_rounded_factors(shape: tuple[int, int], symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape), None if symmetric else rng.normal(size=(33, shape[1]))
    other = x if y is None else y
    f, g = (rounded(v.astype(np.float32)) for v in (x, other))
    pieces = [slice(k, k + bfloat16.COLUMNS) for k in range(0, shape[1], bfloat16.COLUMNS)]
    want = f @ g.T
    # each call's result is rounded to 8 bits, by a 256th of itself at most
    most = 2**-8 * sum(np.abs(f[:, k] @ g[:, k].T) for k in pieces) + 1e-6 * np.abs(f) @ np.abs(g.T)
    for backend in (bfloat16.in_bfloat16("cpu"), bfloat16._Gpu("cpu")):
        error = np.abs(multiply(x, y, backend) - want)
        assert (error <= most).all() and error.max() > 0


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_cka_is_within_4e_6_of_double_precision(tmp_path: Path, offset: float) -> None:
    n, p, rng = 512, 12600, np.random.default_rng(0)
    latent = rng.normal(size=(2, n, 20))
    sites = {}
    for k, turn in enumerate((0, 0.5, 1.0, 1.4)):
        z = np.cos(turn) * latent[0] + np.sin(turn) * latent[1]
        x = (z @ rng.normal(size=(20, p)) / 20**0.5 + rng.normal(size=(n, p))) + offset
        sites[f"x{k}"] = x.reshape(n, 7, -1).astype(np.float32)
    store = write_sites(tmp_path / "a.zarr", sites, slab=64)
    found = compare(store, "bf16", use_cache=False)
    flat = [x.reshape(n, -1).astype(np.float64) for x in sites.values()]
    centred = [x - x.mean(0) for x in flat]
    grams = [x @ x.T for x in centred]
    h = np.array([[gram_hsic1(a, b) for b in grams] for a in grams])
    error = np.abs(found - h / np.sqrt(np.outer(np.diagonal(h), np.diagonal(h))))
    assert 1e-9 < error.max() < 4e-6
    assert np.abs(compare(store, "fp32", use_cache=False) - found).max() > 1e-9


def test_the_oracle_is_the_double_loop() -> None:
    x, y = (v.reshape(N, -1).astype(np.float64) for v in list(SITES.values())[:2])
    assert gram_hsic1(x @ x.T, y @ y.T) == pytest.approx(loop_hsic1(x, y), rel=1e-9)


@pytest.mark.parametrize("estimator", ["exact", "minibatch", "biased"])
def test_every_estimator_is_near_single_precision(store: Store, estimator: str) -> None:
    want = compare(store, "fp32", estimator, use_cache=False)
    found = compare(store, "bf16", estimator, use_cache=False)
    # few images and features: 2^-9 of each product, averaged over 435 pairs
    assert found == pytest.approx(want, abs=5e-4) and not np.array_equal(found, want)


def test_the_number_of_threads_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sites = {f"x{i}": rng.normal(1, 1, size=(40, 7, 600)) for i in range(2)}
    store = write_sites(tmp_path / "a.zarr", sites)
    features = Representation(store, store.select(["all"])[0]).features
    monkeypatch.setattr("vitsee_core.grams.products.GOOD_COLUMNS", 256)
    tile = [GramTile(slice(0, 40), slice(0, 40))]
    before = torch.get_num_threads()
    found: list[Array] = []
    for cores in (1, 3):
        monkeypatch.setattr(machine, "n_cores", lambda cores=cores: cores)
        found += products(
            *(features, np.arange(40), tile), device="cpu", memory=1 << 28, precision="bf16"
        )
    assert np.array_equal(found[0], found[1]) and torch.get_num_threads() == before


def test_matrices_of_both_precisions_are_kept_apart(store: Store) -> None:
    single = compare(store, "fp32")
    half = compare(store, "bf16")
    folder = store.path.with_name(f"{store.path.name}.grams")
    headers = [Header.load(path.read_bytes()) for path in folder.glob("*.json")]
    keys = sorted(header.key for header in headers if header is not None)
    sites = sorted(SITES)
    assert keys == sorted([(s, "all") for s in sites] + [(s, "all", "bf16") for s in sites])
    made = {path.name for path in folder.iterdir()}
    assert np.array_equal(compare(store, "fp32"), single)
    assert np.array_equal(compare(store, "bf16"), half)
    assert {path.name for path in folder.iterdir()} == made  # none was made anew
    assert not np.array_equal(single, half)


def test_the_sidecar_says_it(store: Store) -> None:
    sites = [Representation(store, site) for site in store.select(["all"])]
    h = hsic(sites, options=GramOptions(use_cache=False, precision="bf16"))
    assert h.notes["precision"] == "bf16" and summarise(h).cka.shape == (3, 3)


# Refusals


def test_a_processor_without_it_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat16, "has_bfloat16", lambda device: False)
    out = tmp_path / "r.csv"
    args = ["cka", str(store.path), "--sites", "all", "--precision", "bf16", "-o", str(out)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 1 and done.stdout == "" and not out.exists()
    assert "--precision bf16: this CPU has no products of bfloat16" in done.stderr
    assert "use --precision fp32" in done.stderr
    assert not list(tmp_path.glob("*.grams/*"))


def test_what_needs_more_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(VitseeError, match="no precision 'fp16'; expected fp32 or bf16"):
        compare(store, "fp16")
    ordered = write_sites(tmp_path / "o.zarr", SITES)
    sites = [Representation(ordered, site) for site in ordered.select(["all"])]
    with pytest.raises(VitseeError, match="leave out --precision bf16"):
        hsic(
            sites,
            estimator=Estimator("minibatch", 10, rescale=True),
            options=GramOptions(use_cache=False, precision="bf16"),
        )
    kept = write_sites(tmp_path / "k.zarr", SITES, tokens="pooled", grams=True)
    with pytest.raises(VitseeError, match="what extract --grams kept is there already"):
        compare(kept, "bf16")
