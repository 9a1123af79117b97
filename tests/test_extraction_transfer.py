"""Results that leave a GPU beside the model: in order, bounded, and never read before they are
there; with streams that do nothing until somebody waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.extractions import VIT, array_bytes, extracted, plant_images
from tests.fake_cuda import FakeStream, install
from vitsee_core.extraction import transfer
from vitsee_core.extraction.buffers import HostMemory, block_bytes
from vitsee_core.extraction.slab_grams import GramProducts
from vitsee_core.extraction.transfer import HostCopies, PixelFeed
from vitsee_core.images import Batch
from vitsee_core.kernels import backend
from vitsee_core.kernels.backend import Cuda
from vitsee_core.summaries import largest_magnitude
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
N, SLAB = 10, 4


def copies() -> HostCopies:
    """As on CUDA, for tensors of the CPU."""
    made = HostCopies(CUDA)
    made._device = CPU
    return made


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_arrive_when_waited_for(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, pinned)
    way, out = copies(), torch.zeros(5, 3, dtype=torch.float16)
    value = torch.arange(15.0).view(5, 3)
    way.copy(out[1:], value[1:])
    value.zero_()  # as a model that goes on with the memory
    assert torch.all(out == 0) and way.asynchronous
    mark = way.mark()
    assert mark is not None
    mark.synchronize()
    assert out[1:].tolist() == torch.arange(3.0, 15.0).view(4, 3).tolist()
    assert torch.all(out[0] == 0)


def test_tensors_of_the_host_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for way in (HostCopies(CUDA), HostCopies(CPU)):
        out = torch.zeros(3)
        way.copy(out, torch.ones(3))
        assert torch.all(out == 1)
    assert HostCopies(CPU).mark() is None and not HostCopies(CPU).asynchronous


def test_at_most_two_batches_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    way, stream, out = copies(), FakeStream.made[-1], torch.zeros(6)
    for batch in range(6):
        way.copy(out[batch : batch + 1], torch.ones(1))
        way.end_batch()
        # The host has waited for the batch before last, and for no later one.
        assert stream.done == max(0, batch - 1)
    assert stream.n_waits == 4


def test_memory_that_is_not_pinned_takes_two_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, pinned=False)
    way, stream = copies(), FakeStream.made[-1]
    outs = [torch.zeros(n, dtype=torch.float64) for n in (4, 2, 8, 8, 1)]
    for i, out in enumerate(outs):
        way.copy(out, torch.full(out.shape, i + 1.0))
        assert stream.done == max(0, i - 1)  # the copy before last gave its buffer back
    assert len(way._spare) + len(way._bouncing) == 2
    way.wait()
    assert [set(out.tolist()) for out in outs] == [{1.0}, {2.0}, {3.0}, {4.0}, {5.0}]


def batch(i: int, n: int) -> Batch:
    pixels = torch.full((n, 3, 2, 2), i, dtype=torch.uint8)
    none = np.zeros(n, np.uint64)
    sizes, seconds = np.zeros((n, 2), np.int32), np.full(n, np.nan, np.float32)
    return Batch(slice(0, n), pixels, none == 0, none, sizes, [], seconds, none)


def test_pixels_are_fetched_one_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    to = Tensor.to

    def moved(self: Tensor, device: Any, **kwargs: Any) -> Tensor:
        if device != CUDA:
            return to(self, device, **kwargs)
        return torch.zeros_like(self).copy_(self, **kwargs)

    monkeypatch.setattr(Tensor, "to", moved)
    given = [batch(i, n) for i, n in enumerate((4, 4, 2, 4, 4, 4))]
    loaded = []

    def loading() -> Any:
        for one in given:
            loaded.append(one)
            yield one

    feed = PixelFeed(loading(), CUDA)
    for i, one in enumerate(given):
        found, pixels = feed.take()
        assert found is one
        assert pixels.shape == one.pixels.shape and torch.all(pixels == i)
        assert len(loaded) == i + 1
        feed.ahead()
        feed.ahead()
        assert len(loaded) == min(i + 2, len(given))
        assert torch.all(pixels == i)  # the next batch has memory of its own
        assert len(feed._pinned) <= transfer.N_PINNED_BATCHES
    with pytest.raises(StopIteration):
        feed.take()


def test_other_devices_take_what_is_loaded() -> None:
    feed = PixelFeed(iter([batch(7, 2)]), CPU)
    feed.ahead()
    found, pixels = feed.take()
    assert pixels is found.pixels
    with pytest.raises(StopIteration):
        feed.take()


def test_pinned_memory_is_as_large_as_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = install(monkeypatch)
    shapes = {
        "a": ((3, 5), torch.float32),
        "b": ((7,), torch.uint8),
        "c": ((2, 2), torch.uint64),
        "d": ((0, 4), torch.float16),
    }
    memory = HostMemory(shapes, pinned=True)
    assert block_bytes(shapes) == 64 + 64 + 64  # 60, 7, 32 and 0 bytes
    assert list(runtime.pinned.values()) == [192]
    for name, (shape, dtype) in shapes.items():
        tensor = memory.tensors[name]
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 8 == 0
    memory.tensors["a"].fill_(1)
    memory.tensors["b"].fill_(2)
    assert torch.all(memory.tensors["a"] == 1)
    memory.release()
    memory.release()
    assert runtime.pinned == {}
    runtime.refuse = True
    with pytest.raises(VitseeError, match=r"cannot pin 192 B .* choose a smaller --slab"):
        HostMemory(shapes, pinned=True)
    HostMemory(shapes)


@pytest.mark.parametrize("width", [5, 64, 64 * 3, 64 * 3 + 7])
def test_products_in_pieces(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TERMS", 64)
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    shapes: list[int] = []

    def watched(
        true: Callable[[Tensor, Tensor], Tensor],
    ) -> Callable[[Tensor, Tensor], Tensor]:
        def product(a: Tensor, b: Tensor) -> Tensor:
            shapes.append(a.shape[-1])
            return true(a, b)

        return product

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
    total = torch.ones(6, 6, dtype=torch.float64)
    Cuda("cpu").add_gram(total, x)
    assert max(shapes) <= 64
    torch.testing.assert_close(total - 1, x.double() @ x.double().T, rtol=1e-6, atol=1e-5)


def test_products_of_many_columns_keep_their_digits() -> None:
    """All of one sign, as a diagonal is; columns of a site of ViT-B/16."""
    x = torch.rand(4, 197 * 768, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(4, 4, dtype=torch.float64)
    Cuda("cpu").add_gram(total, x)
    want = x.double() @ x.double().T
    assert float(((total - want) / want).abs().max()) < 3e-6


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_largest_magnitude_of_tensors_of_any_strides(device: str) -> None:
    x = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    x[1, 2, 0, 3] = -7.5
    for view in (x, x[:, 1:], x.permute(0, 2, 3, 1), x.half()[:, :, 0], x.bfloat16()):
        found = largest_magnitude(view.to(device))
        assert found.dtype == torch.float32 and found.shape == ()
        assert device == "meta" or found.item() == 7.5
    x[0, 0, 0, 0] = float("nan")
    assert largest_magnitude(x.permute(0, 2, 3, 1)).isnan()
    x[0, 0, 0, 0] = -float("inf")
    assert largest_magnitude(x).item() == float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images") / "data", N)


ASKED = [
    "--slab",
    SLAB,
    "--attention",
    "rows",
    "--grams",
    "--inputs",
    "--sites",
    "blocks",
]
ASKED += ["--tokens", "pooled"]


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of batches of 3, whose Gram matrices come from held activations."""
    path = tmp_path_factory.mktemp("plain") / "plain.zarr"
    extracted(*VIT, "--data", folder, "-o", path, "--batch-size", 3, *ASKED)
    return path


def as_on_cuda(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """The whole loop with copies that are under way."""
    install(monkeypatch, pinned)
    begin = HostCopies.__init__

    def asynchronous(self: HostCopies, device: torch.device) -> None:
        begin(self, CUDA)
        self._device = device

    monkeypatch.setattr(HostCopies, "__init__", asynchronous)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_made_with_copies_under_way(
    pinned: bool,
    plain: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_cuda(monkeypatch, pinned)
    path = tmp_path / "other.zarr"
    extracted(*VIT, "--data", folder, "-o", path, "--batch-size", 3, *ASKED)
    assert array_bytes(path) == array_bytes(plain)
    # A host that waits for every site would stand still some hundreds of times.
    n_batches, n_slabs = 2 * 2 + 1, 3
    waits = sum(stream.n_waits for stream in FakeStream.made)
    assert waits <= n_batches + 3 * n_slabs + 1 or not pinned


@pytest.mark.slow
def test_a_store_of_tiles_made_with_copies_under_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*VIT, "--data", folder, "--short-side", 48, "--tiles", "--slab", 4]
    command += ["--batch-size", 5]
    extracted(*command, "-o", tmp_path / "plain.zarr")
    as_on_cuda(monkeypatch, True)
    extracted(*command, "-o", tmp_path / "other.zarr")
    assert array_bytes(tmp_path / "other.zarr") == array_bytes(tmp_path / "plain.zarr")


@pytest.mark.slow
def test_gram_matrices_wait_for_what_is_held(
    plain: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without the wait before them: what is held has not arrived, and they are wrong."""
    as_on_cuda(monkeypatch, pinned=True)
    true = GramProducts.gram
    arrived: list[bool] = []

    def gram(self: GramProducts, parts: Any, valid: Tensor) -> Tensor:
        arrived.append(
            all(stream.done == len(stream.queue) for stream in FakeStream.made)
        )
        return true(self, parts, valid)

    monkeypatch.setattr(GramProducts, "gram", gram)
    extracted(
        *VIT, "--data", folder, "-o", tmp_path / "a.zarr", "--batch-size", 3, *ASKED
    )
    assert arrived and all(arrived)
    want = np.asarray(open_store(plain).grams("blocks.0.out"))
    found = np.asarray(open_store(tmp_path / "a.zarr").grams("blocks.0.out"))
    np.testing.assert_array_equal(found, want)


@pytest.mark.slow
def test_sums_are_single_precision_where_the_model_is_not(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "half.zarr"
    extracted(
        *(*VIT, "--data", folder, "-o", path, "--slab", SLAB, "--precision", "bf16"),
        *("--sites", "residual", "--attention", "summary"),
    )
    store = open_store(path)
    sites = "blocks.1.in", "blocks.1.attn.branch"
    z, f = (np.asarray(store.acts(site), np.float64) for site in sites)
    found = np.asarray(store.residual("blocks.1.attn"))
    for column, (a, b) in enumerate(((z, z), (f, f), (z, f))):
        want = (a * b).sum(-1)
        # Of float16 copies: bfloat16 values fit them, the stream's float32 ones to 2^-11.
        scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
        assert np.abs(found[..., column] - want).max() < 3e-4 * scale.max(), column
    rollout = np.asarray(store.attention("rollout"))
    np.testing.assert_allclose(rollout.sum(-1), 1.0, rtol=0, atol=1e-5)
