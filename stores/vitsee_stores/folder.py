"""A store in a folder, and which files lie at a path or URL.

A file is written under a temporary name, synced and renamed, so that a reader, or a machine that
starts again, sees all of it or nothing.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from vitsee_stores.disk import (
    PARTIAL,
    each_in_threads,
    open_regular,
    partial_name,
    put_if_absent,
    read_regular,
    remove_files,
    sync,
    sync_pool,
    temporary_name,
    work_pool,
    write_new,
    write_whole,
)
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.files import Files, Pieces, Put
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Url, parse_place

T = TypeVar("T")
R = TypeVar("R")

# Endings of hidden folders beside a store, while it is being created or removed.
CREATING = ".creating"
REMOVING = ".removing"
# Permissions of the effective user count (setuid); not every platform can ask for these.
HAS_EFFECTIVE_IDS = os.access in os.supports_effective_ids
# `chunk`: a bytearray per thread. Memory of its own for every chunk would cost page faults.
_thread = threading.local()


class Folder(Files):
    """The files of a store in a folder.

    Attributes:
        place: path of the folder.
        durable: whether every write is on disk before the call returns; False skips every fsync.
        parents: number of folders above the store that `create` makes; those further up must exist.
    """

    def __init__(self, place: Path, *, durable: bool = True, parents: int = 0):
        self.place: Path = place
        self.durable = durable
        self.parents = parents
        self._prefix = os.path.join(place, "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the absolute path: another process may have another working directory."""
        constructor = partial(Folder, durable=self.durable, parents=self.parents)
        return constructor, (self.place.absolute(),)

    def each_in_threads(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Use a thread per core."""
        return each_in_threads(work_pool, work, items)

    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Work in the calling thread: handing small files to others costs more than reading."""
        return [work(item) for item in items]

    # reading ----------------------------------------------------------------------------------

    def read(self, name: str, limit: int) -> bytes:
        """Read a regular file; a pipe or device raises OSError."""
        return read_regular(self._prefix + name, limit)

    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """Read into memory that belongs to the thread and is used again by its next call."""
        with open(open_regular(self._prefix + name), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            check(size)
            scratch = getattr(_thread, "chunk", None)
            if scratch is None or len(scratch) < size:
                scratch = bytearray(size)
                _thread.chunk = scratch
            data = memoryview(scratch)[:size]
            _read_into(file, data)
        return data

    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        """Read with one system call, without moving through the file."""
        descriptor = open_regular(self._prefix + name)
        try:
            size = os.fstat(descriptor).st_size
            return size, os.pread(descriptor, length, max(0, size - length))
        finally:
            os.close(descriptor)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Read, and refuse a file that was cut short."""
        with open(open_regular(self._prefix + name), "rb", buffering=0) as file:
            file.seek(start)
            data = bytearray(length)
            n_read = _read_into(file, memoryview(data))
        if n_read < length:
            raise OSError(errno.EIO, f"the file ends {length - n_read} bytes too early")
        return bytes(data)

    def stamp(self, name: str) -> tuple[int, str]:
        """Return the size and the time of modification, in nanoseconds."""
        status = os.stat(self._prefix + name)
        return status.st_size, str(status.st_mtime_ns)

    def names(self, folder: str = "") -> set[str]:
        """List a folder; temporary files are listed too."""
        try:
            return set(os.listdir(self._prefix + folder))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """Walk with `os.walk`; errors name a folder by its path below the store."""

        def report(error: OSError) -> object:
            """Call `onerror` with the relative path in the error."""
            error.filename = os.path.relpath(os.fspath(error.filename), self.place)
            return onerror(error)

        for folder, subfolders, files in os.walk(self.place, onerror=report):
            path = os.path.relpath(folder, self.place).replace(os.sep, "/")
            if path == ".":
                path = ""
            yield path, subfolders, files

    def exists(self, name: str = "") -> bool:
        """Return whether the name is taken, by a dangling link too: nothing could be put there."""
        return os.path.lexists(self._prefix + name if name else self.place)

    # writing ----------------------------------------------------------------------------------

    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Create the store beside its place and rename it: a killed process leaves no partial one.

        Renaming fails if a folder with files is there, so that one of several processes succeeds.
        """
        temporary = _temporary_beside(self.place, CREATING)
        try:
            # The folders above the store, the uppermost first.
            for folder in reversed(list(self.place.parents)[: self.parents]):
                folder.mkdir(exist_ok=True)
                if self.durable:
                    sync(folder.absolute().parent)
            paths = [(temporary / name, pieces) for name, pieces in files]
            folders = sorted({path.parent for path, _ in paths})
            for folder in folders:
                # The store's own folder only below one that exists: a typing error in a path
                # shall not make a tree.
                folder.mkdir(parents=folder != temporary, exist_ok=True)
            for path, pieces in paths:
                write_new(str(path), pieces)
            # Synced before the rename, or a crash could leave a store with empty files.
            if self.durable:
                each_in_threads(sync_pool, sync, [*(path for path, _ in paths), *folders])
            os.rename(temporary, self.place)
            if self.durable:
                sync(self.place.absolute().parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def put(self, name: str, data: bytes) -> None:
        """Write the file under a temporary name, then rename it."""
        write_whole(self._prefix + name, data, durable=self.durable)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write the file under a temporary name, then link it; a link fails where a file is."""
        return put_if_absent(self._prefix + name, data, durable=self.durable)

    @contextmanager
    def writing(self) -> Iterator[Put]:
        """Sync and rename files in other threads while the next ones are written.

        Their folders are synced at the end, each once.
        """
        renames: list[Future[None]] = []
        folders: set[str] = set()
        lock = threading.Lock()  # callers write from several threads

        def put(name: str, pieces: Pieces) -> int:
            """Write a file; return its size in bytes."""
            final = self._prefix + name
            temporary = partial_name(final)
            size = write_new(temporary, pieces)
            if not self.durable:
                os.replace(temporary, final)
                return size
            future = sync_pool().submit(_sync_and_rename, temporary, final)
            with lock:
                renames.append(future)
                folders.add(os.path.dirname(final))
            return size

        try:
            yield put
        finally:
            # After an error too: no thread may write on once the caller has control again.
            wait(renames)
        for future in renames:
            future.result()  # raises the error of a sync or rename
        each_in_threads(sync_pool, sync, sorted(folders))

    def remove(self, names: Iterable[str]) -> None:
        """Unlink the files, one after the other."""
        remove_files(self._prefix + name for name in names)

    def remove_store(self, incomplete: bytes) -> None:
        """Rename the store, then remove it and other leftovers beside it.

        Renamed first, so that an interrupted removal leaves nothing that reads as a store.

        Raises:
            StoreError: a folder of it cannot be changed (the store stays as it is), or a leftover
                cannot be removed.
        """
        path = Path(os.path.realpath(self.place))
        if os.path.lexists(self.place):
            writable = os.W_OK | os.X_OK
            for folder, _, _ in os.walk(path):
                if not os.access(folder, writable, effective_ids=HAS_EFFECTIVE_IDS):
                    raise StoreError(
                        f"{path} stays as it is: {folder} is write-protected"
                    )
            os.rename(path, _temporary_beside(path, REMOVING))
        for leftover in _list_leftovers(path):
            try:
                shutil.rmtree(leftover)
            except OSError as error:
                raise StoreError(
                    f"{path} is removed but for {leftover}, which cannot be: "
                    f"{reason(error)}; delete that yourself"
                ) from None

    def inside(self, name: str) -> Files:
        """Return the folder's files; `create` makes the folders between the two stores."""
        return Folder(self.place / name, durable=self.durable, parents=name.count("/"))

    def sweep(self, folders: Iterable[str], chosen: Callable[[str], bool]) -> int:
        """Remove files that end in .partial, which `writing` and `put` leave when killed."""
        paths = []
        for folder in folders:
            for name in self.names(folder):
                path = os.path.join(self.place, folder, name)
                if name.endswith(PARTIAL) and chosen(path):
                    paths.append(path)
        return remove_files(paths)

    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Do nothing: `create` is atomic."""

    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Remove hidden folders beside the store that end in .creating or .removing."""
        for leftover in filter(chosen, _list_leftovers(self.place.absolute())):
            shutil.rmtree(leftover, ignore_errors=True)

    # other readers ----------------------------------------------------------------------------

    def zarr_store(self) -> Any:
        """Return zarr's LocalStore of the folder."""
        from zarr.storage import LocalStore

        return LocalStore(self.place, read_only=True)


def _temporary_beside(path: Path, ending: str) -> Path:
    """Return a new hidden name beside a store, on the same file system so that it can be renamed.

    The path is made absolute: "." and ".." have no names.
    """
    absolute = path.absolute()
    return Path(temporary_name(absolute.with_name(f".{absolute.name}"), ending))


def _list_leftovers(path: Path) -> list[str]:
    """Return the hidden folders of creations and removals beside a store, running ones too."""
    try:
        names = os.listdir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    start = f".{path.name}."
    return [
        os.path.join(path.parent, name)
        for name in names
        if name.startswith(start) and name.endswith((CREATING, REMOVING))
    ]


def _read_into(file: FileIO, buffer: memoryview[int]) -> int:
    """Fill a buffer from a file; return the number of bytes read, fewer if the file ends."""
    n_read = 0
    # One call may return less than was asked for, network file systems' above all.
    while n_read < len(buffer):
        n_new = file.readinto(buffer[n_read:])
        if not n_new:
            break
        n_read += n_new
    return n_read


def _sync_and_rename(temporary: str, final: str) -> None:
    """Put a file on disk, then give it its name; in this order a crash leaves no empty file."""
    sync(temporary)
    os.replace(temporary, final)


# ---------------- from a path or URL to the files of a store


def files_at(location: str | os.PathLike[str] | Url, *, durable: bool = True) -> Files:
    """Return the files at a path or URL, whether or not a store exists there.

    Args:
        location: path or URL of the store.
        durable: False skips every fsync; of folders alone, objects are durable by themselves.

    Raises:
        StoreError: the URL names no store, or obstore is not installed.
    """
    place = parse_place(location)
    if isinstance(place, Url):
        if importlib.util.find_spec("obstore") is None:
            raise StoreError(f"{place} needs obstore; run: pip install 'vitsee[remote]'")
        # Imported here: obstore is optional.
        from vitsee_stores.objects import Objects

        return Objects(place)
    return Folder(place, durable=durable)


def store_around(path: Path) -> Path | None:
    """Return the store (a folder with a zarr.json) that contains a path; None if there is none."""
    # From the root of the disk downwards: groups inside a store have a zarr.json, too.
    folders = reversed(path.resolve().parents)
    return next((folder for folder in folders if (folder / ZARR_JSON).is_file()), None)
