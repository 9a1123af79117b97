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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.head_types.figure import AGREEMENT, plot
from vitsee_core.analyses.head_types.head_geometry import (
    TEMPORAL,
    TIME_AGREEMENT,
    TIME_SCORES,
    Thresholds,
)
from vitsee_core.analyses.head_types.head_results import (
    INTERVAL,
    MAX_BLOCKS,
    NO_SPREAD,
    PER_IMAGE,
    SCORES,
    HeadResult,
    clearest_heads,
    clearest_heads_in_time,
)
from vitsee_core.attention.head_maps import (
    ALIGNED_FRAMES,
    SlabSums,
    blocks_of_each,
    sum_slabs,
)
from vitsee_core.attention.heads import StoredAttention, with_windows
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import ATTENTION, Gather, Offers, Option, blocks_option
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.glances import select_evenly
from vitsee_core.tables.headlines import Answer, by_store
from vitsee_core.tables.results import Table
from vitsee_stores import Store

if TYPE_CHECKING:
    from vitsee_core.runtime.streaming import Rows

__all__ = ["AGREEMENT", "COLUMNS", "SCORES", "plot", "run"]

log = logging.getLogger(__name__)


COLUMNS = (
    *(*SITE, "row", "col", "head", "type", "detail"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
# With the offset in time after `type` and `detail`, and the class in time after `value`.
CLIP_COLUMNS = (*COLUMNS[:7], "frame", *COLUMNS[7:12], "time", *COLUMNS[12:])


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
        radius: cells on each side of the middle of the focus, a square of side 2 radius + 1 that
            starts at the aligned map's largest cell.
        execution: images, seed and parallel work.

    Raises:
        MissingInput: no store has attention summaries.
        SiteError: a pattern matches no block.
        VitseeError: no chosen image is valid, or a threshold is out of its range.

    Examples:
        >>> import vitsee
        >>> table = vitsee.head_types("vit.zarr", sites="blocks.-1")
        >>> of_heads = table.filter(metric="head_std")
        >>> of_heads["head"].tolist(), of_heads["type"].tolist()
        ([0, 1, 2, 3], ['global', 'global', 'global', 'global'])
    """
    thresholds = thresholds or Thresholds()
    thresholds.check()
    selection = blocks_of_each(stores, sites)
    rows: list[dict[str, Any]] = []
    notes: dict[str, Any] = {
        "interval": INTERVAL,
        "seed": execution.seed,
        "thresholds": asdict(thresholds),
        "radius": radius,
        "images": {},
        "blocks": {},
        "changed": {},
        **selection.notes(),
    }
    for store, blocks in selection.members:
        _warn_of_squares_without_focus(store, blocks, radius)
        # Sums are kept by slab, so that images are left out in whole slabs.
        image_rows = execution.rows(store, whole_slabs=True)
        sums = _sum_attention(store, blocks, image_rows, execution)
        heads = [
            HeadResult(block, number, sums, thresholds, radius, clip=store.plan.clip)
            for block in blocks
            for number in range(block.n_heads)
        ]
        # First the scores of all heads, then the maps of the examples.
        for head in heads:
            rows += [{**_head_columns(store, head), **cells} for cells in head.scores()]
        for example in clearest_heads(heads):
            rows += _map_rows(store, example)
        for example in clearest_heads_in_time(heads):
            rows += _time_rows(store, example)
        changed_shares = _changed_shares(heads)
        notes["images"][store.label] = image_rows.describe()
        # Not blocks of the model: the parts of the images that the jackknife leaves out.
        notes["blocks"][store.label] = len(sums.n_images)
        notes["changed"][store.label] = changed_shares
        log.info("%s: %s", store.label, _describe_sensitivity(heads, changed_shares))
    has_clips = any(store.plan.clip is not None for store in selection.stores)
    columns = CLIP_COLUMNS if has_clips else COLUMNS
    return with_windows(Table.from_rows(rows, columns, notes), selection.members)


def _warn_of_squares_without_focus(
    store: Store, blocks: Sequence[StoredAttention], radius: int
) -> None:
    """Log the grids on which the square around the focus takes in every key.

    Such a square, of side 2 radius + 1, holds all mass of every head.
    """
    grids = {block.layout.grid for block in blocks if block.layout.grid is not None}
    covered = [f"{n} x {m}" for n, m in sorted(grids) if radius >= max(n, m) - 1]
    if covered:
        log.info(
            "%s: --radius %d takes in every key of %s tokens: it finds no focus",
            store.label,
            radius,
            " and ".join(covered),
        )


def _sum_attention(
    store: Store,
    blocks: Sequence[StoredAttention],
    image_rows: Rows,
    execution: Execution,
) -> SlabSums:
    """Return the sums of the attention summaries of all groups, by runs of slabs.

    Args:
        store: with attention summaries.
        blocks: the blocks whose heads are classified.
        image_rows: the chosen images, whole slabs.
        execution: threads and progress.
    """
    array_names = ["aligned", *PER_IMAGE]
    if store.plan.clip is not None:
        array_names.append(ALIGNED_FRAMES)
    groups = dict.fromkeys(block.group for block in blocks)
    keys = [(name, group) for group in groups for name in array_names]
    with counting(execution.progress, image_rows.n):
        return sum_slabs(store, keys, image_rows, execution, parts=MAX_BLOCKS)


def _head_columns(store: Store, head: HeadResult) -> dict[str, Any]:
    """Return the columns that all rows of a head have, among them its classes."""
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


def _time_rows(store: Store, head: HeadResult) -> list[dict[str, Any]]:
    """Return a row per offset in time with the share of the head's attention."""
    assert head.in_time is not None
    shares = head.in_time.shares
    middle = len(shares) // 2
    rows = []
    # Entry i is offset i - middle, from the past to the future.
    for i, share in enumerate(shares.tolist()):
        row = {**_head_columns(store, head), **NO_SPREAD}
        row.update(frame=i - middle, metric=ALIGNED_FRAMES, value=share)
        rows.append(row)
    return rows


def _map_rows(store: Store, head: HeadResult) -> list[dict[str, Any]]:
    """Return a row per cell of the head's aligned map."""
    height, width = head.map.shape  # 2 rows - 1, 2 cols - 1: offset 0 is in the middle
    rows = []
    for i, j in np.ndindex(height, width):
        row = {**_head_columns(store, head), **NO_SPREAD}
        row.update(row=i - height // 2, col=j - width // 2)
        row.update(metric="aligned", value=float(head.map[i, j]))
        rows.append(row)
    return rows


def _changed_shares(heads: Sequence[HeadResult]) -> dict[str, float]:
    """Return changed threshold -> the share of heads that then have another type."""
    shares = {}
    for name in heads[0].variants:
        is_changed = [head.variants[name] != head.type for head in heads]
        shares[name] = float(np.mean(is_changed))
    return shares


def _describe_sensitivity(
    heads: Sequence[HeadResult], changed_shares: dict[str, float]
) -> str:
    """Return how many heads keep their type, and the threshold that changes most of them.

    Args:
        heads: the heads of a store.
        changed_shares: changed threshold -> the share of heads that then have another type.
    """
    # Steady is a head that no change of a threshold gives another type.
    steady = 100 * np.mean([head.steady == 1 for head in heads])
    line = (
        f"{steady:.0f} % of heads keep their type whichever threshold moves by x 0.8 or "
        "x 1.25"
    )
    worst = max(changed_shares, key=lambda name: changed_shares[name])
    if changed_shares[worst]:
        return f"{line} ({worst}: {100 * changed_shares[worst]:.0f} % change)"
    return line


def headline(table: Table) -> list[Answer]:
    """Return per store the number of heads of each type, and how many have a steady type.

    Stores of clips have a second answer, on the classes in time.
    """
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


def at_a_glance(table: Table) -> Table:
    """Return the first store's types by block, and their examples."""
    return select_evenly(table, store=1)


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
        "frame": (
            "of clips, metric aligned_frames: cells in time from the query, key minus query"
        ),
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
