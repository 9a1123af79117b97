"""Code of others that loads weights into its own modules, watched: what it leaves random.

A file or a library calls `module.load_state_dict(...)` while it makes its model. With strict=False
torch leaves what it does not find as it was, and says so to nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError, some
from vitsee_core.models.weights.fitting import (
    classifier_names,
    require_fit,
    require_numbers,
)

EXPECTED = (
    "expected code that loads all but the classifier: give it the weights by the model's "
    "own names (random weights are --random-init SEED)"
)


@dataclass
class Loads:
    """The parameters that calls of `load_state_dict` filled, and those they left as they were.

    Attributes:
        left: (parameter, copy of its values at the call) of those that the weights lacked.
        left_over: names of the weights without use.
        filled: id -> parameter that a call has filled; weak, as an id is used again.
    """

    left: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    filled: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)

    def remember(self, module: nn.Module, names: Iterable[str]) -> None:
        """Remember these parameters of a module, and their values, as left by a call."""
        parameters = dict(module.named_parameters())
        for name in names:
            if name in parameters and not parameters[name].is_meta:
                parameter = parameters[name]
                self.left.append((parameter, parameter.detach().clone()))

    def forget(self, module: nn.Module, names: Iterable[str]) -> None:
        """Forget what earlier calls left of these parameters, because a call has filled them."""
        parameters = dict(module.named_parameters())
        for name in names:
            if name in parameters:
                parameter = parameters[name]
                self.filled[id(parameter)] = weakref.ref(parameter)
        self.left = [pair for pair in self.left if not self._is_filled(pair[0])]

    def never_filled(self, module: nn.Module) -> list[str]:
        """Return the names of a module's parameters that no call has filled, without the
        classifier's."""
        heads = classifier_names(module)
        return [
            name
            for name, parameter in module.named_parameters()
            if not self._is_filled(parameter) and not name.startswith(heads)
        ]

    def _is_filled(self, parameter: Tensor) -> bool:
        """Return whether a call has filled the parameter."""
        reference = self.filled.get(id(parameter))
        return reference is not None and reference() is parameter

    def require_all(self, module: nn.Module, who: str) -> None:
        """Refuse a module with parameters that a call left random, and that nothing has changed
        since; the classifier's may be random.

        Args:
            module: the module that the code made.
            who: the file or library, as the message calls it.

        Raises:
            ModelError: names them.
        """
        parameters = dict(module.named_parameters())
        before_by_id = {id(parameter): before for parameter, before in self.left}
        ids = {id(parameter) for parameter in parameters.values()}
        # Of parameters that the module does not have itself it may have copies (deepcopy).
        elsewhere = [
            before
            for parameter, before in self.left
            if id(parameter) not in ids and not _is_constant(before)
        ]
        unchanged = {
            id(parameter)
            for parameter in parameters.values()
            if not parameter.is_meta
            and any(
                _equal(parameter, before)
                for before in [before_by_id.get(id(parameter)), *elsewhere]
                if before is not None
            )
        }
        heads = classifier_names(module)
        random = [
            name
            for name, parameter in parameters.items()
            if id(parameter) in unchanged and not name.startswith(heads)
        ]
        require_fit(
            who,
            missing=random,
            # Names without use matter only where something is missing: it may be one of them.
            left_over=self.left_over if random else (),
            expected=EXPECTED,
        )


def require_same(
    module: nn.Module, reseeded: nn.Module, names: Iterable[str], who: str
) -> None:
    """Refuse a module with parameters that another seed of the random numbers changes: they were
    drawn, and no code has filled them.

    Args:
        module: the module that the code made.
        reseeded: the module that it made under the other seed.
        names: the parameters to compare.
        who: the file or library, as the message calls it.

    Raises:
        ModelError: names them.
    """
    parameters = dict(module.named_parameters())
    others = dict(reseeded.named_parameters())
    drawn = [
        name
        for name in names
        if name not in others
        or not _equal(parameters[name].nan_to_num(), others[name].nan_to_num())
    ]
    if drawn:
        raise ModelError(
            f"{who} leaves parameters random: {len(drawn)} of {len(parameters)} change with "
            f"the seed ({some(drawn)}); {EXPECTED}"
        )


@contextmanager
def watched_loads(who: str) -> Iterator[Loads]:
    """Return a context in which calls of `load_state_dict` are remembered, and quantised or complex
    weights for floats refused.

    who: the file or library, as messages call it.

    Raises:
        ModelError: within: such weights.
    """
    loads = Loads()
    original: Any = nn.Module.load_state_dict

    def load(
        module: nn.Module, state: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        targets = dict(module.state_dict())
        stored = {
            name: x
            for name, x in state.items()
            if name in targets and isinstance(x, Tensor)
        }
        require_numbers(who, stored, targets)
        try:
            result = original(module, state, *args, **kwargs)
        except RuntimeError:
            # Strict loading fails after it has loaded what fits; the code may go on without.
            own = module.state_dict()
            loads.remember(module, [name for name in own if not _fits(state, own, name)])
            loads.left_over += [name for name in state if name not in own]
            raise
        loads.forget(module, state.keys() - set(result.missing_keys))
        loads.remember(module, result.missing_keys)
        loads.left_over += result.unexpected_keys
        return result

    with mock.patch.object(nn.Module, "load_state_dict", load):
        yield loads


def _equal(parameter: Tensor, before: Tensor) -> bool:
    """Return whether a parameter has the values of before, also if it was rounded since."""
    if parameter.shape != before.shape:
        return False
    return torch.equal(parameter.detach(), before.to(parameter.dtype))


def _is_constant(values: Tensor) -> bool:
    """Return whether all values are equal, as those of new biases and norms are: they tell nothing
    about which parameter it is."""
    return values.numel() < 2 or bool((values == values.flatten()[0]).all())


def _fits(state: Mapping[str, Any], own: Mapping[str, Tensor], name: str) -> bool:
    """Return whether a state dict has a tensor of the module's shape under one of its names."""
    stored = state.get(name)
    return isinstance(stored, Tensor) and stored.shape == own[name].shape
