"""Device and precision of the forward pass."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray

from vitsee_stores.errors import VitseeError

PrecisionSwitches = list[tuple[Any, str, Any]]  # (object, attribute, value), to be set
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(text: str) -> torch.device:
    """Return the torch device for auto, cpu, cuda, cuda:i or mps.

    auto is CUDA if there is a GPU, else Metal, else the CPU.

    Raises:
        VitseeError: the device is unknown, or not available here or in this build of torch.
    """
    has_mps = torch.backends.mps.is_available()
    if text == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if has_mps else "cpu")
    match = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", text)
    if match is None:
        raise VitseeError(
            f"--device is {text!r}; expected auto, cpu, cuda, cuda:1 or mps"
        )
    kind = match[1]
    index = int(match[2] or 0)
    n_cuda = torch.cuda.device_count()
    if kind == "cuda" and index >= n_cuda:
        raise VitseeError(
            f"--device {text}: torch sees {n_cuda} CUDA devices here; try auto"
        )
    if kind == "mps" and not has_mps:
        raise VitseeError("--device mps: torch sees no Metal device here; try auto")
    if kind == "cuda":
        return torch.device(kind, index)
    return torch.device(kind)


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or the type of another device: cpu, mps."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device.

    For a GPU through pinned memory: a copy from pageable memory would wait for all pending work
    there.
    """
    x = torch.from_numpy(values)
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@contextmanager
def precision_context(device: torch.device, precision: str) -> Iterator[None]:
    """Context in which the arithmetic of products is fp32, tf32 (CUDA only), bf16 or fp16.

    fp32 is exactly that: no TF32, no bfloat16 and no autocast, whatever the environment or the
    caller has switched on; bf16 and fp16 are torch's autocast.

    Products of half precision are accumulated in float32 in all of them. The switches are
    process-wide: contexts may nest and may be entered by several threads at once, the latest
    entered wins, and the original state returns after the last exit. So threads of one precision do
    not disturb each other; those of different precision do.

    Raises:
        VitseeError: tf32 on a device that is not CUDA.
    """
    if precision == "tf32" and device.type != "cuda":
        raise VitseeError(
            f"--precision tf32 exists on CUDA only; this run is on {device.type}"
        )
    half = AUTOCAST.get(precision, torch.bfloat16)
    with (
        _OPEN_CONTEXTS.with_switches(_precision_switches(tf32=precision == "tf32")),
        torch.autocast(device.type, half, enabled=precision in AUTOCAST),
    ):
        yield


class _OpenContexts:
    """The open contexts' switches, and the state before the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[
            PrecisionSwitches
        ] = []  # in the order in which they were entered
        self._before: PrecisionSwitches = []

    @contextmanager
    def with_switches(self, switches: PrecisionSwitches) -> Iterator[None]:
        """Context in which these switches apply, unless a later context is open."""
        with self._lock:
            if not self._open:
                self._before = [
                    (module, name, getattr(module, name)) for module, name, _ in switches
                ]
            self._open.append(switches)
            self._set(switches)
        try:
            yield
        finally:
            with self._lock:
                # By identity: other contexts may have equal switches, in another place.
                self._open = [other for other in self._open if other is not switches]
                self._set(self._open[-1] if self._open else self._before)

    def _set(self, switches: PrecisionSwitches) -> None:
        """Set torch's switches."""
        for module, name, value in switches:
            setattr(module, name, value)


_OPEN_CONTEXTS = _OpenContexts()


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which products of float32 stay float32.

    Within torch's autocast it would round their factors and their result, undoing manual casts,
    wherever no `out` is given.
    """
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def current_precision(device: torch.device) -> str:
    """Return the precision of float32 products now: fp32, tf32, or half (autocast)."""
    if torch.is_autocast_enabled(device.type):
        return "half"
    if device.type != "cuda":
        return "fp32"
    module, name, tf32_value = _precision_switches(tf32=True)[0]
    return "tf32" if getattr(module, name) == tf32_value else "fp32"


def _precision_switches(tf32: bool) -> PrecisionSwitches:
    """Return the settings that decide the precision of float32 products, with their values.

    The first is that of CUDA's matrix products, which `current_precision` reads.
    """
    backends = torch.backends
    matmul = backends.cuda.matmul
    # Half precision sums in float32.
    half_sums = [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
    ]
    if not hasattr(matmul, "fp32_precision"):  # before torch 2.9
        return [
            (matmul, "allow_tf32", tf32),
            (backends.cudnn, "allow_tf32", tf32),
            *half_sums,
        ]
    # The older names, of which there is none for the CPU, may not even be read once somebody has
    # used these.
    cudnn: Any = backends.cudnn
    cpu: Any = backends.mkldnn
    cuda_precision = "tf32" if tf32 else "ieee"
    return [
        (matmul, "fp32_precision", cuda_precision),
        (cudnn.conv, "fp32_precision", cuda_precision),
        (cudnn.rnn, "fp32_precision", cuda_precision),
        (cpu.matmul, "fp32_precision", "ieee"),
        (cpu.conv, "fp32_precision", "ieee"),
        *half_sums,
    ]
