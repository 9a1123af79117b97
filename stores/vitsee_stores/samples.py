"""The images of a store: what they are called and what they show."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.notebook import to_frame


@dataclass(frozen=True)
class StoreSamples:
    """The images in the store's order, an array (images,) each: position in the data set's own
    order, id, class (-1 for none), name of the split ("" for none), hash of the encoded bytes,
    whether it could be read; size (images, 2): height and width as decoded, EXIF orientation not
    applied, 0 where it could not be read."""

    index: NDArray[np.int64]
    id: NDArray[np.str_]
    label: NDArray[np.int64]
    split: NDArray[np.str_]
    hash: NDArray[np.uint64]
    valid: NDArray[np.bool_]
    size: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.index)

    def to_pandas(self) -> Any:
        """The samples as a pandas DataFrame, one row an image, `size` as `height` and `width`.

        Raises:
            VitseeError: pandas is not installed.
        """
        names = [field.name for field in fields(self) if field.name != "size"]
        sides = {"height": self.size[:, 0], "width": self.size[:, 1]}
        return to_frame({**{name: getattr(self, name) for name in names}, **sides})
