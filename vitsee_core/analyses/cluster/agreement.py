"""How far clusters agree with classes: purity, mutual information, adjusted Rand index."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.types import Float, Integers

METRICS = ("purity", "nmi", "ari")


def agreement(clusters: Integers, labels: Integers) -> dict[str, float]:
    """Return purity, NMI (0 to 1) and ARI (at most 1, 0 by chance) of clusters and classes.

    Args:
        clusters: (n,) numbers from 0.
        labels: (n,) numbers from 0.
    """
    return _agreement_of_counts(_contingency(clusters, labels))


def _contingency(clusters: Integers, labels: Integers) -> Integers:
    """Return the number of members of each cluster and class, (clusters, classes)."""
    n_clusters = int(clusters.max()) + 1
    n_classes = int(labels.max()) + 1
    flat = clusters * n_classes + labels
    counts = np.bincount(flat, minlength=n_clusters * n_classes)
    return counts.reshape(n_clusters, n_classes)


def agreement_without(
    clusters: Integers, labels: Integers, blocks: Blocks
) -> dict[str, Float]:
    """Return metric -> (blocks,) the agreement of the same clusters without each block's members.

    It is NaN if nothing is left.
    """
    n_classes = int(labels.max()) + 1
    counts = _contingency(clusters, labels)
    flat = clusters * n_classes + labels
    replicates = []
    for block in range(blocks.n):
        in_block = np.bincount(flat[blocks.labels == block], minlength=counts.size)
        without = counts - in_block.reshape(counts.shape)
        replicates.append(_agreement_of_counts(without))
    return {
        metric: np.array([replicate[metric] for replicate in replicates])
        for metric in METRICS
    }


def _agreement_of_counts(contingency: NDArray[Any]) -> dict[str, float]:
    """Return purity, NMI and ARI of a contingency table (clusters, classes); NaN if it is empty."""
    counts = contingency.astype(np.float64)
    n = counts.sum()
    if n == 0:
        return dict.fromkeys(METRICS, np.nan)
    cluster_sizes = counts.sum(1)
    class_sizes = counts.sum(0)

    # I(U; V) = H(U) + H(V) - H(U, V)
    cluster_entropy = _entropy(cluster_sizes / n)
    class_entropy = _entropy(class_sizes / n)
    joint_entropy = _entropy(counts.ravel() / n)
    mean_entropy = (cluster_entropy + class_entropy) / 2
    mutual_information = cluster_entropy + class_entropy - joint_entropy
    # One cluster and one class agree.
    nmi = 1.0
    if mean_entropy > 0:
        # Rounding can leave a little less than 0.
        nmi = float(max(mutual_information, 0) / mean_entropy)

    # Ordered pairs of members that are together in both, in a cluster, in a class (Hubert and
    # Arabie 1985): ari = (index - expected index) / (largest index - expected index).
    pairs_together = _ordered_pairs(counts)
    pairs_in_clusters = _ordered_pairs(cluster_sizes)
    pairs_in_classes = _ordered_pairs(class_sizes)
    expected = 0.0
    if n > 1:
        expected = pairs_in_clusters * pairs_in_classes / (n * (n - 1))
    largest = (pairs_in_clusters + pairs_in_classes) / 2
    # One cluster and one class agree, as do single members with classes of their own.
    ari = 1.0
    if largest != expected:
        ari = (pairs_together - expected) / (largest - expected)
    return {"purity": float(counts.max(1).sum() / n), "nmi": nmi, "ari": ari}


def _ordered_pairs(sizes: Float) -> float:
    """Return the number of ordered pairs within groups of these sizes."""
    return float((sizes * (sizes - 1)).sum())


def _entropy(shares: Float) -> float:
    """Return the entropy in nats of shares that add up to 1."""
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum())
