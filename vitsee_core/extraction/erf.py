"""Effective receptive fields during extraction (Raghu et al. 2021, Figs. 6, C.1 to C.4).

    s     = sum over channels of a site's activation at the centre of its grid
    field = |d s / d x| summed over RGB, of each image; then summed over a slab's images

x is the normalised image. The centre is the middle cell; along an axis with an even number of cells
it is the mean of the middle two, so of four cells if both are even. Images are independent (eval
mode), so one backward pass suffices for a batch: the gradient of the sum of s over images contains
that of each image. Absolute values are taken before any sum over images.

It takes a separate forward pass in float32, so that the stored activations of the same images are
bitwise unaffected. On a GPU a backward pass may not reproduce the last digits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitsee_core.images import normalise
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.runtime.device import precision_context
from vitsee_core.runtime.machine import human_bytes, is_out_of_memory, memory_bytes
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import ErfPlan, SiteSpec, StorePlan
from vitsee_stores.manifest import by_reason

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_core.models.sites import SiteTable

log = logging.getLogger(__name__)

# Memory of a backward pass beside autograd's: gradients of the largest activations.
BACKWARD_FACTOR = 1.5
PROBE_IMAGES = 2


@dataclass(frozen=True)
class ErfCost:
    """The cost, measured on a few images.

    Attributes:
        seconds: per image, all sites.
        image_bytes: memory of autograd per image.
        left_out: site -> why it has no field.
    """

    seconds: float
    image_bytes: int
    left_out: dict[str, str]

    def batch_size(self, device: torch.device, most: int) -> int:
        """Images per backward pass: at most `most`, limited to a quarter of the memory, or half of
        a GPU's free memory."""
        if device.type == "cuda":
            room = torch.cuda.mem_get_info(device)[0] // 2
        else:
            room = memory_bytes() // 4
        return max(1, min(most, room // max(1, self.image_bytes)))

    def describe(self, batches: Sequence[int], n_sites: int) -> str:
        """The cost in words, for batches of these many remaining images."""
        n_images = sum(batches)
        largest = max(batches)
        return (
            f"receptive fields of {n_images} images at {n_sites} sites: {len(batches) * n_sites} "
            f"backward passes over at most {largest} images, about {self.seconds * n_images:.3g} s "
            f"and {human_bytes(self.image_bytes * largest)} of memory"
        )


class ErfPasses:
    """Forward and backward passes of one model for these sites."""

    def __init__(
        self,
        model: LoadedModel,
        table: SiteTable,
        sites: Sequence[SiteSpec],
        device: torch.device,
    ) -> None:
        self._model = model
        self._table = table
        self._sites = sites
        self._device = device
        self._capture = Capture(model, table, sites=sites)
        self.plain_attention = False

    @property
    def names(self) -> list[str]:
        return [site.name for site in self._sites]

    def without(self, names: Collection[str]) -> ErfPasses:
        """The passes for the other sites only."""
        kept = [site for site in self._sites if site.name not in names]
        other = ErfPasses(self._model, self._table, kept, self._device)
        other.plain_attention = self.plain_attention
        return other

    def fields(self, pixels: Tensor) -> dict[str, Tensor | None]:
        """Site -> (images, H, W) field of each image, None if nothing depends on the input.

        pixels: (images, 3, H, W) normalised, on the device; not changed.
        """
        with self._context():
            x, centres = self._forward(pixels)
            return {name: _field(centres[name], x) for name in self.names}

    def probe(self, pixels: Tensor) -> ErfCost:
        """Fields of a few images: which sites have one, and the cost. Raises VitseeError: the model
        has no backward pass."""
        for plain in (False, True):
            self.plain_attention = plain
            try:
                return self._probe(pixels)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                # Not every fused kernel has a backward pass on every device.
                log.debug(
                    "receptive fields need plain attention, or fail with it: %s", error
                )
                text = " ".join(str(error).split()).rstrip(".")[:300]
        raise VitseeError(
            f"--erf is not supported: {self._model.name} has no backward pass here: {text}"
        )

    def _probe(self, pixels: Tensor) -> ErfCost:
        # The first pass on a GPU loads its libraries, which takes longer than a pass.
        for _ in range(1 if self._device.type == "cpu" else 2):
            began = time.perf_counter()
            fields = self.fields(pixels)
            left_out = {
                name: why for name, field in fields.items() if (why := _refusal(field))
            }
            seconds = (time.perf_counter() - began) / len(pixels)
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with self._context(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            graph = self._forward(pixels)
        for parameter in self._model.module.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        del graph
        size = math.ceil(BACKWARD_FACTOR * sum(kept.values()) / len(pixels))
        return ErfCost(seconds, size, left_out)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Gradients, float32, and kernels that have a backward pass."""
        kernels: AbstractContextManager[Any] = (
            sdpa_kernel(SDPBackend.MATH) if self.plain_attention else nullcontext()
        )
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            precision_context(self._device, "fp32"),
            kernels,
        ):
            yield

    def _forward(self, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The input and, per site, the sum over images of s."""
        x = pixels.clone().requires_grad_(True)
        centres = _CentreSums()
        with self._capture as capture:
            # A copy, because the model may modify its input.
            capture.run(x.clone(), centres)
        return x, centres.sums


def _field(centre: Tensor, x: Tensor) -> Tensor | None:
    if not centre.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(centre, x, retain_graph=True, allow_unused=True)
    return None if gradient is None else gradient.abs().sum(1)


def _refusal(field: Tensor | None) -> str | None:
    """Why a site has no field; the field's values arrive on the host with the answer."""
    if field is None:
        return "does not depend on the input by gradient"
    if bool(field.isfinite().all()):
        return None
    return "its gradient is not finite"


def prepare_erf(
    model: LoadedModel,
    table: SiteTable,
    plan: StorePlan,
    asked: ErfPlan,
    pixels: Tensor,
    device: torch.device,
) -> tuple[StorePlan, tuple[ErfPasses, ErfCost], dict[str, str]]:
    """The passes for the plan's receptive fields, tried on a few images; the plan without the sites
    that have none, and the reasons. Raises VitseeError: no site has one."""
    sites = [site for site in plan.sites if site.name in asked.sites]
    passes = ErfPasses(model, table, sites, device)
    cost = passes.probe(normalise(pixels[:PROBE_IMAGES], model.transform, device))
    passes = passes.without(cost.left_out)
    if not passes.names:
        reasons = "; ".join(by_reason(cost.left_out))
        raise VitseeError(f"--erf {asked.n_images} is not supported: {reasons}")
    erf = replace(asked, sites=tuple(passes.names))
    why = {f"{name} erf": reason for name, reason in cost.left_out.items()}
    return replace(plan, erf=erf), (passes, cost), why


class _CentreSums(Observer):
    """An observer that takes the sums at the centres, before the model overwrites them."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Sum over images and channels at the centre of the grid."""
        rows, cols = (slice((n - 1) // 2, n // 2 + 1) for n in body.shape[1:3])
        self.sums[site.name] = body[:, rows, cols].mean((1, 2)).sum()


class ErfSums:
    """One slab's sums: `start`, `add` for each batch, `finish`. Memory: a field per site, in
    float64 (float32 on Metal), and autograd's memory of a batch of `batch_size` images."""

    def __init__(self, passes: ErfPasses, size: tuple[int, int], batch_size: int) -> None:
        self._passes = passes
        self._size = size
        self._batch_size = batch_size

    def start(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, pixels: Tensor, stopped: Callable[[], bool]) -> bool:
        """Add images (images, 3, H, W); False if stopped before all were added."""
        for some in pixels.split(self._batch_size) if len(pixels) else ():
            if stopped():
                return False
            fields = self._passes.fields(some)
            for name, field in fields.items():
                if field is None:
                    raise VitseeError(
                        f"{name} no longer depends on the input by gradient"
                    )
                wide = torch.float32 if field.device.type == "mps" else torch.float64
                total = field.sum(0, dtype=wide)
                self._sums[name] = (
                    self._sums[name] + total if name in self._sums else total
                )
            self._count += len(some)
        return True

    def finish(self, where: str) -> dict[str, NDArray[Any]]:
        """The slab's arrays for the store. Raises VitseeError: a gradient is not finite."""
        out: dict[str, NDArray[Any]] = {"erf/count": np.asarray(self._count, np.int64)}
        for name in self._passes.names:
            total = self._sums.get(name)
            empty = np.zeros(self._size, np.float32)
            field = empty if total is None else total.cpu().numpy().astype(np.float32)
            if not np.isfinite(field).all():
                raise VitseeError(
                    f"the gradient at the centre of {name} is not finite in {where}: extract "
                    "without --erf, or choose other --sites"
                )
            out[f"erf/{name}"] = field
        return out
