"""torch's fused inference path of attention layers, turned off within a model, whose
nn.MultiheadAttention then show what they compute (see multihead.py).

nn.MultiheadAttention and nn.TransformerEncoderLayer compute a layer in one call where nothing has
to be seen of it, in other roundings than otherwise. A model whose sites are captured computes as
its code says in every pass, so that a pass with hooks equals one without to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vitsee_core.models.multihead import MultiheadAttention

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def without_fast_path(module: nn.Module) -> None:
    """Turn the path off while the module runs, where any part of it has one."""
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
