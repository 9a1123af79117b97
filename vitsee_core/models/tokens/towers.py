"""Vision parts of larger models: how images go into a tower of packed patches, and what a
language model receives.

Packed are the patches of all images of a batch, one after another without a batch axis, with the
grid of each image beside them. What leads to a language model is the tower and what lies between
both (a projector, pixel shuffle, pooling), with the library's own `get_image_features` as its
forward pass. That takes images in one of several ways, and gives their tokens in one of several
shapes; here they go in as a batch, and come out as (tokens of all images one after another, dim).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError

Grid = tuple[int, int]  # rows and columns of cells


# Arguments that say the grid of each image, and how many numbers an image has there; the one that
# says in how large groups patches come.
GRIDS = {"grid_thw": 3, "image_grid_thw": 3, "grid_hws": 2, "grid_hw": 2}
MERGES = ("merge_sizes", "image_merge_sizes")
ATTRIBUTE = "_vitsee_packing"
PART = "language-in"  # behind `#`, and the site
FEATURES = "get_image_features"
# What those of classes that take an image in tiles need to know of it, and what joins the tiles.
SIZES = "image_sizes"
JOINS = "pack_image_features"
_LANGUAGE = "_vitsee_language_input"


@dataclass(frozen=True)
class Packing:
    """How images become patches.

    Attributes:
        patch: rows and columns of a patch, in pixels.
        frames: the number of frames to which a still image is repeated.
        merge: patches come in groups of merge x merge, row by row within a group.
        unit: numbers of rows and columns of a grid are multiples of it.
        form: the layout of a patch: "cthw" (one row, channels outermost), "hwc" (one row, channels
            innermost), "image" (channels, rows, cols), or "sequence" (as "image", with a leading
            axis of length 1).
        grids: name of the argument that holds the grids, `grid_thw` or another.
        merges: name of the argument that takes `merge` of each image, "" where there is none.
    """

    patch: int
    frames: int = 1
    merge: int = 1
    unit: int = 1
    form: str = "cthw"
    grids: str = "grid_thw"
    merges: str = ""
    channels: int = 3

    @property
    def step(self) -> int:
        """A size is a multiple of so many pixels."""
        return self.patch * self.unit

    def grid(self, size: tuple[int, int]) -> Grid:
        """Rows and columns of patches of an image of this size.

        Raises:
            ValueError: it is no multiple of `step`.
        """
        if any(n < self.step or n % self.step for n in size):
            raise ValueError(
                f"{self.unit} x {self.unit} patches of {self.patch} pixels are merged, which do "
                f"not divide them (a multiple of {self.step}, as {self.nearest(size[0])})"
            )
        return size[0] // self.patch, size[1] // self.patch

    def nearest(self, length: int) -> int:
        """The multiple of `step` nearest to a length in pixels."""
        return max(round(length / self.step), 1) * self.step

    def pack(self, images: Tensor) -> Tensor:
        """Patches of images (images, channels, rows, cols)."""
        n, channels, *size = images.shape
        (rows, cols), m, p = self.grid((size[0], size[1])), self.merge, self.patch
        cut = images.reshape(n, channels, rows // m, m, p, cols // m, m, p)
        cut = cut.permute(
            0, 2, 5, 3, 6, 1, 4, 7
        )  # image, group, in the group, channel, pixel
        patches = cut.reshape(n * rows * cols, channels, p, p)
        if self.form == "hwc":
            return patches.permute(0, 2, 3, 1).flatten(1)
        if self.form == "cthw":
            return patches.unsqueeze(2).expand(-1, -1, self.frames, -1, -1).flatten(1)
        if self.form == "sequence":
            return patches.unsqueeze(0)
        return patches

    def arguments(
        self, n_images: int, grid: Grid, device: torch.device
    ) -> dict[str, Tensor]:
        """The tower's arguments beside the patches, by name."""
        one = [1, *grid][-GRIDS[self.grids] :]
        found = {
            self.grids: torch.tensor([one], device=device)
            .expand(n_images, -1)
            .contiguous()
        }
        if self.merges:
            found[self.merges] = torch.full((n_images,), self.merge, device=device)
        return found


def packing_of(module: nn.Module) -> Packing | None:
    """How a module takes images, where they are packed for it."""
    return getattr(module, ATTRIBUTE, None)


def packed_inputs(module: nn.Module | type) -> list[str] | None:
    """The arguments that a tower of packed patches needs beside these; None for other modules."""
    taken = inspect.signature(module.forward).parameters  # type: ignore[union-attr]
    grids = [name for name in GRIDS if name in taken]
    if grids:
        return [*grids, *(name for name in MERGES if name in taken)]
    return None


def is_language_input(module: nn.Module) -> bool:
    """Whether a module is what `take_features` made."""
    return hasattr(module, _LANGUAGE)


def image_config(module: nn.Module) -> Any:
    """The configuration of what sees images, None where a module has none."""
    config = getattr(module, "config", None)
    if is_language_input(module):
        return getattr(config, "vision_config", config)
    return config


def patch_side(module: nn.Module) -> int:
    """Rows and columns of a patch in pixels.

    Raises:
        ModelError: the configuration of what sees images states none.
    """
    stated = getattr(image_config(module), "patch_size", None)
    side = (
        stated[0] if isinstance(stated, list | tuple) and len({*stated}) == 1 else stated
    )
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
    found = [
        n
        for n, child in module.named_children()
        if any(m is words for m in child.modules())
    ]
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
    setattr(module, _LANGUAGE, True)


def enter(module: nn.Module, size: tuple[int, int]) -> Callable[..., Any]:
    """A hook before the forward pass that makes its arguments from a batch of images (images,
    channels, rows, cols); which one is decided on an image of this size."""
    sizes = _needs(module.forward, SIZES)

    def given(
        images: Tensor, kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        more = dict(kwargs)
        if sizes:
            own = torch.tensor([[*images.shape[2:]]], device=images.device)
            more[SIZES] = own.expand(len(images), 2)
        return (images.unsqueeze(1) if several else images,), more

    several = False
    parameter = next(module.parameters())
    image = torch.ones(1, 3, *size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad():
            args, kwargs = given(image, {})
            module.forward(*args, **kwargs)
    except (
        ValueError
    ) as error:  # (images, pictures of each, channels, rows, cols) = shape
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
