"""Define the measures that decompose the centred Gram matrix K = H G H = U S U^T of n images.

Procrustes and SVCCA compare the factors of two representations. Ridge R^2 predicts one
representation linearly from another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.similarity.measure import (
    MAX_DENSE_IMAGES,
    Measure,
    SiteGram,
)
from vitsee_core.analyses.similarity.products import inner_products
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes, one_blas_thread
from vitsee_core.types import Float, Float32, Integers

_ROUNDING = 2.0**-24  # of float32, relative


def factorise(gram: SiteGram) -> tuple[Float, Float]:
    """Return the eigenvectors (n, r) and eigenvalues (r,) of K, largest first.

    r is the numerical rank: eigenvalues above the error of rounding G to float32, four times the
    longest row of its errors.
    """
    values, vectors = np.linalg.eigh(gram.centred())  # ascending
    noise = 4 * _ROUNDING * float(np.linalg.norm(gram.shifted, axis=1).max())
    first = int(np.searchsorted(values, noise, "right"))
    return vectors[:, first:][:, ::-1], values[first:][::-1]


@dataclass(frozen=True)
class _FactorMeasure(Measure):
    """A measure whose state is a factor (n, r), and that takes a singular value decomposition of
    each pair."""

    most_images: ClassVar[int | None] = MAX_DENSE_IMAGES
    slow: ClassVar[bool] = True

    def permute(self, state: Float, order: Integers) -> Float:
        """Return the factor with its rows in this order."""
        return state[order]

    def compare(self, a: Sequence[Float], b: Sequence[Float], pairs: Integers) -> Float:
        """Return the values (pairs,), on all cores."""

        def work(pair: Sequence[int]) -> float:
            """Return the value of one pair."""
            i, j = pair
            singular_values: NDArray[Any] = np.linalg.svd(a[i].T @ b[j], compute_uv=False)
            return self._from_singular_values(singular_values)

        with lane_pool(n_lanes()) as pool:
            return np.array(list(in_order(work, pairs.tolist(), pool, 8)))

    @abstractmethod
    def _from_singular_values(self, singular_values: NDArray[Any]) -> float:
        """Return the measure of factors A and B from the singular values of A^T B."""

    def state_bytes(self, n: int) -> int:
        """Return the bytes of a factor of full rank, in float64."""
        return 8 * n * n


@dataclass(frozen=True)
class Procrustes(_FactorMeasure):
    """The angle that is left after the best rotation (Williams et al. 2021, `alpha` = 1).

    1 - 2 theta / pi with theta = arccos(|Xc^T Yc|_* / (|Xc|_F |Yc|_F)). Independent features are
    not at 0 where there are fewer images than dimensions: its null belongs beside it.
    """

    name: ClassVar[str] = "procrustes"

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Float | None:
        """Return the factor U S^(1/2) (n, r), of norm 1, which is Xc but for a rotation; None if no
        eigenvalue is left."""
        vectors, values = factorise(gram)
        if not len(values):
            return None
        return vectors * np.sqrt(values / values.sum())

    def _from_singular_values(self, singular_values: NDArray[Any]) -> float:
        """Return 1 - 2 theta / pi."""
        nuclear_norm = float(singular_values.sum())
        # arccos(1 - e) is about sqrt(2 e): rounding alone would give 1e-8 for equal states.
        return float(1 - 2 / np.pi * np.arccos(min(1.0, nuclear_norm)))


@dataclass(frozen=True)
class Svcca(_FactorMeasure):
    """Mean canonical correlation of the leading principal components (Raghu et al. 2017).

    It is the mean of the min(a, b) singular values of U_a^T V_b, where a and b components have
    `variance` of the variance each. Where a + b > n - 1, some are 1 whatever the features are.
    """

    variance: float = 0.99
    name: ClassVar[str] = "svcca"

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Float | None:
        """Return the leading eigenvectors (n, a); None if no eigenvalue is left."""
        vectors, values = factorise(gram)
        if not len(values):
            return None
        shares = np.cumsum(values) / values.sum()
        # The last share may be rounded below 1, and a `variance` of 1 is not to be beyond it.
        n_leading = int(np.searchsorted(shares, self.variance * (1 - 1e-12))) + 1
        return np.ascontiguousarray(vectors[:, :n_leading])

    def remark(
        self, a: Sequence[Float], b: Sequence[Float], pairs: Integers
    ) -> str | None:
        """Return how many pairs have correlations that are 1 whatever the features are."""
        n_forced = 0
        for i, j in pairs.tolist():
            n_components = a[i].shape[1] + b[j].shape[1]
            n_forced += n_components > len(a[i]) - 1
        if not n_forced:
            return None
        return (
            f"svcca: in {n_forced} of {len(pairs)} pairs the components are more than the images, "
            "so that some correlations are 1 whatever the features are; give more --images, or a "
            "smaller --variance"
        )

    def _from_singular_values(self, singular_values: NDArray[Any]) -> float:
        """Return the mean of the canonical correlations, which rounding may take beyond 1."""
        return float(singular_values.mean().clip(max=1))


RIDGES = 10.0 ** np.arange(-6, 7)  # times the mean eigenvalue of K


@dataclass
class Predictor:
    """The state of a representation, which predicts and is predicted."""

    kernel: Float32  # (n, n) K
    vectors: Float  # (n, n) its eigenvectors
    values: Float  # (n,) its eigenvalues
    ridges: tuple[int, ...] = tuple(range(len(RIDGES)))  # indices of the `RIDGES` to try
    best: set[int] = field(
        default_factory=set
    )  # indices of those that targets chose so far

    def press_matrix(self, ridge: float) -> Float32:
        """Return a matrix P (n, n) with which the PRESS of target features Y is
        sum_ij P_ij (Y Y^T)_ij.

        With M = I - 11^T/n - K (K + l I)^-1 the residuals are M Y, and those of left-out images
        (M Y)_i / M_ii, so that P = M diag(1 / M_ii^2) M.
        """
        n = len(self.kernel)
        values = np.maximum(self.values, 0)
        strength = ridge * float(values.sum()) / n  # l
        # I - K (K + l I)^-1 = U diag(l / (s + l)) U^T
        m = (self.vectors * (strength / (values + strength))) @ self.vectors.T - 1 / n
        weighted = m / np.diagonal(m)
        return (weighted @ weighted.T).astype(np.float32)


@dataclass(frozen=True)
class RidgeR2(Measure):
    """R^2 of the first representation's features predicted from the second's.

    This is Kornblith et al. 2019's linear regression with a ridge, on images that it was not fitted
    on: kernel ridge regression with an intercept, R^2 = 1 - PRESS / ((n / (n - 1))^2 tr K), where
    PRESS sums the squared errors of images left out one at a time, in closed form. Predicting the
    mean of the other images gives 0.

    The ridge is that of 1e-6 to 1e6 times the mean variance with the least PRESS, chosen anew in
    each permutation. The jackknife keeps the ridges of all images: where the error is least, it
    does not change with them to first order.
    """

    name: ClassVar[str] = "ridge_r2"
    limits: ClassVar[tuple[float, float]] = (-np.inf, 1.0)
    symmetric: ClassVar[bool] = False
    most_images: ClassVar[int | None] = MAX_DENSE_IMAGES

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Predictor:
        """Return K and its eigendecomposition; of a replicate, with the ridges of all images."""
        k = gram.centred()
        values, vectors = np.linalg.eigh(k)
        predictor = Predictor(k.astype(np.float32), vectors, values)
        if choices:
            return replace(predictor, ridges=choices)
        return predictor

    def choices(self, state: Predictor) -> tuple[int, ...]:
        """Return the indices of the ridges that targets chose."""
        return tuple(sorted(state.best))

    def permute(self, state: Predictor, order: Integers) -> Predictor:
        """Return the predictor with its images in this order."""
        kernel = state.kernel[np.ix_(order, order)]
        return replace(state, kernel=kernel, vectors=state.vectors[order])

    def compare(
        self, a: Sequence[Predictor], b: Sequence[Predictor], pairs: Integers
    ) -> Float:
        """Return R^2 of a predicted from b, (pairs,); the predictors note the ridges chosen."""
        return self._predict(a, b, pairs, [None])[0]

    def null(
        self,
        a: Sequence[Predictor],
        b: Sequence[Predictor],
        pairs: Integers,
        orders: Sequence[Integers],
    ) -> Float:
        """Return R^2 of permuted images, (permutations, pairs).

        Predictors are computed once for all orders.
        """
        return self._predict(a, b, pairs, orders)

    def _predict(
        self,
        a: Sequence[Predictor],
        b: Sequence[Predictor],
        pairs: Integers,
        orders: Sequence[Integers | None],
    ) -> Float:
        """Return R^2, (orders, pairs), for each order of the predictors' images.

        Args:
            a: targets.
            b: predictors; their `best` gets the ridges chosen in the original order.
            pairs: (pairs, 2) indices of target and predictor.
            orders: None is the original order.
        """
        r2 = np.full((len(orders), len(pairs)), np.nan)
        for j in np.unique(pairs[:, 1]).tolist():
            at = np.flatnonzero(pairs[:, 1] == j)  # the pairs with this predictor
            targets = [a[i].kernel for i in pairs[at, 0].tolist()]
            n = len(targets[0])
            press = np.full((len(orders), len(at), len(RIDGES)), np.inf)
            for ridge in b[j].ridges:
                matrix = b[j].press_matrix(RIDGES[ridge])
                with one_blas_thread():  # set once; the code above uses all cores
                    for k, order in enumerate(orders):
                        permuted = matrix
                        if order is not None:
                            permuted = matrix[np.ix_(order, order)]
                        press[k, :, ridge] = inner_products(targets, [permuted])[:, 0]
            total = np.array([np.trace(k, dtype=np.float64) for k in targets])
            # An image is n / (n - 1) times as far from the mean of the others as from that of all.
            r2[:, at] = 1 - press.min(-1) / (total * (n / (n - 1)) ** 2)
            for k, order in enumerate(orders):
                if order is None:
                    b[j].best.update(press[k].argmin(-1).tolist())
        return r2

    def state_bytes(self, n: int) -> int:
        """Return the bytes of K (float32) and its eigenvectors (float64)."""
        return 12 * n * n
