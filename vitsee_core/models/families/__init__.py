"""Block families, each a module with `describe(block, path, trace) -> Description | None`, and the
readings of blocks that no family knows (`sums`).

A family is recognised by what its blocks have and by how the model called them, never by a
model's name; the residual sums it claims are proven on real activations before a table is made.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vitsee_core.models.families import mixer, parallel, resnet, sums, transformer
from vitsee_core.models.families.base import Description
from vitsee_core.models.trace import Trace

_FAMILIES: tuple[Callable[[nn.Module, str, Trace], Description | None], ...] = (
    transformer.describe,
    parallel.describe,
    mixer.describe,
    resnet.describe,
)


def describe(model: nn.Module, path: str, trace: Trace) -> list[Description]:
    """The readings of a block, the likeliest first: by the family that recognises it, then by its
    sums alone. Which of them is true, pixels decide."""
    families = (family(model.get_submodule(path), path, trace) for family in _FAMILIES)
    named = next((found for found in families if found), None)
    return [found for found in (named, sums.describe(model, path, trace)) if found]
