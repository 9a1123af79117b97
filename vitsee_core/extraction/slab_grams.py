"""Gram matrices of a slab's images, computed with the slab.

    for each site:  X = (valid images, tokens x channels), less the mean image;  K = X X^T

HSIC_1 is exactly invariant to that shift (rounding the mean to float32 does no harm); without it
float32 fails on features with a common offset. Columns are converted to float32 in chunks, sums
over chunks are in float64. The product itself is in float32 whatever the model's precision: no
TF32, no autocast.

An entry needs both of its images, so either one forward pass takes a whole slab, or activations are
kept until the slab is full:

    forward    each site's matrix is computed from the live tensor, in full precision
    memory     activations wait in host memory, in the type they would be stored in
    file       the same in an unnamed scratch file beside the store

Rounding to float16 moves entries by 1e-5 of the mean diagonal (rms; 2e-4 at worst, measured on a
small ViT); nothing else differs. On a CPU one strategy and batch size give the same bytes whatever
shards and resumed runs there are; on a GPU kernels may be selected anew, and last digits move.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import queue
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitsee_core.extraction.buffers import (
    HostMemory,
    Shape,
    SlabBuffers,
    block_bytes,
    feature_paths,
)
from vitsee_core.extraction.outcome import Clock
from vitsee_core.extraction.plan import slab_bytes
from vitsee_core.extraction.transfer import HostCopies
from vitsee_core.kernels.backend import matmul_backend
from vitsee_core.models.sites import SiteTable
from vitsee_core.runtime.device import precision_context
from vitsee_core.runtime.machine import (
    free_disk_bytes,
    human_bytes,
    memory_bytes,
    plural,
    scratch_folder,
)
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.layout import ArraySpec, StorePlan, arrays
from vitsee_stores.url import Place

# On the CPU a chunk stays in cache; on a GPU it is large enough to fill it.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20, "mps": 64 << 20}

Tensors = dict[str, Tensor]


class SlabGrams:
    """Hooks called for each slab; this base class computes no Gram matrices.

    Attributes:
        host_sites: names of the sites whose tokens go to host memory, in their stored type.
    """

    def __init__(self, plan: StorePlan) -> None:
        self.host_sites = frozenset(
            site.name
            for site in plan.sites
            if site.kind != "vector" and site.tokens == "all"
        )

    def reserve_memory(
        self, buffers: SlabBuffers, take: Callable[[queue.SimpleQueue[Tensors]], Tensors]
    ) -> None:
        """Give the buffers the additional memory that Gram matrices need, before a slab.

        Args:
            buffers: the slab's buffers; `unstored` is set.
            take: function that waits for an entry of a queue and returns it.
        """

    def batch_matrices(
        self, site: str, tensors: Sequence[Tensor], valid: Tensor
    ) -> Mapping[str, Tensor]:
        """Compute a site's matrix from the live tensors of one batch.

        Args:
            site: name of the site.
            tensors: (images, ...) each; an image's features are those of all tensors.
            valid: (images,) bool, on the host: which images count.

        Returns:
            Array name -> (n, n) of the n valid images.
        """
        return {}

    def device_matrices(
        self, buffers: SlabBuffers, n_images: int, copies: HostCopies
    ) -> Mapping[str, Tensor]:
        """Compute matrices after the last batch of a slab, before it goes to the writer's thread.

        Args:
            buffers: the slab's buffers.
            n_images: images of the slab, which the last one may have fewer of.
            copies: the copies into the buffers, some of them still under way.

        Returns:
            Array name -> matrix.
        """
        return {}

    def host_matrices(self, buffers: SlabBuffers, n_images: int) -> Mapping[str, Tensor]:
        """Compute the remaining matrices in the writer's thread, once the slab has arrived."""
        return {}


class LiveGrams(SlabGrams):
    """Gram matrices of the live tensors: a batch is a slab."""

    def __init__(self, plan: StorePlan, device: torch.device, clock: Clock) -> None:
        super().__init__(plan)
        self._sites = {site.name for site in plan.gram_sites}
        self._products = GramProducts(device)
        self._clock = clock

    def batch_matrices(
        self, site: str, tensors: Sequence[Tensor], valid: Tensor
    ) -> Mapping[str, Tensor]:
        """Return the matrix of a site over the whole slab, {} for sites without one."""
        if site not in self._sites:
            return {}
        with self._clock("grams"):
            return {f"grams/{site}/all": self._products.gram(tensors, valid)}


class BufferedGrams(SlabGrams):
    """Gram matrices of the activations of a full slab, stored ones and those of `sets`.

    If copies are asynchronous they are computed on the device, in the order of its stream; else by
    the CPU in the writer's thread.

    Args:
        plan: contents of the store.
        device: where the model runs.
        clock: gets the time of the products.
        sets: memory for the unstored activations of one slab each, array name -> tensor.
    """

    def __init__(
        self, plan: StorePlan, device: torch.device, clock: Clock, sets: Sequence[Tensors]
    ) -> None:
        super().__init__(plan)
        self.host_sites |= {site.name for site in plan.gram_sites}
        self._paths_by_gram = {
            f"grams/{site.name}/all": feature_paths(site) for site in plan.gram_sites
        }
        self._clock = clock
        # Two of them: each has a buffer of its own, for its own thread.
        self._device_products = GramProducts(device)
        self._host_products = GramProducts(torch.device("cpu"))
        self._free_sets: queue.SimpleQueue[Tensors] = queue.SimpleQueue()
        for tensors in sets:
            self._free_sets.put(tensors)

    def reserve_memory(
        self, buffers: SlabBuffers, take: Callable[[queue.SimpleQueue[Tensors]], Tensors]
    ) -> None:
        """Give the buffers a free set, and wait until there is one."""
        buffers.unstored = take(self._free_sets)

    def device_matrices(
        self, buffers: SlabBuffers, n_images: int, copies: HostCopies
    ) -> Mapping[str, Tensor]:
        """Return the matrices of a slab on a GPU; its set is free when this returns.

        Later copies into that set wait for the products, which are earlier in the stream.
        """
        if not copies.asynchronous:
            return {}
        # Activations are read on the host where they do not fit the device: not before they are
        # there.
        copies.wait()
        return self._multiply(self._device_products, buffers, n_images)

    def host_matrices(self, buffers: SlabBuffers, n_images: int) -> Mapping[str, Tensor]:
        """Return the matrices of a slab that were not computed on the device."""
        if buffers.unstored is None:
            return {}
        return self._multiply(self._host_products, buffers, n_images)

    def _multiply(
        self, products: GramProducts, buffers: SlabBuffers, n_images: int
    ) -> Mapping[str, Tensor]:
        """Return the matrices of the valid images among the first, and free their set."""
        matrices: dict[str, Tensor] = {}
        with self._clock("grams"):
            valid = buffers["valid"][:n_images] == 1
            for name, paths in self._paths_by_gram.items():
                features = [buffers[path][:n_images] for path in paths]
                matrices[name] = products.gram(features, valid)
        assert buffers.unstored is not None
        self._free_sets.put(buffers.unstored)
        buffers.unstored = None
        return matrices


class GramProducts:
    """X X^T on one device, through one reused buffer: for one thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sum_dtype = torch.float32 if device.type == "mps" else torch.float64
        self._buffer = torch.empty(0, device=device)
        self._backend = matmul_backend(device.type)

    def gram(self, tensors: Sequence[Tensor], valid: Tensor) -> Tensor:
        """Return (n, n) float32 on the device, exactly symmetric, of the n valid images.

        Args:
            tensors: (images, ...) each, on this device or on the host; an image's features are
                those of all tensors.
            valid: (images,) bool, on the host: which images count.
        """
        n_valid = int(valid.sum())
        total = torch.zeros(n_valid, n_valid, dtype=self._sum_dtype, device=self._device)
        if n_valid:
            rows = None if n_valid == len(valid) else valid.nonzero()[:, 0]
            with precision_context(self._device, "fp32"):
                for tensor in tensors:
                    features = _flatten(self._to_device_if_small(tensor))
                    self._add_product(features, rows, total)
        # Products may differ in the last digit on both sides of the diagonal: one side is used.
        return (total.triu() + total.triu(1).T).float()

    def _add_product(self, features: Tensor, rows: Tensor | None, total: Tensor) -> None:
        """Add the product of centred features to `total`, some columns at a time.

        Args:
            features: (images, columns).
            rows: indices of the images that count, None for all.
            total: (n, n) of these images, changed.
        """
        n_rows = len(total)
        n_columns = features.shape[1]
        chunk = max(1, CHUNK_BYTES[self._device.type] // (4 * n_rows))  # float32
        if len(self._buffer) < n_rows * min(chunk, n_columns):
            self._buffer = torch.empty(
                n_rows * min(chunk, n_columns), device=self._device
            )
        if rows is not None:
            rows = rows.to(features.device)
        for first in range(0, n_columns, chunk):
            piece = features[:, first : first + chunk]
            x = self._buffer[: n_rows * piece.shape[1]].view(n_rows, -1)
            x.copy_(piece if rows is None else piece[rows])
            x -= x.mean(0)
            if self._device.type == "cpu":
                # What is not finite is reported by `check_peaks`, with the site's name.
                with np.errstate(all="ignore"):
                    self._backend.add_gram(total.numpy(), x.numpy())
            else:
                self._backend.add_gram(total, x)

    def _to_device_if_small(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the GPU if it fits, in one copy; else unchanged.

        What does not fit is copied column by column, in `_add_product`.
        """
        if self._device.type != "cuda" or tensor.is_cuda:
            return tensor
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        if tensor.nbytes <= free_bytes // 4:
            return tensor.to(self._device, non_blocking=True)
        return tensor


def _flatten(x: Tensor) -> Tensor:
    """Return (images, features) in memory order, so that a channels-last output is not copied.

    The order of features changes no product.
    """
    strides = x.stride()
    order = sorted(range(1, x.ndim), key=lambda axis: -strides[axis])
    return x.permute(0, *order).reshape(len(x), -1)


# ---------------- where the activations of a slab wait

# Largest memory of a forward pass over that of its largest activation in float32: 3.5 to 6 for
# ViT, ResNet, Swin and Mixer on the CPU; the rest for what is reduced beside it.
FORWARD_FACTOR = 8
FORWARD = "forward"
MEMORY = "memory"
FILE = "file"
MIN_SLABS = 10  # for error bars of CKA, which leave out one slab at a time
MIN_IMAGES = 4  # in a slab: HSIC_1 divides by n - 3


@dataclass(frozen=True)
class GramStrategy:
    """How this process computes Gram matrices.

    Attributes:
        batch_size: images per forward pass.
        name: FORWARD, MEMORY or FILE, recorded with every slab; "" where no matrices are requested.
        n_sets: slabs whose activations wait at once.
        set_bytes: memory of the activations of one slab, beside its buffers.
    """

    batch_size: int
    name: str = ""
    n_sets: int = 0
    set_bytes: int = 0

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file, 0 without one."""
        return self.n_sets * self.set_bytes if self.name == FILE else 0

    def record(self) -> dict[str, str]:
        """Return the entry for the provenance of a slab."""
        return {"grams": self.name} if self.name else {}

    def describe(self, plan: StorePlan) -> str:
        """Return the strategy in words, with its bytes; "" without Gram matrices."""
        if not self.name:
            return ""
        subject = f"Gram matrices of {len(plan.gram_sites)} sites"
        size = human_bytes(self.n_sets * self.set_bytes)
        if self.name == FORWARD:
            return f"{subject}: each from one forward pass over its slab"
        if self.name == FILE:
            return (
                f"{subject}: activations of a slab wait in a scratch file of {size} beside the "
                f"store (none with --batch-size {plan.slab}, or a smaller --slab)"
            )
        if not self.set_bytes:
            return f"{subject}: from the slab buffers"
        slabs = plural(self.n_sets, "slabs")
        return f"{subject}: activations of {slabs} wait in {size} of host memory"

    def check_room(self, free_bytes: int, slab: int) -> None:
        """Refuse a scratch file that is larger than the free space beside the store.

        Args:
            free_bytes: free space of the disk.
            slab: images of a slab, which the error line proposes as batch size.

        Raises:
            VitseeError: says both sizes.
        """
        if self.scratch_bytes > free_bytes:
            raise VitseeError(
                f"--grams needs a scratch file of {human_bytes(self.scratch_bytes)} beside the "
                f"store, the disk has {human_bytes(free_bytes)} free; choose --batch-size {slab} "
                "(whole slabs need no file), a smaller --slab or fewer --sites"
            )

    @contextmanager
    def open(
        self, plan: StorePlan, device: torch.device, clock: Clock, output: Place
    ) -> Iterator[SlabGrams]:
        """Context with the object that computes the Gram matrices of slabs, and its memory.

        Args:
            plan: contents of the store.
            device: where the model runs.
            clock: gets the time of the products.
            output: the store, beside which a scratch file is made.

        Raises:
            VitseeError: no room for the scratch file, or it cannot be created.
        """
        if not self.name:
            yield SlabGrams(plan)
            return
        if self.name == FORWARD:
            yield LiveGrams(plan, device, clock)
            return
        shapes = _unstored_shapes(plan)
        blocks: list[Tensor | None] = [None] * self.n_sets
        if self.name == FILE:
            self.check_room(free_disk_bytes(scratch_folder(output)), plan.slab)
            space = _map_scratch_file(self.scratch_bytes, output)
            size = self.set_bytes
            blocks = [
                torch.frombuffer(space, dtype=torch.uint8, count=size, offset=k * size)
                for k in range(self.n_sets)
            ]
        with ExitStack() as stack:
            sets = []
            for block in blocks:
                # Pages of a file cannot be pinned.
                is_pinned = device.type == "cuda" and block is None
                memory = HostMemory(shapes, pinned=is_pinned, block=block)
                stack.callback(memory.release)
                sets.append(memory.tensors)
            yield BufferedGrams(plan, device, clock, sets)


def gram_notes(plan: StorePlan) -> list[str]:
    """Return a remark if slabs are too small for CKA, or too few for its error bars."""
    if not plan.gram_sites:
        return []
    start = f"Gram matrices within {plan.n_slabs} slabs of {plan.slab} images"
    if plan.slab < MIN_IMAGES:
        return [
            f"{start}: CKA needs at least {MIN_IMAGES} images in each (choose a larger --slab)"
        ]
    if plan.n_slabs < MIN_SLABS:
        return [
            f"{start}: CKA has error bars from {MIN_SLABS} slabs on (choose a smaller --slab)"
        ]
    return []


def unstored_arrays(plan: StorePlan) -> dict[str, ArraySpec]:
    """Return the activations that a slab's Gram matrices need beside stored ones.

    They are those of sites that are stored pooled, by the names they would have in a store.
    """
    sites_with_tokens = tuple(
        dataclasses.replace(site, tokens="all") for site in plan.gram_sites
    )
    needed = arrays(dataclasses.replace(plan, sites=sites_with_tokens))
    stored = arrays(plan)
    return {
        path: spec
        for path, spec in needed.items()
        if path.startswith("acts/") and path not in stored
    }


def choose_strategy(
    plan: StorePlan,
    table: SiteTable,
    device: torch.device,
    explicit_batch: int | None,
    default_batch: int,
) -> GramStrategy:
    """Choose how Gram matrices are computed, and with it the batch size.

    Whole slabs if their forward pass fits a quarter of the memory, or half of a GPU's free memory:
    on the CPU a batch of 256 cost 5 % more time than one of 32, keeping its activations twice the
    memory. Else activations wait in a quarter of the memory beside the slab buffers, for two slabs
    (one is multiplied while the next is filled) or for one; else in a file.

    Args:
        plan: contents of the store.
        table: the model's sites, whose shapes say how large a forward pass is.
        device: where the model runs.
        explicit_batch: batch size that the user chose, or None.
        default_batch: batch size without Gram matrices.
    """
    batch_size = min(explicit_batch or default_batch, plan.slab)
    if not plan.gram_sites:
        return GramStrategy(batch_size)
    if batch_size == plan.slab or (
        explicit_batch is None and _forward_fits(plan, table, device)
    ):
        return GramStrategy(plan.slab, FORWARD)
    set_bytes = block_bytes(_unstored_shapes(plan))
    room = memory_bytes() // 4 - 2 * slab_bytes(plan)
    # CUDA multiplies in the order of its stream, so that one set is enough.
    max_sets = 1 if device.type == "cuda" else min(2, plan.n_slabs)
    for n_sets in range(max_sets, 0, -1):
        if n_sets * set_bytes <= max(0, room):
            return GramStrategy(batch_size, MEMORY, n_sets, set_bytes)
    return GramStrategy(batch_size, FILE, 1, set_bytes)


def _forward_fits(plan: StorePlan, table: SiteTable, device: torch.device) -> bool:
    """Return whether a forward pass over a whole slab is likely to fit the memory."""
    largest_site = max(math.prod(site.shape) for site in table.sites)
    rollout_values = 0
    if plan.rollout:
        # The mean over heads of every block, (tokens, tokens), waits for the last block.
        group = plan.attention[0]
        rollout_values = len(group.blocks) * group.layout.n_tokens**2
    need = plan.slab * 4 * (FORWARD_FACTOR * largest_site + rollout_values)  # float32
    if device.type == "cuda":
        # Matrices of this slab, and those of the last one on their way to the host.
        gram_bytes = 2 * len(plan.gram_sites) * plan.slab**2 * 4
        return need + gram_bytes <= torch.cuda.mem_get_info(device)[0] // 2
    return need <= memory_bytes() // 4


def _unstored_shapes(plan: StorePlan) -> dict[str, Shape]:
    """Return the shape and type of the unstored activations of one slab, by array name."""
    return {
        path: ((plan.slab, *spec.shape[1:]), getattr(torch, spec.dtype))
        for path, spec in unstored_arrays(plan).items()
    }


def _map_scratch_file(size: int, output: Place) -> mmap.mmap:
    """Return memory mapped to a file beside `output`, which is removed with its last use.

    Raises:
        VitseeError: the file cannot be made that large.
    """
    try:
        with tempfile.TemporaryFile(dir=scratch_folder(output)) as file:
            # A full disk is an error here and not, later, a signal.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise VitseeError(
            f"cannot make a scratch file of {human_bytes(size)} beside {output}: {reason(error)}"
        ) from None
