"""A store of made-up activations for benchmarks, and the same values in RAM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from synthetic import block_sites, write_store

from vitsee_stores import Store, StorePlan, TokenLayout

GRID = (14, 14)
LAYOUT = TokenLayout(("cls",), GRID, stride_px=(16.0, 16.0))
SLAB = 256
LATENT = 64
Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Activations:
    """Features of L sites: `store` holds them in float16, every site in files of its own;
    `features` are the same values, (images, tokens x dim) float32, one array of each distinct site.
    Site k holds the values of site k modulo their number."""

    store: Store
    features: list[Float32]

    @property
    def n_sites(self) -> int:
        """Sites of the store."""
        return len(self.store.plan.sites)

    @property
    def sites(self) -> list[Float32]:
        """Every site's features; arrays repeat where values do."""
        return [self.features[k % len(self.features)] for k in range(self.n_sites)]

    @property
    def n_features(self) -> int:
        """Columns of a site."""
        return int(self.features[0].shape[1])


def make(
    path: Path, images: int, dim: int, sites: int, distinct: int, offset: float = 0
) -> Activations:
    """A store at `path` of images x 197 tokens x dim: a latent vector an image that turns with
    depth, mixed at random, plus noise of the same size; CKA falls from 1 to about 0.

    Args:
        path: where.
        images: rows.
        dim: channels of a token.
        sites: in the store.
        distinct: of different values.
        offset: a constant added, in standard deviations.
    """
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(2, images, LATENT)).astype(np.float32)
    values = []
    for k in range(min(distinct, sites)):
        turn = math.pi / 2 * k / max(distinct - 1, 1)
        z = math.cos(turn) * latent[0] + math.sin(turn) * latent[1]
        values.append(_site(rng, z, dim, offset))
    store = _write(path, values, images, dim, sites)
    # torch casts an order of magnitude faster than numpy
    return Activations(store, [torch.from_numpy(v).float().numpy() for v in values])


def _site(rng: np.random.Generator, latent: Float32, dim: int, offset: float) -> Float16:
    out = np.empty((len(latent), LAYOUT.n_tokens, dim), np.float16)
    for token in range(LAYOUT.n_tokens):
        mixing = rng.normal(size=(LATENT, dim)).astype(np.float32) / math.sqrt(LATENT)
        noise = rng.standard_normal((len(latent), dim), np.float32)
        out[:, token] = (latent @ mixing + noise) / math.sqrt(2) + offset
    return out.reshape(len(latent), -1)


def _write(
    path: Path, values: Sequence[Float16], images: int, dim: int, sites: int
) -> Store:
    specs = block_sites(sites, dim, LAYOUT)
    plan = StorePlan(images, min(SLAB, images), "none", specs)

    def of_slab(rows: slice) -> dict[str, NDArray[Any]]:
        slab: dict[str, NDArray[Any]] = {}
        for number, spec in enumerate(specs):
            x = values[number % len(values)][rows].reshape(-1, LAYOUT.n_tokens, dim)
            slab[f"acts/{spec.name}/prefix"] = x[:, :1]
            slab[f"acts/{spec.name}/grid"] = x[:, 1:].reshape(len(x), *GRID, dim)
            slab[f"pooled/{spec.name}/cls"] = x[:, 0].astype(np.float32)
            slab[f"pooled/{spec.name}/mean"] = x[:, 1:].mean(1, dtype=np.float32)
        return slab

    return write_store(path, plan, of_slab)
