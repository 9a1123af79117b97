"""Which tensors of a file a converted state dict is made of.

Libraries convert files of other layouts by a function over the whole state dict, which renames,
cuts and joins tensors, resamples some and drops others. What became of each is seen by watching the
tensors, whatever the function calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        self._alive: list[Tensor] = list(state.values())  # an id must not be given away again

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
        resampled = func is functional.interpolate or any(map(self.is_interpolated, inputs))
        if not names:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)
                self._names[id(leaf)] = names | self.of(leaf)
                if resampled:
                    self._interpolated.add(id(leaf))
        return result
