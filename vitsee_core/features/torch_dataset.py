"""Tokens of one site as a stream for training: a sparse autoencoder, a dictionary, a lens.

    from torch.utils.data import DataLoader
    from vitsee_core.features.torch_dataset import TokenDataset

    tokens = TokenDataset("b16.zarr", "blocks.8.out", tokens="patches", batch_size=4096)
    for batch in DataLoader(tokens, batch_size=None, num_workers=2):  # (4096, dim) float32
        ...

A shuffled store's slabs are random samples of the data, so a stream that mixes the tokens of a few
slabs at a time is close to a full shuffle; memory does not grow with the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from vitsee_core.features import choose_features
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.types import Float32
    from vitsee_stores import Store


class TokenDataset(IterableDataset[torch.Tensor]):
    """Batches (batch_size, dim) float32 of single tokens, in a new random order in every epoch.

    Args:
        store: an open store, or its path.
        site: one of its sites.
        tokens: "all", "patches", "prefix", or one vector per image ("cls", "mean", "3,4"); by
            default `patches` if the site has a grid.
        batch_size: tokens per batch; the last of an epoch (of each worker) may be smaller.
        mixed: slabs whose tokens are mixed: two slabs of 256 images of a ViT-B/16 are 310 MB.
        shuffle: False keeps tokens in the store's order.
        seed: of the order; equal seeds and epochs give equal batches for one number of workers.
        rank, world: which part of the slabs this process reads, of `world` processes.

    Workers of a DataLoader divide the slabs; every token comes once per epoch. Set `dataset.epoch`
    before each epoch if workers are restarted; iterating increments it.

    Raises:
        SiteError: no such site or tokens.
        MissingInput: the store has no such tokens.
        VitseeError: sizes below 1, or a rank outside of the world.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        site: str,
        tokens: str | None = None,
        *,
        batch_size: int = 1024,
        mixed: int = 2,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__()
        if batch_size < 1 or mixed < 1:
            raise VitseeError(
                f"batches of {batch_size} of {mixed} slabs; expected 1 and more"
            )
        if not 0 <= rank < world:
            raise VitseeError(
                f"rank {rank} of {world} processes; expected 0 to {world - 1}"
            )
        self.store = open_store(store) if isinstance(store, (str, os.PathLike)) else store
        chosen = self.store.site(site)
        if (
            tokens is None
            and chosen.layout is not None
            and chosen.layout.grid is not None
        ):
            tokens = "patches"
        self.features = choose_features(self.store, chosen, tokens)
        self.batch_size = batch_size
        self.mixed = mixed
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world = world
        self.epoch = 0

    @property
    def dim(self) -> int:
        return self.features.dim

    @property
    def n_tokens(self) -> int:
        """Tokens per epoch, over all processes."""
        per_image = len(self.features.tokens) if self.features.has_tokens else 1
        return int(self.store.valid.sum()) * per_image

    def __iter__(self) -> Iterator[torch.Tensor]:
        rng = np.random.default_rng([self.seed, self.epoch])
        self.epoch += 1
        n = self.store.plan.n_slabs
        order = rng.permutation(n) if self.shuffle else np.arange(n)
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        mine = order[self.rank * workers + worker :: self.world * workers]
        own = np.random.default_rng([self.seed, self.epoch, self.rank, worker])
        left: list[Float32] = []
        for at in range(0, len(mine), self.mixed):
            parts = [self._slab(int(k)) for k in mine[at : at + self.mixed]]
            pool = np.concatenate([*left, *parts])
            if self.shuffle:
                pool = pool[own.permutation(len(pool))]
            whole = len(pool) - len(pool) % self.batch_size
            for start in range(0, whole, self.batch_size):
                yield torch.from_numpy(pool[start : start + self.batch_size].copy())
            left = [pool[whole:]]
        if left and len(left[0]):
            yield torch.from_numpy(left[0].copy())

    def _slab(self, k: int) -> Float32:
        """(tokens, dim) of a slab's readable images."""
        rows = self.store.plan.rows(k)
        mask = np.zeros(self.store.n_images, bool)
        mask[rows] = self.store.valid[rows]
        blocks = list(self.features.blocks(mask))
        dim = self.features.dim
        return np.concatenate(
            [np.empty((0, dim), np.float32), *(b.reshape(-1, dim) for b in blocks)]
        )
