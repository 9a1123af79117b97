"""A survey of a model by a few forward passes: its calls, blocks and grids of tokens, and how each
activation is read as tokens.

tracing    one forward pass with a hook on every module
structure  blocks among the modules, and what comes after them
geometry   rows, columns and prefix tokens of activations
patches    the pixels that a patch embedding's cells depend on, measured
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from vitsee_core.models.hook_points import HookPoint, ModelError, View
from vitsee_core.models.survey.geometry import (
    ModelGeometry,
    Steps,
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
from vitsee_core.models.survey.structure import block_names, find_blocks
from vitsee_core.models.survey.tracing import Seen, Trace, trace
from vitsee_core.models.tokens.clip_order import (
    ClipOrder,
    find_clip_orders,
    order_of_shape,
)
from vitsee_core.models.tokens.clips import Cells, clip_cells, frames_of
from vitsee_core.models.tokens.packed_order import Order, Place, find_orders, output_order
from vitsee_core.models.tokens.towers import (
    Grid,
    is_language_input,
    packing_of,
    patch_side,
)
from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class Survey:
    """trace: every call of a forward pass; blocks: paths in the model's order; names: of these
    blocks by their paths."""

    trace: Trace
    blocks: tuple[str, ...]
    geometry: ModelGeometry
    names: Mapping[str, str]


def survey(
    module: nn.Module,
    size: tuple[int, int, int],
    *,
    doubtful: bool = False,
    known: ModelGeometry | None = None,
) -> Survey:
    """Trace the model on two random images; again with changed corners where shapes alone do
    not show which dimensions are the image's, unless these are to stay `doubtful`. known: its
    tokens, where it has others than it states."""
    if (frames := frames_of(module)) is not None:
        return _survey_of_clips(module, frames, size, doubtful)
    packing = packing_of(module)
    orders = orders_at(module, size)
    if packing is not None:
        known = ModelGeometry(size[1:], grid=packing.grid(size[1:]))
    stated = known or model_geometry(module, size[1:])
    seen = trace(module, size, corners=False, orders=orders)
    blocks = find_blocks(module, seen)
    geometry = count_prefix_tokens(stated, module, seen, blocks)
    # The order of tokens whose grid was counted is for pixels to say.
    if not doubtful and needs_pixels(module, seen, blocks, stated):
        seen = trace(module, size, corners=True, orders=orders)
        blocks = find_blocks(module, seen)
    geometry = replace(geometry, steps=Steps(size[1:], module, seen))
    return Survey(seen, tuple(blocks), geometry, block_names(blocks, seen))


def orders_at(module: nn.Module, size: tuple[int, int, int]) -> dict[Place, Order]:
    """The order of packed tokens at each place for images of this size (channels, rows, cols), and
    of what a language model receives; {} of a model whose images lie in a batch. Raises
    ModelError: as `find_orders` and `output_order`."""
    if (packing := packing_of(module)) is not None:
        return find_orders(module, packing, size)
    if is_language_input(module):
        return output_order(module, patch_side(module), size)
    return {}


def _survey_of_clips(
    module: nn.Module, frames: int, size: tuple[int, int, int], doubtful: bool
) -> Survey:
    """The survey of a model of clips, whose order of tokens is found at every place; of one without
    values, if that is to stay `doubtful`, guessed by shapes."""
    if doubtful and next(module.parameters()).is_meta:
        grid = clip_cells(module, frames, size)
        orders = _orders_of_shapes(trace(module, size, corners=False), grid)
    else:
        grid, orders = find_clip_orders(module, frames, size)
    seen = trace(module, size, corners=False, orders=orders)
    blocks = find_blocks(module, seen)
    most = max((order.n_prefix for order in orders.values()), default=0)
    ends = [
        x
        for path in blocks
        for x in (seen.entered(path), seen.left(path))
        if x and x.grid
    ]
    if not ends:
        raise ModelError(
            f"no block of the model gives {math.prod(grid)} tokens, one for each of {grid[0]} x "
            f"{grid[1]} x {grid[2]} pieces of the clip (time, rows, columns) and, attention aside, "
            "made of its own piece alone; expected a transformer of clips"
        )
    n_views = grid[0] if any(order.by_view for order in orders.values()) else 1
    prefix = kinds_of(module, most // n_views, ends[0].shape[2])
    if n_views > 1:
        prefix = tuple(
            f"{view_kind(kind)}.{i}" for kind in prefix for i in range(n_views)
        )
    geometry = ModelGeometry(size[1:], prefix, (grid[1], grid[2]), frames=frames)
    return Survey(seen, tuple(blocks), geometry, block_names(blocks, seen))


def _orders_of_shapes(seen: Trace, grid: Cells) -> dict[Place, ClipOrder]:
    found = {}
    for name, calls in seen.calls.items():
        for entering in (True, False):
            tensors = [call.entered if entering else call.left for call in calls]
            shapes = {None if x is None else x.shape for x in tensors}
            shape = shapes.pop() if len(shapes) == 1 else None
            order = None if shape is None else order_of_shape(shape, seen.n_images, grid)
            if order is not None and (name or not entering):
                found[(name, entering)] = order
    return found


def tokens_of(module: nn.Module, size: tuple[int, int, int]) -> ModelGeometry:
    """The tokens of a model: as it states them, else counted in a forward pass."""
    if (packing := packing_of(module)) is not None:
        return ModelGeometry(size[1:], grid=packing.grid(size[1:]))
    geometry = model_geometry(module, size[1:])
    if geometry.grid is not None:
        return geometry
    seen = trace(module, size, corners=False)
    return count_prefix_tokens(geometry, module, seen, find_blocks(module, seen))


def needs_pixels(
    module: nn.Module, seen: Trace, blocks: list[str], geometry: ModelGeometry
) -> bool:
    """Whether shapes alone do not show which dimensions of the tokens are the image's."""
    known = geometry.grid and math.prod(geometry.grid) + len(geometry.prefix)
    shapes = {x.shape for x in map(seen.left, blocks) if x}
    tokens = {shape for shape in shapes if len(shape) == 3}
    if tokens and (hasattr(module, "reroll") or any(s[1] != known for s in tokens)):
        return True
    if tokens and tokens == shapes:
        return False
    calls = (call for calls in seen.calls.values() for call in calls)
    maps = (x.shape for call in calls for x in (call.entered, call.left) if x)
    return any(
        len(s) == 4 and geometry.exact((s[1], s[2])) and geometry.exact((s[2], s[3]))
        for s in maps
    )


def measured(module: nn.Module, size: tuple[int, int, int], found: Survey) -> Survey:
    """The survey with its patch embeddings measured: the grids of tokens (not of channels-first
    maps) that one strided layer makes of the image."""
    geometry = found.geometry
    trace = found.trace
    if geometry.frames is not None:
        return found  # each token was told by its piece of the clip
    assert geometry.steps is not None
    if next(iter(module.parameters())).is_meta:
        return found
    if (packing := packing_of(module)) is not None:
        one = packed_patches(trace, packing, size)
        if one is None:
            raise ModelError("no module of the model gives one token for each patch")
        image = torch.randn(size, generator=torch.Generator().manual_seed(2))
        wrong = disproof(module, one, image.to(next(module.parameters()).device))
        if wrong:
            raise ModelError(f"the model's tokens are not those of its patches: {wrong}")
        return replace(found, geometry=replace(geometry, patches=(one,)))
    reader = Reader(module, found)
    patches = []
    for grid in dict.fromkeys(_token_grids(reader, found.blocks)):
        step = geometry.steps.of(grid)
        first = first_seen(trace, grid, geometry.prefix) if step.reductions == 1 else None
        if first is not None:
            patches.append(measure(module, size, *first, step.stride_px))
    known = tuple(one for one in patches if one is not None)
    return replace(found, geometry=replace(geometry, patches=known))


def _token_grids(reader: Reader, blocks: tuple[str, ...]) -> Iterator[Grid]:
    for path in blocks:
        for seen, entering in (
            (reader.trace.entered(path), True),
            (reader.trace.left(path), False),
        ):
            seen = reader.trace.by_image(seen)
            if seen is None or len(seen.shape) < 3:
                continue
            view = reader.token_view(path, seen, entering)
            if (
                view.form in ("tokens", "nhwc", "unrolled")
                and view.layout
                and view.layout.grid
            ):
                yield view.layout.grid


class Reader:
    """Reads what a survey of the model has seen."""

    def __init__(self, model: nn.Module, survey: Survey) -> None:
        self.model = model
        self.trace = survey.trace
        self.geometry = survey.geometry
        self.modules = dict(model.named_modules())
        self.block_index: Mapping[str, int] = {
            path: i for i, path in enumerate(survey.blocks)
        }

    def seen(self, hook_point: HookPoint) -> Seen | None:
        """The tensor at a hook point; None if its module is called another number of times, or if
        the batch is not its first dimension."""
        calls = self.trace.calls.get(hook_point.module, [])
        if len(calls) != hook_point.calls:
            return None
        call = calls[hook_point.call]
        return self.trace.by_image(call.entered if hook_point.when == "in" else call.left)

    def token_view(self, path: str, seen: Seen, entering: bool = False) -> View:
        """The reading of a block's output, or of its input."""
        shape = seen.shape
        if (found := self.ordered(seen)) is not None:
            return found
        if len(shape) == 4:
            return read_map(seen, self.geometry) or View("raw")
        if len(shape) == 2:
            return View("vector")
        if (
            len(shape) == 3
            and self.geometry.prefix
            and shape[1] == len(self.geometry.prefix)
        ):
            # The grid was left behind (PiT's norm); a token is not a grid of one cell.
            return View("rows", TokenLayout((), None, rows=shape[1]))
        layout = self.geometry.token_layout(shape[1]) if len(shape) == 3 else None
        if layout is None:
            return View("raw")
        if in_raster_order(seen, layout):
            return View("tokens", layout)
        reroll = getattr(self.model, "reroll", None)
        if isinstance(reroll, nn.Module) and not layout.prefix:
            number = max(self.block_index[path] - entering, 0)
            return View("unrolled", layout, partial(reroll.forward, block_idx=number))
        return View("rows", TokenLayout((), None, rows=shape[1]))

    def ordered(self, seen: Seen) -> View | None:
        """The reading of a tensor whose order of tokens was found; of clips every other is a vector
        or as it is."""
        if seen.grid is not None:
            prefix = self.geometry.prefix[: seen.n_prefix]
            return View("tokens", self.geometry.layout(seen.grid, prefix))
        if self.geometry.frames is None:
            return None
        return View("vector") if len(seen.shape) == 2 else View("raw")

    def inner_view(self, seen: Seen, base: Sequence[View]) -> View:
        """The reading of an inner activation: tokens if it has as many as the block it is in."""
        shape = seen.shape
        if (found := self.ordered(seen)) is not None:
            return found
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
        found = read_map(seen, self.geometry)
        if found is None or found.layout is None:
            return View("raw")
        if token_grids and found.layout.grid not in token_grids:
            return View("raw")
        return found

    def why_not(self, hook_point: HookPoint) -> str:
        """Why there is nothing to capture at a hook point."""
        calls = self.trace.calls.get(hook_point.module, [])
        if len(calls) != hook_point.calls:
            return f"called {len(calls)} times in one forward pass"
        call = calls[hook_point.call]
        seen = call.entered if hook_point.when == "in" else call.left
        if seen is None:
            return f"gives a {call.left_type}, not one tensor"
        return f"its first dimension is {seen.shape[0]} for {self.trace.n_images} images"
