"""Tokens of a site in as few bytes as keep their cosines, with the error that this makes of them.

A token x of length |x| is kept as its direction u = x / |x|: the part of it along the mean
direction m of the shown tokens, and coordinates along the principal axes of what is left,

    u = a m + h (c_1 e_1 + ... + c_k e_k) + rest,    cos(x, y) = u . v ~ a a' + h^2 (c . c')

with a in 16 bits, whole numbers c of at most 8 bits, and one step h per site. A coarse step is
cheap on all axes, most of all on those with little variance, whose numbers deflate to a bit or two:
so h is `STEP` times the error that is allowed, which takes the fewest bytes (trained and random
weights agree), and k the smallest number of axes that stays within it, of 99 of 100 cosines.

A page has `MOST_BYTES` for attention and tokens. The error allowed is `WITHIN`, or as much
more, the same at all sites, as this takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.lanes import n_lanes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores.layout import TokenLayout


MOST_DIMS = 256
# errors of 99 of 100 cosines that are tried
WITHIN = 0.01
COARSER = 2**0.5
COARSEST = 0.5
STEP = 0.7
MOST_BYTES = (
    9_600_000  # deflated; with all attention of three ViT-B/16 a page is 13 MB then
)
LEAST_BYTES = 3_000_000  # of tokens, however much attention there is
# tokens whose cosines decide k; whose cosines are compared at the end
TRIED = 384
MEASURED = 1024
Number = TypeVar("Number", bound=np.generic)
# the largest code of each number
ALONG = 32767
CODE = 127


@dataclass(frozen=True)
class CosineError:
    """How far cosines of packed features are from those of the stored ones. p99: 99 of 100 are
    within it; largest: of all that were compared; n_pairs: how many were, in an image and across
    images."""

    p99: float
    largest: float
    n_pairs: int


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a site over the shown images. along: (tokens,) a as codes; codes: (k, tokens)
    the c, axis by axis, which deflates better; step: h; tokens are counted image by image. Those
    that do not count have 0 everywhere."""

    along: NDArray[np.int16]
    codes: NDArray[np.int8]
    step: float
    error: CosineError

    def vectors(self) -> Float32:
        """(tokens, 1 + k) whose products are the cosines that the page shows."""
        return _vectors(self.along, self.codes, self.step)


@dataclass(frozen=True)
class Precision:
    """How a site is packed. n_bytes: deflated, as estimated from some of its tokens."""

    step: float
    dims: int
    n_bytes: float


class SiteTokens:
    """The tokens of a site before they are packed: `along` the mean, and `coordinates` along axes.

    Memory: (tokens, 1 + axes) in float32, and the directions of `MEASURED` tokens.
    """

    def __init__(self, x: Float32, counts: Mask, seed: int = 0) -> None:
        """Pack tokens.

        Args:
            x: (tokens, dim); rows that do not count may hold anything.
            counts: (tokens,) which are finite, on their image and not of length 0.
            seed: of the tokens whose cosines are compared, where there are too many.
        """
        units = unit_directions(x[counts])
        mean, axes = _axes(units)
        self.counts = counts
        self.along = units @ mean
        # Axes without variance may point along the mean, which is counted already.
        self.coordinates: Float32 = (units - np.outer(self.along, mean)) @ axes.T
        rng = np.random.default_rng(seed)
        self._tried, self._measured = (
            _some(len(units), n, rng) for n in (TRIED, MEASURED)
        )
        self._units = units[self._measured]
        self._tried_cosines = units[self._tried] @ units[self._tried].T

    def precision(self, within: float) -> Precision:
        """The fewest axes that keep 99 of 100 cosines within this, and all where none do."""
        largest = float(np.abs(self.coordinates).max(initial=0))
        step = max(STEP * within, largest / CODE)
        along, codes = _codes(
            self.along[self._tried], self.coordinates[self._tried], step
        )
        vectors = _vectors(along, codes, step)
        n = len(along)
        k = len(codes)
        low = min(1, k)
        high = k
        while low < high:
            middle = (low + high) // 2
            some = vectors[:, : 1 + middle]
            # Every pair is there twice, and a token with itself, which does not count.
            off = np.abs(self._tried_cosines - some @ some.T) > within
            if np.count_nonzero(off) - np.count_nonzero(off.diagonal()) <= 0.01 * n * (
                n - 1
            ):
                high = middle
            else:
                low = middle + 1
        deflated = sum(
            len(zlib.compress(part.tobytes())) for part in (along, codes[:low])
        )
        return Precision(step, low, deflated * len(self.along) / max(1, n))

    def packed(self, precision: Precision) -> PackedTokens:
        """The tokens packed with this step and these axes."""
        step = precision.step
        along, codes = _codes(self.along, self.coordinates[:, : precision.dims], step)
        vectors = _vectors(along[self._measured], codes[:, self._measured], step)
        error = _error(self._units, vectors)
        return PackedTokens(
            _spread(along, self.counts), _spread(codes, self.counts), step, error
        )


def pack_tokens(
    sites: Sequence[SiteTokens], room: float = MOST_BYTES
) -> list[PackedTokens]:
    """The tokens of all sites of a page with one error allowed, in at most about `room` bytes, or
    `LEAST_BYTES`."""
    room = max(room, LEAST_BYTES)
    each = thread_map(n_lanes())

    def at(within: float) -> tuple[list[Precision], bool]:
        found = [*each(partial(SiteTokens.precision, within=within), sites)]
        return found, sum(own.n_bytes for own in found) <= room

    within = WITHIN
    found, fits = at(within)
    while not fits and within < COARSEST:
        within *= COARSER
        found, fits = at(within)
    for finer in (COARSER**-0.5, COARSER**-0.25) if within > WITHIN else ():
        tried, fits = at(within * finer)
        if fits:
            within = within * finer
            found = tried
    return [*each(lambda pair: pair[0].packed(pair[1]), zip(sites, found, strict=True))]


def unit_directions(x: Float32) -> Float32:
    """(tokens, dim) of length 1; where large numbers would overflow, too."""
    if not len(x):
        return x
    wide = x.astype(np.float64)
    found: Float32 = (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(
        np.float32
    )
    return found


def _axes(units: Float32) -> tuple[Float32, Float32]:
    """(dim,) the direction of the mean, and (k, dim) the axes of what is perpendicular to it, that
    of the largest variance first."""
    from scipy.linalg import eigh

    dim = units.shape[1]
    if not len(units):
        return np.zeros(dim, np.float32), np.zeros((min(MOST_DIMS, dim), dim), np.float32)
    whole = units.mean(0, dtype=np.float64)
    length = float(np.linalg.norm(whole))
    mean = (whole / length if length > 1e-6 else np.zeros(dim)).astype(np.float32)
    left = units - np.outer(units @ mean, mean)
    k = min(MOST_DIMS, dim)
    _, vectors = eigh(left.T @ left, subset_by_index=(dim - k, dim - 1))
    return mean, vectors.T[::-1]


def _codes(
    along: Float32, coordinates: Float32, step: float
) -> tuple[NDArray[np.int16], NDArray[np.int8]]:
    """The numbers as they are kept: (tokens,), (k, tokens)."""
    codes = np.rint(coordinates / step).clip(-CODE, CODE).astype(np.int8)
    return np.rint(along.clip(-1, 1) * ALONG).astype(np.int16), codes.T


def _vectors(along: NDArray[np.int16], codes: NDArray[np.int8], step: float) -> Float32:
    first = along.astype(np.float32)[:, np.newaxis] / np.float32(ALONG)
    return np.concatenate([first, codes.T.astype(np.float32) * np.float32(step)], 1)


def _error(units: Float32, vectors: Float32) -> CosineError:
    n = len(units)
    if n < 2:
        return CosineError(0.0, 0.0, 0)
    every = units @ units.T - vectors @ vectors.T
    off = np.abs(np.concatenate([every[i, i + 1 :] for i in range(n - 1)]))
    return CosineError(float(np.percentile(off, 99)), float(off.max()), len(off))


def _some(n: int, most: int, rng: np.random.Generator) -> Integers:
    if n <= most:
        return np.arange(n)
    return np.sort(rng.choice(n, most, replace=False))


def _spread(packed: NDArray[Number], counts: Mask) -> NDArray[Number]:
    """(..., tokens) with 0 where a token does not count."""
    found = np.zeros((*packed.shape[:-1], len(counts)), packed.dtype)
    found[..., counts] = packed
    return found


def bfloat16(values: Float | Float32) -> NDArray[np.uint16]:
    """Numbers as the upper half of their float32, rounded: within 1/256 of their size. NaN stays
    NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    found: NDArray[np.uint16] = np.where(np.isnan(values), 0x7FC0, rounded).astype(
        np.uint16
    )
    return found


MOST_SIDE = 40


def pooled_side(layout: TokenLayout) -> int:
    """The s: the smallest power of 2 that makes the grid small enough, 1 for most."""
    assert layout.grid is not None
    s = 1
    while -(-max(layout.grid) // s) > MOST_SIDE:
        s *= 2
    return s


def coarse_layout(layout: TokenLayout) -> TokenLayout:
    """The layout of the shown patches; the last row and column may be of fewer cells, and then
    reach beyond the grid."""
    s = pooled_side(layout)
    if s == 1:
        return layout
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = (-(-n // s) for n in layout.grid)
    y, x = layout.stride_px
    return replace(layout, grid=(rows, cols), stride_px=(s * y, s * x))


def pooled(x: Float32, counts: Mask, layout: TokenLayout) -> tuple[Float32, Mask]:
    """Means over those of s x s cells that count.

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
    kept = np.where(counts[..., np.newaxis], x, 0).reshape(n, rows, cols, dim)
    sums = np.add.reduceat(
        np.add.reduceat(kept, range(0, rows, s), 1), range(0, cols, s), 2
    )
    own = counts.reshape(n, rows, cols).astype(np.int64)
    shares = np.add.reduceat(
        np.add.reduceat(own, range(0, rows, s), 1), range(0, cols, s), 2
    )
    found: Float32 = (sums / np.maximum(shares, 1)[..., np.newaxis]).astype(np.float32)
    return found.reshape(n, -1, dim), (shares > 0).reshape(n, -1)
