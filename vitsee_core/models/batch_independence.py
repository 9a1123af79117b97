"""Whether the features of an image depend on that image alone: on no neighbour in its batch, not on
the number of images or on its place among them, nor on the run.

    first batch      a b c d     what the self-check has captured
    neighbours       a * c *     noise in place of the others: a and c have to keep their features
    smaller batch    d b         b and d have to keep theirs, up to rounding

Compared are a few projections of every token (`fingerprint`). In a batch of the same size every
library chooses the same kernels, and an image in the same place goes through the same part of them:
its features are equal to the bit, in whatever precision, and a weak dependence shows. In a batch of
another size sums are made in another order, which is why more is allowed there. What differs is
looked at again in float32, module by module (`run_dependence`, `batch_dependence`), where a
dependence stays and roundings of half precision do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.capture import Observer
from vitsee_core.models.hook_points import (
    ModelError,
    first_tensor,
    hooked,
    input_tensor,
    output_tensor,
)
from vitsee_core.models.sites import AttentionBlock, Sublayer
from vitsee_core.runtime.device import no_autocast, precision_context
from vitsee_stores.layout import SiteSpec

# Projections of a token. The length of their difference tells that of the token's to a factor of
# two, which is enough beside tolerances that roundings stay below by a factor of ten.
N_DIRECTIONS = 8
# Differences relative to the root mean square of an image's tokens. Equal kernels give equal bits
# in every precision. What differs all the same (a library that chooses anew, tokens that are
# routed) is looked at again in float32; there a model that rounds to half precision by itself may
# differ by ROUNDED_TOLERANCE.
SAME_SIZE_TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 1e-3
# Two runs of one batch in float32; sums that threads or a GPU make in no fixed order stay below.
RUN_TOLERANCE = 1e-6
# Sums in another order: 1e-6 a layer in float32, 1e-3 in TF32, up to 1e-2 in bfloat16, which grow
# with the depth of the model.
OTHER_SIZE_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "half": 5e-2}
# Badly conditioned models make more of a rounding. What a change of the pixels by PERTURBATION of
# their size does to a tensor is what roundings do to it; a few times of that is allowed as well.
PERTURBATION = 1e-6
MAX_PERTURBED = 30
# Passes that look for noise: of a layer that is left out with probability 0.1 for each of four
# images all three find nothing in 1 of 3,500.
N_RUNS = 3
_HALF = (torch.float16, torch.bfloat16)


class ChangingModelError(ModelError):
    """A model that gives something else when it is run again."""


class Composition(NamedTuple):
    """Another batch of the same images.

    Attributes:
        images: the batch, (n, ...).
        rows: which images of this batch are compared.
        first_rows: the same images in the first batch.
        same_size: whether it has as many images as the first batch.
    """

    images: Tensor
    rows: tuple[int, ...]
    first_rows: tuple[int, ...]
    same_size: bool

    def tolerance(self, precision: str) -> float:
        """Return the largest difference that roundings explain in this precision."""
        if self.same_size:
            return SAME_SIZE_TOLERANCE
        return OTHER_SIZE_TOLERANCE[precision]


def compositions(images: Tensor) -> list[Composition]:
    """Return two other batches of these images, (n, ...); one for a single image.

    In the first every second image has noise in its place; in the second these images stand alone,
    from the last to the first.
    """
    n = len(images)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    noise = noise.to(images.device, images.dtype)
    if n == 1:
        with_neighbour = torch.cat([noise, images])
        return [Composition(with_neighbour, rows=(1,), first_rows=(0,), same_size=False)]
    other_neighbours = images.clone()
    other_neighbours[1::2] = noise[1::2]
    unchanged = tuple(range(0, n, 2))
    moved = list(range(n - 1 - n % 2, 0, -2))  # the others, from the last to the first
    if len(moved) == 1:
        # Some models do not take a batch of one.
        moved.append(0)
    smaller = images[moved]
    if len(moved) == n:  # two images: the batch must still have another size
        smaller = torch.cat([smaller, noise[:1]])
    return [
        Composition(
            other_neighbours, rows=unchanged, first_rows=unchanged, same_size=True
        ),
        Composition(
            smaller,
            rows=tuple(range(len(moved))),
            first_rows=tuple(moved),
            same_size=False,
        ),
    ]


def fingerprint(x: Tensor) -> Tensor:
    """Return random projections of the last axis of a tensor, (..., N_DIRECTIONS) in float32;
    shorter axes as they are.

    The squared length of the projections is that of the vector, on average over directions
    (Johnson and Lindenstrauss 1984).
    """
    x = x.detach().float()
    if x.ndim <= 1:
        x = x.unsqueeze(-1)
    if x.shape[-1] <= N_DIRECTIONS:
        return x.clone()
    generator = torch.Generator().manual_seed(x.shape[-1])
    directions = torch.randn((x.shape[-1], N_DIRECTIONS), generator=generator)
    with no_autocast(x.device):
        return x @ (directions / N_DIRECTIONS**0.5).to(x.device)


def difference(prints: Tensor, others: Tensor) -> float:
    """Return the largest distance of two tokens' fingerprints, relative to the root mean square of
    all; inf for unequal shapes. NaN and inf in equal places count as equal."""
    if prints.shape != others.shape:
        return float("inf")
    if not prints.numel():
        return 0.0
    is_equal = (prints == others) | (prints.isnan() & others.isnan())
    if bool(is_equal.all()):
        return 0.0
    zeros = torch.zeros_like(prints)
    gaps = torch.where(is_equal, zeros, (prints - others).abs())
    finite = torch.where(is_equal & ~prints.isfinite(), zeros, prints)
    scale = finite.square().sum(-1).mean().sqrt()
    error = float(gaps.square().sum(-1).max().sqrt() / scale)
    return float("inf") if math.isnan(error) else error


class Fingerprints(Observer):
    """An observer that keeps a fingerprint of all that is captured (sites, branches of sublayers,
    outputs of attention), and of the model's output by `note_output`."""

    def __init__(self) -> None:
        self.prints: dict[str, Tensor] = {}

    def note(self, name: str, x: Tensor) -> None:
        """Keep the fingerprint of a tensor (images, ...)."""
        self.prints[name] = fingerprint(x)

    def note_output(self, output: Any, n_images: int) -> None:
        """Keep the fingerprint of the tensor that a model gives, if there is one for each image."""
        x = first_tensor(output, n_images)
        if x is not None and x.ndim and len(x) == n_images:
            self.note("the output", x)

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep the fingerprints of prefix and body."""
        self.note(site.name, body)
        if prefix is not None:
            self.note(f"prefix of {site.name}", prefix)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Keep the fingerprint of the branch."""
        self.note(f"branch of {sublayer.name}", f)

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Keep the fingerprint of the heads' outputs."""
        self.note(f"attention of {block.name}", call.output)

    def differences(
        self, other: Fingerprints, rows: Sequence[int], other_rows: Sequence[int]
    ) -> dict[str, float]:
        """Return name -> `difference` from another batch; inf where that lacks the name.

        Args:
            other: the fingerprints of the other batch.
            rows: the images to compare, in this batch.
            other_rows: the same images in the other batch.
        """
        errors = {}
        for name, prints in self.prints.items():
            other_prints = other.prints.get(name)
            if other_prints is None:
                errors[name] = float("inf")
            else:
                errors[name] = difference(
                    prints[list(rows)], other_prints[list(other_rows)]
                )
        return errors


# ---------------- module by module


@dataclass(frozen=True)
class Event:
    """A tensor that enters or leaves a module.

    Attributes:
        module: the module's path.
        entering: whether the tensor is its input.
        around: path of the module whose code made the tensor.
        prints: the fingerprint, images first where the tensor has them first or second; None
            without a tensor.
        by_image: whether the fingerprint has an entry for each image.
    """

    module: str
    entering: bool
    around: str
    prints: Tensor | None
    by_image: bool


@dataclass
class Passage:
    """One forward pass as its events, in their order; half: whether a number in half precision was
    made in it."""

    events: list[Event] = field(default_factory=list)
    half: bool = False


class _HalfWatch(TorchDispatchMode):
    """A mode that notes whether any function returns a tensor in half precision."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in _HALF:
            self.seen = True
        return result


def passage(module: nn.Module, images: Tensor, watch_half: bool = False) -> Passage:
    """Run a model once in float32, and return every module's input and output as a fingerprint.

    watch_half: whether to note numbers in half precision, which costs a Python call for each
    operation.
    """
    n_images = len(images)
    stack: list[str] = []
    record = Passage()

    def note(name: str, entering: bool, x: Tensor | None) -> None:
        around = name
        if entering and stack:
            around = stack[-1]  # the caller made the input
        prints = None
        by_image = False
        if x is not None and not x.is_complex():
            x = _images_first(x, n_images)
            by_image = x.ndim > 0 and len(x) == n_images
            prints = fingerprint(x)
        record.events.append(Event(name, entering, around, prints, by_image))

    def enter(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        note(name, True, input_tensor(args, kwargs))
        stack.append(name)

    def leave(name: str, child: nn.Module, output: Any) -> None:
        stack.pop()
        note(name, False, output_tensor(child, output, n_images))

    watch = _HalfWatch()
    with (
        torch.inference_mode(),
        precision_context(images.device, "fp32"),
        hooked(module, enter, leave),
        watch if watch_half else nullcontext(),
    ):
        module(images)
    record.half = watch.seen
    return record


def _images_first(x: Tensor, n_images: int) -> Tensor:
    """Return (images, ...) for a tensor that has the images second, or several entries for each
    image (windows in the batch dimension)."""
    if x.ndim > 1 and len(x) != n_images and x.shape[1] == n_images:
        return x.transpose(0, 1)
    if x.ndim > 0 and len(x) > n_images and len(x) % n_images == 0:
        return x.unflatten(0, (n_images, -1))
    return x


def run_dependence(module: nn.Module, images: Tensor) -> str | None:
    """Return the module whose output first differs when the same batch is run again, with its
    class; None where all runs are alike."""
    first = passage(module, images)
    for _ in range(N_RUNS - 1):
        again = passage(module, images)
        for event, other in zip(first.events, again.events, strict=False):
            if (event.module, event.entering) != (other.module, other.entering):
                return _path_and_class(module, event.around)
            if event.prints is None or other.prints is None:
                continue
            if difference(event.prints, other.prints) > RUN_TOLERANCE:
                return _path_and_class(module, event.around)
        if len(first.events) != len(again.events):
            return _path_and_class(module, "")
    return None


def changing(module: nn.Module, images: Tensor) -> str | None:
    """Return in words how a model differs from run to run; None where it does not."""
    where = run_dependence(module, images)
    if where is None:
        return None
    return (
        f"changes from run to run, first in {where}: dropout, noise or sampling that "
        "stays on, or a count of its calls; expected a model in evaluation mode, which "
        "gives the same for the same image"
    )


class Dependence(NamedTuple):
    """The change of a module's output for an image when the other images of its batch change.

    Attributes:
        module: the first module whose output depends on the batch, with its class; None where
            roundings explain what differs.
        error: the relative difference.
    """

    module: str | None
    error: float


def batch_dependence(
    module: nn.Module, images: Tensor, other: Composition
) -> Dependence | None:
    """Return the module whose output for an image first differs in another batch; None where every
    module gives the same.

    Args:
        module: the model.
        images: the first batch.
        other: the other batch.

    Raises:
        RuntimeError, ...: whatever the model raises on such a batch.
    """
    first = passage(module, images, watch_half=True)
    second = passage(module, other.images)
    # What a change of the pixels in the last digits does to each tensor is what roundings do to it.
    signs = torch.randn(images.shape, generator=torch.Generator().manual_seed(4)).sign()
    factors = 1 + PERTURBATION * signs.to(images.device, images.dtype)
    perturbed = passage(module, images * factors)
    float32_tolerance = other.tolerance("fp32")
    tolerance = float32_tolerance
    if first.half:
        tolerance = ROUNDED_TOLERANCE if other.same_size else other.tolerance("half")
    rows = list(other.rows)
    first_rows = list(other.first_rows)
    largest = 0.0
    events = zip(first.events, second.events, perturbed.events, strict=False)
    for event, other_event, perturbed_event in events:
        other_side = (other_event.module, other_event.entering)
        if (event.module, event.entering) != other_side:
            # Other modules are called.
            return Dependence(_path_and_class(module, event.around), float("inf"))
        if event.prints is None or other_event.prints is None or not event.by_image:
            continue
        if not other_event.by_image:
            return Dependence(_path_and_class(module, event.around), float("inf"))
        error = difference(event.prints[first_rows], other_event.prints[rows])
        largest = max(largest, error)
        if error <= tolerance:
            continue
        rounding = float("inf")
        if perturbed_event.prints is not None:
            rounding = difference(
                event.prints[first_rows], perturbed_event.prints[first_rows]
            )
        if error > MAX_PERTURBED * rounding:
            return Dependence(_path_and_class(module, event.around), error)
    return Dependence(None, largest) if largest > float32_tolerance else None


def _path_and_class(module: nn.Module, path: str) -> str:
    """Return a module in words, `blocks.0.norm1 (BatchNorm1d)`."""
    kind = type(module.get_submodule(path)).__name__
    if path:
        return f"{path} ({kind})"
    return f"the model itself ({kind})"
