"""Blocks recognised by the names of their modules: a function per family, which returns None for a
block that is not of it."""

from __future__ import annotations

from collections.abc import Sequence

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


def transformer(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """A block with two residual sublayers, attention and MLP: ViT, DeiT, BEiT, EVA, DINOv3 and
    every other block of that build, with or without LayerScale, norms before or after the sublayer.

    Parts in, norm1, attn.heads, attn.branch, mid, norm2, mlp.hidden, mlp.branch, out; a post-norm
    block's norms follow the sublayer they belong to. The branch is what is added to the stream: the
    output of the drop path, after LayerScale and after a post-norm.
    """
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


def parallel(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """A block with one residual sum, attention and MLP side by side or a gated MLP alone. Parts in,
    branch, out, where the block is out = in + drop_path(...)."""
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


def mixer(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """A sublayer that mixes tokens, then one that mixes channels (MLP-Mixer, ResMLP). Parts in,
    norm1, token.hidden (rows are channels), token.branch, mid, norm2, channel.hidden,
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


def resnet(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """A ResNet block, basic or bottleneck. Parts: conv, norm and act modules by name, then branch,
    shortcut, out.

    v1, with or without squeeze-excitation: out = act(shortcut + branch), the branch being the last
    of norm, attention and drop path before the sum. timm adds in place: the branch's own tensor is
    the sum afterwards. ResNetV2 and BiT: pre-activation, out = shortcut + branch, and the variant
    with activations after the sum that hybrid ViTs use. Norms there carry their activation.
    """
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
