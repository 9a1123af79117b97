"""Probes without training: the classes of the most similar patches of a bank, by cosine.

`knn`: each of the k nearest patches votes with its pixels; a pixel of the input gets the class that
most of them have at its place in the patch, of equally many the lowest (CAPI: Darcet et al. 2025).
Pixels without a class do not vote; where none votes, the patch's most frequent class is taken.

`hummingbird`: scores are the k nearest patches' shares of classes, weighted by softmax(cosine /
0.02), and are interpolated bilinearly (Balažević et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.linear import highest
from vitsee_core.analyses.dense_probe.patch_bank import Bank
from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.masks.class_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.layout import TokenLayout

TEMPERATURE = 0.02
AT_ONCE = 1 << 24  # votes in memory


@dataclass(frozen=True)
class Scaling:
    """(dim,) what is taken off features, and what they are multiplied by."""

    mean: Float
    factor: Float

    @classmethod
    def none(cls, dim: int) -> Scaling:
        """Features as they are."""
        return cls(np.zeros(dim), np.ones(dim))

    @classmethod
    def of(cls, tokens: Float32) -> Scaling:
        """Mean 0 and standard deviation 1 over tokens (n, dim); constant features become 0."""
        mean, std = tokens.mean(0, dtype=np.float64), tokens.std(0, dtype=np.float64)
        return cls(mean, np.divide(1, std, out=np.zeros_like(std), where=std > 0))

    def __call__(self, tokens: Float | Float32) -> Float:
        """(..., dim) scaled."""
        found: Float = (tokens - self.mean) * self.factor
        return found


@dataclass(frozen=True)
class Search:
    """The patches of a bank, scaled: (n, dim); device: of the products."""

    rows: Float32
    scaling: Scaling
    device: str

    def nearest(self, tokens: Float, k: int) -> tuple[Float32, Integers]:
        """Cosines and rows (cells, k), nearest first, ties by row; tokens: (rows, cols, dim)."""
        from vitsee_core.kernels.neighbours import Neighbours
        from vitsee_core.runtime.device import resolve_device

        queries = self.scaling(tokens.reshape(-1, tokens.shape[-1])).astype(np.float32)
        found = Neighbours(queries, k, resolve_device(self.device))
        found.add(self.rows)
        return found.result()


@dataclass(frozen=True)
class KnnHead:
    """Votes of pixels. labels: (n, pixels) of the bank; layout: of the site."""

    search: Search
    labels: ClassMap
    layout: TokenLayout
    k: int

    def predict(self, tokens: Float, pixels: Pixels) -> ClassMap:
        """See `linear.Head`."""
        assert self.layout.stride_px is not None
        _, rows = self.search.nearest(tokens, self.k)
        sides = [round(step) for step in self.layout.stride_px]
        cells = most_votes(self.labels[rows]).reshape(*tokens.shape[:2], *sides)
        inside = []
        for axis, cell in enumerate(pixels.nearest):
            begin = self.layout.offset_px[axis] + cell * self.layout.stride_px[axis]
            at = np.floor(pixels.at[axis] - np.rint(begin)).astype(np.int64)
            inside.append(np.clip(at, 0, sides[axis] - 1))
        (row, col), (down, across) = pixels.nearest, inside
        found: ClassMap = cells[row[:, None], col, down[:, None], across]
        return found


@dataclass(frozen=True)
class HummingbirdHead:
    """Weighted shares. shares: (n, classes) of the bank's patches; classes: (classes,) numbers."""

    search: Search
    shares: Float
    classes: Integers
    k: int

    def predict(self, tokens: Float, pixels: Pixels) -> ClassMap:
        """See `linear.Head`."""
        cosines, rows = self.search.nearest(tokens, self.k)
        weights = np.exp((cosines.astype(np.float64) - cosines[:, :1]) / TEMPERATURE)
        weights /= weights.sum(1, keepdims=True)
        scores = np.einsum("ck,ckn->cn", weights, self.shares[rows])
        return highest(scores.reshape(*tokens.shape[:2], -1), self.classes, pixels)


def most_votes(labels: ClassMap) -> ClassMap:
    """(cells, pixels) the class that most of (cells, k, pixels) have, see the module's text."""
    cells, _, pixels = labels.shape
    classes = np.unique(labels)
    classes = classes[classes != IGNORED]
    if not len(classes):
        return np.full((cells, pixels), IGNORED, np.uint8)
    found = np.empty((cells, pixels), np.uint8)
    step = max(1, AT_ONCE // (pixels * len(classes)))
    for start in range(0, cells, step):
        some = labels[start : start + step]
        votes = np.stack([(some == number).sum(1) for number in classes], -1)
        whole = votes.sum(1).argmax(-1)
        best = np.where(votes.any(-1), votes.argmax(-1), whole[:, None])
        found[start : start + step] = classes[best]
    return found


def knn_head(bank: Bank, scaling: Scaling, layout: TokenLayout, k: int, device: str) -> KnnHead:
    """Of a bank."""
    return KnnHead(_search(bank, scaling, device), bank.labels, layout, k)


def hummingbird_head(bank: Bank, scaling: Scaling, k: int, device: str) -> HummingbirdHead:
    """Of a bank."""
    classes, counts, n = bank.histograms()
    return HummingbirdHead(_search(bank, scaling, device), counts / n[:, None], classes, k)


def _search(bank: Bank, scaling: Scaling, device: str) -> Search:
    return Search(scaling(bank.tokens).astype(np.float32), scaling, device)
