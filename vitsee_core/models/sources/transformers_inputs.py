"""How a batch of images becomes what a class of transformers takes, and its output one tensor.

Of a tower of packed patches this is recognised on numbers. The shape of a patch is the one that its
first layer takes; their order (row by row, or by groups that a merger joins later) the one in which
each channel of the positions that its blocks get depends on the row alone, or on the column alone,
of the patch that the token beside it was made of.
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
    image_config,
    is_language_input,
    packed_inputs,
)

# What of a model's output stands for it: the first that is there.
OUTPUTS = ("logits", "last_hidden_state", "image_embeds", "feature_maps")
_INTERPOLATE = "interpolate_pos_encoding"
# What `adapt` makes of images.
_MADE = ("pixel_attention_mask", "spatial_shapes")
# What configurations call the side of a group, and the frames of a patch.
_UNITS = (
    "spatial_merge_size",
    "merge_size",
    "merge_kernel_size",
    "spatial_merge_kernel_size",
)
_FRAMES = "temporal_patch_size"
_CHANNELS = ("in_channels", "num_channels", "in_chans")
_MOST_MERGED = 4
# Of the positions' largest number: rounding of sines.
_LEVEL = 1e-5
_ERRORS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


def refuse_others(kind: Any, name: str) -> None:
    """Refuse a class, or a module, that needs more than images, or than their patches and grids,
    with a ModelError."""
    taken = inspect.signature(kind.forward).parameters.values()
    plain = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    made = {*_MADE, *(packed_inputs(kind) or ())}
    if is_language_input(kind):
        made.add(towers.SIZES)
    more = [p.name for p in plain[1:] if p.default is p.empty and p.name not in made]
    if more:
        raise ModelError(
            f"{name} takes {plain[0].name} with {', '.join(more)}; expected a model that takes a "
            "batch of images alone"
        )


def adapt(
    module: nn.Module, resized: bool, name: str, size: tuple[int, int] | None = None
) -> None:
    """Let the module take a batch of images alone, and give one tensor.

    Positions are interpolated where images are `resized` and the class does so when asked. A class
    that draws which patches it sees (ViT-MAE) sees them in their order. A class that takes patches
    with a mask and the shape of their grid (SigLIP 2 NaFlex) gets those of the whole image; one
    that takes the patches of all images with their grids (Qwen-VL's towers) these. size: of the
    images, (rows, cols), for what makes a language model's input.

    Raises:
        ModelError: of such a class `name` the order of patches is not found.
    """
    taken = inspect.signature(module.forward).parameters
    whole = is_language_input(module)
    asked = [child.forward for child in module.children()] if whole else [module.forward]
    interpolates = any(_INTERPOLATE in inspect.signature(one).parameters for one in asked)
    given = {_INTERPOLATE: True} if interpolates else {}
    # The predictor of V-JEPA 2 is not its encoder.
    always = {"skip_predictor": True} if "skip_predictor" in taken else {}

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        images, *rest = args
        kwargs = {**always, **(given if resized else {}), **kwargs}
        if "noise" in taken:
            n = (images.shape[-2] // sides[0]) * (images.shape[-1] // sides[1])
            kwargs["noise"] = torch.arange(n, device=images.device).expand(len(images), n)
        if "spatial_shapes" in taken and images.ndim == 4:
            images, more = as_patches(images, sides)
            kwargs = {**kwargs, **more}
        return (images, *rest), kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output
        named = output if isinstance(output, Mapping) else {}
        found = [named[key] for key in OUTPUTS if isinstance(named.get(key), Tensor)]
        return found[0] if found else output

    sides = pair(getattr(image_config(module), "patch_size", None) or 16)
    if packed_inputs(module):
        accept_images(module, name)
    else:
        module.register_forward_pre_hook(enter, with_kwargs=True)
    if not whole:
        module.register_forward_hook(leave)
        return
    if size is not None and not packed_inputs(module) and "spatial_shapes" not in taken:
        before = towers.enter(module, size)
        module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _m, _a, output: towers.tokens(output))


def as_patches(
    images: Tensor, sides: tuple[int, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(images, patches, rows x cols x channels) of images (images, channels, rows, cols), patches
    and the pixels of each row by row; and `pixel_attention_mask` and `spatial_shapes` of them.

    Raises:
        ValueError: the patches do not divide the image.
    """
    n, channels, *size = images.shape
    rows, cols = (length // side for length, side in zip(size, sides, strict=True))
    if (rows * sides[0], cols * sides[1]) != tuple(size):
        raise ValueError(f"patches of {sides[0]} x {sides[1]} pixels do not divide them")
    cut = images.reshape(n, channels, rows, sides[0], cols, sides[1])
    patches = cut.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * cols, -1)
    return patches, {
        "pixel_attention_mask": torch.ones(
            n, rows * cols, dtype=torch.long, device=images.device
        ),
        "spatial_shapes": torch.tensor([[rows, cols]], device=images.device).expand(n, 2),
    }


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
        patch,
        frames=frames,
        unit=unit,
        grids=grids[0],
        merges=next((name for name in grids if name in MERGES), ""),
        channels=next((n for key in _CHANNELS if (n := getattr(config, key, None))), 3),
    )
    if next(module.parameters()).is_meta:
        return replace(packing, merge=unit)  # `find_orders` asks for values
    taken = False
    refused = ""
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
    for form, n in (
        *(("cthw", n) for n in frames),
        ("image", 1),
        ("sequence", 1),
        ("hwc", 1),
    ):
        for merge in merges:
            unit = math.lcm(packing.unit, merge)
            yield replace(packing, form=form, frames=n, merge=merge, unit=unit)


def _positions(module: nn.Module, packing: Packing, grid: Grid) -> list[Tensor]:
    """The arguments with a value for each token that the first attention, and the modules that it
    is in, get beside their first one, for images of this grid of patches: (images, rows, cols,
    numbers) each, in the order of the first argument's tokens."""
    codes = Codes(grid)
    n_tokens = len(codes.cells) * math.prod(grid)
    opened: list[list[Tensor]] = []  # of each module that was entered and not left

    def enter(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        first = input_tensor(args, kwargs)
        found = list[Tensor]()
        opened.append(found)
        order: Order | None = None
        for x in _flat([*args, *kwargs.values()]):
            if x is first or list(x.shape).count(n_tokens) != 1:
                continue
            order = order or (None if first is None else order_of(first, codes))
            if order is not None and order.grid == grid:
                table = x.movedim(list(x.shape).index(n_tokens), 0).reshape(n_tokens, -1)
                laid = Order(grid, order.index, 0).to_grid_order(table.double())
                found.append(laid.reshape(len(codes.cells), *grid, -1))

    def leave(*_: Any) -> None:
        opened.pop()

    args, kwargs = _given(packing, codes.images(packing), {})
    try:
        with hooked(module, enter, leave), torch.no_grad(), FirstAttention():
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
