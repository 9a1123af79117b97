"""The matrix unit of a core, AMX: whether it is there, and its instructions for compiled loops.

A processor's eight tiles are 16 rows of 64 bytes; one instruction adds the product of two of them
to a third in 16 cycles: 8,192 multiplications of bfloat16, 16,384 of bytes. The right one has what
is multiplied together (2 numbers, 4 bytes) side by side, so it is turned, such groups at a time.

Here sums of 32 x 32 stay in tiles 0 to 3 while the factors pass through the other four.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from vitsee_core.compiled import compiled, emitted
from vitsee_core.grams.memory import Long

# Rows of a tile; bytes of one of them, and of a tile.
TILE, WIDTH = 16, 64
BYTES = TILE * WIDTH
# Rows and columns of the sums in tiles 0 to 3, and bytes from one of these rows to the next.
PANEL, PITCH = 2 * TILE, 2 * WIDTH
# Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18
FEATURES = ("amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512bw")


@cache
def is_there() -> bool:
    """Whether this process may use it: the processor has it, the system grants it, and numba
    compiles, for this processor and not for another that the user named."""
    if sys.platform != "linux":
        return False
    from llvmlite import binding
    from numba.core import config

    features, named = binding.get_host_cpu_features(), vars(config)
    if not all(features.get(name, False) for name in FEATURES):
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


def _at(instruction: str, tiles: dict[int, int], pitch: int) -> Callable[..., None]:
    def at(builder: Any, address: Any) -> None:
        """Tiles and memory, so many bytes from the address on, and from one row to the next."""
        for tile, offset in tiles.items():
            place = _memory(builder, builder.add(address, address.type(offset)))
            _emit(builder, instruction, tile, place, address.type(pitch))

    return emitted(at)


@emitted
def configure(builder: Any, address: Any) -> None:
    """What the tiles are, 64 bytes."""
    _emit(builder, "ldtilecfg", _memory(builder, address))


@emitted
def release(builder: Any) -> None:
    """The tiles are not needed any more."""
    _emit(builder, "tilerelease")


@emitted
def clear(builder: Any) -> None:
    """Tiles 0 to 3 = 0."""
    for tile in range(4):
        _emit(builder, "tilezero", tile)


def _multiply(instruction: str) -> Callable[..., None]:
    def multiply(builder: Any) -> None:
        """Tiles 0 to 3, two by two, += tiles 4 and 5 times 6 and 7."""
        for total, left, right in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
            _emit(builder, instruction, total, left, right)

    return emitted(multiply)


@emitted
def _turn(builder: Any, source: Any, to: Any) -> None:
    """A tile's 16 rows of 16 groups of 4 bytes as columns: in four rounds each row changes what it
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


LOAD, STORE = "tileloadd64", "tilestored64"
# 32 rows of 32 numbers, and tiles 0 to 3.
_SUMS = {0: 0, 1: WIDTH, 2: TILE * PITCH, 3: TILE * PITCH + WIDTH}
load_sums, store_sums = _at(LOAD, _SUMS, PITCH), _at(STORE, _SUMS, PITCH)
# Two tiles that lie together into tiles 4 and 5, or 6 and 7.
load_left, load_right = _at(LOAD, {4: 0, 5: BYTES}, WIDTH), _at(LOAD, {6: 0, 7: BYTES}, WIDTH)
# Of bfloat16, summed in single precision, and of signed bytes, summed as they are.
multiply_bfloat16, multiply_bytes = _multiply("tdpbf16ps"), _multiply("tdpbssd")
# All eight tiles have 16 rows of 64 bytes (palette 1).
ALL_TILES = np.zeros(64, np.uint8)
ALL_TILES[0], ALL_TILES[16:32:2], ALL_TILES[48:56] = 1, WIDTH, TILE


@compiled
def turn_all(source: Long, to: Long, size: int) -> None:
    """Tiles that lie together, so many bytes."""
    for at in range(0, size, BYTES):
        _turn(source + at, to + at)
