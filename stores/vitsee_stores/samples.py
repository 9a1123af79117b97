"""The images of a store: ids, labels, sizes; as they are given, stored and read."""

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
    """The images in the store's order.

    Attributes:
        index: (images,) position in the data set's own order.
        ids: path below the data folder, or row key.
        labels: (images,) class, -1 for none.
        splits: name of each image's split, "" for none.
        boxes: (images, 4) x0, y0, x1, y1 of each image in its file, NaN for a whole file; None if
            all images are whole files.
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

    def part(self, rows: slice) -> Samples:
        """Consecutive ones of these images."""
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
        """sha256 over id, NUL, label, newline of each image in order; stores pair by it."""
        digest = hashlib.sha256()
        for name, label in zip(self.ids, self.labels.tolist(), strict=True):
            digest.update(f"{name}\0{label}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True)
class StoreSamples:
    """The images in the store's order; each attribute has one entry per image.

    Attributes:
        index: position in the data set's own order.
        pixel_hash: hash of the pixels that the model was given, 0 if unreadable; None if the store
            does not keep it.
        encoded_id: (images, bytes) the ids as stored; decoded on first use of `id`.
        label: class, -1 for none.
        split: name of the split, "" for none.
        hash: hash of the encoded bytes.
        valid: whether the image could be read.
        size: (images, 2) height and width as decoded, see FORMAT.md on EXIF, 0 if
            unreadable.
        box: (images, 4) x0, y0, x1, y1 of an image that is part of its file, in the file's pixels,
            NaN for a whole file; None if all are whole files.
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
        """(images,) the ids without the part that a box adds: the image's file, as masks and lists
        name it."""
        if self.box is None:
            return self.id
        whole = np.isnan(self.box[:, 0])
        return np.where(
            whole, self.id, [name.rpartition("#")[0] for name in self.id.tolist()]
        )

    def to_pandas(self) -> Any:
        """The samples as a pandas DataFrame, one row per image, `size` as `height` and `width`,
        `box` as `x0`, `y0`, `x1`, `y1`. Raises VitseeError: pandas is not installed."""
        names = ("index", "id", "label", "split", "hash", "valid")
        sides = {"height": self.size[:, 0], "width": self.size[:, 1]}
        box = np.empty((len(self), 0)) if self.box is None else self.box
        edges = dict(zip(("x0", "y0", "x1", "y1"), box.T, strict=False))
        return to_frame(
            {**{name: getattr(self, name) for name in names}, **sides, **edges}
        )


def encode_id(name: str) -> bytes:
    """A sample's id as bytes; file names that are not UTF-8 keep their bytes."""
    return name.encode("utf-8", "surrogateescape")


def samples_arrays(
    samples: Samples, id_bytes: int, splits: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """The arrays below `samples/`. id_bytes, splits: of the store's plan and manifest."""
    names = np.array([encode_id(name) for name in samples.ids], f"S{id_bytes}")
    codes = {name: code for code, name in enumerate(splits)}
    boxes = (
        {} if samples.boxes is None else {"samples/box": samples.boxes.astype(np.float32)}
    )
    return {
        **boxes,
        "samples/index": np.asarray(samples.index, np.int64),
        "samples/label": np.asarray(samples.labels, np.int64),
        "samples/split": np.array([codes[name] for name in samples.splits], np.int16),
        "samples/id": names.view(np.uint8).reshape(len(samples), id_bytes),
    }


def check_samples(arrays: Mapping[str, NDArray[Any]], splits: Sequence[str]) -> None:
    """Refuse arrays that `samples_arrays` cannot have written. Raises ValueError: a code without a
    split, a label below -1, or an invalid box."""
    codes = arrays["samples/split"]
    labels = arrays["samples/label"]
    if codes.min() < 0 or codes.max() >= len(splits):
        raise ValueError(f"codes {codes.min()} to {codes.max()} of {len(splits)} splits")
    if labels.min() < -1:
        raise ValueError(f"the label {labels.min()}")
    boxes = arrays.get("samples/box")
    if boxes is not None:
        whole = np.isnan(boxes).all(1)
        empty = ~(boxes[:, :2] < boxes[:, 2:]).all(1) | ~np.isfinite(boxes).all(1)
        if (empty & ~whole).any():
            raise ValueError(f"the box {boxes[empty & ~whole][0].tolist()}")


def decode_ids(encoded: NDArray[np.uint8]) -> list[str]:
    """The ids of `samples/id`, (images, bytes)."""
    names = np.ascontiguousarray(encoded).view(f"S{encoded.shape[1]}").ravel()
    return [name.decode("utf-8", "surrogateescape") for name in names.tolist()]


def samples_from_arrays(
    arrays: Mapping[str, NDArray[Any]], splits: Sequence[str]
) -> Samples:
    """The samples that `samples_arrays` wrote. Raises ValueError: see `check_samples`."""
    check_samples(arrays, splits)
    return Samples(
        index=arrays["samples/index"],
        ids=decode_ids(arrays["samples/id"]),
        labels=arrays["samples/label"],
        splits=[splits[code] for code in arrays["samples/split"].tolist()],
        boxes=arrays.get("samples/box"),
    )
