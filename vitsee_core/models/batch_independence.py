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

    images: with their neighbours. rows: of the images to compare, in this batch; first_rows: of the
    same images in the first batch. same_size: as many images as the first batch has.
    """

    images: Tensor
    rows: tuple[int, ...]
    first_rows: tuple[int, ...]
    same_size: bool

    def tolerance(self, precision: str) -> float:
        """The largest difference that roundings explain in this precision."""
        if self.same_size:
            return SAME_SIZE_TOLERANCE
        return OTHER_SIZE_TOLERANCE[precision]


def compositions(images: Tensor) -> list[Composition]:
    """Two other batches of these images (n, ...), one for a single image."""
    n = len(images)
    drawn = torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    noise = drawn.to(images.device, images.dtype)
    if n == 1:
        return [Composition(torch.cat([noise, images]), (1,), (0,), same_size=False)]
    neighbours = images.clone()
    neighbours[1::2] = noise[1::2]
    kept = tuple(range(0, n, 2))
    moved = list(range(n - 1 - n % 2, 0, -2))  # the others, from the last to the first
    if len(moved) == 1:
        # Some models take no batch of one.
        moved.append(0)
    fewer = images[moved]
    if len(moved) == n:
        fewer = torch.cat([fewer, noise[:1]])
    rows = tuple(range(len(moved)))
    return [
        Composition(neighbours, kept, kept, same_size=True),
        Composition(fewer, rows, tuple(moved), same_size=False),
    ]


def fingerprint(x: Tensor) -> Tensor:
    """Projections (..., N_DIRECTIONS) of the last axis of `x` in float32; shorter axes as they are.

    Their squared length is that of the projected vector, on average over directions.
    """
    x = x.detach()
    x = x.float() if x.ndim > 1 else x.float().unsqueeze(-1)
    if x.shape[-1] <= N_DIRECTIONS:
        return x.clone()
    generator = torch.Generator().manual_seed(x.shape[-1])
    directions = torch.randn((x.shape[-1], N_DIRECTIONS), generator=generator)
    with no_autocast(x.device):
        return x @ (directions / N_DIRECTIONS**0.5).to(x.device)


def difference(prints: Tensor, others: Tensor) -> float:
    """The largest distance of two tokens' fingerprints, relative to the root mean square of all;
    inf for unequal shapes. NaN and inf in equal places count as equal."""
    if prints.shape != others.shape:
        return float("inf")
    if not prints.numel():
        return 0.0
    same = (prints == others) | (prints.isnan() & others.isnan())
    if bool(same.all()):
        return 0.0
    gaps = torch.where(same, torch.zeros_like(prints), (prints - others).abs())
    lengths = torch.where(same & ~prints.isfinite(), torch.zeros_like(prints), prints)
    scale = lengths.square().sum(-1).mean().sqrt()
    error = float(gaps.square().sum(-1).max().sqrt() / scale)
    return float("inf") if math.isnan(error) else error


class Fingerprints(Observer):
    """An observer that keeps a fingerprint of all that is captured: sites, branches of sublayers,
    outputs of attention; and of the model's output, by `note`."""

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
        """Name -> `difference` of these rows from those of the other, inf where it has none."""
        errors = {}
        for name, prints in self.prints.items():
            theirs = other.prints.get(name)
            error = float("inf")
            if theirs is not None:
                error = difference(prints[list(rows)], theirs[list(other_rows)])
            errors[name] = error
        return errors


# ---------------- module by module


@dataclass(frozen=True)
class Event:
    """A tensor that enters or leaves a module. around: the module whose code made it. prints: the
    fingerprint, images first where the tensor has them first or second; None without a tensor."""

    module: str
    entering: bool
    around: str
    prints: Tensor | None
    by_image: bool


@dataclass
class Passage:
    """One forward pass as its events, in their order. half: a number in half precision was made."""

    events: list[Event] = field(default_factory=list)
    half: bool = False


class _HalfWatch(TorchDispatchMode):
    """Notes whether any function gives a tensor in half precision."""

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
    """One forward pass in float32, every module's input and output as a fingerprint."""
    n_images = len(images)
    stack: list[str] = []
    record = Passage()

    def note(name: str, entering: bool, x: Tensor | None) -> None:
        around = name if not entering else (stack[-1] if stack else name)
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
    """(images, ...) of a tensor that has several entries for each image, or the images second."""
    if x.ndim > 1 and len(x) != n_images and x.shape[1] == n_images:
        return x.transpose(0, 1)
    if x.ndim > 0 and len(x) > n_images and len(x) % n_images == 0:
        return x.unflatten(0, (n_images, -1))
    return x


def run_dependence(module: nn.Module, images: Tensor) -> str | None:
    """The module that first gives something else when the same batch is run again, with its class;
    None where all runs are alike."""
    first = passage(module, images)
    for _ in range(N_RUNS - 1):
        again = passage(module, images)
        for event, other in zip(first.events, again.events, strict=False):
            if (event.module, event.entering) != (other.module, other.entering):
                return _named(module, event.around)
            if event.prints is None or other.prints is None:
                continue
            if difference(event.prints, other.prints) > RUN_TOLERANCE:
                return _named(module, event.around)
        if len(first.events) != len(again.events):
            return _named(module, "")
    return None


def changing(module: nn.Module, images: Tensor) -> str | None:
    """A model that gives something else when it is run again, in words; None for another."""
    where = run_dependence(module, images)
    if where is None:
        return None
    return (
        f"changes from run to run, first in {where}: dropout, noise or sampling that stays on, or "
        "a count of its calls; expected a model in evaluation mode, which gives the same for the "
        "same image"
    )


class Dependence(NamedTuple):
    """module: the first whose output of an image depends on the batch, with its class; None where
    roundings explain what differs. error: how far it is apart, relative."""

    module: str | None
    error: float


def batch_dependence(
    module: nn.Module, images: Tensor, other: Composition
) -> Dependence | None:
    """The module that first gives something else for an image in the other batch; None where every
    module gives the same.

    Raises:
        RuntimeError, ...: whatever the model raises on such a batch.
    """
    first = passage(module, images, watch_half=True)
    second = passage(module, other.images)
    signs = torch.randn(images.shape, generator=torch.Generator().manual_seed(4)).sign()
    perturbed = passage(
        module, images * (1 + PERTURBATION * signs.to(images.device, images.dtype))
    )
    exact = tolerance = other.tolerance("fp32")
    if first.half:
        tolerance = ROUNDED_TOLERANCE if other.same_size else other.tolerance("half")
    largest = 0.0
    for event, there, shaken in zip(
        first.events, second.events, perturbed.events, strict=False
    ):
        if (event.module, event.entering) != (there.module, there.entering):
            return Dependence(_named(module, event.around), float("inf"))
        if event.prints is None or there.prints is None or not event.by_image:
            continue
        if not there.by_image:
            return Dependence(_named(module, event.around), float("inf"))
        rows = list(other.rows)
        first_rows = list(other.first_rows)
        error = difference(event.prints[first_rows], there.prints[rows])
        largest = max(largest, error)
        if error <= tolerance:
            continue
        noise = float("inf")
        if shaken.prints is not None:
            noise = difference(event.prints[first_rows], shaken.prints[first_rows])
        if error > MAX_PERTURBED * noise:
            return Dependence(_named(module, event.around), error)
    return Dependence(None, largest) if largest > exact else None


def _named(module: nn.Module, path: str) -> str:
    """`blocks.0.norm1 (BatchNorm1d)`."""
    kind = type(module.get_submodule(path)).__name__
    if path:
        return f"{path} ({kind})"
    return f"the model itself ({kind})"
