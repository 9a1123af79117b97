"""Probes without training: the labels of the nearest patches of a bank, by cosine or distance.

`knn`: each of the k nearest patches votes with its pixels; a pixel of the input gets the class that
most of them have at its place in the patch, of equally many the lowest (CAPI: Darcet et al. 2025).
Pixels without a class do not vote; where none votes, the patch's most frequent class is taken.
For depths a pixel gets the mean of the neighbours' pixels at its place, or of their whole patches
where none has a depth there.

`hummingbird`: scores are the k nearest patches' shares of classes, weighted by softmax(cosine /
0.02), and are interpolated bilinearly (Balažević et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.masks.class_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.layout import TokenLayout

COSINE, L2 = DISTANCES = ("cosine", "l2")
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Scaling:
    """The numbers (dim,) that are subtracted from features, and the factors that follow."""

    mean: Float
    factor: Float

    @classmethod
    def none(cls, dim: int) -> Scaling:
        """Leaves features as they are."""
        return cls(np.zeros(dim), np.ones(dim))

    @classmethod
    def of(cls, tokens: Float32) -> Scaling:
        """The scaling to mean 0 and standard deviation 1 over tokens (n, dim); constant
        features become 0."""
        mean, std = tokens.mean(0, dtype=np.float64), tokens.std(0, dtype=np.float64)
        return cls(mean, np.divide(1, std, out=np.zeros_like(std), where=std > 0))

    def __call__(self, tokens: Float | Float32) -> Float:
        return (tokens - self.mean) * self.factor


@dataclass(frozen=True)
class Search:
    """A search among the scaled patches of a bank, `rows` (n, dim), computed on `device`."""

    rows: Float32
    scaling: Scaling
    device: str
    distance: str = COSINE

    def nearest(self, tokens: Float, k: int) -> tuple[Float32, Integers]:
        """Closeness and rows (cells, k), nearest first; tokens: (rows, cols, dim). Closeness is the
        cosine, with ties by row, or minus the squared distance."""
        from vitsee_core.kernels.neighbours import Neighbours
        from vitsee_core.runtime.device import resolve_device

        queries = self.scaling(tokens.reshape(-1, tokens.shape[-1])).astype(np.float32)
        device = resolve_device(self.device)
        if self.distance == L2:
            return _nearest_by_l2(queries, self.rows, k, device)
        found = Neighbours(queries, k, device)
        found.add(self.rows)
        return found.result()


def _nearest_by_l2(
    queries: Float32, rows: Float32, k: int, device: object
) -> tuple[Float32, Integers]:
    """Search by -|q - r|^2 = 2 qr - |q|^2 - |r|^2, in float64 and some rows at a time."""
    import torch

    assert isinstance(device, torch.device)
    exact = torch.device("cpu") if device.type == "mps" else device  # Metal has no float64
    q = torch.from_numpy(queries).to(exact).double()
    best = q.new_empty(len(q), 0)
    which = torch.empty(len(q), 0, dtype=torch.int64, device=exact)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        r = torch.from_numpy(rows[start : start + ROWS_AT_ONCE]).to(exact).double()
        close = 2 * q @ r.T - (r**2).sum(1) - (q**2).sum(1)[:, None]
        near = close.topk(min(k, len(r)), dim=1)
        values = torch.cat([best, near.values], 1)
        numbers = torch.cat([which, near.indices + start], 1)
        best, places = values.topk(min(k, values.shape[1]), dim=1)
        which = numbers.gather(1, places)
    return best.float().cpu().numpy(), which.cpu().numpy()


TEMPERATURE = 0.02
AT_ONCE = 1 << 24  # votes in memory


@dataclass(frozen=True)
class KnnHead:
    """Neighbours' pixels. labels: (n, pixels) of the bank; layout: of the site. join: (cells,
    pixels) of (cells, k, pixels)."""

    search: Search
    labels: Labels
    layout: TokenLayout
    k: int
    join: Callable[[Labels], Labels]

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        assert self.layout.stride_px is not None
        _, rows = self.search.nearest(tokens, self.k)
        sides = [round(step) for step in self.layout.stride_px]
        cells = self.join(self.labels[rows]).reshape(*tokens.shape[:2], *sides)
        inside = []
        for axis, cell in enumerate(pixels.nearest):
            begin = self.layout.offset_px[axis] + cell * self.layout.stride_px[axis]
            at = np.floor(pixels.at[axis] - np.rint(begin)).astype(np.int64)
            inside.append(np.clip(at, 0, sides[axis] - 1))
        (row, col), (down, across) = pixels.nearest, inside
        return cells[row[:, None], col, down[:, None], across]


@dataclass(frozen=True)
class HummingbirdScores:
    """The neighbours' shares of classes, weighted by similarity; see `cells.Scores`. `shares` are
    those of the bank's patches, (n, classes)."""

    search: Search
    shares: Float
    k: int

    def __call__(self, tokens: Float) -> Float:
        cosines, rows = self.search.nearest(tokens, self.k)
        weights = np.exp((cosines.astype(np.float64) - cosines[:, :1]) / TEMPERATURE)
        weights /= weights.sum(1, keepdims=True)
        scores: Float = np.einsum("ck,ckn->cn", weights, self.shares[rows])
        return scores.reshape(*tokens.shape[:2], -1)


def most_votes(labels: ClassMap) -> ClassMap:
    """(cells, pixels) the class that most of the k neighbours (cells, k, pixels) have; the module's
    text says how ties are decided."""
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


def mean_depths(depths: Float32) -> Float32:
    """(cells, pixels) the mean of (cells, k, pixels) depths; that of the whole patches where no
    neighbour has one."""
    there = np.isfinite(depths)
    known = np.where(there, depths, 0)
    n, sums = there.sum(1), known.sum(1)
    whole = (sums.sum(1) / n.sum(1))[:, None]
    return np.where(n > 0, sums / np.maximum(n, 1), whole).astype(np.float32)
