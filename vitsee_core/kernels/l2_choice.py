"""Choose a probe's l2 by images held out of the training set, or by leave-one-out.

Neither uses a test image. Both criteria are collected batch by batch: `contribution` may be called
by several threads, `add_contribution` takes its results in the batches' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.ridge import Factors, class_sums, rank_true_classes
from vitsee_core.types import Float, Integers

GRID = tuple(2.0**e for e in range(-10, 20))  # of Google's few-shot evaluations
# Numbers made at a time, float64: residuals (BLOCK) stay in cache; the products with the component
# weights, of which residuals are mixtures, take 16 MB.
BLOCK = 1 << 16
COMPONENT_BLOCK = 1 << 21
ROUNDING = 1e-11  # singular values below this share of the largest are left out


class HeldOutSums(NamedTuple):
    """What held-out images add to `HeldOut`; coordinates as of `Factors.coordinates`."""

    right: Integers  # (l2s,) images whose true class has the highest score
    counts: Integers  # (classes,) images
    class_sums: Float  # (classes, r) sums of coordinates
    scatter: Float  # (r, r) sum of products of coordinates


class HeldOut:
    """Counts right answers, at each l2, on images that the probe was not fitted to.

    The best l2 has the most right answers; ties go to the least squared error, then to the largest
    l2 (features that are all equal).

    Args:
        factors: of the images that the probe is fitted to.
        l2s: candidates.
    """

    method = "most held-out images right, then the least squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors = factors
        self.l2s = tuple(l2s)
        self.right: Integers = np.zeros(len(self.l2s), np.int64)  # images, by l2
        r, n_classes = factors.xty.shape
        # Sums over images' coordinates, from which squared errors follow at any l2.
        self._counts: Integers = np.zeros(n_classes, np.int64)
        self._sums = np.zeros((n_classes, r))
        self._scatter = np.zeros((r, r))

    def add(self, x: NDArray[np.floating[Any]], labels: Integers) -> None:
        """Count images (m, dim) of these classes."""
        self.add_contribution(self.contribution(x, labels))

    def contribution(self, x: NDArray[np.floating[Any]], labels: Integers) -> HeldOutSums:
        """Return the sums of these images (m, dim); changes nothing."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        right = []
        for l2 in self.l2s:
            ranks = rank_true_classes(self.factors.scores(z, l2), labels)
            right.append(np.count_nonzero(ranks == 0))
        n_classes = len(self._counts)
        return HeldOutSums(
            right=np.array(right),
            counts=np.bincount(labels, minlength=n_classes),
            class_sums=class_sums(z, labels, n_classes),
            scatter=z.T @ z,
        )

    def add_contribution(self, sums: HeldOutSums) -> None:
        """Add a result of `contribution`."""
        self.right += sums.right
        self._counts += sums.counts
        self._sums += sums.class_sums
        self._scatter += sums.scatter

    def squared_error(self, l2: float) -> float:
        """Return the sum over images and classes of (b + W'z - t)^2.

        It is multiplied out: sum (b - t)^2 - 2 W' sum (t - b) z' + W' (sum z z') W.
        """
        factors = self.factors
        weights = factors.weights(l2)  # (r, classes) W
        intercept = factors.algebra.intercept(factors.mean_target, factors.n, l2)  # b
        n = int(self._counts.sum())
        # t is 1 for the `counts` images of a class, -1 for the others.
        intercept_terms = (
            self._counts @ (1 - intercept) ** 2
            + (n - self._counts) @ (1 + intercept) ** 2
        )
        all_sums = self._sums.sum(0)  # (r,) sum of z
        # (classes, r) sum of (t - b) z'
        cross_sums = 2 * self._sums - all_sums - intercept[:, np.newaxis] * all_sums
        cross_terms = np.einsum("cr,rc->", cross_sums, weights)
        products = np.einsum("rc,rc->", weights, self._scatter @ weights)
        return float(intercept_terms - 2 * cross_terms + products)

    def best(self) -> float:
        """Return the l2 with the most right answers, then the least squared error."""
        best_indices = np.flatnonzero(self.right == self.right.max())
        candidates = [self.l2s[i] for i in best_indices]
        return min(candidates, key=lambda l2: (self.squared_error(l2), -l2))


class LeaveOneOut:
    """Sums the squared error of each training image under the probe of all the others, at each l2.

    It is exact, without refitting (Allen's PRESS): residual / (1 - leverage). The mean and the
    intercept are refitted without the image; standard deviations are not, nor the mean if the
    intercept is penalised.

    The best l2 has the least error, as scikit-learn's RidgeCV chooses.

    Args:
        factors: of all training images.
        l2s: candidates.
    """

    method = "the least leave-one-out squared error"

    def __init__(self, factors: Factors, l2s: Sequence[float]) -> None:
        self.factors = factors
        self.l2s = tuple(l2s)
        self.squared_error = np.zeros(len(self.l2s))
        self._mix, self._weights = mixture(factors, l2s)
        intercepts = [
            factors.algebra.intercept(factors.mean_target, factors.n, l2) for l2 in l2s
        ]
        # (l2s, 1, classes), less targets of -1.
        self._intercepts_less_target = np.stack(intercepts)[:, np.newaxis] + 1

    def add(self, x: NDArray[np.floating[Any]], labels: Integers) -> None:
        """Count training images (m, dim) of these classes."""
        self.add_contribution(self.contribution(x, labels))

    def contribution(self, x: NDArray[np.floating[Any]], labels: Integers) -> Float:
        """Return the squared errors (l2s,) of these images (m, dim); changes nothing."""
        z = self.factors.coordinates(x.astype(np.float64, copy=False))
        one_less_leverage = 1 - self.factors.leverages(z, self.l2s).T  # (l2s, m)
        # An image that alone decides its score (1 - leverage is rounding) has no left-out probe.
        is_defined = one_less_leverage > 1e-12
        image_weights = 1 / np.square(np.where(is_defined, one_less_leverage, np.nan))
        errors = np.zeros(len(self.l2s))
        n_components, _, n_classes = self._weights.shape
        images_per_block = max(1, BLOCK // (len(self.l2s) * n_classes))
        # Without components all features are constant.
        component_size = max(1, n_components * n_classes)
        images_per_product = max(images_per_block, COMPONENT_BLOCK // component_size)
        for product_start in range(0, len(z), images_per_product):
            # (components, images, classes)
            components = (
                z[product_start : product_start + images_per_product] @ self._weights
            )
            for block_start in range(0, components.shape[1], images_per_block):
                block = components[:, block_start : block_start + images_per_block]
                n_images = block.shape[1]
                start = product_start + block_start
                images = slice(start, start + n_images)
                residuals = np.tensordot(self._mix, block, 1)  # (l2s, images, classes)
                residuals += self._intercepts_less_target
                # The target of the true class is 1, not -1.
                residuals[:, np.arange(n_images), labels[images]] -= 2
                errors += np.einsum(
                    "lm,lmc,lmc->l", image_weights[:, images], residuals, residuals
                )
        return errors

    def add_contribution(self, squared_errors: Float) -> None:
        """Add a result of `contribution`."""
        self.squared_error += squared_errors

    def best(self) -> float:
        """Return the l2 with the least error; the largest if no error could be computed."""
        if np.isnan(self.squared_error).all():
            return self.l2s[-1]
        return self.l2s[int(np.nanargmin(self.squared_error))]


def mixture(factors: Factors, l2s: Sequence[float]) -> tuple[Float, Float]:
    """Return mix (l2s, k) and weights (k, r, classes): their product is the weights at each l2.

    The weights at 30 l2 are mixtures of about 10, to rounding: shrinkage v / (v + l2) is a smooth
    function of l2. This does not hold if a probe can fit all images: its remaining residuals are
    smaller than that rounding, so each l2 has weights of its own.
    """
    values = factors.values
    n_l2s = len(l2s)
    shrinkage = values / (values + np.array(l2s)[:, np.newaxis])  # (l2s, r)
    left, singular_values, right = np.linalg.svd(shrinkage, full_matrices=False)
    k = int(np.count_nonzero(singular_values > ROUNDING * singular_values[:1]))
    if k >= n_l2s or len(values) >= factors.n - 1:
        return np.eye(n_l2s), np.stack([factors.weights(l2) for l2 in l2s])
    # Weights are xty / (v + l2), that is shrinkage / v times xty.
    inverse_values = np.divide(
        right[:k], values, out=np.zeros_like(right[:k]), where=values > 0
    )
    mix = left[:, :k] * singular_values[:k]
    return mix, inverse_values[:, :, np.newaxis] * factors.xty
