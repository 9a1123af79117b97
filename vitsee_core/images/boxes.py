"""Boxes: parts of an image file that are used as images, x0 y0 x1 y1 in the file's pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitsee_core.images.decoding import Opener
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.sides import Size

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class BoxOpener(Opener):
    """Parts of images; a location is (the whole image's own location, its box or None)."""

    whole: Opener

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
    """A box as in lists: four numbers separated by spaces, commas or semicolons.

    Raises:
        DataError: not a box, or empty.
    """
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
    """Top, left, bottom, right of x0, y0, x1, y1, rounded as Pillow's crop does.

    Raises:
        DataError: it is empty, or exceeds an image of this size (height, width), if given.
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
