"""What the compiled loops of attention summaries read and fill, as they hand it on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Geometry(NamedTuple):
    """Where tokens lie.

    n_prefix: tokens before the grid's. grid: rows and columns of the others. cls: the class token,
    -1 without one. px: (cells padded cells,) distances in pixels, 0 beyond. unit: the same on the
    unit square, or empty where it is not wanted. unit_per_px: the ratio of the two, 0 where it is
    not one number.
    """

    n_prefix: int
    grid: tuple[int, int]
    cls: int
    px: NDArray[np.float32]
    unit: NDArray[np.float32]
    unit_per_px: float


class HeadSums(NamedTuple):
    """Sums over queries, by head of each image, in float64.

    totals: (batch, heads, 7), `TOTALS`. received: (batch, heads, tokens), the mass that keys
    receive. renormalised: of the same shape, by renormalised rows. offsets: (batch, heads, (2 rows
    - 1) (2 columns - 1)), that mass by offset.
    """

    totals: NDArray[np.float64]
    received: NDArray[np.float64]
    renormalised: NDArray[np.float64]
    offsets: NDArray[np.float64]


class InCommon(NamedTuple):
    """What the heads of each image have in common.

    head_mean: (batch, tokens, tokens), the mean over heads. spread: (batch, tokens), of the grid's
    queries: the standard deviation over heads (n - 1; 0 for one), mean over the grid's keys.
    cls_rows: (batch, heads, tokens), the class token's row, or of no heads.
    """

    head_mean: NDArray[np.float32]
    spread: NDArray[np.float32]
    cls_rows: NDArray[np.float32]


class OfHeads(NamedTuple):
    """What is said of every head by itself.

    numbers: (8, batch, heads), `NUMBERS`. counts: (2, batch, heads), `COUNTS`. received_rows:
    (batch, heads, tokens), the mean over queries.
    """

    numbers: NDArray[np.float32]
    counts: NDArray[np.int32]
    received_rows: NDArray[np.float32]


class OverImages(NamedTuple):
    """Sums over images that count, in float64, by part of the batch.

    aligned: (parts, heads, offsets), of total mass 1 per image. received: (parts, heads, tokens) of
    `OfHeads.received_rows`. cls: of the same shape, of `InCommon.cls_rows`.
    """

    aligned: NDArray[np.float64]
    received: NDArray[np.float64]
    cls: NDArray[np.float64]
