"""Probes without training: the classes of the most similar patches of a bank, by cosine.

`knn`: each of the k nearest patches votes with its pixels; a pixel of the input gets the class that
most of them have at its place in the patch, of equally many the lowest (CAPI: Darcet et al. 2025).
Pixels without a class do not vote; where none votes, the patch's most frequent class is taken.

Of depths, the mean of the neighbours' pixels at each place, or of their whole patches.

`hummingbird`: scores are the k nearest patches' shares of classes, weighted by softmax(cosine /
0.02), and are interpolated bilinearly (Balažević et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.linear import ClassHead, Head
from vitsee_core.analyses.dense_probe.neighbour_search import Search
from vitsee_core.analyses.dense_probe.patch_bank import Bank
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.masks.class_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Float32
from vitsee_stores.layout import TokenLayout

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
        """See `linear.Head`."""
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
        found: Labels = cells[row[:, None], col, down[:, None], across]
        return found


@dataclass(frozen=True)
class HummingbirdScores:
    """Weighted shares; see `linear.Scores`. shares: (n, classes) of the bank's patches."""

    search: Search
    shares: Float
    k: int

    def __call__(self, tokens: Float) -> Float:
        """(rows, cols, classes)."""
        cosines, rows = self.search.nearest(tokens, self.k)
        weights = np.exp((cosines.astype(np.float64) - cosines[:, :1]) / TEMPERATURE)
        weights /= weights.sum(1, keepdims=True)
        scores: Float = np.einsum("ck,ckn->cn", weights, self.shares[rows])
        return scores.reshape(*tokens.shape[:2], -1)


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


def mean_depths(depths: Float32) -> Float32:
    """(cells, pixels) the mean of (cells, k, pixels) depths; that of the whole patches where no
    neighbour has one."""
    there = np.isfinite(depths)
    known = np.where(there, depths, 0)
    n, sums = there.sum(1), known.sum(1)
    whole = (sums.sum(1) / n.sum(1))[:, None]
    found: Float32 = np.where(n > 0, sums / np.maximum(n, 1), whole).astype(np.float32)
    return found


def knn_head(bank: Bank, search: Search, layout: TokenLayout, k: int) -> Head:
    """Of a bank's classes or depths."""
    of_depth = bank.labels.dtype.kind == "f"
    return KnnHead(search, bank.labels, layout, k, mean_depths if of_depth else most_votes)


def hummingbird_head(bank: Bank, search: Search, k: int) -> Head:
    """Of a bank."""
    classes, counts, n = bank.histograms()
    return ClassHead(classes, HummingbirdScores(search, counts / n[:, None], k))
