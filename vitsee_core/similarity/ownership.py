"""Files owned by a living process, whatever their age: a lock that ends with the process."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX: every file counts as owned
    fcntl = None  # type: ignore[assignment]


def create_owned(path: Path) -> int:
    """A new file that belongs to this process until the returned descriptor is closed."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            return descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # no locks on this file system: nobody can claim or remove it
            return descriptor
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # swept before it was locked


def owned_by_none(path: Path) -> bool:
    """Whether the process that created it with `create_owned` has ended; False if unknown, or if
    there is no such file."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
