"""Images that are rows of one array: in an .npz file, beside labels, class names and splits (the
images that ship with vitsee are such), and in the labelled file of NYU Depth V2,
`nyu_depth_v2_labeled.mat`, which is MATLAB 7.3 and so HDF5.

Its `images` are (height, width, channels, images) in MATLAB's order, so (images, channels, width,
height) in HDF5's. Image i of 1, 2, ... is called by its number in four digits: `0001`.
"""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core import demo
from vitsee_core.images.decoding import ArrayOpener, Opener, hash64, one_line
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.runtime.machine import human_bytes, memory_bytes
from vitsee_stores.plan import Size

log = logging.getLogger(__name__)

_NAMES = ("images", "labels", "class_names", "splits")


def open_npz(path: Path, name: str) -> ImageSource:
    """The rows of `images` (images, height, width), (images, height, width, 1 or 3) or, where the
    last axis is none of channels, (images, 1 or 3, height, width): uint8, or floats from 0 (black)
    to 1 (white), which are rounded to 8 bits.

    Optional beside it: `labels` (integers, -1 for none), `class_names` (text), `splits` (text, one
    a row). The whole array is in memory. A row's id is its number in the file, after its split's
    name and a slash where it has one. Raises DataError: anything else in the file, or a damaged
    one.
    """
    arrays = read_npz(path, name, _NAMES)
    images = arrays.get("images")
    if images is None:
        found = ", ".join(arrays) or "nothing"
        raise DataError(f"{name} has no array 'images'; found: {found}")
    images = _as_bytes(_channels_last(images, name), name)
    if 0 in images.shape[1:]:
        raise DataError(
            f"'images' of {name} is {images.shape}: the images have no pixels"
        )
    n = len(images)
    # An empty list is no names: labels are then bare numbers.
    class_names = [str(c) for c in _text(arrays, "class_names", None, name)] or None
    splits = [str(s) for s in _text(arrays, "splits", n, name)] or [""] * n
    labels = _labels(arrays, n, class_names, name)
    ids = [f"{split}/{row}" if split else str(row) for row, split in enumerate(splits)]
    return ImageSource(
        name, ArrayOpener(images), range(n), ids, labels, splits, class_names
    )


def open_demo(data: str, split: str | None) -> ImageSource:
    """demo:train, demo:test, demo:all. Raises DataError: no such part of it."""
    expression = data.partition(":")[2]
    if expression and split is not None:
        raise DataError(f"{data} names a split already; leave --split {split} out")
    if expression.removeprefix("demo:") in demo.models():
        known = ", ".join(f"demo:{name}" for name in demo.SPLITS)
        raise DataError(f"{data} is a model; the demo's data: {known}")
    return replace(
        open_npz(demo.data_file(), "demo").part(expression or split or "all"), name=data
    )


def _channels_last(images: NDArray[Any], name: str) -> NDArray[Any]:
    """(images, height, width) or (images, height, width, 3)."""
    shape = images.shape
    # Where both could be channels (3 rows, 3 channels) the last axis is taken.
    if images.ndim == 4 and shape[-1] not in (1, 3) and shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    known = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3))
    if not known or images.dtype not in (np.uint8, np.float16, np.float32, np.float64):
        raise DataError(
            f"'images' of {name} is {images.dtype} {shape}; expected uint8 or floats from 0 to 1, "
            "(N, H, W), (N, H, W, 3) or (N, 3, H, W)"
        )
    if images.ndim == 4 and images.shape[-1] == 1:
        return images[..., 0]
    return images


def _as_bytes(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Floats from 0 to 1 as 0 to 255."""
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images)
    out = np.empty(images.shape, np.uint8)
    for k, image in enumerate(
        images
    ):  # one by one: a copy in floats would be the larger one
        if not ((image >= 0) & (image <= 1)).all():
            low = float(image.min())
            high = float(image.max())
            raise DataError(
                f"'images' of {name} is {images.dtype}, and image {k} goes from {low:g} to "
                f"{high:g}; expected 0 (black) to 1 (white), not normalised, or uint8"
            )
        # float64, as products of float16 near 255 are rounded to eighths.
        out[k] = np.rint(image.astype(np.float64) * 255)
    log.info("'images' of %s are floats: rounded to 8 bits", name)
    return out


def read_npz(path: Path, name: str, known: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file, in memory; known: the names that they may have, by default any.
    Raises DataError: another array, Python objects, more bytes than this machine has memory, or a
    damaged file."""
    if not zipfile.is_zipfile(path):
        raise DataError(f"{name} cannot be read as .npz: it is no zip file, or cut short")
    try:
        with zipfile.ZipFile(path) as archive:
            # From the directory of the zip file, before anything is unpacked.
            size = sum(member.file_size for member in archive.infolist())
            most = memory_bytes()
        if size > most:
            raise DataError(
                f"{name} unpacks to {human_bytes(size)}, this machine has {human_bytes(most)} of "
                "memory; expected fewer images, or a folder of them"
            )
        with warnings.catch_warnings(), np.load(path, allow_pickle=False) as file:
            warnings.simplefilter("ignore")  # numpy's on headers of other versions
            extra = [key for key in file.files if known and key not in known]
            if extra:
                found = ", ".join(map(repr, extra))
                names = ", ".join(known)
                raise DataError(f"{name} has {found}; expected only: {names}")
            arrays = {key: file[key] for key in file.files}
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise nearly anything on damaged files
        if "allow_pickle" in str(error):
            raise DataError(f"{name} has Python objects; expected plain arrays") from None
        raise DataError(
            f"{name} cannot be read as .npz: {one_line(error).rstrip('.')}"
        ) from None
    for key, array in arrays.items():
        if not isinstance(
            array, np.ndarray
        ):  # numpy returns the bytes of what is no .npy
            raise DataError(f"{name} cannot be read as .npz: {key} in it is no array")
    return arrays


def _labels(
    arrays: dict[str, NDArray[Any]], n: int, class_names: list[str] | None, name: str
) -> NDArray[np.int64]:
    labels = arrays.get("labels")
    if labels is None:
        return np.full(n, -1, np.int64)
    if labels.dtype.kind not in "iu" or labels.shape != (n,):
        raise DataError(
            f"'labels' of {name} is {labels.dtype} {labels.shape}; expected integers ({n},)"
        )
    labels = np.asarray(labels, np.int64)
    top = len(class_names) if class_names else None
    if n and (labels.min() < -1 or (top is not None and labels.max() >= top)):
        upper = f" below {top}, the number of class names" if top is not None else ""
        raise DataError(
            f"'labels' of {name} go from {labels.min()} to {labels.max()}; "
            f"expected -1 (none) or class numbers from 0{upper}"
        )
    return labels


def _text(
    arrays: dict[str, NDArray[Any]], key: str, n: int | None, name: str
) -> list[Any]:
    values = arrays.get(key)
    if values is None:
        return []
    if (
        values.dtype.kind != "U"
        or values.ndim != 1
        or (n is not None and len(values) != n)
    ):
        rows = "names" if n is None else n
        raise DataError(
            f"{key!r} of {name} is {values.dtype} {values.shape}; expected text ({rows},)"
        )
    return list(values)


# ---------------- NYU Depth V2

IMAGES = "images"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_USER_BLOCK = 512  # MATLAB's header before HDF5 begins


def is_hdf5(path: Path) -> bool:
    """Whether a file is HDF5, with or without MATLAB's header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        # HDF5 may begin at 0 or, in MATLAB's files, behind a block of 512 bytes.
        begin = file.read(_USER_BLOCK + len(_SIGNATURE))
    return _SIGNATURE in (begin[: len(_SIGNATURE)], begin[_USER_BLOCK:])


def open_hdf5(name: str) -> Any:
    """The open file. Raises DataError: h5py is missing, or the file is damaged."""
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
        # (channels, width, height) -> (height, width, channels)
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
    """The images of the file. Raises DataError: h5py is missing, or the file is damaged or of
    another kind."""
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
