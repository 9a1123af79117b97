"""Patch embeddings: the pixels that each cell depends on, measured by changing rows and columns of
an image, and verified on other images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ForwardEnded, HookPoint, View, first_tensor
from vitsee_core.models.survey.tracing import Trace
from vitsee_core.models.tokens.packed_order import Order
from vitsee_core.models.tokens.towers import Grid, Packing
from vitsee_stores.layout import TokenLayout

Pair = tuple[float, float]  # (y, x) in pixels
# A cell answers if its change is more than this share of that with the whole image: below the
# smallest weight at a patch's border, above the rounding of a convolution.
QUIET = 1e-5
Windows = dict[int, tuple[int, int]]  # cell -> its first pixel, and the one past its last


@dataclass(frozen=True)
class Patches:
    """A grid of patches.

    Attributes:
        hook_point: the module side where its cells first come out.
        view: how the tensor there is read.
        stride_px: pixels between neighbouring cells.
        offset_px: centre of cell 0 less half a stride, in pixels.
        window: per axis (first, length) in pixels: what cell 0 would depend on, were the image
            endless; the window of cell i lies i stride_px further on.
        covered: per axis the pixels (from, to) that any cell depends on.
        order: the order of the tokens of a packed tensor, None for others.
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
    """Return (images, rows, cols, dim) at a hook point; the forward pass ends there.

    Args:
        module: the model.
        hook_point: a module's output, at one of its calls.
        view: how the tensor is read as a grid.
        images: (images, channels, rows, cols).
        order: the order of packed tokens, None where they lie row by row.
    """
    grids: list[Tensor] = []
    n_calls = 0

    def leave(_m: nn.Module, _a: object, output: object) -> None:
        """Keep the output of the hook point's call, and end the forward pass."""
        nonlocal n_calls
        n_calls += 1
        if n_calls != hook_point.call + 1:
            return
        x = first_tensor(output, len(images))
        if x is not None:
            if order is not None:
                x = order.to_grid_order(x)
            _, grid = view.split(x)
            grids.append(grid.float())
            raise ForwardEnded

    hook = module.get_submodule(hook_point.module).register_forward_hook(leave)
    with hook, torch.no_grad(), suppress(ForwardEnded):
        module(images)
    return grids[0]


def first_seen(
    trace: Trace, grid: Grid, prefix: tuple[str, ...]
) -> tuple[HookPoint, View] | None:
    """Return the hook point where a grid first comes out of a module, and how it is read there.

    Args:
        trace: a forward pass.
        grid: (rows, cols).
        prefix: kinds of the prefix tokens that a sequence may have before its grid.
    """
    n_cells = grid[0] * grid[1]
    outputs = []
    for name, calls in trace.calls.items():
        for i, call in enumerate(calls):
            seen = trace.by_image(call.left)
            if seen is None or seen.turned or not name:
                continue
            shape = seen.shape
            if len(shape) == 4 and shape[2:] == grid:
                view = View("nchw", TokenLayout((), grid))
            elif len(shape) == 4 and shape[1:3] == grid:
                view = View("nhwc", TokenLayout((), grid))
            elif len(shape) == 3 and shape[1] == n_cells:
                view = View("tokens", TokenLayout((), grid))
            elif len(shape) == 3 and shape[1] == n_cells + len(prefix):
                view = View("tokens", TokenLayout(prefix, grid))
            else:
                continue
            hook_point = HookPoint(name, "out", call=i, calls=len(calls))
            outputs.append((seen.key, hook_point, view))
    if not outputs:
        return None
    _, hook_point, view = min(outputs, key=lambda output: output[0])
    return hook_point, view


def measure(
    module: nn.Module,
    size: tuple[int, int, int],
    hook_point: HookPoint,
    view: View,
    step: Pair,
) -> Patches | None:
    """Return the patches at a hook point.

    The stride and kernel of an unpadded convolution are taken if they are not disproved; else it
    costs about ten forward passes of seventeen images up to the hook point.

    Args:
        module: the model.
        size: (channels, rows, cols) of its input.
        hook_point: where the grid first comes out of a module.
        view: how it is read there.
        step: the product of the strides before it, in pixels.

    Returns:
        None where no window that moves with the cells explains them, or where padding cuts windows
        that overlap: then the centre of the first cell is unknown.
    """
    by_convolution = _patches_of_convolution(module, size, hook_point, view)
    if by_convolution is not None:
        image = torch.randn(size, generator=torch.Generator().manual_seed(2))
        image = image.to(next(iter(module.parameters())).device)
        if disproof(module, by_convolution, image) is None:
            return by_convolution
    windows_by_axis = _WindowSearch(module, size, hook_point, view).find()
    if windows_by_axis is None:
        return None
    axes = []
    covered = []
    for windows, step_px in zip(windows_by_axis, step, strict=True):
        axis = _fit_axis(windows, step_px)
        if axis is None:
            return None
        axes.append(axis)
        first = min(start for start, _ in windows.values())
        last = max(end for _, end in windows.values())
        covered.append((first, last))
    y, x = axes
    return Patches(
        hook_point,
        view,
        stride_px=(y.stride_px, x.stride_px),
        offset_px=(y.offset_px, x.offset_px),
        window=(y.window, x.window),
        covered=(covered[0], covered[1]),
    )


def _patches_of_convolution(
    module: nn.Module, size: tuple[int, int, int], hook_point: HookPoint, view: View
) -> Patches | None:
    """Return the patches that a convolution without padding has if it works on the image as it is,
    None for other layers."""
    layer = module.get_submodule(hook_point.module)
    if not isinstance(layer, nn.Conv2d):
        return None
    if layer.padding != (0, 0) or layer.dilation != (1, 1):
        return None
    assert view.layout is not None and view.layout.grid is not None
    axes = []
    covered = []
    for axis in range(2):
        kernel = layer.kernel_size[axis]
        stride = layer.stride[axis]
        end = (view.layout.grid[axis] - 1) * stride + kernel
        if end > size[1 + axis]:
            return None
        axes.append(
            _Axis(
                stride_px=float(stride),
                offset_px=(kernel - stride) / 2,
                window=(0, kernel),
            )
        )
        covered.append((0, end))
    y, x = axes
    return Patches(
        hook_point,
        view,
        stride_px=(y.stride_px, x.stride_px),
        offset_px=(y.offset_px, x.offset_px),
        window=(y.window, x.window),
        covered=(covered[0], covered[1]),
    )


def packed_patches(
    trace: Trace, packing: Packing, size: tuple[int, int, int]
) -> Patches | None:
    """Return the patches of a tower that takes them packed, at the first output with a token for
    each; None without one.

    Whether the tokens are those of the patches is for `disproof` to say.
    """
    grid = packing.grid((size[1], size[2]))
    keys_and_points = []
    for name, calls in trace.calls.items():
        for i, call in enumerate(calls):
            if name and call.left is not None and call.left.grid == grid:
                hook_point = HookPoint(name, "out", call=i, calls=len(calls))
                keys_and_points.append((call.left.key, hook_point))
    if not keys_and_points:
        return None
    # The first tensor on this grid is the embedding's output.
    _, hook_point = min(keys_and_points, key=lambda pair: pair[0])
    step = float(packing.patch)
    order = trace.orders[hook_point.side]
    assert isinstance(order, Order), "packed images"
    return Patches(
        hook_point,
        View("tokens", TokenLayout((), grid)),
        stride_px=(step, step),
        offset_px=(0.0, 0.0),
        window=((0, packing.patch), (0, packing.patch)),
        covered=((0, size[1]), (0, size[2])),
        order=order,
    )


class _Trial(NamedTuple):
    """An image with changed pixels, and whether a cell should answer to the change."""

    image: Tensor
    cell: tuple[int, int]
    should_answer: bool


def disproof(module: nn.Module, patches: Patches, image: Tensor) -> str | None:
    """Return the first thing that is wrong about the patches on an image, None if nothing is.

    Of the first, the middle and the last cell: changes outside its window are not seen, changes of
    the outermost rows and columns of pixels inside are. Where the image is resized first, a pixel
    more or less is allowed.

    image: (channels, rows, cols).
    """
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(3)).to(image)
    changed_image = image + noise
    n_rows, n_cols = patches.grid
    trials = []
    for cell in ((0, 0), (n_rows // 2, n_cols // 2), (n_rows - 1, n_cols - 1)):
        trials += _trials_of_cell(patches, cell, image, changed_image)
    batch = torch.stack([image, *(trial.image for trial in trials), changed_image])
    with torch.autocast(image.device.type, enabled=False):
        out = cells(
            module, patches.hook_point, patches.view, batch.float(), patches.order
        )
    change = (out - out[:1]).abs().amax(-1)  # (images, rows, cols)
    change_of_all = change[-1]
    for trial, trial_change in zip(trials, change[1:-1], strict=True):
        row, col = trial.cell
        answers = float(trial_change[row, col]) > QUIET * float(change_of_all[row, col])
        if answers != trial.should_answer:
            fault = "answers to pixels outside"
            if trial.should_answer:
                fault = "does not answer to the border of"
            return f"cell ({row}, {col}) of {patches.hook_point.module} {fault} its patch"
    return None


def _trials_of_cell(
    patches: Patches, cell: tuple[int, int], image: Tensor, changed_image: Tensor
) -> list[_Trial]:
    """Return an image that is changed outside of a cell's window alone, then images that are
    changed along each of its four borders."""
    is_resized = any(stride != int(stride) for stride in patches.stride_px)
    slack = 1 if is_resized else 0
    windows = []
    for axis in range(2):
        windows.append(
            _clipped_window(patches, axis, cell[axis], image.shape[axis + 1], slack)
        )
    rows, cols = (slice(start, end) for start, end in windows)
    outside = changed_image.clone()
    outside[:, rows, cols] = image[:, rows, cols]
    trials = [_Trial(outside, cell, should_answer=False)]
    for axis, (start, end) in enumerate(windows):
        first_pixels = slice(start, start + 1 + 2 * slack)
        last_pixels = slice(end - 1 - 2 * slack, end)
        for border in (first_pixels, last_pixels):
            index = _pixel_index(axis, border)
            bordered = image.clone()
            bordered[index] = changed_image[index]
            trials.append(_Trial(bordered, cell, should_answer=True))
    return trials


def _pixel_index(axis: int, pixels: slice) -> tuple[slice, ...]:
    """Return the index of some rows (axis 0) or columns (axis 1) of an image (channels, rows,
    cols)."""
    everything = slice(None)
    if axis == 0:
        return everything, pixels
    return everything, everything, pixels


def _clipped_window(
    patches: Patches, axis: int, cell: int, length: int, slack: int
) -> tuple[int, int]:
    """Return the pixels along an axis, from and to, of a cell's window within an image.

    Args:
        patches: the grid of patches.
        axis: 0 for rows, 1 for columns.
        cell: the cell's index along the axis.
        length: the image's side along the axis in pixels.
        slack: pixels that are added on both sides.
    """
    first, window_length = patches.window[axis]
    start = first + cell * patches.stride_px[axis]
    from_px = math.floor(start) - slack
    to_px = math.ceil(start) + window_length + slack
    return max(from_px, 0), min(to_px, length)


class _Axis(NamedTuple):
    """Patches along one axis; the window is that of cell 0, (first, length) in pixels."""

    stride_px: float
    offset_px: float
    window: tuple[int, int]


def _fit_axis(windows: Windows, step: float) -> _Axis | None:
    """Return the stride that explains the windows of cells along an axis, None where none does.

    Args:
        windows: of the first cell, which padding may cut, and of others.
        step: the product of the strides before the grid.
    """
    length = max(end - start for start, end in windows.values())
    is_first_cut = windows[0][1] - windows[0][0] < length
    inner, *others = sorted(windows)[1:] or [0]
    measured = step
    if others:
        last = others[-1]
        measured = (windows[last][0] - windows[inner][0]) / (last - inner)
    # Windows that touch at a measured stride: the image was cropped first, not resized.
    is_resized = step != int(step) and measured != length
    stride = step if is_resized else measured
    start = windows[inner][0] - inner * stride
    expected = {i: start + i * stride for i in windows if i == inner or i in others}
    deviation = max(abs(windows[i][0] - expected[i]) for i in expected)
    if is_resized:  # windows of a resized image begin at rounded pixels
        if deviation > 1:
            return None
        return _Axis(stride, offset_px=0.0, window=(math.floor(start), length))
    if deviation > 0 or stride != int(stride):
        return None
    if is_first_cut and length != stride:  # where its centre lies does not show
        return None
    offset = start + (length - stride) / 2
    return _Axis(float(stride), offset_px=offset, window=(int(start), length))


class _Query(NamedTuple):
    """A search for one end of the window of a row or column of cells.

    Attributes:
        axis: 0 for rows of pixels and cells, 1 for columns.
        cell: the index of the row or column of cells.
        from_end: whether pixels are changed from the image's end, not from its beginning.
    """

    axis: int
    cell: int
    from_end: bool


class _WindowSearch:
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
        self.queries: list[_Query] = []
        for axis, n in enumerate(view.layout.grid):
            # The first, which padding may cut, its neighbour, the middle and the last.
            for cell in sorted({0, 1, n // 2, n - 1} & set(range(n))):
                self.queries.append(_Query(axis, cell, from_end=False))
                self.queries.append(_Query(axis, cell, from_end=True))

    def find(self) -> list[Windows] | None:
        """Return the windows along each axis; None if a cell answers to nothing, or all cells of an
        axis to the whole image."""
        lengths = [self.size[query.axis] for query in self.queries]
        change_of_all = self._changes(lengths)
        if not bool((change_of_all > 0).all()):
            return None
        # Per query: a number of changed pixels that the cells do not answer to, and one that they
        # do. All queries are halved in one batch.
        unseen = [0] * len(lengths)
        seen = list(lengths)
        while any(seen[i] - unseen[i] > 1 for i in range(len(lengths))):
            middle = [(unseen[i] + seen[i]) // 2 for i in range(len(lengths))]
            answers = (self._changes(middle) > QUIET * change_of_all).tolist()
            for i, is_seen in enumerate(answers):
                if is_seen:
                    seen[i] = middle[i]
                else:
                    unseen[i] = middle[i]
        windows: list[Windows] = [{}, {}]
        for i in range(0, len(self.queries), 2):  # from the beginning, from the end
            axis, cell, _ = self.queries[i]
            windows[axis][cell] = unseen[i], self.size[axis] - unseen[i + 1]
        for axis_windows, length in zip(windows, self.size, strict=True):
            spans = list(axis_windows.values())
            if len(spans) > 1 and all(span == (0, length) for span in spans):
                return None
        return windows

    def _changes(self, n_changed: Sequence[int]) -> Tensor:
        """Return the largest change in each query's cells, (queries,), when so many rows or columns
        of pixels change."""
        # One image per query, and the unchanged image at the end.
        batch = self.image.repeat(len(self.queries) + 1, 1, 1, 1)
        for i, query in enumerate(self.queries):
            pixels = slice(0, n_changed[i])
            if query.from_end:
                length = self.size[query.axis]
                pixels = slice(length - n_changed[i], length)
            index = _pixel_index(query.axis, pixels)
            batch[i][index] = self.other[index]
        out = cells(self.module, self.hook_point, self.view, batch)
        change = (out - out[-1:]).abs()  # (queries + 1, rows, cols, dim)
        largest = []
        for i, query in enumerate(self.queries):
            largest.append(change[i].select(query.axis, query.cell).max())
        return torch.stack(largest)
