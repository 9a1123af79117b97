"""Temporal types of the heads of clips: scores, and classes from thresholds on them.

p(dt) is the share of a head's attention at the offset dt in time, key minus query, in cells of the
grid in time (frames, or tubelets of two), and u that of attention spread evenly over what a query
sees. As in space, a share m counts by its excess (m - u) / (1 - u) over the uniform one. Scores:

- `frame_mass`: p(0), the query's own frame. `near_frames_mass`: |dt| <= 1.
- `offset_frames`: the offset with the largest share, in sampled frames, negative for the past;
  `offset_frames_mass`: that share.
- `place_elsewhere`: max(0, self_mass - frame_mass). Of attention at the same place at whatever time
  (self_mass) no more than frame_mass can be in the query's own frame, so that at least this much is
  at the same place in other frames; exactly that where queries see their own place alone.

Classes, the first whose condition holds; `offset` heads and `same place` are the temporal ones:

- `same frame`, `previous frame`, `next frame`, `frame offset`: excess of the largest share at 0,
  -1, +1 or another offset, at least `focus`. Shares are of all queries: an offset that few of them
  have, as the first frame has none before it, cannot reach it.
- `same place`: excess of `place_elsewhere`, at least `strict`.
- `near frames`: excess of `near_frames_mass`, at least `focus`.
- `all frames`: the rest, uniform attention among them.

Within a frame all heads are `same frame`, and over time at a place all are `strict local` in space,
by construction: the column `window` says which blocks these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.head_types.head_geometry import UNDEFINED, Thresholds, excess
from vitsee_core.attention.head_maps import uniform_map
from vitsee_core.attention.heads import StoredAttention
from vitsee_core.types import Float

TIME_TYPES = (
    *("same frame", "previous frame", "next frame", "frame offset"),
    *("same place", "near frames", "all frames"),
)
TEMPORAL = TIME_TYPES[1:5]
TIME_SCORES = (
    *("frame_mass", "near_frames_mass", "offset_frames", "offset_frames_mass"),
    "place_elsewhere",
)
TIME_AGREEMENT = ("same_time_thresholds", "same_time_slabs")
FEWEST_TIMES = 3  # with fewer every frame is near


@dataclass(frozen=True)
class TimeScores:
    """A head's scores in time, and the excess over uniform attention by which it is classified."""

    values: dict[str, float]
    offset: int  # in cells, of the largest share
    over: dict[str, float]


def measure_time(p: Float, self_mass: float, block: StoredAttention) -> TimeScores:
    """The scores of p: (2 times - 1,) of mass 1, NaN where it is NaN. self_mass: as in space."""
    times = (len(p) + 1) // 2
    if np.isnan(p).any():
        return TimeScores(dict.fromkeys(TIME_SCORES, math.nan), 0, {})
    u = uniform_map((times, 1), (block.times or times, 1))[:, 0]
    own, near = times - 1, slice(max(0, times - 2), times + 1)
    at = int(p.argmax())
    elsewhere = max(0.0, self_mass - float(p[own]))
    values = {
        "frame_mass": float(p[own]),
        "near_frames_mass": float(p[near].sum()),
        "offset_frames": (at - own) * (block.layout.stride_frames or math.nan),
        "offset_frames_mass": float(p[at]),
        "place_elsewhere": elsewhere,
    }
    over = {
        "offset": excess(values["offset_frames_mass"], float(u[at])),
        "near": excess(values["near_frames_mass"], float(u[near].sum()))
        if times >= FEWEST_TIMES
        else math.nan,
        "place": excess(elsewhere, uniform_elsewhere(block)),
    }
    return TimeScores(values, at - own, over)


def uniform_elsewhere(block: StoredAttention) -> float:
    """The share of uniform attention at the same place in other frames."""
    layout = block.layout
    times, grid = layout.frames or 1, layout.grid or (1, layout.rows)
    in_time = uniform_map((times, 1), (block.times or times, 1))[:, 0]
    in_space = uniform_map(grid, block.window)
    return float((1 - in_time[times - 1]) * in_space[grid[0] - 1, grid[1] - 1])


def classify_time(scores: TimeScores, thresholds: Thresholds, block: StoredAttention) -> str:
    """The class of `TIME_TYPES`; `undefined` of a head without any spatial mass."""
    if math.isnan(scores.values["frame_mass"]):
        return UNDEFINED
    if block.times == 1 or block.layout.frames == 1:
        return "same frame"
    over = scores.over
    if over["offset"] >= thresholds.focus:
        named = {0: "same frame", -1: "previous frame", 1: "next frame"}
        return named.get(scores.offset, "frame offset")
    if over["place"] >= thresholds.strict:
        return "same place"
    return "near frames" if over["near"] >= thresholds.focus else "all frames"
