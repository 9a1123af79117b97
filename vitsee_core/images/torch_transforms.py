"""A caller's own transform as a timm configuration, verified on pictures.

Stores record 8-bit pixels, their hashes and a transform in plain numbers, so that a picture can be
prepared again without anybody's code. A torchvision transform is therefore read, not stored: its
steps give a configuration, which must then produce the same input as the transform itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from vitsee_core.images.errors import DataError
from vitsee_core.images.transform import make_recipe, normalise

# Of steps that change nothing but the type, from 0..255 to 0..1 included.
_TO_TENSOR = (
    "ToTensor",
    "PILToTensor",
    "ToImage",
    "ToPureTensor",
    "ConvertImageDtype",
    "ToDtype",
)
_TIMM_TO_TENSOR = ("MaybeToTensor", "MaybePILToTensor", "ToNumpy")
_KEYS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
TOLERANCE = 1e-5  # of the model's input: float32 in another order


def transform_config(transform: Any) -> dict[str, Any]:
    """input_size (channels, rows, cols), interpolation, crop_pct, crop_mode, mean, std.

    Args:
        transform: these as a mapping, as `timm.data.resolve_model_data_config` gives them
            (input_size needed, the others by default bicubic, 1.0, center, 0 and 1); or a transform
            of torchvision's or timm's made of Resize, CenterCrop, conversions to tensors, Grayscale
            and Normalize, in this order; or torchvision's preset (`weights.transforms()`).

    Raises:
        DataError: a transform that does something else, or a configuration that timm cannot build.
    """
    if isinstance(transform, Mapping):
        config = _from_mapping(transform)
        make_recipe(config)
        return config
    config = _from_steps(transform)
    difference, largest = largest_difference(transform, config)
    if not difference <= TOLERANCE * max(1.0, largest):
        raise DataError(
            f"the transform's input differs by up to {difference:.2g} from what its steps say "
            "(resize before the conversion to a tensor, as Pillow does); or give a mapping as "
            "timm.data.resolve_model_data_config gives it"
        )
    return config


def _from_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    if "input_size" not in given:
        raise DataError(
            f"a transform needs input_size (channels, rows, cols), has {list(given)}"
        )
    default = {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
    config = {**default, "mean": (0.0,), "std": (1.0,), **given}
    try:
        size = tuple(int(n) for n in config["input_size"])
        mean, std = (tuple(float(x) for x in config[key]) for key in ("mean", "std"))
        crop_pct = float(config["crop_pct"])
    except (TypeError, ValueError) as error:
        raise DataError(f"a transform's numbers: {error}") from None
    numbers = (*mean, *std, crop_pct)
    if (
        len(size) != 3
        or min(size) < 1
        or not all(map(math.isfinite, numbers))
        or min(std) <= 0
    ):
        raise DataError(
            f"the transform has input_size {size}, mean {mean}, std {std}, crop_pct {crop_pct}; "
            "expected (channels, rows, cols), finite numbers, and std above 0"
        )
    known = {"input_size": size, "mean": mean, "std": std, "crop_pct": crop_pct}
    return {key: known.get(key, config[key]) for key in _KEYS}


def _flat(transform: Any) -> Iterator[Any]:
    import torch

    inner = getattr(transform, "transforms", None)
    if isinstance(transform, torch.nn.Sequential):
        inner = list(transform)
    if inner is None:
        yield transform
        return
    for step in inner:
        yield from _flat(step)


def _edge(size: Any) -> int | tuple[int, int]:
    if isinstance(size, int):
        return size
    if len(size) == 1:
        return int(size[0])
    return (int(size[0]), int(size[1]))


def _both(size: Any) -> tuple[int, int]:
    edge = _edge(size)
    return (edge, edge) if isinstance(edge, int) else edge


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(x) for x in np.atleast_1d(np.asarray(values)))


def _from_steps(transform: Any) -> dict[str, Any]:
    resize: int | tuple[int, int] | None = None  # an edge, or (rows, cols)
    crop: tuple[int, int] | None = None
    interpolation = "bilinear"
    channels = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    for step in _flat(transform):
        kind = type(step).__name__
        if kind == "Resize" and getattr(step, "max_size", None) is None:
            resize = _edge(step.size)
            interpolation = str(getattr(step.interpolation, "value", step.interpolation))
        elif kind == "CenterCrop":
            crop = _both(step.size)
        elif kind == "ImageClassification":  # torchvision's preset
            resize = _edge(step.resize_size)
            crop = _both(step.crop_size)
            interpolation = step.interpolation.value
            mean = _floats(step.mean)
            std = _floats(step.std)
        elif kind == "Grayscale" and step.num_output_channels == 1:
            channels = 1
        elif kind == "Normalize":
            mean = _floats(step.mean)
            std = _floats(step.std)
        elif kind not in (*_TO_TENSOR, *_TIMM_TO_TENSOR):
            raise DataError(
                f"the transform's {kind} cannot be kept in a store; expected Resize, CenterCrop, "
                "conversions to tensors and Normalize, or a mapping as "
                "timm.data.resolve_model_data_config gives it"
            )
    if resize is None or (crop is None and isinstance(resize, int)):
        raise DataError(
            "the transform does not bring every image to one size; expected Resize((rows, cols)), "
            "or Resize(edge) and CenterCrop(size)"
        )
    mode = "center" if isinstance(resize, int) else "squash"
    edge = resize if isinstance(resize, int) else resize[0]
    size = crop if crop is not None else resize
    assert isinstance(size, tuple)
    share = size[0] / edge  # from which timm computes this edge, as floor(size / share)
    share = share if math.floor(size[0] / share) == edge else size[0] / (edge + 0.5)
    return {
        "input_size": (channels, *size),
        "interpolation": interpolation,
        "crop_pct": share,
        "crop_mode": mode,
        "mean": mean,
        "std": std,
    }


def largest_difference(transform: Any, config: Mapping[str, Any]) -> tuple[float, float]:
    """The largest difference between what a transform and a configuration make of noise of three
    shapes, in the numbers that a model gets; and the largest of these numbers.

    Args:
        transform: of a Pillow image, to (channels, rows, cols).
        config: as `transform_config` gives it.

    Raises:
        DataError: the transform fails, or gives another shape.
    """
    import torch

    recipe = make_recipe(config)
    rng = np.random.default_rng(0)
    side = max(recipe.shape[1:])
    differences = []
    largest = 0.0
    for width, height in (
        (side + 37, side),
        (side, 2 * side + 5),
        (side // 2 + 1, side // 2 + 3),
    ):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        pixels = torch.from_numpy(recipe.apply(image).copy())[None]
        expected = normalise(pixels, config, "cpu")[0]
        try:
            given = torch.as_tensor(transform(image), dtype=torch.float32)
        except Exception as error:
            raise DataError(f"the transform fails on a picture: {error}") from error
        if given.shape != expected.shape:
            raise DataError(
                f"the transform gives {tuple(given.shape)}; expected {tuple(expected.shape)}"
            )
        differences.append(float((given - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return float(np.max(differences)), largest
