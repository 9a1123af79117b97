"""y^T y in double precision by the matrix unit, which multiplies bytes: digits of base 256.

A channel whose numbers are at most 2^e is taken in steps of 2^(e - 46), six digits with signs:

    y = 2^(e - 46) sum_k d_k 256^(5 - k)        with |d_k| <= 128

Products of digits are integers, and so are their sums, without any rounding; those of d_k and d_l
with k + l <= 5, and of d_3 with itself, are made. Others have random signs. Together with the steps
the entry of two channels is off by at most n 2^-41 of the product of their largest numbers; of
features in single precision as a rule by less than 1e-13 of that of their lengths. So K. Ozaki et
al., Error-free transformations of matrix multiplication, Numerical Algorithms 2012; on integers H.
Ootomo, K. Ozaki, R. Yokota, DGEMM on integer matrix multiplication unit, 2024.

Digits lie in tiles as the unit wants its right factor, four rows of a channel side by side:
(blocks, panels, digits, tiles, 2, 16, 64), of tiles of 64 rows, and panels of 32 channels, of which
those of one block stay in the nearest cache, and their sums in the second one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted
from vitsee_core.grams.amx import (
    ALL_TILES,
    BYTES,
    PANEL,
    PITCH,
    TILE,
    WIDTH,
    clear,
    configure,
    load_left,
    load_right,
    load_sums,
    multiply_bytes,
    release,
    store_sums,
    turn_all,
)
from vitsee_core.grams.memory import LINE_BYTES, Long, address, aligned, fetch
from vitsee_core.types import Float

DIGITS, STEPS, BASE = 6, 46, 256
# Of the places k + l = 0, 1, ..., as many as digits and one more.
PLACES = DIGITS + 1
TOGETHER = 4  # bytes that the unit multiplies and adds at once
ROWS, TILES = WIDTH, 2  # of a tile, and of these in a block
STAY = 6  # panels of either side whose sums stay in the second cache
AT_ONCE = 2048  # rows; sums of 6 * 2^14 times as many have 31 bits
# A number of these steps plus this has, as bits, 128 added to each of its digits.
BIASED = 1.5 * 2.0**52 + sum(128 * BASE**k for k in range(DIGITS))
BIAS = 0x80
LANES = 8  # numbers in a vector
DOUBLE = 8  # bytes

# (blocks, panels, digits, tiles, 2, 16, 64)
Digits = NDArray[np.uint8]


def add_squares(y: Float, largest: Float, total: Float) -> None:
    """The lower triangle of y^T y is added to that of `total`; where `amx.is_there` said so.

    Memory: 6 bytes for each of up to 2,048 rows' numbers, and 1 MB.

    Args:
        y: (n, d), contiguous, finite.
        largest: (d,) of each channel's magnitudes, at least.
        total: (d, d); what lies above the diagonal is undefined.
    """
    n, d = y.shape
    _, exponents = np.frexp(largest)
    panels, size = -(-d // PANEL), PANEL * PITCH
    steps = np.ones(panels * PANEL)
    steps[:d] = np.ldexp(1.0, exponents - STEPS)
    blocks = -(-min(n, AT_ONCE) // (ROWS * TILES))
    shape = (blocks, panels, DIGITS, TILES, 2, TILE, WIDTH)
    memory = aligned(np.empty(int(np.prod(shape)) + LINE_BYTES, np.uint8))
    sums = aligned(np.empty((STAY**2 * PLACES + 1) * size, np.uint8)).view(np.int32)
    room = aligned(np.empty(DIGITS * TILES * 2 * BYTES + LINE_BYTES, np.uint8))
    for start in range(0, n, AT_ONCE):
        some = y[start : start + AT_ONCE]
        used = (-(-len(some) // (ROWS * TILES)), *shape[1:])
        x = memory[: int(np.prod(used))].reshape(used)
        take_digits(some, 1 / steps, x)
        _add(x, sums, room, steps, total, ALL_TILES)


@emitted
def _take_digits(builder: Any, y: Any, pitch: Any, scale: Any, to: Any, apart: Any) -> None:
    """Of 16 numbers in each of 4 rows the digits, 64 bytes of each one: 4 of the first number, 4 of
    the second, ..."""
    from llvmlite import ir

    numbers, raw = ir.VectorType(ir.DoubleType(), LANES), ir.VectorType(ir.IntType(8), WIDTH)

    def at(address: Any, kind: Any, offset: int = 0) -> Any:
        return builder.inttoptr(builder.add(address, address.type(offset)), kind.as_pointer())

    def chosen(first: Any, second: Any, places: list[int]) -> Any:
        kind = ir.VectorType(ir.IntType(32), WIDTH)
        return builder.shuffle_vector(first, second, ir.Constant(kind, places))

    def alternating(first: Any, second: Any, size: int, upper: bool) -> Any:
        """So many bytes of one, so many of the other, ..., from a half of each 16 bytes."""
        starts = [TILE * k + upper * LANES + i for k in range(4) for i in range(0, LANES, size)]
        places = [s + of + i for s in starts for of in (0, WIDTH) for i in range(size)]
        return chosen(first, second, places)

    scales = [builder.load(at(scale, numbers, WIDTH * h), align=DOUBLE) for h in (0, 1)]
    rows = []
    for _ in range(TOGETHER):
        halves = []
        for h in (0, 1):
            value = builder.load(at(y, numbers, WIDTH * h), align=DOUBLE)
            value = builder.fmul(value, scales[h])
            value = builder.fadd(value, ir.Constant(numbers, [BIASED] * LANES))
            halves.append(builder.bitcast(value, raw))
        rows.append((halves[0], halves[1]))
        y = builder.add(y, pitch)
    digits = []
    # 16 bytes after the other hold four digits of four numbers each, then the last two.
    for some in ([0, 1, 2, 3], [4, 5, 4, 5]):
        places = [
            DOUBLE * (4 * k + c) + DIGITS - 1 - digit
            for k in range(4) for digit in some for c in range(4)
        ]  # fmt: skip
        taken = [chosen(first, second, places) for first, second in rows]
        for upper in (False, True)[: len(set(some)) // 2]:
            first, second = (alternating(a, b, 1, upper) for a, b in (taken[:2], taken[2:]))
            digits += [alternating(first, second, 2, half) for half in (False, True)]
    for digit in digits:
        signed = builder.xor(digit, ir.Constant(raw, [BIAS] * WIDTH))
        builder.store(signed, at(to, raw), align=1)
        to = builder.add(to, apart)


@compiled
def take_digits(y: Float, scale: Float, out: Digits) -> None:
    """All places of `out`, with zeros beyond the rows and channels of y.

    Args:
        y: (n, d), contiguous.
        scale: (channels in `out`,) of which y is multiplied by; the product is below 2^47.
        out: (blocks, panels, digits, tiles, 2, 16, 64).
    """
    (n, d), (blocks, panels) = y.shape, out.shape[:2]
    tiles, pitch, edge = out.shape[3], y.strides[0], np.zeros((ROWS, TILE))
    apart = tiles * 2 * BYTES
    for group in range(blocks * tiles):
        block, tile = divmod(group, tiles)
        rows = min(ROWS, max(0, n - group * ROWS))
        for column in range(0, panels * PANEL, TILE):
            panel, half = divmod(column // TILE, 2)
            columns = min(TILE, max(0, d - column))
            of, step = address(y) + group * ROWS * pitch + column * DOUBLE, np.int64(pitch)
            if rows < ROWS or columns < TILE:
                edge[:] = 0
                for i in range(rows):
                    for j in range(columns):
                        edge[i, j] = y[group * ROWS + i, column + j]
                of, step = address(edge), np.int64(TILE * DOUBLE)
            to = address(out[block, panel]) + (tile * 2 + half) * BYTES
            for i in range(0, ROWS, TOGETHER):
                for k in range(TOGETHER):
                    fetch(of + (i + k) * step + 2 * WIDTH)
                    fetch(of + (i + k) * step + 3 * WIDTH)
                place = to + i // TOGETHER * WIDTH
                _take_digits(of + i * step, step, address(scale) + column * DOUBLE, place, apart)


@compiled
def used_digits(x: Digits) -> int:
    """The first ones that are not all 0."""
    (blocks, panels), of = x.shape[:2], x[0, 0, 0].size
    used = 0
    for block in range(blocks):
        for panel in range(panels):
            digits = x[block, panel].reshape(DIGITS, of)
            for digit in range(used, DIGITS):
                found = np.uint8(0)
                for i in range(of):
                    found |= digits[digit, i]
                if found:
                    used = digit + 1
    return used


@compiled
def _add_block(a: Long, b: Long, sums: Long, tiles: int, digits: int, fresh: bool) -> None:
    """Sums of 32 x 32 for each place += a turned panel times another; fresh: from 0."""
    of = tiles * 2 * BYTES
    for place in range(PLACES):
        if fresh:
            clear()
        else:
            load_sums(sums)
        low, high = max(0, place - digits + 1), min(place, digits - 1)
        if place == PLACES - 1:  # of these places d_3 with itself alone
            low, high = max(low, place // 2), min(high, place // 2)
        for k in range(low, high + 1):
            left, right = a + k * of, b + (place - k) * of
            for _ in range(tiles):
                load_left(left)
                load_right(right)
                multiply_bytes()
                left, right = left + 2 * BYTES, right + 2 * BYTES
        store_sums(sums)
        sums += PANEL * PITCH


@compiled
def _add(
    x: Digits,
    sums: NDArray[np.int32],
    turned: NDArray[np.uint8],
    steps: Float,
    total: Float,
    config: NDArray[np.uint8],
) -> None:
    """The products of the digits, in steps, are added to `total`."""
    n, tiles, digits = x.shape[1], x.shape[3], used_digits(x)
    of, of_sums = DIGITS * tiles * 2 * BYTES, PLACES * PANEL * PITCH
    left, to = address(turned), address(sums)
    configure(address(config))
    for low in range(0, n, STAY):
        for first in range(0, low + 1, STAY):
            high, last = min(n, low + STAY), min(n, first + STAY)
            for block in range(len(x)):
                here = address(x[block])
                for i in range(low, high):
                    turn_all(here + i * of, left, of)
                    for j in range(first, min(i + 1, last)):
                        place = to + ((i - low) * STAY + j - first) * of_sums
                        _add_block(left, here + j * of, place, tiles, digits, block == 0)
            for i in range(low, high):
                for j in range(first, min(i + 1, last)):
                    place = to + ((i - low) * STAY + j - first) * of_sums
                    _add_up(place, steps, total, i * PANEL, j * PANEL)
    release()


@emitted
def _join(builder: Any, sums: Any, to: Any) -> None:
    """32 sums of every place, the first place's first, as 32 numbers."""
    from llvmlite import ir

    whole, number = (ir.VectorType(kind, LANES) for kind in (ir.IntType(32), ir.DoubleType()))
    base = ir.Constant(number, [float(BASE)] * LANES)
    for start in range(0, PANEL, LANES):
        found = ir.Constant(number, None)
        for place in range(PLACES):
            offset = place * PANEL * PITCH + start * PITCH // PANEL
            source = builder.inttoptr(builder.add(sums, sums.type(offset)), whole.as_pointer())
            digits = builder.sitofp(builder.load(source, align=4), number)
            found = builder.fadd(builder.fmul(found, base), digits)
        target = builder.add(to, to.type(start * DOUBLE))
        builder.store(found, builder.inttoptr(target, number.as_pointer()), align=DOUBLE)


@compiled
def _add_up(sums: Long, steps: Float, total: Float, first_row: int, first_column: int) -> None:
    """The sums of all places, 32 x 32 of each, as one number that is added to `total`."""
    columns, found = min(PANEL, total.shape[1] - first_column), np.empty(PANEL)
    unit = 2.0 ** (8 * (2 * DIGITS - 1 - PLACES))
    for i in range(min(PANEL, len(total) - first_row)):
        _join(sums + i * PITCH, address(found))
        to, step = total[first_row + i, first_column:], unit * steps[first_row + i]
        by = steps[first_column:]
        for j in range(columns):
            to[j] += found[j] * (step * by[j])
