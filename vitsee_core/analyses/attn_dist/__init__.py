"""Attention distance: how far do heads look?

Per image, block and head, over spatial queries q and keys k (the class token and other prefix
tokens are neither queries nor keys):

    distance_px = mean_q sum_k w_qk |p_q - p_k|,   w_qk = A_qk / sum_k' A_qk'

with p the patches' positions in input pixels. The table has its mean over images.

- `distance_px`: Dosovitskiy et al. 2021 (Fig. 7 right, 10) and Raghu et al. 2021 (Figs. 3, 4, C.5,
  C.6), who do not say what happens to the class token; its share is taken out as Walmer et al. do.
- `distance_px_raw`: w_qk = A_qk, not renormalised: mass on prefix tokens counts as distance 0.
- `distance_unit`: the grid on a unit square, x = col / (cols - 1), as in the code of Walmer et al.
  2023 (Figs. 4, 15). Uniform attention gets 0.602, 0.560, 0.540 on 7 x 7, 14 x 14, 28 x 28 cells,
  so that models of different patch sizes cannot be compared in this unit; in pixels they can.
- `distance_relative`: distance_px over that of uniform attention on the same grid; 1 is a head that
  attends to all patches equally. In blocks with windows uniform attention is that within them: 1 is
  a head that attends to all patches of its window equally. Their rows name the window. Of images
  at native resolution it is each image's own grid (and windows cut by it), before the mean over
  images.

For clips p is the position in the image alone, whatever the time between. Three more metrics, with
t a patch's time and windows as the blocks have them (joint attention sees all):

- `distance_frames` = mean_q sum_k w_qk |t_q - t_k|, in sampled frames; `distance_seconds`: times
  the clip's seconds between sampled frames, where it says them.
- `frame_mass` = mean_q sum of w_qk over keys of the query's own time: the share of attention
  within its own frame (or tubelet).
- The column `uniform` has each metric's value for attention spread evenly over what a query sees:
  over T times (T^2 - 1) / (3 T) times the frames between them and 1 / T, within a frame 0 and 1.
  A head that attends evenly to all frames does not track anything.

Means go over queries, then images; sorting heads and averaging over them is left to the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.attn_dist.figure import IN_TIME, METRICS, SECONDS, plot
from vitsee_core.attention.head_maps import blocks_of_each
from vitsee_core.attention.heads import (
    StoredAttention,
    read_heads,
    uniform_distance,
    uniform_in_time,
    with_windows,
)
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import ATTENTION, Offers, blocks_option, metrics_option
from vitsee_core.runtime.progress import counting
from vitsee_core.statistics.moments import INTERVAL_METHOD, SlabMoments, Summary
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import (
    Answer,
    by_store,
    extremes,
    margin,
    number,
    picked,
)
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
    from vitsee_core.runtime.streaming import Rows
    from vitsee_stores import Slab

__all__ = ["IN_TIME", "METRICS", "plot", "run"]

log = logging.getLogger(__name__)

RELATIVE = "distance_relative"
MEASURED = ("metric", "value", "std", "low", "high", "n_images")
COLUMNS = (*SITE, "head", *MEASURED)
CLIP_COLUMNS = (*SITE, "head", "uniform", *MEASURED)


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            (*METRICS, *IN_TIME),
            "all",
            "distance_px in pixels; _raw without renormalising over patches; _unit on "
            "a unit square; _relative to uniform attention; of clips distance_frames "
            "and distance_seconds in time, frame_mass within the query's own frame.",
        ),
    ] = (),
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs", replicates=False)
    ] = DEFAULT,
) -> Table:
    """Return the mean over images of each metric for each store, block and head, with its interval.

    The columns are `COLUMNS`: `value`, `std`, `low`, `high` are in the metric's unit, `n_images` is
    the number of images used. If any block has windows, `window` has their sizes in cells. If any
    store holds clips, `uniform` has the metric of attention spread evenly, empty where that is not
    defined. Numbers are NaN without an image (`value`), with fewer than two (`std`, `low`, `high`),
    and on a grid of one cell (`distance_relative`). The stores may have different images.

    Args:
        stores: stores with attention summaries; those without are left out if others have them.

    Raises:
        MissingInput: no store has attention summaries, or no store has what is asked for of clips.
        SiteError: a pattern matches no block.
        VitseeError: unknown metric, or no valid image among those asked for.

    Examples:
        >>> import vitsee
        >>> table = vitsee.attn_dist("vit.zarr", sites="blocks.-1", metrics="distance_px")
        >>> table["head"].tolist(), table["value"].round(1).tolist()  # pixels, one value per head
        ([0, 1, 2, 3], [16.1, 16.6, 17.1, 15.7])
        >>> table.plot().savefig("distances.png")
    """
    all_metrics = (*METRICS, *IN_TIME)
    requested = select_metrics(metrics or all_metrics, all_metrics, "attn-dist")
    # Images have no metrics in time: a store is used with those of the metrics that it has.
    selected = blocks_of_each(stores, sites)
    metrics_by_store = [_available_metrics(store, requested) for store in selected.stores]
    if not any(metrics_by_store):
        raise MissingInput(_why_no_time_metrics(selected.stores[0], requested))
    images_by_store = [execution.rows(store) for store in selected.stores]
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, sum(images.n for images in images_by_store)):
        for (store, blocks), images, store_metrics in zip(
            selected.members, images_by_store, metrics_by_store, strict=True
        ):
            rows += _store_rows(store, blocks, store_metrics, images, execution)
    notes: dict[str, Any] = {"interval": INTERVAL_METHOD, "seed": execution.seed}
    notes["images"] = {
        store.label: images.describe()
        for store, images in zip(selected.stores, images_by_store, strict=True)
    }
    notes.update(selected.notes())
    columns: tuple[str, ...] = COLUMNS
    if any(store.plan.clip is not None for store in selected.stores):
        columns = CLIP_COLUMNS
        notes["uniform"] = (
            "the metric of attention spread evenly over the keys that a query sees"
        )
    return with_windows(Table.from_rows(rows, columns, notes), selected.members)


def _available_metrics(store: Store, requested: Sequence[str]) -> list[str]:
    """Return the requested metrics that a store can have.

    Metrics in time need clips; seconds need a clip that says its frame rate.
    """
    has_clips = store.plan.clip is not None
    unavailable: set[str] = set()
    if not has_clips:
        unavailable.update(IN_TIME)
    elif SECONDS in requested and not np.isfinite(store.seconds).any():
        unavailable.add(SECONDS)
    return [metric for metric in requested if metric not in unavailable]


def _why_no_time_metrics(store: Store, requested: Sequence[str]) -> str:
    """Return why a store has none of the requested metrics, which are all in time."""
    if store.plan.clip is None:
        return (
            f"{store.label} holds images, which have no {', '.join(requested)}; "
            "expected a store of clips"
        )
    return (
        f"the clips of {store.label} do not say their frame rate; expected "
        "distance_frames"
    )


def _store_rows(
    store: Store,
    blocks: Sequence[StoredAttention],
    metrics: Sequence[str],
    images: Rows,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Return the table rows of one store, by metric, then block, then head.

    Args:
        store: with attention summaries.
        blocks: the chosen blocks.
        metrics: metrics that the store has.
        images: the chosen images.
        execution: resources.
    """
    canvas = store.plan.canvas
    # Images at native resolution: each has a grid of its own on the canvas.
    own_grids = canvas is not None and bool(canvas.own_grids)
    # Several metrics may be averaged from the same values, which are summed up once.
    value_keys = [
        _values_key(block, metric, own_grids) for block in blocks for metric in metrics
    ]
    distinct_value_keys = tuple(dict.fromkeys(value_keys))
    make = partial(SlabMoments, partial(_read_distances, distinct_value_keys))
    summaries = execution.fold(store, make, images).result()
    # Clips may have different frame rates: uniform attention has that of the mean.
    frame_seconds = np.nan
    if SECONDS in metrics:
        frame_seconds = float(np.nanmean(store.seconds))
    rows: list[dict[str, Any]] = []
    for metric in metrics:
        for block in blocks:
            summary = summaries[_values_key(block, metric, own_grids)]
            if metric == RELATIVE and not own_grids:
                summary = _relative_to_uniform(summary, block)
            cells = site_columns(store, block)
            if store.plan.clip is not None:
                cells["uniform"] = _uniform_value(block, metric, frame_seconds)
            cells["metric"] = metric
            for head in range(block.n_heads):
                rows.append({**cells, "head": head, **summary.cells((block.row, head))})
    return rows


def _values_key(block: StoredAttention, metric: str, own_grids: bool) -> tuple[str, str]:
    """Return the key (name, group) of the values that a metric is averaged from;
    `_read_distances` reads or computes them.

    Relative distances are those in pixels over a constant, which is applied to their mean; only
    where images have grids of their own it has to be applied to each image.
    """
    if metric == RELATIVE and not own_grids:
        return "distance_px", block.group
    return metric, block.group


def _read_distances(
    value_keys: Sequence[tuple[str, str]], slab: Slab
) -> dict[tuple[str, str], Float]:
    """Return the values of a slab's valid images, (name, group) -> (images, blocks, heads).

    Seconds are frames times each clip's own interval; relative distances are pixels over the
    distance of uniform attention on each image's own grid. Others are stored.
    """
    stored = [key for key in value_keys if key[0] not in (SECONDS, RELATIVE)]
    distances: dict[tuple[str, str], Float] = read_heads(stored, slab)
    seconds = slab.store.seconds[slab.rows][slab.valid].astype(np.float64)
    for name, group in value_keys:
        if name == SECONDS:
            frames = slab.attention("distance_frames", group)[slab.valid]
            distances[name, group] = frames * seconds[:, np.newaxis, np.newaxis]
        elif name == RELATIVE:
            pixels = slab.attention("distance_px", group)[slab.valid]
            uniform = _uniform_on_own_grids(slab, group)  # (images,)
            distances[name, group] = pixels / uniform[:, np.newaxis, np.newaxis]
    return distances


def _uniform_on_own_grids(slab: Slab, group: str) -> Float:
    """Return the distance of uniform attention on the own grid of each valid image of a slab.

    Args:
        slab: of a store whose images have grids of their own.
        group: blocks of one layout and window.

    Returns:
        (images,) in pixels; NaN on a grid of one cell.
    """
    plan = slab.store.plan
    canvas = plan.canvas
    (attention,) = [entry for entry in plan.attention if entry.prefix == group]
    assert canvas is not None and attention.layout.stride_px is not None
    step_y, step_x = attention.layout.stride_px
    # Many images share a size: each size is computed once.
    sizes, size_indices = np.unique(
        slab.store.sizes[slab.rows][slab.valid], axis=0, return_inverse=True
    )
    uniform = []
    for size in sizes.tolist():
        height, width = canvas.image((size[0], size[1]))
        grid = round(height / step_y), round(width / step_x)
        # Windows are cut by the edge of a grid that is smaller than they are.
        window = None
        if attention.window is not None:
            rows, cols = attention.window
            window = min(rows, grid[0]), min(cols, grid[1])
        layout = replace(attention.layout, grid=grid)
        # 0 on a grid of one cell, where a ratio has no meaning.
        uniform.append(uniform_distance(layout, window) or np.nan)
    return np.array(uniform)[size_indices.ravel()]


def _relative_to_uniform(summary: Summary, block: StoredAttention) -> Summary:
    """Return the moments of distances in pixels over the distance of uniform attention.

    They are NaN on a grid of one cell.
    """
    uniform = uniform_distance(block.layout, block.window)
    scale = 1 / uniform if uniform > 0 else np.nan
    return Summary(
        mean=summary.mean * scale,
        std=summary.std * scale,
        low=summary.low * scale,
        high=summary.high * scale,
        n=summary.n,
    )


def _uniform_value(block: StoredAttention, metric: str, frame_seconds: float) -> float:
    """Return the metric of attention that is spread evenly over what a query of a clip sees; NaN
    for the metrics that have no such value.

    Args:
        block: of a store of clips.
        metric: its name.
        frame_seconds: mean seconds between sampled frames.
    """
    pixels = uniform_distance(block.layout, block.window)
    frames, frame_mass = uniform_in_time(block)
    values = {
        "distance_px": pixels,
        "distance_relative": 1.0 if pixels > 0 else np.nan,
        "distance_frames": frames,
        SECONDS: frames * frame_seconds,
        "frame_mass": frame_mass,
    }
    return values.get(metric, np.nan)


def headline(table: Table) -> list[Answer]:
    """Return how far the nearest and the farthest head look in the first and last block of each
    store, relative to uniform attention where the table has that."""
    units = {
        "distance_relative": "times as far as uniform attention",
        "distance_px": "px",
    }
    # The first of the units that the table has.
    metric = next((m for m in units if m in table["metric"]), None)
    answers = _headline_in_time(table)
    if metric is None:
        return answers
    for store, rows in by_store(table, metric=metric):
        outer_blocks = picked(rows, site=(str(rows["site"][0]), str(rows["site"][-1])))
        ranges = []
        for (site,), heads in outer_blocks.group_by("site", maintain_order=True):
            nearest, farthest = extremes(heads)
            low = number(float(heads["value"][nearest]))
            high = number(float(heads["value"][farthest]))
            ranges.append(f"heads of {site} {low} to {high}")
        text = f"{', '.join(ranges)} {units[metric]}{margin(outer_blocks)}"
        answers.append((store, text))
    return answers


def _headline_in_time(table: Table) -> list[Answer]:
    """Return the share of attention within a query's own frame in the first and last block of each
    store of clips."""
    answers = []
    for store, rows in by_store(table, metric="frame_mass"):
        outer_sites = [rows["site"][0], rows["site"][-1]]
        outer_blocks = rows.filter(pl.col("site").is_in(outer_sites))
        shares = []
        for (site,), heads in outer_blocks.group_by("site", maintain_order=True):
            # Uniform attention is the same for all heads of a block.
            mean = float(heads["value"].to_numpy().mean())
            uniform = float(heads["uniform"][0])
            shares.append(f"{site} {number(mean)} (spread evenly: {number(uniform)})")
        text = f"attention within a query's own frame: {', '.join(shares)}"
        answers.append((store, text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Measure how far each attention head looks.

    The mean distance between a patch and the patches it attends to, weighted by the
    attention, averaged over patches and images (Raghu et al. 2021, Figs. 3, 4; Walmer et
    al. 2023, Figs. 4, 15; Dosovitskiy et al. 2021, Figs. 7, 10). One row per head; class
    and register tokens are left out. Reads the summaries that extract stores by default;
    takes seconds. The figure shows the heads of the lowest and highest blocks, all heads
    against depth, and the means of all stores.

      $ vitsee attn-dist b16.zarr -o dist.csv --png dist.png
      $ vitsee attn-dist b16.zarr dino=runs/vits16.zarr --png both.png > both.csv
      $ vitsee attn-dist b16.zarr --metric distance_px --sites blocks.0 | sort -t, -k10 -g

    Of clips also the distance in time and the share of attention within a query's own
    frame, beside what attention spread evenly would give.

      $ vitsee attn-dist videomae.zarr shuffled=shuffled.zarr -o dist.csv --png dist.png
    """,
    needs=("attention",),
    reading=(
        "Left, each line is one block: its heads, sorted by how far they attend on "
        "average. Right, every dot is a head, against its block. Heads near 0 look at "
        "their neighbours, heads near the dashed line (attention spread evenly) at the "
        "whole image. A model that has learnt to look locally has some low heads in "
        "its first blocks; bands are 95 % intervals over images. Panels below, of "
        "clips, show the same in time."
    ),
    source=(
        "Dosovitskiy et al. 2021, Figs. 7 right, 10; Raghu et al. 2021, Figs. 3, 4; "
        "Walmer et al. 2023, Figs. 4, 15"
    ),
    columns=COLUMNS,
    other_columns=(CLIP_COLUMNS,),
    meanings={
        "uniform": "of clips: the metric of attention spread evenly over what a query sees"
    },
    metrics=(*METRICS, *IN_TIME),
    run=run,
    plot=plot,
    headline=headline,
    glance_metric=RELATIVE,
)
