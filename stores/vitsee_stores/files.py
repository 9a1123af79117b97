"""The interface between a store and its storage: a folder (`folder.py`) or a URL (`objects.py`).

A file is named by its path below the store (`acts/embed/grid/c.0.0.0.0`). Readers see a file
complete or not at all. Failures raise OSError: FileNotFoundError if the file does not exist,
NoAnswer if a network is involved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.url import Place

T = TypeVar("T")
R = TypeVar("R")

# A file's bytes, in order. Several buffers, so that a chunk and its checksum are not copied.
Pieces = Sequence[bytes | NDArray[np.uint8]]
# (name, pieces) -> size of the file that was written, in bytes.
Put = Callable[[str, Pieces], int]


class NoAnswer(OSError):
    """The server gave no usable answer, so that the file may exist or not."""


class Files(ABC):
    """The files of one store, of a folder or of an object store.

    Attributes:
        place: the store's path or URL, as the user wrote it.
    """

    place: Place

    def __str__(self) -> str:
        return str(self.place)

    @abstractmethod
    def each_in_threads(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results of `work` for all items, in their order.

        Runs on as many threads as help with reading or writing chunks. The first error is raised
        once no work is running any more.
        """

    @abstractmethod
    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do the same as `each_in_threads` for files of a few KB, whose cost is latency alone."""

    # reading ----------------------------------------------------------------------------------

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a file.

        Raises:
            OSError: it has more than `limit` bytes; nothing is read then.
        """

    @abstractmethod
    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """Return the bytes of a file in memory that this thread's next call may reuse.

        Args:
            name: the file.
            check: called with the size in bytes before memory is allocated; raises to refuse it.
        """

    @abstractmethod
    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        """Return a file's size, and its last `length` bytes (all bytes if it has fewer)."""

    @abstractmethod
    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on.

        Raises:
            OSError: the file ends before.
        """

    @abstractmethod
    def stamp(self, name: str) -> tuple[int, str]:
        """Return a file's size, and a text that changes whenever its bytes are replaced."""

    @abstractmethod
    def names(self, folder: str = "") -> set[str]:
        """Return the names of all files and folders in a folder, none if it does not exist."""

    @abstractmethod
    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield (folder, names of its folders, names of its files) top down, as `os.walk` does.

        The store's root is "". A caller that removes folders from the first list skips them.
        """

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether the file exists; without a name, whether anything is at `place`."""

    # writing ----------------------------------------------------------------------------------

    @abstractmethod
    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Create the store from these files, among them the zarr.json of its root.

        Of several processes that try, one succeeds.

        Raises:
            OSError: something is at `place` already.
        """

    def is_created(self) -> bool:
        """Return whether everything that `create` writes exists.

        Always true where creation is atomic.
        """
        return True

    @abstractmethod
    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Write what `create` writes, except the root.

        Any process may do so while `is_created` is false: its writer may have been killed.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a file, replacing an existing one."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether it was written."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Put]:
        """Return a context that yields a function to write files with.

        All of them are on disk when the context exits.
        """

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""

    @abstractmethod
    def remove_store(self, incomplete: bytes) -> None:
        """Remove the store. An interrupted removal leaves nothing that reads as complete.

        Args:
            incomplete: the zarr.json of the root, changed to that of an incomplete store.
        """

    @abstractmethod
    def inside(self, name: str) -> Files:
        """Return the files of a store inside this one, whether or not it exists.

        Args:
            name: path of its folder, below this store.
        """

    def sweep(self, folders: Iterable[str], chosen: Callable[[str], bool]) -> int:
        """Remove temporary files in these folders whose path `chosen` accepts.

        Returns:
            How many were removed: 0 where the storage itself writes atomically.
        """
        return 0

    @abstractmethod
    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Remove temporary folders beside the store, of creations and removals that ended early.

        Args:
            chosen: whether a folder's path is to be removed.
        """

    # other readers ----------------------------------------------------------------------------

    @abstractmethod
    def zarr_store(self) -> Any:
        """Return a read-only store for zarr-python."""
