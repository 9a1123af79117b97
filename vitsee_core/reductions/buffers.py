"""Memory that is reused from call to call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

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
