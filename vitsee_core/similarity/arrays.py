"""CKA of features that are in memory, without stores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import interval, standard_error
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.errors import VitseeError

LEAST = 4  # images: unbiased HSIC divides by n - 3


def cka_of_arrays(a: ArrayLike, b: ArrayLike) -> Table:
    """One row: debiased linear CKA of two representations of the same images, with the interval of
    a delete-a-block jackknife, as `vitsee cka` has it for sites of stores.

    Args:
        a: (images, ...), flattened to (images, features).
        b: the same images in the same order; its features may be others.

    Raises:
        VitseeError: other numbers of images, fewer than `LEAST`, or numbers that are not finite.
    """
    grams = [_gram(_flat(features, name)) for features, name in ((a, "first"), (b, "second"))]
    n = len(grams[0])
    if len(grams[1]) != n or n < LEAST:
        raise VitseeError(
            f"the arrays have {n} and {len(grams[1])} images; expected the same ones, at least "
            f"{LEAST}"
        )
    value = _cka(*grams)
    labels = block_labels(n, None)
    kept = [np.flatnonzero(labels != block) for block in range(labels.max() + 1)]
    without = np.array(
        [_cka(*(g[np.ix_(own, own)] for g in grams)) if len(own) >= LEAST else np.nan
         for own in kept]
    )  # fmt: skip
    _, low, high = interval(np.array(value), without)
    row: dict[str, Any] = {
        "metric": "cka", "value": value, "std": float(standard_error(without)),
        "low": float(low), "high": float(high), "spread": "jackknife", "n_images": n,
        "replicates": without,
    }  # fmt: skip
    columns = ("metric", "value", "std", "low", "high", "spread", "n_images")
    return Table.from_rows([row], columns, {"estimator": "exact, unbiased HSIC over all images"})


def _flat(features: ArrayLike, name: str) -> Float:
    values: NDArray[Any] = np.asarray(features)
    if values.ndim < 2 or values.dtype.kind not in "fiub":
        raise VitseeError(
            f"the {name} array is {values.dtype} of shape {values.shape}; expected numbers, "
            "(images, features) or (images, tokens, features)"
        )
    flat = values.reshape(len(values), -1).astype(np.float64)
    if not np.isfinite(flat).all():
        raise VitseeError(f"the {name} array has values that are not finite")
    return flat


def _gram(x: Float) -> Float:
    """(images, images), the diagonal 0, of features less their mean, which CKA does not see."""
    x = x - x.mean(0)
    gram: Float = x @ x.T
    np.fill_diagonal(gram, 0.0)
    return gram


def _cka(k: Float, m: Float) -> float:
    own = _hsic(k, k) * _hsic(m, m)
    return _hsic(k, m) / own**0.5 if own > 0 else float("nan")


def _hsic(k: Float, m: Float) -> float:
    """Song et al. 2012, Eq. 5, for matrices without diagonal."""
    n = len(k)
    rows = k.sum(1) @ m.sum(1)
    found = (k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)
    return float(found / (n * (n - 3)))
