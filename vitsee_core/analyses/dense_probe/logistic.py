"""Multinomial logistic regression of patches on their shares of classes.

    min over W, b of  sum_p w_p CE(P_p, softmax(W' z_p + b)) / sum_p w_p + l2 / 2 |W|^2

with P_p the shares of classes among the pixels of patch p that have one, and w_p how many these
are: the cross-entropy of every pixel, were each given the scores of its patch. Features z are
scaled to mean 0 and standard deviation 1 over the training patches. By L-BFGS, each l2 from the
weights of the next larger one; l2 is chosen by the cross-entropy of held-out images. It is the
analysis's `l2_relative` (the mean variance of a feature is 1 here): 1 / (l2 n) is scikit-learn's C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.cells import LinearScores
from vitsee_core.analyses.dense_probe.neighbours import Scaling
from vitsee_core.types import Float

GRID = tuple(10.0**e for e in range(-6, 2))
TOLERANCE, ITERATIONS = 1e-9, 1000


@dataclass(frozen=True)
class Targets:
    """Patches to fit: scaled features (n, dim), shares (n, classes) of each patch's pixels, which
    add up to 1, and weights (n,) of the patches, which add up to 1."""

    z: Float
    shares: Float
    weights: Float

    @classmethod
    def of(cls, z: Float, counts: Float) -> Targets:
        """From the number of pixels of each class in each patch, (n, classes); patches without any
        are left out."""
        n = counts.sum(1)
        kept = n > 0
        return cls(z[kept], counts[kept] / n[kept, None], n[kept] / max(n.sum(), 1))


def fit(targets: Targets, l2s: Sequence[float]) -> dict[float, Float]:
    """The weights at each l2, (dim + 1, classes) with the intercept last."""
    from scipy.optimize import minimize

    shape = targets.z.shape[1] + 1, targets.shares.shape[1]
    start, found = np.zeros(shape), {}
    for l2 in sorted(l2s, reverse=True):
        result = minimize(
            _loss, start.ravel(), (targets, l2), "L-BFGS-B", jac=True,
            options={"maxiter": ITERATIONS, "ftol": 0, "gtol": TOLERANCE, "maxls": 50},
        )  # fmt: skip
        start = result.x.reshape(shape)
        found[l2] = start
    return found


def cross_entropy(targets: Targets, weights: Float) -> float:
    """The mean cross-entropy per pixel, without the penalty."""
    logs, _ = _log_softmax(targets.z @ weights[:-1] + weights[-1])
    return -float(np.einsum("n,nc,nc->", targets.weights, targets.shares, logs))


def choose_l2(fitted: Targets, held_out: Targets, l2s: Sequence[float]) -> float:
    """The l2 with the least cross-entropy on held-out pixels, the largest of several."""
    found = fit(fitted, l2s)
    return min(l2s, key=lambda l2: (cross_entropy(held_out, found[l2]), -l2))


def scores(weights: Float, scaling: Scaling) -> LinearScores:
    """The scores of classes as a linear function of features as they are stored."""
    own = weights[:-1] * scaling.factor[:, None]
    return LinearScores(own, weights[-1] - scaling.mean @ own)


def _loss(flat: Float, targets: Targets, l2: float) -> tuple[float, Float]:
    weights = flat.reshape(-1, targets.shares.shape[1])
    logs, shares = _log_softmax(targets.z @ weights[:-1] + weights[-1])
    value = -float(np.einsum("n,nc,nc->", targets.weights, targets.shares, logs))
    off = targets.weights[:, None] * (shares - targets.shares)
    gradient = np.concatenate([targets.z.T @ off + l2 * weights[:-1], off.sum(0)[None]])
    return value + l2 / 2 * float((weights[:-1] ** 2).sum()), gradient.ravel()


def _log_softmax(scores: Float) -> tuple[Float, Float]:
    """The logarithm of the softmax, and the softmax."""
    apart = scores - scores.max(1, keepdims=True)
    powers = np.exp(apart)
    sums = powers.sum(1, keepdims=True)
    return apart - np.log(sums), powers / sums
