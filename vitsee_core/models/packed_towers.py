"""Which images a tower of packed patches takes, recognised on numbers.

The shape of its patches is the one that its first layer takes; their order (row by row, or by
groups that a merger joins later) the one in which each channel of the positions that its blocks get
depends on the row alone, or on the column alone, of the patch that the token beside it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.attention_watch import KERNEL, SOFTMAX
from vitsee_core.models.hook_points import ForwardEnded, ModelError, input_tensor
from vitsee_core.models.language_input import image_config
from vitsee_core.models.packing import ATTRIBUTE, GRIDS, MERGES, Grid, Packing, packed_inputs
from vitsee_core.models.token_order import Codes, Order, order_of

# What configurations call the side of a group, and the frames of a patch.
_UNITS = ("spatial_merge_size", "merge_size", "merge_kernel_size", "spatial_merge_kernel_size")
_FRAMES = "temporal_patch_size"
_CHANNELS = ("in_channels", "num_channels", "in_chans")
_MOST_MERGED = 4
# Of the positions' largest number: rounding of sines.
_LEVEL = 1e-5
_ERRORS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


def accept_images(module: nn.Module, name: str) -> Packing:
    """Let a tower of packed patches take images (images, channels, rows, cols).

    Raises:
        ModelError: in one line: neither its configuration nor its positions show how.
    """
    packing = _recognised(module, name)
    setattr(module, ATTRIBUTE, packing)

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], Tensor) or set(kwargs) & set(GRIDS):
            return None
        return _given(packing, args[0], kwargs)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    return packing


def _given(packing: Packing, images: Tensor, kwargs: Mapping[str, Any]) -> Any:
    grid = packing.grid((images.shape[2], images.shape[3]))
    more = packing.arguments(len(images), grid, images.device)
    return (packing.pack(images),), {**kwargs, **more}


def _recognised(module: nn.Module, name: str) -> Packing:
    config: Any = image_config(module)
    stated = getattr(config, "patch_size", None)
    patch = stated[-1] if isinstance(stated, list | tuple) else stated
    grids = packed_inputs(module)
    if not isinstance(patch, int) or patch < 1 or not grids:
        raise ModelError(f"{name}: its configuration has no patch_size; expected one")
    unit = max(_number(config, key) for key in _UNITS)
    frames = _number(config, _FRAMES)
    packing = Packing(
        patch, frames=frames, unit=unit, grids=grids[0],
        merges=next((name for name in grids if name in MERGES), ""),
        channels=next((n for key in _CHANNELS if (n := getattr(config, key, None))), 3),
    )  # fmt: skip
    if next(module.parameters()).is_meta:
        return replace(packing, merge=unit)  # `find_orders` asks for values
    taken, refused = False, ""
    for one in _candidates(packing):
        side = math.lcm(_MOST_MERGED, one.unit)
        try:
            tables = _positions(module, one, (side, 2 * side))
        except _ERRORS as error:
            refused = refused or " ".join(str(error).split())
            continue
        if _consistent(tables):
            return one
        taken = True
    if taken:
        raise ModelError(
            f"{name}: no order of its patches gives its blocks positions by row and column, so "
            "where a token lies in the image is not known; expected rotary positions of two axes"
        )
    raise ModelError(f"{name} takes no form of packed patches that is known: {refused}")


def _number(config: Any, key: str) -> int:
    value = getattr(config, key, 1)
    value = value[-1] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) and value > 0 else 1


def _candidates(packing: Packing) -> Iterator[Packing]:
    """Forms of patches, and orders; those that the configuration states first."""
    merges = dict.fromkeys([packing.unit, *range(1, _MOST_MERGED + 1)])
    frames = dict.fromkeys([packing.frames, 1, 2])
    for form, n in (*(("cthw", n) for n in frames), ("image", 1), ("sequence", 1), ("hwc", 1)):
        for merge in merges:
            unit = math.lcm(packing.unit, merge)
            yield replace(packing, form=form, frames=n, merge=merge, unit=unit)


class _FirstAttention(TorchFunctionMode):
    """Ends a forward pass where attention is computed for the first time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is KERNEL or func in SOFTMAX:
            raise ForwardEnded
        return func(*args, **(kwargs or {}))


def _positions(module: nn.Module, packing: Packing, grid: Grid) -> list[Tensor]:
    """The arguments with a value for each token that the first attention, and the modules that it
    is in, get beside their first one, for images of this grid of patches: (images, rows, cols,
    numbers) each, in the order of the first argument's tokens."""
    codes = Codes(grid)
    n_tokens = len(codes.cells) * math.prod(grid)
    opened: list[list[Tensor]] = []  # of each module that was entered and not left

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        first, found = input_tensor(args, kwargs), list[Tensor]()
        opened.append(found)
        order: Order | None = None
        for x in _flat([*args, *kwargs.values()]):
            if x is first or list(x.shape).count(n_tokens) != 1:
                continue
            order = order or (None if first is None else order_of(first, codes))
            if order is not None and order.grid == grid:
                table = x.movedim(list(x.shape).index(n_tokens), 0).reshape(n_tokens, -1)
                laid = Order(grid, order.index, 0).laid(table.double())
                found.append(laid.reshape(len(codes.cells), *grid, -1))

    def leave(*_: Any) -> None:
        opened.pop()

    args, kwargs = _given(packing, codes.images(packing), {})
    with ExitStack() as stack:
        for child in module.modules():
            if child is not module:
                stack.enter_context(child.register_forward_pre_hook(enter, with_kwargs=True))
                stack.enter_context(child.register_forward_hook(leave))
        stack.enter_context(torch.no_grad())
        try:
            with _FirstAttention():
                module.forward(*args, **kwargs)
        except ForwardEnded:
            return [table for found in opened for table in found]
    raise RuntimeError("it computes no attention")


def _flat(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _flat(value)


def _consistent(tables: list[Tensor]) -> bool:
    """Whether each channel of each table (images, rows, cols, numbers) is one of the row, or of the
    column, and some of both, in every image alike."""
    depends = [False, False]
    for laid in tables:
        level = _LEVEL * max(float(laid.abs().max()), 1.0)
        by_row = (laid - laid[:, :1]).abs().amax((0, 1, 2)) > level
        by_col = (laid - laid[:, :, :1]).abs().amax((0, 1, 2)) > level
        by_image = (laid - laid[:1]).abs().amax() > level
        if bool((by_row & by_col).any()) or bool(by_image):
            return False
        depends = [depends[0] or bool(by_row.any()), depends[1] or bool(by_col.any())]
    return all(depends)
