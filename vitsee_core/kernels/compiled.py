"""Loops that are compiled to machine code at their first call."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

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
    names, code = function.__globals__, function.__code__
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
    digest, own = hashlib.sha256(), inspect.getsourcefile(function)
    for name, callee in called.items():
        digest.update(getattr(made[name], "__qualname__", name).encode())
        file = inspect.getsourcefile(inspect.unwrap(callee))
        if file is not None and file != own:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:8]
