"""Head types: which heads are local, axial, offset or global?

Walmer et al. 2023 name strict, soft, axial and offset local heads (section 4.2, Figs. 3, 14) and
sparse repeating patterns (section 4.1) from looking at maps, and list heads by hand. Here stated
and varied thresholds on measured scores decide; see `head_geometry` for both. Of clips these are
classes by the places in the image, and `time` is the class in time (also there): heads of the
previous and the next frame, of the same place in other frames, of all frames. Every class is a
statement about the mean over images: a head may attend locally in some images and globally in
others.

Three things show how reliable a class is: `same_type_thresholds`, the share of variants (each
threshold by itself times 0.8 and times 1.25) that give the same class; `same_type_slabs`, the share
of repetitions without one part of the images that do; and the intervals of the scores, from the
same repetitions (delete-a-block jackknife) where there are at least 10 of them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

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
    """The first store's types by block, and their examples."""
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
# of the jackknife; sums are stored by slab, which cannot be divided
BLOCKS = 20
FEWEST = 10
INTERVAL = (
    f"delete-a-block jackknife over up to {BLOCKS} runs of slabs: std its standard error, low and "
    f"high value -+ t(0.975, runs - 1) * std; empty where there are fewer than {FEWEST} slabs"
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
    """One row per head and score, and the aligned map of one head of each type.

    Columns: `COLUMNS`. `type` and `detail` are the head's (see `classify`), on each of its rows.
    `metric` is one of `SCORES`, in shares of mass, cells, pixels (`offset_px`) or ratios, or of
    `AGREEMENT`; or `aligned`, the map of an example, whose `row` and `col` are the offset key minus
    query. `n_images`: images in the head's aligned map. NaN: not defined, or too few slabs (`std`,
    `low`, `high`, `same_type_slabs`).

    Args:
        stores: with attention summaries; those without are left out where others have them.
        thresholds: the limits of the classes.

    Raises:
        MissingInput: no store has attention summaries.
        SiteError: a pattern matches no block.
        VitseeError: no valid image among those asked for, or a threshold out of its range.
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
        covered = [f"{n} x {m}" for n, m in sorted(grids) if radius >= max(n, m) - 1]
        if covered:
            log.info(
                "%s: --radius %d takes in every key of %s tokens: it finds no focus",
                *(store.label, radius, " and ".join(covered)),
            )
        chosen = execution.rows(store, whole_slabs=True)
        groups = dict.fromkeys(block.group for block in blocks)
        of_clips = store.plan.clip is not None
        summed = ("aligned", *PER_IMAGE, *([ALIGNED_FRAMES] if of_clips else []))
        keys = [(name, group) for group in groups for name in summed]
        with counting(execution.progress, chosen.n):
            sums = sum_slabs(store, keys, chosen, execution, parts=BLOCKS)
        heads = [
            Head(block, head, sums, thresholds, radius, clip=store.plan.clip)
            for block in blocks
            for head in range(block.n_heads)
        ]
        for head in heads:
            rows += [_place(store, head) | score for score in head.scores()]
        for example in _examples(heads):
            rows += _map_rows(store, example)
        for example in _examples_in_time(heads):
            rows += _time_rows(store, example)
        notes["images"][store.label] = chosen.describe()
        notes["blocks"][store.label] = len(sums.n_images)
        # Changed threshold -> the share of heads that then have another type.
        notes["changed"][store.label] = changed = {
            name: float(np.mean([head.variants[name] != head.type for head in heads]))
            for name in heads[0].variants
        }
        log.info("%s: %s", store.label, _sensitivity(heads, changed))
    in_time = any(store.plan.clip is not None for store in selected.stores)
    columns = CLIP_COLUMNS if in_time else COLUMNS
    return with_windows(Table.from_rows(rows, columns, notes), selected.members)


class Head:
    """One head of one block: its map, its scores, and its type with all images, with each part of
    them left out, and under other thresholds."""

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
        parts = len(sums.n_images)
        everything = np.ones(parts, bool)
        self.map, self.n_images, shape, self.values = self._measure(sums, everything)
        self.shape = shape
        self.type, self.detail = self._classify(shape, self.values, thresholds)
        self.variants = {
            name: self._classify(shape, self.values, other)[0]
            for name, other in thresholds.varied()
        }
        self.in_time = self._measure_time(sums, everything) if clip is not None else None
        self.time = self._classify_time(self.in_time, thresholds)
        self.replicates: list[dict[str, float]] = []
        same = []
        same_time = []
        for left_out in range(parts if parts > 1 else 0):
            kept = np.arange(parts) != left_out
            _, _, shape, values = self._measure(sums, kept)
            same.append(self._classify(shape, values, thresholds)[0] == self.type)
            if clip is not None:
                own = self._measure_time(sums, kept)
                values = values | own[1].values
                same_time.append(self._classify_time(own, thresholds) == self.time)
            self.replicates.append(values)
        self.steady = float(
            np.mean([kind == self.type for kind in self.variants.values()])
        )
        self.steady_slabs = float(np.mean(same)) if same else math.nan
        kinds = [
            self._classify_time(self.in_time, other) for _, other in thresholds.varied()
        ]
        self.steady_time = (
            float(np.mean([kind == self.time for kind in kinds])),
            float(np.mean(same_time)) if same_time else math.nan,
        )

    def _classify(
        self, shape: Scores, values: dict[str, float], thresholds: Thresholds
    ) -> tuple[str, str]:
        """The class in space. Where queries of clips see their own place alone it is that, by
        construction."""
        alone = self._clip is not None and self.block.window == (1, 1)
        if alone and not math.isnan(values["self_mass"]):
            return TYPES[0], ""
        return classify(shape, values, thresholds)

    def _measure_time(
        self, sums: SlabSums, kept: NDArray[np.bool_]
    ) -> tuple[Float, TimeScores]:
        """The shares by offset in time, and their scores."""
        block = self.block
        total = sums.sums[ALIGNED_FRAMES, block.group][:, block.row, self.head][kept].sum(
            0
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.where(total.sum() > 0, total / total.sum(), np.nan)
        _, _, _, values = self._measure(sums, kept)
        return shares, measure_time(shares, values["self_mass"], block)

    def _classify_time(
        self, found: tuple[Float, TimeScores] | None, thresholds: Thresholds
    ) -> str | None:
        if found is None:
            return None
        return classify_time(found[1], thresholds, self.block)

    def _measure(
        self, sums: SlabSums, kept: NDArray[np.bool_]
    ) -> tuple[Float, int, Scores, dict[str, float]]:
        block = self.block
        group = self.block.group
        n = int(sums.n_images[kept].sum())
        total = sums.sums["aligned", group][:, block.row, self.head][kept].sum(0)
        maps, counted = mean_maps(total[None], n, block.layout, "aligned")
        shape = measure(maps[0], self._radius, block.window)
        means = {
            name: sums.sums[name, group][:, block.row][kept].sum(0) / n
            for name in PER_IMAGE
        }
        n_keys = block.layout.n_body
        n_seen = keys_seen(block)
        if (
            self._clip is not None and self._clip.by_frame
        ):  # spreads are those of single frames
            n_keys //= block.layout.frames or 1
        own = {name: float(means[name][self.head]) for name in PER_IMAGE[:3]}
        share, queries = repetition(
            own["entropy"], own["prefix_mass"], own["query_std"], n_keys, n_seen
        )
        of_block = [float(means[name][: block.n_heads].mean()) for name in PER_IMAGE[:2]]
        head_std = float(means["head_std"])
        step_y, step_x = block.layout.stride_px or (math.nan, math.nan)
        values = {
            **shape.values,
            "offset_px": math.hypot(
                shape.values["offset_dy"] * step_y, shape.values["offset_dx"] * step_x
            ),
            "query_std": own["query_std"],
            "head_std": head_std,
            "keys_share": share,
            "query_repetition": queries,
            "head_repetition": repetition(of_block[0], of_block[1], head_std, n_keys)[1],
        }
        return maps[0], int(counted[0]), shape, values

    def scores(self) -> list[dict[str, Any]]:
        """Metric, value, spread and interval of each score."""
        found: list[dict[str, Any]] = []
        in_time = {} if self.in_time is None else self.in_time[1].values
        for name, value in (
            {name: self.values[name] for name in SCORES} | in_time
        ).items():
            others = np.array([replicate[name] for replicate in self.replicates])
            enough = len(others) >= FEWEST
            ends = interval(np.array(value), others if enough else others[:0])
            spread = dict(zip(("std", "low", "high"), map(float, ends), strict=True))
            kept = {WORD: others} if enough else {}
            found.append({"metric": name, "value": value, **spread, **kept})
        steady = dict(zip(AGREEMENT, (self.steady, self.steady_slabs), strict=True))
        if self.in_time is not None:
            steady |= dict(zip(TIME_AGREEMENT, self.steady_time, strict=True))
        return found + [
            {"metric": name, "value": value, **NO_SPREAD}
            for name, value in steady.items()
        ]

    def clarity(self) -> float:
        """The larger, the clearer an example of its type the head is."""
        values = self.values
        found = {
            "strict local": values["self_mass"],
            "axial local": abs(math.log(values["elongation"])) if self.map.size else 0.0,
            "repeating": values["query_repetition"],
            "global": -self.shape.excess["focus_mass"],
        }.get(self.type, self.shape.excess["focus_mass"])
        return -math.inf if math.isnan(found) else found


def _place(store: Store, head: Head) -> dict[str, Any]:
    return {
        **site_columns(store, head.block),
        "head": head.head,
        "type": head.type,
        "detail": head.detail,
        "n_images": head.n_images,
        **({} if head.in_time is None else {"time": head.time}),
    }


def _examples(heads: Sequence[Head]) -> list[Head]:
    """The clearest head of each type, in the order of `TYPES`."""
    found = []
    for kind in TYPES:
        same = [head for head in heads if head.type == kind]
        if same:
            found.append(max(same, key=Head.clarity))
    return found


def _examples_in_time(heads: Sequence[Head]) -> list[Head]:
    """The head of each class in time with the largest share at one offset, of the classes of all
    and of near frames with the smallest."""
    found = []
    for kind in TIME_TYPES:
        same = [head for head in heads if head.time == kind]
        if same:
            shares = [
                head.in_time[1].values["offset_frames_mass"]
                for head in same
                if head.in_time
            ]
            at = np.argmin(shares) if kind in TIME_TYPES[5:] else np.argmax(shares)
            found.append(same[int(at)])
    return found


def _time_rows(store: Store, head: Head) -> list[dict[str, Any]]:
    assert head.in_time is not None
    shares = head.in_time[0]
    middle = len(shares) // 2
    return [
        _place(store, head)
        | {"frame": i - middle, "metric": ALIGNED_FRAMES, "value": share, **NO_SPREAD}
        for i, share in enumerate(shares.tolist())
    ]


def _map_rows(store: Store, head: Head) -> list[dict[str, Any]]:
    height, width = head.map.shape
    return [
        _place(store, head)
        | {"row": i - height // 2, "col": j - width // 2}
        | {"metric": "aligned", "value": float(head.map[i, j]), **NO_SPREAD}
        for i in range(height)
        for j in range(width)
    ]


def _sensitivity(heads: Sequence[Head], changed: dict[str, float]) -> str:
    """One line: how many heads keep their type, and the threshold that moves most of them."""
    kept = 100 * np.mean([head.steady == 1 for head in heads])
    line = f"{kept:.0f} % of heads keep their type whichever threshold moves by x 0.8 or x 1.25"
    worst = max(changed, key=lambda name: changed[name])
    if changed[worst]:
        return f"{line} ({worst}: {100 * changed[worst]:.0f} % change)"
    return line


def headline(table: Table) -> list[Answer]:
    """The number of heads of each type, and how many stay so whatever the threshold."""
    found = []
    for store, rows in by_store(table, metric="same_type_thresholds"):
        types = Counter(rows["type"]).most_common()
        firm = int((rows["value"] >= 1).sum())
        said = ", ".join(f"{n} {kind}" for kind, n in types)
        text = f"of {len(rows)} heads {said}"
        found.append((store, f"{text}; {firm} keep their type at every threshold tried"))
    for store, rows in by_store(table, metric=TIME_AGREEMENT[0]):
        times = Counter(rows["time"]).most_common()
        temporal = sum(n for kind, n in times if kind in TEMPORAL)
        said = ", ".join(f"{n} {kind}" for kind, n in times)
        found.append(
            (store, f"in time {said}; {temporal} of {len(rows)} heads are temporal")
        )
    return found


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Classify attention heads by what they attend to.

    Strict, soft, axial and offset local heads (Walmer et al. 2023, Figs. 3, 14) by where their
    aligned maps have their mass, offset ones with direction and distance; repeating ones (their
    sparse repeating patterns) by the few keys that all queries share; the rest are global. Shares
    of mass are measured as their excess over uniform attention: 0 is as uniform, 1 is all of it.
    Reads the summaries that extract stores by default.

      $ vitsee head-types b16.zarr -o types.csv --png types.png
      $ vitsee head-types mae=a.zarr dino=b.zarr --png both.png > both.csv
      $ vitsee head-types b16.zarr --strict 0.4 | grep same_type_thresholds

    One row per head and score; same_type_thresholds is the share of other thresholds (each one
    times 0.8 and times 1.25) that give the same type, same_type_slabs the share of jackknife
    samples (the images without one slab) that do. Rows of the metric aligned are the map of one
    head of each type, row and col the offset from the query. The figure shows counts by block
    and these maps.
    """,
    needs=("attention",),
    reading=(
        "How many heads of each block are local, axial, offset, global or otherwise, by stated "
        "thresholds on their mean maps, with an example of each kind. A head's class is about "
        "its mean over images, and is worth what same_type_thresholds and same_type_slabs in "
        "the table say."
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
