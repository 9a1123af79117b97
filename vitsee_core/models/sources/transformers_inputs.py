"""How a batch of images becomes what a class of transformers takes, and its output one tensor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models import language_input
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.language_input import image_config, is_language_input
from vitsee_core.models.packed_towers import accept_images
from vitsee_core.models.packing import packed_inputs
from vitsee_core.models.sources.own_transform import pair

# What of a model's output stands for it: the first that is there.
OUTPUTS = ("logits", "last_hidden_state", "image_embeds", "feature_maps")
_INTERPOLATE = "interpolate_pos_encoding"
# What `adapt` makes of images.
_MADE = ("pixel_attention_mask", "spatial_shapes")


def refuse_others(kind: Any, name: str) -> None:
    """Refuse a class, or a module, that needs more than images, or than their patches and grids,
    with a ModelError."""
    taken = inspect.signature(kind.forward).parameters.values()
    plain = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    made = {*_MADE, *(packed_inputs(kind) or ())}
    if is_language_input(kind):
        made.add(language_input.SIZES)
    more = [p.name for p in plain[1:] if p.default is p.empty and p.name not in made]
    if more:
        raise ModelError(
            f"{name} takes {plain[0].name} with {', '.join(more)}; expected a model that takes a "
            "batch of images alone"
        )


def adapt(module: nn.Module, resized: bool, name: str, size: tuple[int, int] | None = None) -> None:
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
        before = language_input.enter(module, size)
        module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _m, _a, output: language_input.tokens(output))


def as_patches(images: Tensor, sides: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor]]:
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
        "pixel_attention_mask": torch.ones(n, rows * cols, dtype=torch.long, device=images.device),
        "spatial_shapes": torch.tensor([[rows, cols]], device=images.device).expand(n, 2),
    }
