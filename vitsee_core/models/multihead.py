"""nn.MultiheadAttention with nothing hidden: the product of its attention, and its output
projection as a module that is called.

torch computes the layer in one function. Whoever watches torch's functions gets that one whole,
without the product inside; and the projection's weights are used without a call of the module, so
that no hook sees the heads' outputs. The same code runs here, told that nobody watches, and with
the projection called: every bit is the one that torch gives.

nn.MultiheadAttention and nn.TransformerEncoderLayer also compute a layer in one fused call where
nothing has to be seen of it, in other roundings than otherwise. A model whose sites are captured
computes as its code says in every pass, so that a pass with hooks equals one without to the bit.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation

MULTIHEAD = functional.multi_head_attention_forward
# The heads of the layers that are running; where weights are asked for, these lie in the batch.
RUNNING: list[int] = []
_N_HEADS = 4  # the place of num_heads among its arguments
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def attend(*args: Any, linear: Any = functional.linear, **kwargs: Any) -> Any:
    """torch's multi_head_attention_forward, in sight of who watches; linear: its products with
    weights."""
    shown = {"has_torch_function": lambda _: False, "linear": linear}
    body = _with(MULTIHEAD, {**vars(functional), **shown})
    RUNNING.append(kwargs.get("num_heads") or args[_N_HEADS])
    try:
        return body(*args, **kwargs)
    finally:
        RUNNING.pop()


class MultiheadAttention(nn.MultiheadAttention):
    """torch's layer, its output projection called with (tokens, images, dim)."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Attention as torch's `MultiheadAttention.forward` returns it."""
        n_images = query.shape[0 if self.batch_first else 1] if query.ndim == 3 else 1

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is not self.out_proj.weight:
                return functional.linear(x, weight, bias)
            projected: Tensor = self.out_proj(x.unflatten(0, (-1, n_images)))
            return projected.flatten(0, 1)

        called = {"multi_head_attention_forward": partial(attend, linear=linear)}
        functions = SimpleNamespace(**{**vars(functional), **called})
        layer = _with(nn.MultiheadAttention.forward, {**vars(activation), "F": functions})
        return layer(self, query, *args, **kwargs)


def _with(function: Any, names: dict[str, Any]) -> FunctionType:
    """The same code with other global names."""
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def without_fast_path(module: nn.Module) -> None:
    """Turn torch's fused path off while the module runs, where any part of it has one."""
    for child in module.modules():
        if type(child) is nn.MultiheadAttention:
            child.__class__ = MultiheadAttention
    if not any(isinstance(child, _FUSED) for child in module.modules()):
        return
    before: list[bool] = []

    def enter(*_: Any) -> None:
        before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def leave(*_: Any) -> None:
        if before:  # not where an earlier hook refused the input
            torch.backends.mha.set_fastpath_enabled(before.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
