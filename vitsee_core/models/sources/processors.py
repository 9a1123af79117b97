"""Image processors of transformers: read, recorded, and done by vitsee in numbers that are proven
to give the processor's own input. So a store needs neither transformers nor code of a repository to
prepare its images again.

At native resolution the sizes to which a processor brings images are given by a rule and bounds. It
is called on images of few pixels, with small bounds, and the sizes that it makes are compared with
those of each rule of `Canvas`; what it makes of random pixels with what vitsee's own resize makes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitsee_core.images.transform import make_recipe
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import BACKENDS, one_line, quiet
from vitsee_core.models.sources.transforms import DEFAULT
from vitsee_core.models.tokens.towers import GRIDS, Packing
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import jsonable
from vitsee_stores.plan import Canvas, Size

# Of Pillow's filters, by their numbers.
_FILTERS = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
_ROUNDED_SCALE = 1e-9  # of 255 * (1 / 255)
TOLERANCE = 1e-5  # of the model's input: float32 in another order
THUMBNAIL = (
    "'s image processor cuts images into tiles beside the whole image; without --tiles (and "
    "--short-side N) it gets the whole image alone, as that processor makes it"
)
ROUNDED = (
    "'s image processor resizes floats, which are rounded to 8 bits here: its input differs by up "
    "to half of 1/255 before normalisation"
)
# Sides of images in multiples of a group of patches: within the small bounds, with halves, below
# and above them, thin ones; the last ones are tried with the processor's own bounds, too.
_SIDES = (
    (3.3, 5.7),
    (1.5, 6.5),
    (2.5, 3.5),
    (1.2, 1.4),
    (12.7, 9.1),
    (1.1, 14.2),
    (7.3, 4.1),
)
# small bounds, in groups of patches
_LEAST = 6
_MOST = 36
_GRIDS = (*GRIDS, "spatial_shapes")
_REFUSALS = (
    *(
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
)
_VALUES = ("pixel_values", "pixel_values_images")


@dataclass(frozen=True)
class Processor:
    """own: transformers' object. name: of the model, for messages."""

    own: Any
    name: str

    @cached_property
    def record(self) -> dict[str, Any]:
        """The processor's configuration, as transformers writes it."""
        found: dict[str, Any] = jsonable(self.own.to_dict())
        return found

    @property
    def of_videos(self) -> bool:
        """Whether it takes videos alone."""
        return "images" not in inspect.signature(type(self.own).__call__).parameters

    @cached_property
    def backend(self) -> str:
        """The library that resizes: pil or torchvision, which those of videos take. transformers 4
        says it by the class."""
        if self.of_videos:
            return "torchvision"
        own = getattr(self.own, "backend", None)
        fast = getattr(self.own, "is_fast", None)
        if own in BACKENDS:
            return str(own)
        if fast:
            return "torchvision"
        return "pil"

    @cached_property
    def input_size(self) -> tuple[int, int] | None:
        """(rows, cols) of what it gives; None where that depends on the image."""
        resized, cropped = _sizes(self.record)
        return cropped or resized

    @cached_property
    def cuts(self) -> bool:
        """Whether it cuts an image into tiles, and puts the whole image at their size beside them:
        before them (LLaVA-NeXT) or behind (InternVL)."""
        if self.input_size is None or self.of_videos:
            return False
        rows, cols = self.input_size
        image = np.zeros((rows, 2 * cols, 3), np.uint8)
        try:
            found = self.own(images=image, return_tensors="pt")["pixel_values"][0]
        except (
            AssertionError,
            IndexError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ):
            return False
        return bool(found.ndim == 4 and len(found) > 1)  # one: the frame of a clip

    @cached_property
    def config(self) -> dict[str, Any]:
        """The numbers of `processor_config` with `processor`, which gives the same input.

        Raises:
            ModelError: the processor does something that no such numbers say.
        """
        from vitsee_core.images.torch_transforms import largest_difference

        numbers = processor_config(self.record, self.name)
        found = []
        for variant, tile in product(
            _variants(self.record), (0, -1) if self.cuts else (0,)
        ):
            for processor, rounding in self.candidates(numbers):
                config = {**numbers, **variant, "processor": processor}
                try:
                    apply = partial(self._apply, tile=tile)
                    difference, largest = largest_difference(apply, config)
                except VitseeError as error:
                    raise self._refused(str(error)) from error
                if difference <= rounding + TOLERANCE * max(1.0, largest):
                    return config
                found.append(difference)
        raise self._refused(
            f"its input differs by up to {min(found):.2g} from what it says"
        )

    def prove_packed(self, packing: Packing, config: Mapping[str, Any]) -> None:
        """Prove that the patches which a tower is given of an image of its size are those that
        this processor makes, in the order of its groups and with its mean and deviation.

        Raises:
            ModelError: they differ, or the size is beyond the processor's limits.
        """
        channels, rows, cols = config["input_size"]
        shape = rows, cols, channels
        image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        try:
            made = self.own(images=[image], return_tensors="pt")
        except (ValueError, TypeError, AssertionError, RuntimeError) as error:
            raise ModelError(
                f"the image processor of {self.name} refuses an image of {rows} x {cols} pixels: "
                f"{one_line(error)}; expected another --img-size"
            ) from error
        found = next((made[key] for key in GRIDS if key in made), None)
        grid = packing.grid((rows, cols))
        if found is None or tuple(int(n) for n in found[0][-2:]) != grid:
            given = "no grid"
            if found is not None:
                given = "{} x {} patches".format(*found[0][-2:].tolist())
            raise ModelError(
                f"the image processor of {self.name} makes {given} of an image of {rows} x {cols} "
                f"pixels, expected {grid[0]} x {grid[1]}: the size is beyond its limits, give "
                "another --img-size"
            )
        patches = next(made[key] for key in _VALUES if key in made)
        mean, std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ("mean", "std"))
        wanted = (torch.from_numpy(image).permute(2, 0, 1) / 255 - mean) / std
        expected = packing.pack(wanted.unsqueeze(0)).reshape(-1)
        difference = float("inf")
        if patches.numel() == expected.numel():
            difference = float((patches.reshape(-1).float() - expected).abs().max())
        if difference > TOLERANCE * max(1.0, float(expected.abs().max())):
            raise self._refused(
                f"its patches differ by up to {difference:.2g} from the tower's"
            )

    def origin(self) -> dict[str, Any]:
        import PIL

        versions = {"Pillow": PIL.__version__}
        if self.backend == "torchvision":
            import torchvision

            versions = {"torchvision": torchvision.__version__}
        return {
            "processor": self.record,
            "backend": self.backend,
            "backend_version": versions,
        }

    def candidates(self, numbers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Ways of resizing that may be its own, and what rounding to 8 bits changes in each."""
        yield self.backend, 0.0
        if self.backend == "torchvision":
            yield "torchvision-float", 0.5 / 255 / min(numbers["std"])

    def _apply(self, image: Any, tile: int = 0) -> Any:
        """(channels, rows, cols) of an image, of its tiles this one, or of a clip of this one
        frame."""
        if self.of_videos:
            made = self.own(videos=[np.array(image)[None]], return_tensors="pt")
        else:
            made = self.own(images=image, return_tensors="pt")
        found = next(
            made[key] for key in ("pixel_values", "pixel_values_videos") if key in made
        )[0]
        return found[tile] if found.ndim == 4 else found

    def _refused(self, why: str) -> ModelError:
        return ModelError(
            f"the image processor of {self.name} does more than resize, crop and normalise: {why}; "
            f"expected {'--processor pil, or ' if self.backend == 'torchvision' else ''}--transform"
            " timm with --img-size, --img-mean and --img-std where needed"
        )


def processor_config(
    record: Mapping[str, Any], name: str, *, any_size: bool = False
) -> dict[str, Any]:
    """input_size, interpolation, crop_pct, crop_mode, mean, std of a processor's `to_dict()`; with
    `any_size` a size that depends on the image is left to the model.

    Raises:
        ModelError: it does something that these do not say.
    """
    size = record.get("size") or {}
    resized, cropped = _sizes(record)
    if (
        not any_size
        and resized is None
        and cropped is None
        and record.get("do_resize", True)
    ):
        has_bounds = any(True for _ in _stated(record, patch=1, step=1))
        native = "--native for the size of each image, or " if has_bounds else ""
        raise ModelError(
            f"the image processor of {name} resizes to {size or 'proportions of the image'}, which "
            f"is no fixed size; give {native}--transform timm, and --img-size where the model's "
            "own is not meant"
        )
    found = dict(DEFAULT)
    final = cropped or resized
    if final is not None:
        found["input_size"] = (3, *final)
    if cropped and resized:
        found["crop_pct"] = _share(min(cropped), min(resized))
    if _is_fixed(size):
        found["crop_mode"] = "squash"
    if record.get("resample") in _FILTERS:
        found["interpolation"] = _FILTERS[record["resample"]]
    return found | _normalised(record, bool(record.get("offset")))


def _variants(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Other readings of a record, beside what it says: some resize a shortest edge to more than it,
    by `crop_pct` or by LeViT's 256/224, or squash; some do not say that they offset pixels."""
    yield {}
    if not _is_fixed(record.get("size")):
        shares = [x for x in (record.get("crop_pct"), 224 / 256) if isinstance(x, float)]
        yield from ({"crop_pct": share, "crop_mode": "center"} for share in shares)
        yield {"crop_mode": "squash"}
    if (offset := _normalised(record, True)) != _normalised(record, False):
        yield offset


def _normalised(record: Mapping[str, Any], offset: bool) -> dict[str, tuple[float, ...]]:
    """mean and std of pixels from 0 to 1; where the processor first makes them another scale, less
    1 if they are `offset` (ViViT: from -1 to 1), those that come to the same."""
    found: dict[str, tuple[float, ...]] = {
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
    }
    if record.get("do_normalize", True):
        own = {"mean": record.get("image_mean"), "std": record.get("image_std")}
        found = {
            key: DEFAULT[key] if value is None else tuple(float(x) for x in value)
            for key, value in own.items()
        }
    scale = 255 * float(record.get("rescale_factor") or 1 / 255)
    if not record.get("do_rescale") or abs(scale - 1) < _ROUNDED_SCALE:
        return found
    return {
        "mean": tuple((x + offset) / scale for x in found["mean"]),
        "std": tuple(x / scale for x in found["std"]),
    }


def _share(crop: int, edge: int) -> float:
    """The crop_pct from which floor(crop / crop_pct) is the edge."""
    exact = crop / edge
    return exact if int(crop / exact) == edge else crop / (edge + 0.5)


def _sizes(
    record: Mapping[str, Any],
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The sizes (rows, cols) that images are resized and cropped to, None where that is not fixed;
    a shortest edge gives a square."""
    resized = _edges(record.get("size")) if record.get("do_resize", True) else None
    cropped = _edges(record.get("crop_size")) if record.get("do_center_crop") else None
    return resized, cropped


def _is_fixed(size: Any) -> bool:
    return isinstance(size, Mapping) and bool(size.get("height") and size.get("width"))


def _edges(size: Any) -> tuple[int, int] | None:
    """(rows, cols) of a size; of a shortest edge a square."""
    if isinstance(size, int):
        return size, size
    if _is_fixed(size):
        return int(size["height"]), int(size["width"])
    if (
        isinstance(size, Mapping)
        and size.get("shortest_edge")
        and not size.get("longest_edge")
    ):
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    return None


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
    stated: list[tuple[Any, Any, Callable[[int, int], dict[str, Any]]]] = [
        (
            size.get("shortest_edge"),
            size.get("longest_edge"),
            lambda least, most: {"size": {"shortest_edge": least, "longest_edge": most}},
        ),
        (
            record.get("min_pixels"),
            record.get("max_pixels"),
            lambda least, most: {"min_pixels": least, "max_pixels": most},
        ),
    ]
    for least, most, call in stated:
        if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
            continue
        # GLM-4V's bounds are those of the frames to which a still image is repeated.
        for scale in dict.fromkeys((1, record.get("temporal_patch_size") or 1)):
            bounds = least // scale, most // scale
            yield _Bounds(
                Canvas((1, 1), None, step, None, "pixels", *bounds), call, scale
            )
    n = record.get("max_num_patches")
    if isinstance(n, int) and n > 0 and patch == step:
        canvas = Canvas((1, 1), None, patch, None, "patches", None, n * patch**2)
        yield _Bounds(canvas, lambda _, most: {"max_num_patches": most // patch**2})


def _small(bounds: _Bounds, step: int) -> tuple[Canvas, dict[str, Any]]:
    """The rule with small bounds, and the arguments that give them to the processor."""
    least = _LEAST * step**2
    most = _MOST * step**2
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
    """The processor's output for an image; None where it refuses the image or the arguments."""
    with quiet(), warnings.catch_warnings():  # transformers' remarks on arguments
        warnings.simplefilter("ignore")
        try:
            return processor.own(images=[image], return_tensors="pt", **more)
        except _REFUSALS:
            return None


def _size(made: Any, patch: int) -> Size | None:
    """(rows, cols) in pixels of the first image that a processor made, None where it says no
    grid, or has cut the image into several."""
    found = next((made[key] for key in _GRIDS if key in made), None)
    if found is None or len(found) != 1:
        return None
    rows, cols = (int(n) for n in found[0][-2:])
    return rows * patch, cols * patch
