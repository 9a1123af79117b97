"""How a run ends: its counts, where the time went, and signals as a request to stop between two
batches."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from vitsee_core.images.picture_remarks import remark_lines
from vitsee_core.runtime.machine import plural
from vitsee_stores.errors import VitseeError

REST = "setting up"  # mostly compiled loops, which are read or made, and buffers


@dataclass
class Outcome:
    """Result of one call of `extract`; `complete` refers to the whole store.

    Attributes:
        clock: seconds by consecutive stage: their sum is `seconds`, of each worker if there are
            several.
        beside: seconds of stages that ran concurrently.
        examples: images or clips.
        remarks: what was done to images -> of how many of them, see `picture_remarks`.
    """

    complete: bool
    n_images: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    clock: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    unreadable: list[tuple[int, str, str]] = field(default_factory=list)
    examples: str = "images"
    remarks: Counter[str] = field(default_factory=Counter)
    not_finite: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Add the results of another round."""
        self.n_images += other.n_images
        self.size_bytes += other.size_bytes
        self.seconds += other.seconds
        for own, added in ((self.clock, other.clock), (self.beside, other.beside)):
            for stage, seconds in added.items():
                own[stage] = own.get(stage, 0.0) + seconds
        self.unreadable += other.unreadable
        self.remarks.update(other.remarks)
        self.not_finite += other.not_finite

    def stages(self) -> str:
        """The time by stage, in words."""

        def listed(clock: Mapping[str, float]) -> str:
            longest = sorted(clock.items(), key=lambda item: -item[1])
            return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in longest)

        several = sum(self.clock.values()) > 1.05 * self.seconds
        line = ("all workers together: " if several else "") + listed(self.clock)
        if self.beside:
            return f"{line}; beside these {listed(self.beside)}"
        return line

    def unreadable_line(self) -> str:
        """Which images could not be read, or break the model, and why; "" if none."""
        lines = []
        for images, deed in (
            (self.unreadable, "could not be read"),
            (self.not_finite, "make the model give NaN or inf"),
        ):
            if not images:
                continue
            named = "; ".join(f"{name} ({reason})" for _, name, reason in images[:10])
            more = f"; and {len(images) - 10} more" if len(images) > 10 else ""
            lines.append(
                f"{len(images)} of {plural(self.n_images, self.examples)} {deed}: {named}{more}; "
                "their rows are NaN with valid = 0"
            )
        return "; ".join(lines)

    def remark_lines(self) -> list[str]:
        """Remarks on images that were made plain RGB, a line for each kind of change."""
        return remark_lines(self.remarks, plural(self.n_images, self.examples))


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
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._running = _Running()

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            of = self.seconds if threading.get_ident() == self._owner else self.beside
            of[stage] = of.get(stage, 0.0) + seconds

    def limit(self) -> str:
        """The part that the run mostly waited for, in words: images, the disk, or the model."""
        stages = {
            "loading (more --workers, smaller files)": ("loading",),
            "writing (a faster disk, --tokens pooled)": ("waiting for the writer",),
            "the model and its summaries": ("model", "reductions", "grams", "erf"),
        }
        return max(
            stages, key=lambda part: sum(self.seconds.get(s, 0.0) for s in stages[part])
        )

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
        now = time.perf_counter()
        running = self._running
        if running.stages:
            self.add(running.stages[-1], now - running.since)
        running.since = now


class _Running(threading.local):
    """The running stages of each thread, outermost first, and the start of the innermost."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.since = 0.0


# ---------------- stopped by a signal


class Interrupted(VitseeError):
    """Stopped by a signal with all commits complete; the same command resumes."""

    exit_code = 75  # EX_TEMPFAIL: schedulers may requeue

    def __init__(self, text: str, signal_name: str = "") -> None:
        super().__init__(text)
        self.signal_name = signal_name


class StopRequest:
    """Context in which the first SIGTERM or SIGINT sets `signal_name`; a second one has its
    original effect.

    Signals can be caught in the main thread only; elsewhere nothing is installed.
    """

    CAUGHT = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self.CAUGHT}
        return self

    def __exit__(self, *_error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for caught, handler in self._before.items():
            signal.signal(caught, handler)
        self._before = {}
