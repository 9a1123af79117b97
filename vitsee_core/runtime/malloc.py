"""Keeps freed memory in the process during work that requests the same sizes again and again."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# The parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
# glibc's own: what its thresholds, which follow the largest block that was freed, grow to.
MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD = 65536, 32 << 20, 64 << 20
OF_THE_USER = {
    "GLIBC_TUNABLES",
    *(f"MALLOC_{name}_" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD")),
}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Context in which freed memory is kept for the next request; on exit it returns to the system.

    Every layer of a model frees and requests tensors of some ten megabytes. glibc returns such
    blocks at once, and the kernel zeroes pages before handing them out again: up to a fifth of a
    forward pass (`GLIBC_TUNABLES= python benchmarks/extraction.py` runs without it). Resident
    memory stays at its peak, plus a few per cent of fragmentation.

    Does nothing without glibc, or if the user set its parameters in the environment.
    """
    if OF_THE_USER & os.environ.keys() or (choose := _mallopt()) is None:
        yield
        return
    choose(M_MMAP_MAX, 0)
    choose(M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        choose(M_MMAP_MAX, MMAP_MAX)
        choose(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        choose(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return None
    return library.mallopt
