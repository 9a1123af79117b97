"""x x^T, one triangle of it: half the work of a product, without the interpreter's lock.

numpy calls the same routine for a @ a.T, and then copies the triangle to the other side element by
element; scipy's wrapper holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.scipy_routines import routine
from vitsee_core.types import Float, Float32


@cache
def load_syrk() -> Callable[[Float32, Float32], None] | None:
    """`syrk(x, out)`: the lower triangle of x x^T into `out` (n, n), what lies above it undefined;
    both contiguous. None where scipy offers none. To be called before BLAS threads are limited."""
    if (multiply := routine("blas", "ssyrk", "cciississi")) is None:
        return None

    def syrk(x: Float32, out: Float32) -> None:
        n, k = x.shape
        # Fortran reads rows as columns: x is its transpose there, and the upper triangle our lower.
        multiply(b"U", b"T", n, k, 1.0, x, x.strides[0] // 4, 0.0, out, n)

    return syrk


@cache
def load_double_syrk() -> Callable[[Float, Float], None]:
    """`add(x, total)`: x^T x of x (n, d) is added to the lower triangle of `total` (d, d), or to
    all of it; both contiguous. To be called before BLAS threads are limited."""
    if (multiply := routine("blas", "dsyrk", "cciiddiddi")) is None:
        return _add_product

    def add(x: Float, total: Float) -> None:
        n, d = x.shape
        multiply(b"U", b"N", d, n, 1.0, x, d, 1.0, total, d)

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
