"""Ownership of temporary files and folders: only those whose maker cannot finish them are
leftovers.

A requeued job can run beside its dying predecessor, and two commands can be given one store: files
that another process is still writing must not be removed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
import time
from pathlib import Path

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
