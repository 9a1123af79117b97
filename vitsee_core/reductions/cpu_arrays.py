"""Inputs and outputs of the compiled loops of attention summaries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Geometry(NamedTuple):
    """The positions of tokens on the grid."""

    n_prefix: int  # tokens before the grid's
    grid: tuple[int, int]  # rows and columns of the others
    times: int  # how often the grid is there, time by time; 1 for images
    stride_frames: float  # frames between these times
    cls: int  # the class token, -1 without one
    # (places padded cells,) distances in pixels from a place of the grid, 0 in padding
    px: NDArray[np.float32]
    unit: NDArray[np.float32]  # the same on the unit square, or empty if not wanted
    unit_per_px: float  # the ratio of the two, 0 if it is not constant


class HeadSums(NamedTuple):
    """Sums over queries, by head of each image, in float64."""

    totals: NDArray[np.float64]  # (batch, heads, 7), `TOTALS`
    received: NDArray[np.float64]  # (batch, heads, tokens), the mass that keys receive
    renormalised: NDArray[np.float64]  # (batch, heads, tokens), by renormalised rows
    # (batch, heads, (2 times - 1) (2 rows - 1) (2 columns - 1)), that mass by offset
    offsets: NDArray[np.float64]


class InCommon(NamedTuple):
    """Values shared by the heads of each image."""

    head_mean: NDArray[np.float32]  # (batch, tokens, tokens), the mean over heads
    # (batch, tokens), for the grid's queries: the standard deviation over heads (n - 1; 0 for one),
    # mean over the grid's keys
    spread: NDArray[np.float32]
    cls_rows: NDArray[np.float32]  # (batch, heads, tokens), the class token's row, or of no heads


class OfHeads(NamedTuple):
    """Values of every head by itself."""

    numbers: NDArray[np.float32]  # (8 or 10, batch, heads), `NUMBERS`, of clips `IN_TIME` too
    counts: NDArray[np.int32]  # (2, batch, heads), `COUNTS`
    received_rows: NDArray[np.float32]  # (batch, heads, tokens), the mean over queries


class OverImages(NamedTuple):
    """Sums over images that count, in float64, by part of the batch."""

    aligned: NDArray[np.float64]  # (parts, heads, offsets in space), of total mass 1 per image
    in_time: NDArray[np.float64]  # (parts, heads, offsets in time) of clips, else no parts
    received: NDArray[np.float64]  # (parts, heads, tokens) of `OfHeads.received_rows`
    cls: NDArray[np.float64]  # (parts, heads, tokens) of `InCommon.cls_rows`
