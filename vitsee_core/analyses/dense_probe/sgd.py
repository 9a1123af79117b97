"""The linear heads of Siméoni et al. 2025 (DINOv3), by their own optimiser, on an endless stream of
batches of stored tokens.

Batch norm (its statistics over the cells on images), a 1 x 1 convolution whose weights begin as
N(0, 0.01), AdamW on batches of 16 images, the rate of one cycle after a warm-up. As released:

- classes: dropout of whole channels (0.1), cross-entropy of scores interpolated to the pixels,
  summed over those with a class and divided by all; rate 1e-3, decay 1e-3, warm-up 1,500 of 40,000
  steps;
- depths: 256 outputs, relu(.) + 0.1 normalised, which weigh as many depths spread evenly over the
  range; interpolated to pixels; sqrt(var(g) + 0.15 mean(g)^2) of g = log p - log d (without the
  variance for 100 steps); rate 3e-4, decay 1e-4, gradients clipped at 35, warm-up 12,800 of 38,400
  steps, in which AdamW has no momentum.

With fewer steps the warm-up is shorter in proportion. In float32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitsee_core.analyses.dense_probe.linear import count_truth
from vitsee_core.analyses.dense_probe.metrics import Depth
from vitsee_core.analyses.dense_probe.pixels import Head, LinearScores, Pixels, Scores
from vitsee_core.analyses.dense_probe.solvers import BATCH, Solver
from vitsee_core.analyses.dense_probe.work import (
    HeadKey,
    Patches,
    SplitImages,
    Trained,
    blind_heads,
    counted_rows,
)
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab

NO_CLASS = -100
N_BINS = 256
LEAST_SHARE = 0.1
FLOOR = 1e-3  # added to depths before their logarithm
WITHOUT_VARIANCE = 100  # steps


@dataclass(frozen=True)
class Batch:
    """Some training images.

    Attributes:
        tokens: (images, rows, cols, dim).
        on_image: (images, rows, cols) which cells are not beside the image.
        labels: (images, height, width) indices of classes, `NO_CLASS` for none, or depths, NaN for
            none.
        down, across: (images, height, rows) and (images, width, cols), see `pixels.Pixels`.
    """

    tokens: Tensor
    on_image: Tensor
    labels: Tensor
    down: Tensor
    across: Tensor

    def interpolated(self, image: int, scores: Tensor) -> Tensor:
        """The scores of an image at its pixels, (n, height, width), from those of cells (rows,
        cols, n)."""
        return self.down[image] @ scores.permute(2, 0, 1) @ self.across[image].T


class LinearProbe(nn.Module):
    """Dropout of channels, batch norm, and a linear map of each cell, to be trained. `random` draws
    the weights and the dropout, on the CPU."""

    def __init__(
        self, dim: int, n_outputs: int, dropout: float, random: torch.Generator
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.dim = dim
        self.random = random
        self.norm = nn.BatchNorm1d(dim)
        weights = torch.empty(n_outputs, dim).normal_(0, 0.01, generator=random)
        self.weight = nn.Parameter(weights)
        self.bias = nn.Parameter(torch.zeros(n_outputs))

    def forward(self, batch: Batch) -> Tensor:
        """The scores (images, rows, cols, n), 0 for cells beside the image."""
        tokens = batch.tokens
        if self.dropout:
            share = 1 - self.dropout
            shape = (len(tokens), 1, 1, self.dim)
            kept = torch.empty(shape).bernoulli_(share, generator=self.random) / share
            tokens = tokens * kept.to(tokens.device)
        own = functional.linear(self.norm(tokens[batch.on_image]), self.weight, self.bias)
        scores = own.new_zeros(*batch.on_image.shape, own.shape[-1])
        scores[batch.on_image] = own
        return scores

    def scores(self) -> LinearScores:
        """The trained linear map of features as they are stored."""
        trained = (self.norm.weight, self.norm.bias, self.weight, self.bias)
        scale, offset, matrix, bias = (_numbers(own) for own in trained)
        mean, var = (
            _numbers(own) for own in (self.norm.running_mean, self.norm.running_var)
        )
        scale = scale / np.sqrt(var + self.norm.eps)
        found = (matrix * scale).T
        return LinearScores(found, bias + matrix @ offset - mean @ found)


@dataclass(frozen=True)
class BinScores:
    """Depths (rows, cols, 1) from linear scores of bins, at n depths in metres."""

    scores: LinearScores
    bins: Float

    def __call__(self, tokens: Float) -> Float:
        shares = np.maximum(self.scores(tokens), 0) + LEAST_SHARE
        return (shares @ self.bins / shares.sum(-1))[..., None]


@dataclass(frozen=True)
class ClassRecipe:
    """The training of probes of classes.

    Attributes:
        rate, decay: learning rate and weight decay of AdamW.
        second: the second of its betas.
        clip: largest norm of the gradient.
    """

    n_outputs: int
    dropout: float = 0.1
    rate: float = 1e-3
    decay: float = 1e-3
    second: float = 0.999
    clip: float = math.inf

    def schedule(self, step: int, steps: int) -> tuple[float, float]:
        """The share of the rate, and the first of AdamW's betas. The released loop does not advance
        the rate after its first step."""
        at = max(step - 1, 0)
        warm_up = round(steps * 1500 / 40_000)
        if at < warm_up:
            return (1 - (1 - at / warm_up) * (1 - 1e-6)) * (1 - at / steps), 0.9
        return _cosine(1, 0, (at + 1) / steps), 0.9

    def backward(self, batch: Batch, scores: Tensor, step: int) -> float:
        """The loss; fills the gradient of the scores, a leaf. Image by image: pixels of all classes
        of a whole batch may not fit into memory."""
        total = 0.0
        for image, labels in enumerate(batch.labels):
            pixels = batch.interpolated(image, scores[image])[None]
            loss = functional.cross_entropy(
                pixels, labels[None], ignore_index=NO_CLASS, reduction="sum"
            )
            loss = loss / batch.labels.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def finished(self, scores: LinearScores) -> Scores:
        """The scores that the trained probe gives to cells."""
        return scores


@dataclass(frozen=True)
class DepthRecipe:
    """The training of probes of depths within `limits` (metres); see `ClassRecipe`."""

    limits: tuple[float, float]
    n_outputs: int = N_BINS
    dropout: float = 0.0
    rate: float = 3e-4
    decay: float = 1e-4
    second: float = 0.99
    clip: float = 35.0

    def schedule(self, step: int, steps: int) -> tuple[float, float]:
        warm_up = round(steps * 12_800 / 38_400)
        if step < warm_up:
            return 1e-3 + _cosine(1, 0, step / steps) * step / warm_up, 0.0
        momentum = _cosine(0.85, 0.95, (step - warm_up) / (steps - warm_up))
        return _cosine(1, 1 / 25 / 1000, (step + 1) / steps), momentum

    def backward(self, batch: Batch, scores: Tensor, step: int) -> float:
        bins = torch.linspace(*self.limits, self.n_outputs, device=scores.device)
        shares = torch.relu(scores) + LEAST_SHARE
        depths = (shares @ bins / shares.sum(-1))[..., None]
        found = torch.stack(
            [batch.interpolated(i, own)[0] for i, own in enumerate(depths)]
        )
        there = torch.isfinite(batch.labels)
        g = torch.log(found[there] + FLOOR) - torch.log(batch.labels[there] + FLOOR)
        square = 0.15 * g.mean() ** 2
        if step >= WITHOUT_VARIANCE and len(g) > 1:
            square = square + g.var()
        loss = torch.sqrt(square) if square > 0 else square.abs()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def finished(self, scores: LinearScores) -> Scores:
        return BinScores(scores, np.linspace(*self.limits, self.n_outputs))


Recipe = ClassRecipe | DepthRecipe


def train(
    batches: Iterator[Batch],
    dim: int,
    recipe: Recipe,
    steps: int,
    seed: int,
    device: torch.device,
) -> Iterator[float | Scores]:
    """The loss of every step, then the scores of the trained probe. Takes `steps` batches, on
    `device`; seed: of weights and dropout."""
    random = torch.Generator().manual_seed(seed)
    probe = LinearProbe(dim, recipe.n_outputs, recipe.dropout, random).to(device)
    optimizer = torch.optim.AdamW(
        probe.parameters(), recipe.rate, (0.9, recipe.second), weight_decay=recipe.decay
    )
    for step in range(steps):
        batch = next(batches)
        share, momentum = recipe.schedule(step, steps)
        group = optimizer.param_groups[0]
        group["lr"], group["betas"] = recipe.rate * share, (momentum, recipe.second)
        optimizer.zero_grad()
        scores = probe(batch)
        leaf = scores.detach().requires_grad_()
        loss = recipe.backward(batch, leaf, step)
        scores.backward(leaf.grad)
        nn.utils.clip_grad_norm_(probe.parameters(), recipe.clip)
        optimizer.step()
        yield loss
    yield recipe.finished(probe.scores())


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (math.cos(math.pi * share) + 1)


def _numbers(values: Tensor | None) -> Float:
    assert values is not None
    return values.detach().double().cpu().numpy()


log = logging.getLogger(__name__)


def train_sgd(part: SplitImages, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of the sites one after the other, and the baselines of every grid.

    Raises:
        VitseeError: no pixel counts, or the loss is not finite.
    """
    from vitsee_core.runtime.device import resolve_device

    device = resolve_device(execution.device)
    task = part.task
    # As in the protocol, training sees the model's input.
    part = replace(part, truth=replace(part.truth, resolution="input"))
    places = count_truth(part, execution)
    classes = np.flatnonzero(next(iter(places.values())).totals)
    heads: dict[HeadKey, Head] = {}
    losses: dict[str, float] = {}
    recipe: Recipe = ClassRecipe(len(classes))
    if isinstance(task, Depth):
        recipe = DepthRecipe(task.limits)
    for site, features in part.features.items():
        stream = _Stream(part, features, part.grids[site], classes, execution)
        last: list[float] = []
        for found in train(
            stream.batches(device),
            features.dim,
            recipe,
            solver.steps,
            execution.seed,
            device,
        ):
            if not isinstance(found, float):
                heads[HeadKey(site)] = task.head(classes, found)
            elif not np.isfinite(found):
                raise VitseeError(
                    f"{part.store.label}: the loss of {site} is not finite any more"
                )
            else:
                last = [*last[-9:], found]
                execution.progress.advance(BATCH)
        losses[site] = float(np.mean(last))
    notes: dict[str, Any] = {"loss_of_the_last_steps": losses}
    if not isinstance(task, Depth):
        notes["n_trained"] = len(classes)
    return Trained(heads | blind_heads(task, places), notes)


_Example = tuple[
    Float32, Pixels
]  # tokens (cells, dim), and the pixels of the model's input


@dataclass(frozen=True)
class _Stream:
    """The training images in random order, over and over. Where they do not all fit into memory,
    some slabs at a time are kept: their images are in random order, and so are such groups."""

    part: SplitImages
    features: Patches
    grid: str
    classes: Integers
    execution: Execution

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Batches without an end."""
        examples = self._examples()
        while True:
            yield self._batch(list(islice(examples, BATCH)), device)

    def _examples(self) -> Iterator[_Example]:
        rng = np.random.default_rng((self.execution.seed, 5))
        groups = self._groups()
        if len(groups) > 1:
            log.info(
                "%s: of %s, %d groups of slabs are in memory in turn (more --memory, or fewer "
                "--images, are faster)",
                *(self.part.store.label, self.features.parts[-1].site.name, len(groups)),
            )
        kept = self._load(groups[0]) if len(groups) == 1 else None
        while True:
            for group in rng.permutation(len(groups)):
                examples = kept or self._load(groups[group])
                for i in rng.permutation(len(examples)):
                    yield examples[i]

    def _groups(self) -> list[list[Slab]]:
        """Group the slabs with training images, as many together as half of the memory holds."""
        mask = self.part.truth.mask
        store = self.part.store
        cells = self.features.grid[0] * self.features.grid[1]
        pixels = int(np.prod(store.manifest.transform["input_size"][1:]))
        label = 4 if isinstance(self.part.task, Depth) else 1
        each = 4 * cells * self.features.dim + label * pixels
        room = max(1, self.execution.budget // 2 // each)
        groups: list[list[Slab]] = []
        n = room
        for slab in store.slabs():
            own = int(mask[slab.rows].sum())
            if not own:
                continue
            if n + own > room and (n or not groups):
                groups.append([])
                n = 0
            groups[-1].append(slab)
            n += own
        return groups

    def _load(self, slabs: list[Slab]) -> list[_Example]:
        found = []
        for slab in slabs:
            tokens = self.features.of_slab(slab)
            for row, own in zip(counted_rows(slab), tokens, strict=True):
                if self.part.truth.mask[row]:
                    found.append((own, self.part.truth.pixels(row)[self.grid]))
        return found

    def _batch(self, examples: list[_Example], device: torch.device) -> Batch:
        def tensor(arrays: list[Any], kind: Any = np.float32) -> torch.Tensor:
            return torch.from_numpy(np.stack(arrays).astype(kind)).to(device)

        every = [pixels for _, pixels in examples]
        shown = [np.outer(own.down.sum(0) > 0, own.across.sum(0) > 0) for own in every]
        if isinstance(self.part.task, Depth):
            labels = tensor([own.labels for own in every])
        else:
            table = np.full(IGNORED + 1, NO_CLASS)
            table[self.classes] = np.arange(len(self.classes))
            labels = tensor([table[own.labels] for own in every], np.int64)
        shape = *self.features.grid, self.features.dim
        return Batch(
            tensor([tokens.reshape(shape) for tokens, _ in examples]),
            tensor(shown, np.bool_),
            labels,
            tensor([own.down for own in every]),
            tensor([own.across for own in every]),
        )
