"""Probes that are fitted by stochastic gradient descent.

A linear layer is trained, optionally on batch-normalised features. Walmer et al. 2023 (appendix,
Table 6) train for 20 epochs and say no more. The rest is common practice for linear probes of
self-supervised models (Caron et al. 2021, He et al. 2022): cross-entropy, momentum 0.9, no weight
decay, learning rate lr x batch / 256 falling to 0 along a cosine, images shuffled every epoch (a
last, smaller batch left out); batch normalisation without scale and shift of its own, tested with
the mean and variance of all training images, which do not change while the layer is trained. Images
are features of a store, so none is augmented.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.analyses.probe.fit import Fitted, Task, union
from vitsee_core.analyses.probe.settings import MOMENTUM, Training
from vitsee_core.analyses.probe.sources import Source
from vitsee_core.kernels.ridge import Linear
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    import torch

NORM_EPSILON = 1e-6  # of batch normalisation


def fit_sgd(
    source: Source,
    token_slice: slice,
    draws: Sequence[Draw],
    task: Task,
    training: Training,
) -> list[list[Fitted | None]]:
    """Train a layer for each draw and token of a slice of the source's tokens.

    Returns:
        For each draw, the probes of the tokens; None in place of a probe whose training diverged.

    Raises:
        VitseeError: batch normalisation of a single image.
    """
    if training.batch_norm and min(map(len, draws)) < 2:
        raise VitseeError(
            "--batch-norm needs the variance of at least 2 training images; found 1"
        )
    images = union([draw.indices for draw in draws])
    tokens = range(*token_slice.indices(source.n_tokens))
    # Token first: SGD passes over the images of one token many times, which should lie together.
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
            # Cosine schedule (Loshchilov & Hutter 2017) over all steps, from lr x batch / 256 to 0.
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
