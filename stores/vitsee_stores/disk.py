"""Atomic files (temporary name, fsync, rename, fsync of the folder) and the threads for I/O.

Nothing here or above starts zarr's event loop: a process that forks data loading workers after that
can hang. The threads below are started on first use, and anew in a forked child.

Temporary files and folders name their maker: a requeued job can run beside its dying predecessor,
and two commands can be given one store, so that only what its maker cannot finish is a leftover.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")

PARTIAL = ".partial"
# fsync is bound by the disk, not by cores.
SYNC_THREADS = 16
RESERVE_BYTES = 1 << 20

_pools: dict[str, ThreadPoolExecutor] = {}
_thread = threading.local()


def n_cores() -> int:
    """Cores available to this process; on a cluster often fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def work_pool() -> ThreadPoolExecutor:
    return named_pool("vitsee-chunks", n_cores())


def sync_pool() -> ThreadPoolExecutor:
    return named_pool("vitsee-fsync", SYNC_THREADS)


def named_pool(name: str, size: int) -> ThreadPoolExecutor:
    """A thread pool shared by all callers that use the name."""
    if name not in _pools:
        _pools[name] = ThreadPoolExecutor(size, name)
    return _pools[name]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Context in which `each` runs its work in the calling thread, for callers that already use one
    thread per core."""
    before = getattr(_thread, "alone", False)
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = before


def each(
    pool: Callable[[], ThreadPoolExecutor], work: Callable[[T], R], items: Sequence[T]
) -> list[R]:
    """Apply `work` to every item, results in order; a single item runs in the calling thread. The
    first error is raised only after all items have ended, so no work continues in the background.
    """
    if len(items) < 2 or getattr(_thread, "alone", False):
        return [work(item) for item in items]
    futures = [pool().submit(work, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def partial_name(path: str | Path) -> str:
    return temporary_name(path, PARTIAL)


def write_new(path: str, buffers: Sequence[bytes | NDArray[np.uint8]]) -> int:
    """Write all buffers in order to a new file; returns the number of bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _reserve(descriptor, sum(map(len, buffers)))
        size = 0
        for buffer in buffers:
            view = memoryview(
                cast(bytes, buffer)
            )  # type checkers know that numpy is a buffer from 3.12 on
            while view:
                # One call writes at most 2 GiB, and less on a signal or a nearly full disk.
                done = os.write(descriptor, view)
                view = view[done:]
                size += done
        return size
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Allocate a large file's blocks at once, as numpy's tofile does: writing then takes a third
    less time on ext4. Not posix_fallocate, which writes to every block where the file system lacks
    support. Failure is ignored here; a full disk shows in the writes that follow."""
    if size >= RESERVE_BYTES and (fallocate := _fallocate()) is not None:
        fallocate(descriptor, 0, 0, size)


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        fallocate = ctypes.CDLL(None).fallocate
    except (OSError, AttributeError, TypeError):
        return None
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return cast(Callable[[int, int, int, int], int], fallocate)


def open_regular(path: str | Path) -> int:
    """A descriptor for reading a file; OSError, without blocking, for a pipe or device."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_regular(path: str | Path, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; OSError otherwise."""
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {limit}")
        parts = []
        while size and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def sync(path: str | Path) -> None:
    """fsync of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str | Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` to `path` atomically and, if durable, to disk before returning."""
    temporary = partial_name(path)
    try:
        write_new(temporary, [data])
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        remove_files([temporary])
        raise
    if durable:
        sync(os.path.dirname(os.path.abspath(path)))


def put_if_absent(path: str | Path, data: bytes, *, durable: bool = True) -> bool:
    """Like `write_whole`, but an existing file stays; returns whether `data` was written."""
    temporary = partial_name(path)
    try:
        write_new(temporary, [data])
        if durable:
            sync(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise
        except OSError:  # no hard links on this file system: best effort
            if os.path.lexists(path):
                return False
            os.replace(temporary, path)
    finally:
        remove_files([temporary])
    if durable:
        sync(os.path.dirname(os.path.abspath(path)))
    return True


def remove_files(paths: Iterable[str | Path]) -> int:
    """Remove files; returns how many existed."""
    count = 0
    for path in paths:
        try:
            os.unlink(path)
            count += 1
        except FileNotFoundError:
            continue
    return count


# ---------------- whose temporary files they are

# Files are written in seconds; processes on other machines cannot be checked.
OLD_SECONDS = 3600


def temporary_name(start: str | Path, ending: str) -> str:
    """A new name: `start`, this process, random digits, `ending`."""
    return f"{start}.{tag()}.{secrets.token_hex(8)}{ending}"


def tag() -> str:
    """Identifies this process in temporary names."""
    return f"{_machine()}-{os.getpid()}"


def has_ended(maker: str) -> bool:
    """Whether this `tag` belongs to a process of this machine that has ended; False for other
    machines."""
    match = re.fullmatch(r"([0-9a-f]{8})-(\d{1,9})", maker)
    return match is not None and match[1] == _machine() and not _alive(int(match[2]))


def is_left(path: str | Path) -> bool:
    """Whether a temporary file or folder is a leftover: its maker on this machine has ended,
    whatever the clock says, or it is from another machine and an hour old. False if it is gone."""
    match = re.search(r"\.(([0-9a-f]{8})-\d{1,9})\.[0-9a-f]+\.[a-z]+$", os.fspath(path))
    if match and match[2] == _machine():
        return has_ended(match[1]) and os.path.lexists(path)
    try:
        return time.time() - os.stat(path).st_mtime > OLD_SECONDS
    except OSError:
        return False


def is_mine(path: str | Path) -> bool:
    return f".{tag()}." in os.path.basename(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


@functools.cache
def _machine() -> str:
    """Eight digits that identify a process-id namespace: one boot of a host, one container."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
