"""Clusters of vectors, and their agreement with classes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.types import Float, Float32, Integers

METRICS = ("purity", "nmi", "ari")
N_INIT = 10


def why_meaningless(labels: Integers, k: int, noun: str = "image") -> str | None:
    """Why k clusters of these examples say nothing of any features; None if they do."""
    n, n_classes = len(labels), len(np.unique(labels))
    if n_classes == 1:
        one = noun if n == 1 else f"class among its {noun}s"
        return f"there is one {one}, with which all clusters agree"
    if k == n:
        return f"k is the number of {noun}s ({n}), so that each is a cluster of its own"
    if n_classes == n:
        return f"each of the {n} {noun}s has a class of its own"
    if k == 1:
        return f"k is 1, so that all {noun}s are one cluster"
    return None


def k_means(vectors: Float32, k: int, seed: int) -> Integers:
    """(n,) cluster of each vector; fewer than k clusters if there are fewer distinct vectors."""
    if (vectors == vectors[0]).all():
        # k-means would fill its empty clusters with some of the equal vectors.
        return np.zeros(len(vectors), np.int64)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Fewer distinct vectors than clusters, which is no failure to converge.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(k, init="k-means++", n_init=N_INIT, random_state=seed)
        labels: Integers = model.fit_predict(vectors).astype(np.int64)
    return labels


def agreement(clusters: Integers, labels: Integers) -> dict[str, float]:
    """Purity, NMI (0 to 1) and ARI (at most 1, 0 by chance) of clusters (n,) and classes (n,), both
    numbers from 0."""
    return _agreement_of_table(_contingency(clusters, labels))


def _contingency(clusters: Integers, labels: Integers) -> Integers:
    """(clusters, classes) numbers of members."""
    shape = int(clusters.max()) + 1, int(labels.max()) + 1
    return np.bincount(clusters * shape[1] + labels, minlength=shape[0] * shape[1]).reshape(shape)


def agreement_without(clusters: Integers, labels: Integers, blocks: Blocks) -> dict[str, Float]:
    """Metric -> (blocks,) the agreement of the same clusters without the members of each block; NaN
    if nothing is left."""
    n_classes = int(labels.max()) + 1
    whole = _contingency(clusters, labels)
    rows = []
    for block in range(blocks.n):
        own = (clusters * n_classes + labels)[blocks.labels == block]
        without = whole - np.bincount(own, minlength=whole.size).reshape(whole.shape)
        rows.append(_agreement_of_table(without))
    return {metric: np.array([row[metric] for row in rows]) for metric in METRICS}


def _agreement_of_table(table: NDArray[Any]) -> dict[str, float]:
    counts = table.astype(np.float64)
    n = counts.sum()
    if n == 0:
        return dict.fromkeys(METRICS, np.nan)
    rows, columns = counts.sum(1), counts.sum(0)
    mean_entropy = (_entropy(rows / n) + _entropy(columns / n)) / 2
    mutual = _entropy(rows / n) + _entropy(columns / n) - _entropy(counts.ravel() / n)
    together, in_rows, in_columns = (float((c * (c - 1)).sum()) for c in (counts, rows, columns))
    by_chance = in_rows * in_columns / (n * (n - 1)) if n > 1 else 0.0
    most = (in_rows + in_columns) / 2
    return {
        "purity": float(counts.max(1).sum() / n),
        # One cluster and one class agree, as do single members with classes of their own.
        "nmi": float(max(mutual, 0) / mean_entropy) if mean_entropy > 0 else 1.0,
        "ari": (together - by_chance) / (most - by_chance) if most != by_chance else 1.0,
    }


def _entropy(shares: Float) -> float:
    known = shares[shares > 0]
    return float(-(known * np.log(known)).sum())
