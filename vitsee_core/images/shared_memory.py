"""Memory that loading processes share with their parent."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError
from vitsee_stores.errors import reason

_RAM_DISK = Path("/dev/shm")


class SharedBlock:
    """`size` bytes shared with children started with `fd` among their inherited descriptors.

    One descriptor per block, however many arrays it holds; the creator closes `fd` once the
    children have started, and the memory lives until its last view is freed. The file behind it has
    no name, so that nothing is left over when every process is killed. Pickles as its descriptor's
    number: only a child that inherited it can unpickle it.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self.fd = _anonymous_file(size) if fd is None else fd
        self._map = mmap.mmap(self.fd, size)

    def array(self, shape: tuple[int, ...], offset: int = 0) -> NDArray[np.uint8]:
        """A writable uint8 view of that shape from `offset` on."""
        count = int(np.prod(shape))
        return np.frombuffer(self._map, np.uint8, count, offset).reshape(shape)

    def __reduce__(self) -> tuple[type[SharedBlock], tuple[int, int]]:
        return type(self), (self.size, self.fd)


def _anonymous_file(size: int) -> int:
    """A descriptor of an unnamed file of that size, in memory if there is room for it."""
    # Containers often come with 64 MB here; a page that finds no room kills the process.
    in_memory = _RAM_DISK.is_dir() and shutil.disk_usage(_RAM_DISK).free > size
    try:
        with tempfile.TemporaryFile(dir=_RAM_DISK if in_memory else None) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return os.dup(file.fileno())
    except OSError as error:
        raise DataError(
            f"cannot share {size / 1e6:.0f} MB with the loading processes: {reason(error)}; "
            "run with smaller batches or --workers 0"
        ) from None
