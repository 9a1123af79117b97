"""The part of a model of images and text that makes what its language model receives: the tower and
what lies between both (a projector, pixel shuffle, pooling), with the library's own
`get_image_features` as its forward pass.

That takes images in one of several ways, and gives their tokens in one of several shapes; here they
go in as a batch, and come out as (tokens of all images one after another, dim).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError

PART = "language-in"  # behind `#`, and the site
FEATURES = "get_image_features"
# What those of classes that take an image in tiles need to know of it, and what joins the tiles.
SIZES, JOINS = "image_sizes", "pack_image_features"
_ATTRIBUTE = "_vitsee_language_input"


def is_language_input(module: nn.Module) -> bool:
    """Whether a module is what `take_features` made."""
    return hasattr(module, _ATTRIBUTE)


def image_config(module: nn.Module) -> Any:
    """The configuration of what sees images, None where a module has none."""
    config = getattr(module, "config", None)
    return getattr(config, "vision_config", config) if is_language_input(module) else config


def patch_side(module: nn.Module) -> int:
    """Rows and columns of a patch in pixels.

    Raises:
        ModelError: the configuration of what sees images states none.
    """
    stated = getattr(image_config(module), "patch_size", None)
    side = stated[0] if isinstance(stated, list | tuple) and len({*stated}) == 1 else stated
    if not isinstance(side, int) or side < 1:
        raise ModelError(
            f"the vision part of {type(module).__name__} has patch_size {stated}; expected the "
            "side of a square"
        )
    return side


def drop_language_model(module: nn.Module) -> None:
    """Take the part with the embeddings of words out of a model of images and text.

    Raises:
        ModelError: no part has them.
    """
    try:
        words = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        words = None
    found = [n for n, child in module.named_children() if any(m is words for m in child.modules())]
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no language model, so nothing is what one receives; "
            "expected one of its towers"
        )
    for name in found:
        delattr(module, name)


def take_features(module: Any, of_one_image: Callable[..., Any]) -> None:
    """Make `get_image_features` the forward pass. `of_one_image`: the same of a class whose images
    are one each, for a class that joins an image's tiles."""
    joins = hasattr(module, JOINS) and _needs(module.get_image_features, SIZES)
    module.forward = of_one_image.__get__(module) if joins else module.get_image_features
    setattr(module, _ATTRIBUTE, True)


def enter(module: nn.Module, size: tuple[int, int]) -> Callable[..., Any]:
    """A hook before the forward pass that makes its arguments from a batch of images (images,
    channels, rows, cols); which one is decided on an image of this size."""
    sizes = _needs(module.forward, SIZES)

    def given(images: Tensor, kwargs: Mapping[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        more = dict(kwargs)
        if sizes:
            own = torch.tensor([[*images.shape[2:]]], device=images.device)
            more[SIZES] = own.expand(len(images), 2)
        return (images.unsqueeze(1) if several else images,), more

    several, parameter = False, next(module.parameters())
    image = torch.ones(1, 3, *size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad():
            args, kwargs = given(image, {})
            module.forward(*args, **kwargs)
    except ValueError as error:  # (images, pictures of each, channels, rows, cols) = shape
        several = "unpack" in str(error)
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError):
        several = False  # what is wrong shows again where there are values

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return given(args[0], kwargs)

    return hook


def tokens(output: Any) -> Any:
    """The tokens of all images, (tokens, dim), of what `get_image_features` gives; what it gives
    where that has none."""
    found = output if isinstance(output, Tensor | tuple | list) else None
    found = getattr(output, "pooler_output", None) if found is None else found
    if isinstance(found, tuple | list) and all(isinstance(x, Tensor) for x in found):
        return torch.cat([x.reshape(-1, x.shape[-1]) for x in found])
    if isinstance(found, Tensor):
        return found.flatten(0, -2)
    return output


def _needs(forward: Any, name: str) -> bool:
    parameter = inspect.signature(forward).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty
