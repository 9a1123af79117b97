"""Mean, spread and 95 % interval of a sample that arrives in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitsee_core.types import Float

if TYPE_CHECKING:
    from vitsee_stores import Slab

LEVEL = 0.95
# t(0.975, 19), for the 20 blocks of a jackknife, as scipy has it: importing scipy takes a second.
T_QUANTILE_OF_19 = 2.0930240544083087
INTERVAL_METHOD = (
    "95 % interval of the mean over images: mean -+ t(0.975, n - 1) * std / sqrt(n), std the "
    "sample standard deviation over images (n - 1); for a plain mean this standard error is the "
    "delete-one jackknife's; empty where n < 2"
)


@dataclass(frozen=True)
class Summary:
    """Mean of a sample with its uncertainty; arrays of the shape of an example."""

    mean: Float  # NaN where n = 0
    std: Float  # sample standard deviation (n - 1), NaN where n < 2
    low: Float  # the interval in `INTERVAL_METHOD`, NaN where n < 2
    high: Float
    n: NDArray[np.int64]  # examples counted

    def cells(self, at: int | tuple[int, ...] = ()) -> dict[str, float | int]:
        """Return the columns value, std, low, high and n_images of a row about one entry.

        at: index of the entry.
        """
        return {
            "value": float(self.mean[at]),
            "std": float(self.std[at]),
            "low": float(self.low[at]),
            "high": float(self.high[at]),
            "n_images": int(self.n[at]),
        }


def mean_over_tokens(values: ArrayLike) -> Float:
    """Return (images,) the mean of each image over its tokens.

    A token that is NaN is left out; an image without any other has NaN, where `numpy.nanmean`
    warns. values: (images, tokens).

    >>> mean_over_tokens([[1.0, float("nan"), 3.0], [float("nan")] * 3])
    array([ 2., nan])
    """
    x = np.asarray(values, np.float64)
    present = ~np.isnan(x)
    n = present.sum(axis=1)
    total = np.where(present, x, 0.0).sum(axis=1)
    means: Float = np.where(n > 0, total / np.maximum(n, 1), np.nan)
    return means


class Moments:
    """Count, mean and sum of squared deviations of examples, entry by entry, in float64.

    A NaN entry is left out and not counted; the other entries of its example are used. Pieces are
    joined by Chan, Golub and LeVeque's update (1983), so that neither a large mean nor the split
    into pieces costs digits; another order of joining changes only the last ones.
    """

    def __init__(self) -> None:
        self._n: Any = np.int64(0)
        self._mean: Any = np.float64(0.0)
        self._m2: Any = np.float64(0.0)

    def add(self, examples: ArrayLike) -> None:
        """Count examples: an array (examples, ...), with the same `...` at every call."""
        x = np.asarray(examples, np.float64)
        if len(x) == 0:
            return
        present = ~np.isnan(x)
        n = present.sum(axis=0, dtype=np.int64)
        # Deviations from an example, not from 0: equal examples then have exactly their mean.
        shift = np.take_along_axis(x, np.argmax(present, axis=0)[np.newaxis], axis=0)[0]
        shift = np.where(n > 0, shift, 0.0)
        deviation = np.where(present, x - shift, 0.0)
        offset = deviation.sum(axis=0) / np.maximum(n, 1)
        m2 = (np.where(present, deviation - offset, 0.0) ** 2).sum(axis=0)
        self._join(n, shift + offset, m2)

    def merge(self, other: Moments) -> None:
        """Add the counts of `other`, which stays unchanged."""
        self._join(other._n, other._mean, other._m2)

    def _join(self, n: Any, mean: Any, m2: Any) -> None:
        """Add a piece: its counts, means, and sums of squared deviations from these."""
        # With d = mean - self.mean: M2 += m2 + d^2 N n / (N + n), mean += d n / (N + n).
        total = self._n + n
        share = n / np.maximum(total, 1)
        delta = mean - self._mean
        # With nothing counted before, the mean is taken over as it is, and 0 + 1 * mean is it.
        self._m2 = self._m2 + m2 + np.square(delta) * self._n * share
        self._mean = self._mean + delta * share
        self._n = total

    def summary(self) -> Summary:
        """Return mean, spread and interval of everything counted so far."""
        n = np.asarray(self._n, np.int64)
        mean = np.where(n > 0, self._mean, np.nan)
        std = np.sqrt(np.where(n > 1, self._m2, np.nan) / np.maximum(n - 1, 1))
        half = _quantiles(n - 1) * std / np.sqrt(np.maximum(n, 1))
        return Summary(mean, std, mean - half, mean + half, n)


class SlabMoments:
    """Moments over images of what `read` returns for a slab, to be filled by `streaming.fold`.

    `read(slab)` gives key -> (images, ...) for the slab's images that count, with the same keys for
    each slab; it must be picklable.
    """

    def __init__(self, read: Callable[[Slab], Mapping[Any, ArrayLike]]) -> None:
        self._read = read
        self._moments: dict[Any, Moments] = {}

    def update(self, slab: Slab) -> None:
        """Count the images of a slab."""
        for key, values in self._read(slab).items():
            self._moments.setdefault(key, Moments()).add(values)

    def merge(self, other: SlabMoments) -> None:
        """Add the counts of later slabs."""
        for key, moments in other._moments.items():
            self._moments.setdefault(key, Moments()).merge(moments)

    def result(self) -> dict[Any, Summary]:
        """Return key -> mean, spread and interval."""
        return {key: moments.summary() for key, moments in self._moments.items()}


def _quantiles(df: NDArray[np.int64]) -> Float:
    """Return two-sided 95 % quantiles of Student's t for degrees of freedom; NaN where df < 1."""
    # Each once: a quantile takes microseconds, and most entries have the same number of images.
    unique_dfs, inverse = np.unique(df, return_inverse=True)
    quantiles = [t_quantile(int(k)) if k > 0 else np.nan for k in unique_dfs]
    return np.array(quantiles)[inverse].reshape(df.shape)


@lru_cache(maxsize=4096)
def t_quantile(df: int, level: float = LEVEL) -> float:
    """Return the t with P(|T| < t) = `level` for Student's T with `df` >= 1 degrees of freedom."""
    if (df, level) == (19, LEVEL):
        return T_QUANTILE_OF_19
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + level) / 2))
