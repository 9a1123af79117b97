"""The fits of probes to a group of tokens: ridge regression, and stochastic gradient
descent.

Ridge probes of several tokens are fitted in one pass over the training images; those of
all tokens side by side are fitted in `prober`.

By SGD a linear layer is trained, optionally on batch-normalised features. Walmer et al.
2023 (appendix, Table 6) train for 20 epochs and say no more. The rest is common practice
for linear probes of self-supervised models (Caron et al. 2021, He et al. 2022):
cross-entropy, momentum 0.9, no weight decay, learning rate lr x batch / 256 falling to 0
along a cosine, images shuffled every epoch (a last, smaller batch left out); batch
normalisation without scale and shift of its own, tested with the mean and variance of all
training images, which do not change while the layer is trained. Images are features of a
store, so none is augmented.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.probe.inputs import Block, Draw, Source
from vitsee_core.analyses.probe.options import MOMENTUM, Training
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import (
    Algebra,
    Factors,
    Linear,
    Piece,
    SufficientStats,
    TrainingSums,
    n_bytes,
    rank_true_classes,
    solve,
)
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    import torch


# (number of a draw, number of a token in its group): one probe.
ProbeKey = tuple[int, int]
# The l2 criterion of each probe whose l2 is not given.
Criteria = Mapping[ProbeKey, HeldOut | LeaveOneOut]

# Images per block of features in memory. Larger than a slab of a store, as each block
# costs a division of the right-hand sides at every l2.
IMAGES_PER_BLOCK = 4096
# Images that one thread evaluates at a time. Fixed, whatever the number of threads, as the
# order of sums decides the last digits.
IMAGES_PER_PIECE = 1024
NORM_EPSILON = 1e-6  # of batch normalisation


@dataclass(frozen=True)
class Task:
    """Settings shared by all probes of a run.

    Attributes:
        labels: (n,) classes of the labelled training images.
        n_classes: number of classes of the data set.
        algebra: treatment of the intercept and of feature scales.
        l2s: given values, all of which are reported; empty if `choose` decides.
        choose: "holdout" or "loo" (leave-one-out), how l2 is chosen.
        jobs: threads.
        memory: bytes to stay within.
    """

    labels: Integers
    n_classes: int
    algebra: Algebra
    l2s: tuple[float, ...]
    choose: str
    jobs: int
    memory: int

    def method(self, draw: Draw) -> str:
        """Return how a draw's l2 is chosen: "given", "holdout" or "loo".

        It is "loo" also if the draw has no images to hold out (one shot).
        """
        if self.l2s:
            return "given"
        if self.choose == "loo" or draw.held_out.any():
            return self.choose
        return "loo"

    def choosing_indices(self, draw: Draw) -> Integers:
        """Return the indices of the training images that choose a draw's l2."""
        method = self.method(draw)
        if method == "given":
            return draw.indices[:0]
        if method == "loo":
            return draw.indices
        return draw.indices[draw.held_out]

    @property
    def n_l2(self) -> int:
        """The number of l2 values that each probe is reported at."""
        return max(1, len(self.l2s))


class Fitted(NamedTuple):
    """A fitted probe.

    Attributes:
        l2s: the l2 values that it can be evaluated at; (NaN,) for SGD.
        model: weights at the one l2, or a decomposition that gives the weights at several.
    """

    l2s: tuple[float, ...]
    model: Linear | Factors

    @property
    def blind(self) -> bool:
        """Whether it gives every image the same scores, as its training features were all equal."""
        weights = self.model.weights if isinstance(self.model, Linear) else self.model.xty
        return not weights.any()

    def ranks(self, x: Float, labels: Integers) -> Integers:
        """Return the number of classes ranked before each image's own class, (l2s, m).

        Among equal scores the lower class comes first.

        Args:
            x: (m, dim) features.
            labels: (m,) classes.
        """
        if isinstance(self.model, Linear):
            return rank_true_classes(self.model.scores(x), labels)[np.newaxis]
        # Rotated once; in these coordinates each further l2 costs one small product.
        z = self.model.coordinates(x)
        return np.stack(
            [rank_true_classes(self.model.scores(z, l2), labels) for l2 in self.l2s]
        )


def token_bytes(task: Task, draws: Sequence[Draw], dim: int) -> int:
    """Return the approximate memory of one token while it is probed, in bytes."""
    n_bytes_probes = sum(n_bytes(len(draw), dim, task.n_classes) for draw in draws)
    n_choosing = len(_all_choosing_indices(task, draws))
    # The images that choose l2 stay in memory only if they fit half of it, see `fit`.
    n_bytes_choosing = 4 * n_choosing * dim
    if n_bytes_choosing > task.memory // 2:
        return n_bytes_probes
    return n_bytes_probes + n_bytes_choosing


def fit(
    source: Source, token_slice: slice, draws: Sequence[Draw], task: Task
) -> list[list[Fitted]]:
    """Fit a ridge probe for each draw and token of a slice of the source's tokens.

    The training images are read once; twice if those that choose l2 do not fit the memory.

    Returns:
        For each draw, the probes of the tokens.
    """
    n_tokens = len(range(*token_slice.indices(source.n_tokens)))
    methods = [task.method(draw) for draw in draws]
    choosing = _all_choosing_indices(task, draws)
    n_bytes_choosing = 4 * len(choosing) * n_tokens * source.dim
    sums = _Sums(source.dim, n_tokens, draws, methods, task)
    if 0 < n_bytes_choosing <= task.memory // 2:
        sums.keep_features(choosing)
    images = union([draw.indices for draw in draws])
    sums.collect(source.blocks(token_slice, images))

    def choosing_blocks() -> Iterable[Block]:
        """Return the images that choose l2, from memory if they were kept there."""
        if sums.kept is not None:
            return _blocks_in_memory(choosing, sums.kept)
        return source.blocks(token_slice, choosing)

    keys = [(d, t) for d in range(len(draws)) for t in range(n_tokens)]
    chosen_keys = [(d, t) for d, t in keys if methods[d] != "given"]
    criteria: Criteria = {}
    if chosen_keys:
        criteria = _evaluate_l2s(
            chosen_keys, methods, sums.fitted, task, choosing_blocks(), draws
        )

    def finish(key: ProbeKey) -> Fitted:
        """Return one probe: at its chosen l2 fitted to all training images of the draw."""
        d, t = key
        if methods[d] == "given":
            if len(task.l2s) > 1:
                return Fitted(
                    task.l2s, Factors.from_stats(sums.fitted[d][t], task.algebra)
                )
            l2 = task.l2s[0]
        else:
            l2 = criteria[key].best()
        all_images = sums.fitted[d][t].merge(sums.held_out[d][t])
        return Fitted((l2,), solve(all_images, task.algebra, l2))

    probes = list(thread_map(task.jobs)(finish, keys))
    return [probes[d * n_tokens : (d + 1) * n_tokens] for d in range(len(draws))]


class _Sums:
    """Sums over training images, for each draw and token, collected in one pass.

    Attributes:
        fitted: [draw][token], sums over the images that a trial probe is fitted to; over
            all of a draw's images if none is held out.
        held_out: [draw][token], sums over the images that choose l2 and are not fitted to.
        kept: (kept images, tokens, dim) features in memory; None if none are kept.
    """

    def __init__(
        self,
        dim: int,
        n_tokens: int,
        draws: Sequence[Draw],
        methods: Sequence[str],
        task: Task,
    ) -> None:
        """Start with empty sums for each draw and token, and decide which images they are
        over.

        methods: how each draw's l2 is chosen.
        """
        self.dim = dim
        self.n_tokens = n_tokens
        self.task = task
        n_images = len(task.labels)
        self.kept: NDArray[np.float32] | None = None
        self._is_kept = np.zeros(n_images, bool)
        self.fitted: list[list[SufficientStats]] = []
        self.held_out: list[list[SufficientStats]] = []
        # Pairs of a mask over the training images and the sums (one per token) that they
        # go to.
        self._targets: list[tuple[Mask, list[SufficientStats]]] = []
        held_out_targets = []
        for draw, method in zip(draws, methods, strict=True):
            is_held_out = draw.held_out & (method == "holdout")
            self.fitted.append(self._empty())
            self.held_out.append(self._empty())
            fit_mask = np.zeros(n_images, bool)
            fit_mask[draw.indices[~is_held_out]] = True
            self._targets.append((fit_mask, self.fitted[-1]))
            if is_held_out.any():
                held_out_mask = np.zeros(n_images, bool)
                held_out_mask[draw.indices[is_held_out]] = True
                held_out_targets.append((held_out_mask, self.held_out[-1]))
        self._targets += held_out_targets

    def _empty(self) -> list[SufficientStats]:
        """Return sums of no images, one per token."""
        return [
            SufficientStats(self.dim, self.task.n_classes) for _ in range(self.n_tokens)
        ]

    def keep_features(self, indices: Integers) -> None:
        """Keep the features of these images in `kept`, in ascending order, while they
        are read."""
        self.kept = np.empty((len(indices), self.n_tokens, self.dim), np.float32)
        self._is_kept[indices] = True

    def collect(self, blocks: Iterable[Block]) -> None:
        """Add all blocks of training images."""

        def summed(
            due: tuple[SufficientStats, Piece],
        ) -> tuple[SufficientStats, TrainingSums]:
            """Return the sums over a piece, beside those that they are to be added to."""
            stats, piece = due
            return stats, stats.compute_sums(piece)

        # The products run in threads; adding happens here, in the order of the images.
        for stats, piece_sums in thread_map(self.task.jobs)(summed, self._due(blocks)):
            stats.add_sums(piece_sums)

    def _due(self, blocks: Iterable[Block]) -> Iterator[tuple[SufficientStats, Piece]]:
        """Yield the images whose sums are due, beside the statistics that they belong
        to."""
        n_kept = 0
        for indices, x in blocks:
            for mask, stats in self._targets:
                rows, features = _selected(mask[indices], x)
                labels = self.task.labels[indices[rows]]
                if len(labels) == 0:
                    continue
                for t in range(self.n_tokens):
                    piece = stats[t].queue(features[:, t], labels)
                    if piece is not None:
                        yield stats[t], piece
            if self.kept is not None:
                _, features = _selected(self._is_kept[indices], x)
                self.kept[n_kept : n_kept + len(features)] = features
                n_kept += len(features)


def _evaluate_l2s(
    keys: Sequence[ProbeKey],
    methods: Sequence[str],
    fitted: Sequence[Sequence[SufficientStats]],
    task: Task,
    blocks: Iterable[Block],
    draws: Sequence[Draw],
) -> Criteria:
    """Evaluate probes at every l2 of the grid, on held-out images or by leave-one-out.

    Args:
        keys: the probes whose l2 is chosen.
        methods: how each draw's l2 is chosen.
        fitted: [draw][token], sums over the images that the probe is fitted to.
        task: settings of the fits.
        blocks: the images that choose some draw's l2.
        draws: the draws of training images.
    """

    def criterion(key: ProbeKey) -> HeldOut | LeaveOneOut:
        """Return the criterion of one probe, before it has met an image."""
        d, t = key
        factors = Factors.from_stats(fitted[d][t], task.algebra)
        if methods[d] == "loo":
            return LeaveOneOut(factors, GRID)
        return HeldOut(factors, GRID)

    decomposed = list(thread_map(task.jobs)(criterion, keys))
    criteria = dict(zip(keys, decomposed, strict=True))
    masks = np.zeros((len(draws), len(task.labels)), bool)  # (draws, images)
    for mask, draw in zip(masks, draws, strict=True):
        mask[task.choosing_indices(draw)] = True

    def pieces() -> Iterator[tuple[ProbeKey, NDArray[np.float32], Integers]]:
        """Yield (probe, features (m, dim), labels (m,)) of at most `IMAGES_PER_PIECE`
        images."""
        for indices, x in blocks:
            rows_of_draws = [np.flatnonzero(mask[indices]) for mask in masks]
            for d, t in criteria:
                for start in range(0, len(rows_of_draws[d]), IMAGES_PER_PIECE):
                    rows = rows_of_draws[d][start : start + IMAGES_PER_PIECE]
                    yield (d, t), x[rows, t], task.labels[indices[rows]]

    def evaluate(
        piece: tuple[ProbeKey, NDArray[np.float32], Integers],
    ) -> tuple[ProbeKey, Any]:
        """Return the contribution of a piece to its probe's criterion."""
        key, x, labels = piece
        return key, criteria[key].contribution(x, labels)

    for key, contribution in thread_map(task.jobs)(evaluate, pieces()):
        criteria[key].add_contribution(contribution)
    return criteria


def _selected(
    mask: Mask, x: NDArray[np.float32]
) -> tuple[slice | Integers, NDArray[np.float32]]:
    """Return the selected rows of a block and their features, which are not copied if
    all are."""
    if mask.all():
        return slice(None), x
    rows = np.flatnonzero(mask)
    return rows, x[rows]


def _blocks_in_memory(indices: Integers, x: NDArray[np.float32]) -> Iterator[Block]:
    """Yield features that are in memory in blocks, like those that a source reads."""
    for start in range(0, len(indices), IMAGES_PER_BLOCK):
        stop = start + IMAGES_PER_BLOCK
        yield indices[start:stop], x[start:stop]


def union(index_arrays: Sequence[Integers]) -> Integers:
    """Return all of these indices once, ascending."""
    return np.unique(np.concatenate(index_arrays))


def _all_choosing_indices(task: Task, draws: Sequence[Draw]) -> Integers:
    """Return the indices of the training images that choose some draw's l2, ascending."""
    return union([task.choosing_indices(draw) for draw in draws])


def fit_sgd(
    source: Source,
    token_slice: slice,
    draws: Sequence[Draw],
    task: Task,
    training: Training,
) -> list[list[Fitted | None]]:
    """Train a layer for each draw and token of a slice of the source's tokens.

    Returns:
        For each draw, the probes of the tokens; None in place of a probe whose training
        diverged.

    Raises:
        VitseeError: batch normalisation of a single image.
    """
    if training.batch_norm and min(map(len, draws)) < 2:
        raise VitseeError(
            "--batch-norm needs the variance of at least 2 training images; found 1"
        )
    images = union([draw.indices for draw in draws])
    tokens = range(*token_slice.indices(source.n_tokens))
    # Token first: SGD passes over the images of one token many times, which should lie
    # together.
    x = np.empty((len(tokens), len(images), source.dim), np.float32)
    n_read = 0
    for _, block in source.blocks(token_slice, images):
        x[:, n_read : n_read + len(block)] = block.swapaxes(0, 1)
        n_read += len(block)

    def train(draw: Draw, token: int) -> Fitted | None:
        """Return the probe of one token; None if its training diverged."""
        rows = np.searchsorted(images, draw.indices)
        labels = task.labels[draw.indices]
        linear = train_linear(x[token][rows], labels, task.n_classes, training, draw.seed)
        return None if linear is None else Fitted((math.nan,), linear)

    return [[train(draw, token) for token in range(len(tokens))] for draw in draws]


def train_linear(
    x: Float32, labels: Integers, n_classes: int, training: Training, seed: int
) -> Linear | None:
    """Train a linear layer, and return it with its batch normalisation folded in.

    Args:
        x: (n, dim) features.
        labels: (n,) classes.
        n_classes: number of outputs.
        training: epochs, learning rate and so on.
        seed: seed of the initial weights and of the order of images.

    Returns:
        The layer; None if training diverged.
    """
    from vitsee_core.runtime.device import precision_context, resolve_device

    device = resolve_device(training.device)
    with precision_context(device, "fp32"):
        return _train_on_device(x, labels, n_classes, training, seed, device)


def _train_on_device(
    x: Float32,
    labels: Integers,
    n_classes: int,
    training: Training,
    seed: int,
    device: torch.device,
) -> Linear | None:
    """Do the work of `train_linear` on a torch device, in the precision that is set."""
    import torch

    # Random numbers come from the CPU, so that every device draws the same.
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
            # Cosine schedule (Loshchilov & Hutter 2017) over all steps, from lr x batch /
            # 256 to 0.
            progress = (epoch + step / n_steps) / training.epochs
            rate = training.lr * batch / 256 * (1 + math.cos(math.pi * progress)) / 2
            optimiser.param_groups[0]["lr"] = rate
            rows = order[step * batch : (step + 1) * batch].to(device)
            inputs = features[rows]
            if training.batch_norm:
                inputs = norm(inputs)
            outputs = inputs @ weights + bias
            loss = torch.nn.functional.cross_entropy(outputs, classes[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    w = weights.detach().cpu().numpy().astype(np.float64)
    b = bias.detach().cpu().numpy().astype(np.float64)
    if not (np.isfinite(w).all() and np.isfinite(b).all()):
        return None
    if training.batch_norm:
        # ((x - mean) / std) w + b = x (w / std) + (b - mean (w / std))
        w /= np.sqrt(x.var(axis=0, dtype=np.float64) + NORM_EPSILON)[:, np.newaxis]
        b -= x.mean(axis=0, dtype=np.float64) @ w
    return Linear(w, b)
