"""MLP-Mixer blocks: a sublayer that mixes tokens, then one that mixes channels (ResMLP as well)."""

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
    """Parts in, norm1, token.hidden (rows are channels), token.branch, mid, norm2, channel.hidden,
    channel.branch, out; a single token-mixing layer has no token.hidden."""
    tokens = next((n for n in ("mlp_tokens", "linear_tokens") if has(block, n)), None)
    if tokens is None or not has(block, "norm1", "norm2", "mlp_channels"):
        return None
    ends = drop_paths(block, path)
    if ends is None or not trace.entered(path):
        return None
    mixed = hidden(block.get_submodule(tokens), f"{path}.{tokens}", trace)
    inner = hidden(block.get_submodule("mlp_channels"), f"{path}.mlp_channels", trace)
    parts = [
        enters(path),
        Part("norm1", HookPoint(f"{path}.norm1"), ("norms",)),
        *([Part("token.hidden", mixed, ("hidden",), rows=True)] if mixed else []),
        Part("token.branch", ends[0], ("residual",)),
        Part("mid", HookPoint(f"{path}.norm2", "in"), ("residual",)),
        Part("norm2", HookPoint(f"{path}.norm2"), ("norms",)),
        *([Part("channel.hidden", inner, ("hidden",))] if inner else []),
        Part("channel.branch", ends[1], ("residual",)),
        leaves(path),
    ]
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    sums = (
        Residual("token", "token", "in", "token.branch", "mid"),
        Residual("channel", "channel", "mid", "channel.branch", "out"),
    )
    return Description(tuple(parts), sums, (f"{path}.{tokens}",))
