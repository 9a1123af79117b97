"""Attention distance: how far do heads look?

Per image, block and head, over spatial queries q and keys k (the class token and other prefix
tokens are neither queries nor keys):

    distance_px = mean_q sum_k w_qk |p_q - p_k|,   w_qk = A_qk / sum_k' A_qk'

with p the patches' places in input pixels. The table has its mean over images.

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

Of clips p is the place in the image alone, whatever the time between; beside it stand, with t a
patch's time and windows as the blocks have them (joint attention sees all):

- `distance_frames` = mean_q sum_k w_qk |t_q - t_k|, in sampled frames; `distance_seconds`: times
  the clip's seconds between sampled frames, where it says them.
- `frame_mass` = mean_q sum of w_qk over keys of the query's own time: the share of attention
  within its own frame (or tubelet).
- The column `uniform` has each metric's value for attention spread evenly over what a query sees:
  over T times (T^2 - 1) / (3 T) times the frames between them and 1 / T, within a frame 0 and 1.
  A head that attends evenly to all frames is no head that tracks anything.

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
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
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
            "distance_px in pixels; _raw without renormalising over patches; _unit on a unit "
            "square; _relative to uniform attention; of clips distance_frames and "
            "distance_seconds in time, frame_mass within the query's own frame.",
        ),
    ] = (),
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs", replicates=False)
    ] = DEFAULT,
) -> Table:
    """One row per store, metric, block and head: mean over images, spread and 95 % interval.

    Columns: see `COLUMNS`; `value`, `std`, `low`, `high` in the metric's unit, `n_images` the
    images used; `window`, where any block has windows, theirs in cells; `uniform`, where any store
    holds clips, the metric of attention spread evenly, empty where none is defined. NaN: no image
    (`value`), or fewer than two (`std`, `low`, `high`), or a grid of one cell
    (`distance_relative`). The stores may have different images.

    Args:
        stores: with attention summaries; those without are left out where others have them.

    Raises:
        MissingInput: no store has attention summaries, or no store has what is asked for of clips.
        SiteError: a pattern matches no block.
        VitseeError: unknown metric, or no valid image among those asked for.
    """
    every = (*METRICS, *IN_TIME)
    wanted = asked_for(metrics or every, every, "attn-dist")
    selected = blocks_of_each(stores, sites)
    of_each = [_metrics_of(store, wanted) for store in selected.stores]
    if not any(of_each):
        raise MissingInput(_no_time(selected.stores[0], wanted))
    chosen = [execution.rows(store) for store in selected.stores]
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, sum(own.n for own in chosen)):
        for (store, blocks), own, here in zip(
            selected.members, chosen, of_each, strict=True
        ):
            own_grids = store.plan.canvas is not None and bool(
                store.plan.canvas.own_grids
            )
            arrays = dict.fromkeys(
                _array(block, metric, own_grids) for block in blocks for metric in here
            )
            make = partial(SlabMoments, partial(_read, tuple(arrays)))
            summaries = execution.fold(store, make, own).result()
            seconds = float(np.nanmean(store.seconds)) if SECONDS in here else np.nan
            for metric in here:
                for block in blocks:
                    found = summaries[_array(block, metric, own_grids)]
                    rows += _rows(store, block, metric, found, seconds, own_grids)
    notes = {
        "interval": INTERVAL_METHOD,
        "seed": execution.seed,
        "images": {
            s.label: r.describe() for s, r in zip(selected.stores, chosen, strict=True)
        },
        **selected.notes(),
    }
    columns: tuple[str, ...] = COLUMNS
    if any(store.plan.clip is not None for store in selected.stores):
        columns = CLIP_COLUMNS
        notes["uniform"] = (
            "the metric of attention spread evenly over the keys that a query sees"
        )
    return with_windows(Table.from_rows(rows, columns, notes), selected.members)


def _metrics_of(store: Store, wanted: Sequence[str]) -> list[str]:
    """The metrics that a store can have: those in time only of clips, in seconds where any clip
    says its rate."""
    in_time = store.plan.clip is not None
    rated = bool(np.isfinite(store.seconds).any()) if SECONDS in wanted else False
    return [
        m for m in wanted if m not in IN_TIME or (in_time and (m != SECONDS or rated))
    ]


def _no_time(store: Store, wanted: Sequence[str]) -> str:
    """Why a store has none of these metrics."""
    what = ", ".join(wanted)
    if store.plan.clip is None:
        return (
            f"{store.label} holds images, which have no {what}; expected a store of clips"
        )
    return f"the clips of {store.label} do not say their frame rate; expected distance_frames"


def _read(arrays: Sequence[tuple[str, str]], slab: Slab) -> dict[tuple[str, str], Float]:
    """The arrays of `read_heads`, and distances in seconds: those in frames times each clip's own
    interval."""
    plain = [array for array in arrays if array[0] not in (SECONDS, RELATIVE)]
    found: dict[tuple[str, str], Float] = read_heads(plain, slab)
    seconds = slab.store.seconds[slab.rows][slab.valid].astype(np.float64)
    for name, group in arrays:
        if name == SECONDS:
            frames = slab.attention("distance_frames", group)[slab.valid]
            found[name, group] = frames * seconds[:, np.newaxis, np.newaxis]
        elif name == RELATIVE:
            distance = slab.attention("distance_px", group)[slab.valid]
            found[name, group] = (
                distance / _even_of_each(slab, group)[:, np.newaxis, np.newaxis]
            )
    return found


def _even_of_each(slab: Slab, group: str) -> Float:
    """(images,) of the slab's valid images with grids of their own: the distance of uniform
    attention on each one's grid; NaN on a grid of one cell."""
    plan = slab.store.plan
    canvas, (own,) = plan.canvas, [one for one in plan.attention if one.prefix == group]
    assert canvas is not None and own.layout.stride_px is not None
    sizes, place = np.unique(
        slab.store.sizes[slab.rows][slab.valid], axis=0, return_inverse=True
    )
    even = []
    for size in sizes.tolist():
        height, width = canvas.image((size[0], size[1]))
        step_y, step_x = own.layout.stride_px
        grid = round(height / step_y), round(width / step_x)
        window = None
        if own.window is not None:
            window = min(own.window[0], grid[0]), min(own.window[1], grid[1])
        even.append(uniform_distance(replace(own.layout, grid=grid), window) or np.nan)
    return np.array(even)[place.ravel()]


def _array(block: StoredAttention, metric: str, own_grids: bool) -> tuple[str, str]:
    """The array behind a metric, as `_read` names it, and its group: relative distances are those
    in pixels over one number, but where images have grids of their own."""
    relative = metric == RELATIVE and not own_grids
    return ("distance_px" if relative else metric), block.group


def _rows(
    store: Store,
    block: StoredAttention,
    metric: str,
    summary: Summary,
    seconds: float,
    own_grids: bool,
) -> list[dict[str, Any]]:
    scale = 1.0
    even = uniform_distance(block.layout, block.window)
    if metric == RELATIVE and not own_grids:
        scale = 1 / even if even > 0 else np.nan
    mean, std, low, high = (
        of * scale for of in (summary.mean, summary.std, summary.low, summary.high)
    )
    scaled = Summary(mean, std, low, high, summary.n)
    place = site_columns(store, block)
    if store.plan.clip is not None:
        frames, share = uniform_in_time(block)
        place["uniform"] = {
            "distance_px": even,
            "distance_relative": 1.0 if even > 0 else np.nan,
            "distance_frames": frames,
            SECONDS: frames * seconds,
            "frame_mass": share,
        }.get(metric, np.nan)
    return [
        {**place, "head": head, "metric": metric, **scaled.cells((block.row, head))}
        for head in range(block.n_heads)
    ]


def headline(table: Table) -> list[Answer]:
    """The nearest and the farthest head of the lowest and of the highest block, relative to uniform
    attention where the table has that."""
    units = {
        "distance_relative": "times as far as uniform attention",
        "distance_px": "px",
    }
    metric = next((m for m in units if m in table["metric"]), None)
    found = _headline_in_time(table)
    for store, rows in by_store(table, metric=metric) if metric else []:
        ends = picked(rows, site=(str(rows["site"][0]), str(rows["site"][-1])))
        said = []
        for (site,), own in ends.group_by("site", maintain_order=True):
            low, high = (number(float(own["value"][i])) for i in extremes(own))
            said.append(f"heads of {site} {low} to {high}")
        found.append((store, f"{', '.join(said)} {units[str(metric)]}{margin(ends)}"))
    return found


def _headline_in_time(table: Table) -> list[Answer]:
    """The share of attention within a query's own frame in the first and last block of each store
    of clips."""
    found = []
    for store, rows in by_store(table, metric="frame_mass"):
        ends = rows.filter(pl.col("site").is_in([rows["site"][0], rows["site"][-1]]))
        said = []
        for (site,), own in ends.group_by("site", maintain_order=True):
            mean = float(own["value"].to_numpy().mean())
            even = float(own["uniform"][0])
            said.append(f"{site} {number(mean)} (spread evenly: {number(even)})")
        found.append((store, f"attention within a query's own frame: {', '.join(said)}"))
    return found


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Measure how far each attention head looks.

    The mean distance between a patch and the patches it attends to, weighted by the attention,
    averaged over patches and images (Raghu et al. 2021, Figs. 3, 4; Walmer et al. 2023, Figs.
    4, 15; Dosovitskiy et al. 2021, Figs. 7, 10). One row per head; class and register tokens
    are left out. Reads the summaries that extract stores by default; takes seconds. The figure
    shows the heads of the lowest and highest blocks, all heads against depth, and the means of
    all stores.

      $ vitsee attn-dist b16.zarr -o dist.csv --png dist.png
      $ vitsee attn-dist b16.zarr dino=runs/vits16.zarr --png both.png > both.csv
      $ vitsee attn-dist b16.zarr --metric distance_px --sites blocks.0 | sort -t, -k10 -g

    Of clips also the distance in time and the share of attention within a query's own frame,
    beside what attention spread evenly would give.

      $ vitsee attn-dist videomae.zarr shuffled=shuffled.zarr -o dist.csv --png dist.png
    """,
    needs=("attention",),
    reading=(
        "Left, each line is one block: its heads, sorted by how far they attend on average. "
        "Right, every dot is a head, against its block. Heads near 0 look at their neighbours, "
        "heads near the dashed line (attention spread evenly) at the whole image. A model that "
        "has learnt to look locally has some low heads in its first blocks; bands are 95 % "
        "intervals over images. Panels below, of clips, show the same in time."
    ),
    source=(
        "Dosovitskiy et al. 2021, Figs. 7 right, 10; Raghu et al. 2021, Figs. 3, 4; Walmer et "
        "al. 2023, Figs. 4, 15"
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
