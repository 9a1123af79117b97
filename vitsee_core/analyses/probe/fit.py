"""Probes are fitted by ridge regression of a group of tokens, in one pass over the training images,
or of all tokens side by side; or by stochastic gradient descent.

A ridge probe of all tokens side by side with more features than images is fitted by inner products:
the matrix of those of training images, and of test with training images, is a sum over tokens, so
tokens are read in groups and each byte once; the features (151,296 of a ViT-B/16 layer) are never
in memory all together.

By SGD a linear layer is trained, optionally on batch-normalised features. Walmer et al. 2023
(appendix, Table 6) train for 20 epochs and say no more. The rest is common practice for linear
probes of self-supervised models (Caron et al. 2021, He et al. 2022): cross-entropy, momentum 0.9,
no weight decay, learning rate lr x batch / 256 falling to 0 along a cosine, images shuffled every
epoch (a last, smaller batch left out); batch normalisation without scale and shift of its own,
tested with the mean and variance of all training images, which do not change while the layer is
trained. Images are features of a store, so none is augmented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.probe.settings import MOMENTUM, Block, Draw, Source, Training
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import (
    Algebra,
    Factors,
    Linear,
    Piece,
    SufficientStats,
    TrainingSums,
    from_kernel,
    mean_target,
    n_bytes,
    ranks,
    solve,
    targets,
)
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    import torch

Judges = Mapping[tuple[int, int], HeldOut | LeaveOneOut]  # of draws and tokens

ROWS = 4096
JUDGED = 1024  # images per thread
NORM_EPSILON = 1e-6  # of batch normalisation


@dataclass(frozen=True)
class Task:
    """Settings shared by all probes of a run.

    Attributes:
        labels: (n,) of the labelled training images.
        l2s: given values, all of which are reported; empty if `choose`, "holdout" or "loo",
            decides.
        jobs: threads.
        memory: bytes.
    """

    labels: Integers
    n_classes: int
    algebra: Algebra
    l2s: tuple[float, ...]
    choose: str
    jobs: int
    memory: int

    def method(self, draw: Draw) -> str:
        """How a draw's l2 is chosen: "given", "holdout" or "loo", the latter also if the draw has
        no images to hold out (one shot)."""
        if self.l2s:
            return "given"
        if self.choose == "loo" or draw.held_out.any():
            return self.choose
        return "loo"

    def judging(self, draw: Draw) -> Integers:
        """The places of the images that choose a draw's l2."""
        method = self.method(draw)
        if method == "given":
            return draw.places[:0]
        if method == "loo":
            return draw.places
        return draw.places[draw.held_out]

    @property
    def n_l2(self) -> int:
        """The number of l2 values that each probe is reported at."""
        return max(1, len(self.l2s))


@dataclass(frozen=True)
class Fitted:
    """A probe at one l2 or at several."""

    l2s: tuple[float, ...]
    model: Linear | Factors

    @property
    def blind(self) -> bool:
        """Whether it gives every image the same scores: its training features were all equal."""
        weights = self.model.weights if isinstance(self.model, Linear) else self.model.rhs
        return not weights.any()

    def ranks(self, x: Float, labels: Integers) -> Integers:
        """The number of classes ranked before each image's own, (l2s, m), from features (m, dim)
        and labels (m,); among equal scores the lower class comes first."""
        if isinstance(self.model, Linear):
            return ranks(self.model.scores(x), labels)[np.newaxis]
        z = self.model.coordinates(x)
        return np.stack([ranks(self.model.scores(z, l2), labels) for l2 in self.l2s])


def token_bytes(task: Task, draws: Sequence[Draw], dim: int) -> int:
    """The approximate memory of one token while it is probed, in bytes."""
    probes = sum(n_bytes(len(draw), dim, task.n_classes) for draw in draws)
    again = len(_looked_at_again(task, draws))
    return probes + (4 * again * dim if 4 * again * dim <= task.memory // 2 else 0)


def fit(
    source: Source, part: slice, draws: Sequence[Draw], task: Task
) -> list[list[Fitted]]:
    """A probe for each draw and token of the part of the source's tokens. The training images are
    read once; twice if those that choose l2 do not fit the memory."""
    tokens = len(range(*part.indices(source.n_tokens)))
    n = len(task.labels)
    methods = [task.method(draw) for draw in draws]
    fit_to, judged_by = [np.zeros((len(draws), n), bool) for _ in range(2)]
    for d, (draw, method) in enumerate(zip(draws, methods, strict=True)):
        held = draw.held_out & (method == "holdout")
        fit_to[d, draw.places[~held]] = True
        judged_by[d, draw.places[held]] = True

    def empty_stats() -> list[list[SufficientStats]]:
        return [
            [SufficientStats(source.dim, task.n_classes) for _ in range(tokens)]
            for _ in draws
        ]

    fitted = empty_stats()
    held_out = empty_stats()
    again = _looked_at_again(task, draws)
    keep = len(again) > 0 and 4 * len(again) * tokens * source.dim <= task.memory // 2
    kept = np.empty((len(again) if keep else 0, tokens, source.dim), np.float32)
    wanted = np.zeros(n, bool)
    wanted[again] = keep
    done = 0
    every = [*zip(fit_to, fitted, strict=True), *zip(judged_by, held_out, strict=True)]
    used = [(mask, sums) for mask, sums in every if mask.any()]

    def pieces() -> Iterator[tuple[SufficientStats, Piece]]:
        """The images whose sums are due, as they are read."""
        nonlocal done
        for places, x in source.blocks(part, union([draw.places for draw in draws])):
            for mask, sums in used:
                rows, some = _chosen(mask[places], x)
                labels = task.labels[places[rows]]
                for t in range(tokens if len(labels) else 0):
                    if (piece := sums[t].wait(some[:, t], labels)) is not None:
                        yield sums[t], piece
            _, some = _chosen(wanted[places], x)
            kept[done : done + len(some)] = some
            done += len(some)

    def summed(
        due: tuple[SufficientStats, Piece],
    ) -> tuple[SufficientStats, TrainingSums]:
        return due[0], due[0].sums_of(due[1])

    for sums, part_sums in thread_map(task.jobs)(summed, pieces()):
        sums.count(part_sums)
    pairs = [(d, t) for d in range(len(draws)) for t in range(tokens)]

    def read_again() -> Iterable[Block]:
        if keep:
            return _in_memory(again, kept)
        return source.blocks(part, again)

    judges = _judge(pairs, methods, fitted, task, read_again, draws)

    def finish(pair: tuple[int, int]) -> Fitted:
        d, t = pair
        if methods[d] == "given":
            if len(task.l2s) > 1:
                return Fitted(task.l2s, Factors.of(fitted[d][t], task.algebra))
            l2 = task.l2s[0]
        else:
            l2 = judges[pair].best()
        whole = fitted[d][t].joined(held_out[d][t])
        return Fitted((l2,), solve(whole, task.algebra, l2))

    probes = list(thread_map(task.jobs)(finish, pairs))
    return [probes[d * tokens : (d + 1) * tokens] for d in range(len(draws))]


def _judge(
    pairs: Sequence[tuple[int, int]],
    methods: Sequence[str],
    fitted: Sequence[Sequence[SufficientStats]],
    task: Task,
    read: Callable[[], Iterable[Block]],
    draws: Sequence[Draw],
) -> Judges:
    """Evaluate each probe at every l2, on held-out images or by leave-one-out."""
    pairs = [pair for pair in pairs if methods[pair[0]] != "given"]
    if not pairs:
        return {}

    def decompose(pair: tuple[int, int]) -> HeldOut | LeaveOneOut:
        d, t = pair
        judge = LeaveOneOut if methods[d] == "loo" else HeldOut
        return judge(Factors.of(fitted[d][t], task.algebra), GRID)

    judges = dict(zip(pairs, list(thread_map(task.jobs)(decompose, pairs)), strict=True))
    masks = np.zeros((len(draws), len(task.labels)), bool)
    for mask, draw in zip(masks, draws, strict=True):
        mask[task.judging(draw)] = True
    _look(judges, read(), masks, task)
    return judges


def _look(judges: Judges, blocks: Iterable[Block], masks: Mask, task: Task) -> None:
    """Show the judges the images in (draws, images) `masks`."""

    def pieces() -> Iterator[tuple[tuple[int, int], NDArray[np.float32], Integers]]:
        """Pieces of a fixed number of images whatever the number of threads, as the order of sums
        decides the last digits."""
        for places, x in blocks:
            chosen = [np.flatnonzero(mask[places]) for mask in masks]
            for d, t in judges:
                for start in range(0, len(chosen[d]), JUDGED):
                    rows = chosen[d][start : start + JUDGED]
                    yield (d, t), x[rows, t], task.labels[places[rows]]

    def look(
        piece: tuple[tuple[int, int], NDArray[np.float32], Integers],
    ) -> tuple[tuple[int, int], Any]:
        pair, x, labels = piece
        return pair, judges[pair].judged(x, labels)

    for pair, judged in thread_map(task.jobs)(look, pieces()):
        judges[pair].count(judged)


def _chosen(
    mask: Mask, x: NDArray[np.float32]
) -> tuple[slice | Integers, NDArray[np.float32]]:
    """The selected images of a block, and their features, which are not copied if all are."""
    if mask.all():
        return slice(None), x
    rows = np.flatnonzero(mask)
    return rows, x[rows]


def _in_memory(places: Integers, x: NDArray[np.float32]) -> Iterator[Block]:
    """The kept images in blocks larger than slabs, as each costs a division of the right-hand sides
    at every l2."""
    for start in range(0, len(places), ROWS):
        yield places[start : start + ROWS], x[start : start + ROWS]


def union(places: Sequence[Integers]) -> Integers:
    """All of these places once, ascending."""
    return np.unique(np.concatenate(places))


def _looked_at_again(task: Task, draws: Sequence[Draw]) -> Integers:
    """The places of the images that choose some draw's l2."""
    return union([task.judging(draw) for draw in draws])


class Products:
    """Inner products of some training images with each other (n, n), and of other images with them
    (m, n); the features of both minus the training images' mean, and scaled."""

    def __init__(self, n: int, m: int, algebra: Algebra) -> None:
        self.algebra = algebra
        self.kernel = np.zeros((n, n))
        self.cross = np.zeros((m, n))

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


def probe_concatenated(
    train: Source, test: Source, draws: Sequence[Draw], task: Task, n_test: int
) -> Iterator[tuple[int, Fitted, Float]]:
    """Fit a probe of all tokens side by side for each draw.

    Returns the number of the draw, its probe, and the features that it takes: the inner products of
    the test images with the draw's, (test images, training images). Raises VitseeError: the inner
    products of one draw do not fit the memory.
    """
    for numbers in _batches(draws, n_test, task.memory):
        yield from _side_by_side(
            train, test, [(d, draws[d]) for d in numbers], task, n_test
        )


def _batches(draws: Sequence[Draw], n_test: int, memory: int) -> Iterator[list[int]]:
    """Groups of draws, by number, that fit the memory together."""
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


def _side_by_side(
    train: Source,
    test: Source,
    draws: Sequence[tuple[int, Draw]],
    task: Task,
    n_test: int,
) -> Iterator[tuple[int, Fitted, Float]]:
    """The probes of some draws, which are in memory together; see `probe_concatenated`."""
    every = union([draw.places for _, draw in draws])
    methods = [task.method(draw) for _, draw in draws]
    places = []  # of a draw's images among those read: all, the fitted and the judging ones
    for (_, draw), method in zip(draws, methods, strict=True):
        held = draw.held_out & (method == "holdout")
        whole = np.searchsorted(every, draw.places)
        places.append((whole, whole[~held], whole[held]))
    final = [Products(len(whole), n_test, task.algebra) for whole, *_ in places]
    trial = [
        Products(len(fitted), len(judge), task.algebra) for _, fitted, judge in places
    ]
    per_token = 8 * train.dim * sum(3 * len(draw) for _, draw in draws)
    for part in train.groups(task.memory // 2 // per_token):
        x = np.concatenate([x.reshape(len(x), -1) for _, x in train.blocks(part, every)])
        for (whole, fitted, judge), last, first, method in zip(
            places, final, trial, methods, strict=True
        ):
            last.start(x[whole])
            if method == "holdout":
                first.start(x[fitted])
                first.add(np.arange(len(judge)), x[judge])
        for rows, others in test.blocks(part, np.arange(n_test)):
            flat = others.reshape(len(others), -1)
            for products in final:
                products.add(rows, flat)
    labels = task.labels[every]
    for (d, _), (whole, fitted, judge), last, first, method in zip(
        draws, places, final, trial, methods, strict=True
    ):
        l2s = task.l2s
        if method == "loo":
            factors = from_kernel(
                last.kernel, labels[whole], task.n_classes, task.algebra
            )
            loo = LeaveOneOut(factors, GRID)
            loo.add(last.kernel, labels[whole])
            l2s = (loo.best(),)
        elif method == "holdout":
            factors = from_kernel(
                first.kernel, labels[fitted], task.n_classes, task.algebra
            )
            held_out = HeldOut(factors, GRID)
            held_out.add(first.cross, labels[judge])
            l2s = (held_out.best(),)
        yield d, _of_products(last, labels[whole], l2s, task), last.cross


def _of_products(
    products: Products, labels: Integers, l2s: tuple[float, ...], task: Task
) -> Fitted:
    """The probe of the images whose inner products these are, at each l2."""
    if len(l2s) > 1:
        return Fitted(
            l2s, from_kernel(products.kernel, labels, task.n_classes, task.algebra)
        )
    kernel = products.kernel.copy()
    kernel[np.diag_indices_from(kernel)] += l2s[0]
    weights = np.asarray(
        np.linalg.solve(kernel, targets(labels, task.n_classes)), np.float64
    )
    mean = mean_target(np.bincount(labels, minlength=task.n_classes))
    return Fitted(l2s, Linear(weights, task.algebra.intercept(mean, len(labels), l2s[0])))


def train_linear(
    x: Float32, labels: Integers, n_classes: int, training: Training, seed: int
) -> Linear | None:
    """The layer trained on x (n, dim) with labels (n,), normalisation folded in; None if training
    diverged. seed: of the order of images and the initial weights."""
    from vitsee_core.runtime.device import precision_context, resolve_device

    device = resolve_device(training.device)
    with precision_context(device, "fp32"):
        return _trained(x, labels, n_classes, training, seed, device)


def _trained(
    x: Float32,
    labels: Integers,
    n_classes: int,
    training: Training,
    seed: int,
    device: torch.device,
) -> Linear | None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    features = torch.from_numpy(x).to(device)
    classes = torch.from_numpy(labels).to(device)
    n, dim = features.shape
    batch = min(training.batch, n)
    weights = 0.01 * torch.randn(dim, n_classes, generator=generator)
    weights = weights.to(device).requires_grad_()
    bias = torch.zeros(n_classes, device=device, requires_grad=True)
    norm = torch.nn.BatchNorm1d(dim, affine=False, eps=NORM_EPSILON).to(device)
    optimiser = torch.optim.SGD([weights, bias], lr=1.0, momentum=MOMENTUM)
    n_steps = max(1, n // batch)
    for epoch in range(training.epochs):
        order = torch.randperm(n, generator=generator)
        for step in range(n_steps):
            done = (epoch + step / n_steps) / training.epochs
            rate = training.lr * batch / 256 * (1 + math.cos(math.pi * done)) / 2
            optimiser.param_groups[0]["lr"] = rate
            rows = order[step * batch : (step + 1) * batch].to(device)
            inputs = norm(features[rows]) if training.batch_norm else features[rows]
            loss = torch.nn.functional.cross_entropy(
                inputs @ weights + bias, classes[rows]
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    w = weights.detach().cpu().numpy().astype(np.float64)
    b = bias.detach().cpu().numpy().astype(np.float64)
    if not (np.isfinite(w).all() and np.isfinite(b).all()):
        return None
    if training.batch_norm:
        w /= np.sqrt(x.var(axis=0, dtype=np.float64) + NORM_EPSILON)[:, np.newaxis]
        b -= x.mean(axis=0, dtype=np.float64) @ w
    return Linear(w, b)


def fit_sgd(
    source: Source, part: slice, draws: Sequence[Draw], task: Task, training: Training
) -> list[list[Fitted | None]]:
    """A trained layer for each draw and token of the part; None if training diverged. Raises
    VitseeError: batch normalisation of a single image."""
    if training.batch_norm and min(map(len, draws)) < 2:
        raise VitseeError(
            "--batch-norm needs the variance of at least 2 training images; found 1"
        )
    places = union([draw.places for draw in draws])
    tokens = range(*part.indices(source.n_tokens))
    x = np.empty((len(tokens), len(places), source.dim), np.float32)
    done = 0
    for _, block in source.blocks(part, places):
        x[:, done : done + len(block)] = block.swapaxes(0, 1)
        done += len(block)

    def train(draw: Draw, token: int) -> Fitted | None:
        rows = np.searchsorted(places, draw.places)
        labels = task.labels[draw.places]
        linear = train_linear(x[token][rows], labels, task.n_classes, training, draw.seed)
        return None if linear is None else Fitted((math.nan,), linear)

    return [[train(draw, token) for token in range(len(tokens))] for draw in draws]
