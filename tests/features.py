"""Features of images that do not exist: tokens with something in common, whole models, classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stores import VIT, Site
from vitsee_stores import TokenLayout

Array = NDArray[Any]

VIT_PARTS = ("norm1", "attn.heads", "attn.branch", "mid", "norm2", "mlp.branch", "out")


def activations(
    n: int, dim: int = 4, seed: int = 0, layout: TokenLayout = VIT, latent: int = 5
) -> Array:
    """(n, tokens, dim) of `latent` common directions and noise; the directions are those of the
    images, so that two sites with other seeds resemble each other."""
    common = np.random.default_rng(99).normal(size=(n, latent))
    rng = np.random.default_rng(seed)
    mixed = common @ rng.normal(size=(latent, layout.n_tokens * dim))
    noise = rng.normal(size=mixed.shape)
    return (mixed + noise).reshape(n, layout.n_tokens, dim)


def vit_sites(n: int, blocks: int = 2, dim: int = 4, seed: int = 0) -> dict[str, Site]:
    """All parts of a small transformer: name -> values, or the site it equals."""
    sites: dict[str, Site] = {"embed": activations(n, dim, 100 * seed)}
    before = "embed"
    for i in range(blocks):
        sites[f"blocks.{i}.in"] = before
        for k, part in enumerate(VIT_PARTS):
            sites[f"blocks.{i}.{part}"] = activations(n, dim, 100 * seed + 10 * i + k + 1)
        before = f"blocks.{i}.out"
    return sites | {"pooled": activations(n, dim, 100 * seed + 99)[:, 0]}


def cnn_sites(n: int, layout: TokenLayout, seed: int = 50) -> dict[str, Site]:
    """All parts of a small residual CNN, whose second block has an identity shortcut."""

    def values(k: int) -> Array:
        return activations(n, 3, seed + k, layout)

    return {
        "stem": values(0),
        "layer1.0.branch": values(1),
        "layer1.0.shortcut": values(2),
        "layer1.0.out": values(3),
        "layer1.1.branch": values(4),
        "layer1.1.shortcut": "layer1.0.out",
        "layer1.1.out": values(5),
    }


def class_features(
    labels: Array, tokens: int, dim: int, *, signal: float = 1.0, seed: int = 0
) -> Array:
    """(n, tokens, dim): a direction a class (the same whatever the seed) and unit noise, float32
    numbers."""
    means = np.random.default_rng(77).normal(size=(int(labels.max()) + 1, tokens, dim))
    noise = np.random.default_rng(seed).normal(size=(len(labels), tokens, dim))
    return (signal * means[labels] + noise).astype(np.float32)


def balanced(n: int, classes: int, seed: int = 0) -> Array:
    """(n,) labels in random order, as many of each as possible."""
    return np.random.default_rng(seed).permutation(np.arange(n) % classes)
