"""Loops that are compiled to machine code when they are first called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Sums may be taken in another order, which vector units need. NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function compiled for the types of its arguments, without the interpreter's lock.

    numba is imported, and the code compiled, at the first call; it is cached beside the module, or
    in the user's cache folder, where either can be written.
    """

    @functools.cache
    def made() -> Callable[P, R]:
        import numba

        compile_: Any = numba.njit
        options = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}
        try:
            found: Callable[P, R] = compile_(function, cache=True, **options)
        except RuntimeError:  # no folder for the cache
            found = compile_(function, **options)
        return found

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return made()(*args, **kwargs)

    return call
