"""Block families, each a module with `describe(block, path, trace) -> Description | None`.

A family is recognised by what its blocks have and by how the model called them, never by a
model's name; the residual sums it claims are proven on real activations before a table is made.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vitsee_core.models.families import mixer, parallel, resnet, resnetv2, transformer
from vitsee_core.models.families.base import Description
from vitsee_core.models.trace import Trace

_FAMILIES: tuple[Callable[[nn.Module, str, Trace], Description | None], ...] = (
    transformer.describe,
    parallel.describe,
    mixer.describe,
    resnet.describe,
    resnetv2.describe,
)


def describe(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """The parts of a block by the first family that recognises it."""
    for family in _FAMILIES:
        found = family(block, path, trace)
        if found:
            return found
    return None
