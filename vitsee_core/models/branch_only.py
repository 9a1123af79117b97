"""A branch's output that ignores its skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


class BranchOnly(Tensor):
    """f of a residual sum z + f that is to be left without z: a sum with one tensor of its own
    shape gives f itself, the same object and so to the bit. Any other function gets the plain f.

    Made by `branch_only`; `plain` is f.
    """

    plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The sum's stand-in, or `func` of plain tensors."""
        terms = _plain(args)
        if func in SUMS and len(args) == 2 and not kwargs:
            number = sum(isinstance(term, BranchOnly) for term in args)
            if number == 1 and all(isinstance(term, Tensor) for term in terms):
                f, z = terms if isinstance(args[0], BranchOnly) else terms[::-1]
                if f.shape == z.shape:
                    # The type that the sum would have had (under autocast these differ).
                    return f.to(torch.result_type(f, z))
        return func(*terms, **_plain(dict(kwargs or {})))


def branch_only(f: Tensor) -> Tensor:
    """`f` as an `BranchOnly`; gradients flow through it."""
    wrapped: BranchOnly = f.as_subclass(BranchOnly)
    wrapped.plain = f
    return wrapped


def plain(x: Tensor) -> Tensor:
    """The tensor that an `BranchOnly` stands for; any other as it is."""
    return x.plain if isinstance(x, BranchOnly) else x


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_plain(entry) for entry in value)
    return value
