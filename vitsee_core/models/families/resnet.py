"""ResNet v1 blocks, basic and bottleneck, with or without squeeze-excitation.

out = act(shortcut + branch), the branch being the last of norm, attention and drop path before
the sum. timm adds in place: the branch's own tensor is the sum afterwards.
"""

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
    """Parts: conv, bn and act modules by name, then branch, shortcut, out."""
    last = 3 if has(block, "conv3", "bn3", "act3") else 2
    names = [f"{kind}{i}" for i in range(1, last + 1) for kind in ("conv", "bn", "act")]
    if not has(block, *names) or not hasattr(block, "downsample") or has(block, "conv4"):
        return None
    ends = [n for n in ("drop_path", "se") if has(block, n)] + [f"bn{last}"]
    skip = HookPoint(f"{path}.downsample") if has(block, "downsample") else HookPoint(path, "in")
    parts = [
        Part(name, HookPoint(f"{path}.{name}"), ("norms",) if name.startswith("bn") else ())
        for name in names
    ]
    parts += [
        Part("branch", HookPoint(f"{path}.{ends[0]}"), ("residual",)),
        Part("shortcut", skip, ("residual",)),
        leaves(path),
    ]
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    total = Residual("", "block", "shortcut", "branch", "out", f"{path}.act{last}")
    return Description("ResNet block", tuple(parts), (total,))
