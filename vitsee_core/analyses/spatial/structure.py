"""Measure how patch tokens are structured in space and time.

In space these are cosines by distance, frequencies and shares of variance; from one frame of a clip
to the next it is slowness.

u_t is a patch token over its length (a token of length 0 has no cosine: it is left out). d is the
Manhattan distance of two cells, cos(d) the mean cosine of all pairs of an image at that distance.

- `lds` = cos(1) less the mean cosine of all pairs at d >= 6; `cds` = minus the slope of cos(d) on d
  = 1..8, each distance counted once; NaN on grids that have no such pairs. `lds_scaled`,
  `cds_scaled`: with round(6 s / 16) and round(8 s / 16) in place of 6 and 8, s the longer side of
  the grid, so that grids of other sizes compare (Singh et al. 2025, arXiv 2512.10794, whose grids
  are 16 x 16);
- `rmsc` = sqrt(mean_t |u_t - mean u|^2), which is 0 where all patches are alike (oversmoothing);
  `mean_cos`: mean cosine of two different patches, 1 - rmsc^2 T / (T - 1);
- `srss`, with masks: for each foreground token the mean cosine with foreground tokens at d = 1 less
  that with background tokens at d >= 6; the mean over those that have both;
- `fourier_high`: log amplitude of the highest frequency of the half diagonal less that of frequency
  0, log(|FFT2| + 1e-6) being averaged over channels (Park & Kim 2022; Park et al. 2023): tokens as
  they are, on square grids. Of an even side h the diagonal ends at (h - 2) / h pi, as in their
  code;
- `fourier_radial`: the same at every distance from frequency 0, mean over frequencies of a ring.

Shares are a two-way analysis of variance: the parts explained by image and by position. For x_nt,
the token at position t of image n (channels), N images of T positions each:

    total    = sum_nt |x_nt - m|^2
    image    = T sum_n |m_n - m|^2,   m_n the mean over the image's tokens
    position = N sum_t |m_t - m|^2,   m_t the mean over images at the position
    rest     = total - image - position

each over the total. For independent noise the shares are (N - 1) / (N T - 1), (T - 1) / (N T - 1)
and the remainder.

Slowness: how far the tokens of a place stay what they are from one frame of a clip to the next.
u_tp is the token at time t and place p over its length. Per clip, means over times and places:

- `next_cos` = cos(u_tp, u_(t+1)p), a place with itself in the next frame;
- `next_other_cos` = cos(u_tp, u_(t+1)q), q another place: what all places of a frame share;
- `slowness` = next_cos - next_other_cos, 0 where a place is no more like itself than like others;
- `any_frame_cos` = cos(u_tp, u_sp), s any other time: what a place keeps whatever the order. Of
  frames in random order next_cos is that on average, so only what next_cos has above it is time.

Over all clips i and j that differ:

- `other_clip_cos` = cos(u_i,tp, u_j,(t+1)p): the same place in the next frame of another clip. What
  the position in the image alone makes alike is in it; mean over all pairs, with a jackknife.

A frame is a cell in time here, so two sampled frames where a tubelet joins two. Slow features are
Wiskott and Sejnowski's (2002), who ask for outputs that change little over time; a feature that is
constant everywhere is slow, too, which is why other places and clips stand beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.covariance import autocorrelation
from vitsee_core.truth.masks.labels import FOREGROUND, VOID, Labels
from vitsee_core.types import Float, Integers, Mask

COSINES = ("lds", "cds", "lds_scaled", "cds_scaled", "rmsc", "mean_cos")
FAR = 6  # cells; distant pairs are at this Manhattan distance or beyond
REACH = 8  # cells; the slope of cds is over distances up to it
SIDE = 16  # of the published grid
TINY = 1e-6  # added to an amplitude, so that 0 has a logarithm
SHARES = ("share_image", "share_position", "share_rest")
ALIKE = 1e-12  # relative variance that rounding leaves among equal tokens
NEXT = "next_cos"
PER_CLIP = (NEXT, "next_other_cos", "slowness", "any_frame_cos")
OF_ALL = "other_clip_cos"
IN_TIME = (*PER_CLIP, OF_ALL)


def scaled(cells: int, grid: tuple[int, int]) -> int:
    """Return a distance on a grid of 16 x 16 scaled to another grid, at least 2."""
    return max(2, round(cells * max(grid) / SIDE))


class ImageStructure(NamedTuple):
    """Structure of each image.

    Attributes:
        values: metric -> (images,), NaN where an image has no value.
        profile: (images, rings) of `fourier_radial`, from the lowest frequency above 0 on.
        n_zero: number of tokens of length 0.
    """

    values: dict[str, Float]
    profile: Float
    n_zero: int


def image_structure(
    cells: NDArray[np.floating], labels: Labels | None = None
) -> ImageStructure:
    """Return the structure of patch tokens.

    Args:
        cells: (images, rows, cols, dim).
        labels: (images, rows x cols) which tokens are foreground, for `srss`.
    """
    n_zero = 0
    values_by_metric: dict[str, list[float]] = {}
    profiles = []
    for image in cells:
        tokens = image.astype(np.float64)  # (rows, cols, dim)
        lengths = np.linalg.norm(tokens, axis=-1)
        has_length = lengths > 0
        n_zero += int((~has_length).sum())
        units = tokens / np.where(has_length, lengths, 1)[..., np.newaxis]
        metrics = _cosine_metrics(units, has_length)
        metrics["fourier_high"], profile = _spectrum(tokens)
        profiles.append(profile)
        for metric, value in metrics.items():
            values_by_metric.setdefault(metric, []).append(value)
    values = {metric: np.array(column) for metric, column in values_by_metric.items()}
    if labels is not None:
        values["srss"] = np.array(
            [
                foreground_cosines(image, image_labels)
                for image, image_labels in zip(cells, labels, strict=True)
            ]
        )
    return ImageStructure(values, np.stack(profiles), n_zero)


def _spectrum(tokens: Float) -> tuple[float, Float]:
    """Return `fourier_high` and (rings,) `fourier_radial` of one image, (rows, cols, dim)."""
    transform = np.fft.fft2(tokens, axes=(0, 1))
    # (rows, cols), mean over channels; frequency 0 is at [0, 0].
    amplitude = np.log(np.abs(transform) + TINY).mean(-1)
    rows, cols = amplitude.shape
    base = amplitude[0, 0]

    high = math.nan
    last = (min(rows, cols) - 1) // 2  # highest frequency of the half diagonal
    if rows == cols and last > 0:
        high = float(amplitude[last, last] - base)

    rings = _rings(amplitude.shape).ravel()
    n_frequencies = np.maximum(np.bincount(rings), 1)
    profile = np.bincount(rings, amplitude.ravel()) / n_frequencies - base
    # Rings beyond half the side are not whole circles: only corners reach them.
    return high, profile[1 : max(rows, cols) // 2 + 1]


def _cosine_metrics(units: Float, has_length: Mask) -> dict[str, float]:
    """Return each of `COSINES` of one image.

    Args:
        units: (rows, cols, dim) unit vectors, 0 where a token has no length.
        has_length: (rows, cols).
    """
    sums, counts = sums_by_distance(units, has_length)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_distance = np.where(counts > 0, sums / counts, np.nan)  # cos(d)
    near = by_distance[1] if len(by_distance) > 1 else np.nan

    # Distances of the published 16 x 16 grid, then those in proportion to this grid.
    grid = has_length.shape
    distances = {"": (FAR, REACH), "_scaled": (scaled(FAR, grid), scaled(REACH, grid))}
    values = {}
    for suffix, (far, reach) in distances.items():
        n_far = counts[far:].sum()
        values[f"lds{suffix}"] = math.nan
        if n_far > 0:
            values[f"lds{suffix}"] = float(near - sums[far:].sum() / n_far)
        values[f"cds{suffix}"] = _decline(by_distance[1 : reach + 1], reach)

    # With u of length 1, mean |u - mean u|^2 = 1 - |mean u|^2, and the sum of the cosines of all
    # pairs, each token with itself among them, is n^2 |mean u|^2.
    n = int(has_length.sum())
    values["rmsc"] = math.nan
    values["mean_cos"] = math.nan
    if n > 1:
        mean = units.sum((0, 1)) / n
        squared_mean = float(mean @ mean)
        values["rmsc"] = math.sqrt(max(0.0, 1 - squared_mean))
        values["mean_cos"] = (n * squared_mean - 1) / (n - 1)
    return values


def _decline(values: Float, reach: int) -> float:
    """Return minus the least-squares slope of values at 1, 2, ..., reach; NaN if one is missing."""
    if len(values) < reach:
        return math.nan
    x = np.arange(reach) - (reach - 1) / 2
    return float(-(x @ values) / (x @ x))


def sums_by_distance(units: Float, has_length: Mask) -> tuple[Float, Float]:
    """Return sums of cosines and numbers of pairs at each Manhattan distance 0, 1, ...; every pair
    counts twice.

    Args:
        units: (rows, cols, dim) unit vectors, 0 where a token has no length.
        has_length: (rows, cols).
    """
    rows, cols = has_length.shape
    distance = _distances(rows, cols)
    n_distances = rows + cols - 1
    # By autocorrelation over the grid, which costs T log T instead of T^2 for all pairs.
    sums = np.zeros(n_distances)
    np.add.at(sums, distance, autocorrelation(units))
    counts = np.zeros(n_distances)
    pairs = autocorrelation(has_length[..., np.newaxis].astype(np.float64))
    np.add.at(counts, distance, np.rint(pairs))  # whole numbers but for rounding
    return sums, counts


@lru_cache(maxsize=16)
def _distances(rows: int, cols: int) -> Integers:
    """Return (2 rows, 2 cols) the Manhattan length of each offset.

    The middle offsets, which no pair has, get the largest.
    """
    y = np.minimum(np.arange(2 * rows), 2 * rows - np.arange(2 * rows))
    x = np.minimum(np.arange(2 * cols), 2 * cols - np.arange(2 * cols))
    return np.minimum(np.add.outer(y, x), rows + cols - 2)


@lru_cache(maxsize=16)
def _rings(shape: tuple[int, int]) -> Integers:
    """Return (rows, cols) the distance from frequency 0, rounded, in steps of the longer side."""
    rows, cols = shape
    distance = np.hypot.outer(np.fft.fftfreq(rows), np.fft.fftfreq(cols))
    return np.rint(distance * max(shape)).astype(np.int64)


def frequencies(grid: tuple[int, int]) -> Float:
    """Return (rings,) frequencies of a profile, in units of pi per cell; 1 is a grid's highest."""
    side = max(grid)
    return np.arange(1, side // 2 + 1) * 2 / side


def foreground_cosines(cells: NDArray[np.floating], labels: Labels) -> float:
    """Return `srss` of one image; NaN if no foreground token has both kinds of partners.

    Args:
        cells: (rows, cols, dim).
        labels: (rows x cols,).
    """
    rows, cols = cells.shape[:2]
    units = cells.reshape(rows * cols, -1).astype(np.float64)
    lengths = np.linalg.norm(units, axis=1)
    units = units / np.where(lengths > 0, lengths, 1)[:, np.newaxis]
    is_foreground = (labels == FOREGROUND) & (lengths > 0)
    is_background = (labels != FOREGROUND) & (labels != VOID) & (lengths > 0)

    positions = np.stack(np.divmod(np.arange(rows * cols), cols), axis=1)
    # (foreground tokens, tokens)
    distance = np.abs(positions[is_foreground, np.newaxis] - positions).sum(-1)
    is_near = (distance == 1) & is_foreground
    is_far = (distance >= FAR) & is_background
    has_both = is_near.any(1) & is_far.any(1)
    if not has_both.any():
        return math.nan
    cosine = units[is_foreground] @ units.T
    near = (cosine * is_near).sum(1)[has_both] / is_near.sum(1)[has_both]
    far = (cosine * is_far).sum(1)[has_both] / is_far.sum(1)[has_both]
    return float((near - far).mean())


@dataclass
class TokenSums:
    """Sums over the tokens of images, from which shares of variance follow.

    Attributes:
        n: number of images.
        position_sums: (tokens, dim) sums over images.
        squares: sum of |x|^2 over images and tokens.
        squared_means: sum over images of |m_n|^2, m_n the mean over an image's tokens.
    """

    n: int
    position_sums: Float
    squares: float
    squared_means: float

    @classmethod
    def of(cls, tokens: Float) -> TokenSums:
        """Return the sums of tokens, (images, tokens, dim)."""
        means = tokens.mean(1)
        return cls(
            n=len(tokens),
            position_sums=tokens.sum(0),
            squares=float(np.vdot(tokens, tokens)),
            squared_means=float(np.vdot(means, means)),
        )

    def plus(self, other: TokenSums, sign: int = 1) -> TokenSums:
        """Return the sums with the images of another added (sign 1) or removed (sign -1)."""
        return TokenSums(
            n=self.n + sign * other.n,
            position_sums=self.position_sums + sign * other.position_sums,
            squares=self.squares + sign * other.squares,
            squared_means=self.squared_means + sign * other.squared_means,
        )

    def shares(self) -> dict[str, float]:
        """Return each of `SHARES`; NaN if all tokens are equal, or with one image or position."""
        n = self.n
        t = len(self.position_sums)
        shares = dict.fromkeys(SHARES, math.nan)
        if n < 2 or t < 2:
            return shares
        mean = self.position_sums.sum(0) / (n * t)
        squared_mean = n * t * float(mean @ mean)  # N T |m|^2
        total = self.squares - squared_mean
        # Tokens that are equal but for rounding have no variance to divide.
        if total <= ALIKE * self.squares:
            return shares
        squared_positions = float(np.vdot(self.position_sums, self.position_sums))
        shares["share_image"] = (t * self.squared_means - squared_mean) / total
        shares["share_position"] = (squared_positions / n - squared_mean) / total
        shares["share_rest"] = 1 - shares["share_image"] - shares["share_position"]
        return shares

    def nulls(self) -> dict[str, float]:
        """Return the shares of independent noise; NaN where `shares` is."""
        n = self.n
        t = len(self.position_sums)
        if n < 2 or t < 2:
            return dict.fromkeys(SHARES, math.nan)
        degrees = n * t - 1  # of freedom of all tokens
        image = (n - 1) / degrees
        position = (t - 1) / degrees
        return {
            "share_image": image,
            "share_position": position,
            "share_rest": 1 - image - position,
        }


def units_of(cells: NDArray[np.floating]) -> Float:
    """Return the tokens of a clip over their lengths, (times, positions, dim).

    A token of length 0 stays 0.

    Args:
        cells: (times, rows, cols, dim).
    """
    x: Float = cells.reshape(len(cells), -1, cells.shape[-1]).astype(np.float64)
    lengths: Float = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, lengths, out=np.zeros_like(x), where=lengths > 0)


def clip_cosines(units: Float) -> dict[str, float]:
    """Return each of `PER_CLIP`; NaN for a clip of one time, or without such a pair of tokens.

    Sums over pairs are products of sums: that of all pairs of two frames is the product of the
    frames' sums, from which the pairs of a token with itself are taken.

    Args:
        units: (times, positions, dim) as `units_of` returns them.
    """
    has_length: Float = np.any(units, -1).astype(np.float64)
    # A position with itself in the next frame.
    same = float(np.vdot(units[:-1], units[1:]))
    n_same = float(np.vdot(has_length[:-1], has_length[1:]))
    next_cos = _mean(same, n_same)
    # All positions with all in the next frame, less the former.
    frame_sums = units.sum(1)  # (times, dim)
    n_in_frame = has_length.sum(1)
    all_pairs = float(np.vdot(frame_sums[:-1], frame_sums[1:]))
    n_all_pairs = float(n_in_frame[:-1] @ n_in_frame[1:])
    next_other_cos = _mean(all_pairs - same, n_all_pairs - n_same)
    # A position at all pairs of times; a token's cosine with itself is 1.
    position_sums = units.sum(0)  # (positions, dim)
    n_times = has_length.sum(0)
    over_times = float(np.vdot(position_sums, position_sums)) - float(has_length.sum())
    n_over_times = float((n_times**2 - n_times).sum())
    return {
        NEXT: next_cos,
        "next_other_cos": next_other_cos,
        "slowness": next_cos - next_other_cos,
        "any_frame_cos": _mean(over_times, n_over_times),
    }


def _mean(total: float, n: float) -> float:
    """Return a total over a number; NaN over 0."""
    return total / n if n > 0 else math.nan


@dataclass
class ClipSums:
    """Sums over clips, from which the cosine with other clips follows.

    Attributes:
        n: number of clips.
        units: (times, positions, dim) the sum of the tokens over their lengths.
        n_tokens: (times, positions) numbers of tokens that have a length.
        same: the sum of `next_cos` over pairs of one clip.
        n_same: the number of these pairs.
    """

    n: int
    units: Float
    n_tokens: Float
    same: float
    n_same: float

    @classmethod
    def of(cls, units: Float) -> ClipSums:
        """Return the sums of clips, (clips, times, positions, dim)."""
        has_length: Float = np.any(units, -1).astype(np.float64)
        return cls(
            n=len(units),
            units=units.sum(0),
            n_tokens=has_length.sum(0),
            same=float(np.vdot(units[:, :-1], units[:, 1:])),
            n_same=float(np.vdot(has_length[:, :-1], has_length[:, 1:])),
        )

    def plus(self, other: ClipSums, sign: int = 1) -> ClipSums:
        """Return the sums with the clips of another added (sign 1) or removed (sign -1)."""
        return ClipSums(
            n=self.n + sign * other.n,
            units=self.units + sign * other.units,
            n_tokens=self.n_tokens + sign * other.n_tokens,
            same=self.same + sign * other.same,
            n_same=self.n_same + sign * other.n_same,
        )

    def cosine(self) -> float:
        """Return `other_clip_cos`; NaN for one clip or one time."""
        if self.n < 2:
            return math.nan
        # All pairs of clips, less those of a clip with itself.
        all_pairs = float(np.vdot(self.units[:-1], self.units[1:]))
        n_all_pairs = float(np.vdot(self.n_tokens[:-1], self.n_tokens[1:]))
        return _mean(all_pairs - self.same, n_all_pairs - self.n_same)
