"""Which tensors of a file a converted state dict is made of.

Libraries convert files of other layouts by a function over the whole state dict, which renames,
cuts and joins tensors, resamples some and drops others. What became of each is seen by watching the
tensors, whatever the function calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_NOTHING: frozenset[str] = frozenset()


class Origins(TorchFunctionMode):
    """While it is active, every tensor that is made of a state dict's is remembered."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(x): frozenset({name}) for name, x in state.items()}
        self._interpolated: set[int] = set()
        self._alive: list[Tensor] = list(
            state.values()
        )  # an id must not be given away again
        self._storages: set[int] = set()
        self.add_inputs(state)

    def add_inputs(self, state: Mapping[str, Tensor]) -> None:
        """Take tensors for the state dict's own: parts of them are no new values."""
        for name, x in state.items():
            self._names.setdefault(id(x), frozenset({name}))
            self._alive.append(x)
            if x.layout == torch.strided and x.numel():
                self._storages.add(x.untyped_storage().data_ptr())

    def is_part(self, tensor: Tensor) -> bool:
        """Whether a tensor's values are a part of one of the state dict's, as they are there."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def of(self, tensor: Tensor) -> frozenset[str]:
        """The names of the tensors that one is made of."""
        return self._names.get(id(tensor), _NOTHING)

    def is_interpolated(self, tensor: Tensor) -> bool:
        """Whether it was resampled on its way."""
        return id(tensor) in self._interpolated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        names = _NOTHING.union(*(self.of(x) for x in inputs))
        resampled = func is functional.interpolate or any(
            map(self.is_interpolated, inputs)
        )
        if not names:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)
                self._names[id(leaf)] = names | self.of(leaf)
                if resampled:
                    self._interpolated.add(id(leaf))
        return result
