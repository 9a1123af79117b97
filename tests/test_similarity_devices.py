"""CKA as it is made on a GPU (torch, tiles on the device, strips that travel as stored) against
numpy's, with torch on the CPU in the GPU's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.features import activations
from tests.stores import CNN, write_model
from tests.test_cka_heads import CNN_SITES, N, distances, vit
from vitsee_core.analyses import cka, cka_heads
from vitsee_core.kernels import backend
from vitsee_core.kernels.backend import (
    Cuda,
    Staging,
    full_precision,
    product_in,
    product_size,
)
from vitsee_core.runtime.device import current_precision
from vitsee_core.similarity import estimate, on_the_fly, products, whole_tiles
from vitsee_core.similarity.gram_file import GramFile, GramView, Header
from vitsee_core.similarity.representation import raw_gram
from vitsee_core.similarity.whole_tiles import DeviceTiles
from vitsee_stores import Store

CPU = torch.device("cpu")


class OnTheCpu(Cuda):
    """The arithmetic of a GPU, on the CPU."""

    def free_bytes(self) -> None:  # type: ignore[override]
        return None


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of what only a GPU uses, counted."""
    calls = {"tiles": 0, "strips": 0}

    def memory(_device: str, n: int) -> DeviceTiles:
        calls["tiles"] += 1
        return DeviceTiles("cpu", n)

    send = Staging.send

    def sent(self: Staging, *args: Any) -> Any:
        calls["strips"] += 1
        return send(self, *args)

    for module in (products, on_the_fly):
        monkeypatch.setattr(module, "matmul_backend", lambda *_: OnTheCpu("cpu"))
    monkeypatch.setattr(whole_tiles, "_tile_memory", memory)
    monkeypatch.setattr(Staging, "send", sent)
    return calls


def store_of(path: Path) -> Store:
    sites = {
        "embed": activations(N, 4, 1) + 30,  # far from 0: what is subtracted matters
        "blocks.0.out": activations(N, 4, 2),
        "blocks.1.out": activations(N, 4, 3),
    }
    return write_model(path, sites, slab=7, valid=[i != 5 for i in range(N)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"estimator": "biased"},
        {"estimator": "minibatch", "batch": 8, "repeats": 3},
    ],
    ids=lambda options: options.get("estimator", "exact"),
)
def test_cka(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path / "a.zarr")
    want = cka.run(store, no_cache=True, **options)
    calls = as_on_a_gpu(monkeypatch)
    found = cka.run(store, no_cache=True, **options)
    assert calls["strips"] and calls["tiles"]
    for name in ("value", "std"):
        np.testing.assert_allclose(
            found[name], want[name], rtol=0, atol=2e-6, err_msg=name
        )


@pytest.mark.slow
def test_cka_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = vit(tmp_path / "vit.zarr")
    b = write_model(tmp_path / "cnn.zarr", CNN_SITES, layout=CNN)
    assert distances().shape[0] == N
    want = cka_heads.run(a, b, window=2, no_cache=True)
    calls = as_on_a_gpu(monkeypatch)
    found = cka_heads.run(a, b, window=2, no_cache=True)
    assert calls["tiles"]
    np.testing.assert_allclose(found["value"], want["value"], rtol=0, atol=2e-6)


def test_what_a_cache_keeps_beside_its_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products with what was subtracted and sums over channels, made on the device."""

    def kept(path: Path) -> dict[str, tuple[Any, ...]]:
        store = store_of(path)
        cka.run(store)
        found = {}
        for file in path.with_name(f"{path.name}.grams").glob("*.json"):
            header = Header.load(file.read_bytes())
            assert header is not None
            view = GramView(GramFile(file.with_suffix(".tiles"), header), header.rows)
            everything = slice(0, view.n)
            gram = view.block(everything, everything)
            found[header.key[0]] = gram, raw_gram(gram, view.shift), view.shift.means
        return found

    want = kept(tmp_path / "host.zarr")
    as_on_a_gpu(monkeypatch)
    found = kept(tmp_path / "device.zarr")
    assert found.keys() == want.keys() and len(found) == 3
    for site, pair in found.items():
        for here, there in zip(pair, want[site], strict=True):
            scale = np.abs(there).max()
            np.testing.assert_allclose(
                here, there, rtol=0, atol=2e-6 * scale, err_msg=site
            )


@pytest.mark.parametrize("n", [1, 7, 8, 9, 50])
def test_symmetric_products_are_whole_after_half_the_work(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MIN_WIDTH", 4)
    device = Cuda("cpu")
    x = torch.randn(n, 30, generator=torch.Generator().manual_seed(0))
    y = torch.randn(n + 3, 30, generator=torch.Generator().manual_seed(1))
    memory = torch.full((product_size(n, n + 3),), torch.nan)  # as it may be on a GPU
    total, product = device.zeros((n, n)), product_in(memory, n, n)
    for _ in range(2):
        device.multiply(x, x, product)
        device.add(total, product)
    found = device.host(total, symmetric=True)
    want = 2 * (x.double() @ x.double().T).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    other = product_in(memory, n, n + 3)
    device.multiply(x, y, other)
    np.testing.assert_allclose(other, x @ y.T, rtol=1e-5, atol=1e-5)


def test_sums_of_pieces_leave_the_device_in_few_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0))
    runs = np.arange(1, 4), np.arange(2, 8)
    scattered = np.array([0, 2, 5]), np.array([7, 1])
    memory = DeviceTiles("cpu", 5 * 6 * 8)
    copies: list[int] = []
    cpu = torch.Tensor.cpu

    def counted(x: torch.Tensor) -> torch.Tensor:
        copies.append(x.numel())
        return cpu(x)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    for most, n_copies in ((1 << 24, 1), (1, 3)):
        copies.clear()
        monkeypatch.setattr(whole_tiles, "MAX_WAITING", most)
        found = list(memory.sums(values, [runs, scattered, runs], 2, 2))
        assert len(copies) == n_copies and len(found) == 3
        for (rows, cols), sums in zip((runs, scattered, runs), found, strict=True):
            block = values.numpy()[:, rows][:, :, cols].astype(np.float64)
            products, own, over_cols, over_rows = sums
            want = np.einsum("aij,bij->ab", block[:2], block[2:])
            np.testing.assert_allclose(products, want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(own, (block**2).sum((1, 2)), rtol=1e-5)
            np.testing.assert_allclose(over_cols, block.sum(2), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(over_rows, block.sum(1), rtol=1e-5, atol=1e-6)
    assert list(memory.sums(values, [], 2, 2)) == []


def test_tiles_on_the_device() -> None:
    memory = DeviceTiles("cpu", 2 * 3 * 3)
    values = memory.shaped(2, 3, 3)
    memory.put(values, 0, np.arange(9, dtype=np.float32).reshape(3, 3))
    memory.put(values, 1, torch.ones(3, 3))
    assert memory.take_diagonals(values).tolist() == [[0, 4, 8], [1, 1, 1]]
    assert values[0].tolist() == [[0, 1, 2], [3, 0, 5], [6, 7, 0]]


def test_products_on_a_gpu_are_single_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32 as environments switch it on; every product of both ways to CKA is made without it."""
    seen: list[str] = []

    def multiplied(self: DeviceTiles, *args: Any) -> Any:
        seen.append(current_precision(torch.device("cuda")))
        return sums(self, *args)

    as_on_a_gpu(monkeypatch)
    sums = DeviceTiles.sums
    monkeypatch.setattr(DeviceTiles, "sums", multiplied)
    for module in (estimate, on_the_fly):
        monkeypatch.setattr(
            module, "full_precision", lambda _device: full_precision("cuda")
        )
    a = vit(tmp_path / "vit.zarr")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert current_precision(torch.device("cuda")) == "tf32"
        cka.run(a, no_cache=True)
        by_sites = len(seen)
        cka_heads.run(a, a, window=2, no_cache=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert 0 < by_sites < len(seen)
    assert set(seen) == {"fp32"}
