"""Canvases: inputs on which images of several sizes lie, each in the top left corner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]


def corner_size(size: Size, short_side: int, multiple: int) -> Size:
    """(height, width) to which an image of this size is resized: the short side exactly, the long
    one in proportion, rounded down to the multiple. In whole numbers, so that it is the same
    everywhere."""
    height, width = size
    long = max(size) * short_side // min(size) // multiple * multiple
    return (short_side, long) if height <= width else (long, short_side)


@dataclass(frozen=True)
class Canvas:
    """size: (height, width) in pixels, the same for all images. short_side, multiple: see
    `corner_size`. tiles: (height, width) of the input that the model saw at once; None where it saw
    the whole canvas, which every image fills then. crop_mode: "corner"."""

    size: Size
    short_side: int
    multiple: int
    tiles: Size | None = None
    crop_mode: str = "corner"

    def image(self, size: Size) -> Size:
        """(height, width) of an original image on the canvas."""
        return corner_size(size, self.short_side, self.multiple)

    def filled(self, sizes: NDArray[Any]) -> NDArray[np.bool_]:
        """(images,) which of these original sizes, (images, 2), cover the whole canvas; a size of
        0, of an image that could not be read, counts as one that does."""
        found = np.ones(len(sizes), np.bool_)
        known, back = np.unique(sizes, axis=0, return_inverse=True)
        for k, (height, width) in enumerate(known.tolist()):
            if height > 0 and width > 0:
                found[back.ravel() == k] = self.image((height, width)) == self.size
        return found
