"""Define the measures that are inner products of one n x n matrix per site: CKA, RSA and GULP.

All pairs are one matrix product, and permuting the images of one side moves its rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vitsee_core.analyses.similarity.measure import (
    MAX_DENSE_IMAGES,
    Measure,
    SiteGram,
)
from vitsee_core.kernels.compiled import compiled
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes
from vitsee_core.similarity import pearson
from vitsee_core.types import Float, Float32, Integers, Mask

# Of the rows of all matrices that are multiplied at a time, in float64: they stay in cache.
_BLOCK_BYTES = 1 << 22


def inner_products(a: Sequence[Float32], b: Sequence[Float32]) -> Float:
    """Return sum_ij A_ij B_ij of each A in a and B in b, (len(a), len(b)).

    All matrices are (n, n); sums are in float64, on all cores.
    """
    n = len(a[0])
    same = a is b
    n_matrices = len(a) if same else len(a) + len(b)
    step = max(1, _BLOCK_BYTES // (8 * n * n_matrices))

    def multiply_rows(start: int) -> Float:
        """Return the sums over `step` rows of all matrices."""
        left = _flatten_rows(a, start, step)  # (len(a), step * n)
        right = left if same else _flatten_rows(b, start, step)
        return left @ right.T

    total = np.zeros((len(a), len(b)))
    with lane_pool(n_lanes()) as pool:
        # Added in the rows' order, so that rounding does not depend on threads.
        for sums in in_order(multiply_rows, range(0, n, step), pool, n_lanes() + 1):
            total += sums
    return total


def _flatten_rows(matrices: Sequence[Float32], start: int, step: int) -> Float:
    """Return the rows from `start` on, of each matrix as one row, (matrices, step * n)."""
    rows = [matrix[start : start + step].ravel() for matrix in matrices]
    return np.stack(rows, dtype=np.float64)


@dataclass(frozen=True)
class _MatrixMeasure(Measure):
    """A measure whose state is a matrix (n, n), and whose value is made of inner products.

    Attributes:
        uses_norms: `_from_products` makes the values; else they are the inner products.
    """

    uses_norms: ClassVar[bool] = True

    def permute(self, state: Float32, order: Integers) -> Float32:
        """Return the matrix with rows and columns in this order."""
        return state[np.ix_(order, order)]

    def compare(
        self, a: Sequence[Float32], b: Sequence[Float32], pairs: Integers
    ) -> Float:
        """Return the values (pairs,); all pairs of a used row and column are multiplied at once."""
        rows, i = np.unique(pairs[:, 0], return_inverse=True)
        cols, j = np.unique(pairs[:, 1], return_inverse=True)
        left = [a[row] for row in rows]
        right = [b[col] for col in cols]
        same = len(left) == len(right) and all(
            x is y for x, y in zip(left, right, strict=True)
        )
        products = inner_products(left, left if same else right)
        if not self.uses_norms:
            return products[i, j]
        if same:
            left_norms = np.diagonal(products)
            right_norms = left_norms
        else:
            left_norms = np.array([_squared_norm(matrix) for matrix in left])
            right_norms = np.array([_squared_norm(matrix) for matrix in right])
        equal = [left[row] is right[col] for row, col in zip(i, j, strict=True)]
        return self._from_products(
            products[i, j],
            left_norms=left_norms[i],
            right_norms=right_norms[j],
            equal=np.array(equal),
            n=len(left[0]),
        )

    def _from_products(
        self,
        products: Float,
        *,
        left_norms: Float,
        right_norms: Float,
        equal: Mask,
        n: int,
    ) -> Float:
        """Return the measure (pairs,) from inner products.

        Args:
            products: (pairs,) sum_ij A_ij B_ij.
            left_norms: (pairs,) |A|_F^2.
            right_norms: (pairs,) |B|_F^2.
            equal: (pairs,) whether A and B are one matrix.
            n: number of images.
        """
        return products

    def state_bytes(self, n: int) -> int:
        """Return the bytes of an (n, n) matrix of float32."""
        return 4 * n * n


@dataclass(frozen=True)
class Cka(_MatrixMeasure):
    """Debiased linear CKA, as in `vitsee cka`.

    HSIC_1 is the inner product of U-centred Gram matrices (Szekely & Rizzo 2014), which are divided
    by their norms here, so that CKA is the inner product.
    """

    name: ClassVar[str] = "cka"
    limits: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    can_restrict: ClassVar[bool] = True

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Float32 | None:
        """Return the U-centred matrix (n, n) of norm 1; None if HSIC_1 with itself is not
        positive."""
        k = gram.centred()
        n = len(k)
        # K~_ij = K_ij - r_i / (n - 2) - r_j / (n - 2) + sum / ((n - 1) (n - 2)), i != j; r of row
        # sums without the diagonal.
        np.fill_diagonal(k, 0)
        sums = k.sum(0)
        k -= sums / (n - 2)
        k -= sums[:, np.newaxis] / (n - 2) - sums.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(k, 0)
        norm = np.linalg.norm(k)
        if not norm > 0:
            return None
        return (k / norm).astype(np.float32)

    def restrict(self, state: Float32, image_indices: Integers) -> Float32 | None:
        """Return the U-centred matrix of some of the images.

        U-centring subtracts a number per row and per column, so that it may start from the
        U-centred matrix of all images as well as from K.
        """
        n = len(image_indices)
        centred: Float32 = np.empty((n, n), np.float32)
        norm = u_centre(state, image_indices, centred)
        return centred if norm > 0 else None


@dataclass(frozen=True)
class Rsa(_MatrixMeasure):
    """Representational similarity analysis (Kriegeskorte et al. 2008).

    Spearman's correlation, with mean ranks for ties, of the dissimilarities of all pairs of images.

    Attributes:
        rdm: the dissimilarity: "pearson", 1 less the correlation over features, or "euclidean".
    """

    rdm: str = "pearson"
    name: ClassVar[str] = "rsa"
    limits: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    most_images: ClassVar[int | None] = MAX_DENSE_IMAGES

    can_restrict: ClassVar[bool] = True

    def images_without_value(self, gram: SiteGram) -> Mask | None:
        """Return the images whose features are all the same, with which nothing correlates."""
        return gram.is_flat if self.rdm == "pearson" else None

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Float32 | None:
        """Return the ranks (n, n) of dissimilarities from 1 on, 0 on the diagonal; None if all are
        equal.

        Ranks are whole or half numbers, below 2^23 for `MAX_DENSE_IMAGES`: exact in float32.
        """
        from scipy.stats import rankdata

        n = gram.n
        if self.rdm == "euclidean":
            dissimilarities = gram.distances()
        else:
            dissimilarities = 1 - pearson(gram.shifted, gram.shift)
        upper = np.triu_indices(n, 1)
        ranks = rankdata(dissimilarities[upper])
        if not np.ptp(ranks) > 0:
            return None
        matrix = np.zeros((n, n), np.float32)
        matrix[upper] = ranks
        return matrix + matrix.T

    def restrict(self, state: Float32, image_indices: Integers) -> Float32 | None:
        """Return the ranks among some of the images: dissimilarities keep their order, so ranks are
        counted anew from ranks."""
        n = len(image_indices)
        ranks: Float32 = np.zeros((n, n), np.float32)
        n_distinct = rank_anew(state, image_indices, ranks)
        return ranks if n_distinct > 1 else None

    def _from_products(
        self,
        products: Float,
        *,
        left_norms: Float,
        right_norms: Float,
        equal: Mask,
        n: int,
    ) -> Float:
        """Return the correlations of ranks, (pairs,)."""
        # All sums are over both triangles. The mean of N = n (n - 1) / 2 ranks is (N + 1) / 2, so
        # that centring takes 2 N ((N + 1) / 2)^2 from each sum of products.
        n_entries = n * (n - 1)
        of_means = n_entries * ((n_entries / 2 + 1) / 2) ** 2
        variances = (left_norms - of_means) * (right_norms - of_means)
        return (products - of_means) / np.sqrt(variances)


@compiled
def u_centre(k: Float32, image_indices: Integers, out: Float32) -> float:
    """U-centre the rows and columns of k at these images into `out`, divided by its norm.

    Args:
        k: (N, N), of all images.
        image_indices: (n,) of them.
        out: (n, n), filled; 0 if the norm is 0.

    Returns:
        The norm that it had.
    """
    n = len(image_indices)
    sums = np.zeros(n)
    total = 0.0
    squares = 0.0
    for i in range(n):
        row = k[image_indices[i]]
        for j in range(n):
            sums[i] += row[image_indices[j]] if i != j else 0.0
        total += sums[i]
    sums /= n - 2
    total /= (n - 1) * (n - 2)
    # Twice over the entries, for the norm and for the result, as `out` is float32: its norm would
    # be that of rounded entries.
    for i in range(n):
        row = k[image_indices[i]]
        level = total - sums[i]
        for j in range(n):
            value = row[image_indices[j]] - sums[j] + level if i != j else 0.0
            squares += value * value
    norm = np.sqrt(squares)
    scale = 1 / norm if norm > 0 else 0.0
    for i in range(n):
        row = k[image_indices[i]]
        level = total - sums[i]
        for j in range(n):
            value = row[image_indices[j]] - sums[j] + level
            out[i, j] = value * scale if i != j else 0.0
    return float(norm)


@compiled
def rank_anew(ranks: Float32, image_indices: Integers, out: Float32) -> int:
    """Write the ranks among pairs of these images to `out`, on both sides of its diagonal.

    Args:
        ranks: (N, N) among pairs of all images, whole or half numbers.
        image_indices: (n,) of them.
        out: (n, n), filled but for its diagonal.

    Returns:
        The number of distinct ranks.
    """
    n = len(image_indices)
    # Twice a rank is a whole number: sorting is counting.
    counts = np.zeros(len(ranks) * (len(ranks) - 1) + 1, np.int32)
    for i in range(n):
        row = ranks[image_indices[i]]
        for j in range(i):
            counts[int(2 * row[image_indices[j]])] += 1
    new_ranks = np.empty(len(counts), np.float32)
    n_below = 0
    n_distinct = 0
    for doubled in range(len(counts)):
        new_ranks[doubled] = n_below + (counts[doubled] + 1) / 2  # the mean of equal ones
        n_below += counts[doubled]
        n_distinct += counts[doubled] > 0
    for i in range(n):
        row = ranks[image_indices[i]]
        for j in range(i):
            rank = new_ranks[int(2 * row[image_indices[j]])]
            out[i, j] = rank
            out[j, i] = rank
    return n_distinct


@dataclass(frozen=True)
class Gulp(_MatrixMeasure):
    """GULP (Boix-Adsera et al. 2022): how far the ridge predictions from both are apart.

    The squared distance of the predictions, averaged over all targets, is |A - B|_F^2 with
    A = K (K + l I)^-1, K of trace 1.

    Attributes:
        ridge: l; at 0, features with n or more dimensions all have distance 0.
    """

    ridge: float = 1e-2
    name: ClassVar[str] = "gulp"
    distance: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (0.0, np.inf)
    most_images: ClassVar[int | None] = MAX_DENSE_IMAGES

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Float32:
        """Return the matrix A (n, n)."""
        k = gram.centred()
        k /= np.trace(k)
        # K (K + l I)^-1 = I - l (K + l I)^-1: one inverse of a symmetric matrix.
        np.fill_diagonal(k, np.diagonal(k) + self.ridge)
        smoother = -self.ridge * inverse(k)
        np.fill_diagonal(smoother, np.diagonal(smoother) + 1)
        return smoother.astype(np.float32)

    def _from_products(
        self,
        products: Float,
        *,
        left_norms: Float,
        right_norms: Float,
        equal: Mask,
        n: int,
    ) -> Float:
        """Return |A - B|_F^2, (pairs,); exactly 0 for one matrix, despite rounding."""
        distances: Float = np.maximum(left_norms + right_norms - 2 * products, 0)
        distances[equal] = 0
        return distances


def _squared_norm(matrix: Float32) -> float:
    """Return the sum of squares of a matrix's entries, in float64."""
    return float(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64))


def inverse(matrix: Float) -> Float:
    """Return the inverse of a positive definite (n, n) matrix, which is overwritten."""
    from scipy.linalg import lapack

    # By Cholesky's factor: half the work of a general inverse, and the result is symmetric.
    factor, failed = lapack.dpotrf(matrix, lower=1, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError("not positive definite")
    triangle, _ = lapack.dpotri(factor, lower=1, overwrite_c=1)
    lower: Float = np.tril(triangle)
    return lower + np.tril(lower, -1).T
