"""Slowness: how far the tokens of a place stay what they are from one frame of a clip to the next.

u_tp is a token at time t and place p over its length (a token of length 0 has no cosine: it is left
out). Per clip, means over times and places:

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

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float

NEXT = "next_cos"
PER_CLIP = (NEXT, "next_other_cos", "slowness", "any_frame_cos")
OF_ALL = "other_clip_cos"
IN_TIME = (*PER_CLIP, OF_ALL)


def units_of(cells: NDArray[np.floating]) -> Float:
    """(times, places, dim) the tokens of a clip (times, rows, cols, dim) over their lengths, 0
    where a token has none."""
    x: Float = cells.reshape(len(cells), -1, cells.shape[-1]).astype(np.float64)
    length: Float = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


def clip_cosines(units: Float) -> dict[str, float]:
    """Each of `PER_CLIP`; NaN of one time, and of what no pair of tokens has."""
    there: Float = np.any(units, -1).astype(np.float64)
    same, n_same = float(np.vdot(units[:-1], units[1:])), float(np.vdot(there[:-1], there[1:]))
    frames, n_frames = units.sum(1), there.sum(1)
    every = float(np.vdot(frames[:-1], frames[1:])), float(n_frames[:-1] @ n_frames[1:])
    places, n_places = units.sum(0), there.sum(0)
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
        return _ratio(every, float(np.vdot(self.there[:-1], self.there[1:])) - self.n_same)
