"""Principal axes of features from their second moments.

The axes are eigenvectors of the scatter about the mean, largest eigenvalue first (Pearson 1901);
the sign of an axis is chosen so that its entry of largest magnitude is positive, as in scikit-learn
from 1.5 on.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.statistics.covariance.spectra import ALIKE
from vitsee_core.statistics.covariance.sums import CovarianceSums
from vitsee_core.types import Float

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
