"""The images of a store: ids, labels, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.manifest import decode_ids
from vitsee_stores.notebook import to_frame


@dataclass(frozen=True)
class StoreSamples:
    """The images in the store's order; each attribute has one entry per image.

    Attributes:
        index: position in the data set's own order.
        encoded_id: (images, bytes) the ids as stored; decoded on first use of `id`.
        label: class, -1 for none.
        split: name of the split, "" for none.
        hash: hash of the encoded bytes.
        valid: whether the image could be read.
        size: (images, 2) height and width as decoded, EXIF orientation not applied, 0 if
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
        return np.where(whole, self.id, [name.rpartition("#")[0] for name in self.id.tolist()])

    def to_pandas(self) -> Any:
        """The samples as a pandas DataFrame, one row per image, `size` as `height` and `width`,
        `box` as `x0`, `y0`, `x1`, `y1`.

        Raises:
            VitseeError: pandas is not installed.
        """
        names = ("index", "id", "label", "split", "hash", "valid")
        sides = {"height": self.size[:, 0], "width": self.size[:, 1]}
        box = np.empty((len(self), 0)) if self.box is None else self.box
        edges = dict(zip(("x0", "y0", "x1", "y1"), box.T, strict=False))
        return to_frame({**{name: getattr(self, name) for name in names}, **sides, **edges})
