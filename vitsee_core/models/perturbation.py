"""A model run on the same images with one of its tensors changed, and where that has an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.blocks import CONTAINERS, is_leaf
from vitsee_core.models.hook_points import ForwardEnded, input_tensor

LEARNED, FIXED, COMPUTED = "learned", "fixed", "computed"


@dataclass(frozen=True)
class Candidate:
    """Something that may be added to the tokens. changed(a, b): a context in which it is a times
    itself plus b."""

    name: str
    kind: str
    changed: Callable[[float, float], AbstractContextManager[None]]


class PerturbationRunner:
    """Runs a model repeatedly on the same images and captures the inputs of its modules."""

    def __init__(self, module: nn.Module, images: Tensor) -> None:
        self.module, self.images = module, images
        self.plain: list[tuple[Any, ...]] = []

    def candidates(self) -> Iterator[Candidate]:
        """Tensors that belong to no layer and to no block, with several positions; and modules
        that return a tensor and take none."""
        found, makers = [], {}
        for path, child in self.module.named_modules():
            if is_leaf(child) or any(part in CONTAINERS for part in path.split(".")):
                continue
            makers[path] = child
            for kind, tensors in (
                (LEARNED, child.named_parameters(recurse=False)),
                (FIXED, child.named_buffers(recurse=False)),
            ):
                for name, tensor in tensors:
                    if tensor.is_floating_point() and sum(n > 1 for n in tensor.shape) > 1:
                        full = f"{path}.{name}" if path else name
                        found.append(Candidate(full, kind, _changed_tensor(tensor)))
        made = self._first_run(makers)
        yield from found
        for path in made:
            yield Candidate(path, COMPUTED, _changed_output(makers[path]))

    def effect(self, candidate: Candidate) -> tuple[int, Tensor] | None:
        """The first call of a module whose input changes when the candidate does, by its number,
        and that change; None where no input does."""

        def differs(call: int, x: Tensor) -> bool:
            return call >= len(self.plain) or _fingerprint(x) != self.plain[call]

        with candidate.changed(1.0, 1.0):
            seen = self._until(differs)
        if seen is None:
            return None
        before = self.entering(seen[0])
        return None if before.shape != seen[1].shape else (seen[0], seen[1] - before)

    def share(self, candidates: Sequence[Candidate], call: int) -> Tensor:
        """The share that candidates have in the input of a call, for an image of zeros."""
        whole = self.entering(call)
        with ExitStack() as stack:
            for candidate in candidates:
                stack.enter_context(candidate.changed(0.0, 0.0))
            rest = self.entering(call)
        return whole[0] - rest[0]

    def _first_run(self, makers: dict[str, nn.Module]) -> list[str]:
        """Fill `plain`; the modules called without a tensor that give one."""
        made = []

        def left(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = (*args, *kwargs.values())
            fed = any(isinstance(value, Tensor | list | tuple | dict) for value in given)
            if isinstance(output, Tensor) and not fed:
                made.append(name)

        with ExitStack() as stack:
            for name, child in makers.items():
                see = partial(left, name)
                stack.enter_context(child.register_forward_hook(see, with_kwargs=True))
            self._until(lambda _, x: self.plain.append(_fingerprint(x)))
        return made

    def entering(self, wanted: int, images: Tensor | None = None) -> Tensor:
        """The input of a module at this call, for these images or the usual ones."""
        seen = self._until(lambda call, _: call == wanted, images)
        assert seen is not None
        return seen[1]

    def _until(
        self, stop: Callable[[int, Tensor], bool | None], images: Tensor | None = None
    ) -> tuple[int, Tensor] | None:
        """Run until `stop` is true of the input of a module: the call's number, and that input.
        None if it is true of none before the first block."""
        seen: list[tuple[int, Tensor]] = []
        calls = 0

        def enter(last: bool, _module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal calls
            x = input_tensor(args, kwargs)
            if x is not None and stop(calls, x):
                seen.append((calls, x.clone()))
            if seen or last:
                raise ForwardEnded
            calls += x is not None

        with ExitStack() as stack, torch.no_grad(), suppress(ForwardEnded):
            for path, child in self.module.named_modules():
                see = partial(enter, path.split(".")[0] in CONTAINERS)
                stack.enter_context(child.register_forward_pre_hook(see, with_kwargs=True))
            self.module(self.images if images is None else images)
        return seen[0] if seen else None


def _fingerprint(x: Tensor) -> tuple[Any, ...]:
    wide = x.double()
    return tuple(x.shape), float(wide.sum()), float(wide.abs().sum())


def _changed_tensor(tensor: Tensor) -> Callable[[float, float], AbstractContextManager[None]]:
    @contextmanager
    def changed(a: float, b: float) -> Iterator[None]:
        with torch.no_grad():
            kept = tensor.clone()
            tensor.mul_(a).add_(b)
            try:
                yield
            finally:
                tensor.copy_(kept)

    return changed


def _changed_output(module: nn.Module) -> Callable[[float, float], AbstractContextManager[None]]:
    @contextmanager
    def changed(a: float, b: float) -> Iterator[None]:
        with module.register_forward_hook(lambda _m, _i, output: output * a + b):
            yield

    return changed
