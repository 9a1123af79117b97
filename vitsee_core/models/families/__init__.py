"""Block families, each a module with `describe(block, path, trace) -> Description | None`.

A family is recognised by what its blocks have and by how the model called them, never by a
model's name; the residual sums it claims are proven on real activations before a table is made.
"""

from __future__ import annotations

from torch import nn

from vitsee_core.models.families import mixer, parallel, resnet, resnetv2, transformer
from vitsee_core.models.families.base import Description
from vitsee_core.models.trace import Trace

_FAMILIES = (transformer, parallel, mixer, resnet, resnetv2)


def describe(block: nn.Module, path: str, trace: Trace) -> Description | None:
    """The parts of a block by the first family that recognises it."""
    for family in _FAMILIES:
        found = family.describe(block, path, trace)
        if found:
            return found
    return None
