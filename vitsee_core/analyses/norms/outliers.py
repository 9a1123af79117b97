"""Outliers among the norms of patch tokens: thresholds, shares, bimodality, and histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Integers, Mask

N_MAD = 6.0
MAD_SCALE = 1.4826  # makes the median absolute deviation of a normal sample its sigma
BINS_PER_OCTAVE = 8
PIECE = 1 << 18  # norms worked on at a time


def mad_threshold(norms: Float) -> float:
    """median + 6 x 1.4826 median(|x - median|) of all norms."""
    return _threshold(np.sort(norms, axis=None))


def blocks_out(labels: NDArray[np.integer]) -> Iterator[Mask]:
    """A mask (images,) for each block of the jackknife: the images that are not in it."""
    return (labels != b for b in range(int(labels.max()) + 1))


def share_above_mad(norms: Float, labels: Integers) -> tuple[float, Float]:
    """The share of norms (images, tokens) above `mad_threshold`, and the same without each block of
    images, with threshold and share recomputed; NaN if nothing is left.

    Norms are sorted once, and stay so without a block: neither medians nor counts cost more than
    leaving it out. Memory: beside the norms, three times as much.
    """
    values, blocks = _in_order(norms, labels)
    return _share(values), np.array([_share(values[keep]) for keep in blocks_out(blocks)])


def _share(ascending: Float) -> float:
    n = len(ascending)
    if not n:
        return np.nan
    return float(n - np.searchsorted(ascending, _threshold(ascending), "right")) / n


def _threshold(ascending: Float) -> float:
    """`mad_threshold` of norms in ascending order."""
    n, middle = len(ascending), _median(ascending)
    deviations = [_nearest(ascending, middle, k + 1) for k in ((n - 1) // 2, n // 2)]
    return middle + N_MAD * MAD_SCALE * sum(deviations) / 2


def _nearest(ascending: Float, middle: float, k: int) -> float:
    """The k-th smallest |x - middle|: the k nearest values are contiguous, starting where a
    bisection finds."""
    low, high = 0, len(ascending) - k
    while low < high:
        at = (low + high) // 2
        if middle - ascending[at] > ascending[at + k] - middle:
            low = at + 1
        else:
            high = at
    return float(max(middle - ascending[low], ascending[low + k - 1] - middle))


def pooled_median(norms: Float, labels: Integers) -> tuple[float, Float]:
    """The median over all tokens of all images, and the same without each block of images; NaN if
    nothing is left. Memory as for `share_above_mad`."""
    values, blocks = _in_order(norms, labels)
    return _median(values), np.array([_median(values[keep]) for keep in blocks_out(blocks)])


def _median(ascending: Float) -> float:
    n = len(ascending)
    return float(ascending[(n - 1) // 2] + ascending[n // 2]) / 2 if n else np.nan


def _in_order(norms: Float, labels: Integers) -> tuple[Float, NDArray[np.int32]]:
    """All norms, ascending, and the block of each."""
    order = np.argsort(norms, axis=None)
    values = norms.ravel()[order]
    order //= norms.shape[1]  # images
    return values, labels.astype(np.int32)[order]


def bimodality(norms: Float, labels: Integers) -> tuple[float, Float]:
    """(skewness^2 + 1) / kurtosis of the logarithms of all norms (images, tokens) above 0 (Sarle's
    coefficient), and the same without each block of images: 1/3 for a normal sample, 5/9 for a
    uniform one, 1 for two equal peaks; NaN if all are equal."""
    # About the mean of all: power sums of few digits lost, whatever the unit.
    n, total = np.concatenate([_powers(piece, 0.0)[:, :2] for piece in _pieces(norms)]).sum(0)
    centre = total / n if n else 0.0
    powers = np.concatenate([_powers(piece, centre) for piece in _pieces(norms)])
    without = [_coefficient(powers[keep].sum(0)) for keep in blocks_out(labels)]
    return _coefficient(powers.sum(0)), np.array(without)


def _powers(norms: Float, centre: float) -> Float:
    """(images, 5) number of an image's norms above 0, and the sums over these of the first four
    powers of their logarithms minus `centre`."""
    with np.errstate(divide="ignore"):
        logs = np.log(norms)
    there = np.isfinite(logs)
    x = np.where(there, logs - centre, 0.0)
    return np.stack([there.sum(1), *((x**p).sum(1) for p in range(1, 5))], 1)


def _pieces(norms: Float) -> Iterator[Float]:
    """A few images' norms at a time, which need little additional memory."""
    step = max(1, PIECE // norms.shape[1])
    return (norms[at : at + step] for at in range(0, len(norms), step))


def _coefficient(powers: Float) -> float:
    """The coefficient from the number of values and the sums of their first four powers."""
    n = powers[0]
    if n < 2:
        return np.nan
    m1, r2, r3, r4 = powers[1:] / n
    m2 = r2 - m1**2
    m3 = r3 - 3 * m1 * r2 + 2 * m1**3
    m4 = r4 - 4 * m1 * r3 + 6 * m1**2 * r2 - 3 * m1**4
    if not m2 > 1e-24:  # of logarithms: all norms alike to 12 digits
        return np.nan
    return float((m3**2 / m2**3 + 1) / (m4 / m2**2))


def histogram(norms: Float) -> list[tuple[float, float, float]]:
    """(from, to, share of the norms) for each non-empty bin; bins are eighths of a factor of 2, the
    same for every site and model. Norms of 0 are in none."""
    counts = Counter[int]()
    for piece in _pieces(norms):
        bins = np.floor(BINS_PER_OCTAVE * np.log2(piece[piece > 0])).astype(np.int64)
        filled, of_each = np.unique(bins, return_counts=True)
        counts.update(dict(zip(filled.tolist(), of_each.tolist(), strict=True)))
    return [
        (2.0 ** (k / BINS_PER_OCTAVE), 2.0 ** ((k + 1) / BINS_PER_OCTAVE), counts[k] / norms.size)
        for k in sorted(counts)
    ]
