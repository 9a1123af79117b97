"""Prefix tokens of a model that does not say how many it has: its tokens, less the cells of the
grid of patches."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from vitsee_core.models.geometry import Geometry
from vitsee_core.models.packing import Grid
from vitsee_core.models.trace import Trace

MOST_PREFIX = 32
# What parameters of such tokens are called, by kind; what matches none is a register.
_KINDS = {"cls": r"(^|_)(cls|class)", "dist": r"(^|_)dist"}
_OTHERS = r"pos|mask|query|bias|scale|head|norm|weight"


def counted(geometry: Geometry, module: nn.Module, trace: Trace, blocks: Sequence[str]) -> Geometry:
    """The geometry with prefix and grid, where the model states neither and both can be counted:
    the grid is that of the last map before the blocks with no more cells than there are tokens, or
    of the patches whose size the model states, or the one that as few tokens as possible leave
    over."""
    stated = isinstance(getattr(module, "num_prefix_tokens", None), int)
    if stated or geometry.grid is not None or not blocks:
        return geometry
    entered = trace.by_image(trace.entered(blocks[0])) or trace.by_image(trace.left(blocks[0]))
    if entered is None or len(entered.shape) != 3:
        return geometry
    n_tokens = entered.shape[1]
    grid = _map_before(trace, entered.key, n_tokens) or _of_patches(module, geometry, n_tokens)
    grid = grid or _of_number(geometry, n_tokens)
    if grid is None:
        return geometry
    n_prefix = n_tokens - math.prod(grid)
    if geometry.prefix and len(geometry.prefix) == n_prefix:
        return replace(geometry, grid=grid)
    return replace(geometry, grid=grid, prefix=kinds_of(module, n_prefix, entered.shape[2]))


def _map_before(trace: Trace, before: tuple[int, int], n_tokens: int) -> Grid | None:
    """Rows and columns of the last channels-first map that a layer gave before a tensor."""
    maps = [
        (call.left.key, (call.left.shape[2], call.left.shape[3]))
        for calls in trace.calls.values()
        for call in calls
        if call.left and len(call.left.shape) == 4 and call.left.key < before
        if call.left.shape[0] == trace.n_images
        if 0 <= n_tokens - call.left.shape[2] * call.left.shape[3] <= MOST_PREFIX
    ]
    return max(maps)[1] if maps else None


def _of_patches(module: nn.Module, geometry: Geometry, n_tokens: int) -> Grid | None:
    """The grid of patches of the size that a model, or its configuration, states."""
    for stating in (getattr(module, "config", None), module):
        side = getattr(stating, "patch_size", None)
        if isinstance(side, int) and side > 0:
            grid = geometry.image[0] // side, geometry.image[1] // side
            if 0 <= n_tokens - math.prod(grid) <= MOST_PREFIX and min(grid) > 1:
                return grid
    return None


def _of_number(geometry: Geometry, n_tokens: int) -> Grid | None:
    """The grid that is reduced alike on both axes and leaves the fewest tokens over."""
    for n in range(min(MOST_PREFIX, n_tokens - 1) + 1):
        grid = geometry.grid_of(n_tokens - n)
        if grid is not None and min(grid) > 1:
            return grid
    return None


def kinds_of(module: nn.Module, n_prefix: int, dim: int) -> tuple[str, ...]:
    """The kinds of the prefix tokens, one of each kind where a parameter of the tokens' width has
    such a name."""
    kinds = []
    names = [
        name.rpartition(".")[2].lower()
        for name, parameter in module.named_parameters()
        if parameter.shape[-1:] == (dim,) and parameter.numel() <= dim * MOST_PREFIX
    ]
    for kind, pattern in _KINDS.items():
        if any(re.search(pattern, name) and not re.search(_OTHERS, name) for name in names):
            kinds.append(kind)
    kinds += [f"reg{i}" for i in range(max(n_prefix - len(kinds), 0))]
    return tuple(kinds[:n_prefix])
