"""The hooks of interventions: what a site holds is replaced where the following layers take it.

A site that is a module's output, or its input, is replaced by another tensor. A residual sum that
is no module's output (`mid` of a transformer block) is written over in place, as its skip must see
the change, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitsee_core.models.branch_only import BranchOnly, branch_only, plain
from vitsee_core.models.hook_points import (
    CaptureError,
    HookPoint,
    View,
    input_tensor,
    output_tensor,
)
from vitsee_core.models.interventions.blocked import BlockedAttention
from vitsee_core.models.interventions.neurons import Moved
from vitsee_core.models.interventions.references import Array, generators
from vitsee_core.models.interventions.tokens import Places, TokenChoice


class Given(Protocol):
    """The values that take the place of tokens: `references.Reference`, or values that are at
    hand."""

    def begin(self, rows: slice) -> None:
        """Read ahead what these rows of the new store will need."""

    def of(self, rows: Places, places: Places, draws: list[np.random.Generator]) -> Array:
        """(images, chosen, dim) for these rows at these tokens (images, chosen)."""


@dataclass(frozen=True)
class Change:
    """Tokens of one site that get other values. channels: those of ablated heads, None for all.
    reference: None for zeros. about: tokens or heads in words, which random numbers depend on."""

    tokens: TokenChoice
    channels: NDArray[np.int64] | None
    reference: Given | None
    about: str


Changed = Change | Moved


@dataclass(frozen=True)
class ChangedSite:
    """A place where a site is replaced. in_place: the tensor itself is written over. turned: tokens
    come before images there."""

    name: str
    hook_point: HookPoint
    view: View
    in_place: bool
    turned: bool


_Site = tuple[ChangedSite, list[Changed]]


class Changes:
    """The interventions of one model, in effect within `applied()`.

    Attributes:
        lines: each intervention in words, as manifests and tables have it.
        stores: the ids of the stores that values come from.
        expected: filled if it is a dictionary: site -> (images, tokens, dim) after its change.
        sites: name -> where the site is, and what is changed there, in order.
        attention: block -> the path of its attention module, and the mode that blocks pairs there.
        seed, index: of random numbers, and each image's place in the data set.
    """

    def __init__(
        self,
        module: nn.Module,
        lines: Sequence[str],
        stores: Sequence[str],
        seed: int,
        index: NDArray[np.int64],
    ) -> None:
        self.module, self.lines, self.stores = module, tuple(lines), tuple(stores)
        self.seed, self.index = seed, index
        self.sites: dict[str, _Site] = {}
        self.attention: dict[str, tuple[str, BlockedAttention]] = {}
        self.expected: dict[str, Tensor] | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.rows = np.zeros(0, np.int64)

    def record(self) -> dict[str, list[str]]:
        """The entry of manifests, the lines of the interventions; an empty dict without any."""
        return {"interventions": list(self.lines)} if self.lines else {}

    def begin(self, rows: slice) -> None:
        """Read ahead what the passes over these rows of the store will need."""
        for _, changes in self.sites.values():
            for change in changes:
                if isinstance(change, Change) and change.reference is not None:
                    change.reference.begin(rows)

    def at(self, rows: slice) -> None:
        """Say which rows of the store the next pass is about."""
        self.rows = np.arange(rows.start, rows.stop)

    def check(self) -> None:
        """Raises:
        CaptureError: the last pass had another number of attention calls in a changed block than
            one.
        """
        for name, (_, mode) in self.attention.items():
            calls, mode.calls = mode.calls, 0
            if calls != 1:
                raise CaptureError(f"{name}: {calls} attention calls were changed, expected 1")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model runs with the interventions; hooks registered within see what
        they leave."""
        with ExitStack() as stack:
            stack.enter_context(
                self.module.register_forward_pre_hook(lambda _m, _a: self.counts.clear())
            )
            by_place: dict[tuple[str, str], list[_Site]] = defaultdict(list)
            for site in self.sites.values():
                by_place[site[0].hook_point.module, site[0].hook_point.when].append(site)
            for (path, when), sites in by_place.items():
                child = self.module.get_submodule(path)
                if when == "in":
                    hook: Any = partial(self._entering, sites)
                    stack.enter_context(child.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    hook = partial(self._leaving, sites)
                    stack.enter_context(child.register_forward_hook(hook))
            for path, mode in self.attention.values():
                child = self.module.get_submodule(path)
                enter, leave = _entered(mode)
                stack.enter_context(child.register_forward_pre_hook(enter))
                stack.enter_context(child.register_forward_hook(leave, always_call=True))
            yield

    def _entering(self, sites: Sequence[_Site], _module: nn.Module, args: Any, kwargs: Any) -> Any:
        old = input_tensor(args, kwargs)
        new = self._changed(sites, old)
        if new is None or old is None:
            return None
        return swapped(args, old, new), swapped(kwargs, old, new)

    def _leaving(self, sites: Sequence[_Site], module: nn.Module, _args: Any, output: Any) -> Any:
        old = output_tensor(module, output, len(self.rows))
        new = self._changed(sites, old)
        return None if new is None or old is None else swapped(output, old, new)

    def _changed(self, sites: Sequence[_Site], old: Tensor | None) -> Tensor | None:
        """The tensor after the changes of this call of a module; None without any."""
        point = sites[0][0].hook_point
        call = self.counts[point.module, point.when]
        self.counts[point.module, point.when] += 1
        for site, changes in sites:
            if site.hook_point.call == call:
                if old is None:
                    raise CaptureError(f"{site.name}: its module gave no single tensor")
                with torch._C.DisableTorchFunction():
                    return self._replaced(site, changes, old)
        return None

    def _replaced(
        self, site: ChangedSite, changes: Sequence[Changed], old: Tensor
    ) -> Tensor | None:
        x = old.transpose(0, 1) if site.turned else old
        if len(x) != len(self.rows):
            raise CaptureError(f"{site.name}: {len(x)} for a batch of {len(self.rows)} images")
        before = site.view.flat(x)
        after = before.clone()
        for change in changes:
            if isinstance(change, Moved):
                change.put(after)
                continue
            draws = generators(self.seed, f"{change.about} {site.name}", self.index[self.rows])
            places = change.tokens.of(before, draws)
            values = torch.zeros((), dtype=after.dtype, device=after.device)
            if change.reference is not None:
                given = change.reference.of(self.rows, places, draws)
                if change.channels is not None:
                    given = given[..., change.channels]
                values = torch.from_numpy(given).to(after)
            rows = np.arange(len(places))[:, None]
            if change.channels is None:
                after[rows, places] = values
            else:
                after[rows[:, :, None], places[:, :, None], change.channels] = values
        if self.expected is not None:
            self.expected[site.name] = after.clone()
        if site.in_place:
            x.copy_(site.view.unflat(after, x))
            return None
        new = torch.empty_like(x).copy_(site.view.unflat(after, x))
        return new.transpose(0, 1) if site.turned else new


def _entered(mode: BlockedAttention) -> tuple[Any, Any]:
    """Hooks that enter the mode with a module and leave it with that."""
    open_modes: list[BlockedAttention] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        open_modes.append(mode)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if open_modes:
            open_modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return enter, leave


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """The same arguments or output with one tensor for another."""
    if isinstance(value, Tensor):
        if plain(value) is not old:
            return value
        return branch_only(new) if isinstance(value, BranchOnly) else new
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = swapped(entry, old, new)
        return value
    if isinstance(value, tuple | list):
        entries = [swapped(entry, old, new) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value
