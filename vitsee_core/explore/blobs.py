"""Numbers within a page: arrays one after another, deflated, in base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack(arrays: Sequence[NDArray[np.generic]]) -> str:
    """Arrays as the page reads them: little endian, in C order, each begun at a multiple of 4
    bytes, their shapes and types known from elsewhere."""
    pieces = []
    for array in arrays:
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        pieces.append(data + bytes(-len(data) % 4))
    return base64.b64encode(zlib.compress(b"".join(pieces), 9)).decode()


def unpack(text: str) -> bytes:
    """What `pack` wrote, before deflation."""
    return zlib.decompress(base64.b64decode(text))
