"""Rows of features laid out as the matrix unit takes them: panels of 32 rows, in tiles of the
bfloat16 parts that `halves` multiplies.

Features are read as they are stored (half precision, bytes, single precision), shifted, and split
in one pass, whose vectors of 32 numbers are emitted: the compiler makes slower code of loops. 16
rows of a tile go one after the other, as they lie together, and the lines
of the next 16 are asked for meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted
from vitsee_core.grams.amx import PANEL, TILE, WIDTH
from vitsee_core.grams.memory import Long, address, fetch

# Numbers of a row of a tile, and of one of a panel in a block, all parts together.
TILE_NUMBERS, ROW_NUMBERS = 32, 256
# Bytes of a part of the tiles that a panel has side by side.
PART = WIDTH * PANEL
# float32 as bfloat16: its upper half, rounded to even; from NOT_A_NUMBER on as it is.
UPPER, LEADING = 16, 0xFFFF0000
LAST, BELOW_HALF = 1, 0x7FFF
MAGNITUDE, NOT_A_NUMBER = 0x7FFFFFFF, 0x7F800001
# Types of stored features: float16, uint8, float32.
HALF, BYTE, SINGLE = 0, 1, 2
NOTHING = np.zeros(0, np.float32)
# Rows that are fetched before they are taken; bytes of a row.
AHEAD, FURTHER = 16, 256

# (blocks, panels, tiles, parts, 2, 16, 32)
Tiles = NDArray[np.uint16]


# A row of a tile: 32 numbers


def vector_at(builder: Any, address: Any, kind: Any) -> Any:
    """The pointer to 32 numbers of a type."""
    from llvmlite import ir

    return builder.inttoptr(address, ir.VectorType(kind, TILE_NUMBERS).as_pointer())


def _of_half(builder: Any, raw: Any, mean: Any, scale: Any) -> Any:
    """A float16 less a float32."""
    from llvmlite import ir

    single = ir.VectorType(ir.FloatType(), TILE_NUMBERS)
    x = builder.fpext(builder.load(vector_at(builder, raw, ir.HalfType()), align=2), single)
    return builder.fsub(x, builder.load(vector_at(builder, mean, ir.FloatType()), align=4))


def _of_byte(builder: Any, raw: Any, mean: Any, scale: Any) -> Any:
    """(byte - mean) scale."""
    from llvmlite import ir

    single = ir.VectorType(ir.FloatType(), TILE_NUMBERS)
    x = builder.uitofp(builder.load(vector_at(builder, raw, ir.IntType(8)), align=1), single)
    less, by = (builder.load(vector_at(builder, a, ir.FloatType()), align=4) for a in (mean, scale))
    return builder.fmul(builder.fsub(x, less), by)


def _of_single(builder: Any, raw: Any, mean: Any, scale: Any) -> Any:
    """A float32 as it is."""
    from llvmlite import ir

    return builder.load(vector_at(builder, raw, ir.FloatType()), align=4)


def _lay(values: Callable[..., Any], parts: int, sums: bool = False) -> Callable[..., None]:
    """What reads 32 numbers and writes their parts; with `sums` it adds the numbers' products with
    `mean` to the first 32 of 64 numbers, the numbers to the others."""

    def lay(builder: Any, raw: Any, mean: Any, scale: Any, to: Any, added: Any) -> None:
        from llvmlite import ir

        bits, short = (ir.VectorType(ir.IntType(n), TILE_NUMBERS) for n in (32, 16))
        x = values(builder, raw, mean, scale)
        for part in split(builder, x, parts):
            upper = builder.lshr(
                builder.bitcast(part, bits), ir.Constant(bits, [UPPER] * TILE_NUMBERS)
            )
            place = vector_at(builder, to, ir.IntType(16))
            builder.store(builder.trunc(upper, short), place, align=2)
            to = builder.add(to, to.type(PART))
        if sums:
            weights = builder.load(vector_at(builder, mean, ir.FloatType()), align=4)
            for value in (builder.fmul(x, weights), x):
                place = vector_at(builder, added, ir.FloatType())
                total = builder.fadd(builder.load(place, align=4), value)
                builder.store(total, place, align=4)
                added = builder.add(added, added.type(4 * TILE_NUMBERS))

    return emitted(lay)


def split(builder: Any, x: Any, parts: int) -> list[Any]:
    """The nearest bfloat16s, the nearest ones to what is left, ..., as float32."""
    found = []
    for _ in range(parts):
        found.append(_nearest(builder, x))
        x = builder.fsub(x, found[-1])
    return found


def _nearest(builder: Any, x: Any) -> Any:
    from llvmlite import ir

    kind = ir.VectorType(ir.IntType(32), TILE_NUMBERS)

    def constant(value: int) -> Any:
        return ir.Constant(kind, [value] * TILE_NUMBERS)

    bits = builder.bitcast(x, kind)
    last = builder.and_(builder.lshr(bits, constant(UPPER)), constant(LAST))
    rounded = builder.add(bits, builder.add(last, constant(BELOW_HALF)))
    size = builder.and_(bits, constant(MAGNITUDE))
    number = builder.icmp_unsigned("<", size, constant(NOT_A_NUMBER))
    leading = builder.and_(builder.select(number, rounded, bits), constant(LEADING))
    return builder.bitcast(leading, x.type)


_half_1, _half_2 = _lay(_of_half, 1), _lay(_of_half, 2)
_half_1_summed, _half_2_summed = _lay(_of_half, 1, True), _lay(_of_half, 2, True)
_byte_1, _byte_2 = _lay(_of_byte, 1), _lay(_of_byte, 2)
_single_1, _single_2 = _lay(_of_single, 1), _lay(_of_single, 2)


@compiled
def _lay_tile(
    kind: int, parts: int, raw: Long, mean: Long, scale: Long, to: Long, added: Long
) -> None:
    """A row of a tile; `added`: where its sums are, 0 for none."""
    if kind == HALF:
        if added != 0:
            if parts > 1:
                _half_2_summed(raw, mean, scale, to, added)
            else:
                _half_1_summed(raw, mean, scale, to, added)
        elif parts > 1:
            _half_2(raw, mean, scale, to, added)
        else:
            _half_1(raw, mean, scale, to, added)
    elif kind == BYTE:
        if parts > 1:
            _byte_2(raw, mean, scale, to, added)
        else:
            _byte_1(raw, mean, scale, to, added)
    elif parts > 1:
        _single_2(raw, mean, scale, to, added)
    else:
        _single_1(raw, mean, scale, to, added)


class Stored(NamedTuple):
    """Features as they are stored, their type, and what is made of them. raw: (rows, columns),
    whose rows are contiguous; mean, scale: (columns,), or () where the type takes none."""

    kind: int
    raw: NDArray[Any]
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]


@compiled
def _lay_rows(stored: Stored, x: Tiles, row: int, column: int, sums: NDArray[np.float32]) -> None:
    """All of it, from a row and a column of x on."""
    kind, raw, mean, scale = stored
    parts, n_rows, pitch = x.shape[3], len(raw), raw.strides[0]
    of, less, by, to = address(raw), address(mean), address(scale), address(x)
    added = np.zeros((TILE, 2, TILE_NUMBERS), np.float32)
    of_tile, last = parts * PART, column + raw.shape[1]
    low, high, n_tiles = -(-column // TILE_NUMBERS), last // TILE_NUMBERS, x.shape[2]
    start = 0
    while start < n_rows:
        panel, line = divmod(row + start, PANEL)
        n = min(TILE - line % TILE, n_rows - start)
        of_panel = to + panel * n_tiles * of_tile + line * WIDTH
        for tile in range(low, high):
            block, inside = divmod(tile, n_tiles)
            place = of_panel + (block * x.shape[1] * n_tiles + inside) * of_tile
            k = tile * TILE_NUMBERS - column
            for i in range(n):
                source = of + (start + i) * pitch + k * raw.itemsize
                fetch(source + TILE * pitch)
                fetch(source + FURTHER)
                if kind == SINGLE:
                    fetch(source + TILE * pitch + WIDTH)
                to_sums = address(added[i]) if len(sums) else 0
                target = place + i * WIDTH
                _lay_tile(kind, parts, source, less + 4 * k, by + 4 * k, target, to_sums)
        if len(sums):
            _add_up(added, sums[start : start + n])
        start += n
    first = column // TILE_NUMBERS
    _lay_edge(stored, x, row, column, first, sums)
    if high > first:
        _lay_edge(stored, x, row, column, high, sums)


@compiled
def _lay_edge(
    stored: Stored, x: Tiles, row: int, column: int, tile: int, sums: NDArray[np.float32]
) -> None:
    """The columns in one tile, unless they fill it or there are none."""
    kind, raw, mean, scale = stored
    low = max(0, tile * TILE_NUMBERS - column)
    high = min(raw.shape[1], (tile + 1) * TILE_NUMBERS - column)
    if low >= high or high - low == TILE_NUMBERS:
        return
    inside, parts, (block, tile) = column + low, x.shape[3], divmod(tile, x.shape[2])
    inside %= TILE_NUMBERS
    some, less = np.zeros(TILE_NUMBERS, raw.dtype), np.zeros(TILE_NUMBERS, np.float32)
    by, found = np.zeros_like(less), np.zeros((parts, PANEL, TILE_NUMBERS), np.uint16)
    added = np.zeros((1, 2, TILE_NUMBERS), np.float32)
    for k in range(high - low if kind != SINGLE else 0):
        less[inside + k] = mean[low + k]
        if kind == BYTE:
            by[inside + k] = scale[low + k]
    for i in range(len(raw)):
        for k in range(high - low):
            some[inside + k] = raw[i, low + k]
        to_sums = address(added) if len(sums) else 0
        of, to = address(some), address(found)
        _lay_tile(kind, parts, of, address(less), address(by), to, to_sums)
        panel, line = divmod(row + i, PANEL)
        for part in range(parts):
            for k in range(inside, inside + high - low):
                x[block, panel, tile, part, line // TILE, line % TILE, k] = found[part, 0, k]
        if len(sums):
            _add_up(added, sums[i : i + 1])


@compiled
def _add_up(added: NDArray[np.float32], sums: NDArray[np.float32]) -> None:
    """Each row's sums += what was added for it, which is 0 then."""
    for i in range(len(sums)):
        for of in range(2):
            total = np.float32(0)
            for k in range(TILE_NUMBERS):
                total += added[i, of, k]
                added[i, of, k] = 0
            sums[i, of] += total


@compiled
def shift_into_panels(
    raw: NDArray[np.uint16],
    mean: NDArray[np.float32],
    x: Tiles,
    row: int,
    column: int,
    sums: NDArray[np.float32],
) -> None:
    """As `fused.shift_half`, from one of the rows and columns of x on, the values of
    `halves.Panels`: the bits of the nearest bfloat16, and of the nearest to what is left."""
    _lay_rows(Stored(HALF, raw, mean, NOTHING), x, row, column, sums)


@compiled
def shift_bytes_into_panels(
    raw: NDArray[np.uint8],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    x: Tiles,
    row: int,
) -> None:
    """As `fused.shift_bytes`, from one of the rows of x on, the values of `halves.Panels`."""
    _lay_rows(Stored(BYTE, raw, mean, scale), x, row, 0, np.zeros((0, 2), np.float32))


@compiled
def into_panels(raw: NDArray[np.float32], x: Tiles) -> None:
    """Numbers as they are."""
    _lay_rows(Stored(SINGLE, raw, NOTHING, NOTHING), x, 0, 0, np.zeros((0, 2), np.float32))


@compiled
def take_rows(x: Tiles, places: NDArray[np.int64], out: Tiles) -> None:
    """Some rows of x into `out`, from its first row on; their lines are fetched some rows ahead."""
    n, of_panel = len(places), x.shape[2] * x.shape[3] * PANEL * TILE_NUMBERS
    of, to = np.zeros(n + AHEAD, np.int64), np.empty(n, np.int64)
    for i in range(n):
        of[i] = places[i] // PANEL * of_panel + places[i] % PANEL * TILE_NUMBERS
        to[i] = i // PANEL * of_panel + i % PANEL * TILE_NUMBERS
    for block in range(len(x)):
        source, target = x[block].reshape(-1), out[block].reshape(-1)
        start = address(source)
        for at in range(0, of_panel, PANEL * TILE_NUMBERS):
            for i in range(n):
                fetch(start + 2 * (of[i + AHEAD] + at))
                a, b = np.uint64(of[i] + at), np.uint64(to[i] + at)  # none is negative
                for k in range(TILE_NUMBERS):
                    target[b + np.uint64(k)] = source[a + np.uint64(k)]
