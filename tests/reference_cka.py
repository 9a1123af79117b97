"""CKA by its definition: double loops over images in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def loop_hsic1(x: Array, y: Array) -> float:
    """HSIC_1 of images by features: the tilde matrices, their row sums and totals."""
    n = len(x)
    places = [(i, j) for i in range(n) for j in range(n) if i != j]
    k = {(i, j): math.fsum(x[i] * x[j]) for i, j in places}
    m = {(i, j): math.fsum(y[i] * y[j]) for i, j in places}
    rows_k = [math.fsum(k[i, j] for j in range(n) if j != i) for i in range(n)]
    rows_m = [math.fsum(m[i, j] for j in range(n) if j != i) for i in range(n)]
    trace = math.fsum(k[p] * m[p] for p in places)
    middle = math.fsum(a * b for a, b in zip(rows_k, rows_m, strict=True))
    last = math.fsum(rows_k) * math.fsum(rows_m) / ((n - 1) * (n - 2))
    return (trace + last - 2 * middle / (n - 2)) / (n * (n - 3))


def gram_hsic1(gram: Array, other: Array) -> float:
    """Song et al. 2012, with matrices."""
    n = len(gram)
    k, m = (x - np.diag(np.diagonal(x)) for x in (gram, other))
    return float(
        (
            (k * m).sum()
            + k.sum() * m.sum() / ((n - 1) * (n - 2))
            - 2 / (n - 2) * (k @ m).sum()
        )
        / (n * (n - 3))
    )


def loop_hsic0(x: Array, y: Array) -> float:
    """Kornblith et al. 2019: tr(K H L H) / (n - 1)^2, with explicit matrices."""
    n = len(x)
    h = np.eye(n) - 1 / n
    return float(np.trace((x @ x.T) @ h @ (y @ y.T) @ h)) / (n - 1) ** 2


def loop_cka(
    x: Array, y: Array, hsic: Callable[[Array, Array], float] = loop_hsic1
) -> float:
    """Debiased CKA of two sites over all their images, tokens flattened; or by another HSIC."""
    x, y = (np.asarray(v, np.float64).reshape(len(v), -1) for v in (x, y))
    return hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))


def loop_jackknife(x: Array, y: Array, blocks: list[Array]) -> float:
    """The standard error of CKA that leaves out one block of images at a time."""
    values = []
    for block in blocks:
        keep = np.setdiff1d(np.arange(len(x)), block)
        values.append(loop_cka(x[keep], y[keep]))
    m, mean = len(values), math.fsum(values) / len(values)
    return math.sqrt((m - 1) / m * math.fsum((v - mean) ** 2 for v in values))
