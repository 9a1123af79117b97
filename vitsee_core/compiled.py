"""Loops that are compiled to machine code when they are first called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Sums may be taken in another order, which vector units need. NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


# Every rounding as it is written, but for products that are added at once.
EXACT = {"contract"}


def compiled(function: Callable[P, R], flags: Collection[str] = FAST) -> Callable[P, R]:
    """The function compiled for the types of its arguments, without the interpreter's lock.

    numba is imported, and the code compiled, at the first call; it is cached beside the module, or
    in the user's cache folder, where either can be written. It may call other compiled functions of
    its own module: the cache notices changes of that file alone.
    """

    @functools.cache
    def made() -> Callable[P, R]:
        import numba

        compile_: Any = numba.njit
        options = {"nogil": True, "fastmath": set(flags), "error_model": "numpy"}
        written = _with_compiled_callees(function)
        try:
            found: Callable[P, R] = compile_(written, cache=True, **options)
        except RuntimeError:  # no folder for the cache
            found = compile_(written, **options)
        return found

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return made()(*args, **kwargs)

    vars(call)["made"] = made
    return call


def _with_compiled_callees(function: Callable[P, R]) -> Callable[P, R]:
    """The function with numba's own in place of the compiled ones that it calls by name."""
    names, code = function.__globals__, function.__code__
    callees = {
        name: vars(names[name])["made"]()
        for name in code.co_names
        if isinstance(names.get(name), FunctionType) and "made" in vars(names[name])
    }
    if not callees:
        return function
    copy = FunctionType(code, {**names, **callees}, function.__name__, function.__defaults__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy
