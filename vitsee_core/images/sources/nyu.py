"""The images of the labelled file of NYU Depth V2, `nyu_depth_v2_labeled.mat`: MATLAB 7.3, which is
HDF5.

Its `images` are (height, width, channels, images) in MATLAB's order, so (images, channels, width,
height) in HDF5's. Image i of 1, 2, ... is called by its number in four digits: `0001`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitsee_core.images.decoding import Opener, hash64, one_line
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.sides import Size

IMAGES = "images"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_USER_BLOCK = 512  # MATLAB's header before HDF5 begins


def is_hdf5(path: Path) -> bool:
    """Whether a file is HDF5, with or without MATLAB's header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(_USER_BLOCK + len(_SIGNATURE))
    return _SIGNATURE in (begin[: len(_SIGNATURE)], begin[_USER_BLOCK:])


def open_hdf5(name: str) -> Any:
    """The open file.

    Raises:
        DataError: h5py is missing, or the file is damaged.
    """
    try:
        import h5py
    except ImportError:
        raise DataError(
            f"{name} needs the package h5py; run: pip install 'vitsee[depth]'"
        ) from None
    try:
        return h5py.File(name, "r")
    except OSError as error:
        raise DataError(f"{name} cannot be read as HDF5: {one_line(error)}") from None


def nyu_ids(n: int) -> list[str]:
    """The names of the first n images: "0001", "0002", and so on."""
    return [f"{i + 1:04d}" for i in range(n)]


@dataclass(frozen=True)
class NyuOpener(Opener):
    """Images of the file at `path`; a location is a number from 0."""

    path: str

    def _load(self, location: int) -> tuple[Image.Image, int]:
        pixels = self._pixels(location)
        return Image.fromarray(np.ascontiguousarray(pixels.transpose(2, 1, 0))), hash64(
            pixels.tobytes()
        )

    def _bytes(self, location: int) -> bytes:
        return bytes(self._pixels(location).tobytes())

    def _size(self, location: int) -> Size:
        with open_hdf5(self.path) as file:
            _, _, width, height = file[IMAGES].shape
        return int(height), int(width)

    def _pixels(self, location: int) -> Any:
        """(channels, width, height)."""
        with open_hdf5(self.path) as file:
            try:
                return np.asarray(file[IMAGES][location])
            except OSError as error:
                raise ImageError(f"image {location + 1}", one_line(error)) from None


def open_nyu(path: Path, name: str) -> ImageSource:
    """The images of the file.

    Raises:
        DataError: h5py is missing, or the file is damaged or of another kind.
    """
    if not is_hdf5(path):
        raise DataError(
            f"{name} is no MATLAB file of version 7.3; expected nyu_depth_v2_labeled.mat"
        )
    with open_hdf5(str(path)) as file:
        images = file.get(IMAGES)
        shape: tuple[int, ...] = getattr(images, "shape", ())
        kind = str(getattr(images, "dtype", ""))
        if len(shape) != 4 or shape[1] != 3 or kind != "uint8":
            raise DataError(
                f"{name} has no uint8 '{IMAGES}' of (images, 3, width, height); found: "
                f"{', '.join(file) or 'nothing'}; expected nyu_depth_v2_labeled.mat"
            )
    n = int(shape[0])
    opener = NyuOpener(str(path.absolute()))
    return ImageSource(name, opener, range(n), nyu_ids(n), np.full(n, -1), [""] * n, None)
