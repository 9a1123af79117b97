"""Outliers among the norms of patch tokens: thresholds, shares, bimodality, and histograms."""

from __future__ import annotations

import numpy as np

from vitsee_core.statistics.image_statistics import statistic
from vitsee_core.types import Float, Integers, Mask

N_MAD = 6.0
MAD_SCALE = 1.4826  # makes the median absolute deviation of a normal sample its sigma
BINS_PER_OCTAVE = 8


def mad_threshold(norms: Float) -> float:
    """median + 6 x 1.4826 median(|x - median|) of all norms."""
    middle = float(np.median(norms))
    return middle + N_MAD * MAD_SCALE * float(np.median(np.abs(norms - middle)))


def blocks_out(labels: Integers) -> list[Mask]:
    """For each block of the jackknife, the images (images,) that are not in it."""
    return [labels != b for b in range(int(labels.max()) + 1)]


def share_above_mad(norms: Float, labels: Integers) -> tuple[float, Float]:
    """The share of norms above `mad_threshold`, and the same without each block of images,
    threshold and share anew.

    Args:
        norms: (images, tokens).
        labels: (images,).
    """
    kept = [norms[keep] for keep in blocks_out(labels)]
    return _share(norms), np.array([_share(x) if x.size else np.nan for x in kept])


def _share(norms: Float) -> float:
    return float((norms > mad_threshold(norms)).mean())


def pooled_median(norms: Float, labels: Integers) -> tuple[float, Float]:
    """The median over all tokens of all images, and the same without each block of images."""
    of_tokens = np.repeat(labels, norms.shape[1])
    found = statistic(norms.reshape(1, -1), "median", of_tokens)
    return float(found.value[0]), found.trace[0]


def bimodality(norms: Float, labels: Integers) -> tuple[float, Float]:
    """(skewness^2 + 1) / kurtosis of the logarithms of all norms above 0 (Sarle's coefficient), and
    the same without each block of images: 1/3 for a normal sample, 5/9 for a uniform one, 1 for two
    equal peaks; NaN where all are alike.

    Args:
        norms: (images, tokens).
        labels: (images,).
    """
    with np.errstate(divide="ignore"):
        logs = np.log(norms)
    there = np.isfinite(logs)
    # About the mean of all: power sums of few digits lost, whatever the unit.
    centre = logs[there].mean() if there.any() else 0.0
    x = np.where(there, logs - centre, 0.0)
    powers = np.stack([there.sum(1), *((x**p).sum(1) for p in range(1, 5))], 1)
    without = [_coefficient(powers[keep].sum(0)) for keep in blocks_out(labels)]
    return _coefficient(powers.sum(0)), np.array(without)


def _coefficient(powers: Float) -> float:
    """From the number of values and the sums of their first four powers."""
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
    """(from, to, share of the norms) for each bin that has any; bins are eighths of a factor of 2,
    the same for every site and model. Norms of 0 are in none."""
    values = norms[norms > 0]
    bins = np.floor(BINS_PER_OCTAVE * np.log2(values)).astype(np.int64)
    found, counts = np.unique(bins, return_counts=True)
    return [
        (2.0 ** (k / BINS_PER_OCTAVE), 2.0 ** ((k + 1) / BINS_PER_OCTAVE), count / norms.size)
        for k, count in zip(found.tolist(), counts.tolist(), strict=True)
    ]
