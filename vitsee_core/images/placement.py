"""Where things lie in pixels: boxes (parts of an image file that are used as images, x0 y0 x1 y1 in
its pixels), an image on a model's input with everything drawn on it, and the cells of a grid."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images.decoding import Opener
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.transform import (
    Step,
    crop_corner,
    make_recipe,
    resized,
    resized_keep_ratio,
    trimmed,
)
from vitsee_core.types import Integers
from vitsee_stores.errors import VitseeError
from vitsee_stores.plan import Size, TokenLayout, canvas_size

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class BoxOpener(Opener):
    """Parts of images; a location is (the whole image's own location, its box or None)."""

    whole: Opener

    def upright(self) -> Opener:
        """The same parts of images that are turned upright: boxes are in the pixels of these."""
        return BoxOpener(self.whole.upright())

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        heir, fds = self.whole.inherit()
        return BoxOpener(heir), fds

    def _load(self, location: tuple[Any, Box | None]) -> tuple[Image.Image, int]:
        inner, box = location
        image, value = self.whole.load(inner)
        if box is None:
            return image, value
        try:
            top, left, bottom, right = box_pixels(box, (image.height, image.width))
        except DataError as error:
            raise ImageError(str(inner), str(error)) from None
        return image.crop((left, top, right, bottom)), value

    def _bytes(self, location: tuple[Any, Box | None]) -> bytes:
        return self.whole._bytes(location[0])

    def _size(self, location: tuple[Any, Box | None]) -> Size:
        inner, box = location
        size = self.whole.size(inner)
        if box is None:
            return size
        top, left, bottom, right = box_pixels(box, size)
        return bottom - top, right - left


def parse_box(text: str) -> Box:
    """A box as in lists: four numbers separated by spaces, commas or semicolons. Raises DataError:
    not a box, or empty."""
    words = text.strip().strip("[]()").replace(",", " ").replace(";", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        raise DataError(f"the box {text.strip()[:60]!r} is not x0 y0 x1 y1 in pixels")
    x0, y0, x1, y1 = (float(np.float32(edge)) for edge in numbers)  # as stores keep them
    box_pixels((x0, y0, x1, y1), None)
    return x0, y0, x1, y1


def box_text(box: Sequence[float], between: str = " ") -> str:
    """The four numbers, without trailing zeros."""
    return between.join(f"{float(edge):.7g}" for edge in box)


def box_pixels(box: Sequence[float], size: Size | None) -> tuple[int, int, int, int]:
    """Top, left, bottom, right of x0, y0, x1, y1, rounded as Pillow's crop does. Raises DataError:
    it is empty, or exceeds an image of this size (height, width), if given."""
    numbers = [float(edge) for edge in box]
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        raise DataError(f"the box {box_text(box)} is not x0 y0 x1 y1 in pixels")
    left, top, right, bottom = (round(edge) for edge in numbers)
    if left >= right or top >= bottom:
        raise DataError(
            f"the box {box_text(box)} is empty; expected x0 y0 x1 y1 with x0 < x1, y0 < y1"
        )
    if size is not None and (left < 0 or top < 0 or bottom > size[0] or right > size[1]):
        raise DataError(
            f"the box {box_text(box)} reaches out of its image, which has {size[1]} x {size[0]} "
            "pixels"
        )
    return top, left, bottom, right


Edges = Integers

# ---------------- an image on a model's input

_RESIZES: dict[str, Callable[..., Size]] = {
    "resize": lambda size, edges, _: resized(size, edges),
    "resize_keep_ratio": lambda size, target, longest, _: resized_keep_ratio(
        size, target, longest
    ),
    "corner": lambda size, _, *numbers: canvas_size(size, *numbers[:-1]),
}
_DECIDING = (
    *(
        "input_size",
        "interpolation",
        "crop_pct",
        "crop_mode",
        "crop_border_pixels",
        "mean",
    ),
    *("short_side", "multiple", "min_pixels", "max_pixels", "processor"),
)


@dataclass(frozen=True)
class Placement:
    """The edges of the whole image on the model's input, in its pixels: 0 is the left or upper edge
    of the first, and cropped parts are beyond the input."""

    top: float
    left: float
    bottom: float
    right: float

    def points(self, xy: NDArray[Any], size: Sequence[int]) -> NDArray[np.float64]:
        """(points, 2) x, y on the input, in pixels whose centres are integers.

        Args:
            xy: (points, 2) x, y in pixels of the original image, counted alike.
            size: height and width of the original image.
        """
        at = np.asarray(xy, np.float64)
        begin = np.array([self.left, self.top])
        end = np.array([self.right, self.bottom])
        sides = np.array([size[1], size[0]])
        return begin + (at + 0.5) * (end - begin) / sides - 0.5

    def on_image(self, layout: TokenLayout) -> NDArray[np.bool_]:
        """(rows, cols) which cells of a grid have their centre on the image.

        Args:
            layout: with a grid, of the same input.

        Raises:
            ValueError: it has none.
        """
        if layout.grid is None or layout.stride_px is None:
            raise ValueError("a layout without a grid has no cells")
        rows, cols = (
            layout.offset_px[axis]
            + (np.arange(layout.grid[axis]) + 0.5) * layout.stride_px[axis]
            for axis in (0, 1)
        )
        down = (rows > self.top) & (rows < self.bottom)
        across = (cols > self.left) & (cols < self.right)
        return down[:, None] & across


def place(
    transform: Mapping[str, Any], size: Sequence[int], box: Sequence[float] | None = None
) -> Placement:
    """The position of the whole image on the model's input, beyond it where it was cropped.

    Args:
        transform: a store's, or a model's.
        size: height and width of the original image (`store.sizes`); with a box those of its file.
        box: x0, y0, x1, y1 of the part of the file that is the image, cut out before everything
            else; rounded to whole pixels, as Pillow's crop does.

    Raises:
        DataError: a transform that does more than resize and crop, an image without pixels, a box
            that is empty or not inside.
    """
    whole = int(size[0]), int(size[1])
    part = (0, 0, *whole) if box is None else box_pixels(box, whole)
    now = part[2] - part[0], part[3] - part[1]
    if min(now) < 1:
        raise _no_place(whole)
    # Of the whole image, in the pixels of what it has become so far.
    top = -float(part[0])
    left = -float(part[1])
    height = float(whole[0])
    width = float(whole[1])
    for name, arguments in _steps(transform):
        corner: Size = (0, 0)
        if name in _RESIZES:
            new: Size = _RESIZES[name](now, *arguments)
            if min(new) < 1:
                raise _no_place(whole)
            top, height = (edge * new[0] / now[0] for edge in (top, height))
            left, width = (edge * new[1] / now[1] for edge in (left, width))
        elif name == "center_crop":
            new, _, *down = arguments
            corner = (
                crop_corner(now[0], new[0], *down),
                crop_corner(now[1], new[1], *down),
            )
        elif name == "trim":
            corner, new = trimmed(now, *arguments)
        else:
            continue
        top = top - corner[0]
        left = left - corner[1]
        now = new
    return Placement(top, left, top + height, left + width)


def _no_place(size: Size) -> DataError:
    return DataError(
        f"an image of {size[1]} x {size[0]} pixels has no place on the input"
    )


def _steps(transform: Mapping[str, Any]) -> tuple[Step, ...]:
    deciding = {
        name: transform[name] for name in _DECIDING if transform.get(name) is not None
    }
    return _steps_of(json.dumps(deciding, default=str, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _steps_of(transform: str) -> tuple[Step, ...]:
    recipe = make_recipe(json.loads(transform))
    if recipe.whole is not None:
        raise DataError(
            f"points cannot follow the images' transform: {recipe.whole}; expected only resize and "
            "crop"
        )
    return recipe.steps


def cell_edges(layout: TokenLayout, size: tuple[int, ...]) -> tuple[Edges, Edges]:
    """The edges of the rows and of the columns of cells, (rows + 1,) and (cols + 1,).

    Cell (r, c) is the pixels from round(offset_px + (r, c) stride_px) to round(offset_px + (r + 1,
    c + 1) stride_px), clipped to an image of `size` (height, width), and may be empty there. Pixels
    outside all cells belong to none. Raises VitseeError: the layout has no grid, or an unknown
    position.
    """
    if layout.grid is None or layout.stride_px is None:
        raise VitseeError(
            "these tokens do not say which pixels are theirs: no grid, or no stride"
        )
    rows, cols = (
        np.clip(np.rint(start + step * np.arange(n + 1)), 0, length).astype(np.int64)
        for n, length, start, step in zip(
            layout.grid, size, layout.offset_px, layout.stride_px, strict=True
        )
    )
    return rows, cols


def nearest_places(n: int, n_out: int, low: float, high: float) -> Integers:
    """(n_out,) which of n places contains the middle of each of `n_out` equal parts of `low` to
    `high`, by Pillow's nearest resize, its rounding included; below 0 or at least n beyond them."""
    begin = min(0, int(np.floor(low)))
    end = max(n, int(np.ceil(high)))
    ramp = Image.fromarray(np.arange(begin, end, dtype=np.int32)[None])
    box = (low - begin, 0, high - begin, 1)
    resized = ramp.resize((n_out, 1), Image.Resampling.NEAREST, box)
    return np.asarray(resized)[0].astype(np.int64)
