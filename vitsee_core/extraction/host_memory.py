"""Blocks of host memory for many tensors, which a GPU can write to asynchronously."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitsee_core.runtime.machine import human_bytes
from vitsee_stores.errors import VitseeError

ALIGNED = 64


class HostMemory:
    """Tensors of given shapes and types, consecutive in one block.

    The block itself is pinned by registering it with CUDA: torch's own pinned tensors are each
    rounded up to powers of two, up to twice the size, and cannot be swapped out.

    Args:
        shapes: name -> (shape, type).
        pinned: for asynchronous copies from a GPU; until `release`.
        block: uint8, at least `block_bytes(shapes)` long, instead of its own memory.

    Raises:
        VitseeError: CUDA refuses to pin so much.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        pinned: bool = False,
        block: Tensor | None = None,
    ) -> None:
        size = block_bytes(shapes)
        self._block = torch.empty(size, dtype=torch.uint8) if block is None else block
        self._pinned = pinned and size > 0
        self.tensors: dict[str, Tensor] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            n = math.prod(shape) * dtype.itemsize
            self.tensors[name] = self._block[offset : offset + n].view(dtype).view(shape)
            offset += _aligned(n)
        if self._pinned:
            code = _cudart().cudaHostRegister(self._block.data_ptr(), size, 0)
            if int(code) != 0:
                self._pinned = False
                raise VitseeError(
                    f"CUDA cannot pin {human_bytes(size)} of host memory for slab buffers (error "
                    f"{int(code)}); choose a smaller --slab"
                )

    def release(self) -> None:
        """Unpin the memory; no copy may be pending. The tensors keep their values."""
        if self._pinned:
            self._pinned = False
            _cudart().cudaHostUnregister(self._block.data_ptr())


def block_bytes(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes.values())


def _aligned(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED


def _cudart() -> Any:
    return torch.cuda.cudart()
