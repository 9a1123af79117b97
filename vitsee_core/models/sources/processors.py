"""An image processor's record as a configuration of vitsee's own transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.own_transform import DEFAULT

# Of Pillow's filters, by their numbers.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def processor_config(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """input_size, interpolation, crop_pct, crop_mode, mean, std of a processor's `to_dict()`.

    Raises:
        ModelError: it does something that these do not say.
    """
    size, crop = record.get("size") or {}, record.get("crop_size") or {}
    found = dict(DEFAULT)
    resized = _edges(size) if record.get("do_resize", True) else None
    cropped = _edges(crop) if record.get("do_center_crop") else None
    if resized is None and cropped is None and record.get("do_resize", True):
        raise ModelError(
            f"the image processor of {name} resizes to {size}, which is no fixed size; give "
            "--img-size, and --img-mean and --img-std, with a class or a folder without it"
        )
    final = cropped or resized
    if final is not None:
        found["input_size"] = (3, *final)
    if cropped and resized:
        found["crop_pct"] = min(cropped) / min(resized)
    if "shortest_edge" not in size and resized and not cropped:
        found["crop_mode"] = "squash"
    if record.get("resample") in _FILTERS:
        found["interpolation"] = _FILTERS[record["resample"]]
    if record.get("do_normalize", True):
        for key, own in (("mean", "image_mean"), ("std", "image_std")):
            if record.get(own) is not None:
                found[key] = tuple(float(x) for x in record[own])
    else:
        found |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return found


def _edges(size: Any) -> tuple[int, int] | None:
    """(rows, cols) of a size; of a shortest edge a square."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping):
        if size.get("height") and size.get("width"):
            return int(size["height"]), int(size["width"])
        if size.get("shortest_edge") and not size.get("longest_edge"):
            return int(size["shortest_edge"]), int(size["shortest_edge"])
    return None
