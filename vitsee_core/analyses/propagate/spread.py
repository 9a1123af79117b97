"""Distributes videos over threads, which stop if one fails or the user stops the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from vitsee_core.analyses.propagate.davis import MaskFiles, Video
from vitsee_core.analyses.propagate.work import Found, VideoWork
from vitsee_core.runtime.lanes import Stopped, run_lanes
from vitsee_core.runtime.progress import Progress

T = TypeVar("T")


class StoppableProgress:
    """Forwards progress until the run is stopped; then reporting raises `Stopped`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.ended = threading.Event()

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        self._progress.start(total, done, unit)

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """See `Progress`. Raises Stopped: the run was stopped."""
        if self.ended.is_set():
            raise Stopped
        self._progress.advance(count, size_bytes)

    def skip(self, count: int) -> None:
        self._progress.skip(count)

    def stop(self) -> None:
        self._progress.stop()


def work_on(work: VideoWork, groups: Sequence[Sequence[Video]], jobs: int) -> Found:
    """All groups, `jobs` at a time. Raises VitseeError: the first error of any group."""
    progress = StoppableProgress(work.progress)
    total, adding = Found(), threading.Lock()
    stoppable = replace(work, progress=progress)

    def find(group: Sequence[Video]) -> None:
        part = stoppable(group)
        with adding:
            total.merge(part)

    _each(find, groups, jobs, progress)
    return total


def check_masks(masks: MaskFiles, videos: Sequence[Video], jobs: int, progress: Progress) -> None:
    """Read every mask once, before any other work. Raises VitseeError: see `MaskFiles.read`."""
    stoppable = StoppableProgress(progress)

    def check(video: Video) -> None:
        for frame in range(len(video.frames)):
            masks.read(video, range(frame, frame + 1))
            stoppable.advance(1)

    _each(check, videos, jobs, stoppable)


def _each(
    function: Callable[[T], None], items: Sequence[T], jobs: int, progress: StoppableProgress
) -> None:
    """Apply `function` to every item; it reports to `progress`, which stops all threads as soon as
    one fails."""

    def lane(_: int, take: Callable[[], int | None]) -> None:
        while (number := take()) is not None:
            function(items[number])

    run_lanes(min(jobs, len(items)), lane, len(items), progress.ended.set)
