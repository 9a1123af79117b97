"""Head types: which heads are local, axial, offset or global?

Walmer et al. 2023 name strict, soft, axial and offset local heads (section 4.2, Figs. 3, 14) and
sparse repeating patterns (section 4.1) from looking at maps, and list heads by hand. Here
thresholds on measured scores decide; `head_geometry` defines the scores and the classes. Heads of
clips have two classes: `type` by the positions in the image, and `time` by the frames: the query's
own, the previous or the next one, the same position in other frames, or all frames. Every class is
about the mean over images: a head may attend locally in some images and globally in others.

Three things show how reliable a class is. `same_type_thresholds` is the share of changed thresholds
(each one by itself times 0.8 and times 1.25) that give the same class. `same_type_slabs` is the
share of jackknife samples, each without one block of the images, that give the same class. The
scores have intervals from the same samples if there are at least 10 of them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.head_types.figure import AGREEMENT, plot
from vitsee_core.analyses.head_types.head_geometry import (
    SHAPE_SCORES,
    TEMPORAL,
    TIME_AGREEMENT,
    TIME_SCORES,
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
from vitsee_core.attention.head_maps import (
    ALIGNED_FRAMES,
    SlabSums,
    blocks_of_each,
    mean_maps,
    sum_slabs,
)
from vitsee_core.attention.heads import StoredAttention, keys_seen, with_windows
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import ATTENTION, Gather, Offers, Option, blocks_option
from vitsee_core.runtime.progress import counting
from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.glances import some_of
from vitsee_core.tables.headlines import Answer, by_store
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores import Store

if TYPE_CHECKING:
    from vitsee_stores.plan import Clip

__all__ = ["AGREEMENT", "plot", "run"]

log = logging.getLogger(__name__)


def at_a_glance(table: Table) -> Table:
    """Return the first store's types by block, and their examples."""
    return some_of(table, store=1)


COLUMNS = (
    *(*SITE, "row", "col", "head", "type", "detail"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
CLIP_COLUMNS = (*COLUMNS[:7], "frame", *COLUMNS[7:12], "time", *COLUMNS[12:])
SCORES = (
    *SHAPE_SCORES[:5],
    "offset_px",
    *SHAPE_SCORES[5:],
    *("query_std", "head_std", "keys_share", "query_repetition", "head_repetition"),
)
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


@analysis
def run(
    *stores: Store,
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    thresholds: Annotated[Thresholds | None, Gather(Thresholds)] = None,
    radius: Annotated[
        int,
        Option(
            "Half the side of the square in which a local head's mass is counted.",
            metavar="CELLS",
            least=1,
        ),
    ] = 2,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return a table with one row per head and score, and the aligned map of a head of each type.

    The columns are `COLUMNS`. Each row of a head repeats its `type` and `detail`, as
    `head_geometry.classify` gives them. `metric` is one of `SCORES` (shares of mass, cells, pixels
    for `offset_px`, or ratios), one of `AGREEMENT`, or `aligned`: the map of an example, whose
    `row` and `col` are the offset from query to key. `n_images` counts the images in the head's
    aligned map. NaN means not defined, or for `std`, `low`, `high` and `same_type_slabs` that there
    are too few slabs.

    Args:
        stores: stores with attention summaries. Others are left out, as long as one has them.
        sites: patterns of the blocks whose heads are classified.
        thresholds: the limits of the classes.
        radius: cells on each side of the middle of the focus.
        execution: images, seed and parallel work.

    Raises:
        MissingInput: no store has attention summaries.
        SiteError: a pattern matches no block.
        VitseeError: no chosen image is valid, or a threshold is out of its range.
    """
    thresholds = thresholds or Thresholds()
    thresholds.check()
    selected = blocks_of_each(stores, sites)
    rows: list[dict[str, Any]] = []
    notes: dict[str, Any] = {
        "interval": INTERVAL,
        "seed": execution.seed,
        "thresholds": asdict(thresholds),
        "radius": radius,
        "images": {},
        "blocks": {},
        "changed": {},
        **selected.notes(),
    }
    for store, blocks in selected.members:
        grids = {block.layout.grid for block in blocks if block.layout.grid is not None}
        # A square of side 2 radius + 1 that covers the whole map holds all mass of every head.
        covered = [f"{n} x {m}" for n, m in sorted(grids) if radius >= max(n, m) - 1]
        if covered:
            log.info(
                "%s: --radius %d takes in every key of %s tokens: it finds no focus",
                store.label,
                radius,
                " and ".join(covered),
            )
        chosen = execution.rows(store, whole_slabs=True)
        array_names = ["aligned", *PER_IMAGE]
        if store.plan.clip is not None:
            array_names.append(ALIGNED_FRAMES)
        groups = dict.fromkeys(block.group for block in blocks)
        keys = [(name, group) for group in groups for name in array_names]
        with counting(execution.progress, chosen.n):
            sums = sum_slabs(store, keys, chosen, execution, parts=MAX_BLOCKS)
        heads = [
            HeadResult(block, number, sums, thresholds, radius, clip=store.plan.clip)
            for block in blocks
            for number in range(block.n_heads)
        ]
        for head in heads:
            rows += [{**_head_columns(store, head), **cells} for cells in head.scores()]
        for example in _clearest_heads(heads):
            rows += _map_rows(store, example)
        for example in _clearest_heads_in_time(heads):
            rows += _time_rows(store, example)
        notes["images"][store.label] = chosen.describe()
        notes["blocks"][store.label] = len(sums.n_images)
        # Changed threshold -> the share of heads that then have another type.
        changed_shares = {
            name: float(np.mean([head.variants[name] != head.type for head in heads]))
            for name in heads[0].variants
        }
        notes["changed"][store.label] = changed_shares
        log.info("%s: %s", store.label, _describe_sensitivity(heads, changed_shares))
    has_clips = any(store.plan.clip is not None for store in selected.stores)
    columns = CLIP_COLUMNS if has_clips else COLUMNS
    return with_windows(Table.from_rows(rows, columns, notes), selected.members)


class SpaceMeasurement(NamedTuple):
    """Scores of a head's aligned map, over some blocks of images."""

    map: Float
    """(2 rows - 1, 2 cols - 1) attention by offset from query to key, of mass 1."""
    n_images: int
    shape: Scores
    values: dict[str, float]
    """Score -> its value: all of `SCORES`."""


class TimeMeasurement(NamedTuple):
    """Scores of a head over the frames of clips."""

    shares: Float
    """(2 times - 1,) share of attention by offset in time."""
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
        n_blocks = len(sums.n_images)
        all_blocks = np.ones(n_blocks, bool)
        self.map, self.n_images, self.shape, self.values = self._measure(sums, all_blocks)
        self.type, self.detail = self._classify(self.shape, self.values, thresholds)
        self.variants = {
            name: self._classify(self.shape, self.values, variant)[0]
            for name, variant in thresholds.varied()
        }
        self.in_time: TimeMeasurement | None = None
        if clip is not None:
            self.in_time = self._measure_time(sums, all_blocks)
        self.time = self._classify_time(self.in_time, thresholds)
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
        """Measure the head over frames, on the included blocks of images."""
        block = self.block
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
        """Measure the head's map and its repetition, on the included blocks of images."""
        block = self.block
        layout = block.layout
        group = block.group
        n = int(sums.n_images[included].sum())
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
                row[WORD] = replicates
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
        return -math.inf if math.isnan(clarity) else clarity


def _share_true(values: Sequence[bool]) -> float:
    """Return the share of true values; NaN if there are no values."""
    return float(np.mean(values)) if values else math.nan


def _head_columns(store: Store, head: HeadResult) -> dict[str, Any]:
    """Return the columns that all rows of a head have."""
    columns = {
        **site_columns(store, head.block),
        "head": head.head,
        "type": head.type,
        "detail": head.detail,
        "n_images": head.n_images,
    }
    if head.in_time is not None:
        columns["time"] = head.time
    return columns


def _clearest_heads(heads: Sequence[HeadResult]) -> list[HeadResult]:
    """Return the clearest head of each type, in the order of `TYPES`."""
    examples = []
    for kind in TYPES:
        same_type = [head for head in heads if head.type == kind]
        if same_type:
            examples.append(max(same_type, key=HeadResult.clarity))
    return examples


def _clearest_heads_in_time(heads: Sequence[HeadResult]) -> list[HeadResult]:
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
            is_spread = kind in ("near frames", "all frames")
            clearest = np.argmin(shares) if is_spread else np.argmax(shares)
            examples.append(same_time[int(clearest)])
    return examples


def _time_rows(store: Store, head: HeadResult) -> list[dict[str, Any]]:
    """Return a row per offset in time with the share of the head's attention."""
    assert head.in_time is not None
    shares = head.in_time.shares
    middle = len(shares) // 2
    rows = []
    for i, share in enumerate(shares.tolist()):
        row = {**_head_columns(store, head), **NO_SPREAD}
        row.update(frame=i - middle, metric=ALIGNED_FRAMES, value=share)
        rows.append(row)
    return rows


def _map_rows(store: Store, head: HeadResult) -> list[dict[str, Any]]:
    """Return a row per cell of the head's aligned map."""
    height, width = head.map.shape
    rows = []
    for i, j in np.ndindex(height, width):
        row = {**_head_columns(store, head), **NO_SPREAD}
        row.update(row=i - height // 2, col=j - width // 2)
        row.update(metric="aligned", value=float(head.map[i, j]))
        rows.append(row)
    return rows


def _describe_sensitivity(
    heads: Sequence[HeadResult], changed_shares: dict[str, float]
) -> str:
    """Return how many heads keep their type, and the threshold that changes most of them.

    Args:
        heads: the heads of a store.
        changed_shares: changed threshold -> the share of heads that then have another type.
    """
    steady = 100 * np.mean([head.steady == 1 for head in heads])
    line = f"{steady:.0f} % of heads keep their type whichever threshold moves by x 0.8 or x 1.25"
    worst = max(changed_shares, key=lambda name: changed_shares[name])
    if changed_shares[worst]:
        return f"{line} ({worst}: {100 * changed_shares[worst]:.0f} % change)"
    return line


def headline(table: Table) -> list[Answer]:
    """Return per store the number of heads of each type, and how many have a steady type."""
    answers = []
    for store, rows in by_store(table, metric="same_type_thresholds"):
        counts = Counter(rows["type"]).most_common()
        n_steady = int((rows["value"] >= 1).sum())
        types = ", ".join(f"{n} {kind}" for kind, n in counts)
        text = f"of {len(rows)} heads {types}"
        answers.append(
            (store, f"{text}; {n_steady} keep their type at every threshold tried")
        )
    for store, rows in by_store(table, metric=TIME_AGREEMENT[0]):
        counts = Counter(rows["time"]).most_common()
        n_temporal = sum(n for kind, n in counts if kind in TEMPORAL)
        times = ", ".join(f"{n} {kind}" for kind, n in counts)
        text = f"in time {times}; {n_temporal} of {len(rows)} heads are temporal"
        answers.append((store, text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Classify attention heads by what they attend to.

    Strict, soft, axial and offset local heads (Walmer et al. 2023, Figs. 3, 14) by where
    their aligned maps have their mass, offset ones with direction and distance; repeating
    ones (their sparse repeating patterns) by the few keys that all queries share; the
    rest are global. Shares of mass are measured as their excess over uniform attention: 0
    is as uniform, 1 is all of it. Reads the summaries that extract stores by default.

      $ vitsee head-types b16.zarr -o types.csv --png types.png
      $ vitsee head-types mae=a.zarr dino=b.zarr --png both.png > both.csv
      $ vitsee head-types b16.zarr --strict 0.4 | grep same_type_thresholds

    One row per head and score; same_type_thresholds is the share of other thresholds
    (each one times 0.8 and times 1.25) that give the same type, same_type_slabs the share
    of jackknife samples (the images without one slab) that do. Rows of the metric aligned
    are the map of one head of each type, row and col the offset from the query. The
    figure shows counts by block and these maps.
    """,
    needs=("attention",),
    reading=(
        "How many heads of each block are local, axial, offset, global or otherwise, "
        "by stated thresholds on their mean maps, with an example of each kind. A "
        "head's class is about its mean over images, and is worth what "
        "same_type_thresholds and same_type_slabs in the table say."
    ),
    source="Walmer et al. 2023, sections 4.1, 4.2, Figs. 3, 14",
    columns=COLUMNS,
    other_columns=(CLIP_COLUMNS,),
    meanings={
        "detail": "the direction of an offset head; row, column or cross of an axial one",
        "time": "of clips: what the head attends to in time",
        "frame": "of clips, metric aligned_frames: cells in time from the query, key minus query",
    },
    metrics=(
        *SCORES,
        *TIME_SCORES,
        *AGREEMENT,
        *TIME_AGREEMENT,
        "aligned",
        ALIGNED_FRAMES,
    ),
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
    glance_metric="",
)
