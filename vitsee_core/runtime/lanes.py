"""Worker threads with single-threaded BLAS.

A thread that waits for another inside a product (BLAS with a thread per core, beside a reader)
leaves its core idle; threads that read, convert and multiply their own piece do not wait. Sums are
added in the pieces' order, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from vitsee_core.runtime import machine
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.runtime.streaming import submitted

T = TypeVar("T")
R = TypeVar("R")


def n_lanes(most: int | None = None) -> int:
    """Number of worker threads: one per core, at most `most`."""
    cores = machine.n_cores()
    return cores if most is None else max(1, min(cores, most))


class Stopped(Exception):
    """Another thread failed; this one gives up."""


class Turns:
    """Orders access to shared things: piece k waits for piece k - 1."""

    def __init__(self, n_things: int) -> None:
        self._done = [0] * n_things
        self._changed = threading.Condition()
        self._stopped = False

    @contextmanager
    def of(self, piece: int, thing: int) -> Iterator[None]:
        """Context for the piece's turn; exiting it admits the next piece. Raises Stopped: `stop`
        was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._done[thing] == piece)
            if self._stopped:
                raise Stopped
        yield
        with self._changed:
            self._done[thing] += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Release all waiting pieces, with `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def run_lanes(
    lanes: int,
    work: Callable[[int, Callable[[], int | None]], None],
    n: int,
    stop: Callable[[], None],
) -> None:
    """Run `work(lane, take)` in each thread; `take()` returns the index of the next of n pieces,
    None after the last. On an error `stop` is called, and the first error is raised once all
    threads have ended."""
    numbers = iter(range(n))
    taking = threading.Lock()
    ended = False

    def take() -> int | None:
        with taking:
            return None if ended else next(numbers, None)

    def lane(k: int) -> None:
        nonlocal ended
        try:
            work(k, take)
        except Stopped:
            pass
        except BaseException:
            ended = True
            stop()
            raise

    if lanes == 1:
        lane(0)
        return
    with ThreadPoolExecutor(lanes, "vitsee-lane") as pool:
        futures = [pool.submit(lane, k) for k in range(lanes)]
        try:
            for future in futures:
                future.result()
        except BaseException:  # also on a signal: the threads end soon
            ended = True
            stop()
            raise


def in_order(
    work: Callable[[T], R], items: Sequence[T], pool: ThreadPoolExecutor | None, ahead: int
) -> Iterator[R]:
    """Apply `work` to every item, results in order, on the threads of `pool` with at most `ahead`
    items in flight; in the calling thread without a pool."""
    if pool is None or len(items) < 2:
        yield from map(work, items)
        return
    yield from submitted(lambda item: pool.submit(work, item), items, lambda: ahead)


@contextmanager
def lane_pool(lanes: int) -> Iterator[ThreadPoolExecutor | None]:
    """Threads for `in_order`, each with single-threaded BLAS; None for one lane."""
    with one_blas_thread():
        if lanes == 1:
            yield None
            return
        with ThreadPoolExecutor(lanes, "vitsee-lane") as pool:
            yield pool


def run_all(
    work: Callable[[T], object], items: Iterable[T], pool: ThreadPoolExecutor | None
) -> None:
    """Apply `work` to every item on the threads of `pool`, in any order, until all are done."""
    if pool is None:
        for item in items:
            work(item)
        return
    futures = [pool.submit(work, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
