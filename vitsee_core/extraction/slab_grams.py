"""Gram matrices of a slab's images, computed with the slab.

    for each site:  X = (valid images, tokens x channels), less the mean image;  K = X X^T

HSIC_1 is exactly invariant to that shift (rounding the mean to float32 does no harm); without it
float32 fails on features with a common offset. Columns are converted to float32 in chunks, sums
over chunks are in float64. The product itself is in float32 whatever the model's precision: no
TF32, no autocast.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitsee_core.extraction.buffers import SlabBuffers, feature_paths
from vitsee_core.extraction.outcome import Clock
from vitsee_core.extraction.transfer import HostCopies
from vitsee_core.kernels.backend import matmul_backend
from vitsee_core.runtime.device import precision_context
from vitsee_stores.layout import StorePlan

# On the CPU a chunk stays in cache; on a GPU it is large enough to fill it.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20, "mps": 64 << 20}

Tensors = dict[str, Tensor]


class SlabGrams:
    """Hooks called for each slab; this base class computes no Gram matrices.

    kept: names of the sites whose tokens go to host memory, in their stored type.
    """

    def __init__(self, plan: StorePlan) -> None:
        self.kept = frozenset(
            site.name for site in plan.sites if site.kind != "vector" and site.tokens == "all"
        )

    def reserve(
        self, buffers: SlabBuffers, take: Callable[[queue.SimpleQueue[Tensors]], Tensors]
    ) -> None:
        """Give the buffers, before a slab, the additional memory that Gram matrices need; `take`
        waits for a free set."""

    def of_batch(self, site: str, parts: Sequence[Tensor], valid: Tensor) -> Mapping[str, Tensor]:
        """Array name -> Gram matrix, from the live tensors of one batch; see `GramProducts`."""
        return {}

    def on_device(self, buffers: SlabBuffers, n: int, copies: HostCopies) -> Mapping[str, Tensor]:
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
        self._products, self._clock = GramProducts(device), clock

    def of_batch(self, site: str, parts: Sequence[Tensor], valid: Tensor) -> Mapping[str, Tensor]:
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
        self._paths = {f"grams/{site.name}/all": feature_paths(site) for site in plan.gram_sites}
        self._clock = clock
        self._on_device, self._on_host = GramProducts(device), GramProducts(torch.device("cpu"))
        self._free: queue.SimpleQueue[Tensors] = queue.SimpleQueue()
        for tensors in sets:
            self._free.put(tensors)

    def reserve(
        self, buffers: SlabBuffers, take: Callable[[queue.SimpleQueue[Tensors]], Tensors]
    ) -> None:
        buffers.unstored = take(self._free)

    def on_device(self, buffers: SlabBuffers, n: int, copies: HostCopies) -> Mapping[str, Tensor]:
        """Frees the memory at once: later copies wait for the products."""
        if not copies.asynchronous:
            return {}
        # Activations are read on the host where they do not fit the device: not before they are
        # there.
        copies.wait()
        return self._made(self._on_device, buffers, n)

    def on_host(self, buffers: SlabBuffers, n: int) -> Mapping[str, Tensor]:
        return {} if buffers.unstored is None else self._made(self._on_host, buffers, n)

    def _made(self, products: GramProducts, buffers: SlabBuffers, n: int) -> Mapping[str, Tensor]:
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
        n, width = len(total), features.shape[1]
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
                with np.errstate(all="ignore"):  # `check_peaks` reports what is not finite
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
