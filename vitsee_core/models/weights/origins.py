"""Which tensors of a file a converted state dict is made of.

Libraries convert files of other layouts by a function over the whole state dict, which renames,
cuts and joins tensors, resamples some and drops others. What became of each is seen by watching the
tensors, whatever the function calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_NOTHING: frozenset[str] = frozenset()


class Origins(TorchFunctionMode):
    """A mode that remembers, while it is active, of which tensors of a state dict each tensor was
    made.

        origins = Origins(state)
        with origins:
            converted = convert(state)
        origins.of(converted["blocks.0.attn.qkv.weight"])  # {"layer.0.q", "layer.0.k", ...}
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(x): frozenset({name}) for name, x in state.items()}
        self._interpolated: set[int] = set()
        # Tensors are known by id(), which Python gives away again once one is freed.
        self._alive: list[Tensor] = list(state.values())
        self._storages: set[int] = set()
        # A tensor that is wrapped as a parameter is another object over the same values.
        self._names_of_storage: dict[int, frozenset[str]] = {}
        self.add_inputs(state)

    def add_inputs(self, state: Mapping[str, Tensor]) -> None:
        """Count these tensors as the state dict's, so that a view of one is not a new value."""
        for name, x in state.items():
            self._names.setdefault(id(x), frozenset({name}))
            self._alive.append(x)
            if x.layout == torch.strided and x.numel():
                self._storages.add(x.untyped_storage().data_ptr())
                self._remember_storage(x, frozenset({name}))

    def is_part(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view of one of the state dict's."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def of(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the state dict's tensors that a tensor was made of."""
        names = self._names.get(id(tensor), _NOTHING)
        if not names and isinstance(tensor, nn.Parameter):
            names = self._names_of_storage.get(
                tensor.untyped_storage().data_ptr(), _NOTHING
            )
        return names

    def is_interpolated(self, tensor: Tensor) -> bool:
        """Return whether a tensor was interpolated on its way."""
        return id(tensor) in self._interpolated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        names = _NOTHING.union(*(self.of(x) for x in inputs))
        if not names:
            return result
        resampled = func is functional.interpolate or any(
            self.is_interpolated(x) for x in inputs
        )
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)
                self._names[id(leaf)] = names | self.of(leaf)
                self._remember_storage(leaf, self._names[id(leaf)])
                if resampled:
                    self._interpolated.add(id(leaf))
        return result

    def _remember_storage(self, tensor: Tensor, names: frozenset[str]) -> None:
        """Remember of which tensors the values below a tensor were made."""
        if tensor.layout == torch.strided and tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            before = self._names_of_storage.get(address, _NOTHING)
            self._names_of_storage[address] = before | names
