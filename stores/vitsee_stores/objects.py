"""A store at a URL: each object is written atomically, through obstore.

Credentials and endpoints come from the environment, as obstore and the providers' own tools read
them. Every request goes through `_tried`, the only place that retries.
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
# Before the second try; twice that before the third. Half as much again at random.
WAIT_SECONDS = 0.5
# Requests are bound by the network, not by cores; each holds a chunk in memory.
THREADS = 16
# Larger objects are written in parts of this size.
PART_BYTES = 32 << 20
ROOT = "zarr.json"
LAST_MADE = "commits/zarr.json"
_thread = threading.local()
_process: list[int] = []  # pid in which obstore's threads run, once started


class Objects(Files):
    """The files of a store at a URL; picklable."""

    def __init__(self, place: Url):
        self.place: Url = place
        self._opened: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "_opened": None}

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Uses more threads than cores, also for callers with one thread per core. After an error
        nothing more is started."""
        if len(items) < 2 or getattr(_thread, "is_ours", False):
            return [work(item) for item in items]

        def ours(item: T) -> R:
            _thread.is_ours = True
            return work(item)

        pool = named_pool("vitsee-objects", THREADS)
        futures = [pool.submit(ours, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        errors = (f.exception() for f in futures if not f.cancelled())
        for error in filter(None, errors):
            raise error
        return [future.result() for future in futures]

    def each_small(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Like `each`: a small object takes as long to request as a large one."""
        return self.each(work, items)

    # reading ----------------------------------------------------------------------------------

    def read(self, name: str, limit: int) -> bytes:
        def check(size: int) -> None:
            if size > limit:
                raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {limit}")

        return bytes(self.read_chunk(name, check))

    def read_chunk(self, name: str, check: Callable[[int], None]) -> memoryview[int]:
        """Each result has memory of its own."""

        def once() -> memoryview[int]:
            response = obstore.get(self._client, name)
            check(response.meta["size"])
            return memoryview(response.bytes())

        return self._tried(once)

    def read_end(self, name: str, length: int) -> tuple[int, bytes]:
        """One request where the server supports suffix ranges."""

        def once() -> tuple[int, bytes]:
            try:
                response = obstore.get(
                    self._client, name, options={"range": {"suffix": length}}
                )
                return response.meta["size"], bytes(response.bytes())
            except (NotSupportedError, GenericError) as error:
                # The first is raised by Azure, the second for a range of an empty object.
                if isinstance(error, GenericError) and "NotPartial" not in str(error):
                    raise
            size = obstore.head(self._client, name)["size"]
            start = max(0, size - length)
            part = (
                obstore.get_range(self._client, name, start=start, end=size)
                if size
                else b""
            )
            return size, bytes(part)

        return self._tried(once)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        def once() -> bytes:
            data = obstore.get_range(self._client, name, start=start, length=length)
            if len(data) != length:
                raise GenericError(f"the server sent {len(data)} of {length} bytes")
            return bytes(data)

        return self._tried(once) if length else b""

    def stamp(self, name: str) -> tuple[int, str]:
        """A stamp from the object's entity tag, or its time of modification where the server sends
        none."""
        about = self._tried(lambda: obstore.head(self._client, name))
        return about["size"], str(about["e_tag"] or about["last_modified"])

    def names(self, folder: str = "") -> set[str]:
        """Names below a prefix, up to the next slash."""
        listing = self._tried(
            lambda: obstore.list_with_delimiter(self._client, folder or None)
        )
        paths = [
            *(entry["path"] for entry in listing["objects"]),
            *listing["common_prefixes"],
        ]
        return {path.rpartition("/")[2] for path in paths}

    def walk(
        self, onerror: Callable[[OSError], object]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """Computed from one list of all objects."""
        try:
            paths = self.listed()
        except OSError as error:
            error.filename = "."
            onerror(error)
            return
        waiting = [("", paths)]
        while waiting:
            folder, inside = waiting.pop()
            below: dict[str, list[str]] = {}
            for path in inside:
                name, slash, rest = path.partition("/")
                if slash:
                    below.setdefault(name, []).append(rest)
            names = list(below)
            yield folder, names, [path for path in inside if "/" not in path]
            start = f"{folder}/" if folder else ""
            waiting += [(start + name, below[name]) for name in reversed(names)]

    def exists(self, name: str = "") -> bool:
        """Without a name: whether any object begins with the URL."""
        try:
            self._tried(lambda: obstore.head(self._client, name or ROOT))
            return True
        except FileNotFoundError:
            return not name and bool(self.names())

    def listed(self) -> list[str]:
        """The names of all objects."""
        return self._tried(
            lambda: [
                entry["path"] for page in obstore.list(self._client) for entry in page
            ]
        )

    # writing ----------------------------------------------------------------------------------

    def create(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Writes the root first, if absent: its writer wins. All else follows from the root and the
        images, so any process that joins can write it, too (`fill`)."""
        root = next(pieces for name, pieces in files if name == ROOT)
        if not self.put_if_absent(ROOT, _joined(root)):
            raise FileExistsError(errno.EEXIST, "a store is there")
        self.fill(files)

    def is_made(self) -> bool:
        """Whether the object that `fill` writes last exists."""
        return self.exists(LAST_MADE)

    def fill(self, files: Sequence[tuple[str, Pieces]]) -> None:
        """Writes all files but the root, and last the one that marks them as present."""
        last = [name for name, _ in files if name == LAST_MADE]
        rest = [(name, pieces) for name, pieces in files if name not in (ROOT, *last)]
        self.each(lambda file: self.put(file[0], _joined(file[1])), rest)
        self.put(LAST_MADE, _joined(dict(files)[LAST_MADE]))

    def sweep_beside(self, chosen: Callable[[str], bool] = lambda path: True) -> None:
        """Nothing to do: objects appear atomically under their own names."""

    def put(self, name: str, data: bytes) -> None:
        """Large objects are written in parts."""
        self._tried(lambda: obstore.put(self._client, name, data, chunk_size=PART_BYTES))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        tries = 0

        def once() -> bool:
            nonlocal tries
            tries += 1
            obstore.put(self._client, name, data, mode="create", use_multipart=False)
            return True

        try:
            return self._tried(once)
        except FileExistsError:
            # An earlier try may have succeeded although its response was lost.
            return tries > 1 and self.read(name, len(data) + (1 << 20)) == data

    @contextmanager
    def writing(self) -> Iterator[Put]:
        """An object exists once its request was answered."""

        def put(name: str, pieces: Pieces) -> int:
            data = _joined(pieces)
            self.put(name, data)
            return len(data)

        yield put

    def remove(self, names: Iterable[str]) -> None:
        listed = list(names)
        if listed:
            self._tried(lambda: obstore.delete(self._client, listed))

    def remove_store(self, incomplete: bytes) -> None:
        """The root is first marked incomplete and removed last, markers go before other objects: an
        interrupted removal leaves a store without slabs, which can be removed or filled again."""
        paths = set(self.listed())
        if ROOT in paths:
            self.put(ROOT, incomplete)
        markers = {path for path in paths if path.startswith("commits/")}
        for some in (markers, paths - markers - {ROOT}, paths & {ROOT}):
            self.remove(sorted(some))

    def inside(self, name: str) -> Files:
        return Objects(replace(self.place, key=f"{self.place.key}/{name}"))

    # other readers ----------------------------------------------------------------------------

    def zarr_store(self) -> Any:
        """Zarr's ObjectStore on obstore, which retries its own requests."""
        from zarr.storage import ObjectStore

        return ObjectStore(from_url(str(self.place)), read_only=True)

    # requests ---------------------------------------------------------------------------------

    @property
    def _client(self) -> Any:
        if self._opened is None:
            self._opened = from_url(str(self.place), retry_config={"max_retries": 0})
        return self._opened

    def _tried(self, once: Callable[[], R]) -> R:
        """Call `once`, up to TRIES times.

        Raises:
            FileNotFoundError: there is no such object.
            FileExistsError: the object exists, where none should.
            NoAnswer: anything else; describes it in a line.
        """
        if not _process:
            _process.append(os.getpid())
        if _process[0] != os.getpid():
            raise NoAnswer(
                errno.ENOTSUP,
                "this process was forked from one that had opened a URL, which cannot work; start "
                "processes with multiprocessing's 'spawn'",
            )
        for tries in range(1, TRIES + 1):
            try:
                return once()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise NoAnswer(errno.EIO, "there is no such bucket") from None
                raise FileNotFoundError(errno.ENOENT, "no such object") from None
            except AlreadyExistsError:
                raise FileExistsError(errno.EEXIST, "it is there already") from None
            except BaseError as error:
                what, final = _in_words(error)
                if final or tries == TRIES:
                    again = "" if final else f" ({TRIES} tries)"
                    raise NoAnswer(errno.EIO, what + again) from None
            time.sleep(WAIT_SECONDS * 2 ** (tries - 1) * random.uniform(1, 1.5))
        raise AssertionError("the last try returns or raises")


def _joined(pieces: Pieces) -> bytes:
    return b"".join(cast(bytes, piece) for piece in pieces)


def _in_words(error: BaseError) -> tuple[str, bool]:
    """obstore's error as part of a line, and whether retrying is useless."""
    text = str(error)
    if (
        "169.254.169.254" in text or "metadata.google" in text
    ):  # the clouds' metadata servers
        return (
            "no credentials are set (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_SKIP_SIGNATURE=true for a public bucket)"
        ), True
    code = re.search(r"<Code>(\w+)</Code>", text)
    if "NoSuchBucket" in text:
        return "there is no such bucket", True
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return f"access is denied{f' ({code[1]})' if code else ''}", True
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
    return (f"{line} ({code[1]})" if code else line)[:300], False
