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
- `focus_mass`: mass in the square of side 2 radius + 1 around the peak. The square starts at the
  largest cell and moves to its centre of mass until it stays. `offset_dy` and `offset_dx` are the
  centre of mass in it, and `offset_cells` is its distance from the query.
- `row_mass`, `column_mass`: |dy| <= 1, and |dx| <= 1. `cross_mass`: dy = 0 or dx = 0.
- `elongation`: standard deviation along x over that along y (both with a cell's own 1/12 added to
  the variance). `off_cross`: the mass off the cross, divided by what it would be if dy and dx were
  independent; 0 for a cross, 1 for a Gaussian of any width. Both are computed on what rises above
  the background, max(p - b u, 0), with b the median of p / u over pairs of tokens: otherwise a
  little attention spread evenly would decide them.

Sparse repeating patterns (section 4.1) are few keys that all queries share. The scores, for N
spatial keys:

- `keys_share`: exp(entropy over spatial keys) / N, the share of keys in use: 1 if all alike.
- `query_repetition`: 1 - s / s0, where s is the standard deviation over queries (`query_std`) in
  units of the mean, and s0 = sqrt(1 / keys_share - 1) is that of queries which choose as many keys
  independently of each other. It is 1 if all queries attend to the same keys, and about 0 if they
  choose independently. `head_repetition`: the same over a block's heads, with `head_std`.

Entropy and spread are means over images of what `extract` keeps. The entropy's part over prefix
keys is taken out as if each query used one of them, which makes `keys_share` an upper bound where
there are several.

In blocks with windows u is uniform attention within a window, and `keys_share` counts the keys of a
query's window. `query_repetition` still counts all keys of the image, and queries in different
windows share none: it is 0 if a window's keys are used alike, and with n keys in a window it is
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
from typing import Annotated, NamedTuple

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
# The variance of a uniform distribution over a cell of side 1.
CELL_VARIANCE = 1 / 12

# Threshold -> its range, without the lower end (but 1 is a possible ratio).
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
        strict: the least excess of self_mass.
        focus: the least excess of focus_mass, of the mass along an axis, and of cross_mass.
        offset: the least distance of an offset head's focus, in cells.
        elongation: the least elongation of axial heads, along either axis; crosses have an
            off_cross of at most its inverse.
        repetition: the least query_repetition.
        keys: the largest keys_share.
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
            value = getattr(self, field.name)
            low, high = RANGES[field.name]
            if low < value <= high or value == low == 1:
                continue
            expected = "above 0"
            if math.isfinite(high):
                expected = f"above {low:g}, at most {high:g}"
            elif low:
                expected = f"{low:g} or more"
            raise VitseeError(f"--{field.name} is {value:g}; expected {expected}")

    def varied(
        self, factors: tuple[float, ...] = (0.8, 1.25)
    ) -> Iterator[tuple[str, Thresholds]]:
        """Yield thresholds with one of them multiplied by a factor, each with its description."""
        for field in fields(self):
            for factor in factors:
                changed = {field.name: getattr(self, field.name) * factor}
                yield f"{field.name} x {factor:g}", replace(self, **changed)


class Scores(NamedTuple):
    """A head's scores from its aligned map.

    Attributes:
        values: score -> value, for all of `SHAPE_SCORES`.
        excess: score -> its excess over uniform attention, for those that are shares of mass.
        relative_elongation: the elongation divided by that of uniform attention.
    """

    values: dict[str, float]
    excess: dict[str, float]
    relative_elongation: float


def excess(mass: float, uniform: float) -> float:
    """Return the excess of a share of mass over uniform attention's share, (m - u) / (1 - u).

    It is 0 for uniform attention and 1 if the region has all mass; NaN if the region has all mass
    of uniform attention, too.
    """
    if uniform < 1 - 1e-9:
        return (mass - uniform) / (1 - uniform)
    return math.nan


def measure(p: Float, radius: int = 2, window: tuple[int, int] | None = None) -> Scores:
    """Return the scores of an aligned map; all are NaN if the map has a NaN.

    Args:
        p: (2 rows - 1, 2 cols - 1) a head's attention by offset from query to key, of mass 1.
        radius: cells on each side of the middle of the focus, a square of side 2 radius + 1.
        window: rows and columns of cells of the windows in which queries see keys; None if they
            see the whole image.
    """
    height, width = p.shape
    if np.isnan(p).any():
        undefined = dict.fromkeys(SHAPE_SCORES, math.nan)
        return Scores(undefined, undefined, math.nan)
    # The cell of offset 0; the grid of tokens has middle + 1 rows and columns.
    middle = (height // 2, width // 2)
    u = uniform_map((middle[0] + 1, middle[1] + 1), window)
    dy = np.arange(height) - middle[0]
    dx = np.arange(width) - middle[1]
    focus, centre = _find_focus(p, radius)
    regions = {
        "self_mass": np.s_[middle[0], middle[1]],
        "focus_mass": focus,
        "row_mass": np.s_[abs(dy) <= 1, :],
        "column_mass": np.s_[:, abs(dx) <= 1],
        "cross_mass": (dy == 0)[:, None] | (dx == 0),
    }
    mass = {name: float(p[region].sum()) for name, region in regions.items()}
    excesses = {
        name: excess(mass[name], float(u[region].sum()))
        for name, region in regions.items()
    }
    risen = _above_background(p, u)
    row = float(risen[middle[0]].sum())
    column = float(risen[:, middle[1]].sum())
    # P(dy != 0 and dx != 0) = P(dy != 0) P(dx != 0) if dy and dx are independent.
    independent_off_cross = (1 - row) * (1 - column)
    off_cross = math.nan
    if independent_off_cross > 1e-9:
        cross = float(risen[regions["cross_mass"]].sum())
        off_cross = (1 - cross) / independent_off_cross
    elongation = _elongation(risen, dy, dx)
    values = {
        **mass,
        "offset_dy": centre[0] - middle[0],
        "offset_dx": centre[1] - middle[1],
        "offset_cells": math.hypot(centre[0] - middle[0], centre[1] - middle[1]),
        "elongation": elongation,
        "off_cross": off_cross,
    }
    return Scores(
        values={name: values[name] for name in SHAPE_SCORES},
        excess=excesses,
        relative_elongation=elongation / _elongation(u, dy, dx),
    )


def _find_focus(p: Float, radius: int) -> tuple[tuple[slice, slice], tuple[float, float]]:
    """Return the square around the peak, and the centre of mass (y, x) in it, in cells."""
    start_y, start_x = np.unravel_index(int(p.argmax()), p.shape)
    middle = (int(start_y), int(start_x))
    visited: set[tuple[int, int]] = set()
    while True:
        rows = slice(max(0, middle[0] - radius), middle[0] + radius + 1)
        cols = slice(max(0, middle[1] - radius), middle[1] + radius + 1)
        square = p[rows, cols]
        mass = float(square.sum())
        y = rows.start + float(square.sum(1) @ np.arange(square.shape[0])) / mass
        x = cols.start + float(square.sum(0) @ np.arange(square.shape[1])) / mass
        visited.add(middle)
        middle = (round(y), round(x))
        # The square stays, or comes back to where it was: without this it could go round for ever.
        if middle in visited:
            return (rows, cols), (y, x)


def _above_background(p: Float, u: Float) -> Float:
    """Return what rises above the background b u of a map, scaled to mass 1.

    b is the median of p / u over pairs of tokens. A map that nowhere rises above it is returned
    as it is.
    """
    ratio = np.divide(p, u, out=np.zeros_like(p), where=u > 0).ravel()
    # A median weighted by u: an offset counts as often as there are pairs of tokens with it.
    order = np.argsort(ratio, kind="stable")
    cumulated_pairs = np.cumsum(u.ravel()[order])
    median = ratio[order][np.searchsorted(cumulated_pairs, 0.5)]
    risen = np.maximum(p - median * u, 0.0)
    mass = risen.sum()
    return risen / mass if mass > 1e-3 else p


def _elongation(p: Float, dy: NDArray[np.int64], dx: NDArray[np.int64]) -> float:
    """Return the standard deviation of a map along x over that along y."""
    return _deviation(p.sum(0), dx) / _deviation(p.sum(1), dy)


def _deviation(marginal: Float, offsets: NDArray[np.int64]) -> float:
    """Return the standard deviation of offsets in cells, with the variance within a cell."""
    mean = float(marginal @ offsets)
    # Without the cell's own variance a map of a single cell would have none.
    return math.sqrt(float(marginal @ (offsets - mean) ** 2) + CELL_VARIANCE)


def repetition(
    entropy: float,
    prefix_mass: float,
    std: float,
    n_keys: int,
    n_seen: float | None = None,
) -> tuple[float, float]:
    """Return (keys_share, repetition), over queries or over heads.

    Both are NaN if nothing goes to spatial keys; repetition is NaN also if all keys are used alike.

    Args:
        entropy: mean entropy of attention, in nats, of a head or of a block's mean head.
        prefix_mass: mean share of attention to prefix tokens, of the same.
        std: `query_std` of a head, or `head_std` of a block.
        n_keys: spatial keys of the image.
        n_seen: keys that a query sees in its window; by default all.
    """
    m = min(max(prefix_mass, 0.0), 1.0)
    if math.isnan(entropy + prefix_mass + std) or m > 1 - 1e-6:
        return math.nan, math.nan
    # H = H(m, 1 - m) + (1 - m) H(spatial keys), with all prefix keys as if they were one.
    prefix_entropy = 0.0
    if m > 0:
        prefix_entropy = -(m * math.log(m) + (1 - m) * math.log(1 - m))
    spatial_entropy = max(0.0, (entropy - prefix_entropy) / (1 - m))
    share = min(1.0, math.exp(spatial_entropy) / n_keys)
    seen_share = min(1.0, share * n_keys / (n_seen or n_keys))
    # s0: the relative deviation of independent choices of share * n_keys keys.
    independent_std = math.sqrt(1 / share - 1)
    if independent_std <= 1e-3:
        return seen_share, math.nan
    # The mean weight of a spatial key is (1 - m) / n_keys; s is std in units of it.
    relative_std = n_keys * std / (1 - m)
    return seen_share, 1 - relative_std / independent_std


def classify(
    scores: Scores, spread: Mapping[str, float], thresholds: Thresholds
) -> tuple[str, str]:
    """Return a head's class, one of `TYPES`, and its detail.

    The class is the first of strict, offset, axial, soft, repeating and global whose conditions
    hold. The detail is the direction of an offset head, `row`, `column` or `cross` of an axial
    head, else "". A head without any spatial mass is `undefined`.

    Args:
        scores: the scores of its aligned map.
        spread: `keys_share` and `query_repetition`.
        thresholds: the limits of the classes.
    """
    values = scores.values
    if math.isnan(values["self_mass"]):
        return UNDEFINED, ""
    if scores.excess["self_mass"] >= thresholds.strict:
        return "strict local", ""
    is_local = scores.excess["focus_mass"] >= thresholds.focus
    if is_local and values["offset_cells"] >= thresholds.offset:
        return "offset local", direction(values["offset_dy"], values["offset_dx"])
    axis = _find_axis(scores, thresholds)
    if axis:
        return "axial local", axis
    if is_local:
        return "soft local", ""
    uses_few_keys = spread["keys_share"] <= thresholds.keys
    if uses_few_keys and spread["query_repetition"] >= thresholds.repetition:
        return "repeating", ""
    return "global", ""


def _find_axis(scores: Scores, thresholds: Thresholds) -> str:
    """Return `row`, `column` or `cross`, along which a head is elongated; "" for none of them."""
    # In cells, and relative to uniform attention: a grid of 4 x 16 cells makes every map long.
    elongations = (scores.values["elongation"], scores.relative_elongation)
    excesses = scores.excess
    focus = thresholds.focus
    if excesses["row_mass"] >= focus and min(elongations) >= thresholds.elongation:
        return "row"
    inverse = 1 / thresholds.elongation
    if excesses["column_mass"] >= focus and max(elongations) <= inverse:
        return "column"
    if excesses["cross_mass"] >= focus and scores.values["off_cross"] <= inverse:
        return "cross"
    return ""


def direction(dy: float, dx: float) -> str:
    """Return the nearest of `DIRECTIONS`; dy is positive downwards, as rows count from the top."""
    eighth_turn = math.pi / 4
    return DIRECTIONS[round(math.atan2(dy, dx) / eighth_turn) % 8]


class TimeScores(NamedTuple):
    """A head's scores in time.

    Attributes:
        values: score -> value, for all of `TIME_SCORES`.
        offset: the offset with the largest share, in cells of the grid in time.
        over: the excess over uniform attention at the `offset`, in `near` frames, and at the same
            `place` in other frames; classes are decided by these.
    """

    values: dict[str, float]
    offset: int
    over: dict[str, float]


def measure_time(p: Float, self_mass: float, block: StoredAttention) -> TimeScores:
    """Return the scores in time of a clip's head; all are NaN if p has a NaN.

    Args:
        p: (2 times - 1,) share of attention by offset from query to key in time, of mass 1.
        self_mass: share of attention at the query's own position in the image, in all frames.
        block: the head's block.
    """
    times = (len(p) + 1) // 2
    if np.isnan(p).any():
        return TimeScores(dict.fromkeys(TIME_SCORES, math.nan), 0, {})
    u = uniform_map((times, 1), (block.times or times, 1))[:, 0]
    # The index of offset 0 in p, and the indices of offsets -1 to 1.
    same_frame = times - 1
    near = slice(max(0, times - 2), times + 1)
    peak = int(p.argmax())
    # At least so much of the mass at the same position is in other frames than the query's.
    elsewhere = max(0.0, self_mass - float(p[same_frame]))
    stride_frames = block.layout.stride_frames or math.nan
    values = {
        "frame_mass": float(p[same_frame]),
        "near_frames_mass": float(p[near].sum()),
        "offset_frames": (peak - same_frame) * stride_frames,
        "offset_frames_mass": float(p[peak]),
        "place_elsewhere": elsewhere,
    }
    over = {
        "offset": excess(values["offset_frames_mass"], float(u[peak])),
        "near": excess(values["near_frames_mass"], float(u[near].sum())),
        "place": excess(elsewhere, uniform_elsewhere(block)),
    }
    return TimeScores(values, peak - same_frame, over)


def uniform_elsewhere(block: StoredAttention) -> float:
    """Return the share of uniform attention at the query's position in other frames."""
    layout = block.layout
    times = layout.frames or 1
    grid = layout.grid or (1, layout.rows)
    in_time = uniform_map((times, 1), (block.times or times, 1))[:, 0]
    in_space = uniform_map(grid, block.window)
    same_position = in_space[grid[0] - 1, grid[1] - 1]
    return float((1 - in_time[times - 1]) * same_position)


def classify_time(
    scores: TimeScores, thresholds: Thresholds, block: StoredAttention
) -> str:
    """Return a head's class in time, one of `TIME_TYPES`, or `undefined` without spatial mass."""
    if math.isnan(scores.values["frame_mass"]):
        return UNDEFINED
    # Attention within a frame has no choice.
    if block.times == 1 or block.layout.frames == 1:
        return "same frame"
    if scores.over["offset"] >= thresholds.focus:
        near_types = {0: "same frame", -1: "previous frame", 1: "next frame"}
        return near_types.get(scores.offset, "frame offset")
    if scores.over["place"] >= thresholds.strict:
        return "same place"
    if scores.over["near"] >= thresholds.focus:
        return "near frames"
    return "all frames"
