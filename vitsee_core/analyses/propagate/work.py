"""Propagation through the videos of one or several stores, and the controls beside it.

The unit of work is a group of videos: those that begin in one slab, at all sites of all
stores, so that a slab is read once per site (twice where a video runs on into the next)
and the masks, their contours and the controls are made once for all sites. Results do not
depend on the groups.

Memory of a group: one slab of a site as it is stored, `context` + 2 frames of tokens in
float32, the similarities of a strip of tokens, the masks of its videos.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.analyses.propagate.davis import MaskFiles, Video
from vitsee_core.analyses.propagate.propagation import (
    STRIP_BYTES,
    FrameMap,
    Window,
    frame_map,
)
from vitsee_core.analyses.propagate.propagation_settings import PropagationSettings
from vitsee_core.analyses.propagate.videos import (
    Frames,
    FrameScores,
    Labels,
    LostObjects,
    VideoRun,
    VideoTruth,
    noise_frames,
    score_frames,
)
from vitsee_core.demo.indexed_masks import write_mask
from vitsee_core.images.placement import place
from vitsee_core.runtime.device import precision_context
from vitsee_core.runtime.lanes import Stopped, run_lanes
from vitsee_core.runtime.progress import SILENT, Progress, Silent

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


# ---------------------------------------------------------------- the work


# Which rows of the table: store's number, name of the site, baseline ("" for the model).
Key = tuple[int, str, str]
# Radius of the window in rows and columns; None for no window.
Radii = tuple[float, float] | None


@dataclass(frozen=True)
class RunShape:
    """The shapes on which the cost of a run depends, and the noise that replaces its
    tokens.

    Attributes:
        frame_map: the mapping of a frame to the grid.
        radii: of the window.
        dim: number of channels.
        time_indices: of clips the index in time, in the grid, of each frame; None for
            images.
    """

    frame_map: FrameMap
    radii: Radii
    dim: int
    time_indices: tuple[int, ...] | None = None

    def noise(self, seed: int, video: str) -> Frames:
        """Yield noise as tokens of each frame, (rows, cols, dim).

        Frames of a clip that share their tokens share their noise.
        """
        frames = noise_frames(seed, video, self.frame_map, self.dim)
        if self.time_indices is None:
            yield from frames
            return
        noise_by_time: dict[int, NDArray[np.floating]] = {}
        for time_index in self.time_indices:
            if time_index not in noise_by_time:
                noise_by_time[time_index] = next(frames)
            yield noise_by_time[time_index]


@dataclass
class PropagationScores:
    """The results, each key of rows -> name of a video -> result.

    Attributes:
        scores: J and F; of models and baselines.
        unseen_share: share of a frame's pixels that no token has seen; of models.
        lost_objects: how many objects of the first mask have no token; of models.
    """

    scores: dict[Key, dict[str, FrameScores]] = field(default_factory=dict)
    unseen_share: dict[Key, dict[str, float]] = field(default_factory=dict)
    lost_objects: dict[Key, dict[str, LostObjects]] = field(default_factory=dict)

    def add(self, key: Key, video: str, scores: FrameScores) -> None:
        """Add the scores of one video."""
        self.scores.setdefault(key, {})[video] = scores

    def merge(self, addition: PropagationScores) -> None:
        """Add the results of other videos."""
        for key, scores in addition.scores.items():
            self.scores.setdefault(key, {}).update(scores)
        for key, shares in addition.unseen_share.items():
            self.unseen_share.setdefault(key, {}).update(shares)
        for key, counts in addition.lost_objects.items():
            self.lost_objects.setdefault(key, {}).update(counts)


@dataclass
class VideoWork:
    """A function that propagates the masks of a group of videos and returns their scores.

    Attributes:
        stores: stores of the videos.
        sites: the sites of each store.
        masks: the annotation.
        settings: how labels are carried.
        baselines: names of the controls.
        seed: seed of the noise.
        device: where tokens are compared.
        folders: (store's number, site) -> where predicted labels are written, one folder
            per video; empty if they are not saved.
        progress: counts frames.
    """

    stores: Sequence[Store]
    sites: Sequence[Sequence[SiteSpec]]
    masks: MaskFiles
    settings: PropagationSettings
    baselines: Sequence[str]
    seed: int
    device: torch.device
    folders: dict[tuple[int, str], Path] = field(default_factory=dict)
    progress: Progress = SILENT

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without progress, which belongs to this process."""
        return {**self.__dict__, "progress": SILENT}

    def __call__(self, videos: Sequence[Video]) -> PropagationScores:
        """Return the scores of a group of videos.

        Raises:
            VitseeError: a mask is damaged or does not fit its frame.
        """
        with torch.inference_mode(), precision_context(self.device, "fp32"):
            return _VideoGroup(self, videos).run()

    def n_frames(self, video: Video) -> int:
        """Return how many frames need labels.

        The last frame is not scored, so it has labels only if they are saved.
        """
        return len(video.frames) if self.folders else len(video.frames) - 1

    def run_shape(self, number: int, site: SiteSpec, video: Video) -> RunShape:
        """Return the shapes of a video at a site of the store with this number."""
        assert site.layout is not None and site.layout.stride_px is not None
        transform = self.stores[number].manifest.transform
        placement = place(transform, video.size)
        return RunShape(
            frame_map=frame_map(site.name, site.layout, placement, video.size),
            radii=self.settings.radii(site.layout.stride_px),
            dim=site.dim,
            time_indices=video.rows[number].time_indices(site.layout),
        )


class _VideoGroup:
    """A group of videos, with what all sites share computed once: masks, controls, windows."""

    def __init__(self, work: VideoWork, videos: Sequence[Video]) -> None:
        self._work = work
        self._videos = videos
        self._truths = {
            video.name: VideoTruth(work.masks.read(video)) for video in videos
        }
        self._scores = PropagationScores()
        # (baseline, video, what the baseline depends on) -> scores.
        self._controls: dict[
            tuple[str, str, RunShape | FrameMap | None], FrameScores
        ] = {}
        self._windows: dict[tuple[tuple[int, int], Radii], Window] = {}

    def run(self) -> PropagationScores:
        """Return the scores at all sites of all stores."""
        for number, (store, sites) in enumerate(
            zip(self._work.stores, self._work.sites, strict=True)
        ):
            rows = [video.rows[number] for video in self._videos]
            for site in sites:
                reader = SiteReader(store, site, [frame_rows.rows for frame_rows in rows])
                for video, frame_rows in zip(self._videos, rows, strict=True):
                    assert site.layout is not None
                    frames = reader.frames(
                        frame_rows.rows, frame_rows.time_indices(site.layout)
                    )
                    self._score_video(number, site, video, frames)
        return self._scores

    def _score_video(
        self, number: int, site: SiteSpec, video: Video, frames: Frames
    ) -> None:
        """Add the scores of a video's frames at a site, and those of the controls."""
        work = self._work
        name = video.name
        shape = work.run_shape(number, site, video)
        run = VideoRun(self._truths[name], shape.frame_map, self._window(shape))
        key = number, site.name, ""
        unseen_share = shape.frame_map.unseen_share()
        self._scores.unseen_share.setdefault(key, {})[name] = unseen_share
        self._scores.lost_objects.setdefault(key, {})[name] = run.lost_objects
        save = None
        if work.folders:
            save = _label_writer(work.folders[number, site.name] / name, video.frames)
        scores = run.score(
            frames,
            dim=site.dim,
            n_frames=work.n_frames(video),
            save=save,
            progress=work.progress,
        )
        self._scores.add(key, name, scores)
        for baseline in work.baselines:
            control = self._control_scores(baseline, video, shape, run)
            self._scores.add((number, site.name, baseline), name, control)

    def _control_scores(
        self, baseline: str, video: Video, shape: RunShape, run: VideoRun
    ) -> FrameScores:
        """Return the scores of a control, which are computed once for sites alike."""
        truth = self._truths[video.name]
        work = self._work
        dependence = {"still": None, "grid": shape.frame_map, "random": shape}[baseline]
        key = (baseline, video.name, dependence)
        if key in self._controls:
            return self._controls[key]
        if baseline == "still":
            scores = score_frames(truth, lambda _: truth.labels[0])
        elif baseline == "grid":
            scores = score_frames(truth, run.through_grid)
        else:
            scores = run.score(
                shape.noise(work.seed, video.name),
                dim=shape.dim,
                n_frames=len(video.frames) - 1,
                progress=work.progress,
            )
        self._controls[key] = scores
        return scores

    def _window(self, shape: RunShape) -> Window:
        """Return the window of a grid, made once."""
        key = shape.frame_map.grid, shape.radii
        if key not in self._windows:
            self._windows[key] = Window(
                grid=shape.frame_map.grid,
                settings=self._work.settings,
                radii=shape.radii,
                device=self._work.device,
            )
        return self._windows[key]


class SiteReader:
    """Reads the grids of a site's frames, slab by slab.

    The last slab is cached, so that videos in order read each once.
    """

    def __init__(
        self, store: Store, site: SiteSpec, rows: Sequence[Sequence[int]]
    ) -> None:
        """Open a site.

        rows: rows of the frames of each video that will be requested; no others are read.
        """
        self._acts = store.acts(site.name, "patches", partial=True)
        self._slab = store.plan.slab
        self._span = min(map(min, rows)), max(map(max, rows)) + 1
        # Number of the cached slab, and its tokens (images, ...).
        self._cached_number: int | None = None
        self._cached_tokens: NDArray[np.floating] | None = None

    def frames(self, rows: Sequence[int], time_indices: Sequence[int] | None) -> Frames:
        """Yield the grid of each frame as stored, (rows, cols, dim).

        Args:
            rows: each frame's row; of a store of clips the clip's.
            time_indices: of clips each frame's index in time, in the grid; None for
                images.
        """
        for frame, row in enumerate(rows):
            slab_number = row // self._slab
            start = max(slab_number * self._slab, self._span[0])
            if self._cached_number != slab_number:
                self._cached_tokens = None  # free it before reading the next
                stop = min((slab_number + 1) * self._slab, self._span[1])
                self._cached_tokens = self._acts[start:stop]
                self._cached_number = slab_number
            assert self._cached_tokens is not None
            tokens = self._cached_tokens[row - start]
            yield tokens if time_indices is None else tokens[time_indices[frame]]


def _label_writer(folder: Path, frames: Sequence[str]) -> Callable[[int, Labels], None]:
    """Make a video's folder; return a function that writes the labels of a frame into it."""
    folder.mkdir(parents=True)
    return lambda frame, labels: write_mask(folder / f"{frames[frame]}.png", labels)


def group_videos(
    videos: Sequence[Video], slab: int, min_groups: int
) -> list[list[Video]]:
    """Return videos in groups: those that begin in one slab of the first store, in order.

    Args:
        videos: the videos.
        slab: images per slab of the first store.
        min_groups: groups are split further if they are fewer.
    """
    groups: dict[int, list[Video]] = {}
    for video in videos:
        groups.setdefault(video.rows[0].rows[0] // slab, []).append(video)
    grouped = list(groups.values())
    while len(grouped) < min_groups:
        longest = max(grouped, key=len)
        if len(longest) == 1:
            break
        index = grouped.index(longest)
        half = (len(longest) + 1) // 2
        grouped[index : index + 1] = [longest[:half], longest[half:]]
    return grouped


# ---------------------------------------------------------------- videos over threads
#
# Threads stop if one fails or the user stops the run.


T = TypeVar("T")


class _Stoppable(Silent):
    """Forwards what is advanced until the run is stopped; then reporting raises `Stopped`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.ended = threading.Event()

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Forward the count; this is where threads notice that the run is stopped."""
        if self.ended.is_set():
            raise Stopped
        self._progress.advance(count, size_bytes)


def score_groups(
    work: VideoWork, groups: Sequence[Sequence[Video]], jobs: int
) -> PropagationScores:
    """Return the scores of all groups, `jobs` groups at a time.

    Raises:
        VitseeError: the first error of any group.
    """
    scores = PropagationScores()
    merging = threading.Lock()

    def score_group(group: Sequence[Video], progress: Progress) -> None:
        """Add the scores of a group."""
        group_scores = replace(work, progress=progress)(group)
        with merging:
            scores.merge(group_scores)

    _run_on_threads(score_group, groups, jobs, work.progress)
    return scores


def check_masks(
    masks: MaskFiles, videos: Sequence[Video], jobs: int, progress: Progress
) -> None:
    """Read every mask once, before hours of other work.

    Raises:
        VitseeError: a mask is damaged, in colour, or not of its frame's size.
    """

    def check_video(video: Video, progress: Progress) -> None:
        """Read a video's masks one by one, so that memory is that of one."""
        for frame in range(len(video.frames)):
            masks.read(video, range(frame, frame + 1))
            progress.advance(1)

    _run_on_threads(check_video, videos, jobs, progress)


def _run_on_threads(
    function: Callable[[T, Progress], None],
    items: Sequence[T],
    jobs: int,
    progress: Progress,
) -> None:
    """Apply a function to every item, on `jobs` threads.

    Args:
        function: takes an item and the progress to report to, which ends the thread as
            soon as another has failed.
        items: what it is applied to.
        jobs: number of threads.
        progress: where reports go.
    """
    stoppable = _Stoppable(progress)

    def lane(_: int, take: Callable[[], int | None]) -> None:
        """Work on items until none is left."""
        while (number := take()) is not None:
            function(items[number], stoppable)

    run_lanes(min(jobs, len(items)), lane, len(items), stoppable.ended.set)


# ---------------------------------------------------------------- its cost
#
# Time is estimated from a few frames, memory from shapes.


N_TIMED_FRAMES = 3


@dataclass(frozen=True)
class Cost:
    """The estimated cost of propagating all videos.

    Attributes:
        n_frames: frames of all videos whose labels are needed.
        n_runs: passes over these, one per site of a store and per shape of noise.
        seconds: time of one thread.
    """

    n_frames: int
    n_runs: int
    seconds: float

    def line(self, jobs: int) -> str:
        """Return the cost in words, on this many threads."""
        seconds = self.seconds / jobs
        minutes = seconds / 60
        hours = seconds / 3600
        if minutes < 2:
            duration = f"{seconds:.0f} s"
        elif hours < 2:
            duration = f"{minutes:.0f} minutes"
        else:
            duration = f"{hours:.1f} hours"
        frame_ms = 1000 * self.seconds / (self.n_frames * self.n_runs)
        return (
            f"{self.n_frames} frames, {self.n_runs} times (sites and noise), at "
            f"{frame_ms:.3g} ms: about {duration}"
        )


def estimate_cost(work: VideoWork, videos: Sequence[Video]) -> Cost:
    """Return the cost, timed on the first video's first masks with noise as tokens."""
    n_frames = sum(work.n_frames(video) for video in videos)
    shapes = [
        work.run_shape(number, site, videos[0])
        for number, sites in enumerate(work.sites)
        for site in sites
    ]
    # Enough frames that the last ones have a full context.
    masks = work.masks.read(videos[0], range(2))
    n_repeats = work.settings.context + N_TIMED_FRAMES + 2
    truth = VideoTruth(masks[[0] + [1] * n_repeats])
    # Runs of one shape cost the same.
    seconds = {
        shape: _frame_seconds(work, shape, truth) for shape in dict.fromkeys(shapes)
    }
    run_seconds = [seconds[shape] for shape in shapes]
    if "random" in work.baselines:
        run_seconds += seconds.values()
    return Cost(
        n_frames=n_frames,
        n_runs=len(run_seconds),
        seconds=n_frames * sum(run_seconds),
    )


def _frame_seconds(work: VideoWork, shape: RunShape, truth: VideoTruth) -> float:
    """Return the time per frame, propagated and scored: the shortest of the last ones."""
    frame = next(noise_frames(work.seed, "", shape.frame_map, shape.dim))
    clock: list[float] = []

    def frames() -> Frames:
        """Yield the same tokens again and again, noting when each is requested."""
        while True:
            clock.append(time.perf_counter())
            yield frame

    with torch.inference_mode(), precision_context(work.device, "fp32"):
        window = Window(shape.frame_map.grid, work.settings, shape.radii, work.device)
        run = VideoRun(truth, shape.frame_map, window)
        run.score(frames(), dim=shape.dim, n_frames=len(truth.labels) - 1)
    return min(after - before for before, after in pairwise(clock[-N_TIMED_FRAMES - 1 :]))


def group_bytes(work: VideoWork, videos: Sequence[Video]) -> int:
    """Return the peak memory of a thread: a slab and frames of tokens, masks, and a strip."""
    largest_site = 0
    for store, sites in zip(work.stores, work.sites, strict=True):
        for site in sites:
            image_bytes = 4 * math.prod(site.shape)  # in float32
            slab_bytes = store.plan.slab * image_bytes
            if site.dtype == "float16":
                slab_bytes //= 2
            n_times = 1
            if site.layout is not None and site.layout.frames:
                n_times = site.layout.frames
            frames_bytes = (work.settings.context + 2) * (image_bytes // n_times)
            largest_site = max(largest_site, slab_bytes + frames_bytes)
    largest_masks = 0
    for group in group_videos(videos, work.stores[0].plan.slab, min_groups=1):
        mask_bytes = sum(len(video.frames) * math.prod(video.size) for video in group)
        largest_masks = max(largest_masks, mask_bytes)
    return largest_site + largest_masks + STRIP_BYTES
