"""Half precision made single, shifted and summed in one loop over the features, and laid out in the
bfloat16 parts that `halves` multiplies.

As calls of numpy and torch it is four passes over pieces that stay in cache (cast, subtract,
product with the mean, sum), which take twice the time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled

# float16 as float32: its bits, moved to their places there, count 2^112 too small; from INFINITE on
# they are infinity or NaN, whose exponent is another.
SCALE = np.float32(2.0**112)
INFINITE, EXPONENT = np.uint32(0x0F800000), np.uint32(0x70000000)
SIZE, SIGN = np.uint32(0x7FFF), np.uint32(0x8000)
TO_SIZE, TO_SIGN = np.uint32(13), np.uint32(16)
# Of the matrix unit (see `amx`): rows of a tile and of a panel; numbers of a row of a tile, and of
# one of a panel, all parts together.
TILE, PANEL, TILE_NUMBERS, ROW_NUMBERS = 16, 32, 32, 512
# float32 as bfloat16: its upper half, rounded to even; from NOT_A_NUMBER on as it is.
UPPER, LEADING = np.uint32(16), np.uint32(0xFFFF0000)
LAST, BELOW_HALF = np.uint32(1), np.uint32(0x7FFF)
MAGNITUDE, NOT_A_NUMBER = np.uint32(0x7FFFFFFF), np.uint32(0x7F800001)


@compiled
def _single(bits: np.uint16) -> np.float32:
    """A float16 as float32."""
    half = np.uint32(bits)
    size = np.uint32((half & SIZE) << TO_SIZE)
    infinite = size >= INFINITE
    size = np.uint32(size + EXPONENT) if infinite else size
    sign = np.uint32((half & SIGN) << TO_SIGN)
    value = np.uint32(size | sign).view(np.float32)
    return value if infinite else value * SCALE


@compiled
def _leading(value: np.float32) -> np.uint32:
    """The bits of the nearest bfloat16, as those of a float32."""
    bits = np.float32(value).view(np.uint32)
    up = np.uint32(BELOW_HALF + np.uint32(np.uint32(bits >> UPPER) & LAST))
    rounded = np.uint32(bits + up) if np.uint32(bits & MAGNITUDE) < NOT_A_NUMBER else bits
    return np.uint32(rounded & LEADING)


@compiled
def _shift(
    raw: NDArray[np.uint16], mean: NDArray[np.float32], x: NDArray[np.float32]
) -> tuple[np.float32, np.float32]:
    """x = raw - mean, of one row; its product with `mean`, and its sum."""
    along, total = np.float32(0), np.float32(0)
    for k in range(len(raw)):
        value = _single(raw[k]) - mean[k]
        x[k] = value
        along += value * mean[k]
        total += value
    return along, total


@compiled
def shift_half(
    raw: NDArray[np.uint16],
    mean: NDArray[np.float32],
    x: NDArray[np.float32],
    column: int,
    sums: NDArray[np.float32],
) -> None:
    """x = raw - mean, from one of its columns on, and its sums.

    Args:
        raw: (rows, columns) the bits of float16.
        mean: (columns,) what is subtracted.
        x: (rows, width), filled.
        column: where in `x` the first column goes.
        sums: (rows, 2), added to: each row's product with `mean`, and its sum; without rows nothing
            is added up.
    """
    rows, columns = raw.shape
    for i in range(rows):
        # Parts of rows, which the compiler knows to be contiguous.
        along, total = _shift(raw[i], mean, x[i][column : column + columns])
        if len(sums):
            sums[i, 0] += along
            sums[i, 1] += total


@compiled
def _into_panels(
    values: NDArray[np.float32],
    inside: int,
    n: int,
    x: NDArray[np.uint16],
    row: int,
    column: int,
) -> None:
    """values[inside : inside + n] from a column of a row of panels on, `inside` its place within a
    tile: the bits of the nearest bfloat16, and of the nearest to what is left."""
    parts, width = x.shape[3], x.shape[2] * TILE_NUMBERS
    block, first = column // width, column % width // TILE_NUMBERS
    panel, of_panel = row // PANEL, row % PANEL
    half, line = of_panel // TILE, of_panel % TILE
    for t in range(-(-(inside + n) // TILE_NUMBERS)):
        tile = values[t * TILE_NUMBERS : (t + 1) * TILE_NUMBERS]
        low = inside if t == 0 else 0
        high = min(TILE_NUMBERS, inside + n - t * TILE_NUMBERS)
        # Loops of a fixed length become vectors, four times as fast as those of any length.
        if low > 0 or high < TILE_NUMBERS:
            for k in range(low, high):
                bits = _leading(tile[k])
                x[block, panel, first + t, 0, half, line, k] = np.uint32(bits >> UPPER)
                if parts > 1:
                    rest = _leading(np.float32(tile[k] - np.uint32(bits).view(np.float32)))
                    x[block, panel, first + t, 1, half, line, k] = np.uint32(rest >> UPPER)
        elif parts > 1:
            for k in range(TILE_NUMBERS):
                bits = _leading(tile[k])
                x[block, panel, first + t, 0, half, line, k] = np.uint32(bits >> UPPER)
                rest = _leading(np.float32(tile[k] - np.uint32(bits).view(np.float32)))
                x[block, panel, first + t, 1, half, line, k] = np.uint32(rest >> UPPER)
        else:
            for k in range(TILE_NUMBERS):
                bits = _leading(tile[k])
                x[block, panel, first + t, 0, half, line, k] = np.uint32(bits >> UPPER)


@compiled
def shift_into_panels(
    raw: NDArray[np.uint16],
    mean: NDArray[np.float32],
    x: NDArray[np.uint16],
    row: int,
    column: int,
    sums: NDArray[np.float32],
) -> None:
    """As `shift_half`, from one of the rows and columns of x on, the values of `halves.Panels`."""
    rows, columns = raw.shape
    width = x.shape[2] * TILE_NUMBERS
    values = np.zeros(width + TILE_NUMBERS, np.float32)
    start = 0
    while start < columns:  # block by block: what is written lies together
        of_block = (column + start) % width
        n, inside = min(columns - start, width - of_block), of_block % TILE_NUMBERS
        less, to = mean[start : start + n], values[inside : inside + n]
        for i in range(rows):
            along, total = _shift(raw[i][start : start + n], less, to)
            if len(sums):
                sums[i, 0] += along
                sums[i, 1] += total
            _into_panels(values, inside, n, x, row + i, column + start)
        start += n


@compiled
def shift_bytes_into_panels(
    raw: NDArray[np.uint8],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    x: NDArray[np.uint16],
) -> None:
    """As `shift_bytes`, into the values of `halves.Panels`."""
    rows, columns = raw.shape
    width = x.shape[2] * TILE_NUMBERS
    values = np.zeros(width, np.float32)
    for start in range(0, columns, width):
        n = min(columns - start, width)
        less, by = mean[start : start + n], scale[start : start + n]
        for i in range(rows):
            some = raw[i][start : start + n]
            for k in range(n):
                values[k] = (np.float32(some[k]) - less[k]) * by[k]
            _into_panels(values, 0, n, x, i, start)


@compiled
def put_blocks(blocks: NDArray[np.float32], out: NDArray[np.float32], symmetric: bool) -> None:
    """A product as the matrix unit makes it, `halves.Sums.values`, row by row; of a symmetric one
    what is below the diagonal above it, too."""
    n, m = out.shape
    for j in range(len(blocks)):
        wide = min(PANEL, m - j * PANEL)
        for i in range(j if symmetric else 0, blocks.shape[1]):
            high = min(PANEL, n - i * PANEL)
            block = blocks[j, i]
            for r in range(high):
                to = out[i * PANEL + r][j * PANEL : j * PANEL + wide]
                for c in range(wide):
                    to[c] = block[r, c]
            if symmetric:
                for c in range(wide):
                    to = out[j * PANEL + c][i * PANEL : i * PANEL + high]
                    for r in range(c + 1 if i == j else 0, high):
                        to[r] = block[r, c]


@compiled
def shift_bytes(
    raw: NDArray[np.uint8],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    x: NDArray[np.float32],
) -> None:
    """x = (raw - mean) scale, of (rows, columns), with a mean and a scale of each column."""
    for i in range(raw.shape[0]):
        of, to = raw[i], x[i]
        for j in range(len(of)):
            to[j] = (np.float32(of[j]) - mean[j]) * scale[j]
