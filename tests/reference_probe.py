"""Slow, obvious ridge probes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def ridge(x: Array, labels: Array, n_classes: int, l2: float) -> tuple[Array, Array]:
    """Weights (dim, classes) and intercept (classes,): the penalised normal equations with a
    column of ones that is not penalised, one class at a time."""
    x = np.asarray(x, np.float64)
    padded = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    penalty = l2 * np.eye(padded.shape[1])
    penalty[-1, -1] = 0
    solution = np.zeros((padded.shape[1], n_classes))
    for c in range(n_classes):
        y = np.array([1.0 if label == c else -1.0 for label in labels])
        solution[:, c] = np.linalg.solve(padded.T @ padded + penalty, padded.T @ y)
    return solution[:-1], solution[-1]


def padded_ridge(
    x: Array,
    labels: Array,
    test: Array,
    n_classes: int,
    l2: float,
    constant: float = 100.0,
) -> Array:
    """(m, classes) scores as big_vision computes them: standardised, a constant column, every
    column penalised alike."""
    x, test = np.asarray(x, np.float64), np.asarray(test, np.float64)
    mean, std = x.mean(0), x.std(0) + 1e-5
    padded = np.concatenate([(x - mean) / std, np.full((len(x), 1), constant)], axis=1)
    others = np.concatenate(
        [(test - mean) / std, np.full((len(test), 1), constant)], axis=1
    )
    y = 2.0 * np.eye(n_classes)[labels] - 1.0
    weights = np.linalg.solve(
        padded.T @ padded + l2 * np.eye(padded.shape[1]), padded.T @ y
    )
    return others @ weights


def shots_of(labels: Array, n_classes: int, shots: int, seed: int) -> Array:
    """Positions in the data set's order, as big_vision draws them."""
    rng = np.random.default_rng(seed)
    permuted = [rng.permutation(np.where(labels == c)[0]) for c in range(n_classes)]
    return np.concatenate([indices[:shots] for indices in permuted])


def top(scores: Array, labels: Array, k: int) -> float:
    """Share of images whose class is among the k highest; the lower class of equals first."""
    right = 0
    for row, label in zip(scores, labels, strict=True):
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        right += int(label) in order[:k]
    return right / len(labels)
