"""A survey of a model by a few forward passes: its calls, blocks and grids of tokens, and how each
activation is read as tokens.

tracing    one forward pass with a hook on every module
structure  the blocks among the modules
head       what comes after the blocks: norm, pooled vector, logits
geometry   rows, columns and prefix tokens of activations
strides    how far the cells of each grid are apart in pixels
patches    the pixels that a patch embedding's cells depend on, measured
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from vitsee_core.models.hook_points import HookPoint, ModelError, ModuleSide, View
from vitsee_core.models.survey.geometry import (
    ModelGeometry,
    count_prefix_tokens,
    in_raster_order,
    kinds_of,
    model_geometry,
    read_map,
    view_kind,
)
from vitsee_core.models.survey.patches import (
    disproof,
    first_seen,
    measure,
    packed_patches,
)
from vitsee_core.models.survey.strides import Steps
from vitsee_core.models.survey.structure import block_names, find_blocks
from vitsee_core.models.survey.tracing import Seen, Trace, trace
from vitsee_core.models.tokens.clip_order import (
    ClipOrder,
    find_clip_orders,
    order_of_shape,
)
from vitsee_core.models.tokens.clips import Cells, clip_cells, frames_of
from vitsee_core.models.tokens.packed_order import Order, find_orders, output_order
from vitsee_core.models.tokens.towers import (
    Grid,
    computes_language_input,
    packing_of,
    patch_side,
)
from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class Survey:
    """The structure of a model as a few forward passes show it.

    Attributes:
        trace: every call of a forward pass.
        blocks: paths of the blocks, in the model's order.
        geometry: grid and prefix tokens.
        names: path of a block -> its name in sites.
    """

    trace: Trace
    blocks: tuple[str, ...]
    geometry: ModelGeometry
    names: Mapping[str, str]


def survey(
    module: nn.Module,
    size: tuple[int, int, int],
    *,
    allow_ambiguous_axes: bool = False,
    geometry: ModelGeometry | None = None,
) -> Survey:
    """Return the survey of a model: its calls on two random images, its blocks and its tokens.

    Where shapes alone do not show which dimensions of the tokens are the image's, the model is run
    again on images with changed corners.

    Args:
        module: the model.
        size: (channels, rows, cols) of its input.
        allow_ambiguous_axes: whether these dimensions may stay open, which saves that pass.
        geometry: the model's tokens, where it has others than it states (registers were added).

    Raises:
        ModelError: the model does not run on images of this size.
    """
    frames = frames_of(module)
    if frames is not None:
        return _survey_of_clips(module, frames, size, allow_ambiguous_axes)
    packing = packing_of(module)
    orders = orders_at(module, size)
    if packing is not None:
        geometry = ModelGeometry(size[1:], grid=packing.grid(size[1:]))
    stated_geometry = geometry or model_geometry(module, size[1:])
    record = trace(module, size, corners=False, orders=orders)
    blocks = find_blocks(module, record)
    geometry = count_prefix_tokens(stated_geometry, module, record, blocks)
    # Not by the counted geometry: pixels tell the order of tokens whose grid was counted.
    if not allow_ambiguous_axes and needs_pixels(module, record, blocks, stated_geometry):
        record = trace(module, size, corners=True, orders=orders)
        blocks = find_blocks(module, record)
    geometry = replace(geometry, steps=Steps(size[1:], module, record))
    return Survey(record, tuple(blocks), geometry, block_names(blocks, record))


def orders_at(module: nn.Module, size: tuple[int, int, int]) -> dict[ModuleSide, Order]:
    """Return the order of packed tokens at each module side, or that of the tokens that a language
    model receives; {} for a model whose images lie in a batch.

    Args:
        module: the model.
        size: (channels, rows, cols) of an image.

    Raises:
        ModelError: the model does not take this size, its tokens are not cells of a grid, or it has
            no values (meta device).
    """
    packing = packing_of(module)
    if packing is not None:
        return find_orders(module, packing, size)
    if computes_language_input(module):
        return output_order(module, patch_side(module), size)
    return {}


def _survey_of_clips(
    module: nn.Module, frames: int, size: tuple[int, int, int], may_guess: bool
) -> Survey:
    """Return the survey of a model of clips, whose order of tokens is found at every module side.

    Args:
        module: the model.
        frames: frames of a clip.
        size: (channels, rows, cols) of a frame.
        may_guess: whether the order may be guessed from shapes where the model has no values (meta
            device).

    Raises:
        ModelError: no block gives the tokens of the clip.
    """
    if may_guess and next(module.parameters()).is_meta:
        grid = clip_cells(module, frames, size)
        orders = _orders_of_shapes(trace(module, size, corners=False), grid)
    else:
        grid, orders = find_clip_orders(module, frames, size)
    record = trace(module, size, corners=False, orders=orders)
    blocks = find_blocks(module, record)
    max_prefix = max((order.n_prefix for order in orders.values()), default=0)
    # Inputs and outputs of blocks that are tokens of the clip.
    block_tensors: list[Seen] = []
    for path in blocks:
        for seen in (record.entered(path), record.left(path)):
            if seen and seen.grid:
                block_tensors.append(seen)
    if not block_tensors:
        raise ModelError(
            f"no block of the model gives {math.prod(grid)} tokens, one for each of "
            f"{grid[0]} x {grid[1]} x {grid[2]} pieces of the clip (time, rows, columns) "
            "and, attention aside, made of its own piece alone; expected a transformer "
            "of clips"
        )
    # Where each view of a clip has prefix tokens of its own, their kinds are numbered.
    n_views = grid[0] if any(order.by_view for order in orders.values()) else 1
    prefix = kinds_of(module, max_prefix // n_views, block_tensors[0].shape[2])
    if n_views > 1:
        prefix = tuple(
            f"{view_kind(kind)}.{i}" for kind in prefix for i in range(n_views)
        )
    geometry = ModelGeometry(size[1:], prefix, (grid[1], grid[2]), frames=frames)
    return Survey(record, tuple(blocks), geometry, block_names(blocks, record))


def _orders_of_shapes(record: Trace, grid: Cells) -> dict[ModuleSide, ClipOrder]:
    """Return the order at every module side whose tensors have one shape, as shapes suggest it."""
    orders = {}
    for name, calls in record.calls.items():
        for is_input in (True, False):
            if is_input and not name:
                continue  # the clips themselves
            tensors = [call.entered if is_input else call.left for call in calls]
            shapes = {None if seen is None else seen.shape for seen in tensors}
            shape = shapes.pop() if len(shapes) == 1 else None
            if shape is None:
                continue
            order = order_of_shape(shape, record.n_images, grid)
            if order is not None:
                orders[ModuleSide(name, is_input)] = order
    return orders


def tokens_of(module: nn.Module, size: tuple[int, int, int]) -> ModelGeometry:
    """Return the tokens of a model as it states them, else as counted in a forward pass.

    size: (channels, rows, cols) of its input.
    """
    packing = packing_of(module)
    if packing is not None:
        return ModelGeometry(size[1:], grid=packing.grid(size[1:]))
    geometry = model_geometry(module, size[1:])
    if geometry.grid is not None:
        return geometry
    record = trace(module, size, corners=False)
    return count_prefix_tokens(geometry, module, record, find_blocks(module, record))


def needs_pixels(
    module: nn.Module, record: Trace, blocks: list[str], geometry: ModelGeometry
) -> bool:
    """Return whether shapes alone do not show which dimensions of the tokens are the image's.

    Args:
        module: the model.
        record: a forward pass of it.
        blocks: paths of its blocks.
        geometry: its tokens as it states them.
    """
    n_tokens = geometry.grid and math.prod(geometry.grid) + len(geometry.prefix)
    shapes = {seen.shape for seen in map(record.left, blocks) if seen}
    token_shapes = {shape for shape in shapes if len(shape) == 3}
    if token_shapes and hasattr(module, "reroll"):
        return True  # Hiera's tokens are not in raster order
    if any(shape[1] != n_tokens for shape in token_shapes):
        return True
    if token_shapes and token_shapes == shapes:
        return False
    # A map whose first two dimensions fit the image as well as its last two do: channels first or
    # last?
    for calls in record.calls.values():
        for call in calls:
            for seen in (call.entered, call.left):
                if seen is None or len(seen.shape) != 4:
                    continue
                _, first, second, third = seen.shape
                if geometry.exact((first, second)) and geometry.exact((second, third)):
                    return True
    return False


def with_measured_patches(
    module: nn.Module, size: tuple[int, int, int], survey: Survey
) -> Survey:
    """Return the survey with its patch embeddings measured: the pixels that each token depends on,
    for the grids of tokens that one strided layer makes of the image.

    Channels-first maps are left out, and so are models without values and models of clips, whose
    tokens were found by their pieces of the clip.

    Raises:
        ModelError: the tokens of a packed tower are not those of its patches.
    """
    geometry = survey.geometry
    record = survey.trace
    if geometry.frames is not None:
        return survey
    assert geometry.steps is not None
    if next(iter(module.parameters())).is_meta:
        return survey
    packing = packing_of(module)
    if packing is not None:
        packed = packed_patches(record, packing, size)
        if packed is None:
            raise ModelError("no module of the model gives one token for each patch")
        image = torch.randn(size, generator=torch.Generator().manual_seed(2))
        reason = disproof(module, packed, image.to(next(module.parameters()).device))
        if reason:
            raise ModelError(f"the model's tokens are not those of its patches: {reason}")
        return replace(survey, geometry=replace(geometry, patches=(packed,)))
    reader = Reader(module, survey)
    patches = []
    # Each grid once, in the order of the blocks.
    for grid in dict.fromkeys(_token_grids(reader, survey.blocks)):
        step = geometry.steps.of(grid)
        if (
            step.reductions != 1
        ):  # the grid of the image itself, or behind several strides
            continue
        first = first_seen(record, grid, geometry.prefix)
        if first is None:
            continue
        measured = measure(module, size, *first, step.stride_px)
        if measured is not None:
            patches.append(measured)
    return replace(survey, geometry=replace(geometry, patches=tuple(patches)))


def _token_grids(reader: Reader, blocks: tuple[str, ...]) -> Iterator[Grid]:
    """Yield the grid of each block's input and output that holds an image's tokens."""
    for path in blocks:
        for is_input in (True, False):
            seen = reader.trace.entered(path) if is_input else reader.trace.left(path)
            seen = reader.trace.by_image(seen)
            if seen is None or len(seen.shape) < 3:
                continue
            view = reader.token_view(path, seen, entering=is_input)
            has_tokens = view.form in ("tokens", "nhwc", "unrolled")
            if has_tokens and view.layout and view.layout.grid:
                yield view.layout.grid


class Reader:
    """Says how the activations of a survey are read as tokens."""

    def __init__(self, model: nn.Module, survey: Survey) -> None:
        self.model = model
        self.trace = survey.trace
        self.geometry = survey.geometry
        self.modules = dict(model.named_modules())
        self.block_index: Mapping[str, int] = {
            path: i for i, path in enumerate(survey.blocks)
        }

    def seen(self, hook_point: HookPoint) -> Seen | None:
        """Return the tensor at a hook point; None if its module is called another number of times,
        or if the batch is not its first dimension."""
        calls = self.trace.calls.get(hook_point.module, [])
        if len(calls) != hook_point.calls:
            return None
        call = calls[hook_point.call]
        return self.trace.by_image(call.entered if hook_point.when == "in" else call.left)

    def token_view(self, path: str, seen: Seen, entering: bool = False) -> View:
        """Return the reading of a block's output, or of its input where it is `entering`."""
        shape = seen.shape
        ordered = self.ordered(seen)
        if ordered is not None:
            return ordered
        if len(shape) == 4:
            return read_map(seen, self.geometry) or View("raw")
        if len(shape) == 2:
            return View("vector")
        if len(shape) != 3:
            return View("raw")
        if self.geometry.prefix and shape[1] == len(self.geometry.prefix):
            # The grid was left behind (PiT's norm); a token is not a grid of one cell.
            return View("rows", TokenLayout((), None, rows=shape[1]))
        layout = self.geometry.token_layout(shape[1])
        if layout is None:
            return View("raw")
        if in_raster_order(seen, layout):
            return View("tokens", layout)
        reroll = getattr(self.model, "reroll", None)
        if isinstance(reroll, nn.Module) and not layout.prefix:
            # Hiera: a block's input is the output of the block before it.
            index = max(self.block_index[path] - entering, 0)
            return View("unrolled", layout, partial(reroll.forward, block_idx=index))
        return View("rows", TokenLayout((), None, rows=shape[1]))

    def ordered(self, seen: Seen) -> View | None:
        """Return the reading of a tensor whose order of tokens was found, and of any tensor of a
        model of clips (a vector or raw where it has no order); None for others."""
        if seen.grid is not None:
            prefix = self.geometry.prefix[: seen.n_prefix]
            return View("tokens", self.geometry.layout(seen.grid, prefix))
        if self.geometry.frames is None:
            return None
        return View("vector") if len(seen.shape) == 2 else View("raw")

    def inner_view(self, seen: Seen, base: Sequence[View]) -> View:
        """Return the reading of an activation inside a block: tokens if it has as many as the
        block.

        base: the readings of the block's input and output.
        """
        shape = seen.shape
        ordered = self.ordered(seen)
        if ordered is not None:
            return ordered
        if len(shape) == 2:
            return View("vector")
        if len(shape) == 3:
            if not base and self.geometry.grid:
                layout = self.geometry.token_layout(shape[1])
                if layout and layout.grid == self.geometry.grid:
                    return View("tokens", layout)
            for view in base:
                if view.layout and view.layout.grid and view.layout.n_tokens == shape[1]:
                    if view.form == "unrolled":
                        return view
                    return View("tokens", view.layout)
            if any(view.form == "rows" and view.layout for view in base):
                return View("rows", TokenLayout((), None, rows=shape[1]))
            return View("raw")
        if len(shape) != 4:
            return View("raw")
        token_grids = [
            view.layout.grid for view in base if view.form == "tokens" and view.layout
        ]
        map_view = read_map(seen, self.geometry)
        if map_view is None or map_view.layout is None:
            return View("raw")
        if token_grids and map_view.layout.grid not in token_grids:
            return View("raw")
        return map_view

    def why_not(self, hook_point: HookPoint) -> str:
        """Return why there is nothing to capture at a hook point, in words behind the site."""
        calls = self.trace.calls.get(hook_point.module, [])
        if len(calls) != hook_point.calls:
            return f"called {len(calls)} times in one forward pass"
        call = calls[hook_point.call]
        seen = call.entered if hook_point.when == "in" else call.left
        if seen is None:
            return f"gives a {call.left_type}, not one tensor"
        return f"its first dimension is {seen.shape[0]} for {self.trace.n_images} images"
