"""The images of a store: ids, labels, sizes.

`Samples` is what a store is created with, `StoreSamples` what its readers have, and between the two
are the arrays below `samples/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.notebook import to_frame


@dataclass(frozen=True)
class Samples:
    """The images of a store that is to be made, in the store's order.

    Attributes:
        index: (images,) position in the order of the data set.
        ids: path below the data folder, or row key.
        labels: (images,) class, -1 for none.
        splits: name of each image's split, "" for none.
        boxes: (images, 4) x0, y0, x1, y1 of each image in its file, NaN for a complete file; None
            if all images are complete files.
    """

    index: NDArray[np.int64]
    ids: list[str]
    labels: NDArray[np.int64]
    splits: list[str]
    boxes: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.index), len(self.ids), len(self.labels), len(self.splits)}
        if self.boxes is not None:
            lengths.add(len(self.boxes))
        if len(lengths) != 1:
            raise ValueError(
                f"samples of one length were expected, not {sorted(lengths)}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def subset(self, rows: slice) -> Samples:
        """Return the images at these positions."""
        return Samples(
            index=self.index[rows],
            ids=self.ids[rows],
            labels=self.labels[rows],
            splits=self.splits[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
        )

    @property
    def id(self) -> NDArray[np.str_]:
        """(images,) ids as an array."""
        return np.array(self.ids, np.str_)

    @property
    def label(self) -> NDArray[np.int64]:
        """(images,) class of each image, -1 for none."""
        return self.labels

    @property
    def split(self) -> NDArray[np.str_]:
        """(images,) name of each image's split, "" for none."""
        return np.array(self.splits, np.str_)

    def fingerprint(self) -> str:
        """Return sha256 over id, NUL, label, newline of each image in order.

        Two stores hold the same images in the same order if it is equal.
        """
        digest = hashlib.sha256()
        for name, label in zip(self.ids, self.labels.tolist(), strict=True):
            digest.update(f"{name}\0{label}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True)
class StoreSamples:
    """The images of a store, in its order; each attribute has one entry per image.

    Attributes:
        index: position in the order of the data set.
        pixel_hash: hash of the pixels that the model was given, 0 if unreadable; None if the store
            does not keep it.
        encoded_id: (images, bytes) the ids as stored; decoded on first use of `id`.
        label: class, -1 for none.
        split: name of the split, "" for none.
        hash: hash of the encoded bytes.
        valid: whether the image could be read.
        size: (images, 2) height and width as decoded, turned by EXIF's orientation only if the
            store's transform has `exif`; 0 if unreadable.
        box: (images, 4) x0, y0, x1, y1 of an image that is cut out of its file, in the file's
            pixels, NaN for a complete file; None if all are complete files.
    """

    index: NDArray[np.int64]
    label: NDArray[np.int64]
    split: NDArray[np.str_]
    hash: NDArray[np.uint64]
    valid: NDArray[np.bool_]
    size: NDArray[np.int32]
    box: NDArray[np.float32] | None
    encoded_id: NDArray[np.uint8]
    pixel_hash: NDArray[np.uint64] | None = None

    @cached_property
    def id(self) -> NDArray[np.str_]:
        """(images,) the ids."""
        return np.array(decode_ids(self.encoded_id), np.str_)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def file(self) -> NDArray[np.str_]:
        """(images,) each image's file, as masks and lists name it: the id without "#" and box."""
        if self.box is None:
            return self.id
        is_complete = np.isnan(self.box[:, 0])
        names = [name.rpartition("#")[0] for name in self.id.tolist()]
        return np.where(is_complete, self.id, names)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame of one row per image.

        `size` becomes `height` and `width`, `box` (if any) `x0`, `y0`, `x1`, `y1`.

        Raises:
            VitseeError: pandas is not installed.
        """
        columns: dict[str, NDArray[Any]] = {
            "index": self.index,
            "id": self.id,
            "label": self.label,
            "split": self.split,
            "hash": self.hash,
            "valid": self.valid,
            "height": self.size[:, 0],
            "width": self.size[:, 1],
        }
        if self.box is not None:
            columns["x0"] = self.box[:, 0]
            columns["y0"] = self.box[:, 1]
            columns["x1"] = self.box[:, 2]
            columns["y1"] = self.box[:, 3]
        return to_frame(columns)


def encode_id(name: str) -> bytes:
    """Return a sample's id as bytes; file names that are not UTF-8 keep theirs."""
    return name.encode("utf-8", "surrogateescape")


def samples_arrays(
    samples: Samples, id_bytes: int, splits: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a store that are below `samples/`, by name.

    Args:
        samples: the images.
        id_bytes: length of an encoded id, from the store's plan; shorter ones end in NULs.
        splits: names of all splits, from the store's manifest; arrays hold their positions.
    """
    arrays: dict[str, NDArray[Any]] = {}
    if samples.boxes is not None:
        arrays["samples/box"] = samples.boxes.astype(np.float32)  # (images, 4)
    arrays["samples/index"] = np.asarray(samples.index, np.int64)
    arrays["samples/label"] = np.asarray(samples.labels, np.int64)
    codes = {name: code for code, name in enumerate(splits)}
    arrays["samples/split"] = np.array([codes[name] for name in samples.splits], np.int16)
    # Bytes in place of strings: the core of Zarr 3 has no type for text.
    ids = np.array([encode_id(name) for name in samples.ids], f"S{id_bytes}")
    arrays["samples/id"] = ids.view(np.uint8).reshape(len(samples), id_bytes)
    return arrays


def check_samples(arrays: Mapping[str, NDArray[Any]], splits: Sequence[str]) -> None:
    """Refuse arrays that `samples_arrays` cannot have written.

    Raises:
        ValueError: a code without a split, a label below -1, or a box without an area.
    """
    codes = arrays["samples/split"]
    labels = arrays["samples/label"]
    if codes.min() < 0 or codes.max() >= len(splits):
        raise ValueError(f"codes {codes.min()} to {codes.max()} of {len(splits)} splits")
    if labels.min() < -1:
        raise ValueError(f"the label {labels.min()}")
    boxes = arrays.get("samples/box")
    if boxes is not None:
        is_complete = np.isnan(boxes).all(axis=1)
        has_area = (boxes[:, :2] < boxes[:, 2:]).all(axis=1)
        is_invalid = ~is_complete & ~(has_area & np.isfinite(boxes).all(axis=1))
        if is_invalid.any():
            raise ValueError(f"the box {boxes[is_invalid][0].tolist()}")


def decode_ids(encoded: NDArray[np.uint8]) -> list[str]:
    """Return the ids of `samples/id`, (images, bytes)."""
    names = np.ascontiguousarray(encoded).view(f"S{encoded.shape[1]}").ravel()
    return [name.decode("utf-8", "surrogateescape") for name in names.tolist()]


def samples_from_arrays(
    arrays: Mapping[str, NDArray[Any]], splits: Sequence[str]
) -> Samples:
    """Return the samples that `samples_arrays` wrote.

    Raises:
        ValueError: it cannot have written these arrays.
    """
    check_samples(arrays, splits)
    return Samples(
        index=arrays["samples/index"],
        ids=decode_ids(arrays["samples/id"]),
        labels=arrays["samples/label"],
        splits=[splits[code] for code in arrays["samples/split"].tolist()],
        boxes=arrays.get("samples/box"),
    )
