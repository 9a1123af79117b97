"""The distance between a grid's cells, in pixels.

It is the product of the strides on the path from the image to the grid, as layers state them or as
the sizes of grids show.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn

from vitsee_core.models.survey.patches import Pair
from vitsee_core.models.survey.tracing import Trace
from vitsee_core.models.tokens.towers import Grid


class Step(NamedTuple):
    """The distance of a grid's cells.

    Attributes:
        stride_px: (y, x) pixels between neighbouring cells.
        reductions: strided layers between image and grid; one is a patch embedding.
    """

    stride_px: Pair
    reductions: int


class Steps:
    """The step of every grid of one model.

    Layers that state their stride say it. Of grids whose path no layer shows, one somewhat larger
    than another is that with a border (DaViT pads maps of odd sizes); else the step is the whole
    number that gives the one from the other on both axes up to padding or cropping (patches merged
    by slicing), else their ratio (images resized first). Where two paths lead to grids of one
    size, the first counts.
    """

    def __init__(
        self, image: Grid, module: nn.Module | None = None, trace: Trace | None = None
    ):
        """Read the steps of layers that state their stride from a forward pass.

        Args:
            image: (rows, cols) of the input in pixels.
            module: the model; None for steps from the sizes of grids alone.
            trace: a forward pass of it.
        """
        # Grid -> step, in the order in which grids were met.
        self.steps: dict[Grid, Step] = {image: Step((1.0, 1.0), reductions=0)}
        if module is None or trace is None:
            return
        for layer in _strided_layers(module, trace):
            if layer.output_grid not in self.steps:
                before = self.of(layer.input_grid)
                self.steps[layer.output_grid] = _next_step(before, layer.stride)

    def of(self, grid: Grid) -> Step:
        """Return the step of a grid, and note it for the grids to come."""
        if grid not in self.steps:
            self.steps[grid] = self._step_from_sizes(grid)
        return self.steps[grid]

    def _step_from_sizes(self, grid: Grid) -> Step:
        """Return the step of a grid whose path no layer shows, from the grids that are known."""
        latest = list(self.steps)[-1]
        # Smallest first: the nearest grid that a whole stride leads from.
        larger = [g for g in self.steps if g[0] >= grid[0] and g[1] >= grid[1]]
        larger.sort(key=math.prod)
        source = None
        factor = None
        for candidate in larger:
            factor = whole_stride(candidate, grid)
            if factor is not None:
                source = candidate
                break
        if factor is None or _is_padded(latest, grid):
            for candidate in (latest, *reversed(self.steps)):
                if _is_padded(candidate, grid):
                    return self.steps[candidate]
        if source is not None and factor is not None:
            return _next_step(self.steps[source], factor)
        # Images that were resized first: a ratio that is not whole, and no strided layer.
        nearest = larger[0] if larger else latest
        before = self.steps[nearest]
        stride_y = before.stride_px[0] * (nearest[0] / grid[0])
        stride_x = before.stride_px[1] * (nearest[1] / grid[1])
        return Step((stride_y, stride_x), before.reductions)


def _next_step(before: Step, stride: Pair) -> Step:
    """Return the step behind a layer of this stride, in cells of the grid before it."""
    stride_px = before.stride_px[0] * stride[0], before.stride_px[1] * stride[1]
    # A layer of stride 1 that only crops is not a reduction.
    return Step(stride_px, before.reductions + (max(stride) > 1))


def _is_padded(before: Grid, after: Grid) -> bool:
    """Return whether one grid may be another with a border: up to a multiple of a window or
    stride."""
    added_rows = after[0] - before[0]
    added_cols = after[1] - before[1]
    return 0 <= added_rows < before[0] and 0 <= added_cols < before[1]


def whole_stride(before: Grid, after: Grid) -> Pair | None:
    """Return the whole number of cells of one grid between neighbours of another, the same on both
    axes up to padding or cropping; None if there is none. Of several it is the one nearest to the
    mean ratio of sides."""
    row_ratio = before[0] / after[0]
    col_ratio = before[1] / after[1]
    mean = math.sqrt(row_ratio * col_ratio)
    strides = range(1, math.ceil(max(row_ratio, col_ratio)) + 1)
    for stride in sorted(strides, key=lambda stride: abs(stride - mean)):
        # Cropping rounds the number of cells down, padding up.
        fits = all(
            n_after in (n_before // stride, -(-n_before // stride))
            for n_before, n_after in zip(before, after, strict=True)
        )
        if fits:
            return float(stride), float(stride)
    return None


class _StridedLayer(NamedTuple):
    """A call of a layer that gives another grid than it gets; stride: (y, x) in cells."""

    input_grid: Grid
    output_grid: Grid
    stride: Pair


def _strided_layers(module: nn.Module, trace: Trace) -> list[_StridedLayer]:
    """Return the calls of layers that state their stride and give another grid, in the order of the
    forward pass."""
    keys_and_layers = []
    for name, child in module.named_modules():
        stride = _pair(getattr(child, "stride", None))
        kernel = _pair(getattr(child, "kernel_size", None)) or (1, 1)
        if stride is None or any(child.children()):
            continue
        for call in trace.calls.get(name, ()):
            if call.entered is None or call.left is None:
                continue
            if len(call.entered.shape) != 4 or len(call.left.shape) != 4:
                continue
            _, _, *before = call.entered.shape
            _, _, *after = call.left.shape
            # Any padding, up to the kernel, and any rounding.
            fits = all(
                0 < b <= a and abs(a / s - b) <= 1 + k / s
                for a, b, s, k in zip(before, after, stride, kernel, strict=True)
            )
            if fits and before != after:
                layer = _StridedLayer(
                    input_grid=(before[0], before[1]),
                    output_grid=(after[0], after[1]),
                    stride=(float(stride[0]), float(stride[1])),
                )
                keys_and_layers.append((call.left.key, layer))
    keys_and_layers.sort(key=lambda item: item[0])
    return [layer for _, layer in keys_and_layers]


def _pair(value: Any) -> tuple[int, int] | None:
    """Return a layer's setting for rows and columns, None where it is not one or two integers."""
    if isinstance(value, int):
        return value, value
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    return (value[0], value[1]) if all(type(n) is int for n in value) else None
