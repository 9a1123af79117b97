"""One head measured and classified: with all images, without each block of images, and with each
threshold changed; and the clearest heads of each class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.head_types.figure import AGREEMENT
from vitsee_core.analyses.head_types.head_geometry import (
    SHAPE_SCORES,
    TIME_AGREEMENT,
    TIME_TYPES,
    TYPES,
    Scores,
    Thresholds,
    TimeScores,
    classify,
    classify_time,
    measure,
    measure_time,
    repetition,
)
from vitsee_core.attention.head_maps import ALIGNED_FRAMES, SlabSums, mean_maps
from vitsee_core.attention.heads import StoredAttention, keys_seen
from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.types import Float

if TYPE_CHECKING:
    from vitsee_stores.plan import Clip

# In the table's order: the distance in pixels stands after the one in cells.
SCORES = (
    *SHAPE_SCORES[:5],
    "offset_px",
    *SHAPE_SCORES[5:],
    *("query_std", "head_std", "keys_share", "query_repetition", "head_repetition"),
)
# Summaries of which `repetition` is made; sums over the images of each slab are kept.
PER_IMAGE = ("entropy", "prefix_mass", "query_std", "head_std")
NO_SPREAD = dict.fromkeys(("std", "low", "high"), math.nan)
# The jackknife leaves out runs of whole slabs, as sums are kept by slab: at most so many runs, and
# no intervals from fewer than so many.
MAX_BLOCKS = 20
MIN_BLOCKS = 10
INTERVAL = (
    f"delete-a-block jackknife over up to {MAX_BLOCKS} runs of slabs: std its standard "
    "error, low and high value -+ t(0.975, runs - 1) * std; empty where there are "
    f"fewer than {MIN_BLOCKS} slabs"
)


class SpaceMeasurement(NamedTuple):
    """Scores of a head's aligned map, over some blocks of images.

    Attributes:
        map: (2 rows - 1, 2 cols - 1) attention by offset from query to key, of mass 1.
        n_images: number of images in the map.
        shape: the scores that the map alone gives.
        values: score -> its value, for all of `SCORES`.
    """

    map: Float
    n_images: int
    shape: Scores
    values: dict[str, float]


class TimeMeasurement(NamedTuple):
    """Scores of a head over the frames of clips.

    Attributes:
        shares: (2 times - 1,) share of attention by offset in time.
        scores: the scores that they give.
    """

    shares: Float
    scores: TimeScores


class HeadResult:
    """One head of one block: its map, its scores, and its type.

    The type is found with all images, with each block of images left out, and with each threshold
    changed.

    Attributes:
        map: (2 rows - 1, 2 cols - 1) the aligned map.
        variants: changed threshold -> the type that it gives.
        in_time: measurements over frames, None for a head of images.
        time: the class in time, None for a head of images.
        n_images: number of images in the map.
        values: score -> its value.
        type, detail: the class in space, as `head_geometry.classify` returns it.
        replicates: scores without each block of images.
        steady, steady_slabs: the shares of changed thresholds, and of blocks of images left out,
            that give the same type; NaN if nothing could be left out.
        steady_time: the same two shares for the class in time.
    """

    def __init__(
        self,
        block: StoredAttention,
        head: int,
        sums: SlabSums,
        thresholds: Thresholds,
        radius: int,
        clip: Clip | None = None,
    ) -> None:
        self.block = block
        self.head = head
        self._radius = radius
        self._clip = clip
        # With all images.
        n_blocks = len(sums.n_images)
        all_blocks = np.ones(n_blocks, bool)
        self.map, self.n_images, self.shape, self.values = self._measure(sums, all_blocks)
        self.type, self.detail = self._classify(self.shape, self.values, thresholds)
        # With each threshold changed.
        self.variants = {
            name: self._classify(self.shape, self.values, variant)[0]
            for name, variant in thresholds.varied()
        }
        self.in_time: TimeMeasurement | None = None
        if clip is not None:
            self.in_time = self._measure_time(sums, all_blocks)
        self.time = self._classify_time(self.in_time, thresholds)
        # Without each block of images.
        self.replicates: list[dict[str, float]] = []
        same_type = []
        same_time = []
        if n_blocks > 1:
            for left_out in range(n_blocks):
                included = np.arange(n_blocks) != left_out
                _, _, shape, values = self._measure(sums, included)
                kind, _ = self._classify(shape, values, thresholds)
                same_type.append(kind == self.type)
                if clip is not None:
                    in_time = self._measure_time(sums, included)
                    values = {**values, **in_time.scores.values}
                    time = self._classify_time(in_time, thresholds)
                    same_time.append(time == self.time)
                self.replicates.append(values)
        # How often the class stays.
        self.steady = _share_true([kind == self.type for kind in self.variants.values()])
        self.steady_slabs = _share_true(same_type)
        times = [
            self._classify_time(self.in_time, variant)
            for _, variant in thresholds.varied()
        ]
        self.steady_time = (
            _share_true([time == self.time for time in times]),
            _share_true(same_time),
        )

    def _classify(
        self, shape: Scores, values: dict[str, float], thresholds: Thresholds
    ) -> tuple[str, str]:
        """Return the class in space and its detail, as `head_geometry.classify` does."""
        # Attention over time alone sees one position, so that it is strictly local by construction.
        sees_own_position = self._clip is not None and self.block.window == (1, 1)
        if sees_own_position and not math.isnan(values["self_mass"]):
            return TYPES[0], ""
        return classify(shape, values, thresholds)

    def _measure_time(
        self, sums: SlabSums, included: NDArray[np.bool_]
    ) -> TimeMeasurement:
        """Measure the head over frames, on the included blocks of images.

        included: (blocks of images,) whether each is used.
        """
        block = self.block
        # (blocks of images, 2 times - 1)
        by_block = sums.sums[ALIGNED_FRAMES, block.group][:, block.row, self.head]
        total = by_block[included].sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.where(total.sum() > 0, total / total.sum(), np.nan)
        self_mass = self._measure(sums, included).values["self_mass"]
        return TimeMeasurement(shares, measure_time(shares, self_mass, block))

    def _classify_time(
        self, measurement: TimeMeasurement | None, thresholds: Thresholds
    ) -> str | None:
        """Return the class in time; None for a head of images."""
        if measurement is None:
            return None
        return classify_time(measurement.scores, thresholds, self.block)

    def _measure(self, sums: SlabSums, included: NDArray[np.bool_]) -> SpaceMeasurement:
        """Measure the head's map and its repetition, on the included blocks of images.

        included: (blocks of images,) whether each is used.
        """
        block = self.block
        layout = block.layout
        group = block.group
        n = int(sums.n_images[included].sum())
        # (2 rows - 1, 2 cols - 1), the sum over images
        total = sums.sums["aligned", group][:, block.row, self.head][included].sum(0)
        maps, n_counted = mean_maps(total[None], n, layout, "aligned")
        shape = measure(maps[0], self._radius, block.window)
        # Each is (heads,), but for `head_std`, which is one number of the block.
        entropy, prefix_mass, query_std, head_std = (
            sums.sums[name, group][:, block.row][included].sum(0) / n
            for name in PER_IMAGE
        )
        n_keys = layout.n_body
        if self._clip is not None and self._clip.by_frame:
            # A model that sees single frames has the spreads of single frames.
            n_keys //= layout.frames or 1
        keys_share, query_repetition = repetition(
            float(entropy[self.head]),
            float(prefix_mass[self.head]),
            float(query_std[self.head]),
            n_keys=n_keys,
            n_seen=keys_seen(block),
        )
        # Over heads the spread is measured against the mean head of the block.
        _, head_repetition = repetition(
            float(entropy[: block.n_heads].mean()),
            float(prefix_mass[: block.n_heads].mean()),
            float(head_std),
            n_keys=n_keys,
        )
        # A grid without a known stride has no distances in pixels.
        step_y, step_x = layout.stride_px or (math.nan, math.nan)
        offset_y_px = shape.values["offset_dy"] * step_y
        offset_x_px = shape.values["offset_dx"] * step_x
        values = {
            **shape.values,
            "offset_px": math.hypot(offset_y_px, offset_x_px),
            "query_std": float(query_std[self.head]),
            "head_std": float(head_std),
            "keys_share": keys_share,
            "query_repetition": query_repetition,
            "head_repetition": head_repetition,
        }
        return SpaceMeasurement(maps[0], int(n_counted[0]), shape, values)

    def scores(self) -> list[dict[str, Any]]:
        """Return the cells metric, value, std, low and high of each score, and its replicates."""
        values = {name: self.values[name] for name in SCORES}
        if self.in_time is not None:
            values.update(self.in_time.scores.values)
        rows: list[dict[str, Any]] = []
        for name, value in values.items():
            replicates = np.array([replicate[name] for replicate in self.replicates])
            enough = len(replicates) >= MIN_BLOCKS
            # Without replicates std, low and high are NaN.
            std, low, high = interval(
                np.array(value), replicates if enough else replicates[:0]
            )
            row = {
                "metric": name,
                "value": value,
                "std": float(std),
                "low": float(low),
                "high": float(high),
            }
            if enough:
                row[REPLICATES] = replicates
            rows.append(row)
        steadiness = dict(zip(AGREEMENT, (self.steady, self.steady_slabs), strict=True))
        if self.in_time is not None:
            steadiness.update(zip(TIME_AGREEMENT, self.steady_time, strict=True))
        for name, value in steadiness.items():
            rows.append({"metric": name, "value": value, **NO_SPREAD})
        return rows

    def clarity(self) -> float:
        """Return how clear an example of its type the head is; larger is clearer."""
        focus = self.shape.excess["focus_mass"]
        clarity = focus
        if self.type == "strict local":
            clarity = self.values["self_mass"]
        elif self.type == "axial local":
            # Rows have an elongation above 1, columns below: both are equally clear.
            clarity = abs(math.log(self.values["elongation"]))
        elif self.type == "repeating":
            clarity = self.values["query_repetition"]
        elif self.type == "global":
            clarity = -focus
        # A head without the score is an example only if no other has its type.
        return -math.inf if math.isnan(clarity) else clarity


def _share_true(values: Sequence[bool]) -> float:
    """Return the share of true values; NaN if there are no values."""
    return float(np.mean(values)) if values else math.nan


def clearest_heads(heads: Sequence[HeadResult]) -> list[HeadResult]:
    """Return the clearest head of each type, in the order of `TYPES`."""
    examples = []
    for kind in TYPES:
        same_type = [head for head in heads if head.type == kind]
        if same_type:
            examples.append(max(same_type, key=HeadResult.clarity))
    return examples


def clearest_heads_in_time(heads: Sequence[HeadResult]) -> list[HeadResult]:
    """Return the clearest head of each class in time, in the order of `TIME_TYPES`.

    It is the one with the largest share at a single offset. For the classes `near frames` and
    `all frames` it is the one whose largest share is smallest, that is, the most even one.
    """
    examples = []
    for kind in TIME_TYPES:
        same_time = [head for head in heads if head.time == kind]
        if same_time:
            shares = [
                head.in_time.scores.values["offset_frames_mass"]
                for head in same_time
                if head.in_time is not None
            ]
            if kind in ("near frames", "all frames"):
                clearest = int(np.argmin(shares))
            else:
                clearest = int(np.argmax(shares))
            examples.append(same_time[clearest])
    return examples
