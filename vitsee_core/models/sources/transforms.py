"""How a model's images are prepared, with the user's changes: for a model of timm's as its
configuration says, checked; for another as its author states it."""

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
    "says no transform: assumed are 224 x 224 pixels and ImageNet's mean and standard deviation "
    "(for others: --img-size, --img-mean, --img-std, or let its function give one)"
)
MOST_PIXELS = 1 << 14  # along one side


def pair(size: Any) -> tuple[int, int]:
    """(rows, cols) of a size that may be one number."""
    return (size, size) if isinstance(size, int) else tuple(size)


def stated(own: Any, module: nn.Module, name: str) -> dict[str, Any]:
    """A transform as its author gives it, as a configuration; without one that of a module which
    says it as timm's do, else `DEFAULT`.

    Raises:
        ModelError: one that cannot be kept as numbers.
    """
    if own is None:
        own = getattr(module, "pretrained_cfg", None)
        if not own:
            return dict(DEFAULT)
    from vitsee_core.images.torch_transforms import transform_config

    try:
        return transform_config(own)
    except VitseeError as error:
        raise ModelError(f"{name}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name}: its transform cannot be read: {one_line(error)}"
        ) from error


def changed(
    config: Mapping[str, Any],
    img_size: int | tuple[int, int] | None,
    given: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """The configuration with what the user gives in its place, see `Source.transform`.

    Raises:
        ModelError: values that are none.
    """
    wanted = {key: value for key, value in given.items() if value is not None}
    fill = wanted.pop("fill", None)
    found = {**config, **wanted}
    if img_size is not None:
        found["input_size"] = (found["input_size"][0], *pair(img_size))
    channels = found["input_size"][0]
    for key in ("mean", "std"):
        found[key] = tuple(float(x) for x in found[key])
        if len(found[key]) not in (1, channels):
            raise ModelError(
                f"{name} takes {channels} channels, and --img-{key} has {len(found[key])} numbers"
            )
    if fill is not None and found["crop_mode"] != "border":
        raise ModelError(
            f"--fill {fill} is for what lies around an image; expected --crop-mode border with it"
        )
    found["input_size"] = tuple(int(n) for n in found["input_size"])
    return {**found, **({"fill": fill} if fill == "black" else {})}


def input_transform(
    module: nn.Module,
    name: str,
    img_size: tuple[int, int] | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The transform of a timm model, in the form of `Source.transform`. `pretrained_cfg` decides
    what is not given; `fill` is there where what lies around an image is black and not the mean.

    Raises:
        ModelError: the configuration (a folder's config.json) has other values than numbers; a fill
            where nothing lies around an image.
    """
    import timm.data

    data: Any = timm.data
    config = getattr(module, "pretrained_cfg", None) or {}
    wanted: dict[str, Any] = {
        key: value for key, value in given.items() if value is not None
    }
    fill = wanted.pop("fill", None)
    if img_size is not None:
        channels = checked_size(config.get("input_size", (3, 1, 1)), name)[0]
        wanted["input_size"] = (int(getattr(module, "in_chans", channels)), *img_size)
    resolved = data.resolve_data_config(wanted, model=module, use_test_size=False)
    size = checked_size(resolved["input_size"], name)
    own = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if img_size is None and own is not None and tuple(own) != size[1:]:
        size = (size[0], int(own[0]), int(own[1]))
    std = _numbers(resolved["std"], "std", name, size[0])
    crop = _numbers(resolved["crop_pct"], "crop_pct", name, 1)[0]
    if min(std) <= 0 or crop <= 0:
        raise ModelError(
            f"the configuration of {name} has std {list(std)} and crop_pct {crop:g}; expected "
            "numbers above 0"
        )
    mode = str(resolved["crop_mode"])
    if fill is not None and mode != "border":
        raise ModelError(
            f"--fill {fill} is for what lies around an image, and --crop-mode {mode} leaves "
            "nothing there; expected --crop-mode border with it"
        )
    return {
        "input_size": size,
        "interpolation": str(resolved["interpolation"]),
        "crop_pct": crop,
        "crop_mode": mode,
        "mean": _numbers(resolved["mean"], "mean", name, size[0]),
        "std": std,
        **({"fill": fill} if fill == "black" else {}),  # timm's own is the mean
    }


def label_names(config: Mapping[str, Any], name: str) -> list[str] | None:
    """The names of a model's classes, where its configuration has them.

    Raises:
        ModelError: they are no list.
    """
    names = config.get("label_names")
    if not names:
        return None
    if not isinstance(names, list | tuple):
        raise ModelError(
            f"the configuration of {name} has label_names {str(names)[:40]!r}; expected a list"
        )
    return [str(label) for label in names]


def checked_size(value: Any, name: str) -> tuple[int, int, int]:
    """(channels, rows, cols) as a configuration has them.

    Raises:
        ModelError: they are something else.
    """
    whole = isinstance(value, list | tuple) and all(isinstance(n, int) for n in value)
    if not whole or len(value) != 3 or not all(1 <= n <= MOST_PIXELS for n in value):
        raise ModelError(
            f"the configuration of {name} has input_size {str(value)[:40]}; expected channels, "
            "rows and columns, as 3, 224, 224"
        )
    channels, rows, cols = value
    return channels, rows, cols


def _numbers(value: Any, what: str, name: str, channels: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(x) for x in np.atleast_1d(value))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in (1, 3, channels) or not all(map(math.isfinite, numbers)):
        count = "one number" if channels == 1 else "finite numbers, one per channel"
        raise ModelError(
            f"the configuration of {name} has {what} {str(value)[:40]}; expected {count}"
        )
    return numbers
