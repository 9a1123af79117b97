"""Native resolution: the sizes to which an image processor of transformers brings images, as a rule
and bounds that are proven to give its own sizes, and its pixels.

A processor is called on images of few pixels, with small bounds, and the sizes that it makes are
compared with those of each rule of `Canvas`; what it makes of random pixels is compared with what
vitsee's own resize makes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitsee_core.images.transform import make_recipe
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.packing import GRIDS
from vitsee_core.models.sources.processors import TOLERANCE, Processor, processor_config
from vitsee_stores.plan import Canvas, Size

# Sides of images in multiples of a group of patches: within the small bounds, with halves, below
# and above them, thin ones; the last ones are tried with the processor's own bounds, too.
_SIDES = ((3.3, 5.7), (1.5, 6.5), (2.5, 3.5), (1.2, 1.4), (12.7, 9.1), (1.1, 14.2), (7.3, 4.1))
_LEAST, _MOST = 6, 36  # small bounds, in groups of patches
_GRIDS = (*GRIDS, "spatial_shapes")
_REFUSALS = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)
_VALUES = ("pixel_values", "pixel_values_images")


@dataclass(frozen=True)
class _Bounds:
    """canvas: the rule with the processor's own bounds; call: the arguments that give a processor
    other ones, made of these (least, most) in pixels; scale: its bounds over those in pixels."""

    canvas: Canvas
    call: Callable[[int, int], dict[str, Any]]
    scale: int = 1


def native_canvas(
    processor: Processor, patch: int, step: int, pack: Callable[[Tensor], Tensor]
) -> tuple[Canvas, dict[str, Any]]:
    """The canvas, still without a size, and interpolation, processor, mean and std, with which
    vitsee prepares images as the processor does at native resolution.

    Args:
        processor: of a tower of packed or padded patches.
        patch: side of a patch in pixels.
        step: sides are multiples of so many pixels.
        pack: patches of images (1, channels, rows, cols), as the tower gets them.

    Raises:
        ModelError: no rule gives its sizes, or no way of resizing its pixels.
    """
    for bounds in _stated(processor.record, patch, step):
        if _same_sizes(processor, bounds, patch, step):
            return bounds.canvas, _proven(processor, bounds, step, pack)
    raise ModelError(
        f"the image processor of {processor.name} brings images to sizes that neither bounds of "
        "pixels nor of patches give, so their native resolution is not known; leave out --native"
    )


def _stated(record: Mapping[str, Any], patch: int, step: int) -> Iterator[_Bounds]:
    """The rules that a processor's record may mean."""
    size = record.get("size") or {}
    named = [("size", size.get("shortest_edge"), size.get("longest_edge"))]
    named.append(("pixels", record.get("min_pixels"), record.get("max_pixels")))
    for name, least, most in named:
        if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
            continue
        # GLM-4V's bounds are those of the frames to which a still image is repeated.
        for scale in dict.fromkeys((1, record.get("temporal_patch_size") or 1)):
            canvas = _canvas("pixels", step, least // scale, most // scale)
            yield _Bounds(canvas, _by_edges if name == "size" else _by_pixels, scale)
    n = record.get("max_num_patches")
    if isinstance(n, int) and n > 0 and patch == step:
        most = n * patch**2
        yield _Bounds(_canvas("patches", patch, None, most), lambda _, most: {
            "max_num_patches": most // patch**2
        })  # fmt: skip


def _canvas(rule: str, multiple: int, least: int | None, most: int) -> Canvas:
    return Canvas((1, 1), None, multiple, None, rule, least, most)


def _by_edges(least: int, most: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def _by_pixels(least: int, most: int) -> dict[str, Any]:
    return {"min_pixels": least, "max_pixels": most}


def _small(bounds: _Bounds, step: int) -> tuple[Canvas, dict[str, Any]]:
    """The rule with small bounds, and the arguments that give them to the processor."""
    least, most = _LEAST * step**2, _MOST * step**2
    own = None if bounds.canvas.min_pixels is None else least
    canvas = replace(bounds.canvas, min_pixels=own, max_pixels=most)
    return canvas, bounds.call(least * bounds.scale, most * bounds.scale)


def _same_sizes(processor: Processor, bounds: _Bounds, patch: int, step: int) -> bool:
    """Whether the rule gives the processor's sizes."""
    small, call = _small(bounds, step)
    tried = [(small, call, sides) for sides in _SIDES]
    tried += [(bounds.canvas, {}, sides) for sides in _SIDES[-2:]]
    for canvas, more, sides in tried:
        size = round(sides[0] * step), round(sides[1] * step)
        made = _made(processor, np.zeros((*size, 3), np.uint8), more)
        if made is None or _size(made, patch) != canvas.image(size):
            return False
    return True


def _proven(
    processor: Processor, bounds: _Bounds, step: int, pack: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """The numbers with which vitsee's pixels are those of the processor. Raises ModelError: none
    are."""
    numbers = processor_config(processor.record, processor.name, any_size=True)
    canvas, call = _small(bounds, step)
    size = round(4.3 * step), round(6.6 * step)
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    made = _made(processor, image, call)
    assert made is not None  # of such sizes the grids were right
    found = next(made[key] for key in _VALUES if key in made).reshape(-1).float()
    mean, std = (torch.tensor(numbers[key]).view(-1, 1, 1) for key in ("mean", "std"))
    differences = []
    for way, rounding in processor.candidates(numbers):
        config = {**canvas_transform(canvas), **numbers, "processor": way}
        config["input_size"] = (3, *canvas.image(size))
        config["crop_mode"] = canvas.crop_mode
        pixels = torch.tensor(make_recipe(config).apply(Image.fromarray(image)))
        expected = pack(((pixels / 255 - mean) / std).unsqueeze(0)).reshape(-1)
        if len(expected) <= len(found):  # the rest is padding
            difference = float((found[: len(expected)] - expected).abs().max())
            if difference <= rounding + TOLERANCE * max(1.0, float(expected.abs().max())):
                return {**numbers, "processor": way}
            differences.append(difference)
    said = f"by up to {min(differences):.2g}" if differences else "in their number"
    raise ModelError(
        f"the image processor of {processor.name} does more than resize and normalise: its pixels "
        f"at native resolution differ {said} from what it says; leave out --native"
    )


def canvas_transform(canvas: Canvas) -> dict[str, Any]:
    """The entries of a transform that say how images come to lie on a canvas."""
    names = ("crop_mode", "short_side", "multiple", "min_pixels", "max_pixels")
    return {name: value for name in names if (value := getattr(canvas, name)) is not None}


def _made(processor: Processor, image: Any, more: Mapping[str, Any]) -> Any:
    """What the processor makes of an image, None where it refuses it or the arguments."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers' remarks on arguments
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return processor.own(images=[image], return_tensors="pt", **more)
    except _REFUSALS:
        return None
    finally:
        logging.disable(level)


def _size(made: Any, patch: int) -> Size | None:
    """(rows, cols) in pixels of the first image that a processor made, None where it says no
    grid, or has cut the image into several."""
    found = next((made[key] for key in _GRIDS if key in made), None)
    if found is None or len(found) != 1:
        return None
    rows, cols = (int(n) for n in found[0][-2:])
    return rows * patch, cols * patch
