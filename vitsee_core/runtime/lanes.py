"""Threads that each do whole pieces of work, one BLAS thread in each.

A thread that waits for another inside a product (BLAS with a thread a core, beside a reader) leaves
its core idle; threads that read, convert and multiply their own piece do not wait.
What they add up is added in the pieces' order, so that results do not depend on their number.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

from vitsee_core.runtime import machine
from vitsee_core.runtime.streaming import submitted

T = TypeVar("T")
R = TypeVar("R")


class _SharedLimit:
    """A limit of the whole process that may be wanted by several at once: the first sets it, the
    last takes it back. limit: sets it, and returns what takes it back."""

    def __init__(self, limit: Callable[[], Callable[[], object]]) -> None:
        self._limit, self._lock, self._inside = limit, threading.Lock(), 0
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
    """Those that are loaded, which are looked for anew once more modules are."""
    return ThreadpoolController()


def _limit_blas() -> Callable[[], object]:
    limits: Any = _libraries(len(sys.modules)).limit(limits=1, user_api="blas")
    return limits.restore_original_limits


def _limit_torch() -> Callable[[], object]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return partial(torch.set_num_threads, before)


_blas, _torch = _SharedLimit(_limit_blas), _SharedLimit(_limit_torch)


def one_blas_thread() -> AbstractContextManager[None]:
    """Within it, a product of numpy is done by the thread that calls it. May be nested and
    overlap."""
    return _blas.held()


def one_torch_thread() -> AbstractContextManager[None]:
    """The same of torch on the CPU, which is imported."""
    return _torch.held()


def n_lanes(most: int | None = None) -> int:
    """Threads: one per core, `most` at most."""
    cores = machine.n_cores()
    return cores if most is None else max(1, min(cores, most))


class Stopped(Exception):
    """Another thread failed; this one gives up."""


class Turns:
    """Lets piece k do something to a thing after piece k - 1 did."""

    def __init__(self, n_things: int) -> None:
        self._done = [0] * n_things
        self._changed = threading.Condition()
        self._stopped = False

    @contextmanager
    def of(self, piece: int, thing: int) -> Iterator[None]:
        """Wait for the piece's turn; its end is the next one's beginning.

        Raises:
            Stopped: by `stop`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._done[thing] == piece)
            if self._stopped:
                raise Stopped
        yield
        with self._changed:
            self._done[thing] += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """No piece waits any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def run_lanes(
    lanes: int,
    work: Callable[[int, Callable[[], int | None]], None],
    n: int,
    stop: Callable[[], None],
) -> None:
    """`work(lane, take)` in so many threads; `take()` is the number of the next of n pieces, None
    after the last. The first error is raised when all have ended, `stop` called before."""
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
        except BaseException:  # a signal here, too: the threads end soon
            ended = True
            stop()
            raise


def in_order(
    work: Callable[[T], R], items: Sequence[T], pool: ThreadPoolExecutor | None, ahead: int
) -> Iterator[R]:
    """`work` of every item in the items' order, done by the threads of `pool` at most `ahead`
    items before; by this one without a pool."""
    if pool is None or len(items) < 2:
        yield from map(work, items)
        return
    yield from submitted(lambda item: pool.submit(work, item), items, lambda: ahead)


@contextmanager
def lane_pool(lanes: int) -> Iterator[ThreadPoolExecutor | None]:
    """Threads for `in_order`, each with one BLAS thread; None for one lane."""
    with one_blas_thread():
        if lanes == 1:
            yield None
            return
        with ThreadPoolExecutor(lanes, "vitsee-lane") as pool:
            yield pool


def run_all(
    work: Callable[[T], object], items: Iterable[T], pool: ThreadPoolExecutor | None
) -> None:
    """`work` of every item by the threads of `pool`, in no order; back when all are done."""
    if pool is None:
        for item in items:
            work(item)
        return
    futures = [pool.submit(work, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
