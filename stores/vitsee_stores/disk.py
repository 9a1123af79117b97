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

# Ending of a file that is still being written.
PARTIAL = ".partial"
# fsync is bound by the disk, not by cores.
SYNC_THREADS = 16
# Smaller files are not worth the system call that allocates their blocks.
RESERVE_BYTES = 1 << 20

_pools: dict[str, ThreadPoolExecutor] = {}
# `alone`: whether `each_in_threads` works in this thread (`in_this_thread`).
_thread = threading.local()


def n_cores() -> int:
    """Return the number of cores of this process; on a cluster often fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def work_pool() -> ThreadPoolExecutor:
    """Return the threads that compress, check and decompress chunks: one per core."""
    return named_pool("vitsee-chunks", n_cores())


def sync_pool() -> ThreadPoolExecutor:
    """Return the threads that wait for fsync."""
    return named_pool("vitsee-fsync", SYNC_THREADS)


def named_pool(name: str, size: int) -> ThreadPoolExecutor:
    """Return the thread pool that all callers with this name share; started on first use."""
    if name not in _pools:
        _pools[name] = ThreadPoolExecutor(size, name)
    return _pools[name]


# A forked child has the executors' objects but none of their threads: it starts its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Return a context in which `each_in_threads` works in the calling thread.

    For callers that already use one thread per core.
    """
    outer = getattr(_thread, "alone", False)  # contexts may be nested
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = outer


def each_in_threads(
    pool: Callable[[], ThreadPoolExecutor], work: Callable[[T], R], items: Sequence[T]
) -> list[R]:
    """Return the results of `work` for all items, in their order.

    A single item runs in the calling thread, or all, within `in_this_thread`. The first error is
    raised once all items have ended, so that no work continues in the background.

    Args:
        pool: returns the threads; called if they are needed.
        work: the function of an item.
        items: its arguments.
    """
    if len(items) < 2 or getattr(_thread, "alone", False):
        return [work(item) for item in items]
    futures = [pool().submit(work, item) for item in items]
    # `exception` waits for its future: all have ended when the list is complete.
    outcomes = [future.exception() for future in futures]
    for error in outcomes:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def partial_name(path: str | Path) -> str:
    """Return a new name for a file that becomes `path` once it is complete."""
    return temporary_name(path, PARTIAL)


def write_new(path: str, buffers: Sequence[bytes | NDArray[np.uint8]]) -> int:
    """Write all buffers in order to a new file; return its size in bytes.

    Raises:
        FileExistsError: the file exists.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _reserve(descriptor, sum(map(len, buffers)))
        size = 0
        for buffer in buffers:
            # Cast: type checkers take an array for a buffer from Python 3.12 on.
            remaining = memoryview(cast(bytes, buffer))
            while remaining:
                # One call writes at most 2 GiB, and less on a signal or a nearly full disk.
                n_written = os.write(descriptor, remaining)
                remaining = remaining[n_written:]
                size += n_written
        return size
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Allocate a large file's blocks at once, as numpy's tofile does.

    Writing then takes a third less time on ext4. Failure is ignored here: a full disk shows in the
    writes that follow.
    """
    if size < RESERVE_BYTES:
        return
    fallocate = _load_fallocate()
    if fallocate is not None:
        fallocate(descriptor, 0, 0, size)


@functools.cache
def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's (descriptor, mode, offset, length) -> status; None on other systems."""
    # Not os.posix_fallocate, which writes to every block where the file system lacks support.
    try:
        fallocate = ctypes.CDLL(None).fallocate
    except (OSError, AttributeError, TypeError):
        return None
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return cast(Callable[[int, int, int, int], int], fallocate)


def open_regular(path: str | Path) -> int:
    """Return a descriptor for reading a file.

    Raises:
        OSError: it is a pipe, device or folder, or cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: it is larger than `limit` bytes, is not a regular file, or cannot be read.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {limit}")
        # One read may return less than was asked for; a file that shrank ends early.
        pieces = []
        n_left = size
        while n_left:
            piece = file.read(n_left)
            if not piece:
                break
            pieces.append(piece)
            n_left -= len(piece)
        return b"".join(pieces)


def sync(path: str | Path) -> None:
    """Call fsync on a file, or on a folder: that puts its list of names on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str | Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically, replacing an existing one; if durable, to disk before returning."""
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
    """Write a file atomically unless it exists; return whether it was written.

    A rename would replace an existing file. A hard link to the complete file fails instead.
    """
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
        except OSError:
            # This file system has no hard links. Two processes may now both write; the last wins.
            if os.path.lexists(path):
                return False
            os.replace(temporary, path)
    finally:
        remove_files([temporary])
    if durable:
        sync(os.path.dirname(os.path.abspath(path)))
    return True


def remove_files(paths: Iterable[str | Path]) -> int:
    """Remove files; return how many existed."""
    count = 0
    for path in paths:
        try:
            os.unlink(path)
            count += 1
        except FileNotFoundError:
            continue
    return count


# ---------------- which process made a temporary file

# Age of a leftover of another machine, whose processes cannot be checked; writing takes seconds.
OLD_SECONDS = 3600


def temporary_name(start: str | Path, ending: str) -> str:
    """Return a new name: `start`, tag of this process, random digits, `ending`."""
    return f"{start}.{tag()}.{secrets.token_hex(8)}{ending}"


def tag() -> str:
    """Return a text that identifies this process in temporary names: machine, process id."""
    return f"{_machine()}-{os.getpid()}"


def has_ended(maker: str) -> bool:
    """Return whether the process with this `tag` ran on this machine and has ended.

    False for a process of another machine, of which nothing is known.
    """
    match = re.fullmatch(r"([0-9a-f]{8})-(\d{1,9})", maker)
    if match is None or match[1] != _machine():
        return False
    return not _is_running(int(match[2]))


def is_leftover(path: str | Path) -> bool:
    """Return whether a temporary file or folder is a leftover of a killed process.

    It is one if its process ran on this machine and has ended, whatever the clock says, or if it is
    from another machine and an hour old. False if it does not exist.
    """
    match = re.search(r"\.(([0-9a-f]{8})-\d{1,9})\.[0-9a-f]+\.[a-z]+$", os.fspath(path))
    if match and match[2] == _machine():
        return has_ended(match[1]) and os.path.lexists(path)
    try:
        return time.time() - os.stat(path).st_mtime > OLD_SECONDS
    except OSError:
        return False


def is_from_this_process(path: str | Path) -> bool:
    """Return whether this process gave a file its temporary name."""
    return f".{tag()}." in os.path.basename(path)


def _is_running(process_id: int) -> bool:
    """Return whether a process of this machine is running."""
    try:
        os.kill(process_id, 0)  # signal 0 checks alone
    except ProcessLookupError:
        return False
    except OSError:  # it runs, as another user
        return True
    return True


@functools.cache
def _machine() -> str:
    """Return eight digits that identify a process-id namespace: one boot of a host, one container.

    Process ids mean nothing outside of it, so the host's name would not be enough.
    """
    names = [socket.gethostname()]
    try:
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        names.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux
        pass
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
