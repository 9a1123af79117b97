"""Blocks with one residual sum: attention and MLP side by side, or a gated MLP alone."""

from __future__ import annotations

from torch import nn

from vitsee_core.models.families.base import Description, Part, Residual, enters, fired, has, leaves
from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.trace import Trace


def describe(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """Parts in, branch, out, where the block is out = in + drop_path(...)."""
    side_by_side = has(block, "in_norm", "in_proj", "drop_path")
    gated = has(block, "norm", "mlp_channels", "drop_path")
    branch = Part("branch", HookPoint(f"{path}.drop_path"), ("residual",))
    if (
        not (side_by_side or gated)
        or not fired(trace, branch.hook_point)
        or not trace.entered(path)
    ):
        return None
    parts = (enters(path), branch, leaves(path))
    return Description(parts, (Residual("", "block", "in", "branch", "out"),))
