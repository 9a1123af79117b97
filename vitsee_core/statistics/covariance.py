"""Second moments of a site's vectors or tokens: the sums of one pass, spectra and principal axes.

Sums. Examples y are taken about a fixed `shift` (an example of the site), so that a large mean
costs no digits; with S = sum y y^T the scatter about the mean is S - s s^T / n. Unbiased estimates
of tr(C^2) need the fourth powers. All in float64; one product of n x D by D x n costs n D^2
multiply-adds, half of that by symmetry. Each slab is summed by one thread with single-threaded
BLAS, one thread per core: the result does not depend on their number.

Spectra. For n examples with D channels, sigma_i the singular values of the matrix of examples,
lambda_i the eigenvalues of the scatter about the mean (squared singular values of the centred
matrix), these tell how many directions the features use, and how evenly:

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

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import (
    SHARE,
    WORTH_SAYING,
    cpu_rate,
    n_lanes,
    one_blas_thread,
    rough_time,
)
from vitsee_core.runtime.machine import freed_memory_kept, human_bytes
from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import Slab, Store

log = logging.getLogger(__name__)

# Examples in float64 at a time: so many, or more of few channels.
ROWS_AT_ONCE = 1024
VALUES_AT_ONCE = 1 << 18
DOUBLE = 0.5  # of the rate of products in single precision
METRICS = ("rankme", "effective_rank", "participation_ratio", "alpha", "anisotropy")
FIRST_RANK = 11
LAST_RANK = 100
# Below this part of the sum of squares the scatter is rounding: all examples are equal.
ALIKE = 1e-10
MANY = 128  # channels from which a few axes take less by iteration
SMALL = (
    1024  # channels up to which several threads do not find eigenvalues sooner than one
)


@dataclass
class CovarianceSums:
    """Moment sums of examples y = x - shift."""

    shift: Float  # (dim,) a fixed vector
    n: int  # number of examples
    first: Float  # (dim,) sum(y)
    second: Float  # (dim, dim) sum(y y^T)
    third: Float  # (dim,) sum(|y|^2 y)
    fourth: float  # sum(|y|^4)
    directions: Float  # (dim,) sum of x / |x| over examples of non-zero length
    n_long: int  # number of those

    @classmethod
    def empty(cls, shift: Float) -> CovarianceSums:
        dim = len(shift)
        first, third, directions = np.zeros((3, dim))
        return cls(shift, 0, first, np.zeros((dim, dim)), third, 0.0, directions, 0)

    @classmethod
    def of(cls, x: Float | Float32, shift: Float) -> CovarianceSums:
        """The sums of examples x: (n, dim)."""
        own = cls.empty(shift)
        own.n = len(x)
        dim = len(shift)
        rows = min(max(ROWS_AT_ONCE, VALUES_AT_ONCE // dim), len(x))
        values, squares = np.empty((2, rows, dim))
        ones = np.ones(max(rows, dim))
        for start in range(0, len(x), rows or 1):
            some = x[start : start + rows]
            n = len(some)
            y = values[:n]
            squared = squares[:n]
            y[:] = some
            # Sums along rows as products: numpy's own, of short rows, take many times as long.
            length = np.multiply(y, y, out=squared) @ ones[:dim]
            long = length > 0
            own.n_long += int(long.sum())
            own.directions += (long / np.sqrt(np.where(long, length, 1))) @ y
            y -= shift
            size = np.multiply(y, y, out=squared) @ ones[:dim]
            own.first += ones[:n] @ y
            own.third += size @ y
            own.fourth += float(size @ size)
            own.second += y.T @ y
        return own

    def add(self, other: CovarianceSums, sign: int = 1) -> None:
        """Add another's examples, which stays unchanged; sign -1 removes them again."""
        self.n += sign * other.n
        self.n_long += sign * other.n_long
        self.fourth += sign * other.fourth
        self.first += sign * other.first
        self.third += sign * other.third
        self.directions += sign * other.directions
        self.second += sign * other.second

    @property
    def mean(self) -> Float:
        """(dim,) mean of the unshifted examples."""
        return self.shift + self.first / self.n

    @property
    def scatter(self) -> Float:
        """(dim, dim) sum of (x - mean)(x - mean)^T."""
        return self.second - np.outer(self.first, self.first) / self.n

    @property
    def variance(self) -> float:
        """The trace of the scatter; NaN where that is rounding, as all examples are equal."""
        trace = float(np.trace(self.second)) - float(self.first @ self.first) / self.n
        raw = trace + self.n * float(self.mean @ self.mean)
        return trace if trace > ALIKE * raw else math.nan

    @property
    def raw(self) -> Float:
        """(dim, dim) sum of x x^T."""
        return self.scatter + self.n * np.outer(self.mean, self.mean)

    @property
    def fourth_about_mean(self) -> float:
        """Sum of |x - mean|^4."""
        d = -self.first / self.n
        delta = float(d @ d)
        trace = float(np.trace(self.second))
        with_first = float(d @ self.first)
        return float(
            self.fourth
            + 4 * d @ self.second @ d
            + self.n * delta**2
            + 4 * d @ self.third
            + 2 * delta * trace
            + 4 * delta * with_first
        )


class Examples(Protocol):
    """Selects and transforms the tokens that are examples; must be picklable."""

    def __call__(self, x: Float32, rows: Integers) -> tuple[Float32, Mask]:
        """(images, tokens, dim) values to sum, and (images, tokens) which of them count.

        Args:
            x: (images, tokens, dim) as stored.
            rows: (images,) of the store.
        """


class SumsByBlock:
    """Sums of each block of images, to be filled by `streaming.fold`: every token is an example, or
    what `examples` makes of them.

    features: of one site. shift: (dim,). labels: (all images,) each one's block, below 0 for none.
    """

    def __init__(
        self,
        features: SiteFeatures,
        shift: Float,
        labels: Integers,
        examples: Examples | None = None,
    ) -> None:
        self.features = features
        self.shift = shift
        self.labels = labels
        self.examples = examples
        self.blocks: dict[int, CovarianceSums] = {}

    def update(self, slab: Slab) -> None:
        labels = self.labels[slab.rows][slab.valid]
        x = self.features.of_slab(slab, slice(0, len(self.features.tokens)))
        counts = None
        if self.examples is not None:
            rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
            x, counts = self.examples(x, rows)
        for b in np.unique(labels[labels >= 0]).tolist():
            of_block = labels == b
            chosen = slice(None) if of_block.all() else of_block  # no copy of all of them
            own = x[chosen].reshape(-1, x.shape[-1])
            if counts is not None:
                own = own[counts[chosen].ravel()]
            self.blocks[b] = CovarianceSums.of(own, self.shift)

    def merge(self, other: SumsByBlock) -> None:
        for b, sums in other.blocks.items():
            if b not in self.blocks:
                self.blocks[b] = CovarianceSums.empty(self.shift)
            self.blocks[b].add(sums)

    def result(self) -> list[CovarianceSums]:
        """Sums of every block, in order."""
        return [self.blocks[b] for b in sorted(self.blocks)]


def block_sums(
    features: SiteFeatures,
    rows: Rows,
    labels: Integers,
    execution: Execution,
    examples: Examples | None = None,
) -> list[CovarianceSums]:
    """Sums of each block of a site's images. labels: (all images,) blocks, below 0 for none;
    examples: selects and transforms tokens; by default all, unchanged.

    Memory: a D x D matrix in float64 for each block, and one more for each slab in progress.
    """
    first = int(np.flatnonzero((labels >= 0) & rows.mask)[0])
    token: Float32 = features.load(slice(first, first + 1), slice(0, 1)).astype(
        np.float32
    )
    if examples is not None:
        whole = features.load(slice(first, first + 1), slice(0, len(features.tokens)))
        token, _ = examples(whole.astype(np.float32), np.array([first]))
    shift = token[0, 0].astype(np.float64)
    make = partial(SumsByBlock, features, shift, labels, examples)
    size = features.slab_bytes + 8 * features.dim**2
    store: Store = features.store
    if execution.map is None:
        lanes = n_lanes(execution.budget // (2 * size))
        execution = replace(execution, jobs=max(execution.jobs, lanes))
    with one_blas_thread(), freed_memory_kept():
        return execution.fold(store, make, rows, slab_bytes=size).result()


def total(parts: Sequence[CovarianceSums]) -> CovarianceSums:
    """The sum of several blocks."""
    whole = CovarianceSums.empty(parts[0].shift)
    for part in parts:
        whole.add(part)
    return whole


def say_cost(sites: Sequence[SiteFeatures], n_images: int) -> float:
    """Log the estimated time of one pass over the tokens of these sites, from a short trial; only
    at debug level (-v) if it is seconds.

    Returns:
        Multiply-adds: tokens x dim^2, summed over sites.
    """
    products = float(sum(n_images * len(one.tokens) * one.dim**2 for one in sites))
    if not products:
        return products
    read = sum(one.slab_bytes / one.store.plan.slab / 2 * n_images for one in sites)
    seconds = products / (SHARE * DOUBLE * cpu_rate())
    log.log(
        logging.INFO if seconds >= WORTH_SAYING else logging.DEBUG,
        "%s: second moments of %d sites over %d images: %.1e multiply-adds, %s of tokens, %s; "
        "twice as long for twice the images (--images N takes fewer)",
        *(sites[0].store.label, len(sites), n_images, products),
        *(human_bytes(read), rough_time(seconds)),
    )
    return products


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
            sums.n,
            len(sums.shift),
            _eigenvalues(sums.raw),
            _eigenvalues(sums.scatter),
            sums.fourth_about_mean,
            float(np.linalg.norm(sums.directions)),
            sums.n_long,
        )

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
        n = self.n
        dim = self.dim
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
        n = self.n
        dim = self.dim
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
        trace = float(self.centred.sum())
        fourth = self.fourth
        # Song et al.'s three terms for K of centred examples without its diagonal: the sum of its
        # squares, of all its entries, and of its squared row sums.
        squares = float((self.centred**2).sum()) - fourth
        entries = -trace
        rows = fourth
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
    if (
        len(values) <= LAST_RANK - FIRST_RANK
        or not values.min() > ALIKE * eigenvalues.sum()
    ):
        return math.nan
    rank = np.arange(FIRST_RANK, LAST_RANK + 1)
    weight = 1 / rank
    x = np.log(rank)
    y = np.log(values)
    x = x - (weight @ x) / weight.sum()
    return float(-(weight * x) @ y / ((weight * x) @ x))


def _eigenvalues(matrix: Float) -> Float:
    """Largest first; negative rounding errors become 0."""
    with one_blas_thread() if len(matrix) <= SMALL else nullcontext():
        return np.maximum(np.linalg.eigvalsh(matrix)[::-1], 0.0)


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

    scatter = sums.scatter
    dim = len(sums.shift)
    with one_blas_thread() if dim <= SMALL else nullcontext():
        values, vectors = eigh(scatter, subset_by_index=(dim - k, dim - 1))
    axes = vectors.T[::-1]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, np.newaxis], 1)
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    return PrincipalAxes(
        sums.mean, axes, np.maximum(values[::-1], 0) / sums.variance, sums.n
    )


def leading_shares(sums: CovarianceSums, near: PrincipalAxes) -> Float:
    """(k,) shares of the variance of the first axes of some examples, as `principal_axes` gives
    them. near: the axes of these and some more examples, which many channels' are found from."""
    from scipy.linalg import eigh
    from scipy.sparse.linalg import ArpackError, eigsh

    scatter, (k, dim), whole = sums.scatter, near.axes.shape, sums.variance
    if dim >= MANY and not math.isnan(whole):
        start = (
            near.axes.sum(0) + np.random.default_rng(0).standard_normal(dim) / dim**0.5
        )
        with suppress(ArpackError):
            values = eigsh(scatter, k, which="LA", v0=start, return_eigenvectors=False)
            return np.maximum(np.sort(values)[::-1], 0) / whole
    values = eigh(scatter, subset_by_index=(dim - k, dim - 1), eigvals_only=True)
    return np.maximum(values[::-1], 0) / whole


def autocorrelation(x: Float) -> Float:
    """(2 rows, 2 cols) sum over tokens of x_t . x_(t + offset); offset 0 is at the origin, offsets
    beyond the middle are negative, the middle itself is none."""
    shape = (2 * x.shape[0], 2 * x.shape[1])
    spectrum = np.fft.rfft2(x, shape, axes=(0, 1))
    power = np.einsum("yxd,yxd->yx", spectrum, spectrum.conj()).real
    return np.fft.irfft2(power, shape)
