"""Measures that are inner products of one n x n matrix per representation: CKA, RSA and GULP.

All pairs are one matrix product; permuting the images of one side moves its rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vitsee_core.measures.base import MOST_DENSE, Measure
from vitsee_core.measures.site_gram import SiteGram
from vitsee_core.types import Float, Float32, Integers, Mask

_BYTES = 1 << 26  # of the parts of all matrices that are multiplied at a time


def inner_products(a: Sequence[Float32], b: Sequence[Float32]) -> Float:
    """(len(a), len(b)) sum_ij A_ij B_ij, in float64."""
    n, same = len(a[0]), a is b
    step = max(1, _BYTES // (8 * n * (len(a) + (0 if same else len(b)))))
    total = np.zeros((len(a), len(b)))
    for at in range(0, n, step):
        left = _part(a, at, step)
        total += left @ (left if same else _part(b, at, step)).T
    return total


def _part(matrices: Sequence[Float32], at: int, step: int) -> Float:
    rows = [matrix[at : at + step].ravel() for matrix in matrices]
    return np.stack(rows).astype(np.float64)


@dataclass(frozen=True)
class _Flattened(Measure):
    def permuted(self, state: Float32, order: Integers) -> Float32:
        """See `Measure`."""
        return state[np.ix_(order, order)]

    def compare(self, a: Sequence[Float32], b: Sequence[Float32], pairs: Integers) -> Float:
        """See `Measure`."""
        rows, i = np.unique(pairs[:, 0], return_inverse=True)
        cols, j = np.unique(pairs[:, 1], return_inverse=True)
        of_a = [a[r] for r in rows]
        same = len(rows) == len(cols) and all(x is b[c] for x, c in zip(of_a, cols, strict=True))
        products = inner_products(of_a, of_a if same else [b[c] for c in cols])
        return self._values(products[i, j], of_a, [b[c] for c in cols], i, j)

    def _values(
        self,
        products: Float,
        a: Sequence[Float32],
        b: Sequence[Float32],
        i: Integers,
        j: Integers,
    ) -> Float:
        return products

    def state_bytes(self, n: int) -> int:
        """See `Measure`."""
        return 4 * n * n


@dataclass(frozen=True)
class Cka(_Flattened):
    """Debiased linear CKA, as `vitsee cka`: HSIC_1 is the inner product of U-centred Gram matrices
    (Szekely & Rizzo 2014), here each divided by its norm."""

    name: ClassVar[str] = "cka"
    limits: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def prepare(self, gram: SiteGram, kept: object = None) -> Float32 | None:
        """(n, n) U-centred, of norm 1; None where HSIC_1 with itself is not positive."""
        k, n = gram.centred(), gram.n
        np.fill_diagonal(k, 0)
        sums = k.sum(0)
        k -= sums / (n - 2)
        k -= sums[:, np.newaxis] / (n - 2) - sums.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(k, 0)
        norm = np.linalg.norm(k)
        return (k / norm).astype(np.float32) if norm > 0 else None


@dataclass(frozen=True)
class Rsa(_Flattened):
    """Representational similarity analysis (Kriegeskorte et al. 2008): Spearman's correlation, mean
    ranks for ties, of the dissimilarities of all pairs of images. rdm: "pearson", 1 less the
    correlation over features, or "euclidean"."""

    rdm: str = "pearson"
    name: ClassVar[str] = "rsa"
    limits: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    most_images: ClassVar[int | None] = MOST_DENSE

    def lacking(self, gram: SiteGram) -> Mask | None:
        """Images whose features are all the same correlate with none."""
        return gram.flat if self.rdm == "pearson" else None

    def prepare(self, gram: SiteGram, kept: object = None) -> Float32 | None:
        """(n, n) ranks of dissimilarities less their mean, of norm 1, 0 on the diagonal; None where
        all are the same."""
        of = gram.distances() if self.rdm == "euclidean" else 1 - gram.correlations()
        i, j = np.triu_indices(gram.n, 1)
        ranks = _ranks(of[i, j])
        ranks -= ranks.mean()
        norm = np.linalg.norm(ranks) * np.sqrt(2)
        if not norm > 0:
            return None
        out = np.zeros((gram.n, gram.n), np.float32)
        out[i, j] = ranks / norm
        return out + out.T


def _ranks(values: Float) -> Float:
    from scipy.stats import rankdata

    found: Float = rankdata(values, "average")
    return found


@dataclass(frozen=True)
class Gulp(_Flattened):
    """GULP (Boix-Adsera et al. 2022): the squared distance of ridge predictors made of both,
    averaged over all targets: |A - B|_F^2, A = K (K + l I)^-1 with the centred Gram matrix K of
    trace 1. ridge: l; at 0, features with n or more dimensions all have distance 0."""

    ridge: float = 1e-2
    name: ClassVar[str] = "gulp"
    distance: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (0.0, np.inf)
    most_images: ClassVar[int | None] = MOST_DENSE

    def prepare(self, gram: SiteGram, kept: object = None) -> Float32:
        """(n, n) A."""
        k = gram.centred()
        k /= np.trace(k)
        np.fill_diagonal(k, np.diagonal(k) + self.ridge)
        smoother = -self.ridge * inverse(k)
        np.fill_diagonal(smoother, np.diagonal(smoother) + 1)
        return smoother.astype(np.float32)

    def _values(
        self,
        products: Float,
        a: Sequence[Float32],
        b: Sequence[Float32],
        i: Integers,
        j: Integers,
    ) -> Float:
        own_a, own_b = (np.array([_squared(m) for m in side]) for side in (a, b))
        found: Float = np.maximum(own_a[i] + own_b[j] - 2 * products, 0)
        equal = np.array([a[r] is b[c] for r, c in zip(i, j, strict=True)])
        found[equal] = 0
        return found


def _squared(matrix: Float32) -> float:
    return float(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64))


def inverse(matrix: Float) -> Float:
    """Of a positive definite (n, n) matrix, which is overwritten."""
    from scipy.linalg import lapack

    factor, failed = lapack.dpotrf(matrix, lower=1, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError("not positive definite")
    found, _ = lapack.dpotri(factor, lower=1, overwrite_c=1)
    lower: Float = np.tril(found)
    return lower + np.tril(lower, -1).T
