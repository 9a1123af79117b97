"""Probes of all tokens side by side, with more features than images: by inner products.

The matrix of inner products of training images, and of test with training images, is a sum over
tokens, so they are read in groups and each byte once; the features (151,296 of a ViT-B/16 layer)
are never in memory all together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.analyses.probe.fit import Fitted, Task, union
from vitsee_core.analyses.probe.rows import Tally
from vitsee_core.analyses.probe.sources import Source
from vitsee_core.kernels.ridge import GRID, Algebra, HeldOut, LeaveOneOut, Linear, from_kernel
from vitsee_core.kernels.ridge.solver import mean_target, targets
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import VitseeError


class Products:
    """Inner products of some training images with each other (n, n), and of other images with them
    (m, n); the features of both minus the training images' mean, and scaled."""

    def __init__(self, n: int, m: int, algebra: Algebra) -> None:
        self.algebra = algebra
        self.kernel, self.cross = np.zeros((n, n)), np.zeros((m, n))

    def start(self, x: Float32) -> None:
        """Begin the next group of features, from the training images (n, features)."""
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
        """Add the same features of some of the other images, (rows, features)."""
        other = x - self._shift - self._mean
        if self._scales is not None:
            other *= self._scales
        self.cross[rows] += other @ self._x.T


@dataclass(frozen=True)
class _Of:
    """Places, among the images read, of a draw's images: all, the fitted ones, the judging ones."""

    whole: Integers
    fit: Integers
    judge: Integers


def probe_concatenated(
    train: Source, test: Source, draws: Sequence[Draw], task: Task, tally: Tally
) -> None:
    """Fit and test; the result goes into `tally`, as for one token. Raises VitseeError: the inner
    products of one draw do not fit the memory."""
    for numbers in _in_memory(draws, len(tally.labels), task.memory):
        _probe(train, test, [draws[d] for d in numbers], numbers, task, tally)


def _in_memory(draws: Sequence[Draw], n_test: int, memory: int) -> Iterator[list[int]]:
    """Groups of draws that fit the memory together."""
    sizes = [8 * len(d) * (3 * len(d) + n_test) for d in draws]
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


def _probe(
    train: Source, test: Source, draws: Sequence[Draw], numbers: Sequence[int], task: Task,
    tally: Tally,
) -> None:  # fmt: skip
    n_test = len(tally.labels)
    every = union([draw.places for draw in draws])
    methods = [task.method(draw) for draw in draws]
    places = []
    for draw, method in zip(draws, methods, strict=True):
        held = draw.held_out & (method == "holdout")
        whole = np.searchsorted(every, draw.places)
        places.append(_Of(whole, whole[~held], whole[held]))
    final = [Products(len(p.whole), n_test, task.algebra) for p in places]
    trial = [Products(len(p.fit), len(p.judge), task.algebra) for p in places]
    per_token = 8 * train.dim * sum(3 * len(draw) for draw in draws)
    for part in train.groups(task.memory // 2 // per_token):
        x = np.concatenate([x.reshape(len(x), -1) for _, x in train.blocks(part, every)])
        for p, last, first, method in zip(places, final, trial, methods, strict=True):
            last.start(x[p.whole])
            if method == "holdout":
                first.start(x[p.fit])
                first.add(np.arange(len(p.judge)), x[p.judge])
        for rows, others in test.blocks(part, np.arange(n_test)):
            flat = others.reshape(len(others), -1)
            for products in final:
                products.add(rows, flat)
    labels = task.labels[every]
    for d, p, last, first, method in zip(numbers, places, final, trial, methods, strict=True):
        if method == "given":
            l2s: tuple[float, ...] = task.l2s
        else:
            l2s = (_choose(p, labels, last, first, method, task),)
        fitted = _fitted(last, labels[p.whole], l2s, task)
        for i, ranks in enumerate(fitted.ranks(last.cross, tally.labels)):
            tally.l2s[d, i, 0], tally.blind[d, i, 0] = l2s[i], fitted.blind
            right = tally.judged(ranks[np.newaxis])
            tally.count(d, slice(i, i + 1), 0, np.arange(n_test), right)


def _choose(
    p: _Of, labels: Integers, last: Products, first: Products, method: str, task: Task
) -> float:
    judge: HeldOut | LeaveOneOut
    if method == "loo":
        factors = from_kernel(last.kernel, labels[p.whole], task.n_classes, task.algebra)
        judge = LeaveOneOut(factors, GRID)
        judge.add(last.kernel, labels[p.whole])
    else:
        factors = from_kernel(first.kernel, labels[p.fit], task.n_classes, task.algebra)
        judge = HeldOut(factors, GRID)
        judge.add(first.cross, labels[p.judge])
    return judge.best()


def _fitted(products: Products, labels: Integers, l2s: tuple[float, ...], task: Task) -> Fitted:
    if len(l2s) > 1:
        return Fitted(l2s, from_kernel(products.kernel, labels, task.n_classes, task.algebra))
    kernel = products.kernel.copy()
    kernel[np.diag_indices_from(kernel)] += l2s[0]
    weights = np.asarray(np.linalg.solve(kernel, targets(labels, task.n_classes)), np.float64)
    mean = mean_target(np.bincount(labels, minlength=task.n_classes))
    return Fitted(l2s, Linear(weights, task.algebra.intercept(mean, len(labels), l2s[0])))
