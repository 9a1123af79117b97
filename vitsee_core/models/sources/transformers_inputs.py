"""Hooks that turn a batch of images into the inputs of a class of transformers, and its output into
one tensor.

How a tower of packed patches takes images is found by trial. The layout of a patch is the first
that the tower computes with. The order of patches (row by row, or by groups that a merger joins
later) is the first in which each channel of the positions that its blocks get depends on the row
alone, or on the column alone, of the patch that the token beside it was made of.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.attention_watch import FirstAttention
from vitsee_core.models.hook_points import ForwardEnded, ModelError, hooked, input_tensor
from vitsee_core.models.sources.transforms import pair
from vitsee_core.models.tokens import towers
from vitsee_core.models.tokens.packed_order import Codes, Order, order_of
from vitsee_core.models.tokens.towers import (
    ATTRIBUTE,
    GRIDS,
    MERGES,
    Grid,
    Packing,
    computes_language_input,
    image_config,
    packed_inputs,
)

# Entries of an output that may be the model's; the first that is there is taken.
OUTPUTS = ("logits", "last_hidden_state", "image_embeds", "feature_maps")
_INTERPOLATE = "interpolate_pos_encoding"
# Arguments of SigLIP 2 NaFlex that `take_images_alone` makes of images.
_PADDED_INPUTS = ("pixel_attention_mask", "spatial_shapes")
# Names that configurations have for the side of a group of patches.
_GROUP_SIDE_KEYS = (
    "spatial_merge_size",
    "merge_size",
    "merge_kernel_size",
    "spatial_merge_kernel_size",
)
_FRAMES_KEY = "temporal_patch_size"
_CHANNELS_KEYS = ("in_channels", "num_channels", "in_chans")
# Largest side of a group that is tried; no model that is known has a larger one.
_MAX_GROUP_SIDE = 4
# Differences below this share of the largest position are rounding of sines in float32.
_POSITION_TOLERANCE = 1e-5
# What towers raise on patches of another layout.
_LAYOUT_ERRORS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


def refuse_others(kind: Any, name: str) -> None:
    """Raise ModelError for a model that needs more than images, or than their patches and grids.

    Args:
        kind: the model's class, or a module.
        name: the model, as the message calls it.
    """
    parameters = []
    for parameter in inspect.signature(kind.forward).parameters.values():
        is_plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_plain and parameter.name != "self":
            parameters.append(parameter)
    provided = {*_PADDED_INPUTS, *(packed_inputs(kind) or ())}
    if computes_language_input(kind):
        provided.add(towers.SIZES)
    lacking = []
    for parameter in parameters[1:]:  # the first takes the images
        is_required = parameter.default is parameter.empty
        if is_required and parameter.name not in provided:
            lacking.append(parameter.name)
    if lacking:
        raise ModelError(
            f"{name} takes {parameters[0].name} with {', '.join(lacking)}; expected a "
            "model that takes a batch of images alone"
        )


def take_images_alone(
    module: nn.Module, resized: bool, name: str, size: tuple[int, int] | None = None
) -> None:
    """Register hooks that let a module take a batch of images alone, and give one tensor.

    A class that draws which patches it sees (ViT-MAE) sees all in their order. A class that takes
    patches with a mask and the shape of their grid (SigLIP 2 NaFlex) gets those of each image. A
    class that takes the patches of all images with their grids (Qwen-VL's towers) gets those.

    Args:
        module: changed in place.
        resized: whether images have another size than the weights' positions are for; then they are
            interpolated if the class can.
        name: the model, as messages call it.
        size: (rows, cols) in pixels of the images, which a language model's input is tried on.

    Raises:
        ModelError: the order of packed patches is not found.
    """
    inputs = inspect.signature(module.forward).parameters
    gives_language_input = computes_language_input(module)
    forwards = [module.forward]
    if (
        gives_language_input
    ):  # its forward is the library's function, which passes arguments on
        forwards = [child.forward for child in module.children()]
    interpolates = any(
        _INTERPOLATE in inspect.signature(forward).parameters for forward in forwards
    )
    constants = {}
    if "skip_predictor" in inputs:  # the predictor of V-JEPA 2 is not its encoder
        constants["skip_predictor"] = True
    if interpolates and resized:
        constants[_INTERPOLATE] = True
    patch_rows, patch_cols = pair(getattr(image_config(module), "patch_size", None) or 16)

    def make_inputs(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return (args, kwargs) with what the class takes beside the images."""
        images, *rest = args
        kwargs = {**constants, **kwargs}
        if "noise" in inputs:
            # ViT-MAE sorts patches by noise: ascending numbers keep their order.
            n = (images.shape[-2] // patch_rows) * (images.shape[-1] // patch_cols)
            kwargs["noise"] = torch.arange(n, device=images.device).expand(len(images), n)
        if "spatial_shapes" in inputs and images.ndim == 4:
            images, masks_and_shapes = as_patches(images, (patch_rows, patch_cols))
            kwargs = {**kwargs, **masks_and_shapes}
        return (images, *rest), kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        """Return the output's first tensor of `OUTPUTS`; the output itself without one."""
        if isinstance(output, Mapping):
            for key in OUTPUTS:
                if isinstance(output.get(key), Tensor):
                    return output[key]
        return output

    if packed_inputs(module):
        accept_images(module, name)
    else:
        module.register_forward_pre_hook(make_inputs, with_kwargs=True)
    if not gives_language_input:
        module.register_forward_hook(leave)
        return
    if size is not None and not packed_inputs(module) and "spatial_shapes" not in inputs:
        before = towers.input_hook(module, size)
        module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _m, _a, output: towers.tokens(output))


def as_patches(
    images: Tensor, sides: tuple[int, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cut images into patches.

    Args:
        images: (images, channels, rows, cols).
        sides: (rows, cols) of a patch in pixels.

    Returns:
        (images, patches, rows x cols x channels), patches and the pixels of each row by row; and
        the arguments `pixel_attention_mask` (images, patches) and `spatial_shapes` (images, 2).

    Raises:
        ValueError: the patches do not divide the image.
    """
    n, channels, height, width = images.shape
    patch_rows, patch_cols = sides
    rows = height // patch_rows
    cols = width // patch_cols
    if (rows * patch_rows, cols * patch_cols) != (height, width):
        raise ValueError(
            f"patches of {patch_rows} x {patch_cols} pixels do not divide them"
        )
    # (images, channels, rows, patch rows, cols, patch cols)
    cut = images.reshape(n, channels, rows, patch_rows, cols, patch_cols)
    # -> (images, rows, cols, patch rows, patch cols, channels)
    patches = cut.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * cols, -1)
    mask = torch.ones(n, rows * cols, dtype=torch.long, device=images.device)
    shape = torch.tensor([[rows, cols]], device=images.device)
    return patches, {"pixel_attention_mask": mask, "spatial_shapes": shape.expand(n, 2)}


# ------------------------------------------------------------ towers of packed patches


def accept_images(module: nn.Module, name: str) -> Packing:
    """Let a tower of packed patches take images (images, channels, rows, cols).

    Args:
        module: gets a hook, and its packing as the attribute `ATTRIBUTE`.
        name: the model, as messages call it.

    Raises:
        ModelError: neither its configuration nor its positions show how.
    """
    packing = _find_packing(module, name)
    setattr(module, ATTRIBUTE, packing)

    def make_inputs(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return (args, kwargs) of packed patches; None, for no change, if they are packed."""
        is_packed = bool(set(kwargs) & set(GRIDS))
        if is_packed or not args or not isinstance(args[0], Tensor):
            return None
        return _pack_inputs(packing, args[0], kwargs)

    module.register_forward_pre_hook(make_inputs, with_kwargs=True)
    return packing


def _pack_inputs(packing: Packing, images: Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Return (args, kwargs) of a tower for images (images, channels, rows, cols)."""
    grid = packing.grid((images.shape[2], images.shape[3]))
    grids = packing.arguments(len(images), grid, images.device)
    return (packing.pack(images),), {**kwargs, **grids}


def _find_packing(module: nn.Module, name: str) -> Packing:
    """Return the first layout and order of patches with which a tower's positions go by row and
    column.

    Raises:
        ModelError: none does, or the configuration states no side of patches.
    """
    stated = _stated_packing(module, name)
    if next(module.parameters()).is_meta:
        # Without values there is no order to find; `find_orders` asks for them.
        return replace(stated, merge=stated.unit)
    computes = False
    first_error = ""
    for packing in _candidates(stated):
        # A grid of different sides that each group divides tells rows from columns.
        side = math.lcm(_MAX_GROUP_SIDE, packing.unit)
        try:
            tables = _positions(module, packing, (side, 2 * side))
        except _LAYOUT_ERRORS as error:
            first_error = first_error or " ".join(str(error).split())
            continue
        if _are_by_row_and_column(tables):
            return packing
        computes = True
    if computes:
        raise ModelError(
            f"{name}: no order of its patches gives its blocks positions by row and "
            "column, so where a token lies in the image is not known; expected rotary "
            "positions of two axes"
        )
    raise ModelError(
        f"{name} takes no form of packed patches that is known: {first_error}"
    )


def _stated_packing(module: nn.Module, name: str) -> Packing:
    """Return the packing by a tower's configuration and arguments alone, in one row by row.

    Raises:
        ModelError: the configuration states no side of patches.
    """
    config: Any = image_config(module)
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, list | tuple):
        patch = patch[-1]
    inputs = packed_inputs(module)
    if not isinstance(patch, int) or patch < 1 or not inputs:
        raise ModelError(f"{name}: its configuration has no patch_size; expected one")
    merges = [argument for argument in inputs if argument in MERGES]
    channels = [getattr(config, key, None) for key in _CHANNELS_KEYS]
    return Packing(
        patch,
        frames=_positive_number(config, _FRAMES_KEY),
        unit=max(_positive_number(config, key) for key in _GROUP_SIDE_KEYS),
        grids=inputs[0],
        merges=merges[0] if merges else "",
        channels=next((n for n in channels if n), 3),
    )


def _positive_number(config: Any, key: str) -> int:
    """Return a number of a configuration, of several the last one; 1 without one."""
    value = getattr(config, key, 1)
    if isinstance(value, list | tuple) and value:
        value = value[-1]
    return value if isinstance(value, int) and value > 0 else 1


def _candidates(stated: Packing) -> Iterator[Packing]:
    """Yield layouts of a patch and orders of patches, those that the configuration states first."""
    group_sides = dict.fromkeys([stated.unit, *range(1, _MAX_GROUP_SIDE + 1)])
    forms = [("cthw", n_frames) for n_frames in dict.fromkeys([stated.frames, 1, 2])]
    forms += [("image", 1), ("sequence", 1), ("hwc", 1)]
    for form, n_frames in forms:
        for side in group_sides:
            yield replace(
                stated,
                form=form,
                frames=n_frames,
                merge=side,
                unit=math.lcm(stated.unit, side),
            )


def _positions(module: nn.Module, packing: Packing, grid: Grid) -> list[Tensor]:
    """Return the arguments with numbers per token that the first attention, and the modules around
    it, get beside their first argument.

    Args:
        module: a tower of packed patches.
        packing: layout and order that it is tried with.
        grid: (rows, cols) of patches of the images that it is tried on.

    Returns:
        (images, rows, cols, numbers) each, where a token stands at the patch that the first
        argument's token was made of.

    Raises:
        RuntimeError: the tower computes no attention, or refuses the patches.
    """
    codes = Codes(grid)
    n_images = len(codes.cells)
    n_tokens = n_images * math.prod(grid)
    # A list per module that was entered and not left: the first attention ends the forward pass,
    # so that those of the modules around it remain.
    tables_by_depth: list[list[Tensor]] = []

    def enter(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Append a list with the module's arguments of one axis of tokens."""
        first = input_tensor(args, kwargs)
        tables: list[Tensor] = []
        tables_by_depth.append(tables)
        order: Order | None = None
        for x in _flat_tensors([*args, *kwargs.values()]):
            if x is first or list(x.shape).count(n_tokens) != 1:
                continue
            if order is None and first is not None:  # costs a search, so only when needed
                order = order_of(first, codes)
            if order is not None and order.grid == grid:
                token_axis = list(x.shape).index(n_tokens)
                table = x.movedim(token_axis, 0).reshape(n_tokens, -1).double()
                on_grid = Order(grid, order.index, 0).to_grid_order(table)
                tables.append(on_grid.reshape(n_images, *grid, -1))

    def leave(*_: Any) -> None:
        """Drop the list of a module that has returned."""
        tables_by_depth.pop()

    args, kwargs = _pack_inputs(packing, codes.images(packing), {})
    try:
        with hooked(module, enter, leave), torch.no_grad(), FirstAttention():
            module.forward(*args, **kwargs)
    except ForwardEnded:
        return [table for tables in tables_by_depth for table in tables]
    raise RuntimeError("it computes no attention")


def _flat_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _flat_tensors(value)


def _are_by_row_and_column(tables: list[Tensor]) -> bool:
    """Return whether each channel depends on the row alone or on the column alone, some on each,
    and none on the image.

    tables: (images, rows, cols, numbers) each.
    """
    row_matters = False
    col_matters = False
    for table in tables:
        tolerance = _POSITION_TOLERANCE * max(float(table.abs().max()), 1.0)
        # (numbers,) of booleans
        by_row = (table - table[:, :1]).abs().amax((0, 1, 2)) > tolerance
        by_col = (table - table[:, :, :1]).abs().amax((0, 1, 2)) > tolerance
        by_image = bool((table - table[:1]).abs().amax() > tolerance)
        if bool((by_row & by_col).any()) or by_image:
            return False
        row_matters |= bool(by_row.any())
        col_matters |= bool(by_col.any())
    return row_matters and col_matters
