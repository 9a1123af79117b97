"""How images are prepared for a model that is not timm's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.errors import one_line
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
        raise ModelError(f"{name}: its transform cannot be read: {one_line(error)}") from error


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
