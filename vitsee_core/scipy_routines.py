"""Routines of BLAS and LAPACK as scipy offers them to compiled code, `scipy.linalg.cython_blas` and
`cython_lapack`: without what Python's wrappers of them copy, and without the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of arguments, all of which are pointers: characters, integers, numbers of single and of double
# precision. Numbers and arrays of them are named after the module.
KINDS = {"c": "char *", "i": "int *", "s": "{}_s *", "d": "{}_d *"}


def routine(library: str, name: str, kinds: str) -> Callable[..., None] | None:
    """A routine, which takes characters as bytes, integers, floats, and contiguous arrays. None
    where scipy offers none, or another one.

    Args:
        library: "blas" or "lapack".
        name: of the routine.
        kinds: of its arguments, each a letter of `KINDS`.
    """
    module = f"cython_{library}"
    try:
        capsule = import_module(f"scipy.linalg.{module}").__pyx_capi__[name]
    except (ImportError, AttributeError, KeyError):
        return None
    number = f"__pyx_t_5scipy_6linalg_{len(module)}{module}"
    signature = f"void ({', '.join(KINDS[kind].format(number) for kind in kinds)})".encode()
    if (place := _address(capsule, signature)) is None:
        return None
    types = [ctypes.c_char_p if kind == "c" else ctypes.c_void_p for kind in kinds]
    call = ctypes.CFUNCTYPE(None, *types)(place)

    def run(*values: bytes | int | float | NDArray[Any]) -> None:
        held = [_pointed_at(value, kind) for value, kind in zip(values, kinds, strict=True)]
        call(*(v if isinstance(v, bytes) else v.ctypes.data for v in held))

    return run


def _pointed_at(value: bytes | int | float | NDArray[Any], kind: str) -> Any:
    if isinstance(value, bytes | np.ndarray):
        return value
    return np.array(value, {"i": np.intc, "s": np.float32, "d": np.float64}[kind])


def _address(capsule: Any, signature: bytes) -> int | None:
    """Of the function in a capsule; None where it takes other arguments."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    return api.PyCapsule_GetPointer(capsule, name) if name == signature else None
