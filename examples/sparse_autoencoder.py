"""A small sparse autoencoder on one layer's tokens, trained from a store.

    python examples/sparse_autoencoder.py b16.zarr blocks.8.out --features 4096

A TopK autoencoder (Gao et al. 2024): each token is explained by the k most active of many features.
The store is read slab by slab; the model that made it is not needed.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from vitsee_core.features.torch_dataset import TokenDataset
from vitsee_stores import Store, open_store


class TopKAutoencoder(nn.Module):
    """x -> the k largest of `features` activations -> x."""

    def __init__(self, dim: int, features: int, k: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(dim, features), nn.Linear(features, dim)
        self.k = k
        with torch.no_grad():
            self.decoder.weight /= self.decoder.weight.norm(dim=0)
            self.encoder.weight.copy_(self.decoder.weight.T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, dim) as far as k features explain them."""
        active = self.encoder(x - self.decoder.bias).relu()
        kept = active.topk(self.k, dim=-1)
        sparse = torch.zeros_like(active).scatter(-1, kept.indices, kept.values)
        found: torch.Tensor = self.decoder(sparse)
        return found


def train(
    store: Store,
    site: str,
    features: int,
    *,
    k: int = 4,
    epochs: int = 5,
    workers: int = 0,
) -> tuple[TopKAutoencoder, list[float]]:
    """The autoencoder, and after each epoch the share of the variance that it explained."""
    torch.manual_seed(0)
    tokens = TokenDataset(store, site, batch_size=256)
    model = TopKAutoencoder(tokens.dim, features, k)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    explained = []
    for epoch in range(epochs):
        tokens.epoch = epoch
        error = variance = 0.0
        for x in DataLoader(tokens, batch_size=None, num_workers=workers):
            loss = ((model(x) - x) ** 2).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            error += loss.item() * len(x)
            variance += ((x - x.mean(0)) ** 2).sum().item()
        explained.append(1 - error / variance)
        print(f"epoch {epoch}: {explained[-1]:.3f} of the variance explained")
    return model, explained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument("site")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("-k", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    train(
        open_store(given.store),
        given.site,
        given.features,
        k=given.k,
        epochs=given.epochs,
    )
