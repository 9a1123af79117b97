"""Which pixels of the input belong to a grid's cells."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Edges = NDArray[np.int64]


def cell_edges(layout: TokenLayout, size: tuple[int, ...]) -> tuple[Edges, Edges]:
    """The edges of the rows and of the columns of cells, (rows + 1,) and (cols + 1,).

    Cell (r, c) is the pixels from round(offset_px + (r, c) stride_px) to round(offset_px + (r + 1,
    c + 1) stride_px), clipped to an image of `size` (height, width), and may be empty there. Pixels
    outside all cells belong to none.

    Raises:
        VitseeError: the layout has no grid, or an unknown position.
    """
    if layout.grid is None or layout.stride_px is None:
        raise VitseeError("these tokens do not say which pixels are theirs: no grid, or no stride")
    rows, cols = (
        np.clip(np.rint(start + step * np.arange(n + 1)), 0, length).astype(np.int64)
        for n, length, start, step in zip(
            layout.grid, size, layout.offset_px, layout.stride_px, strict=True
        )
    )
    return rows, cols
