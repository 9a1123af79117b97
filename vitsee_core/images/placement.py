"""Geometry in pixels.

Boxes are parts of an image file that are used as images; a `Placement` is the position of an image,
and so of everything drawn on it, on a model's input; and cells are the pixels of a grid's tokens.
"""

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

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the file


@dataclass(frozen=True)
class BoxOpener(Opener):
    """Opens parts of image files; a location is (the file's location, a box, or None for all).

    The hash of a part is that of its whole file.
    """

    files: Opener

    def upright(self) -> Opener:
        """Return an opener of parts of upright images: boxes are in the pixels of these."""
        return BoxOpener(self.files.upright())

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """Return an opener to pickle for a worker, and the descriptors that it must inherit."""
        heir, fds = self.files.inherit()
        return BoxOpener(heir), fds

    def _load(self, location: tuple[Any, Box | None]) -> tuple[Image.Image, int]:
        """Return a part of an image; raise ImageError if the box reaches out of it."""
        inner, box = location
        image, encoded_hash = self.files.load(inner)
        if box is None:
            return image, encoded_hash
        try:
            top, left, bottom, right = box_pixels(box, (image.height, image.width))
        except DataError as error:
            raise ImageError(str(inner), str(error)) from None
        return image.crop((left, top, right, bottom)), encoded_hash

    def _bytes(self, location: tuple[Any, Box | None]) -> bytes:
        inner, _ = location
        return self.files._bytes(inner)

    def _size(self, location: tuple[Any, Box | None]) -> Size:
        inner, box = location
        size = self.files.size(inner)
        if box is None:
            return size
        top, left, bottom, right = box_pixels(box, size)
        return bottom - top, right - left


def parse_box(text: str) -> Box:
    """Return a box from its text in a list: numbers separated by spaces, commas or semicolons.

    Raises:
        DataError: it is not a box, or an empty one.
    """
    words = text.strip().strip("[]()").replace(",", " ").replace(";", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        raise DataError(f"the box {text.strip()[:60]!r} is not x0 y0 x1 y1 in pixels")
    # Rounded to float32, as stores have boxes.
    x0, y0, x1, y1 = (float(np.float32(edge)) for edge in numbers)
    box_pixels((x0, y0, x1, y1), None)
    return x0, y0, x1, y1


def box_text(box: Sequence[float], between: str = " ") -> str:
    """Return a box's four numbers as text, without trailing zeros."""
    return between.join(f"{float(edge):.7g}" for edge in box)


def box_pixels(box: Sequence[float], size: Size | None) -> tuple[int, int, int, int]:
    """Return (top, left, bottom, right) in whole pixels of a box x0, y0, x1, y1.

    They are rounded as Pillow's crop rounds.

    Raises:
        DataError: the box is empty, or exceeds an image of `size` (height, width), if given.
    """
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
# The settings of a transform that decide its steps.
_GEOMETRIC_SETTINGS = (
    "input_size",
    "interpolation",
    "crop_pct",
    "crop_mode",
    "crop_border_pixels",
    "mean",
    "short_side",
    "multiple",
    "min_pixels",
    "max_pixels",
    "processor",
)


@dataclass(frozen=True)
class Placement:
    """The edges of an image on the model's input, in pixels of the input.

    0 is the left or upper edge of the first pixel; parts that were cropped are beyond the input.
    """

    top: float
    left: float
    bottom: float
    right: float

    def points(self, xy: NDArray[Any], size: Sequence[int]) -> NDArray[np.float64]:
        """Return (points, 2) x, y on the input of points on the original image.

        On both, the centre of a pixel has integer coordinates.

        Args:
            xy: (points, 2) x, y in pixels of the original image.
            size: height and width of the original image.
        """
        image_points = np.asarray(xy, np.float64)
        begin = np.array([self.left, self.top])
        end = np.array([self.right, self.bottom])
        sides = np.array([size[1], size[0]])
        # Half a pixel is added and taken off, since edges count from the first pixel's edge.
        return begin + (image_points + 0.5) * (end - begin) / sides - 0.5

    def on_image(self, layout: TokenLayout) -> NDArray[np.bool_]:
        """Return (rows, cols) which cells of a grid have their centre on the image.

        Args:
            layout: the layout of tokens of the same input, with a grid.

        Raises:
            ValueError: the layout has no grid.
        """
        if layout.grid is None or layout.stride_px is None:
            raise ValueError("a layout without a grid has no cells")
        n_rows, n_cols = layout.grid
        centre_y = layout.offset_px[0] + (np.arange(n_rows) + 0.5) * layout.stride_px[0]
        centre_x = layout.offset_px[1] + (np.arange(n_cols) + 0.5) * layout.stride_px[1]
        rows_on = (centre_y > self.top) & (centre_y < self.bottom)
        cols_on = (centre_x > self.left) & (centre_x < self.right)
        return rows_on[:, None] & cols_on


def place(
    transform: Mapping[str, Any], size: Sequence[int], box: Sequence[float] | None = None
) -> Placement:
    """Return the position of an image on the model's input; cropped parts are beyond the input.

    Args:
        transform: the transform of a store or of a model.
        size: height and width of the original image (`store.sizes`); with a box those of its file.
        box: x0, y0, x1, y1 of the part of the file that is the image, cut out before everything
            else; rounded to whole pixels, as Pillow's crop does.

    Raises:
        DataError: a transform that does more than resize and crop, an image without pixels, a box
            that is empty or not inside.
    """
    file_size = int(size[0]), int(size[1])
    # (top, left, bottom, right)
    image_box = (0, 0, *file_size) if box is None else box_pixels(box, file_size)
    box_top, box_left, box_bottom, box_right = image_box
    current: Size = (box_bottom - box_top, box_right - box_left)
    if min(current) < 1:
        raise _no_pixels(file_size)
    # The rectangle of the whole file, in pixels of the image after the steps so far.
    top = -float(box_top)
    left = -float(box_left)
    height = float(file_size[0])
    width = float(file_size[1])
    for name, arguments in _geometric_steps(transform):
        corner: Size = (0, 0)
        if name in _RESIZES:
            new: Size = _RESIZES[name](current, *arguments)
            if min(new) < 1:
                raise _no_pixels(file_size)
            # Multiplied before the division: exact for sizes that divide each other.
            top = top * new[0] / current[0]
            height = height * new[0] / current[0]
            left = left * new[1] / current[1]
            width = width * new[1] / current[1]
        elif name == "center_crop":
            # The fill does not move anything; `down` is the processor's way of rounding.
            new, _, *down = arguments
            corner = (
                crop_corner(current[0], new[0], *down),
                crop_corner(current[1], new[1], *down),
            )
        elif name == "trim":
            corner, new = trimmed(current, *arguments)
        else:
            continue
        top = top - corner[0]
        left = left - corner[1]
        current = new
    return Placement(top, left, top + height, left + width)


def _no_pixels(size: Size) -> DataError:
    """Return the error for an image of which no pixel is left on the input."""
    return DataError(
        f"an image of {size[1]} x {size[0]} pixels has no place on the input"
    )


def _geometric_steps(transform: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the steps of a transform; raise DataError if it does more than resize and crop."""
    settings = {
        name: transform[name]
        for name in _GEOMETRIC_SETTINGS
        if transform.get(name) is not None
    }
    # As text, since a dict cannot be a key of the cache.
    return _cached_steps(json.dumps(settings, default=str, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _cached_steps(transform: str) -> tuple[Step, ...]:
    """Return the steps of a transform in JSON; it is called for each image."""
    recipe = make_recipe(json.loads(transform))
    if recipe.timm_transform is not None:
        raise DataError(
            f"points cannot follow the images' transform: {recipe.timm_transform}; expected only "
            "resize and crop"
        )
    return recipe.steps


def cell_edges(layout: TokenLayout, size: tuple[int, ...]) -> tuple[Edges, Edges]:
    """Return the edges of a grid's cells: (rows + 1,) of its rows and (cols + 1,) of its columns.

    Cell (r, c) has the pixels from round(offset_px + (r, c) stride_px) to round(offset_px + (r + 1,
    c + 1) stride_px), clipped to the input, where it may be empty. Pixels outside of all cells
    belong to none.

    Args:
        layout: the layout of the tokens.
        size: (height, width) of the input.

    Raises:
        VitseeError: the layout has no grid, or does not say where it lies.
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
    """Return (n_out,) the index, among n cells, of the nearest cell of each output pixel.

    The output divides the range from `low` to `high`, counted in cells, into `n_out` equal pixels;
    the nearest cell is the one that contains a pixel's centre. Indices below 0, or n and above,
    are beyond the cells. Pillow's nearest resize computes it, so that its rounding is included.
    """
    # A ramp of the indices, long enough for the range, is resized in place of an image.
    begin = min(0, int(np.floor(low)))
    end = max(n, int(np.ceil(high)))
    ramp = Image.fromarray(np.arange(begin, end, dtype=np.int32)[None])
    box = (low - begin, 0, high - begin, 1)
    resized = ramp.resize((n_out, 1), Image.Resampling.NEAREST, box)
    return np.asarray(resized)[0].astype(np.int64)
