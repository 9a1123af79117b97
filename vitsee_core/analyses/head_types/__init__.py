"""Head types: which heads are local, axial, offset or global?

Walmer et al. 2023 name strict, soft, axial and offset local heads (section 4.2, Figs. 3, 14) and
sparse repeating patterns (section 4.1) from looking at maps, and list heads by hand. Here stated
and varied thresholds on measured scores decide; see `attention.head_geometry` for both. Every class
is a statement about the mean over images: a head may attend locally in some images and globally in
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
import polars as pl
from numpy.typing import NDArray

from vitsee_core.analyses.head_types.head_geometry import (
    SHAPE_SCORES,
    TYPES,
    UNDEFINED,
    Scores,
    Thresholds,
    classify,
    measure,
    repetition,
)
from vitsee_core.attention.head_maps import (
    SlabSums,
    blocks_of_each,
    mean_maps,
    per_query,
    sum_slabs,
)
from vitsee_core.attention.heads import StoredAttention, keys_seen, with_windows
from vitsee_core.figures.head_tiles import cut_maps, mark_middle, stretched
from vitsee_core.figures.panels import Grid, legend_below, map_axes, note_count, small, stack
from vitsee_core.figures.plotting import COLOURS, GREY, integer_ticks, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import ATTENTION, Gather, Offers, Option, blocks_option
from vitsee_core.runtime.progress import counting
from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.columns import SITE, site_columns, window_of
from vitsee_core.tables.glances import some_of
from vitsee_core.tables.headlines import Answer, by_store
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.tables.results import Table
    from vitsee_stores import Store

log = logging.getLogger(__name__)

QUESTION = ATTENTION
HELP = """
Classify attention heads by what they attend to.

Strict, soft, axial and offset local heads (Walmer et al. 2023, Figs. 3, 14) by where their
aligned maps have their mass, offset ones with direction and distance; repeating ones (their
sparse repeating patterns) by the few keys that all queries share; the rest are global. Shares
of mass are measured as their excess over uniform attention: 0 is as uniform, 1 is all of it.
Reads the summaries that extract stores by default.

  $ vitsee head-types b16.zarr -o types.csv --png types.png
  $ vitsee head-types mae=a.zarr dino=b.zarr --png both.png > both.csv
  $ vitsee head-types b16.zarr --strict 0.4 | grep same_type_thresholds

One row per head and score; same_type_thresholds is the share of other thresholds (each one times
0.8 and times 1.25) that give the same type, same_type_slabs the share of jackknife samples (the
images without one slab) that do. Rows of the metric aligned are the map of one head of each type,
row and col the offset from the query. The figure shows counts by block and these maps.
"""
MEANING = {"detail": "the direction of an offset head; row, column or cross of an axial one"}
NEEDS = ("attention",)
READING = (
    "How many heads of each block are local, axial, offset, global or otherwise, by stated "
    "thresholds on their mean maps, with an example of each kind. A head's class is about its "
    "mean over images, and is worth what same_type_thresholds and same_type_slabs in the "
    "table say."
)
SOURCE = "Walmer et al. 2023, sections 4.1, 4.2, Figs. 3, 14"
AT_A_GLANCE = ""


def at_a_glance(table: Table) -> Table:
    """The first store's types by block, and their examples."""
    return some_of(table, store=1)


COLUMNS = (
    *(*SITE, "row", "col", "head", "type", "detail"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
SCORES = (
    *SHAPE_SCORES[:5],
    "offset_px",
    *SHAPE_SCORES[5:],
    *("query_std", "head_std", "keys_share", "query_repetition", "head_repetition"),
)
AGREEMENT = ("same_type_thresholds", "same_type_slabs")
PER_IMAGE = ("entropy", "prefix_mass", "query_std", "head_std")
NO_SPREAD = dict.fromkeys(("std", "low", "high"), math.nan)
BLOCKS, FEWEST = 20, 10  # of the jackknife; sums are stored by slab, which cannot be divided
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
    execution: Annotated[Execution, Offers("images seed jobs memory", dask="slabs")] = DEFAULT,
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
        keys = [(name, group) for group in groups for name in ("aligned", *PER_IMAGE)]
        with counting(execution.progress, chosen.n):
            sums = sum_slabs(store, keys, chosen, execution, parts=BLOCKS)
        heads = [
            Head(block, head, sums, thresholds, radius)
            for block in blocks
            for head in range(block.n_heads)
        ]
        for head in heads:
            rows += [_place(store, head) | score for score in head.scores()]
        for example in _examples(heads):
            rows += _map_rows(store, example)
        notes["images"][store.label] = chosen.describe()
        notes["blocks"][store.label] = len(sums.n_images)
        notes["changed"][store.label] = changed = _changed(heads)
        log.info("%s: %s", store.label, _sensitivity(heads, changed))
    return with_windows(Table.from_rows(rows, COLUMNS, notes), selected.members)


class Head:
    """One head of one block: its map, its scores, and its type with all images, with each part of
    them left out, and under other thresholds."""

    def __init__(
        self, block: StoredAttention, head: int, sums: SlabSums, thresholds: Thresholds, radius: int
    ) -> None:
        self.block, self.head, self._radius = block, head, radius
        parts = len(sums.n_images)
        everything = np.ones(parts, bool)
        self.map, self.n_images, shape, self.values = self._measure(sums, everything)
        self.shape = shape
        self.type, self.detail = classify(shape, self.values, thresholds)
        self.variants = {
            name: classify(shape, self.values, other)[0] for name, other in thresholds.varied()
        }
        self.replicates: list[dict[str, float]] = []
        same = []
        for left_out in range(parts if parts > 1 else 0):
            _, _, shape, values = self._measure(sums, np.arange(parts) != left_out)
            self.replicates.append(values)
            same.append(classify(shape, values, thresholds)[0] == self.type)
        self.steady = float(np.mean([kind == self.type for kind in self.variants.values()]))
        self.steady_slabs = float(np.mean(same)) if same else math.nan

    def _measure(
        self, sums: SlabSums, kept: NDArray[np.bool_]
    ) -> tuple[Float, int, Scores, dict[str, float]]:
        block, group = self.block, self.block.group
        n = int(sums.n_images[kept].sum())
        total = sums.sums["aligned", group][:, block.row, self.head][kept].sum(0)
        maps, counted = mean_maps(total[None], n, block.layout, "aligned")
        shape = measure(maps[0], self._radius, block.window)
        means = {name: sums.sums[name, group][:, block.row][kept].sum(0) / n for name in PER_IMAGE}
        n_keys = block.layout.n_body
        n_seen = keys_seen(block)
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
        for name in SCORES:
            value = self.values[name]
            others = np.array([replicate[name] for replicate in self.replicates])
            enough = len(others) >= FEWEST
            ends = interval(np.array(value), others if enough else others[:0])
            spread = dict(zip(("std", "low", "high"), map(float, ends), strict=True))
            kept = {WORD: others} if enough else {}
            found.append({"metric": name, "value": value, **spread, **kept})
        steady = (self.steady, self.steady_slabs)
        return found + [
            {"metric": name, "value": value, **NO_SPREAD}
            for name, value in zip(AGREEMENT, steady, strict=True)
        ]

    def clarity(self) -> float:
        """How clear an example of its type a head is."""
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
    }


def _examples(heads: Sequence[Head]) -> list[Head]:
    """The clearest head of each type, in the order of `TYPES`."""
    found = []
    for kind in TYPES:
        same = [head for head in heads if head.type == kind]
        if same:
            found.append(max(same, key=Head.clarity))
    return found


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
    return f"{line} ({worst}: {100 * changed[worst]:.0f} % change)" if changed[worst] else line


def _changed(heads: Sequence[Head]) -> dict[str, float]:
    """Changed threshold -> the share of heads that then have another type."""
    return {
        name: float(np.mean([head.variants[name] != head.type for head in heads]))
        for name in heads[0].variants
    }


def headline(table: Table) -> list[Answer]:
    """How many heads are of which type, and how many stay so whatever the threshold."""
    found = []
    for store, rows in by_store(table, metric="same_type_thresholds"):
        types = Counter(rows["type"]).most_common()
        firm = int((rows["value"] >= 1).sum())
        said = ", ".join(f"{n} {kind}" for kind, n in types)
        text = f"of {len(rows)} heads {said}"
        found.append((store, f"{text}; {firm} keep their type at every threshold tried"))
    return found


TINTS = dict(zip((*TYPES, UNDEFINED), (*COLOURS[:5], "#BDBDBD", "#EEEEEE"), strict=True))

_EXAMPLES = Grid(len(TYPES), width=10.5, widest=13, height=14, most=len(TYPES))
UNSTEADY = "changes type when a threshold moves by x 0.8 or x 1.25"


@styled
def plot(table: Table) -> Figure:
    """One line of panels per store, from the table alone: heads of each type by block, those
    hatched that change type when some threshold moves by x 0.8 or x 1.25; and the aligned map of
    the clearest head of each type, corrected for coverage, over the range written below it,
    midlines in red."""
    stores = table.frame.partition_by("store", maintain_order=True)
    grids = [g for _ in stores for g in (Grid(1, widest=60, height=11), _EXAMPLES)]
    figure, parts = stack(*grids)
    for rows, above, below in zip(stores, parts[::2], parts[1::2], strict=True):
        examples = rows.filter(metric="aligned")
        _draw_counts(Grid(1).axes(above)[0], rows)
        for axes, kind in zip(_EXAMPLES.axes(below), TYPES, strict=True):
            _draw_example(axes, examples.filter(type=kind), kind)
    from matplotlib.patches import Patch

    found = {UNSTEADY: Patch(facecolor="white", edgecolor=GREY, hatch="//////")}
    if UNDEFINED in table.frame["type"]:
        found["no type"] = Patch(facecolor=TINTS[UNDEFINED])
    legend_below(figure, found)
    return figure


def _draw_counts(axes: Axes, rows: pl.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    steady = rows.filter(metric="same_type_thresholds")
    steady = steady.with_columns(sure=pl.col("value").eq_missing(1))
    depths = steady["depth"].unique().sort().to_numpy()
    base = np.zeros(len(depths))
    for kind in (*TYPES, UNDEFINED):
        for sure in (True, False):
            own = steady.filter(type=kind, sure=sure)
            counts = (own["depth"].to_numpy() == depths[:, np.newaxis]).sum(1)
            if not counts.any():
                continue
            hatch = "" if sure else "//////"
            axes.bar(
                depths, counts, 0.8, base, color=TINTS[kind], hatch=hatch, edgecolor="white",
                linewidth=0.4,
            )  # fmt: skip
            base += counts
    axes.set_title(shorten(rows["store"][0], 28))
    note_count(axes, steady)
    axes.grid(False, axis="x")
    integer_ticks(axes, depths, 13)
    axes.set_xlabel("block")
    axes.set_ylabel("heads")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_example(axes: Axes, rows: pl.DataFrame, kind: str) -> None:
    map_axes(axes)
    axes.set_title(kind)
    for spine in axes.spines.values():
        spine.set(color=TINTS[kind], linewidth=2)
    axes.set_aspect("equal")
    if not len(rows):
        axes.text(0.5, 0.5, "no head", transform=axes.transAxes, ha="center", color=GREY)
        return
    ((_, head, site, values),) = cut_maps(rows)
    window = rows["window"][0] if "window" in rows.columns else None
    shown = per_query(values, window_of(window))
    axes.imshow(stretched(shown), origin="upper")
    mark_middle(axes, values.shape)
    detail = rows["detail"][0]
    text = f"{site_words(site)}, head {head}" + (f"\n{detail}" if detail else "")
    lowest, highest = np.nanmin(shown), np.nanmax(shown)
    axes.set_xlabel(f"{text}\n{lowest:.2g} to {highest:.2g}", fontsize=small())
