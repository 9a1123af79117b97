"""How a run ends: its counts, its time by stage, and signals that stop it between two batches."""

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
    """Result of one call of `extract`.

    Attributes:
        complete: whether the store has all of its slabs now, by whatever process.
        n_images: images that this call did.
        size_bytes: bytes that it wrote.
        seconds: its time.
        clock: seconds by consecutive stage: their sum is `seconds`, of each worker if there are
            several.
        beside: seconds of stages that ran concurrently.
        unreadable: (row, name, reason) of each image that could not be read.
        examples: "images" or "clips".
        remarks: what was done to images -> number of these images.
        not_finite: (row, name, reason) of each image that makes the model give NaN or inf.
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
        """Add the results of another round; `complete` stays as it is."""
        self.n_images += other.n_images
        self.size_bytes += other.size_bytes
        self.seconds += other.seconds
        _add_seconds(self.clock, other.clock)
        _add_seconds(self.beside, other.beside)
        self.unreadable += other.unreadable
        self.remarks.update(other.remarks)
        self.not_finite += other.not_finite

    def stages(self) -> str:
        """Return the time by stage, in words."""
        line = _stage_list(self.clock)
        # Stages of one process add up to its time; those of several workers to a multiple of it.
        if sum(self.clock.values()) > 1.05 * self.seconds:
            line = f"all workers together: {line}"
        if self.beside:
            return f"{line}; beside these {_stage_list(self.beside)}"
        return line

    def unreadable_line(self) -> str:
        """Return which images could not be read or break the model, and why; "" if none."""
        images_by_deed = {
            "could not be read": self.unreadable,
            "make the model give NaN or inf": self.not_finite,
        }
        lines = []
        for deed, images in images_by_deed.items():
            if not images:
                continue
            names = "; ".join(f"{name} ({reason})" for _, name, reason in images[:10])
            more = f"; and {len(images) - 10} more" if len(images) > 10 else ""
            lines.append(
                f"{len(images)} of {plural(self.n_images, self.examples)} {deed}: {names}{more}; "
                "their rows are NaN with valid = 0"
            )
        return "; ".join(lines)

    def remark_lines(self) -> list[str]:
        """Return remarks on images that were made plain RGB, a line for each kind of change."""
        return remark_lines(self.remarks, plural(self.n_images, self.examples))


def _stage_list(seconds_by_stage: Mapping[str, float]) -> str:
    """Return `model 2.0 s, loading 1.0 s`, the longest first."""
    longest_first = sorted(seconds_by_stage.items(), key=lambda item: -item[1])
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in longest_first)


def _add_seconds(total: dict[str, float], added: Mapping[str, float]) -> None:
    """Add seconds by stage to others, in place."""
    for stage, seconds in added.items():
        total[stage] = total.get(stage, 0.0) + seconds


class Clock:
    """Seconds by stage; `with clock("loading"): ...`. Thread-safe.

    On a CPU a stage includes all its computation; an asynchronous device continues after the call,
    and its time is in the stage that waits for it.

    Attributes:
        seconds: stage -> seconds of the thread that created the clock. Each moment belongs to the
            innermost running stage, so that all add up to the time of the outermost.
        beside: stage -> seconds of other threads, which work concurrently.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._running = _Running()

    def add(self, stage: str, seconds: float) -> None:
        """Add time to a stage of the calling thread."""
        is_owner = threading.get_ident() == self._owner
        with self._lock:
            _add_seconds(self.seconds if is_owner else self.beside, {stage: seconds})

    def limit(self) -> str:
        """Return what the run mostly waited for, in words: images, the disk, or the model."""
        stages_by_cause = {
            "loading (more --workers, smaller files)": ["loading"],
            "writing (a faster disk, --tokens pooled)": ["waiting for the writer"],
            "the model and its summaries": ["model", "reductions", "grams", "erf"],
        }
        seconds_by_cause = {
            cause: sum(self.seconds.get(stage, 0.0) for stage in stages)
            for cause, stages in stages_by_cause.items()
        }
        return max(seconds_by_cause, key=seconds_by_cause.__getitem__)

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
    """Context in which the first SIGTERM or SIGINT is a request to stop, and a second one acts.

    It is true once a signal came. Signals can be caught in the main thread only; elsewhere nothing
    is installed.

    Attributes:
        signal_name: name of the signal that came, None so far.
    """

    CAUGHT = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for caught in self.CAUGHT:
                self._handlers[caught] = signal.signal(caught, self._on_signal)
        return self

    def __exit__(self, *_error: object) -> None:
        self._restore_handlers()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; the next one has its original effect."""
        self.signal_name = signal.Signals(number).name
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        """Give the signals back to the handlers that they had before."""
        for caught, handler in self._handlers.items():
            signal.signal(caught, handler)
        self._handlers = {}
