"""Transformer blocks with two residual sublayers, attention and MLP.

ViT, DeiT, BEiT, EVA, DINOv3 and every other block of that build, with or without LayerScale, norms
before or after the sublayer. The branch is what is added to the stream: the output of the drop
path, after LayerScale and after a post-norm.
"""

from __future__ import annotations

from torch import nn

from vitsee_core.models.families.base import (
    Description,
    Part,
    Residual,
    drop_paths,
    enters,
    fired,
    has,
    hidden,
    leaves,
)
from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.trace import Trace


def describe(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """Parts in, norm1, attn.heads, attn.branch, mid, norm2, mlp.hidden, mlp.branch, out; a
    post-norm block's norms follow the sublayer they belong to."""
    if not has(block, "norm1", "attn", "norm2", "mlp"):
        return None
    ends = drop_paths(block, path)
    start = trace.entered(path)
    if ends is None or start is None or not all(fired(trace, hook_point) for hook_point in ends):
        return None
    norm1 = Part("norm1", HookPoint(f"{path}.norm1"), ("norms",))
    norm2 = Part("norm2", HookPoint(f"{path}.norm2"), ("norms",))
    heads = _heads(block, path, trace)
    attn = Part("attn.branch", ends[0], ("residual",))
    mlp = Part("mlp.branch", ends[1], ("residual",))
    inner = hidden(block.get_submodule("mlp"), f"{path}.mlp", trace)
    middle = [Part("mlp.hidden", inner, ("hidden",))] if inner else []
    if _is(trace, f"{path}.norm1", start.key):
        mid = Part("mid", HookPoint(f"{path}.norm2", "in"), ("residual",))
        parts = [enters(path), norm1, *heads, attn, mid, norm2, *middle, mlp, leaves(path)]
    elif _is(trace, f"{path}.attn", start.key):
        mid = Part("mid", HookPoint(f"{path}.mlp", "in"), ("residual",))
        parts = [enters(path), *heads, norm1, attn, mid, *middle, norm2, mlp, leaves(path)]
    else:
        return None
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    sums = (
        Residual("attn", "attn", "in", "attn.branch", "mid"),
        Residual("mlp", "mlp", "mid", "mlp.branch", "out"),
    )
    return Description(tuple(parts), sums)


def _is(trace: Trace, module: str, key: tuple[int, int]) -> bool:
    seen = trace.entered(module)
    return seen is not None and seen.key == key


def _heads(block: nn.Module, path: str, trace: Trace) -> list[Part]:
    """The heads' outputs side by side, as they go into the projection."""
    hook_point = HookPoint(f"{path}.attn.proj", "in")
    known = has(block.get_submodule("attn"), "proj") and fired(trace, hook_point)
    return [Part("attn.heads", hook_point, ("heads",))] if known else []
