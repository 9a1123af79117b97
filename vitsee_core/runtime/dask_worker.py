"""The worker side of `DaskMap`."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from vitsee_core.runtime.versions import worker_versions
from vitsee_stores.errors import NoStore, VitseeError

PACKAGES = ("vitsee_core", "vitsee_stores")  # whose log lines workers return
REMEDY = "start workers from the same environment"
SAME_FILES = "workers need this machine's files under the same paths, or stores at URLs"


class DaskError(VitseeError):
    """No cluster, or none that can do this work."""


class Done(NamedTuple):
    """Reply of a worker: a result or a user's mistake, and what was logged."""

    result: Any
    error: VitseeError | None
    lines: list[tuple[str, int, str]]


def done(
    ours: Mapping[str, str],
    work: bytes | str,
    item: bytes,
    *,
    modules: tuple[str, ...] = (),
) -> bytes:
    """Do one task on this worker, and return the pickled `Done`.

    Args:
        ours: the versions of the command's own process; nothing is unpickled if they differ.
        work: the pickled function, or the name of the worker plugin that holds it.
        item: the pickled item.
        modules: modules of guests that do the work.
    """
    from distributed import get_worker

    worker: Any = get_worker()
    error: VitseeError | None = refusal(worker.address, worker_versions(modules), ours)
    if error is not None:
        return pickle.dumps(Done(None, error, []))
    function = worker.plugins[work].work if isinstance(work, str) else work
    result: Any = None
    with _collect_lines(modules) as lines:
        try:
            result = _unpickled_function(function)(pickle.loads(item))
        except NoStore as unseen:  # the command's own process found it
            error = on_this_worker(unseen)
        except VitseeError as mistake:  # it would fail on any worker
            error = mistake.with_traceback(None)
    return pickle.dumps(Done(result, error, lines), protocol=5)


def refusal(
    worker: str, theirs: Mapping[str, str], ours: Mapping[str, str]
) -> DaskError | None:
    """Return the error for a worker with other versions, which would compute other numbers.

    None if all versions are equal. worker: its address; theirs, ours: name -> version.
    """
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if not differing:
        return None
    worker_text = ", ".join(f"{name} {theirs.get(name, 'missing')}" for name in differing)
    text_here = ", ".join(f"{name} {ours[name]}" for name in differing)
    return DaskError(
        f"the Dask worker at {worker} has {worker_text}; here: {text_here} ({REMEDY})"
    )


def on_this_worker(error: VitseeError) -> DaskError:
    """Return an error about something that this worker lacks and the command's process has."""
    first, _, _ = str(error).partition(" (")
    return DaskError(
        f"on the Dask worker at {socket.gethostname()}: {first} ({SAME_FILES})"
    )


@lru_cache(maxsize=4)
def _unpickled_function(work: bytes) -> Callable[[Any], Any]:
    """Return the function; the cache saves unpickling it for each task."""
    return pickle.loads(work)


class _LineCollector(logging.Handler):
    """Collects log records of the thread that created it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, int, str]] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a record; other threads of the worker have collectors of their own."""
        if record.thread == self._thread:
            self.lines.append((record.name, record.levelno, record.getMessage()))


@contextmanager
def _collect_lines(modules: Iterable[str]) -> Iterator[list[tuple[str, int, str]]]:
    """Context with the list of (logger, level, line) that this thread logs in it."""
    collector = _LineCollector()
    names = dict.fromkeys((*PACKAGES, *(module.partition(".")[0] for module in modules)))
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        logger.addHandler(collector)
    try:
        yield collector.lines
    finally:
        for logger in loggers:
            logger.removeHandler(collector)
