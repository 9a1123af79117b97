"""Groups of videos spread over threads, which end where one fails or the user stops the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import TypeVar

from vitsee_core.progress import Progress
from vitsee_core.video.davis import MaskFiles, Video
from vitsee_core.video.work import Found, VideoWork

T = TypeVar("T")
R = TypeVar("R")


class Stopped(Exception):
    """Raised in a thread whose result nobody waits for any more."""


class StoppableProgress:
    """Passes on how far the work is, until it is to end: then what reports to it ends."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.ended = threading.Event()

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """See `Progress`."""
        self._progress.start(total, done, unit)

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """See `Progress`.

        Raises:
            Stopped: the work is to end.
        """
        if self.ended.is_set():
            raise Stopped
        self._progress.advance(count, size_bytes)

    def stop(self) -> None:
        """See `Progress`."""
        self._progress.stop()


def work_on(work: VideoWork, groups: Sequence[Sequence[Video]], jobs: int) -> Found:
    """All groups, `jobs` at a time.

    Raises:
        VitseeError: the first that any of them raises.
    """
    progress = StoppableProgress(work.progress)
    total = Found()
    for part in _finished(replace(work, progress=progress), groups, jobs, progress):
        total.merge(part)
    return total


def check_masks(masks: MaskFiles, videos: Sequence[Video], jobs: int, progress: Progress) -> None:
    """Read every mask once, before any other work.

    Raises:
        VitseeError: see `MaskFiles.read`.
    """
    stoppable = StoppableProgress(progress)

    def check(video: Video) -> None:
        for frame in range(len(video.frames)):
            masks.read(video, range(frame, frame + 1))
            stoppable.advance(1)

    for _ in _finished(check, videos, jobs, stoppable):
        pass


def _finished(
    function: Callable[[T], R], items: Sequence[T], jobs: int, progress: StoppableProgress
) -> Iterator[R]:
    """Results in the order in which they come."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            progress.ended.set()
            for future in futures:
                future.cancel()
