"""Candidate positions of a target: those that are compared with the source keypoint.

Candidates are the product of rows and columns of positions, so that a map over all of them takes
one product per axis. What is interpolated between the centres of tokens without rescaling is
bilinear there and has its largest value at a corner: for `vit_analysis` only the pixels next to
centres, and the first and last of each border, are candidates of all the pixels. Pixels beyond
the outer centres are equal; of equal ones the first is taken, while the released code leaves the
lower and right border to rounding.

Positions are in pixels of the model's input whose centres are integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitsee_core.types import Float, Integers
from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class TokenAxis:
    """The tokens along one axis of a grid.

    Attributes:
        n: number of tokens.
        stride: pixels from one token to the next.
        offset: edge of the first token, in pixels.
    """

    n: int
    stride: float
    offset: float

    @property
    def centres(self) -> Float:
        """Return the tokens' centres: (n,) in pixels whose centres are integers."""
        # Pixel i reaches from i - 0.5 to i + 0.5, so that edges lie half a pixel before it.
        first_edge = self.offset - 0.5
        return first_edge + (np.arange(self.n, dtype=np.float64) + 0.5) * self.stride

    def token_coordinates(self, positions: Float) -> Float:
        """Return pixels in units of tokens, 0 the first centre, clamped to the outer centres.

        Clamping repeats the border, as `torch.nn.functional.interpolate` does.
        """
        coordinates = (positions + 0.5 - self.offset) / self.stride - 0.5
        return np.clip(coordinates, 0, self.n - 1)

    def bilinear_weights(self, positions: Float) -> Float:
        """Return the weights of the tokens at pixels: (positions, n), each row adds up to 1."""
        coordinates = self.token_coordinates(positions)
        # The last centre belongs to the cell before it; an axis of one token has no cell.
        lower = np.minimum(np.floor(coordinates), max(self.n - 2, 0)).astype(np.int64)
        upper = np.minimum(lower + 1, self.n - 1)
        rows = np.arange(len(positions))
        weights = np.zeros((len(positions), self.n))
        weights[rows, lower] = 1 - (coordinates - lower)
        # Added: with a single token, lower and upper are the same entry.
        weights[rows, upper] += coordinates - lower
        return weights

    def nearest_weights(self, positions: Float) -> Float:
        """Return (positions, n) weights: 1 for the nearest token, of two the later."""
        nearest = np.floor(self.token_coordinates(positions) + 0.5).astype(np.int64)
        return np.eye(self.n)[nearest]


class CandidateAxis(NamedTuple):
    """Candidate positions of the target along one axis.

    Attributes:
        positions: (positions,) in pixels.
        weights: (positions, tokens) of the tokens along the axis at each position.
    """

    positions: Float
    weights: Float


def token_axes(layout: TokenLayout) -> tuple[TokenAxis, TokenAxis]:
    """Return the rows and the columns of a layout with a grid."""
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = (
        TokenAxis(n, stride, offset)
        for n, stride, offset in zip(
            layout.grid, layout.stride_px, layout.offset_px, strict=True
        )
    )
    return rows, cols


def candidate_axes(
    layout: TokenLayout, input_size: tuple[int, int], window: Float, match: str
) -> tuple[CandidateAxis, CandidateAxis]:
    """Return the candidate positions: every row of the first axis with every column of the second.

    Args:
        layout: with a grid.
        input_size: (height, width) in pixels.
        window: left, top, right, bottom of the searched area. If it contains no position, the one
            nearest to its middle is used.
        match: one of `protocol.MATCHES`.
    """
    rows, cols = token_axes(layout)
    left, top, right, bottom = window.tolist()
    return (
        _candidate_axis(rows, input_size[0], top, bottom, match),
        _candidate_axis(cols, input_size[1], left, right, match),
    )


def _candidate_axis(
    axis: TokenAxis, length: int, low: float, high: float, match: str
) -> CandidateAxis:
    """Return the candidates between low and high, of an axis of `length` pixels."""
    if match == "token":
        inside = _indices_between(axis.centres, low, high)
        return CandidateAxis(axis.centres[inside], np.eye(axis.n)[inside])
    pixels = np.arange(length, dtype=np.float64)
    positions = pixels[_indices_between(pixels, low, high)]
    if match == "vit_analysis":
        positions = _corner_pixels(axis, positions)
    return CandidateAxis(positions, axis.bilinear_weights(positions))


def _indices_between(positions: Float, low: float, high: float) -> Integers:
    """Return the indices of positions from low to high; if none is, of the nearest to the middle.

    A box can be thinner than a token: without the second case it would have no candidate.
    """
    inside = np.flatnonzero((positions >= low) & (positions <= high))
    if len(inside):
        return inside
    return np.array([np.abs(positions - (low + high) / 2).argmin()])


def _corner_pixels(axis: TokenAxis, pixels: Float) -> Float:
    """Return the first and the last pixel between every two centres.

    What is linear between centres has its largest value there.
    """
    intervals = np.floor((pixels + 0.5 - axis.offset) / axis.stride - 0.5)
    # A pixel on a centre belongs to both intervals: it is an end of either.
    intervals = np.clip(intervals, -1, axis.n - 1)
    is_last = np.append(intervals[1:] != intervals[:-1], True)
    is_first = np.append(True, is_last[:-1])
    return pixels[is_first | is_last]
