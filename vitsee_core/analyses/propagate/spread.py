"""Distributes videos over threads, which stop if one fails or the user stops the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from vitsee_core.analyses.propagate.davis import MaskFiles, Video
from vitsee_core.analyses.propagate.work import Found, VideoWork
from vitsee_core.runtime.lanes import Stopped, run_lanes
from vitsee_core.runtime.progress import Progress, Silent

T = TypeVar("T")


class _Stoppable(Silent):
    """Forwards what is advanced until the run is stopped; then reporting raises `Stopped`."""

    def __init__(self, to: Progress) -> None:
        self._to, self.ended = to, threading.Event()

    def advance(self, count: int, size_bytes: int = 0) -> None:
        if self.ended.is_set():
            raise Stopped
        self._to.advance(count, size_bytes)


def work_on(work: VideoWork, groups: Sequence[Sequence[Video]], jobs: int) -> Found:
    """All groups, `jobs` at a time. Raises VitseeError: the first error of any group."""
    total, adding = Found(), threading.Lock()

    def find(group: Sequence[Video], progress: Progress) -> None:
        part = replace(work, progress=progress)(group)
        with adding:
            total.merge(part)

    _each(find, groups, jobs, work.progress)
    return total


def check_masks(masks: MaskFiles, videos: Sequence[Video], jobs: int, progress: Progress) -> None:
    """Read every mask once, before any other work. Raises VitseeError: see `MaskFiles.read`."""

    def check(video: Video, progress: Progress) -> None:
        for frame in range(len(video.frames)):
            masks.read(video, range(frame, frame + 1))
            progress.advance(1)

    _each(check, videos, jobs, progress)


def _each(
    function: Callable[[T, Progress], None], items: Sequence[T], jobs: int, progress: Progress
) -> None:
    """Apply `function` to every item and to what it reports to, which ends all threads as soon as
    one fails."""
    stoppable = _Stoppable(progress)

    def lane(_: int, take: Callable[[], int | None]) -> None:
        while (number := take()) is not None:
            function(items[number], stoppable)

    run_lanes(min(jobs, len(items)), lane, len(items), stoppable.ended.set)
