"""Products in the calling thread alone.

Small products by a thread per core take no less time than by one: the others wait for their parts
in a loop, which takes cores from whatever else runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any

from threadpoolctl import ThreadpoolController


class _SharedLimit:
    """Reference-counted process-wide limit: set by the first user, restored by the last. limit:
    sets it, and returns what restores it."""

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


_blas, _torch = _SharedLimit(_limit_blas), _SharedLimit(_limit_torch)


def one_blas_thread() -> AbstractContextManager[None]:
    """Context in which numpy's products run in the calling thread; may nest and overlap."""
    return _blas.held()


def one_torch_thread() -> AbstractContextManager[None]:
    """The same for torch on the CPU."""
    return _torch.held()
