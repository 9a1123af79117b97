"""Memory that is used again from call to call: buffers by name, and pinned memory through which
strips of features go to a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.runtime.device import to_device
from vitsee_core.types import Float32

if TYPE_CHECKING:
    from torch import Tensor


class Buffers:
    """Float32 tensors by name; requesting one again loses its contents."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            # Allocating this much memory each time costs page faults worth a tenth of the run. An
            # inference tensor could not be written outside inference mode by a later caller.
            with torch.inference_mode(False):
                kept = torch.empty(size, dtype=torch.float32, device=self._device)
            self._kept[name] = kept
        return kept[:size].view(shape)


class Staging:
    """A strip on its way to the device, for one thread: pinned memory that is filled with values as
    stored, sent on a stream of its own, and refilled once it has arrived."""

    def __init__(self, device: Any, n: int, dtype: np.dtype[Any]) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        like = torch.from_numpy(np.empty(0, dtype)).dtype
        self._memory = torch.empty(n, dtype=like, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._arrived: Any = None

    def room(self, rows: int, columns: int) -> NDArray[Any]:
        """(rows, columns) to be filled; waits until the previous contents were copied."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._memory[: rows * columns].view(rows, columns).numpy()

    def send(self, rows: int, columns: int, dtype: np.dtype[Any]) -> Tensor:
        """The filled values, on the device in another type."""
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

    def shift(self, x: Tensor, mean: Float32) -> None:
        """x -= mean, on the device."""
        x -= self._on_device(mean)

    def times(self, x: Tensor, weights: Float32) -> Float32:
        return (x @ self._on_device(weights).to(x.dtype)).float().cpu().numpy()

    def _on_device(self, values: Float32) -> Tensor:
        return to_device(values, self._device)
