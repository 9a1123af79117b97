"""The description of one block by its family: blocks recognised by the names of their modules, a
function per family, which returns None for a block that is not of it.

A family is recognised by what its blocks have and by how the model called them, never by a model's
name; the residual sums it claims are proven on real activations before a table is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.survey.tracing import Trace


@dataclass(frozen=True)
class BlockHook:
    """A named hook point within a block.

    Attributes:
        name: the part's name in sites.
        hook_point: where its tensor is.
        groups: the groups of sites that it belongs to.
        rows: whether its rows are channels or the like, not the cells of an image grid.
        minus: the hook point whose tensor is subtracted.
    """

    name: str
    hook_point: HookPoint
    groups: tuple[str, ...] = ()
    rows: bool = False
    minus: HookPoint | None = None


@dataclass(frozen=True)
class Residual:
    """A residual sum, total = activation(skip + branch), of three parts of one block.

    Attributes:
        name: the sublayer ("attn", "mlp", "token", "channel"), "" for a block that is one sublayer.
        kind: the same, "block" for such a block.
        skip, branch, total: the parts' names.
        activation: path of the module that is applied to the sum, if any.
        ablated: whether the skip was taken out.
        witness: where the branch is only known as total - skip: the output that it must be, times
            one factor per channel.
    """

    name: str
    kind: str
    skip: str
    branch: str
    total: str
    activation: str | None = None
    ablated: bool = False
    witness: HookPoint | None = None

    @property
    def formula(self) -> str:
        """The total as a formula of the parts, for messages."""
        formula = self.branch if self.ablated else f"{self.skip} + {self.branch}"
        if self.activation:
            formula = f"activation({formula})"
        return formula


@dataclass(frozen=True)
class Description:
    """All parts of one block in order, `in` and `out` included, and its residual sums.

    rows_below: paths of modules that work on rows that are no image grid.
    """

    parts: tuple[BlockHook, ...]
    residuals: tuple[Residual, ...] = ()
    rows_below: tuple[str, ...] = ()


def has(block: nn.Module, *names: str) -> bool:
    """Return whether a block has modules of all these names."""
    return all(isinstance(getattr(block, name, None), nn.Module) for name in names)


def enters(path: str) -> BlockHook:
    """Return the part `in`, the input of a block."""
    return BlockHook("in", HookPoint(path, "in"), ("residual",))


def leaves(path: str) -> BlockHook:
    """Return the part `out`, the output of a block."""
    return BlockHook("out", HookPoint(path), ("blocks", "residual"))


def drop_paths(block: nn.Module, path: str) -> tuple[HookPoint, HookPoint] | None:
    """Return where the two branches of a block end: after their drop path, whether each has its own
    or both share one that is called twice; None without a drop path."""
    if has(block, "drop_path1", "drop_path2"):
        return HookPoint(f"{path}.drop_path1"), HookPoint(f"{path}.drop_path2")
    if has(block, "drop_path"):
        # The first call ends the attention branch, the second the MLP's (blocks that
        # share one module).
        shared = HookPoint(f"{path}.drop_path", calls=2)
        return shared, replace(shared, call=1)
    return None


def fired(trace: Trace, hook_point: HookPoint) -> bool:
    """Return whether the module was called as often as the hook point expects."""
    return len(trace.calls.get(hook_point.module, ())) == hook_point.calls


def hidden(mlp: nn.Module, path: str, trace: Trace) -> HookPoint | None:
    """Return where the hidden activations of an MLP are: the input of its first dropout, which is
    the activation or a gated product, or else the output of its activation; None without both."""
    dropout_input = HookPoint(f"{path}.drop1", "in")
    if has(mlp, "drop1") and fired(trace, dropout_input):
        return dropout_input
    activation_output = HookPoint(f"{path}.act", "out")
    if has(mlp, "act") and fired(trace, activation_output):
        return activation_output
    return None


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
    if ends is None or start is None:
        return None
    if not all(fired(trace, hook_point) for hook_point in ends):
        return None
    norm1 = BlockHook("norm1", HookPoint(f"{path}.norm1"), ("norms",))
    norm2 = BlockHook("norm2", HookPoint(f"{path}.norm2"), ("norms",))
    heads = _heads(block, path, trace)
    attn = BlockHook("attn.branch", ends[0], ("residual",))
    mlp = BlockHook("mlp.branch", ends[1], ("residual",))
    inner = hidden(block.get_submodule("mlp"), f"{path}.mlp", trace)
    middle = [BlockHook("mlp.hidden", inner, ("hidden",))] if inner else []
    # Pre-norm (ViT): norm2 reads the stream between the sublayers.
    if _takes(trace, f"{path}.norm1", start.key):
        mid = BlockHook("mid", HookPoint(f"{path}.norm2", "in"), ("residual",))
        parts = [
            enters(path),
            norm1,
            *heads,
            attn,
            mid,
            norm2,
            *middle,
            mlp,
            leaves(path),
        ]
    elif _takes(trace, f"{path}.attn", start.key):
        mid = BlockHook("mid", HookPoint(f"{path}.mlp", "in"), ("residual",))
        parts = [
            enters(path),
            *heads,
            norm1,
            attn,
            mid,
            *middle,
            norm2,
            mlp,
            leaves(path),
        ]
    else:
        return None
    # A module that was defined but not called (a fused path around it) would have no
    # tensor.
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    # x_mid = x + attn.branch, out = x_mid + mlp.branch; a post-norm is inside of its
    # branch.
    sums = (
        Residual("attn", "attn", "in", "attn.branch", "mid"),
        Residual("mlp", "mlp", "mid", "mlp.branch", "out"),
    )
    return Description(tuple(parts), sums)


def _takes(trace: Trace, module: str, key: tuple[int, int]) -> bool:
    """Return whether the tensor with this key is a module's input."""
    seen = trace.entered(module)
    return seen is not None and seen.key == key


def _heads(block: nn.Module, path: str, trace: Trace) -> list[BlockHook]:
    """Return the part `attn.heads`, the heads' outputs side by side as they go into the projection;
    [] where the attention has no such module."""
    hook_point = HookPoint(f"{path}.attn.proj", "in")
    if has(block.get_submodule("attn"), "proj") and fired(trace, hook_point):
        return [BlockHook("attn.heads", hook_point, ("heads",))]
    return []


def mixer(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """Return the parts of a block that mixes tokens, then channels (MLP-Mixer, ResMLP).

    Parts are in, norm1, token.hidden (rows are channels), token.branch, mid, norm2, channel.hidden,
    channel.branch, out; a single token-mixing layer has no token.hidden.
    """
    # timm's names in MLP-Mixer and in ResMLP.
    tokens = next((n for n in ("mlp_tokens", "linear_tokens") if has(block, n)), None)
    if tokens is None or not has(block, "norm1", "norm2", "mlp_channels"):
        return None
    ends = drop_paths(block, path)
    if ends is None or not trace.entered(path):
        return None
    # (images, channels, hidden): the token-mixing MLP works on the transposed tokens.
    mixed = hidden(block.get_submodule(tokens), f"{path}.{tokens}", trace)
    inner = hidden(block.get_submodule("mlp_channels"), f"{path}.mlp_channels", trace)
    parts = [enters(path), BlockHook("norm1", HookPoint(f"{path}.norm1"), ("norms",))]
    if mixed:
        parts.append(BlockHook("token.hidden", mixed, ("hidden",), rows=True))
    parts += [
        BlockHook("token.branch", ends[0], ("residual",)),
        BlockHook("mid", HookPoint(f"{path}.norm2", "in"), ("residual",)),
        BlockHook("norm2", HookPoint(f"{path}.norm2"), ("norms",)),
    ]
    if inner:
        parts.append(BlockHook("channel.hidden", inner, ("hidden",)))
    parts += [BlockHook("channel.branch", ends[1], ("residual",)), leaves(path)]
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    sums = (
        Residual("token", "token", "in", "token.branch", "mid"),
        Residual("channel", "channel", "mid", "channel.branch", "out"),
    )
    return Description(tuple(parts), sums, (f"{path}.{tokens}",))


def resnet(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """Return the parts of a ResNet block, basic or bottleneck: conv, norm and act modules by name,
    then branch, shortcut, out.

    v1, with or without squeeze-excitation: out = act(shortcut + branch), the branch being the last
    of norm, attention and drop path before the sum. timm adds in place: the branch's own tensor is
    the sum afterwards. ResNetV2 and BiT: pre-activation, out = shortcut + branch, and the variant
    with activations after the sum that hybrid ViTs use. Norms there carry their activation.
    """
    # hasattr, not `has`: it is None where the block's input is its own shortcut.
    if not hasattr(block, "downsample"):
        return None
    # v1: two layers in a basic block, three in a bottleneck.
    last = 3 if has(block, "conv3", "bn3", "act3") else 2
    names = [f"{kind}{i}" for i in range(1, last + 1) for kind in ("conv", "bn", "act")]
    if has(block, *names) and not has(block, "conv4"):
        # In the reverse of the order in which they run: the last before the sum.
        end = next(n for n in ("drop_path", "se", f"bn{last}") if has(block, n))
        description = _describe_sequence(
            block, path, trace, names=names, end=end, act=f"act{last}"
        )
        if description:
            return description
    # ResNetV2 and BiT.
    last = 3 if has(block, "conv3", "norm3") else 2
    pairs = [f"{kind}{i}" for i in range(1, last + 1) for kind in ("norm", "conv")]
    if not has(block, *pairs, "drop_path"):
        return None
    act = f"act{last}" if has(block, f"act{last}") else None
    # The order of definition is that of the calls: norms before convolutions where the
    # block is pre-activation, behind them in the variant of hybrids.
    names = [name for name, _ in block.named_children() if name in (*pairs, act)]
    return _describe_sequence(block, path, trace, names=names, end="drop_path", act=act)


def _describe_sequence(
    block: nn.Module,
    path: str,
    trace: Trace,
    *,
    names: Sequence[str],
    end: str,
    act: str | None,
) -> Description | None:
    """Return the parts of a block that is a sequence of modules beside a shortcut; None where one
    of them was not called.

    Args:
        block: the block.
        path: its path.
        trace: a forward pass.
        names: its modules in order.
        end: the module whose output is the branch.
        act: the activation of the sum, None without one.
    """
    # Without a layer on the shortcut the block's own input is the skip.
    skip = HookPoint(path, "in")
    if has(block, "downsample"):
        skip = HookPoint(f"{path}.downsample")
    parts = []
    for name in names:
        groups = ("norms",) if name.startswith(("bn", "norm")) else ()
        parts.append(BlockHook(name, HookPoint(f"{path}.{name}"), groups))
    parts += [
        BlockHook("branch", HookPoint(f"{path}.{end}"), ("residual",)),
        BlockHook("shortcut", skip, ("residual",)),
        leaves(path),
    ]
    if not all(fired(trace, part.hook_point) for part in parts):
        return None
    # Of v1, whose output is act(shortcut + branch); the sum itself is no module's output.
    activation = f"{path}.{act}" if act else None
    return Description(
        tuple(parts), (Residual("", "block", "shortcut", "branch", "out", activation),)
    )


# In this order; the first that recognises a block describes it.
FAMILIES: tuple[Callable[[nn.Module, str, Trace], Description | None], ...] = (
    transformer,
    mixer,
    resnet,
)
