"""Tokens of a site in some tens of numbers each, with the error that this makes of their cosines.

A token x of length |x| is kept as its direction u = x / |x|: the part of it along the mean
direction m of the shown tokens, and k coordinates along the principal axes of what is left,

    u = a m + s (c_1 e_1 + ... + c_k e_k) + rest,    cos(x, y) = u . v ~ a a' + s s' (c . c')

with a in 16 bits, the c in 8 bits and one scale s per token. k is the smallest number of axes, at
most `MOST_DIMS`, that keeps 99 of 100 cosines within `WITHIN` of those of the stored features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Float32, Integers, Mask

MOST_DIMS, STEP = 64, 4
WITHIN = 0.01  # of 99 of 100 cosines
TRIED, MEASURED = 768, 4096  # tokens whose cosines decide k; whose cosines are compared at the end
Number = TypeVar("Number", bound=np.generic)
ALONG, SCALE, CODE = 32767, 65535, 127  # the largest code of each number


@dataclass(frozen=True)
class CosineError:
    """Of packed against stored features. p99: 99 of 100 cosines are within it; largest: of all that
    were compared; n_pairs: so many, of pairs of the shown tokens, in an image and across images."""

    p99: float
    largest: float
    n_pairs: int


@dataclass(frozen=True)
class PackedTokens:
    """Of a site, over the shown images. along, scale: (tokens,) a and s as codes; codes: (k,
    tokens) the c, axis by axis, which deflates better; tokens are counted image by image. Those
    that do not count have 0 everywhere."""

    along: NDArray[np.int16]
    scale: NDArray[np.uint16]
    codes: NDArray[np.int8]
    error: CosineError

    def vectors(self) -> Float32:
        """(tokens, 1 + k) whose products are the cosines that the page shows."""
        return _vectors(self.along, self.scale, self.codes)


def pack_tokens(x: Float32, counts: Mask, seed: int = 0) -> PackedTokens:
    """The tokens of a site.

    Args:
        x: (tokens, dim); rows that do not count may hold anything.
        counts: (tokens,) which are finite, on their image and not of length 0.
        seed: of the tokens whose cosines are compared, where there are too many.
    """
    units = unit_directions(x[counts])
    mean, axes = _axes(units)
    first = units @ mean
    # Axes without variance may point along the mean, which is counted already.
    coordinates = (units - np.outer(first, mean)) @ axes.T
    rng = np.random.default_rng(seed)
    tried, measured = (_some(len(units), n, rng) for n in (TRIED, MEASURED))
    for k in _candidates(units[tried], first[tried], coordinates[tried]):
        kept = _codes(first, coordinates[:, :k])
        vectors = _vectors(*kept)
        error = _error(units[measured], vectors[measured])
        if error.p99 <= WITHIN:
            break
    along, scale, codes = kept
    return PackedTokens(
        _spread(along, counts), _spread(scale, counts), _spread(codes, counts), error
    )


def unit_directions(x: Float32) -> Float32:
    """(tokens, dim) of length 1; where large numbers would overflow, too."""
    if not len(x):
        return x
    wide = x.astype(np.float64)
    found: Float32 = (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(np.float32)
    return found


def _axes(units: Float32) -> tuple[Float32, Float32]:
    """(dim,) the direction of the mean, and (k, dim) the axes of what is perpendicular to it, that
    of the largest variance first."""
    from scipy.linalg import eigh

    dim = units.shape[1]
    if not len(units):
        return np.zeros(dim, np.float32), np.zeros((min(MOST_DIMS, dim), dim), np.float32)
    mean = units.mean(0, dtype=np.float64)
    length = float(np.linalg.norm(mean))
    mean = mean / length if length > 1e-6 else np.zeros(dim)
    left = units - np.outer(units @ mean, mean)
    scatter = left.T @ left
    k = min(MOST_DIMS, dim)
    _, vectors = eigh(scatter, subset_by_index=(dim - k, dim - 1))
    return mean.astype(np.float32), vectors.T[::-1].astype(np.float32)


def _candidates(units: Float32, along: Float32, coordinates: Float32) -> list[int]:
    """Numbers of axes to try, from the smallest that does for some of the tokens on."""
    most = coordinates.shape[1]
    steps = [*range(min(STEP, most), most, STEP), most]
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        vectors = _vectors(*_codes(along, coordinates[:, : steps[middle]]))
        if _error(units, vectors).p99 <= WITHIN:
            high = middle
        else:
            low = middle + 1
    return steps[low:]


def _codes(
    along: Float32, coordinates: Float32
) -> tuple[NDArray[np.int16], NDArray[np.uint16], NDArray[np.int8]]:
    """The numbers as they are kept: (tokens,), (tokens,), (k, tokens)."""
    largest = np.abs(coordinates).max(1, initial=0)
    scale = np.ceil(largest.clip(0, 1) * SCALE).astype(np.uint16)
    step = np.where(scale > 0, scale.astype(np.float32) / (SCALE * CODE), 1)
    codes = np.rint(coordinates / step[:, np.newaxis]).clip(-CODE, CODE).astype(np.int8)
    return np.rint(along.clip(-1, 1) * ALONG).astype(np.int16), scale, codes.T


def _vectors(
    along: NDArray[np.int16], scale: NDArray[np.uint16], codes: NDArray[np.int8]
) -> Float32:
    step = scale.astype(np.float32) / np.float32(SCALE * CODE)
    coordinates = codes.T.astype(np.float32) * step[:, np.newaxis]
    first = along.astype(np.float32)[:, np.newaxis] / np.float32(ALONG)
    return np.concatenate([first, coordinates], 1)


def _error(units: Float32, vectors: Float32) -> CosineError:
    pairs = np.triu_indices(len(units), 1)
    if not len(pairs[0]):
        return CosineError(0.0, 0.0, 0)
    off: Float = np.abs((units @ units.T)[pairs] - (vectors @ vectors.T)[pairs])
    return CosineError(float(np.percentile(off, 99)), float(off.max()), len(off))


def _some(n: int, most: int, rng: np.random.Generator) -> Integers:
    return np.arange(n) if n <= most else np.sort(rng.choice(n, most, replace=False))


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
    found: NDArray[np.uint16] = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    return found
