"""Where arrays lie in memory, for compiled loops that address it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted

LINE_BYTES = 64  # of a line of the cache

Long = np.int64 | int


@compiled
def address(x: NDArray[Any]) -> Long:
    """Of the first number."""
    return np.int64(x.ctypes.data)


@emitted
def fetch(builder: Any, address: Any) -> None:
    """Ask for a line of memory, which need not be there."""
    from llvmlite import ir

    number = ir.IntType(32)
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    # To read, into the nearest cache, data.
    where = builder.inttoptr(address, byte)
    builder.call(prefetch, [where, number(0), number(3), number(1)])


def aligned(memory: NDArray[Any]) -> NDArray[Any]:
    """What of some memory begins where a line of the cache does."""
    return memory[-memory.ctypes.data % LINE_BYTES // memory.itemsize :]
