"""Block families, each a function of `named` with (block, path, trace) -> Description | None, and
the readings of blocks that no family knows (`sums`).

A family is recognised by what its blocks have and by how the model called them, never by a
model's name; the residual sums it claims are proven on real activations before a table is made.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vitsee_core.models.families import named, sums
from vitsee_core.models.families.base import Description
from vitsee_core.models.trace import Trace

_FAMILIES: tuple[Callable[[nn.Module, str, Trace], Description | None], ...] = (
    named.transformer,
    named.parallel,
    named.mixer,
    named.resnet,
)


def describe(model: nn.Module, path: str, trace: Trace) -> list[Description]:
    """The readings of a block, the likeliest first: by the family that recognises it, then by its
    sums alone. Which of them is true, pixels decide."""
    families = (family(model.get_submodule(path), path, trace) for family in _FAMILIES)
    recognised = next((found for found in families if found), None)
    return [found for found in (recognised, sums.describe(model, path, trace)) if found]
