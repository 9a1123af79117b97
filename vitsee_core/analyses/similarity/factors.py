"""Measures of the factors U S U^T of centred Gram matrices: Procrustes and SVCCA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vitsee_core.analyses.similarity.base import MOST_DENSE, Measure
from vitsee_core.analyses.similarity.site_gram import SiteGram
from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes
from vitsee_core.types import Float, Integers

_ROUNDING = 2.0**-24  # of float32, relative


def factorised(gram: SiteGram) -> tuple[Float, Float]:
    """(n, r), (r,) eigenvectors and eigenvalues of K, largest first, at numerical rank: above the
    error of rounding G to float32 (four times the longest row of its errors)."""
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
        """(n, r) U S^(1/2), of norm 1."""
        vectors, values = factorised(gram)
        return vectors * np.sqrt(values / values.sum()) if len(values) else None

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
        """(n, a) leading eigenvectors."""
        vectors, values = factorised(gram)
        if not len(values):
            return None
        shares = np.cumsum(values) / values.sum()
        leading = int(np.searchsorted(shares, self.variance * (1 - 1e-12))) + 1
        return np.ascontiguousarray(vectors[:, :leading])

    def remark(self, a: Sequence[Float], b: Sequence[Float], pairs: Integers) -> str | None:
        """Correlations that are 1 whatever the features are."""
        forced = sum(a[i].shape[1] + b[j].shape[1] > len(a[i]) - 1 for i, j in pairs.tolist())
        if not forced:
            return None
        return (
            f"svcca: in {forced} of {len(pairs)} pairs the components are more than the images, so "
            "that some correlations are 1 whatever the features are; give more --images, or a "
            "smaller --variance"
        )

    def _pair(self, a: Float, b: Float) -> float:
        return float(np.linalg.svd(a.T @ b, compute_uv=False).mean().clip(max=1))
