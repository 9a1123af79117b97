"""The linear heads of Siméoni et al. 2025 (DINOv3), trained by their own optimiser.

Batch norm (its statistics over the cells on images), a 1 x 1 convolution whose weights
begin as N(0, 0.01), AdamW on batches of 16 images of stored tokens, the rate of one cycle
after a warm-up. As released:

- classes: dropout of whole channels (0.1), cross-entropy of scores interpolated to the
  pixels, summed over those with a class and divided by all; rate 1e-3, decay 1e-3, warm-up
  1,500 of 40,000 steps;
- depths: 256 outputs, relu(.) + 0.1 normalised, which weigh as many depths spread evenly
  over the range; interpolated to pixels; sqrt(var(g) + 0.15 mean(g)^2) of g = log p - log
  d (without the variance for 100 steps); rate 3e-4, decay 1e-4, gradients clipped at 35,
  warm-up 12,800 of 38,400 steps, in which AdamW has no momentum.

With fewer steps the warm-up is shorter in proportion. In float32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitsee_core.analyses.dense_probe.heads import (
    MIN_BIN_SHARE,
    BinScores,
    Head,
    HeadKey,
    LinearScores,
    Scores,
    Trained,
)
from vitsee_core.analyses.dense_probe.linear import blind_heads, count_truth
from vitsee_core.analyses.dense_probe.metrics import Depth
from vitsee_core.analyses.dense_probe.options import BATCH, Solver
from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.analyses.dense_probe.split_images import (
    Patches,
    SplitImages,
    counted_rows,
)
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab

log = logging.getLogger(__name__)

NO_CLASS = -100  # what torch's cross-entropy ignores by default
N_BINS = 256
LOG_FLOOR = 1e-3  # metres, added to depths before their logarithm
STEPS_WITHOUT_VARIANCE = 100
N_LAST_LOSSES = 10  # whose mean the notes have


@dataclass(frozen=True)
class Batch:
    """Some training images.

    Attributes:
        tokens: (images, rows, cols, dim).
        on_image: (images, rows, cols) which cells are not beside the image.
        labels: (images, height, width) indices of classes, `NO_CLASS` for none, or depths,
            NaN for none.
        row_weights: (images, height, rows) as in `pixels.Pixels`.
        col_weights: (images, width, cols) as in `pixels.Pixels`.
    """

    tokens: Tensor
    on_image: Tensor
    labels: Tensor
    row_weights: Tensor
    col_weights: Tensor

    def interpolated(self, image: int, scores: Tensor) -> Tensor:
        """Return the scores of an image at its pixels, (n, height, width).

        scores: (rows, cols, n) of cells.
        """
        down = self.row_weights[image] @ scores.permute(2, 0, 1)  # (n, height, cols)
        return down @ self.col_weights[image].T


class LinearProbe(nn.Module):
    """Dropout of channels, batch norm, and a linear map of each cell, to be trained."""

    def __init__(
        self, dim: int, n_outputs: int, dropout: float, generator: torch.Generator
    ) -> None:
        """Draw the weights.

        Args:
            dim: channels of a token.
            n_outputs: scores of a cell.
            dropout: share of the channels that are 0 in a step.
            generator: on the CPU; draws the weights, and the dropout of every step.
        """
        super().__init__()
        self.dropout = dropout
        self.dim = dim
        self.generator = generator
        self.norm = nn.BatchNorm1d(dim)
        weights = torch.empty(n_outputs, dim).normal_(0, 0.01, generator=generator)
        self.weight = nn.Parameter(weights)
        self.bias = nn.Parameter(torch.zeros(n_outputs))

    def forward(self, batch: Batch) -> Tensor:
        """Return the scores (images, rows, cols, n), 0 for cells beside the image."""
        tokens = batch.tokens
        if self.dropout:
            keep = 1 - self.dropout
            shape = (len(tokens), 1, 1, self.dim)  # whole channels of an image
            # Drawn on the CPU, so that every device drops the same channels.
            factors = torch.empty(shape).bernoulli_(keep, generator=self.generator) / keep
            tokens = tokens * factors.to(tokens.device)
        normed = self.norm(tokens[batch.on_image])  # (cells on images, dim)
        cell_scores = functional.linear(normed, self.weight, self.bias)
        n_outputs = cell_scores.shape[-1]
        scores = cell_scores.new_zeros(*batch.on_image.shape, n_outputs)
        scores[batch.on_image] = cell_scores
        return scores

    def scores(self) -> LinearScores:
        """Return the trained linear map of features as they are stored, batch norm
        folded in."""
        matrix = _to_numpy(self.weight)  # (n, dim)
        mean = _to_numpy(self.norm.running_mean)
        variance = _to_numpy(self.norm.running_var)
        offset = _to_numpy(self.norm.bias)
        scale = _to_numpy(self.norm.weight) / np.sqrt(variance + self.norm.eps)
        # W ((x - mean) scale + offset) + b = (W scale) x + b + W offset - (W scale) mean
        weights = (matrix * scale).T  # (dim, n)
        bias = _to_numpy(self.bias) + matrix @ offset - mean @ weights
        return LinearScores(weights, bias)


def _to_numpy(values: Tensor | None) -> Float:
    """Return a tensor as an array in float64."""
    assert values is not None
    return values.detach().double().cpu().numpy()


class Schedule(NamedTuple):
    """The settings of AdamW in one step: a share of the rate, and the first of its
    betas."""

    rate_share: float
    momentum: float


@dataclass(frozen=True)
class ClassRecipe:
    """The training of probes of classes.

    Attributes:
        n_outputs: scores of a cell.
        dropout: share of the channels that are 0 in a step.
        rate: learning rate of AdamW.
        decay: weight decay of AdamW.
        second_beta: the second of AdamW's betas.
        max_norm: norm that gradients are clipped at.
    """

    n_outputs: int
    dropout: float = 0.1
    rate: float = 1e-3
    decay: float = 1e-3
    second_beta: float = 0.999
    max_norm: float = math.inf

    def schedule(self, step: int, n_steps: int) -> Schedule:
        """Return the settings of AdamW in one step: a linear warm-up, then half a
        cosine."""
        # The released loop does not advance the rate after its first step.
        n_advances = max(step - 1, 0)
        n_warm_up = round(n_steps * 1500 / 40_000)
        if n_advances < n_warm_up:
            warm_up = 1 - (1 - n_advances / n_warm_up) * (1 - 1e-6)
            return Schedule(warm_up * (1 - n_advances / n_steps), momentum=0.9)
        return Schedule(_cosine(1, 0, (n_advances + 1) / n_steps), momentum=0.9)

    def backward(self, batch: Batch, scores: Tensor, step: int) -> float:
        """Return the loss, and fill the gradient of the scores, which are a leaf."""
        del step
        # Image by image: the pixels of all classes of a whole batch may not fit the memory.
        total = 0.0
        for image, labels in enumerate(batch.labels):
            pixel_scores = batch.interpolated(image, scores[image])[None]
            loss = functional.cross_entropy(
                pixel_scores, labels[None], ignore_index=NO_CLASS, reduction="sum"
            )
            loss = loss / batch.labels.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def trained_scores(self, scores: LinearScores) -> Scores:
        """Return the scores that the trained probe gives to cells."""
        return scores


@dataclass(frozen=True)
class DepthRecipe:
    """The training of probes of depths; further attributes and methods as in `ClassRecipe`.

    limits: the least and the largest depth, in metres.
    """

    limits: tuple[float, float]
    n_outputs: int = N_BINS
    dropout: float = 0.0
    rate: float = 3e-4
    decay: float = 1e-4
    second_beta: float = 0.99
    max_norm: float = 35.0

    def schedule(self, step: int, n_steps: int) -> Schedule:
        """Return the settings of AdamW in one step: no momentum during a third of the
        steps."""
        n_warm_up = round(n_steps * 12_800 / 38_400)
        if step < n_warm_up:
            rate_share = 1e-3 + _cosine(1, 0, step / n_steps) * step / n_warm_up
            return Schedule(rate_share, momentum=0.0)
        momentum = _cosine(0.85, 0.95, (step - n_warm_up) / (n_steps - n_warm_up))
        rate_share = _cosine(1, 1 / 25 / 1000, (step + 1) / n_steps)
        return Schedule(rate_share, momentum)

    def backward(self, batch: Batch, scores: Tensor, step: int) -> float:
        """Return the loss, and fill the gradient of the scores, which are a leaf."""
        nearest, farthest = self.limits
        bins = torch.linspace(nearest, farthest, self.n_outputs, device=scores.device)
        shares = torch.relu(scores) + MIN_BIN_SHARE
        cell_depths = (shares @ bins / shares.sum(-1))[..., None]
        # (images, height, width)
        depths = torch.stack(
            [batch.interpolated(i, cells)[0] for i, cells in enumerate(cell_depths)]
        )
        is_known = torch.isfinite(batch.labels)
        log_depths = torch.log(depths[is_known] + LOG_FLOOR)
        g = log_depths - torch.log(batch.labels[is_known] + LOG_FLOOR)
        square = 0.15 * g.mean() ** 2
        if step >= STEPS_WITHOUT_VARIANCE and len(g) > 1:
            square = square + g.var()
        # The gradient of the root is infinite at 0.
        loss = torch.sqrt(square) if square > 0 else square.abs()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def trained_scores(self, scores: LinearScores) -> Scores:
        """Return the depths that the trained probe gives to cells."""
        nearest, farthest = self.limits
        return BinScores(scores, np.linspace(nearest, farthest, self.n_outputs))


Recipe = ClassRecipe | DepthRecipe


def _cosine(start: float, end: float, share: float) -> float:
    """Return the value after a share of half a cosine from start to end."""
    return end + (start - end) / 2 * (math.cos(math.pi * share) + 1)


def train(
    batches: Iterator[Batch],
    dim: int,
    recipe: Recipe,
    n_steps: int,
    seed: int,
    device: torch.device,
) -> Iterator[float | Scores]:
    """Yield the loss of every step, then the scores of the trained probe.

    Args:
        batches: as many as there are steps, on the device.
        dim: channels of a token.
        recipe: how probes of this task are trained.
        n_steps: steps of the optimiser.
        seed: seed of weights and dropout.
        device: torch device.
    """
    generator = torch.Generator().manual_seed(seed)
    probe = LinearProbe(dim, recipe.n_outputs, recipe.dropout, generator).to(device)
    optimizer = torch.optim.AdamW(
        probe.parameters(),
        lr=recipe.rate,
        betas=(0.9, recipe.second_beta),
        weight_decay=recipe.decay,
    )
    for step in range(n_steps):
        batch = next(batches)
        schedule = recipe.schedule(step, n_steps)
        group = optimizer.param_groups[0]
        group["lr"] = recipe.rate * schedule.rate_share
        group["betas"] = (schedule.momentum, recipe.second_beta)
        optimizer.zero_grad()
        scores = probe(batch)
        # The loss is differentiated to the scores, a leaf, and then once through the
        # probe: the recipe may differentiate image by image, which frees each image's
        # pixels.
        leaf = scores.detach().requires_grad_()
        loss = recipe.backward(batch, leaf, step)
        scores.backward(leaf.grad)
        nn.utils.clip_grad_norm_(probe.parameters(), recipe.max_norm)
        optimizer.step()
        yield loss
    yield recipe.trained_scores(probe.scores())


def train_sgd(images: SplitImages, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of the sites one after the other, and the baselines of every grid.

    Raises:
        VitseeError: no pixel counts, or the loss is not finite.
    """
    from vitsee_core.runtime.device import resolve_device

    device = resolve_device(execution.device)
    task = images.task
    # As in the protocol, training sees the model's input.
    images = replace(images, truth=replace(images.truth, resolution="input"))
    grid_sums = count_truth(images, execution)
    classes = np.flatnonzero(next(iter(grid_sums.values())).totals)
    recipe: Recipe = ClassRecipe(len(classes))
    if isinstance(task, Depth):
        recipe = DepthRecipe(task.limits)
    heads: dict[HeadKey, Head] = {}
    mean_losses: dict[str, float] = {}
    for site, patches in images.features.items():
        stream = _Stream(images, patches, images.grids[site], classes, execution)
        last_losses: list[float] = []
        for result in train(
            stream.batches(device),
            patches.dim,
            recipe,
            solver.steps,
            execution.seed,
            device,
        ):
            if not isinstance(result, float):
                heads[HeadKey(site)] = task.head(classes, result)
            elif not np.isfinite(result):
                raise VitseeError(
                    f"{images.store.label}: the loss of {site} is not finite any more"
                )
            else:
                last_losses = [*last_losses[1 - N_LAST_LOSSES :], result]
                execution.progress.advance(BATCH)
        mean_losses[site] = float(np.mean(last_losses))
    notes: dict[str, Any] = {"loss_of_the_last_steps": mean_losses}
    if not isinstance(task, Depth):
        notes["n_trained"] = len(classes)
    return Trained(heads | blind_heads(task, grid_sums), notes)


class _Example(NamedTuple):
    """One training image: its tokens (cells, dim), and the pixels of the model's input."""

    tokens: Float32
    pixels: Pixels


@dataclass(frozen=True)
class _Stream:
    """The training images in random order, over and over.

    Where they do not all fit the memory, some slabs at a time are kept: their images are
    in random order, and so are such groups.

    Attributes:
        images: the training images.
        patches: the patch tokens that the probe reads.
        grid: key of their grid.
        classes: numbers of the classes that occur.
        execution: seed and memory.
    """

    images: SplitImages
    patches: Patches
    grid: str
    classes: Integers
    execution: Execution

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Yield batches on a device, without an end."""
        examples = self._shuffled_examples()
        while True:
            yield self._to_batch(list(islice(examples, BATCH)), device)

    def _shuffled_examples(self) -> Iterator[_Example]:
        """Yield the training images in random order, without an end."""
        rng = np.random.default_rng((self.execution.seed, 5))
        groups = self._slab_groups()
        if len(groups) > 1:
            log.info(
                "%s: of %s, %d groups of slabs are in memory in turn (more --memory, or "
                "fewer --images, are faster)",
                self.images.store.label,
                self.patches.sites[-1].name,
                len(groups),
            )
        # A single group is read once, several ones each time that it is their turn.
        all_examples = self._load(groups[0]) if len(groups) == 1 else None
        while True:
            for group in rng.permutation(len(groups)):
                examples = all_examples or self._load(groups[group])
                for i in rng.permutation(len(examples)):
                    yield examples[i]

    def _slab_groups(self) -> list[list[Slab]]:
        """Group the slabs with training images, as many together as half of the memory
        holds."""
        mask = self.images.truth.mask
        store = self.images.store
        rows, cols = self.patches.grid
        n_pixels = int(np.prod(store.manifest.transform["input_size"][1:]))
        n_bytes_label = 4 if isinstance(self.images.task, Depth) else 1
        n_bytes_image = 4 * rows * cols * self.patches.dim + n_bytes_label * n_pixels
        max_images = max(1, self.execution.budget // 2 // n_bytes_image)
        groups: list[list[Slab]] = []
        n_in_group = 0
        for slab in store.slabs():
            n_images = int(mask[slab.rows].sum())
            if n_images == 0:
                continue
            if not groups or n_in_group + n_images > max_images:
                groups.append([])
                n_in_group = 0
            groups[-1].append(slab)
            n_in_group += n_images
        return groups

    def _load(self, slabs: list[Slab]) -> list[_Example]:
        """Return the training images of some slabs."""
        examples = []
        for slab in slabs:
            tokens_of_images = self.patches.of_slab(slab)
            for row, tokens in zip(counted_rows(slab), tokens_of_images, strict=True):
                if self.images.truth.mask[row]:
                    pixels = self.images.truth.pixels(row)[self.grid]
                    examples.append(_Example(tokens, pixels))
        return examples

    def _to_batch(self, examples: list[_Example], device: torch.device) -> Batch:
        """Return some images as a batch on a device."""

        def stacked(arrays: list[Any], dtype: Any = np.float32) -> Tensor:
            """Return the arrays of all images as one tensor on the device."""
            return torch.from_numpy(np.stack(arrays).astype(dtype)).to(device)

        rows, cols = self.patches.grid
        tokens = []
        on_image = []
        labels = []
        row_weights = []
        col_weights = []
        # Class number -> its output.
        output_of_class = np.full(IGNORED + 1, NO_CLASS)
        output_of_class[self.classes] = np.arange(len(self.classes))
        is_depth = isinstance(self.images.task, Depth)
        for example in examples:
            pixels = example.pixels
            tokens.append(example.tokens.reshape(rows, cols, self.patches.dim))
            # Cells beside the image have no part in any pixel.
            has_rows = pixels.row_weights.sum(0) > 0
            has_cols = pixels.col_weights.sum(0) > 0
            on_image.append(np.outer(has_rows, has_cols))
            labels.append(pixels.labels if is_depth else output_of_class[pixels.labels])
            row_weights.append(pixels.row_weights)
            col_weights.append(pixels.col_weights)
        return Batch(
            tokens=stacked(tokens),
            on_image=stacked(on_image, np.bool_),
            labels=stacked(labels, np.float32 if is_depth else np.int64),
            row_weights=stacked(row_weights),
            col_weights=stacked(col_weights),
        )
