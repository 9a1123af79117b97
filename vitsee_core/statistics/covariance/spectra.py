"""Spectra and principal axes of features, from their second moments.

Measures of the spectrum of features: how many directions they use, and how evenly.

For n examples with D channels, sigma_i the singular values of the matrix of examples, lambda_i the
eigenvalues of the scatter about the mean (squared singular values of the centred matrix):

- `rankme` = exp(-sum p_i log p_i), p_i = sigma_i / sum sigma: of the matrix as it is, not centred,
  its min(n, D) largest singular values (Garrido et al. 2023, eq. 1, without their 1e-7);
- `effective_rank`: the same of the centred matrix (Roy & Vetterli 2007), min(n - 1, D) values;
- `participation_ratio` = (tr C)^2 / tr(C^2), C the covariance, tr(C^2) by the unbiased estimate
  HSIC_1(K, K) of Song et al. 2012: the naive ratio stays below n - 1 whatever D is;
- `alpha`: eigenvalues fall as rank^-alpha: least squares of log lambda on log rank with weights
  1 / rank, ranks 11 to 100 (Stringer et al. 2019, Agrawal et al. 2022); n and D above 100;
- `anisotropy`: mean cosine of two different examples (Ethayarajh 2019).

The principal axes are eigenvectors of the scatter, largest eigenvalue first (Pearson 1901); the
sign of an axis is chosen so that its entry of largest magnitude is positive, as in scikit-learn
from 1.5 on.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.statistics.covariance.sums import CovarianceSums
from vitsee_core.types import Float

METRICS = ("rankme", "effective_rank", "participation_ratio", "alpha", "anisotropy")
FIRST_RANK, LAST_RANK = 11, 100
# Below this part of the sum of squares the scatter is rounding: all examples are equal.
ALIKE = 1e-10


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of n examples with `dim` channels.

    Attributes:
        raw: eigenvalues of X'X, largest first, 0 and above; min(n, dim) of them.
        centred: the same about the mean.
        fourth: sum of |x - mean|^4.
        resultant: length of the sum of the unit vectors.
        n_long: number of those.
    """

    n: int
    dim: int
    raw: Float
    centred: Float
    fourth: float
    resultant: float
    n_long: int

    @classmethod
    def of_sums(cls, sums: CovarianceSums) -> Spectrum:
        """The spectrum of second moments, D x D; best if n is above D."""
        return cls(
            sums.n, len(sums.shift), _eigenvalues(sums.raw), _eigenvalues(sums.scatter),
            sums.fourth_about_mean, float(np.linalg.norm(sums.directions)), sums.n_long,
        )  # fmt: skip

    @classmethod
    def of_examples(cls, x: Float) -> Spectrum:
        """The spectrum of examples (n, dim) themselves, n x n; best if D is above n."""
        y = x - x.mean(0)
        length = np.linalg.norm(x, axis=1)
        long = length > 0
        units = (x[long] / length[long, np.newaxis]).sum(0)
        return cls(
            *(len(x), x.shape[1], _eigenvalues(x @ x.T), _eigenvalues(y @ y.T)),
            float((np.einsum("nd,nd->n", y, y) ** 2).sum()),
            *(float(np.linalg.norm(units)), int(long.sum())),
        )

    @property
    def alike(self) -> bool:
        """Whether all examples are equal up to rounding."""
        return float(self.centred.sum()) <= ALIKE * float(self.raw.sum())

    def metrics(self) -> dict[str, float]:
        """Each of `METRICS`; NaN where undefined."""
        n, dim = self.n, self.dim
        metrics = dict.fromkeys(METRICS, math.nan)
        metrics["rankme"] = entropy_rank(self.raw[: min(n, dim)])
        if self.n_long > 1:
            k = self.n_long
            metrics["anisotropy"] = (self.resultant**2 - k) / (k * (k - 1))
        if self.alike:
            return metrics
        metrics["effective_rank"] = entropy_rank(self.centred[: min(n - 1, dim)])
        metrics["participation_ratio"] = self._participation()
        if n > LAST_RANK and dim > LAST_RANK:
            metrics["alpha"] = power_law(self.centred)
        return metrics

    def caps(self) -> dict[str, float]:
        """The largest possible value of each metric; NaN if there is none."""
        n, dim = self.n, self.dim
        return {
            "rankme": min(n, dim),
            "effective_rank": min(n - 1, dim),
            "participation_ratio": dim,
            "anisotropy": 1,
        }

    def _participation(self) -> float:
        n = self.n
        if n < 4:
            return math.nan
        trace, fourth = float(self.centred.sum()), self.fourth
        # Song et al.'s three terms for K of centred examples without its diagonal: the sum of its
        # squares, of all its entries, and of its squared row sums.
        squares, entries, rows = float((self.centred**2).sum()) - fourth, -trace, fourth
        hsic = squares + entries**2 / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)
        hsic /= n * (n - 3)
        return (trace / (n - 1)) ** 2 / hsic if hsic > 0 else math.nan


def entropy_rank(eigenvalues: Float) -> float:
    """exp of the entropy of the singular values, the roots of these eigenvalues; NaN if all are
    0."""
    values = np.sqrt(eigenvalues)
    if not values.sum() > 0:
        return math.nan
    p = values / values.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def power_law(eigenvalues: Float) -> float:
    """Minus the slope of log eigenvalue on log rank, see above; NaN if one of them is 0."""
    values = eigenvalues[FIRST_RANK - 1 : LAST_RANK]
    if len(values) <= LAST_RANK - FIRST_RANK or not values.min() > ALIKE * eigenvalues.sum():
        return math.nan
    rank = np.arange(FIRST_RANK, LAST_RANK + 1)
    weight = 1 / rank
    x, y = np.log(rank), np.log(values)
    x = x - (weight @ x) / weight.sum()
    return float(-(weight * x) @ y / ((weight * x) @ x))


def _eigenvalues(matrix: Float) -> Float:
    """Largest first; negative rounding errors become 0."""
    return np.maximum(np.linalg.eigvalsh(matrix)[::-1], 0.0)


SMALL = 1024  # channels up to which several threads do not compute axes sooner than one


@dataclass(frozen=True)
class PrincipalAxes:
    """The leading principal axes of a covariance."""

    mean: Float  # (dim,)
    axes: Float  # (k, dim) unit vectors
    shares: Float  # (k,) shares of the variance, NaN if all examples are equal
    n: int  # examples

    def scores(self, x: NDArray[np.floating]) -> Float:
        """(..., k) coordinates of features (..., dim) along the axes, about the mean."""
        return (np.asarray(x, np.float64) - self.mean) @ self.axes.T


def principal_axes(sums: CovarianceSums, k: int) -> PrincipalAxes:
    """The first k axes; k is at most the number of channels. Time: (4/3) dim^3 for all k
    together."""
    from scipy.linalg import eigh

    scatter, dim = sums.scatter, len(sums.shift)
    with one_blas_thread() if dim <= SMALL else nullcontext():
        values, vectors = eigh(scatter, subset_by_index=(dim - k, dim - 1))
    axes = vectors.T[::-1]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, np.newaxis], 1)
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    trace = float(np.trace(scatter))
    raw = trace + sums.n * float(sums.mean @ sums.mean)
    whole = trace if trace > ALIKE * raw else math.nan
    return PrincipalAxes(sums.mean, axes, np.maximum(values[::-1], 0) / whole, sums.n)
