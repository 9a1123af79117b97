"""Whose a temporary file or folder is: only what its maker cannot finish any more is left over.

A job that was requeued can stand beside its dying self, and two commands can be given one store:
what the other is writing must not be taken away from under it.
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

# A file is written in seconds; makers on other machines cannot be asked whether they live.
OLD_SECONDS = 3600


def temporary_name(start: str | Path, ending: str) -> str:
    """A new name: `start`, this process, something random, `ending`."""
    return f"{start}.{tag()}.{secrets.token_hex(8)}{ending}"


def tag() -> str:
    """What names this process in temporary names."""
    return f"{_machine()}-{os.getpid()}"


def has_ended(maker: str) -> bool:
    """Whether this `tag` is of a process of this machine that is no more; False of others."""
    match = re.fullmatch(r"([0-9a-f]{8})-(\d{1,9})", maker)
    return match is not None and match[1] == _machine() and not _alive(int(match[2]))


def is_left(path: str | Path) -> bool:
    """Whether a temporary file or folder is left over: its maker ended on this machine, whatever
    the clock says, or it is of another machine and an hour old. False for one that is gone."""
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
    """Eight digits for what numbers its processes by itself: a boot of a host, a container."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
