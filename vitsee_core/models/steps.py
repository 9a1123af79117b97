"""Input pixels between neighbouring cells of a model's grids: the product of the strides on the
path from the image to each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from vitsee_core.models.packing import Grid

if TYPE_CHECKING:
    from vitsee_core.models.trace import Trace

Pair = tuple[float, float]


@dataclass(frozen=True)
class Step:
    """stride_px: between neighbouring cells, (y, x). reductions: strided layers between image and
    grid; one is a patch embedding."""

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

    def __init__(self, image: Grid, module: nn.Module | None = None, trace: Trace | None = None):
        """Steps are read from a forward pass; without one only from sizes."""
        self.known: dict[Grid, Step] = {image: Step((1.0, 1.0), 0)}
        if module is None or trace is None:
            return
        for entered, left, factor in _strided(module, trace):
            if left not in self.known:
                before = self.of(entered)
                self.known[left] = Step(
                    (before.stride_px[0] * factor[0], before.stride_px[1] * factor[1]),
                    before.reductions + (max(factor) > 1),
                )

    def of(self, grid: Grid) -> Step:
        """The step of a grid, noted for the grids to come."""
        if grid not in self.known:
            self.known[grid] = self._from_sizes(grid)
        return self.known[grid]

    def _from_sizes(self, grid: Grid) -> Step:
        *_, latest = self.known
        larger = [known for known in self.known if known[0] >= grid[0] and known[1] >= grid[1]]
        larger.sort(key=math.prod)
        nearest, factor = (larger or [latest])[0], None
        for known in larger:
            if factor := whole_stride(known, grid):
                nearest = known
                break
        if _padded(latest, grid) or factor is None:
            for known in (latest, *reversed(self.known)):
                if _padded(known, grid):
                    return self.known[known]
        before = self.known[nearest]
        ratio = factor or (nearest[0] / grid[0], nearest[1] / grid[1])
        px = before.stride_px[0] * ratio[0], before.stride_px[1] * ratio[1]
        return Step(px, before.reductions + (factor is not None and max(factor) > 1))


def _padded(before: Grid, after: Grid) -> bool:
    """Whether one grid may be another with a border: up to a multiple of a window or stride."""
    return all(0 <= a - b < b for b, a in zip(before, after, strict=True))


def whole_stride(before: Grid, after: Grid) -> Pair | None:
    """The whole number of cells of one grid between neighbours of another, the same on both axes
    up to padding or cropping; None if there is none."""
    ratios = [larger / smaller for larger, smaller in zip(before, after, strict=True)]
    mean = math.sqrt(ratios[0] * ratios[1])
    for step in sorted(range(1, math.ceil(max(ratios)) + 1), key=lambda step: abs(step - mean)):
        if all(
            cells in (larger // step, -(-larger // step))
            for larger, cells in zip(before, after, strict=True)
        ):
            return float(step), float(step)
    return None


def _strided(module: nn.Module, trace: Trace) -> Iterator[tuple[Grid, Grid, Pair]]:
    """(grid that entered, grid that left, stride) of every layer that states its stride and gives
    another grid, in the order of the forward pass."""
    met = []
    for name, layer in module.named_modules():
        stride = _pair(getattr(layer, "stride", None))
        kernel = _pair(getattr(layer, "kernel_size", None)) or (1, 1)
        if stride is None or any(layer.children()):
            continue
        for call in trace.calls.get(name, ()):
            entered, left = call.entered, call.left
            if entered is None or left is None or {len(entered.shape), len(left.shape)} != {4}:
                continue
            before, after = entered.shape[2:], left.shape[2:]
            fits = all(
                0 < b <= a and abs(a / s - b) <= 1 + k / s
                for a, b, s, k in zip(before, after, stride, kernel, strict=True)
            )
            if fits and before != after:
                pair = float(stride[0]), float(stride[1])
                edge = (before[0], before[1]), (after[0], after[1]), pair
                met.append((left.key, edge))
    for _, edge in sorted(met, key=lambda item: item[0]):
        yield edge


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(n) is int for n in value):
        return value[0], value[1]
    return None
