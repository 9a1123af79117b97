"""A store in a folder: files are written under temporary names, synced, then renamed."""

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
from pathlib import Path
from typing import Any, TypeVar

from vitsee_stores.disk import (
    PARTIAL,
    each,
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

CREATING = ".creating"
REMOVING = ".removing"
EFFECTIVE = os.access in os.supports_effective_ids
_thread = threading.local()


class Folder(Files):
    """The files of a store in a folder.

    Attributes:
        durable: whether every write is on disk before the call returns; False skips every fsync.
        parents: how many folders above the store are made with it; those above must exist.
    """

    def __init__(self, place: Path, *, durable: bool = True, parents: int = 0):
        self.place: Path = place
        self.durable = durable
        self.parents = parents
        self._prefix = os.path.join(place, "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Absolute: another process may have another working directory."""
        made = partial(Folder, durable=self.durable, parents=self.parents)
        return made, (self.place.absolute(),)

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        return each(work_pool, work, items)

    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The work is done in the calling thread: handing small files to others costs more than
        reading them."""
        return [work(item) for item in items]

    # reading ----------------------------------------------------------------------------------

    def read(self, name: str, limit: int) -> bytes:
        return read_regular(self._prefix + name, limit)

    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """Reads into per-thread memory."""
        with open(open_regular(self._prefix + name), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            check(size)
            scratch = getattr(_thread, "chunk", None)
            if scratch is None or len(scratch) < size:
                scratch = _thread.chunk = bytearray(size)
            data = memoryview(scratch)[:size]
            done = 0
            while done < size and (got := file.readinto(data[done:])):
                done += got
        return data

    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        descriptor = open_regular(self._prefix + name)
        try:
            size = os.fstat(descriptor).st_size
            return size, os.pread(descriptor, length, max(0, size - length))
        finally:
            os.close(descriptor)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        with open(open_regular(self._prefix + name), "rb", buffering=0) as file:
            file.seek(start)
            data = bytearray(length)
            view = memoryview(data)
            done = 0
            while done < length and (got := file.readinto(view[done:])):
                done += got
        if done < length:
            raise OSError(errno.EIO, f"the file ends {length - done} bytes too early")
        return bytes(data)

    def stamp(self, name: str) -> tuple[int, str]:
        """A stamp from the file's time of modification."""
        status = os.stat(self._prefix + name)
        return status.st_size, str(status.st_mtime_ns)

    def names(self, folder: str = "") -> set[str]:
        try:
            return set(os.listdir(self._prefix + folder))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """Errors name what cannot be listed by its path below the store."""

        def report(error: OSError) -> object:
            error.filename = os.path.relpath(os.fspath(error.filename), self.place)
            return onerror(error)

        for here, below, files in os.walk(self.place, onerror=report):
            path = os.path.relpath(here, self.place).replace(os.sep, "/")
            yield "" if path == "." else path, below, files

    def exists(self, name: str = "") -> bool:
        """True for a dangling link, too."""
        return os.path.lexists(self._prefix + name if name else self.place)

    # writing ----------------------------------------------------------------------------------

    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Created beside the place and renamed, so that a killed process leaves no partial
        store."""
        temporary = _sibling(self.place, CREATING)
        try:
            for folder in list(self.place.parents)[: self.parents][::-1]:
                folder.mkdir(exist_ok=True)
                if self.durable:
                    sync(folder.absolute().parent)
            paths = [(temporary / name, pieces) for name, pieces in files]
            folders = sorted({path.parent for path, _ in paths})
            for folder in folders:
                folder.mkdir(parents=folder != temporary, exist_ok=True)
            for path, pieces in paths:
                write_new(str(path), pieces)
            if self.durable:
                each(sync_pool, sync, [*(path for path, _ in paths), *folders])
            os.rename(temporary, self.place)
            if self.durable:
                sync(self.place.absolute().parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def put(self, name: str, data: bytes) -> None:
        """The file is written under a temporary name, then renamed."""
        write_whole(self._prefix + name, data, durable=self.durable)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """The file is written under a temporary name, then linked."""
        return put_if_absent(self._prefix + name, data, durable=self.durable)

    @contextmanager
    def writing(self) -> Iterator[Put]:
        """Other threads sync and rename the files; their folders are synced at the end."""
        settling: list[Future[None]] = []
        folders: set[str] = set()
        lock = threading.Lock()

        def put(name: str, pieces: Pieces) -> int:
            final = self._prefix + name
            temporary = partial_name(final)
            size = write_new(temporary, pieces)
            if not self.durable:
                os.replace(temporary, final)
                return size
            future = sync_pool().submit(_settle, temporary, final)
            with lock:
                settling.append(future)
                folders.add(os.path.dirname(final))
            return size

        try:
            yield put
        finally:
            wait(settling)
        for future in settling:
            future.result()
        each(sync_pool, sync, sorted(folders))

    def remove(self, names: Iterable[str]) -> None:
        remove_files(self._prefix + name for name in names)

    def remove_store(self, incomplete: bytes) -> None:
        """Renamed first, so that an interrupted removal leaves nothing that reads as a store; a
        store with a folder that cannot be changed stays as it is. Leftovers beside it go, too."""
        place = Path(os.path.realpath(self.place))
        if os.path.lexists(self.place):
            for here, *_ in os.walk(place):
                if not os.access(here, os.W_OK | os.X_OK, effective_ids=EFFECTIVE):
                    raise StoreError(f"{place} stays as it is: {here} is write-protected")
            os.rename(place, _sibling(place, REMOVING))
        for leftover in _beside(place):
            try:
                shutil.rmtree(leftover)
            except OSError as error:
                raise StoreError(
                    f"{place} is removed but for {leftover}, which cannot be: {reason(error)}; "
                    "delete that yourself"
                ) from None

    def inside(self, name: str) -> Files:
        return Folder(self.place / name, durable=self.durable, parents=name.count("/"))

    def sweep(self, folders: Iterable[str], chosen: Callable[[str], bool]) -> int:
        """Removes files ending in .partial."""
        return remove_files(
            path
            for folder in folders
            for name in self.names(folder)
            if name.endswith(PARTIAL)
            and chosen(path := os.path.join(self.place, folder, name))
        )

    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Nothing to do: `create` is atomic."""

    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Removes hidden folders beside the store that end in .creating or .removing."""
        for leftover in filter(chosen, _beside(self.place.absolute())):
            shutil.rmtree(leftover, ignore_errors=True)

    # other readers ----------------------------------------------------------------------------

    def zarr_store(self) -> Any:
        from zarr.storage import LocalStore

        return LocalStore(self.place, read_only=True)


def _sibling(path: Path, kind: str) -> Path:
    place = path.absolute()
    return Path(temporary_name(place.with_name(f".{place.name}"), kind))


def _beside(place: Path) -> list[str]:
    """Leftovers of killed processes beside a store."""
    try:
        names = os.listdir(place.parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    start = f".{place.name}."
    return [
        os.path.join(place.parent, name)
        for name in names
        if name.startswith(start) and name.endswith((CREATING, REMOVING))
    ]


def _settle(temporary: str, final: str) -> None:
    sync(temporary)
    os.replace(temporary, final)


# ---------------- from a path or URL to the files of a store


def files_at(place: str | os.PathLike[str] | Url, *, durable: bool = True) -> Files:
    """The files at a path or URL, whether or not a store exists there. durable: False skips every
    fsync, in a folder. Raises StoreError: a URL that names no store, or that nothing installed can
    open."""
    parsed = parse_place(place)
    if isinstance(parsed, Url):
        if importlib.util.find_spec("obstore") is None:
            raise StoreError(f"{parsed} needs obstore; run: pip install 'vitsee[remote]'")
        from vitsee_stores.objects import Objects

        return Objects(parsed)
    return Folder(parsed, durable=durable)


def store_around(path: Path) -> Path | None:
    """The store (a folder with a zarr.json) that contains a path; None if there is none."""
    folders = reversed(
        path.resolve().parents
    )  # the root's zarr.json, not a nested group's
    return next((folder for folder in folders if (folder / ZARR_JSON).is_file()), None)
