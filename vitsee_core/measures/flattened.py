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
    """The state is a matrix. of_norms: values are made of the matrices' norms, too."""

    of_norms: ClassVar[bool] = True

    def permuted(self, state: Float32, order: Integers) -> Float32:
        """See `Measure`."""
        return state[np.ix_(order, order)]

    def compare(self, a: Sequence[Float32], b: Sequence[Float32], pairs: Integers) -> Float:
        """See `Measure`."""
        rows, i = np.unique(pairs[:, 0], return_inverse=True)
        cols, j = np.unique(pairs[:, 1], return_inverse=True)
        of_a, of_b = [a[r] for r in rows], [b[c] for c in cols]
        same = len(of_a) == len(of_b) and all(x is y for x, y in zip(of_a, of_b, strict=True))
        products = inner_products(of_a, of_a if same else of_b)
        if not self.of_norms:
            return products[i, j]
        own_a = np.diagonal(products) if same else np.array([_squared(m) for m in of_a])
        own_b = own_a if same else np.array([_squared(m) for m in of_b])
        equal = np.array([of_a[r] is of_b[c] for r, c in zip(i, j, strict=True)])
        return self._values(products[i, j], own_a[i], own_b[j], equal, len(of_a[0]))

    def _values(self, products: Float, own_a: Float, own_b: Float, equal: Mask, n: int) -> Float:
        """(pairs,) of inner products, those of either side with itself, and which sides are one,
        of n images."""
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

    reduces: ClassVar[bool] = True

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Float32 | None:
        """(n, n) U-centred, of norm 1; None where HSIC_1 with itself is not positive."""
        return _u_centred(gram.centred())

    def reduced(self, state: Float32, places: Integers) -> Float32 | None:
        """See `Measure`: U-centring takes off a number per row and per column, so that of a part of
        the images it may begin where that of all ended."""
        return _u_centred(state[np.ix_(places, places)].astype(np.float64))


def _u_centred(k: Float) -> Float32 | None:
    """(n, n) U-centred, of norm 1; None where nothing is left. `k` is overwritten."""
    n = len(k)
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

    reduces: ClassVar[bool] = True

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Float32 | None:
        """(n, n) ranks of dissimilarities from 1 on, exact in float32, 0 on the diagonal; None
        where all are the same."""
        of = gram.distances() if self.rdm == "euclidean" else 1 - gram.correlations()
        return _symmetric(_ranks(of[np.triu_indices(gram.n, 1)]), gram.n)

    def reduced(self, state: Float32, places: Integers) -> Float32 | None:
        """See `Measure`: dissimilarities keep their order, so their ranks are counted anew."""
        doubled = (2 * state[np.ix_(places, places)]).astype(np.int64)  # ties have halves
        counts = np.bincount(doubled.ravel()) // 2  # the matrix has each twice
        counts[0] = 0
        if np.count_nonzero(counts) < 2:
            return None
        anew = np.cumsum(counts)  # twice the mean rank of equal ones is 2 cumsum - count + 1
        anew *= 2
        anew -= counts
        anew += 1
        anew[0] = 0
        ranks = anew.astype(np.float32)
        ranks /= 2
        found: Float32 = ranks[doubled]
        return found

    def _values(self, products: Float, own_a: Float, own_b: Float, equal: Mask, n: int) -> Float:
        pairs = n * (n - 1)  # each twice
        common = pairs * ((pairs / 2 + 1) / 2) ** 2
        return (products - common) / np.sqrt((own_a - common) * (own_b - common))


def _symmetric(ranks: Float, n: int) -> Float32 | None:
    """(n, n) of the upper triangle's; None where all are the same."""
    if not np.ptp(ranks) > 0:
        return None
    out = np.zeros((n, n), np.float32)
    out[np.triu_indices(n, 1)] = ranks
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

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Float32:
        """(n, n) A."""
        k = gram.centred()
        k /= np.trace(k)
        np.fill_diagonal(k, np.diagonal(k) + self.ridge)
        smoother = -self.ridge * inverse(k)
        np.fill_diagonal(smoother, np.diagonal(smoother) + 1)
        return smoother.astype(np.float32)

    def _values(self, products: Float, own_a: Float, own_b: Float, equal: Mask, n: int) -> Float:
        found: Float = np.maximum(own_a + own_b - 2 * products, 0)
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
