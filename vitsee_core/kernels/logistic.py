"""Multinomial logistic regression of examples on shares of classes, in float64 by L-BFGS.

    min over W, b of  sum_p w_p CE(P_p, softmax(W' z_p + b)) / sum_p w_p + l2 / 2 |W|^2

with P_p the shares of classes of example p, say of the labelled pixels of a patch, and w_p
the number of labels that they are shares of: the cross-entropy of every label, were each
given the scores of its example. The intercept b is not penalised. 1 / (l2 n), with n the
number of labels, is scikit-learn's C, which has no shares of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitsee_core.types import Float, Float32

TOLERANCE = 1e-9  # largest entry of the gradient at the end
MAX_ITERATIONS = 1000
MAX_LINE_SEARCH = 50  # evaluations of one line search; scipy's default is 20


@dataclass(frozen=True)
class Scaling:
    """A linear change of features: minus `mean`, times `factor`, (dim,) each."""

    mean: Float
    factor: Float

    @classmethod
    def none(cls, dim: int) -> Scaling:
        """Return the scaling that leaves features of `dim` channels as they are."""
        return cls(mean=np.zeros(dim), factor=np.ones(dim))

    @classmethod
    def of(cls, tokens: Float32) -> Scaling:
        """Return the scaling to mean 0 and standard deviation 1 over tokens (n, dim).

        Constant features become 0.
        """
        mean = tokens.mean(0, dtype=np.float64)
        std = tokens.std(0, dtype=np.float64)
        factor = np.divide(1, std, out=np.zeros_like(std), where=std > 0)
        return cls(mean, factor)

    def __call__(self, tokens: Float | Float32) -> Float:
        """Return the scaled features of tokens (..., dim)."""
        return (tokens - self.mean) * self.factor


@dataclass(frozen=True)
class Targets:
    """Examples to fit.

    Attributes:
        z: (n, dim) scaled features.
        shares: (n, classes) shares of each example's labels, which add up to 1.
        weights: (n,) share of each example in all labels; they add up to 1.
    """

    z: Float
    shares: Float
    weights: Float

    @classmethod
    def of(cls, z: Float, counts: Float) -> Targets:
        """Return the examples that have a label.

        Args:
            z: (n, dim) scaled features.
            counts: (n, classes) number of labels of each class in each example.
        """
        n_labels = counts.sum(1)
        is_labelled = n_labels > 0
        return cls(
            z=z[is_labelled],
            shares=counts[is_labelled] / n_labels[is_labelled, None],
            weights=n_labels[is_labelled] / max(n_labels.sum(), 1),
        )


class LogSoftmax(NamedTuple):
    """The logarithm of a softmax over classes, and the softmax, (n, classes) each."""

    logarithms: Float
    shares: Float


def fit(targets: Targets, l2s: Sequence[float]) -> dict[float, Float]:
    """Fit the regression at each l2.

    Returns:
        l2 -> weights (dim + 1, classes), with the intercept last.
    """
    from scipy.optimize import minimize

    shape = (targets.z.shape[1] + 1, targets.shares.shape[1])
    start = np.zeros(shape)
    weights_of_l2s = {}
    # From the largest l2 down, each from the weights of the one before: few steps are left.
    for l2 in sorted(l2s, reverse=True):
        result = minimize(
            _penalised_loss,
            start.ravel(),
            args=(targets, l2),
            method="L-BFGS-B",
            jac=True,
            # ftol 0: the gradient alone ends the iteration, not a loss that changes little.
            options={
                "maxiter": MAX_ITERATIONS,
                "ftol": 0,
                "gtol": TOLERANCE,
                "maxls": MAX_LINE_SEARCH,
            },
        )
        start = result.x.reshape(shape)
        weights_of_l2s[l2] = start
    return weights_of_l2s


def cross_entropy(targets: Targets, weights: Float) -> float:
    """Return the mean cross-entropy per label, without the penalty.

    weights: (dim + 1, classes), with the intercept last.
    """
    softmax = _log_softmax(targets.z @ weights[:-1] + weights[-1])
    return _mean_cross_entropy(targets, softmax)


def choose_l2(fitted: Targets, held_out: Targets, l2s: Sequence[float]) -> float:
    """Return the l2 with the least cross-entropy on held-out examples, the largest of
    several."""
    weights_of_l2s = fit(fitted, l2s)
    return min(l2s, key=lambda l2: (cross_entropy(held_out, weights_of_l2s[l2]), -l2))


def _penalised_loss(
    flat_weights: Float, targets: Targets, l2: float
) -> tuple[float, Float]:
    """Return the loss and its gradient, flat as the optimiser wants the weights."""
    weights = flat_weights.reshape(-1, targets.shares.shape[1])
    softmax = _log_softmax(targets.z @ weights[:-1] + weights[-1])
    loss = _mean_cross_entropy(targets, softmax)
    penalty = l2 / 2 * float((weights[:-1] ** 2).sum())
    # The gradient of the loss by the scores, (n, classes).
    residuals = targets.weights[:, None] * (softmax.shares - targets.shares)
    gradient = np.concatenate(
        [targets.z.T @ residuals + l2 * weights[:-1], residuals.sum(0)[None]]
    )
    return loss + penalty, gradient.ravel()


def _mean_cross_entropy(targets: Targets, softmax: LogSoftmax) -> float:
    """Return the mean cross-entropy per label of predicted shares."""
    products = np.einsum("n,nc,nc->", targets.weights, targets.shares, softmax.logarithms)
    return -float(products)


def _log_softmax(scores: Float) -> LogSoftmax:
    """Return the softmax of scores (n, classes) over classes, and its logarithm."""
    # Minus the largest score, so that no power overflows.
    below_largest = scores - scores.max(1, keepdims=True)
    powers = np.exp(below_largest)
    sums = powers.sum(1, keepdims=True)
    return LogSoftmax(below_largest - np.log(sums), powers / sums)
