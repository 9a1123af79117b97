"""Host memory for one slab's numbers, and its conversion to the store's arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.runtime.machine import human_bytes
from vitsee_core.summaries.summary import PER_CLIP, PER_IMAGE
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import ArraySpec, SiteSpec, StorePlan, arrays

PER_HEAD = tuple(name for name in PER_IMAGE if name != "head_std")
# Values for missing heads and invalid images in arrays of integers.
MISSING = {"n_queries": 0, "received_argmax": -1}
PEAKS = "peaks"

ALIGNED = 64
Shape = tuple[tuple[int, ...], torch.dtype]


class SlabBuffers:
    """Host memory for one slab, reused from slab to slab: path -> tensor, (slab, ...) of per-image
    values, and one row of sums over a slab.

    Attributes:
        unstored: activations that are not stored but needed for Gram matrices.
        sums: the sums so far.
        peaks: the largest |x| by site.
        done: what to wait for before reading.
    """

    def __init__(self, plan: StorePlan, pinned: bool):
        specs = {
            p: s for p, s in arrays(plan).items() if s.per == "image" or is_sum(p, s)
        }
        self._sites = [site.name for site in plan.sites]
        shapes: dict[str, Shape] = {PEAKS: ((len(self._sites),), torch.float32)}
        for path, spec in specs.items():
            shape = (
                (plan.slab, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
            )
            shapes[path] = shape, getattr(torch, spec.dtype)
        self._memory = HostMemory(shapes, pinned=pinned)
        tensors = self._memory.tensors
        self.arrays = {
            path: tensors[path] for path, spec in specs.items() if spec.per == "image"
        }
        self._row = {path: tensors[path] for path in specs.keys() - self.arrays.keys()}
        self.unstored: dict[str, Tensor] | None = None
        self.begin()

    def begin(self) -> None:
        """Start a slab: clear the sums."""
        self.sums: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}
        self.done: torch.cuda.Event | None = None

    def __getitem__(self, path: str) -> Tensor:
        """(slab, ...) of one array."""
        if path in self.arrays:
            return self.arrays[path]
        assert self.unstored is not None, path
        return self.unstored[path]

    def sum(self, path: str, shape: torch.Size) -> Tensor:
        """Destination of a sum of this shape; a Gram matrix of fewer images than a slab is smaller
        than its place."""
        self.sums[path] = self._row[path].flatten()[: shape.numel()].view(shape)
        return self.sums[path]

    def largest(self, names: list[str]) -> Tensor:
        """Destination of the largest |x| of these sites, in their order."""
        out = self._memory.tensors[PEAKS][: len(names)]
        self.peaks = dict(zip(names, out.unbind(), strict=True))
        return out

    def wait(self) -> None:
        """Return when everything has arrived."""
        if self.done is not None:
            self.done.synchronize()

    def release(self) -> None:
        """Unpin memory; no copy may be pending."""
        self._memory.release()


def feature_paths(site: SiteSpec) -> list[str]:
    """The arrays of a site's activations, prefix first."""
    body = {"tokens": "grid", "rows": "rows", "raw": "raw"}[site.kind]
    has_prefix = site.layout is not None and site.layout.n_prefix > 0
    return [
        f"acts/{site.name}/{part}" for part in (["prefix"] if has_prefix else []) + [body]
    ]


def is_sum(path: str, spec: ArraySpec) -> bool:
    """Whether an array has one row per slab that the observer sums on the device."""
    return spec.per == "slab" and path.startswith(("attention/", "grams/"))


def to_store(
    buffers: SlabBuffers, sums: Mapping[str, Tensor], n: int, plan: StorePlan
) -> dict[str, NDArray[Any]]:
    """The first `n` rows of the buffers and the slab's sums as arrays, after their arrival; invalid
    rows become NaN."""
    out: dict[str, NDArray[Any]] = {k: v[:n].numpy() for k, v in buffers.arrays.items()}
    invalid = np.flatnonzero(out["valid"] == 0)
    if invalid.size:
        for path, array in out.items():
            if array.dtype.kind == "f":
                array[invalid] = np.nan
            elif (name := path.rpartition("/")[2]) in MISSING:
                array[invalid] = MISSING[name]
    # Beyond a block's own heads, as buffers are reused and initially undefined.
    for group in plan.attention:
        for row, heads in enumerate(group.n_heads):
            for name in (*PER_HEAD, *PER_CLIP, "cls_rows", "received_rows"):
                if heads < max(group.n_heads) and (group.folder + name) in out:
                    out[group.folder + name][:, row, heads:] = MISSING.get(name, np.nan)
    valid = out["valid"] == 1
    for path, value in sums.items():
        array = value.numpy()
        out[path] = (
            as_block(array, valid, plan.slab) if path.startswith("grams/") else array
        )
    out["n_valid"] = np.asarray(int(out["valid"].sum()), np.int64)
    return out


def as_block(
    gram: NDArray[Any], valid: NDArray[np.bool_], slab: int
) -> NDArray[np.float32]:
    """(slab, slab): the matrix of the valid images in their places, NaN elsewhere."""
    block = np.full((slab, slab), np.nan, np.float32)
    places = np.flatnonzero(valid)
    block[np.ix_(places, places)] = gram
    return block


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
        shapes: Mapping[str, Shape],
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
            code = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), size, 0)
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
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())


def block_bytes(shapes: Mapping[str, Shape]) -> int:
    return sum(
        _aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes.values()
    )


def _aligned(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED
