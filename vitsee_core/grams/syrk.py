"""x x^T, one triangle of it: half the work of a product, without the interpreter's lock.

numpy calls the same routine for a @ a.T, and then copies the triangle to the other side element by
element, which costs a sixth of the time; scipy's wrapper holds the lock. So the routine is taken
where scipy offers it to compiled code, `scipy.linalg.cython_blas`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Float32

_S = "__pyx_t_5scipy_6linalg_11cython_blas_s *"
SIGNATURE = f"void (char *, char *, int *, int *, {_S}, {_S}, int *, {_S}, {_S}, int *)".encode()
DOUBLE = SIGNATURE.replace(b"blas_s", b"blas_d")


@cache
def load_syrk() -> Callable[[Float32, Float32], None] | None:
    """`syrk(x, out)`: the lower triangle of x x^T into `out` (n, n), what lies above it undefined;
    both contiguous. None where scipy offers none. To be called before BLAS threads are limited."""
    try:
        from scipy.linalg import cython_blas

        routine = _routine(cython_blas.__pyx_capi__["ssyrk"], SIGNATURE)
    except (ImportError, AttributeError, KeyError, ValueError):
        return None

    def syrk(x: Float32, out: Float32) -> None:
        n, k = x.shape
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        sizes = [ctypes.byref(ctypes.c_int(size)) for size in (n, k, x.strides[0] // 4)]
        # Fortran reads rows as columns: x is its transpose there, and the upper triangle our lower.
        routine(
            *(b"U", b"T", sizes[0], sizes[1], ctypes.byref(one), x.ctypes.data, sizes[2]),
            *(ctypes.byref(zero), out.ctypes.data, sizes[0]),
        )

    return syrk


@cache
def load_double_syrk() -> Callable[[Float, Float], None]:
    """`add(x, total)`: x^T x of x (n, d) is added to the lower triangle of `total` (d, d), or to
    all of it; both contiguous. To be called before BLAS threads are limited."""
    try:
        from scipy.linalg import cython_blas

        routine = _routine(cython_blas.__pyx_capi__["dsyrk"], DOUBLE)
    except (ImportError, AttributeError, KeyError, ValueError):
        return _add_product

    def add(x: Float, total: Float) -> None:
        n, d = x.shape
        one = ctypes.byref(ctypes.c_double(1))
        rows, columns = (ctypes.byref(ctypes.c_int(size)) for size in (n, d))
        routine(
            *(b"U", b"N", columns, rows, one, x.ctypes.data, columns),
            *(one, total.ctypes.data, columns),
        )

    return add


def _add_product(x: Float, total: Float) -> None:
    total += x.T @ x


def mirror(square: NDArray[Any]) -> None:
    """The lower triangle into the upper one, block by block so that it stays in cache."""
    n, step = len(square), 64
    for i in range(0, n, step):
        rows = slice(i, min(i + step, n))
        block = square[rows, rows]
        block[...] = np.tril(block) + np.tril(block, -1).T
        for j in range(i + step, n, step):
            cols = slice(j, min(j + step, n))
            square[rows, cols] = square[cols, rows].T


def _routine(capsule: Any, signature: bytes) -> Any:
    """The function in a capsule.

    Raises:
        ValueError: it takes other arguments.
    """
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    if name != signature:
        raise ValueError(f"unexpected signature: {name!r}")
    text, number = ctypes.c_char_p, ctypes.c_void_p
    takes = [text, text, *[number] * 8]
    return ctypes.CFUNCTYPE(None, *takes)(api.PyCapsule_GetPointer(capsule, name))
