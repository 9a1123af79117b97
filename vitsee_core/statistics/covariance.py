"""Sum the second moments of a site's vectors or tokens in one pass; spectra and principal axes.

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

# Examples that are converted to float64 at a time: so many, or more of few channels.
ROWS_AT_ONCE = 1024
VALUES_AT_ONCE = 1 << 18
DOUBLE = 0.5  # rate of float64 products, of that of float32
METRICS = ("rankme", "effective_rank", "participation_ratio", "alpha", "anisotropy")
FIRST_RANK = 11
LAST_RANK = 100
# Below this share of the sum of squares the scatter is rounding: all examples are equal.
ALIKE = 1e-10
ITERATE_FROM = 128  # channels from which a few axes take less time by iteration
ONE_THREAD_UP_TO = 1024  # channels up to which more threads find eigenvalues no sooner


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
    n_nonzero: int  # number of those

    @classmethod
    def empty(cls, shift: Float) -> CovarianceSums:
        """Return the sums of no examples."""
        dim = len(shift)
        return cls(
            shift=shift,
            n=0,
            first=np.zeros(dim),
            second=np.zeros((dim, dim)),
            third=np.zeros(dim),
            fourth=0.0,
            directions=np.zeros(dim),
            n_nonzero=0,
        )

    @classmethod
    def from_examples(cls, x: Float | Float32, shift: Float) -> CovarianceSums:
        """Return the sums of examples x (n, dim)."""
        sums = cls.empty(shift)
        sums.n = len(x)
        dim = len(shift)
        batch = min(max(ROWS_AT_ONCE, VALUES_AT_ONCE // dim), len(x))
        # Memory for all batches: fresh memory costs page faults.
        values, squares = np.empty((2, batch, dim))
        ones = np.ones(max(batch, dim))
        for start in range(0, len(x), batch or 1):
            examples = x[start : start + batch]
            n = len(examples)
            y = values[:n]
            squared = squares[:n]
            y[:] = examples
            # Sums along rows as products: numpy's own, of short rows, take many times as long.
            norms = np.multiply(y, y, out=squared) @ ones[:dim]  # (n,) |x|^2
            is_nonzero = norms > 0
            sums.n_nonzero += int(is_nonzero.sum())
            sums.directions += (is_nonzero / np.sqrt(np.where(is_nonzero, norms, 1))) @ y
            y -= shift
            norms = np.multiply(y, y, out=squared) @ ones[:dim]  # (n,) |y|^2
            sums.first += ones[:n] @ y
            sums.third += norms @ y
            sums.fourth += float(norms @ norms)
            sums.second += y.T @ y
        return sums

    def add(self, other: CovarianceSums, sign: int = 1) -> None:
        """Add the examples of `other`, which stays unchanged; sign -1 removes them again."""
        self.n += sign * other.n
        self.n_nonzero += sign * other.n_nonzero
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
        """Trace of the scatter; NaN where that is rounding, as all examples are equal."""
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
        # |y + d|^4 with d from the mean to the shift, multiplied out and summed over y.
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
        """Return the values to sum (images, tokens, dim), and which of them count (images, tokens).

        Args:
            x: (images, tokens, dim) as stored.
            rows: (images,) of the store.
        """


class SumsByBlock:
    """Sums of each block of images, to be filled by `streaming.fold`.

    Args:
        features: of one site.
        shift: (dim,) subtracted from the examples.
        labels: (all images,) the block of each image, below 0 for none.
        examples: makes examples of the tokens; by default each token is one.
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
        """Add the tokens of a slab, which is the only one of this object."""
        labels = self.labels[slab.rows][slab.valid]
        x = self.features.of_slab(slab, slice(0, len(self.features.tokens)))
        counts = None
        if self.examples is not None:
            rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
            x, counts = self.examples(x, rows)
        for block in np.unique(labels[labels >= 0]).tolist():
            in_block = labels == block
            images = slice(None) if in_block.all() else in_block  # a slice makes no copy
            block_examples = x[images].reshape(-1, x.shape[-1])
            if counts is not None:
                block_examples = block_examples[counts[images].ravel()]
            self.blocks[block] = CovarianceSums.from_examples(block_examples, self.shift)

    def merge(self, other: SumsByBlock) -> None:
        """Add the sums of later slabs."""
        for b, sums in other.blocks.items():
            if b not in self.blocks:
                self.blocks[b] = CovarianceSums.empty(self.shift)
            self.blocks[b].add(sums)

    def result(self) -> list[CovarianceSums]:
        """Return the sums of each block, in order."""
        return [self.blocks[b] for b in sorted(self.blocks)]


def block_sums(
    features: SiteFeatures,
    rows: Rows,
    labels: Integers,
    execution: Execution,
    examples: Examples | None = None,
) -> list[CovarianceSums]:
    """Return the sums of each block of a site's images.

    Memory: a D x D matrix in float64 for each block, and one more for each slab in progress.

    Args:
        features: of the site.
        rows: images that count.
        labels: (all images,) blocks, below 0 for none.
        execution: threads or workers.
        examples: selects and transforms tokens; by default all, unchanged.
    """
    # The shift is the first example that counts.
    first = int(np.flatnonzero((labels >= 0) & rows.mask)[0])
    n_read = 1 if examples is None else len(features.tokens)
    tokens: Float32 = features.load(slice(first, first + 1), slice(0, n_read))
    tokens = tokens.astype(np.float32)
    if examples is not None:
        tokens, _ = examples(tokens, np.array([first]))
    shift = tokens[0, 0].astype(np.float64)
    make = partial(SumsByBlock, features, shift, labels, examples)
    size = features.slab_bytes + 8 * features.dim**2
    store: Store = features.store
    if execution.map is None:
        lanes = n_lanes(execution.budget // (2 * size))
        execution = replace(execution, jobs=max(execution.jobs, lanes))
    with one_blas_thread(), freed_memory_kept():
        return execution.fold(store, make, rows, slab_bytes=size).result()


def total(blocks: Sequence[CovarianceSums]) -> CovarianceSums:
    """Return the sums over all blocks."""
    sums = CovarianceSums.empty(blocks[0].shift)
    for block in blocks:
        sums.add(block)
    return sums


def say_cost(sites: Sequence[SiteFeatures], n_images: int) -> float:
    """Log the estimated time of one pass over the tokens of these sites, from a short trial; only
    at debug level (-v) if it is seconds.

    Returns:
        Multiply-adds: tokens x dim^2, summed over sites.
    """
    multiply_adds = 0.0
    n_bytes = 0.0
    for site in sites:
        multiply_adds += n_images * len(site.tokens) * site.dim**2
        # A slab takes twice its stored bytes while it is read.
        n_bytes += site.slab_bytes / site.store.plan.slab / 2 * n_images
    if not multiply_adds:
        return multiply_adds
    seconds = multiply_adds / (SHARE * DOUBLE * cpu_rate())
    log.log(
        logging.INFO if seconds >= WORTH_SAYING else logging.DEBUG,
        "%s: second moments of %d sites over %d images: %.1e multiply-adds, %s of tokens, %s; "
        "twice as long for twice the images (--images N takes fewer)",
        sites[0].store.label,
        len(sites),
        n_images,
        multiply_adds,
        human_bytes(n_bytes),
        rough_time(seconds),
    )
    return multiply_adds


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of n examples with `dim` channels.

    Attributes:
        n: number of examples.
        dim: number of channels.
        raw: eigenvalues of X'X, largest first, 0 and above; min(n, dim) of them.
        centred: the same about the mean.
        fourth: sum of |x - mean|^4.
        resultant: length of the sum of x / |x| over examples of non-zero length.
        n_nonzero: number of those.
    """

    n: int
    dim: int
    raw: Float
    centred: Float
    fourth: float
    resultant: float
    n_nonzero: int

    @classmethod
    def from_sums(cls, sums: CovarianceSums) -> Spectrum:
        """Return the spectrum of second moments, D x D; faster if n is above D."""
        return cls(
            n=sums.n,
            dim=len(sums.shift),
            raw=_eigenvalues(sums.raw),
            centred=_eigenvalues(sums.scatter),
            fourth=sums.fourth_about_mean,
            resultant=float(np.linalg.norm(sums.directions)),
            n_nonzero=sums.n_nonzero,
        )

    @classmethod
    def from_examples(cls, x: Float) -> Spectrum:
        """Return the spectrum of examples (n, dim) themselves, n x n; faster if D is above n."""
        y = x - x.mean(0)
        lengths = np.linalg.norm(x, axis=1)
        is_nonzero = lengths > 0
        directions = (x[is_nonzero] / lengths[is_nonzero, np.newaxis]).sum(0)
        return cls(
            n=len(x),
            dim=x.shape[1],
            # X X^T has the eigenvalues of X^T X but for zeros.
            raw=_eigenvalues(x @ x.T),
            centred=_eigenvalues(y @ y.T),
            fourth=float((np.einsum("nd,nd->n", y, y) ** 2).sum()),
            resultant=float(np.linalg.norm(directions)),
            n_nonzero=int(is_nonzero.sum()),
        )

    @property
    def is_constant(self) -> bool:
        """Whether all examples are equal up to rounding."""
        return float(self.centred.sum()) <= ALIKE * float(self.raw.sum())

    def metrics(self) -> dict[str, float]:
        """Return the value of each of `METRICS`; NaN where undefined."""
        n = self.n
        dim = self.dim
        metrics = dict.fromkeys(METRICS, math.nan)
        metrics["rankme"] = entropy_rank(self.raw[: min(n, dim)])
        if self.n_nonzero > 1:
            # |sum u|^2 = k + the sum over pairs of different examples, of k unit vectors u.
            k = self.n_nonzero
            metrics["anisotropy"] = (self.resultant**2 - k) / (k * (k - 1))
        if self.is_constant:
            return metrics
        metrics["effective_rank"] = entropy_rank(self.centred[: min(n - 1, dim)])
        metrics["participation_ratio"] = self.participation_ratio()
        if n > LAST_RANK and dim > LAST_RANK:
            metrics["alpha"] = power_law(self.centred)
        return metrics

    def caps(self) -> dict[str, float]:
        """Return the largest possible value of each metric that has one."""
        n = self.n
        dim = self.dim
        return {
            "rankme": min(n, dim),
            "effective_rank": min(n - 1, dim),
            "participation_ratio": dim,
            "anisotropy": 1,
        }

    def participation_ratio(self) -> float:
        """Return (tr C)^2 / tr(C^2), tr(C^2) by its unbiased estimate; NaN below 4 examples, or
        where that is not positive."""
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
    """Return exp of the entropy of the singular values, the roots of these eigenvalues; NaN if all
    are 0."""
    values = np.sqrt(eigenvalues)
    if not values.sum() > 0:
        return math.nan
    p = values / values.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def power_law(eigenvalues: Float) -> float:
    """Return the alpha with which eigenvalues fall as rank^-alpha, over ranks 11 to 100.

    It is NaN if there are fewer eigenvalues, or one of them is 0.
    """
    values = eigenvalues[FIRST_RANK - 1 : LAST_RANK]
    if len(values) <= LAST_RANK - FIRST_RANK:
        return math.nan
    if not values.min() > ALIKE * eigenvalues.sum():
        return math.nan
    # Weighted least squares of log eigenvalue on log rank; alpha is minus the slope.
    rank = np.arange(FIRST_RANK, LAST_RANK + 1)
    weight = 1 / rank
    x = np.log(rank)
    y = np.log(values)
    x = x - (weight @ x) / weight.sum()
    return float(-(weight * x) @ y / ((weight * x) @ x))


def _eigenvalues(matrix: Float) -> Float:
    """Return the eigenvalues of a symmetric matrix, largest first; rounding errors below 0 are
    0."""
    with one_blas_thread() if len(matrix) <= ONE_THREAD_UP_TO else nullcontext():
        return np.maximum(np.linalg.eigvalsh(matrix)[::-1], 0.0)


@dataclass(frozen=True)
class PrincipalAxes:
    """The leading principal axes of a covariance."""

    mean: Float  # (dim,)
    axes: Float  # (k, dim) unit vectors
    shares: Float  # (k,) shares of the variance, NaN if all examples are equal
    n: int  # examples

    def scores(self, x: NDArray[np.floating]) -> Float:
        """Return the coordinates (..., k) of features (..., dim) along the axes, about the mean."""
        return (np.asarray(x, np.float64) - self.mean) @ self.axes.T


def principal_axes(sums: CovarianceSums, k: int) -> PrincipalAxes:
    """Return the first k axes, k at most the number of channels.

    Time: (4/3) dim^3 for all k together.
    """
    from scipy.linalg import eigh

    scatter = sums.scatter
    dim = len(sums.shift)
    with one_blas_thread() if dim <= ONE_THREAD_UP_TO else nullcontext():
        values, vectors = eigh(scatter, subset_by_index=(dim - k, dim - 1))
    axes = vectors.T[::-1]
    # The entry of largest magnitude is positive, so that signs do not depend on the library.
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, np.newaxis], 1)
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    shares = np.maximum(values[::-1], 0) / sums.variance
    return PrincipalAxes(mean=sums.mean, axes=axes, shares=shares, n=sums.n)


def leading_shares(sums: CovarianceSums, near: PrincipalAxes) -> Float:
    """Return the shares (k,) of the variance of the first axes, as `principal_axes` has them.

    Args:
        sums: of some examples, as of a jackknife's replicate.
        near: k axes of these and a few more examples, from which an iteration starts.
    """
    from scipy.linalg import eigh
    from scipy.sparse.linalg import ArpackError, eigsh

    scatter = sums.scatter
    variance = sums.variance
    k, dim = near.axes.shape
    if dim >= ITERATE_FROM and not math.isnan(variance):
        # With some of any direction, as an axis that is orthogonal to the start is never found.
        noise = np.random.default_rng(0).standard_normal(dim) / dim**0.5
        start = near.axes.sum(0) + noise
        with suppress(ArpackError):
            values = eigsh(scatter, k, which="LA", v0=start, return_eigenvectors=False)
            return np.maximum(np.sort(values)[::-1], 0) / variance
    values = eigh(scatter, subset_by_index=(dim - k, dim - 1), eigvals_only=True)
    return np.maximum(values[::-1], 0) / variance


def autocorrelation(x: Float) -> Float:
    """Return the sums over tokens of x_t . x_(t + offset), (2 rows, 2 columns).

    Offset 0 is at the origin, offsets beyond the middle are negative, the middle itself is none.

    x: (rows, columns, dim).
    """
    # Padded to twice the size, so that the transform's period wraps no token onto another.
    shape = (2 * x.shape[0], 2 * x.shape[1])
    spectrum = np.fft.rfft2(x, shape, axes=(0, 1))
    power = np.einsum("yxd,yxd->yx", spectrum, spectrum.conj()).real
    return np.fft.irfft2(power, shape)
