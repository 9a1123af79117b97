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

# Arguments that hold the grid of each image -> how many numbers an image has there.
GRIDS = {"grid_thw": 3, "image_grid_thw": 3, "grid_hws": 2, "grid_hw": 2}
# Arguments that hold the side of the groups in which patches come.
MERGES = ("merge_sizes", "image_merge_sizes")
ATTRIBUTE = "_vitsee_packing"
PART = "language-in"  # what stands behind `#`, and the name of the site
FEATURES = "get_image_features"
# Of classes that cut an image into tiles: the argument with its size, the method that joins tiles.
SIZES = "image_sizes"
JOINS = "pack_image_features"
_LANGUAGE_INPUT_MARK = "_vitsee_language_input"


@dataclass(frozen=True)
class Packing:
    """How a tower takes images as packed patches.

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
        channels: the number of channels of an image.
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
        """Number of pixels that both sides of an image are multiples of."""
        return self.patch * self.unit

    def grid(self, size: tuple[int, int]) -> Grid:
        """Return (rows, cols) of patches of an image of a size in pixels.

        Raises:
            ValueError: a side is not a multiple of `step`.
        """
        if any(n < self.step or n % self.step for n in size):
            raise ValueError(
                f"{self.unit} x {self.unit} patches of {self.patch} pixels are merged, "
                f"which do not divide them (a multiple of {self.step}, as "
                f"{self.nearest(size[0])})"
            )
        return size[0] // self.patch, size[1] // self.patch

    def nearest(self, length: int) -> int:
        """Return the multiple of `step` nearest to a length in pixels, `step` at least."""
        return max(round(length / self.step), 1) * self.step

    def pack(self, images: Tensor) -> Tensor:
        """Return the patches of images (images, channels, rows, cols), in the layout of `form`.

        All images' patches lie on one axis, image by image, group by group, and row by row within
        a group.
        """
        n, channels, height, width = images.shape
        rows, cols = self.grid((height, width))
        side = self.merge
        patch = self.patch
        groups_down = rows // side
        groups_across = cols // side
        cut = images.reshape(
            n, channels, groups_down, side, patch, groups_across, side, patch
        )
        # -> (images, group rows, group cols, rows in the group, cols in the group, channels,
        #     pixel rows, pixel cols)
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)
        patches = cut.reshape(n * rows * cols, channels, patch, patch)
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
        """Return the tower's arguments beside the patches, by name.

        grid: (rows, cols) of patches, the same for all images.
        """
        n_numbers = GRIDS[self.grids]
        image_grid = [1, *grid][-n_numbers:]  # one frame, rows, cols; or rows, cols
        grids = torch.tensor([image_grid], device=device).expand(n_images, -1)
        arguments = {self.grids: grids.contiguous()}
        if self.merges:
            arguments[self.merges] = torch.full((n_images,), self.merge, device=device)
        return arguments


def packing_of(module: nn.Module) -> Packing | None:
    """Return how images are packed for a module, None for modules that take them in a batch."""
    return getattr(module, ATTRIBUTE, None)


def packed_inputs(module: nn.Module | type) -> list[str] | None:
    """Return the arguments that a tower of packed patches needs beside them, the grids' first; None
    for other modules and classes."""
    parameters = inspect.signature(module.forward).parameters  # type: ignore[union-attr]
    grids = [name for name in GRIDS if name in parameters]
    if not grids:
        return None
    return [*grids, *(name for name in MERGES if name in parameters)]


def computes_language_input(module: nn.Module) -> bool:
    """Return whether `take_features` has made a module compute a language model's input."""
    return hasattr(module, _LANGUAGE_INPUT_MARK)


def image_config(module: nn.Module) -> Any:
    """Return the configuration of the module that sees images, None where there is none."""
    config = getattr(module, "config", None)
    if computes_language_input(module):
        return getattr(config, "vision_config", config)
    return config


def patch_side(module: nn.Module) -> int:
    """Return the side of a patch in pixels.

    Raises:
        ModelError: the configuration of the module that sees images states none.
    """
    patch_size = getattr(image_config(module), "patch_size", None)
    side = patch_size
    if isinstance(patch_size, list | tuple) and len({*patch_size}) == 1:
        side = patch_size[0]
    if not isinstance(side, int) or side < 1:
        raise ModelError(
            f"the vision part of {type(module).__name__} has patch_size {patch_size}; "
            "expected the side of a square"
        )
    return side


def drop_language_model(module: nn.Module) -> None:
    """Delete the child with the embeddings of words from a model of images and text.

    Raises:
        ModelError: no child has them.
    """
    try:
        word_embeddings = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        word_embeddings = None
    names = []
    for name, child in module.named_children():
        if any(descendant is word_embeddings for descendant in child.modules()):
            names.append(name)
    if not names:
        raise ModelError(
            f"{type(module).__name__} has no language model, so nothing is what one "
            "receives; expected one of its towers"
        )
    for name in names:
        delattr(module, name)


def take_features(module: Any, features_of_images: Callable[..., Any]) -> None:
    """Make `get_image_features` the forward pass of a module, which gets a mark.

    features_of_images: `get_image_features` of a class that does not cut images into tiles; it
        replaces that of a class which joins tiles.
    """
    joins_tiles = hasattr(module, JOINS) and _requires(module.get_image_features, SIZES)
    module.forward = module.get_image_features
    if joins_tiles:
        module.forward = features_of_images.__get__(module)
    setattr(module, _LANGUAGE_INPUT_MARK, True)


def input_hook(module: nn.Module, size: tuple[int, int]) -> Callable[..., Any]:
    """Return a hook before the forward pass that makes its arguments from a batch of images.

    Images are (images, channels, rows, cols). Some classes take (images, pictures of each,
    channels, rows, cols): a forward pass of one image shows it.

    size: (rows, cols) of that image, in pixels.
    """
    needs_sizes = _requires(module.forward, SIZES)
    has_picture_axis = False

    def make_inputs(
        images: Tensor, kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return (args, kwargs) of the forward pass."""
        kwargs = dict(kwargs)
        if needs_sizes:
            image_size = torch.tensor([[*images.shape[2:]]], device=images.device)
            kwargs[SIZES] = image_size.expand(len(images), 2)
        if has_picture_axis:
            images = images.unsqueeze(1)  # (images, 1, channels, rows, cols)
        return (images,), kwargs

    parameter = next(module.parameters())
    image = torch.ones(1, 3, *size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad():
            args, kwargs = make_inputs(image, {})
            module.forward(*args, **kwargs)
    except ValueError as error:  # Python's, of five names for a shape of four axes
        has_picture_axis = "unpack" in str(error)
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError):
        pass  # what is wrong shows again where there are values

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return (args, kwargs) of the forward pass for a batch of images."""
        return make_inputs(args[0], kwargs)

    return hook


def tokens(output: Any) -> Any:
    """Return the tokens of all images, (tokens, dim), in an output of `get_image_features`: a
    tensor, or one per image, or an object that has either as `pooler_output`.

    Another output is returned as it is.
    """
    features = output
    if not isinstance(output, Tensor | tuple | list):
        features = getattr(output, "pooler_output", None)
    if isinstance(features, tuple | list):
        if all(isinstance(x, Tensor) for x in features):
            return torch.cat([x.reshape(-1, x.shape[-1]) for x in features])
        return output
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return output


def _requires(forward: Any, name: str) -> bool:
    """Return whether a function has a parameter without a default."""
    parameter = inspect.signature(forward).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty
