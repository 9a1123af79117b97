"""Progress reporting of long runs: a protocol; the terminal's implementation draws a bar."""

from __future__ import annotations

import html
import importlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Progress(Protocol):
    """Receives the progress of a run.

    Between `start` and `stop` one phase of the work is counted; a run of several phases starts
    each separately.
    """

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Begin a phase: `total` are to be done, `done` of them already are. unit: a plural."""

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Count `count` more as done, and `size_bytes` as written or read.

        May be called from any thread.
        """

    def skip(self, count: int) -> None:
        """Count `count` as done before this run: they do not count for the rate."""

    def stop(self) -> None:
        """End the phase, after success or failure."""


class Silent:
    """Progress that shows nothing."""

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Show nothing."""

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Show nothing."""

    def skip(self, count: int) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """Show nothing."""


SILENT = Silent()
SILENT_SECONDS = 2.0  # shorter work is not announced
SITE_IMAGES = "images x sites"  # the unit of analyses that read every image once a site

log = logging.getLogger(__name__)
_counting = threading.Lock()  # global, because a Tally is pickled


@dataclass
class Tally(Silent):
    """Progress that is summed, for a report by another process.

    Attributes:
        count: sum of what was advanced.
        size_bytes: sum of its bytes.
    """

    count: int = 0
    size_bytes: int = 0

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Add to the sums."""
        with _counting:
            self.count += count
            self.size_bytes += size_bytes


@dataclass
class Forwarded(Tally):
    """Progress that is passed on to another, and summed.

    Attributes:
        to: the other progress.
    """

    to: Progress = SILENT

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Start the other progress."""
        self.to.start(total, done, unit)

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Add to the sums, and advance the other progress."""
        super().advance(count, size_bytes)
        self.to.advance(count, size_bytes)

    def skip(self, count: int) -> None:
        """Add to the sums, and skip as much in the other progress."""
        super().advance(count)
        self.to.skip(count)

    def stop(self) -> None:
        """Stop the other progress."""
        self.to.stop()


@dataclass
class OfClips(Forwarded):
    """Progress of an analysis of clips, whose units are named for images: these are renamed."""

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Start the other progress in the words of clips."""
        super().start(total, done, unit.replace("images", "clips"))


@contextmanager
def soon_said(text: str) -> Iterator[None]:
    """Context that logs a text if the work inside takes more than `SILENT_SECONDS`."""
    timer = threading.Timer(SILENT_SECONDS, log.info, ("%s ...", text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def counting(
    progress: Progress, total: int, unit: str = "images", *, done: int = 0
) -> Iterator[Progress]:
    """Context that starts and stops `progress`, on errors too."""
    progress.start(total, done, unit)
    try:
        yield progress
    finally:
        progress.stop()


RENEWAL_SECONDS = 0.2  # seconds between renewals


class NotebookProgress:
    """Progress as a bar in an IPython notebook; elsewhere as a line on stderr after each phase.

    Args:
        what: text before the numbers.

    Examples:
        >>> import vitsee
        >>> table = vitsee.attn_dist("vit.zarr", progress=vitsee.NotebookProgress())
    """

    def __init__(self, what: str = "vitsee") -> None:
        self.what = what
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._unit = "images"
        self._start = 0.0
        self._shown = 0.0
        self._display: Any = None

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Begin a phase: `total` are to be done, `done` of them already are. unit: a plural."""
        with self._lock:
            self._total = total
            self._done = done
            self._unit = unit
            self._start = time.monotonic()
            self._shown = 0.0
            self._display = None
            self._show()

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Count `count` more as done; the bar is renewed a few times a second."""
        with self._lock:
            self._done += count
            if time.monotonic() - self._shown > RENEWAL_SECONDS:
                self._show()

    def skip(self, count: int) -> None:
        """Count `count` as done before this run."""
        self.advance(count)

    def stop(self) -> None:
        """End the phase; the last state stays."""
        with self._lock:
            self._show(last=True)

    def line(self) -> str:
        """Return `vitsee: 120 of 1,000 images, 3 s`."""
        seconds = time.monotonic() - self._start
        count = f"{self._done:,} of {self._total:,} {self._unit}"
        return f"{self.what}: {count}, {seconds:.0f} s"

    def _show(self, last: bool = False) -> None:
        """Renew the bar; outside of a notebook print a line, if it is the last."""
        self._shown = time.monotonic()
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None or not hasattr(shell, "kernel"):
            if last:
                sys.stderr.write(f"{self.line()}\n")
            return
        notebook = importlib.import_module("IPython.display")
        bar = f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress> '
        content = notebook.HTML(bar + html.escape(self.line()))
        if self._display is None:
            self._display = notebook.display(content, display_id=True)
        else:
            self._display.update(content)
