"""Propagation: do tokens find the same objects in the next frames of a video?

The masks of a video's first frame are carried to the others by the similarity of tokens
(see `propagate.propagation` for the algorithm of Jabri et al. 2020, Caron et al. 2021 and
Walmer et al. 2023, Figs. 10 left, 30, Table 4), and compared with the annotation as
DAVIS-2017 does (Pont-Tuset et al. 2017; `propagate.videos`):

    j         region similarity, intersection over union       f   contour accuracy
    jf        (j + f) / 2
    j_recall  share of frames with j above 0.5                 j_decay   first quarter less
    last

First means over a video's frames (the first and the last are not scored), then over all
objects, as the official evaluation does: a video of five objects counts five times.

Of a store of clips a frame's tokens are those of the clip at its time: frames that share a
token of several frames have the same ones. Only the frames that were sampled are used; a
store of the same frames as images beside it is read at these alone, so that both are
scored on the same masks. In clips with shuffled frames each frame's tokens are taken from
where the model saw it.

Three controls stand beside each site: `still` (the first mask stays where it is), `grid`
(each frame's own mask to the grid and back: what the grid allows), `random` (Gaussian
tokens; of clips one for each place in time of the grid).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.analyses.propagate.propagation_settings import PRESETS, choose_settings
from vitsee_core.declaration import Analysis
from vitsee_core.demo.indexed_masks import VOID
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.patch_maps.photos import frames_seen
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import SILENT, counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.columns import REPLICATES, SITE, site_columns
from vitsee_core.tables.files import check_output_path, remove_leftovers, temporary_path
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError, reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.analyses.propagate.davis import Video
    from vitsee_core.analyses.propagate.work import PropagationScores, VideoWork
    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

headline = partial(best_layers, units={"jf": "mean of J and F"})

BASELINES = ("still", "grid", "random")
COLUMNS = (
    *SITE,
    "video",
    "object",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_objects",
    "n_videos",
    "n_images",
    "baseline",
)
DRAWN_METRICS = ("jf", "j", "f")
METRICS = (*DRAWN_METRICS, "j_recall", "f_recall", "j_decay", "f_decay")
MAX_UNSEEN_SHARE = 0.01  # of a frame's pixels; a remark says if more are unseen


@analysis
def run(
    *stores: Store,
    masks: Path | str,
    void: int | str | None = None,
    only: Path | str | None = None,
    sites: Sequence[str] = (),
    preset: str | None = None,
    context: int | None = None,
    radius: float | None = None,
    radius_px: float | None = None,
    neighbourhood: str | None = None,
    topk: int | None = None,
    temperature: float | None = None,
    first_labels: str | None = None,
    upsample: str | None = None,
    metrics: Sequence[str] = (),
    baselines: Sequence[str] = BASELINES,
    per_video: bool = False,
    save: Path | str | None = None,
    execution: Execution = DEFAULT,
) -> Table:
    """Return one row per site and metric, then those of the baselines.

    Columns: `COLUMNS`; `video`, `object` only with `per_video`: a video's rows have no
    object. `value`: 0 to 1 (decay -1 to 1), a mean over objects; `std` over objects;
    `low`, `high`: the 95 % interval by a jackknife over videos, NaN with one video.
        n_images: frames that are scored.

    Memory of each of the `jobs` threads: one slab of a site as it is stored, `context` + 2
    frames of tokens in float32, the similarities of a strip of tokens, the masks of a
    group of videos.

    Args:
        stores: of the same frames, extracted with `order="dataset"`; an id's folder is its
            video. Of clips an id is a video, and its folder of masks has one for each of
            its frames.
        masks: DAVIS' folder, or one with a folder of PNG masks per video; see
            `propagate.davis`.
        void: the value of pixels that count as background, by default 255; with "none"
            each value is an object.
        only: a file with the names of the videos to use, one per line.
        sites: names, globs and groups; by default `blocks`, or what the preset takes.
        preset: `walmer` (the default's numbers), `dino`, `dinov3`; see `PRESETS`.
        context: see `PropagationSettings`, as for those that follow; None is the preset's.
        radius: `math.inf` for no window.
        radius_px: in place of `radius`.
        neighbourhood: `square` or `circle`.
        topk: number of tokens.
        temperature: of their weights.
        first_labels: `nearest` or `area`.
        upsample: `bilinear` or `nearest`.
        metrics: some of `METRICS`; by default all.
        baselines: some of `BASELINES`.
        per_video: add rows of each video and object.
        save: a folder to be made, for the labels found: one PNG per frame as DAVIS'
            evaluation reads them, below `<video>/`, or `<store>/<site>/<video>/` where
            there are several.
        execution: what the work may use; see `Execution`. `images` is refused.

    Raises:
        MissingInput: a store keeps a site pooled only.
        SiteError: a site without a grid.
        VitseeError: see `davis.find_videos`, `choose_settings`; `save` exists.

    Examples:
        >>> import vitsee
        >>> table = vitsee.propagate("normal.zarr", masks="videos", sites="blocks.-1.out")
        >>> sorted(set(table["metric"]))
        ['f', 'f_decay', 'f_recall', 'j', 'j_decay', 'j_recall', 'jf']
    """
    from vitsee_core.analyses.propagate.davis import (
        find_masks,
        find_videos,
        oriented_masks,
    )

    settings = choose_settings(
        preset,
        context=context,
        radius=radius,
        radius_px=radius_px,
        neighbourhood=neighbourhood,
        topk=topk,
        temperature=temperature,
        first_labels=first_labels,
        upsample=upsample,
    )
    chosen_metrics = select_metrics(metrics or METRICS, METRICS, "propagate")
    for name in baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    if execution.images is not None:
        raise VitseeError(
            "propagate looks at whole videos; choose them with only=, not images="
        )
    execution.check_device()
    patterns = sites or PRESETS[preset or "walmer"].sites
    selected = select_each(stores, patterns, _sites_with_grid)
    mask_files = find_masks(Path(masks), _void_value(void))
    only_path = None if only is None else Path(only)
    videos = find_videos(selected.stores, mask_files, only_path)
    mask_files = oriented_masks(selected.stores, mask_files, videos)
    # Memory is taken for `context` frames: no more than a video has.
    longest = max(len(video.frames) for video in videos)
    bounded_settings = replace(settings, context=min(settings.context, longest))
    # torch is imported from here on: what is refused above is refused at once.
    from vitsee_core.analyses.propagate.videos import INTERVAL, SPREAD, describe_blocks
    from vitsee_core.analyses.propagate.work import VideoWork
    from vitsee_core.runtime.device import resolve_device

    save_path = None if save is None else Path(save)
    with _label_folders(save_path, selected.stores, selected.chosen) as folders:
        work = VideoWork(
            stores=selected.stores,
            sites=selected.chosen,
            masks=mask_files,
            settings=bounded_settings,
            baselines=tuple(dict.fromkeys(baselines)),
            seed=execution.seed,
            device=resolve_device(execution.device),
            folders=folders,
            progress=execution.progress,
        )
        scores = _score_videos(work, videos, execution)
    remarks = _remarks(work, scores)
    for remark in remarks:
        log.info("%s", remark)
    clips = {}
    for store in selected.stores:
        clip_words = frames_seen(store)
        if clip_words:
            clips[store.label] = clip_words
    notes = {
        "interval": INTERVAL,
        "spread": SPREAD,
        "settings": asdict(settings),
        **({"preset": f"{preset}: {PRESETS[preset].source}"} if preset else {}),
        "seed": execution.seed,
        "videos": {video.name: len(video.frames) for video in videos},
        "masks": str(mask_files.root),
        **({"void": str(void)} if void is not None else {}),
        **({"clips": clips} if clips else {}),
        **selected.notes(),
        **({"remarks": remarks} if remarks else {}),
        REPLICATES: {store.label: describe_blocks(videos) for store in selected.stores},
    }
    columns = [name for name in COLUMNS if per_video or name not in ("video", "object")]
    rows = [
        row
        for row in _rows(work, videos, scores, per_video)
        if row["metric"] in chosen_metrics
    ]
    return Table.from_rows(rows, columns, notes)


def _void_value(void: int | str | None) -> int | None:
    """Return the value that counts as background, or None for "none".

    Raises:
        VitseeError: no pixel of 8 bits has the value, or it is background already.
    """
    if void == "none":
        return None
    if void is None:
        return VOID
    value = int(void)
    if not 0 < value <= VOID:
        raise VitseeError(f"--void {value}: no object; expected 1 to {VOID}, or none")
    return value


def _sites_with_grid(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the selected sites of one store.

    Raises:
        SiteError: a site has no grid of tokens.
        MissingInput: a site is kept pooled only.
    """
    sites = store.select(list(patterns))
    for site in sites:
        if site.layout is None or site.layout.grid is None:
            raise SiteError(
                f"{store.label}: {site.name} has no grid of tokens; propagate needs "
                "sites that have one"
            )
        store.acts(site.name, "patches", partial=True)  # raises if it is pooled only
    return sites


def _score_videos(
    work: VideoWork, videos: Sequence[Video], execution: Execution
) -> PropagationScores:
    """Return the scores of all videos, on threads here or on the workers of `execution.map`."""
    from vitsee_core.analyses.propagate.work import (
        PropagationScores,
        check_masks,
        estimate_cost,
        group_bytes,
        group_videos,
        score_groups,
    )
    from vitsee_core.runtime.lanes import one_torch_thread

    n_masks = sum(len(video.frames) for video in videos)
    with counting(execution.progress, n_masks, "masks") as progress:
        check_masks(work.masks, videos, execution.jobs, progress)
    jobs = max(1, min(execution.jobs, execution.budget // group_bytes(work, videos)))
    # Twice as many groups as workers, so that none waits long for the last.
    groups = group_videos(
        videos,
        slab=work.stores[0].plan.slab,
        min_groups=2 * max(jobs, execution.width),
    )
    jobs = min(jobs, len(groups))
    with one_torch_thread():
        cost = estimate_cost(work, videos)
        log.info("%s", cost.line(jobs))
        with counting(execution.progress, cost.n_frames * cost.n_runs, "frames"):
            if execution.map is None:
                return score_groups(work, groups, jobs)
            scores = PropagationScores()
            score_group = partial(_score_group, replace(work, progress=SILENT))
            for group_scores in execution.spread(score_group, groups):
                scores.merge(group_scores)
            return scores


def _score_group(
    work: VideoWork, execution: Execution, group: Sequence[Video]
) -> PropagationScores:
    """Return the scores of a group of videos, on a worker with its own progress."""
    from vitsee_core.runtime.lanes import one_torch_thread

    with one_torch_thread():
        return replace(work, progress=execution.progress)(group)


@contextmanager
def _label_folders(
    save: Path | None, stores: Sequence[Store], sites: Sequence[Sequence[SiteSpec]]
) -> Iterator[dict[tuple[int, str], Path]]:
    """Yield (store's number, site) -> the folder of its videos' labels; empty if none are
    saved.

    The folders lie below a temporary one that becomes `save` at the end, so that it
    appears only when it is complete.
    """
    if save is None:
        yield {}
        return
    if save.exists() or save.is_symlink():
        raise VitseeError(f"{save} exists; --save makes a folder: give another name")
    if not save.absolute().parent.is_dir():
        raise VitseeError(
            f"cannot make {save}: there is no folder {save.absolute().parent}"
        )
    check_output_path(save)
    for store in stores:
        if "/" in store.label or store.label in (".", ".."):
            raise VitseeError(
                f"--save makes folders called as the stores are; {store.label} cannot be "
                "one"
            )
    remove_leftovers(save.parent)
    temporary = temporary_path(save)
    has_several_sites = sum(map(len, sites)) > 1
    folders = {}
    for number, (store, store_sites) in enumerate(zip(stores, sites, strict=True)):
        for site in store_sites:
            folder = temporary
            if has_several_sites:
                folder = temporary / store.label / site.name
            folders[number, site.name] = folder
    try:
        yield folders
        os.replace(temporary, save)
    except OSError as error:
        raise VitseeError(f"cannot write {save}: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remarks(work: VideoWork, scores: PropagationScores) -> list[str]:
    """Return caveats: a window smaller than `top`, tokens of several frames, lost objects,
    pixels that no token sees."""
    remarks = []
    for number, (store, sites) in enumerate(zip(work.stores, work.sites, strict=True)):
        grids: dict[tuple[int, int] | None, str] = {}
        for site in sites:
            assert site.layout is not None and site.layout.stride_px is not None
            grids.setdefault(site.layout.grid, site.name)
            n_tokens = work.settings.max_window_tokens(site.layout.stride_px)
            if work.settings.topk > n_tokens:
                remarks.append(
                    f"{store.label} {site.name}: the window has {n_tokens:g} tokens in "
                    f"all frames: --topk {work.settings.topk} takes them all"
                )
        strides = {site.layout.stride_frames for site in sites if site.layout is not None}
        for stride in sorted(stride for stride in strides if stride and stride > 1):
            remarks.append(
                f"{store.label}: a token stands for {stride:g} sampled frames, which "
                "are not told apart: masks move only from one token to the next"
            )
        # Lost objects and unseen pixels depend on the grid alone: said once for each.
        for grid, site_name in grids.items():
            assert grid is not None
            key = number, site_name, ""
            subject = f"{store.label}, {grid[0]} x {grid[1]} tokens"
            n_lost = sum(lost.n_lost for lost in scores.lost_objects[key].values())
            n_objects = sum(lost.n_objects for lost in scores.lost_objects[key].values())
            if n_lost:
                advice = ""
                if work.settings.first_labels == "nearest":
                    advice = "; --first-labels area keeps them"
                remarks.append(
                    f"{subject}: {n_lost} of {n_objects} objects of the first masks are "
                    f"lost: no token stands for them{advice}"
                )
            unseen_share = scores.unseen_share[key]
            worst = max(unseen_share, key=unseen_share.__getitem__)
            if unseen_share[worst] > MAX_UNSEEN_SHARE:
                percent = 100 * unseen_share[worst]
                remarks.append(
                    f"{subject}: no token sees {percent:.0f} % of the frames of {worst}, "
                    "which is taken for background (extract --crop-mode squash keeps it "
                    "all)"
                )
    return remarks


def _rows(
    work: VideoWork, videos: Sequence[Video], scores: PropagationScores, per_video: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows about the models, then those of the baselines."""
    from vitsee_core.analyses.propagate.videos import VideoSummary

    for baseline in ("", *work.baselines):
        for number, (store, sites) in enumerate(
            zip(work.stores, work.sites, strict=True)
        ):
            for site in sites:
                about = {**site_columns(store, site), "video": "", "baseline": baseline}
                summary = VideoSummary.from_scores(
                    videos, scores.scores[number, site.name, baseline]
                )
                for row in summary.rows(per_video):
                    yield about | row


@styled
def plot(table: Table) -> Figure:
    """Draw J&F, J and F against relative depth.

    A curve per store with its interval over videos as a band, baselines dashed (Walmer et
    al. 2023, Figs. 10 left, 30).
    """
    rows = table.frame
    if "video" in rows.columns:
        rows = rows.filter(pl.col("video").is_null())
    metrics = [metric for metric in METRICS if metric in rows["metric"]]
    # Recall and decay are drawn only where a table has nothing else.
    metrics = [metric for metric in metrics if metric in DRAWN_METRICS] or metrics
    # Scores lie between 0 and 1, a decay from -1; an interval of few videos need not.
    minimum = -1 if metrics[-1].endswith("decay") else 0
    drawn = rows.filter(pl.col("metric").is_in(metrics)).with_columns(
        pl.col("low", "high").clip(minimum, 1)
    )
    top: Any = max(drawn[name].max() or 0 for name in ("value", "high"))

    def finish(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        """Give all panels of scores one scale from 0."""
        if not metric.endswith("decay"):
            axes.set_ylim(0, 1.05 * top if top else 1)

    return draw_depth_panels(
        drawn,
        metrics,
        finish,
        spread="95 % interval over videos",
        counts=("n_videos", "videos"),
    )


ANALYSIS = Analysis(
    module=__name__,
    needs=("grid",),
    reading=(
        "Masks of a video's first frame carried to the later ones by the similarity of "
        "tokens, scored as DAVIS does, against depth. Grey lines: the first mask left "
        "where it is, random tokens, and what the grid of tokens allows; models on "
        "other grids are compared with their own ceiling."
    ),
    source=(
        "Jabri et al. 2020; Caron et al. 2021; Walmer et al. 2023, Figs. 10 left, 30, "
        "Table 4"
    ),
    columns=COLUMNS,
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
)
