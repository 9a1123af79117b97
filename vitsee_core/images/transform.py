"""The model's evaluation transform: timm's own, to uint8 pixels; normalisation on the device.

The steps are those of `timm.data.create_transform`, as plain Pillow calls, so that workers and
analyses run them without importing torch. Its usual steps are known here; for anything else timm
builds the transform. The pixels equal timm's bit for bit, resizing included: Pillow always resizes
with antialiasing.

The conventions are timm's: RGBA, palette and CMYK images go through `convert("RGB")` (alpha is
dropped), EXIF orientation is not applied here, and models with one input channel get
`convert("L")`. One convention is our own, because `convert` clips every value above 255: 16-bit
grey is scaled to 8 bits (65535 is white), and 32-bit integer or float pixels are refused.
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

Step = tuple[
    str, tuple[Any, ...]
]  # a key of `_STEPS`, and the function's further arguments
_MODES = {1: "L", 3: "RGB"}  # number of channels -> Pillow's mode
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")
FILLS = ("mean", "black")  # the colour beside an image that does not fill the input
# Image processors of transformers, which resize in place of Pillow as timm calls it: with Pillow,
# with torchvision's tensors of 8 bits, or with its tensors of floats, which are rounded to 8 bits.
PROCESSORS = ("pil", "torchvision", "torchvision-float")
# Of a resized image: a strip of 1 x 60000 pixels would become 3 GB on its way to 224 x 224.
MAX_PIXELS = 2**27


@dataclass(frozen=True)
class Recipe:
    """The steps from a decoded image to a model's pixels.

    Attributes:
        shape: (channels, height, width) of the pixels.
        steps: the steps, in order.
        timm_transform: timm's transform itself, if it has a step that is not known here; it is
            then applied in place of `steps`.
    """

    shape: tuple[int, int, int]
    steps: tuple[Step, ...]
    timm_transform: Any = None

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the (channels, height, width) pixels of an image.

        Raises:
            ImageError: the image has a mode or a size that cannot be converted to the model's.
        """
        image = to_mode(image, _MODES[self.shape[0]])
        if self.timm_transform is not None:
            return np.asarray(self.timm_transform(image), np.uint8)
        try:
            for name, arguments in self.steps:
                image = _STEPS[name](image, *arguments)
        except (ValueError, OverflowError) as error:
            raise ImageError("image", f"cannot be resized: {error}") from None
        pixels = np.asarray(image)
        if pixels.ndim == 2:  # grey, which Pillow gives without an axis of channels
            return pixels[None]
        return pixels.transpose(2, 0, 1)


class AnyRecipe(Protocol):
    """A transform from an image, or a clip, to uint8 pixels."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the pixels: (channels, height, width), of clips with frames first."""

    def apply(self, image: Any) -> NDArray[np.uint8]:
        """Return the pixels of an image or a clip."""


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return an image as 8-bit "RGB" or "L", by the conventions in this module's docstring.

    Raises:
        ImageError: 32-bit pixels, whose white is unknown.
    """
    # Pillow < 11 opens 16-bit PNG files with mode "I".
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        values = np.asarray(image).astype(np.uint32)
        # 65535 / 255 = 257, rounded to the nearest.
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
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
    """Return timm's evaluation transform for a resolved data config.

    With `fill` "black", timm's border mode surrounds an image with black in place of the mean. The
    crop modes "corner", "pixels" and "patches" are our own: an image on a canvas, see `Canvas` in
    vitsee_stores.

    Args:
        transform: the data config, as timm resolves it and stores have it.

    Raises:
        DataError: timm cannot build the config, or it has not one or three channels.
    """
    channels, height, width = transform["input_size"]
    if channels not in _MODES:
        raise DataError(
            f"the model takes {channels} channels; expected 1 (grey) or 3 (RGB)"
        )
    shape = (channels, height, width)
    processor = transform.get("processor")
    if transform.get("crop_mode") in ("corner", *NATIVE):
        return Recipe(shape, (_canvas_step(transform),))
    timm_transform = None
    steps = usual_steps(transform)
    if steps is None:
        steps, timm_transform = steps_of_timm(transform)
    if transform.get("fill") == "black":
        steps = [_with_black_fill(step) for step in steps]
    if processor is not None:
        steps = [_as_processor(step, processor) for step in steps]
        timm_transform = None
    return Recipe(shape, tuple(steps), timm_transform)


def _canvas_step(transform: Mapping[str, Any]) -> Step:
    """Return the step that resizes an image and puts it into the corner of a canvas."""
    interpolation = transform["interpolation"]
    if transform.get("processor") not in (None, "pil"):
        interpolation = f"{transform['processor']}:{interpolation}"
    _, height, width = transform["input_size"]
    # The arguments of `_corner`, in its order.
    arguments = (
        (height, width),
        transform["crop_mode"],
        transform["multiple"],
        transform.get("short_side"),
        transform.get("min_pixels"),
        transform.get("max_pixels"),
        interpolation,
    )
    return "corner", arguments


def _with_black_fill(step: Step) -> Step:
    """Return a step that fills with black if it crops; other steps as they are."""
    name, arguments = step
    if name != "center_crop":
        return step
    size, *_ = arguments
    return name, (size, 0)


def _as_processor(step: Step, processor: str) -> Step:
    """Return a step as an image processor of transformers does it.

    A crop's corner is rounded down, and a resize is done by the library of the processor.

    Raises:
        DataError: there is no such processor.
    """
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
    """Return timm's steps for usual settings; None for others, which timm itself must build."""
    height, width = transform["input_size"][1:]
    mode = transform.get("crop_mode")
    interpolation = transform.get("interpolation")
    crop_pct = transform.get("crop_pct")
    border = transform.get("crop_border_pixels")
    mean = transform.get("mean") or ()
    numbers = (crop_pct, *mean)
    is_usual = (
        all(type(side) is int and side > 0 for side in (height, width))
        and all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        and (border is None or (type(border) is int and border >= 0))
        and interpolation in INTERPOLATIONS
    )
    if not is_usual or crop_pct is None or crop_pct <= 0:
        return None
    size = height, width
    # The image is resized to this size, of which the crop is the fraction `crop_pct`.
    scaled = math.floor(height / crop_pct), math.floor(width / crop_pct)
    trim: list[Step] = [("trim", (border,))] if border else []
    crop: Step = "center_crop", (size, 0)
    resize: Step
    if mode == "squash":
        resize = "resize", (scaled, interpolation)
    elif mode == "border" and mean:
        resize = "resize_keep_ratio", (scaled, 1.0, interpolation)
        crop = "center_crop", (size, tuple(round(255 * value) for value in mean))
    elif mode == "center" and scaled[0] == scaled[1]:
        resize = "resize", (scaled[:1], interpolation)  # the shorter side
    elif mode == "center":
        resize = "resize_keep_ratio", (scaled, 0.0, interpolation)
    else:
        return None
    return [*trim, resize, crop, ("pixels", ())]


def steps_of_timm(transform: Mapping[str, Any]) -> tuple[list[Step], Any]:
    """Return timm's steps, and timm's transform itself if one of them is unknown here.

    Raises:
        DataError: timm cannot build the config.
    """
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
    steps = [_as_pillow_step(step) for step in built.transforms]
    pillow_steps = [step for step in steps if step is not None]
    if len(pillow_steps) < len(steps):
        return pillow_steps, built
    return pillow_steps, None


def normalise(
    pixels: torch.Tensor, transform: Mapping[str, Any], device: torch.device | str
) -> torch.Tensor:
    """Return pixels as the model's input, (pixels / 255 - mean) / std, in float32 on a device.

    It is bitwise equal on CPU and CUDA to timm's `ToTensor` and `Normalize`.

    Args:
        pixels: uint8 (images, channels, height, width), or (clips, frames, channels, height,
            width) for clips.
        transform: has `mean` and `std`, with a value for each channel or for all.
        device: the device of the result.

    Raises:
        DataError: mean or std has another number of values.
    """
    import torch

    channels = pixels.shape[-3]
    for name in ("mean", "std"):
        if len(transform[name]) not in (1, channels):
            raise DataError(
                f"{name} has {len(transform[name])} values for {channels} channels"
            )
    x = pixels.to(device, non_blocking=True).to(torch.float32)
    # Tensors, since CUDA turns a division by a number into a multiplication by its reciprocal,
    # which rounds differently.
    largest = _device_constant((255.0,), str(x.device))
    mean = _device_constant(tuple(map(float, transform["mean"])), str(x.device))
    std = _device_constant(tuple(map(float, transform["std"])), str(x.device))
    return x.div_(largest).sub_(mean).div_(std)


@functools.lru_cache(maxsize=16)
def _device_constant(values: tuple[float, ...], device: str) -> torch.Tensor:
    """Return (1, values, 1, 1) float32 on a device.

    It is cached, since a copy to the device would wait for all pending work there.
    """
    import torch

    # A tensor made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


def _as_pillow_step(step: Any) -> Step | None:
    """Return a torchvision or timm transform as a `Step`, (name, arguments), that Pillow can do;
    None for a transform of another kind or with settings not followed here."""
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
    """Return (height, width) of an image after torchvision's Resize.

    Args:
        size: (height, width) of the image.
        edges: (height, width), or the length of the shorter side alone; the longer one's is then
            in proportion, rounded down.
    """
    if len(edges) == 2:
        return edges[0], edges[1]
    height, width = size
    short = edges[0]
    long = int(short * max(size) / min(size))
    return (short, long) if height <= width else (long, short)


def resized_keep_ratio(size: Size, target: Size, longest: float) -> Size:
    """Return (height, width) of an image after timm's ResizeKeepRatio, in its proportions.

    Args:
        size: (height, width) of the image.
        target: (height, width) that the result fits into, or covers.
        longest: 1 to fit into the target, 0 to cover it.
    """
    ratios = size[0] / target[0], size[1] / target[1]
    ratio = max(ratios) * longest + min(ratios) * (1.0 - longest)
    return round(size[0] / ratio), round(size[1] / ratio)


def crop_corner(side: int, target: int, down: bool = False) -> int:
    """Return the start of a centred crop along a side of an image; negative if it is padded.

    A half is rounded to the even pixel, as torchvision does, or `down`, as transformers does.
    """
    if side < target:
        return -((target - side) // 2)
    if down:
        return (side - target) // 2
    return round((side - target) / 2.0)


def trimmed(size: Size, border: int) -> tuple[Size, Size]:
    """Return (top, left) and (height, width) of what is left when a border is cut off all around.

    Args:
        size: (height, width) of the image.
        border: the border's width in pixels; (0, 0) is left if it is half of the image or more.
    """
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
    """Return an image resized to (height, width); raise ValueError if that is too large.

    Args:
        image: the image.
        size: (height, width).
        interpolation: a name of `INTERPOLATIONS`, after a processor and a colon if it is not
            Pillow that resizes.
    """
    height, width = size
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"{image.width} x {image.height} pixels become {width} x {height}"
        )
    processor, _, method = interpolation.rpartition(":")
    if processor:
        as_floats = processor != "torchvision"
        return _resize_by_torchvision(image, size, method, as_floats)
    return image.resize((width, height), Image.Resampling[method.upper()])


def _resize_by_torchvision(
    image: Image.Image, size: Size, method: str, as_floats: bool
) -> Image.Image:
    """Return an image resized to (height, width) as a tensor of bytes, or of floats.

    torch is imported here, so that only workers that need it pay for the import.
    """
    import torch
    from torchvision.transforms.v2 import functional

    pixels = torch.from_numpy(np.array(image))
    is_grey = pixels.ndim == 2
    # (channels, height, width)
    planes = pixels[None] if is_grey else pixels.permute(2, 0, 1).contiguous()
    if as_floats:
        planes = planes.float()
    planes = functional.resize(
        planes,
        list(size),
        interpolation=functional.InterpolationMode(method),
        antialias=True,
    )
    if as_floats:
        planes = planes.round().clamp(0, 255).to(torch.uint8)  # bicubic overshoots
    resized_pixels = planes[0] if is_grey else planes.permute(1, 2, 0)
    return Image.fromarray(resized_pixels.contiguous().numpy())


def _center_crop(
    image: Image.Image,
    size: tuple[int, int],
    fill: int | tuple[int, ...],
    down: bool = False,
) -> Image.Image:
    """Return the (height, width) crop at an image's centre, padded if the image is smaller.

    Args:
        image: the image.
        size: (height, width).
        fill: the colour of the padding.
        down: whether halves of a pixel are rounded down, see `crop_corner`.
    """
    height, width = size
    pad_x = max(width - image.width, 0)
    pad_y = max(height - image.height, 0)
    if pad_x or pad_y:
        # left, top, right, bottom
        border = (pad_x // 2, pad_y // 2, (pad_x + 1) // 2, (pad_y + 1) // 2)
        if isinstance(fill, tuple) and image.mode == "L":
            fill = fill[0]
        image = ImageOps.expand(image, border, fill)
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
    """Return a black canvas (height, width) with the resized image in its upper left corner.

    The other arguments are those of `canvas_size`, which says to what size the image is resized.
    """
    image_size = image.height, image.width
    size = canvas_size(
        image_size, crop_mode, multiple, short_side, min_pixels, max_pixels
    )
    if size[0] > canvas[0] or size[1] > canvas[1]:
        raise ValueError(
            f"to {size[1]} x {size[0]} on a canvas of {canvas[1]} x {canvas[0]} pixels"
        )
    canvas_image = Image.new(image.mode, canvas[::-1])
    canvas_image.paste(_to_size(image, size, interpolation))
    return canvas_image


_STEPS: dict[str, Callable[..., Image.Image]] = {
    "resize": _resize,
    "resize_keep_ratio": _resize_keep_ratio,
    "center_crop": _center_crop,
    "trim": _trim,
    "corner": _corner,
    "pixels": lambda image: image,
}
