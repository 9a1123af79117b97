"""Propagation through the videos of one or several stores, and the controls beside it.

The unit of work is a group of videos: those that begin in one slab, at all sites of all stores, so
that a slab is read once per site (twice where a video runs on into the next) and the masks, their
contours and the controls are made once for all sites. Results do not depend on the groups.

Memory of a group: one slab of a site as it is stored, `context` + 2 frames of tokens in float32,
the similarities of a strip of tokens, the masks of its videos.
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
    VideoRun,
    VideoTruth,
    noise_frames,
    scored,
)
from vitsee_core.demo.indexed_masks import write_mask
from vitsee_core.images.placement import place
from vitsee_core.runtime.device import precision_context
from vitsee_core.runtime.lanes import Stopped, run_lanes
from vitsee_core.runtime.progress import SILENT, Progress, Silent

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


# ---------------------------------------------------------------- the work


# The rows of a table: (store's number, site, baseline).
Key = tuple[int, str, str]
Radii = tuple[float, float] | None


@dataclass(frozen=True)
class RunShape:
    """The mapping of a frame to the grid, the window, and the number of channels; of clips the
    place in time of each frame in the grid. The cost of a run, and the noise that replaces its
    tokens, depend on these only."""

    where: FrameMap
    radii: Radii
    dim: int
    cells: tuple[int, ...] | None = None

    def noise(self, seed: int, video: str) -> Frames:
        """Noise as tokens: of each frame its own, of clips one for each place in time, as frames of
        one place share their tokens."""
        each = noise_frames(seed, video, self.where, self.dim)
        if self.cells is None:
            yield from each
            return
        of_places: dict[int, NDArray[np.floating]] = {}
        for cell in self.cells:
            if cell not in of_places:
                of_places[cell] = next(each)
            yield of_places[cell]


@dataclass
class PropagationScores:
    """The result for each row and video: its scores, the share of the frame that no token has seen,
    and the number of objects without any token beside that of all objects."""

    scores: dict[Key, dict[str, FrameScores]] = field(default_factory=dict)
    hidden: dict[Key, dict[str, float]] = field(default_factory=dict)
    lost: dict[Key, dict[str, tuple[int, int]]] = field(default_factory=dict)

    def add(self, key: Key, video: str, scores: FrameScores) -> None:
        self.scores.setdefault(key, {})[video] = scores

    def merge(self, other: PropagationScores) -> None:
        """Add the videos of `other`."""
        for key in other.scores:
            self.scores.setdefault(key, {}).update(other.scores[key])
        for key in other.hidden:
            self.hidden.setdefault(key, {}).update(other.hidden[key])
            self.lost.setdefault(key, {}).update(other.lost[key])


@dataclass
class VideoWork:
    """The work on every video."""

    stores: Sequence[Store]
    sites: Sequence[Sequence[SiteSpec]]  # of each store
    masks: MaskFiles
    settings: PropagationSettings
    baselines: Sequence[str]
    seed: int
    device: torch.device
    # (store's number, site) -> where predicted labels are written, one folder per video; empty if
    # they are not saved
    folders: dict[tuple[int, str], Path] = field(default_factory=dict)
    progress: Progress = SILENT

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "progress": SILENT}

    def __call__(self, videos: Sequence[Video]) -> PropagationScores:
        """The scores of a group of videos. Raises VitseeError: a mask is damaged or does not fit
        its frame."""
        with torch.inference_mode(), precision_context(self.device, "fp32"):
            return _Group(self, videos).run()

    def n_frames(self, video: Video) -> int:
        """Number of frames that need labels: the last is not scored."""
        return len(video.frames) - (not self.folders)

    def kind(self, number: int, site: SiteSpec, video: Video) -> RunShape:
        transform = self.stores[number].manifest.transform
        where = frame_map(
            site.name, site.layout, place(transform, video.size), video.size
        )
        assert site.layout is not None and site.layout.stride_px is not None
        cells = video.rows[number].cells(site.layout)
        return RunShape(
            where, self.settings.radii(site.layout.stride_px), site.dim, cells
        )


class _Group:
    """Some videos, with what all sites share computed once."""

    def __init__(self, work: VideoWork, videos: Sequence[Video]) -> None:
        self._work = work
        self._videos = videos
        self._truths = {
            video.name: VideoTruth(work.masks.read(video)) for video in videos
        }
        self._found = PropagationScores()
        self._controls: dict[
            tuple[str, str, RunShape | FrameMap | None], FrameScores
        ] = {}
        self._windows: dict[tuple[tuple[int, int], Radii], Window] = {}

    def run(self) -> PropagationScores:
        """All sites of all stores."""
        for number, (store, sites) in enumerate(
            zip(self._work.stores, self._work.sites, strict=True)
        ):
            rows = [video.rows[number] for video in self._videos]
            for site in sites:
                reader = SiteReader(store, site, [own.rows for own in rows])
                for video, own in zip(self._videos, rows, strict=True):
                    layout = site.layout
                    assert layout is not None
                    frames = reader.frames(own.rows, own.cells(layout))
                    self._measure(number, site, video, frames)
        return self._found

    def _measure(self, number: int, site: SiteSpec, video: Video, frames: Frames) -> None:
        work = self._work
        name = video.name
        kind = work.kind(number, site, video)
        run = VideoRun(self._truths[name], kind.where, self._window(kind))
        key = number, site.name, ""
        self._found.hidden.setdefault(key, {})[name] = kind.where.hidden()
        self._found.lost.setdefault(key, {})[name] = run.lost
        save = None
        if work.folders:
            save = _writer(work.folders[number, site.name] / name, video.frames)
        scores = run.score(frames, site.dim, work.n_frames(video), save, work.progress)
        self._found.add(key, name, scores)
        for baseline in work.baselines:
            control = self._control(baseline, video, kind, run)
            self._found.add((number, site.name, baseline), name, control)

    def _control(
        self, baseline: str, video: Video, kind: RunShape, run: VideoRun
    ) -> FrameScores:
        """Computed once per what it depends on."""
        truth = self._truths[video.name]
        work = self._work
        depends = {"still": None, "grid": kind.where, "random": kind}[baseline]
        key = (baseline, video.name, depends)
        if key in self._controls:
            return self._controls[key]
        if baseline == "still":
            scores = scored(truth, lambda _: truth.labels[0])
        elif baseline == "grid":
            scores = scored(truth, run.through_grid)
        else:
            noise = kind.noise(work.seed, video.name)
            scores = run.score(
                noise, kind.dim, len(video.frames) - 1, None, work.progress
            )
        self._controls[key] = scores
        return scores

    def _window(self, kind: RunShape) -> Window:
        key = kind.where.grid, kind.radii
        if key not in self._windows:
            work = self._work
            self._windows[key] = Window(
                kind.where.grid, work.settings, kind.radii, work.device
            )
        return self._windows[key]


class SiteReader:
    """The grids of a site's frames, slab by slab: the last slab is cached, so that videos in order
    read each once."""

    def __init__(
        self, store: Store, site: SiteSpec, rows: Sequence[Sequence[int]]
    ) -> None:
        """rows: all that will be requested."""
        self._acts = store.acts(site.name, "patches", partial=True)
        self._slab = store.plan.slab
        self._span = min(map(min, rows)), max(map(max, rows)) + 1
        self._held: tuple[int, NDArray[np.floating]] | None = None

    def frames(self, rows: Sequence[int], cells: Sequence[int] | None) -> Frames:
        """(rows, cols, dim) of each image, as stored; of clips of each of these places in time."""
        for frame, row in enumerate(rows):
            k = row // self._slab
            begin = max(k * self._slab, self._span[0])
            if self._held is None or self._held[0] != k:
                self._held = None  # free it before reading the next
                self._held = (
                    k,
                    self._acts[begin : min((k + 1) * self._slab, self._span[1])],
                )
            found = self._held[1][row - begin]
            yield found if cells is None else found[cells[frame]]


def _writer(folder: Path, frames: Sequence[str]) -> Callable[[int, Labels], None]:
    folder.mkdir(parents=True)
    return lambda frame, labels: write_mask(folder / f"{frames[frame]}.png", labels)


def group_videos(videos: Sequence[Video], slab: int, least: int) -> list[list[Video]]:
    """Videos that begin in one slab (of the first store) grouped in order; split further if there
    would be fewer than `least` groups."""
    groups: dict[int, list[Video]] = {}
    for video in videos:
        groups.setdefault(video.rows[0].rows[0] // slab, []).append(video)
    grouped = list(groups.values())
    while (
        len(grouped) < least and (longest := max(grouped, key=len)) and len(longest) > 1
    ):
        at = grouped.index(longest)
        half = (len(longest) + 1) // 2
        grouped[at : at + 1] = [longest[:half], longest[half:]]
    return grouped


# ---------------------------------------------------------------- videos over threads
#
# Threads stop if one fails or the user stops the run.


T = TypeVar("T")


class _Stoppable(Silent):
    """Forwards what is advanced until the run is stopped; then reporting raises `Stopped`."""

    def __init__(self, to: Progress) -> None:
        self._to = to
        self.ended = threading.Event()

    def advance(self, count: int, size_bytes: int = 0) -> None:
        if self.ended.is_set():
            raise Stopped
        self._to.advance(count, size_bytes)


def work_on(
    work: VideoWork, groups: Sequence[Sequence[Video]], jobs: int
) -> PropagationScores:
    """All groups, `jobs` at a time. Raises VitseeError: the first error of any group."""
    total = PropagationScores()
    adding = threading.Lock()

    def find(group: Sequence[Video], progress: Progress) -> None:
        part = replace(work, progress=progress)(group)
        with adding:
            total.merge(part)

    _each(find, groups, jobs, work.progress)
    return total


def check_masks(
    masks: MaskFiles, videos: Sequence[Video], jobs: int, progress: Progress
) -> None:
    """Read every mask once, before any other work. Raises VitseeError: see `MaskFiles.read`."""

    def check(video: Video, progress: Progress) -> None:
        for frame in range(len(video.frames)):
            masks.read(video, range(frame, frame + 1))
            progress.advance(1)

    _each(check, videos, jobs, progress)


def _each(
    function: Callable[[T, Progress], None],
    items: Sequence[T],
    jobs: int,
    progress: Progress,
) -> None:
    """Apply `function` to every item and to what it reports to, which ends all threads as soon as
    one fails."""
    stoppable = _Stoppable(progress)

    def lane(_: int, take: Callable[[], int | None]) -> None:
        while (number := take()) is not None:
            function(items[number], stoppable)

    run_lanes(min(jobs, len(items)), lane, len(items), stoppable.ended.set)


# ---------------------------------------------------------------- its cost
#
# Time is estimated from a few frames, memory from shapes.


MEASURED = 3  # frames of each kind


@dataclass(frozen=True)
class Cost:
    """The estimated cost of propagating all videos."""

    n_frames: int  # of all videos, whose labels are needed
    n_runs: int  # passes over these, one per site of a store and per kind of noise
    seconds: float  # of one thread

    def line(self, jobs: int) -> str:
        seconds = self.seconds / jobs
        minutes = seconds / 60
        hours = seconds / 3600
        about = f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} minutes"
        about = about if hours < 2 else f"{hours:.1f} hours"
        each = 1000 * self.seconds / (self.n_frames * self.n_runs)
        return (
            f"{self.n_frames} frames, {self.n_runs} times (sites and noise), at {each:.3g} ms: "
            f"about {about}"
        )


def cost_of(work: VideoWork, videos: Sequence[Video]) -> Cost:
    """Measured on the first video's first masks, with noise as tokens."""
    n_frames = sum(work.n_frames(video) for video in videos)
    kinds = [
        work.kind(number, site, videos[0])
        for number, sites in enumerate(work.sites)
        for site in sites
    ]
    # Enough frames that the last ones have a full context.
    first = work.masks.read(videos[0], range(2))
    truth = VideoTruth(first[[0] + [1] * (work.settings.context + MEASURED + 2)])
    seconds = {kind: _seconds(work, kind, truth) for kind in dict.fromkeys(kinds)}
    noise = list(seconds.values()) if "random" in work.baselines else []
    runs = [*(seconds[kind] for kind in kinds), *noise]
    return Cost(n_frames, len(runs), n_frames * sum(runs))


def _seconds(work: VideoWork, kind: RunShape, truth: VideoTruth) -> float:
    """Time per frame, propagated and scored; the shortest of the last ones."""
    frame = next(noise_frames(work.seed, "", kind.where, kind.dim))
    clock: list[float] = []

    def frames() -> Frames:
        while True:
            clock.append(time.perf_counter())
            yield frame

    with torch.inference_mode(), precision_context(work.device, "fp32"):
        window = Window(kind.where.grid, work.settings, kind.radii, work.device)
        VideoRun(truth, kind.where, window).score(
            frames(), kind.dim, len(truth.labels) - 1
        )
    return min(after - before for before, after in pairwise(clock[-MEASURED - 1 :]))


def group_bytes(work: VideoWork, videos: Sequence[Video]) -> int:
    """Peak memory of a thread: see `work`."""
    largest = 0
    for store, sites in zip(work.stores, work.sites, strict=True):
        for site in sites:
            image = 4 * math.prod(site.shape)
            slab = store.plan.slab * image // (2 if site.dtype == "float16" else 1)
            frame = image // (site.layout.frames or 1 if site.layout else 1)
            largest = max(largest, slab + (work.settings.context + 2) * frame)
    groups = group_videos(videos, work.stores[0].plan.slab, 1)
    masks = max(sum(len(v.frames) * math.prod(v.size) for v in group) for group in groups)
    return largest + masks + STRIP_BYTES
