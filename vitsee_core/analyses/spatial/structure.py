"""How patch tokens are structured in space (cosines by distance, frequencies, shares of variance),
and from one frame of a clip to the next (slowness).

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

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.covariance import autocorrelation
from vitsee_core.truth.masks.labels import FOREGROUND, VOID, Labels
from vitsee_core.types import Float, Integers, Mask

COSINES = ("lds", "cds", "lds_scaled", "cds_scaled", "rmsc", "mean_cos")
FAR = 6
REACH = 8
SIDE = 16
TINY = 1e-6  # below the logarithm of an amplitude
SHARES = ("share_image", "share_position", "share_rest")
ALIKE = 1e-12
NEXT = "next_cos"
PER_CLIP = (NEXT, "next_other_cos", "slowness", "any_frame_cos")
OF_ALL = "other_clip_cos"
IN_TIME = (*PER_CLIP, OF_ALL)


def scaled(cells: int, grid: tuple[int, int]) -> int:
    """A distance on a grid of 16 x 16 scaled to another grid, at least 2."""
    return max(2, round(cells * max(grid) / SIDE))


@dataclass(frozen=True)
class ImageStructure:
    """Structure of each image."""

    values: dict[str, Float]  # name -> (images,), NaN where there is none
    profile: (
        Float  # (images, rings) of `fourier_radial`, from the lowest frequency above 0 on
    )
    n_zero: int  # tokens of length 0


def image_structure(
    cells: NDArray[np.floating], labels: Labels | None = None
) -> ImageStructure:
    """The structure of patch tokens.

    Args:
        cells: (images, rows, cols, dim).
        labels: (images, rows x cols) which tokens are foreground, for `srss`.
    """
    of_images = [_of_image(x.astype(np.float64)) for x in cells]
    values = {
        name: np.array([one[0][name] for one in of_images]) for name in of_images[0][0]
    }
    if labels is not None:
        pairs = zip(cells, labels, strict=True)
        values["srss"] = np.array([foreground_cosines(x, on) for x, on in pairs])
    n_zero = sum(one[2] for one in of_images)
    return ImageStructure(values, np.stack([one[1] for one in of_images]), n_zero)


def _of_image(x: Float) -> tuple[dict[str, float], Float, int]:
    length = np.linalg.norm(x, axis=-1)
    there = length > 0
    units = x / np.where(there, length, 1)[..., np.newaxis]
    values = _cosines(units, there)
    # Mean over channels; frequency 0 first.
    amplitude = np.log(np.abs(np.fft.fft2(x, axes=(0, 1))) + TINY).mean(-1)
    base = amplitude[0, 0]
    last = (min(amplitude.shape) - 1) // 2
    square = amplitude.shape[0] == amplitude.shape[1] and last > 0
    values["fourier_high"] = float(amplitude[last, last] - base) if square else math.nan
    rings = _rings(amplitude.shape)
    counts = np.maximum(np.bincount(rings.ravel()), 1)
    profile = np.bincount(rings.ravel(), amplitude.ravel()) / counts - base
    return values, profile[1 : max(amplitude.shape) // 2 + 1], int((~there).sum())


def _cosines(units: Float, there: Mask) -> dict[str, float]:
    grid = there.shape
    sums, counts = sums_by_distance(units, there)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_distance = np.where(counts > 0, sums / counts, np.nan)
    values = {}
    for name, far, reach in (
        ("", FAR, REACH),
        ("_scaled", scaled(FAR, grid), scaled(REACH, grid)),
    ):
        near = by_distance[1] if len(by_distance) > 1 else np.nan
        n_far = counts[far:].sum()
        values[f"lds{name}"] = (
            float(near - sums[far:].sum() / n_far) if n_far > 0 else math.nan
        )
        values[f"cds{name}"] = _decline(by_distance[1 : reach + 1], reach)
    n = int(there.sum())
    mean = units.sum((0, 1)) / n if n else np.zeros(units.shape[-1])
    values["rmsc"] = math.sqrt(max(0.0, 1 - float(mean @ mean))) if n > 1 else math.nan
    values["mean_cos"] = (n * float(mean @ mean) - 1) / (n - 1) if n > 1 else math.nan
    return values


def _decline(values: Float, reach: int) -> float:
    """Minus the slope of values at 1, 2, ..., reach; NaN if one is missing."""
    if len(values) < reach:
        return math.nan
    x = np.arange(reach) - (reach - 1) / 2
    return float(-(x @ values) / (x @ x))


def sums_by_distance(units: Float, there: Mask) -> tuple[Float, Float]:
    """Sums of cosines, and numbers of pairs, of the tokens at each Manhattan distance 0, 1, ...,
    every pair twice. units: (rows, cols, dim) unit vectors, or 0 where not `there`.

    By autocorrelation over the grid, which costs T log T instead of T^2 for all pairs.
    """
    rows, cols = there.shape
    distance = _distances(rows, cols)
    n = rows + cols - 1
    pairs = autocorrelation(there[..., np.newaxis].astype(np.float64))
    sums = np.zeros((2, n))
    for row, values in zip(sums, (autocorrelation(units), np.rint(pairs)), strict=True):
        np.add.at(row, distance, values)
    return sums[0], sums[1]


@lru_cache(maxsize=16)
def _distances(rows: int, cols: int) -> Integers:
    """(2 rows, 2 cols) the Manhattan length of each offset; the middle ones, which no pair has, get
    the largest."""
    y = np.minimum(np.arange(2 * rows), 2 * rows - np.arange(2 * rows))
    x = np.minimum(np.arange(2 * cols), 2 * cols - np.arange(2 * cols))
    return np.minimum(np.add.outer(y, x), rows + cols - 2)


@lru_cache(maxsize=16)
def _rings(shape: tuple[int, int]) -> Integers:
    """(rows, cols) the distance from frequency 0, rounded, in steps of the longer side."""
    y, x = (np.fft.fftfreq(n) for n in shape)
    return np.rint(np.hypot.outer(y, x) * max(shape)).astype(np.int64)


def frequencies(grid: tuple[int, int]) -> Float:
    """(rings,) of a profile, in units of pi per cell: 1 is the highest that a grid has."""
    side = max(grid)
    return np.arange(1, side // 2 + 1) * 2 / side


def foreground_cosines(cells: NDArray[np.floating], labels: Labels) -> float:
    """`srss` of one image.

    Args:
        cells: (rows, cols, dim).
        labels: (rows x cols,).
    """
    rows, cols = cells.shape[:2]
    x = cells.reshape(rows * cols, -1).astype(np.float64)
    length = np.linalg.norm(x, axis=1)
    x = x / np.where(length > 0, length, 1)[:, np.newaxis]
    on = (labels == FOREGROUND) & (length > 0)
    off = (labels != FOREGROUND) & (labels != VOID) & (length > 0)
    places = np.stack(np.divmod(np.arange(rows * cols), cols), 1)
    apart = np.abs(places[on, np.newaxis] - places).sum(-1)
    near = (apart == 1) & on
    far = (apart >= FAR) & off
    both = near.any(1) & far.any(1)
    if not both.any():
        return math.nan
    cosine = x[on] @ x.T
    means = [(cosine * some).sum(1)[both] / some.sum(1)[both] for some in (near, far)]
    return float((means[0] - means[1]).mean())


@dataclass
class TokenSums:
    """Sums over the tokens of images, from which shares of variance follow."""

    n: int  # images
    at: Float  # (tokens, dim) sums over images
    squares: float  # sum of |x|^2
    means: float  # sum over images of |m_n|^2

    @classmethod
    def of(cls, x: Float) -> TokenSums:
        """The sums of x: (images, tokens, dim)."""
        means = x.mean(1)
        squares = float(np.vdot(x, x))
        of_means = float(np.vdot(means, means))
        return cls(len(x), x.sum(0), squares, of_means)

    def plus(self, other: TokenSums, sign: int = 1) -> TokenSums:
        """The sums with the images of another added (sign 1) or removed (sign -1)."""
        return TokenSums(
            self.n + sign * other.n,
            self.at + sign * other.at,
            self.squares + sign * other.squares,
            self.means + sign * other.means,
        )

    def shares(self) -> dict[str, float]:
        """Each of `SHARES`; NaN if all tokens are equal, or with one image or position."""
        n = self.n
        t = len(self.at)
        shares = dict.fromkeys(SHARES, math.nan)
        if n < 2 or t < 2:
            return shares
        mean = self.at.sum(0) / (n * t)
        of_mean = n * t * float(mean @ mean)
        total = self.squares - of_mean
        if total <= ALIKE * self.squares:
            return shares
        shares["share_image"] = (t * self.means - of_mean) / total
        shares["share_position"] = (
            float(np.vdot(self.at, self.at)) / n - of_mean
        ) / total
        shares["share_rest"] = 1 - shares["share_image"] - shares["share_position"]
        return shares

    def nulls(self) -> dict[str, float]:
        """The shares of independent noise; NaN where `shares` is."""
        n = self.n
        t = len(self.at)
        left = n * t - 1
        if n < 2 or t < 2:
            return dict.fromkeys(SHARES, math.nan)
        image = (n - 1) / left
        position = (t - 1) / left
        return dict(zip(SHARES, (image, position, 1 - image - position), strict=True))


def units_of(cells: NDArray[np.floating]) -> Float:
    """(times, places, dim) the tokens of a clip (times, rows, cols, dim) over their lengths, 0
    where a token has none."""
    x: Float = cells.reshape(len(cells), -1, cells.shape[-1]).astype(np.float64)
    length: Float = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


def clip_cosines(units: Float) -> dict[str, float]:
    """Each of `PER_CLIP`; NaN of one time, and of what no pair of tokens has."""
    there: Float = np.any(units, -1).astype(np.float64)
    same = float(np.vdot(units[:-1], units[1:]))
    n_same = float(np.vdot(there[:-1], there[1:]))
    frames = units.sum(1)
    n_frames = there.sum(1)
    every = float(np.vdot(frames[:-1], frames[1:])), float(n_frames[:-1] @ n_frames[1:])
    places = units.sum(0)
    n_places = there.sum(0)
    n_any = float((n_places**2 - n_places).sum())
    itself = _ratio(same, n_same)
    others = _ratio(every[0] - same, every[1] - n_same)
    over_time = _ratio(float(np.vdot(places, places)) - float(there.sum()), n_any)
    return dict(zip(PER_CLIP, (itself, others, itself - others, over_time), strict=True))


def _ratio(total: float, n: float) -> float:
    return total / n if n > 0 else math.nan


@dataclass
class ClipSums:
    """Sums over clips, from which the cosine with other clips follows.

    Attributes:
        n: clips.
        units: (times, places, dim) the sum of the tokens over their lengths.
        there: (times, places) tokens that have a length.
        same, n_same: the sum of `next_cos` over pairs of one clip, and the number of pairs.
    """

    n: int
    units: Float
    there: Float
    same: float
    n_same: float

    @classmethod
    def of(cls, units: Float) -> ClipSums:
        """The sums of clips, (clips, times, places, dim)."""
        there: Float = np.any(units, -1).astype(np.float64)
        same = float(np.vdot(units[:, :-1], units[:, 1:]))
        n_same = float(np.vdot(there[:, :-1], there[:, 1:]))
        return cls(len(units), units.sum(0), there.sum(0), same, n_same)

    def plus(self, other: ClipSums, sign: int = 1) -> ClipSums:
        """The sums with the clips of another added (sign 1) or removed (sign -1)."""
        return ClipSums(
            self.n + sign * other.n,
            self.units + sign * other.units,
            self.there + sign * other.there,
            self.same + sign * other.same,
            self.n_same + sign * other.n_same,
        )

    def cosine(self) -> float:
        """`other_clip_cos`; NaN of one clip or one time."""
        if self.n < 2:
            return math.nan
        every = float(np.vdot(self.units[:-1], self.units[1:])) - self.same
        return _ratio(
            every, float(np.vdot(self.there[:-1], self.there[1:])) - self.n_same
        )
