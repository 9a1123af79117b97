"""The images of a store: what they are called and what they show."""

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
    """The images in the store's order, an array (images,) each: position in the data set's own
    order, id, class (-1 for none), name of the split ("" for none), hash of the encoded bytes,
    whether it could be read; size (images, 2): height and width as decoded, EXIF orientation not
    applied, 0 where it could not be read; box (images, 4): x0, y0, x1, y1 of an image that is a
    part of its file, in the file's pixels, NaN for a whole one, None where all are whole.
    encoded_id (images, bytes): the ids as they are stored; of a million images they are made
    strings only where they are asked for."""

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
        """(images,) the ids without what a box adds to them: what masks and lists call the images'
        files."""
        if self.box is None:
            return self.id
        whole = np.isnan(self.box[:, 0])
        return np.where(whole, self.id, [name.rpartition("#")[0] for name in self.id.tolist()])

    def to_pandas(self) -> Any:
        """The samples as a pandas DataFrame, one row an image, `size` as `height` and `width`,
        `box` as `x0`, `y0`, `x1`, `y1`.

        Raises:
            VitseeError: pandas is not installed.
        """
        names = ("index", "id", "label", "split", "hash", "valid")
        sides = {"height": self.size[:, 0], "width": self.size[:, 1]}
        box = np.empty((len(self), 0)) if self.box is None else self.box
        edges = dict(zip(("x0", "y0", "x1", "y1"), box.T, strict=False))
        return to_frame({**{name: getattr(self, name) for name in names}, **sides, **edges})
