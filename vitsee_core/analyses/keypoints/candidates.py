"""Candidate positions of a keypoint on the input, and the weights of the tokens there.

Candidates are the product of rows and columns of positions, so that a map over all of them takes
one product per axis. What is interpolated between the centres of tokens without rescaling is
bilinear there and has its largest value at a corner: for `vit_analysis` only the pixels next to
centres, and the first and last of each border, are candidates of all the pixels. Pixels beyond the
outer centres are equal; of equal ones the first is taken, while the released code leaves the lower
and right border to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.types import Float, Integers
from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class Cells:
    """n tokens along one axis: cell i begins at pixel `offset` + i `stride`."""

    n: int
    stride: float
    offset: float

    @property
    def centres(self) -> Float:
        """(n,) in pixels whose centres are integers."""
        return self.offset - 0.5 + (np.arange(self.n, dtype=np.float64) + 0.5) * self.stride

    def places(self, at: Float) -> Float:
        """Pixels in units of cells, 0 the first centre; clamped to the first and last centre, as
        interpolation repeats the border."""
        return np.clip((at + 0.5 - self.offset) / self.stride - 0.5, 0, self.n - 1)

    def weights(self, at: Float) -> Float:
        """(positions, n) bilinear weights of the tokens."""
        place = self.places(at)
        low = np.minimum(np.floor(place), max(self.n - 2, 0)).astype(np.int64)
        rows = np.arange(len(at))
        weights = np.zeros((len(at), self.n))
        weights[rows, low] = 1 - (place - low)
        weights[rows, np.minimum(low + 1, self.n - 1)] += place - low
        return weights

    def nearest(self, at: Float) -> Float:
        """(positions, n) weights of 1 for the nearest token, the later of two."""
        return np.eye(self.n)[np.floor(self.places(at) + 0.5).astype(np.int64)]


@dataclass(frozen=True)
class CandidateAxis:
    """Candidate positions of the target along one axis."""

    at: Float  # (positions,) pixels
    weights: Float  # (positions, cells) of the tokens


def cells_of(layout: TokenLayout) -> tuple[Cells, Cells]:
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = (
        Cells(n, stride, offset)
        for n, stride, offset in zip(layout.grid, layout.stride_px, layout.offset_px, strict=True)
    )
    return rows, cols


def candidates(
    layout: TokenLayout, size: tuple[int, int], window: Float, match: str
) -> tuple[CandidateAxis, CandidateAxis]:
    """Candidate positions: every row of the first axis with every column of the second.

    Args:
        layout: with a grid.
        size: of the input, (height, width).
        window: left, top, right, bottom of the searched area. If it contains no position, the one
            nearest to its middle is used.
        match: one of `protocol.MATCHES`.
    """
    rows, cols = cells_of(layout)
    left, top, right, bottom = window.tolist()
    return _axis(rows, size[0], top, bottom, match), _axis(cols, size[1], left, right, match)


def _axis(cells: Cells, length: int, low: float, high: float, match: str) -> CandidateAxis:
    if match == "token":
        chosen = _within(cells.centres, low, high)
        return CandidateAxis(cells.centres[chosen], np.eye(cells.n)[chosen])
    pixels = np.arange(length, dtype=np.float64)
    at = pixels[_within(pixels, low, high)]
    if match == "vit_analysis":
        at = _corners(cells, at)
    return CandidateAxis(at, cells.weights(at))


def _within(at: Float, low: float, high: float) -> Integers:
    inside = np.flatnonzero((at >= low) & (at <= high))
    return inside if len(inside) else np.array([np.abs(at - (low + high) / 2).argmin()])


def _corners(cells: Cells, pixels: Float) -> Float:
    """The first and last of the pixels between every two centres, where what is linear between
    centres has its largest value."""
    between = np.floor((pixels + 0.5 - cells.offset) / cells.stride - 0.5)
    # On a centre a pixel belongs to both sides: either has it as an end.
    between = np.clip(between, -1, cells.n - 1)
    last = np.append(between[1:] != between[:-1], True)
    first = np.append(True, last[:-1])
    return pixels[first | last]
