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
shards and resumed runs there are; on a GPU kernels may be selected anew, and last digits move."""

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

    kept: names of the sites whose tokens go to host memory, in their stored type.
    """

    def __init__(self, plan: StorePlan) -> None:
        self.kept = frozenset(
            site.name
            for site in plan.sites
            if site.kind != "vector" and site.tokens == "all"
        )

    def reserve(
        self, buffers: SlabBuffers, take: Callable[[queue.SimpleQueue[Tensors]], Tensors]
    ) -> None:
        """Give the buffers, before a slab, the additional memory that Gram matrices need; `take`
        waits for a free set."""

    def of_batch(
        self, site: str, parts: Sequence[Tensor], valid: Tensor
    ) -> Mapping[str, Tensor]:
        """Array name -> Gram matrix, from the live tensors of one batch; see `GramProducts`."""
        return {}

    def on_device(
        self, buffers: SlabBuffers, n: int, copies: HostCopies
    ) -> Mapping[str, Tensor]:
        """The matrices to compute after the last batch of a slab of `n` images, before it goes to
        the writer's thread."""
        return {}

    def on_host(self, buffers: SlabBuffers, n: int) -> Mapping[str, Tensor]:
        """The remaining matrices, computed in the writer's thread once the slab has arrived."""
        return {}


class LiveGrams(SlabGrams):
    """Gram matrices of the live tensors: a batch is a slab."""

    def __init__(self, plan: StorePlan, device: torch.device, clock: Clock) -> None:
        super().__init__(plan)
        self._sites = {site.name for site in plan.gram_sites}
        self._products = GramProducts(device)
        self._clock = clock

    def of_batch(
        self, site: str, parts: Sequence[Tensor], valid: Tensor
    ) -> Mapping[str, Tensor]:
        if site not in self._sites:
            return {}
        with self._clock("grams"):
            return {f"grams/{site}/all": self._products.gram(parts, valid)}


class BufferedGrams(SlabGrams):
    """Gram matrices of the activations of a full slab, stored ones and those of `sets`.

    If copies are asynchronous they are computed on the device, in the order of its stream; else by
    the CPU in the writer's thread.
    """

    def __init__(
        self, plan: StorePlan, device: torch.device, clock: Clock, sets: Sequence[Tensors]
    ) -> None:
        super().__init__(plan)
        self.kept |= {site.name for site in plan.gram_sites}
        self._paths = {
            f"grams/{site.name}/all": feature_paths(site) for site in plan.gram_sites
        }
        self._clock = clock
        self._on_device = GramProducts(device)
        self._on_host = GramProducts(torch.device("cpu"))
        self._free: queue.SimpleQueue[Tensors] = queue.SimpleQueue()
        for tensors in sets:
            self._free.put(tensors)

    def reserve(
        self, buffers: SlabBuffers, take: Callable[[queue.SimpleQueue[Tensors]], Tensors]
    ) -> None:
        buffers.unstored = take(self._free)

    def on_device(
        self, buffers: SlabBuffers, n: int, copies: HostCopies
    ) -> Mapping[str, Tensor]:
        """Frees the memory at once: later copies wait for the products."""
        if not copies.asynchronous:
            return {}
        # Activations are read on the host where they do not fit the device: not before they are
        # there.
        copies.wait()
        return self._made(self._on_device, buffers, n)

    def on_host(self, buffers: SlabBuffers, n: int) -> Mapping[str, Tensor]:
        if buffers.unstored is None:
            return {}
        return self._made(self._on_host, buffers, n)

    def _made(
        self, products: GramProducts, buffers: SlabBuffers, n: int
    ) -> Mapping[str, Tensor]:
        """Matrices of the valid images among the first `n`; frees their memory."""
        with self._clock("grams"):
            valid = buffers["valid"][:n] == 1
            made = {
                name: products.gram([buffers[path][:n] for path in paths], valid)
                for name, paths in self._paths.items()
            }
        assert buffers.unstored is not None
        self._free.put(buffers.unstored)
        buffers.unstored = None
        return made


class GramProducts:
    """X X^T on one device, through one reused buffer: for one thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._buffer = torch.empty(0, device=device)
        self._backend = matmul_backend(device.type)

    def gram(self, parts: Sequence[Tensor], valid: Tensor) -> Tensor:
        """(n, n) float32 on the device, exactly symmetric, n the number of valid images.

        Args:
            parts: (images, ...) each, on this device or on the host; an image's features are those
                of all parts.
            valid: (images,) bool, on the host: which images count.
        """
        n = int(valid.sum())
        total = torch.zeros(n, n, dtype=self._wide, device=self._device)
        if n:
            rows = None if n == len(valid) else valid.nonzero()[:, 0]
            with precision_context(self._device, "fp32"):
                for part in parts:
                    self._add(_flat(self._near(part)), rows, total)
        return (total.triu() + total.triu(1).T).float()

    def _add(self, features: Tensor, rows: Tensor | None, total: Tensor) -> None:
        """Add the product of one part's features (images, columns)."""
        n = len(total)
        width = features.shape[1]
        columns = max(1, CHUNK_BYTES[self._device.type] // (4 * n))
        if len(self._buffer) < n * min(columns, width):
            self._buffer = torch.empty(n * min(columns, width), device=self._device)
        rows = None if rows is None else rows.to(features.device)
        for first in range(0, width, columns):
            piece = features[:, first : first + columns]
            x = self._buffer[: n * piece.shape[1]].view(n, -1)
            x.copy_(piece if rows is None else piece[rows])
            x -= x.mean(0)
            if self._device.type == "cpu":
                with np.errstate(
                    all="ignore"
                ):  # `check_peaks` reports what is not finite
                    self._backend.add_gram(total.numpy(), x.numpy())
            else:
                self._backend.add_gram(total, x)

    def _near(self, part: Tensor) -> Tensor:
        """The part on the device if it fits, in one copy; else unchanged, to be fetched in
        pieces."""
        if self._device.type != "cuda" or part.is_cuda:
            return part
        free, _ = torch.cuda.mem_get_info(self._device)
        fits = part.numel() * part.element_size() <= free // 4
        return part.to(self._device, non_blocking=True) if fits else part


def _flat(x: Tensor) -> Tensor:
    """(images, features), in memory order (which changes no product): a channels-last CNN output is
    not copied."""
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
FEWEST_SLABS = 10  # of a leave-one-slab-out spread


@dataclass(frozen=True)
class GramStrategy:
    """How this process computes Gram matrices.

    Attributes:
        batch_size: images per forward pass.
        name: one of the three above, in the provenance of slabs; "" where none are requested.
        n_sets: slabs whose activations wait at once.
        set_bytes: of one of them, beside its buffers.
    """

    batch_size: int
    name: str = ""
    n_sets: int = 0
    set_bytes: int = 0

    @property
    def scratch_bytes(self) -> int:
        return self.n_sets * self.set_bytes if self.name == FILE else 0

    def record(self) -> dict[str, str]:
        return {"grams": self.name} if self.name else {}

    def describe(self, plan: StorePlan) -> str:
        """The strategy in words, with its bytes; "" without Gram matrices."""
        if not self.name:
            return ""
        of = f"Gram matrices of {len(plan.gram_sites)} sites"
        size = human_bytes(self.n_sets * self.set_bytes)
        if self.name == FORWARD:
            return f"{of}: each from one forward pass over its slab"
        if self.name == FILE:
            return (
                f"{of}: activations of a slab wait in a scratch file of {size} beside the store "
                f"(none with --batch-size {plan.slab}, or a smaller --slab)"
            )
        if not self.set_bytes:
            return f"{of}: from the slab buffers"
        return f"{of}: activations of {plural(self.n_sets, 'slabs')} wait in {size} of host memory"

    def check_room(self, free: int, slab: int) -> None:
        """Raises VitseeError: the scratch file needs more than the `free` bytes beside the
        store."""
        if self.scratch_bytes > free:
            raise VitseeError(
                f"--grams needs a scratch file of {human_bytes(self.scratch_bytes)} beside the "
                f"store, the disk has {human_bytes(free)} free; choose --batch-size {slab} (whole "
                "slabs need no file), a smaller --slab or fewer --sites"
            )

    @contextmanager
    def open(
        self, plan: StorePlan, device: torch.device, clock: Clock, output: Place
    ) -> Iterator[SlabGrams]:
        """Context with the object that computes the Gram matrices of slabs, and its memory. Raises
        VitseeError: no room for the scratch file, or it cannot be created."""
        if self.name in ("", FORWARD):
            yield LiveGrams(plan, device, clock) if self.name else SlabGrams(plan)
            return
        shapes = _shapes(plan)
        blocks: list[Tensor | None] = [None] * self.n_sets
        if self.name == FILE:
            self.check_room(free_disk_bytes(scratch_folder(output)), plan.slab)
            space = _scratch(self.scratch_bytes, output)
            size = self.set_bytes
            blocks = [
                torch.frombuffer(space, dtype=torch.uint8, count=size, offset=k * size)
                for k in range(self.n_sets)
            ]
        with ExitStack() as stack:
            sets = []
            for block in blocks:
                pinned = device.type == "cuda" and block is None
                memory = HostMemory(shapes, pinned=pinned, block=block)
                stack.callback(memory.release)
                sets.append(memory.tensors)
            yield BufferedGrams(plan, device, clock, sets)


def gram_notes(plan: StorePlan) -> list[str]:
    """A remark if slabs are too small for CKA, or too few for its error bars."""
    if not plan.gram_sites:
        return []
    start = f"Gram matrices within {plan.n_slabs} slabs of {plan.slab} images"
    if plan.slab < 4:
        return [f"{start}: CKA needs at least 4 images in each (choose a larger --slab)"]
    if plan.n_slabs < FEWEST_SLABS:
        few = f"CKA has error bars from {FEWEST_SLABS} slabs on"
        return [f"{start}: {few} (choose a smaller --slab)"]
    return []


def unstored_arrays(plan: StorePlan) -> dict[str, ArraySpec]:
    """Activations that a slab's Gram matrices need beside stored ones: those of sites that are
    stored pooled, under the names they would have in a store."""
    everything = tuple(
        dataclasses.replace(site, tokens="all") for site in plan.gram_sites
    )
    whole = arrays(dataclasses.replace(plan, sites=everything))
    stored = arrays(plan)
    return {p: s for p, s in whole.items() if p.startswith("acts/") and p not in stored}


def choose_strategy(
    plan: StorePlan,
    table: SiteTable,
    device: torch.device,
    explicit_batch: int | None,
    default_batch: int,
) -> GramStrategy:
    """The strategy for this plan's Gram matrices, with the default batch size.

    Whole slabs if their forward pass fits a quarter of the memory, or half of a GPU's free memory:
    on the CPU a batch of 256 cost 5 % more time than one of 32, keeping its activations twice the
    memory. Else activations are kept in a quarter of the memory beside the slab buffers, for two
    slabs (one is multiplied while the next is filled) or for one; else in a file.
    """
    batch_size = min(explicit_batch or default_batch, plan.slab)
    if not plan.gram_sites:
        return GramStrategy(batch_size)
    if batch_size == plan.slab or (
        explicit_batch is None and _forward_fits(plan, table, device)
    ):
        return GramStrategy(plan.slab, FORWARD)
    set_bytes = block_bytes(_shapes(plan))
    room = memory_bytes() // 4 - 2 * slab_bytes(plan)
    # CUDA multiplies in the order of its stream, so that one set is enough.
    sets = 1 if device.type == "cuda" else min(2, plan.n_slabs)
    for n_sets in range(sets, 0, -1):
        if n_sets * set_bytes <= max(0, room):
            return GramStrategy(batch_size, MEMORY, n_sets, set_bytes)
    return GramStrategy(batch_size, FILE, 1, set_bytes)


def _forward_fits(plan: StorePlan, table: SiteTable, device: torch.device) -> bool:
    """Whether a forward pass over a whole slab is likely to fit."""
    largest = max(math.prod(site.shape) for site in table.sites)
    maps = 0
    if plan.rollout:
        group = plan.attention[0]
        maps = len(group.blocks) * group.layout.n_tokens**2
    need = plan.slab * 4 * (FORWARD_FACTOR * largest + maps)
    if device.type == "cuda":
        results = 2 * len(plan.gram_sites) * plan.slab**2 * 4
        return need + results <= torch.cuda.mem_get_info(device)[0] // 2
    return need <= memory_bytes() // 4


def _shapes(plan: StorePlan) -> dict[str, Shape]:
    return {
        path: ((plan.slab, *spec.shape[1:]), getattr(torch, spec.dtype))
        for path, spec in unstored_arrays(plan).items()
    }


def _scratch(size: int, output: Place) -> mmap.mmap:
    """Memory mapped to a file beside `output`, which is removed with its last use."""
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
