"""The linear heads of Siméoni et al. 2025 (DINOv3), by their own optimiser, on stored tokens.

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

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitsee_core.analyses.dense_probe.cells import LinearScores, Scores
from vitsee_core.types import Float

NO_CLASS = -100
N_BINS, LEAST_SHARE = 256, 0.1
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
        """(n, height, width) an image's scores (rows, cols, n) at its pixels."""
        return self.down[image] @ scores.permute(2, 0, 1) @ self.across[image].T


class LinearProbe(nn.Module):
    """Dropout of channels, batch norm, and a linear map of each cell, to be trained. `random` draws
    the weights and the dropout, on the CPU."""

    def __init__(self, dim: int, n_outputs: int, dropout: float, random: torch.Generator) -> None:
        super().__init__()
        self.dropout, self.dim, self.random = dropout, dim, random
        self.norm = nn.BatchNorm1d(dim)
        weights = torch.empty(n_outputs, dim).normal_(0, 0.01, generator=random)
        self.weight, self.bias = nn.Parameter(weights), nn.Parameter(torch.zeros(n_outputs))

    def forward(self, batch: Batch) -> Tensor:
        """(images, rows, cols, n) scores, 0 for cells beside the image."""
        tokens = batch.tokens
        if self.dropout:
            share, shape = 1 - self.dropout, (len(tokens), 1, 1, self.dim)
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
        mean, var = (_numbers(own) for own in (self.norm.running_mean, self.norm.running_var))
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
    """How probes of classes are trained.

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
        at, warm_up = max(step - 1, 0), round(steps * 1500 / 40_000)
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
    """How probes of depths within `limits` (metres) are trained; see `ClassRecipe`."""

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
        found = torch.stack([batch.interpolated(i, own)[0] for i, own in enumerate(depths)])
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
    batches: Iterator[Batch], dim: int, recipe: Recipe, steps: int, seed: int, device: torch.device
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
