"""What one or two forward passes say about a model: calls, blocks, token geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from vitsee_core.models.blocks import find_blocks
from vitsee_core.models.geometry import Geometry, model_geometry
from vitsee_core.models.steps import Steps
from vitsee_core.models.trace import Trace, trace


@dataclass(frozen=True)
class Survey:
    """trace: every call of a forward pass; blocks: paths in the model's order."""

    trace: Trace
    blocks: tuple[str, ...]
    geometry: Geometry


def survey(module: nn.Module, size: tuple[int, int, int]) -> Survey:
    """Trace the model on two random images; once more with changed corners where shapes alone do
    not say which dimensions are the image's."""
    geometry = model_geometry(module, size[1:])
    seen = trace(module, size, corners=False)
    blocks = find_blocks(module, seen)
    if _doubtful(module, seen, blocks, geometry):
        seen = trace(module, size, corners=True)
        blocks = find_blocks(module, seen)
    geometry = replace(geometry, steps=Steps(size[1:], module, seen))
    return Survey(seen, tuple(blocks), geometry)


def _doubtful(module: nn.Module, seen: Trace, blocks: list[str], geometry: Geometry) -> bool:
    known = geometry.grid and math.prod(geometry.grid) + len(geometry.prefix)
    plain = not hasattr(module, "reroll")
    shapes = {x.shape for x in map(seen.left, blocks) if x}
    if plain and shapes and all(len(s) == 3 and s[1] == known for s in shapes):
        return False
    if any(len(shape) == 3 for shape in shapes):
        return True
    calls = (call for calls in seen.calls.values() for call in calls)
    maps = (x.shape for call in calls for x in (call.entered, call.left) if x)
    return any(
        len(s) == 4 and geometry.exact((s[1], s[2])) and geometry.exact((s[2], s[3])) for s in maps
    )
