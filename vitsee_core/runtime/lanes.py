"""Worker threads with single-threaded BLAS, and how long their products take.

A thread that waits for another inside a product (BLAS with a thread per core, beside a reader)
leaves its core idle; threads that read, convert and multiply their own piece do not wait. Small
products by a thread per core take no less time than by one: the others wait for their parts in a
loop, which takes cores from whatever else runs. Sums are added in the pieces' order, so that
results do not depend on the number of threads.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from vitsee_core.runtime import machine

T = TypeVar("T")
R = TypeVar("R")


# For the estimated time of products:
WORTH_SAYING = 5.0  # seconds; shorter work is announced at debug level only
SHARE = 0.6  # fraction of the rate of large products that analyses reach
SIDE = 512  # rows and columns of the matrices of the trial

log = logging.getLogger(__name__)


def n_lanes(max_lanes: int | None = None) -> int:
    """Return the number of worker threads: one per core, at most `max_lanes`, at least 1."""
    cores = machine.n_cores()
    if max_lanes is None:
        return cores
    return max(1, min(cores, max_lanes))


class Stopped(Exception):
    """Another thread failed; this one gives up."""


class OrderedAccess:
    """Orders access to shared sums: piece k waits until piece k - 1 has added to them.

    Sums of floats depend on their order; so they are the same for any number of threads.
    """

    def __init__(self, n_sums: int) -> None:
        """n_sums: number of sums, each with an order of its own."""
        self._done = [0] * n_sums
        self._changed = threading.Condition()
        self._stopped = False

    @contextmanager
    def turn(self, piece: int, index_of_sum: int) -> Iterator[None]:
        """Context for the turn of a piece at a sum; exiting it admits the next piece.

        An error inside admits nobody: `stop` has to be called.

        Raises:
            Stopped: `stop` was called.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or self._done[index_of_sum] == piece
            )
            if self._stopped:
                raise Stopped
        yield
        with self._changed:
            self._done[index_of_sum] += 1
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
    """Run `work(lane, take)` in each of some threads, until all pieces are taken.

    On an error `stop` is called, and the first error is raised once all threads have ended.

    Args:
        lanes: number of threads; 1 runs in the caller's.
        work: gets its lane's number, and `take`, which returns the index of the next piece, None
            after the last.
        n: number of pieces.
        stop: releases threads that wait for another.
    """
    piece_numbers = iter(range(n))
    take_lock = threading.Lock()
    ended = False

    def take() -> int | None:
        """Return the index of the next piece; None after the last, and after an error."""
        with take_lock:
            return None if ended else next(piece_numbers, None)

    def lane(k: int) -> None:
        """Do the work of a thread."""
        nonlocal ended
        try:
            work(k, take)
        except Stopped:  # another thread raises the error that matters
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


def submitted(
    submit: Callable[[T], Any],
    items: Iterable[T],
    ahead: Callable[[], int],
    result: Callable[[Any], R] = Future.result,
) -> Iterator[R]:
    """Yield the results of all items in their order; no work continues after the end.

    This holds also if the caller stops early: futures are cancelled, or waited for.

    Args:
        submit: hands an item to a pool or a cluster and returns its future.
        items: consumed as they are submitted.
        ahead: how many may be submitted before the first result is taken, asked anew each time.
        result: waits for the result of a future.
    """
    waiting: deque[Any] = deque()
    try:
        for item in items:
            waiting.append(submit(item))
            while len(waiting) >= ahead():
                yield result(waiting.popleft())
        while waiting:
            yield result(waiting.popleft())
    finally:
        running = []
        for future in waiting:
            # A lost cluster raises here, too, but its first error is the one to show.
            with suppress(Exception):
                if future.cancel() is False:
                    running.append(future)
        for future in running:
            future.exception()


def in_order(
    work: Callable[[T], R],
    items: Sequence[T],
    pool: ThreadPoolExecutor | None,
    ahead: int,
) -> Iterator[R]:
    """Apply `work` to every item, and yield the results in order.

    Args:
        work: the function.
        items: its arguments.
        pool: threads; None for the calling thread.
        ahead: how many items may be in flight.
    """
    if pool is None or len(items) < 2:
        yield from map(work, items)
        return
    yield from submitted(lambda item: pool.submit(work, item), items, lambda: ahead)


@contextmanager
def lane_pool(lanes: int) -> Iterator[ThreadPoolExecutor | None]:
    """Context with threads for `in_order`, each with single-threaded BLAS; None for one lane."""
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
    # All are waited for before an error is raised: none continues in the background.
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


class _SharedLimit:
    """A process-wide limit that is set by its first user and restored by its last."""

    def __init__(self, limit: Callable[[], Callable[[], object]]) -> None:
        """limit: sets the limit, and returns the function that restores the state before."""
        self._limit = limit
        self._lock = threading.Lock()
        self._n_users = 0
        self._restore: Callable[[], object] = bool  # does nothing

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the limit applies; may nest, and be entered by several threads."""
        with self._lock:
            if self._n_users == 0:
                self._restore = self._limit()
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    self._restore()


@lru_cache(maxsize=1)
def _blas_libraries(n_modules: int) -> ThreadpoolController:
    """Return the loaded BLAS libraries; n_modules: they are searched again once it changes."""
    return ThreadpoolController()


def _limit_blas() -> Callable[[], object]:
    """Let BLAS use one thread; return the function that undoes it."""
    limits: Any = _blas_libraries(len(sys.modules)).limit(limits=1, user_api="blas")
    return limits.restore_original_limits


def _limit_torch() -> Callable[[], object]:
    """Let torch use one thread; return the function that undoes it."""
    import torch

    n_threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    return partial(torch.set_num_threads, n_threads_before)


_blas = _SharedLimit(_limit_blas)
_torch = _SharedLimit(_limit_torch)


def one_blas_thread() -> AbstractContextManager[None]:
    """Context in which numpy's products run in the calling thread; may nest and overlap."""
    return _blas.active()


def one_torch_thread() -> AbstractContextManager[None]:
    """Context in which torch's products on the CPU run in the calling thread."""
    return _torch.active()


def say_cost(label: str, n_images: int, multiplications: float) -> None:
    """Log the estimated time of comparing this many images of a store, and how it grows.

    The estimate comes from a short trial; if it is seconds, it is logged at debug level only.
    """
    seconds = multiplications / (SHARE * cpu_rate())
    level = logging.INFO if seconds >= WORTH_SAYING else logging.DEBUG
    text = (
        f"{label}: {multiplications:.1e} multiplications for {n_images} images, "
        f"{rough_time(seconds)} on {n_lanes()} cores; four times as long for twice the "
        "images (--images N takes fewer)"
    )
    log.log(level, "%s", text)


def cpu_rate() -> float:
    """Return the multiplications per second of large products on all cores.

    It is measured on one core, which takes milliseconds.
    """
    x = np.ones((SIDE, SIDE), np.float32)
    out = np.empty_like(x)
    fastest = np.inf
    with one_blas_thread():
        # The first product also pages in the memory; the fastest one is undisturbed.
        for _ in range(3):
            began = time.perf_counter()
            np.matmul(x, x, out=out)
            fastest = min(fastest, time.perf_counter() - began)
    return float(SIDE**3 / fastest * n_lanes())


def rough_time(seconds: float) -> str:
    """Return a rounded duration: about 40 s, about 12 min, about 3.5 h."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
