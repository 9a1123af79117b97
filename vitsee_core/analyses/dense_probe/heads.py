"""Trained probes (`Head`): how each predicts the class or the depth of every pixel.

- Scores of cells, interpolated bilinearly to pixels (`ClassHead`, `DepthHead`): linear in
  the token (`LinearScores`), depths from linear scores of bins (`BinScores`), the same for
  every image (`FixedScores`, of the baselines), or the shares of classes of the nearest
  patches (`HummingbirdScores`).
- Pixels of the nearest patches (`KnnHead`).

The baselines see no tokens: they learn from each cell of a grid how often a class occurs
there, or the mean depth (`PositionSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vitsee_core.analyses.dense_probe.options import COSINE, L2, TEMPERATURE
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Float32, Integers

if TYPE_CHECKING:
    from vitsee_core.kernels.logistic import Scaling
    from vitsee_stores.layout import TokenLayout

# Added to the outputs of bins of depths, so that their sum is above 0.
MIN_BIN_SHARE = 0.1
MAX_SCORES = 1 << 22  # interpolated scores in memory
MAX_VOTES = 1 << 24  # votes of neighbours' pixels in memory
ROWS_AT_ONCE = 1 << 16  # patches of the bank whose distances are in memory


@dataclass(frozen=True)
class HeadKey:
    """Identifies a trained probe or a baseline.

    Attributes:
        probed: name of the probed site or sites; for a baseline the key of the grid.
        l2: l2 of the fit; None if the solver has none, and for a baseline.
        k: number of neighbours; None if the solver has none.
        baseline: name of the baseline; "" for a probe.
    """

    probed: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


class Head(Protocol):
    """A trained probe, which predicts the label of every pixel."""

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """Return the class or the depth of each pixel, (height, width).

        tokens: (rows, cols, dim) of the image.
        """


class Trained(NamedTuple):
    """The trained probes and baselines of a pair of stores, and notes on the training for a
    table."""

    probes: dict[HeadKey, Head]
    notes: dict[str, object]


# Scores (rows, cols, n) from tokens (rows, cols, dim); objects that can be pickled.
Scores = Callable[[Float], Float]


@dataclass(frozen=True)
class LinearScores:
    """Scores that are linear in the token: tokens @ weights + bias.

    Attributes:
        weights: (dim, n).
        bias: (n,).
    """

    weights: Float
    bias: Float

    def __call__(self, tokens: Float) -> Float:
        """Return the scores (..., n) of tokens (..., dim)."""
        return tokens @ self.weights + self.bias


@dataclass(frozen=True)
class BinScores:
    """Depths (rows, cols, 1) from linear scores of bins.

    Attributes:
        scores: one output per bin.
        bins: (n,) depth of each bin in metres.
    """

    scores: LinearScores
    bins: Float

    def __call__(self, tokens: Float) -> Float:
        """Return the depths of cells with tokens (rows, cols, dim)."""
        shares = np.maximum(self.scores(tokens), 0) + MIN_BIN_SHARE
        return (shares @ self.bins / shares.sum(-1))[..., None]


@dataclass(frozen=True)
class FixedScores:
    """Scores (rows, cols, n) that are the same for every image, of a probe that sees no
    tokens."""

    values: Float

    def __call__(self, tokens: Float) -> Float:
        """Return the scores, whatever the tokens are."""
        del tokens
        return self.values


@dataclass(frozen=True)
class ClassHead:
    """Gives a pixel the class with the highest interpolated score, the lowest of equal
    ones.

    Attributes:
        classes: (n,) numbers of the classes.
        scores: scores of the classes at cells.
        nearest: give a pixel the class of its nearest cell, without interpolation.
    """

    classes: Integers
    scores: Scores
    nearest: bool = False

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """Return the class of each pixel, (height, width)."""
        scores = self.scores(tokens)
        numbers = self.classes.astype(np.uint8)
        if self.nearest:
            rows, cols = pixels.nearest_cells
            return numbers[scores.argmax(-1)][rows[:, None], cols]
        classes = np.empty(pixels.labels.shape, np.uint8)
        for pixel_rows, pixel_scores in interpolated_scores(scores, pixels):
            classes[pixel_rows] = numbers[pixel_scores.argmax(-1)]
        return classes


@dataclass(frozen=True)
class DepthHead:
    """Gives a pixel the interpolated score as its depth, clipped to `limits` in metres."""

    scores: Scores
    limits: tuple[float, float]

    def predict(self, tokens: Float, pixels: Pixels) -> Float32:
        """Return the depth of each pixel in metres, (height, width)."""
        nearest, farthest = self.limits
        depths = np.empty(pixels.labels.shape, np.float32)
        for pixel_rows, pixel_scores in interpolated_scores(self.scores(tokens), pixels):
            depths[pixel_rows] = np.clip(pixel_scores[..., 0], nearest, farthest)
        return depths


def interpolated_scores(scores: Float, pixels: Pixels) -> Iterator[tuple[slice, Float]]:
    """Yield (rows of pixels, their interpolated scores (pixel rows, width, n)), some at a
    time.

    scores: (rows, cols, n) of cells.
    """
    rows, cols, n = scores.shape
    height, width = pixels.labels.shape
    step = max(1, MAX_SCORES // (width * n))
    for start in range(0, height, step):
        pixel_rows = slice(start, min(start + step, height))
        # Down first, then across: (pixel rows, cols, n) -> (pixel rows, width, n).
        down = pixels.row_weights[pixel_rows] @ scores.reshape(rows, -1)
        yield pixel_rows, pixels.col_weights @ down.reshape(-1, cols, n)


@dataclass(frozen=True)
class Search:
    """A search among the patches of a bank.

    Attributes:
        rows: (n, dim) scaled tokens of the bank.
        scaling: scaling of tokens that are looked for.
        device: torch device of the search.
        distance: `options.COSINE` or `options.L2`.
    """

    rows: Float32
    scaling: Scaling
    device: str
    distance: str = COSINE

    def nearest(self, tokens: Float, k: int) -> tuple[Float32, Integers]:
        """Return closeness (cells, k) and row (cells, k) of the nearest patches, nearest
        first.

        Closeness is the cosine, with ties by row, or minus the squared distance.

        Args:
            tokens: (rows, cols, dim) tokens of an image.
            k: number of neighbours.
        """
        from vitsee_core.kernels.neighbours import Neighbours
        from vitsee_core.runtime.device import resolve_device

        queries = self.scaling(tokens.reshape(-1, tokens.shape[-1])).astype(np.float32)
        device = resolve_device(self.device)
        if self.distance == L2:
            return _nearest_by_l2(queries, self.rows, k, device)
        neighbours = Neighbours(queries, k, device)
        neighbours.add(self.rows)
        return neighbours.result()


def _nearest_by_l2(
    queries: Float32, rows: Float32, k: int, device: object
) -> tuple[Float32, Integers]:
    """Return minus the squared distance and the row of the k nearest rows, (queries, k)
    each.

    The search is by -|q - r|^2 = 2 qr - |q|^2 - |r|^2, in float64 (the difference of large
    numbers is small) and some rows at a time.
    """
    import torch

    assert isinstance(device, torch.device)
    if device.type == "mps":
        device = torch.device("cpu")  # Metal has no float64
    q = torch.from_numpy(queries).to(device).double()
    best_closeness = q.new_empty(len(q), 0)
    best_rows = torch.empty(len(q), 0, dtype=torch.int64, device=device)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        r = torch.from_numpy(rows[start : start + ROWS_AT_ONCE]).to(device).double()
        closeness = 2 * q @ r.T - (r**2).sum(1) - (q**2).sum(1)[:, None]
        nearest = closeness.topk(min(k, len(r)), dim=1)
        # The best so far compete with the best of these rows.
        all_closeness = torch.cat([best_closeness, nearest.values], 1)
        all_rows = torch.cat([best_rows, nearest.indices + start], 1)
        n_kept = min(k, all_closeness.shape[1])
        best_closeness, columns = all_closeness.topk(n_kept, dim=1)
        best_rows = all_rows.gather(1, columns)
    return best_closeness.float().cpu().numpy(), best_rows.cpu().numpy()


@dataclass(frozen=True)
class KnnHead:
    """Predicts a pixel from the neighbours' pixels at the same position in the patch.

    Attributes:
        search: the search among the bank's patches.
        labels: (n, pixels) labels of the bank's patches.
        layout: layout of the site's tokens.
        k: number of neighbours.
        join: makes (cells, pixels) of the neighbours' labels (cells, k, pixels).
    """

    search: Search
    labels: Labels
    layout: TokenLayout
    k: int
    join: Callable[[Labels], Labels]

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        """Return the label of each pixel (height, width) from tokens (rows, cols, dim)."""
        assert self.layout.stride_px is not None
        _, neighbours = self.search.nearest(tokens, self.k)
        height, width = (round(step) for step in self.layout.stride_px)
        cell_labels = self.join(self.labels[neighbours])
        cell_labels = cell_labels.reshape(*tokens.shape[:2], height, width)
        rows, columns = pixels.nearest_cells
        down = self._position_in_cell(pixels, axis=0, size=height)
        across = self._position_in_cell(pixels, axis=1, size=width)
        return cell_labels[rows[:, None], columns, down[:, None], across]

    def _position_in_cell(self, pixels: Pixels, axis: int, size: int) -> Integers:
        """Return how far each pixel is into its nearest cell along an axis, 0 to size -
        1."""
        assert self.layout.stride_px is not None
        cell = pixels.nearest_cells[axis]
        begin = self.layout.offset_px[axis] + cell * self.layout.stride_px[axis]
        position = np.floor(pixels.centres[axis] - np.rint(begin)).astype(np.int64)
        # Pixels at the input's edge can lie beside the outermost cell.
        return np.clip(position, 0, size - 1)


@dataclass(frozen=True)
class HummingbirdScores:
    """Scores cells by the neighbours' shares of classes, weighted by similarity.

    Attributes:
        search: the search among the bank's patches.
        shares: (n, classes) share of each class in the bank's patches.
        k: number of neighbours.
    """

    search: Search
    shares: Float
    k: int

    def __call__(self, tokens: Float) -> Float:
        """Return the scores (rows, cols, classes) of tokens (rows, cols, dim)."""
        cosines, neighbours = self.search.nearest(tokens, self.k)
        # Softmax; minus the largest cosine, so that nothing overflows.
        below_nearest = cosines.astype(np.float64) - cosines[:, :1]
        weights = np.exp(below_nearest / TEMPERATURE)
        weights /= weights.sum(1, keepdims=True)
        scores: Float = np.einsum("ck,ckn->cn", weights, self.shares[neighbours])
        return scores.reshape(*tokens.shape[:2], -1)


def most_votes(labels: ClassMap) -> ClassMap:
    """Return the class (cells, pixels) that most of the k neighbours (cells, k, pixels)
    have.

    Of equally many it is the lowest. Where no neighbour has a class at a pixel, it is the
    most frequent class of their whole patches.
    """
    n_cells, _, n_pixels = labels.shape
    classes = np.unique(labels)
    classes = classes[classes != IGNORED]
    if not len(classes):
        return np.full((n_cells, n_pixels), IGNORED, np.uint8)
    winners = np.empty((n_cells, n_pixels), np.uint8)
    step = max(1, MAX_VOTES // (n_pixels * len(classes)))
    for start in range(0, n_cells, step):
        cells = labels[start : start + step]
        # (cells, pixels, classes)
        votes = np.stack([(cells == number).sum(1) for number in classes], -1)
        patch_winner = votes.sum(1).argmax(-1)
        winner = np.where(votes.any(-1), votes.argmax(-1), patch_winner[:, None])
        winners[start : start + step] = classes[winner]
    return winners


def mean_depths(depths: Float32) -> Float32:
    """Return the mean (cells, pixels) of the neighbours' depths (cells, k, pixels).

    Where no neighbour has a depth at a pixel, it is the mean of their whole patches.
    """
    is_known = np.isfinite(depths)
    n_known = is_known.sum(1)
    sums = np.where(is_known, depths, 0).sum(1)
    patch_mean = (sums.sum(1) / n_known.sum(1))[:, None]
    means = np.where(n_known > 0, sums / np.maximum(n_known, 1), patch_mean)
    return means.astype(np.float32)


@dataclass
class PositionSums:
    """Sums over the pixels of a grid's cells, each pixel weighted by its share in the cell.

    Attributes:
        targets: (targets, rows, cols) sums of the targets.
        weights: (rows, cols) sums of the shares.
    """

    targets: Float
    weights: Float

    def __add__(self, later: PositionSums) -> PositionSums:
        """Return the sums over both."""
        return PositionSums(self.targets + later.targets, self.weights + later.weights)

    @property
    def totals(self) -> Float:
        """The sums (targets,) over all cells."""
        return self.targets.sum((1, 2))

    def scores(self) -> tuple[Integers, FixedScores, FixedScores]:
        """Return the targets that occur, their mean over all cells, and their mean at each
        cell.

        Where no pixel of a cell counts it has the mean over all cells.
        """
        classes = np.flatnonzero(self.totals)
        overall = self.totals[classes] / self.weights.sum()
        has_pixels = self.weights > 0
        at_cells = self.targets[classes] / np.where(has_pixels, self.weights, 1)
        at_cells = np.where(has_pixels, at_cells, overall[:, None, None])
        everywhere = np.broadcast_to(overall, (*self.weights.shape, len(classes)))
        return classes, FixedScores(everywhere), FixedScores(np.moveaxis(at_cells, 0, -1))


# Key of a grid -> the sums at its cells.
GridSums = dict[str, PositionSums]
