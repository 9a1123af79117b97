"""Native resolution: which rule and bounds give the sizes to which a processor brings images, and
in which numbers vitsee prepares images as it does.

The processor is called on images of few pixels, with small bounds, and the sizes that it makes are
compared with those of each rule of `Canvas`; what it makes of random pixels with what vitsee's own
resize makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitsee_core.images.transform import make_recipe
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import quiet
from vitsee_core.models.sources.processor_record import (
    SizeRule,
    processor_config,
    size_rules,
)
from vitsee_core.models.sources.processors import PATCH_KEYS, TOLERANCE, Processor
from vitsee_core.models.tokens.towers import GRIDS
from vitsee_stores.plan import Canvas, Size

# Sides of trial images in multiples of a group of patches: within the small bounds, with halves,
# below and above them, and thin ones.
_TRIAL_SIDES = (
    (3.3, 5.7),
    (1.5, 6.5),
    (2.5, 3.5),
    (1.2, 1.4),
    (12.7, 9.1),
    (1.1, 14.2),
    (7.3, 4.1),
)
# The last ones are tried with the processor's own bounds, too.
_N_OWN_BOUNDS = 2
_PIXEL_TRIAL_SIDES = (4.3, 6.6)
# Small bounds in groups of patches: trials cost few pixels.
_MIN_GROUPS = 6
_MAX_GROUPS = 36
_GRID_KEYS = (*GRIDS, "spatial_shapes")
# What processors raise on images, or on arguments, that they do not take.
_REFUSALS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


def native_canvas(
    processor: Processor, patch: int, step: int, pack: Callable[[Tensor], Tensor]
) -> tuple[Canvas, dict[str, Any]]:
    """Return how vitsee prepares images as a processor does at native resolution.

    Args:
        processor: of a tower of packed or padded patches.
        patch: side of a patch in pixels.
        step: number of pixels that sides of images are multiples of.
        pack: (1, channels, rows, cols) -> the patches that the tower gets.

    Returns:
        The canvas, still without a size; and interpolation, processor, mean and std.

    Raises:
        ModelError: no rule gives the processor's sizes, or no way of resizing its pixels.
    """
    for rule in size_rules(processor.record, patch, step):
        if _gives_sizes(rule, processor, patch, step):
            return rule.canvas, _find_numbers(processor, rule, step, pack)
    raise ModelError(
        f"the image processor of {processor.name} brings images to sizes that neither "
        "bounds of pixels nor of patches give, so their native resolution is not known; "
        "leave out --native"
    )


def canvas_transform(canvas: Canvas) -> dict[str, Any]:
    """Return the entries of a transform that say how images come to lie on a canvas."""
    entries = {
        "crop_mode": canvas.crop_mode,
        "short_side": canvas.short_side,
        "multiple": canvas.multiple,
        "min_pixels": canvas.min_pixels,
        "max_pixels": canvas.max_pixels,
    }
    return {key: value for key, value in entries.items() if value is not None}


def _with_small_bounds(rule: SizeRule, step: int) -> tuple[Canvas, dict[str, Any]]:
    """Return a rule's canvas with small bounds, and the arguments that give them to the
    processor."""
    least = _MIN_GROUPS * step**2
    most = _MAX_GROUPS * step**2
    has_least = rule.canvas.min_pixels is not None
    canvas = replace(
        rule.canvas, min_pixels=least if has_least else None, max_pixels=most
    )
    return canvas, rule.bound_arguments(least * rule.scale, most * rule.scale)


def _gives_sizes(rule: SizeRule, processor: Processor, patch: int, step: int) -> bool:
    """Return whether a rule gives the processor's sizes for the trial images."""
    small_canvas, small_bounds = _with_small_bounds(rule, step)
    trials = [(small_canvas, small_bounds, sides) for sides in _TRIAL_SIDES]
    for sides in _TRIAL_SIDES[-_N_OWN_BOUNDS:]:
        trials.append((rule.canvas, {}, sides))
    for canvas, arguments, (n_rows, n_cols) in trials:
        size = round(n_rows * step), round(n_cols * step)
        image = np.zeros((*size, 3), np.uint8)
        output = _process(processor, image, arguments)
        if output is None or _output_size(output, patch) != canvas.image(size):
            return False
    return True


def _find_numbers(
    processor: Processor, rule: SizeRule, step: int, pack: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return the numbers with which vitsee's pixels are those of the processor.

    Raises:
        ModelError: none are.
    """
    numbers = processor_config(processor.record, processor.name, any_size=True)
    canvas, bounds = _with_small_bounds(rule, step)
    n_rows, n_cols = _PIXEL_TRIAL_SIDES
    size = round(n_rows * step), round(n_cols * step)
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    output = _process(processor, image, bounds)
    assert output is not None  # `_gives_sizes` has tried such sizes
    key = next(key for key in PATCH_KEYS if key in output)
    patches = output[key].reshape(-1).float()
    mean = torch.tensor(numbers["mean"]).view(-1, 1, 1)
    std = torch.tensor(numbers["std"]).view(-1, 1, 1)
    differences = []
    for resizing, rounding in processor.resizing_candidates(numbers):
        config = {**canvas_transform(canvas), **numbers, "processor": resizing}
        config["input_size"] = (3, *canvas.image(size))
        config["crop_mode"] = canvas.crop_mode
        pixels = torch.tensor(make_recipe(config).apply(Image.fromarray(image)))
        expected = pack(((pixels / 255 - mean) / std).unsqueeze(0)).reshape(-1)
        if len(expected) <= len(patches):  # the rest is padding
            difference = float((patches[: len(expected)] - expected).abs().max())
            if difference <= rounding + TOLERANCE * max(1.0, float(expected.abs().max())):
                return {**numbers, "processor": resizing}
            differences.append(difference)
    deviation = "in their number"
    if differences:
        deviation = f"by up to {min(differences):.2g}"
    raise ModelError(
        f"the image processor of {processor.name} does more than resize and normalise: "
        f"its pixels at native resolution differ {deviation} from what it says; leave "
        f"out --native"
    )


def _process(processor: Processor, image: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the processor's output for an image, None where it refuses image or arguments."""
    with quiet(), warnings.catch_warnings():  # transformers' remarks on arguments
        warnings.simplefilter("ignore")
        try:
            return processor.library_object(
                images=[image], return_tensors="pt", **arguments
            )
        except _REFUSALS:
            return None


def _output_size(output: Any, patch: int) -> Size | None:
    """Return (rows, cols) in pixels of the image in a processor's output, None where that has no
    grid, or has cut the image into several."""
    grids = next((output[key] for key in _GRID_KEYS if key in output), None)
    if grids is None or len(grids) != 1:
        return None
    rows, cols = (int(n) for n in grids[0][-2:])
    return rows * patch, cols * patch
