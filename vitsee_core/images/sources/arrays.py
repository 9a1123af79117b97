"""Arrays in an .npz file: images, and optionally labels, class names, splits; the images that ship
with vitsee are such."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core import demo
from vitsee_core.images.decoding import ArrayOpener, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.runtime.machine import human_bytes, memory_bytes

log = logging.getLogger(__name__)

_NAMES = ("images", "labels", "class_names", "splits")


def open_npz(path: Path, name: str) -> ImageSource:
    """The rows of `images` (images, height, width), (images, height, width, 1 or 3) or, where the
    last axis is none of channels, (images, 1 or 3, height, width): uint8, or floats from 0 (black)
    to 1 (white), which are rounded to 8 bits.

    Optional beside it: `labels` (integers, -1 for none), `class_names` (text), `splits` (text, one
    a row). The whole array is in memory. A row's id is its number in the file, after its
    split's name and a slash where it has one.

    Raises:
        DataError: anything else in the file, or a damaged one.
    """
    arrays = read_npz(path, name, _NAMES)
    images = arrays.get("images")
    if images is None:
        found = ", ".join(arrays) or "nothing"
        raise DataError(f"{name} has no array 'images'; found: {found}")
    images = _as_bytes(_channels_last(images, name), name)
    if 0 in images.shape[1:]:
        raise DataError(f"'images' of {name} is {images.shape}: the images have no pixels")
    n = len(images)
    class_names = [str(c) for c in _text(arrays, "class_names", None, name)] or None
    splits = [str(s) for s in _text(arrays, "splits", n, name)] or [""] * n
    labels = _labels(arrays, n, class_names, name)
    ids = [f"{split}/{row}" if split else str(row) for row, split in enumerate(splits)]
    return ImageSource(name, ArrayOpener(images), range(n), ids, labels, splits, class_names)


def open_demo(data: str, split: str | None) -> ImageSource:
    """demo:train, demo:test, demo:all. Raises DataError: no such part of it."""
    expression = data.partition(":")[2]
    if expression and split is not None:
        raise DataError(f"{data} names a split already; leave --split {split} out")
    if expression.removeprefix("demo:") in demo.models():
        known = ", ".join(f"demo:{name}" for name in demo.SPLITS)
        raise DataError(f"{data} is a model; the demo's data: {known}")
    return replace(open_npz(demo.data_file(), "demo").part(expression or split or "all"), name=data)


def _channels_last(images: NDArray[Any], name: str) -> NDArray[Any]:
    """(images, height, width) or (images, height, width, 3)."""
    shape = images.shape
    if images.ndim == 4 and shape[-1] not in (1, 3) and shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    known = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3))
    if not known or images.dtype not in (np.uint8, np.float16, np.float32, np.float64):
        raise DataError(
            f"'images' of {name} is {images.dtype} {shape}; expected uint8 or floats from 0 to 1, "
            "(N, H, W), (N, H, W, 3) or (N, 3, H, W)"
        )
    return images[..., 0] if images.ndim == 4 and images.shape[-1] == 1 else images


def _as_bytes(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Floats from 0 to 1 as 0 to 255."""
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images)
    out = np.empty(images.shape, np.uint8)
    for k, image in enumerate(images):  # one by one: a copy in floats would be the larger one
        if not ((image >= 0) & (image <= 1)).all():
            low, high = float(image.min()), float(image.max())
            raise DataError(
                f"'images' of {name} is {images.dtype}, and image {k} goes from {low:g} to "
                f"{high:g}; expected 0 (black) to 1 (white), not normalised, or uint8"
            )
        out[k] = np.rint(image.astype(np.float64) * 255)
    log.info("'images' of %s are floats: rounded to 8 bits", name)
    return out


def read_npz(path: Path, name: str, known: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file, in memory; known: the names that they may have, by default any.

    Raises:
        DataError: another array, Python objects, more bytes than this machine has memory, or a
            damaged file.
    """
    if not zipfile.is_zipfile(path):
        raise DataError(f"{name} cannot be read as .npz: it is no zip file, or cut short")
    try:
        with zipfile.ZipFile(path) as archive:
            size, most = sum(member.file_size for member in archive.infolist()), memory_bytes()
        if size > most:
            raise DataError(
                f"{name} unpacks to {human_bytes(size)}, this machine has {human_bytes(most)} of "
                "memory; expected fewer images, or a folder of them"
            )
        with warnings.catch_warnings(), np.load(path, allow_pickle=False) as file:
            warnings.simplefilter("ignore")  # numpy's on headers of other versions
            extra = [key for key in file.files if known and key not in known]
            if extra:
                found, names = ", ".join(map(repr, extra)), ", ".join(known)
                raise DataError(f"{name} has {found}; expected only: {names}")
            arrays = {key: file[key] for key in file.files}
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise nearly anything on damaged files
        if "allow_pickle" in str(error):
            raise DataError(f"{name} has Python objects; expected plain arrays") from None
        raise DataError(f"{name} cannot be read as .npz: {one_line(error).rstrip('.')}") from None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns the bytes of what is no .npy
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


def _text(arrays: dict[str, NDArray[Any]], key: str, n: int | None, name: str) -> list[Any]:
    values = arrays.get(key)
    if values is None:
        return []
    if values.dtype.kind != "U" or values.ndim != 1 or (n is not None and len(values) != n):
        rows = "names" if n is None else n
        raise DataError(
            f"{key!r} of {name} is {values.dtype} {values.shape}; expected text ({rows},)"
        )
    return list(values)
