"""Compile loops to machine code at their first call, and cast and shift features by such loops.

One of them casts half precision to single, shifts and sums it in one loop over the features. With
numpy and torch these are four passes over cached pieces (cast, subtract, product with the mean,
sum), which take twice the time.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

# LLVM's flags of floating-point arithmetic.
# Sums may be reordered, which vector units need. NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}
# Roundings as written, except fused multiply-add.
EXACT = {"contract"}


def compiled(function: Callable[P, R], flags: Collection[str] = FAST) -> Callable[P, R]:
    """Return a function that is compiled for the types of its arguments, and releases the GIL.

    Args:
        function: a loop in the part of Python that numba knows.
        flags: `FAST` or `EXACT`.

    At the first call numba is imported and the code compiled; it is cached beside the module, or in
    the user's cache folder, if either is writable. Compiled functions may call each other by name.

    Callees are inlined, and compiled with every caller instead of read from the cache. Otherwise a
    call would run either the callee as compiled alone or the copy in the caller, whichever the
    process loaded first, and the two round differently.
    """

    @functools.cache
    def dispatcher(inlined: bool = False) -> Callable[P, R]:
        """Return numba's version of the function, as called or as inlined into callers."""
        import numba

        compile_: Any = numba.njit
        options = {"nogil": True, "fastmath": set(flags), "error_model": "numpy"}
        source = _with_compiled_callees(function)
        if inlined:
            return compile_(source, forceinline=True, **options)
        try:
            cached: Callable[P, R] = compile_(source, cache=True, **options)
        except RuntimeError:  # no folder for the cache
            return compile_(source, **options)
        return cached

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Compile at the first call, then run."""
        return dispatcher()(*args, **kwargs)

    # Marks the function as compiled, for callers that are compiled themselves.
    vars(call)["dispatcher"] = dispatcher
    return call


def _with_compiled_callees(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with numba's versions of the compiled functions that it calls by name."""
    names = function.__globals__
    code = function.__code__
    callees: dict[str, FunctionType] = {}
    for name in code.co_names:
        callee = names.get(name)
        if isinstance(callee, FunctionType) and "dispatcher" in vars(callee):
            callees[name] = callee
    if not callees:
        return function
    inlined = {name: vars(callee)["dispatcher"](True) for name, callee in callees.items()}
    digest = _digest_callees(function, callees, inlined)
    copy = FunctionType(
        code, {**names, **inlined}, function.__name__, function.__defaults__
    )
    # numba's cache goes by the name, and notices changes of the function's own file alone.
    copy.__qualname__ = f"{function.__qualname__}_{digest}"
    copy.__module__ = function.__module__
    return copy


def _digest_callees(
    function: Callable[..., Any],
    callees: dict[str, FunctionType],
    inlined: dict[str, Any],
) -> str:
    """Return a digest of the other files that a function's compiled code depends on.

    Args:
        function: whose code it is.
        callees: the compiled functions that it calls, by name.
        inlined: their compiled versions, whose names have the digests of their own callees.
    """
    digest = hashlib.sha256()
    function_file = inspect.getsourcefile(function)
    for name, callee in callees.items():
        digest.update(getattr(inlined[name], "__qualname__", name).encode())
        file = inspect.getsourcefile(inspect.unwrap(callee))
        if file is not None and file != function_file:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:8]


# float16 has 1 sign, 5 exponent and 10 fraction bits, float32 has 1, 8 and 23: moved by 13 bits,
# exponent and fraction are a float32 that is 2^112 too small, as the exponents' biases are 15 and
# 127. From INFINITE on they are infinity or NaN, which need the largest exponent instead.
SCALE = np.float32(2.0**112)
INFINITE = np.uint32(0x0F800000)
EXPONENT = np.uint32(0x70000000)
SIZE = np.uint32(0x7FFF)
SIGN = np.uint32(0x8000)
TO_SIZE = np.uint32(13)
TO_SIGN = np.uint32(16)


@compiled
def _single(bits: np.uint16) -> np.float32:
    """Return the float32 of a float16's bits."""
    half = np.uint32(bits)
    size = np.uint32((half & SIZE) << TO_SIZE)
    infinite = size >= INFINITE
    size = np.uint32(size + EXPONENT) if infinite else size
    sign = np.uint32((half & SIGN) << TO_SIGN)
    value = np.uint32(size | sign).view(np.float32)
    return value if infinite else value * SCALE


@compiled
def _shift(
    raw: NDArray[np.uint16], mean: NDArray[np.float32], x: NDArray[np.float32]
) -> tuple[np.float32, np.float32]:
    """Write one row of raw - mean to x; return its product with `mean`, and its sum."""
    product = np.float32(0)
    total = np.float32(0)
    for k in range(len(raw)):
        value = _single(raw[k]) - mean[k]
        x[k] = value
        product += value * mean[k]
        total += value
    return product, total


@compiled
def shift_half(
    raw: NDArray[np.uint16],
    mean: NDArray[np.float32],
    x: NDArray[np.float32],
    column: int,
    sums: NDArray[np.float32],
) -> None:
    """Write raw - mean to x, from one of its columns on, and add to its sums.

    Args:
        raw: (rows, columns) the bits of float16.
        mean: (columns,) subtracted.
        x: (rows, width), filled.
        column: where in `x` the first column goes.
        sums: (rows, 2), added to: each row's product with `mean`, and its sum; not computed if it
            has no rows.
    """
    rows, columns = raw.shape
    for i in range(rows):
        # Slices of rows, so that the compiler knows them to be contiguous.
        product, total = _shift(raw[i], mean, x[i][column : column + columns])
        if len(sums):
            sums[i, 0] += product
            sums[i, 1] += total


@compiled
def shift_bytes(
    raw: NDArray[np.uint8],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    x: NDArray[np.float32],
) -> None:
    """Write (raw - mean) * scale to x.

    Args:
        raw: (rows, columns).
        mean: (columns,).
        scale: (columns,).
        x: (rows, columns), filled.
    """
    for i in range(raw.shape[0]):
        # Slices of rows, so that the compiler knows them to be contiguous.
        raw_row = raw[i]
        x_row = x[i]
        for j in range(len(raw_row)):
            x_row[j] = (np.float32(raw_row[j]) - mean[j]) * scale[j]
