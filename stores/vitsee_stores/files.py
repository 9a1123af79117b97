"""The files of one store, wherever they are: the only way to a disk that stores have.

A file is named by its path below the store (`acts/embed/grid/c.0.0.0.0`). Whoever reads sees it
whole or not at all. What fails raises OSError: FileNotFoundError where there is no such file,
NoAnswer where a network is in between.
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
# Puts a file of these pieces, one after the other; its bytes.
Put = Callable[[str, Pieces], int]


class NoAnswer(OSError):
    """What was asked for may well be there: whoever has it gave no answer, or none of use."""


class Files(ABC):
    """A store's files. place: where the store is, as users name it."""

    place: Place

    def __str__(self) -> str:
        return str(self.place)

    @abstractmethod
    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`work` of every item in order, by as many threads as reading or writing chunks is worth.
        The first error is raised after all have ended."""

    @abstractmethod
    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """As `each`, for files of a few KB, which only waiting makes slow."""

    # reading ----------------------------------------------------------------------------------

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """All of a file of at most `limit` bytes."""

    @abstractmethod
    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """All of a file whose number of bytes `check` lets pass, before memory is taken; in memory
        that this thread's next call may take again."""

    @abstractmethod
    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        """A file's number of bytes, and the last `length` of them."""

    @abstractmethod
    def names(self, folder: str = "") -> set[str]:
        """What is in a folder, folders too; nothing where there is none."""

    @abstractmethod
    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """As `os.walk`, top down: each folder ("" is the store's own) with the names of the folders
        and of the files in it. Folders taken out of the list are left out."""

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Whether there is such a file; without a name, whether anything is at the place."""

    # writing ----------------------------------------------------------------------------------

    @abstractmethod
    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """A store of these files, its root's zarr.json among them, where nothing is yet. Of several
        processes one makes it.

        Raises:
            OSError: something is there.
        """

    def is_made(self) -> bool:
        """Whether all that `create` puts is there; where a store is made at once it is."""
        return True

    @abstractmethod
    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Put what `create` puts, but the root, where `is_made` denies that it is there."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Put a file, in place of what was there."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Put a file unless there is one; whether it was put."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Put]:
        """A context for many files; what it put is on the disk at its end."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, those that are not there too."""

    @abstractmethod
    def remove_store(self, incomplete: bytes) -> None:
        """Remove everything at the place. Cut short, it leaves nothing that reads as complete.
        incomplete: the root's zarr.json, saying so."""

    def sweep(self, folders: Iterable[str], chosen: Callable[[str], bool]) -> int:
        """Remove those temporary files in these folders that `chosen` says, by their path; the
        number. Where files are put at once there are none."""
        return 0

    @abstractmethod
    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Remove what unfinished creations and removals left beside the store."""

    # other readers ----------------------------------------------------------------------------

    @abstractmethod
    def zarr_store(self) -> Any:
        """What zarr-python opens as a store, to read only."""
