"""Linear prediction of one representation from another: ridge, R^2 on left-out images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from vitsee_core.analyses.similarity.base import MOST_DENSE, Measure
from vitsee_core.analyses.similarity.flattened import inner_products
from vitsee_core.analyses.similarity.site_gram import SiteGram
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.types import Float, Float32, Integers

RIDGES = 10.0 ** np.arange(-6, 7)


@dataclass
class Predictor:
    """A predicting representation."""

    kernel: Float32  # (n, n) K
    vectors: Float  # its eigenvectors
    values: Float  # its eigenvalues
    ridges: tuple[int, ...] = tuple(range(len(RIDGES)))  # which of `RIDGES` are tried
    best: set[int] = field(default_factory=set)  # which of them targets chose so far

    def press_maker(self, ridge: float) -> Float32:
        """(n, n) P with PRESS of target features Y = sum_ij P_ij (Y Y^T)_ij.

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

    def compare(self, a: Sequence[Predictor], b: Sequence[Predictor], pairs: Integers) -> Float:
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
        """(orders, pairs); None: the original order."""
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
