"""Dot products of residual branches that do not exist, and stores of two models of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stores import write_residuals
from vitsee_stores import Store, TokenLayout

Array = NDArray[Any]

SITES = ("blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp")


def products_of(z: Array, f: Array) -> Array:
    """(..., dim) twice -> (..., 3) float32 z.z, f.f, z.f."""
    return np.stack([(z * z).sum(-1), (f * f).sum(-1), (z * f).sum(-1)], -1).astype(
        np.float32
    )


def random_branches(
    n: int, tokens: int, seed: int = 0, dim: int = 5
) -> tuple[Array, Array]:
    """Skips and branches (n, tokens, dim) of very different norms."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, tokens, dim)) * np.exp(rng.normal(size=(n, tokens, 1)))
    return z, rng.normal(size=z.shape) + 0.5 * z


def vit(path: Path, n: int = 10, tokens: int = 7, seed: int = 0, **kwargs: Any) -> Store:
    """Two blocks, random branches of 7 tokens."""
    products = {
        site: products_of(*random_branches(n, tokens, seed + i))
        for i, site in enumerate(SITES)
    }
    return write_residuals(path, products, **kwargs)


def cnn(path: Path, n: int = 10, **kwargs: Any) -> Store:
    """Two blocks of 2 x 3 locations and one of a single location."""
    layouts = {
        f"layer{i}.0": TokenLayout((), grid, stride_px=(8.0, 8.0))
        for i, grid in enumerate([(2, 3), (2, 3), (1, 1)], 1)
    }
    products = {
        site: products_of(*random_branches(n, layout.n_tokens, i + 50))
        for i, (site, layout) in enumerate(layouts.items())
    }
    return write_residuals(path, products, layouts=layouts, model="resnet", **kwargs)
