"""Canvases: fixed-size inputs that hold images of several sizes, each in the top left corner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]


def corner_size(size: Size, short_side: int, multiple: int) -> Size:
    """(height, width) to which an image of this size is resized: the short side exactly, the long
    side in proportion, rounded down to the multiple. Integer arithmetic gives the same result on
    every machine."""
    height, width = size
    long = max(size) * short_side // min(size) // multiple * multiple
    return (short_side, long) if height <= width else (long, short_side)


@dataclass(frozen=True)
class Canvas:
    """A fixed-size input for images of several sizes."""

    size: Size  # (height, width) in pixels, the same for all images
    short_side: int  # see `corner_size`
    multiple: int  # see `corner_size`
    # (height, width) of the input that the model saw at once; None where it saw the whole canvas,
    # which every image then fills
    tiles: Size | None = None
    crop_mode: str = "corner"

    def image(self, size: Size) -> Size:
        """(height, width) of an original image on the canvas."""
        return corner_size(size, self.short_side, self.multiple)

    def filled(self, sizes: NDArray[Any]) -> NDArray[np.bool_]:
        """(images,) which of these original sizes, (images, 2), cover the whole canvas. A size of
        0, from an image that could not be read, counts as covering it."""
        covers = np.ones(len(sizes), np.bool_)
        known, back = np.unique(sizes, axis=0, return_inverse=True)
        for k, (height, width) in enumerate(known.tolist()):
            if height > 0 and width > 0:
                covers[back.ravel() == k] = self.image((height, width)) == self.size
        return covers
