"""Ridge probes of all tokens side by side, fitted by inner products.

With more features than images (151,296 features of a ViT-B/16 layer) the dual form of ridge
regression needs inner products of images only: those of the training images with each other, and of
the test images with them. Both are sums over tokens, so tokens are read in groups and each byte
once; the features are never in memory all together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.analyses.probe.fit import Fitted, Task, union
from vitsee_core.analyses.probe.sources import Source
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import (
    Algebra,
    Linear,
    from_kernel,
    mean_target,
    targets,
)
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.errors import VitseeError


class Products:
    """Inner products of images, summed over groups of features.

    Features are taken minus the training images' mean, and scaled as `algebra` says.

    Attributes:
        kernel: (n, n), training images with each other.
        cross: (m, n), other images with the training images.
    """

    def __init__(self, n: int, m: int, algebra: Algebra) -> None:
        self.algebra = algebra
        self.kernel = np.zeros((n, n))
        self.cross = np.zeros((m, n))

    def start(self, x: Float32) -> None:
        """Begin the next group of features, from the training images (n, features)."""
        # Minus the first image before the mean: a large common value costs no digits.
        self._shift = x[0].astype(np.float64)
        self._x = x - self._shift
        self._mean = self._x.mean(axis=0)
        self._x -= self._mean
        squares = np.einsum("ij,ij->j", self._x, self._x)
        self._scales = self.algebra.scales(squares, len(x))
        if self._scales is not None:
            self._x *= self._scales
        self.kernel += self._x @ self._x.T

    def add(self, rows: Integers, x: Float32) -> None:
        """Add the same group of features of some of the other images.

        Args:
            rows: (k,) which of the other images.
            x: (k, features).
        """
        other = x - self._shift - self._mean
        if self._scales is not None:
            other *= self._scales
        self.cross[rows] += other @ self._x.T


class SideBySideProbe(NamedTuple):
    """The probe of one draw, and what it is tested on.

    Attributes:
        draw: number of the draw.
        probe: takes inner products with the draw's images as features.
        test_products: (test images, the draw's images) inner products.
    """

    draw: int
    probe: Fitted
    test_products: Float


def probe_concatenated(
    train: Source, test: Source, draws: Sequence[Draw], task: Task, n_test: int
) -> Iterator[SideBySideProbe]:
    """Fit a probe of all tokens side by side for each draw.

    Raises:
        VitseeError: the inner products of one draw do not fit the memory.
    """
    for draw_numbers in _batches_in_memory(draws, n_test, task.memory):
        batch = [_DrawProducts.of(d, draws[d], task, n_test) for d in draw_numbers]
        _collect(batch, train, test, task, n_test)
        for products in batch:
            yield products.fit()


def _batches_in_memory(
    draws: Sequence[Draw], n_test: int, memory: int
) -> Iterator[list[int]]:
    """Yield groups of draws, by number, whose inner products fit half the memory together."""
    # float64: the kernels (n, n) of all images and of the trial, one more while a probe is solved,
    # and the test products (n_test, n).
    sizes = [8 * len(draw) * (3 * len(draw) + n_test) for draw in draws]
    if max(sizes) > memory // 2:
        raise VitseeError(
            f"--tokens all of {max(map(len, draws))} training and {n_test} test images takes "
            f"{human_bytes(2 * max(sizes))} of memory, more than {human_bytes(memory)} (give more "
            "with --memory, or use fewer images with --images or --shots)"
        )
    batch: list[int] = []
    for d, size in enumerate(sizes):
        if batch and sum(sizes[i] for i in batch) + size > memory // 2:
            yield batch
            batch = []
        batch.append(d)
    yield batch


class _DrawProducts:
    """The inner products of one draw, and the probe that follows from them.

    Attributes:
        draw: the draw of training images.
        final: inner products of all its images, and of the test images with them.
        trial: inner products of the images that are fitted to while l2 is chosen, and of the
            held-out images with them.
    """

    def __init__(
        self, number: int, draw: Draw, task: Task, final: Products, trial: Products
    ) -> None:
        self.number = number
        self.draw = draw
        self.task = task
        self.method = task.method(draw)
        self.is_held_out = draw.held_out & (self.method == "holdout")
        self.final = final
        self.trial = trial

    @classmethod
    def of(cls, number: int, draw: Draw, task: Task, n_test: int) -> _DrawProducts:
        """Return the products of a draw before any feature was added."""
        n_held_out = int((draw.held_out & (task.method(draw) == "holdout")).sum())
        return cls(
            number,
            draw,
            task,
            final=Products(len(draw), n_test, task.algebra),
            trial=Products(len(draw) - n_held_out, n_held_out, task.algebra),
        )

    def start(self, x: Float32) -> None:
        """Add a group of features of the draw's images, (n, features)."""
        self.final.start(x)
        if self.method == "holdout":
            self.trial.start(x[~self.is_held_out])
            held_out = x[self.is_held_out]
            self.trial.add(np.arange(len(held_out)), held_out)

    def fit(self) -> SideBySideProbe:
        """Return the draw's probe, fitted to all of its images."""
        labels = self.task.labels[self.draw.indices]
        probe = self._fit_at(labels, self._l2s(labels))
        return SideBySideProbe(self.number, probe, self.final.cross)

    def _l2s(self, labels: Integers) -> tuple[float, ...]:
        """Return the given l2 values, or the chosen one. labels: (n,) classes of the images."""
        n_classes = self.task.n_classes
        algebra = self.task.algebra
        if self.method == "loo":
            kernel = self.final.kernel
            loo = LeaveOneOut(from_kernel(kernel, labels, n_classes, algebra), GRID)
            loo.add(kernel, labels)
            return (loo.best(),)
        if self.method == "holdout":
            fitted_labels = labels[~self.is_held_out]
            factors = from_kernel(self.trial.kernel, fitted_labels, n_classes, algebra)
            held_out = HeldOut(factors, GRID)
            held_out.add(self.trial.cross, labels[self.is_held_out])
            return (held_out.best(),)
        return self.task.l2s

    def _fit_at(self, labels: Integers, l2s: tuple[float, ...]) -> Fitted:
        """Return the probe at each of these l2 values. labels: (n,) classes of the images."""
        n_classes = self.task.n_classes
        algebra = self.task.algebra
        if len(l2s) > 1:
            factors = from_kernel(self.final.kernel, labels, n_classes, algebra)
            return Fitted(l2s, factors)
        # One l2 needs no decomposition: W = (XX' + l2 I)^-1 Y, in the inner products' coordinates.
        (l2,) = l2s
        kernel = self.final.kernel.copy()
        kernel[np.diag_indices_from(kernel)] += l2
        solution = np.linalg.solve(kernel, targets(labels, n_classes))
        weights = np.asarray(solution, np.float64)
        mean = mean_target(np.bincount(labels, minlength=n_classes))
        return Fitted(l2s, Linear(weights, algebra.intercept(mean, len(labels), l2)))


def _collect(
    batch: Sequence[_DrawProducts], train: Source, test: Source, task: Task, n_test: int
) -> None:
    """Add all features to the products of some draws, a group of tokens at a time."""
    images = union([products.draw.indices for products in batch])
    # float64 per token: a copy of the features as read, one for the final and one for the trial.
    n_bytes_per_token = 8 * train.dim * sum(3 * len(products.draw) for products in batch)
    for token_slice in train.groups(task.memory // 2 // n_bytes_per_token):
        blocks = train.blocks(token_slice, images)
        x = np.concatenate([block.reshape(len(block), -1) for _, block in blocks])
        for products in batch:
            rows = np.searchsorted(images, products.draw.indices)
            products.start(x[rows])
        for rows, block in test.blocks(token_slice, np.arange(n_test)):
            flat = block.reshape(len(block), -1)
            for products in batch:
                products.final.add(rows, flat)
