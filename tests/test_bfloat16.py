"""Gram matrices from products in bfloat16: how far off, where refused, kept apart from others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.features import activations
from tests.reference_cka import gram_hsic1, loop_hsic1
from tests.stores import write_sites
from vitsee_cli.main import main
from vitsee_core.kernels.backend import (
    BF16_COLUMNS,
    CudaBfloat16,
    matmul_backend,
    product_in,
    product_size,
)
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


class OnTheCpu(CudaBfloat16):
    """The arithmetic of a GPU, imitated."""

    def free_bytes(self) -> None:  # type: ignore[override]
        return None


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(device: str, precision: str = "fp32") -> Any:
        return OnTheCpu(device) if precision == "bf16" else matmul_backend(device)

    monkeypatch.setattr("vitsee_core.similarity.products.matmul_backend", backend)
    monkeypatch.setattr(
        "vitsee_core.similarity.estimate.require_bfloat16", lambda device: None
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_sites(tmp_path / "a.zarr", SITES)


def compare(
    store: Store, precision: str, estimator: str = "exact", **kwargs: Any
) -> Array:
    sites = [Representation(store, site) for site in store.select(["all"])]
    how = Estimator(estimator)
    h = hsic(sites, estimator=how, options=GramOptions(precision=precision, **kwargs))
    return centred_alignment(h.cross, h.rows, h.cols)


def multiply(x: Array, y: Array | None = None) -> Array:
    """By the code under test, all of it."""
    backend = OnTheCpu("cpu")
    a = backend.take(x.astype(np.float32))
    b = a if y is None else backend.take(y.astype(np.float32))
    memory = backend.buffer(np.full(product_size(len(a), len(b)), np.nan, np.float32))
    total, product = backend.zeros((len(a), len(b))), product_in(memory, len(a), len(b))
    backend.multiply(a, b, product)
    backend.add(total, product)
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 3), (300, 7), (257, 5000), (520, 4097)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_products_are_those_of_rounded_factors(
    shape: tuple[int, int], symmetric: bool
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape), None if symmetric else rng.normal(size=(33, shape[1]))
    other = x if y is None else y
    f, g = (rounded(v.astype(np.float32)) for v in (x, other))
    pieces = [slice(k, k + BF16_COLUMNS) for k in range(0, shape[1], BF16_COLUMNS)]
    want = f @ g.T
    # each call's result is rounded to 8 bits, by a 256th of itself at most
    most = 2**-8 * sum(np.abs(f[:, k] @ g[:, k].T) for k in pieces) + 1e-6 * np.abs(
        f
    ) @ np.abs(g.T)
    error = np.abs(multiply(x, y) - want)
    assert (error <= most).all() and error.max() > 0


@pytest.mark.slow
@pytest.mark.usefixtures("supported")
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


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("estimator", ["exact", "minibatch", "biased"])
def test_every_estimator_is_near_single_precision(store: Store, estimator: str) -> None:
    want = compare(store, "fp32", estimator, use_cache=False)
    found = compare(store, "bf16", estimator, use_cache=False)
    # few images and features: 2^-9 of each product, averaged over 435 pairs
    assert found == pytest.approx(want, abs=5e-4) and not np.array_equal(found, want)


@pytest.mark.usefixtures("supported")
def test_matrices_of_both_precisions_are_kept_apart(store: Store) -> None:
    single = compare(store, "fp32")
    half = compare(store, "bf16")
    folder = store.path.with_name(f"{store.path.name}.grams")
    headers = [Header.load(path.read_bytes()) for path in folder.glob("*.json")]
    keys = sorted(header.key for header in headers if header is not None)
    sites = sorted(SITES)
    assert keys == sorted(
        [(s, "all") for s in sites] + [(s, "all", "bf16") for s in sites]
    )
    made = {path.name for path in folder.iterdir()}
    assert np.array_equal(compare(store, "fp32"), single)
    assert np.array_equal(compare(store, "bf16"), half)
    assert {path.name for path in folder.iterdir()} == made  # none was made anew
    assert not np.array_equal(single, half)


@pytest.mark.usefixtures("supported")
def test_the_sidecar_says_it(store: Store) -> None:
    sites = [Representation(store, site) for site in store.select(["all"])]
    h = hsic(sites, options=GramOptions(use_cache=False, precision="bf16"))
    assert h.notes["precision"] == "bf16" and summarise(h).cka.shape == (3, 3)


# Refusals


def test_a_cpu_is_refused(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "r.csv"
    args = [
        "cka",
        str(store.path),
        "--sites",
        "all",
        "--precision",
        "bf16",
        "-o",
        str(out),
    ]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 1 and done.stdout == "" and not out.exists()
    assert "--precision bf16 is slower than fp32 on a CPU; leave it out" in done.stderr
    assert not list(tmp_path.glob("*.grams/*"))


@pytest.mark.usefixtures("supported")
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
