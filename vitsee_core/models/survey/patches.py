"""Which pixels a patch embedding's cells depend on: measured by changing rows and columns of an
image, and verified on other images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ForwardEnded, HookPoint, View, first_tensor
from vitsee_core.models.survey.tracing import Trace
from vitsee_core.models.tokens.packed_order import Order
from vitsee_core.models.tokens.towers import Grid, Packing
from vitsee_stores.layout import TokenLayout

Pair = tuple[float, float]  # (y, x) in pixels
# Of the answer to a change of the whole image: below the smallest weight at a patch's border,
# above the rounding of a convolution.
QUIET = 1e-5
Ends = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Patches:
    """A grid of patches. hook_point, view: where its cells are first seen, and how they are read.

    window: the pixels along each axis that cell 0 would depend on, were the image endless, as
        (first, length); those of cell i lie i stride_px further on.
    stride_px, offset_px: as in the layout. covered: per axis the pixels (from, to) that any cell
        depends on.
    order: of the tokens of a packed tensor.
    """

    hook_point: HookPoint
    view: View
    stride_px: Pair
    offset_px: Pair
    window: tuple[tuple[int, int], tuple[int, int]]
    covered: tuple[tuple[int, int], tuple[int, int]]
    order: Order | None = None

    @property
    def grid(self) -> Grid:
        """The rows and columns of the grid of patches."""
        assert self.view.layout is not None and self.view.layout.grid is not None
        return self.view.layout.grid


def cells(
    module: nn.Module,
    hook_point: HookPoint,
    view: View,
    images: Tensor,
    order: Order | None = None,
) -> Tensor:
    """(images, rows, cols, dim) at a hook point; the forward pass ends there."""
    found: list[Tensor] = []
    calls = 0

    def left(_m: nn.Module, _a: object, output: object) -> None:
        nonlocal calls
        calls += 1
        x = first_tensor(output, len(images)) if calls == hook_point.call + 1 else None
        if x is not None:
            x = x if order is None else order.to_grid_order(x)
            found.append(view.split(x)[1].float())
            raise ForwardEnded

    hook = module.get_submodule(hook_point.module).register_forward_hook(left)
    with hook, torch.no_grad(), suppress(ForwardEnded):
        module(images)
    return found[0]


def first_seen(
    trace: Trace, grid: Grid, prefix: tuple[str, ...]
) -> tuple[HookPoint, View] | None:
    """The place where a grid first comes out of a module, channels first, last or as a sequence."""
    passages = []
    n = grid[0] * grid[1]
    for name, calls in trace.calls.items():
        for i, call in enumerate(calls):
            left = trace.by_image(call.left)
            if left is None or left.turned or not name:
                continue
            shape = left.shape
            if len(shape) == 4 and grid in (shape[2:], shape[1:3]):
                view = View(
                    "nchw" if shape[2:] == grid else "nhwc", TokenLayout((), grid)
                )
            elif len(shape) == 3 and shape[1] in (n, n + len(prefix)):
                view = View("tokens", TokenLayout(prefix if shape[1] > n else (), grid))
            else:
                continue
            passages.append((left.key, HookPoint(name, "out", i, len(calls)), view))
    first = min(passages, key=lambda passage: passage[0], default=None)
    return None if first is None else first[1:]


def measure(
    module: nn.Module,
    size: tuple[int, int, int],
    hook_point: HookPoint,
    view: View,
    step: Pair,
) -> Patches | None:
    """The patches at a hook point, `step` being the product of the strides before it. None
    where no window that moves with the cells explains them, or padding cuts windows that overlap:
    then the centre of the first cell is unknown.

    The stride and kernel of an unpadded convolution are taken if they are not disproved; else about
    ten forward passes of seventeen images up to there.
    """
    stated = _as_stated(module, size, hook_point, view)
    if stated is not None:
        image = torch.randn(size, generator=torch.Generator().manual_seed(2))
        if (
            disproof(module, stated, image.to(next(iter(module.parameters())).device))
            is None
        ):
            return stated
    found = _Windows(module, size, hook_point, view).find()
    if found is None:
        return None
    y, x = (_axis(windows, n) for windows, n in zip(found, step, strict=True))
    if y is None or x is None:
        return None
    (first, last), (left, right) = (
        (min(a for a, _ in w.values()), max(b for _, b in w.values())) for w in found
    )
    covered = (first, last), (left, right)
    return Patches(hook_point, view, (y[0], x[0]), (y[1], x[1]), (y[2], x[2]), covered)


def _as_stated(
    module: nn.Module, size: tuple[int, int, int], hook_point: HookPoint, view: View
) -> Patches | None:
    """The patches of a convolution without padding that works on the image as it is."""
    layer = module.get_submodule(hook_point.module)
    if (
        not isinstance(layer, nn.Conv2d)
        or layer.padding != (0, 0)
        or layer.dilation != (1, 1)
    ):
        return None
    assert view.layout is not None and view.layout.grid is not None
    (k_y, k_x), (s_y, s_x), (rows, cols) = (
        layer.kernel_size,
        layer.stride,
        view.layout.grid,
    )
    ends = (rows - 1) * s_y + k_y, (cols - 1) * s_x + k_x
    if ends[0] > size[1] or ends[1] > size[2]:
        return None
    strides = float(s_y), float(s_x)
    offsets = (k_y - s_y) / 2, (k_x - s_x) / 2
    return Patches(
        hook_point,
        view,
        strides,
        offsets,
        ((0, k_y), (0, k_x)),
        ((0, ends[0]), (0, ends[1])),
    )


def packed_patches(
    trace: Trace, packing: Packing, size: tuple[int, int, int]
) -> Patches | None:
    """The patches of a tower that takes them packed, where a module first gives one token for each;
    whether they are these is for `disproof` to say."""
    grid = packing.grid((size[1], size[2]))
    keys_and_points = [
        (call.left.key, HookPoint(name, "out", call=i, calls=len(calls)))
        for name, calls in trace.calls.items()
        for i, call in enumerate(calls)
        if name and call.left is not None and call.left.grid == grid
    ]
    if not keys_and_points:
        return None
    # The first tensor on this grid is the embedding's output.
    _, hook_point = min(keys_and_points, key=lambda pair: pair[0])
    step = float(packing.patch)
    window = (0, packing.patch), (0, packing.patch)
    covered = (0, size[1]), (0, size[2])
    view = View("tokens", TokenLayout((), grid))
    order = trace.orders[hook_point.side]
    assert isinstance(order, Order), "packed images"
    return Patches(hook_point, view, (step, step), (0.0, 0.0), window, covered, order)


def disproof(module: nn.Module, patches: Patches, image: Tensor) -> str | None:
    """The first thing that is wrong about the patches on this image (channels, rows, cols); None if
    nothing is.

    Of the first, the middle and the last cell: changes outside its window are not seen, changes of
    the outermost rows and columns of pixels inside are. Where the image is resized first, a pixel
    more or less is allowed.
    """
    slack = 0 if all(step == int(step) for step in patches.stride_px) else 1
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(3)).to(image)
    other = image + noise
    batch = [image]
    checks = []
    for cell in (
        (0, 0),
        tuple(n // 2 for n in patches.grid),
        tuple(n - 1 for n in patches.grid),
    ):
        inside = [_clipped(patches, axis, cell[axis], image, slack) for axis in (0, 1)]
        rows, cols = (slice(a, b) for a, b in inside)
        outside = other.clone()
        outside[:, rows, cols] = image[:, rows, cols]
        batch.append(outside)
        checks.append((cell, False))
        for axis, (a, b) in enumerate(inside):
            for part in (slice(a, a + 1 + 2 * slack), slice(b - 1 - 2 * slack, b)):
                changed = image.clone()
                place = (
                    (slice(None), part) if axis == 0 else (slice(None), slice(None), part)
                )
                changed[place] = other[place]
                batch.append(changed)
                checks.append((cell, True))
    batch.append(other)
    with torch.autocast(image.device.type, enabled=False):
        given = torch.stack(batch).float()
        out = cells(module, patches.hook_point, patches.view, given, patches.order)
    change = (out - out[:1]).abs().amax(-1)
    for (row, col), wanted, seen in (
        (*check, change[i + 1]) for i, check in enumerate(checks)
    ):
        answers = float(seen[row, col]) > QUIET * float(change[-1, row, col])
        if answers != wanted:
            where = (
                "does not answer to the border of"
                if wanted
                else "answers to pixels outside"
            )
            return f"cell ({row}, {col}) of {patches.hook_point.module} {where} its patch"
    return None


def _clipped(
    patches: Patches, axis: int, place: int, image: Tensor, slack: int
) -> tuple[int, int]:
    """The pixels along an axis, from and to, of a cell's window within the image."""
    first, length = patches.window[axis]
    start = first + place * patches.stride_px[axis]
    ends = math.floor(start) - slack, math.ceil(start) + length + slack
    return max(ends[0], 0), min(ends[1], image.shape[axis + 1])


def _axis(windows: Ends, step: float) -> tuple[float, float, tuple[int, int]] | None:
    """Stride, offset, and the window of cell 0 as (first, length), along one axis."""
    length = max(b - a for a, b in windows.values())
    cut = windows[0][1] - windows[0][0] < length
    inner, *others = sorted(windows)[1:] or [0]
    measured = step
    if others:
        measured = (windows[others[-1]][0] - windows[inner][0]) / (others[-1] - inner)
    # By a whole number and without overlap: the image was cropped first, not resized.
    resized = step != int(step) and measured != length
    step = step if resized else measured
    start = windows[inner][0] - inner * step
    uneven = max(abs(windows[i][0] - start - i * step) for i in (inner, *others))
    if uneven > resized or (not resized and step != int(step)):
        return None
    if resized:
        return step, 0.0, (math.floor(start), length)
    if cut and length != step:
        return None
    return float(step), start + (length - step) / 2, (int(start), length)


class _Windows:
    """Finds by halving where the windows of some rows and columns of cells begin and end."""

    def __init__(
        self,
        module: nn.Module,
        size: tuple[int, int, int],
        hook_point: HookPoint,
        view: View,
    ) -> None:
        device = next(iter(module.parameters())).device
        generator = torch.Generator().manual_seed(2)
        self.image, self.other = torch.randn((2, *size), generator=generator).to(device)
        self.module = module
        self.hook_point = hook_point
        self.view = view
        self.size = size[1:]
        assert view.layout is not None and view.layout.grid is not None
        self.queries = [
            (axis, place, from_end)
            for axis, n in enumerate(view.layout.grid)
            for place in sorted({0, 1, n // 2, n - 1} & set(range(n)))
            for from_end in (False, True)
        ]

    def find(self) -> list[Ends] | None:
        """The ends of windows for each axis, cell -> (first pixel, past the last); None if a cell
        answers to nothing, or all of an axis to the whole image."""
        lengths = [self.size[axis] for axis, _, _ in self.queries]
        loud = self._answers(lengths)
        if not bool((loud > 0).all()):
            return None
        # Of so many pixels from an end a change is not seen, of so many it is.
        unseen = [0] * len(lengths)
        seen = lengths
        while any(b - a > 1 for a, b in zip(unseen, seen, strict=True)):
            middle = [(a + b) // 2 for a, b in zip(unseen, seen, strict=True)]
            answers = (self._answers(middle) > QUIET * loud).tolist()
            unseen = [
                a if yes else m for a, m, yes in zip(unseen, middle, answers, strict=True)
            ]
            seen = [
                m if yes else b for b, m, yes in zip(seen, middle, answers, strict=True)
            ]
        windows: list[Ends] = [{}, {}]
        starts = unseen[::2]
        ends = unseen[1::2]
        for (axis, place, _), start, end in zip(
            self.queries[::2], starts, ends, strict=True
        ):
            windows[axis][place] = start, self.size[axis] - end
        for found, length in zip(windows, self.size, strict=True):
            if len(found) > 1 and all(ends == (0, length) for ends in found.values()):
                return None
        return windows

    def _answers(self, changed: Sequence[int]) -> Tensor:
        """How strongly each query's cells answer when so many rows or columns change."""
        batch = self.image.repeat(len(self.queries) + 1, 1, 1, 1)
        for i, ((axis, _, from_end), n) in enumerate(
            zip(self.queries, changed, strict=True)
        ):
            length = self.size[axis]
            part = slice(length - n, length) if from_end else slice(0, n)
            place = (slice(None), part) if axis == 0 else (slice(None), slice(None), part)
            batch[i][place] = self.other[place]
        out = cells(self.module, self.hook_point, self.view, batch)
        change = (out - out[-1:]).abs()
        return torch.stack(
            [
                change[i].select(axis, place).max()
                for i, (axis, place, _) in enumerate(self.queries)
            ]
        )
