"""Measures made of products of one matrix per representation.

CKA, RSA and GULP are inner products of n x n matrices: all pairs are one matrix product, and
permuting the images of one side moves its rows and columns. Procrustes and SVCCA compare the
factors U S U^T of centred Gram matrices. Ridge R^2 predicts one representation linearly from
another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from vitsee_core.analyses.similarity.measure import MOST_DENSE, Measure, SiteGram
from vitsee_core.kernels.compiled import compiled
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes, one_blas_thread
from vitsee_core.similarity import pearson
from vitsee_core.types import Float, Float32, Integers, Mask

_BYTES = (
    1 << 22
)  # of the parts of all matrices that are multiplied at a time: they stay in cache


def inner_products(a: Sequence[Float32], b: Sequence[Float32]) -> Float:
    """The sums over ij of A_ij B_ij for each A of a and B of b, (len(a), len(b)), in float64, on
    all cores."""
    n = len(a[0])
    same = a is b
    step = max(1, _BYTES // (8 * n * (len(a) + (0 if same else len(b)))))

    def product(at: int) -> Float:
        left = _part(a, at, step)
        return left @ (left if same else _part(b, at, step)).T

    total = np.zeros((len(a), len(b)))
    with lane_pool(n_lanes()) as pool:
        for part in in_order(product, range(0, n, step), pool, n_lanes() + 1):
            total += part
    return total


def _part(matrices: Sequence[Float32], at: int, step: int) -> Float:
    return np.stack(
        [matrix[at : at + step].ravel() for matrix in matrices], dtype=np.float64
    )


@dataclass(frozen=True)
class _Flattened(Measure):
    """The state is a matrix. of_norms: values depend on the matrices' norms, too."""

    of_norms: ClassVar[bool] = True

    def permuted(self, state: Float32, order: Integers) -> Float32:
        return state[np.ix_(order, order)]

    def compare(
        self, a: Sequence[Float32], b: Sequence[Float32], pairs: Integers
    ) -> Float:
        rows, i = np.unique(pairs[:, 0], return_inverse=True)
        cols, j = np.unique(pairs[:, 1], return_inverse=True)
        of_a = [a[r] for r in rows]
        of_b = [b[c] for c in cols]
        same = len(of_a) == len(of_b) and all(
            x is y for x, y in zip(of_a, of_b, strict=True)
        )
        products = inner_products(of_a, of_a if same else of_b)
        if not self.of_norms:
            return products[i, j]
        own_a = np.diagonal(products) if same else np.array([_squared(m) for m in of_a])
        own_b = own_a if same else np.array([_squared(m) for m in of_b])
        equal = np.array([of_a[r] is of_b[c] for r, c in zip(i, j, strict=True)])
        return self._values(products[i, j], own_a[i], own_b[j], equal, len(of_a[0]))

    def _values(
        self, products: Float, own_a: Float, own_b: Float, equal: Mask, n: int
    ) -> Float:
        """The measure (pairs,) from inner products, those of either side with itself, and a mask of
        the pairs whose sides are equal, for n images."""
        return products

    def state_bytes(self, n: int) -> int:
        return 4 * n * n


@dataclass(frozen=True)
class Cka(_Flattened):
    """Debiased linear CKA, as `vitsee cka`: HSIC_1 is the inner product of U-centred Gram matrices
    (Szekely & Rizzo 2014), here each divided by its norm."""

    name: ClassVar[str] = "cka"
    limits: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    reduces: ClassVar[bool] = True

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Float32 | None:
        """The U-centred matrix (n, n) of norm 1; None if HSIC_1 with itself is not positive."""
        return _u_centred(gram.centred())

    def reduced(self, state: Float32, places: Integers) -> Float32 | None:
        """U-centring subtracts a number per row and per column, so that for a part of the images it
        may start from that of all."""
        centred: Float32 = np.empty((len(places),) * 2, np.float32)
        return centred if u_centre(state, places, centred) > 0 else None


def _u_centred(k: Float) -> Float32 | None:
    """The U-centred matrix (n, n) of norm 1; None if nothing is left. `k` is overwritten."""
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
        """The ranks (n, n) of dissimilarities from 1 on, exact in float32, 0 on the diagonal; None
        if all are equal."""
        from scipy.stats import rankdata

        euclidean = self.rdm == "euclidean"
        of = gram.distances() if euclidean else 1 - pearson(gram.shifted, gram.shift)
        return _symmetric(rankdata(of[np.triu_indices(gram.n, 1)]), gram.n)

    def reduced(self, state: Float32, places: Integers) -> Float32 | None:
        """Dissimilarities keep their order, so their ranks are recounted."""
        ranks: Float32 = np.zeros((len(places),) * 2, np.float32)
        return ranks if rank_anew(state, places, ranks) > 1 else None

    def _values(
        self, products: Float, own_a: Float, own_b: Float, equal: Mask, n: int
    ) -> Float:
        pairs = n * (n - 1)  # each twice
        common = pairs * ((pairs / 2 + 1) / 2) ** 2
        return (products - common) / np.sqrt((own_a - common) * (own_b - common))


@compiled
def u_centre(k: Float32, places: Integers, found: Float32) -> float:
    """U-centre the part of k, (n, n), at these images into `found`, of norm 1; returns its norm."""
    n = len(places)
    sums = np.zeros(n)
    total = 0.0
    squares = 0.0
    for i in range(n):
        row = k[places[i]]
        for j in range(n):
            sums[i] += row[places[j]] if i != j else 0.0
        total += sums[i]
    sums /= n - 2
    total /= (n - 1) * (n - 2)
    for i in range(n):
        row = k[places[i]]
        level = total - sums[i]
        for j in range(n):
            value = row[places[j]] - sums[j] + level if i != j else 0.0
            squares += value * value
    norm = np.sqrt(squares)
    scale = 1 / norm if norm > 0 else 0.0
    for i in range(n):
        row = k[places[i]]
        level = total - sums[i]
        for j in range(n):
            found[i, j] = (row[places[j]] - sums[j] + level) * scale if i != j else 0.0
    return float(norm)


@compiled
def rank_anew(ranks: Float32, places: Integers, found: Float32) -> int:
    """Write the ranks among pairs of these images to `found`, on both sides of its diagonal;
    returns the number of distinct ones."""
    n = len(places)
    counts = np.zeros(len(ranks) * (len(ranks) - 1) + 1, np.int32)
    for i in range(n):
        row = ranks[places[i]]
        for j in range(i):
            counts[int(2 * row[places[j]])] += 1  # ties have halves
    anew = np.empty(len(counts), np.float32)
    before = 0
    distinct = 0
    for at in range(len(counts)):
        anew[at] = before + (counts[at] + 1) / 2  # the mean of equal ones
        before += counts[at]
        distinct += counts[at] > 0
    for i in range(n):
        row = ranks[places[i]]
        for j in range(i):
            value = anew[int(2 * row[places[j]])]
            found[i, j] = value
            found[j, i] = value
    return distinct


def _symmetric(ranks: Float, n: int) -> Float32 | None:
    """The matrix (n, n) of the ranks of its upper triangle; None if all are equal."""
    if not np.ptp(ranks) > 0:
        return None
    out = np.zeros((n, n), np.float32)
    out[np.triu_indices(n, 1)] = ranks
    return out + out.T


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
        """The matrix A (n, n)."""
        k = gram.centred()
        k /= np.trace(k)
        np.fill_diagonal(k, np.diagonal(k) + self.ridge)
        smoother = -self.ridge * inverse(k)
        np.fill_diagonal(smoother, np.diagonal(smoother) + 1)
        return smoother.astype(np.float32)

    def _values(
        self, products: Float, own_a: Float, own_b: Float, equal: Mask, n: int
    ) -> Float:
        distances: Float = np.maximum(own_a + own_b - 2 * products, 0)
        distances[equal] = 0
        return distances


def _squared(matrix: Float32) -> float:
    return float(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64))


def inverse(matrix: Float) -> Float:
    """The inverse of a positive definite (n, n) matrix, which is overwritten."""
    from scipy.linalg import lapack

    factor, failed = lapack.dpotrf(matrix, lower=1, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError("not positive definite")
    triangle, _ = lapack.dpotri(factor, lower=1, overwrite_c=1)
    lower: Float = np.tril(triangle)
    return lower + np.tril(lower, -1).T


_ROUNDING = 2.0**-24  # of float32, relative


def factorised(gram: SiteGram) -> tuple[Float, Float]:
    """The eigenvectors (n, r) and eigenvalues (r,) of K, largest first, at numerical rank r: above
    the error of rounding G to float32 (four times the longest row of its errors)."""
    values, vectors = np.linalg.eigh(gram.centred())
    noise = 4 * _ROUNDING * float(np.linalg.norm(gram.shifted, axis=1).max())
    kept = slice(int(np.searchsorted(values, noise, "right")), None)
    return vectors[:, kept][:, ::-1], values[kept][::-1]


@dataclass(frozen=True)
class _OfFactors(Measure):
    """The state is a matrix (n, r)."""

    most_images: ClassVar[int | None] = MOST_DENSE
    slow: ClassVar[bool] = True

    def permuted(self, state: Float, order: Integers) -> Float:
        return state[order]

    def compare(self, a: Sequence[Float], b: Sequence[Float], pairs: Integers) -> Float:
        with lane_pool(n_lanes()) as pool:
            values = in_order(
                lambda pair: self._pair(a[pair[0]], b[pair[1]]), pairs.tolist(), pool, 8
            )
            return np.array(list(values))

    @abstractmethod
    def _pair(self, a: Float, b: Float) -> float:
        """The measure of two states."""

    def state_bytes(self, n: int) -> int:
        return 8 * n * n


@dataclass(frozen=True)
class Procrustes(_OfFactors):
    """1 - 2 theta / pi with theta = arccos(|Xc^T Yc|_* / (|Xc|_F |Yc|_F)), the angle that is left
    after the best rotation (Williams et al. 2021, `alpha` = 1). Independent features are not at 0
    where there are fewer images than dimensions: its null belongs beside it."""

    name: ClassVar[str] = "procrustes"

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Float | None:
        """The factor U S^(1/2) (n, r), of norm 1."""
        vectors, values = factorised(gram)
        if len(values):
            return vectors * np.sqrt(values / values.sum())
        return None

    def _pair(self, a: Float, b: Float) -> float:
        nuclear = float(np.linalg.svd(a.T @ b, compute_uv=False).sum())
        # arccos(1 - e) is about sqrt(2 e): rounding alone would give 1e-8 for equal states.
        return float(1 - 2 / np.pi * np.arccos(min(1.0, nuclear)))


@dataclass(frozen=True)
class Svcca(_OfFactors):
    """Mean canonical correlation of the leading principal components (Raghu et al. 2017): the mean
    of the min(a, b) singular values of U_a^T V_b, a and b components with `variance` of the
    variance each. Where a + b > n - 1, some are 1 whatever the features are."""

    variance: float = 0.99
    name: ClassVar[str] = "svcca"

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Float | None:
        """The leading eigenvectors (n, a)."""
        vectors, values = factorised(gram)
        if not len(values):
            return None
        shares = np.cumsum(values) / values.sum()
        leading = int(np.searchsorted(shares, self.variance * (1 - 1e-12))) + 1
        return np.ascontiguousarray(vectors[:, :leading])

    def remark(
        self, a: Sequence[Float], b: Sequence[Float], pairs: Integers
    ) -> str | None:
        """Correlations that are 1 whatever the features are."""
        forced = sum(
            a[i].shape[1] + b[j].shape[1] > len(a[i]) - 1 for i, j in pairs.tolist()
        )
        if not forced:
            return None
        return (
            f"svcca: in {forced} of {len(pairs)} pairs the components are more than the images, so "
            "that some correlations are 1 whatever the features are; give more --images, or a "
            "smaller --variance"
        )

    def _pair(self, a: Float, b: Float) -> float:
        return float(np.linalg.svd(a.T @ b, compute_uv=False).mean().clip(max=1))


RIDGES = 10.0 ** np.arange(-6, 7)


@dataclass
class Predictor:
    """The state of a representation, which predicts and is predicted."""

    kernel: Float32  # (n, n) K
    vectors: Float  # its eigenvectors
    values: Float  # its eigenvalues
    ridges: tuple[int, ...] = tuple(range(len(RIDGES)))  # which of `RIDGES` are tried
    best: set[int] = field(default_factory=set)  # which of them targets chose so far

    def press_maker(self, ridge: float) -> Float32:
        """A matrix P (n, n) with which the PRESS of target features Y is sum_ij P_ij (Y Y^T)_ij.

        With M = I - 11^T/n - K (K + l I)^-1 the residuals are M Y, and those of left-out images
        (M Y)_i / M_ii, so that P = M diag(1 / M_ii^2) M.
        """
        n = len(self.kernel)
        values = np.maximum(self.values, 0)
        strength = ridge * float(values.sum()) / n
        m = (self.vectors * (strength / (values + strength))) @ self.vectors.T - 1 / n
        weighted = m / np.diagonal(m)
        return (weighted @ weighted.T).astype(np.float32)


@dataclass(frozen=True)
class RidgeR2(Measure):
    """R^2 of the first representation's features predicted from the second's (Kornblith et al.
    2019's linear regression, with a ridge, on images that it was not fitted on).

    Kernel ridge regression with an intercept, R^2 = 1 - PRESS / ((n / (n - 1))^2 tr K), where PRESS
    sums the squared errors of images left out one at a time, in closed form; the ridge is that of
    1e-6 to 1e6 times the mean variance with the least PRESS, chosen anew in each permutation. The
    jackknife keeps the ridges of all images: where the error is least, it does not change with them
    to first order. Predicting the mean of the other images gives 0.
    """

    name: ClassVar[str] = "ridge_r2"
    limits: ClassVar[tuple[float, float]] = (-np.inf, 1.0)
    symmetric: ClassVar[bool] = False
    most_images: ClassVar[int | None] = MOST_DENSE

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Predictor:
        k = gram.centred()
        values, vectors = np.linalg.eigh(k)
        made = Predictor(k.astype(np.float32), vectors, values)
        return replace(made, ridges=kept) if kept else made

    def kept(self, state: Predictor) -> tuple[int, ...]:
        """The ridges that targets chose."""
        return tuple(sorted(state.best))

    def permuted(self, state: Predictor, order: Integers) -> Predictor:
        kernel = state.kernel[np.ix_(order, order)]
        return replace(state, kernel=kernel, vectors=state.vectors[order])

    def compare(
        self, a: Sequence[Predictor], b: Sequence[Predictor], pairs: Integers
    ) -> Float:
        return self._each(a, b, pairs, [None])[0]

    def null(
        self,
        a: Sequence[Predictor],
        b: Sequence[Predictor],
        pairs: Integers,
        orders: Sequence[Integers],
    ) -> Float:
        """Predictors are computed once for all orders."""
        return self._each(a, b, pairs, orders)

    def _each(
        self,
        a: Sequence[Predictor],
        b: Sequence[Predictor],
        pairs: Integers,
        orders: Sequence[Integers | None],
    ) -> Float:
        """The R^2 of each order of the predictors' images and each pair, (orders, pairs); None is
        the original order."""
        r2 = np.full((len(orders), len(pairs)), np.nan)
        for j in np.unique(pairs[:, 1]).tolist():
            at = np.flatnonzero(pairs[:, 1] == j)
            targets = [a[i].kernel for i in pairs[at, 0].tolist()]
            n = len(targets[0])
            press = np.full((len(orders), len(at), len(RIDGES)), np.inf)
            for ridge in b[j].ridges:
                maker = b[j].press_maker(RIDGES[ridge])
                with one_blas_thread():  # set once; the code above uses all cores
                    for k, order in enumerate(orders):
                        moved = maker if order is None else maker[np.ix_(order, order)]
                        press[k, :, ridge] = inner_products(targets, [moved])[:, 0]
            total = np.array([np.trace(k, dtype=np.float64) for k in targets])
            r2[:, at] = 1 - press.min(-1) / (total * (n / (n - 1)) ** 2)
            for k, order in enumerate(orders):
                if order is None:
                    b[j].best.update(press[k].argmin(-1).tolist())
        return r2

    def state_bytes(self, n: int) -> int:
        return 12 * n * n
