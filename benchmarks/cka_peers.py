"""The peers of `cka.py`: the published minibatch scheme, two packages from PyPI, float64 by loops.

All of them get features that lie in RAM as float32, which favours them: ours are read from a store
in float16 and cast.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Rows = NDArray[np.int64]


def published_hsic(sites: Sequence[Float32], batches: Sequence[Rows | None]) -> Float64:
    """(L, L) sums over batches of n (n - 3) HSIC_1, as Nguyen et al. (2021) published it:
    `efficient_CKA.py` of google-research, in numpy.

    A batch at a time: every site's Gram matrix once, U-centred and flattened, then one product for
    all pairs; float32, features not centred. Kinder than the original where that costs nothing:
    numpy's `x @ x.T` is ssyrk (half the work of the original's product), buffers are reused, and
    the pairs are multiplied by torch, which is faster on this shape. None is all images.
    """
    n = len(sites[0]) if batches[0] is None else len(batches[0])
    grams = np.empty((len(sites), n, n), np.float32)
    total = np.zeros((len(sites), len(sites)), np.float32)
    for batch in batches:
        for x, gram in zip(sites, grams, strict=True):
            part = x if batch is None else x[batch]
            np.matmul(part, part.T, out=gram)
            u_centre(gram)
        flat = torch.from_numpy(grams.reshape(len(sites), -1))
        total += (flat @ flat.T).numpy()
    return total.astype(np.float64)


def u_centre(gram: NDArray[Any]) -> None:
    """Szekely and Rizzo (2014), in place."""
    n = len(gram)
    np.fill_diagonal(gram, 0)
    means = gram.sum(0) / (n - 2)
    means -= means.sum() / (2 * (n - 1))
    gram -= means[:, None]
    gram -= means[None, :]
    np.fill_diagonal(gram, 0)


def float64_hsic(sites: Sequence[NDArray[Any]], batch: Rows | None = None) -> Float64:
    """(L, L) n (n - 3) HSIC_1 in float64: features centred, pair by pair."""
    grams = []
    for x in sites:
        features = (x if batch is None else x[batch]).astype(np.float64)
        features -= features.mean(0)
        gram = features @ features.T
        u_centre(gram)
        grams.append(gram)
    return np.array([[np.vdot(a, b) for b in grams] for a in grams])


def alignment(hsic: Float64) -> Float64:
    """CKA of the sites among themselves."""
    scale = np.sqrt(np.diagonal(hsic))
    value: Float64 = hsic / scale[:, None] / scale[None, :]
    return value


class Replay(nn.Module):
    """A model whose layers put out stored features, whatever the input: for packages that hook
    models. one_batch: as (1, images, features), the shape that ckatorch takes for one Gram matrix
    over images; its hooks otherwise compare tokens within each image."""

    def __init__(self, sites: Sequence[Float32], one_batch: bool = False) -> None:
        super().__init__()
        features = map(torch.from_numpy, sites)
        self.features = [x[None] if one_batch else x for x in features]
        self.layers = nn.ModuleList(nn.Identity() for _ in sites)

    def forward(self, rows: Tensor) -> Tensor:
        for layer, features in zip(self.layers, self.features, strict=True):
            layer(features)
        return rows

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return [f"layers.{k}" for k in range(len(self.layers))]


def torch_cka(sites: Sequence[Float32]) -> tuple[float, Float64]:
    """Seconds and CKA of torch_cka, all sites as one batch."""
    from torch_cka import CKA

    model = Replay(sites)
    with _quiet():
        peer = CKA(model, model, "a", "b", model.names, model.names)
        began = time.perf_counter()
        peer.compare(_one_batch(len(sites[0])))
        return time.perf_counter() - began, peer.hsic_matrix.double().numpy()


def ckatorch(sites: Sequence[Float32]) -> tuple[float, Float64]:
    """Seconds and CKA of ckatorch, all sites as one batch, once."""
    from ckatorch import CKA

    model = Replay(sites, one_batch=True)
    with _quiet():
        peer = CKA(model, model, model.names, first_name="a", second_name="b")
        began = time.perf_counter()
        value = peer(_one_batch(len(sites[0])), epochs=1)
        return time.perf_counter() - began, value.double().numpy()


# Seconds and CKA of some sites; work on all pairs of L sites over that on a corner of c. torch_cka
# makes L + L^2 Gram matrices, ckatorch two a pair, in float64.
Package = tuple[
    Callable[[Sequence[Float32]], tuple[float, Float64]], Callable[[int, int], float]
]
PACKAGES: dict[str, Package] = {
    "torch_cka": (torch_cka, lambda n, c: (n + n**2) / (c + c**2)),
    "ckatorch": (ckatorch, lambda n, c: n**2 / c**2),
}


def installed() -> list[str]:
    """The packages that are there; others are said, with how to have them."""
    there = []
    for name in PACKAGES:
        try:
            import_module(name)
            there.append(name)
        except ImportError as error:
            print(f"{name} is left out: {error} (pip install vitsee[bench])")
    return there


def _one_batch(n: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(n)), batch_size=n)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and advice."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
