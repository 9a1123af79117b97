"""Loops that are compiled to machine code at their first call.

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

# Sums may be reordered, which vector units need. NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


# Roundings as written, except fused multiply-add.
EXACT = {"contract"}


def compiled(function: Callable[P, R], flags: Collection[str] = FAST) -> Callable[P, R]:
    """The function compiled for the types of its arguments, releasing the GIL.

    At the first call numba is imported and the code compiled; it is cached beside the module, or in
    the user's cache folder, if either is writable. Compiled functions may call each other by name.

    Callees are inlined, and compiled with every caller instead of read from the cache. Otherwise a
    call would run either the callee as compiled alone or the copy in the caller, whichever the
    process loaded first, and the two round differently.
    """

    @functools.cache
    def made(inlined: bool = False) -> Callable[P, R]:
        import numba

        compile_: Any = numba.njit
        options = {"nogil": True, "fastmath": set(flags), "error_model": "numpy"}
        written = _with_compiled_callees(function)
        if inlined:
            return compile_(written, forceinline=True, **options)
        try:
            dispatcher: Callable[P, R] = compile_(written, cache=True, **options)
        except RuntimeError:  # no folder for the cache
            dispatcher = compile_(written, **options)
        return dispatcher

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return made()(*args, **kwargs)

    vars(call)["made"] = made
    return call


def _with_compiled_callees(function: Callable[P, R]) -> Callable[P, R]:
    """The function with numba's versions of the compiled functions that it calls by name."""
    names = function.__globals__
    code = function.__code__
    called = {
        name: names[name]
        for name in code.co_names
        if isinstance(names.get(name), FunctionType) and "made" in vars(names[name])
    }
    if not called:
        return function
    made = {name: vars(callee)["made"](True) for name, callee in called.items()}
    copy = FunctionType(code, {**names, **made}, function.__name__, function.__defaults__)
    # numba's cache goes by the name, and notices changes of the function's own file alone.
    copy.__qualname__ = f"{function.__qualname__}_{_digest(function, called, made)}"
    copy.__module__ = function.__module__
    return copy


def _digest(
    function: Callable[..., Any], called: dict[str, FunctionType], made: dict[str, Any]
) -> str:
    """Digest of the files that a function's compiled code depends on beside its own: those of its
    callees, recursively."""
    digest = hashlib.sha256()
    own = inspect.getsourcefile(function)
    for name, callee in called.items():
        digest.update(getattr(made[name], "__qualname__", name).encode())
        file = inspect.getsourcefile(inspect.unwrap(callee))
        if file is not None and file != own:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:8]


# float16 as float32: its bits, moved to their places there, count 2^112 too small; from INFINITE on
# they are infinity or NaN, whose exponent is another.
SCALE = np.float32(2.0**112)
INFINITE = np.uint32(0x0F800000)
EXPONENT = np.uint32(0x70000000)
SIZE = np.uint32(0x7FFF)
SIGN = np.uint32(0x8000)
TO_SIZE = np.uint32(13)
TO_SIGN = np.uint32(16)


@compiled
def _single(bits: np.uint16) -> np.float32:
    """float16 bits as float32."""
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
    """x = raw - mean, for one row; returns its product with `mean`, and its sum."""
    along = np.float32(0)
    total = np.float32(0)
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
        mean: (columns,) subtracted.
        x: (rows, width), filled.
        column: where in `x` the first column goes.
        sums: (rows, 2), added to: each row's product with `mean`, and its sum; not computed if it
            has no rows.
    """
    rows, columns = raw.shape
    for i in range(rows):
        # Slices of rows, so that the compiler knows them to be contiguous.
        along, total = _shift(raw[i], mean, x[i][column : column + columns])
        if len(sums):
            sums[i, 0] += along
            sums[i, 1] += total


@compiled
def shift_bytes(
    raw: NDArray[np.uint8],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    x: NDArray[np.float32],
) -> None:
    """x = (raw - mean) scale, for (rows, columns), with a mean and a scale per column."""
    for i in range(raw.shape[0]):
        of = raw[i]
        to = x[i]
        for j in range(len(of)):
            to[j] = (np.float32(of[j]) - mean[j]) * scale[j]
