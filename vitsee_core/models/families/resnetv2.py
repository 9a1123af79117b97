"""ResNetV2 and BiT blocks: pre-activation, out = shortcut + branch; and the variant with
activations after the sum that hybrid ViTs use. Norms there carry their activation."""

from __future__ import annotations

from torch import nn

from vitsee_core.models.families.base import (
    Description,
    Part,
    Residual,
    fired,
    has,
    leaves,
)
from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.trace import Trace


def describe(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """Parts: norm, conv and act modules by name in the block's order, then branch, shortcut,
    out."""
    last = 3 if has(block, "conv3", "norm3") else 2
    pairs = [f"{kind}{i}" for i in range(1, last + 1) for kind in ("norm", "conv")]
    if not has(block, *pairs, "drop_path") or not hasattr(block, "downsample"):
        return None
    act = f"act{last}" if has(block, f"act{last}") else None
    wanted = {*pairs, *([act] if act else [])}
    names = [name for name, _ in block.named_children() if name in wanted]
    skip = HookPoint(f"{path}.downsample") if has(block, "downsample") else HookPoint(path, "in")
    parts = [
        Part(name, HookPoint(f"{path}.{name}"), ("norms",) if name.startswith("norm") else ())
        for name in names
    ]
    parts += [
        Part("branch", HookPoint(f"{path}.drop_path"), ("residual",)),
        Part("shortcut", skip, ("residual",)),
        leaves(path),
    ]
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    activation = f"{path}.{act}" if act else None
    total = Residual("", "block", "shortcut", "branch", "out", activation)
    return Description("ResNetV2 block", tuple(parts), (total,))
