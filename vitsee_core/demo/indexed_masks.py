"""Masks as PNG files whose pixels are numbers of objects, as VOC and DAVIS publish them: 0 is
background, 255 void, and a palette gives each number its colour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

VOID = 255  # pixels that no score counts


def palette() -> list[int]:
    """Return the colours of VOC and DAVIS for 256 numbers: red, green and blue of each in turn.

    A colour's bits are every third bit of the number, the lowest of them the highest of the colour,
    so that small numbers, which are near each other, have colours that are not.
    """
    colours = np.zeros((256, 3), np.int64)
    numbers = np.arange(256)
    for bit in range(8):
        for channel in range(3):
            number_bit = numbers >> (3 * bit + channel) & 1
            colours[:, channel] |= number_bit << (7 - bit)
    return [int(value) for value in colours.ravel()]


def write_mask(path: Path, labels: NDArray[np.uint8]) -> None:
    """Write numbers of objects as a PNG with the palette. labels: (height, width)."""
    image = Image.fromarray(labels)
    image.putpalette(palette())
    image.save(path)
