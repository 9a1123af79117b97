"""Multiply matrices on the CPU by numpy, or on a GPU by torch, in memory that is reused.

torch is imported only when it is used.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.lanes import one_blas_thread, one_torch_thread
from vitsee_core.types import Float, Float32
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Multiplications above which a GPU, or torch's faster cast, is worth importing torch, which takes
# seconds.
LARGE = 1e11
# Multiplications above which compiled loops are worth loading, which takes a second.
WORTH_COMPILING = 5e11
# Columns of a symmetric product that a GPU makes at a time: an eighth, but as many as fill it.
MIN_WIDTH = 1024
N_WIDTHS = 8
TERMS = 16384  # products that `add_gram` sums in single precision on a GPU
PRECISIONS = ("fp32", "bf16")  # of the products of Gram matrices
BF16_COLUMNS = 2048  # features that one product of bfloat16 sums
# Numbers between the rows of a product. numpy copies one triangle of x x^T to the other, column by
# column: at strides of a power of two all of a column falls into the same few lines of the cache.
GAP = 16

# cast(to, values) copies values (rows, columns) into `to`, an array of the same shape and another
# type.
Cast = Callable[[NDArray[Any], NDArray[Any]], None]


def choose_device(text: str, work: float) -> str:
    """Return cpu, cuda or cuda:i for a user's `--device`.

    `auto` is the CPU if the work, in multiplications, is too small to import torch for. Devices
    differ in rounding only.

    Raises:
        VitseeError: no such device, or one without float64.
    """
    if text == "cpu" or (text == "auto" and work < LARGE and "torch" not in sys.modules):
        return "cpu"
    from vitsee_core.runtime.device import resolve_device

    device = resolve_device(text)
    if device.type == "mps":
        if text == "auto":
            return "cpu"
        raise VitseeError("--device mps has no float64; use --device cpu")
    return str(device)


def is_worth_compiling(work: float) -> bool:
    """Return whether compiled loops save more time than loading them takes.

    work: multiplications on the CPU.
    """
    return work > WORTH_COMPILING


def full_precision(device: str) -> AbstractContextManager[None]:
    """Context in which float32 is not replaced by TF32 or bfloat16."""
    if device == "cpu":
        return nullcontext()
    import torch

    from vitsee_core.runtime.device import precision_context

    return precision_context(torch.device(device), "fp32")


class MatmulBackend(Protocol):
    """Strips of features (rows, columns), their products, and float64 sums of products."""

    def cast(self, to: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy into another type, on the host."""

    def staging(self, n: int, dtype: np.dtype[Any]) -> Staging | None:
        """Pinned memory for strips of at most `n` numbers that are sent as stored, then cast and
        shifted on the device; None where strips are used in place."""

    def free_bytes(self) -> int | None:
        """Usable bytes of the device's own memory; None if it has none."""

    def one_thread(self) -> AbstractContextManager[None]:
        """Context in which a product on the host runs in the thread that calls it."""

    def buffer(self, memory: NDArray[Any]) -> Any:
        """Device memory of the size and type of `memory`."""

    def zeros(self, shape: tuple[int, int]) -> Any:
        """A float64 sum of products, initially 0."""

    def take(self, x: NDArray[Any]) -> Any:
        """The strip on the device."""

    def multiply(self, left: Any, right: Any, out: Any) -> None:
        """out = left right^T; if `left is right`, a GPU fills only the lower triangle."""

    def add(self, total: Any, product: Any) -> None:
        """total += product."""

    def add_gram(self, total: Any, x: Any) -> None:
        """total (n, n) += x x^T, both triangles, for x (n, columns) on the device."""

    def host(self, total: Any, symmetric: bool) -> Float:
        """The sum as an array, both triangles."""


def matmul_backend(device: str, precision: str = "fp32") -> MatmulBackend:
    """Return the backend of a device, as `choose_device` names it; precision: of `PRECISIONS`."""
    if device == "cpu":
        return Cpu()
    if precision == "bf16":
        return CudaBfloat16(device)
    return Cuda(device)


def require_bfloat16(device: str) -> None:
    """Refuse a device on which bfloat16 products are slower than float32.

    Raises:
        VitseeError: names the device.
    """
    if device == "cpu":
        raise VitseeError(
            "--precision bf16 is slower than fp32 on a CPU; leave it out, or give --device cuda"
        )
    import torch

    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise VitseeError(
            f"--precision bf16: {device} has no products of bfloat16 (compute capability 8 or "
            "later); use --precision fp32"
        )


def product_size(rows: int, others: int) -> int:
    """Return the number of elements that `product_in` needs for a product (rows, others)."""
    return rows * (others + GAP)


def product_in(memory: Any, rows: int, others: int) -> Any:
    """Return (rows, others) of memory for a product.

    memory: (n,), an array or a tensor, of which the result is a view.
    """
    return memory[: product_size(rows, others)].reshape(rows, others + GAP)[:, :others]


class Cpu:
    """`MatmulBackend` of numpy, and of torch where that is imported and faster."""

    def cast(self, to: NDArray[Any], values: NDArray[Any]) -> None:
        """Cast by torch, if it is imported and the values are float16: 2 to 5 times as fast."""
        if (
            "torch" in sys.modules
            and values.dtype == np.float16
            and values.flags.writeable
        ):
            import torch

            torch.from_numpy(to).copy_(torch.from_numpy(values))
        else:
            np.copyto(to, values)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Limit BLAS to one thread, and torch if it is imported."""
        with (
            one_blas_thread(),
            one_torch_thread() if "torch" in sys.modules else nullcontext(),
        ):
            yield

    def staging(self, n: int, dtype: np.dtype[Any]) -> None:
        """Return None: strips are used in place."""

    def free_bytes(self) -> None:
        """Return None: there is no other memory than the host's."""

    def buffer(self, memory: NDArray[Any]) -> NDArray[Any]:
        """Return `memory` itself."""
        return memory

    def zeros(self, shape: tuple[int, int]) -> Float:
        """Return a float64 array of 0."""
        return np.zeros(shape)

    def take(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return `x` itself."""
        return x

    def multiply(
        self, left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]
    ) -> None:
        """Write left right^T to `out`.

        Symmetric products are by numpy, which calls syrk: half the work. Others are by torch, if it
        is imported: 20 % faster than numpy at some hundred rows, 5 % at a thousand.
        """
        if left is right or "torch" not in sys.modules:
            np.matmul(left, right.T, out=out)
        else:
            import torch

            torch.mm(
                torch.from_numpy(left),
                torch.from_numpy(right).T,
                out=torch.from_numpy(out),
            )

    def add(self, total: Float, product: NDArray[Any]) -> None:
        """Add a product to a float64 sum, in place."""
        np.add(total, product, out=total)

    def add_gram(self, total: Float, x: Float32) -> None:
        """Add x x^T to `total`, by BLAS' syrk."""
        total += x @ x.T

    def host(self, total: Float, symmetric: bool) -> Float:
        """Return the sum itself: both triangles are there."""
        return total


class Cuda:
    """`MatmulBackend` of torch, on a device with float64."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)

    def cast(self, to: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy into another type, on the host, by torch: faster than numpy for float16."""
        self._torch.from_numpy(to).copy_(self._torch.from_numpy(values))

    def one_thread(self) -> AbstractContextManager[None]:
        """Limit BLAS to one thread, for sums on the host."""
        return one_blas_thread()

    def staging(self, n: int, dtype: np.dtype[Any]) -> Staging:
        """Return memory for strips as stored: half the bytes of float32 for float16, and no cast on
        the host."""
        return Staging(self._device, n, dtype)

    def free_bytes(self) -> int:
        """Return half of the device's free memory, as torch needs some itself."""
        return int(self._torch.cuda.mem_get_info(self._device)[0] // 2)

    def buffer(self, memory: NDArray[Any]) -> Tensor:
        """Return uninitialised device memory of the same size and type."""
        dtype = self._torch.from_numpy(memory[:0]).dtype
        return self._torch.empty(len(memory), dtype=dtype, device=self._device)

    def zeros(self, shape: tuple[int, int]) -> Tensor:
        """Return a float64 tensor of 0 on the device."""
        return self._torch.zeros(shape, dtype=self._torch.float64, device=self._device)

    def take(self, x: NDArray[Any]) -> Tensor:
        """Return a copy on the device."""
        return self._torch.from_numpy(x).to(self._device)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left right^T to `out`; of a symmetric product a few columns at a time, each from
        the diagonal down, which is little more than half the work."""
        is_symmetric = left is right
        width = len(right)
        if is_symmetric:
            width = max(MIN_WIDTH, len(right) // N_WIDTHS)
        for start in range(0, len(right), width):
            first = start if is_symmetric else 0
            columns = slice(start, start + width)
            self._torch.mm(left[first:], right[columns].T, out=out[first:, columns])

    def add(self, total: Tensor, product: Tensor) -> None:
        """Add a product to a float64 sum, in place."""
        total += product

    def add_gram(self, total: Tensor, x: Tensor) -> None:
        """Add x x^T to `total`, in sums of at most `TERMS` products.

        Longer sums lose digits; how many depends on the kernel that cuBLAS chooses. All blocks of
        `TERMS` columns are one batched call, which fills a GPU where one small matrix does not.
        """
        torch = self._torch
        n_blocks = x.shape[1] // TERMS
        in_blocks = n_blocks * TERMS
        if n_blocks:
            # (blocks, n, TERMS)
            blocks = x[:, :in_blocks].unflatten(1, (n_blocks, TERMS)).transpose(0, 1)
            total += torch.bmm(blocks, blocks.transpose(1, 2)).sum(0, dtype=total.dtype)
        if in_blocks < x.shape[1]:
            last = x[:, in_blocks:]
            total += torch.mm(last, last.T)

    def host(self, total: Tensor, symmetric: bool) -> Float:
        """Return the sum as an array; of a symmetric one the lower triangle is mirrored."""
        if symmetric:
            total = total.tril() + total.tril(-1).T
        return total.cpu().numpy()


class CudaBfloat16(Cuda):
    """`Cuda` with factors rounded to bfloat16, 8 bits.

    For centred features that costs CKA 4e-6 at 512 images of 12,600 features (tested), and less
    with more of either: rounding errors are independent and average out over features and pairs of
    images. A product of some columns is rounded to 8 bits, too; these are summed in float32.
    """

    def multiply(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left right^T to `out`; entries above the diagonal of a symmetric product are
        undefined, but finite."""
        out.zero_()
        rows = len(left)
        if left is right:
            rows = max(MIN_WIDTH, len(left) // N_WIDTHS)
        for at in range(0, left.shape[1], BF16_COLUMNS):
            a = left[:, at : at + BF16_COLUMNS].bfloat16()
            b = a if left is right else right[:, at : at + BF16_COLUMNS].bfloat16()
            for i in range(0, len(a), rows):
                until = i + rows if left is right else len(b)
                out[i : i + rows, :until] += a[i : i + rows] @ b[:until].T


class Buffers:
    """Float32 tensors by name, whose memory is reused; requesting one again loses its contents."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape in the memory of that name, with arbitrary contents."""
        size = math.prod(shape)
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < size:
            # Allocating this much memory each time costs page faults worth a tenth of the run. An
            # inference tensor could not be written outside inference mode by a later caller.
            with self._torch.inference_mode(False):
                tensor = self._torch.empty(
                    size, dtype=self._torch.float32, device=self._device
                )
            self._tensors[name] = tensor
        return tensor[:size].view(shape)


class Staging:
    """Memory for a strip on its way to the device, for one thread.

    It is pinned, filled with values as stored, sent on a stream of its own, and refilled once its
    contents have arrived.

    Args:
        device: torch's.
        n: the largest number of values of a strip.
        dtype: in which they are stored.
    """

    def __init__(self, device: Any, n: int, dtype: np.dtype[Any]) -> None:
        import torch

        self._torch = torch
        self._device = device
        on_gpu = device.type == "cuda"
        like = torch.from_numpy(np.empty(0, dtype)).dtype
        self._memory = torch.empty(n, dtype=like, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._arrived: Any = None

    def room(self, rows: int, columns: int) -> NDArray[Any]:
        """Return (rows, columns) to be filled, once the previous contents were copied."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._memory[: rows * columns].view(rows, columns).numpy()

    def send(self, rows: int, columns: int, dtype: np.dtype[Any]) -> Tensor:
        """Return the filled values (rows, columns) on the device, in another type."""
        host = self._memory[: rows * columns].view(rows, columns)
        to = self._torch.from_numpy(np.empty(0, dtype)).dtype
        if self._stream is None:
            return host.to(self._device, to, copy=True)
        with self._torch.cuda.stream(self._stream):
            raw = host.to(self._device, non_blocking=True)
        # The host may refill the memory after this event; the device's work waits for it, too.
        self._arrived = self._torch.cuda.Event()
        self._arrived.record(self._stream)
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(self._arrived)
        raw.record_stream(current)  # its memory is not reused before that work is done
        return raw.to(to, copy=True)

    def shift(self, x: Tensor, mean: Float32) -> None:
        """Subtract the mean (columns,) from x (rows, columns) on the device, in place."""
        x -= self._on_device(mean)

    def times(self, x: Tensor, weights: Float32) -> Float32:
        """Return x @ weights on the host, for x (rows, columns) on the device."""
        return (x @ self._on_device(weights).to(x.dtype)).float().cpu().numpy()

    def _on_device(self, values: Float32) -> Tensor:
        """Return a copy on the device."""
        from vitsee_core.runtime.device import to_device

        return to_device(values, self._device)
