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

Switches = list[tuple[Any, str, Any]]  # object, attribute, value
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(text: str) -> torch.device:
    """The torch device for auto, cpu, cuda, cuda:i or mps; auto takes the first that exists. Raises
    VitseeError: unknown, or not available on this machine or in this torch build."""
    has_mps = torch.backends.mps.is_available()
    if text == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
        )
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
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device, through pinned memory for a GPU: a copy from pageable memory would
    wait for all pending work there."""
    x = torch.from_numpy(values)
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@contextmanager
def precision_context(device: torch.device, precision: str) -> Iterator[None]:
    """fp32 (exactly: no TF32, no bfloat16, no autocast, whatever the environment or the caller has
    switched on), tf32 (CUDA), or autocast to bf16 or fp16.

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
        _OPEN.with_switches(_switches(tf32=precision == "tf32")),
        torch.autocast(device.type, half, enabled=precision in AUTOCAST),
    ):
        yield


class _OpenContexts:
    """The open contexts' switches, and the state before the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[Switches] = []
        self._before: Switches = []

    @contextmanager
    def with_switches(self, wanted: Switches) -> Iterator[None]:
        """Context in which these switches apply, unless a later context is open."""
        with self._lock:
            if not self._wanted:
                self._before = [
                    (place, name, getattr(place, name)) for place, name, _ in wanted
                ]
            self._wanted.append(wanted)
            self._set(wanted)
        try:
            yield
        finally:
            with self._lock:
                own = next(i for i, some in enumerate(self._wanted) if some is wanted)
                del self._wanted[own]
                self._set(self._wanted[-1] if self._wanted else self._before)

    def _set(self, switches: Switches) -> None:
        for place, name, value in switches:
            setattr(place, name, value)


_OPEN = _OpenContexts()


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which products of float32 stay float32: autocast rounds their factors and their
    result, undoing manual casts, wherever no `out` is given."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def current_precision(device: torch.device) -> str:
    """The current precision of float32 products on this device: fp32, tf32, or half (autocast)."""
    if torch.is_autocast_enabled(device.type):
        return "half"
    if device.type != "cuda":
        return "fp32"
    place, name, rounded = _switches(tf32=True)[0]
    return "tf32" if getattr(place, name) == rounded else "fp32"


def _switches(tf32: bool) -> Switches:
    """The settings that decide the precision of float32 products: (object, attribute, value)."""
    backends = torch.backends
    matmul = backends.cuda.matmul
    halves = [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
    ]
    if not hasattr(matmul, "fp32_precision"):  # before torch 2.9
        return [
            (matmul, "allow_tf32", tf32),
            (backends.cudnn, "allow_tf32", tf32),
            *halves,
        ]
    # The older names, of which there is none for the CPU, may not even be read once somebody has
    # used these.
    cuda: Any = backends.cudnn
    cpu: Any = backends.mkldnn
    return [
        *(
            (place, "fp32_precision", "tf32" if tf32 else "ieee")
            for place in (matmul, cuda.conv, cuda.rnn)
        ),
        *((place, "fp32_precision", "ieee") for place in (cpu.matmul, cpu.conv)),
        *halves,
    ]
