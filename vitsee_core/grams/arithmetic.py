"""Products on the CPU by numpy, or on a GPU by torch, which is imported where it is worth it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core import machine
from vitsee_core.grams.syrk import load_syrk, mirror
from vitsee_core.lanes import one_blas_thread, one_torch_thread
from vitsee_core.types import Float32
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from torch import Tensor

# Multiplications above which a GPU, or torch's faster cast, is worth the seconds that torch takes
# to be imported.
LARGE = 1e11
# The same for the routine of `syrk`, with which scipy comes.
MEDIUM = 1e10
# The same for compiled code, which takes a second to be loaded; and where the processor has a
# matrix unit for it.
HUGE, LARGE_FOR_UNIT = 2e12, 4e11
# Columns of a symmetric product that a GPU makes at a time: an eighth, of a size that fills it.
GOOD_WIDTH, N_WIDTHS = 1024, 8
TERMS = 16384  # products that `add_gram` sums in single precision on a GPU
# Of the products that Gram matrices are made of; see `bfloat16`.
PRECISIONS = ("fp32", "bf16")

# Cast(to, values): into (rows, columns) from as many, of another type.
Cast = Callable[[NDArray[Any], NDArray[Any]], None]


def choose_device(text: str, work: float) -> str:
    """cpu, cuda or cuda:i for what the user says; `auto` is the CPU where the work, in
    multiplications, is too small to import torch for. Results do not depend on it but by rounding.

    Raises:
        VitseeError: no such device, or one without float64.
    """
    if work > MEDIUM:
        load_syrk()  # before the threads of its library are limited
    if text == "cpu" or (text == "auto" and work < LARGE and "torch" not in sys.modules):
        return "cpu"
    from vitsee_core.device import resolve_device

    device = resolve_device(text)
    if device.type == "mps":
        if text == "auto":
            return "cpu"
        raise VitseeError("--device mps has no float64; use --device cpu")
    return str(device)


def is_worth_compiling(work: float) -> bool:
    """Whether so many multiplications on the CPU are to be done by compiled code, as far as there
    is some."""
    return work > (LARGE_FOR_UNIT if "amx_bf16" in machine.cpu_flags() else HUGE)


def full_precision(device: str) -> AbstractContextManager[None]:
    """Within it, single precision is that, on GPUs too."""
    if device == "cpu":
        return nullcontext()
    import torch

    from vitsee_core.device import precision_context

    return precision_context(torch.device(device), "fp32")


class Arithmetic(Protocol):
    """Strips (rows, columns), products of them, and float64 sums of products."""

    def cast(self, to: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy into another type."""

    def staging(self, n: int, dtype: np.dtype[Any]) -> Staging | None:
        """For strips of at most `n` elements that travel as they are stored, and are cast and
        shifted where they arrive; None where they are taken as they are."""

    def strip_bytes(self, rows: int, columns: int, item: int) -> int:
        """What a strip takes on the host, with so many bytes a number."""

    def strip(self, memory: NDArray[Any], rows: int, columns: int) -> Any:
        """A strip to be filled, in memory of that size and the numbers' type."""

    def product_size(self, rows: int, others: int) -> int:
        """Numbers that `buffer` needs for a product."""

    def free_bytes(self) -> int | None:
        """What may be used of the device's own memory; None where it has none."""

    def one_thread(self) -> AbstractContextManager[None]:
        """Within it, products on the host are done by the thread that calls them."""

    def scratch_bytes(self, rows: int) -> int:
        """What `multiply` takes for factors of at most so many rows, beside them and its result."""

    def buffer(self, memory: NDArray[Any]) -> Any:
        """Room for a product of the size of `memory`."""

    def zeros(self, shape: tuple[int, int], symmetric: bool) -> Any:
        """A sum of products."""

    def take(self, x: NDArray[Any]) -> Any:
        """A strip on the device."""

    def multiply(self, left: Any, right: Any, out: Any) -> Any:
        """left right^T in the memory of `out`; with the same array on both sides only what lies on
        and below the diagonal counts."""

    def add(self, total: Any, product: Any) -> None:
        """total += product."""

    def add_gram(self, total: Any, x: Any) -> None:
        """total (n, n) += x x^T, whole, for x (n, columns) of the device, in single precision."""

    def host(self, total: Any, symmetric: bool) -> NDArray[np.float64]:
        """A sum as an array, whole."""


def arithmetic(device: str, work: float) -> Arithmetic:
    """Of a device as `choose_device` names it, for so many multiplications."""
    return Host(load_syrk() if work > MEDIUM else None) if device == "cpu" else Gpu(device)


class Plain:
    """Strips and products as arrays (rows, columns)."""

    def strip_bytes(self, rows: int, columns: int, item: int) -> int:
        """All numbers."""
        return rows * columns * item

    def strip(self, memory: NDArray[Any], rows: int, columns: int) -> Any:
        """(rows, columns)."""
        return memory[: rows * columns].reshape(rows, columns)

    def product_size(self, rows: int, others: int) -> int:
        """All numbers."""
        return rows * others


class Host(Plain):
    """numpy, and `syrk` where it is worth it."""

    def __init__(self, syrk: Callable[[Any, Any], None] | None = None) -> None:
        self._syrk = syrk

    def cast(self, to: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy into another type: by torch, if it is imported anyway and the values are float16, 2
        to 5 times as fast."""
        if "torch" in sys.modules and values.dtype == np.float16 and values.flags.writeable:
            import torch

            torch.from_numpy(to).copy_(torch.from_numpy(values))
        else:
            np.copyto(to, values)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """For BLAS, and torch where it is imported."""
        with one_blas_thread(), one_torch_thread() if "torch" in sys.modules else nullcontext():
            yield

    def staging(self, n: int, dtype: np.dtype[Any]) -> None:
        """None: memory is read once."""

    def free_bytes(self) -> int | None:
        """None."""
        return None

    def scratch_bytes(self, rows: int) -> int:
        """None."""
        return 0

    def buffer(self, memory: NDArray[Any]) -> NDArray[Any]:
        """The memory, all finite: what lies above a diagonal is added up too."""
        memory.fill(0)
        return memory

    def zeros(self, shape: tuple[int, int], symmetric: bool) -> Any:
        """A sum of products, in float64."""
        return np.zeros(shape)

    def take(self, x: NDArray[Any]) -> NDArray[Any]:
        """The strip."""
        return x

    def multiply(self, left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """left right^T in the memory of `out`, by syrk where both sides are the same memory."""
        shape = len(left), len(right)
        product: NDArray[Any] = out[: shape[0] * shape[1]].reshape(shape)
        if left is right and self._syrk is not None and left.dtype == np.float32:
            self._syrk(left, product)
        else:
            self.whole(left, right, product)
        return product

    def whole(self, left: Float32, right: Float32, out: Float32) -> None:
        """left right^T, whole, into `out` (contiguous): by torch, if it is imported anyway, a fifth
        faster than numpy at some hundred rows, a twentieth at a thousand; by numpy where both sides
        are the same memory, which takes syrk (and copies a small triangle faster than `mirror`)."""
        if left is right or "torch" not in sys.modules:
            np.matmul(left, right.T, out=out)
        else:
            import torch

            torch.mm(torch.from_numpy(left), torch.from_numpy(right).T, out=torch.from_numpy(out))

    def add(self, total: NDArray[np.float64], product: NDArray[Any]) -> None:
        """total += product."""
        np.add(total, product, out=total)

    def add_gram(self, total: NDArray[np.float64], x: NDArray[Any]) -> None:
        """total += x x^T: the same array on both sides, so that numpy calls syrk."""
        total += x @ x.T

    def host(self, total: NDArray[np.float64], symmetric: bool) -> NDArray[np.float64]:
        """The whole sum in memory of the host."""
        if symmetric:
            mirror(total)
        return total


class Gpu(Plain):
    """torch, on a device with float64."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)

    def cast(self, to: NDArray[Any], values: NDArray[Any]) -> None:
        """On the host."""
        self._torch.from_numpy(to).copy_(self._torch.from_numpy(values))

    def one_thread(self) -> AbstractContextManager[None]:
        """For BLAS on the host."""
        return one_blas_thread()

    def staging(self, n: int, dtype: np.dtype[Any]) -> Staging:
        """Half the bytes of float32 where float16 is stored, and no cast on the host."""
        return Staging(self._device, n, dtype)

    def free_bytes(self) -> int | None:
        """Half of what is free."""
        return int(self._torch.cuda.mem_get_info(self._device)[0] // 2)

    def scratch_bytes(self, rows: int) -> int:
        """None."""
        return 0

    def buffer(self, memory: NDArray[Any]) -> Tensor:
        """As much on the device."""
        dtype = self._torch.from_numpy(memory[:0]).dtype
        return self._torch.empty(len(memory), dtype=dtype, device=self._device)

    def zeros(self, shape: tuple[int, int], symmetric: bool) -> Any:
        """A sum of products, in float64."""
        return self._torch.zeros(shape, dtype=self._torch.float64, device=self._device)

    def take(self, x: NDArray[Any]) -> Tensor:
        """The strip on the device."""
        return self._torch.from_numpy(x).to(self._device)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """left right^T in the memory of `out`: of a symmetric product the columns on and below the
        diagonal, a few at a time."""
        product = out[: len(left) * len(right)].view(len(left), len(right))
        width = len(right) if left is not right else max(1, GOOD_WIDTH, len(right) // N_WIDTHS)
        for at in range(0, len(right), width):
            below = left[at:] if left is right else left
            self._torch.mm(
                below, right[at : at + width].T, out=product[-len(below) :, at : at + width]
            )
        return product

    def add(self, total: Tensor, product: Tensor) -> None:
        """total += product."""
        total += product

    def add_gram(self, total: Tensor, x: Tensor) -> None:
        """total += x x^T, in sums of at most `TERMS` products: a product of more columns at once
        loses digits by as much as the kernel of the day decides. Those of all pieces are one call,
        which fills a GPU where one small matrix does not."""
        torch, width = self._torch, x.shape[1]
        whole = width // TERMS
        if whole:
            pieces = x[:, : whole * TERMS].unflatten(1, (whole, TERMS)).transpose(0, 1)
            total += torch.bmm(pieces, pieces.transpose(1, 2)).sum(0, dtype=total.dtype)
        if rest := width - whole * TERMS:
            last = x[:, width - rest :]
            total += torch.mm(last, last.T)

    def host(self, total: Tensor, symmetric: bool) -> NDArray[np.float64]:
        """The whole sum in memory of the host."""
        found: NDArray[np.float64] = total.cpu().numpy()
        if symmetric:
            mirror(found)
        return found


class Staging:
    """A strip on its way to the device: pinned memory that is filled with values as stored, sent
    on a stream of its own, and filled again once it has arrived. For one thread."""

    def __init__(self, device: Any, n: int, dtype: np.dtype[Any]) -> None:
        import torch

        self._torch, self._device = torch, device
        on_gpu = device.type == "cuda"
        like = torch.from_numpy(np.empty(0, dtype)).dtype
        self._memory = torch.empty(n, dtype=like, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._arrived: Any = None

    def room(self, rows: int, columns: int) -> NDArray[Any]:
        """(rows, columns) to be filled; waits until its last contents were copied."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: NDArray[Any] = self._memory[: rows * columns].view(rows, columns).numpy()
        return found

    def send(self, rows: int, columns: int, dtype: np.dtype[Any]) -> Tensor:
        """What was filled in, of another type, on the device."""
        torch = self._torch
        host = self._memory[: rows * columns].view(rows, columns)
        to = torch.from_numpy(np.empty(0, dtype)).dtype
        if self._stream is None:
            return host.to(self._device, to, copy=True)
        with torch.cuda.stream(self._stream):
            raw = host.to(self._device, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(self._stream)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._arrived)
        raw.record_stream(current)
        return raw.to(to, copy=True)

    def shift(self, x: Tensor, mean: NDArray[np.float32]) -> None:
        """x -= mean, on the device."""
        x -= self._on_device(mean)

    def times(self, x: Tensor, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """x weights, on the host."""
        found: NDArray[np.float32] = (
            (x @ self._on_device(weights).to(x.dtype)).float().cpu().numpy()
        )
        return found

    def _on_device(self, values: NDArray[np.float32]) -> Tensor:
        from vitsee_core.device import to_device

        return to_device(values, self._device)
