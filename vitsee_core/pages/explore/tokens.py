"""Packs the tokens of a site in few bytes, and measures the error of their cosines.

A token x is packed as its direction u = x / |x|: its coordinate a along the mean direction m of the
shown tokens, and coordinates c along the principal axes e of the rest,

    u = a m + h (c_1 e_1 + ... + c_k e_k) + rest,    cos(x, y) = u . v ~ a a' + h^2 (c . c')

with a in 16 bits, integers c of at most 8 bits, and one step h per site. A coarse step saves bytes
on all axes, most of all on those with little variance, whose integers deflate to a bit or two. So h
is `STEP` times the allowed error, which takes the fewest bytes (for trained and random weights
alike), and k the smallest number of axes such that 99 of 100 cosines are within that error.

A page has `MAX_BYTES` for attention and tokens. The allowed error is `ALLOWED_ERROR`, or as much
larger, the same at all sites, as the tokens need to fit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.lanes import n_lanes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores.layout import TokenLayout


MAX_AXES = 256
# The error of 99 of 100 cosines: the smallest that is allowed, the factor by which it grows until
# the tokens fit, and the largest.
ALLOWED_ERROR = 0.01
ERROR_FACTOR = 2**0.5
MAX_ERROR = 0.5
STEP = 0.7  # of the allowed error
# Deflated. With all attention of three ViT-B/16 a page is 13 MB then.
MAX_BYTES = 9_600_000
MIN_TOKEN_BYTES = 3_000_000  # of tokens, however much attention there is
N_TRIAL_TOKENS = 384  # whose cosines decide k
N_MEASURED_TOKENS = 1024  # whose cosines are compared at the end
Number = TypeVar("Number", bound=np.generic)
# The largest code along the mean (int16), and along an axis (int8).
MAX_MEAN_CODE = 32767
MAX_AXIS_CODE = 127


@dataclass(frozen=True)
class CosineError:
    """The difference between cosines of packed and of stored features.

    Attributes:
        p99: 99 of 100 differences are within it.
        largest: of all that were compared.
        n_pairs: how many were compared, within an image and across images.
    """

    p99: float
    largest: float
    n_pairs: int


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a site over the shown images, counted image by image.

    Attributes:
        along: (tokens,) codes of a; 0 of a token that does not count, as its `codes`.
        codes: (k, tokens) the c; axis by axis, which deflates better.
        step: h.
        error: of the cosines.
    """

    along: NDArray[np.int16]
    codes: NDArray[np.int8]
    step: float
    error: CosineError

    def vectors(self) -> Float32:
        """Return (tokens, 1 + k) whose inner products are the cosines that the page shows."""
        return _decode(self.along, self.codes, self.step)


class Precision(NamedTuple):
    """How a site is packed.

    Attributes:
        step: h.
        n_axes: k.
        n_bytes: deflated, estimated from a sample of its tokens.
    """

    step: float
    n_axes: int
    n_bytes: float


class SiteTokens:
    """The tokens of a site before they are packed: `along` the mean, and `coordinates` along axes.

    Memory: (tokens, 1 + axes) in float32, and the directions of `N_MEASURED_TOKENS` tokens.

    Args:
        x: (tokens, dim); rows that do not count may hold anything.
        counts: (tokens,) which are finite, on their image and not of length 0.
        seed: of the sample of tokens whose cosines are compared.
    """

    def __init__(self, x: Float32, counts: Mask, seed: int = 0) -> None:
        units = unit_directions(x[counts])  # (tokens that count, dim)
        mean, axes = _mean_and_axes(units)
        self.counts = counts
        self.along = units @ mean
        # Axes without variance may point along the mean, which is counted already.
        self.coordinates: Float32 = (units - np.outer(self.along, mean)) @ axes.T
        rng = np.random.default_rng(seed)
        self._trial = _sample(len(units), N_TRIAL_TOKENS, rng)
        self._measured = _sample(len(units), N_MEASURED_TOKENS, rng)
        self._measured_units = units[self._measured]
        trial_units = units[self._trial]
        self._trial_cosines = trial_units @ trial_units.T

    def precision(self, allowed_error: float) -> Precision:
        """Return the fewest axes that keep 99 of 100 cosines within this error.

        All axes if no number of them does.
        """
        largest = float(np.abs(self.coordinates).max(initial=0))
        # A step at which the largest coordinate still has a code of 8 bits.
        step = max(STEP * allowed_error, largest / MAX_AXIS_CODE)
        along, codes = _encode(
            self.along[self._trial], self.coordinates[self._trial], step
        )
        vectors = _decode(along, codes, step)
        n = len(along)
        # Bisection: more axes are not farther off.
        low = min(1, len(codes))
        high = len(codes)
        while low < high:
            middle = (low + high) // 2
            leading = vectors[:, : 1 + middle]
            is_off = np.abs(self._trial_cosines - leading @ leading.T) > allowed_error
            # Every pair is there twice, and a token with itself, which does not count.
            n_off = np.count_nonzero(is_off) - np.count_nonzero(is_off.diagonal())
            if n_off <= 0.01 * n * (n - 1):
                high = middle
            else:
                low = middle + 1
        n_deflated = len(zlib.compress(along.tobytes()))
        n_deflated += len(zlib.compress(codes[:low].tobytes()))
        return Precision(step, low, n_deflated * len(self.along) / max(1, n))

    def pack(self, precision: Precision) -> PackedTokens:
        """Return the tokens with this step and these axes, and the error of their cosines."""
        step = precision.step
        along, codes = _encode(self.along, self.coordinates[:, : precision.n_axes], step)
        vectors = _decode(along[self._measured], codes[:, self._measured], step)
        return PackedTokens(
            along=_fill_tokens(along, self.counts),
            codes=_fill_tokens(codes, self.counts),
            step=step,
            error=_cosine_error(self._measured_units, vectors),
        )


def pack_tokens(
    sites: Sequence[SiteTokens], max_bytes: float = MAX_BYTES
) -> list[PackedTokens]:
    """Return the packed tokens of all sites of a page, with one allowed error for all.

    Args:
        sites: of all stores.
        max_bytes: of all sites, deflated, about; `MIN_TOKEN_BYTES` at least.
    """
    max_bytes = max(max_bytes, MIN_TOKEN_BYTES)
    map_threads = thread_map(n_lanes())

    def choose_precisions(allowed_error: float) -> tuple[list[Precision], bool]:
        """Return the precision of each site, and whether all sites fit."""
        choose = partial(SiteTokens.precision, allowed_error=allowed_error)
        precisions = list(map_threads(choose, sites))
        return precisions, sum(p.n_bytes for p in precisions) <= max_bytes

    allowed_error = ALLOWED_ERROR
    precisions, fits = choose_precisions(allowed_error)
    while not fits and allowed_error < MAX_ERROR:
        allowed_error *= ERROR_FACTOR
        precisions, fits = choose_precisions(allowed_error)
    if allowed_error > ALLOWED_ERROR:
        # The factor was coarse: two steps back, as far as the tokens still fit.
        for finer in (ERROR_FACTOR**-0.5, ERROR_FACTOR**-0.25):
            finer_precisions, fits = choose_precisions(allowed_error * finer)
            if fits:
                allowed_error = allowed_error * finer
                precisions = finer_precisions
    pairs = zip(sites, precisions, strict=True)
    return list(map_threads(lambda pair: pair[0].pack(pair[1]), pairs))


def unit_directions(x: Float32) -> Float32:
    """Return the tokens (tokens, dim) divided by their lengths."""
    if not len(x):
        return x
    # float64: squares of large numbers do not overflow.
    wide = x.astype(np.float64)
    units: Float32 = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return units.astype(np.float32)


def _mean_and_axes(units: Float32) -> tuple[Float32, Float32]:
    """Return (dim,) the direction of the mean, and (k, dim) the axes perpendicular to it.

    The axis with the largest variance is the first.
    """
    from scipy.linalg import eigh

    dim = units.shape[1]
    k = min(MAX_AXES, dim)
    if not len(units):
        return np.zeros(dim, np.float32), np.zeros((k, dim), np.float32)
    mean = units.mean(0, dtype=np.float64)
    length = float(np.linalg.norm(mean))
    # Directions that cancel have no mean direction: it stays 0.
    direction = np.zeros(dim, np.float32)
    if length > 1e-6:
        direction = (mean / length).astype(np.float32)
    rest = units - np.outer(units @ direction, direction)
    _, vectors = eigh(rest.T @ rest, subset_by_index=(dim - k, dim - 1))
    return direction, vectors.T[::-1]  # eigh: the smallest eigenvalue first


def _encode(
    along: Float32, coordinates: Float32, step: float
) -> tuple[NDArray[np.int16], NDArray[np.int8]]:
    """Return the codes (tokens,) along the mean and (k, tokens) along the axes."""
    codes = np.rint(coordinates / step).clip(-MAX_AXIS_CODE, MAX_AXIS_CODE)
    mean_codes = np.rint(along.clip(-1, 1) * MAX_MEAN_CODE)
    return mean_codes.astype(np.int16), codes.astype(np.int8).T


def _decode(along: NDArray[np.int16], codes: NDArray[np.int8], step: float) -> Float32:
    """Return the vectors (tokens, 1 + k) of codes, as the page computes them."""
    first = along.astype(np.float32)[:, np.newaxis] / np.float32(MAX_MEAN_CODE)
    return np.concatenate([first, codes.T.astype(np.float32) * np.float32(step)], 1)


def _cosine_error(units: Float32, vectors: Float32) -> CosineError:
    """Return the error of the inner products of decoded vectors, over all pairs of tokens."""
    n = len(units)
    if n < 2:
        return CosineError(0.0, 0.0, 0)
    differences = units @ units.T - vectors @ vectors.T
    pairs = [differences[i, i + 1 :] for i in range(n - 1)]  # each pair once
    errors = np.abs(np.concatenate(pairs))
    return CosineError(float(np.percentile(errors, 99)), float(errors.max()), len(errors))


def _sample(n: int, max_size: int, rng: np.random.Generator) -> Integers:
    """Return at most `max_size` of the indices below n, in order."""
    if n <= max_size:
        return np.arange(n)
    return np.sort(rng.choice(n, max_size, replace=False))


def _fill_tokens(packed: NDArray[Number], counts: Mask) -> NDArray[Number]:
    """Return (..., tokens) from the tokens that count; the others are 0."""
    filled = np.zeros((*packed.shape[:-1], len(counts)), packed.dtype)
    filled[..., counts] = packed
    return filled


def bfloat16(values: Float | Float32) -> NDArray[np.uint16]:
    """Return the bits of numbers in bfloat16: within 1/256 of their size; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # The upper half of a float32, rounded to nearest, ties to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


MAX_GRID_SIDE = 40  # of the shown patches


def pooled_side(layout: TokenLayout) -> int:
    """Return s: a shown patch is the mean of s x s cells of the model's grid.

    The smallest power of 2 that makes the grid at most `MAX_GRID_SIDE`; 1 for most models.
    """
    assert layout.grid is not None
    s = 1
    while -(-max(layout.grid) // s) > MAX_GRID_SIDE:  # rounded up
        s *= 2
    return s


def coarse_layout(layout: TokenLayout) -> TokenLayout:
    """Return the layout of the shown patches.

    Those of the last row and column may be means of fewer cells, and reach beyond the grid.
    """
    s = pooled_side(layout)
    if s == 1:
        return layout
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = (-(-n // s) for n in layout.grid)
    y, x = layout.stride_px
    return replace(layout, grid=(rows, cols), stride_px=(s * y, s * x))


def pooled(x: Float32, counts: Mask, layout: TokenLayout) -> tuple[Float32, Mask]:
    """Return the shown patches: means over those of s x s cells that count.

    Args:
        x: (images, cells, dim); rows that do not count may hold anything.
        counts: (images, cells).
        layout: of the site.

    Returns:
        (images, shown patches, dim), and which of them have a cell that counts.
    """
    s = pooled_side(layout)
    if s == 1:
        return x, counts
    assert layout.grid is not None
    rows, cols = layout.grid
    n = len(x)
    dim = x.shape[-1]
    first_rows = range(0, rows, s)
    first_cols = range(0, cols, s)
    cells = np.where(counts[..., np.newaxis], x, 0).reshape(n, rows, cols, dim)
    row_sums = np.add.reduceat(cells, first_rows, axis=1)
    sums = np.add.reduceat(row_sums, first_cols, axis=2)
    is_counted = counts.reshape(n, rows, cols).astype(np.int64)
    row_counts = np.add.reduceat(is_counted, first_rows, axis=1)
    n_cells = np.add.reduceat(row_counts, first_cols, axis=2)
    means: Float32 = (sums / np.maximum(n_cells, 1)[..., np.newaxis]).astype(np.float32)
    return means.reshape(n, -1, dim), (n_cells > 0).reshape(n, -1)
