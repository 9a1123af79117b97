"""A store at a URL, through obstore: object stores write each object atomically.

Credentials and endpoints come from the environment, where obstore and the providers' own tools look
for them. Every request goes through `_request`, which alone retries.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from vitsee_stores.disk import named_pool
from vitsee_stores.files import Files, NoAnswer, Pieces, Put
from vitsee_stores.url import Url

T = TypeVar("T")
R = TypeVar("R")

TRIES = 3
# Before the second try; twice that before the third. Up to half as much again at random, so that
# processes that failed together do not come back together.
WAIT_SECONDS = 0.5
# Requests are bound by the network, not by cores; each holds a chunk in memory.
THREADS = 16
# Larger objects are written in parts of this size.
PART_BYTES = 32 << 20
ROOT = "zarr.json"
# The object that `fill` writes last, so that it marks a created store.
LAST_CREATED = "commits/zarr.json"
# `is_worker`: whether the thread belongs to the pool of `Objects.each_in_threads`.
_thread = threading.local()
_process: list[int] = []  # pid in which obstore's threads run, once started


class Objects(Files):
    """The files of a store at a URL; picklable.

    Attributes:
        place: the store's URL.
    """

    def __init__(self, place: Url):
        self.place: Url = place
        self._opened: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out obstore's client, which another process cannot use."""
        return {"place": self.place, "_opened": None}

    def each_in_threads(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Use more threads than cores, also for callers with one thread per core.

        After an error nothing more is started.
        """
        # A worker that waited for workers of the same pool could wait for ever.
        if len(items) < 2 or getattr(_thread, "is_worker", False):
            return [work(item) for item in items]

        def work_as_worker(item: T) -> R:
            """Do the work in a thread that is marked as the pool's."""
            _thread.is_worker = True
            return work(item)

        pool = named_pool("vitsee-objects", THREADS)
        futures = [pool.submit(work_as_worker, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do the same as `each_in_threads`: a request takes long for a small object, too."""
        return self.each_in_threads(work, items)

    # reading ----------------------------------------------------------------------------------

    def read(self, name: str, limit: int) -> bytes:
        """Read an object whose size the server's answer tells before its bytes are taken."""

        def check(size: int) -> None:
            """Refuse an object of more than `limit` bytes."""
            if size > limit:
                raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {limit}")

        return bytes(self.read_chunk(name, check))

    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """Return memory that no other call uses."""

        def get() -> memoryview[int]:
            """Request the object; the body is read after `check` has accepted its size."""
            response = obstore.get(self._client, name)
            check(response.meta["size"])
            return memoryview(response.bytes())

        return self._request(get)

    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        """Read with one request where the server supports suffix ranges, otherwise with two."""

        def get_end() -> tuple[int, bytes]:
            """Request the last bytes; where that is not supported, the size and then a range."""
            try:
                response = obstore.get(
                    self._client, name, options={"range": {"suffix": length}}
                )
                return response.meta["size"], bytes(response.bytes())
            except (NotSupportedError, GenericError) as error:
                # NotSupportedError comes from Azure, NotPartial for a range of an empty object.
                if isinstance(error, GenericError) and "NotPartial" not in str(error):
                    raise
            size = obstore.head(self._client, name)["size"]
            if not size:
                return 0, b""
            start = max(0, size - length)
            end = obstore.get_range(self._client, name, start=start, end=size)
            return size, bytes(end)

        return self._request(get_end)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Read with one request; none for 0 bytes, a range that HTTP cannot ask for."""
        if not length:
            return b""

        def get_range() -> bytes:
            """Request the bytes; fewer than `length` are an error that is tried again."""
            data = obstore.get_range(self._client, name, start=start, length=length)
            if len(data) != length:
                raise GenericError(f"the server sent {len(data)} of {length} bytes")
            return bytes(data)

        return self._request(get_range)

    def stamp(self, name: str) -> tuple[int, str]:
        """Return size and entity tag; the time of modification where the server sends no tag."""
        metadata = self._request(lambda: obstore.head(self._client, name))
        return metadata["size"], str(metadata["e_tag"] or metadata["last_modified"])

    def names(self, folder: str = "") -> set[str]:
        """Return the names below a prefix, up to the next slash."""
        listing = self._request(
            lambda: obstore.list_with_delimiter(self._client, folder or None)
        )
        paths = [entry["path"] for entry in listing["objects"]]
        paths += listing["common_prefixes"]
        return {path.rpartition("/")[2] for path in paths}

    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """Walk through one listing of all objects; a request per folder would take far longer."""
        try:
            paths = self.listed()
        except OSError as error:
            error.filename = "."
            onerror(error)
            return
        # A stack of folders, each with the paths below it, relative to it.
        stack = [("", paths)]
        while stack:
            folder, paths_below = stack.pop()
            files = []
            paths_by_subfolder: dict[str, list[str]] = {}
            for path in paths_below:
                name, slash, path_in_subfolder = path.partition("/")
                if slash:
                    paths_by_subfolder.setdefault(name, []).append(path_in_subfolder)
                else:
                    files.append(path)
            subfolders = list(paths_by_subfolder)
            # The caller may remove names from `subfolders`: these are not walked.
            yield folder, subfolders, files
            prefix = f"{folder}/" if folder else ""
            for name in reversed(subfolders):
                stack.append((prefix + name, paths_by_subfolder[name]))

    def exists(self, name: str = "") -> bool:
        """Ask for the object; without a name, for the store's root, then for any object below."""
        try:
            self._request(lambda: obstore.head(self._client, name or ROOT))
            return True
        except FileNotFoundError:
            return not name and bool(self.names())

    def listed(self) -> list[str]:
        """Return the names of all objects of the store."""

        def list_pages() -> list[str]:
            """Request all pages of the listing; a failure of one begins anew."""
            names = []
            for page in obstore.list(self._client):
                names += [entry["path"] for entry in page]
            return names

        return self._request(list_pages)

    # writing ----------------------------------------------------------------------------------

    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Write the root if it is absent, then everything else.

        The process that writes the root wins. All else follows from the root and the images, so
        that any process that joins can write it, too (`fill`).
        """
        root = next(pieces for name, pieces in files if name == ROOT)
        if not self.put_if_absent(ROOT, _concatenate(root)):
            raise FileExistsError(errno.EEXIST, "a store is there")
        self.fill(files)

    def is_created(self) -> bool:
        """Return whether the object that `fill` writes last exists."""
        return self.exists(LAST_CREATED)

    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Write all files but the root, and last the one that marks them as present."""
        pieces_by_name = dict(files)

        def put(name: str) -> None:
            """Write one of the files."""
            self.put(name, _concatenate(pieces_by_name[name]))

        names = [name for name in pieces_by_name if name not in (ROOT, LAST_CREATED)]
        self.each_in_threads(put, names)
        put(LAST_CREATED)

    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Do nothing: objects appear atomically under their final names."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object; a large one in several requests, of which the last makes it visible."""
        self._request(
            lambda: obstore.put(self._client, name, data, chunk_size=PART_BYTES)
        )

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write with a conditional put: the server refuses it if the object exists."""
        n_tries = 0

        def create_object() -> bool:
            """Put the object and count the tries, those whose answer was lost too."""
            nonlocal n_tries
            n_tries += 1
            # Conditions are not supported for objects that are written in parts.
            obstore.put(self._client, name, data, mode="create", use_multipart=False)
            return True

        try:
            return self._request(create_object)
        except FileExistsError:
            # An earlier try may have succeeded although its response was lost: then the object is
            # ours. The limit is above our size, so that a larger object is read and differs.
            return n_tries > 1 and self.read(name, len(data) + (1 << 20)) == data

    @contextmanager
    def writing(self) -> Iterator[Put]:
        """Write each object at once; it is durable once the server has answered."""

        def put(name: str, pieces: Pieces) -> int:
            """Write an object; return its size in bytes."""
            data = _concatenate(pieces)
            self.put(name, data)
            return len(data)

        yield put

    def remove(self, names: Iterable[str]) -> None:
        """Delete the objects, many with one request where the server supports that."""
        objects = list(names)
        if objects:
            self._request(lambda: obstore.delete(self._client, objects))

    def remove_store(self, incomplete: bytes) -> None:
        """Mark the root as incomplete, then remove markers, other objects, and the root last.

        An interrupted removal leaves a store without slabs, which can be removed or filled again.
        """
        names = set(self.listed())
        if ROOT in names:
            self.put(ROOT, incomplete)
        markers = {name for name in names if name.startswith("commits/")}
        self.remove(sorted(markers))
        self.remove(sorted(names - markers - {ROOT}))
        self.remove(sorted(names & {ROOT}))

    def inside(self, name: str) -> Files:
        """Return the objects below a longer key of the same bucket."""
        return Objects(replace(self.place, key=f"{self.place.key}/{name}"))

    # other readers ----------------------------------------------------------------------------

    def zarr_store(self) -> Any:
        """Return Zarr's ObjectStore on obstore, which retries its own requests."""
        from zarr.storage import ObjectStore

        return ObjectStore(from_url(str(self.place)), read_only=True)

    # requests ---------------------------------------------------------------------------------

    @property
    def _client(self) -> Any:
        """obstore's client of the store, made on first use; it does not retry, `_request` does."""
        if self._opened is None:
            self._opened = from_url(str(self.place), retry_config={"max_retries": 0})
        return self._opened

    def _request(self, send: Callable[[], R]) -> R:
        """Return what `send` returns, which is called up to TRIES times.

        Raises:
            FileNotFoundError: there is no such object.
            FileExistsError: the object exists, where none should.
            NoAnswer: anything else; describes it in a line.
        """
        # The threads of obstore's runtime do not survive a fork: requests would hang.
        if not _process:
            _process.append(os.getpid())
        if _process[0] != os.getpid():
            raise NoAnswer(
                errno.ENOTSUP,
                "this process was forked from one that had opened a URL, which cannot "
                "work; start processes with multiprocessing's 'spawn'",
            )
        for n_tries in range(1, TRIES + 1):
            try:
                return send()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise NoAnswer(errno.EIO, "there is no such bucket") from None
                raise FileNotFoundError(errno.ENOENT, "no such object") from None
            except AlreadyExistsError:
                raise FileExistsError(errno.EEXIST, "it is there already") from None
            except BaseError as error:
                message, is_final = _describe_error(error)
                if is_final:
                    raise NoAnswer(errno.EIO, message) from None
                if n_tries == TRIES:
                    raise NoAnswer(errno.EIO, f"{message} ({TRIES} tries)") from None
            time.sleep(WAIT_SECONDS * 2 ** (n_tries - 1) * random.uniform(1, 1.5))
        raise AssertionError("the last try returns or raises")


def _concatenate(pieces: Pieces) -> bytes:
    """Return the bytes of an object; arrays are buffers, which `join` takes."""
    return b"".join(cast(bytes, piece) for piece in pieces)


def _describe_error(error: BaseError) -> tuple[str, bool]:
    """Return obstore's error as words within a line, and whether retrying is useless.

    obstore has few classes of errors: the causes are in the texts of their Rust libraries.
    """
    text = str(error)
    # Without credentials the clouds' metadata servers are asked, which only their machines have.
    if "169.254.169.254" in text or "metadata.google" in text:
        return (
            "no credentials are set (for s3:// AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket)"
        ), True
    code = re.search(r"<Code>(\w+)</Code>", text)
    if "NoSuchBucket" in text:
        return "there is no such bucket", True
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        suffix = f" ({code[1]})" if code else ""
        return f"access is denied{suffix}", True
    # The first line, without the XML of the answer and the names of libraries before it.
    line = text.partition("\n")[0].partition(": <")[0]
    line = line.rpartition(" - ")[2].strip()
    line = re.sub(r"^Generic \w+ error: ", "", line)
    line = line.replace("Server returned non-2xx status code:", "the server answered")
    if "body error" in line:
        line = "the server's answer was cut short"
    elif "error sending request" in line:
        line = "the server gave no answer"
    if "kind: Timeout" in text or "TimedOut" in text:
        line = "the server did not answer in time"
    elif "kind: Connect" in text:
        host = re.search(r"https?://([^/\s]+)", text)
        line = f"cannot connect to {host[1] if host else 'the server'}"
    if code:
        line = f"{line} ({code[1]})"
    return line[:300], False
