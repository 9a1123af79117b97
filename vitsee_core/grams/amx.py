"""x y^T of bfloat16 by the matrix unit of a core, AMX: two tiles of 16 rows times two.

A processor's tiles are 16 rows of 64 bytes; one instruction adds the product of two of them to a
third, 8,192 multiplications in 16 cycles: 16 times what its vectors do in single precision. No
library offers the three products that `halves` sums, nor a triangle, nor sums that stay in single
precision beside it; so the instructions are emitted here.

Features lie in tiles, each a stretch of memory, (blocks, panels, tiles, parts, 2, 16, 32): panels
of 32 rows, of which a block of columns takes at most 16 kB: two of them stay in the nearest cache.
Sums of two panels, 32 x 32, stay in four tiles; those of 16 panels by 16 stay in the second cache
while all blocks go by. The right side's panel is turned before, pairs of numbers at a time, as the
unit wants it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted
from vitsee_core.grams.panels import PANEL, TILE, TILE_NUMBERS, Tiles, address

# Bytes of a row of a tile, and of a tile.
WIDTH, BYTES = 2 * TILE_NUMBERS, 2 * TILE_NUMBERS * TILE
# Panels of either side whose sums, 1 MB, stay in the second cache.
STAY = 16
# Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18

Long = np.int64 | int
# (panels of columns, panels of rows, 32, 32): the sums of one pair of panels lie together.
Blocks = NDArray[np.float32]


@cache
def is_there() -> bool:
    """Whether this process may use it: the processor has it, the system grants it, and numba
    compiles, for this processor and not for another that the user named."""
    if sys.platform != "linux":
        return False
    from llvmlite import binding
    from numba.core import config

    features, named = binding.get_host_cpu_features(), vars(config)
    if not all(features.get(name, False) for name in ("amx-tile", "amx-bf16", "avx512f")):
        return False
    if named["CPU_NAME"] or named["CPU_FEATURES"] or named["DISABLE_JIT"]:
        return False
    return int(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA)) == 0


def _emit(builder: Any, name: str, *args: Any) -> None:
    """A call of one of LLVM's intrinsics, of which integers of Python's are constants of a byte."""
    from llvmlite import ir

    values = [ir.IntType(8)(a) if isinstance(a, int) else a for a in args]
    of = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    name = f"llvm.x86.{name}"
    found = builder.module.globals.get(name) or ir.Function(builder.module, of, name)
    builder.call(found, values)


def _memory(builder: Any, address: Any) -> Any:
    from llvmlite import ir

    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _load(tile: int) -> Callable[..., None]:
    def load(builder: Any, address: Any, pitch: Any) -> None:
        """A tile's rows, so many bytes from one to the next."""
        _emit(builder, "tileloadd64", tile, _memory(builder, address), pitch)

    return emitted(load)


def _store(tile: int) -> Callable[..., None]:
    def store(builder: Any, address: Any, pitch: Any) -> None:
        """As the tile is loaded."""
        _emit(builder, "tilestored64", tile, _memory(builder, address), pitch)

    return emitted(store)


@emitted
def _configure(builder: Any, address: Any) -> None:
    """What the tiles are, 64 bytes."""
    _emit(builder, "ldtilecfg", _memory(builder, address))


@emitted
def _release(builder: Any) -> None:
    """The tiles are not needed any more."""
    _emit(builder, "tilerelease")


@emitted
def _clear(builder: Any) -> None:
    """Tiles 0 to 3 = 0."""
    for tile in range(4):
        _emit(builder, "tilezero", tile)


@emitted
def _multiply(builder: Any) -> None:
    """Tiles 0 to 3, two by two, += tiles 4 and 5 times 6 and 7."""
    for total, left, right in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
        _emit(builder, "tdpbf16ps", total, left, right)


@emitted
def _turn(builder: Any, source: Any, to: Any) -> None:
    """A tile's 16 rows of 16 pairs of numbers as columns: in four rounds each row changes what it
    has in the places of one bit with the row whose number differs in that bit."""
    from llvmlite import ir

    index = ir.VectorType(ir.IntType(32), TILE)
    lines = []
    for _ in range(TILE):
        lines.append(builder.load(builder.inttoptr(source, index.as_pointer()), align=4))
        source = builder.add(source, source.type(WIDTH))
    for bit in (1, 2, 4, 8):
        for row in (r for r in range(TILE) if not r & bit):
            low, high = lines[row], lines[row | bit]
            first = [c if not c & bit else TILE + (c ^ bit) for c in range(TILE)]
            second = [c | bit if not c & bit else TILE + c for c in range(TILE)]
            lines[row] = builder.shuffle_vector(low, high, ir.Constant(index, first))
            lines[row | bit] = builder.shuffle_vector(low, high, ir.Constant(index, second))
    for line in lines:
        builder.store(line, builder.inttoptr(to, index.as_pointer()), align=4)
        to = builder.add(to, to.type(WIDTH))


_load_0, _load_1, _load_2, _load_3 = _load(0), _load(1), _load(2), _load(3)
_load_4, _load_5, _load_6, _load_7 = _load(4), _load(5), _load(6), _load(7)
_store_0, _store_1, _store_2, _store_3 = _store(0), _store(1), _store(2), _store(3)
# All eight tiles have 16 rows of 64 bytes (palette 1).
ALL_TILES = np.zeros(64, np.uint8)
ALL_TILES[0], ALL_TILES[16:32:2], ALL_TILES[48:56] = 1, WIDTH, TILE


def add_product(
    left: Tiles,
    right: Tiles,
    out: Blocks,
    turned: NDArray[np.uint8],
    symmetric: bool,
    every: bool,
    fresh: bool,
) -> None:
    """out += left right^T. Of numbers in two parts on both sides the product of the second ones is
    left out, but for what `symmetric` and `every` say.

    Args:
        left: (blocks, panels, tiles, parts, 2, 16, 32) the bits of bfloat16, contiguous but along
            the blocks; for speed it begins with a line of the cache, as what follows.
        right: likewise, of as many blocks and tiles.
        out: (panels of right, panels of left, 32, 32) rows of left and of right.
        turned: as large as a panel of `right` in a block, changed.
        symmetric: only blocks on and below the diagonal are made, and those along it have the
            product of the second parts, too.
        every: all blocks have it.
        fresh: out = left right^T, whatever it was.
    """
    _add(left, right, out, symmetric, every, fresh, ALL_TILES, turned)


@compiled
def _turn_panel(source: Long, to: Long, size: int) -> None:
    for at in range(0, size, BYTES):
        _turn(source + at, to + at)


@compiled
def _add_block(
    a: Long, b: Long, out: Long, of: tuple[int, int, int], every: bool, fresh: bool
) -> None:
    """32 x 32 sums += a panel times a turned one; of: tiles, parts of a and of b; fresh: from 0."""
    (tiles, parts_a, parts_b), pitch = of, PANEL * 4
    if fresh:
        _clear()
    else:
        _load_0(out, pitch)
        _load_1(out + WIDTH, pitch)
        _load_2(out + TILE * pitch, pitch)
        _load_3(out + TILE * pitch + WIDTH, pitch)
    for _ in range(tiles):
        _load_4(a, WIDTH)
        _load_5(a + BYTES, WIDTH)
        _load_6(b, WIDTH)
        _load_7(b + BYTES, WIDTH)
        _multiply()
        if parts_b > 1:
            _load_6(b + 2 * BYTES, WIDTH)
            _load_7(b + 3 * BYTES, WIDTH)
            _multiply()
        if parts_a > 1:
            _load_4(a + 2 * BYTES, WIDTH)
            _load_5(a + 3 * BYTES, WIDTH)
            if every and parts_b > 1:
                _multiply()
            _load_6(b, WIDTH)
            _load_7(b + BYTES, WIDTH)
            _multiply()
        a, b = a + 2 * parts_a * BYTES, b + 2 * parts_b * BYTES
    _store_0(out, pitch)
    _store_1(out + WIDTH, pitch)
    _store_2(out + TILE * pitch, pitch)
    _store_3(out + TILE * pitch + WIDTH, pitch)


@compiled
def _add(
    left: Tiles,
    right: Tiles,
    out: Blocks,
    symmetric: bool,
    every: bool,
    fresh: bool,
    tiles: NDArray[np.uint8],
    turned: NDArray[np.uint8],
) -> None:
    n, m, n_tiles = left.shape[1], right.shape[1], left.shape[2]
    parts_a, parts_b = left.shape[3], right.shape[3]
    to, turned_b = address(out), address(turned)
    of_a, of_b = n_tiles * parts_a * 2 * BYTES, n_tiles * parts_b * 2 * BYTES
    _configure(address(tiles))
    for low in range(0, n, STAY):
        for first in range(0, low + 1 if symmetric else m, STAY):
            high, last = min(n, low + STAY), min(m, first + STAY)
            for block in range(len(left)):
                a, b = address(left[block]), address(right[block])
                for j in range(first, last):
                    _turn_panel(b + j * of_b, turned_b, of_b)
                    for i in range(max(low, j) if symmetric else low, high):
                        place = to + (j * n + i) * PANEL * PANEL * 4
                        whole = every or (symmetric and i == j)
                        first_one = fresh and block == 0
                        a_i, of_i = a + i * of_a, (n_tiles, parts_a, parts_b)
                        _add_block(a_i, turned_b, place, of_i, whole, first_one)
    _release()
