"""The probes of one site: fitted to training images, tested on test images, right answers
counted.

`Prober` is what other files use. A probe of all tokens side by side mostly has more
features than images (151,296 in a layer of a ViT-B/16). The dual form of ridge regression
then needs inner products of images only: those of the training images with each other, and
of the test images with them. Both are sums over tokens, so tokens are read in groups and
each byte once; the features are never in memory all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitsee_core.analyses.probe.fit import Fitted, Task, fit, fit_sgd, token_bytes, union
from vitsee_core.analyses.probe.inputs import ConcatenatedTokens, Draw, Source
from vitsee_core.analyses.probe.options import Training
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import Algebra, Linear, from_kernel, mean_target, targets
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError

TOP = 5
METRICS = ("top1", "top5")


class Tally:
    """Right answers on the test images, for each draw, l2, token and class.

    `top1` counts an image as right if its own class has the highest score, `top5` if it is
    among the five highest. With five classes or fewer `top5` would always be 1 and is left
    out.

    Attributes:
        metrics: names of the counted metrics, `top1` and possibly `top5`.
        right: (draws, l2s, tokens, metrics, classes), number of right answers.
        in_block: (draws, l2s, tokens, metrics, blocks), right answers in each block of
            test images.
        share: (draws, l2s, metrics, images), for how many of the tokens from `first` on
            each image is right.
        l2s: (draws, l2s, tokens), the l2 that each probe used; NaN for SGD.
        failed: (draws, l2s, tokens), probes without a result, as SGD diverged.
        blind: (draws, l2s, tokens), probes that give all images the same scores.
    """

    def __init__(
        self,
        labels: Integers,
        n_classes: int,
        *,
        draws: int,
        l2s: int,
        tokens: int,
        first: int = 0,
        blocks: Integers | None = None,
    ) -> None:
        """Start with counts of zero.

        Args:
            labels: (images,) class of each test image.
            n_classes: number of classes.
            draws: number of draws of training images.
            l2s: number of l2 values at which each probe is reported.
            tokens: number of tokens.
            first: first token that counts towards `share`; the ones before it are prefix
                tokens.
            blocks: (images,) jackknife block of each test image; by default all are in one
                block.
        """
        self.labels = labels
        self.n_classes = n_classes
        self.first = first
        self.blocks = np.zeros(len(labels), np.int64) if blocks is None else blocks
        self.metrics = METRICS if n_classes > TOP else METRICS[:1]
        n_metrics = len(self.metrics)
        self.right = np.zeros((draws, l2s, tokens, n_metrics, n_classes), np.int64)
        n_blocks = int(self.blocks.max(initial=-1)) + 1
        self.in_block = np.zeros((draws, l2s, tokens, n_metrics, n_blocks), np.int64)
        self.l2s = np.zeros((draws, l2s, tokens))
        self.failed = np.zeros((draws, l2s, tokens), bool)
        self.blind = np.zeros((draws, l2s, tokens), bool)
        self.share = np.zeros((draws, l2s, n_metrics, len(labels)), np.float32)

    def is_right(self, ranks: Integers) -> Mask:
        """Return whether each image is right, (l2s, metrics, m).

        Args:
            ranks: (l2s, m) number of classes that are ranked before each image's own class.
        """
        # An image is right if fewer than 1 (top1) or 5 (top5) classes come before its own.
        limits = np.array((1, TOP)[: len(self.metrics)])
        return ranks[:, np.newaxis] < limits[:, np.newaxis]

    def count(
        self, draw: int, l2s: slice, token: int, indices: Integers, right: Mask
    ) -> None:
        """Add the answers of one probe about some test images.

        Args:
            draw: number of the draw.
            l2s: l2 values of the probe.
            token: number of the token.
            indices: (m,) which of the test images.
            right: (l2s, metrics, m) whether each is right, from `is_right`.
        """
        self._add_by_group(self.right[draw, l2s, token], right, self.labels[indices])
        self._add_by_group(self.in_block[draw, l2s, token], right, self.blocks[indices])
        if token >= self.first:
            self.share[draw, l2s][:, :, indices] += right

    @staticmethod
    def _add_by_group(totals: Integers, right: Mask, groups: Integers) -> None:
        """Add the right answers (l2s, metrics, m) of each group of images to totals (l2s,
        metrics, groups). groups: (m,) the class or block of each image."""
        n_l2s, n_metrics, n_groups = totals.shape
        l2_index, metric_index, image_index = np.nonzero(right)
        # One bincount over a flat index (l2, metric, group) is much faster than a loop
        # over l2s.
        row = l2_index * n_metrics + metric_index
        flat = row * n_groups + groups[image_index]
        counts = np.bincount(flat, minlength=n_l2s * n_metrics * n_groups)
        totals += counts.reshape(totals.shape)


@dataclass(frozen=True)
class Prober:
    """Fits and tests the probes of a site; the settings are shared by every site.

    Attributes:
        task: settings of the fits.
        draws: the draws of training images; each has a probe of its own.
        test_labels: (images,) classes of the labelled test images.
        training: settings of SGD; None for ridge regression.
        blocks: (images,) jackknife block of each test image.
    """

    task: Task
    draws: Sequence[Draw]
    test_labels: Integers
    training: Training | None = None
    blocks: Integers | None = None

    def each(
        self,
        train: Source,
        test: Source,
        title: str,
        first: int = 0,
        done: Callable[[int], object] = lambda n: None,
    ) -> Tally:
        """Fit and test a probe for every token, as many at a time as fit the memory.

        Args:
            train: features of the training images.
            test: features of the test images.
            title: site and tokens in words, for errors.
            first: tokens from this one on are averaged in the tally's `share`.
            done: called with the number of probes that were finished.

        Raises:
            VitseeError: not even one token fits the memory.
        """
        tally = self._tally(train.n_tokens, first)
        if self.training is None:
            bytes_per_token = token_bytes(self.task, self.draws, train.dim)
        else:
            # float32: the features as read, and a copy of each draw's.
            bytes_per_token = 8 * train.dim * sum(map(len, self.draws))
        if bytes_per_token > self.task.memory:
            raise VitseeError(
                f"probing {title} takes about {human_bytes(bytes_per_token)} of memory, "
                f"more than {human_bytes(self.task.memory)} (give more with --memory, or "
                "use fewer images)"
            )
        tokens_at_once = max(1, self.task.memory // bytes_per_token)
        with self.threads():
            for token_slice in train.groups(tokens_at_once):
                fitted: list[list[Fitted | None]]
                if self.training is not None:
                    fitted = fit_sgd(
                        train, token_slice, self.draws, self.task, self.training
                    )
                else:
                    ridge = fit(train, token_slice, self.draws, self.task)
                    fitted = [list(probes) for probes in ridge]
                self._test(test, token_slice, fitted, tally)
                n_tokens = token_slice.stop - token_slice.start
                done(len(self.draws) * n_tokens)
        return tally

    def threads(self) -> AbstractContextManager[None]:
        """Return a context in which ridge probes' products run in the calling thread.

        Entering takes some milliseconds, so callers with many sites hold it for all of
        them.
        """
        if self.training is not None:
            return nullcontext()
        return one_blas_thread()

    def side_by_side(self, train: Source, test: Source, title: str) -> Tally:
        """Fit and test one probe of all tokens together.

        With more features than images it is fitted by inner products, so that the features
        are never in memory all together. title: site and tokens in words, for errors.
        """
        has_more_features = train.n_tokens * train.dim > max(map(len, self.draws))
        # With fewer features than images their sums are smaller than inner products.
        if train.n_tokens > 1 and has_more_features and self.training is None:
            tally = self._tally(n_tokens=1, first=0)
            n = len(self.test_labels)
            for d, probe, x in probe_concatenated(train, test, self.draws, self.task, n):
                tally.l2s[d, :, 0] = probe.l2s
                tally.blind[d, :, 0] = probe.blind
                right = tally.is_right(probe.ranks(x, self.test_labels))
                tally.count(d, slice(None), 0, np.arange(n), right)
            return tally
        return self.each(ConcatenatedTokens(train), ConcatenatedTokens(test), title)

    def _tally(self, n_tokens: int, first: int) -> Tally:
        """Return an empty tally of the test images."""
        return Tally(
            self.test_labels,
            self.task.n_classes,
            draws=len(self.draws),
            l2s=self.task.n_l2,
            tokens=n_tokens,
            first=first,
            blocks=self.blocks,
        )

    def _test(
        self,
        test: Source,
        token_slice: slice,
        fitted: list[list[Fitted | None]],
        tally: Tally,
    ) -> None:
        """Count the right answers of the probes of some tokens.

        fitted: probe of each draw and token of the slice; None if its training diverged.
        """
        probe_keys = [
            (d, t) for d, probes in enumerate(fitted) for t in range(len(probes))
        ]
        for d, t in probe_keys:
            probe = fitted[d][t]
            at = (d, slice(None), token_slice.start + t)
            tally.failed[at] = probe is None
            tally.blind[at] = probe is not None and probe.blind
            tally.l2s[at] = np.nan if probe is None else probe.l2s

        def pieces() -> Iterator[tuple[tuple[int, int], Integers, Float32]]:
            """Yield (probe's key, image indices, features (m, dim)) as the images are
            read."""
            for indices, x in test.blocks(token_slice, np.arange(len(self.test_labels))):
                for d, t in probe_keys:
                    yield (d, t), indices, x[:, t]

        def score(
            piece: tuple[tuple[int, int], Integers, Float32],
        ) -> tuple[tuple[int, int], Integers, Mask | None]:
            """Return (probe's key, image indices, whether each is right (l2s, metrics,
            m)); None in place of the last if the probe's training diverged."""
            (d, t), indices, x = piece
            probe = fitted[d][t]
            if probe is None:
                return (d, t), indices, None
            ranks = probe.ranks(x.astype(np.float64), self.test_labels[indices])
            return (d, t), indices, tally.is_right(ranks)

        # Scoring runs in threads; counting stays here, as tallies are not safe to share.
        for (d, t), indices, right in thread_map(self.task.jobs)(score, pieces()):
            if right is not None:
                token = token_slice.start + t
                tally.count(d, slice(None), token, indices, right)


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
    """Yield groups of draws, by number, whose inner products fit half the memory
    together."""
    # float64: the kernels (n, n) of all images and of the trial, one more while a probe is
    # solved, and the test products (n_test, n).
    sizes = [8 * len(draw) * (3 * len(draw) + n_test) for draw in draws]
    if max(sizes) > memory // 2:
        raise VitseeError(
            f"--tokens all of {max(map(len, draws))} training and {n_test} test images "
            f"takes {human_bytes(2 * max(sizes))} of memory, more than "
            f"{human_bytes(memory)} (give more with --memory, or use fewer images with "
            "--images or --shots)"
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
        trial: inner products of the images that are fitted to while l2 is chosen, and of
            the held-out images with them.
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
        """Return the given l2 values, or the chosen one. labels: (n,) classes of the
        images."""
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
        """Return the probe at each of these l2 values. labels: (n,) classes of the
        images."""
        n_classes = self.task.n_classes
        algebra = self.task.algebra
        if len(l2s) > 1:
            factors = from_kernel(self.final.kernel, labels, n_classes, algebra)
            return Fitted(l2s, factors)
        # One l2 needs no decomposition: W = (XX' + l2 I)^-1 Y, in the inner products'
        # coordinates.
        (l2,) = l2s
        kernel = self.final.kernel.copy()
        kernel[np.diag_indices_from(kernel)] += l2
        solution = np.linalg.solve(kernel, targets(labels, n_classes))
        weights = np.asarray(solution, np.float64)
        mean = mean_target(np.bincount(labels, minlength=n_classes))
        return Fitted(l2s, Linear(weights, algebra.intercept(mean, len(labels), l2)))


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
        features = x - self._shift - self._mean
        if self._scales is not None:
            features *= self._scales
        self.cross[rows] += features @ self._x.T


def _collect(
    batch: Sequence[_DrawProducts], train: Source, test: Source, task: Task, n_test: int
) -> None:
    """Add all features to the products of some draws, a group of tokens at a time."""
    images = union([products.draw.indices for products in batch])
    # float64 per token: a copy of the features as read, one for the final and one for the
    # trial.
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
