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
    """The cost of receptive fields, measured on a few images.

    Attributes:
        seconds: time per image, of all sites.
        image_bytes: memory of autograd per image.
        left_out: site -> reason why it has no field.
    """

    seconds: float
    image_bytes: int
    left_out: dict[str, str]

    def batch_size(self, device: torch.device, max_images: int) -> int:
        """Return the images per backward pass.

        At most `max_images`, limited to a quarter of the memory, or half of a GPU's free memory.
        """
        if device.type == "cuda":
            room = torch.cuda.mem_get_info(device)[0] // 2
        else:
            room = memory_bytes() // 4
        return max(1, min(max_images, room // max(1, self.image_bytes)))

    def describe(self, batch_sizes: Sequence[int], n_sites: int) -> str:
        """Return the cost in words, for batches of these sizes that are still to do."""
        n_images = sum(batch_sizes)
        largest = max(batch_sizes)
        n_passes = len(batch_sizes) * n_sites
        return (
            f"receptive fields of {n_images} images at {n_sites} sites: {n_passes} "
            f"backward passes over at most {largest} images, about {self.seconds * n_images:.3g} s "
            f"and {human_bytes(self.image_bytes * largest)} of memory"
        )


class ErfPasses:
    """Forward and backward passes of one model for the fields of some of its sites.

    Attributes:
        plain_attention: whether attention runs without fused kernels, some of which have no
            backward pass on some devices.
    """

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
        """Names of the sites."""
        return [site.name for site in self._sites]

    def without(self, names: Collection[str]) -> ErfPasses:
        """Return the passes for the other sites only."""
        sites = [site for site in self._sites if site.name not in names]
        passes = ErfPasses(self._model, self._table, sites, self._device)
        passes.plain_attention = self.plain_attention
        return passes

    def fields(self, pixels: Tensor) -> dict[str, Tensor | None]:
        """Return each site's field of each image, (images, H, W); None if nothing depends on x.

        Args:
            pixels: (images, 3, H, W) normalised, on the device; not changed.
        """
        with self._context():
            x, centre_sums = self._forward(pixels)
            return {name: _field(centre_sums[name], x) for name in self.names}

    def probe(self, pixels: Tensor) -> ErfCost:
        """Compute the fields of a few images, and return their cost and the sites without one.

        `plain_attention` is set if fused kernels have no backward pass here.

        Raises:
            VitseeError: the model has no backward pass.
        """
        for plain_attention in (False, True):
            self.plain_attention = plain_attention
            try:
                return self._measure(pixels)
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

    def _measure(self, pixels: Tensor) -> ErfCost:
        """Return the time and memory of these images' fields, and the sites without one."""
        # The first pass on a GPU loads its libraries, which takes longer than a pass.
        n_passes = 1 if self._device.type == "cpu" else 2
        for _ in range(n_passes):
            began = time.perf_counter()
            fields = self.fields(pixels)
            left_out: dict[str, str] = {}
            for name, field in fields.items():
                # This waits for the device, so that the time below includes its work.
                reason = _refusal(field)
                if reason is not None:
                    left_out[name] = reason
            seconds = (time.perf_counter() - began) / len(pixels)

        # Memory that autograd saves, by address: several nodes may save the same tensor.
        saved_bytes: dict[int, int] = {}

        def note_saved(x: Tensor) -> Tensor:
            """Note the size of a tensor that autograd saves, and return it as it is."""
            storage = x.untyped_storage()
            saved_bytes[storage.data_ptr()] = storage.nbytes()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(note_saved, lambda x: x)
        with self._context(), hooks:
            graph = self._forward(pixels)
        for parameter in self._model.module.parameters():
            saved_bytes.pop(parameter.untyped_storage().data_ptr(), None)
        # The graph lives until here: a freed tensor's address would be used again.
        del graph
        per_image = BACKWARD_FACTOR * sum(saved_bytes.values()) / len(pixels)
        return ErfCost(seconds, math.ceil(per_image), left_out)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Context with gradients, float32, and kernels that have a backward pass."""
        kernels: AbstractContextManager[Any] = nullcontext()
        if self.plain_attention:
            kernels = sdpa_kernel(SDPBackend.MATH)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            precision_context(self._device, "fp32"),
            kernels,
        ):
            yield

    def _forward(self, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the input, and for each site the sum of s over images."""
        x = pixels.clone().requires_grad_(True)
        centres = _CentreSums()
        with self._capture as capture:
            # A copy, because the model may modify its input, which a leaf does not allow.
            capture.run(x.clone(), centres)
        return x, centres.sums


def _field(centre_sum: Tensor, x: Tensor) -> Tensor | None:
    """Return |d s / d x| summed over channels, (images, H, W); None if s does not depend on x.

    Args:
        centre_sum: sum of s over the images.
        x: (images, 3, H, W) input.
    """
    if not centre_sum.requires_grad:
        return None
    # The graph is retained for the other sites.
    (gradient,) = torch.autograd.grad(centre_sum, x, retain_graph=True, allow_unused=True)
    return None if gradient is None else gradient.abs().sum(1)


def _refusal(field: Tensor | None) -> str | None:
    """Return why a site has no usable field, None if it has one; waits for the device."""
    if field is None:
        return "does not depend on the input by gradient"
    if bool(field.isfinite().all()):
        return None
    return "its gradient is not finite"


def prepare_erf(
    model: LoadedModel,
    table: SiteTable,
    plan: StorePlan,
    erf_plan: ErfPlan,
    pixels: Tensor,
    device: torch.device,
) -> tuple[StorePlan, tuple[ErfPasses, ErfCost], dict[str, str]]:
    """Try the receptive fields of a plan on a few images.

    Args:
        model: the model, on the device.
        table: its sites.
        plan: contents of the store.
        erf_plan: the receptive fields that it asks for.
        pixels: (images, 3, H, W) uint8; the first ones are used.
        device: where the model runs.

    Returns:
        The plan without the sites that have no field; the passes and their cost; and
        `SITE erf` -> reason for these sites.

    Raises:
        VitseeError: no site has a field.
    """
    sites = [site for site in plan.sites if site.name in erf_plan.sites]
    passes = ErfPasses(model, table, sites, device)
    cost = passes.probe(normalise(pixels[:PROBE_IMAGES], model.transform, device))
    passes = passes.without(cost.left_out)
    if not passes.names:
        reasons = "; ".join(by_reason(cost.left_out))
        raise VitseeError(f"--erf {erf_plan.n_images} is not supported: {reasons}")
    tried_plan = replace(erf_plan, sites=tuple(passes.names))
    left_out = {f"{name} erf": reason for name, reason in cost.left_out.items()}
    return replace(plan, erf=tried_plan), (passes, cost), left_out


class _CentreSums(Observer):
    """Sums the activations at the centres of grids, before the model overwrites them.

    Attributes:
        sums: site -> scalar, the sum of s over images, with its graph.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Sum over images and channels at the centre of the grid (images, rows, cols, dim)."""
        rows = _middle(body.shape[1])
        cols = _middle(body.shape[2])
        self.sums[site.name] = body[:, rows, cols].mean((1, 2)).sum()


def _middle(n_cells: int) -> slice:
    """Return the middle cell of an axis, or the middle two of an even number of cells."""
    return slice((n_cells - 1) // 2, n_cells // 2 + 1)


class ErfSums:
    """The sums of fields over one slab: `start`, `add` for each batch, `finish`.

    Memory: a field per site, in float64 (float32 on Metal), and autograd's memory of a batch of
    `batch_size` images.

    Args:
        passes: the passes of the model.
        size: (height, width) of a field.
        batch_size: images per backward pass.
    """

    def __init__(self, passes: ErfPasses, size: tuple[int, int], batch_size: int) -> None:
        self._passes = passes
        self._size = size
        self._batch_size = batch_size

    def start(self) -> None:
        """Begin a slab."""
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, pixels: Tensor, stopped: Callable[[], bool]) -> bool:
        """Add the fields of images.

        Args:
            pixels: (images, 3, H, W) normalised, on the device.
            stopped: says whether the run is to stop; asked before each backward pass.

        Returns:
            False if stopped before all images were added.

        Raises:
            VitseeError: a site that had a field has none now.
        """
        batches = pixels.split(self._batch_size) if len(pixels) else ()
        for batch in batches:
            if stopped():
                return False
            fields = self._passes.fields(batch)
            for name, field in fields.items():
                if field is None:
                    raise VitseeError(
                        f"{name} no longer depends on the input by gradient"
                    )
                sum_dtype = torch.float64
                if field.device.type == "mps":
                    sum_dtype = torch.float32
                total = field.sum(0, dtype=sum_dtype)
                if name in self._sums:
                    total = self._sums[name] + total
                self._sums[name] = total
            self._count += len(batch)
        return True

    def finish(self, where: str) -> dict[str, NDArray[Any]]:
        """Return the slab's arrays for the store: `erf/count`, and `erf/SITE` of each site.

        Args:
            where: images of the slab, in words.

        Raises:
            VitseeError: a gradient is not finite.
        """
        slab_arrays: dict[str, NDArray[Any]] = {
            "erf/count": np.asarray(self._count, np.int64)
        }
        for name in self._passes.names:
            field = np.zeros(self._size, np.float32)
            if name in self._sums:
                field = self._sums[name].cpu().numpy().astype(np.float32)
            if not np.isfinite(field).all():
                raise VitseeError(
                    f"the gradient at the centre of {name} is not finite in {where}: extract "
                    "without --erf, or choose other --sites"
                )
            slab_arrays[f"erf/{name}"] = field
        return slab_arrays
