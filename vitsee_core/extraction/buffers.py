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
PEAKS = "peaks"  # name of the memory of the largest |x|, which is no array of a store
ALIGNED = 64  # bytes: a cache line, and enough for every type
Shape = tuple[tuple[int, ...], torch.dtype]


class SlabBuffers:
    """Host memory for the numbers of one slab, reused from slab to slab.

    Attributes:
        arrays: array name -> (slab, ...) values of each image.
        unstored: array name -> (slab, ...) activations that Gram matrices need and that are not
            stored; None without any.
        sums: array name -> sum over the slab, as far as it was sent.
        peaks: site -> its largest |x|.
        done: event after which everything has arrived, None if it has.
    """

    def __init__(self, plan: StorePlan, pinned: bool):
        """Take memory for any slab of a store.

        Args:
            plan: contents of the store.
            pinned: whether a GPU can copy to the memory asynchronously, until `release`.

        Raises:
            VitseeError: CUDA refuses to pin so much.
        """
        specs = {
            path: spec
            for path, spec in arrays(plan).items()
            if spec.per == "image" or is_sum(path, spec)
        }
        self._sites = [site.name for site in plan.sites]
        shapes: dict[str, Shape] = {PEAKS: ((len(self._sites),), torch.float32)}
        for path, spec in specs.items():
            shape = spec.shape[1:]
            if spec.per == "image":
                shape = (plan.slab, *shape)
            shapes[path] = shape, getattr(torch, spec.dtype)
        self._memory = HostMemory(shapes, pinned=pinned)
        self.arrays: dict[str, Tensor] = {}
        # Array name -> the row of one slab, at its largest size.
        self._memory_of_sums: dict[str, Tensor] = {}
        for path, spec in specs.items():
            tensors = self.arrays if spec.per == "image" else self._memory_of_sums
            tensors[path] = self._memory.tensors[path]
        self.unstored: dict[str, Tensor] | None = None
        self.begin()

    def begin(self) -> None:
        """Start a slab: forget which sums and peaks have arrived; memory is not zeroed."""
        self.sums: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}
        self.done: torch.cuda.Event | None = None

    def __getitem__(self, path: str) -> Tensor:
        """Return one array, (slab, ...), stored or not."""
        if path in self.arrays:
            return self.arrays[path]
        assert self.unstored is not None, path
        return self.unstored[path]

    def sum(self, path: str, shape: torch.Size) -> Tensor:
        """Return the memory that a sum of this shape is copied to.

        A Gram matrix of fewer images than a slab is smaller than its memory.
        """
        memory = self._memory_of_sums[path].flatten()
        self.sums[path] = memory[: shape.numel()].view(shape)
        return self.sums[path]

    def largest(self, names: list[str]) -> Tensor:
        """Return the memory that the largest |x| of these sites is copied to, in their order."""
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
    """Return the names of the arrays of a site's activations, prefix first."""
    body = {"tokens": "grid", "rows": "rows", "raw": "raw"}[site.kind]
    paths = [f"acts/{site.name}/{body}"]
    if site.layout is not None and site.layout.n_prefix > 0:
        paths.insert(0, f"acts/{site.name}/prefix")
    return paths


def is_sum(path: str, spec: ArraySpec) -> bool:
    """Return whether an array has one row per slab, which the observer sums on the device."""
    return spec.per == "slab" and path.startswith(("attention/", "grams/"))


def to_store(
    buffers: SlabBuffers, sums: Mapping[str, Tensor], n_images: int, plan: StorePlan
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a slab for the store, after all numbers have arrived.

    Floats of invalid images become NaN, in the buffers too.

    Args:
        buffers: the slab's buffers.
        sums: array name -> sum over the slab, or Gram matrix of its valid images.
        n_images: images of the slab, the first rows of the buffers.
        plan: contents of the store.
    """
    slab_arrays: dict[str, NDArray[Any]] = {
        path: tensor[:n_images].numpy() for path, tensor in buffers.arrays.items()
    }
    invalid_rows = np.flatnonzero(slab_arrays["valid"] == 0)
    if invalid_rows.size:
        for path, array in slab_arrays.items():
            name = path.rpartition("/")[2]
            if array.dtype.kind == "f":
                array[invalid_rows] = np.nan
            elif name in MISSING:
                array[invalid_rows] = MISSING[name]
    # A group's arrays are as wide as its block with most heads, and buffers are undefined at first.
    for group in plan.attention:
        for row, n_heads in enumerate(group.n_heads):
            if n_heads == max(group.n_heads):
                continue
            for name in (*PER_HEAD, *PER_CLIP, "cls_rows", "received_rows"):
                path = group.folder + name
                if path in slab_arrays:
                    slab_arrays[path][:, row, n_heads:] = MISSING.get(name, np.nan)
    valid = slab_arrays["valid"] == 1
    for path, tensor in sums.items():
        array = tensor.numpy()
        if path.startswith("grams/"):
            array = as_block(array, valid, plan.slab)
        slab_arrays[path] = array
    slab_arrays["n_valid"] = np.asarray(int(slab_arrays["valid"].sum()), np.int64)
    return slab_arrays


def as_block(
    gram: NDArray[Any], valid: NDArray[np.bool_], slab: int
) -> NDArray[np.float32]:
    """Return (slab, slab) with the matrix at the rows and columns of valid images, else NaN.

    Args:
        gram: (n, n) of the n valid images.
        valid: (images,) which images of the slab are valid.
        slab: images of a whole slab.
    """
    block = np.full((slab, slab), np.nan, np.float32)
    valid_rows = np.flatnonzero(valid)
    block[np.ix_(valid_rows, valid_rows)] = gram
    return block


class HostMemory:
    """Tensors of several shapes and types, consecutive in one block of memory.

    The block itself is pinned by registering it with CUDA: torch's own pinned tensors are each
    rounded up to powers of two, up to twice the size, and cannot be swapped out.

    Args:
        shapes: name -> (shape, type).
        pinned: whether a GPU can copy to it asynchronously, until `release`.
        block: uint8, at least `block_bytes(shapes)` long; None for new memory.

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
            n_bytes = math.prod(shape) * dtype.itemsize
            memory = self._block[offset : offset + n_bytes]
            self.tensors[name] = memory.view(dtype).view(shape)
            offset += _aligned(n_bytes)
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
    """Return the bytes of a block with tensors of these shapes and types."""
    return sum(
        _aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes.values()
    )


def _aligned(n_bytes: int) -> int:
    """Round up to a multiple of `ALIGNED`."""
    return -(-n_bytes // ALIGNED) * ALIGNED
