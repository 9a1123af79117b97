"""How a model's images are prepared, as a dict of numbers with the user's changes.

A model of timm says it in its configuration, which is checked; another as its author gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import one_line
from vitsee_stores.errors import VitseeError

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
DEFAULT: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
    **IMAGENET,
}
ASSUMED = (
    "says no transform: assumed are 224 x 224 pixels and ImageNet's mean and standard "
    "deviation (for others: --img-size, --img-mean, --img-std, or let its function give "
    "one)"
)
MAX_SIDE_PX = 1 << 14


def pair(size: Any) -> tuple[int, int]:
    """Return (rows, cols) of a size that may be one number."""
    return (size, size) if isinstance(size, int) else tuple(size)


def author_transform(transform: Any, module: nn.Module, name: str) -> dict[str, Any]:
    """Return the transform that a model's author gives, as numbers.

    Args:
        transform: a transform of torchvision, timm or a dict, as `transform_config` takes it; None
            for the module's `pretrained_cfg`, or `DEFAULT` without one.
        module: the model.
        name: the model, as messages call it.

    Raises:
        ModelError: the transform cannot be kept as numbers.
    """
    if transform is None:
        transform = getattr(module, "pretrained_cfg", None)
        if not transform:
            return dict(DEFAULT)
    from vitsee_core.images.torch_transforms import transform_config

    try:
        return transform_config(transform)
    except VitseeError as error:
        raise ModelError(f"{name}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name}: its transform cannot be read: {one_line(error)}"
        ) from error


def changed(
    config: Mapping[str, Any],
    img_size: int | tuple[int, int] | None,
    settings: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """Return a transform with the user's values in place of its own.

    Args:
        config: the transform's numbers.
        img_size: rows and columns, or one number for both; None to keep the transform's.
        settings: as in `Source.transform`; None for values to keep.
        name: the model, as messages call it.

    Raises:
        ModelError: `mean` or `std` of another number of channels, or `fill` where nothing lies
            around an image.
    """
    user_values = {key: value for key, value in settings.items() if value is not None}
    fill = user_values.pop("fill", None)
    transform = {**config, **user_values}
    if img_size is not None:
        transform["input_size"] = (transform["input_size"][0], *pair(img_size))
    channels = transform["input_size"][0]
    for key in ("mean", "std"):
        transform[key] = tuple(float(x) for x in transform[key])
        n_values = len(transform[key])
        if n_values not in (1, channels):
            raise ModelError(
                f"{name} takes {channels} channels, and --img-{key} has {n_values} numbers"
            )
    if fill is not None and transform["crop_mode"] != "border":
        raise ModelError(
            f"--fill {fill} is for what lies around an image; expected --crop-mode "
            f"border with it"
        )
    transform["input_size"] = tuple(int(n) for n in transform["input_size"])
    if fill == "black":  # the mean is the default, and not recorded
        transform["fill"] = fill
    return transform


def input_transform(
    module: nn.Module,
    name: str,
    img_size: tuple[int, int] | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the transform of a timm model, in the form of `Source.transform`.

    Values that the user does not give are those of `pretrained_cfg`. `fill` is an entry only where
    what lies around an image is black and not the mean.

    Raises:
        ModelError: the configuration (a folder's config.json) has other values than numbers; a fill
            where nothing lies around an image.
    """
    import timm.data

    data: Any = timm.data
    config = getattr(module, "pretrained_cfg", None) or {}
    user_values: dict[str, Any] = {
        key: value for key, value in settings.items() if value is not None
    }
    fill = user_values.pop("fill", None)
    if img_size is not None:
        channels = checked_size(config.get("input_size", (3, 1, 1)), name)[0]
        channels = int(getattr(module, "in_chans", channels))
        user_values["input_size"] = (channels, *img_size)
    # timm's larger size for tests is not the one that the weights were trained at.
    resolved = data.resolve_data_config(user_values, model=module, use_test_size=False)
    channels, rows, cols = checked_size(resolved["input_size"], name)
    embedded_size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if img_size is None and embedded_size is not None:
        rows, cols = int(embedded_size[0]), int(embedded_size[1])
    std = _finite_numbers(resolved["std"], "std", name, channels)
    crop = _finite_numbers(resolved["crop_pct"], "crop_pct", name, 1)[0]
    if min(std) <= 0 or crop <= 0:
        raise ModelError(
            f"the configuration of {name} has std {list(std)} and crop_pct {crop:g}; "
            "expected numbers above 0"
        )
    mode = str(resolved["crop_mode"])
    if fill is not None and mode != "border":
        raise ModelError(
            f"--fill {fill} is for what lies around an image, and --crop-mode {mode} "
            "leaves nothing there; expected --crop-mode border with it"
        )
    transform: dict[str, Any] = {
        "input_size": (channels, rows, cols),
        "interpolation": str(resolved["interpolation"]),
        "crop_pct": crop,
        "crop_mode": mode,
        "mean": _finite_numbers(resolved["mean"], "mean", name, channels),
        "std": std,
    }
    if fill == "black":
        transform["fill"] = fill
    return transform


def label_names(config: Mapping[str, Any], name: str) -> list[str] | None:
    """Return the names of a model's classes, None where its configuration has none.

    Raises:
        ModelError: they are not a list.
    """
    names = config.get("label_names")
    if not names:
        return None
    if not isinstance(names, list | tuple):
        raise ModelError(
            f"the configuration of {name} has label_names {str(names)[:40]!r}; expected "
            f"a list"
        )
    return [str(label) for label in names]


def checked_size(value: Any, name: str) -> tuple[int, int, int]:
    """Return a configuration's input_size as (channels, rows, cols).

    Raises:
        ModelError: it is not three integers from 1 to `MAX_SIDE_PX`.
    """
    is_size = isinstance(value, list | tuple) and len(value) == 3
    if not is_size or not all(
        isinstance(n, int) and 1 <= n <= MAX_SIDE_PX for n in value
    ):
        raise ModelError(
            f"the configuration of {name} has input_size {str(value)[:40]}; expected "
            "channels, rows and columns, as 3, 224, 224"
        )
    channels, rows, cols = value
    return channels, rows, cols


def _finite_numbers(value: Any, key: str, name: str, channels: int) -> tuple[float, ...]:
    """Return an entry of a configuration as one number, three, or one per channel.

    Raises:
        ModelError: names the entry `key` of the model `name`.
    """
    try:
        numbers = tuple(float(x) for x in np.atleast_1d(value))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in (1, 3, channels) or not all(map(math.isfinite, numbers)):
        count = "one number" if channels == 1 else "finite numbers, one per channel"
        raise ModelError(
            f"the configuration of {name} has {key} {str(value)[:40]}; expected {count}"
        )
    return numbers
