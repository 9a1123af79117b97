"""Image processors of transformers as their configuration says: sizes, crops and normalisation in
the numbers of vitsee's own transform, and the rules that may give sizes at native resolution.

What a configuration says need not be what a processor does: `processors` and `native_sizes` compare
both on random pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.transforms import DEFAULT
from vitsee_stores.plan import Canvas

# Pillow's filters by their numbers.
_FILTERS = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
# Rounding of 255 * (1 / 255): a scale within it is 1.
_SCALE_TOLERANCE = 1e-9
# LeViT resizes the shortest edge to 256/224 of the crop, and does not say so.
_LEVIT_CROP = 224 / 256


class ProcessorSizes(NamedTuple):
    """(rows, cols) that images are resized and then cropped to, None where that is not fixed."""

    resized: tuple[int, int] | None
    cropped: tuple[int, int] | None


class SizeRule(NamedTuple):
    """A rule that gives images their sizes at native resolution.

    Attributes:
        canvas: the rule with the processor's own bounds.
        bound_arguments: (least, most) in pixels -> arguments that give the processor these bounds.
        scale: the processor's bounds over those in pixels of an image.
    """

    canvas: Canvas
    bound_arguments: Callable[[int, int], dict[str, Any]]
    scale: int = 1


def processor_config(
    record: Mapping[str, Any], name: str, *, any_size: bool = False
) -> dict[str, Any]:
    """Return input_size, interpolation, crop_pct, crop_mode, mean and std of a processor.

    Args:
        record: the processor's `to_dict()`.
        name: the model, as messages call it.
        any_size: whether a size that depends on the image is left to the model.

    Raises:
        ModelError: the size depends on the image.
    """
    size = record.get("size") or {}
    resized, cropped = processor_sizes(record)
    input_size = cropped or resized
    if input_size is None and not any_size and record.get("do_resize", True):
        has_rule = next(size_rules(record, patch=1, step=1), None) is not None
        native = "--native for the size of each image, or " if has_rule else ""
        raise ModelError(
            f"the image processor of {name} resizes to "
            f"{size or 'proportions of the image'}, which is no fixed size; give "
            f"{native}--transform timm, and --img-size where the model's own is not meant"
        )
    config = dict(DEFAULT)
    if input_size is not None:
        config["input_size"] = (3, *input_size)
    if cropped and resized:
        config["crop_pct"] = _crop_fraction(min(cropped), min(resized))
    if _is_fixed(size):
        config["crop_mode"] = "squash"
    if record.get("resample") in _FILTERS:
        config["interpolation"] = _FILTERS[record["resample"]]
    return config | _normalisation(record, has_offset=bool(record.get("offset")))


def config_variants(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes of `processor_config` that a record may mean, {} first.

    Some processors resize a shortest edge to more than the record says, by `crop_pct` or by LeViT's
    256/224, or squash the image; some offset pixels without a word.
    """
    yield {}
    if not _is_fixed(record.get("size")):
        fraction = record.get("crop_pct")
        if isinstance(fraction, float):
            yield {"crop_pct": fraction, "crop_mode": "center"}
        yield {"crop_pct": _LEVIT_CROP, "crop_mode": "center"}
        yield {"crop_mode": "squash"}
    with_offset = _normalisation(record, has_offset=True)
    if with_offset != _normalisation(record, has_offset=False):
        yield with_offset


def processor_sizes(record: Mapping[str, Any]) -> ProcessorSizes:
    """Return the sizes that a record says; a shortest edge gives a square."""
    resized = None
    cropped = None
    if record.get("do_resize", True):
        resized = _edges(record.get("size"))
    if record.get("do_center_crop"):
        cropped = _edges(record.get("crop_size"))
    return ProcessorSizes(resized, cropped)


def size_rules(record: Mapping[str, Any], patch: int, step: int) -> Iterator[SizeRule]:
    """Yield the rules for sizes at native resolution that a record may mean.

    Args:
        record: the processor's `to_dict()`.
        patch: side of a patch in pixels.
        step: number of pixels that sides of images are multiples of.
    """
    size = record.get("size") or {}
    yield from _pixel_rules(
        record,
        step,
        size.get("shortest_edge"),
        size.get("longest_edge"),
        lambda least, most: {"size": {"shortest_edge": least, "longest_edge": most}},
    )
    yield from _pixel_rules(
        record,
        step,
        record.get("min_pixels"),
        record.get("max_pixels"),
        lambda least, most: {"min_pixels": least, "max_pixels": most},
    )
    max_patches = record.get("max_num_patches")
    if isinstance(max_patches, int) and max_patches > 0 and patch == step:
        patch_pixels = patch**2
        yield SizeRule(
            Canvas(
                (1, 1),
                short_side=None,
                multiple=patch,
                crop_mode="patches",
                max_pixels=max_patches * patch_pixels,
            ),
            lambda _, most: {"max_num_patches": most // patch_pixels},
        )


def _pixel_rules(
    record: Mapping[str, Any],
    step: int,
    least: Any,
    most: Any,
    bound_arguments: Callable[[int, int], dict[str, Any]],
) -> Iterator[SizeRule]:
    """Yield the rules of two bounds on an image's number of pixels, none where they are not such.

    Some names, as shortest_edge, have other meanings in other processors.
    """
    are_numbers = isinstance(least, int) and isinstance(most, int)
    if not are_numbers or not 0 < least <= most:
        return
    # GLM-4V's bounds are those of the frames to which a still image is repeated.
    for scale in dict.fromkeys((1, record.get("temporal_patch_size") or 1)):
        canvas = Canvas(
            (1, 1),
            short_side=None,
            multiple=step,
            crop_mode="pixels",
            min_pixels=least // scale,
            max_pixels=most // scale,
        )
        yield SizeRule(canvas, bound_arguments, scale)


def _normalisation(
    record: Mapping[str, Any], *, has_offset: bool
) -> dict[str, tuple[float, ...]]:
    """Return mean and std of pixels from 0 to 1 that come to what the processor does.

    A processor may first bring pixels to another scale, and subtract 1 (ViViT: from -1 to 1):
    (scale * x - offset - mean) / std = (x - (mean + offset) / scale) / (std / scale).
    """
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    if record.get("do_normalize", True):
        mean = _floats(record.get("image_mean"), DEFAULT["mean"])
        std = _floats(record.get("image_std"), DEFAULT["std"])
    scale = 255 * float(record.get("rescale_factor") or 1 / 255)
    if record.get("do_rescale") and abs(scale - 1) >= _SCALE_TOLERANCE:
        mean = tuple((x + has_offset) / scale for x in mean)
        std = tuple(x / scale for x in std)
    return {"mean": mean, "std": std}


def _floats(values: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    """Return values as floats, the default for None."""
    return default if values is None else tuple(float(x) for x in values)


def _crop_fraction(crop: int, edge: int) -> float:
    """Return the crop_pct for which the edge that timm computes, floor(crop / crop_pct), is
    `edge`."""
    exact = crop / edge
    if int(crop / exact) == edge:
        return exact
    return crop / (edge + 0.5)  # the middle of what the floor makes `edge`


def _is_fixed(size: Any) -> bool:
    """Return whether a size is a height and a width, whatever the image's proportions."""
    return isinstance(size, Mapping) and bool(size.get("height") and size.get("width"))


def _edges(size: Any) -> tuple[int, int] | None:
    """Return (rows, cols) of a size, a square for a shortest edge, None where it is not fixed."""
    if isinstance(size, int):
        return size, size
    if not isinstance(size, Mapping):
        return None
    if _is_fixed(size):
        return int(size["height"]), int(size["width"])
    shortest_edge = size.get("shortest_edge")
    if shortest_edge and not size.get("longest_edge"):
        return int(shortest_edge), int(shortest_edge)
    return None
