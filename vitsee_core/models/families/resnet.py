"""ResNet blocks, basic and bottleneck, of both versions.

v1, with or without squeeze-excitation: out = act(shortcut + branch), the branch being the last of
norm, attention and drop path before the sum. timm adds in place: the branch's own tensor is the sum
afterwards. ResNetV2 and BiT: pre-activation, out = shortcut + branch, and the variant with
activations after the sum that hybrid ViTs use. Norms there carry their activation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vitsee_core.models.families.base import Description, Part, Residual, fired, has, leaves
from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.trace import Trace


def describe(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """Parts: conv, norm and act modules by name, then branch, shortcut, out."""
    if not hasattr(block, "downsample"):
        return None
    last = 3 if has(block, "conv3", "bn3", "act3") else 2
    names = [f"{kind}{i}" for i in range(1, last + 1) for kind in ("conv", "bn", "act")]
    if has(block, *names) and not has(block, "conv4"):
        end = next(n for n in ("drop_path", "se", f"bn{last}") if has(block, n))
        if found := _described(block, path, trace, names, end, f"act{last}"):
            return found
    last = 3 if has(block, "conv3", "norm3") else 2
    pairs = [f"{kind}{i}" for i in range(1, last + 1) for kind in ("norm", "conv")]
    if not has(block, *pairs, "drop_path"):
        return None
    act = f"act{last}" if has(block, f"act{last}") else None
    names = [name for name, _ in block.named_children() if name in (*pairs, act)]
    return _described(block, path, trace, names, "drop_path", act)


def _described(
    block: nn.Module, path: str, trace: Trace, names: Sequence[str], end: str, act: str | None
) -> Description | None:
    """A block of the modules `names` in this order, whose branch ends at one of them, or behind."""
    skip = HookPoint(f"{path}.downsample") if has(block, "downsample") else HookPoint(path, "in")
    norms = tuple(name for name in names if name.startswith(("bn", "norm")))
    parts = [
        *(Part(n, HookPoint(f"{path}.{n}"), ("norms",) if n in norms else ()) for n in names),
        Part("branch", HookPoint(f"{path}.{end}"), ("residual",)),
        Part("shortcut", skip, ("residual",)),
        leaves(path),
    ]
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    activation = f"{path}.{act}" if act else None
    return Description(
        tuple(parts), (Residual("", "block", "shortcut", "branch", "out", activation),)
    )
