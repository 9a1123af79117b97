"""Locks against two processes writing one slab: without --shard, or a requeued job beside its dying
predecessor.

A slab's chunks must all come from one process, since another batch size or device rounds otherwise,
and the commit marker seals them together. So a slab is written under a lock that the system
releases with its process; the second process finds it committed and continues. File systems without
locks, and object stores, are used without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vitsee_stores.url import Place, Url

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_writer(store: Place, slab: int) -> Iterator[None]:
    """Context in which no other process writes this slab; waits for one that does. Threads of one
    process do not exclude each other."""
    with _locked(store, [slab], wait=True):
        yield


@contextmanager
def without_writer(store: Place, slabs: Sequence[int]) -> Iterator[list[int]]:
    """Context with those of the slabs that no other process writes, before or during it: their
    partial files are from processes that ended."""
    with _locked(store, slabs, wait=False) as free:
        yield free


@contextmanager
def _locked(store: Place, slabs: Sequence[int], wait: bool) -> Iterator[list[int]]:
    """Locks on one byte per slab of an existing file; yields the slabs that no other process has
    locked. Object stores have no locks."""
    if isinstance(store, Url):
        yield list(slabs)
        return
    try:
        descriptor = os.open(store / "commits" / "zarr.json", os.O_RDWR)
    except OSError:  # the writer itself reports what is wrong with the store
        yield list(slabs)
        return
    try:
        yield [slab for slab in slabs if _lock(descriptor, slab, wait)]
    finally:
        os.close(descriptor)


def _lock(descriptor: int, byte: int, wait: bool) -> bool:
    """False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # no locks here
        return True
    return True
