"""The model's evaluation transform: timm's own, to uint8 pixels; normalisation on the device.

The steps are those of `timm.data.create_transform`, as plain Pillow calls, so that workers and
analyses run them without importing torch: its usual ones are known here, and of anything else timm
is asked. The pixels equal timm's bit for bit, resizing included: Pillow always resizes with
antialiasing. The conventions are timm's: RGBA, palette and CMYK images go through `convert("RGB")`
(alpha is dropped), EXIF orientation is not applied here, and models with one input channel get
`convert("L")`. One is our own, because `convert` clips every value above 255: 16-bit grey is scaled
to 8 bits (65535 is white), and 32-bit integer or float pixels are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.pillow_warnings import heard_warnings
from vitsee_stores.plan import NATIVE, Size, canvas_size

if TYPE_CHECKING:
    import torch

Step = tuple[str, tuple[Any, ...]]
_MODES = {1: "L", 3: "RGB"}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")
FILLS = ("mean", "black")  # what lies beside an image that does not fill the input
# What resizes in place of Pillow as timm calls it: transformers' image processors with Pillow, with
# torchvision's tensors of 8 bits, or with its tensors of floats, which are rounded here to 8 bits.
PROCESSORS = ("pil", "torchvision", "torchvision-float")
MAX_PIXELS = (
    2**27
)  # a strip of 1 x 60000 pixels would become 3 GB on its way to 224 x 224


@dataclass(frozen=True)
class Recipe:
    """Steps from a decoded image to uint8 pixels of `shape` (channels, height, width)."""

    shape: tuple[int, int, int]
    steps: tuple[Step, ...]
    whole: Any = None  # timm's transform itself, where a step of it is not known here

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """Pixels (channels, height, width). Raises ImageError: an image mode or size that cannot be
        converted to the model's."""
        image = to_mode(image, _MODES[self.shape[0]])
        if self.whole is not None:
            return np.asarray(self.whole(image), np.uint8)
        try:
            for name, arguments in self.steps:
                image = _STEPS[name](image, *arguments)
        except (ValueError, OverflowError) as error:
            raise ImageError("image", f"cannot be resized: {error}") from None
        pixels = np.asarray(image)
        if pixels.ndim == 2:
            return pixels[None]
        return pixels.transpose(2, 0, 1)


class AnyRecipe(Protocol):
    """A transform from an image, or a clip, to uint8 pixels of `shape`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def apply(self, image: Any) -> NDArray[np.uint8]: ...


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image as 8-bit "RGB" or "L" (see the module's text for the conventions). Raises
    ImageError: 32-bit pixels, whose white is unknown."""
    # Pillow < 11 opens 16-bit PNG files with mode "I".
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(
            "image", f"32-bit pixels (mode {image.mode}); expected 8 or 16 bits"
        )
    try:
        with heard_warnings():
            return image if image.mode == mode else image.convert(mode)
    except ValueError:  # Pillow converts CIELAB by a colour profile alone
        why = f"colours of the mode {image.mode}, which Pillow does not convert to {mode}"
        raise ImageError("image", why) from None


def make_recipe(transform: Mapping[str, Any]) -> Recipe:
    """timm's evaluation transform for a resolved data config; with `fill` "black", what timm's
    border mode lays around an image is black in place of the mean. The crop modes "corner",
    "pixels" and "patches" are our own: an image on a canvas, see `Canvas` in vitsee_stores. Raises
    DataError: the config is none that timm can build, or has not one or three channels."""
    channels, height, width = transform["input_size"]
    if channels not in _MODES:
        raise DataError(
            f"the model takes {channels} channels; expected 1 (grey) or 3 (RGB)"
        )
    shape = (channels, height, width)
    whole = None
    if (mode := transform.get("crop_mode")) in ("corner", *NATIVE):
        names = ("short_side", "min_pixels", "max_pixels")
        numbers = mode, transform["multiple"], *(transform.get(name) for name in names)
        how = transform["interpolation"]
        if transform.get("processor") not in (None, "pil"):
            how = f"{transform['processor']}:{how}"
        return Recipe(shape, (("corner", ((height, width), *numbers, how)),))
    steps = usual_steps(transform)
    if steps is None:
        steps, whole = steps_of_timm(transform)
    if transform.get("fill") == "black":
        steps = [(s[0], (s[1][0], 0)) if s[0] == "center_crop" else s for s in steps]
    if (processor := transform.get("processor")) is not None:
        steps = [_as_processor(step, processor) for step in steps]
        whole = None
    return Recipe(shape, tuple(steps), whole)


def _as_processor(step: Step, processor: str) -> Step:
    """The step as an image processor does it: cropped at a corner that is rounded down, resized by
    the library named. Raises DataError: no such processor."""
    if processor not in PROCESSORS:
        raise DataError(f"no processor {processor!r}; expected {', '.join(PROCESSORS)}")
    name, arguments = step
    if name == "center_crop":
        return "center_crop", (*arguments, True)
    if name in ("resize", "resize_keep_ratio") and processor != "pil":
        *size, interpolation = arguments
        return name, (*size, f"{processor}:{interpolation}")
    return step


def usual_steps(transform: Mapping[str, Any]) -> list[Step] | None:
    """timm's steps for these settings; None for unusual ones, which timm itself must decide."""
    height, width = transform["input_size"][1:]
    mode = transform.get("crop_mode")
    interpolation = transform.get("interpolation")
    share = transform.get("crop_pct")
    border = transform.get("crop_border_pixels")
    mean = transform.get("mean") or ()
    known = (
        all(type(side) is int and side > 0 for side in (height, width))
        and all(
            type(number) in (int, float) and math.isfinite(number)
            for number in (share, *mean)
        )
        and (border is None or (type(border) is int and border >= 0))
        and interpolation in INTERPOLATIONS
    )
    if not known or share is None or share <= 0:
        return None
    size = height, width
    scaled = math.floor(height / share), math.floor(width / share)
    trim: list[Step] = [("trim", (border,))] if border else []
    crop: Step = "center_crop", (size, 0)
    resize: Step
    if mode == "squash":
        resize = "resize", (scaled, interpolation)
    elif mode == "border" and mean:
        resize = "resize_keep_ratio", (scaled, 1.0, interpolation)
        crop = "center_crop", (size, tuple(round(255 * value) for value in mean))
    elif mode == "center" and scaled[0] == scaled[1]:
        resize = "resize", (scaled[:1], interpolation)
    elif mode == "center":
        resize = "resize_keep_ratio", (scaled, 0.0, interpolation)
    else:
        return None
    return [*trim, resize, crop, ("pixels", ())]


def steps_of_timm(transform: Mapping[str, Any]) -> tuple[list[Step], Any]:
    """timm's steps, and timm's transform itself if one of them is unknown here. Raises DataError:
    timm cannot build the config."""
    from timm.data.transforms_factory import create_transform

    names = (
        "interpolation",
        "crop_pct",
        "crop_mode",
        "crop_border_pixels",
        "mean",
        "std",
    )
    chosen = {name: transform[name] for name in names if transform.get(name) is not None}
    size = tuple(transform["input_size"])
    try:
        built = create_transform(size, normalize=False, **chosen)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"timm cannot build the transform {chosen}: {error!r}") from None
    steps = [_lower(step) for step in built.transforms]
    known = [step for step in steps if step is not None]
    return known, built if len(known) < len(steps) else None


def normalise(
    pixels: torch.Tensor, transform: Mapping[str, Any], device: torch.device | str
) -> torch.Tensor:
    """Uint8 pixels (images, channels, height, width), of clips (clips, frames, channels, height,
    width), as the model's input: float32, on `device`.

    (pixels / 255 - mean) / std, bitwise equal on CPU and CUDA to timm's `ToTensor`, `Normalize`.
    Raises DataError: mean and std have neither one value nor one per channel.
    """
    import torch

    channels = pixels.shape[-3]
    for name in ("mean", "std"):
        if len(transform[name]) not in (1, channels):
            raise DataError(
                f"{name} has {len(transform[name])} values for {channels} channels"
            )
    x = pixels.to(device, non_blocking=True).to(torch.float32)
    # A number as divisor is turned into a multiplication on CUDA, which rounds differently.
    largest, mean, std = (
        _constant(tuple(map(float, values)), str(x.device))
        for values in ((255,), transform["mean"], transform["std"])
    )
    return x.div_(largest).sub_(mean).div_(std)


@functools.lru_cache(maxsize=16)
def _constant(values: tuple[float, ...], device: str) -> torch.Tensor:
    """(1, values, 1, 1) float32, cached on the device: a copy would wait for all pending work
    there."""
    import torch

    with torch.inference_mode(False):  # or it could only be used in there
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


def _lower(step: Any) -> Step | None:
    """A torchvision or timm step as a Pillow step; None if it is unknown here."""
    kind = type(step).__name__
    if kind == "Resize" and step.max_size is None:
        size = (step.size,) if isinstance(step.size, int) else tuple(step.size)
        return "resize", (size, step.interpolation.value)
    if (
        kind == "ResizeKeepRatio"
        and not step.random_scale_prob
        and not step.random_aspect_prob
    ):
        return "resize_keep_ratio", (
            tuple(step.size),
            step.longest,
            step.interpolation.value,
        )
    if kind == "CenterCrop":
        return "center_crop", (tuple(step.size), 0)
    if kind == "CenterCropOrPad" and step.padding_mode == "constant":
        fill = step.fill if isinstance(step.fill, int) else tuple(step.fill)
        return "center_crop", (tuple(step.size), fill)
    if kind == "TrimBorder":
        return "trim", (step.border_size,)
    if kind == "MaybePILToTensor":
        return "pixels", ()
    return None


# ---------------- geometry, in whole pixels, as (height, width) and (top, left)


def resized(size: Size, edges: tuple[int, ...]) -> Size:
    """The size of a resized image: one edge is the shorter side's length, and the longer one's is
    rounded down; else both are given."""
    if len(edges) == 2:
        return edges[0], edges[1]
    height, width = size
    long = int(edges[0] * max(size) / min(size))
    return (edges[0], long) if height <= width else (long, edges[0])


def resized_keep_ratio(size: Size, target: Size, longest: float) -> Size:
    """Inside the target (`longest` 1) or around it (0), in the image's own proportions."""
    ratios = size[0] / target[0], size[1] / target[1]
    ratio = max(ratios) * longest + min(ratios) * (1.0 - longest)
    return round(size[0] / ratio), round(size[1] / ratio)


def crop_corner(side: int, target: int, down: bool = False) -> int:
    """Start of a centred crop along a side of an image; negative if it is padded. A half is rounded
    to the even pixel, as torchvision does, or `down`, as transformers does."""
    if side < target:
        return -((target - side) // 2)
    if down:
        return (side - target) // 2
    return round((side - target) / 2.0)


def trimmed(size: Size, border: int) -> tuple[Size, Size]:
    """The corner of the rest, and its size, after cutting a border off all around."""
    corner = min(border, size[0]), min(border, size[1])
    return corner, (max(0, size[0] - 2 * border), max(0, size[1] - 2 * border))


def _resize(image: Image.Image, size: tuple[int, ...], interpolation: str) -> Image.Image:
    return _to_size(image, resized((image.height, image.width), size), interpolation)


def _resize_keep_ratio(
    image: Image.Image, size: tuple[int, int], longest: float, interpolation: str
) -> Image.Image:
    target = resized_keep_ratio((image.height, image.width), size, longest)
    return _to_size(image, target, interpolation)


def _to_size(
    image: Image.Image, size: tuple[int, int], interpolation: str
) -> Image.Image:
    height, width = size
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"{image.width} x {image.height} pixels become {width} x {height}"
        )
    library, _, how = interpolation.rpartition(":")
    if library:
        return _by_torchvision(image, size, how, library != "torchvision")
    return image.resize((width, height), Image.Resampling[how.upper()])


def _by_torchvision(
    image: Image.Image, size: Size, how: str, as_floats: bool
) -> Image.Image:
    """Resized as a tensor; torch is imported here, for the workers that need it."""
    import torch
    from torchvision.transforms.v2 import functional

    pixels = torch.from_numpy(np.array(image))
    planes = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
    mode = functional.InterpolationMode(how)
    planes = functional.resize(
        planes.float() if as_floats else planes,
        list(size),
        interpolation=mode,
        antialias=True,
    )
    if as_floats:
        planes = planes.round().clamp(0, 255).to(torch.uint8)
    found = planes[0] if pixels.ndim == 2 else planes.permute(1, 2, 0)
    return Image.fromarray(found.contiguous().numpy())


def _center_crop(
    image: Image.Image,
    size: tuple[int, int],
    fill: int | tuple[int, ...],
    down: bool = False,
) -> Image.Image:
    height, width = size
    wide = max(width - image.width, 0)
    high = max(height - image.height, 0)
    if wide or high:
        border = (wide // 2, high // 2, (wide + 1) // 2, (high + 1) // 2)
        one = isinstance(fill, tuple) and image.mode == "L"
        image = ImageOps.expand(image, border, fill[0] if one else fill)  # type: ignore[index]
    top = crop_corner(image.height, height, down)
    left = crop_corner(image.width, width, down)
    return image.crop((left, top, left + width, top + height))


def _trim(image: Image.Image, border: int) -> Image.Image:
    (top, left), (height, width) = trimmed((image.height, image.width), border)
    return image.crop((left, top, left + width, top + height))


def _corner(
    image: Image.Image,
    canvas: Size,
    crop_mode: str,
    multiple: int,
    short_side: int | None,
    min_pixels: int | None,
    max_pixels: int | None,
    interpolation: str,
) -> Image.Image:
    own = image.height, image.width
    size = canvas_size(own, crop_mode, multiple, short_side, min_pixels, max_pixels)
    if size[0] > canvas[0] or size[1] > canvas[1]:
        raise ValueError(
            f"to {size[1]} x {size[0]} on a canvas of {canvas[1]} x {canvas[0]} pixels"
        )
    whole = Image.new(image.mode, canvas[::-1])
    whole.paste(_to_size(image, size, interpolation))
    return whole


_STEPS: dict[str, Callable[..., Image.Image]] = {
    "resize": _resize,
    "resize_keep_ratio": _resize_keep_ratio,
    "center_crop": _center_crop,
    "trim": _trim,
    "corner": _corner,
    "pixels": lambda image: image,
}
