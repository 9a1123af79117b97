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
# Entries of the click context:
NOT_OFFERED = "vitsee.not_offered"  # whether the command does not apply to the model
REASON = "vitsee.reason"  # why the last command failed
RESUMES = "vitsee.resumes"  # what is kept of a command that is stopped

SHOW_AFTER = 1.0  # seconds: shorter work shows no progress
LOG_SECONDS = 15.0  # between progress lines where stderr is not a terminal

PROGRESS_ONLY = -2  # a verbosity, for `setup`

log = logging.getLogger("vitsee_cli")


# How lines of the log are shown; `step_lines` and `send_lines_to` change it.
_SHOW_ALL: set[str] = set()  # stays empty: lines are repeated
_shown_lines = _SHOW_ALL
_rewrite: Callable[[str], str] = str
_send: Callable[[str], None] | None = None


@contextmanager
def step_lines(shown_lines: set[str], rewrite: Callable[[str], str]) -> Iterator[None]:
    """Context in which the log lines of a nested command are shown, each only once.

    Args:
        shown_lines: the lines shown already, which is extended.
        rewrite: puts a line into the words of the outer command.
    """
    global _shown_lines, _rewrite
    _shown_lines = shown_lines
    _rewrite = rewrite
    try:
        yield
    finally:
        _shown_lines = _SHOW_ALL
        _rewrite = str


@contextmanager
def each_line_once() -> Iterator[None]:
    """Context in which no log line is shown twice."""
    if _shown_lines is not _SHOW_ALL:  # a study runs this command, and sees to it itself
        yield
        return
    with step_lines(set(), str):
        yield


def send_lines_to(send: Callable[[str], None]) -> None:
    """From now on pass log lines to `send`, for another process to `show`.

    Progress is then lines, too: the bars of several processes would overwrite each other.
    """
    global _send
    _send = send


def show(line: str, shown_lines: set[str]) -> None:
    """Print a line on stderr, unless it is in `shown_lines`, to which it is added.

    It goes through rich, so that a progress bar stays below it.
    """
    if line in shown_lines:
        return
    if shown_lines is not _SHOW_ALL:
        shown_lines.add(line)
    stderr().print(
        visible(line, keep="\n\t"), markup=False, highlight=False, soft_wrap=True
    )


class _StderrHandler(logging.Handler):
    """Shows each log record as a line on stderr, or sends it to the process that does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show or send the record; from WARNING on its level stands before it."""
        try:
            line = _rewrite(self.format(record))
            if record.levelno >= logging.WARNING:
                line = f"{record.levelname.lower()}: {line}"
            if _send is None:
                show(line, _shown_lines)
            else:
                _send(line)
        except Exception:
            self.handleError(record)


class _ClosedStdout(io.TextIOBase):
    """Stdout closed by the shell (`>&-`): writing a result is a user's mistake."""

    encoding = "utf-8"
    errors = "strict"

    def write(self, text: str) -> int:
        """Raise the VitseeError that a user sees."""
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
    """Context in which a text stands below the other lines of a terminal; -q silences it."""
    if not (stderr().is_terminal and log.isEnabledFor(logging.INFO)):
        yield
        return
    from rich.text import Text

    with stderr().status(Text(visible(text)), refresh_per_second=4):
        yield


def require_stdout() -> None:
    """Check stdout before work whose result goes there.

    Raises:
        VitseeError: it is closed.
    """
    if isinstance(sys.stdout, _ClosedStdout):
        sys.stdout.write("")


def setup(verbosity: int) -> None:
    """Choose which log lines are shown from now on.

    verbosity: -1 for warnings only, `PROGRESS_ONLY` for progress, too, 0 for remarks, too, and 1
    for debugging.
    """
    levels = {-1: logging.WARNING, 0: logging.INFO, PROGRESS_ONLY: logging.INFO}
    level = levels.get(verbosity, logging.DEBUG)
    stderr.cache_clear()
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = [_StderrHandler()]
        if verbosity == PROGRESS_ONLY:
            # Warnings and errors pass, too.
            logger.handlers[0].addFilter(
                lambda record: (
                    record.levelno > logging.INFO or getattr(record, "progress", False)
                )
            )
        logger.propagate = False


def show_lines_of(package: str) -> None:
    """From the next `setup` on show the log lines of another package, too."""
    if package not in PACKAGES:
        PACKAGES.append(package)


@lru_cache(maxsize=1)
def stderr() -> Console:
    """Return the rich console on stderr that bars and log lines share.

    Once its reader is gone (`2>&1 | head`) it is silent, and the command goes on.
    """
    from rich.console import Console

    class Stderr(Console):
        """A console that does not end the program."""

        def on_broken_pipe(self) -> None:
            """Fall silent, where rich would end the program."""
            self.quiet = True

    return Stderr(stderr=True)


def stdout(width: int | None = None) -> Console:
    """Return a rich console on stdout, for tables.

    If stdout is not a terminal nothing is cut or coloured. width: columns; by default the
    terminal's, or wide enough for any row.
    """
    from rich.console import Console

    class Stdout(Console):
        """A console that lets `main` handle a closed pipe."""

        def on_broken_pipe(self) -> None:
            """Raise the BrokenPipeError: rich would exit with 1, but `| head` is no failure."""
            raise

    if width is None and not sys.stdout.isatty():
        width = 10_000
    return Stdout(width=width, highlight=False, soft_wrap=False)


def say(line: str) -> None:
    """Print a remark for the user on stderr; -q silences it."""
    log.info("%s", line)


def warn(line: str) -> None:
    """Print a warning on stderr, which -q does not silence."""
    log.warning("%s", line)


def out(text: str) -> None:
    """Print a result, one or several lines, on stdout."""
    sys.stdout.write(visible(text, keep="\n\t") + "\n")


def fail(text: str) -> None:
    """Print on stderr why a command failed, whatever the verbosity."""
    sys.stderr.write(visible(text, keep="\n\t") + "\n")


def command_line() -> list[str]:
    """Return the words of the command line as typed, `vitsee` first."""
    return ["vitsee", *click.get_current_context().meta.get(ARGUMENTS, [])]


def debug_traceback() -> None:
    """Print the current exception's traceback on stderr, with -v only."""
    if log.isEnabledFor(logging.DEBUG):
        fail(traceback.format_exc().rstrip())


def human_time(seconds: float) -> str:
    """Return a duration as `0:42` or `3:07:10`."""
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{rest_minutes:02d}:{rest_seconds:02d}"
    return f"{rest_minutes}:{rest_seconds:02d}"


class Reporter:
    """Reports progress of a long run on stderr.

    Between `start` and `stop` progress is a bar on a terminal, an occasional line elsewhere (a
    file, a batch system), and nothing with -q or for work that is done at once. `advance` may be
    called from several threads.
    """

    def __init__(
        self,
        title: str,
        *,
        show_after: float | None = None,
        line_interval: float = LOG_SECONDS,
    ) -> None:
        """Make a reporter that shows nothing yet.

        Args:
            title: what stands before the numbers.
            show_after: seconds; nothing is shown for a shorter phase. None: `SHOW_AFTER`.
            line_interval: seconds between lines where stderr is not a terminal.
        """
        # May be set: its text is shown after the time left.
        self.suffix: Callable[[], str] | None = None
        self._title = title
        self._line_interval = line_interval
        # Read now, not as a default of the signature, so that tests can change it.
        self._show_after = SHOW_AFTER if show_after is None else show_after
        self._lock = threading.Lock()
        self._display: _Bar | _Lines | None = None

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Begin a phase: `total` are to be done, `done` of them already are. unit: a plural."""
        self.stop()
        if log.isEnabledFor(logging.INFO):
            rate = _Rate(total, done, unit, self.suffix)
            if _send is None and stderr().is_terminal:
                self._display = _Bar(self._title, rate, show_after=self._show_after)
                return
            # In a worker of a study, short steps say nothing about their progress.
            is_worker = _send is not None
            self._display = _Lines(
                self._title,
                rate,
                show_after=self._line_interval if is_worker else self._show_after,
                line_interval=self._line_interval,
            )

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """Count `count` more as done, and `size_bytes` as read or written."""
        with self._lock:
            if self._display is not None:
                self._display.rate.add(count, size_bytes)
                self._display.show()

    def skip(self, count: int) -> None:
        """Count `count` as done before the start: they do not count for the rate."""
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
def slab_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Context with a function that shows progress, for `describe` and `validate` of a store.

    They call it as `report(done, total)`, counting slabs from 0 on.
    """
    progress = Reporter(title)

    def report(done: int, total: int) -> None:
        """Start the display at 0 of `total` slabs; later count another slab."""
        if done == 0:
            progress.start(total, unit="slabs")
        else:
            progress.advance(1)

    try:
        yield report
    finally:
        progress.stop()


class _Rate:
    """Images (or other units) and bytes since the start, their rates, and the time left."""

    def __init__(
        self, total: int, done: int, unit: str, suffix: Callable[[], str] | None = None
    ) -> None:
        """Begin now, with `done` of `total` done before; suffix: makes the end of `text`."""
        self.total = total
        self.done = done
        self.unit = unit
        self.suffix = suffix
        self.images = 0  # done since the start
        self.size_bytes = 0
        self.start = time.monotonic()

    def add(self, images: int, size_bytes: int) -> None:
        """Count images (or other units) and bytes."""
        self.images += images
        self.size_bytes += size_bytes

    @property
    def count(self) -> int:
        """Number of units that are done in all."""
        return self.done + self.images

    def text(self) -> str:
        """Return `31.2 images/s, 96.5 MB/s, 1:42 left`; bytes only if there were some."""
        seconds = max(time.monotonic() - self.start, 1e-9)  # never divide by 0
        facts = [f"{self.images / seconds:.1f} {self.unit}/s"]
        if self.size_bytes:
            facts.append(f"{human_bytes(self.size_bytes / seconds)}/s")
        n_left = self.total - self.count
        if self.images and n_left > 0:
            facts.append(f"{human_time(n_left * seconds / self.images)} left")
        elif n_left <= 0:
            facts.append(f"{human_time(seconds)} in all")
        if self.suffix is not None:
            facts.append(self.suffix())
        return ", ".join(facts)


class _Lines:
    """Progress as occasional log lines; the last one ends a phase that was not short."""

    def __init__(
        self, title: str, rate: _Rate, *, show_after: float, line_interval: float
    ) -> None:
        """Times in seconds; a phase shorter than `show_after` gets no last line."""
        self.title = title
        self.rate = rate
        self.show_after = show_after
        self.line_interval = line_interval
        self.next_time = rate.start + line_interval

    def show(self) -> None:
        """Log a line, if it is time to."""
        if time.monotonic() >= self.next_time:
            self.next_time = time.monotonic() + self.line_interval
            self._log_line()

    def close(self) -> None:
        """Log the last line, unless the phase was short."""
        if time.monotonic() >= self.rate.start + self.show_after:
            self._log_line()

    def _log_line(self) -> None:
        """Log the current count and rate."""
        rate = self.rate
        total = plural(rate.total, rate.unit)
        line = f"{self.title}: {rate.count}/{total}, {rate.text()}"
        log.info("%s", line, extra={"progress": True})


class _Bar:
    """Progress as a bar below the log lines."""

    def __init__(self, title: str, rate: _Rate, *, show_after: float) -> None:
        """Show the bar `show_after` seconds from now, unless it is closed before."""
        self.title = title
        self.rate = rate
        self.live: Progress | None = None
        self._lock = threading.Lock()
        self._closed = False
        # By a timer, not with the first `advance`: that may be minutes away.
        self._timer = threading.Timer(show_after, self._appear)
        self._timer.daemon = True
        if show_after:
            self._timer.start()
        else:
            self._appear()

    def _appear(self) -> None:
        """Show the bar; called by the timer's thread."""
        with self._lock:
            if not self._closed:
                self.live = self._make_bar()
                self.live.start()

    def _make_bar(self) -> Progress:
        """Return rich's bar: title, bar, done/total, rates."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        live = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            console=stderr(),
        )
        live.add_task(
            self.title, total=self.rate.total, completed=self.rate.count, rate=""
        )
        return live

    def show(self) -> None:
        """Move the bar to the current count, if it is on the screen."""
        if self.live is not None:
            self.live.update(
                self.live.task_ids[0], completed=self.rate.count, rate=self.rate.text()
            )

    def close(self) -> None:
        """Leave the last state on the screen; a bar that has not appeared never will."""
        with self._lock:
            self._closed = True
        self._timer.cancel()
        if self.live is not None:
            self.show()
            self.live.stop()
