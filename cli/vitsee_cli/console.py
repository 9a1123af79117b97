"""Terminal output: results on stdout, remarks, warnings and progress on stderr.

The core and the stores log through `logging`; this module decides what is shown, and how. rich is
imported with the first line that needs it, so that `vitsee --help` does not pay for it.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import click

from vitsee_core.runtime.machine import human_bytes as human_bytes
from vitsee_core.runtime.machine import plural
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PACKAGES = ["vitsee_cli", "vitsee_core", "vitsee_stores"]  # whose log lines are shown
ARGUMENTS = "vitsee.arguments"  # where the group leaves them in the click context
GRAMS_KEPT = "finished Gram matrices are kept; repeat the command to resume"
NOT_OFFERED = (
    "vitsee.not_offered"  # in the click context: whether it was asked of the wrong model
)
REASON = "vitsee.reason"  # in the click context: why the last command failed
RESUMES = (
    "vitsee.resumes"  # in the click context: what is kept of a command that is stopped
)
SHOW_AFTER = 1.0  # seconds: shorter work shows no progress
LOG_SECONDS = 15.0  # between progress lines where stderr is no terminal

PROGRESS_ONLY = -2

log = logging.getLogger("vitsee_cli")


def _is_progress(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or getattr(record, "progress", False)


_ALL: set[str] = set()  # always empty: every line is shown
_shown = _ALL
_rewrite: Callable[[str], str] = str
_send: Callable[[str], None] | None = None


@contextmanager
def of_a_step(shown: set[str], rewrite: Callable[[str], str]) -> Iterator[None]:
    """Show the lines of a nested command as `rewrite` puts them in the outer command's words, and
    none that is in `shown`, which gets them."""
    global _shown, _rewrite
    _shown = shown
    _rewrite = rewrite
    try:
        yield
    finally:
        _shown = _ALL
        _rewrite = str


@contextmanager
def each_line_once() -> Iterator[None]:
    """Show no line twice; a study that runs this command sees to it itself."""
    if _shown is not _ALL:
        yield
        return
    with of_a_step(set(), str):
        yield


def hand_over(send: Callable[[str], None]) -> None:
    """From now on lines are for another process to `show`; progress has no bars, which that
    process may have."""
    global _send
    _send = send


def show(line: str, shown: set[str]) -> None:
    """A line on stderr, through rich so that a progress bar stays intact, unless it is in `shown`,
    which gets it."""
    if line in shown:
        return
    if shown is not _ALL:
        shown.add(line)
    stderr().print(
        visible(line, keep="\n\t"), markup=False, highlight=False, soft_wrap=True
    )


class _StderrHandler(logging.Handler):
    """One record, one line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            prefix = (
                ""
                if record.levelno < logging.WARNING
                else f"{record.levelname.lower()}: "
            )
            line = prefix + _rewrite(self.format(record))
            show(line, _shown) if _send is None else _send(line)
        except Exception:
            self.handleError(record)


class _ClosedStdout(io.TextIOBase):
    """Stdout closed by the shell (`>&-`): writing a result is a user's mistake."""

    encoding = "utf-8"
    errors = "strict"

    def write(self, text: str) -> int:
        raise VitseeError("stdout is closed (>&-): the result has nowhere to go")


def prepare_streams() -> None:
    """Replace closed standard streams, and print any text whatever the encoding.

    A closed descriptor below 3 would be reused by the next opened file, and receive what libraries
    print; it is bound to the null device.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = _ClosedStdout()
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def status(text: str) -> Iterator[None]:
    """On a terminal this text stands below the other lines meanwhile; -q silences it."""
    if not (stderr().is_terminal and log.isEnabledFor(logging.INFO)):
        yield
        return
    from rich.text import Text

    with stderr().status(Text(visible(text)), refresh_per_second=4):
        yield


def require_stdout() -> None:
    """Check stdout before work whose result goes there. Raises VitseeError: it is closed."""
    if isinstance(sys.stdout, _ClosedStdout):
        sys.stdout.write("")


def setup(verbosity: int) -> None:
    """Show warnings only (-1), also progress (`PROGRESS_ONLY`), also remarks (0), or all (1)."""
    levels = {-1: logging.WARNING, 0: logging.INFO, PROGRESS_ONLY: logging.INFO}
    level = levels.get(verbosity, logging.DEBUG)
    stderr.cache_clear()
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = [_StderrHandler()]
        if verbosity == PROGRESS_ONLY:
            logger.handlers[0].addFilter(_is_progress)
        logger.propagate = False


def show_lines_of(package: str) -> None:
    """Show the log lines of another package, too, from the next `setup` on."""
    if package not in PACKAGES:
        PACKAGES.append(package)


@lru_cache(maxsize=1)
def stderr() -> Console:
    """The one rich console on stderr, shared by bars and log lines. Once its reader is gone
    (`2>&1 | head`) it is silent, and the command goes on."""
    from rich.console import Console

    class Stderr(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Stderr(stderr=True)


def stdout(width: int | None = None) -> Console:
    """A rich console on stdout for tables. If stdout is not a terminal nothing is cut or coloured.
    width: columns; by default the terminal's, or wide enough for any row."""
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            # rich would end the program with 1; that `head` has enough is not a failure.
            raise

    if width is None and not sys.stdout.isatty():
        width = 10_000
    return Stdout(width=width, highlight=False, soft_wrap=False)


def say(line: str) -> None:
    """A remark for the user on stderr; -q silences it."""
    log.info("%s", line)


def warn(line: str) -> None:
    """A line on stderr that -q does not silence."""
    log.warning("%s", line)


def out(text: str) -> None:
    """A result: one line (or several) on stdout."""
    sys.stdout.write(visible(text, keep="\n\t") + "\n")


def fail(text: str) -> None:
    """Why a command failed, on stderr whatever the verbosity."""
    sys.stderr.write(visible(text, keep="\n\t") + "\n")


def command_line() -> list[str]:
    """The command line as typed, starting with `vitsee`."""
    return ["vitsee", *click.get_current_context().meta.get(ARGUMENTS, [])]


def debug_traceback() -> None:
    if log.isEnabledFor(logging.DEBUG):
        fail(traceback.format_exc().rstrip())


def human_time(seconds: float) -> str:
    """`0:42` or `3:07:10`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Reporter:
    """Reports progress of a long run on stderr.

    Between `start` and `stop` progress is a bar on a terminal, an occasional line elsewhere (a
    file, a batch system), and nothing with -q or for work that is done at once. `advance` may be
    called from several threads.
    """

    def __init__(
        self, what: str, *, after: float | None = None, every: float = LOG_SECONDS
    ) -> None:
        """Progress of `what`. Nothing is shown for a phase shorter than `after` seconds
        (`SHOW_AFTER`); `every` is the seconds between lines without a terminal. `beside`, which may
        be set, is shown after the time left."""
        self.beside: Callable[[], str] | None = None
        self._what = what
        self._every = every
        self._after = SHOW_AFTER if after is None else after
        self._lock = threading.Lock()
        self._display: _Bar | _Lines | None = None

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Begin with `done` of `total` (of `unit`) already done."""
        self.stop()
        if log.isEnabledFor(logging.INFO):
            rate = _Rate(total, done, unit, self.beside)
            if _send is not None:
                self._display = _Lines(self._what, rate, self._every, self._every)
            elif stderr().is_terminal:
                self._display = _Bar(self._what, rate, self._after)
            else:
                self._display = _Lines(self._what, rate, self._after, self._every)

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Count this many more as done, and bytes as read or written."""
        with self._lock:
            if self._display is not None:
                self._display.rate.add(count, size_bytes)
                self._display.show()

    def skip(self, count: int) -> None:
        """Count this many as done before the start, so that the rate is that of this run."""
        with self._lock:
            if self._display is not None:
                self._display.rate.done += count

    def stop(self) -> None:
        """End after success or failure; the last state stays on the screen."""
        with self._lock:
            if self._display is not None:
                self._display.close()
                self._display = None


@contextmanager
def slabs_of(what: str) -> Iterator[Callable[[int, int], None]]:
    """Reports the slabs that `describe` and `validate` process, as those of `what`."""
    progress = Reporter(what)

    def report(done: int, total: int) -> None:
        progress.advance(1) if done else progress.start(total, unit="slabs")

    try:
        yield report
    finally:
        progress.stop()


class _Rate:
    """Images (or other units) and bytes since the start, their rates, and the time left."""

    def __init__(
        self, total: int, done: int, unit: str, beside: Callable[[], str] | None = None
    ) -> None:
        self.total = total
        self.done = done
        self.unit = unit
        self.beside = beside
        self.images = self.size_bytes = 0
        self.start = time.monotonic()

    def add(self, images: int, size_bytes: int) -> None:
        self.images += images
        self.size_bytes += size_bytes

    @property
    def count(self) -> int:
        return self.done + self.images

    def text(self) -> str:
        """`31.2 images/s, 96.5 MB/s, 1:42 left`; bytes only where some were written."""
        seconds = max(time.monotonic() - self.start, 1e-9)
        parts = [f"{self.images / seconds:.1f} {self.unit}/s"]
        if self.size_bytes:
            parts.append(f"{human_bytes(self.size_bytes / seconds)}/s")
        left = self.total - self.count
        if self.images and left > 0:
            parts.append(f"{human_time(left * seconds / self.images)} left")
        elif left <= 0:
            parts.append(f"{human_time(seconds)} in all")
        if self.beside is not None:
            parts.append(self.beside())
        return ", ".join(parts)


class _Lines:
    """Progress as occasional log lines, the last one at the end of anything that took `after`
    seconds."""

    def __init__(self, what: str, rate: _Rate, after: float, every: float) -> None:
        self.what = what
        self.rate = rate
        self.after = after
        self.every = every
        self.next = rate.start + every

    def show(self) -> None:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every
            self._say()

    def close(self) -> None:
        if time.monotonic() >= self.rate.start + self.after:
            self._say()

    def _say(self) -> None:
        rate = self.rate
        line = f"{self.what}: {rate.count}/{plural(rate.total, rate.unit)}, {rate.text()}"
        log.info("%s", line, extra={"progress": True})


class _Bar:
    """Progress as a bar below the log lines, after `after` seconds."""

    def __init__(self, what: str, rate: _Rate, after: float) -> None:
        self.what = what
        self.rate = rate
        self.live: Progress | None = None
        self._lock = threading.Lock()
        self._closed = False
        # Not with the first advance: that may be minutes away.
        self._timer = threading.Timer(after, self._appear)
        self._timer.daemon = True
        self._timer.start() if after else self._appear()

    def _appear(self) -> None:
        with self._lock:
            if not self._closed:
                self.live = self._made()
                self.live.start()

    def _made(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        live = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            console=stderr(),
        )
        live.add_task(
            self.what, total=self.rate.total, completed=self.rate.count, rate=""
        )
        return live

    def show(self) -> None:
        if (live := self.live) is not None:
            live.update(
                live.task_ids[0], completed=self.rate.count, rate=self.rate.text()
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._timer.cancel()
        if self.live is not None:
            self.show()
            self.live.stop()
