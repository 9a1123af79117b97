"""The files of one store, wherever it is: the only interface from a store to storage.

A file is named by its path below the store (`acts/embed/grid/c.0.0.0.0`). Readers see a file whole
or not at all. Failures raise OSError: FileNotFoundError if the file does not exist, NoAnswer if a
network is involved.
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

Pieces = Sequence[bytes | NDArray[np.uint8]]
# Writes a file from these pieces in order; returns its size.
Put = Callable[[str, Pieces], int]


class NoAnswer(OSError):
    """The file may well exist: the server gave no answer, or an unusable one."""


class Files(ABC):
    """A store's files.

    Attributes:
        place: the store's path or URL as users write it.
    """

    place: Place

    def __str__(self) -> str:
        return str(self.place)

    @abstractmethod
    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply `work` to every item, results in order, on as many threads as reading or writing
        chunks is worth. The first error is raised after all have ended."""

    @abstractmethod
    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Like `each`, for files of a few KB whose cost is latency alone."""

    # reading ----------------------------------------------------------------------------------

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""

    @abstractmethod
    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """A whole file; `check` is called with its size before memory is allocated. The memory may
        be reused by this thread's next call."""

    @abstractmethod
    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        """A file's size, and its last `length` bytes."""

    @abstractmethod
    def read_range(self, name: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` on; OSError if the file ends before."""

    @abstractmethod
    def stamp(self, name: str) -> tuple[int, str]:
        """A file's size, and a text that changes whenever its bytes are replaced."""

    @abstractmethod
    def names(self, folder: str = "") -> set[str]:
        """Names of the files and folders in a folder; empty if there is no such folder."""

    @abstractmethod
    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """Like `os.walk`, top down: each folder ("" is the store's root) with the names of its
        folders and files. Folders removed from the list are skipped."""

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Whether the file exists; without a name, whether anything is at the place."""

    # writing ----------------------------------------------------------------------------------

    @abstractmethod
    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Create a store from these files, its root's zarr.json among them, where nothing exists
        yet. Of several processes, one succeeds. Raises OSError: something exists there."""

    def is_made(self) -> bool:
        """Whether everything that `create` writes exists; always true where creation is atomic."""
        return True

    @abstractmethod
    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Write what `create` writes, except the root; needed while `is_made` is false."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a file, replacing an existing one."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; returns whether it was written."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Put]:
        """Context for writing many files; they are on disk when it exits."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""

    @abstractmethod
    def remove_store(self, incomplete: bytes) -> None:
        """Remove everything at the place. An interrupted removal leaves nothing that reads as
        complete. incomplete: the root's zarr.json, marked as incomplete."""

    @abstractmethod
    def inside(self, name: str) -> Files:
        """The files of another store, in a folder of this one, whether or not one exists there."""

    def sweep(self, folders: Iterable[str], chosen: Callable[[str], bool]) -> int:
        """Remove the temporary files in these folders whose path `chosen` accepts; returns how
        many. Where writes are atomic there are none."""
        return 0

    @abstractmethod
    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Remove what unfinished creations and removals left beside the store."""

    # other readers ----------------------------------------------------------------------------

    @abstractmethod
    def zarr_store(self) -> Any:
        """A read-only store for zarr-python."""
