"""Where Gram matrices come from: an entry needs both of its images, so either one forward pass
takes a whole slab, or activations are held until the slab is full.

    forward   each site's matrix is made from the live tensor, in full precision; nothing is held
    memory    held in host memory, in the type they would be stored in
    file      the same in a scratch file that has no name, beside the store

Rounding to float16 moves entries by 1e-5 of the mean diagonal (rms; 2e-4 at worst, measured on a
small ViT); nothing else differs. On a CPU one way and batch size give the same bytes whatever
shards and resumed runs there are; on a GPU kernels may be chosen anew, and last digits move.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from vitsee_core.extraction.host_memory import HostMemory, block_bytes
from vitsee_core.extraction.plan import slab_bytes
from vitsee_core.machine import free_disk_bytes, human_bytes, memory_bytes
from vitsee_core.models import SiteTable
from vitsee_stores.disk import reason
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import ArraySpec, SiteSpec, StorePlan, arrays

# Largest memory of a forward pass over that of its largest activation in float32: 3.5 to 6 for
# ViT, ResNet, Swin and Mixer on the CPU; the rest for what is reduced beside it.
FORWARD_FACTOR = 8
FEWEST_SLABS = 10  # of a leave-one-slab-out spread


@dataclass(frozen=True)
class GramStrategy:
    """How this process makes Gram matrices. where: "" (none are asked for), "forward", "memory" or
    "file". n_sets: slabs that are held at once; set_bytes: what one takes."""

    batch_size: int
    where: str = ""
    n_sets: int = 0
    set_bytes: int = 0

    @property
    def holds(self) -> bool:
        """Whether activations are held until their slab is full."""
        return self.where in ("memory", "file")

    @property
    def file_bytes(self) -> int:
        """Size of the scratch file."""
        return self.n_sets * self.set_bytes if self.where == "file" else 0

    def describe(self, plan: StorePlan) -> str:
        """In words, with the bytes; "" without Gram matrices."""
        start = f"Gram matrices of {len(plan.gram_sites)} sites"
        size = human_bytes(self.n_sets * self.set_bytes)
        if self.where == "file":
            return (
                f"{start}: activations of a slab wait in a scratch file of {size} beside the store "
                f"(none with --batch-size {plan.slab}, or a smaller --slab)"
            )
        if self.where == "memory" and self.set_bytes:
            return f"{start}: activations of {self.n_sets} slabs wait in {size} of host memory"
        if self.where == "memory":
            return f"{start}: from the slab buffers"
        return f"{start}: each from one forward pass over its slab" if self.where else ""


def gram_notes(plan: StorePlan) -> list[str]:
    """A line where slabs are too small for CKA, or too few for its error bars."""
    if not plan.gram_sites:
        return []
    start = f"Gram matrices within {plan.n_slabs} slabs of {plan.slab} images"
    if plan.slab < 4:
        return [f"{start}: CKA needs at least 4 images in each (choose a larger --slab)"]
    if plan.n_slabs < FEWEST_SLABS:
        few = f"CKA has error bars from {FEWEST_SLABS} slabs on"
        return [f"{start}: {few} (choose a smaller --slab)"]
    return []


def held_arrays(plan: StorePlan) -> dict[str, ArraySpec]:
    """What has to be held of a slab beside what is stored: the activations of sites that are kept
    pooled, under the names they would have in a store."""
    everything = tuple(dataclasses.replace(site, tokens="all") for site in plan.gram_sites)
    whole = arrays(dataclasses.replace(plan, sites=everything))
    stored = arrays(plan)
    return {p: s for p, s in whole.items() if p.startswith("acts/") and p not in stored}


def feature_paths(site: SiteSpec) -> list[str]:
    """The arrays of a site's activations, prefix first."""
    body = {"tokens": "grid", "rows": "rows", "raw": "raw"}[site.kind]
    has_prefix = site.layout is not None and site.layout.n_prefix > 0
    return [f"acts/{site.name}/{part}" for part in (["prefix"] if has_prefix else []) + [body]]


def choose_strategy(
    plan: StorePlan,
    table: SiteTable,
    device: torch.device,
    explicit_batch: int | None,
    default_batch: int,
) -> GramStrategy:
    """The way to this plan's Gram matrices, and with it the batch size where none was given.

    Whole slabs where their forward pass fits a quarter of the memory, or half of a GPU's that is
    free: on the CPU a batch of 256 cost 5 % more time than one of 32, holding its activations twice
    the memory. Else activations are
    held in a quarter of the memory beside the slab buffers, of two slabs (one is multiplied while
    the next is filled) or of one; else in a file.
    """
    batch_size = min(explicit_batch or default_batch, plan.slab)
    if not plan.gram_sites:
        return GramStrategy(batch_size)
    if batch_size == plan.slab or (explicit_batch is None and _forward_fits(plan, table, device)):
        return GramStrategy(plan.slab, "forward")
    set_bytes = block_bytes(_shapes(plan))
    room = memory_bytes() // 4 - 2 * slab_bytes(plan)
    # CUDA multiplies in the order of its stream, so that one set is enough.
    sets = 1 if device.type == "cuda" else min(2, plan.n_slabs)
    for n_sets in range(sets, 0, -1):
        if n_sets * set_bytes <= max(0, room):
            return GramStrategy(batch_size, "memory", n_sets, set_bytes)
    return GramStrategy(batch_size, "file", 1, set_bytes)


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


def make_room(route: GramStrategy, plan: StorePlan, output: Path, pinned: bool) -> list[HostMemory]:
    """Sets of tensors (slab, ...) for the arrays of `held_arrays`.

    Raises:
        VitseeError: the disk has no room for the scratch file, or none can be made there.
    """
    shapes = _shapes(plan)
    if route.where == "memory":
        return [HostMemory(shapes, pinned=pinned) for _ in range(route.n_sets)]
    space = _scratch(route.file_bytes, output, plan.slab)
    starts = range(0, route.file_bytes, route.set_bytes)
    blocks = (
        torch.frombuffer(space, dtype=torch.uint8, count=route.set_bytes, offset=start)
        for start in starts
    )
    return [HostMemory(shapes, block=block) for block in blocks]


def _shapes(plan: StorePlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        path: ((plan.slab, *spec.shape[1:]), getattr(torch, spec.dtype))
        for path, spec in held_arrays(plan).items()
    }


def no_room(size: int, free: int, slab: int) -> str:
    """A line for a scratch file that does not fit the disk."""
    return (
        f"--grams needs a scratch file of {human_bytes(size)} beside the store, the disk has "
        f"{human_bytes(free)} free; choose --batch-size {slab} (whole slabs need no file), a "
        "smaller --slab or fewer --sites"
    )


def _scratch(size: int, output: Path, slab: int) -> mmap.mmap:
    """Memory that lies in a file beside `output`; the file goes with the last use of it."""
    free = free_disk_bytes(output)
    if size > free:
        raise VitseeError(no_room(size, free, slab))
    try:
        with tempfile.TemporaryFile(dir=output.absolute().parent) as file:
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
