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


# Of the estimated time of products:
WORTH_SAYING = 5.0  # seconds
SHARE = 0.6  # fraction of the rate of large products that analyses reach
SIDE = 512  # of the matrices of the trial

log = logging.getLogger(__name__)


def n_lanes(most: int | None = None) -> int:
    """Number of worker threads: one per core, at most `most`."""
    cores = machine.n_cores()
    return cores if most is None else max(1, min(cores, most))


class Stopped(Exception):
    """Another thread failed; this one gives up."""


class OrderedAccess:
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


def submitted(
    submit: Callable[[T], Any],
    items: Iterable[T],
    ahead: Callable[[], int],
    result: Callable[[Any], R] = Future.result,
) -> Iterator[R]:
    """The results of all items in their order. No work continues after the end, also after an early
    one.

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
            with suppress(
                Exception
            ):  # of a lost cluster: the first error is the one to show
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


class _SharedLimit:
    """Reference-counted process-wide limit: set by the first user, restored by the last. limit:
    sets it, and returns what restores it."""

    def __init__(self, limit: Callable[[], Callable[[], object]]) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: Callable[[], object] = bool

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._restore = self._limit()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._restore()


@lru_cache(maxsize=1)
def _libraries(n_modules: int) -> ThreadpoolController:
    """The loaded BLAS libraries; searched again once more modules are imported."""
    return ThreadpoolController()


def _limit_blas() -> Callable[[], object]:
    limits: Any = _libraries(len(sys.modules)).limit(limits=1, user_api="blas")
    return limits.restore_original_limits


def _limit_torch() -> Callable[[], object]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return partial(torch.set_num_threads, before)


_blas = _SharedLimit(_limit_blas)
_torch = _SharedLimit(_limit_torch)


def one_blas_thread() -> AbstractContextManager[None]:
    """Context in which numpy's products run in the calling thread; may nest and overlap."""
    return _blas.held()


def one_torch_thread() -> AbstractContextManager[None]:
    """The same for torch on the CPU."""
    return _torch.held()


def say_cost(label: str, n_images: int, multiplications: float) -> None:
    """Log the estimated time of comparing this many images of a store, from a short trial, and how
    it grows; silent if it is seconds."""
    seconds = multiplications / (SHARE * cpu_rate())
    log.log(
        logging.INFO if seconds >= WORTH_SAYING else logging.DEBUG,
        "%s: %.1e multiplications for %d images, %s on %d cores; four times as long for twice the "
        "images (--images N takes fewer)",
        *(label, multiplications, n_images, rough_time(seconds), n_lanes()),
    )


def cpu_rate() -> float:
    """Multiplications per second of large products on all cores, measured in milliseconds."""
    x = np.ones((SIDE, SIDE), np.float32)
    out = np.empty_like(x)
    best = np.inf
    with one_blas_thread():
        for _ in range(3):
            began = time.perf_counter()
            np.matmul(x, x, out=out)
            best = min(best, time.perf_counter() - began)
    return float(SIDE**3 / best * n_lanes())


def rough_time(seconds: float) -> str:
    """A rounded duration: about 40 s, about 12 min, about 3.5 h."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
