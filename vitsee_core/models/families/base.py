"""The description of one block by its family."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.trace import Trace


@dataclass(frozen=True)
class Part:
    """A named hook point within a block.

    rows: the activation has channels or the like as rows, so it is no image grid. minus: the
    hook point whose tensor is taken from that of the other.
    """

    name: str
    hook_point: HookPoint
    groups: tuple[str, ...] = ()
    rows: bool = False
    minus: HookPoint | None = None


@dataclass(frozen=True)
class Residual:
    """total = activation(skip + branch), all three being parts of one block; without the skip
    where that is ablated.

    name: the sublayer ("attn", "mlp", "token", "channel"), "" for a block that is one sublayer.
    activation: path of the module that is applied to the sum, if any. witness: where the branch is
    the difference of total and skip, whose output it must be, times one factor per channel.
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
        """The formula of the total, in words."""
        summed = self.branch if self.ablated else f"{self.skip} + {self.branch}"
        return f"activation({summed})" if self.activation else summed


@dataclass(frozen=True)
class Description:
    """All parts of one block in order, `in` and `out` included, and its residual sums.

    rows_below: paths of modules that work on rows that are no image grid.
    """

    parts: tuple[Part, ...]
    residuals: tuple[Residual, ...] = ()
    rows_below: tuple[str, ...] = ()


def has(block: nn.Module, *names: str) -> bool:
    """Whether all these attributes are modules."""
    return all(isinstance(getattr(block, name, None), nn.Module) for name in names)


def enters(path: str) -> Part:
    """The input of a block."""
    return Part("in", HookPoint(path, "in"), ("residual",))


def leaves(path: str) -> Part:
    """The output of a block."""
    return Part("out", HookPoint(path), ("blocks", "residual"))


def drop_paths(block: nn.Module, path: str) -> tuple[HookPoint, HookPoint] | None:
    """The places where the two branches of a block end: after their drop path, whether each has its
    own or both share one that is called twice."""
    if has(block, "drop_path1", "drop_path2"):
        return HookPoint(f"{path}.drop_path1"), HookPoint(f"{path}.drop_path2")
    if has(block, "drop_path"):
        shared = HookPoint(f"{path}.drop_path", calls=2)
        return shared, replace(shared, call=1)
    return None


def fired(trace: Trace, hook_point: HookPoint) -> bool:
    """Whether the module was called as often as the hook point expects."""
    return len(trace.calls.get(hook_point.module, ())) == hook_point.calls


def hidden(mlp: nn.Module, path: str, trace: Trace) -> HookPoint | None:
    """The hidden activations of an MLP: what its first dropout gets, which is the activation, or
    the gated product where a gate is the activation; else the activation's output."""
    for name, when in (("drop1", "in"), ("act", "out")):
        hook_point = HookPoint(f"{path}.{name}", "in" if when == "in" else "out")
        if has(mlp, name) and fired(trace, hook_point):
            return hook_point
    return None
