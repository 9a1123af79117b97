"""The time of an extraction, and where it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

REST = "setting up"  # mostly compiled loops, which are read or made, and buffers


class Clock:
    """Seconds by stage; `with clock("loading"): ...`. Thread-safe.

    seconds: of the thread that created the clock, each moment in its innermost running stage, so
    that they add up to the time of the outermost. beside: of other threads, which work
    concurrently. On a CPU a stage includes all its computation; an asynchronous device continues
    after the call, and its time is in the stage that waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self._owner, self._lock = threading.get_ident(), threading.Lock()
        self._running = _Running()

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            of = self.seconds if threading.get_ident() == self._owner else self.beside
            of[stage] = of.get(stage, 0.0) + seconds

    def limit(self) -> str:
        """The part that the run mostly waited for, in words: images, the disk, or the model."""
        waited = {
            "loading (more --workers, smaller files)": self.seconds.get("loading", 0.0),
            "writing (a faster disk, --tokens pooled)": self.seconds.get(
                "waiting for the writer", 0.0
            ),
        }
        rest = sum(
            self.seconds.get(stage, 0.0) for stage in ("model", "reductions", "grams", "erf")
        )
        waited["the model and its summaries"] = rest
        return max(waited, key=lambda stage: waited[stage])

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to this stage, and not to an outer one."""
        running = self._running
        self._change()
        running.stages.append(stage)
        try:
            yield
        finally:
            self._change()
            running.stages.pop()

    def _change(self) -> None:
        """Add the time since the last change to the running stage."""
        now, running = time.perf_counter(), self._running
        if running.stages:
            self.add(running.stages[-1], now - running.since)
        running.since = now


class _Running(threading.local):
    """The running stages of each thread, outermost first, and the start of the innermost."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.since = 0.0
