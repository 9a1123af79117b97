"""The kind of a head, read from its aligned map: measured scores, and classes from thresholds on
them.

Walmer et al. 2023 (section 4.2, Figs. 3, 14) distinguish strict, soft, axial and offset local heads
from global ones by eye; their code lists heads by hand. Here p(dy, dx) is a head's aligned map, of
total mass 1, and u that of uniform attention, that is, the map of a head that attends to all tokens
equally. The share m of p's mass in some region is measured by its excess over the share u of
uniform attention,

    excess(m) = (m - u) / (1 - u)           0: uniform attention, 1: everything,

so that one threshold suits 7 x 7 and 28 x 28 cells. Scores of `measure`:

- `self_mass`: p(0, 0).
- `focus_mass`: mass in the square of side 2 radius + 1 around the peak: starting at the largest
  cell, the square moves to its centre of mass until it stays. `offset_dy`, `offset_dx`: the centre
  of mass in it, and `offset_cells` its distance from the query.
- `row_mass`, `column_mass`: |dy| <= 1, and |dx| <= 1. `cross_mass`: dy = 0 or dx = 0.
- `elongation`: standard deviation along x over that along y (both with a cell's own 1/12 added to
  the variance). `off_cross`: the mass off the cross over what it would be if dy and dx were
  independent; 0 for a cross, 1 for a Gaussian of any width. Both are of what rises above the
  background, max(p - b u, 0) with b the median of p / u over pairs of tokens: otherwise a little
  attention spread evenly would decide them.

Sparse repeating patterns (section 4.1) are few keys that all queries share. With N spatial keys:

- `keys_share`: exp(entropy over spatial keys) / N, the share of keys in use: 1 if all alike.
- `query_repetition`: 1 - s / s0, s the standard deviation over queries (`query_std`) in units of
  the mean, s0 = sqrt(1 / keys_share - 1) that of queries which choose as many keys independently of
  each other: 1 where all queries attend to the same keys, about 0 where they do not.
  `head_repetition`: the same over a block's heads, with `head_std`.

Entropy and spread are means over images of what `extract` keeps. The entropy's part over prefix
keys is taken out as if each query used one of them, which makes `keys_share` an upper bound where
there are several.

In blocks with windows u is uniform attention within them, and N of `keys_share` the keys of a
query's window. `query_repetition` stays over all keys of the image, of which queries in different
windows share none: it is 0 where a window's keys are used alike, and with n keys in a window
1 - sqrt((N / n - 1) / (N - 1)) at most.

Temporal types of the heads of clips: scores, and classes from thresholds on them.

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
- `near frames`: excess of `near_frames_mass`, at least `focus`; of two times every frame is near.
- `all frames`: the rest, uniform attention among them.

Within a frame all heads are `same frame`, and over time at a place all are `strict local` in space,
by construction: the column `window` says which blocks these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.head_maps import uniform_map
from vitsee_core.attention.heads import StoredAttention
from vitsee_core.runtime.options import Option
from vitsee_core.types import Float
from vitsee_stores.errors import VitseeError

TYPES = (
    "strict local",
    "soft local",
    "axial local",
    "offset local",
    "repeating",
    "global",
)
UNDEFINED = "undefined"
DIRECTIONS = (
    "right",
    "down-right",
    "down",
    "down-left",
    "left",
    "up-left",
    "up",
    "up-right",
)
SHAPE_SCORES = (
    *("self_mass", "focus_mass", "offset_dy", "offset_dx", "offset_cells"),
    *("row_mass", "column_mass", "elongation", "cross_mass", "off_cross"),
)
CELL_VARIANCE = 1 / 12
# Of thresholds: shares and excesses over 0 up to 1, cells over 0, a ratio of 1 and more.
RANGES = {
    **dict.fromkeys(("strict", "focus", "repetition", "keys"), (0.0, 1.0)),
    **{"offset": (0.0, math.inf), "elongation": (1.0, math.inf)},
}
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


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of the classes.

    Attributes:
        strict: excess of self_mass.
        focus: excess of focus_mass, of the mass along an axis and of cross_mass.
        offset: cells.
        elongation: of axial heads, either way; of crosses off_cross below its inverse.
        repetition: query_repetition.
        keys: largest keys_share.
    """

    strict: Annotated[
        float, Option("strict local: excess mass on the query itself, at least.", above=0)
    ] = 0.5
    focus: Annotated[
        float,
        Option(
            "local: excess mass around the place where it gathers; axial: along an axis.",
            above=0,
        ),
    ] = 0.5
    offset: Annotated[
        float,
        Option("offset local: cells from the query to that place, at least.", above=0),
    ] = 0.5
    elongation: Annotated[
        float, Option("axial local: how much longer than wide, at least.", above=0)
    ] = 2.0
    repetition: Annotated[
        float,
        Option(
            "repeating: how far all queries share their keys (1: wholly), at least.",
            above=0,
        ),
    ] = 0.5
    keys: Annotated[
        float, Option("repeating: share of the keys in use, at most.", above=0)
    ] = 0.25

    def check(self) -> None:
        """Refuse thresholds that all heads or none can reach.

        Raises:
            VitseeError: names the threshold and its range.
        """
        for field in fields(self):
            value, (low, high) = getattr(self, field.name), RANGES[field.name]
            if not (low < value <= high or value == low == 1):
                range_ = (
                    f"above {low:g}, at most {high:g}"
                    if math.isfinite(high)
                    else (f"{low:g} or more" if low else "above 0")
                )
                raise VitseeError(f"--{field.name} is {value:g}; expected {range_}")

    def varied(
        self, factors: tuple[float, ...] = (0.8, 1.25)
    ) -> Iterator[tuple[str, Thresholds]]:
        """(what was changed, thresholds) with one of them multiplied by a factor."""
        for field in fields(self):
            for factor in factors:
                changed = {field.name: getattr(self, field.name) * factor}
                yield f"{field.name} x {factor:g}", replace(self, **changed)


@dataclass(frozen=True)
class Scores:
    """A head's scores, and the excess over uniform attention of those that are shares of mass."""

    values: dict[str, float]
    excess: dict[str, float]
    relative_elongation: float


def excess(mass: float, uniform: float) -> float:
    """The excess of a share of mass over uniform attention's: 0 to 1; NaN where the region contains
    all of the latter."""
    if uniform < 1 - 1e-9:
        return (mass - uniform) / (1 - uniform)
    return math.nan


def measure(p: Float, radius: int = 2, window: tuple[int, int] | None = None) -> Scores:
    """The scores of an aligned map, (2 rows - 1, 2 cols - 1) of mass 1; NaN where it is NaN.

    Args:
        p: the map.
        radius: cells on each side of the middle of the focus.
        window: rows and columns of cells of the windows in which queries see keys.
    """
    height, width = p.shape
    if np.isnan(p).any():
        nothing = dict.fromkeys(SHAPE_SCORES, math.nan)
        return Scores(nothing, nothing, math.nan)
    middle = (height // 2, width // 2)
    u = uniform_map((middle[0] + 1, middle[1] + 1), window)
    dy = np.arange(height) - middle[0]
    dx = np.arange(width) - middle[1]
    box, centre = _focus(p, radius)
    regions = {
        "self_mass": np.s_[middle[0], middle[1]],
        "focus_mass": box,
        "row_mass": np.s_[abs(dy) <= 1, :],
        "column_mass": np.s_[:, abs(dx) <= 1],
        "cross_mass": (dy == 0)[:, None] | (dx == 0),
    }
    mass = {name: float(p[region].sum()) for name, region in regions.items()}
    over = {
        name: excess(mass[name], float(u[region].sum()))
        for name, region in regions.items()
    }
    risen = _above_background(p, u)
    row = float(risen[middle[0]].sum())
    column = float(risen[:, middle[1]].sum())
    independent = (1 - row) * (1 - column)
    off_cross = 1 - float(risen[regions["cross_mass"]].sum())
    elongation = _elongation(risen, dy, dx)
    values = {
        **mass,
        "offset_dy": centre[0] - middle[0],
        "offset_dx": centre[1] - middle[1],
        "offset_cells": math.hypot(centre[0] - middle[0], centre[1] - middle[1]),
        "elongation": elongation,
        "off_cross": off_cross / independent if independent > 1e-9 else math.nan,
    }
    return Scores(
        {n: values[n] for n in SHAPE_SCORES}, over, elongation / _elongation(u, dy, dx)
    )


def _focus(p: Float, radius: int) -> tuple[tuple[slice, slice], tuple[float, float]]:
    """The square around the peak, and the centre of mass in it."""
    at = tuple(int(i) for i in np.unravel_index(int(p.argmax()), p.shape))
    seen: set[tuple[int, ...]] = set()
    while True:
        box = tuple(slice(max(0, i - radius), i + radius + 1) for i in at)
        part = p[box]
        y = box[0].start + float(part.sum(1) @ np.arange(part.shape[0])) / float(
            part.sum()
        )
        x = box[1].start + float(part.sum(0) @ np.arange(part.shape[1])) / float(
            part.sum()
        )
        seen.add(at)
        at = (round(y), round(x))
        if at in seen:
            return (box[0], box[1]), (y, x)


def _above_background(p: Float, u: Float) -> Float:
    """The part of a map above its background, scaled to mass 1; the map itself if nothing is."""
    lift = np.divide(p, u, out=np.zeros_like(p), where=u > 0).ravel()
    order = np.argsort(lift, kind="stable")
    median = lift[order][np.searchsorted(np.cumsum(u.ravel()[order]), 0.5)]
    risen = np.maximum(p - median * u, 0.0)
    mass = risen.sum()
    return risen / mass if mass > 1e-3 else p


def _elongation(p: Float, dy: NDArray[np.int64], dx: NDArray[np.int64]) -> float:
    def deviation(marginal: Float, offsets: NDArray[np.int64]) -> float:
        mean = float(marginal @ offsets)
        return math.sqrt(float(marginal @ (offsets - mean) ** 2) + CELL_VARIANCE)

    return deviation(p.sum(0), dx) / deviation(p.sum(1), dy)


def repetition(
    entropy: float,
    prefix_mass: float,
    std: float,
    n_keys: int,
    n_seen: float | None = None,
) -> tuple[float, float]:
    """(keys_share, repetition) from a head's means over images and `query_std`, or from a block's
    and `head_std`. n_seen: keys that a query sees in its window, by default all. NaN where nothing
    goes to spatial keys; the second also where all keys are used alike."""
    m = min(max(prefix_mass, 0.0), 1.0)
    if math.isnan(entropy + prefix_mass + std) or m > 1 - 1e-6:
        return math.nan, math.nan
    between = -sum(x * math.log(x) for x in (m, 1 - m) if x > 0)
    share = min(1.0, math.exp(max(0.0, (entropy - between) / (1 - m))) / n_keys)
    alone = math.sqrt(1 / share - 1)
    seen = min(1.0, share * n_keys / (n_seen or n_keys))
    return seen, 1 - n_keys * std / (1 - m) / alone if alone > 1e-3 else math.nan


def classify(
    scores: Scores, spread: Mapping[str, float], thresholds: Thresholds
) -> tuple[str, str]:
    """(class of `TYPES`, detail): the direction of an offset head, `row`, `column` or `cross` of an
    axial one, else "". The first of strict, offset, axial, soft, repeating and global whose
    conditions hold.

    A head without any spatial mass is `undefined`.
    """
    values = scores.values
    over = scores.excess
    t = thresholds
    if math.isnan(values["self_mass"]):
        return UNDEFINED, ""
    if over["self_mass"] >= t.strict:
        return "strict local", ""
    local = over["focus_mass"] >= t.focus
    if local and values["offset_cells"] >= t.offset:
        return "offset local", direction(values["offset_dy"], values["offset_dx"])
    if axis := _axis(scores, t):
        return "axial local", axis
    if local:
        return "soft local", ""
    if spread["keys_share"] <= t.keys and spread["query_repetition"] >= t.repetition:
        return "repeating", ""
    return "global", ""


def _axis(scores: Scores, t: Thresholds) -> str:
    """The axis along which a head is elongated, both in cells and relative to uniform attention (a
    grid of 4 x 16 cells makes every map long)."""
    along_x = (scores.values["elongation"], scores.relative_elongation)
    if scores.excess["row_mass"] >= t.focus and min(along_x) >= t.elongation:
        return "row"
    if scores.excess["column_mass"] >= t.focus and max(along_x) <= 1 / t.elongation:
        return "column"
    off = scores.values["off_cross"]
    if scores.excess["cross_mass"] >= t.focus and off <= 1 / t.elongation:
        return "cross"
    return ""


def direction(dy: float, dx: float) -> str:
    """One of `DIRECTIONS`, the nearest; rows count from the top."""
    return DIRECTIONS[round(math.atan2(dy, dx) / (math.pi / 4)) % 8]


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
    own = times - 1
    near = slice(max(0, times - 2), times + 1)
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
        "near": excess(values["near_frames_mass"], float(u[near].sum())),
        "place": excess(elsewhere, uniform_elsewhere(block)),
    }
    return TimeScores(values, at - own, over)


def uniform_elsewhere(block: StoredAttention) -> float:
    """The share of uniform attention at the same place in other frames."""
    layout = block.layout
    times = layout.frames or 1
    grid = layout.grid or (1, layout.rows)
    in_time = uniform_map((times, 1), (block.times or times, 1))[:, 0]
    in_space = uniform_map(grid, block.window)
    return float((1 - in_time[times - 1]) * in_space[grid[0] - 1, grid[1] - 1])


def classify_time(
    scores: TimeScores, thresholds: Thresholds, block: StoredAttention
) -> str:
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
    if over["near"] >= thresholds.focus:
        return "near frames"
    return "all frames"
