"""Sums over an image's pixels that least squares needs, made per cell of the token grid.

With U the bilinear operator from cells to pixels, M the diagonal of the pixels' weights (0 for
those that do not count) and Y their targets, classes as one-hot or depths:

    S = U'MU    (cells, cells): a cell and its eight neighbours, so four numbers a cell
    T = U'MY    (cells, targets): a triangular filter of the class map

so that for tokens Z (cells, dim), sums over pixels are Z'SZ and Z'T; no pixel has features in
memory. As U is a product of one operator a direction, S and T are each a few products of matrices
as large as the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.types import Float


@dataclass(frozen=True)
class CellSums:
    """Of one image and grid.

    own, beside, below, across: (rows, cols), (rows, cols - 1), (rows - 1, cols) and (rows - 1,
    cols - 1) numbers of S: of a cell with itself, with its right neighbour, with the one below, and
    of either diagonal of four cells, which are equal. present: the classes that occur, or 0 for a
    depth. targets: (present, rows, cols) T. totals: (present,) sums of Y over pixels. squares: that
    of Y squared. n: that of the weights. weights: (rows, cols) U'M1, the row sums of S.
    """

    own: Float
    beside: Float
    below: Float
    across: Float
    present: list[int]
    targets: Float
    totals: Float
    squares: float
    n: float
    weights: Float

    @classmethod
    def of(cls, pixels: Pixels, class_weights: Float | None = None) -> CellSums:
        """Of an image's labelled pixels.

        Args:
            pixels: of the image.
            class_weights: (256,) of a pixel of each class, 0 for `IGNORED`; by default 1.
        """
        down = pixels.down, pixels.down[:, :-1] * pixels.down[:, 1:]
        right = pixels.across, pixels.across[:, :-1] * pixels.across[:, 1:]
        counted = pixels.counted if class_weights is None else class_weights[pixels.labels]
        squares = [weights**2 for weights in (down[0], right[0])]
        rows, pairs = squares[0].T @ counted, down[1].T @ counted
        present, targets = pixels.present, pixels.targets
        weighted = [counted * own for own in targets]
        grid = down[0].shape[1], right[0].shape[1]
        return cls(
            rows @ squares[1],
            rows @ right[1],
            pairs @ squares[1],
            pairs @ right[1],
            present,
            np.array([pixels.on_cells(own) for own in weighted]).reshape(-1, *grid),
            np.array([own.sum() for own in weighted], np.float64),
            float(sum((w * own).sum() for w, own in zip(weighted, targets, strict=True))),
            float(counted.sum()),
            pixels.on_cells(counted),
        )

    def smoothed(self, tokens: Float) -> Float:
        """S Z of tokens (rows, cols, dim)."""
        found = self.own[..., None] * tokens
        for weights, one, other in (
            (self.beside, np.s_[:, :-1], np.s_[:, 1:]),
            (self.below, np.s_[:-1, :], np.s_[1:, :]),
            (self.across, np.s_[:-1, :-1], np.s_[1:, 1:]),
            (self.across, np.s_[:-1, 1:], np.s_[1:, :-1]),
        ):
            found[one] += weights[..., None] * tokens[other]
            found[other] += weights[..., None] * tokens[one]
        return found
